from __future__ import annotations

import asyncio

import pytest

from tailrace.bench.load.messages import (
    Bye,
    Go,
    Halt,
    Job,
    Outcome,
    Pulse,
    Ready,
    pack,
    read_order,
    read_report,
)
from tailrace.bench.load.shot import Shot, blank_record

SHOT = Shot(3, 0.5, 7, 8, b'{"prompt": "\xc3\xbc"}', request_id="r", after=1, think_s=0.25)
JOB = Job(
    worker=1,
    url="http://h:1",
    host="h",
    address="127.0.0.1",
    port=1,
    has_tls=False,
    api_key="k",
    path="/v1/completions",
    timeout_s=3.0,
    until_s=None,
    shots=[SHOT],
)


def read(data: bytes, reader):
    async def go():
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        found = []
        while (message := await reader(stream)) is not None:
            found.append(message)
        return found

    return asyncio.run(go())


def test_orders_come_through_whole():
    orders = [JOB, Go(12.5), Halt()]
    assert read(b"".join(map(pack, orders)), read_order) == orders


def test_reports_come_through_whole():
    record = blank_record(SHOT, worker=1)
    record.chunk_s = [1.5, 2.5]
    reports = [Ready(), Pulse(1, 2, 3, [0.5]), Outcome(record), Bye(0.25)]
    assert read(b"".join(map(pack, reports)), read_report) == reports


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_pipe_that_ends_within_a_message_is_an_end(cut):
    data = pack(Go(12.5))
    assert read(data + data[:cut], read_order) == [Go(12.5)]
