"""Runs a model over a poisoned paged cache with shuffled blocks, as the engine's runner would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tailrace.kernels.attention_batch import AttentionBatch

if TYPE_CHECKING:
    from tailrace.models.causal_lm import CausalLM


class PagedRun:
    """A few sequences that are fed chunk by chunk, several in one step."""

    def __init__(
        self,
        model: CausalLM,
        *,
        sequences: int = 1,
        max_tokens: int = 128,
        block_size: int = 8,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.lengths = [0] * sequences
        blocks_each = -(-max_tokens // block_size)
        num_blocks = sequences * blocks_each + 3
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.tables = shuffled[: sequences * blocks_each].view(sequences, blocks_each)
        config = model.config
        heads, dim = config.num_kv_heads, config.head_dim
        poison = float("nan")
        self.caches = [
            (
                torch.full((num_blocks, heads, dim, block_size), poison),
                torch.full((num_blocks, heads, block_size, dim), poison),
            )
            for _ in range(config.num_layers)
        ]

    def step(self, chunks: dict[int, list[int]]) -> torch.Tensor:
        """Feed each sequence its chunk; return the logits of all rows, in the dict's order."""
        starts, positions, slots = [0], [], []
        for sequence, chunk in chunks.items():
            first = self.lengths[sequence]
            rows = torch.arange(first, first + len(chunk))
            blocks = self.tables[sequence][rows // self.block_size]
            positions.append(rows)
            slots.append(blocks * self.block_size + rows % self.block_size)
            self.lengths[sequence] += len(chunk)
            starts.append(starts[-1] + len(chunk))
        kv_lens = [self.lengths[sequence] for sequence in chunks]
        batch = AttentionBatch(
            query_starts=torch.tensor(starts, dtype=torch.int32),
            kv_lens=torch.tensor(kv_lens, dtype=torch.int32),
            block_tables=self.tables[list(chunks)].to(torch.int32),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            max_query_len=max(len(chunk) for chunk in chunks.values()),
            max_kv_len=max(kv_lens),
        )
        token_ids = torch.tensor([token for chunk in chunks.values() for token in chunk])
        return self.model.logits(self.model.forward(token_ids, batch, self.caches))

    def greedy(self, prompt: list[int], new_tokens: int, *, chunk: int = 10_000) -> list[int]:
        """Continue sequence 0 greedily, its prompt fed in chunks."""
        for start in range(0, len(prompt), chunk):
            logits = self.step({0: prompt[start : start + chunk]})
        output = [int(logits[-1].argmax())]
        while len(output) < new_tokens:
            output.append(int(self.step({0: output[-1:]})[-1].argmax()))
        return output
