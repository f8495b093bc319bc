"""The loop's body: schedule, run, commit; step N+1 is scheduled while step N runs.

    main thread     schedule N+1, prepare | wait for N | commit N -> outputs | schedule N+2 ...
    runner thread   ------ execute N ------------------>|------ execute N+1 ----------------->

`Engine.step` issues the next step before it waits for the one in flight, so the runner's thread
always has its next batch at hand. What this costs: a sequence that ends on an EOS nobody could
foresee has one row computed in vain.

A request with a grammar waits, outside the scheduler, until that is compiled on its thread. Whether
a request may queue at all is the gate's to say (gate.py).
"""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from tailrace.engine.early_prompts import POOL_SHARE
from tailrace.engine.gate import Gate, Refusal
from tailrace.engine.phases import StepSums
from tailrace.engine.sequence import Sequence, Status
from tailrace.engine.step_meter import StepMeter
from tailrace.engine.step_time import StepTimeModel
from tailrace.errors import DeviceMemoryError, IntegrityError
from tailrace.text.grammar import GrammarError
from tailrace.types import (
    EngineStats,
    KvReport,
    KvTable,
    RequestTimes,
    ReserveKv,
    TokenOutput,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from tailrace.clock import Clock
    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.late_binding import LateBinding
    from tailrace.engine.runner import StepResult
    from tailrace.engine.scheduler import Chunk, Scheduler, Step
    from tailrace.engine.step_time import StepLoad
    from tailrace.text.grammar import Grammar, GrammarCompiler
    from tailrace.types import EngineRequest, GrowPrompt, TokenLogprobs


log = structlog.get_logger("tailrace.engine")

_COMPILE_WAIT_S = 0.002
"""An engine with nothing else to do looks so often for new requests while a grammar compiles."""
_OUTLOOK_S = 0.1
"""Reports say when a place will be free as it was predicted at most so long ago."""
_NO_MEMORY = (
    "the device ran out of memory in this request's step, and again when it was computed anew; "
    "try again later, or send a shorter prompt"
)


class Executed(Protocol):
    """A step that ran, or will have."""

    @property
    def is_done(self) -> bool:
        """Whether it has."""
        ...

    def wait(self) -> StepResult:
        """Return what it brought, once it has."""
        ...


class StepRunner(Protocol):
    """What the engine needs of a runner."""

    def padded_decodes(self, decodes: int) -> int:
        """Return the rows that a step with prompts computes for so many decodes."""
        ...

    def prepare(self, step: Step, blocks: BlockManager) -> Any:
        """Turn a step into the runner's input, without waiting for a result."""
        ...

    def whole_prompts(self, decodes: int, tokens: int) -> int:
        """Return the most prompt tokens, up to those given, that need no padding beside decodes."""
        ...

    def computed(self, step: Step) -> StepLoad:
        """Return what a step computes, its padding included."""
        ...

    def touch_kv(self, units: list[int]) -> None:
        """Make the memory of these units of KV real; on the runner's thread."""
        ...

    def check_device(self) -> None:
        """Raise where no further step can succeed in this process."""
        ...

    def execute(self, prepared: Any) -> Executed:
        """Run the step, or queue it on the device."""
        ...


@dataclass
class _InFlight:
    step: Step
    result: Future[Executed]
    issued_s: float
    load: StepLoad
    predicted_s: float | None
    host_s: float
    """What choosing and preparing it took."""
    follows: bool
    """Whether it was issued while another was in flight."""
    void: set[Sequence] = field(default_factory=set)
    """Whose chunks continue a step that brought nothing, so that these bring nothing either."""

    @property
    def is_done(self) -> bool:
        """Whether waiting for it would take no time."""
        if not self.result.done():
            return False
        return self.result.exception() is not None or self.result.result().is_done


@dataclass
class _Counters:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_time_s: float = 0.0
    step_tokens: int = 0
    busy_s: float = 0.0
    memory_failures: int = 0


class Engine:
    """Runs sequences to their end.

    Args:
        scheduler: Chooses each step.
        runner: Executes it.
        submit: Starts `runner.execute` on the runner's thread: `executor.submit`.
        clock: Monotonic seconds.
        context_length: Most tokens of one sequence.
        vocab_size: Token ids are below this.
        eos_token_ids: End a sequence unless it says `ignore_eos`.
        step_time: Learns from every step; by default one that was not fitted and stays so.
        late_binding: Says how long to hold the next step; None: it is issued at once.
        grammars: Compiles them; None: requests with a grammar are refused.
        gate: Says who may queue; None: everybody may.
        block_bytes: Of KV in one unit; for the statistics.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        submit: Callable[..., Future[Executed]],
        clock: Clock,
        context_length: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        step_time: StepTimeModel | None = None,
        late_binding: LateBinding | None = None,
        grammars: GrammarCompiler | None = None,
        gate: Gate | None = None,
        block_bytes: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.step_time = step_time or StepTimeModel()
        self.gate = gate or Gate(scheduler, self.step_time)
        self.meter = StepMeter()
        self._late = late_binding
        self._block_bytes = block_bytes
        self._submit = submit
        self._clock = clock
        self._grammars = grammars
        self._compiling: dict[str, tuple[EngineRequest, Future[Grammar]]] = {}
        self._sequences: dict[str, Sequence] = {}
        self._reserved: dict[str, float] = {}
        """Deadlines of leases, and of early work, whose request has not come yet."""
        self._place_free_s: float | None = None
        self._place_free_asked_s = float("-inf")
        self._in_flight: _InFlight | None = None
        self._last_done_s = 0.0
        self._counters = _Counters()
        self._steps = StepSums()

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` can bring something."""
        return self._in_flight is not None or self.scheduler.has_work or bool(self._compiling)

    @property
    def requests(self) -> int:
        """Complete requests that run or wait."""
        return len(self._sequences) + len(self._compiling)

    def add(self, request: EngineRequest) -> TokenOutput | None:
        """Queue a request; return its final output at once where it cannot be served."""
        fault = self._fault(request)
        if fault is not None:
            return self._refuse(request, fault)
        refusal = self._key_refusal(request)
        if refusal is not None:
            return self._turn_away(request.request_id, refusal)
        if not request.sampling.grammar:
            return self._start(request, None)
        if self._grammars is None:
            return self._refuse(request, "this engine serves no grammars")
        compiled = self._grammars.compile_soon(request.sampling.grammar)
        self._compiling[request.request_id] = (request, compiled)
        return None

    def turn_away(self, request_id: str, reason: str) -> TokenOutput:
        """Refuse a request for which there is no place, and say when there will be one.

        Args:
            request_id: What it was leased, or was computed early, is given up.
            reason: Fit for the client.
        """
        after_s = self.gate.retry_after_s(busy_s=self._busy_s())
        return self._turn_away(request_id, Refusal(reason, after_s))

    def reserve(self, wish: ReserveKv) -> None:
        """Lease KV for a request that is still arriving; a second wish of an id does nothing.

        A wish, no right: it does not overtake who is waiting, and all leases of requests that may
        never come leave three quarters of the pool to those that have.
        """
        self._expire_reservations()
        request_id, blocks = wish.request_id, self.scheduler.blocks
        known = (self._sequences, self._compiling, self._reserved)
        if any(request_id in ids for ids in known) or self.scheduler.waiting:
            return
        promised = blocks.reserved_units + self.scheduler.early.units
        room = blocks.num_units // POOL_SHARE - promised
        tokens = min(wish.num_tokens, self.context_length, room * blocks.unit_tokens)
        if tokens > 0:
            blocks.reserve(request_id, tokens)
            self._reserved[request_id] = self._clock() + wish.lifetime_s

    def grow(self, piece: GrowPrompt) -> None:
        """Take a piece of a prompt that is still arriving, to be computed early: a wish, as above.

        A piece that does not follow on what is known of its prompt is ignored.
        """
        early = self.scheduler.early
        request_id, ids = piece.request_id, piece.token_ids
        known = early.get(request_id)
        if request_id in self._sequences or request_id in self._compiling:
            return
        if not self._are_ids(ids):
            return
        if piece.start + len(ids) >= self.context_length:
            return
        if known is not None and piece.start == len(known.token_ids):
            early.extend(known, ids)
        elif known is None and piece.start == 0 and early.can_add():
            self.reserve(ReserveKv(request_id, len(ids), piece.lifetime_s))
            now = self._clock()
            self._reserved.setdefault(request_id, now + piece.lifetime_s)
            early.add(Sequence.arriving(request_id, ids, now, piece.cache_salt))

    def abort(self, request_ids: Iterable[str]) -> list[TokenOutput]:
        """Forget requests; return a final output for each that was known."""
        wanted = dict.fromkeys(request_ids)  # an id that comes twice ends its request once
        for request_id in wanted:
            self._forget_arriving(request_id)
        unstarted = [i for i in wanted if i in self._compiling]
        for request_id in unstarted:
            self._compiling.pop(request_id)[1].cancel()  # nobody waits behind what nobody wants
        found = [self._sequences[i] for i in wanted if i in self._sequences]
        return [
            *(TokenOutput(request_id, [], finish_reason="abort") for request_id in unstarted),
            *(self._finish(sequence, "abort", self._clock()) for sequence in found),
        ]

    def step(self) -> list[TokenOutput]:
        """Issue the next step, then wait for the one in flight and return what it brought."""
        self.meter.begin_turn()
        self._expire_reservations()
        refused = self._start_compiled()
        issued = self._issue()
        previous, self._in_flight = self._in_flight, issued
        return [*refused, *(self._collect(previous) if previous is not None else [])]

    def hold_s(self) -> float:
        """Return for how long `step` may still be put off, so that who comes now is in it.

        0 where that brings nobody anything: no place is free, or the step in flight has ended.
        """
        running = self._in_flight
        if self._late is None or running is None or running.predicted_s is None:
            return 0.0
        if not self.scheduler.places_free or running.is_done:
            return 0.0
        began_s = max(running.issued_s, self._last_done_s)
        return max(0.0, self._late.due_s(began_s, running.predicted_s) - self._clock())

    def stats(self) -> EngineStats:
        """Describe the engine now."""
        self._expire_reservations()  # an engine without work takes no step that would
        blocks, count = self.scheduler.blocks, self._counters
        running = self.scheduler.running
        return EngineStats(
            time_s=self._clock(),
            running_requests=len(running),
            waiting_requests=len(self.scheduler.waiting) + len(self._compiling),
            total_blocks=blocks.num_units,
            free_blocks=blocks.available_units,
            block_size=blocks.unit_tokens,
            # A shared unit is full, and each of its holders counted its tokens.
            live_tokens=sum(sequence.num_computed for sequence in running)
            + sum(sequence.num_computed for sequence in self.scheduler.early.holders)
            - blocks.duplicate_units * blocks.unit_tokens,
            held_blocks=blocks.held_units,
            leased_blocks=blocks.leased_units,
            lent_blocks=blocks.lent_units,
            wide_share=blocks.wide_share,
            prompt_tokens_total=count.prompt_tokens,
            generation_tokens_total=count.generation_tokens,
            cached_tokens_total=blocks.hit_tokens_total,
            prefix_query_tokens_total=blocks.query_tokens_total,
            preemptions_total=self.scheduler.preemptions_total,
            returns_total=self.scheduler.returns_total,
            lent_blocks_total=blocks.lent_units_total,
            evictions_total=blocks.evictions_total,
            runs_total=blocks.runs_total,
            host_blocks=blocks.host_places,
            swapped_blocks=blocks.swapped_units,
            swapped_out_blocks_total=blocks.swapped_out_total,
            swapped_in_blocks_total=blocks.swapped_in_total,
            block_bytes=self._block_bytes,
            steps_total=count.steps,
            step_time_s=count.step_time_s,
            step_tokens=count.step_tokens,
            busy_s_total=count.busy_s,
            early_used_tokens_total=self.scheduler.early.used_tokens_total,
            early_dropped_tokens_total=self.scheduler.early.dropped_tokens_total,
            step_costs=self.step_time.costs,
            timings=self.meter.read(),
            place_free_s=self._next_place_s(),
            late_refusals_total=self.gate.late_refusals_total,
            memory_failures_total=count.memory_failures,
        )

    def inspect_kv(self) -> KvReport:
        """Check the KV pool and describe it; takes time in its size."""
        self._expire_reservations()
        blocks = self.scheduler.blocks
        try:
            blocks.check_integrity()
            fault = ""
        except IntegrityError as error:
            log.exception("kv_pool_broken")
            fault = str(error)
        return KvReport(
            fault=fault,
            block_size=blocks.unit_tokens,
            total_blocks=blocks.num_units,
            free_blocks=blocks.available_units,
            reserved_blocks=blocks.reserved_units,
            host_blocks=blocks.host_places,
            swapped_blocks=blocks.swapped_units,
            tables=[
                KvTable(
                    request_id=table.seq_id,
                    held=len(table.units),
                    shared=table.shared,
                    ahead=len(table.ahead),
                    claim=table.lease.claim,
                    short=table.lease.short,
                    debt=table.lease.debt,
                )
                for table in blocks.tables()
            ],
        )

    def _start(self, request: EngineRequest, grammar: Grammar | None) -> TokenOutput | None:
        """Queue a request; return its final output where its first token would be late."""
        self._reserved.pop(request.request_id, None)
        sequence = self._sequence_of(request)
        sequence.grammar = grammar
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)
        refusal = self.gate.judge(sequence, now_s=self._clock(), busy_s=self._busy_s())
        if refusal is None:
            return None
        self._let_go(sequence)
        return self._turn_away(request.request_id, refusal)

    def _key_refusal(self, request: EngineRequest) -> Refusal | None:
        if not request.max_sequences:
            return None
        held = [s for s in self._sequences.values() if s.key == request.key]
        compiling = sum(other.key == request.key for other, _ in self._compiling.values())
        return self.gate.key_refusal(
            request.key, held, compiling, request.max_sequences, busy_s=self._busy_s()
        )

    def _turn_away(self, request_id: str, refusal: Refusal) -> TokenOutput:
        self._forget_arriving(request_id)
        return TokenOutput(
            request_id,
            [],
            finish_reason="refused",
            error=refusal.reason,
            retry_after_s=refusal.retry_after_s,
            predicted_ttft_s=refusal.predicted_ttft_s,
            refusal=refusal.rule,
        )

    def _busy_s(self) -> float:
        """Return the seconds until the step in flight is done, as predicted."""
        running = self._in_flight
        if running is None or running.predicted_s is None:
            return 0.0
        began_s = max(running.issued_s, self._last_done_s)
        return max(0.0, began_s + running.predicted_s - self._clock())

    def _next_place_s(self) -> float | None:
        """Return when somebody who runs will have ended, where others wait for it."""
        now_s = self._clock()
        if not self.scheduler.waiting and self.scheduler.places_free:
            return None
        if now_s - self._place_free_asked_s > _OUTLOOK_S:
            self._place_free_asked_s = now_s
            self._place_free_s = self.gate.place_free_s(busy_s=self._busy_s())
        return self._place_free_s

    def _refuse(self, request: EngineRequest, fault: str) -> TokenOutput:
        self._forget_arriving(request.request_id)
        return TokenOutput(request.request_id, [], finish_reason="error", error=fault)

    def _start_compiled(self) -> list[TokenOutput]:
        """Queue the requests whose grammar is compiled; return outputs of those that cannot be."""
        if not self._compiling:
            return []
        if self._in_flight is None and not self.scheduler.has_work:
            wait([compiled for _, compiled in self._compiling.values()], _COMPILE_WAIT_S)
        refused = []
        for request, compiled in list(self._compiling.values()):
            if not compiled.done():
                continue
            del self._compiling[request.request_id]
            try:
                grammar = compiled.result()
            except GrammarError as error:
                refused.append(self._refuse(request, f"the grammar is refused: {error}"))
                continue
            except Exception:
                log.exception("grammar_failed")
                refused.append(self._refuse(request, "the engine failed at this grammar"))
                continue
            late = self._start(request, grammar)
            refused += [late] if late is not None else []
        return refused

    def _expire_reservations(self) -> None:
        """Give back what was leased for requests that never came."""
        if not self._reserved:
            return
        now = self._clock()
        for request_id in [i for i, deadline_s in self._reserved.items() if deadline_s <= now]:
            self._forget_arriving(request_id)

    def _forget_arriving(self, request_id: str) -> None:
        """Give back what a request that is not complete holds and is leased, if anything."""
        if self._reserved.pop(request_id, None) is None:
            return
        early = self.scheduler.early.get(request_id)
        if early is not None:
            self.scheduler.early.drop(early)
        self.scheduler.blocks.release(request_id)

    def _sequence_of(self, request: EngineRequest) -> Sequence:
        """Return a waiting sequence that goes on from what was computed early, if that is it."""
        early = self.scheduler.early.get(request.request_id)
        if early is None:
            return Sequence.from_request(request, self.context_length)
        if not early.begins(request):
            self.scheduler.early.drop(early)
            return Sequence.from_request(request, self.context_length)
        early.complete(request, self.context_length)
        self.scheduler.early.complete(early)
        return early

    def _are_ids(self, ids: list[int]) -> bool:
        return bool(ids) and 0 <= min(ids) <= max(ids) < self.vocab_size

    def _fault(self, request: EngineRequest) -> str | None:
        """Say what is wrong with a request that the front end should have refused."""
        ids = request.token_ids
        if request.request_id in self._sequences or request.request_id in self._compiling:
            return f"request id {request.request_id!r} is already running"
        if not ids:
            return "the prompt has no tokens"
        if len(ids) >= self.context_length:
            return f"the prompt has {len(ids)} tokens; the context holds {self.context_length}"
        if request.sampling.max_tokens < 1:
            return f"max_tokens is {request.sampling.max_tokens}; must be at least 1"
        if not self._are_ids(ids):
            return f"a prompt token id is outside 0..{self.vocab_size - 1}"
        return None

    def _issue(self) -> _InFlight | None:
        begun_s = self._clock()
        step = self.scheduler.schedule()
        chosen_s = self._clock()
        self.meter.add_schedule(chosen_s - begun_s)
        self._note_victims(step)
        if not step.chunks:
            return None
        prepared = self.runner.prepare(step, self.scheduler.blocks)
        result = self._submit(self.runner.execute, prepared)
        load = self.runner.computed(step)
        prepared_s = self._clock()
        self.meter.add_prepare(prepared_s - chosen_s)
        return _InFlight(
            step,
            result,
            issued_s=chosen_s,
            load=load,
            predicted_s=self.step_time.predict(load),
            host_s=prepared_s - begun_s,
            follows=self._in_flight is not None,
        )

    def _collect(self, in_flight: _InFlight) -> list[TokenOutput]:
        """Wait for a step and commit it."""
        try:
            result = in_flight.result.result().wait()
        except Exception as error:  # noqa: BLE001 -- whatever it was, only this step's requests fail
            self.runner.check_device()  # but where the device is lost: only a new process helps
            self._last_done_s = self._clock()
            if isinstance(error, DeviceMemoryError) or in_flight.void:
                return self._retry_step(in_flight, error)
            return self._fail_step(in_flight.step, error)
        now = self._clock()
        self._account(in_flight, result, now)
        self.scheduler.retire_copies(in_flight.step)
        outputs = []
        sampled = 0
        for index, chunk in enumerate(in_flight.step.chunks):
            row = sampled if chunk.samples else None
            sampled += chunk.samples
            if chunk.sequence in in_flight.void:
                self.scheduler.retire(chunk)
                continue
            if chunk.sequence.prompt_counted < chunk.sequence.num_prompt:
                self._count_prefill(chunk)
            if chunk.sequence.recover_to or not chunk.sequence.num_output:
                self._settle(chunk, now)
            if result.prompt_logprobs:
                self._take_prompt_logprobs(chunk, result, index)
            # Where memory was short, it has sufficed.
            if chunk.sequence.memory_failures and chunk.end >= chunk.sequence.failed_end:
                chunk.sequence.memory_failures = 0
            output = self._commit(chunk, result, row, now)
            if output is not None:
                outputs.append(output)
        self.meter.add_commit(self._clock() - now)
        return outputs

    def _account(self, in_flight: _InFlight, result: StepResult, now: float) -> None:
        # A step starts when it is issued or when the one before it ends, whichever is later.
        started = max(in_flight.issued_s, self._last_done_s)
        self._last_done_s = now
        idle_s = result.idle_s if in_flight.follows else 0.0
        self.meter.add_step(result.device_s, idle_s, result.queue_s, in_flight.predicted_s)
        if self._late is not None:
            host_s = in_flight.host_s + result.queue_s
            self._late.observe(device_s=result.device_s, idle_s=idle_s, host_s=host_s)
        if not result.prompt_logprobs:  # scoring prompts takes time that no later step does
            self.step_time.observe(in_flight.load, result.device_s)
        self._counters.steps += 1
        self._counters.step_time_s = now - started
        self._counters.step_tokens = in_flight.step.num_tokens
        self._counters.busy_s += now - started
        step = in_flight.step
        self._steps.add(started, now, step.num_tokens, step.num_tokens - step.decodes)

    def _settle(self, chunk: Chunk, now: float) -> None:
        """Account for a sequence's time up to the end of a step that had a chunk of its.

        Once it decodes, nothing has to be told apart until it ends, or is preempted.
        """
        sequence = chunk.sequence
        is_early = sequence.status is Status.WAITING and not sequence.recover_to
        if is_early or sequence.status in (Status.ARRIVING, Status.FINISHED):
            return
        if not sequence.spent.has_begun:
            sequence.scheduled_s = self._steps.started_s
        sequence.spent.settle(
            now,
            self._steps,
            own_prompt_tokens=chunk.num_tokens if chunk.num_tokens > 1 else 0,
            has_token=sequence.num_output > 0,
        )
        sequence.spent.is_behind |= sequence.status is Status.WAITING  # sent back meanwhile

    def _count_prefill(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        end = min(chunk.end, sequence.num_prompt)
        start = max(chunk.start, sequence.prompt_counted)
        if end > start:
            self._counters.prompt_tokens += end - start
            sequence.prompt_counted = end

    @staticmethod
    def _take_prompt_logprobs(chunk: Chunk, result: StepResult, index: int) -> None:
        scores = result.prompt_logprobs.get(index)
        if scores is not None:
            kept = chunk.sequence.prompt_logprobs
            kept.extend([*([] if kept else [None]), *scores])

    def _commit(
        self, chunk: Chunk, result: StepResult, row: int | None, now: float
    ) -> TokenOutput | None:
        """Apply one chunk's outcome to its sequence; return what the client gets to know."""
        sequence = chunk.sequence
        # No token for anybody: a prompt's inner chunk, or ended or aborted while this step ran.
        if row is None or sequence.status is Status.FINISHED:
            self.scheduler.commit(chunk)
            return None
        if row in result.errors:
            self.scheduler.retire(chunk)
            return self._finish(sequence, "error", now, error=result.errors[row])
        token_id = result.token_ids[row]
        is_back = sequence.is_recovering
        sequence.token_ids.append(token_id)
        self.scheduler.commit(chunk)
        self._counters.generation_tokens += 1
        first = sequence.num_output == 1
        if first:
            sequence.first_token_s = now
        logprobs = result.logprobs[row]
        is_stop = self._is_stop(sequence, token_id)
        reason = None
        if is_stop or row in result.completed:
            reason = "stop"
        elif sequence.num_output >= sequence.max_output:
            reason = "length"
        output = TokenOutput(
            sequence.request_id,
            [token_id],
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=self._prompt_logprobs(sequence) if first else None,
            finish_reason=reason,
            stop_token_id=token_id if is_stop else None,
            times=self._times(sequence, now) if reason or first or is_back else None,
            predicted_ttft_s=sequence.predicted_ttft_s if first else None,
        )
        if reason is not None:
            self._let_go(sequence)
        return output

    def _is_stop(self, sequence: Sequence, token_id: int) -> bool:
        sampling = sequence.sampling
        # `min_tokens` masks these ids in the sampler, so no further test is needed here.
        return token_id in sampling.stop_token_ids or (
            token_id in self.eos_token_ids and not sampling.ignore_eos
        )

    @staticmethod
    def _prompt_logprobs(sequence: Sequence) -> list[TokenLogprobs | None] | None:
        if sequence.sampling.prompt_logprobs is None:
            return None
        return sequence.prompt_logprobs or [None]

    def _finish(
        self,
        sequence: Sequence,
        reason: str,
        now: float,
        error: str | None = None,
        *,
        may_retry: bool = False,
    ) -> TokenOutput:
        self._let_go(sequence, forget=reason == "error")
        return TokenOutput(
            sequence.request_id,
            [],
            finish_reason=reason,
            error=error,
            may_retry=may_retry,
            times=self._times(sequence, now),
        )

    def _let_go(self, sequence: Sequence, *, forget: bool = False) -> None:
        # What made a request fail may stand in its KV: nobody shall find it in the prefix cache.
        self.scheduler.finish(sequence, forget=forget)
        del self._sequences[sequence.request_id]

    def _fail_step(self, step: Step, error: Exception) -> list[TokenOutput]:
        """End every request of a step that raised; the others go on."""
        now = self._clock()
        log.error("step_failed", requests=len(step.chunks), exc_info=error)
        unheard = self.scheduler.unheard(step)
        # The text may hold paths and the like: it is for the log, not for clients.
        message = f"the engine failed in this request's step ({type(error).__name__})"
        outputs = []
        self.scheduler.retire_copies(step, failed=True)
        for chunk in step.chunks:
            self.scheduler.retire(chunk)
            if chunk.sequence.status is Status.ARRIVING:
                self.scheduler.early.drop(chunk.sequence, forget=True)
            elif chunk.sequence.status is not Status.FINISHED:
                outputs.append(self._finish(chunk.sequence, "error", now, error=message))
        following = self._in_flight
        # What it computed for those who ended may fail too, and the others shall not end with it.
        outputs += self._collect_void({*unheard, *(chunk.sequence for chunk in step.chunks)})
        self._tell_again(unheard, following)
        return outputs

    def _retry_step(self, in_flight: _InFlight, error: Exception) -> list[TokenOutput]:
        """Have the chunks of a step without memory computed again, in smaller steps.

        The KV before them is sound, so nothing else is lost. It is the rows of prompts that take
        memory: who brought some gets a second try and no third; where nobody did, all count.
        """
        step = in_flight.step
        if isinstance(error, DeviceMemoryError):
            self._counters.memory_failures += 1
            log.warning(
                "step_without_memory",
                error=str(error),
                tokens=step.num_tokens,
                requests=len(step.chunks),
                token_budget_now=self.scheduler.cut_budget(),
            )
        else:
            log.warning("step_after_one_without_memory_failed", exc_info=error)
        self.scheduler.retire_copies(step, failed=True)
        for chunk in step.chunks:
            self.scheduler.retire(chunk)
        unheard, following = self.scheduler.unheard(step), self._in_flight
        # What follows builds on KV, tokens and sampling states that were never made.
        outputs = self._collect_void({*unheard, *(chunk.sequence for chunk in step.chunks)})
        self._tell_again(unheard, following)
        # Of another fault it is not known whose doing it was: who is to blame will meet it again.
        is_memory = isinstance(error, DeviceMemoryError)
        all_count = step.decodes == len(step.chunks)
        swapped_in = {sequence for sequence, _ in step.swapped_in}
        for chunk in step.chunks:
            if chunk.sequence not in in_flight.void:
                start = chunk.start
                if chunk.sequence in swapped_in and chunk.sequence.kv is not None:
                    start = chunk.sequence.kv.cached_tokens  # nobody knows what was copied back
                counts = is_memory and (all_count or chunk.num_tokens > 1)
                failed_end = chunk.end if counts else None
                output = self._try_again(chunk.sequence, start, failed_end)
                outputs += [output] if output is not None else []
        return outputs

    def _collect_void(self, lost: set[Sequence]) -> list[TokenOutput]:
        """Collect the step in flight, if any, in which the chunks of these bring nothing."""
        following, self._in_flight = self._in_flight, None
        if following is None:
            return []
        following.void = lost
        return self._collect(following)

    def _tell_again(self, unheard: list[Sequence], following: _InFlight | None) -> None:
        """Have the runner told again of who was admitted in a step that failed.

        Args:
            unheard: Had no chunk in that step.
            following: The step after it, in which their chunks were void.
        """
        chunks = [] if following is None else following.step.chunks
        starts = {chunk.sequence: chunk.start for chunk in chunks}
        for sequence in unheard:
            self._try_again(sequence, starts.get(sequence, sequence.num_computed), None)

    def _try_again(
        self, sequence: Sequence, start: int, failed_end: int | None
    ) -> TokenOutput | None:
        """Rewind a request to before a chunk that brought nothing, or end it.

        Args:
            sequence: Nothing of its is in flight.
            start: Of the chunk.
            failed_end: Up to where it found no memory, which counts; None: that was not its doing.
        """
        if sequence.status is Status.FINISHED:
            return None
        if not sequence.num_output:  # what came of its prompt's scores; none has been sent
            sequence.prompt_scored = max(0, len(sequence.prompt_logprobs) - 1)
        if sequence.status is not Status.RUNNING:  # preempted since, or computed early
            self.scheduler.early.drop(sequence, forget=True)
            # That chunk's positions would be in what the host holds of it.
            self.scheduler.blocks.drop_swapped(sequence.request_id)
            sequence.spent.is_behind |= sequence.recover_to > 0
            return None
        if failed_end is not None and sequence.memory_failures:
            return self._finish(sequence, "error", self._clock(), error=_NO_MEMORY, may_retry=True)
        if failed_end is not None:
            sequence.memory_failures, sequence.failed_end = 1, failed_end
        self.scheduler.rewind(sequence, start)
        return None

    def _note_victims(self, step: Step) -> None:
        """Have what the preempted did so far end with the last step, where none of theirs runs."""
        for sequence in step.victims:
            if not sequence.steps_in_flight:
                spent, has_token = sequence.spent, sequence.num_output > 0
                spent.catch_up(self._last_done_s, self._steps, has_token=has_token)
                spent.is_behind = True

    def _times(self, sequence: Sequence, now: float) -> RequestTimes:
        spent = sequence.spent
        spent.catch_up(now, self._steps, has_token=sequence.num_output > 0)
        return RequestTimes(
            arrival_s=sequence.arrival_s,
            scheduled_s=sequence.scheduled_s,
            first_token_s=sequence.first_token_s,
            finished_s=now,
            preemptions=sequence.preemptions,
            cached_tokens=sequence.cached_tokens,
            queue_s=spent.queue_s,
            prefill_s=spent.prefill_s,
            prefill_wait_s=spent.prefill_wait_s,
            decode_s=spent.decode_s,
            decode_wait_s=spent.decode_wait_s,
            preempted_s=spent.preempted_s,
        )
