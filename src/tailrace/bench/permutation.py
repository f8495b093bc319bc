"""Whether two machines differ: runs on them are no pairs, so they are dealt out anew.

If it made no difference which machine a figure came from, any way of dealing all figures into two
hands would be as likely as the one that was seen. The p-value is the share of dealings whose means
lie at least as far apart. With three figures a side the least p-value is 0.1: too few to show
anything, and then nothing is shown.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_DEALINGS = 20_000
"""Beyond it so many are drawn by a seeded generator instead of all being gone through."""
ROUNDING = 1e-12


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the share of dealings as extreme as the one seen, two-sided; 1 without figures."""
    if not (len(first) and len(second)):
        return 1.0
    values = np.array([*first, *second], dtype=np.float64)
    size, count = len(values), len(first)
    seen = abs(values[:count].mean() - values[count:].mean())
    if math.comb(size, count) <= MOST_DEALINGS:
        hands = np.array(list(itertools.combinations(range(size), count)))
        extra = 0
    else:
        random = np.random.default_rng(0)
        hands = np.argsort(random.random((MOST_DEALINGS, size)), axis=1)[:, :count]
        extra = 1  # the dealing that was seen is one of those possible
    sums = values[hands].sum(axis=1)
    apart = np.abs(sums / count - (values.sum() - sums) / (size - count))
    far = int((apart >= seen - ROUNDING).sum())
    return (far + extra) / (len(hands) + extra)
