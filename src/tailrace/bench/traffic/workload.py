"""A workload: the `[traffic]` table of a plan, and the schedules that are drawn from it.

    source     a preset, a profile of figures, or a trace file: lengths, and often arrival times
    overrides  other arrivals, another rate, other lengths, longest lengths
    form       open loop (each request due at its time), sessions of several turns, or a closed
               loop of users who wait for their answer and then think

`build` is a function of its arguments alone. One seed has one stream of random numbers for each
purpose (times, lengths, priorities, thinking), so that the same seed at another rate sends the
same requests, only closer together: what a search for the highest rate should compare.
A trace file is replayed from its first request whatever the seed.

Later turns repeat the conversation so far: prompt k is prompt k-1, then a stand-in for its answer
(text of exactly the answer's planned length), then new text. What the server really answered is
not sent back: lengths would then not be known before the run, and would differ between engines.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.bench.traffic import arrivals as at
from tailrace.bench.traffic.lengths import Lengths, draw_pair, read_lengths
from tailrace.bench.traffic.presets import PRESETS, Preset
from tailrace.bench.traffic.profile import Profile, draw
from tailrace.bench.traffic.schedule import Arrival, Schedule, Shape, clipped
from tailrace.bench.traffic.source import PROFILES
from tailrace.bench.traffic.trace import Trace, read_trace
from tailrace.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLOSED = "closed"
ARRIVALS = ("", *at.KINDS, CLOSED)
FASTEST_TOKEN_S = 0.002
"""No answer is expected to take less than this a token: how many requests a user may need."""
MOST_CLOSED_REQUESTS = 50_000
"""More prompts than this are not made for a closed loop without being asked for by number."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is sent; every field is an option of the command line and a key of a plan."""

    source: str
    """A preset (`chat70`), a profile (`azure-conv`), or the path of a trace file."""
    arrivals: str = ""
    """poisson, gamma, constant, ramp, step, or closed; empty: as the source has them (a preset:
    poisson), or closed where `users` is given."""
    burstiness: float = 1.0
    """Shape of gamma arrivals: 1 is Poisson, below 1 is burstier."""
    rate_rps: float | None = None
    """Offered requests per second; None: the source's own. Under ramp and step, their mean."""
    rates: str = ""
    """Of ramp and step: second:rate points, such as "0:1,300:10"."""
    input_tokens: str = ""
    """Lengths of prompts (see lengths.py); empty: the source's own."""
    output_tokens: str = ""
    """Lengths of answers; empty: the source's own."""
    max_input_tokens: int | None = None
    """Longer prompts are cut; a session ends before the turn whose prompt would be longer."""
    max_output_tokens: int | None = None
    users: int = 0
    """Closed loop: this many users. 0 is an open loop, or the preset's own under `closed`."""
    think_s: str = ""
    """Seconds from an answer's end to the next request, "0.5" or "0.1-0.5" (uniform)."""
    turns: int = 1
    """Requests of a session, each continuing the conversation."""
    priorities: str = ""
    """priority:share pairs, such as "0:0.9,1:0.1"; smaller is served earlier."""
    text_file: Path | None = None
    """A text, or a folder of .txt files, that prompts are cut from; None: Python's own."""
    seed: int = 0

    _parsed: _Parsed = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check every value once.

        Raises:
            ConfigError: A value is unknown, out of range, or contradicts another.
        """
        object.__setattr__(self, "_parsed", _parse(self))

    @property
    def is_closed(self) -> bool:
        """Whether users wait for their answers, so that no rate is offered."""
        return self._parsed.users > 0

    def describe(self) -> str:
        """Return the report's sentence: where requests come from, when, and how long they are."""
        parsed = self._parsed
        parts = [parsed.about, parsed.when]
        if parsed.inputs is not None:
            parts.append(f"prompts of {parsed.inputs.describe()}")
        if parsed.outputs is not None:
            parts.append(f"answers of {parsed.outputs.describe()}")
        parts += _bounds(self)
        if self.turns > 1:
            parts.append(f"sessions of {self.turns} turns with stand-in answers in the history")
        if parsed.think != (0.0, 0.0):
            parts.append(f"{parsed.think[0]:g}-{parsed.think[1]:g} s of thinking")
        if self.priorities:
            parts.append(f"priorities {self.priorities}")
        return "; ".join(parts)


