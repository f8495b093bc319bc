"""One front end among several: `python -m tailrace.server.api_worker`, started by front_ends.py.

It serves as a lone front end does, but that it talks to an engine which is not its own, and comes
and goes as orders say. A SIGTERM of its own drains it; the watcher then starts another.

    signal, signal   drain, at once
    order,  order    drain, at once
    signal, order    drain; or the other way round: whoever signals the whole process group, or
                     systemd all of a control group, has asked once
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import structlog

from tailrace.errors import EngineError
from tailrace.server import listening, serve
from tailrace.server.borrowed_engine import BorrowedEngine
from tailrace.server.orders import Drain, EngineDown, EngineUp, Family, Order, Serving, Start
from tailrace.telemetry.console_log import configure_log

if TYPE_CHECKING:
    from tailrace.server.bridge import Bridge
    from tailrace.server.services import Services

log = structlog.get_logger("tailrace.front_end")

_TICK_S = 1.0
_MAX_ORDER_BYTES = 1024 * 1024


class StopRequests:
    """Counts apart who has us stop, by a signal or by an order.

    Args:
        stop: Set once to have us drain, and again to have us end at once.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._asked: Counter[str] = Counter()

    def ask(self, by: str) -> None:
        """Somebody asks, for the first time or again."""
        self._asked[by] += 1
        is_known = self._asked[by] == 1 and len(self._asked) > 1
        if not is_known:
            self._stop.set()


@dataclass
class _FrontEnd:
    engine: BorrowedEngine
    services: Services
    bridge: Bridge
    requests: StopRequests

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
                    self.requests.ask("order")
        log.warning("watcher_died")
        os._exit(1)

    async def release(self, stop: asyncio.Event) -> None:
        """Once we drain, wait for no other engine."""
        await stop.wait()
        await self.engine.release()

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
    with asyncio.Runner(loop_factory=listening.loop_factory()) as runner:
        return runner.run(_main())


async def _main() -> int:
    orders = asyncio.StreamReader(limit=_MAX_ORDER_BYTES)
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer
    )
    start = msgspec.json.decode(await orders.readline(), type=Start)
    config = start.config
    configure_log(config.server.log_level)
    bind = listening.bind_only if start.joins else listening.bind
    listener = bind(config.server.host, start.port, is_shared=True)
    engine = BorrowedEngine(start.identity)
    services, bridge = serve.assemble(config, engine)
    stop = asyncio.Event()
    requests = StopRequests(stop)
    loop.add_signal_handler(signal.SIGTERM, requests.ask, "signal")
    front_end = _FrontEnd(engine, services, bridge, requests)
    works = (front_end.obey(orders), front_end.tick(), front_end.release(stop))
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await serve.serve_until(
            stop, services, bridge, listener, front_end.announce(), joins=start.joins
        )
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
