"""Batch in, token ids out: the only module that touches the device.

`prepare` turns a scheduled step into index tensors and needs no result of the step before, so the
engine calls it while that step still runs. `execute` runs on one dedicated thread, in order, and
alone reads and writes device state: KV caches, sampler state, and each slot's last token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tailrace.engine.host_kv import HostKv
from tailrace.errors import EngineError
from tailrace.kernels.attention_batch import AttentionBatch

if TYPE_CHECKING:
    from tailrace.clock import Clock
    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.sampler import Sampler
    from tailrace.engine.scheduler import Chunk, Step
    from tailrace.engine.sequence import Sequence
    from tailrace.engine.step_time import StepLoad
    from tailrace.models.causal_lm import CausalLM
    from tailrace.text.grammar import GrammarState
    from tailrace.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Admission:
    """A sequence's sampling state as it enters a slot; copied, because the lists go on growing."""

    slot: int
    sampling: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    grammar: GrammarState | None = None

    @classmethod
    def of(cls, sequence: Sequence) -> Admission:
        """Copy what the sampler needs to know."""
        return cls(
            slot=sequence.slot,
            sampling=sequence.sampling,
            prompt_ids=sequence.token_ids[: sequence.num_prompt],
            output_ids=(output_ids := sequence.token_ids[sequence.num_prompt :]),
            grammar=None if sequence.grammar is None else sequence.grammar.start(output_ids),
        )


@dataclass(frozen=True)
class PromptRows:
    """Rows of one chunk whose next prompt tokens want log-probabilities."""

    chunk_index: int
    rows: slice
    """Rows of the flat batch."""
    targets: list[int]
    top_n: int


@dataclass(frozen=True)
class PreparedStep:
    """A step as tensors; T rows, B chunks, S of them sample."""

    step: Step
    token_ids: torch.Tensor
    """int64 [T]; 0 where `pending_rows` says that the device knows the id."""
    pending_rows: torch.Tensor
    """int64 [P], rows whose token is their slot's last one."""
    pending_slots: torch.Tensor
    """int64 [P]."""
    batch: AttentionBatch
    sample_rows: torch.Tensor
    """int64 [S], the last row of each sampling chunk."""
    sample_slots: list[int]
    prompt_rows: list[PromptRows]
    admissions: list[Admission]


@dataclass(frozen=True)
class StepResult:
    """What a step brought, aligned with its sampling chunks in order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)
    """By index of the sampling chunk: why that row has no valid token."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By index of the chunk."""
    device_s: float = 0.0
    """What the device took for it; 0 where nobody measured."""
    idle_s: float = 0.0
    """What the device stood still between the step before and this one, or the copies for it."""
    queue_s: float = 0.0
    """What the runner's thread took to queue it, where it is queued."""
    completed: frozenset[int] = frozenset()
    """Sampling chunks whose grammar allows nothing after this token."""

    @property
    def is_done(self) -> bool:
        """Whether the step has ended: on a CPU, one that was executed has."""
        return True

    def wait(self) -> StepResult:
        """Return this: on a CPU, a step that was executed is done."""
        return self


