"""Owns the KV units: who holds which, what can be reused, what goes first when space runs out.

A unit is the piece that the kernels address (8 tokens by default); a block is an aligned run of 1,
2 or 4 units. Tables list units, so one kernel serves every size.

Rules:
1. A unit is free, held by one or more tables, set aside ahead for one table, or idle in the prefix
   cache; never two of these.
2. Long sequences take runs of 4, short ones and whoever borrows take single units. What a run has
   beyond the need is set aside ahead: the next units of its table, unless they are lent first.
3. Units are taken from the free ones, then from the cached ones that have been idle longest, then
   from those set aside ahead of others: unwritten, so nothing is lost but a run's length.
4. Only full units whose tokens are known and computed enter the prefix cache; a hit never covers a
   whole prompt; a second unit with the same text stays unknown. A partial unit is never shared: a
   copy would save computing 7 tokens at most.
5. A sequence gives its units back tail first, so a shared prefix outlives the tails grown from it.
6. Entries of a table never change while it lives: lending moves promises (leases.py) and unwritten
   units, never a written one.
7. A sequence that is swapped out has places on the host and no table. What its next table does not
   find in the prefix cache is copied back from there.

    state      leaves by        to
    free       grow             held, or ahead (the rest of its run)
    ahead      grow             held by its own table
    ahead      another's grow   held by that one: lent, nothing else was available
    ahead      close            free
    held       open (a hit)     held by one more table; only a known unit can be hit
    held       close            held by one fewer; by none: idle if known, else free
    idle       open (a hit)     held
    idle       grow             held, by another text: evicted; or free, to make up a run
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tailrace.engine.host_units import HostUnits, KvCopy
from tailrace.engine.leases import Lease, Leases
from tailrace.engine.prefix_cache import Parent, PrefixCache
from tailrace.engine.unit_pool import GROUP, NONE, UnitPool
from tailrace.errors import EngineError, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NEVER = sys.maxsize
# Sequences expected to reach so many tokens take runs of 2 and of 4 units.
_PAIR_TOKENS, _QUAD_TOKENS = 128, 512
# With so many free units beside a full cache nearly every run of 4 is found (99 %); with 16, 84 %.
_MOST_LOOSE_UNITS = 32
# Log2 of the longest run that may start at a table's index, by the index modulo 4.
_ALIGNED = (2, 0, 1, 0)


@dataclass(eq=False, slots=True)
class Table:
    """One sequence's units. The owner reads it; only the block manager writes."""

    seq_id: str
    lease: Lease
    units: list[int] = field(default_factory=list)
    capacity: int = 0
    """Tokens that `units` hold."""
    cached_tokens: int = 0
    """Tokens whose KV was found when the table was opened."""
    shared: int = 0
    """Leading units that another table held then."""
    commit_at: int = _NEVER
    """`commit` has nothing to do before so many tokens are computed."""
    known: int = 0
    """Leading units whose text went through the prefix cache."""
    parent: Parent = ""
    """The entry of the last of those."""
    order: int = 0
    """Log2 of the runs to take."""
    ahead: list[int] = field(default_factory=list)
    """The rest of the last run, the next unit last."""
    quads: int = 0
    """Aligned runs of 4 in `units`."""


