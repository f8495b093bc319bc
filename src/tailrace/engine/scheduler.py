"""State in, one mixed batch out. Pure: no device, no clock, no I/O.

Rules, in this order:
1. One token budget a step, no phases: decodes and prefill chunks share a batch.
2. Decodes come first, one token each, so that no prompt can starve a running stream.
3. What the budget leaves goes to prefills in order (priority, then age): first those under way,
   then new ones. Several may be mid-prefill at once.
4. A waiting sequence is admitted only where a slot is free and its whole prompt fits what is free
   now, so that admission itself never causes a preemption.
5. Out of blocks, the youngest running sequence is preempted (recomputed later); the oldest is kept.
   Nobody is admitted in a step that preempted somebody.
6. A preempted sequence whose last token is still in flight waits until that token is known.

Steps overlap (see sequence.py): `schedule` may be called for step N+1 before `commit` of step N.
Blocks that a preempted or finished sequence gives back may be handed out at once although a step
in flight still writes to them: the device runs steps in order, so the new owner writes last.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tailrace.engine.sequence import NO_SLOT, Sequence, Status
from tailrace.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace.engine.block_manager import BlockManager


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of one sequence, to be computed in one step."""

    sequence: Sequence
    slot: int
    start: int
    end: int
    samples: bool
    """Whether the last position yields a new token."""
    from_device: bool
    """Whether the (single) input token is the pending one, known to the device only."""

    @property
    def num_tokens(self) -> int:
        """Positions to compute."""
        return self.end - self.start


@dataclass
class Step:
    """What the runner does next; `admitted` and `released` come before the chunks."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    preempted: int = 0
    num_tokens: int = 0
    """Positions to compute in all."""
    padding: int = 0
    """Rows that the device computes beside the decodes, for its own convenience."""

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self.chunks.append(chunk)
        self.num_tokens += chunk.num_tokens

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence's chunk out again, if it has one."""
        dropped = [chunk for chunk in self.chunks if chunk.sequence is sequence]
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        self.num_tokens -= sum(chunk.num_tokens for chunk in dropped)