class StepWatch:
    """Times steps where they run when they are called, one after the other: on a CPU.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._begun_s = self._ended_s = clock()
        self._idle_s = 0.0

    def come(self) -> None:
        """Note that a step has come: what follows is its copies, if it has some."""
        self._idle_s = self._clock() - self._ended_s

    def begin(self) -> None:
        """Note that it begins."""
        self._begun_s = self._clock()

    def end(self) -> tuple[float, float]:
        """Note that it ended; return the seconds that it took, and those before it came."""
        self._ended_s = self._clock()
        return self._ended_s - self._begun_s, self._idle_s


class Runner:
    """Owns the model, the KV caches and the sampler.

    Args:
        model: The loaded model.
        sampler: Turns logits into ids; has `max_batch_size` slots.
        num_blocks: KV blocks of the pool.
        block_size: Tokens of one block.
        num_slots: `max_batch_size`.
    """

    def __init__(
        self, model: CausalLM, sampler: Sampler, *, num_blocks: int, block_size: int, num_slots: int
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.kv_caches = allocate_kv(model, num_blocks, block_size)
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64)
        self._watch = StepWatch()
        self._host: HostKv | None = None

    def keep_on_host(self, num_places: int) -> HostKv:
        """Allocate host memory for so many units of preempted sequences; once, at start.

        Raises:
            ConfigError: The host does not give the memory.
        """
        self._host = HostKv(self.kv_caches, num_places)
        return self._host

    @staticmethod
    def padded_decodes(decodes: int) -> int:
        """Return as many: a CPU computes what is asked for, and no more."""
        return decodes

    @staticmethod
    def whole_prompts(decodes: int, tokens: int) -> int:
        """Return as many tokens as given: nothing is padded, whatever stands beside them."""
        del decodes
        return tokens

    @staticmethod
    def computed(step: Step) -> StepLoad:
        """Return what a step computes: what its chunks ask for."""
        return step.load

    def touch_kv(self, units: list[int]) -> None:
        """Make the pages of these units real, so that reading them takes the time it will take."""
        for k, v in self.kv_caches:
            k[units] = 0.0
            v[units] = 0.0

    def check_device(self) -> None:
        """A CPU is not lost."""

    @staticmethod
    def describe(prepared: PreparedStep) -> dict[str, object]:
        """Say what a step is, for the log."""
        return describe_step(prepared.step)

    def prepare(self, step: Step, blocks: BlockManager) -> PreparedStep:
        """Turn a step into tensors; reads scheduler state, so it runs on the engine's thread."""
        chunks = step.chunks
        token_ids, pending_rows, pending_slots = _input_tokens(chunks, step.num_tokens)
        starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum([chunk.num_tokens for chunk in chunks], out=starts[1:])
        sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
        return PreparedStep(
            step=step,
            token_ids=token_ids,
            pending_rows=pending_rows,
            pending_slots=pending_slots,
            batch=_attention_batch(chunks, starts, blocks),
            sample_rows=torch.from_numpy(starts[1:][sampling].astype(np.int64) - 1),
            sample_slots=[chunks[i].slot for i in sampling],
            prompt_rows=[
                rows
                for index, chunk in enumerate(chunks)
                if (rows := prompt_rows(index, chunk, int(starts[index]))) is not None
            ],
            admissions=[Admission.of(sequence) for sequence in step.admitted],
        )

    @torch.inference_mode()
    def execute(self, prepared: PreparedStep) -> StepResult:
        """Run one step; called on the runner's thread only, in order of scheduling."""
        self._watch.come()
        swap(self._host, prepared.step)
        self._watch.begin()
        result = self._run(prepared)
        device_s, idle_s = self._watch.end()
        return replace(result, device_s=device_s, idle_s=idle_s)

    def _run(self, prepared: PreparedStep) -> StepResult:
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
        token_ids = prepared.token_ids
        if len(prepared.pending_rows):
            token_ids[prepared.pending_rows] = self._last_tokens[prepared.pending_slots]
        hidden = self.model.forward(token_ids, prepared.batch, self.kv_caches)
        prompt_logprobs = {
            rows.chunk_index: score_prompt(self.model, self.sampler, hidden, rows)
            for rows in prepared.prompt_rows
        }
        if not prepared.sample_slots:
            return StepResult([], [], prompt_logprobs=prompt_logprobs)
        logits = self.model.logits(hidden[prepared.sample_rows])
        sampled = self.sampler.sample(logits, prepared.sample_slots)
        self._last_tokens[torch.tensor(prepared.sample_slots)] = sampled.token_ids
        return StepResult(
            token_ids=sampled.token_ids.tolist(),
            logprobs=sampled.logprobs,
            errors=sampled.errors,
            completed=sampled.completed,
            prompt_logprobs=prompt_logprobs,
        )


def describe_step(step: Step) -> dict[str, object]:
    """Say of what size a step is, and nothing of whose or with what text."""
    return {
        "tokens": step.num_tokens,
        "decodes": step.decodes,
        "prompts": len(step.chunks) - step.decodes,
        "longest_tokens": max([chunk.end for chunk in step.chunks]),
        "prompts_scored": sum(
            chunk.sequence.sampling.prompt_logprobs is not None for chunk in step.chunks
        ),
        "swapped_out": len(step.swapped_out),
        "swapped_in": len(step.swapped_in),
    }


def swap(host: HostKv | None, step: Step) -> bool:
    """Make a step's copies between pool and host, and tell whether there are some.

    They are no part of the step's own time, nor of what the device stands still before it.

    Raises:
        EngineError: There are some, but no host memory.
    """
    if not step.swapped_out and not step.swapped_in:
        return False
    if host is None:
        raise EngineError("a step swaps KV, but the runner was given no host memory")
    host.run((copy for _, copy in step.swapped_out), (copy for _, copy in step.swapped_in))
    return True


