"""When what happened to a request, kept for those that run: `phases` applied to steps' chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.engine.phases import StepSums
from tailrace.engine.sequence import Status
from tailrace.types import RequestTimes

if TYPE_CHECKING:
    from tailrace.engine.scheduler import Chunk, Step
    from tailrace.engine.sequence import Sequence


class TimeKeeper:
    """Keeps every sequence's time by phase, and when the last step was done."""

    def __init__(self) -> None:
        self.last_done_s = 0.0
        self._steps = StepSums()

    def begin_s(self, issued_s: float) -> float:
        """Return when a step starts: as it is issued or as the one before it ends, the later."""
        return max(issued_s, self.last_done_s)

    def add_step(self, step: Step, started_s: float, now_s: float) -> None:
        """Account for a step that is done."""
        self._steps.add(started_s, now_s, step.num_tokens, step.num_tokens - step.decodes)

    def settle(self, chunk: Chunk, now_s: float) -> None:
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
            now_s,
            self._steps,
            own_prompt_tokens=chunk.num_tokens if chunk.num_tokens > 1 else 0,
            has_token=sequence.num_output > 0,
        )
        sequence.spent.is_behind |= sequence.status is Status.WAITING  # sent back meanwhile

    def note_victims(self, step: Step) -> None:
        """Have what the preempted did so far end with the last step, where none of theirs runs."""
        for sequence in step.victims:
            if not sequence.steps_in_flight:
                spent, has_token = sequence.spent, sequence.num_output > 0
                spent.catch_up(self.last_done_s, self._steps, has_token=has_token)
                spent.is_behind = True

    def times(self, sequence: Sequence, now_s: float) -> RequestTimes:
        """Return all that is known of a sequence's time, up to now."""
        spent = sequence.spent
        spent.catch_up(now_s, self._steps, has_token=sequence.num_output > 0)
        return RequestTimes(
            arrival_s=sequence.arrival_s,
            scheduled_s=sequence.scheduled_s,
            first_token_s=sequence.first_token_s,
            finished_s=now_s,
            preemptions=sequence.preemptions,
            cached_tokens=sequence.cached_tokens,
            queue_s=spent.queue_s,
            prefill_s=spent.prefill_s,
            prefill_wait_s=spent.prefill_wait_s,
            decode_s=spent.decode_s,
            decode_wait_s=spent.decode_wait_s,
            preempted_s=spent.preempted_s,
        )
