"""From raw arrivals to the schedule of one run: stretched, cut, clipped, and honest about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, how long it is, and what it shares with others."""

    arrival_s: float
    """Seconds from the first request. Of a later turn of a session, and of a user's later
    requests in a closed loop: the earliest that it can be expected to be due."""
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    """Leading blocks of `Schedule.block_tokens` whole tokens each; equal ids are equal text."""
    priority: int = 0
    """As the server is told; smaller is served earlier."""
    session: int | None = None
    """Requests of one session are sent one after another, by `turn`."""
    turn: int = 0
    """From 0. A later turn's prompt begins with the whole prompt of the turn before it."""
    think_s: float = 0.0
    """A request that waits for an answer is due this long after it ended."""
    user: int | None = None
    """Closed loop: who sends it. A user sends its requests one after another, in the schedule's
    order; the first is due at `arrival_s`, each other one `think_s` after the answer before it."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a trace is turned into a run."""

    rate_scale: float = 1.0
    """Multiplies the arrival rate: 0.5 stretches the time between arrivals to twice its length."""
    duration_s: float | None = None
    """Keeps arrivals before this second of the (stretched) run; None keeps all."""
    max_requests: int | None = None
    max_input_tokens: int | None = None
    """Longer prompts are cut to this length, and counted."""
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check every value once.

        Raises:
            ConfigError: A value is not positive.
        """
        for name in vars(self):
            value = getattr(self, name)
            if value is not None and not value > 0:
                option = name.removesuffix("_s").replace("_", "-")
                raise ConfigError(f"--{option} {value}: must be above 0")


@dataclass(frozen=True)
class Schedule:
    """The requests of one run, in order of time."""

    arrivals: tuple[Arrival, ...]
    source: str
    """What a reader of the report should know about where they come from."""
    duration_s: float
    """The span in which requests arrive; a closed loop's users begin none after it."""
    clipped_inputs: int = 0
    clipped_outputs: int = 0
    block_tokens: int = 0
    """Tokens in a block of `Arrival.prefix_ids`; 0: no prefix is shared."""
    users: int = 0
    """Closed loop: how many users share the requests; 0 is an open loop."""

    @property
    def rate_rps(self) -> float:
        """Requests per second that are offered; a closed loop has none before it has run."""
        return len(self.arrivals) / self.duration_s if self.duration_s > 0 else float("inf")


def plan(
    arrivals: Iterable[Arrival], shape: Shape, *, source: str, block_tokens: int = 0
) -> Schedule:
    """Apply `shape` to raw arrivals; a prompt that is clipped keeps its whole leading blocks.

    Raises:
        ConfigError: No request is left.
    """
    kept = [_stretched(arrival, shape) for arrival in arrivals]
    kept.sort(key=lambda arrival: arrival.arrival_s)
    if shape.duration_s is not None:
        kept = [arrival for arrival in kept if arrival.arrival_s < shape.duration_s]
    kept = kept[: shape.max_requests]
    if not kept:
        raise ConfigError(
            f"{source}: no request arrives within {shape.duration_s} s at --rate-scale "
            f"{shape.rate_scale}; raise --duration or --rate-scale, or take another --seed"
        )
    most_in, most_out = shape.max_input_tokens, shape.max_output_tokens
    return Schedule(
        arrivals=tuple(clipped(arrival, shape, block_tokens) for arrival in kept),
        source=source,
        duration_s=_span(kept, shape),
        block_tokens=block_tokens,
        clipped_inputs=sum(most_in is not None and a.input_tokens > most_in for a in kept),
        clipped_outputs=sum(most_out is not None and a.output_tokens > most_out for a in kept),
    )


def _span(kept: list[Arrival], shape: Shape) -> float:
    """Return the duration asked for, or the last arrival where requests ran out before it."""
    cut_by_count = shape.max_requests is not None and len(kept) == shape.max_requests
    if shape.duration_s is None or cut_by_count:
        return kept[-1].arrival_s
    return shape.duration_s


def _stretched(arrival: Arrival, shape: Shape) -> Arrival:
    return replace(arrival, arrival_s=arrival.arrival_s / shape.rate_scale)


def clipped(arrival: Arrival, shape: Shape, block_tokens: int) -> Arrival:
    """Return the request within the longest lengths, with the prefix blocks that still fit."""
    input_tokens = min(arrival.input_tokens, shape.max_input_tokens or arrival.input_tokens)
    whole_blocks = input_tokens // block_tokens if block_tokens else 0
    return replace(
        arrival,
        input_tokens=input_tokens,
        output_tokens=min(arrival.output_tokens, shape.max_output_tokens or arrival.output_tokens),
        prefix_ids=arrival.prefix_ids[:whole_blocks],
    )
