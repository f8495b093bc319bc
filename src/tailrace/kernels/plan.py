"""Plans: which kernel serves which size on this machine, as measured, in a file.

    question    an operation at sizes of one class      "prefill attention", "below 1024 keys"
    candidates  kernels that compute the same           "64x64, 4 warps, 3 stages", ...
    choice      their times, and the winner: the default, unless another beats it by `MARGIN`

A plan belongs to one kind of GPU, model shape, dtype and set of versions: its key. Its file's name
is made of the first three, so that a plan of other versions is found and seen to be stale. A pinned
plan is never written to again. No torch here: `tailrace plan show` answers at once.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated

import msgspec

from tailrace.config import cache_dir
from tailrace.errors import ConfigError
from tailrace.kept_file import KeptFile, OtherFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FORMAT = 2
"""Of 1, times were the host's where it launched a kernel for longer than the device ran it."""
MARGIN = 0.03
"""By how much less time than the default's a candidate wins."""

MOST_BYTES = 1 << 20
"""Of a plan's file."""

Words = Annotated[str, msgspec.Meta(max_length=300)]
Seconds = Annotated[float, msgspec.Meta(gt=0.0, lt=1e3)]


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a plan holds."""

    gpu: Words
    """Its name and compute capability."""
    model: Words
    """The sizes that kernels see."""
    dtype: Words
    tailrace: Words
    torch: Words
    triton: Words


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured for one question, and what follows from it."""

    operation: Words
    sizes: Words
    default: Words
    winner: Words
    seconds: dict[Words, Seconds]
    refused: dict[Words, Words] = {}
    """Candidates that cannot serve here, and why; not timed."""
    no_memory: dict[Words, Words] = {}
    """Candidates that the device had no memory for at the time, and what they asked for: they say
    nothing of what they can do where there is more, and `tailrace plan measure` tries again."""

    @property
    def question(self) -> tuple[str, str]:
        """What the choice answers."""
        return self.operation, self.sizes


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine's choices for a model."""

    key: Key
    choices: tuple[Choice, ...]
    pinned: bool = False
    format: int = FORMAT

    def choice(self, operation: str, sizes: str) -> Choice | None:
        """Return what was measured for a question, if it was."""
        return next((c for c in self.choices if c.question == (operation, sizes)), None)

    def winner(self, operation: str, sizes: str) -> str | None:
        """Return the candidate that serves, where the question was measured."""
        found = self.choice(operation, sizes)
        return None if found is None else found.winner

    def answers(self, operation: str, sizes: str, candidates: Iterable[str]) -> bool:
        """Tell whether the question was measured with all of these candidates."""
        found = self.choice(operation, sizes)
        if found is None:
            return False
        return not set(candidates) - {*found.seconds, *found.refused, *found.no_memory}

    def with_choices(self, choices: Iterable[Choice]) -> Plan:
        """Return the plan with further choices, which replace older ones to the same questions."""
        merged = {choice.question: choice for choice in (*self.choices, *choices)}
        return msgspec.structs.replace(self, choices=tuple(merged.values()))

    def without(self, choices: Iterable[Choice]) -> Plan:
        """Return the plan without its choices to the questions that these answer."""
        questions = {choice.question for choice in choices}
        kept = tuple(choice for choice in self.choices if choice.question not in questions)
        return msgspec.structs.replace(self, choices=kept)

    def describe(self) -> list[str]:
        """Say it in lines: the key, then each choice with its times in microseconds."""
        key = msgspec.structs.asdict(self.key)
        lines = [f"{name}: {value}" for name, value in key.items()]
        lines += ["pinned"] if self.pinned else []
        for choice in self.choices:
            lines.append(f"{choice.operation}, {choice.sizes}: {choice.winner}")
            for name, seconds in sorted(choice.seconds.items(), key=lambda item: item[1]):
                mark = " (default)" if name == choice.default else ""
                lines.append(f"    {seconds * 1e6:10.1f} us  {name}{mark}")
            for outcome, failed in (
                ("refused", choice.refused),
                ("out of memory", choice.no_memory),
            ):
                lines += [f"    {outcome:<13}  {name}: {why}" for name, why in failed.items()]
        if any(choice.no_memory for choice in self.choices):
            lines.append("out of memory: `tailrace plan measure` tries those again")
        return lines


_FILES = KeptFile(
    "plan", Plan, MOST_BYTES, FORMAT, "remove it, and `tailrace plan measure` makes one"
)


def choose(
    operation: str,
    sizes: str,
    default: str,
    seconds: dict[str, float],
    refused: dict[str, str],
    *,
    no_memory: dict[str, str] | None = None,
) -> Choice:
    """Return the choice that measured times lead to.

    Args:
        operation: Of the question.
        sizes: Of the question.
        default: The candidate that serves without a plan; it must have been timed.
        seconds: By candidate.
        refused: Candidates without a time, and why.
        no_memory: Likewise, for want of memory.
    """
    fastest = min(seconds, key=lambda name: seconds[name])
    is_won = seconds[fastest] < (1.0 - MARGIN) * seconds[default]
    return Choice(
        operation,
        sizes,
        default,
        fastest if is_won else default,
        dict(seconds),
        dict(refused),
        dict(no_memory or {}),
    )


def usual_file(key: Key) -> Path:
    """Return where the plan of a GPU, model and dtype lies, whatever the versions."""
    what = f"{key.gpu}\n{key.model}\n{key.dtype}"
    return folder() / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"


def folder() -> Path:
    """Return the folder of the plans that were measured here."""
    return cache_dir() / "plans"


def read(file: Path) -> Plan:
    """Return a file's plan.

    Raises:
        ConfigError: The file cannot be read, is no plan, or is of another format.
    """
    return _FILES.read(file)


def require(plan: Plan, key: Key, file: Path) -> None:
    """Refuse a plan that was measured for something else.

    Raises:
        ConfigError: Names the file, the field, and both values.
    """
    for name, wanted in msgspec.structs.asdict(key).items():
        found = getattr(plan.key, name)
        if found != wanted:
            raise ConfigError(
                f"plan {file}: measured for {name} {found!r}, and here it is {wanted!r}; "
                "`tailrace plan measure` makes one for this machine and version"
            )


class _Pinned(msgspec.Struct):
    """What a plan of any format tells of that."""

    pinned: bool = False


def is_pinned(file: Path) -> bool:
    """Tell whether a pinned plan lies there, of whatever format.

    Raises:
        ConfigError: Something else lies there: it may have been one.
    """
    if not file.exists():
        return False
    try:
        return read(file).pinned
    except OtherFormatError:
        return _FILES.glance(file, _Pinned).pinned


def write(plan: Plan, file: Path) -> None:
    """Write a plan, whole or not at all, in place of another, whatever format that has.

    Raises:
        ConfigError: The file is a pinned plan, or none, or cannot be written.
    """
    if is_pinned(file):
        raise ConfigError(f"plan {file}: is pinned; remove it, or name another file")
    _FILES.write(plan, file)


def pin(source: Path, target: Path) -> Plan:
    """Copy a plan and mark the copy as pinned.

    Raises:
        ConfigError: There is no plan at the source, or a file at the target.
    """
    plan = msgspec.structs.replace(read(source), pinned=True)
    if target.exists():
        raise ConfigError(f"plan {target}: exists; remove it, or name another file")
    write(plan, target)
    return plan