@dataclass(frozen=True)
class _Parsed:
    """A workload's values, read."""

    origin: Preset | Profile | Path
    about: str
    when: str
    inputs: Lengths | None
    """None: the origin's own."""
    outputs: Lengths | None
    curve: at.RateCurve | None
    users: int
    think: tuple[float, float]
    priorities: tuple[tuple[int, float], ...]


def _parse(workload: Workload) -> _Parsed:
    origin = _origin(workload.source)
    preset = origin if isinstance(origin, Preset) else None
    _check(workload)
    users = workload.users
    if workload.arrivals == CLOSED and not users:
        users = preset.users if preset else 0
        if not users:
            raise ConfigError("arrivals 'closed': say how many users")
    think = workload.think_s or (preset.think_s if preset and users else "")
    inputs = workload.input_tokens or (preset.input_tokens if preset else "")
    outputs = workload.output_tokens or (preset.output_tokens if preset else "")
    is_shaped = workload.arrivals in {"ramp", "step"}
    return _Parsed(
        origin=origin,
        about=_about(origin, workload.source),
        when=_when(workload, users, is_preset=preset is not None),
        inputs=read_lengths(inputs) if inputs else None,
        outputs=read_lengths(outputs, is_output=True) if outputs else None,
        curve=(
            at.read_curve(workload.rates, is_ramp=workload.arrivals == "ramp")
            if is_shaped
            else None
        ),
        users=users,
        think=_read_think(think),
        priorities=_read_priorities(workload.priorities),
    )


def _check(workload: Workload) -> None:
    kind = workload.arrivals
    if kind not in ARRIVALS:
        raise ConfigError(
            f"arrivals {kind!r}: not one of {', '.join(ARRIVALS[1:])}{nearest(kind, ARRIVALS)}"
        )
    if bool(workload.rates) != (kind in {"ramp", "step"}):
        raise ConfigError("rates: goes with arrivals 'ramp' or 'step', which need it")
    if workload.users and kind not in {"", CLOSED}:
        raise ConfigError(f"users {workload.users}: a closed loop has no arrivals {kind!r}")
    if workload.burstiness != 1.0 and kind != "gamma":
        raise ConfigError("burstiness: goes with arrivals 'gamma'")
    if (workload.users or kind == CLOSED) and workload.rate_rps is not None:
        raise ConfigError("rate_rps: a closed loop's rate follows from its answers; leave it out")
    for name in ("burstiness", "rate_rps", "max_input_tokens", "max_output_tokens", "turns"):
        value = getattr(workload, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} {value}: must be above 0")
    if workload.users < 0:
        raise ConfigError(f"users {workload.users}: must be 0 (open loop) or more")
    if workload.text_file is not None and not workload.text_file.exists():
        raise ConfigError(f"text_file {workload.text_file}: no such file or folder")


def _origin(source: str) -> Preset | Profile | Path:
    found: Preset | Profile | None = PRESETS.get(source) or PROFILES.get(source)
    if found is not None:
        return found
    file = Path(source)
    if file.is_file():
        return file
    known = [*PRESETS, *PROFILES]
    raise ConfigError(
        f"{source}: neither a trace file nor one of {', '.join(known)}{nearest(source, known)}"
    )


def _about(origin: Preset | Profile | Path, source: str) -> str:
    if isinstance(origin, Preset):
        return f"preset {origin.name} ({origin.about})"
    if isinstance(origin, Profile):
        return f"profile {origin.name} ({origin.source})"
    return f"trace {Path(source).name}"


def _when(workload: Workload, users: int, *, is_preset: bool) -> str:
    if users:
        return f"closed loop of {users} users"
    kind = workload.arrivals or ("poisson" if is_preset else "")
    named = {
        "": "arrivals of the source",
        "poisson": "Poisson arrivals",
        "gamma": f"gamma arrivals of burstiness {workload.burstiness:g}",
        "constant": "constant arrivals",
        "ramp": f"Poisson arrivals ramped {workload.rates}",
        "step": f"Poisson arrivals stepped {workload.rates}",
    }
    return named[kind]


def _bounds(workload: Workload) -> list[str]:
    sides = (("prompts", workload.max_input_tokens), ("answers", workload.max_output_tokens))
    return [f"{side} cut to {most} tokens" for side, most in sides if most is not None]


