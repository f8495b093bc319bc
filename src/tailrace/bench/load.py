"""The open loop: every request leaves at its scheduled time, whatever the server does.

    schedule     |    |  |        |     |          due times
    dispatcher   +----+--+--------+-----+          one task that never waits for an answer
    requests     [=====....text..text..]           one task and one connection each
                    [==....text.......]

The dispatcher's lateness is measured (`dispatched_s - scheduled_s`), and so is the event loop's
(`Heartbeat`): where the client could not keep up, the run is not to be believed.
Nothing is tokenised, drawn or encoded here; bodies were made before the run.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import resource
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.bench.records import Record
from tailrace.bench.sse import Event, SseError, SseParser
from tailrace.bench.wire import MAX_ERROR_BYTES, Endpoint, Exchange, WireError, open_exchange
from tailrace.clock import Clock, monotonic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEARTBEAT_S = 0.02
LINGER_S = 1.0
"""How long a server may take to close a stream after `data: [DONE]`."""
OUR_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS})
"""Connection errors that say nothing about the server."""


@dataclass(frozen=True)
class Shot:
    """One request, ready to send."""

    index: int
    scheduled_s: float
    """From the run's start."""
    input_tokens: int
    output_tokens: int
    body: bytes


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    """Of any shape: servers differ."""


_CHUNK = msgspec.json.Decoder(_Chunk)


@dataclass
class Heartbeat:
    """How late the client's event loop runs what is due."""

    lags_s: list[float] = field(default_factory=list)

    async def beat(self, clock: Clock) -> None:
        """Measure until cancelled."""
        while True:
            due_s = clock() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            self.lags_s.append(max(clock() - due_s, 0.0))


@dataclass
class LoadState:
    """What a watcher may read while the run goes on."""

    total: int
    started_s: float = 0.0
    sent: int = 0
    in_flight: int = 0
    done: list[Record] = field(default_factory=list)
    chunks: int = 0
    """Chunks with text, over all requests."""


