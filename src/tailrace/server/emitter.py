"""One stream's way out: pieces in, bytes to the client, with a bound on what it has not taken.

    pump --put--> pending pieces --render, join--> send   (blocks while the client is behind)

Rules
1. While `send` is free, each piece is an event of its own; what waits is joined into one send.
2. While `send` is blocked, a piece is absorbed by the last waiting one of its choice: nothing is
   lost, there are only fewer events. Token counts stay exact, for pieces carry their tokens.
3. What waits may cost `limit_bytes`. Beyond that `put` says no, and the caller ends the stream.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tailrace.server.choice import Piece

# What an event costs besides its text, roughly: its envelope, and each scored token's entry.
_EVENT_BYTES = 256
_SCORE_BYTES = 96


class Emitter:
    """Writes one stream.

    Args:
        send: Sends body bytes; blocks while the client is behind.
        render: Turns a piece into an event's bytes.
        limit_bytes: Most that may wait.
        opening: Goes out before the first piece.
    """

    def __init__(
        self,
        send: Callable[[bytes], Awaitable[None]],
        render: Callable[[Piece], bytes],
        *,
        limit_bytes: int,
        opening: bytes = b"",
    ) -> None:
        self._send = send
        self._render = render
        self._limit_bytes = limit_bytes
        self._opening = opening
        self._pending: list[Piece] = []
        self._last_of: dict[int, Piece] = {}
        self._pending_bytes = 0
        self._is_sending = False
        self._is_complete = False
        self._wakeup = asyncio.Event()
        self.sent_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """What waits, by its estimated cost."""
        return self._pending_bytes

    def put(self, piece: Piece) -> bool:
        """Take a piece; return False where the client is too far behind to take more."""
        waiting = self._last_of.get(piece.index) if self._is_sending else None
        self._pending_bytes += _cost(piece) + (0 if waiting else _EVENT_BYTES)
        if self._is_sending and self._pending_bytes > self._limit_bytes:
            return False
        if waiting is not None:
            waiting.absorb(piece)
        else:
            self._pending.append(piece)
            self._last_of[piece.index] = piece
        self._wakeup.set()
        return True

    def complete(self) -> None:
        """Say that no piece will follow."""
        self._is_complete = True
        self._wakeup.set()

    async def wait(self) -> bool:
        """Wait for something to do; return whether a piece is pending."""
        await self._wakeup.wait()
        return bool(self._pending)

    async def run(self) -> None:
        """Write until complete and empty."""
        while await self.wait():
            await self._write(self._take())

    def _take(self) -> bytes:
        pieces, self._pending = self._pending, []
        self._last_of.clear()
        self._pending_bytes = 0
        if not self._is_complete:
            self._wakeup.clear()
        opening, self._opening = self._opening, b""
        return opening + b"".join([self._render(piece) for piece in pieces])

    async def _write(self, data: bytes) -> None:
        if not data:  # a piece need not be an event
            return
        self._is_sending = True
        try:
            await self._send(data)
        finally:
            self._is_sending = False
        self.sent_bytes += len(data)


def _cost(piece: Piece) -> int:
    scores = sum(1 + len(score.top_ids) for score in piece.logprobs)
    return len(piece.text.encode("utf-8", "replace")) + _SCORE_BYTES * scores
