"""Which units hold which text, and which of them goes first.

A key is the unit before (for the first one the weights that computed it, and the salt) and the
tokens of the unit itself, compared in full: equal keys are equal text by construction, not by a
hash's good luck. "The unit before" is the serial number of its entry, never used twice, so nothing
follows a unit that was evicted and reused. Keys are bytes, which the garbage collector does not
visit: there can be a million.

    salt --[t0..t7]--> entry 4, unit 17 --[t8..t15]--> entry 9, unit 3
                                        --[t8'..]----> entry 12, unit 40

An entry whose predecessor is gone is not found any more, and goes when its turn comes: sequences
give units back tail first, so that happens only where two computed the same text at once.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING

from tailrace.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Parent = int | str
"""The serial number of an entry, or the salt."""


_SHIFT = 32
_UNIT = (1 << _SHIFT) - 1


class PrefixCache:
    """Finds full units by their text; knows which are idle, and for how long.

    Args:
        num_units: Units of the pool.
        unit_tokens: Tokens of a unit.
        computed_by: The weights that prompts' KV comes of; part of every first key.
    """

    def __init__(self, num_units: int, unit_tokens: int, computed_by: str = "same") -> None:
        self.unit_tokens = unit_tokens
        self._root = computed_by.encode() + b"\0"
        self._pack = struct.Struct(f"<Q{unit_tokens}I").pack
        # The entry's serial number, shifted by `_SHIFT` bits, and the unit: one object, and one
        # place in memory to go to, where a million of them do not stay in the processor's cache.
        self._found: dict[bytes, int] = {}
        # By unit; empty where it is not known.
        self._keys = [b""] * num_units
        self._last_serial = 0
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Units that can be found."""
        return len(self._found)

    def __contains__(self, unit: int) -> bool:
        return bool(self._keys[unit])

    @property
    def idle(self) -> int:
        """Units that nobody holds."""
        return len(self._idle)

    def is_idle(self, unit: int) -> bool:
        """Whether a unit is cached and nobody holds it."""
        return unit in self._idle

    def idle_units(self) -> Iterable[int]:
        """Units that nobody holds, the longest idle first."""
        return iter(self._idle)

    def find(self, token_ids: Sequence[int], salt: str) -> tuple[list[int], Parent]:
        """Return the units of the longest known prefix that leaves a token, and their last entry.

        The last token of a prompt must be computed, to have logits.
        """
        units: list[int] = []
        parent: Parent = salt
        if not self._found:
            return units, parent
        size, found = self.unit_tokens, self._found
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            entry = found.get(self._key(parent, token_ids[start : start + size]))
            if entry is None:
                break
            units.append(entry & _UNIT)
            parent = entry >> _SHIFT
        return units, parent

    def add(self, parent: Parent, token_ids: Sequence[int], unit: int) -> int:
        """Make a full unit known; return its entry, or that of the unit with the same text."""
        is_entry = parent.__class__ is int
        key = self._pack(parent, *token_ids) if is_entry else self._key(parent, token_ids)
        serial = self._last_serial + 1
        entry = serial << _SHIFT | unit
        known = self._found.setdefault(key, entry)
        if known is not entry:
            return known >> _SHIFT
        self._last_serial = serial
        self._keys[unit] = key
        return serial

    def forget(self, unit: int) -> None:
        """Make a unit unknown, if it was known."""
        key = self._keys[unit]
        if key:
            del self._found[key]
            self._keys[unit] = b""
            self._idle.pop(unit, None)

    def rest(self, unit: int) -> None:
        """Note that nobody holds a known unit any more; it is now the last to be evicted."""
        self._idle[unit] = None

    def wake(self, unit: int) -> bool:
        """Note that somebody holds a known unit; return whether it was idle."""
        if unit in self._idle:
            del self._idle[unit]
            return True
        return False

    def evict(self) -> int:
        """Forget the unit that has been idle longest, and return it."""
        unit, _ = self._idle.popitem(last=False)
        del self._found[self._keys[unit]]
        self._keys[unit] = b""
        return unit

    def _key(self, parent: Parent, token_ids: Sequence[int]) -> bytes:
        # Unlike for each parent: keys under a salt are longer than those of entries.
        if isinstance(parent, str):
            return self._root + parent.encode() + self._pack(0, *token_ids)
        return self._pack(parent, *token_ids)

    def check_integrity(self) -> None:
        """Verify that the maps agree.

        Raises:
            IntegrityError: They do not.
        """
        known = {unit: key for unit, key in enumerate(self._keys) if key}
        units = {key: entry & _UNIT for key, entry in self._found.items()}
        if units != {key: unit for unit, key in known.items()}:
            raise IntegrityError("keys and cached units disagree")
        if self._idle.keys() - known.keys():
            raise IntegrityError("an idle unit is not in the prefix cache")
        serials = {entry >> _SHIFT for entry in self._found.values()}
        if len(serials) != len(known) or 0 in serials:
            raise IntegrityError("two entries of the prefix cache have one serial number")
