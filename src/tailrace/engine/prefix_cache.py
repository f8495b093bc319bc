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
from collections import OrderedDict
from typing import TYPE_CHECKING

from tailrace.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The first byte keeps salts and serial numbers apart; the tokens' length is fixed.
_SALT, _SERIAL = b"s", b"e"


class PrefixCache:
    """Finds full units by their text; knows which are idle, and for how long.

    Args:
        unit_tokens: Tokens of a unit.
    """

    def __init__(self, unit_tokens: int) -> None:
        self.unit_tokens = unit_tokens
        self._pack = struct.Struct(f"<{unit_tokens}I").pack
        self._found: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._entries: dict[int, bytes] = {}
        self._last_serial = 0
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Units that can be found."""
        return len(self._keys)

    def __contains__(self, unit: int) -> bool:
        return unit in self._keys

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

    @staticmethod
    def root(salt: str) -> bytes:
        """What a text's first unit follows."""
        return _SALT + salt.encode()

    def find(self, token_ids: Sequence[int], salt: str) -> tuple[list[int], bytes]:
        """Return the units of the longest known prefix that leaves a token, and their last entry.

        The last token of a prompt must be computed, to have logits.
        """
        units: list[int] = []
        parent = self.root(salt)
        if not self._found:
            return units, parent
        size, pack, found = self.unit_tokens, self._pack, self._found
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            unit = found.get(parent + pack(*token_ids[start : start + size]))
            if unit is None:
                break
            units.append(unit)
            parent = self._entries[unit]
        return units, parent

    def add(self, parent: bytes, token_ids: Sequence[int], unit: int) -> bytes:
        """Make a full unit known; return its entry, or that of the unit with the same text."""
        key = parent + self._pack(*token_ids)
        known = self._found.get(key)
        if known is not None:
            return self._entries[known]
        self._last_serial += 1
        self._found[key] = unit
        self._keys[unit] = key
        entry = self._entries[unit] = _SERIAL + self._last_serial.to_bytes(8)
        return entry

    def forget(self, unit: int) -> None:
        """Make a unit unknown, if it was known."""
        key = self._keys.pop(unit, None)
        if key is not None:
            del self._found[key]
            del self._entries[unit]
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
        del self._found[self._keys.pop(unit)]
        del self._entries[unit]
        return unit

    def check_integrity(self) -> None:
        """Verify that the maps agree.

        Raises:
            IntegrityError: They do not.
        """
        if self._found != {key: unit for unit, key in self._keys.items()}:
            raise IntegrityError("keys and cached units disagree")
        if self._entries.keys() != self._keys.keys():
            raise IntegrityError("entries and cached units disagree")
        if self._idle.keys() - self._keys.keys():
            raise IntegrityError("an idle unit is not in the prefix cache")
        if len(set(self._entries.values())) != len(self._entries):
            raise IntegrityError("two entries of the prefix cache have one serial number")
