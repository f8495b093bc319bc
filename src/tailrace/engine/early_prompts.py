"""Prompts whose bodies are still arriving: computed with what no complete request needs.

Rules:
1. Nothing here overtakes a complete request: chunks come last, in steps in which nobody waits, and
   take at most a quarter of a step. Who needs units or an admission gets them from here first.
2. All of them together hold at most a quarter of the pool, and none ever borrows.
3. Their KV is private: no prefix of it can be found before the request has come whole.
4. The last known token is not computed, for it may turn out to be the prompt's last, which samples.
5. Nobody here samples, so nobody has a place of the batch: runners know them by slots beyond those.

    grow            complete                      admit
    ---> ARRIVING -------------> WAITING, kept ----------> RUNNING    the request's ids begin so
             |                      | give_way: recomputed
             | drop, give_way       '-> WAITING
             '-> FINISHED                                             it comes as any other
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.engine.sequence import NO_SLOT, Sequence, Status
from tailrace.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tailrace.engine.block_manager import BlockManager, Table

EARLY_SLOTS = 8
"""Most prompts that are computed early at once; each costs a runner a row of its block tables."""
POOL_SHARE = 4
"""One part in so many of the pool may be held by, and leased to, requests that may never come."""
STEP_SHARE = 4
"""One part in so many of a step: a complete request that comes now waits for no more than that."""


class EarlyPrompts:
    """Who is computed early; the scheduler asks and tells.

    Args:
        blocks: The pool.
        first_slot: The first slot that is no place of the batch.
        step_tokens: Most tokens of a step for all of them.
    """

    def __init__(self, blocks: BlockManager, *, first_slot: int, step_tokens: int) -> None:
        self._blocks = blocks
        self.step_tokens = step_tokens
        """Most tokens of a step for all of them."""
        self._free_slots = list(range(first_slot, first_slot + EARLY_SLOTS))
        self._arriving: dict[str, Sequence] = {}
        self._kept: dict[str, Sequence] = {}
        """Came whole and wait for their place, with what was computed."""
        self.dropped_tokens_total = 0
        """Computed early and given up."""
        self.used_tokens_total = 0
        """Computed early and used."""

    @property
    def holders(self) -> Iterable[Sequence]:
        """Everybody here; some have no units."""
        yield from self._arriving.values()
        yield from self._kept.values()

    @property
    def units(self) -> int:
        """Units held by, and leased to, everybody here."""
        tables = [sequence.kv for sequence in self.holders if sequence.kv is not None]
        return sum(len(table.units) + table.lease.claim for table in tables)

    def has_work(self, budget: int) -> bool:
        """Whether a step of so many tokens, with nothing else in it, would compute something."""
        tokens = min(budget, self.step_tokens)
        return any(self._can_go_on(sequence, tokens) for sequence in self._arriving.values())

    def get(self, request_id: str) -> Sequence | None:
        """Return who is arriving under an id."""
        return self._arriving.get(request_id)

    def can_add(self) -> bool:
        """Whether there is a slot for one more."""
        return bool(self._free_slots)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in.

        Raises:
            EngineError: There is no slot.
        """
        if not self._free_slots:
            raise EngineError("there is no slot for one more early prompt")
        sequence.slot = self._free_slots.pop()
        self._arriving[sequence.request_id] = sequence

    def extend(self, sequence: Sequence, token_ids: list[int]) -> None:
        """More of a prompt has come."""
        table = sequence.kv
        if table is not None and not sequence.steps_in_flight:
            unit = self._blocks.unit_tokens
            was_found = (len(sequence.token_ids) - 1) // unit * unit
            if sequence.num_computed == table.cached_tokens == was_found:
                # All of it was in the prefix cache: so may be what follows.
                self._close(sequence)
        sequence.token_ids.extend(token_ids)
        sequence.num_prompt = len(sequence.token_ids)

    def complete(self, sequence: Sequence) -> None:
        """A request has come whole, and begins with what is here: keep it for its admission."""
        del self._arriving[sequence.request_id]
        self._free_slots.append(sequence.slot)
        sequence.slot = NO_SLOT
        if sequence.kv is not None:
            self._kept[sequence.request_id] = sequence
            if not sequence.steps_in_flight:
                # Others may begin like it, such as further choices of the same request.
                self._blocks.commit(sequence.kv, sequence.token_ids, sequence.num_computed)

    def admit(self, sequence: Sequence) -> Table | None:
        """Let a kept sequence go, with its table; None: nothing of it is here."""
        if self._kept.pop(sequence.request_id, None) is None or sequence.kv is None:
            return None
        self.used_tokens_total += sequence.num_computed - sequence.kv.cached_tokens
        return sequence.kv

    def drop(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Give up what is here of a sequence; one that is still arriving is finished.

        Args:
            sequence: Arriving or kept.
            forget: Whether its KV is not to be trusted.
        """
        if self._arriving.pop(sequence.request_id, None) is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = NO_SLOT
            sequence.move("finish")
        self._kept.pop(sequence.request_id, None)
        if sequence.kv is not None:
            self.dropped_tokens_total += sequence.num_computed - sequence.kv.cached_tokens
            self._close(sequence, forget=forget)

    def give_way(self, *, to: Sequence, kept_too: bool) -> bool:
        """Drop the youngest that holds units; return whether there was one.

        Args:
            to: Who needs units: keeps its own.
            kept_too: Whether requests that came whole lose what was computed early.
        """
        for group in (self._arriving, self._kept) if kept_too else (self._arriving,):
            for sequence in reversed(group.values()):
                if sequence.kv is not None and sequence is not to:
                    self.drop(sequence)
                    return True
        return False

    def ahead(self) -> Iterator[tuple[int, int]]:
        """Yield what may be computed next, in order: tokens computed before, and how many follow.

        As far as room and cached prefixes do not change it.
        """
        unit = self._blocks.unit_tokens
        for sequence in self._arriving.values():
            end = (len(sequence.token_ids) - 1) // unit * unit
            if end > sequence.num_computed:
                yield sequence.num_computed, end - sequence.num_computed

    def grow(self, left: int, fitting: Callable[[int, int], int]) -> Iterator[tuple[Sequence, int]]:
        """Yield who is computed in this step, with room made, and up to where.

        Args:
            left: Tokens that the step has left.
            fitting: Of (tokens computed before, tokens wanted): for how many there is time.
        """
        left = min(left, self.step_tokens)
        for sequence in list(self._arriving.values()):
            table = sequence.kv or self._open(sequence)
            in_time = fitting(sequence.num_computed, left) if left > 0 else 0
            end = self._end(sequence, table, in_time) if table is not None else 0
            if table is not None and end:
                self._blocks.grow(table, end)
                left -= end - sequence.num_computed
                yield sequence, end

    def _can_go_on(self, sequence: Sequence, tokens: int) -> bool:
        if sequence.kv is None:
            return self._room_to_open(sequence) > 0
        return self._end(sequence, sequence.kv, tokens) > 0

    def _room(self, claim: int = 0) -> int:
        """Units that one of them could still take without borrowing: see rule 2."""
        blocks = self._blocks
        share = blocks.num_units // POOL_SHARE - blocks.reserved_units - self.units
        unclaimed = max(0, blocks.unclaimed_units)
        return min(blocks.available_units, claim + max(0, min(unclaimed, share)))

    def _room_to_open(self, sequence: Sequence) -> int:
        return self._room(self._blocks.reserved_for(sequence.request_id))

    def _end(self, sequence: Sequence, table: Table, left: int) -> int:
        """Where its next chunk ends: after a full unit; 0: there is nothing to do, or no room."""
        unit = self._blocks.unit_tokens
        end = min(len(sequence.token_ids) - 1, sequence.num_computed + left)
        end = min(end, table.capacity + self._room(table.lease.claim) * unit) // unit * unit
        return end if end > sequence.num_computed else 0

    def _open(self, sequence: Sequence) -> Table | None:
        """Start its table with what the prefix cache has of it; one that is too long is dropped."""
        blocks, ids = self._blocks, sequence.token_ids
        room = self._room_to_open(sequence)
        if room <= 0:
            return None
        if blocks.lookup(ids, sequence.cache_salt) > room * blocks.unit_tokens:
            blocks.release(sequence.request_id)
            self.drop(sequence)
            return None
        table = blocks.open(sequence.request_id, ids, sequence.cache_salt, len(ids))
        blocks.limit_lease(table, max(0, room - len(table.units)))
        sequence.kv = table
        sequence.num_computed = sequence.cached_tokens = table.cached_tokens
        return table

    def _close(self, sequence: Sequence, *, forget: bool = False) -> None:
        if sequence.kv is None:
            raise EngineError(f"early prompt {sequence.request_id} has no table")
        self._blocks.close(sequence.kv, forget=forget)
        sequence.kv = None
        sequence.num_computed = 0

    def check_integrity(self) -> None:
        """Verify the rules.

        Raises:
            EngineError: One is broken.
        """
        for sequence in self._arriving.values():
            if sequence.status is not Status.ARRIVING or sequence.slot == NO_SLOT:
                raise EngineError(f"{sequence.request_id} is not arriving")
        for sequence in self._kept.values():
            if sequence.status is not Status.WAITING or sequence.kv is None:
                raise EngineError(f"{sequence.request_id} is not kept")
        if len(self._free_slots) + len(self._arriving) != EARLY_SLOTS:
            raise EngineError("the slots of early prompts are miscounted")
