"""Places in host memory for the KV of preempted sequences, each as large as a unit of the pool.

    RUNNING  --preempt-->  WAITING, swapped out  --admit-->  RUNNING
    units 17 4 9 --copy--> places 0 1 2          --copy-->   units 3 8 21, places free again
                           finish: places free again

Who holds which place is known here; what stands in them only to the runner, which copies in the
order of steps. So a place that is given up may be handed out at once: whoever reads what stood in
it comes first, as with units (scheduler.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.errors import EngineError, IntegrityError


@dataclass(frozen=True)
class KvCopy:
    """Units of the pool, and the places on the host that hold the same, one for one."""

    units: list[int]
    places: list[int]


@dataclass(frozen=True)
class SwappedOut:
    """One sequence's KV on the host."""

    tokens: int
    """From its first."""
    places: list[int]


class HostUnits:
    """Who holds which place.

    Args:
        num_places: Ids are 0 to `num_places` - 1, all free at first; may be 0.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))
        self._swapped: dict[str, SwappedOut] = {}

    @property
    def used(self) -> int:
        """Places that hold something."""
        return self.num_places - len(self._free)

    @property
    def holders(self) -> set[str]:
        """Sequences that are swapped out."""
        return set(self._swapped)

    def get(self, seq_id: str) -> SwappedOut | None:
        """Return what a sequence has here."""
        return self._swapped.get(seq_id)

    def put(self, seq_id: str, tokens: int, count: int) -> list[int] | None:
        """Give a sequence `count` places for its first tokens; None where too few are free.

        Raises:
            EngineError: It has some already.
        """
        if seq_id in self._swapped:
            raise EngineError(f"sequence {seq_id} is swapped out already")
        if count > len(self._free):
            return None
        places = [self._free.pop() for _ in range(count)]
        self._swapped[seq_id] = SwappedOut(tokens, places)
        return places

    def take(self, seq_id: str) -> SwappedOut:
        """Give a sequence's places back, and say what they hold.

        Raises:
            EngineError: It has none.
        """
        swapped = self._swapped.pop(seq_id, None)
        if swapped is None:
            raise EngineError(f"sequence {seq_id} is not swapped out")
        # In order, so that neighbours are handed out together: the fewer runs, the fewer copies.
        self._free.extend(swapped.places)
        self._free.sort(reverse=True)
        return swapped

    def check_integrity(self, unit_tokens: int) -> None:
        """Verify that each place is free or held once, and that tokens fill their places.

        Raises:
            IntegrityError: That is not so.
        """
        held = [place for swapped in self._swapped.values() for place in swapped.places]
        if sorted([*held, *self._free]) != list(range(self.num_places)):
            raise IntegrityError("a place on the host is lost, or held twice")
        for seq_id, swapped in self._swapped.items():
            if len(swapped.places) != -(-swapped.tokens // unit_tokens) or not swapped.places:
                raise IntegrityError(
                    f"sequence {seq_id}: {len(swapped.places)} places for {swapped.tokens} tokens"
                )
