"""A request without a socket: what a handler sends is kept, and the test decides who goes away."""

import asyncio
import json

from tailrace.config import Config, ServerConfig
from tailrace.server.http import DROP_EXTENSION, Request
from tailrace.server.services import Services, TextServices
from tailrace.text.chat import ChatTemplate
from tailrace.text.grammar import GrammarCompiler
from tailrace.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine


class HandMadeRequest(Request):
    """The real Request over receive and send of our own."""

    def __init__(self, body, *, is_open=True):
        self._incoming = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self.gone = asyncio.Event()
        self.status = None
        self.sent = []
        self.is_finished = False
        self.was_dropped = False
        self.reads = asyncio.Event()
        """Clear it, and sending a body blocks as for a client that does not read."""
        if is_open:
            self.reads.set()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [],
            "extensions": {DROP_EXTENSION: {"call": self._note_drop}},
        }
        super().__init__(scope, self._receive_message, self._send_message, ServerConfig())

    async def _receive_message(self):
        if self._incoming:
            return self._incoming.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send_message(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        await self.reads.wait()
        self.sent.append(message["body"])
        self.is_finished = not message.get("more_body", False)

    def _note_drop(self):
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


def make_services(folder, scripts=None, config=None, *, text=None, **engine_options):
    """Return services over a scripted engine; `text` saves loading the folder again."""
    return Services(
        config=config or Config(),
        engine=FakeEngine(scripts, **engine_options),
        metrics=FakeMetrics(),
        request_log=FakeLog(),
        started_s=0.0,
        text=text or load_text(folder),
    )


def load_text(folder, *, calls_are_text=False):
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer)
    return TextServices(
        "tiny",
        tokenizer,
        template,
        grammars=GrammarCompiler(folder, tokenizer.vocab_size, [tokenizer.eos_token_id or 0]),
        tool_style=template.tool_style,
        calls_are_text=calls_are_text,
    )
