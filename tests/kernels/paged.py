"""Sequences laid out in a paged cache, as a test wants them: shuffled blocks, poisoned slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tailrace.kernels.attention_batch import AttentionBatch

NAN = float("nan")


def make_batch(chunks, block_size, tables=None):
    """Return the batch of [(rows, kv_len), ...]; without tables, blocks are dealt at random."""
    counts = [-(-kv_len // block_size) for _, kv_len in chunks]
    if tables is None:
        ids = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
        tables = [row.tolist() for row in ids]
    width = max((len(row) for row in tables), default=0) + 1
    positions, slots, starts = [], [], [0]
    for (rows, kv_len), table in zip(chunks, tables, strict=True):
        for position in range(kv_len - rows, kv_len):
            positions.append(position)
            slots.append(table[position // block_size] * block_size + position % block_size)
        starts.append(starts[-1] + rows)
    padded = [row + [-1] * (width - len(row)) for row in tables]
    return AttentionBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        kv_lens=torch.tensor([kv_len for _, kv_len in chunks], dtype=torch.int32),
        block_tables=torch.tensor(padded, dtype=torch.int32).reshape(len(chunks), width),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        max_query_len=max((rows for rows, _ in chunks), default=0),
        max_kv_len=max((kv_len for _, kv_len in chunks), default=0),
    )


@dataclass(kw_only=True)
class Paged:
    """Sequences with known keys and values, in a cache whose other slots hold NaN."""

    kv_lens: list[int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    spare_blocks: int = 2
    queries: list[torch.Tensor] = field(init=False)
    """[kv_len, Hq, D] for each sequence: a query for every position."""
    keys: list[torch.Tensor] = field(init=False)
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self):
        kv_heads = (self.num_kv_heads, self.head_dim)
        self.queries = [torch.randn(n, self.num_heads, self.head_dim) for n in self.kv_lens]
        self.keys = [torch.randn(n, *kv_heads) for n in self.kv_lens]
        self.values = [torch.randn(n, *kv_heads) for n in self.kv_lens]
        counts = [-(-n // self.block_size) for n in self.kv_lens]
        num_blocks = sum(counts) + self.spare_blocks
        order = torch.randperm(num_blocks).tolist()
        self.tables = []
        for count in counts:
            self.tables.append([order.pop() for _ in range(count)])
        self.k_cache = torch.full((num_blocks, *kv_heads, self.block_size), NAN)
        self.v_cache = torch.full(
            (num_blocks, self.num_kv_heads, self.block_size, self.head_dim), NAN
        )
        for table, keys, values in zip(self.tables, self.keys, self.values, strict=True):
            positions = torch.arange(keys.shape[0])
            blocks = torch.tensor(table, dtype=torch.long)[positions // self.block_size]
            offsets = positions % self.block_size
            self.k_cache[blocks, :, :, offsets] = keys
            self.v_cache[blocks, :, offsets] = values

    @property
    def scale(self):
        return self.head_dim**-0.5

    def attend(self, kernels, chunks):
        """Attend for [(sequence, rows, kv_len), ...]; returns one [rows, Hq, D] for each."""
        batch = make_batch(
            [(rows, kv_len) for _, rows, kv_len in chunks],
            self.block_size,
            [self.tables[s][: -(-kv_len // self.block_size)] for s, _, kv_len in chunks],
        )
        q = torch.cat([self.queries[s][kv_len - rows : kv_len] for s, rows, kv_len in chunks])
        out = kernels.paged_attention(q, self.k_cache, self.v_cache, batch, self.scale)
        assert out.shape == (q.shape[0], self.num_heads * self.head_dim)
        out = out.view(-1, self.num_heads, self.head_dim)
        return list(out.split([rows for _, rows, _ in chunks]))

    def truth(self, sequence):
        """Causal attention of every position of a sequence, by the formula, in float64."""
        group = self.num_heads // self.num_kv_heads
        q = self.queries[sequence].double()
        k = self.keys[sequence].double().repeat_interleave(group, dim=1)
        v = self.values[sequence].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        scores = scores.masked_fill(
            torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf")
        )
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
