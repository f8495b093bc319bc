"""How long after a prompt's last byte its first token comes, by what is done before that byte.

    python benchmarks/ingest.py --rounds 9
    python benchmarks/ingest.py --rounds 5 --serve --model-path smollm2
    python benchmarks/ingest.py --rounds 9 --serve --model-path DIR --gpus 0

Without --serve: the real application under uvicorn on a socket, with SmolLM2's tokenizer and a mock
engine that answers at once, so that the way in and the way out remain. With it: a real server, of
which what follows are the options; its prefix cache is off, and prompts beyond its context are left
out, as the table says.

The client paces the body: 20 KB/s, 200 KB/s, or at once. All arms go to one server, in turns, and
differ by a field ahead of the prompt:

    computed   none                  tokenised, and computed, while the body arrives
    tokenised  "echo": false         only tokenised: a field that might bar the other came first
    whole      "prompt": ""          neither: of two prompts the parser takes the last

The answers must be the same, or this fails. "computed" is left out with the mock engine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import multiprocessing
import socket
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import httpx
from mock_engine import MockEngine, services_of

from tailrace.bench.launch import LocalServer
from tailrace.models import gguf
from tailrace.server import listening, serve
from tailrace.server.engine_client import OutputQueue
from tailrace.text.tokenizer import Tokenizer
from tailrace.types import TokenOutput

if TYPE_CHECKING:
    from tailrace.types import EngineRequest

LENGTHS = (1_000, 4_000, 16_000)
RATES = (("20 KB/s", 20_000), ("200 KB/s", 200_000), ("at once", None))
PIECE_S = 0.01
"""A paced body comes in pieces of so many seconds."""


class Prompt(MockEngine):
    """Every request is one token, at once."""

    def submit(self, request: EngineRequest) -> OutputQueue:
        queue = OutputQueue()
        queue.put_nowait(TokenOutput(request.request_id, [260], finish_reason="length"))
        return queue

    def reserve(self, request_id: str, num_tokens: int, lifetime_s: float) -> None:
        pass

    def grow(self, request_id: str, start: int, token_ids: list[int], lifetime_s: float) -> None:
        pass


ARMS = {"computed": "", "tokenised": '"echo": false, ', "whole": '"prompt": "", '}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, help="options of `tailrace serve`")
    arguments = parser.parse_args()
    folder = model_folder(arguments.serve or [])
    tokenizer = Tokenizer.load(folder)
    prompts = [prompt_of(tokenizer, length) for length in LENGTHS]
    if arguments.serve is not None:
        with LocalServer([*arguments.serve, "--no-prefix-cache"]) as server:
            print(" ".join(server.command))
            compare(server.port, prompts, arguments.rounds, list(ARMS))
            print_early_tokens(server.url)
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        context = multiprocessing.get_context("fork")  # before this process has threads
        process = context.Process(target=serve_forever, args=(listener, folder, tokenizer))
        process.start()
    try:
        compare(port, prompts, arguments.rounds, ["tokenised", "whole"])
    finally:
        process.terminate()
        process.join()


def model_folder(options: list[str]) -> Path:
    """Return where the served model's tokenizer is."""
    named = dict(itertools.pairwise(options)).get("--model-path", "smollm2")
    return gguf.resolve(named) if named == "smollm2" else Path(named)


def print_early_tokens(url: str) -> None:
    """Say how much was computed early, and for nothing: without it the arms are the same."""
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        if line.startswith("tailrace:early_prompt_tokens_total"):
            print(line)


def compare(port: int, prompts: list[str], rounds: int, arms: list[str]) -> None:
    print(f"{'tokens':>7} {'body':>9}   first token after the last byte, ms: median (least - most)")
    for label, rate in RATES:
        for length, prompt in zip(LENGTHS, prompts, strict=True):
            if not fits(port, prompt):
                print(f"{length:>7} {label:>9}   beyond the context", flush=True)
                continue
            times: dict[str, list[float]] = {arm: [] for arm in arms}
            answers = set()
            for number in range(rounds):
                for arm in arms if number % 2 else reversed(arms):
                    took_ms, answer = ask(port, prompt, rate, ahead=ARMS[arm])
                    times[arm].append(took_ms)
                    answers.add(answer)
            if len(answers) != 1:
                raise SystemExit(f"the arms' answers differ: {answers}")
            ((tokens, _),) = answers
            columns = "   ".join(
                f"{arm} {statistics.median(of_arm):8.2f} ({min(of_arm):.2f} - {max(of_arm):.2f})"
                for arm, of_arm in times.items()
            )
            print(f"{tokens:>7} {label:>9}   {columns}", flush=True)


def fits(port: int, prompt: str) -> bool:
    """Whether the server takes a prompt of this length at all."""
    body = {"prompt": prompt, "max_tokens": 1}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=600)
    if answer.status_code == 200:
        return True
    if answer.json()["error"]["code"] == "context_length_exceeded":
        return False
    raise SystemExit(answer.text)


def prompt_of(tokenizer: Tokenizer, length: int) -> str:
    """Return prose of about so many tokens."""
    prose = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(prose[: 8 * length], add_special_tokens=False)[:length]
    return tokenizer.decode(ids, skip_special_tokens=False)


def ask(port: int, prompt: str, rate: int | None, *, ahead: str) -> tuple[float, tuple[int, str]]:
    """Return the milliseconds from the last piece to the first event; tokens, and the answer."""
    options = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
    options["stream_options"] = {"include_usage": True}
    fields = json.dumps({"prompt": prompt, **options})
    body = ("{" + ahead + fields[1:]).encode()
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
    text = received.split(b'"text":"')[1].split(b'"')[0].decode()
    return 1000 * took_s, (int(received.split(b'"prompt_tokens":')[1].split(b",")[0]), text)


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
    engine = Prompt(context_length=32_768, vocab_size=49_152)
    services = services_of(engine, folder, tokenizer)
    server = serve._Server(serve._uvicorn_config(services))  # noqa: SLF001 -- as it is
    with asyncio.Runner(loop_factory=listening.loop_factory()) as runner:
        runner.run(server.serve(sockets=[listener]))


if __name__ == "__main__":
    main()