class Scheduler:
    """Decides who runs; owns the waiting and running lists and the slots.

    Args:
        blocks: The KV blocks, asked and told by nobody else.
        max_batch_size: Slots.
        token_budget: Most positions of a step; at least `max_batch_size`.
        padded_decodes: Rows that the device computes for so many decodes. What it adds counts
            against the budget of prompts, so that full steps are of sizes that it has captured.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_size: int,
        token_budget: int,
        padded_decodes: Callable[[int], int] = lambda decodes: decodes,
    ) -> None:
        if token_budget < max_batch_size:
            raise EngineError(f"token budget {token_budget} < max batch size {max_batch_size}")
        self.blocks = blocks
        self.token_budget = token_budget
        self._padded_decodes = padded_decodes
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions_total = 0
        self._free_slots = list(range(max_batch_size - 1, -1, -1))
        self._released: list[int] = []

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a waiting sequence at its place in the order."""
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def finish(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Take a sequence out, wherever it is, and give back what it holds.

        Args:
            sequence: Waiting or running.
            forget: Whether its KV is not to be trusted, so that no prefix of it is reused.
        """
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self._give_back(sequence, forget=forget)
        sequence.move("finish")

    def schedule(self) -> Step:
        """Choose the next step's chunks; empty chunks mean that there is nothing to do now."""
        step = Step()
        for decodes in (True, False):
            # A copy: preemption shortens the list from its young end.
            for sequence in list(self.running):
                if sequence.status is Status.RUNNING and (sequence.uncomputed == 1) is decodes:
                    self._extend(step, sequence)
            if decodes:
                step.padding = self._padded_decodes(step.num_tokens) - step.num_tokens
        if not step.preempted:
            self._admit(step)
        if step.chunks:  # an empty step is not run, so it must carry nothing away
            step.released, self._released = self._released, []
        self._note_issued(step)
        return step

    def commit(self, chunk: Chunk) -> None:
        """Note that a chunk has run: its full blocks become findable in the prefix cache."""
        self.retire(chunk)
        sequence = chunk.sequence
        # Preempted or finished meanwhile: its blocks are gone. (Running again is impossible: a
        # preempted sequence is not admitted while it has steps in flight.)
        if sequence.status is Status.RUNNING:
            self.blocks.commit(sequence.request_id, sequence.token_ids, chunk.end)

    @staticmethod
    def retire(chunk: Chunk) -> None:
        """Note that a chunk is no longer in flight, whether or not its KV can be used."""
        chunk.sequence.steps_in_flight -= 1
        if chunk.samples:
            chunk.sequence.pending_tokens -= 1

    def _extend(self, step: Step, sequence: Sequence) -> None:
        """Give a running sequence its next chunk, at the cost of younger ones if need be."""
        if not sequence.wants_work or self._left(step) <= 0:
            return
        end = self._chunk_end(step, sequence)
        while not self.blocks.can_grow(sequence.request_id, end):
            victim = self.running[-1]
            self._preempt(step, victim)
            if victim is sequence:
                return
        self.blocks.grow(sequence.request_id, end)
        step.add(_chunk(sequence, end))

    def _chunk_end(self, step: Step, sequence: Sequence) -> int:
        """Where a chunk ends that takes what the step's budget has left."""
        return sequence.num_computed + min(sequence.uncomputed, self._left(step))

    def _left(self, step: Step) -> int:
        return self.token_budget - step.num_tokens - step.padding

    def _admit(self, step: Step) -> None:
        """Start waiting sequences, in order, while slots, blocks and budget last."""
        while self.waiting and self._free_slots and self._left(step) > 0:
            sequence = self.waiting[0]
            if sequence.steps_in_flight or not self._fits(sequence):
                return  # nobody overtakes: smaller ones cannot starve the first in order
            self.waiting.pop(0)
            sequence.num_computed = self.blocks.open(
                sequence.request_id, sequence.token_ids, sequence.cache_salt
            )
            if not sequence.preemptions:
                sequence.cached_tokens = sequence.num_computed
            sequence.move("admit")
            sequence.slot = self._free_slots.pop()
            bisect.insort(self.running, sequence, key=lambda s: s.order)
            step.admitted.append(sequence)
            end = self._chunk_end(step, sequence)
            self.blocks.grow(sequence.request_id, end)
            step.add(_chunk(sequence, end))

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the whole prompt, and a first token of every runner, fits the free blocks."""
        size = self.blocks.block_size
        needed = -(-(sequence.length + 1) // size)
        # A prefix-cache hit is not subtracted: idle cached blocks count as free and would be
        # counted twice. Safe, if pessimistic where a running sequence holds the hit.
        reserve = len(self.running)
        free = self.blocks.free_blocks
        return needed + reserve <= free or (not self.running and needed <= free)

    def _preempt(self, step: Step, victim: Sequence) -> None:
        """Send a running sequence back to wait, to be recomputed."""
        step.drop(victim)
        self._give_back(victim)
        victim.move("preempt")
        victim.num_computed = 0
        victim.preemptions += 1
        self.preemptions_total += 1
        step.preempted += 1
        self.add(victim)

    def _give_back(self, sequence: Sequence, *, forget: bool = False) -> None:
        self.blocks.close(sequence.request_id, forget=forget)
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._released.append(sequence.slot)
        sequence.slot = NO_SLOT

    @staticmethod
    def _note_issued(step: Step) -> None:
        """Account for the step as if it had run: the next one builds on it."""
        for chunk in step.chunks:
            chunk.sequence.num_computed = chunk.end
            chunk.sequence.steps_in_flight += 1
            if chunk.samples:
                chunk.sequence.pending_tokens += 1


def _chunk(sequence: Sequence, end: int) -> Chunk:
    return Chunk(
        sequence=sequence,
        slot=sequence.slot,
        start=sequence.num_computed,
        end=end,
        samples=end == sequence.length,
        from_device=sequence.num_computed >= len(sequence.token_ids),
    )
