"""From a Job to bytes on the wire: whole or streamed, watched for a client that goes away.

    engine's message --> outbox --turn--> generation --> emitter --> written     (no task at all)
    handler --+-- writer  emitter --> send       where the client is behind, and for the end
              '-- gone    the connection's end

Whichever of "writer" and "gone" ends first ends the request; so does a client that is too far
behind, or that does not take the end. The head of a stream is sent with its first piece, so that
what fails before is answered with a proper status.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import structlog

from tailrace.errors import RequestError, TailraceError
from tailrace.server.emitter import Channel, Emitter
from tailrace.server.generation import Generation
from tailrace.server.record_keeping import keep_record
from tailrace.server.standing import PRIORITY_HEADER, standing_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from tailrace.server.choice import Piece
    from tailrace.server.generation import Job
    from tailrace.server.http import Request
    from tailrace.server.services import Services, TextServices

log = structlog.get_logger("tailrace.answering")

DELIVERY_TIMEOUT_S = 60.0
"""A client that has not taken the rest of its stream so long after the last token is dropped."""

_T = TypeVar("_T")


class Format(Protocol):
    """How one route writes its answers."""

    every_token: bool
    """Whether a token without text of its own is an event."""

    def opening(self) -> bytes:
        """Return what a stream begins with."""
        ...

    def event(self, piece: Piece) -> bytes:
        """Return a piece as events of a stream."""
        ...

    def closing(self, generation: Generation) -> bytes:
        """Return what a stream ends with."""
        ...

    def failure(self, error: RequestError) -> bytes:
        """Return what a stream ends with once it has failed."""
        ...

    def whole(self, pieces: list[Piece], generation: Generation) -> bytes:
        """Return the JSON of an answer that does not stream; one piece for each choice."""
        ...


class SlowReaderError(TailraceError):
    """The client takes its stream more slowly than it is generated, and is too far behind."""


async def answer(
    services: Services, request: Request, text: TextServices, job: Job, form: Format
) -> None:
    """Run a job and send its answer.

    Raises:
        RequestError: It failed before anything was sent.
    """
    standing = standing_of(
        request.holder,
        in_body=job.terms.priority,
        in_header=request.headers.get(PRIORITY_HEADER),
    )
    generation = Generation(
        services,
        text.tokenizer,
        job,
        timeline=request.timeline,
        wants_metrics=job.terms.returns_metrics or request.wants_timing,
        standing=standing,
        cache_scope=services.cache_scope(request.holder),
    )
    request.at_end(
        lambda delivered_s: generation.when_told(
            lambda: keep_record(services, request, generation, delivered_s)
        )
    )
    request.looks_itself()
    try:
        generation.start()
        if job.terms.is_streaming:
            await _stream(services, request, generation, form)
        else:
            await _whole(request, generation, form)
    except SlowReaderError as error:
        generation.close("slow_reader")
        log.warning("slow_reader", request_id=job.request_id, error=str(error))
        request.drop()
    except Exception:  # of ours, too: no client left
        generation.close("error")
        raise
    finally:
        # Only what was cut off is still open here: the client went, or the server ends.
        generation.close("disconnect")


async def _whole(request: Request, generation: Generation, form: Format) -> None:
    async with _watched(request, _collect(generation)) as (collecting, gone):
        await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return
        pieces = collecting.result()
        generation.close()
        await request.send_json_bytes(200, form.whole(pieces, generation))


async def _collect(generation: Generation) -> list[Piece]:
    """Return one piece for each choice, in order."""
    choices: dict[int, Piece] = {}
    async with contextlib.aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            if piece.index in choices:
                choices[piece.index].absorb(piece)
            else:
                choices[piece.index] = piece
    return [choices[index] for index in sorted(choices)]


async def _stream(
    services: Services, request: Request, generation: Generation, form: Format
) -> None:
    async def send(data: bytes) -> None:
        if not request.is_answered:
            await request.start_stream()
        await request.write(data)

    emitter = Emitter(
        send,
        form.event,
        limit_bytes=services.config.server.stream_buffer_bytes,
        opening=form.opening(),
        channel=Channel(request.is_free, request.write_now),
    )
    feed = _Feed(generation, emitter, every_token=form.every_token)
    generation.listen(partial(services.outbox.add, feed))
    async with (
        _running(request.disconnected()) as gone,
        _running(_write(request, generation, form, emitter, feed)) as writer,
    ):
        await asyncio.wait({feed.ended, writer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if feed.ended.done() and isinstance(feed.ended.exception(), SlowReaderError):
            feed.ended.result()
        await asyncio.wait(
            {writer, gone}, timeout=DELIVERY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if writer.done():
            writer.result()
        elif not gone.done():
            raise SlowReaderError(f"the stream's end was not taken in {DELIVERY_TIMEOUT_S:g} s")


class _Feed:
    """Moves what the engine said to the client, in its turns: an `Outlet`.

    All the work on a token, from bytes of text to bytes of HTTP, is done in the stream's turn, so
    that the outbox orders all of it. `ended` tells how it came to its end.
    """

    def __init__(self, generation: Generation, emitter: Emitter, *, every_token: bool) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.priority = generation.priority
        self.turn = 0
        self._generation = generation
        self._emitter = emitter
        self._every_token = every_token
        self._held: dict[int, Piece] = {}

    @property
    def has_begun(self) -> bool:
        """Whether the client has got anything."""
        return self._emitter.has_begun

    def write_pending(self) -> None:
        """Take all that has come, and write it as far as the client takes it."""
        if self.ended.done():
            return  # and what went wrong is not to be followed by more
        ends: list[Exception | None] = []
        try:
            self._generation.drain(self.take, ends.append)
            self._emitter.write_pending()
        except Exception as error:  # noqa: BLE001 -- the caller serves the other streams too
            ends.append(error)
        if ends:  # only now: a last piece that cannot be written is no good end
            self.end(next((error for error in ends if error is not None), None))

    def take(self, piece: Piece) -> None:
        """Pass a piece on.

        Raises:
            SlowReaderError: The client is too far behind.
        """
        spoken = piece if self._every_token else self._spoken(piece)
        if spoken is not None and not self._emitter.put(spoken):
            raise SlowReaderError(
                f"{self._emitter.pending_bytes} bytes wait for the client (stream-buffer-bytes)"
            )

    def end(self, error: Exception | None) -> None:
        """Note the end; only the first counts."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
            # Where the client goes first, nobody asks for it.
            self.ended.exception()
        self._emitter.complete()

    def _spoken(self, piece: Piece) -> Piece | None:
        """Let a piece without text wait for the next of its choice."""
        whole = self._held.pop(piece.index, piece)
        if whole is not piece:
            whole.absorb(piece)
        if whole.text or whole.finish_reason is not None:
            return whole
        self._held[piece.index] = whole
        return None


async def _write(
    request: Request,
    generation: Generation,
    form: Format,
    emitter: Emitter,
    feed: _Feed,
) -> None:
    """Write what is not written at once, and the end."""
    await emitter.run()
    if not request.is_answered:
        await feed.ended  # nothing was sent yet, so its error is the answer
        await request.start_stream()  # no piece was an event
    try:
        await feed.ended
    except RequestError as error:
        generation.close("error")
        await request.finish(form.failure(error))
        error.__traceback__ = None  # leads to the feed that keeps the error, in a circle
    else:
        generation.close()
        await request.finish(form.closing(generation))


@contextlib.asynccontextmanager
async def _watched(
    request: Request, work: Coroutine[None, None, _T]
) -> AsyncIterator[tuple[asyncio.Task[_T], asyncio.Task[None]]]:
    """Run `work` beside a watch for the connection's end."""
    async with _running(work) as working, _running(request.disconnected()) as gone:
        yield working, gone


@contextlib.asynccontextmanager
async def _running(work: Coroutine[None, None, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """Run `work` as a task that does not outlive the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
