"""One client process of a fleet, `python -m tailrace.bench.load.worker`, heard over its pipes."""

from __future__ import annotations

import asyncio
import math
import os
import ssl
import sys
from typing import TYPE_CHECKING

from tailrace.bench.load.client import Load
from tailrace.bench.load.event_loop import run
from tailrace.bench.load.messages import (
    Bye,
    Go,
    Job,
    Outcome,
    Pulse,
    Ready,
    ToParent,
    pack,
    read_order,
)
from tailrace.bench.wire import Endpoint

if TYPE_CHECKING:
    from typing import BinaryIO

PULSE_S = 0.25


class _Worker:
    """Runs one job and reports."""

    def __init__(self, orders: asyncio.StreamReader, reports: asyncio.WriteTransport) -> None:
        self._orders = orders
        self._reports = reports
        self._lags_told = 0

    async def run(self) -> None:
        """Take the job, wait for the start, send the share, report to the end."""
        job = await read_order(self._orders)
        if not isinstance(job, Job):  # the parent is gone
            return
        load = self._load(job)
        self._tell(Ready())
        go = await read_order(self._orders)
        if not isinstance(go, Go):  # stopped before the start
            return
        stop = asyncio.Event()
        helpers = [
            asyncio.create_task(self._listen(stop)),
            asyncio.create_task(self._pulse(load)),
        ]
        try:
            await load.run(stop, start_s=go.start_s)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        self._beat(load)
        self._tell(Bye(load.cpu_s))

    def _load(self, job: Job) -> Load:
        tls = ssl.create_default_context() if job.has_tls else None
        endpoint = Endpoint(job.url, job.host, job.address, job.port, tls, job.api_key)
        return Load(
            endpoint,
            job.shots,
            timeout_s=job.timeout_s,
            path=job.path,
            until_s=math.inf if job.until_s is None else job.until_s,
            worker=job.worker,
            on_record=lambda record: self._tell(Outcome(record)),
        )

    async def _listen(self, stop: asyncio.Event) -> None:
        # Halt, or the end of the pipe: the parent wants no more either way.
        await read_order(self._orders)
        stop.set()

    async def _pulse(self, load: Load) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            self._beat(load)

    def _beat(self, load: Load) -> None:
        lags_s = load.lags_s[self._lags_told :]
        self._lags_told += len(lags_s)
        state = load.state
        self._tell(Pulse(state.sent, state.in_flight, state.chunks, lags_s))

    def _tell(self, message: ToParent) -> None:
        # The transport buffers: a slow parent never holds a request back. Where the parent is gone
        # it is closed, and the end of the orders is what stops the load.
        if not self._reports.is_closing():
            self._reports.write(pack(message))


async def _main(orders: BinaryIO, reports: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), orders)
    ended = asyncio.Event()
    transport, _ = await loop.connect_write_pipe(lambda: _End(ended), reports)
    try:
        await _Worker(reader, transport).run()
    finally:
        transport.close()  # after what is still buffered
        await ended.wait()


class _End(asyncio.BaseProtocol):
    """Knows when everything written is out, or nobody reads any more."""

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's name
        """Tell so."""
        self._ended.set()


def main() -> None:
    """Run one worker."""
    orders = os.fdopen(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    reports = os.fdopen(sys.stdout.fileno(), "wb", buffering=0, closefd=False)
    run(_main(orders, reports))


if __name__ == "__main__":
    main()
