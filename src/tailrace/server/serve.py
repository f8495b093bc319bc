"""`tailrace serve`: the front end's process from its first line to its exit status.

    load text side | engine loads ... | READY | serve | SIGTERM: drain, then stop | status 0

SIGTERM and SIGINT drain: /ready turns 503, new requests are refused, running ones get
`drain_timeout_s`. A second signal stops at once. An engine that cannot be started ends the server
with status 1 and one readable line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvicorn

from tailrace.clock import monotonic
from tailrace.config import DEFAULT_MODEL
from tailrace.errors import ConfigError, EngineError
from tailrace.server.app import create_app
from tailrace.server.bridge import GRACE_S, Bridge
from tailrace.server.connection import connection_class
from tailrace.server.services import Services, TextServices
from tailrace.server.supervisor import Launcher
from tailrace.telemetry.metrics import Metrics
from tailrace.telemetry.rates import RateWindow
from tailrace.telemetry.request_log import RequestLog
from tailrace.text.chat import ChatTemplate
from tailrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tailrace.config import Config

log = structlog.get_logger("tailrace.server")

BACKLOG = 2048
INSISTENT_GRACE_S = 0.2
"""After a second signal."""


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would re-raise SIGTERM after a clean end (status -15)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(config: Config) -> int:
    """Serve until told to stop; return the process's exit status.

    Raises:
        ConfigError: The address cannot be bound.
    """
    _configure_logging(config.server.log_level)
    listener = _bind(config.server.host, config.server.port)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, listener))


async def _serve(config: Config, listener: socket.socket) -> int:
    services, bridge = _assemble(config)
    server = _Server(_uvicorn_config(services))
    stop = _stop_on_signals()
    engine = asyncio.create_task(bridge.run())
    http = asyncio.create_task(server.serve(sockets=[listener]))
    stopped = asyncio.create_task(stop.wait())
    announced = asyncio.create_task(_announce(config, services, bridge, listener))
    try:
        await asyncio.wait([engine, http, stopped], return_when=asyncio.FIRST_COMPLETED)
        if engine.done():
            return _engine_failed(engine)
        if http.done():
            http.result()
            raise EngineError("the HTTP server ended by itself")
        await _drain(services, stop)
        return 0
    finally:
        services.draining = True
        announced.cancel()
        stopped.cancel()
        await bridge.stop(INSISTENT_GRACE_S if stop.is_set() else GRACE_S)
        server.should_exit = True
        await asyncio.gather(engine, http, announced, stopped, return_exceptions=True)
        services.request_log.close()


def _assemble(config: Config) -> tuple[Services, Bridge]:
    def load_text(folder: str) -> None:
        if services.text is None:
            services.text = _text_services(config, Path(folder))

    rates = RateWindow()
    bridge = Bridge(Launcher(config.engine), on_resolved=load_text, on_stats=rates.add)
    services = Services(
        config=config,
        engine=bridge,
        metrics=Metrics(),
        request_log=RequestLog(
            config.server.request_log,
            max_bytes=config.server.request_log_bytes,
            files=config.server.request_log_files,
        ),
        started_s=monotonic(),
        rates=rates,
    )
    return services, bridge


def _text_services(config: Config, folder: Path) -> TextServices:
    tokenizer = Tokenizer.load(folder)
    return TextServices(
        model_name=_model_name(config),
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(folder, tokenizer),
    )


def _model_name(config: Config) -> str:
    if config.server.served_model_name:
        return config.server.served_model_name
    if config.engine.model_path == DEFAULT_MODEL:
        return "SmolLM2-135M-Instruct"
    # Not `stem`: a folder may be called Qwen2.5-0.5B.
    return Path(config.engine.model_path).resolve().name.removesuffix(".gguf")


def _engine_failed(engine: asyncio.Task[None]) -> int:
    error = engine.exception()
    if error is not None and not isinstance(error, EngineError):
        raise error
    print(f"tailrace: {error}", file=sys.stderr)  # noqa: T201 -- for the operator, beside the log
    return 1


async def _announce(
    config: Config, services: Services, bridge: Bridge, listener: socket.socket
) -> None:
    """Say once, in one line, that the server is ready."""
    ready = await bridge.wait_ready()
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    log.info(
        "ready",
        url=f"http://{host}:{listener.getsockname()[1]}",
        model=services.text.model_name if services.text else "",
        device=ready.device,
        context_length=ready.context_length,
        kv_tokens=ready.total_blocks * ready.block_size,
        load_s=round(ready.load_s, 2),
        warmup_s=round(ready.warmup_s, 2),
    )


async def _drain(services: Services, stop: asyncio.Event) -> None:
    services.draining = True
    timeout_s = services.config.server.drain_timeout_s
    log.info("draining", sequences=services.admission.sequences, timeout_s=timeout_s)
    stop.clear()  # the next signal means: now
    waits = [asyncio.create_task(services.admission.wait_empty()), asyncio.create_task(stop.wait())]
    _, pending = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    log.info("drained", sequences=services.admission.sequences)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Here, where a failure is one readable line: with SO_REUSEADDR two may bind, one listens.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _uvicorn_config(services: Services) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(services),
        http=connection_class(services.config.server.header_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 -- not there on every platform
    except ImportError:
        return None
    return uvloop.Loop


def _configure_logging(level: str) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