class BlockManager:
    """Hands out KV units, remembers prefixes and keeps promises.

    Args:
        num_units: Units of the pool; ids are 0 to `num_units` - 1.
        unit_tokens: Tokens of a unit: the kernels' block size.
        prefix_cache: Whether full units can be found by, and shared with, later sequences.
        mixed_sizes: Whether blocks are runs of 1, 2 or 4 units; if not, always of 1.
        host_places: Units that the host can hold for preempted sequences.

    Raises:
        EngineError: A pool without units, or units without room.
    """

    def __init__(
        self,
        num_units: int,
        unit_tokens: int,
        *,
        prefix_cache: bool = True,
        mixed_sizes: bool = True,
        host_places: int = 0,
        computed_by: str = "same",
    ) -> None:
        if unit_tokens < 1:
            raise EngineError(f"units of {unit_tokens} tokens: must be at least 1")
        self.num_units = num_units
        self.unit_tokens = unit_tokens
        self.mixed_sizes = mixed_sizes
        self.hit_tokens_total = 0
        self.query_tokens_total = 0
        self.evictions_total = 0
        self._runs = [0, 0, 0]
        self.closings = 0
        """Grows whenever something was given back."""
        self._pool = UnitPool(num_units)
        self._cache = PrefixCache(num_units, unit_tokens, computed_by) if prefix_cache else None
        self._holders = array("i", bytes(4 * num_units))
        self._tables: dict[str, Table] = {}
        self._leases = Leases()
        self._host = HostUnits(host_places)
        self.swapped_out_total = 0
        self.swapped_in_total = 0
        self._reservations: dict[str, Lease] = {}
        self._spare: dict[str, Table] = {}
        self._loose_units = min(_MOST_LOOSE_UNITS, num_units // 64)
        self._ahead_units = 0
        self._entries = 0
        self._quads = 0
        self.available_units = num_units
        """Units that could be handed out now: free, idle in the cache, or set aside ahead."""

    # What there is

    @property
    def held_units(self) -> int:
        """Units that tables hold, each counted once."""
        return self.num_units - self.available_units

    @property
    def duplicate_units(self) -> int:
        """Entries of tables beyond the first for each unit: what sharing saves."""
        return self._entries - self.held_units

    @property
    def unclaimed_units(self) -> int:
        """Units that are promised to nobody."""
        return self._leases.surplus(self.available_units)

    @property
    def leased_units(self) -> int:
        """Units promised ahead of need."""
        return self._leases.claims

    @property
    def reserved_units(self) -> int:
        """Those of them promised to requests that have no table yet."""
        return sum(lease.claim for lease in self._reservations.values())

    @property
    def lent_units(self) -> int:
        """Units held by borrowers and promised to others."""
        return self._leases.lent

    @property
    def lent_units_total(self) -> int:
        """Units ever lent."""
        return self._leases.lent_total

    @property
    def runs_total(self) -> tuple[int, int, int]:
        """Runs of 1, 2 and 4 units ever taken."""
        single, pair, quad = self._runs
        return single, pair, quad

    @property
    def wide_share(self) -> float:
        """Share of the tables' entries that are aligned runs of 4, which could be loaded whole."""
        return GROUP * self._quads / self._entries if self._entries else 0.0

    @property
    def host_places(self) -> int:
        """Units that the host can hold."""
        return self._host.num_places

    @property
    def swapped_units(self) -> int:
        """Units that the host holds."""
        return self._host.used

    def units_for(self, num_tokens: int) -> int:
        """Units that so many tokens fill."""
        return -(-num_tokens // self.unit_tokens)

    def borrowers(self) -> Iterable[str]:
        """Sequences that hold lent units."""
        return self._leases.borrowers()

    def tables(self) -> Iterable[Table]:
        """Every table that is open."""
        return self._tables.values()

    # A sequence's life

    def lookup(self, token_ids: Sequence[int], salt: str | None) -> int:
        """Return how many tokens `open` would find cached; takes nothing."""
        if self._cache is None or salt is None:
            return 0
        return len(self._cache.find(token_ids, salt)[0]) * self.unit_tokens

    def demand(self, token_ids: Sequence[int], salt: str | None, num_tokens: int) -> int:
        """Units that a new table for so many tokens would take of those available.

        Args:
            token_ids: The prompt.
            salt: Whose prefixes it may share; None: nobody's.
            num_tokens: At least the prompt's.
        """
        needed = self.units_for(num_tokens)
        if self._cache is None or salt is None:
            return needed
        hits, _ = self._cache.find(token_ids, salt)
        return needed - sum(not self._cache.is_idle(unit) for unit in hits)

    def open(
        self, seq_id: str, token_ids: Sequence[int], salt: str | None, expected_tokens: int = 0
    ) -> Table:
        """Start a sequence's table with its cached prefix, and lease what it is expected to need.

        A reservation of the same id is taken over.

        Args:
            seq_id: Whose table.
            token_ids: The prompt, or all tokens known.
            salt: Only prefixes of the same salt are found; with None the sequence finds nothing
                and leaves nothing to find.
            expected_tokens: How long the sequence is expected to become; at least its prompt.

        Raises:
            EngineError: The sequence has a table already.
        """
        if seq_id in self._tables:
            raise EngineError(f"sequence {seq_id} holds units already")
        # Not given up and asked for again: others that are short would come first.
        reserved = self._reservations.pop(seq_id, None)
        table = Table(seq_id, reserved or self._leases.open(seq_id), parent=salt or "")
        if self._cache is not None and salt is not None:
            self._take_prefix(table, token_ids, salt)
            table.commit_at = (table.known + 1) * self.unit_tokens
        self._tables[seq_id] = table
        self.expect(table, max(expected_tokens, len(token_ids)))
        return table

    def expect(self, table: Table, num_tokens: int) -> None:
        """Lease what a sequence of so many tokens will need beyond what it holds."""
        wanted = max(0, self.units_for(num_tokens) - len(table.units))
        self._leases.want(table.lease, wanted, self.available_units)
        if self.mixed_sizes:
            table.order = (num_tokens >= _PAIR_TOKENS) + (num_tokens >= _QUAD_TOKENS)

    def limit_lease(self, table: Table, most: int) -> None:
        """Give up what a table is leased beyond `most` units, and what could not be: not owed."""
        self._leases.want(table.lease, min(table.lease.claim, most), self.available_units)

    def missing(self, table: Table, num_tokens: int) -> int:
        """Units that the table lacks to hold so many tokens."""
        return max(0, self.units_for(num_tokens) - len(table.units))

    def can_grow(self, table: Table, num_tokens: int) -> bool:
        """Whether the table could be made to hold so many tokens, by borrowing if need be."""
        return self.missing(table, num_tokens) <= self.available_units

    def grow(self, table: Table, num_tokens: int) -> None:
        """Make the table hold so many tokens.

        Raises:
            EngineError: There are not enough units; nothing was taken.
        """
        units = table.units
        missing = -(-num_tokens // self.unit_tokens) - len(units)
        if missing <= 0:
            return
        available = self.available_units
        if missing > available:
            raise EngineError(
                f"sequence {table.seq_id} needs {missing} more units, {available} are available"
            )
        self._leases.spend(table.lease, missing, available)
        self.available_units -= missing
        before = len(units)
        self._extend(table, missing)
        table.capacity = len(units) * self.unit_tokens
        self._entries += missing
        if before + missing >= (before | 3) + 1:
            self._count_quads(table, before)

    def advance(self, tables: Iterable[Table]) -> None:
        """Give each table its next unit if its lease promises one and none must be lent for it.

        A step of decodes asks for a hundred tables at once, so this is `grow` by one unit, without
        the cases that are rare; tables it leaves as they are need `grow`.
        """
        taken = 0
        holders, spare, pool, unit_tokens = self._holders, self._spare, self._pool, self.unit_tokens
        for table in tables:
            ahead, lease, units = table.ahead, table.lease, table.units
            if not lease.claim:
                continue
            if ahead:
                unit = ahead.pop()
                self._ahead_units -= 1
                if not ahead:
                    del spare[table.seq_id]
            else:
                order = min(table.order, _ALIGNED[len(units) & 3])
                unit = pool.take(order)
                if unit == NONE:
                    continue
                self._runs[order] += 1
                if order:
                    ahead.extend(range(unit + (1 << order) - 1, unit, -1))
                    self._ahead_units += (1 << order) - 1
                    spare[table.seq_id] = table
            lease.claim -= 1
            taken += 1
            holders[unit] = 1
            units.append(unit)
            table.capacity += unit_tokens
            first = unit - 3
            if not first & 3 and not len(units) & 3:
                is_quad = units[-4:] == [first, first + 1, first + 2, unit]
                table.quads += is_quad
                self._quads += is_quad
        self._leases.claims -= taken
        self.available_units -= taken
        self._entries += taken

    def table(self, seq_id: str) -> list[int]:
        """Return the sequence's units: the live list, not to be changed.

        Raises:
            EngineError: The sequence has no table.
        """
        table = self._tables.get(seq_id)
        if table is None:
            raise EngineError(f"sequence {seq_id} holds no units")
        return table.units

    def commit(self, table: Table, token_ids: Sequence[int], num_computed: int) -> None:
        """Note that the KV of the first `num_computed` tokens is written.

        Looks only at units that became full since the last call.

        Args:
            table: Whose KV.
            token_ids: All of the sequence's tokens, from the first.
            num_computed: Never less than at the last call.

        Raises:
            EngineError: More is computed than tokens are known or units held.
        """
        if num_computed > table.capacity or num_computed > len(token_ids):
            raise EngineError(
                f"sequence {table.seq_id}: {num_computed} tokens computed, but {len(token_ids)} "
                f"known and units for {table.capacity} held"
            )
        end = table.commit_at
        if num_computed < end or self._cache is None:
            return
        add, units, size = self._cache.add, table.units, self.unit_tokens
        known, parent = table.known, table.parent
        while end <= num_computed:
            parent = add(parent, token_ids[end - size : end], units[known])
            known += 1
            end += size
        table.known, table.parent, table.commit_at = known, parent, end

    def close(self, table: Table, *, forget: bool = False) -> None:
        """Give back what a sequence holds and is promised.

        Args:
            table: Whose units.
            forget: Whether their content is not to be trusted: no later sequence finds it.

        Raises:
            EngineError: The sequence has no such table.
        """
        if self._tables.pop(table.seq_id, None) is not table:
            raise EngineError(f"sequence {table.seq_id} holds no units")
        cache, holders, pool = self._cache, self._holders, self._pool
        freed = 0
        for unit in reversed(table.units):
            if forget and cache is not None:
                cache.forget(unit)
            holders[unit] -= 1
            if holders[unit] == 0:
                freed += 1
                if cache is not None and unit in cache:
                    cache.rest(unit)
                else:
                    pool.give(unit)
        pool.give_all(table.ahead)
        self._ahead_units -= len(table.ahead)
        self._spare.pop(table.seq_id, None)
        self.available_units += freed
        self._entries -= len(table.units)
        self._quads -= table.quads
        self._leases.close(table.lease)
        self._leases.settle(self.available_units)
        self.closings += 1

    # What the host holds

    def swap_out(self, table: Table, num_tokens: int) -> KvCopy | None:
        """Keep the first tokens of a table that is about to be closed on the host.

        Args:
            table: Whose KV.
            num_tokens: At least 1; what is computed, or will be when the copy is made.

        Returns:
            What to copy before anything writes to these units; None where the host is too full.

        Raises:
            EngineError: The sequence is swapped out already, or its table is shorter.
        """
        count = self.units_for(num_tokens)
        if not 0 < count <= len(table.units):
            raise EngineError(
                f"sequence {table.seq_id}: {num_tokens} tokens to swap out of {table.capacity}"
            )
        places = self._host.put(table.seq_id, num_tokens, count)
        if places is None:
            return None
        self.swapped_out_total += count
        return KvCopy(table.units[:count], places)

    def swapped_tokens(self, seq_id: str) -> int:
        """Tokens whose KV the host holds for a sequence."""
        swapped = self._host.get(seq_id)
        return swapped.tokens if swapped is not None else 0

    def swap_in(self, table: Table) -> KvCopy:
        """Grow a new table to what the host holds of its sequence, and give the places back.

        Returns:
            What to copy before the sequence goes on; nothing of what the prefix cache had.

        Raises:
            EngineError: The sequence is not swapped out, or there are not enough units.
        """
        self.grow(table, self.swapped_tokens(table.seq_id))
        places = self._host.take(table.seq_id).places
        found = self.units_for(table.cached_tokens)
        self.swapped_in_total += max(0, len(places) - found)
        return KvCopy(table.units[found : len(places)], places[found:])

    def drop_swapped(self, seq_id: str) -> None:
        """Give up what the host holds of a sequence; does nothing where that is nothing."""
        if self._host.get(seq_id) is not None:
            self._host.take(seq_id)

    # Promises to those who have no table yet

    def reserve(self, holder: str, num_tokens: int) -> int:
        """Lease units for a request that is still arriving; return the units promised.

        Only what nobody has a claim to is promised, and the rest is not owed. The holder's `open`
        takes the reservation over; who gives up must `release` it.

        Raises:
            EngineError: The holder has a reservation or a table already.
        """
        lease = self._leases.open(holder)
        self._reservations[holder] = lease
        wanted = max(0, min(self.units_for(num_tokens), self.unclaimed_units))
        self._leases.want(lease, wanted, self.available_units)
        return lease.claim

    def release(self, holder: str) -> None:
        """Give a reservation up; does nothing where there is none."""
        lease = self._reservations.pop(holder, None)
        if lease is not None:
            self._leases.close(lease)
            self._leases.settle(self.available_units)
            self.closings += 1

    def reserved_for(self, holder: str) -> int:
        """Units that a reservation promises; 0 where there is none."""
        lease = self._reservations.get(holder)
        return lease.claim if lease is not None else 0

    def check_integrity(self) -> None:
        """Verify every rule that the structures can break; takes time in the pool's size.

        Raises:
            IntegrityError: A unit is in two states or none, a count, a key or an account is wrong.
        """
        self._pool.check_integrity()
        if self._cache is not None:
            self._cache.check_integrity()
        self._leases.check_integrity(self.available_units)
        self._host.check_integrity(self.unit_tokens)
        held = Counter(unit for table in self._tables.values() for unit in table.units)
        ahead = [unit for table in self._tables.values() for unit in table.ahead]
        idle = [] if self._cache is None else list(self._cache.idle_units())
        resting = set(idle)
        places = Counter([*self._pool.free_units(), *ahead, *idle, *held])
        for unit in range(self.num_units):
            if places.pop(unit, 0) != 1:
                raise IntegrityError(
                    f"unit {unit} is not in exactly one of free, ahead, idle and held"
                )
            if self._holders[unit] != held[unit]:
                raise IntegrityError(
                    f"unit {unit}: {self._holders[unit]} holders noted, {held[unit]} found"
                )
            known = self._cache is not None and unit in self._cache
            if known and not held[unit] and unit not in resting:
                raise IntegrityError(f"unit {unit} is cached, but neither held nor idle")
        if places:
            raise IntegrityError(f"units {sorted(places)} are none of the pool's")
        self._check_counts(held.total(), len(ahead))

    def _check_counts(self, entries: int, ahead: int) -> None:
        idle = self._cache.idle if self._cache is not None else 0
        if self.available_units != self._pool.free + idle + ahead:
            raise IntegrityError("the available units are miscounted")
        if self._ahead_units != ahead or self._entries != entries:
            raise IntegrityError("units ahead, or entries of tables, are miscounted")
        spare = {seq_id for seq_id, table in self._tables.items() if table.ahead}
        if spare != self._spare.keys():
            raise IntegrityError("the tables with units ahead are not those listed")
        for table in self._tables.values():
            if table.capacity != len(table.units) * self.unit_tokens:
                raise IntegrityError(f"sequence {table.seq_id}: wrong capacity {table.capacity}")
            if table.quads != _quads_of(table.units):
                raise IntegrityError(f"sequence {table.seq_id}: wrong count of wide runs")
        if self._quads != sum(table.quads for table in self._tables.values()):
            raise IntegrityError("wide runs are miscounted")
        if self._reservations.keys() & self._tables.keys():
            raise IntegrityError("a sequence has a table and a reservation")
        if self._host.holders & self._tables.keys():
            raise IntegrityError("a sequence has a table and is swapped out")

    def _take_prefix(self, table: Table, token_ids: Sequence[int], salt: str) -> None:
        """Share the longest cached prefix; units that were idle must be paid for."""
        cache = self._cache
        assert cache is not None  # noqa: S101 -- the caller asked
        units, table.parent = cache.find(token_ids, salt)
        idle = sum(map(cache.is_idle, units))
        self._leases.spend(table.lease, idle, self.available_units)
        self.available_units -= idle
        for unit in units:
            cache.wake(unit)
            self._holders[unit] += 1
        table.units = units
        table.known = len(units)
        table.shared = len(units) - idle
        table.capacity = table.cached_tokens = len(units) * self.unit_tokens
        self._entries += len(units)
        self._count_quads(table, 0)
        self.query_tokens_total += len(token_ids)
        self.hit_tokens_total += table.cached_tokens

    def _extend(self, table: Table, missing: int) -> None:
        """Append units, a run at a time; the rest of the last run is set aside ahead.

        units    [ 16 17 18 19 | 40 41          needs 1 more
        ahead                          43 42    takes 42 and keeps 43
                                                none left: an aligned run of 4, as long as the
                                                lease promises more, else just what is needed
        """
        units, ahead = table.units, table.ahead
        while missing > 0 and ahead:
            unit = ahead.pop()
            units.append(unit)
            self._holders[unit] = 1
            self._ahead_units -= 1
            missing -= 1
            if not ahead:
                del self._spare[table.seq_id]
        while missing > 0:
            missing -= self._append_run(table, missing)

    def _append_run(self, table: Table, missing: int) -> int:
        """Append up to `missing` units of one new run; return how many."""
        order = min(table.order, _ALIGNED[len(table.units) & 3])
        if not table.lease.claim:
            order = min(order, (missing >= 2) + (missing >= 4))
        while order and (first := self._take_run(order)) == NONE:
            order -= 1
        if not order:
            first = self._take_one()
        end = first + (1 << order)
        middle = min(first + missing, end)
        table.units.extend(range(first, middle))
        for unit in range(first, middle):
            self._holders[unit] = 1
        if middle < end:
            table.ahead.extend(range(end - 1, middle - 1, -1))
            self._ahead_units += end - middle
            self._spare[table.seq_id] = table
        self._runs[order] += 1
        return middle - first

    def _take_run(self, order: int) -> int:
        """Take a free run, or free what has been idle longest until there is one.

        What a sequence gave back is idle together, so a run is seldom far. A few units may stay
        free for want of a run; more would empty the cache where the free ones lie scattered.
        """
        first = self._pool.take(order)
        while first == NONE and self._pool.free < self._loose_units:
            if self._cache is None or not self._cache.idle:
                break
            self._pool.give(self._cache.evict())
            self.evictions_total += 1
            first = self._pool.take(order)
        return first

    def _take_one(self) -> int:
        unit = self._pool.take(0)
        if unit != NONE:
            return unit
        if self._cache is not None and self._cache.idle:
            self.evictions_total += 1
            return self._cache.evict()
        return self._take_ahead()

    def _take_ahead(self) -> int:
        """Take the unit that its table would reach last."""
        lender = next(iter(self._spare.values()))
        unit = lender.ahead.pop(0)
        self._ahead_units -= 1
        if not lender.ahead:
            del self._spare[lender.seq_id]
        return unit

    def _count_quads(self, table: Table, start: int) -> None:
        """Count aligned runs that were completed from index `start` on."""
        found = _quads_of(table.units, start & ~3)
        table.quads += found
        self._quads += found


def _quads_of(units: list[int], start: int = 0) -> int:
    """Aligned runs of 4 at indices that 4 divides."""
    found = 0
    for i in range(start, len(units) - 3, 4):
        first = units[i]
        if not first & 3 and units[i + 3] == first + 3:
            found += units[i + 1] == first + 1 and units[i + 2] == first + 2
    return found
