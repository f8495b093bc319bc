"""The check of the client itself: it measures what was added, and says when that is too much."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time

import pytest

from tailrace.bench.load import Load, Shot
from tailrace.bench.load import loopback as loopback_module
from tailrace.bench.load.canary import Carried, Peak, _body, carry
from tailrace.bench.load.loopback import CHUNK, CHUNK_BYTES, CHUNKS_PER_S, loopback
from tailrace.bench.stats import distribution
from tailrace.errors import ConfigError

pytestmark = pytest.mark.slow
"""Each starts processes."""


def stream(tmp_path, *, count=3, chunks=5, pattern="steps", processes=1):
    """Return the records, when the run began, and the server's stamps."""

    async def go():
        async with loopback(tmp_path, pattern=pattern, processes=processes) as server:
            shots = [
                Shot(i, 0.0, 1, chunks, _body(10, chunks), request_id=f"r{i}") for i in range(count)
            ]
            load = Load(server.endpoint, shots, timeout_s=20)
            records = await load.run(asyncio.Event())
            return records, load.state.started_s, server.stamps_s()

    return asyncio.run(go())


def test_a_chunk_is_as_long_as_an_engines():
    assert abs(len(CHUNK) - CHUNK_BYTES) <= 2


@pytest.mark.parametrize("pattern", ["steps", "spread"])
def test_every_chunk_is_stamped_before_it_is_read(tmp_path, pattern):
    records, started_s, stamps = stream(tmp_path, pattern=pattern)
    assert [record.status for record in records] == ["ok"] * 3
    for record in records:
        sent = stamps[record.request_id]
        assert len(sent) == len(record.chunk_s) == 5
        assert all(s < r + started_s for s, r in zip(sent, record.chunk_s, strict=True))
        # Each has its time; one that comes late does not delay the next.
        assert all(a <= b for a, b in itertools.pairwise(sent))
        # A loop's timer may be early by its own grain, a millisecond.
        assert sent[-1] - started_s - record.sent_s >= 4 / CHUNKS_PER_S - 0.001


def test_several_servers_share_the_port_and_all_stamps_are_found(tmp_path):
    records, _, stamps = stream(tmp_path, count=12, processes=2)
    assert {record.request_id for record in records} == stamps.keys()


def test_the_client_carries_a_small_peak(tmp_path):
    found = asyncio.run(carry(Peak(rate_rps=5, streams=4), seconds=0.5, bound_s=5.0))
    assert found.reasons == ()
    assert found.failed == 0
    assert len(found.added.ordered) >= 4 * 5
    assert 0 < found.added.at(50) < 5
    assert found.cpu_us_per_chunk > 0
    assert "4 streams, 80 chunks/s" in str(found)


def test_a_client_that_is_held_up_is_told(tmp_path):
    """Something else takes the event loop for a while: the chunks it left lying are late."""

    async def go():
        hog = asyncio.create_task(block())
        found = await carry(Peak(rate_rps=5, streams=4), seconds=1.0, bound_s=0.05, processes=1)
        hog.cancel()
        return found

    async def block():
        while True:
            await asyncio.sleep(0.01)
            time.sleep(0.2)  # noqa: ASYNC251  # what is tested

    found = asyncio.run(go())
    assert any("reading chunks at p99" in reason for reason in found.reasons)


def test_the_peak_follows_from_the_rate_and_the_lengths():
    peak = Peak.of(2.0, input_tokens=1000, output_tokens=100)
    assert peak.streams * peak.chunks_per_s == pytest.approx(2.0 * 100)
    assert peak.rate_rps == 2.0
    assert 3000 < peak.body_bytes < 8000


def test_faults_and_failures_void_it():
    calm = distribution("", "", [0.001])
    peak = Peak(rate_rps=1, streams=1)
    fields = {"peak": peak, "processes": 2, "added": calm, "dispatch": calm}
    fields |= {"cpu_us_per_chunk": 30.0, "bound_s": 0.01}
    assert Carried(**fields, failed=0, faults=()).reasons == ()
    assert (
        "2 requests to a local server failed" in Carried(**fields, failed=2, faults=()).reasons[0]
    )
    assert Carried(**fields, failed=0, faults=("process died",)).reasons == ("process died",)
    late = distribution("", "", [0.5])
    reasons = Carried(**(fields | {"dispatch": late}), failed=0, faults=()).reasons
    assert "sending requests at p99 500.0 ms, bound 10 ms" in reasons[0]


def test_a_server_that_does_not_start_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(loopback_module.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="did not start"):
        stream(tmp_path)


def test_no_server_is_left_behind(tmp_path):
    async def go():
        async with loopback(tmp_path) as server:
            return server.endpoint.port

    port = asyncio.run(go())

    async def knock():
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)

    asyncio.run(knock())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
