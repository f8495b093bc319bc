"""One JSON line a request, written by a thread of its own.

A full disk, a vanished folder or a burst must not slow or end a request: what cannot be written
is counted and dropped.

    FILE      grows to `max_bytes`, then
    FILE.1    it is this one, and each older one moves on; beyond `files` the oldest is deleted

Several processes may write one log, each line whole: who holds the lock of the file that is FILE
now rotates, the others see that FILE is another one and open it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import queue
import re
import stat
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
import structlog

from tailrace.telemetry.phases import Phases

if TYPE_CHECKING:
    from collections.abc import Iterable

log = structlog.get_logger("tailrace.request_log")

_QUEUE_RECORDS = 10_000
_CLOSE_S = 5.0
"""What a file that does not take what is left may cost the server's end."""
_HEAD_BYTES = 512
"""Enough to tell two files apart: a record begins with its id."""


class RequestRecord(msgspec.Struct, kw_only=True):
    """What became of one HTTP request.

    Stamps are monotonic seconds, None: did not happen. Durations are `phases`, `ttft_phases`,
    `decode_wait_s`, `ttft_s` and `predicted_ttft_s`.
    """

    request_id: str
    """As the answer's body names it; empty where none came to be."""
    http_request_id: str = ""
    """The client's X-Request-Id, or the one of ours that the answer's header carries."""
    key: str = ""
    """The name of the API key that it brought; never the key."""
    route: str
    unix_s: float
    """Wall clock at the end, to join with other logs."""
    received_s: float
    """Its first byte came."""
    prompt_ready_s: float | None = None
    submitted_s: float | None = None
    """Handed to the engine."""
    scheduled_s: float | None = None
    """Its first step began."""
    first_token_s: float | None = None
    """The front end had the first token."""
    last_token_s: float | None = None
    finished_s: float
    """The kernel had the answer's last byte, or the client was gone."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    choices: int = 1
    is_streaming: bool = False
    finish_reason: str = ""
    """stop, length, disconnect, slow_reader, error; "refused": the engine never had it."""
    status: int = 200
    """Of the answer; 499: the client left before it began."""
    reason: str = ""
    """Of a refusal: the error's code and message."""
    ttft_s: float | None = None
    """From `received_s` to the first token, of a stream to its first event at the socket."""
    predicted_ttft_s: float | None = None
    """The same, as the engine expected when it got the request; None where it predicted nothing."""
    phases: Phases | None = None
    """They add up to `finished_s - received_s`; of several sequences, that which ended last."""
    ttft_phases: Phases | None = None
    """The same to the first token, of a stream to its first event; that which came first."""
    decode_wait_s: float = 0.0
    """Of the decode phase: prompts of other requests."""


class RequestLog:
    """Appends records to a file; an empty path keeps none.

    Args:
        path: The file.
        max_bytes: Size at which it is rotated; 0: never.
        files: Rotated files that are kept beside it.
    """

    def __init__(self, path: str, *, max_bytes: int = 0, files: int = 1) -> None:
        self.dropped_total = 0
        self._max_bytes = max_bytes
        self._files = files
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
        """Write what is left, then end the thread; what takes longer than seconds is left out."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._records.put(None, timeout=_CLOSE_S)
                self._thread.join(_CLOSE_S)
            self._thread = None

    def _run(self) -> None:
        file: IO[bytes] | None = None
        while (record := self._records.get()) is not None:
            try:
                line = msgspec.json.encode(record) + b"\n"
                file = self._with_room(file or self._open(), len(line))
                self._append(file, line)
            # All but OSError: the record cannot be encoded; it may hold half a character.
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                self._note_drop(error)
                _close(file)
                file = None  # the next record tries the path anew
        _close(file)

    def _open(self) -> IO[bytes]:
        if self._path is None:
            raise OSError("no path")
        return self._path.open("ab", buffering=0)

    def _with_room(self, file: IO[bytes], size: int) -> IO[bytes]:
        """Return the file to append to: another one where this one is full."""
        if not self._max_bytes:
            return file
        seen = os.fstat(file.fileno())
        is_full = seen.st_size > 0 and seen.st_size + size > self._max_bytes
        if not is_full or not stat.S_ISREG(seen.st_mode):
            return file
        self._is_torn = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            if self._path is not None and _is_file(self._path, seen):
                _rotate(self._path, self._files)
        finally:
            _close(file)
        return self._open()

    def _append(self, file: IO[bytes], line: bytes) -> None:
        if self._is_torn:  # end the half line that a full disk left
            line = b"\n" + line
        written = file.write(line)
        is_whole = written == len(line)
        if written:
            self._is_torn = not is_whole
        if not is_whole:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _note_drop(self, error: Exception) -> None:
        if self.dropped_total == 0:
            reason = error.strerror if isinstance(error, OSError) else ascii(error)[:200]
            log.warning("cannot_write", path=str(self._path), error=reason)
        self.dropped_total += 1


def rotated(path: Path) -> list[Path]:
    """Return a log's files that are there, oldest first; the last one is being written."""
    numbered = re.compile(re.escape(path.name) + r"\.(\d+)")
    found = {}
    if path.parent.is_dir():
        for other in path.parent.iterdir():
            match = numbered.fullmatch(other.name)
            if match:
                found[int(match[1])] = other
    return [found[number] for number in sorted(found, reverse=True)] + [path] * path.exists()


class LogMark:
    """Where a log ends now: what is written later can be told from it, whatever is rotated.

    Files are known by how they begin: names move on, and a new file may get a deleted one's inode.

    Args:
        path: The log; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: list[tuple[bytes, int]] = []
        for file in rotated(path):
            size = file.stat().st_size
            self._known.append((_head(file)[:size], size))

    def written_since(self) -> bytes:
        """Return what was written since, but for what has been deleted meanwhile."""
        parts = []
        for file in rotated(self._path):
            head = _head(file)
            known = [size for begins, size in self._known if begins and head.startswith(begins)]
            with file.open("rb") as stream:
                stream.seek(max(known, default=0))
                parts.append(stream.read())
        return b"".join(parts)


def _head(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(_HEAD_BYTES)


def read_records(files: Iterable[Path]) -> tuple[list[RequestRecord], int]:
    """Return the records of files, in order, and how many lines could not be read.

    A full disk may have torn a line.

    Raises:
        OSError: A file cannot be read.
    """
    decoder = msgspec.json.Decoder(RequestRecord)
    found: list[RequestRecord] = []
    damaged = 0
    for file in files:
        with file.open("rb") as stream:
            for line in stream:
                try:
                    found.append(decoder.decode(line))
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    damaged += bool(line.strip())
    return found, damaged


def _is_file(path: Path, seen: os.stat_result) -> bool:
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino)


def _rotate(path: Path, files: int) -> None:
    """Move each file on by one; the oldest is replaced, or deleted where none is kept."""
    if files < 1:
        path.unlink()
        return
    names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, files + 1))]
    for newer, older in reversed(list(itertools.pairwise(names))):
        if newer.exists():
            newer.replace(older)


def _close(file: IO[bytes] | None) -> None:
    if file is not None:
        with contextlib.suppress(OSError):
            file.close()