class PromptScorer(Protocol):
    """What a sampler offers for tokens that are known."""

    def prompt_logprobs(
        self, logits: torch.Tensor, target_ids: torch.Tensor, top_n: int
    ) -> list[TokenLogprobs]:
        """Score known tokens: logits float32 [R, V], target_ids int64 [R]."""
        ...


# Prompt rows whose logits exist at once: 64 x 152k floats are 39 MB.
_SCORE_ROWS = 64


def score_prompt(
    model: CausalLM, sampler: PromptScorer, hidden: torch.Tensor, rows: PromptRows
) -> list[TokenLogprobs]:
    """Log-probabilities of known next tokens, a slice at a time to bound the logits' size."""
    scores: list[TokenLogprobs] = []
    span = hidden[rows.rows]
    targets = torch.tensor(rows.targets, device=hidden.device)
    for low in range(0, len(rows.targets), _SCORE_ROWS):
        part = slice(low, low + _SCORE_ROWS)
        logits = model.logits(span[part]).float()
        scores += sampler.prompt_logprobs(logits, targets[part], rows.top_n)
    return scores


def allocate_kv(
    model: CausalLM, num_blocks: int, block_size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make the KV pool, one (K^T, V) pair a layer, uninitialised (pages cost nothing until used).

    K is [num_blocks, Hkv, D, block_size], V is [num_blocks, Hkv, block_size, D], float32.
    """
    config = model.config
    heads, dim = config.num_kv_heads, config.head_dim
    return [
        (
            torch.empty(num_blocks, heads, dim, block_size),
            torch.empty(num_blocks, heads, block_size, dim),
        )
        for _ in range(config.num_layers)
    ]


def kv_bytes_per_token(model: CausalLM) -> int:
    """Bytes of KV that one token takes over all layers, in float32."""
    config = model.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4


def _input_tokens(
    chunks: list[Chunk], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = np.zeros(num_tokens, dtype=np.int64)
    rows: list[int] = []
    slots: list[int] = []
    row = 0
    for chunk in chunks:
        if chunk.from_device:
            rows.append(row)
            slots.append(chunk.slot)
        else:
            ids[row : row + chunk.num_tokens] = chunk.sequence.token_ids[chunk.start : chunk.end]
        row += chunk.num_tokens
    return (
        torch.from_numpy(ids),
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(slots, dtype=torch.int64),
    )


def _attention_batch(
    chunks: list[Chunk], starts: np.ndarray, blocks: BlockManager
) -> AttentionBatch:
    size = blocks.unit_tokens
    # Only as many units as this step reaches: tables may already be longer.
    widths = [-(-chunk.end // size) for chunk in chunks]
    tables = np.full((len(chunks), max(widths)), -1, dtype=np.int32)
    positions = np.empty(int(starts[-1]), dtype=np.int64)
    slots = np.empty(int(starts[-1]), dtype=np.int64)
    for i, chunk in enumerate(chunks):
        tables[i, : widths[i]] = blocks.table(chunk.sequence.request_id)[: widths[i]]
        rows = slice(int(starts[i]), int(starts[i + 1]))
        positions[rows] = np.arange(chunk.start, chunk.end)
        slots[rows] = tables[i, positions[rows] // size].astype(np.int64) * size
        slots[rows] += positions[rows] % size
    ends = [chunk.end for chunk in chunks]
    return AttentionBatch(
        query_starts=torch.from_numpy(starts),
        kv_lens=torch.tensor(ends, dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        max_query_len=max(chunk.num_tokens for chunk in chunks),
        max_kv_len=max(ends),
    )


def prompt_rows(index: int, chunk: Chunk, first_row: int) -> PromptRows | None:
    """Rows of a chunk that predict a prompt token, for sequences that asked and have none yet."""
    sequence = chunk.sequence
    top_n = sequence.sampling.prompt_logprobs
    # After a preemption the prompt is computed again; what was scored is not scored twice.
    start = max(chunk.start, sequence.prompt_scored)
    end = min(chunk.end, sequence.num_prompt - 1)
    if top_n is None or start >= end:
        return None
    sequence.prompt_scored = end
    return PromptRows(
        chunk_index=index,
        rows=slice(first_row + start - chunk.start, first_row + end - chunk.start),
        targets=sequence.token_ids[start + 1 : end + 1],
        top_n=top_n,
    )
