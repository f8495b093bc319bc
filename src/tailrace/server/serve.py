"""`tailrace serve`: the front end from when it is imported to its exit status.

    load text side | engine loads ... | READY | serve | SIGTERM: drain, then stop | status 0

SIGTERM and SIGINT drain: /ready turns 503, new requests are refused, running ones get
`drain_timeout_s`. A second signal stops at once. An engine that cannot be started ends the server
with status 1 and one readable line.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvicorn

from tailrace.clock import monotonic
from tailrace.config import DEFAULT_MODEL
from tailrace.errors import EngineError
from tailrace.server.app import create_app
from tailrace.server.bridge import GRACE_S, Bridge, silence_limit_s
from tailrace.server.connection import connection_class
from tailrace.server.services import Services, TextServices
from tailrace.telemetry.metrics import Metrics
from tailrace.telemetry.rates import RateWindow
from tailrace.telemetry.request_log import RequestLog
from tailrace.text.chat import ChatTemplate
from tailrace.text.grammar import GrammarCompiler
from tailrace.text.tokenizer import Tokenizer
from tailrace.text.tool_calls import ToolStyle

if TYPE_CHECKING:
    import socket
    from collections.abc import Coroutine, Iterator

    from tailrace.config import Config
    from tailrace.server.supervisor import EngineSource, Launcher
    from tailrace.types import EngineReady

log = structlog.get_logger("tailrace.server")

INSISTENT_GRACE_S = 0.2
"""After a second signal."""


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would re-raise SIGTERM after a clean end (status -15)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    config: Config, listener: socket.socket, launcher: Launcher, stop: asyncio.Event
) -> int:
    """Serve until told to stop; return the process's exit status.

    Args:
        config: All settings.
        listener: Where clients come from.
        launcher: Of engines, the first of which it may have begun.
        stop: Set by signals: see `serve_until`.
    """
    services, bridge = assemble(config, launcher)

    async def announce() -> None:
        ready = await bridge.wait_ready()
        log_ready(config, ready, listener, services.text.model_name if services.text else "")

    try:
        return await serve_until(stop, services, bridge, listener, announce())
    except EngineError as error:
        print(f"tailrace: {error}", file=sys.stderr)  # noqa: T201 -- for the operator, beside the log
        return 1


async def serve_until(
    stop: asyncio.Event,
    services: Services,
    bridge: Bridge,
    listener: socket.socket,
    announce: Coroutine[None, None, None],
    *,
    joins: bool = False,
) -> int:
    """Serve until `stop` is set, then drain; return the process's exit status.

    Args:
        stop: Set again while draining, it means: at once.
        services: Of the server.
        bridge: The engine in them.
        listener: Where clients come from.
        announce: Says that the server is ready, once it is.
        joins: Whether others serve at this address: then the listener is only bound, and listens
            when the engine is ready. By itself a server listens at once, to say that it loads.

    Raises:
        EngineError: There is no engine, and there will be none.
    """
    server = _Server(_uvicorn_config(services))
    engine = asyncio.create_task(bridge.run())
    http = asyncio.create_task(_listen(server, listener, bridge if joins else None))
    stopped = asyncio.create_task(stop.wait())
    announced = asyncio.create_task(announce)
    try:
        await asyncio.wait([engine, http, stopped], return_when=asyncio.FIRST_COMPLETED)
        if engine.done() and not stop.is_set():
            engine.result()
            raise EngineError("the bridge to the engine ended by itself")
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
        if joins and not server.started:
            http.cancel()
        await asyncio.gather(engine, http, announced, stopped, return_exceptions=True)
        services.request_log.close()


async def _listen(server: _Server, listener: socket.socket, bridge: Bridge | None) -> None:
    """Serve; if there is a bridge, from when its engine is ready."""
    if bridge is not None:
        await bridge.wait_ready()
    await server.serve(sockets=[listener])


def assemble(config: Config, source: EngineSource) -> tuple[Services, Bridge]:
    """Return what routes need, and the bridge to the engine in it."""

    def load_text(folder: str) -> None:
        if services.text is None:
            services.text = _text_services(config, Path(folder))
            keep_what_is_here()

    rates = RateWindow()
    bridge = Bridge(
        source,
        on_resolved=load_text,
        on_stats=rates.add,
        silence_limit_s=silence_limit_s(config.engine.step_limit_s),
    )
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


def keep_what_is_here() -> None:
    """Have the garbage collector pass over all there is: modules and vocabularies stay.

    A full collection goes through them each time, 30 to 150 ms in which no stream is written.
    """
    gc.collect()
    gc.freeze()


def _text_services(config: Config, folder: Path) -> TextServices:
    tokenizer = Tokenizer.load(folder)
    chat_template = ChatTemplate.load(folder, tokenizer)
    # Which token ends a sequence does not matter to whether a grammar compiles.
    grammars = GrammarCompiler(folder, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    grammars.load()
    return TextServices(
        model_name=_model_name(config),
        tokenizer=tokenizer,
        chat_template=chat_template,
        grammars=grammars,
        tool_style=_tool_style(config.server.tool_call_parser, chat_template),
        calls_are_text=config.server.tool_call_parser == "none",
    )


def _tool_style(setting: str, chat_template: ChatTemplate) -> ToolStyle | None:
    if setting == "none":
        return None
    return chat_template.tool_style if setting == "auto" else ToolStyle(setting)


def _model_name(config: Config) -> str:
    if config.server.served_model_name:
        return config.server.served_model_name
    if config.engine.model_path == DEFAULT_MODEL:
        return "SmolLM2-135M-Instruct"
    # Not `stem`: a folder may be called Qwen2.5-0.5B.
    return Path(config.engine.model_path).resolve().name.removesuffix(".gguf")


def log_ready(config: Config, ready: EngineReady, listener: socket.socket, model: str) -> None:
    """Say once, in one line, that the server is ready."""
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    log.info(
        "ready",
        url=f"http://{host}:{listener.getsockname()[1]}",
        model=model,
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
