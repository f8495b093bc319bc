"""Pairs in place of products: a setting that has nothing to do with the others is dealt out.

Where a kernel's sizes, shapes and halves are multiplied out, most cases go a way that another has
gone. With each value of one setting beside each value of another, at least once, what hangs on two
of them is still seen.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence


def dealt(
    cases: Iterable[Sequence[Hashable]], values: tuple[Hashable, Hashable]
) -> list[tuple[Hashable, ...]]:
    """Return each case with one of two values at its end.

    What several cases share meets both.
    """
    met: Counter[tuple[int, Hashable, Hashable]] = Counter()
    """How often a part of a case, by its place there, has stood beside a value."""

    def merit(case: Sequence[Hashable], value: Hashable) -> tuple[int, int]:
        counts = [met[place, part, value] for place, part in enumerate(case)]
        return counts.count(0), -sum(counts)

    found = []
    for case in cases:
        value = max(values, key=lambda value, case=case: merit(case, value))
        met.update((place, part, value) for place, part in enumerate(case))
        found.append((*case, value))
    return found
