"""The free units of the KV pool, handed out as aligned runs of 1, 2 or 4.

Four neighbours are a group, and its free units are four bits; so a buddy is found, split and
joined again by looking the bits up in a table. Groups with a free unit are linked by their longest
free run:

    bits of a group    0000     0101     0111     1111
    longest run           -        1        2        4     a list for each; 0000 is in none

A run is cut from the shortest that serves, so long runs last. Lists are intrusive (two arrays of
group numbers), so every operation on one run takes the same time in any pool.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from tailrace.errors import EngineError, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable

GROUP = 4
"""Units of the longest run."""
NONE = -1
_MASKS = range(1 << GROUP)


def _level(mask: int) -> int:
    """Log2 of the longest aligned free run; -1 where none is free."""
    if mask == 0b1111:
        return 2
    if mask & 0b0011 == 0b0011 or mask & 0b1100 == 0b1100:
        return 1
    return 0 if mask else NONE


def _cut(mask: int, order: int) -> int:
    """Bits of the run to take; 0 where there is none. A single unit spares pairs."""
    if order == 2:
        return 0b1111 if mask == 0b1111 else 0
    if order == 1:
        return next((pair for pair in (0b0011, 0b1100) if mask & pair == pair), 0)
    singles = [1 << i for i in range(GROUP) if mask >> i & 1]
    lonely = [1 << i for i in range(GROUP) if mask >> i & 1 and not mask >> (i ^ 1) & 1]
    return (lonely or singles or [0])[0]


_LEVELS = [_level(mask) for mask in _MASKS]
_CUTS = [[_cut(mask, order) for mask in _MASKS] for order in range(3)]
_FIRST = [(mask & -mask).bit_length() - 1 for mask in _MASKS]


class UnitPool:
    """Which units are free; who holds the others is not known here.

    Args:
        num_units: Ids are 0 to `num_units` - 1, all free at first.

    Raises:
        EngineError: A pool without units.
    """

    def __init__(self, num_units: int) -> None:
        if num_units < 1:
            raise EngineError(f"a pool of {num_units} units: must be at least 1")
        self.num_units = num_units
        self.free = num_units
        """Free units."""
        groups, rest = divmod(num_units, GROUP)
        self._masks = bytearray([0b1111] * groups + ([(1 << rest) - 1] if rest else []))
        self._heads = len(self._masks)
        # Rings through one head a level: [group, ..., head of level 0, of level 1, of level 2].
        nodes = range(self._heads + 3)
        self._next = array("i", nodes)
        self._previous = array("i", nodes)
        for group in reversed(range(self._heads)):
            self._link(group, _LEVELS[self._masks[group]])

    def take(self, order: int) -> int:
        """Take an aligned run of 2**order units; return its first unit, or NONE."""
        for head in range(self._heads + order, self._heads + 3):
            group = self._next[head]
            if group != head:
                break
        else:
            return NONE
        if order == 2:  # the whole group
            self._masks[group] = 0
            after = self._next[head] = self._next[group]
            self._previous[after] = head
            self.free -= GROUP
            return group * GROUP
        mask = self._masks[group]
        bits = _CUTS[order][mask]
        self._change(group, mask, mask ^ bits)
        self.free -= 1 << order
        return group * GROUP + _FIRST[bits]

    def give(self, unit: int) -> None:
        """Make a unit free; with its neighbours it is a longer run at once.

        Raises:
            IntegrityError: It is free already.
        """
        group, place = divmod(unit, GROUP)
        mask = self._masks[group]
        if mask >> place & 1:
            raise IntegrityError(f"unit {unit} is given back, but it is free")
        self._change(group, mask, mask | 1 << place)
        self.free += 1

    def give_all(self, units: Iterable[int]) -> None:
        """Make units free."""
        for unit in units:
            self.give(unit)

    def is_free(self, unit: int) -> bool:
        """Whether a unit is free."""
        return bool(self._masks[unit // GROUP] >> unit % GROUP & 1)

    def free_units(self) -> list[int]:
        """List every free unit; takes time in the pool's size."""
        return [unit for unit in range(self.num_units) if self.is_free(unit)]

    def longest_free_runs(self) -> int:
        """Count the free runs of 4; takes time in the pool's size."""
        return self._masks.count(0b1111)

    def check_integrity(self) -> None:
        """Verify that the lists say what the bits say.

        Raises:
            IntegrityError: They do not.
        """
        listed: list[int] = []
        for level in range(3):
            head = self._heads + level
            node, before = self._next[head], head
            while node != head:
                if node > self._heads or self._previous[node] != before:
                    raise IntegrityError(f"group {node}: its links are broken")
                if _LEVELS[self._masks[node]] != level:
                    raise IntegrityError(f"group {node} is listed at the wrong level {level}")
                listed.append(node)
                node, before = self._next[node], node
        if sorted(listed) != [g for g in range(self._heads) if self._masks[g]]:
            raise IntegrityError("the lists are not exactly the groups with a free unit")
        if self.free != sum(mask.bit_count() for mask in self._masks):
            raise IntegrityError(f"{self.free} units are counted free, the bits disagree")

    def _change(self, group: int, old: int, new: int) -> None:
        self._masks[group] = new
        before, after = _LEVELS[old], _LEVELS[new]
        if before != after:
            if before != NONE:
                self._unlink(group)
            if after != NONE:
                self._link(group, after)

    def _link(self, group: int, level: int) -> None:
        head = self._heads + level
        first = self._next[head]
        self._next[head] = self._previous[first] = group
        self._next[group], self._previous[group] = first, head

    def _unlink(self, group: int) -> None:
        before, after = self._previous[group], self._next[group]
        self._next[before], self._previous[after] = after, before
