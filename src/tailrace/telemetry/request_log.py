"""One JSON line a request, written by a thread of its own.

A full disk, a vanished folder or a burst must not slow or end a request: what cannot be written
is counted and dropped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
from pathlib import Path
from typing import IO

import msgspec
import structlog

log = structlog.get_logger("tailrace.request_log")

_QUEUE_RECORDS = 10_000


class RequestRecord(msgspec.Struct, kw_only=True):
    """What became of one HTTP request; `_s` are monotonic seconds, None: did not happen."""

    request_id: str
    """As the answer's body names it."""
    http_request_id: str = ""
    """The client's X-Request-Id, or the one of ours that the answer's header carries."""
    route: str
    unix_s: float
    """Wall clock at the end, to join with other logs."""
    received_s: float
    prompt_ready_s: float | None = None
    submitted_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    choices: int = 1
    is_streaming: bool = False
    finish_reason: str = ""


class RequestLog:
    """Appends records to a file; an empty path keeps none."""

    def __init__(self, path: str) -> None:
        self.dropped_total = 0
        self._is_torn = False
        self._path = Path(path) if path else None
        self._records: queue.Queue[RequestRecord | None] = queue.Queue(_QUEUE_RECORDS)
        self._thread: threading.Thread | None = None
        if self._path is not None:
            self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
            self._thread.start()

    def write(self, record: RequestRecord) -> None:
        """Hand a record over; returns at once."""
        if self._thread is None:
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self.dropped_total += 1

    def close(self) -> None:
        """Write what is left, then end the thread."""
        if self._thread is not None:
            self._records.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        file: IO[bytes] | None = None
        while (record := self._records.get()) is not None:
            try:
                file = file or self._open()
                self._append(file, msgspec.json.encode(record) + b"\n")
            except OSError as error:
                self._note_drop(error)
                _close(file)
                file = None  # the next record tries the path anew
        _close(file)

    def _open(self) -> IO[bytes]:
        if self._path is None:
            raise OSError("no path")
        return self._path.open("ab", buffering=0)

    def _append(self, file: IO[bytes], line: bytes) -> None:
        if self._is_torn:  # end the half line that a full disk left
            line = b"\n" + line
        written = file.write(line)
        is_whole = written == len(line)
        if written:
            self._is_torn = not is_whole
        if not is_whole:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _note_drop(self, error: OSError) -> None:
        if self.dropped_total == 0:
            log.warning("cannot_write", path=str(self._path), error=error.strerror)
        self.dropped_total += 1


def _close(file: IO[bytes] | None) -> None:
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()
