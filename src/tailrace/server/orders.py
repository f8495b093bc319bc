"""What the process that watches the front ends tells each of them, and hears of them.

One JSON line a message: orders come on a front end's standard input, whose end means that the
watcher died; the front end's words go out on its standard output. No request passes here: front
ends talk to the engine themselves.
"""

from __future__ import annotations

import msgspec

from tailrace.config import Config


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Come up; the first order."""

    index: int
    """Of this front end, from 0 on."""
    identity: str
    """Another for each life of it: see `types.ForgetFrontend`."""
    config: Config
    port: int
    """The one that all of them listen on."""
    joins: bool = False
    """Whether others serve there: no client is to come to one that does not yet."""


class EngineUp(msgspec.Struct, frozen=True, tag="engine_up"):
    """There is an engine process; it may still be loading."""

    socket: str
    pid: int
    number: int
    """1 for the first."""


class EngineDown(msgspec.Struct, frozen=True, tag="engine_down"):
    """It has ended."""

    number: int


class Family(msgspec.Struct, frozen=True, tag="family"):
    """Who the front ends are, for whoever is asked for metrics."""

    pids: dict[str, int]
    """By role, such as "frontend-0"."""
    restarts: int
    """How often one of them was started again."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new requests, and end when the running ones have; a second one means: at once."""


Order = Start | EngineUp | EngineDown | Family | Drain


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """A front end listens, and the engine is ready."""

    model: str


Word = Serving
