"""A scripted OpenAI-style server: latencies and faults are known, so the client can be checked.

`python tests/bench/mock_server.py --port 8001` runs it by itself. The request's `seed` selects
its behaviour (the harness sends seed + index), so a test scripts each request by its number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Self

Script = Callable[[int], "Behaviour"]


@dataclass(frozen=True)
class Behaviour:
    """How one completion goes."""

    ttft_s: float = 0.0
    gap_s: float = 0.0
    fault: str = ""
    """One of FAULTS, or nothing."""
    tokens_off: int = 0
    """Added to the prompt tokens of the usage."""
    cached_tokens: int | None = 0
    """None leaves them out of the usage, as servers do that do not count them."""


FAULTS = (
    "refuse",  # HTTP 503
    "error_event",  # an error in the middle of the stream
    "late_refusal",  # the first event of a stream says that the request is a wrong one
    "cut",  # the connection ends in the middle of the stream
    "garbage",  # bytes that are no JSON
    "binary",  # bytes that are no UTF-8
    "not_http",
    "endless_event",  # a line without an end
    "no_done",  # no data: [DONE]
    "short",  # fewer tokens than asked for
    "silent",  # no answer at all, until the client gives up
    "no_usage",
)


class WordCodec:
    """A toy tokenizer: a token is a word with the white space before it; ids are stable."""

    name = "words"

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode_now(self, text: str) -> list[int]:
        return [self._id(word) for word in re.findall(r"\s*\S+|\s+$", text)]

    def decode_now(self, ids: list[int]) -> str:
        return "".join(self._words[token] for token in ids)

    async def encode(self, text: str) -> list[int]:
        return self.encode_now(text)

    async def decode(self, ids: list[int]) -> str:
        return self.decode_now(ids)

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]


@dataclass
class MockServer:
    """Serves on a free loopback port inside `async with`."""

    script: Script = lambda _: Behaviour()
    context_tokens: int = 8192
    codec: WordCodec = field(default_factory=WordCodec)
    completions: list[dict] = field(default_factory=list)
    """Bodies of /v1/completions in order of arrival."""
    paths: list[str] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    """X-Request-Id of each completion, in order of arrival."""
    wrote_s: dict[int, list[float]] = field(default_factory=dict)
    """By a request's seed, when each of its tokens was written, in monotonic seconds."""
    api_key: str = ""
    port: int = 0
    is_ready: bool = True

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._server.close_clients() if hasattr(self._server, "close_clients") else None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path, headers, body = await _read_request(reader)
            self.paths.append(path)
            if self.api_key and headers.get("authorization") != f"Bearer {self.api_key}":
                _answer(writer, 401, {"error": {"message": "wrong key"}})
            elif path in {"/v1/completions", "/v1/chat/completions"}:
                self.completions.append(body)
                self.request_ids.append(headers.get("x-request-id", ""))
                await self._complete(writer, reader, body)
            else:
                self._plain(writer, path, body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _plain(self, writer, path: str, body: dict) -> None:
        answers = {
            "/v1/models": lambda: {"data": [{"id": "mock", "max_model_len": self.context_tokens}]},
            "/version": lambda: {"version": "0-mock"},
            "/tokenize": lambda: {"tokens": self.codec.encode_now(body["prompt"])},
            "/detokenize": lambda: {"prompt": self.codec.decode_now(body["tokens"])},
        }
        if path in answers:
            _answer(writer, 200, answers[path]())
        elif path == "/ready":
            _answer(writer, 200 if self.is_ready else 503, {})
        elif path == "/metrics":
            running = len(self.completions)
            text = f'mock:num_requests_running{{m="a"}} {running}\nmock:kv_cache_usage_perc 0.25\n'
            _answer(writer, 200, text)
        else:
            _answer(writer, 404, {"error": {"message": f"no {path}"}})

    async def _complete(self, writer, reader, body: dict) -> None:
        how = self.script(body["seed"]) if "seed" in body else Behaviour()
        if how.fault == "refuse":
            _answer(writer, 503, {"error": {"message": "busy <script>alert(1)</script>"}})
            return
        if how.fault == "silent":
            await reader.read()
            return
        if how.fault == "not_http":
            writer.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        await self._stream(writer, body, how)

    async def _stream(self, writer, body: dict, how: Behaviour) -> None:
        tokens = body["max_tokens"] - (1 if how.fault == "short" else 0)
        if "messages" in body:
            # As engines open a chat: a role, and no text yet.
            _event(
                writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            )
        if how.fault == "late_refusal":
            _event(writer, {"error": {"message": "too long", "code": 400}})
            _chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            return
        for number in range(tokens):
            await asyncio.sleep(how.gap_s if number else how.ttft_s)
            if number == tokens // 2 and how.fault in _MIDDLE:
                _chunk(writer, _MIDDLE[how.fault])
                await writer.drain()
                if how.fault == "cut":
                    return
            self.wrote_s.setdefault(body.get("seed", 0), []).append(monotonic())
            _event(writer, {"choices": [_choice(body, number)]})
            await writer.drain()  # raises once the client is gone
        _event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if how.fault != "no_usage":
            prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            prompt_tokens = len(self.codec.encode_now(prompt)) + how.tokens_off
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
            if how.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": how.cached_tokens}
            _event(writer, {"choices": [], "usage": usage})
        if how.fault != "no_done":
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _choice(body: dict, number: int) -> dict:
    """Return token `number`: of a chat, reasoning under both of its names, then content."""
    if "messages" not in body:
        return {"index": 0, "text": f" w{number}"}
    names = ("reasoning_content", "reasoning", "content")
    return {"index": 0, "delta": {names[min(number, 2)]: f" w{number}"}}


_MIDDLE = {
    "cut": b"data: {",
    "garbage": b"data: {nonsense\n\n",
    "binary": b"data: \xff\xfe\xfd\n\n",
    "endless_event": b"data: " + b"x" * (3 << 20),
    "error_event": b'data: {"error": {"message": "out of memory"}}\n\n',
}


async def _read_request(reader) -> tuple[str, dict[str, str], dict]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (h.partition(":") for h in head[1:])
    }
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return head[0].split()[1], headers, json.loads(body) if body else {}


def _answer(writer, status: int, content: object) -> None:
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def _event(writer, content: dict) -> None:
    _chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(writer, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def running(**fields) -> Iterator[MockServer]:
    """Run a server in a thread, for clients that bring their own event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = MockServer(**fields)
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(120)
        loop.close()


async def _end(server: MockServer) -> None:
    await server.__aexit__()
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


async def _serve(options: argparse.Namespace) -> int:
    stop = asyncio.Event()
    on_term = (lambda: None) if options.stubborn else stop.set
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_term)
    script = Behaviour(options.ttft, options.gap, fault=options.fault)
    async with MockServer(script=lambda _: script, port=options.port) as server:
        server.is_ready = not options.never_ready
        sys.stdout.write(f"serving at {server.url}\n")
        sys.stdout.flush()
        await stop.wait()
    return options.exit_status


def main() -> int:
    """Stand in for `tailrace serve`, in health and in sickness."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=0.05)
    parser.add_argument("--gap", type=float, default=0.001)
    parser.add_argument("--fault", default="")
    parser.add_argument("--exit-status", type=int, default=0)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--stubborn", action="store_true", help="do not end at SIGTERM")
    parser.add_argument("--stillborn", action="store_true", help="end before serving")
    options = parser.parse_args()
    if options.stillborn:
        sys.stdout.write("no weights to be found\n")
        return 4
    return asyncio.run(_serve(options))


if __name__ == "__main__":
    sys.exit(main())
