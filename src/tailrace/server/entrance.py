"""`tailrace serve` from its first line: the engine's process is begun, then the rest is imported.

    settings | socket | engine begun, which imports torch ...
                      | import the front end | serve.py

The front end takes half a second to import, which the engine need not wait for. So nothing that
takes long may be imported at the top of this file. Signals are caught from before the engine is
there: one that comes during the import stops the server as soon as it serves.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from tailrace.server.listening import bind, loop_factory, stop_on_signals
from tailrace.server.supervisor import Launcher
from tailrace.telemetry.console_log import configure_log

if TYPE_CHECKING:
    import socket

    from tailrace.config import Config


def run(config: Config) -> int:
    """Serve until told to stop; return the process's exit status.

    Raises:
        ConfigError: The address cannot be bound.
        EngineError: No engine can be started.
    """
    configure_log(config.server.log_level)
    if config.server.api_workers > 1:
        from tailrace.server.front_ends import run_front_ends  # noqa: PLC0415 -- seldom needed

        return run_front_ends(config)
    listener = bind(config.server.host, config.server.port)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(config, listener))


async def _serve(config: Config, listener: socket.socket) -> int:
    stop = stop_on_signals(signal.SIGTERM, signal.SIGINT)
    launcher = Launcher(config.engine)
    try:
        await launcher.begin()
        # Nothing else is to be done on the loop meanwhile.
        from tailrace.server.serve import serve  # noqa: PLC0415 -- the engine is under way

        return await serve(config, listener, launcher, stop)
    finally:
        launcher.clean()
