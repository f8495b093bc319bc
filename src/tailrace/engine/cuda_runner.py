"""Batch in, token ids out, on a GPU: nothing waits for the device but the reader of the ids.

    main thread      prepare N+1: pack index arrays          | wait for N's ids | commit N ...
    runner thread    queue N+1: one copy, one graph (or its kernels), one copy back
    device           ------------ N ------------>|------------ N+1 ------------>

A step of decodes alone is one captured CUDA graph, padded to the next bucket of rows; any other
step queues its kernels one by one. The ids of a step stay on the device, where the next finds them
(`_last_tokens`), and reach the host through a pinned buffer and an event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tailrace.engine.runner import Admission, PromptRows, StepResult, prompt_rows, score_prompt
from tailrace.engine.staging import RING, Packed, Staging
from tailrace.kernels.attention_shapes import prefill_shape
from tailrace.kernels.paged_attention.device_batch import DeviceBatch, cut_tiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.sampler import Sampler
    from tailrace.engine.scheduler import Chunk, Step
    from tailrace.kernels.paged_attention.triton_prefill import Shape
    from tailrace.kernels.triton_kernels import TritonKernels
    from tailrace.models.causal_lm import CausalLM, KVCache
    from tailrace.types import TokenLogprobs

NOT_FINITE = "the model's logits are not finite"
_SMALL_BUCKETS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)


def graph_buckets(max_batch_size: int) -> list[int]:
    """Return the batch sizes that are captured, ascending; the last is `max_batch_size`."""
    sizes = [size for size in _SMALL_BUCKETS if size < max_batch_size]
    sizes += range(40, max_batch_size, 8)
    return [*sizes, max_batch_size]


@dataclass(frozen=True)
class PreparedDeviceStep:
    """A step whose index arrays lie in a pinned buffer."""

    step: Step
    packed: Packed
    bucket: int
    """Rows of the graph to replay; 0: no graph serves this step."""
    num_decodes: int
    shape: Shape
    max_query_len: int
    max_kv_len: int
    sample_slots: list[int]
    prompt_rows: list[PromptRows]
    admissions: list[Admission]


@dataclass(frozen=True)
class DeviceResult:
    """A step that is queued; `wait` gives what it brought."""

    token_ids: torch.Tensor
    """Pinned int64 [S]; valid after the event."""
    event: torch.cuda.Event
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    def wait(self) -> StepResult:
        """Wait for the device.

        Raises:
            RuntimeError: The device failed in this step or one before.
        """
        self.event.synchronize()
        ids = self.token_ids.tolist()
        errors = dict(self.errors)
        for row, token_id in enumerate(ids):
            if token_id < 0:
                errors.setdefault(row, NOT_FINITE)
        return StepResult(ids, self.logprobs, errors, self.prompt_logprobs)


class CudaRunner:
    """Owns the model, the KV caches, the graphs and the sampler's device state.

    Args:
        model: On `kernels.device`.
        sampler: Of the same device; has `num_slots` slots.
        kernels: The model's; their scratch is reserved here.
        num_blocks: KV blocks of the pool.
        block_size: Tokens of one block.
        num_slots: `max_batch_size`.
        context_length: Most tokens of one sequence.
        token_budget: Most rows of a step.
        kv_dtype: Of the cache.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: Sampler,
        kernels: TritonKernels,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        context_length: int,
        token_budget: int,
        kv_dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.device = kernels.device
        self._capability = kernels.capability
        self.block_size = block_size
        self.num_slots = num_slots
        self.kv_caches = allocate_kv(model, num_blocks, block_size, kv_dtype, self.device)
        config = model.config
        kernels.reserve(
            rows=num_slots,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            max_kv_len=context_length,
        )
        self._width = -(-context_length // block_size)
        self._tables = np.zeros((num_slots, self._width), dtype=np.int32)
        self._filled = [0] * num_slots
        words = 6 * token_budget + num_slots * (self._width + 16) + 4096
        self._staging = Staging(words, self.device)
        # One entry more than there are slots: padded rows write their token there.
        self._last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)
        self._host_ids = torch.empty(RING, num_slots, dtype=torch.int64, pin_memory=True)
        self._ring = 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._graph_outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._buckets = graph_buckets(num_slots)
        self._pool: Any = None  # torch names the type of its handle only to itself

    # The engine's thread

    def prepare(self, step: Step, blocks: BlockManager) -> PreparedDeviceStep:
        """Turn a step into index arrays; reads scheduler state: the engine's thread runs it."""
        for sequence in step.admitted:
            self._filled[sequence.slot] = 0
        chunks = step.chunks
        self._extend_tables(chunks, blocks)
        decodes = _leading_decodes(chunks)
        sampling = [chunk.slot for chunk in chunks if chunk.samples]
        is_plain = decodes == len(chunks) == len(sampling)
        bucket = self._bucket(decodes) if is_plain and self._graphs else 0
        longest = max(chunk.end for chunk in chunks)
        shape = prefill_shape(self.model.config.head_dim, longest, self._capability)
        if bucket:
            arrays = self._decode_arrays(chunks, bucket)
        else:
            arrays = self._mixed_arrays(chunks, step.num_tokens, decodes, shape)
        starts = np.cumsum([0, *(chunk.num_tokens for chunk in chunks)])
        return PreparedDeviceStep(
            step=step,
            packed=self._staging.pack(arrays),
            bucket=bucket,
            num_decodes=decodes,
            shape=shape,
            max_query_len=max(chunk.num_tokens for chunk in chunks),
            max_kv_len=longest,
            sample_slots=sampling,
            prompt_rows=[
                rows
                for index, chunk in enumerate(chunks)
                if (rows := prompt_rows(index, chunk, int(starts[index]))) is not None
            ],
            admissions=[Admission.of(sequence) for sequence in step.admitted],
        )

    def _bucket(self, rows: int) -> int:
        return next(size for size in self._buckets if size >= rows)

    def _extend_tables(self, chunks: Sequence[Chunk], blocks: BlockManager) -> None:
        """Copy the block ids that are new since a slot's last step."""
        for chunk in chunks:
            have, need = self._filled[chunk.slot], -(-chunk.end // self.block_size)
            if need > have:
                table = blocks.table(chunk.sequence.request_id)
                self._tables[chunk.slot, have:need] = table[have:need]
                self._filled[chunk.slot] = need

    def _decode_arrays(self, chunks: Sequence[Chunk], bucket: int) -> dict[str, np.ndarray]:
        rows = len(chunks)
        slots = np.fromiter((chunk.slot for chunk in chunks), np.int32, rows)
        positions = np.fromiter((chunk.start for chunk in chunks), np.int32, rows)
        ids, pending = _tokens_of(chunks, rows, rows)
        tables = np.zeros((bucket, self._width), dtype=np.int32)
        tables[:rows] = self._tables[slots]
        places = tables[np.arange(rows), positions // self.block_size] * self.block_size
        return {
            "ids": _padded(ids, bucket, 0),
            "pending": _padded(pending, bucket, -1),
            "positions": _padded(positions, bucket, 0),
            "slots": _padded(places + positions % self.block_size, bucket, -1),
            "kv_lens": _padded(positions + 1, bucket, 0),
            "sample_slots": _padded(slots, bucket, self.num_slots),
            "tables": tables,
        }

    def _mixed_arrays(
        self, chunks: Sequence[Chunk], num_tokens: int, decodes: int, shape: Shape
    ) -> dict[str, np.ndarray]:
        count = len(chunks)
        slots = np.fromiter((chunk.slot for chunk in chunks), np.int32, count)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int32, count)
        rows = np.fromiter((chunk.num_tokens for chunk in chunks), np.int32, count)
        firsts = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(rows, out=firsts[1:])
        owner = np.repeat(np.arange(count), rows)
        positions = (np.arange(num_tokens) - firsts[owner] + starts[owner]).astype(np.int32)
        ids, pending = _tokens_of(chunks, num_tokens, decodes)
        tables = self._tables[slots]
        places = tables[owner, positions // self.block_size] * self.block_size
        samples = np.fromiter((chunk.samples for chunk in chunks), np.bool_, count)
        tiles = cut_tiles(
            rows[decodes:],
            (starts + rows)[decodes:],
            first_sequence=decodes,
            block_m=shape.block_m,
        )
        return {
            "ids": ids,
            "pending": pending,
            "positions": positions,
            "slots": places + positions % self.block_size,
            "kv_lens": starts + rows,
            "sample_slots": slots[samples],
            "tables": tables,
            "query_starts": firsts,
            "tiles": tiles,
            "sample_rows": firsts[1:][samples] - 1,
        }

    # The runner's thread

    @torch.inference_mode()
    def execute(self, prepared: PreparedDeviceStep) -> DeviceResult:
        """Queue one step; called on the runner's thread only, in order of scheduling."""
        for slot in prepared.step.released:
            self.sampler.release(slot)
        for entry in prepared.admissions:
            self.sampler.admit(entry.slot, entry.sampling, entry.prompt_ids, entry.output_ids)
        arrays = self._staging.send(prepared.packed)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        if prepared.bucket:
            self._graphs[prepared.bucket].replay()
            logits, ids = self._graph_outputs[prepared.bucket]
        else:
            hidden = self._forward(arrays, prepared)
            prompt_logprobs = {
                rows.chunk_index: score_prompt(self.model, self.sampler, hidden, rows)
                for rows in prepared.prompt_rows
            }
            if not prepared.sample_slots:
                return self._result(0, [], {}, prompt_logprobs)
            logits, ids = self._sample_rows(hidden, arrays["sample_rows"], arrays["sample_slots"])
        return self._drawn(logits, ids, prepared.sample_slots, prompt_logprobs)

    def _drawn(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        slots: list[int],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> DeviceResult:
        """Take the greedy ids where they are what every row asks for, else draw."""
        count = len(slots)
        logprobs: list[TokenLogprobs | None] = [None] * count
        errors: dict[int, str] = {}
        if self.sampler.are_plain_greedy(slots):
            self.sampler.count_drawn(slots)
        else:
            sampled = self.sampler.sample(logits[:count].float(), slots)
            ids, logprobs, errors = sampled.token_ids, sampled.logprobs, sampled.errors
            self._last_tokens[torch.tensor(slots, device=self.device)] = ids
        host = self._host_ids[self._ring, :count]
        host.copy_(ids[:count], non_blocking=True)
        return self._result(count, logprobs, errors, prompt_logprobs)

    def _result(
        self,
        count: int,
        logprobs: list[TokenLogprobs | None],
        errors: dict[int, str],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> DeviceResult:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own gap
        event.record()
        host = self._host_ids[self._ring, :count]
        self._ring = (self._ring + 1) % RING
        return DeviceResult(host, event, logprobs, errors, prompt_logprobs)

    def _forward(
        self, arrays: dict[str, torch.Tensor], prepared: PreparedDeviceStep
    ) -> torch.Tensor:
        batch = DeviceBatch(
            query_starts=arrays["query_starts"],
            kv_lens=arrays["kv_lens"],
            block_tables=arrays["tables"],
            positions=arrays["positions"],
            slots=arrays["slots"],
            max_query_len=prepared.max_query_len,
            max_kv_len=prepared.max_kv_len,
            num_decodes=prepared.num_decodes,
            tiles=arrays["tiles"],
            shape=prepared.shape,
        )
        return self.model.forward(self._input_ids(arrays), batch, self.kv_caches)

    def _input_ids(self, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        pending = arrays["pending"]
        last = self._last_tokens[pending.clamp(min=0)]
        return torch.where(pending >= 0, last, arrays["ids"])

    def _sample_rows(
        self, hidden: torch.Tensor, rows: torch.Tensor | None, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [S, V] and the likeliest ids, -1 where a row is not finite; keep them."""
        logits = self.model.logits(hidden if rows is None else hidden.index_select(0, rows))
        peaks, ids = logits.max(dim=-1)
        # An id that cannot be: the host takes it for an error, the next step reads token 0.
        self._last_tokens.index_copy_(0, slots.long(), ids)
        return logits, torch.where(peaks.isfinite(), ids, -1)

    # At start

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs of all buckets, the largest first, in one memory pool."""
        for bucket in reversed(self._buckets):
            arrays = self._staging.views(self._empty_step(bucket))
            batch = DeviceBatch(
                query_starts=arrays["kv_lens"],
                kv_lens=arrays["kv_lens"],
                block_tables=arrays["tables"],
                positions=arrays["positions"],
                slots=arrays["slots"],
                max_query_len=1,
                max_kv_len=self._width * self.block_size,
                num_decodes=bucket,
                tiles=torch.empty(0, 2, dtype=torch.int32, device=self.device),
                shape=prefill_shape(self.model.config.head_dim, 1, self._capability),
            )

            def run(
                arrays: dict[str, torch.Tensor] = arrays, batch: DeviceBatch = batch
            ) -> tuple[torch.Tensor, torch.Tensor]:
                hidden = self.model.forward(self._input_ids(arrays), batch, self.kv_caches)
                return self._sample_rows(hidden, None, arrays["sample_slots"])

            run()  # compiles, and chooses cuBLAS's algorithms, outside the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = run()
            self._pool = graph.pool()
            self._graphs[bucket], self._graph_outputs[bucket] = graph, outputs

    def _empty_step(self, bucket: int) -> Packed:
        packed = self._staging.pack(self._decode_arrays([], bucket))
        self._staging.send(packed)
        return packed


def allocate_kv(
    model: CausalLM, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """Make the KV pool, token-major: [num_blocks, block_size, Hkv, D] in memory.

    The views returned have the kernels' shapes: K [num_blocks, Hkv, D, block_size], V
    [num_blocks, Hkv, block_size, D]. Why token-major: docs/performance.md, "The KV layout".
    """
    config = model.config
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    pairs = []
    for _ in range(config.num_layers):
        k = torch.empty(shape, dtype=dtype, device=device)
        v = torch.empty(shape, dtype=dtype, device=device)
        pairs.append((k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)))
    return pairs


def kv_bytes_per_token(model: CausalLM, dtype: torch.dtype) -> int:
    """Bytes of KV that one token takes over all layers."""
    config = model.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def _leading_decodes(chunks: Sequence[Chunk]) -> int:
    return next((index for index, chunk in enumerate(chunks) if chunk.num_tokens != 1), len(chunks))


def _tokens_of(
    chunks: Sequence[Chunk], num_tokens: int, decodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and, where only the device knows one, its slot; both int32 [T]."""
    ids = np.zeros(num_tokens, dtype=np.int32)
    pending = np.full(num_tokens, -1, dtype=np.int32)
    for row, chunk in enumerate(chunks[:decodes]):
        if chunk.from_device:
            pending[row] = chunk.slot
        else:
            ids[row] = chunk.sequence.token_ids[chunk.start]
    row = decodes
    for chunk in chunks[decodes:]:
        if chunk.from_device:
            pending[row] = chunk.slot
        else:
            ids[row : row + chunk.num_tokens] = chunk.sequence.token_ids[chunk.start : chunk.end]
        row += chunk.num_tokens
    return ids, pending


def _padded(values: np.ndarray, size: int, filler: int) -> np.ndarray:
    padded = np.full(size, filler, dtype=np.int32)
    padded[: len(values)] = values
    return padded


def scratch_bytes(rows: int, num_heads: int, head_dim: int, max_kv_len: int, split: int) -> int:
    """Bytes of the decode kernel's scratch."""
    return rows * num_heads * math.ceil(max_kv_len / split) * (head_dim + 1) * 4
