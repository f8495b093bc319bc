"""Who may queue at the engine, and what is expected of those who do.

The engine's side of admission, since only here are the requests of all front ends known: a key's
own cap, the prediction of each first token (outlook.py), the refusal of those that would be late,
and when there will be room again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.engine.outlook import Ahead, House, Stream
from tailrace.engine.scheduler import GROWTH_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence as Several

    from tailrace.engine.scheduler import Scheduler
    from tailrace.engine.sequence import Sequence
    from tailrace.engine.step_time import StepTimeModel

FULL = "rate_limit_exceeded"
KEY_FULL = "key_limit_exceeded"
LATE = "first_token_late"
LEAST_RETRY_S = 1.0
MOST_RETRY_S = 600.0


@dataclass(frozen=True)
class Refusal:
    """Why somebody may not queue."""

    reason: str
    """Fit for the client."""
    retry_after_s: float
    predicted_ttft_s: float | None = None
    rule: str = FULL
    """FULL, KEY_FULL or LATE."""


class Gate:
    """Predicts and refuses; changes nothing but a sequence's own expectations.

    Args:
        scheduler: Who waits and runs, in which order.
        step_time: Predicts steps; without a fit nothing is predicted.
        max_ttft_s: A first token predicted later is refused; 0: none is.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step_time: StepTimeModel,
        *,
        max_ttft_s: float = 0.0,
    ) -> None:
        self.max_ttft_s = max_ttft_s
        self.late_refusals_total = 0
        self._scheduler = scheduler
        self._step_time = step_time

    def judge(self, sequence: Sequence, *, now_s: float, busy_s: float) -> Refusal | None:
        """Predict the first token of a sequence that was just queued; say whether it is too late.

        Args:
            sequence: In the waiting list.
            now_s: The clock's time.
            busy_s: Seconds until the step in flight is done.
        """
        blocks, waiting = self._scheduler.blocks, self._scheduler.waiting
        if not sequence.num_computed:
            found = blocks.lookup(sequence.token_ids, sequence.cache_salt)
            sequence.likely_cached = min(found, sequence.num_prompt - 1)
        own = sequence.outlook = _ahead(sequence, _answer_left(sequence))
        house = self._house(waiting[: waiting.index(sequence)], busy_s)
        if house is None:
            return None
        coming_s = house.first_token_s(own)
        predicted_s = now_s - sequence.arrival_s + coming_s
        sequence.predicted_ttft_s = predicted_s
        if not self.max_ttft_s or predicted_s <= self.max_ttft_s:
            return None
        self.late_refusals_total += 1
        least_s = self._alone(own)
        alone = "" if least_s <= self.max_ttft_s else f" ({least_s:.3g} s were it alone here)"
        return Refusal(
            f"the first token would come too late: it is predicted in {predicted_s:.3g} s{alone}, "
            f"and this server promises {self.max_ttft_s:g} s (--max-ttft); try again later",
            retry_after_s=_bounded(predicted_s - self.max_ttft_s),
            predicted_ttft_s=predicted_s,
            rule=LATE,
        )

    def place_free_s(self, *, busy_s: float, places: int = 1) -> float | None:
        """Return when so many of those that run will have ended; None: that is not predicted."""
        house = self._house([], busy_s)
        return None if house is None else house.place_free_s(places)

    def retry_after_s(self, *, busy_s: float, places: int = 1) -> float:
        """Return what to tell who found no place."""
        return _bounded(self.place_free_s(busy_s=busy_s, places=places) or 0.0)

    def key_refusal(
        self, key: str, held: Several[Sequence], compiling: int, most: int, *, busy_s: float
    ) -> Refusal | None:
        """Say whether a key has as many sequences here as it may, and when one will have ended.

        Args:
            key: Its name.
            held: The sequences that it has.
            compiling: Further ones, whose grammars are still being compiled.
            most: How many it may have.
            busy_s: As above.
        """
        if len(held) + compiling < most:
            return None
        free_s = self._key_free_s(held, busy_s)
        return Refusal(
            f"the key {key!r} has {len(held) + compiling} of {most} sequences running or waiting; "
            "try again later",
            retry_after_s=_bounded(free_s),
            rule=KEY_FULL,
        )

    def _key_free_s(self, held: Several[Sequence], busy_s: float) -> float:
        """Return when the first of a key's own will have ended."""
        lefts = [self._left(s) for s in held if s.num_output]
        costs = self._step_time.costs
        if costs is None:
            return 0.0
        if not lefts:  # none has begun its answer: at least that of somebody else
            return self.place_free_s(busy_s=busy_s) or 0.0
        running = self._scheduler.running
        context = sum(s.num_computed for s in running)
        step_s = costs.predict(0, 0, max(1, len(running)), context)
        return busy_s + min(lefts) * step_s

    def _house(self, before: Several[Sequence], busy_s: float) -> House | None:
        """Describe who goes before somebody: those that run, and some that wait."""
        costs, scheduler = self._step_time.costs, self._scheduler
        if costs is None:
            return None
        streams, prompts = [], []
        for s in scheduler.running:
            if s.uncomputed > 1:
                left = max(1, s.expected_output - s.num_output)
                prompts.append(Ahead(s.num_computed, s.uncomputed, left, waits=False))
            else:
                streams.append(Stream(s.length, self._left(s)))
        pace = scheduler.pace
        return House(
            costs=costs,
            streams=streams,
            prompts=prompts + [_outlook(s) for s in before],
            places_free=scheduler.places_free,
            kv_free=scheduler.blocks.available_units * scheduler.blocks.unit_tokens,
            growth=GROWTH_TOKENS,
            token_budget=scheduler.token_budget,
            target_s=0.0 if pace is None else pace.aim_s,
            least_tokens=1 if pace is None else pace.least_tokens,
            busy_s=busy_s,
        )

    def _alone(self, own: Ahead) -> float:
        costs = self._step_time.costs
        if costs is None:
            return 0.0
        budget = self._scheduler.token_budget
        kv_free = own.start + own.left
        return House(
            costs=costs, places_free=1, kv_free=kv_free, token_budget=budget
        ).first_token_s(own)

    def _left(self, sequence: Sequence) -> int:
        """Return how many tokens a running sequence is expected to make yet."""
        so_far = sequence.num_output + sequence.pending_tokens
        if so_far >= sequence.max_output:
            return 1
        expected = max(sequence.expected_output, so_far)
        if expected == so_far:  # it has outgrown what was expected
            expected = self._scheduler.answers.expect(so_far, sequence.max_output)
        return max(1, expected - so_far)


def _ahead(sequence: Sequence, answer: int) -> Ahead:
    start = max(sequence.num_computed, sequence.likely_cached)
    start = min(start, sequence.length - 1)
    return Ahead(start, sequence.length - start, max(1, answer))


def _outlook(sequence: Sequence) -> Ahead:
    """Describe one that waits; queues are long, so this is looked up where it can be."""
    if sequence.outlook is None or sequence.preemptions:
        return _ahead(sequence, _answer_left(sequence))
    return sequence.outlook


def _answer_left(sequence: Sequence) -> int:
    """Return how much of its answer one that waits is expected to make yet."""
    return sequence.expected_cost - sequence.num_prompt - sequence.num_output


def _bounded(seconds: float) -> float:
    return min(max(seconds, LEAST_RETRY_S), MOST_RETRY_S)
