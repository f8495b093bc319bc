"""One front end among several: `python -m tailrace.server.api_worker`, started by front_ends.py.

It serves as a lone front end does, but that it talks to an engine which is not its own, and comes
and goes as orders say. A SIGTERM of its own drains it; the watcher then starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import structlog

from tailrace.errors import EngineError
from tailrace.server import serve
from tailrace.server.borrowed_engine import BorrowedEngine
from tailrace.server.orders import Drain, EngineDown, EngineUp, Family, Order, Serving, Start

if TYPE_CHECKING:
    from tailrace.server.bridge import Bridge
    from tailrace.server.services import Services

log = structlog.get_logger("tailrace.front_end")

_TICK_S = 1.0
_MAX_ORDER_BYTES = 1024 * 1024


@dataclass
class _FrontEnd:
    engine: BorrowedEngine
    services: Services
    bridge: Bridge
    stop: asyncio.Event

    async def obey(self, orders: asyncio.StreamReader) -> None:
        """Follow orders until whoever gives them is gone."""
        while line := await orders.readline():
            match msgspec.json.decode(line, type=Order):
                case EngineUp() as up:
                    await self.engine.is_up(up)
                case EngineDown(number):
                    await self.engine.is_down(number)
                case Family(pids, restarts):
                    self.services.family = pids
                    self.services.frontend_restarts = restarts
                case Drain():
                    self.stop.set()
                    await self.engine.release()
        log.warning("watcher_died")
        os._exit(1)

    async def announce(self) -> None:
        """Say that we serve, once we do."""
        await self.bridge.wait_ready()
        text = self.services.text
        word = Serving(text.model_name if text else "")
        sys.stdout.buffer.write(msgspec.json.encode(word) + b"\n")
        sys.stdout.buffer.flush()

    async def tick(self) -> None:
        """Put into the shared files what is not counted there at once."""
        while True:
            self.services.metrics.note_dropped(self.services.request_log.dropped_total)
            await asyncio.sleep(_TICK_S)


def main() -> int:
    """Serve until told to stop; return the exit status."""
    # Ctrl-C reaches the whole process group; the watcher decides when we go.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=serve.loop_factory()) as runner:
        return runner.run(_main())


async def _main() -> int:
    orders = asyncio.StreamReader(limit=_MAX_ORDER_BYTES)
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer
    )
    start = msgspec.json.decode(await orders.readline(), type=Start)
    config = start.config
    serve.configure_logging(config.server.log_level)
    listener = serve.bind(config.server.host, start.port, is_shared=True)
    engine = BorrowedEngine(start.identity)
    services, bridge = serve.assemble(config, engine)
    stop = serve.stop_on_signals(signal.SIGTERM)
    front_end = _FrontEnd(engine, services, bridge, stop)
    tasks = [asyncio.create_task(front_end.obey(orders)), asyncio.create_task(front_end.tick())]
    try:
        return await serve.serve_until(stop, services, bridge, listener, front_end.announce())
    except EngineError:
        return 1  # the watcher has the same from its own side, and tells the operator
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        pipe.close()


if __name__ == "__main__":
    sys.exit(main())
