"""What happened to each request: one JSONL record, all that statistics and report need.

Times are seconds from the run's start on the client's monotonic clock. `scheduled_s` is when the
request was due; every latency counts from there, so that a late client or a stalled server
cannot hide behind the requests it held back. A later turn of a session, and a closed-loop user's
next request, are due when the answer before them ended and their think time has passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

STATUSES = {
    "ok": "complete, with as many tokens as were asked for",
    "connect": "no connection",
    "http": "an HTTP status other than 200",
    "stream": "an error event, or a stream that broke or could not be read",
    "short": "fewer tokens than were asked for",
    "timeout": "not complete within the time limit",
    "client": "the client itself ran out of sockets or files, or its process died",
    "cancelled": "in flight when the run was interrupted",
}
"""How a request can end. `cancelled` is neither success nor failure; all but it and `ok` failed."""


class Record(msgspec.Struct, kw_only=True):
    """One request from schedule to end."""

    index: int
    scheduled_s: float
    """When it was due."""
    planned_input_tokens: int
    planned_output_tokens: int
    status: str = "cancelled"
    dispatched_s: float | None = None
    """The client turned to it; minus `scheduled_s` this is the client's own lag."""
    sent_s: float | None = None
    """Connected, and the last byte handed to the kernel."""
    first_token_s: float | None = None
    """The first bytes with generated text were read."""
    finished_s: float | None = None
    """The last bytes were read, or the failure was known."""
    chunk_s: list[float] = []
    """When each chunk with a token was read, from the first with text on."""
    input_tokens: int | None = None
    """As the server counted them."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server says it had cached."""
    finish_reason: str | None = None
    http_status: int | None = None
    """The answer's; of a refusal within a stream (`stream`) the 4xx code of its error event."""
    error: str | None = None
    request_id: str = ""
    """Sent as X-Request-Id; the server's own log may know the request by it."""
    priority: int = 0
    """As sent; 0 is not sent."""
    user: int | None = None
    """The closed loop's user."""
    session: int | None = None
    turn: int = 0
    """0-based within its session."""
    worker: int = 0
    """The client process that sent it."""

    @property
    def is_ok(self) -> bool:
        """Whether the answer came whole."""
        return self.status == "ok"

    @property
    def is_failure(self) -> bool:
        """Whether the server (or the client, on its behalf) failed it."""
        return self.status not in {"ok", "cancelled"}


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Record)


def to_line(record: Record) -> bytes:
    """Return the record as one line of JSONL."""
    return _ENCODER.encode(record) + b"\n"


def write_records(file: Path, records: Iterable[Record]) -> None:
    """Write records as JSONL."""
    file.write_bytes(b"".join(map(to_line, records)))


def read_records(file: Path) -> list[Record]:
    """Read records, in order of schedule.

    Raises:
        ConfigError: The file cannot be read or a line is no record.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_DECODER.decode(line))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{file}:{number}: not a request record ({error})") from error
    return sorted(found, key=lambda record: record.index)
