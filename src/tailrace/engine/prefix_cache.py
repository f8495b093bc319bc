"""Which units hold which text, and which of them goes first.

A key is the unit before (the salt, for the first one) and the tokens of the unit itself, compared
in full: equal keys are equal text by construction, not by a hash's good luck. "The unit before" is
the serial number of its entry, never used twice, so nothing follows a unit that was evicted and
reused. Keys are bytes, which the garbage collector does not visit: there can be a million.

    salt --[t0..t7]--> entry 4, unit 17 --[t8..t15]--> entry 9, unit 3
                                        --[t8'..]----> entry 12, unit 40

An entry whose predecessor is gone is not found any more, and goes when its turn comes: sequences
give units back tail first, so that happens only where two computed the same text at once.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from tailrace.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Parent = int | str
"""The serial number of an entry, or the salt."""


class PrefixCache:
    """Finds full units by their text; knows which are idle, and for how long.

    Args:
        num_units: Units of the pool.
        unit_tokens: Tokens of a unit.
    """

    def __init__(self, num_units: int, unit_tokens: int) -> None:
        self.unit_tokens = unit_tokens
        self._pack = struct.Struct(f"<Q{unit_tokens}I").pack
        self._found: dict[bytes, int] = {}
        # By unit; empty, and 0, where it is not known.
        self._keys = [b""] * num_units
        self._entries = array("Q", bytes(8 * num_units))
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
            unit = found.get(self._key(parent, token_ids[start : start + size]))
            if unit is None:
                break
            units.append(unit)
            parent = self._entries[unit]
        return units, parent

    def add(self, parent: Parent, token_ids: Sequence[int], unit: int) -> int:
        """Make a full unit known; return its entry, or that of the unit with the same text."""
        is_entry = isinstance(parent, int)
        key = self._pack(parent, *token_ids) if is_entry else self._key(parent, token_ids)
        known = self._found.setdefault(key, unit)
        if known != unit:
            return self._entries[known]
        serial = self._last_serial = self._last_serial + 1
        self._keys[unit] = key
        self._entries[unit] = serial
        return serial

    def forget(self, unit: int) -> None:
        """Make a unit unknown, if it was known."""
        key = self._keys[unit]
        if key:
            del self._found[key]
            self._keys[unit], self._entries[unit] = b"", 0
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
        self._keys[unit], self._entries[unit] = b"", 0
        return unit

    def _key(self, parent: Parent, token_ids: Sequence[int]) -> bytes:
        # Unlike for each parent: only keys under the empty salt are as short as those of entries,
        # and no entry has number 0.
        if isinstance(parent, str):
            return parent.encode() + self._pack(0, *token_ids)
        return self._pack(parent, *token_ids)

    def check_integrity(self) -> None:
        """Verify that the maps agree.

        Raises:
            IntegrityError: They do not.
        """
        known = {unit: key for unit, key in enumerate(self._keys) if key}
        if self._found != {key: unit for unit, key in known.items()}:
            raise IntegrityError("keys and cached units disagree")
        entries = {unit: entry for unit, entry in enumerate(self._entries) if entry}
        if entries.keys() != known.keys():
            raise IntegrityError("entries and cached units disagree")
        if self._idle.keys() - known.keys():
            raise IntegrityError("an idle unit is not in the prefix cache")
        if len(set(entries.values())) != len(entries):
            raise IntegrityError("two entries of the prefix cache have one serial number")
