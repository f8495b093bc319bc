"""What to keep in mind of a comparison, each thing said once: the cautions of searches and trials.

Cautions that differ in their figures alone are one caution; how many had it, and whose they were,
says whether it met one contender more than another.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from tailrace.bench.validity import FEW

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tailrace.bench.result import Comparison

_FIGURES = re.compile(r"\d[\d.,\s]*")


def search_cautions(comparison: Comparison) -> list[str]:
    """Return what speaks for care with the highest rates that were found."""
    found = [search for search in comparison.searches if search.max_rps is not None]
    told = ((search.contender, text) for search in found for text in search.cautions)
    return _grouped(told, len(found), "searches")


def trial_cautions(comparison: Comparison) -> list[str]:
    """Return what speaks for care with the valid trials; that each was short is left to its row."""
    valid = [trial for trial in comparison.trials if not trial.reasons]
    told = ((t.contender, text) for t in valid for text in t.cautions if FEW not in text)
    return _grouped(told, len(valid), "valid trials")


def _grouped(told: Iterable[tuple[str, str]], total: int, what: str) -> list[str]:
    """Return one line for each kind of text: how many of `total`, of which contenders."""
    texts: dict[str, str] = {}
    owners: dict[str, Counter[str]] = {}
    for contender, text in told:
        kind = _FIGURES.sub("#", text)
        texts.setdefault(kind, text)
        owners.setdefault(kind, Counter())[contender] += 1
    lines = []
    for kind, text in texts.items():
        shares = ", ".join(f"{name} {count}" for name, count in owners[kind].items())
        example = ", the first of them" if owners[kind].total() > 1 and kind != text else ""
        lines.append(f"{owners[kind].total()} of {total} {what} ({shares}){example}: {text}.")
    return lines
