"""How long prompts and answers are: distributions of token counts, and how they are written.

    "512"                         always 512
    "32-128"                      every length of the range equally often
    "mix:0.7@32-128,0.3@512-2048" ranges with their shares
    "normal:4200:1280:300:6800"   mean, standard deviation, lowest, highest
    "file:lengths.txt"            drawn from a file's lines: one count, or "input output" pairs

The mean and deviation of a truncated normal are those of what is DRAWN, after truncation: that is
what a team reads off its own log. The normal underneath is solved for; where no normal between
these bounds has such a mean and deviation, that is an error.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

SOLVER_ROUNDS = 100
SOLVED = 1e-7
"""How far the moments may be from those asked for, in units of half the range."""


class Lengths(Protocol):
    """A distribution of token counts."""

    @property
    def mean_tokens(self) -> float:
        """The mean of what is drawn."""
        ...

    def draw(self, rng: random.Random) -> int:
        """Return one count, 1 or more."""
        ...

    def describe(self) -> str:
        """Return it in words, for the report."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    tokens: int

    @property
    def mean_tokens(self) -> float:
        """The one value."""
        return self.tokens

    def draw(self, _: random.Random) -> int:
        """Return the one value."""
        return self.tokens

    def describe(self) -> str:
        """Return it in words."""
        return f"{self.tokens} tokens"


@dataclass(frozen=True)
class Mixture:
    """Uniform ranges, each with its share."""

    parts: tuple[tuple[float, int, int], ...]
    """(share, lowest, highest); the shares add up to 1."""

    @property
    def mean_tokens(self) -> float:
        """The mean of what is drawn."""
        return sum(share * (low + high) / 2 for share, low, high in self.parts)

    def draw(self, rng: random.Random) -> int:
        """Return a count of one of the ranges."""
        shares = [share for share, _, _ in self.parts]
        _, low, high = rng.choices(self.parts, shares)[0]
        return rng.randint(low, high)

    def describe(self) -> str:
        """Return it in words."""
        if len(self.parts) == 1:
            return f"{self.parts[0][1]}-{self.parts[0][2]} tokens"
        ranges = (f"{share:.0%} {low}-{high}" for share, low, high in self.parts)
        return f"{', '.join(ranges)} tokens"


@dataclass(frozen=True)
class TruncatedNormal:
    """A normal distribution between bounds; `mean` and `deviation` are those after truncation."""

    mean: float
    deviation: float
    low: int
    high: int
    _cumulative: list[float] = field(init=False, repr=False, compare=False)
    """For each count from `low` on: the share of counts up to it."""

    def __post_init__(self) -> None:
        """Solve for the normal underneath.

        Raises:
            ConfigError: There is none.
        """
        if not 1 <= self.low < self.mean < self.high or not self.deviation > 0:
            raise ConfigError(
                f"{self._written}: needs 1 <= lowest < mean < highest and a deviation above 0"
            )
        object.__setattr__(self, "_cumulative", np.cumsum(self._solve()).tolist())

    @property
    def mean_tokens(self) -> float:
        """The mean of what is drawn."""
        return self.mean

    def draw(self, rng: random.Random) -> int:
        """Return a count, by the inverse of the distribution."""
        return min(self.low + bisect.bisect_left(self._cumulative, rng.random()), self.high)

    def describe(self) -> str:
        """Return it in words."""
        return (
            f"{self.low}-{self.high} tokens (truncated normal, mean {self.mean:g}, "
            f"sd {self.deviation:g} after truncation)"
        )

    @property
    def _written(self) -> str:
        return f"normal:{self.mean:g}:{self.deviation:g}:{self.low}:{self.high}"

    def _solve(self) -> Numbers:
        """Return the share of each count.

        A normal cut to bounds is exp(a z + b z**2), normed, with b below 0. The parameters with
        given first and second moments are the bottom of a convex bowl: Newton's steps, halved
        while they overshoot, find it.
        """
        middle, half = (self.low + self.high) / 2, (self.high - self.low) / 2
        z = (np.arange(self.low, self.high + 1) - middle) / half
        powers = np.stack([z, z**2])
        wanted_mean = (self.mean - middle) / half
        wanted = np.array([wanted_mean, wanted_mean**2 + (self.deviation / half) ** 2])
        start = -0.5 * (half / self.deviation) ** 2
        at = np.array([-2 * start * wanted_mean, start])
        for _ in range(SOLVER_ROUNDS):
            shares = _normed(at @ powers)
            gap = powers @ shares - wanted
            if abs(gap).max() < SOLVED:
                break
            spread = (powers * shares) @ powers.T - np.outer(powers @ shares, powers @ shares)
            step = np.linalg.lstsq(spread, gap, rcond=None)[0]
            bowl = _bowl(at, powers, wanted)
            while _bowl(at - step, powers, wanted) > bowl and abs(step).max() > SOLVED:
                step /= 2
            at = at - step
        if abs(gap).max() >= SOLVED or at[1] > 0:
            raise ConfigError(
                f"{self._written}: no normal distribution between these bounds has this mean and "
                "deviation; widen the bounds or change the deviation"
            )
        return shares


