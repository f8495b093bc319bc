"""The event loop that a client runs on: uvloop where there is one, about half the CPU a chunk."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end on a new event loop, as asyncio.run does."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the fastest loop of this platform; None is asyncio's own."""
    try:
        import uvloop  # noqa: PLC0415  # not on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop
