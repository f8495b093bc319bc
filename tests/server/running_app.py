"""The application over a scripted engine, under a real uvicorn on a free port, in a thread.

    with running_app(tiny_folder, {"Hi": Script("Hello")}) as app:
        answer = app.get("/health")
        app.call(app.engine.die)

The engine and the services live in the server's thread: a test touches them through `call` and
`wait`, and only reads plain values directly.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from tailrace.clock import monotonic
from tailrace.config import Config
from tailrace.server import listening, serve
from tailrace.server.services import Services
from tailrace.telemetry.metrics import Metrics
from tailrace.telemetry.request_log import RequestLog
from tests.server.fake_engine import FakeEngine
from tests.server.hand_made import load_text

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from tests.server.fake_engine import Script

DEADLINE_S = 120.0
"""After so long a test has failed; none takes a tenth of it."""


@dataclass
class RunningApp:
    """A server in a thread of its own.

    Attributes:
        services: Belong to the server's thread, as does the engine in them.
        loop: The server's event loop.
        port: On 127.0.0.1.
        client: An httpx client of this address.
        server: uvicorn's.
    """

    services: Services
    loop: asyncio.AbstractEventLoop
    port: int
    client: httpx.Client
    server: serve._Server

    @property
    def engine(self) -> FakeEngine:
        """The scripted engine."""
        return self.services.engine

    @property
    def url(self) -> str:
        """The base URL, without a slash at its end."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET a path."""
        return self.client.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """POST a value as JSON, or what `options` say."""
        if body is not None:
            options["json"] = body
        return self.client.post(path, **options)

    def raw(self, *parts: bytes) -> bytes:
        """Send bytes, one `send` for each part; return what came until the server closed."""
        with self.connect() as connection:
            for part in parts:
                connection.sendall(part)
            return read_to_end(connection)

    def connect(self) -> socket.socket:
        """Open a connection of bare bytes."""
        connection = socket.create_connection(("127.0.0.1", self.port), DEADLINE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call in the server's thread; return what it returned."""

        async def called() -> Any:
            return function(*args)

        return self.wait(called())

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Await in the server's thread, such as `app.wait(app.engine.was_aborted.wait())`."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    def settle(self) -> None:
        """Wait until every request that was answered, or left, has been put away too."""

        async def settled() -> None:
            await asyncio.gather(*self.server.server_state.tasks, return_exceptions=True)

        self.wait(settled())


def read_to_end(connection: socket.socket) -> bytes:
    """Return everything until the other side closed, were it by a reset."""
    received = bytearray()
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return bytes(received)


@contextmanager
def running_app(
    folder: Path,
    scripts: dict[str, Script] | None = None,
    config: Config | None = None,
    **engine_options: Any,
) -> Iterator[RunningApp]:
    """Serve until the block ends.

    Args:
        folder: Holds a tokenizer: the fixture `tiny_folder`.
        scripts: What the engine says, by prompt; see `FakeEngine`.
        config: The settings; the port is ours.
        engine_options: Of `FakeEngine`.
    """
    config = config or Config()
    services = Services(
        config=config,
        engine=FakeEngine(scripts, **engine_options),
        metrics=Metrics(),
        request_log=RequestLog(
            config.server.request_log,
            max_bytes=config.server.request_log_bytes,
            files=config.server.request_log_files,
        ),
        started_s=monotonic(),
        text=load_text(folder),
    )
    settings = serve._uvicorn_config(services)
    settings.timeout_graceful_shutdown = 1
    server = serve._Server(settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread, loop = _start(server, listener)
        port = listener.getsockname()[1]
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as client:
                yield RunningApp(services, loop, port, client, server)
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)
            services.request_log.close()
            assert not thread.is_alive(), "the server did not end"


def _start(
    server: serve._Server, listener: socket.socket
) -> tuple[threading.Thread, asyncio.AbstractEventLoop]:
    started: Future[asyncio.AbstractEventLoop] = Future()

    async def main() -> None:
        started.set_result(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    def run() -> None:
        with asyncio.Runner(loop_factory=listening.loop_factory()) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    return thread, started.result(DEADLINE_S)