def _normed(exponents: Numbers) -> Numbers:
    weights: Numbers = np.exp(exponents - exponents.max())
    shares: Numbers = weights / weights.sum()
    return shares


def _bowl(at: Numbers, powers: Numbers, wanted: Numbers) -> float:
    exponents = at @ powers
    highest = exponents.max()
    return float(highest + np.log(np.exp(exponents - highest).sum()) - at @ wanted)


@dataclass(frozen=True)
class Listed:
    """Drawn from a file's lines, each equally often, with replacement."""

    file: Path
    rows: tuple[tuple[int, ...], ...] = field(repr=False)
    column: int

    @property
    def mean_tokens(self) -> float:
        """The mean of the file's lines."""
        return sum(row[self.column] for row in self.rows) / len(self.rows)

    def draw(self, rng: random.Random) -> int:
        """Return one line's count."""
        return rng.choice(self.rows)[self.column]

    def describe(self) -> str:
        """Return it in words."""
        return f"as in {self.file.name} ({len(self.rows)} lines)"


def draw_pair(rng: random.Random, inputs: Lengths, outputs: Lengths) -> tuple[int, int]:
    """Return a prompt's and its answer's length: of one line, where one file of pairs has both."""
    if isinstance(inputs, Listed) and isinstance(outputs, Listed) and inputs.file == outputs.file:
        row = rng.choice(inputs.rows)
        return row[inputs.column], row[outputs.column]
    return inputs.draw(rng), outputs.draw(rng)


def read_lengths(text: str, *, is_output: bool = False) -> Lengths:
    """Return the distribution that `text` names; `is_output` takes a file's second column.

    Raises:
        ConfigError: It is written otherwise, a number is out of range, or the file is bad.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "normal":
            mean, deviation, low, high = rest.split(":")
            return TruncatedNormal(float(mean), float(deviation), int(low), int(high))
        if kind == "mix":
            return _mixture(text, rest.split(","))
        if kind == "file":
            return _listed(Path(rest), is_output=is_output)
        if "-" in text.strip("-"):
            return _mixture(text, [f"1@{text}"])
        tokens = int(text)
    except ValueError as error:
        raise ConfigError(
            f"lengths {text!r}: write 512, 32-128, mix:0.7@32-128,0.3@512-2048, "
            "normal:MEAN:SD:LOW:HIGH or file:PATH"
        ) from error
    if tokens < 1:
        raise ConfigError(f"lengths {text!r}: must be 1 or more")
    return Fixed(tokens)


def _mixture(text: str, parts: list[str]) -> Mixture:
    found = []
    for part in parts:
        share, _, span = part.partition("@")
        low, _, high = span.partition("-")
        found.append((float(share), int(low), int(high or low)))
    if not all(share > 0 and 1 <= low <= high for share, low, high in found):
        raise ConfigError(f"lengths {text!r}: each part needs a share above 0 and 1 <= low <= high")
    if not math.isclose(sum(share for share, _, _ in found), 1, abs_tol=1e-6):
        raise ConfigError(f"lengths {text!r}: the shares must add up to 1")
    return Mixture(tuple(found))


def _listed(file: Path, *, is_output: bool) -> Listed:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"lengths file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"lengths file {file}: not UTF-8 text ({error.reason})") from error
    rows: list[tuple[int, ...]] = []
    for number, line in enumerate(lines, start=1):
        words = line.replace(",", " ").split()
        if not words or words[0].startswith("#"):
            continue
        rows.append(_row(words, f"{file}:{number}"))
    if not rows:
        raise ConfigError(f"lengths file {file}: no line in it")
    if len({len(row) for row in rows}) > 1:
        raise ConfigError(f"lengths file {file}: some lines have one number, some have two")
    return Listed(file, tuple(rows), len(rows[0]) - 1 if is_output else 0)


def _row(words: list[str], where: str) -> tuple[int, ...]:
    try:
        row = tuple(int(word) for word in words)
    except ValueError as error:
        raise ConfigError(f"{where}: write one token count, or an input output pair") from error
    if len(row) > 2 or min(row) < 1:
        raise ConfigError(f"{where}: write one or two counts, each 1 or more")
    return row
