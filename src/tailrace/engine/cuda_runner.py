"""Batch in, token ids out, on a GPU: nothing waits for the device but the reader of the ids.

    main thread      prepare N+1: pack index arrays          | wait for N's ids | commit N ...
    runner thread    queue N+1: one copy, one graph (or its kernels), one copy back
    device           ------------ N ------------>|------------ N+1 ------------>

A step of decodes alone is one captured CUDA graph, padded to the next bucket of rows; any other
step queues its kernels one by one. The ids of a step stay on the device, where the next finds them
(forward_pass.py), and reach the host through a pinned buffer and an event.

Rows with a grammar need the ids of the step before for their masks. So before they are sampled, and
after the model's kernels are queued, that step is settled: the ids are read and the grammars go on.

    runner thread    queue N+1's model | settle N, make masks | queue N+1's draw
    device           ---- N ---->|-------- N+1's model -------->|- draw ->
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from tailrace.engine.decode_launches import describe as describe_launches
from tailrace.engine.decode_launches import least_decodes
from tailrace.engine.device_faults import check_device, is_out_of_memory
from tailrace.engine.device_kv import allocate_kv, kv_bytes_per_token
from tailrace.engine.device_result import DeviceResult, mark
from tailrace.engine.forward_pass import ForwardPass
from tailrace.engine.frames import Frame, FrameSizes
from tailrace.engine.host_kv import HostKv
from tailrace.engine.runner import (
    Admission,
    PromptRows,
    describe_step,
    prompt_rows,
    score_prompt,
    swap,
)
from tailrace.engine.slot_tables import SlotTables, most_sequences
from tailrace.engine.staging import RING, Packed, Staging
from tailrace.engine.step_arrays import cut_prompts, leading_decodes
from tailrace.engine.step_graphs import StepGraphs
from tailrace.errors import DeviceMemoryError, EngineError
from tailrace.kernels.attention_shapes import BOUNDS
from tailrace.kernels.dependent_launch import has_dependent_launches
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.paged_attention.prefill_kernels import is_hopper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.device_sampler import DeviceSampler
    from tailrace.engine.frames import Detail
    from tailrace.engine.phase_overlap import PhaseOverlap
    from tailrace.engine.scheduler import Chunk, Step
    from tailrace.engine.step_time import StepLoad
    from tailrace.kernels.early_compile import EarlyCompile
    from tailrace.kernels.kv_scales import KVScales
    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape
    from tailrace.kernels.triton_kernels import TritonKernels
    from tailrace.models.causal_lm import CausalLM, KVCache
    from tailrace.types import TokenLogprobs


_TILE_TOKENS = 16
"""No shape's tile of queries is smaller."""


