"""Records as Locust's statistics: the rows TTFT, ITL and E2E of its tables and its web UI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gevent
from gevent.queue import SimpleQueue

from tailrace.bench.stats import e2e_s, gaps_s, ttft_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tailrace.bench.records import Record

EVENTS_A_TURN = 16
"""Statistics events that are fired before streams get their turn again."""


class Reporter:
    """Turns records into Locust's statistics, a few at a time, so that no stream waits for it."""

    def __init__(self, fire: Callable[..., None]) -> None:
        """Report to `fire`, Locust's request event."""
        self._fire = fire
        self._records: SimpleQueue[Record] = SimpleQueue()
        self._greenlet = gevent.spawn(self._work)

    def add(self, record: Record) -> None:
        """Report a record soon."""
        self._records.put(record)

    def finish(self) -> None:
        """Report what is left."""
        self._greenlet.kill()
        while not self._records.empty():
            for event in events_of(self._records.get_nowait()):
                self._fire(**event)

    def _work(self) -> None:
        while True:
            for number, event in enumerate(events_of(self._records.get()), start=1):
                self._fire(**event)
                if number % EVENTS_A_TURN == 0:
                    gevent.sleep(0)


def events_of(record: Record) -> Iterator[dict[str, Any]]:
    """Yield a record's statistics events; none for a request that was cut off."""
    if record.is_ok:
        yield _event("TTFT", ttft_s(record))
        yield from (_event("ITL", gap_s) for gap_s in gaps_s(record))
        yield _event("E2E", e2e_s(record), tokens=record.output_tokens or 0)
    elif record.is_failure:
        took_s = (record.finished_s or record.scheduled_s) - record.scheduled_s
        yield _event("E2E", took_s, failure=f"{record.status}: {record.error}")


def _event(
    kind: str, seconds: float | None, *, tokens: int = 0, failure: str | None = None
) -> dict[str, Any]:
    return {
        "request_type": kind,
        "name": "completion",
        "response_time": None if seconds is None else 1e3 * seconds,
        "response_length": tokens,
        "exception": None if failure is None else RequestFailedError(failure),
        "context": {},
    }


class RequestFailedError(Exception):
    """How Locust is told of a failed request."""