def _read_think(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    try:
        span = (float(low or 0), float(high or low or 0))
    except ValueError as error:
        raise ConfigError(f"think_s {text!r}: write 0.5 or 0.1-0.5, in seconds") from error
    if not 0 <= span[0] <= span[1] < math.inf:
        raise ConfigError(f"think_s {text!r}: needs 0 <= low <= high")
    return span


def _read_priorities(text: str) -> tuple[tuple[int, float], ...]:
    if not text:
        return ((0, 1.0),)
    try:
        pairs = [part.split(":") for part in text.split(",")]
        found = tuple((int(priority), float(share)) for priority, share in pairs)
    except ValueError as error:
        raise ConfigError(f"priorities {text!r}: write 0:0.9,1:0.1 (priority:share)") from error
    total = sum(share for _, share in found)
    if not all(share > 0 for _, share in found) or not math.isclose(total, 1, abs_tol=1e-6):
        raise ConfigError(f"priorities {text!r}: shares must be above 0 and add up to 1")
    return found


def build(
    workload: Workload,
    *,
    rate_rps: float | None,
    duration_s: float | None,
    max_requests: int | None = None,
    seed: int,
) -> Schedule:
    """Return the requests of one run; the same arguments give the same ones.

    Args:
        workload: What is sent.
        rate_rps: Offered requests per second; None: the workload's, or its source's own.
        duration_s: Requests become due before this second; None: as many as the trace or
            `max_requests` has.
        max_requests: The earliest so many are kept; None: all.
        seed: Chooses times, lengths and priorities.

    Raises:
        ConfigError: No end or no rate is given, a trace is too short for what is asked, or no
            request is left.
    """
    for name, value in (("rate", rate_rps), ("duration", duration_s), ("requests", max_requests)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} {value}: must be above 0")
    build = _Build(workload, rate_rps or workload.rate_rps, duration_s, max_requests, seed)
    return build.closed() if workload.is_closed else build.open()


@dataclass
class _Build:
    """The making of one schedule."""

    workload: Workload
    rate_rps: float | None
    duration_s: float | None
    max_requests: int | None
    seed: int
    clipped_inputs: int = 0
    clipped_outputs: int = 0
    left_out: int = 0
    """Turns whose prompt would have been too long."""

    def __post_init__(self) -> None:
        self.parsed = self.workload._parsed  # noqa: SLF001  # one module, two classes
        self.shape = Shape(
            max_input_tokens=self.workload.max_input_tokens,
            max_output_tokens=self.workload.max_output_tokens,
        )
        own_block_tokens = self.own_block_tokens()
        if own_block_tokens and self.workload.turns > 1:
            raise ConfigError(
                f"turns {self.workload.turns}: the prompts of {self.workload.source} already begin "
                "like earlier ones; leave turns at 1, or take a source without shared prefixes"
            )
        self.has_lost_prefixes = own_block_tokens > 0 and self.parsed.inputs is not None
        self.block_tokens = 0 if self.has_lost_prefixes else own_block_tokens
        self.think_rng = self.rng("think")
        self.priority_rng = self.rng("priority")

    def rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self.seed}:{purpose}")

    # Open loop

    def open(self) -> Schedule:
        is_finite = isinstance(self.parsed.origin, Path)
        if self.duration_s is None and self.max_requests is None and not is_finite:
            raise ConfigError(
                f"{self.workload.source} has no end: give a duration or a number of requests"
            )
        found: list[Arrival] = []
        sessions = self.sessions()
        for number, due_s in enumerate(self.times()):
            # So many sessions have at least as many requests: the surplus is cut when sorted.
            if number == self.max_requests:
                break
            if self.duration_s is not None and due_s >= self.duration_s:
                break
            session = next(sessions, None)
            if session is None:
                self.check_long_enough(len(found))
                break
            found += self.placed(session, due_s, number)
        else:
            self.check_long_enough(len(found))
        return self.schedule(found)

    def check_long_enough(self, count: int) -> None:
        """Refuse a trace, or a rate that falls to 0, that ends before what was asked for."""
        if self.duration_s is None and self.max_requests is None:
            return
        if self.max_requests is not None and count >= self.max_requests:
            return
        is_dried_up = self.parsed.curve is not None and self.parsed.curve.points[-1][1] == 0
        if self.duration_s is not None and is_dried_up:
            return
        raise ConfigError(
            f"{self.workload.source} ends after {count} requests, before the "
            f"{self.duration_s or math.inf:g} s or {self.max_requests or math.inf:g} requests "
            "asked for; lower the duration or the rate, or draw from a profile"
        )

    def placed(
        self, session: list[Arrival], due_s: float, number: int, think_s: float = 0.0
    ) -> Iterator[Arrival]:
        """Yield a session's requests at the earliest time each can be due."""
        is_single = self.workload.turns == 1
        for turn, arrival in enumerate(session):
            if turn:
                think_s = self.think()
                due_s += session[turn - 1].output_tokens * FASTEST_TOKEN_S + think_s
            yield replace(
                arrival,
                arrival_s=due_s,
                session=None if is_single else number,
                turn=turn,
                think_s=think_s,
            )

    def times(self) -> Iterator[float]:
        """Yield when sessions begin: each is `turns` requests, and the rate is of requests."""
        kind = self.workload.arrivals
        origin = self.parsed.origin
        if not kind and not isinstance(origin, Preset):
            scale = (self.rate_rps or self.own_rate_rps()) / self.own_rate_rps()
            own = (arrival.arrival_s / scale for arrival in self.raw())
            return itertools.islice(own, 0, None, self.workload.turns)
        if self.parsed.curve is not None:
            return self.curve_times(self.parsed.curve)
        rate_rps = self.rate_rps
        if rate_rps is None:
            if isinstance(origin, Preset):
                raise ConfigError(f"{self.workload.source} has no rate of its own: give one")
            rate_rps = self.own_rate_rps()
        rate_rps /= self.workload.turns
        rng = self.rng("times")
        named: dict[str, Callable[[], Iterator[float]]] = {
            "": lambda: at.poisson(rng, rate_rps),
            "poisson": lambda: at.poisson(rng, rate_rps),
            "gamma": lambda: at.gamma(rng, rate_rps, self.workload.burstiness),
            "constant": lambda: at.constant(rate_rps),
        }
        return named[kind]()

    def curve_times(self, curve: at.RateCurve) -> Iterator[float]:
        if self.rate_rps is not None:
            if self.duration_s is None:
                raise ConfigError("rate_rps with arrivals 'ramp' or 'step': give a duration")
            curve = curve.scaled_to(self.rate_rps, self.duration_s)
        turns = self.workload.turns
        points = tuple((second, rate / turns) for second, rate in curve.points)
        return replace(curve, points=points).arrivals(self.rng("times"))

    def own_rate_rps(self) -> float:
        origin = self.parsed.origin
        if isinstance(origin, Profile):
            return origin.rate_rps
        if isinstance(origin, Path):
            return _trace(origin).rate_rps
        raise AssertionError(origin)

    # Closed loop

    def closed(self) -> Schedule:
        if self.rate_rps is not None:
            raise ConfigError(
                "rate: a closed loop has none to set; its rate follows from its answers"
            )
        if self.duration_s is None:
            raise ConfigError("a closed loop has no end: give a duration")
        # When each user's last answer can have ended at the earliest. Whoever can be next sends
        # next: users have equal shares of the time, not of the requests.
        free = [(0.0, user) for user in range(self.parsed.users)]
        found: list[Arrival] = []
        for number, session in enumerate(self.sessions()):
            free_s, user = free[0]
            is_enough = self.max_requests is not None and len(found) >= self.max_requests
            if is_enough or free_s >= self.duration_s:
                break
            think_s = self.think()
            placed = list(self.placed(session, free_s + think_s, number, think_s))
            ended_s = placed[-1].arrival_s + placed[-1].output_tokens * FASTEST_TOKEN_S
            heapq.heapreplace(free, (ended_s, user))
            found += [replace(arrival, user=user) for arrival in placed]
            self.check_not_too_many(len(found))
        else:
            self.check_long_enough(len(found))
        return self.schedule(found)

    def check_not_too_many(self, count: int) -> None:
        if self.max_requests is None and count > MOST_CLOSED_REQUESTS:
            raise ConfigError(
                f"{self.parsed.users} users may need more than {MOST_CLOSED_REQUESTS} prompts in "
                f"{self.duration_s:g} s; say how many to make, and the run ends when a user has "
                "none left"
            )

    # Both

    def schedule(self, found: list[Arrival]) -> Schedule:
        found.sort(key=lambda arrival: arrival.arrival_s)
        if self.duration_s is not None:
            found = [arrival for arrival in found if arrival.arrival_s < self.duration_s]
        is_cut = self.max_requests is not None and len(found) >= self.max_requests
        found = found[: self.max_requests]
        if not found:
            raise ConfigError(
                f"{self.workload.source}: no request is due within {self.duration_s} s; raise the "
                "duration or the rate, or take another seed"
            )
        notes = [self.workload.describe()]
        if self.block_tokens:
            notes.append(f"prefixes shared in blocks of {self.block_tokens} tokens")
        if self.has_lost_prefixes:
            notes.append("the source's shared prefixes left out with its prompt lengths")
        if self.left_out:
            notes.append(f"{self.left_out} turns too long and left out")
        # A closed loop ends by its clock, however many requests its users have left.
        is_cut = is_cut and not self.parsed.users
        return Schedule(
            arrivals=tuple(found),
            source=f"{'; '.join(notes)}; seed {self.seed}",
            duration_s=(
                found[-1].arrival_s if is_cut or self.duration_s is None else self.duration_s
            ),
            clipped_inputs=self.clipped_inputs,
            clipped_outputs=self.clipped_outputs,
            block_tokens=self.block_tokens,
            users=self.parsed.users,
        )

    def sessions(self) -> Iterator[list[Arrival]]:
        """Yield the requests of one session after another, lengths final, times not yet."""
        requests = self.requests()
        while group := list(itertools.islice(requests, self.workload.turns)):
            priority = self.priority()
            yield [replace(arrival, priority=priority) for arrival in self.grown(group)]

    def grown(self, group: list[Arrival]) -> Iterator[Arrival]:
        """Yield turns, each with the conversation so far before its own text."""
        history = 0
        for number, arrival in enumerate(group):
            input_tokens = history + arrival.input_tokens
            most = self.workload.max_input_tokens
            if history and most is not None and input_tokens > most:
                self.left_out += len(group) - number
                return
            yield replace(arrival, input_tokens=input_tokens)
            history = input_tokens + arrival.output_tokens

    def requests(self) -> Iterator[Arrival]:
        """Yield lengths and prefixes, clipped."""
        rng = self.rng("lengths")
        inputs, outputs = self.parsed.inputs, self.parsed.outputs
        for raw in self.raw():
            arrival = raw
            if inputs is not None and outputs is not None:
                arrival = Arrival(raw.arrival_s, *draw_pair(rng, inputs, outputs))
            elif inputs is not None:
                arrival = Arrival(raw.arrival_s, inputs.draw(rng), raw.output_tokens)
            elif outputs is not None:
                arrival = replace(raw, output_tokens=outputs.draw(rng))
            yield self.clip(arrival)

    def raw(self) -> Iterator[Arrival]:
        """Yield the source's own requests; a preset's have no lengths yet."""
        origin = self.parsed.origin
        if isinstance(origin, Preset):
            return itertools.repeat(Arrival(0.0, 1, 1))
        if isinstance(origin, Profile):
            return draw(origin, seed=self.seed)
        return iter(_trace(origin).arrivals)

    def own_block_tokens(self) -> int:
        """Return how long the blocks of the source's prefix ids are; 0: it has none."""
        origin = self.parsed.origin
        if isinstance(origin, Profile):
            return origin.prefixes.block_tokens if origin.prefixes else 0
        return _trace(origin).block_tokens if isinstance(origin, Path) else 0

    def clip(self, arrival: Arrival) -> Arrival:
        short = clipped(arrival, self.shape, self.block_tokens)
        self.clipped_inputs += short.input_tokens < arrival.input_tokens
        self.clipped_outputs += short.output_tokens < arrival.output_tokens
        return short

    def think(self) -> float:
        return self.think_rng.uniform(*self.parsed.think)

    def priority(self) -> int:
        names = [priority for priority, _ in self.parsed.priorities]
        shares = [share for _, share in self.parsed.priorities]
        return self.priority_rng.choices(names, shares)[0]


@functools.lru_cache(maxsize=4)
def _trace(file: Path) -> Trace:
    # A search builds many schedules from one file, and a plan does not change it.
    return read_trace(file)