@dataclass(frozen=True)
class PreparedDeviceStep:
    """A step whose index arrays lie in a pinned buffer."""

    step: Step
    packed: Packed
    frame: Frame
    is_captured: bool
    """Whether a graph serves the frame."""
    shape: PrefillShape
    max_query_len: int
    max_kv_len: int
    sample_slots: list[int]
    prompt_rows: list[PromptRows]
    admissions: list[Admission]


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
        kv_scales: One a layer, where that is float8.
        paced: Whether prompts beside decodes are cut to a time.
        prefill_weights: Whose copy of the weights serves prompts; "same": there is one.
        overlap: Has decodes and prompts of a step go apart, each by its copy.
        early_compile: Compiles what a capture needs, before it needs it; None: nothing does.

    Raises:
        EngineError: KV scales and cache do not go together.
    """

    def __init__(
        self,
        model: CausalLM,
        sampler: DeviceSampler,
        kernels: TritonKernels,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        context_length: int,
        token_budget: int,
        kv_dtype: torch.dtype,
        kv_scales: list[KVScales] | None = None,
        paced: bool = False,
        prefill_weights: str = "same",
        overlap: PhaseOverlap | None = None,
        early_compile: EarlyCompile | None = None,
    ) -> None:
        if (kv_scales is not None) != (kv_dtype == FLOAT8):
            raise EngineError("KV scales go with a float8 cache, and with no other")
        self.prefill_weights = prefill_weights
        self._early_compile = early_compile
        self.sampler = sampler
        self.device = kernels.device
        self.block_size = block_size
        kv_caches = allocate_kv(model, num_blocks, block_size, kv_dtype, self.device)
        config = model.config
        self._prefill_shape = partial(kernels.prefill_shape, config.head_dim)
        self._kernels = kernels
        shape = self._prefill_shape(context_length)
        self.sizes = FrameSizes(num_slots, token_budget, shape.block_m, paced=paced)
        sequences = most_sequences(num_slots, self.sizes.mixed)
        kernels.reserve(
            rows=num_slots,
            sequences=sequences,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_kv_len=context_length,
        )
        tables = SlotTables(
            num_slots,
            -(-context_length // block_size),
            block_size,
            max_sequences=sequences,
            device=self.device,
        )
        # Eleven arrays of a row or sequence each at most, padded, and what tables grew by.
        words = 11 * (token_budget + 2 * num_slots + 64) + tables.words
        self.forward_pass = ForwardPass(
            model,
            self.device,
            kv_caches,
            kv_scales,
            tables,
            Staging(words, self.device),
            torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device),
            overlap,
        )
        is_gpu = self.device.type == "cuda"  # else Triton's interpreter, in tests
        self._host_ids = torch.empty(RING, num_slots, dtype=torch.int64, pin_memory=is_gpu)
        self._ring = 0
        self._unsettled: list[DeviceResult] = []
        """Steps with grammars, which a later step of theirs must wait for."""
        self._waited_s = 0.0
        """For them, in the step that is being queued."""
        self._came: torch.cuda.Event | None = None
        self._began: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        self._host: HostKv | None = None
        self.step_graphs = StepGraphs(
            self.forward_pass,
            self.sizes,
            shape,
            dependent_from=least_decodes(model.layer_linears, self.device, kernels.capability),
            has_dependent_launches=has_dependent_launches(self.device, kernels.capability),
        )

    @property
    def model(self) -> CausalLM:
        """Whose steps these are."""
        return self.forward_pass.model

    @property
    def kv_caches(self) -> list[KVCache]:
        """The pool, as the kernels address it (see device_kv.py)."""
        return self.forward_pass.kv_caches

    @property
    def kv_scales(self) -> list[KVScales] | None:
        """One a layer, where the cache is float8."""
        return self.forward_pass.kv_scales

    @property
    def unit_bytes(self) -> int:
        """Of KV in one unit, over all layers."""
        return self.block_size * kv_bytes_per_token(self.model, self.kv_caches[0][0].dtype)

    def keep_on_host(self, num_places: int) -> HostKv:
        """Pin host memory for so many units of preempted sequences; once, at start.

        Raises:
            ConfigError: The host does not give the memory.
        """
        self._host = HostKv(self.kv_caches, num_places)
        return self._host

    # At start

    def capture(self, detail: Detail = "all") -> None:
        """Capture the graphs of the steps that have frames (`StepGraphs.capture`)."""
        if self._early_compile is not None:
            self._early_compile.before(partial(self._rehearse, detail), since="capture")
        self.step_graphs.capture(detail)
        self._warm_without_room()

    @torch.inference_mode()
    def _rehearse(self, detail: Detail) -> None:
        """Do once what `capture` begins with, and what the first requests will want besides.

        It may be done without kernels, whose ids are then not what the first step begins with.
        """
        places = self.forward_pass
        kept = places.last_tokens.clone()
        self.step_graphs.rehearse(detail)
        for longest in {min(bound - 1, places.tables.max_tokens) for bound in BOUNDS}:
            self.step_graphs.warm(self._prefill_shape(longest), tokens=_TILE_TOKENS)
        self._warm_without_room()
        size, dtype = self.model.config.hidden_size, self._kernels.dtype
        row = torch.zeros(1, size, dtype=dtype, device=self.device)
        self.sampler.rehearse(self.model.logits(row))
        places.last_tokens.copy_(kept)

    def _warm_without_room(self) -> None:
        """Warm what serves prompts that there is no room to widen: none is to wait for it."""
        if self._kernels.wide_tokens:
            longest = self.forward_pass.tables.max_tokens
            self.step_graphs.warm(self._prefill_shape(longest, has_room=False))

    # The engine's thread

    def padded_decodes(self, decodes: int) -> int:
        """Return the rows that a mixed step computes for so many decodes."""
        return self.sizes.padded_decodes(decodes)

    def whole_prompts(self, decodes: int, tokens: int) -> int:
        """Return the most prompt tokens, up to those given, that need no padding beside decodes."""
        return self.sizes.whole_prompts(decodes, tokens)

    def computed(self, step: Step) -> StepLoad:
        """Return what a step computes: prompts beside decodes, and both padded to a frame."""
        load = step.load
        decodes = self._decodes(step)
        if decodes == step.num_tokens:
            return load
        frame = self._captured_frame(step.chunks, step.num_tokens, decodes)
        if frame is None:
            return load
        return replace(load, prefill_tokens=frame.tokens, decodes=frame.decodes)

    def touch_kv(self, units: list[int]) -> None:
        """Do nothing: a GPU's memory is there once it is allocated."""

    def check_device(self) -> None:
        """Raise where the context is lost: every later call of this process would fail."""
        check_device(self.device)

    def describe(self, prepared: PreparedDeviceStep) -> dict[str, object]:
        """Say what a step is and which kernels serve it, for the log."""
        frame, config = prepared.frame, self.model.config
        decodes = self._kernels.decode_shape(
            config.head_dim, config.num_heads // config.num_kv_heads
        )
        return {
            **describe_step(prepared.step),
            "frame": f"{frame.decodes} decodes, {frame.tokens} tokens of {frame.prompts} prompts",
            "captured": prepared.is_captured,
            "decode_attention": decodes.words,
            "prefill_attention": prepared.shape.words,
            "prefill_weights": self.prefill_weights,
            "phase_overlap": self.forward_pass.overlap is not None,
            "decode_launches": describe_launches(self.step_graphs.dependent_from),
        }

    def prepare(self, step: Step, blocks: BlockManager) -> PreparedDeviceStep:
        """Turn a step into index arrays; reads scheduler state: the engine's thread runs it."""
        chunks = step.chunks
        scored = _scored(chunks)
        longest = max([chunk.end for chunk in chunks])
        decodes = self._decodes(step)
        # Scoring a prompt needs its hidden rows, which graphs keep to themselves.
        captured = None if scored else self._captured_frame(chunks, step.num_tokens, decodes)
        shape = self.step_graphs.shape
        if captured is None:
            shape = self._prefill_shape(longest, has_room=self._has_room(chunks[decodes:]))
        tiles = cut_prompts(chunks, decodes, captured, shape)
        frame = captured or Frame(
            decodes, step.num_tokens - decodes, len(chunks) - decodes, len(tiles)
        )
        return PreparedDeviceStep(
            step=step,
            packed=self.forward_pass.staging.pack(
                self.forward_pass.arrays(step, decodes, frame, tiles, blocks)
            ),
            frame=frame,
            is_captured=captured is not None,
            shape=shape,
            max_query_len=max([1, *(chunk.num_tokens for chunk in chunks[decodes:])]),
            max_kv_len=longest,
            sample_slots=[chunk.slot for chunk in chunks if chunk.samples],
            prompt_rows=scored,
            admissions=[Admission.of(sequence) for sequence in step.admitted],
        )

    def _decodes(self, step: Step) -> int:
        """Return how many chunks, at the front, are served as decodes."""
        is_apart = self.prefill_weights != "same"
        if step.decodes == len(step.chunks) and not is_apart:  # as in most steps
            return step.decodes
        return leading_decodes(step.chunks, prompts_apart=is_apart)

    def _captured_frame(
        self, chunks: Sequence[Chunk], num_tokens: int, decodes: int
    ) -> Frame | None:
        """Return the smallest captured frame that the step fits, without much padding."""
        is_widened = is_hopper(self.step_graphs.shape)
        if not self.step_graphs.graphs or (is_widened and not self._has_room(chunks[decodes:])):
            return None
        return self.sizes.fitting(
            decodes=decodes, tokens=num_tokens - decodes, prompts=len(chunks) - decodes
        )

    def _has_room(self, prompts: Sequence[Chunk]) -> bool:
        """Tell whether there is room to widen the prompts' keys, if that is done at all."""
        if not self._kernels.wide_tokens:
            return True
        return self._kernels.has_room(np.array([chunk.end for chunk in prompts], np.int32))

    # The runner's thread

    @torch.inference_mode()
    def execute(self, prepared: PreparedDeviceStep) -> DeviceResult:
        """Queue one step; called on the runner's thread only, in order of scheduling.

        Raises:
            DeviceMemoryError: It found no memory; the next step may.
        """
        self._waited_s, begun_s = 0.0, time.perf_counter()
        try:
            result = self._queue(prepared)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # What no tensor holds goes back to the device: pieces may have become too small.
            torch.cuda.empty_cache()
            raise DeviceMemoryError(str(error).splitlines()[0]) from error
        # Not a copy: the next step's grammars wait for this very result.
        result.queue_s = time.perf_counter() - begun_s - self._waited_s
        return result

    def _queue(self, prepared: PreparedDeviceStep) -> DeviceResult:
        self._came = self._began = mark(self.device)
        if swap(self._host, prepared.step):
            self._began = mark(self.device)
        for slot in prepared.step.released:
            self.sampler.release(slot)
        for entry in prepared.admissions:
            self.sampler.admit(
                entry.slot,
                entry.sampling,
                entry.prompt_ids,
                entry.output_ids,
                entry.grammar,
            )
        arrays = self.forward_pass.staging.send(prepared.packed)
        self.forward_pass.tables.apply(arrays)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        if prepared.is_captured:
            logits, ids = self.step_graphs.replay(prepared.frame)
        else:
            hidden = self._forward(arrays, prepared)
            prompt_logprobs = {
                rows.chunk_index: score_prompt(self.model, self.sampler, hidden, rows)
                for rows in prepared.prompt_rows
            }
            if not prepared.sample_slots:
                return self._result(0, [], {}, prompt_logprobs)
            rows, slots = arrays["sample_rows"], arrays["sample_slots"]
            logits, ids = self.forward_pass.sample_rows(hidden, rows, slots)
        return self._drawn(logits, ids, prepared.sample_slots, arrays, prompt_logprobs)

    def _drawn(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        slots: list[int],
        arrays: dict[str, torch.Tensor],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> DeviceResult:
        """Take the greedy ids where they are what every row asks for, else draw."""
        count = len(slots)
        if not count:
            return self._result(0, [], {}, prompt_logprobs)
        logprobs: list[TokenLogprobs | None] = [None] * count
        errors: dict[int, str] = {}
        grammars = self.sampler.grammars(slots)
        if grammars:
            self._wait_for_ids()
        self._unsettled = [result for result in self._unsettled if not result.is_settled]
        if self.sampler.are_plain_greedy(slots):
            self.sampler.count_drawn(slots)
        else:
            sampled = self.sampler.sample(logits[:count], slots)
            ids, logprobs, errors = sampled.token_ids, sampled.logprobs, sampled.errors
            # A row without a token fails when its id is read; the next step reads token 0 for it.
            self.forward_pass.last_tokens.index_copy_(
                0, arrays["sample_slots"][:count].long(), ids.clamp(0)
            )
        host = self._host_ids[self._ring, :count]
        host.copy_(ids[:count], non_blocking=True)
        result = self._result(count, logprobs, errors, prompt_logprobs)
        if grammars:
            result.grammars = grammars
            self._unsettled.append(result)
        return result

    def _wait_for_ids(self) -> None:
        """Wait for the ids that the next masks need; that is no part of queueing a step."""
        begun_s = time.perf_counter()
        for result in self._unsettled:
            result.wait()
        self._waited_s += time.perf_counter() - begun_s

    def _result(
        self,
        count: int,
        logprobs: list[TokenLogprobs | None],
        errors: dict[int, str],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> DeviceResult:
        before, self._ended = self._ended, mark(self.device)
        host = self._host_ids[self._ring, :count]
        self._ring = (self._ring + 1) % RING
        return DeviceResult(
            host,
            self._ended,
            logprobs,
            errors,
            prompt_logprobs,
            before=before,
            came=self._came,
            began=self._began,
        )

    def _forward(
        self, arrays: dict[str, torch.Tensor], prepared: PreparedDeviceStep
    ) -> torch.Tensor:
        batch = self.forward_pass.batch(
            arrays,
            num_decodes=prepared.frame.decodes,
            max_query_len=prepared.max_query_len,
            max_kv_len=prepared.max_kv_len,
            shape=prepared.shape,
        )
        return self.forward_pass.hidden(arrays, batch)


def _scored(chunks: Sequence[Chunk]) -> list[PromptRows]:
    """Return the rows whose next prompt tokens want log-probabilities: seldom any."""
    found: list[PromptRows] = []
    first = 0
    for index, chunk in enumerate(chunks):
        if chunk.sequence.sampling.prompt_logprobs is not None:
            rows = prompt_rows(index, chunk, first)
            found += [rows] if rows is not None else []
        first += chunk.end - chunk.start
    return found
