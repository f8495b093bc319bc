"""Server-sent events out of bytes, however the network cut them.

The rules of the HTML standard that matter here: a line ends with LF, CR LF or CR; a blank line
ends an event; several `data` lines join with LF; lines that open with a colon are comments;
unknown fields are passed over; an event without data is none; what the stream's end cuts off is
dropped. Any split of the bytes gives the same events.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_EVENT_BYTES = 1 << 20
"""A longer event is no token of text: it is refused, so that memory stays flat."""


class SseError(ValueError):
    """The bytes cannot be events."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    data: bytes
    name: str = "message"


class SseParser:
    """Feed bytes, get events."""

    def __init__(self) -> None:
        self._tail = b""
        self._after_cr = False
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name = ""

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that `chunk` completes.

        Raises:
            SseError: An event is longer than `MAX_EVENT_BYTES`.
        """
        if self._after_cr and chunk:
            # The line ended at CR; an LF that follows belongs to the same line end.
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if not chunk:
            return []
        lines = (self._tail + chunk).splitlines(keepends=True)
        self._tail = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        self._after_cr = not self._tail and lines[-1].endswith(b"\r")
        events = [event for line in lines if (event := self._line(line.rstrip(b"\r\n")))]
        _check_size(len(self._tail))
        return events

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        _check_size(len(line) + self._data_bytes)
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._data_bytes += len(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> Event | None:
        data, name = self._data, self._name
        self._data, self._data_bytes, self._name = [], 0, ""
        return Event(b"\n".join(data), name or "message") if data else None


def _check_size(size: int) -> None:
    if size > MAX_EVENT_BYTES:
        raise SseError(f"an event of {size} bytes or more; the limit is {MAX_EVENT_BYTES}")
