"""Batch in, token ids out, on a GPU: nothing waits for the device but the reader of the ids.

    main thread      prepare N+1: pack index arrays          | wait for N's ids | commit N ...
    runner thread    queue N+1: one copy, one graph (or its kernels), one copy back
    device           ------------ N ------------>|------------ N+1 ------------>

A step of decodes alone is one captured CUDA graph, padded to the next bucket of rows; any other
step queues its kernels one by one. The ids of a step stay on the device, where the next finds them
(`_last_tokens`), and reach the host through a pinned buffer and an event.

Rows with a grammar need the ids of the step before for their masks. So before they are sampled, and
after the model's kernels are queued, that step is settled: the ids are read and the grammars go on.

    runner thread    queue N+1's model | settle N, make masks | queue N+1's draw
    device           ---- N ---->|-------- N+1's model -------->|- draw ->
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from tailrace.engine import frames
from tailrace.engine.device_sampler import NO_TOKEN
from tailrace.engine.early_prompts import EARLY_SLOTS
from tailrace.engine.frames import Frame
from tailrace.engine.graph_capture import captured, quietly
from tailrace.engine.host_kv import HostKv
from tailrace.engine.runner import (
    Admission,
    PromptRows,
    StepResult,
    prompt_rows,
    score_prompt,
    swap,
)
from tailrace.engine.scheduler import Step
from tailrace.engine.slot_tables import SlotTables
from tailrace.engine.staging import RING, Packed, Staging
from tailrace.engine.weight_prefetch import DeviceCache, budget_of, describe
from tailrace.errors import DeviceMemoryError, EngineError
from tailrace.kernels.dependent_launch import dependent_launches, has_dependent_launches
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.paged_attention.device_batch import DeviceBatch, cut_tiles
from tailrace.kernels.sampling.rows import NOT_FINITE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.device_sampler import DeviceSampler
    from tailrace.engine.frames import Detail
    from tailrace.engine.scheduler import Chunk
    from tailrace.engine.step_time import StepLoad
    from tailrace.engine.weight_prefetch import Budgets
    from tailrace.kernels.kv_scales import KVScales
    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape
    from tailrace.kernels.triton_kernels import TritonKernels
    from tailrace.kernels.weight_prefetch.gaps import Budget
    from tailrace.models.causal_lm import CausalLM, KVCache
    from tailrace.text.grammar import GrammarState
    from tailrace.types import TokenLogprobs

_NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it came of, is lack of memory on the device.

    Not all of them are torch's OutOfMemoryError: cuBLAS and the capture of a graph allocate too,
    and a capture that fails hides what made it fail.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


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


@dataclass(frozen=True)
class CapturedSteps:
    """Graphs by their frames, and where each leaves its logits and ids."""

    graphs: dict[Frame, torch.cuda.CUDAGraph]
    outputs: dict[Frame, tuple[torch.Tensor, torch.Tensor]]


@dataclass
class DeviceResult:
    """A step that is queued; `wait` gives what it brought."""

    token_ids: torch.Tensor
    """Pinned int64 [S]; valid after the event."""
    event: torch.cuda.Event | None
    """None on a CPU, where nothing is queued."""
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    began: torch.cuda.Event | None = None
    """When the device came to this step."""
    before: torch.cuda.Event | None = None
    """When it had done the one before."""
    queue_s: float = 0.0
    grammars: dict[int, GrammarState] = field(default_factory=dict)
    """By row; they go on when this is settled."""
    _settled: StepResult | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_done(self) -> bool:
        """Whether the device is done with it; does not wait."""
        if self.event is None:
            return True
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # torch's own gap

    @property
    def is_settled(self) -> bool:
        """Whether its grammars have gone on."""
        return self._settled is not None

    def wait(self) -> StepResult:
        """Wait for the device, and let the rows' grammars go on; once, whoever comes first.

        Raises:
            RuntimeError: The device failed in this step or one before.
        """
        with self._lock:
            if self._settled is None:
                self._settled = self._settle()
            return self._settled

    def _settle(self) -> StepResult:
        if self.event is not None:
            self.event.synchronize()
        ids = self.token_ids.tolist()
        errors = dict(self.errors)
        for row, token_id in enumerate(ids):
            if token_id < 0:
                errors.setdefault(row, NO_TOKEN[token_id])
        return StepResult(
            ids,
            self.logprobs,
            errors,
            self.prompt_logprobs,
            device_s=_seconds(self.began, self.event),
            idle_s=_seconds(self.before, self.began),
            queue_s=self.queue_s,
            completed=self._follow(ids, errors),
        )

    def _follow(self, ids: list[int], errors: dict[int, str]) -> frozenset[int]:
        """Let grammars go on with what was drawn; return the rows of those that are complete."""
        completed = set()
        for row, grammar in self.grammars.items():
            if row in errors:
                continue
            grammar.take(ids[row])
            if grammar.is_complete:
                completed.add(row)
            grammar.look_ahead()
        return frozenset(completed)


def _seconds(first: torch.cuda.Event | None, then: torch.cuda.Event | None) -> float:
    """Return the device's seconds between two events that have happened; 0 without them."""
    if first is None or then is None:
        return 0.0
    return float(first.elapsed_time(then)) / 1e3


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
        budgets: How much of the next weight captured decode steps ask for ahead, by rows.

    Raises:
        EngineError: KV scales and cache do not go together, or there is no GPU to ask.
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
        budgets: Budgets | None = None,
    ) -> None:
        if (kv_scales is not None) != (kv_dtype == FLOAT8):
            raise EngineError("KV scales go with a float8 cache, and with no other")
        self.model = model
        self.kv_scales = kv_scales
        self.prefill_weights = prefill_weights
        self.sampler = sampler
        self.device = kernels.device
        self.cache = DeviceCache.of(kernels.device)
        """What weights are asked for into; None on a CPU."""
        if budgets and self.cache is None:
            raise EngineError("weights are asked for ahead on a GPU only")
        self._budgets = budgets or {}
        self._has_dependent_launches = has_dependent_launches(kernels.device, kernels.capability)
        self.block_size = block_size
        self.num_slots = num_slots
        self._token_budget = token_budget
        self.kv_caches = allocate_kv(model, num_blocks, block_size, kv_dtype, self.device)
        config = model.config
        kernels.reserve(
            rows=num_slots,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            max_kv_len=context_length,
        )
        self._buckets = frames.graph_buckets(num_slots)
        self._prefill_shape = partial(kernels.prefill_shape, config.head_dim)
        self._shape = self._prefill_shape(context_length)
        self._mixed = frames.mixed_frames(num_slots, token_budget, self._shape.block_m, paced=paced)
        self._padded_sizes = frames.padded_sizes(num_slots)
        self._tables = SlotTables(
            num_slots,
            -(-context_length // block_size),
            block_size,
            max_sequences=_most_sequences(num_slots, self._mixed),
            device=self.device,
        )
        # Eleven arrays of a row or sequence each at most, padded, and what tables grew by.
        words = 11 * (token_budget + 2 * num_slots + 64) + self._tables.words
        self._staging = Staging(words, self.device)
        # One entry more than there are slots: padded rows write their token there.
        self._last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)
        is_gpu = self.device.type == "cuda"  # else Triton's interpreter, in tests
        self._host_ids = torch.empty(RING, num_slots, dtype=torch.int64, pin_memory=is_gpu)
        self._ring = 0
        self._unsettled: list[DeviceResult] = []
        """Steps with grammars, which a later step of theirs must wait for."""
        self._began: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        self._host: HostKv | None = None
        self._graphs: dict[Frame, torch.cuda.CUDAGraph] = {}
        self._graph_outputs: dict[Frame, tuple[torch.Tensor, torch.Tensor]] = {}

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

    # The engine's thread

    def padded_decodes(self, decodes: int) -> int:
        """Return the rows that a mixed step computes for so many decodes."""
        padded = next(size for size in self._padded_sizes if size >= decodes)
        # Padding takes at most half of what prompts would have; else the step is not captured.
        return padded if 2 * (padded - decodes) <= self._token_budget - decodes else decodes

    def whole_prompts(self, decodes: int, tokens: int) -> int:
        """Return the most prompt tokens, up to those given, that need no padding beside decodes."""
        rows = self.padded_decodes(decodes)
        return frames.whole_prompts(self._mixed, rows, tokens)

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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def prepare(self, step: Step, blocks: BlockManager) -> PreparedDeviceStep:
        """Turn a step into index arrays; reads scheduler state: the engine's thread runs it."""
        chunks = step.chunks
        scored = _scored(chunks)
        longest = max([chunk.end for chunk in chunks])
        decodes = self._decodes(step)
        # Scoring a prompt needs its hidden rows, which graphs keep to themselves.
        captured = None if scored else self._captured_frame(chunks, step.num_tokens, decodes)
        shape = self._shape
        if captured is None:
            shape = self._prefill_shape(longest)
        tiles = _tiles(chunks, decodes, captured, shape)
        frame = captured or Frame(
            decodes, step.num_tokens - decodes, len(chunks) - decodes, len(tiles)
        )
        return PreparedDeviceStep(
            step=step,
            packed=self._staging.pack(self._arrays(step, decodes, frame, tiles, blocks)),
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
        return _leading_decodes(step.chunks, prompts_apart=is_apart)

    def _captured_frame(
        self, chunks: Sequence[Chunk], num_tokens: int, decodes: int
    ) -> Frame | None:
        """Return the smallest captured frame that the step fits, without much padding."""
        if not self._graphs:
            return None
        tokens, prompts = num_tokens - decodes, len(chunks) - decodes
        if not tokens:
            return Frame(next(size for size in self._buckets if size >= decodes))
        return frames.fitting_frame(self._mixed, decodes=decodes, tokens=tokens, prompts=prompts)

    def _arrays(
        self,
        step: Step,
        decodes: int,
        frame: Frame,
        tiles: np.ndarray,
        blocks: BlockManager | None,
    ) -> dict[str, np.ndarray]:
        """Return the step's arrays, padded to the frame: padding writes no KV and has no keys.

        Those of a frame have its shapes, so that a graph finds them; what tables grew by comes
        last, for its size is free.
        """
        chunks = step.chunks
        count = len(chunks)
        slots = np.array([chunk.slot for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        ends = np.array([chunk.end for chunk in chunks], np.int32)
        samples = np.array([chunk.samples for chunk in chunks], np.bool_)
        rows = ends - starts
        tables = self._tables
        growth = {} if blocks is None else tables.extend(step, slots, ends, blocks)
        # Where each chunk's rows, and the chunk itself, stand in the frame.
        firsts = np.cumsum(rows, dtype=np.int32) - rows
        firsts[decodes:] += frame.decodes - decodes
        places = np.arange(count)
        places[decodes:] += frame.decodes - decodes
        owner = np.repeat(np.arange(count), rows)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(rows) - rows, rows)
        row = firsts[owner] + within
        position = starts[owner] + within
        units = tables.host[slots[owner], position // self.block_size]
        ids, pending = _tokens_of(chunks, slots, rows)
        sequences = frame.decodes + frame.prompts + 1
        query_starts = np.arange(sequences + 1, dtype=np.int32)
        query_starts[frame.decodes :] = frame.decodes + int(rows[decodes:].sum())
        query_starts[places[decodes:]] = firsts[decodes:]
        sampled = firsts[samples] + rows[samples] - 1
        size = frame.decodes + frame.prompts
        return {
            "ids": _placed(ids, row, frame.rows, 0),
            "pending": _placed(pending, row, frame.rows, -1),
            "positions": _placed(position, row, frame.rows, 0),
            "slots": _placed(
                units * self.block_size + position % self.block_size, row, frame.rows, -1
            ),
            "kv_lens": _placed(ends, places, sequences, 0),
            "query_starts": query_starts,
            "sample_rows": _placed(sampled, np.arange(len(sampled)), size, 0),
            "sample_slots": _placed(slots[samples], np.arange(len(sampled)), size, self.num_slots),
            "table_rows": _placed(slots, places, sequences, tables.no_slot),
            "tiles": tiles,
            **growth,
        }

    # The runner's thread

    @torch.inference_mode()
    def execute(self, prepared: PreparedDeviceStep) -> DeviceResult:
        """Queue one step; called on the runner's thread only, in order of scheduling.

        Raises:
            DeviceMemoryError: It found no memory; the next step may.
        """
        begun_s = time.perf_counter()
        try:
            result = self._queue(prepared)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # What no tensor holds goes back to the device: pieces may have become too small.
            torch.cuda.empty_cache()
            raise DeviceMemoryError(str(error).splitlines()[0]) from error
        # Not a copy: the next step's grammars wait for this very result.
        result.queue_s = time.perf_counter() - begun_s
        return result

    def _queue(self, prepared: PreparedDeviceStep) -> DeviceResult:
        swap(self._host, prepared.step)
        self._began = self._mark()
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
        arrays = self._staging.send(prepared.packed)
        self._tables.apply(arrays)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        if prepared.is_captured:
            self._graphs[prepared.frame].replay()
            logits, ids = self._graph_outputs[prepared.frame]
        else:
            hidden = self._forward(arrays, prepared)
            prompt_logprobs = {
                rows.chunk_index: score_prompt(self.model, self.sampler, hidden, rows)
                for rows in prepared.prompt_rows
            }
            if not prepared.sample_slots:
                return self._result(0, [], {}, prompt_logprobs)
            logits, ids = self._sample_rows(hidden, arrays["sample_rows"], arrays["sample_slots"])
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
            for result in self._unsettled:
                result.wait()
        self._unsettled = [result for result in self._unsettled if not result.is_settled]
        if self.sampler.are_plain_greedy(slots):
            self.sampler.count_drawn(slots)
        else:
            sampled = self.sampler.sample(logits[:count], slots)
            ids, logprobs, errors = sampled.token_ids, sampled.logprobs, sampled.errors
            # A row without a token fails when its id is read; the next step reads token 0 for it.
            self._last_tokens.index_copy_(0, arrays["sample_slots"][:count].long(), ids.clamp(0))
        host = self._host_ids[self._ring, :count]
        host.copy_(ids[:count], non_blocking=True)
        result = self._result(count, logprobs, errors, prompt_logprobs)
        if grammars:
            result.grammars = grammars
            self._unsettled.append(result)
        return result

    def _result(
        self,
        count: int,
        logprobs: list[TokenLogprobs | None],
        errors: dict[int, str],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> DeviceResult:
        before, self._ended = self._ended, self._mark()
        host = self._host_ids[self._ring, :count]
        self._ring = (self._ring + 1) % RING
        return DeviceResult(
            host, self._ended, logprobs, errors, prompt_logprobs, began=self._began, before=before
        )

    def _mark(self) -> torch.cuda.Event | None:
        """Have the device note the time when it comes here; None on a CPU."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own gap
        event.record()
        return event

    def _forward(
        self, arrays: dict[str, torch.Tensor], prepared: PreparedDeviceStep
    ) -> torch.Tensor:
        batch = DeviceBatch(
            query_starts=arrays["query_starts"],
            kv_lens=arrays["kv_lens"],
            block_tables=self._tables.of_step(arrays["table_rows"]),
            positions=arrays["positions"],
            slots=arrays["slots"],
            max_query_len=prepared.max_query_len,
            max_kv_len=prepared.max_kv_len,
            num_decodes=prepared.frame.decodes,
            tiles=arrays["tiles"],
            shape=prepared.shape,
        )
        return self._hidden(arrays, batch)

    def _hidden(self, arrays: dict[str, torch.Tensor], batch: DeviceBatch) -> torch.Tensor:
        self._tables.gather(arrays["table_rows"])
        ids = self._input_ids(arrays)
        return self.model.forward(ids, batch, self.kv_caches, self.kv_scales)

    def _input_ids(self, arrays: dict[str, torch.Tensor]) -> torch.Tensor:
        pending = arrays["pending"]
        last = self._last_tokens[pending.clamp(min=0)]
        return torch.where(pending >= 0, last, arrays["ids"])

    def _sample_rows(
        self, hidden: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [S, V] and the likeliest ids, -1 where a row is not finite; keep them."""
        logits = self.model.logits(hidden.index_select(0, rows))
        peaks, ids = logits.max(dim=-1)
        self._last_tokens.index_copy_(0, slots.long(), ids)
        # An id that cannot be: the host takes it for an error.
        return logits, torch.where(peaks.isfinite(), ids, NOT_FINITE)

    # At start

    @torch.inference_mode()
    def capture(self, detail: Detail = "all") -> None:
        """Capture the graphs of the frames, the largest first, in one memory pool.

        Raises:
            RuntimeError: The device has no memory for them (`is_out_of_memory`); the runner is
                of no further use.
        """
        self._buckets, self._mixed = frames.kept_frames(
            self._buckets, self._mixed, self._token_budget, detail
        )
        if not self._mixed:  # nothing to pad decodes for
            self._padded_sizes = list(range(self.num_slots + 1))
        chosen = [*map(Frame, self._buckets), *self._mixed]
        chosen.sort(key=lambda frame: frame.rows, reverse=True)
        self.serve_by(self._captured(chosen, self._budgets))

    @torch.inference_mode()
    def captured_decodes(
        self,
        *,
        dependent: bool = False,
        budget: Budget | None = None,
        sizes: Sequence[int] = (),
    ) -> CapturedSteps:
        """Capture the steps of decodes once more, after `capture`; what serves stays as it is.

        Args:
            dependent: Whether by dependent launches (see kernels/dependent_launch.py).
            budget: Of weights that they ask for ahead, whatever their rows.
            sizes: Batch sizes out of `decode_sizes`; none: all of them.

        Raises:
            ConfigError: A layer does not tell how its weight is read.
            EngineError: What is asked for, the device does not know.
            RuntimeError: The device has no memory for the graphs.
        """
        if dependent and not self._has_dependent_launches:
            raise EngineError("dependent launches: this GPU does not know them; Hopper does")
        budgets = {} if budget is None else {self.num_slots: budget}
        with dependent_launches(on=dependent):
            chosen = sorted(sizes or self._buckets, reverse=True)
            return self._captured([Frame(size) for size in chosen], budgets)

    @property
    def decode_sizes(self) -> list[int]:
        """The batch sizes whose decode steps are captured, ascending."""
        return list(self._buckets)

    @torch.inference_mode()
    def prefetch_by(self, budgets: Budgets) -> None:
        """Serve decode steps by graphs that ask for weights by other budgets, after `capture`.

        Raises:
            RuntimeError: The device has no memory for the graphs; what served goes on serving.
        """
        sizes = [size for size in self._buckets if budget_of(budgets, size) != self._budget(size)]
        self.serve_by(self._captured([Frame(size) for size in reversed(sizes)], budgets))
        self._budgets = budgets

    def describe_prefetch(self) -> str:
        """Say in one line what decode steps ask for ahead."""
        return describe(self._budgets)

    def _budget(self, size: int) -> Budget | None:
        return budget_of(self._budgets, size)

    def rehearsals(
        self,
        sequences: int,
        keys: Sequence[int],
        budget: Budget | None,
        *,
        dependent: bool = False,
    ) -> list[Callable[[], float]]:
        """Capture a step of decodes, and return what runs it and tells its seconds.

        To be called before there are requests. No KV is written.

        Args:
            sequences: At most as many as are captured.
            keys: Tokens of each sequence: one function for each of these.
            budget: Of weights that it asks for ahead.
            dependent: Whether by dependent launches.

        Raises:
            EngineError: What is asked for, the device does not know.
            RuntimeError: The device has no memory for the graph.
        """
        size = next(size for size in self._buckets if size >= sequences)
        steps = self.captured_decodes(dependent=dependent, budget=budget, sizes=[size])
        run = partial(self._rehearse, steps.graphs[Frame(size)], Frame(size), sequences)
        longest = self._tables.width * self.block_size
        return [partial(run, min(count, longest)) for count in keys]

    @torch.inference_mode()
    def _rehearse(
        self, graph: torch.cuda.CUDAGraph, frame: Frame, sequences: int, keys: int
    ) -> float:
        arrays = self._arrays(Step(), 0, frame, _no_tiles(frame), None)
        arrays["kv_lens"][:sequences] = keys
        arrays["positions"][:sequences] = keys - 1
        arrays["table_rows"][:sequences] = np.arange(sequences)
        self._staging.send(self._staging.pack(arrays))
        self._tables.pretend(sequences, keys, self.kv_caches[0][0].shape[0])
        begin = self._mark()
        graph.replay()
        end = self._mark()
        self._tables.forget()
        self.check_device()
        return _seconds(begin, end)

    def serve_by(self, steps: CapturedSteps) -> CapturedSteps:
        """Let these serve instead of those of the same frames; return all that served before."""
        before = CapturedSteps(dict(self._graphs), dict(self._graph_outputs))
        self._graphs.update(steps.graphs)
        self._graph_outputs.update(steps.outputs)
        return before

    def _captured(self, frames: Sequence[Frame], budgets: Budgets) -> CapturedSteps:
        """Capture frames, the largest first; those of decodes alone ask for weights ahead."""
        runs = [
            self._warmed(frame, None if frame.tokens else budget_of(budgets, frame.decodes))
            for frame in frames
        ]
        steps = CapturedSteps({}, {})
        stream, pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        with quietly():
            for frame, run in zip(frames, runs, strict=True):
                steps.graphs[frame], steps.outputs[frame] = captured(run, stream, pool)
        return steps

    def _warmed(
        self, frame: Frame, budget: Budget | None
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Run a frame with one layer of each kind, and return what runs all of them.

        The run compiles, loads kernels and chooses cuBLAS's algorithms, none of which a capture
        may do. Further layers of a kind would only do again what is done.
        """
        packed = self._staging.pack(self._arrays(Step(), 0, frame, _no_tiles(frame), None))
        arrays = self._staging.send(packed)
        batch = DeviceBatch(
            query_starts=arrays["query_starts"],
            kv_lens=arrays["kv_lens"],
            block_tables=self._tables.of_step(arrays["table_rows"]),
            positions=arrays["positions"],
            slots=arrays["slots"],
            max_query_len=max(frame.tokens, 1),
            max_kv_len=self._tables.width * self.block_size,
            num_decodes=frame.decodes,
            tiles=arrays["tiles"],
            shape=self._shape,
        )
        model, layers = self.model.shallow()
        scales = None if self.kv_scales is None else [self.kv_scales[index] for index in layers]
        caches = [self.kv_caches[index] for index in layers]
        self._tables.gather(arrays["table_rows"])
        with self._asking(model, budget):
            hidden = model.forward(self._input_ids(arrays), batch, caches, scales)
        self._sample_rows(hidden, arrays["sample_rows"], arrays["sample_slots"])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the arrays are overwritten by the next frame's

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            with self._asking(self.model, budget):
                hidden = self._hidden(arrays, batch)
            return self._sample_rows(hidden, arrays["sample_rows"], arrays["sample_slots"])

        return run

    def _asking(self, model: CausalLM, budget: Budget | None) -> AbstractContextManager[None]:
        """Have a step of decodes ask for weights ahead, if any."""
        if budget is None:
            return nullcontext()
        if self.cache is None:
            raise EngineError("weights are asked for ahead on a GPU only")
        return self.cache.asking(model, budget)


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


def table_bytes(
    num_slots: int, context_length: int, block_size: int, mixed: Sequence[Frame]
) -> int:
    """Return the device's bytes of block tables, for sequences of at most so many tokens."""
    most = _most_sequences(num_slots, mixed)
    return SlotTables.device_bytes(num_slots, -(-context_length // block_size), most)


def _most_sequences(num_slots: int, mixed: Sequence[Frame]) -> int:
    """Return the most sequences of a step, padding included."""
    return num_slots + max([EARLY_SLOTS, *(frame.prompts for frame in mixed)]) + 1


def _leading_decodes(chunks: Sequence[Chunk], *, prompts_apart: bool = False) -> int:
    """Return how many chunks, at the front, are served as decodes: they have one row.

    Args:
        chunks: Of the step.
        prompts_apart: Whether a prompt's single row is none, since another copy of the weights
            serves it.
    """
    for index, chunk in enumerate(chunks):
        is_prompt = prompts_apart and chunk.start < chunk.sequence.num_prompt
        if chunk.num_tokens != 1 or is_prompt:
            return index
    return len(chunks)


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


def _tokens_of(
    chunks: Sequence[Chunk], slots: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and, where only the device knows one, its slot; both int32 [T]."""
    firsts = np.cumsum(rows) - rows
    ids = np.zeros(int(rows.sum()), dtype=np.int32)
    pending = np.full(len(ids), -1, dtype=np.int32)
    from_device = np.array([chunk.from_device for chunk in chunks], np.bool_)
    pending[firsts[from_device]] = slots[from_device]
    for index in np.flatnonzero(~from_device).tolist():
        chunk, first = chunks[index], int(firsts[index])
        ids[first : first + chunk.num_tokens] = chunk.sequence.token_ids[chunk.start : chunk.end]
    return ids, pending


def _tiles(
    chunks: Sequence[Chunk], decodes: int, frame: Frame | None, shape: PrefillShape
) -> np.ndarray:
    """Cut the prompts' chunks; a captured frame gets as many tiles as it has, some without work."""
    prompts = chunks[decodes:]
    if not prompts:
        return _no_tiles(frame or Frame(decodes))
    cut = cut_tiles(
        np.array([chunk.num_tokens for chunk in prompts], dtype=np.int32),
        np.array([chunk.end for chunk in prompts], dtype=np.int32),
        first_sequence=decodes if frame is None else frame.decodes,
        block_m=shape.block_m,
    )
    if frame is None:
        return cut
    tiles = _no_tiles(frame)
    tiles[: len(cut)] = cut
    return tiles


def _no_tiles(frame: Frame) -> np.ndarray:
    """Return the frame's tiles, all of the sequence without rows."""
    tiles = np.zeros((frame.tiles, 2), dtype=np.int32)
    tiles[:, 0] = frame.decodes + frame.prompts
    return tiles


def _placed(values: np.ndarray, places: np.ndarray, size: int, filler: int) -> np.ndarray:
    placed = np.full(size, filler, dtype=np.int32)
    placed[places] = values
    return placed
