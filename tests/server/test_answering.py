"""Streams in their turns: who goes first, and that one's failure is not another's."""

import asyncio
from collections import deque

import pytest

from tailrace.errors import RequestError
from tailrace.server.answering import SlowReaderError, _Feed
from tailrace.server.choice import Piece
from tailrace.server.emitter import Channel, Emitter
from tailrace.server.outbox import Outbox
from tailrace.server.routes_generate import GenerateFormat
from tests.server.fake_engine import Script
from tests.server.running_app import running_app


class Said:
    """In a generation's place: pieces, or errors, that have come."""

    def __init__(self, priority):
        self.priority = priority
        self.come = deque()

    def drain(self, on_piece, on_end):
        while self.come:
            item = self.come.popleft()
            if isinstance(item, Exception):
                on_end(item)
            else:
                on_piece(item)


class Stream:
    """A feed over a client that is free, or behind."""

    def __init__(self, name, outbox, log, *, priority=0, is_free=True, limit_bytes=10_000):
        self.said, self.outbox, self.is_free = Said(priority), outbox, is_free

        async def send(data):
            await asyncio.get_running_loop().create_future()

        self.emitter = Emitter(
            send,
            lambda piece: f"{name}{len(piece.token_ids)}".encode(),
            limit_bytes=limit_bytes,
            channel=Channel(lambda: self.is_free, lambda data: log.append(data.decode())),
        )
        self.feed = _Feed(self.said, self.emitter, every_token=True)

    def say(self, *items):
        self.said.come.extend(items)
        self.outbox.add(self.feed)


def token(text="t"):
    return Piece(0, text, [1])


async def turns(count=10):
    for _ in range(count):
        await asyncio.sleep(0)


def test_an_urgent_first_token_overtakes_a_backlog_whose_turns_then_take_more():
    async def main():
        outbox, log = Outbox(streams_per_round=2), []
        many = [Stream(f"s{i}:", outbox, log) for i in range(6)]
        for stream in many:
            stream.say(token())
        await turns()
        log.clear()
        for stream in many:
            stream.say(token())
        await turns(1)
        assert log == ["s0:1", "s1:1"]
        Stream("first:", outbox, log).say(token())
        Stream("urgent:", outbox, log, priority=-1).say(token())
        many[5].say(token())  # in the turn that it waits for already
        await turns()
        assert log[2:] == ["urgent:1", "first:1", "s2:1", "s3:1", "s4:1", "s5:1s5:1"]

    asyncio.run(main())


def test_what_fails_in_one_streams_turn_ends_that_stream_alone():
    async def main():
        outbox, log = Outbox(), []
        failing, failed, fine = (Stream(f"{name}:", outbox, log) for name in "abc")

        def render(piece):
            raise ValueError("no text of this")

        failing.emitter._render = render
        failing.say(token())
        failed.say(RequestError("the step failed", status=500))
        fine.say(token())
        await turns()
        assert log == ["c:1"]
        assert isinstance(failing.feed.ended.exception(), ValueError)
        assert failed.feed.ended.exception().status == 500
        assert not fine.feed.ended.done()

    asyncio.run(main())


def test_a_client_behind_is_bounded_in_what_waits_for_it():
    async def main():
        outbox, log = Outbox(), []
        slow = Stream("a:", outbox, log, is_free=False, limit_bytes=2000)
        for _ in range(100):
            slow.say(token("x" * 100))
            await turns(2)
            if slow.feed.ended.done():
                break
        assert isinstance(slow.feed.ended.exception(), SlowReaderError)
        assert slow.emitter.pending_bytes < 2500
        assert log == []

    asyncio.run(main())


@pytest.mark.parametrize("tokens_before", [0, 2])
def test_over_a_socket_an_answer_that_cannot_be_written_is_one_clients_affair(
    tiny_folder, monkeypatch, tokens_before
):
    event = GenerateFormat.event

    def breaks(self, piece):
        if piece.text == "!":
            raise ValueError("no event of this")
        return event(self, piece)

    monkeypatch.setattr(GenerateFormat, "event", breaks)
    scripts = {"bad": Script("a" * tokens_before + "!b"), "good": Script("fine")}
    with running_app(tiny_folder, scripts) as app:
        body = b'{"prompt":"bad","stream":true,"max_tokens":9}'
        bad = app.raw(
            b"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        assert b"[DONE]" not in bad
        assert bad.startswith(b"HTTP/1.1 200" if tokens_before else b"HTTP/1.1 500")
        good = app.post("/generate", {"prompt": "good", "stream": True})
        assert good.text.count("data: ") == len("fine") + 1
        app.settle()
        assert app.engine.open_requests == 0
        assert app.services.admission.sequences == 0


def test_over_a_socket_an_end_that_cannot_be_written_is_no_whole_answer(tiny_folder, monkeypatch):
    """The engine is done with it in the same turn; that must not hide what went wrong."""
    event = GenerateFormat.event

    def breaks(self, piece):
        if piece.finish_reason is not None:
            raise ValueError("no event of this")
        return event(self, piece)

    monkeypatch.setattr(GenerateFormat, "event", breaks)
    with running_app(tiny_folder, {"bad": Script("abc")}) as app:
        body = b'{"prompt":"bad","stream":true,"max_tokens":9}'
        bad = app.raw(
            b"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        assert bad.count(b"data: ") == len("abc")
        assert b"[DONE]" not in bad
        assert not bad.endswith(b"0\r\n\r\n")  # the last chunk, as of a whole answer
        app.settle()
        counted = app.get("/metrics").text
        assert 'request_success_total{finished_reason="error"} 1.0' in counted
