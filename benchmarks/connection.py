"""What a request costs the front end's CPU, over our HTTP connection and over uvicorn's own.

    python benchmarks/connection.py --rounds 20 --requests 400

The real application in one process, with SmolLM2's tokenizer and a mock engine that brings a token
every 5 ms, listens on two ports: on one connections are `server/connection.Connection`, on the
other uvicorn's `HttpToolsProtocol`, which it extends. The client, another process, sends a block of
requests over a few keep-alive connections to one port, then the same block to the other, and who
comes first changes with the round. Before and after a block it asks the server for its CPU time
(user and system). Printed: microseconds a request, medians over the rounds, and ours less uvicorn's
as the median of the rounds' differences with their quartiles.

    live      GET /live: nothing but the connection and the table of routes
    whole     a completion of `TOKENS` tokens, answered whole
    stream    the same, streamed; over uvicorn's own the application does not know whether a write
              would wait, so that it writes from a task

CPU time counts what the process used and not when it was kept waiting, but a crowded machine's
caches and clock still show in it: the load average is printed beside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import socket
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mock_engine import MockEngine, services_of
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tailrace.models import gguf
from tailrace.server import listening, serve
from tailrace.server.engine_client import OutputQueue
from tailrace.text.tokenizer import Tokenizer
from tailrace.types import TokenOutput

if TYPE_CHECKING:
    import uvicorn

    from tailrace.server.services import Services
    from tailrace.types import EngineRequest

CONNECTIONS = 8
TOKENS = 8
STEP_S = 0.005
ARMS = ("ours", "uvicorn")
_TOKEN_ID = 260
_CPU_PATH = "/cpu"


class Ticking(MockEngine):
    """Every request gets a token `STEP_S` after the one before."""

    def submit(self, request: EngineRequest) -> OutputQueue:
        queue = OutputQueue()
        loop = asyncio.get_running_loop()
        most = request.sampling.max_tokens
        for number in range(1, most + 1):
            reason = "length" if number == most else None
            output = TokenOutput(request.request_id, [_TOKEN_ID], finish_reason=reason)
            loop.call_later(number * STEP_S, queue.put_nowait, output)
        return queue


@dataclass(frozen=True)
class Kind:
    """A request, and what its answer ends with; an answer of a known length is `whole`."""

    name: str
    request: bytes
    end: bytes = b""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=400, help="of a block")
    options = parser.parse_args()
    listeners = {arm: socket.create_server(("127.0.0.1", 0)) for arm in ARMS}
    context = multiprocessing.get_context("fork")  # before this process has threads
    process = context.Process(target=serve_forever, args=(listeners,))
    process.start()
    try:
        clients = {arm: Client(listener.getsockname()) for arm, listener in listeners.items()}
        print(f"load average at the start: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
        print(f"{'':8}{'ours':>9}{'uvicorn':>9}   ours less uvicorn's, us a request (quartiles)")
        for kind in kinds():
            print(line_of(kind, compare(clients, kind, options)), flush=True)
        print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    finally:
        process.terminate()
        process.join()


def kinds() -> list[Kind]:
    """Return the requests that are timed."""
    fields = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
    return [
        Kind("live", b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"),
        Kind("whole", completion(fields)),
        Kind("stream", completion(fields | {"stream": True}), b"0\r\n\r\n"),
    ]


def completion(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def compare(
    clients: dict[str, Client], kind: Kind, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the microseconds of CPU a request, one figure for each round and arm."""
    used: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for client in clients.values():
        client.block(kind, options.requests)  # warm
    for number in range(options.rounds):
        for arm in ARMS if number % 2 else reversed(ARMS):
            used[arm].append(clients[arm].block(kind, options.requests))
    return used


def line_of(kind: Kind, used: dict[str, list[float]]) -> str:
    more = [ours - theirs for ours, theirs in zip(*(used[arm] for arm in ARMS), strict=True)]
    low, middle, high = statistics.quantiles(more, n=4)
    medians = "".join(f"{statistics.median(used[arm]):9.1f}" for arm in ARMS)
    return f"{kind.name:8}{medians}   {middle:+.1f} ({low:+.1f} to {high:+.1f})"


class Client:
    """Keep-alive connections to one port."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._connections = [socket.create_connection(address) for _ in range(CONNECTIONS)]
        for connection in self._connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def block(self, kind: Kind, requests: int) -> float:
        """Send so many requests, one at a time on each connection; return the CPU us of one."""
        before_s = self._cpu_s()
        rounds = -(-requests // CONNECTIONS)
        for _ in range(rounds):
            for connection in self._connections:
                connection.sendall(kind.request)
            for connection in self._connections:
                answer = receive(connection, kind.end)
                if not answer.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"{kind.name}: {answer!r}")
        return 1e6 * (self._cpu_s() - before_s) / (rounds * CONNECTIONS)

    def _cpu_s(self) -> float:
        connection = self._connections[0]
        connection.sendall(f"GET {_CPU_PATH} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        return float(receive(connection).partition(b"\r\n\r\n")[2])


def receive(connection: socket.socket, end: bytes = b"") -> bytes:
    """Return one answer: up to `end`, or of the length that its head tells."""
    received = b""
    while not (received.endswith(end) if end else is_whole(received)):
        part = connection.recv(65536)
        if not part:
            raise SystemExit(f"no whole answer: {received!r}")
        received += part
    return received


def is_whole(received: bytes) -> bool:
    head, found, body = received.partition(b"\r\n\r\n")
    if not found:
        return False
    return len(body) >= int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])


def serve_forever(listeners: dict[str, socket.socket]) -> None:
    """Serve one application on both ports, each with its connections."""
    logging.disable()
    folder = gguf.resolve("smollm2")
    tokenizer = Tokenizer.load(folder)
    engine = Ticking(context_length=8192, vocab_size=49_152)
    services = services_of(engine, folder, tokenizer)

    async def main() -> None:
        await asyncio.gather(
            *(server_of(services, arm).serve(sockets=[listeners[arm]]) for arm in ARMS)
        )

    with asyncio.Runner(loop_factory=listening.loop_factory()) as runner:
        runner.run(main())


def server_of(services: Services, arm: str) -> uvicorn.Server:
    settings = serve._uvicorn_config(services)  # noqa: SLF001 -- as it is
    if arm == "uvicorn":
        settings.http = HttpToolsProtocol
    settings.app = tells_cpu(settings.app)
    return serve._Server(settings)  # noqa: SLF001 -- as it is


def tells_cpu(app: Any) -> Any:
    """Return the application with one more path, which tells the CPU seconds of this process."""

    async def told(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != _CPU_PATH:
            await app(scope, receive, send)
            return
        body = repr(time.process_time()).encode()
        length = str(len(body)).encode()
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return told


if __name__ == "__main__":
    main()
