"""When a first token is due, and when a place will be free: the steps to come, walked in bulk.

    house now --> prompts ahead, in order, then one's own --> the end of the step that samples

The walk does not go step by step. Steps that carry the same are taken as one stretch, and a stretch
ends where a prompt is done (it becomes a stream) or a stream ends (its place and its KV are free).
So it takes as many stretches as there are sequences, whatever their lengths:

    | prompt A, 3.2 steps | B, 0.5 | 0.3 to the step's end | decodes until a place is free | C ...

Prompts share steps, so a stretch may end inside one; where nobody fills it up, that one is closed.
Of a long queue only the head is walked: what follows goes on at the pace of the head's later half.
What it does not foresee: who comes later and goes first, answers of another length than the latest
ones had, preemptions, and steps cut for lack of memory.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.types import StepCosts

_TOUCH = 1e-9
"""Of a step: less is nothing."""
_HEAD = 128
"""Prompts that are walked."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A prompt that is to be computed."""

    start: int
    """Tokens that need no computing: done, or cached."""
    left: int
    """Tokens that do."""
    answer: int
    """Tokens expected to follow."""
    waits: bool = True
    """Whether it needs a place first."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A sequence that decodes."""

    context: int
    left: int
    """Tokens expected to come."""


@dataclass(frozen=True, kw_only=True)
class House:
    """Who is there, and what steps cost.

    Attributes:
        costs: The model of step time.
        streams: Who decodes.
        prompts: Who is computed before the one that asks, in order.
        places_free: Of the batch.
        kv_free: Tokens of KV that are free.
        growth: Tokens of KV that are left to each running sequence when somebody is admitted.
        token_budget: Most rows of a step.
        target_s: Most seconds of a step with decodes; 0: no such target.
        least_tokens: Prompt tokens that such a step carries all the same.
        busy_s: Until the step in flight is done.
    """

    costs: StepCosts
    streams: list[Stream] = field(default_factory=list)
    prompts: list[Ahead] = field(default_factory=list)
    places_free: int
    kv_free: int
    growth: int = 0
    token_budget: int
    target_s: float = 0.0
    least_tokens: int = 1
    busy_s: float = 0.0

    def first_token_s(self, own: Ahead) -> float:
        """Return the seconds until the first token of who comes after all these."""
        walk = _Walk(self)
        middle_s = 0.0
        for number, prompt in enumerate(self.prompts[:_HEAD]):
            if number == _HEAD // 2:
                middle_s = walk.seconds
            walk.compute(prompt)
        walk.skip(self.prompts[_HEAD:], self.prompts[_HEAD // 2 : _HEAD], walk.seconds - middle_s)
        walk.compute(own)
        walk.close_step()
        return walk.seconds

    def place_free_s(self, places: int = 1) -> float:
        """Return the seconds until so many of those that run have ended, or all of them."""
        walk = _Walk(self)
        for prompt in self.prompts:
            if not prompt.waits:
                walk.compute(prompt)
        walk.close_step()
        walk.end(places - walk.ended)
        return walk.seconds


class _Walk:
    """The house as time goes on."""

    def __init__(self, house: House) -> None:
        self.seconds = house.busy_s
        self.ended = 0
        self._house, self._costs = house, house.costs
        self._steps = 0.0
        self._filled = 0.0
        """How much of the present step prompts have taken."""
        self._last_room = 0.0
        self._ends = [(float(max(1, s.left)), s.context + s.left) for s in house.streams]
        """Steps at which streams end, and the KV that they hold by then."""
        heapq.heapify(self._ends)
        self._decodes = len(house.streams)
        self._context = float(sum(stream.context for stream in house.streams))
        self._places = house.places_free
        self._kv = float(house.kv_free)

    def compute(self, prompt: Ahead) -> None:
        """Go on until a prompt is computed; it decodes from then on."""
        if prompt.waits:
            self._admit(prompt)
        self._kv -= prompt.left
        left, depth = float(prompt.left), prompt.start + (prompt.left + 1) / 2
        while left > _TOUCH:
            room = self._last_room = self._room(depth)
            steps = left / room
            if self._ends:
                steps = min(steps, max(0.0, self._ends[0][0] - self._steps))
            self._go(steps, room, room * depth)
            self._filled = (self._filled + steps) % 1.0
            left -= steps * room
            self._note_ends()
        length = prompt.start + prompt.left
        answer = max(1, prompt.answer)
        heapq.heappush(self._ends, (self._steps + answer, length + answer))
        self._decodes += 1
        self._context += length

    def skip(self, rest: list[Ahead], measured: list[Ahead], took_s: float) -> None:
        """Go past prompts at the pace at which others, in such a house, took so long.

        Work is what prompts and answers take of steps: the former of their tokens, the latter of
        their number, shared by all who decode.
        """
        if not rest:
            return
        room = self._room(0.0)
        token_s = self._step_s(room, 0.0, self._context) / room
        turn_s = self._step_s(0.0, 0.0, self._context) / max(1, self._decodes)

        def work(prompts: list[Ahead]) -> float:
            return sum(token_s * p.left + turn_s * p.answer for p in prompts)

        of_measured = work(measured)
        self.seconds += took_s * work(rest) / of_measured if of_measured else 0.0

    def close_step(self) -> None:
        """Let a step end that prompts do not fill."""
        filled, costs = self._filled, self._costs
        if filled > _TOUCH:
            self._go(1.0 - filled, 0.0, 0.0)
            # So much of a full step's arithmetic was counted; a smaller step hides more of it.
            counted = filled * costs.arithmetic_s(self._last_room, self._decodes)
            alone = (1.0 - filled) * costs.arithmetic_s(0.0, self._decodes)
            self.seconds += costs.arithmetic_s(filled * self._last_room, self._decodes)
            self.seconds -= counted + alone
            # That it has prompts at all is paid whole.
            self.seconds += (1.0 - filled) * costs.prompts_s
        self._filled = 0.0

    def end(self, places: int) -> None:
        """Go on until so many streams more have ended."""
        wanted = self.ended + places
        while self._ends and self.ended < wanted:
            self._go_to_end()

    def _admit(self, prompt: Ahead) -> None:
        if self._has_room(prompt):
            self._places -= 1
            return
        self.close_step()
        while self._ends and not self._has_room(prompt):
            self._go_to_end()
        self._places -= 1

    def _has_room(self, prompt: Ahead) -> bool:
        kept = self._house.growth * self._decodes
        return self._places > 0 and self._kv >= prompt.left + kept

    def _go_to_end(self) -> None:
        """Go on to the next end of a stream, with decodes alone."""
        self._go(max(0.0, self._ends[0][0] - self._steps), 0.0, 0.0)
        self._steps = max(self._steps, self._ends[0][0])
        self._note_ends()

    def _go(self, steps: float, tokens: float, pairs: float) -> None:
        grown = steps * self._decodes
        self.seconds += steps * self._step_s(tokens, pairs, self._context + grown / 2)
        self._steps += steps
        self._context += grown
        self._kv -= grown

    def _step_s(self, tokens: float, pairs: float, context: float) -> float:
        """As `StepCosts.predict`, for parts of tokens, and for steps that have but begun."""
        return self._costs.seconds(tokens, pairs, self._decodes, context)

    def _note_ends(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps + _TOUCH:
            _, held = heapq.heappop(self._ends)
            self.ended += 1
            self._decodes -= 1
            self._context = max(0.0, self._context - held)
            self._places += 1
            self._kv += held

    def _room(self, depth: float) -> float:
        """Return how many prompt tokens a step carries now, each attending to `depth` positions."""
        house, costs = self._house, self._costs
        most = max(1.0, house.token_budget - self._decodes)
        if not house.target_s or not self._decodes:
            return most
        spare_s = house.target_s - self._step_s(0.0, 0.0, self._context) - costs.prompts_s
        fitting = costs.tokens_within(max(0.0, spare_s), depth, self._decodes)
        return min(most, max(float(house.least_tokens), fitting))