class Load:
    """One run of shots against one endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        shots: Sequence[Shot],
        *,
        timeout_s: float,
        path: str = "/v1/completions",
        on_record: Callable[[Record], None] = lambda _: None,
        clock: Clock = monotonic,
    ) -> None:
        self.state = LoadState(total=len(shots))
        self.heartbeat = Heartbeat()
        self._endpoint = endpoint
        self._shots = sorted(shots, key=lambda shot: shot.scheduled_s)
        self._timeout_s = timeout_s
        self._path = path
        self._on_record = on_record
        self._clock = clock

    async def run(self, stop: asyncio.Event) -> list[Record]:
        """Send everything on time and wait for every answer, or until `stop` is set.

        Returns:
            A record of each request that was dispatched, in order of schedule.
        """
        _raise_file_limit()
        # Garbage made while preparing is swept now, not inside a measured chunk.
        gc.collect()
        gc.freeze()
        heart = asyncio.create_task(self.heartbeat.beat(self._clock))
        stopped = asyncio.create_task(stop.wait())
        try:
            tasks = await self._dispatch(stopped)
            await self._drain(tasks, stopped)
        finally:
            await _cancel(heart, stopped)
            gc.unfreeze()
        return sorted(self.state.done, key=lambda record: record.index)

    async def _dispatch(self, stopped: asyncio.Task[bool]) -> list[asyncio.Task[None]]:
        self.state.started_s = self._clock()
        tasks: list[asyncio.Task[None]] = []
        for shot in self._shots:
            delay_s = self.state.started_s + shot.scheduled_s - self._clock()
            if delay_s > 0:
                await asyncio.wait({stopped}, timeout=delay_s)
            if stopped.done():
                break
            self.state.sent += 1
            self.state.in_flight += 1
            tasks.append(asyncio.create_task(self._shoot(shot)))
        return tasks

    async def _drain(self, tasks: list[asyncio.Task[None]], stopped: asyncio.Task[bool]) -> None:
        answers = asyncio.gather(*tasks)
        either: set[asyncio.Future[Any]] = {answers, stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if answers.done():
            # What a request cannot handle itself is a bug of this client, and must not pass.
            await answers
        await _cancel(answers, *tasks)

    async def _shoot(self, shot: Shot) -> None:
        record = Record(
            index=shot.index,
            scheduled_s=shot.scheduled_s,
            planned_input_tokens=shot.input_tokens,
            planned_output_tokens=shot.output_tokens,
            dispatched_s=self._now(),
        )
        try:
            await self._converse(shot, record)
        finally:
            # Also when cancelled: what is known is kept.
            record.finished_s = self._now() if record.finished_s is None else record.finished_s
            self.state.in_flight -= 1
            self.state.done.append(record)
            self._on_record(record)

    async def _converse(self, shot: Shot, record: Record) -> None:
        reading = _Reading(record, self.state)
        deadline_s = self.state.started_s + shot.scheduled_s + self._timeout_s
        exchange: Exchange | None = None
        try:
            async with asyncio.timeout(deadline_s - self._clock()):
                exchange = await open_exchange(
                    self._endpoint,
                    self._endpoint.request("POST", self._path, shot.body),
                    reading.on_body,
                    clock=self._clock,
                )
                record.sent_s = self._since_start(exchange.sent_s)
                await exchange.done
            reading.conclude(exchange.status)
        except TimeoutError:
            _fail(record, "timeout", f"not complete {self._timeout_s:g} s after its time")
        except (WireError, SseError, msgspec.MsgspecError) as error:
            _fail(record, "stream", str(error))
        except OSError as error:
            kind = "client" if error.errno in OUR_OWN_LIMITS else "connect"
            _fail(record, kind, str(error))
        finally:
            if exchange is not None:
                record.http_status = exchange.status
                exchange.close()

    def _now(self) -> float:
        return self._clock() - self.state.started_s

    def _since_start(self, moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - self.state.started_s


class _Reading:
    """Turns one answer's bytes into its record."""

    def __init__(self, record: Record, state: LoadState) -> None:
        self._record = record
        self._state = state
        self._parser = SseParser()
        self._refusal = bytearray()
        self._ended = False
        self._finish_s: float | None = None

    def on_body(self, exchange: Exchange, data: bytes) -> None:
        """Take body bytes; never raises, since it is called from within the HTTP parser."""
        if exchange.status != 200:
            self._refusal += data[: MAX_ERROR_BYTES - len(self._refusal)]
            return
        at_s = exchange.read_s - self._state.started_s
        try:
            for event in self._parser.feed(data):
                self._on_event(at_s, event)
        except (SseError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            exchange.fail(SseError(f"bad event: {error}"))
            return
        if self._ended:
            # The answer is whole; a peer that then keeps the connection open is not waited for.
            asyncio.get_running_loop().call_later(LINGER_S, exchange.finish)

    def _on_event(self, at_s: float, event: Event) -> None:
        if event.data == b"[DONE]":
            self._ended = True
            self._record.finished_s = at_s
            return
        chunk = _CHUNK.decode(event.data)
        if chunk.error is not None or event.name == "error":
            raise SseError(bytes(event.data[:MAX_ERROR_BYTES]).decode("utf-8", "replace"))
        for choice in chunk.choices:
            self._on_choice(at_s, choice)
        if chunk.usage is not None:
            self._on_usage(chunk.usage)

    def _on_choice(self, at_s: float, choice: _Choice) -> None:
        record = self._record
        if choice.text:
            if record.first_token_s is None:
                record.first_token_s = at_s
            record.chunk_s.append(at_s)
            self._state.chunks += 1
        if choice.finish_reason:
            record.finish_reason = choice.finish_reason
            self._finish_s = at_s

    def _on_usage(self, usage: _Usage) -> None:
        record = self._record
        record.input_tokens = usage.prompt_tokens
        record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def conclude(self, http_status: int | None) -> None:
        """Give the record its status, now that the answer's bytes are all in."""
        record = self._record
        if http_status != 200:
            text = self._refusal.decode("utf-8", "replace")
            _fail(record, "http", f"HTTP {http_status}: {text}")
        elif not self._ended:
            _fail(record, "stream", "the stream ended without data: [DONE]")
        elif (record.output_tokens or 0) < record.planned_output_tokens and self._is_short():
            asked = record.planned_output_tokens
            _fail(record, "short", f"{record.output_tokens} of {asked} tokens")
        else:
            # Tokens without text (special ones) show only in the usage and the finish reason.
            record.first_token_s = record.first_token_s or self._finish_s
            record.status = "ok"

    def _is_short(self) -> bool:
        """Without usage, only an answer with no text at all is known to be short."""
        record = self._record
        return record.output_tokens is not None or record.first_token_s is None


def _fail(record: Record, status: str, error: str) -> None:
    record.status = status
    record.error = error


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _raise_file_limit() -> None:
    """An open loop holds as many sockets as the server is slow: take all the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
