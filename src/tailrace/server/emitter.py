"""One stream's way out: pieces in, bytes to the client, with a bound on what it has not taken.

    turn --put--> pending pieces --render, join--> write_now   in the same turn, client not behind
                                               '-> send        from a task, which it blocks

Rules
1. While the client takes bytes, each piece is an event of its own, written in the stream's turn
   (see outbox.py); what waits is joined into one write.
2. While the client is behind, a piece is absorbed by the last waiting one of its choice: nothing is
   lost, there are only fewer events. Token counts stay exact, for pieces carry their tokens.
3. What waits may cost `limit_bytes`. Beyond that `put` says no, and the caller ends the stream.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tailrace.server.choice import Piece

# What an event costs besides its text, roughly: its envelope, and each scored token's entry.
_EVENT_BYTES = 256
_SCORE_BYTES = 96


@dataclass(frozen=True)
class Channel:
    """How a stream is written at once."""

    is_free: Callable[[], bool]
    """Whether the client takes bytes now."""
    write_now: Callable[[bytes], None]
    """Only while it does."""


class Emitter:
    """Writes one stream.

    Args:
        send: Sends body bytes; blocks while the client is behind.
        render: Turns a piece into an event's bytes.
        limit_bytes: Most that may wait.
        opening: Goes out before the first piece.
        channel: Writes at once while the client is not behind; None: everything goes by `send`.
    """

    def __init__(
        self,
        send: Callable[[bytes], Awaitable[None]],
        render: Callable[[Piece], bytes],
        *,
        limit_bytes: int,
        opening: bytes = b"",
        channel: Channel | None = None,
    ) -> None:
        self._send = send
        self._render = render
        self._limit_bytes = limit_bytes
        self._opening = opening
        self._channel = channel
        self._pending: list[Piece] = []
        self._last_of: dict[int, Piece] = {}
        self._pending_bytes = 0
        self._is_sending = False
        self._is_complete = False
        self._wakeup = asyncio.Event()
        self.sent_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """What waits for a client that is behind, by its estimated cost."""
        return self._pending_bytes

    @property
    def has_begun(self) -> bool:
        """Whether anything was written."""
        return self.sent_bytes > 0

    def put(self, piece: Piece) -> bool:
        """Take a piece; return False where the client is too far behind to take more.

        Pieces for a channel want a `write_pending` after them.
        """
        if self._is_direct():
            self._pending.append(piece)  # until the turn's end
            return True
        is_behind = self._is_sending or self._channel is not None
        waiting = self._last_of.get(piece.index) if is_behind else None
        self._pending_bytes += _cost(piece) + (0 if waiting else _EVENT_BYTES)
        if is_behind and self._pending_bytes > self._limit_bytes:
            return False
        if waiting is not None:
            waiting.absorb(piece)
        else:
            self._pending.append(piece)
            self._last_of[piece.index] = piece
        self._wakeup.set()
        return True

    def write_pending(self) -> None:
        """Write what waits, or leave it to `run` where the client has fallen behind."""
        if not self._pending or self._is_sending:
            return  # written meanwhile, or `run` goes on with it
        if self._channel is None or not self._is_direct():
            self._wakeup.set()
            return
        data = self._take()
        if data:  # a piece need not be an event
            self._channel.write_now(data)
            self.sent_bytes += len(data)

    def complete(self) -> None:
        """Say that no piece will follow."""
        self._is_complete = True
        self._wakeup.set()

    async def run(self) -> None:
        """Write what is not written at once, until complete and empty."""
        while True:
            await self._wakeup.wait()
            if self._pending:
                await self._write(self._take())
            elif self._is_complete:
                return
            else:
                self._wakeup.clear()

    def _is_direct(self) -> bool:
        return not self._is_sending and self._channel is not None and self._channel.is_free()

    def _take(self) -> bytes:
        pieces, self._pending = self._pending, []
        self._last_of.clear()
        self._pending_bytes = 0
        if len(pieces) == 1 and not self._opening:
            return self._render(pieces[0])
        opening, self._opening = self._opening, b""
        return opening + b"".join([self._render(piece) for piece in pieces])

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        self._is_sending = True
        try:
            await self._send(data)
        finally:
            self._is_sending = False
        self.sent_bytes += len(data)


def _cost(piece: Piece) -> int:
    text = piece.text
    text_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
    if not piece.logprobs:
        return text_bytes
    scores = sum(1 + len(score.top_ids) for score in piece.logprobs)
    return text_bytes + _SCORE_BYTES * scores
