"""A request without a socket: what a handler sends is kept, and the test decides who goes away."""

import asyncio
import json

import msgspec

from tailrace.config import Config
from tailrace.errors import RequestError
from tailrace.server.services import Services, TextServices
from tailrace.text.chat import ChatTemplate
from tailrace.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine


class HandMadeRequest:
    def __init__(self, body, *, is_open=True):
        self._body = json.dumps(body).encode()
        self.gone = asyncio.Event()
        self.status = None
        self.sent = []
        self.is_finished = False
        self.was_dropped = False
        self.reads = asyncio.Event()
        """Clear it, and `write` blocks as for a client that does not read."""
        if is_open:
            self.reads.set()
        self.is_blocked = asyncio.Event()

    async def decode(self, kind):
        try:
            return msgspec.json.decode(self._body, type=kind)
        except msgspec.ValidationError as error:
            raise RequestError(str(error)) from error

    async def disconnected(self):
        await self.gone.wait()

    async def send_json_bytes(self, status, data):
        self.status = status
        self.sent.append(data)
        self.is_finished = True

    async def start_stream(self):
        self.status = 200

    async def write(self, data):
        self.is_blocked.set()
        await self.reads.wait()
        self.sent.append(data)

    async def finish(self, data):
        await self.write(data)
        self.is_finished = True

    def drop(self):
        self.was_dropped = True

    @property
    def json(self):
        return json.loads(b"".join(self.sent))

    @property
    def events(self):
        """The `data:` payloads of a stream, parsed but for [DONE]."""
        parts = b"".join(self.sent).decode().split("\n\n")
        assert parts.pop() == ""
        assert all(part.startswith("data: ") for part in parts)
        payloads = [part.removeprefix("data: ") for part in parts]
        return [p if p == "[DONE]" else json.loads(p) for p in payloads]


class FakeMetrics:
    def __init__(self):
        self.records = []
        self.gaps_s = []

    def observe_request(self, record):
        self.records.append(record)

    def observe_token_gap(self, seconds):
        self.gaps_s.append(seconds)


class FakeLog:
    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(record)


def make_services(folder, scripts=None, config=None, **engine_options):
    tokenizer = Tokenizer.load(folder)
    return Services(
        config=config or Config(),
        engine=FakeEngine(scripts, **engine_options),
        metrics=FakeMetrics(),
        request_log=FakeLog(),
        started_s=0.0,
        text=TextServices("tiny", tokenizer, ChatTemplate.load(folder, tokenizer)),
    )
