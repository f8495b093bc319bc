"""How long after a prompt's last byte its first token comes, with and without early encoding.

    python benchmarks/ingest.py --rounds 9

The real application under uvicorn on a socket, with SmolLM2's tokenizer and a mock engine that
answers at once: what remains is the way in and the way out. (An engine's prefill comes on top.)
The client paces the body: 20 KB/s, 200 KB/s, or at once. Both arms go to one server, in turns.
The one without early encoding sends an empty "prompt" first and the real one after it: of two, the
parser takes the last, and the early encoder gives up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import socket
import statistics
import time
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

from tailrace.config import Config
from tailrace.models import gguf
from tailrace.server import serve
from tailrace.server.engine_client import EngineState, OutputQueue
from tailrace.server.services import Services, TextServices
from tailrace.telemetry.metrics import Metrics
from tailrace.telemetry.request_log import RequestLog
from tailrace.text.chat import ChatTemplate
from tailrace.text.tokenizer import Tokenizer
from tailrace.types import EngineReady, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tailrace.types import EngineRequest

LENGTHS = (1_000, 4_000, 16_000)
RATES = (("20 KB/s", 20_000), ("200 KB/s", 200_000), ("at once", None))
PIECE_S = 0.01
"""A paced body comes in pieces of so many seconds."""


class MockEngine:
    """Implements `EngineClient`; every request is one token, at once."""

    state = EngineState.READY
    restarts_total = 0
    stats = None
    pids: dict[str, int] = {}  # noqa: RUF012 -- never changed
    ready = EngineReady(
        context_length=32_768,
        vocab_size=49_152,
        eos_token_ids=[],
        total_blocks=1,
        block_size=16,
        device="mock",
        load_s=0.0,
        warmup_s=0.0,
    )

    def submit(self, request: EngineRequest) -> OutputQueue:
        queue = OutputQueue()
        queue.put_nowait(TokenOutput(request.request_id, [260], finish_reason="length"))
        return queue

    def reserve(self, request_id: str, num_tokens: int, lifetime_s: float) -> None:
        pass

    def grow(self, request_id: str, start: int, token_ids: list[int], lifetime_s: float) -> None:
        pass

    def abort(self, request_ids: Iterable[str]) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    folder = gguf.resolve("smollm2")
    tokenizer = Tokenizer.load(folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        context = multiprocessing.get_context("fork")  # before this process has threads
        server = context.Process(target=serve_forever, args=(listener, folder, tokenizer))
        server.start()
    try:
        compare(port, [prompt_of(tokenizer, length) for length in LENGTHS], rounds)
    finally:
        server.terminate()
        server.join()


def compare(port: int, prompts: list[str], rounds: int) -> None:
    print(f"{'tokens':>7} {'body':>9}   first token after the last byte, ms: median (least - most)")
    for label, rate in RATES:
        for prompt in prompts:
            early, whole = [], []
            for _ in range(rounds):
                early.append(ask(port, prompt, rate, is_early=True))
                whole.append(ask(port, prompt, rate, is_early=False))
            (tokens,) = {tokens for _, tokens in early + whole}  # the arms agree, or this fails
            columns = "   ".join(
                f"{name} {statistics.median(times):6.2f} ({min(times):.2f} - {max(times):.2f})"
                for name, times in (
                    ("early", [ms for ms, _ in early]),
                    ("whole", [ms for ms, _ in whole]),
                )
            )
            print(f"{tokens:>7} {label:>9}   {columns}", flush=True)


def prompt_of(tokenizer: Tokenizer, length: int) -> str:
    """Return prose of about so many tokens."""
    prose = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(prose[: 8 * length], add_special_tokens=False)[:length]
    return tokenizer.decode(ids, skip_special_tokens=False)


def ask(port: int, prompt: str, rate: int | None, *, is_early: bool) -> tuple[float, int]:
    """Return the milliseconds from the last piece to the first event, and the prompt's tokens."""
    options = {"max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    fields = json.dumps({"prompt": prompt, **options})
    body = (fields if is_early else '{"prompt": "", ' + fields[1:]).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head.encode())
        piece = len(body) if rate is None else int(rate * PIECE_S)
        began = ended = time.monotonic()
        for number, start in enumerate(range(0, len(body), piece)):
            time.sleep(max(0.0, began + number * PIECE_S - time.monotonic()))
            ended = time.monotonic()
            connection.sendall(body[start : start + piece])
        received = receive(connection, b"data: ")
        took_s = time.monotonic() - ended
        if b"[DONE]" not in received:
            received += receive(connection, b"[DONE]")
    return 1000 * took_s, int(received.split(b'"prompt_tokens":')[1].split(b",")[0])


def receive(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        part = connection.recv(65536)
        if not part:
            raise SystemExit(f"no answer: {received!r}")
        received += part
    return received


def serve_forever(listener: socket.socket, folder: Path, tokenizer: Tokenizer) -> None:
    logging.disable()
    services = Services(
        config=Config(),
        engine=MockEngine(),
        metrics=Metrics(),
        request_log=RequestLog(""),
        started_s=time.monotonic(),
        text=TextServices("mock", tokenizer, ChatTemplate.load(folder, tokenizer)),
    )
    server = serve._Server(serve._uvicorn_config(services))  # noqa: SLF001 -- as it is
    with asyncio.Runner(loop_factory=serve.loop_factory()) as runner:
        runner.run(server.serve(sockets=[listener]))


if __name__ == "__main__":
    main()
