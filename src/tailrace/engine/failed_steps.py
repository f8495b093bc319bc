"""What becomes of a step that brought nothing, and of the one behind it.

    lack of memory     its chunks are computed again, in smaller steps; a second time it is an error
    any other fault    its requests end with an error, and the others go on

The step behind it is in flight already and builds on KV, tokens and sampling states that were never
made. So it is collected first, void for the same sequences; whoever was admitted in the failed
step without a chunk in it is told to the runner again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import structlog

from tailrace.engine.sequence import Status
from tailrace.errors import DeviceMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace.clock import Clock
    from tailrace.engine.engine_report import Counters
    from tailrace.engine.scheduler import Scheduler, Step
    from tailrace.engine.sequence import Sequence
    from tailrace.engine.step_runner import InFlight
    from tailrace.types import TokenOutput

log = structlog.get_logger("tailrace.engine")

_NO_MEMORY = (
    "the device ran out of memory in this request's step, and again when it was computed anew; "
    "try again later, or send a shorter prompt"
)


class Finish(Protocol):
    """Ends a sequence."""

    def __call__(
        self,
        sequence: Sequence,
        reason: str,
        now: float,
        error: str | None = None,
        *,
        may_retry: bool = False,
    ) -> TokenOutput:
        """Return its last output."""
        ...


class FailedSteps:
    """Puts sequences back to where they were, or ends them.

    Args:
        scheduler: Whose steps fail.
        clock: Monotonic seconds.
        count: Where failures for lack of memory are counted.
        finish: Ends a sequence.
        collect_void: Collects the step in flight, in which the chunks of these sequences bring
            nothing; returns that step, None where there is none, and its outputs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        count: Counters,
        *,
        finish: Finish,
        collect_void: Callable[[set[Sequence]], tuple[InFlight | None, list[TokenOutput]]],
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._count = count
        self._finish = finish
        self._collect_void = collect_void

    def outputs(self, in_flight: InFlight, error: Exception) -> list[TokenOutput]:
        """Deal with a step that raised; return what its requests, and those behind, get to know."""
        if isinstance(error, DeviceMemoryError) or in_flight.void:
            return self._retry_step(in_flight, error)
        return self._fail_step(in_flight.step, error)

    def _fail_step(self, step: Step, error: Exception) -> list[TokenOutput]:
        """End every request of a step that raised; the others go on."""
        now = self._clock()
        log.error("step_failed", requests=len(step.chunks), exc_info=error)
        unheard = self._scheduler.unheard(step)
        # The text may hold paths and the like: it is for the log, not for clients.
        message = f"the engine failed in this request's step ({type(error).__name__})"
        outputs = []
        self._scheduler.retire_copies(step, failed=True)
        for chunk in step.chunks:
            self._scheduler.retire(chunk)
            if chunk.sequence.status is Status.ARRIVING:
                self._scheduler.early.drop(chunk.sequence, forget=True)
            elif chunk.sequence.status is not Status.FINISHED:
                outputs.append(self._finish(chunk.sequence, "error", now, error=message))
        # What it computed for those who ended may fail too, and the others shall not end with it.
        lost = {*unheard, *(chunk.sequence for chunk in step.chunks)}
        following, more = self._collect_void(lost)
        outputs += more
        self._tell_again(unheard, following)
        return outputs

    def _retry_step(self, in_flight: InFlight, error: Exception) -> list[TokenOutput]:
        """Have the chunks of a step without memory computed again, in smaller steps.

        The KV before them is sound, so nothing else is lost. It is the rows of prompts that take
        memory: who brought some gets a second try and no third; where nobody did, all count.
        """
        step = in_flight.step
        if isinstance(error, DeviceMemoryError):
            self._count.memory_failures += 1
            log.warning(
                "step_without_memory",
                error=str(error),
                tokens=step.num_tokens,
                requests=len(step.chunks),
                token_budget_now=self._scheduler.cut_budget(),
            )
        else:
            log.warning("step_after_one_without_memory_failed", exc_info=error)
        self._scheduler.retire_copies(step, failed=True)
        for chunk in step.chunks:
            self._scheduler.retire(chunk)
        unheard = self._scheduler.unheard(step)
        lost = {*unheard, *(chunk.sequence for chunk in step.chunks)}
        following, outputs = self._collect_void(lost)
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

    def _tell_again(self, unheard: list[Sequence], following: InFlight | None) -> None:
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
            self._scheduler.early.drop(sequence, forget=True)
            # That chunk's positions would be in what the host holds of it.
            self._scheduler.blocks.drop_swapped(sequence.request_id)
            sequence.spent.is_behind |= sequence.recover_to > 0
            return None
        if failed_end is not None and sequence.memory_failures:
            return self._finish(sequence, "error", self._clock(), error=_NO_MEMORY, may_retry=True)
        if failed_end is not None:
            sequence.memory_failures, sequence.failed_end = 1, failed_end
        self._scheduler.rewind(sequence, start)
        return None
