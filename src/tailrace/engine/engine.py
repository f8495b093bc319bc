"""The loop's body: schedule, run, commit; step N+1 is scheduled while step N runs.

    main thread     schedule N+1, prepare | wait for N | commit N -> outputs | schedule N+2 ...
    runner thread   ------ execute N ------------------>|------ execute N+1 ----------------->

`Engine.step` issues the next step before it waits for the one in flight, so the runner's thread
always has its next batch at hand. What this costs: a sequence that ends on an EOS nobody could
foresee has one row computed in vain.

Beside the loop: who has come and is not queued (arrivals.py), whether a request may queue at all
(gate.py), what becomes of a step that brought nothing (failed_steps.py), where requests' time went
(request_times.py), and the engine in figures (engine_report.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.engine.arrivals import Arrivals
from tailrace.engine.engine_report import Counters, Moment, engine_stats, kv_report
from tailrace.engine.failed_steps import FailedSteps
from tailrace.engine.gate import Gate, Refusal
from tailrace.engine.request_times import TimeKeeper
from tailrace.engine.sequence import Status
from tailrace.engine.step_meter import StepMeter
from tailrace.engine.step_runner import InFlight
from tailrace.engine.step_time import StepTimeModel
from tailrace.types import TokenOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from tailrace.clock import Clock
    from tailrace.engine.late_binding import LateBinding
    from tailrace.engine.runner import StepResult
    from tailrace.engine.scheduler import Chunk, Scheduler
    from tailrace.engine.sequence import Sequence
    from tailrace.engine.step_runner import Executed, StepRunner
    from tailrace.text.grammar import Grammar, GrammarCompiler
    from tailrace.types import (
        EngineRequest,
        EngineStats,
        GrowPrompt,
        KvReport,
        ReserveKv,
        TokenLogprobs,
    )

_OUTLOOK_S = 0.1
"""Reports say when a place will be free as it was predicted at most so long ago."""


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
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = Arrivals(
            scheduler,
            clock,
            self._sequences.keys(),
            context_length=context_length,
            vocab_size=vocab_size,
            grammars=grammars,
        )
        self._place_free_s: float | None = None
        self._place_free_asked_s = float("-inf")
        self._in_flight: InFlight | None = None
        self._counters = Counters()
        self._times = TimeKeeper()
        self._failed = FailedSteps(
            scheduler, clock, self._counters, finish=self._finish, collect_void=self._collect_void
        )

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` can bring something."""
        return (
            self._in_flight is not None or self.scheduler.has_work or bool(self._arrivals.compiling)
        )

    @property
    def requests(self) -> int:
        """Complete requests that run or wait."""
        return len(self._sequences) + self._arrivals.compiling

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
        if self._arrivals.grammars is None:
            return self._refuse(request, "this engine serves no grammars")
        self._arrivals.compile(request, self._arrivals.grammars)
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
        self._arrivals.reserve(wish)

    def grow(self, piece: GrowPrompt) -> None:
        """Take a piece of a prompt that is still arriving, to be computed early: a wish, as above.

        A piece that does not follow on what is known of its prompt is ignored.
        """
        self._arrivals.grow(piece)

    def abort(self, request_ids: Iterable[str]) -> list[TokenOutput]:
        """Forget requests; return a final output for each that was known."""
        wanted = dict.fromkeys(request_ids)  # an id that comes twice ends its request once
        for request_id in wanted:
            self._arrivals.forget(request_id)
        unstarted = [i for i in wanted if self._arrivals.cancel(i)]
        found = [self._sequences[i] for i in wanted if i in self._sequences]
        return [
            *(TokenOutput(request_id, [], finish_reason="abort") for request_id in unstarted),
            *(self._finish(sequence, "abort", self._clock()) for sequence in found),
        ]

    def step(self) -> list[TokenOutput]:
        """Issue the next step, then wait for the one in flight and return what it brought."""
        self.meter.begin_turn()
        self._arrivals.expire()
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
        began_s = self._times.begin_s(running.issued_s)
        return max(0.0, self._late.due_s(began_s, running.predicted_s) - self._clock())

    def stats(self) -> EngineStats:
        """Describe the engine now."""
        self._arrivals.expire()  # an engine without work takes no step that would
        moment = Moment(
            time_s=self._clock(),
            compiling=self._arrivals.compiling,
            place_free_s=self._next_place_s(),
            block_bytes=self._block_bytes,
            step_costs=self.step_time.costs,
            timings=self.meter.read(),
            late_refusals_total=self.gate.late_refusals_total,
        )
        return engine_stats(self.scheduler, self._counters, moment)

    def inspect_kv(self) -> KvReport:
        """Check the KV pool and describe it; takes time in its size."""
        self._arrivals.expire()
        return kv_report(self.scheduler.blocks)

    def _start(self, request: EngineRequest, grammar: Grammar | None) -> TokenOutput | None:
        """Queue a request; return its final output where its first token would be late."""
        sequence = self._arrivals.sequence_of(request)
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
        compiling = self._arrivals.compiling_of(request.key)
        return self.gate.key_refusal(
            request.key, held, compiling, request.max_sequences, busy_s=self._busy_s()
        )

    def _turn_away(self, request_id: str, refusal: Refusal) -> TokenOutput:
        self._arrivals.forget(request_id)
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
        began_s = self._times.begin_s(running.issued_s)
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
        self._arrivals.forget(request.request_id)
        return TokenOutput(request.request_id, [], finish_reason="error", error=fault)

    def _start_compiled(self) -> list[TokenOutput]:
        """Queue the requests whose grammar is compiled; return outputs of those that cannot be."""
        if not self._arrivals.compiling:
            return []
        is_idle = self._in_flight is None and not self.scheduler.has_work
        refused = []
        for request, grammar, fault in self._arrivals.compiled(is_idle=is_idle):
            if fault:
                refused.append(self._refuse(request, fault))
                continue
            late = self._start(request, grammar)
            refused += [late] if late is not None else []
        return refused

    def _fault(self, request: EngineRequest) -> str | None:
        """Say what is wrong with a request that the front end should have refused."""
        ids = request.token_ids
        if self._arrivals.is_whole(request.request_id):
            return f"request id {request.request_id!r} is already running"
        if not ids:
            return "the prompt has no tokens"
        if len(ids) >= self.context_length:
            return f"the prompt has {len(ids)} tokens; the context holds {self.context_length}"
        if request.sampling.max_tokens < 1:
            return f"max_tokens is {request.sampling.max_tokens}; must be at least 1"
        if not self._arrivals.are_ids(ids):
            return f"a prompt token id is outside 0..{self.vocab_size - 1}"
        return None

    def _issue(self) -> InFlight | None:
        begun_s = self._clock()
        step = self.scheduler.schedule()
        chosen_s = self._clock()
        self.meter.add_schedule(chosen_s - begun_s)
        self._times.note_victims(step)
        if not step.chunks:
            return None
        prepared = self.runner.prepare(step, self.scheduler.blocks)
        result = self._submit(self.runner.execute, prepared)
        load = self.runner.computed(step)
        prepared_s = self._clock()
        self.meter.add_prepare(prepared_s - chosen_s)
        return InFlight(
            step,
            result,
            issued_s=chosen_s,
            load=load,
            predicted_s=self.step_time.predict(load),
            host_s=prepared_s - begun_s,
            follows=self._in_flight is not None,
        )

    def _collect(self, in_flight: InFlight) -> list[TokenOutput]:
        """Wait for a step and commit it."""
        try:
            result = in_flight.result.result().wait()
        except Exception as error:  # noqa: BLE001 -- whatever it was, only this step's requests fail
            self.runner.check_device()  # but where the device is lost: only a new process helps
            self._times.last_done_s = self._clock()
            return self._failed.outputs(in_flight, error)
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
                self._times.settle(chunk, now)
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

    def _account(self, in_flight: InFlight, result: StepResult, now: float) -> None:
        started = self._times.begin_s(in_flight.issued_s)
        self._times.last_done_s = now
        idle_s = result.idle_s if in_flight.follows else 0.0
        # Scoring prompts takes time that no later step does: it is neither judged nor learnt from.
        scores = bool(result.prompt_logprobs)
        predicted_s = None if scores else in_flight.predicted_s
        self.meter.add_step(result.device_s, idle_s, result.queue_s, predicted_s)
        if self._late is not None:
            host_s = in_flight.host_s + result.queue_s
            self._late.observe(device_s=result.device_s, idle_s=idle_s, host_s=host_s)
        if not scores:
            self.step_time.observe(in_flight.load, result.device_s)
        pace = self.scheduler.pace
        if pace is not None and predicted_s is not None and result.device_s > 0.0:
            # By its chunks: rows that pad it to a captured size are nobody's stream.
            pace.observe(in_flight.step.load, predicted_s, result.device_s)
            self.meter.pace_margin = pace.margin.value
        self._counters.steps += 1
        self._counters.step_time_s = now - started
        self._counters.step_tokens = in_flight.step.num_tokens
        self._counters.busy_s += now - started
        self._times.add_step(in_flight.step, started, now)

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
            times=self._times.times(sequence, now) if reason or first or is_back else None,
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
            times=self._times.times(sequence, now),
        )

    def _let_go(self, sequence: Sequence, *, forget: bool = False) -> None:
        # What made a request fail may stand in its KV: nobody shall find it in the prefix cache.
        self.scheduler.finish(sequence, forget=forget)
        del self._sequences[sequence.request_id]

    def _collect_void(self, lost: set[Sequence]) -> tuple[InFlight | None, list[TokenOutput]]:
        """Collect the step in flight, if any, in which the chunks of these bring nothing."""
        following, self._in_flight = self._in_flight, None
        if following is None:
            return None, []
        following.void = lost
        return following, self._collect(following)
