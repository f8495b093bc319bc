"""What a server listens by: its socket, its event loop and its signals; imported in no time."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    import signal

BACKLOG = 2048


def stop_on_signals(*numbers: signal.Signals) -> asyncio.Event:
    """Return an event that each of these signals sets."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    return stop


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: An address of this machine.
        port: 0 takes a free one.
        is_shared: Whether others of this user may listen there too, and get their part.

    Raises:
        ConfigError: The address cannot be bound.
    """
    listener = bind_only(host, port, is_shared=is_shared)
    try:
        # Here, where a failure is one readable line: with SO_REUSEADDR two may bind, one listens.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def bind_only(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """Return a socket that is bound, to keep a port, and gets no connections. See `bind`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop where there is one."""
    try:
        import uvloop  # noqa: PLC0415 -- not there on every platform
    except ImportError:
        return None
    return uvloop.Loop
