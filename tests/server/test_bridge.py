"""The bridge against real processes that misbehave: what each request gets, and what is left."""

import asyncio
import os
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tailrace.clock import VirtualClock
from tailrace.config import Config, EngineConfig
from tailrace.engine.core_dump import WAIT_S
from tailrace.errors import EngineError, ModelError, RequestError
from tailrace.server import bridge as bridge_module
from tailrace.server.bridge import (
    MAX_FAILED_STARTS,
    SILENCE_LIMIT_S,
    Bridge,
    silence_limit_s,
)
from tailrace.server.engine_client import EngineState
from tailrace.server.serve import assemble
from tailrace.server.supervisor import Launcher
from tailrace.types import STEP_HUNG_STATUS, EngineRequest, SamplingParams

WORKER = Path(__file__).with_name("fake_worker.py")
DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def quick_pings(monkeypatch):
    monkeypatch.setattr(bridge_module, "PING_INTERVAL_S", 0.01)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


async def until(condition):
    """Let the loop turn until something is so; `run` has the deadline."""
    while not condition():  # noqa: ASYNC110 -- the bridge tells of no state by event
        await asyncio.sleep(0.002)


def request(request_id="r"):
    return EngineRequest(
        request_id=request_id,
        token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=2),
        arrival_s=0.0,
    )


class Running:
    """A bridge at work, and what it told its owner."""

    def __init__(self, behaviours, *, on_resolved=None, **options):
        self.folders = []
        self.reports = []
        self.pids = set()
        self.launcher = Launcher(EngineConfig(), command=(sys.executable, WORKER, *behaviours))
        self.bridge = Bridge(
            self.launcher,
            on_resolved=on_resolved or self.folders.append,
            on_stats=self.note,
            **{"silence_limit_s": SILENCE_LIMIT_S, "first_backoff_s": 0.001} | options,
        )
        self.task = asyncio.create_task(self.bridge.run())

    def note(self, stats):
        self.pids |= set(self.bridge.pids.values())
        self.reports.append(stats)

    async def ready(self):
        await self.bridge.wait_ready()
        await until(lambda: self.reports)
        return self.bridge

    async def failure(self):
        """Return the error that `run` ends with."""
        with pytest.raises(EngineError) as caught:
            await self.task
        return caught.value


@asynccontextmanager
async def running(*behaviours, **options):
    held = Running(behaviours, **options)
    try:
        yield held
    finally:
        await held.bridge.stop(0.2)
        await asyncio.gather(held.task, return_exceptions=True)
        assert held.bridge.pids == {}
        assert not held.launcher.folder.exists()
        for pid in held.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def outputs(queue):
    """Return a request's outputs, up to the last."""
    got = [await queue.get()]
    while got[-1].finish_reason is None:
        got.append(await queue.get())
    return got


def test_a_request_goes_out_and_its_outputs_come_back():
    async def main():
        async with running("normal") as held:
            assert held.bridge.state is EngineState.STARTING
            bridge = await held.ready()
            assert bridge.state is EngineState.READY
            assert bridge.ready.device == "fake"
            assert held.folders == ["/model/folder"]
            got = await outputs(bridge.submit(request()))
            assert [output.token_ids for output in got] == [[1], [2]]
            assert got[-1].finish_reason == "length"
            assert bridge.open_requests == 0
            assert bridge.stats is held.reports[-1]

    run(main())


def test_many_requests_get_their_own_outputs():
    async def main():
        async with running("normal") as held:
            bridge = await held.ready()
            queues = {f"r{i}": bridge.submit(request(f"r{i}")) for i in range(50)}
            for request_id, queue in queues.items():
                assert {o.request_id for o in await outputs(queue)} == {request_id}
            assert bridge.open_requests == 0

    run(main())


def test_nothing_can_be_submitted_before_the_engine_is_ready():
    async def main():
        async with running("loads") as held:
            await until(lambda: held.folders)
            with pytest.raises(RequestError, match="starting") as caught:
                held.bridge.submit(request())
            assert caught.value.status == 503
            assert caught.value.retry_after_s > 0
            held.bridge.abort(["r"])

    run(main())


def test_an_abort_reaches_the_engine_and_the_front_end_forgets():
    async def main():
        async with running("holds") as held:
            bridge = await held.ready()
            queue = bridge.submit(request())
            assert bridge.open_requests == 1
            bridge.abort(["r", "never heard of"])
            assert bridge.open_requests == 0
            assert bridge.open_requests == 0
            await until(lambda: held.reports[-1].preemptions_total == 1)  # aborts it was told of
            assert queue.take() is None
            bridge.abort(["r"])
            seen = len(held.reports)
            await until(lambda: len(held.reports) > seen + 1)
            assert held.reports[-1].preemptions_total == 1

    run(main())


def test_the_last_word_of_an_aborted_request_comes_once_or_is_known_not_to_come():
    async def main():
        words = {}
        async with running("holds") as held:
            bridge = await held.ready()
            bridge.submit(request("a"))
            bridge.abort(["a", "never heard of"], words.__setitem__)
            assert words == {"never heard of": None}
            await until(lambda: "a" in words)
            assert words["a"].finish_reason == "abort"
            words.clear()
            bridge.abort(["a"], words.__setitem__)
            assert words == {"a": None}

    run(main())


def test_a_last_word_that_will_not_come_any_more_is_said_to_be_missing():
    async def main():
        words = {}
        async with running("stubborn") as held:
            bridge = await held.ready()
            bridge.submit(request("a"))
            bridge.abort(["a"], words.__setitem__)
            assert words == {}
        assert words == {"a": None}

    run(main())


def test_all_who_ask_for_the_kv_pool_get_a_report():
    async def main():
        async with running("normal") as held:
            with pytest.raises(RequestError, match="starting"):
                await held.bridge.inspect_kv()
            bridge = await held.ready()
            one, other = await asyncio.gather(bridge.inspect_kv(), bridge.inspect_kv())
            assert one.total_blocks == other.total_blocks == 64

    run(main())


def test_a_lease_is_told_to_the_engine_and_given_back():
    async def main():
        async with running("normal") as held:
            held.bridge.reserve("early", 100, 5.0)  # not ready: nothing to lease from
            bridge = await held.ready()
            bridge.reserve("a", 100, 5.0)
            bridge.reserve("b", 100, 5.0)
            assert (await bridge.inspect_kv()).reserved_blocks == 2
            bridge.abort(["a", "early"])
            assert (await bridge.inspect_kv()).reserved_blocks == 1
            await outputs(bridge.submit(request("b")))
            assert (await bridge.inspect_kv()).reserved_blocks == 0
            bridge.abort(["b"])

    run(main())


def test_an_engine_that_dies_over_the_kv_pool_leaves_nobody_waiting():
    async def main():
        async with running("dies", "normal") as held:
            bridge = await held.ready()
            with pytest.raises(RequestError, match="engine died"):
                await bridge.inspect_kv()
            await until(lambda: bridge.state is EngineState.READY)
            assert (await bridge.inspect_kv()).fault == ""

    run(main())


def test_an_engine_that_dies_ends_its_requests_and_is_started_again():
    async def main():
        async with running("dies", "normal") as held:
            bridge = await held.ready()
            queues = [bridge.submit(request(f"r{i}")) for i in range(3)]
            for queue in queues:
                last = (await outputs(queue))[-1]
                assert last.finish_reason == "error"
                assert "engine died" in last.error
            assert bridge.state is EngineState.RESTARTING
            assert bridge.open_requests == 0
            assert bridge.stats is None
            with pytest.raises(RequestError, match="restarting"):
                bridge.submit(request())
            bridge.abort(["r0"])
            await until(lambda: bridge.state is EngineState.READY)
            assert bridge.restarts_total == 1
            assert len(await outputs(bridge.submit(request("r0")))) == 2

    run(main())


def test_outputs_before_the_death_are_not_lost():
    async def main():
        async with running("dies", "normal") as held:
            bridge = await held.ready()
            got = await outputs(bridge.submit(request()))
            assert [output.finish_reason for output in got[:-1]] in ([], [None])
            assert got[-1].finish_reason == "error"

    run(main())


def test_restarts_go_on_for_as_long_as_they_succeed():
    async def main():
        async with running("dies", "dies", "dies", "normal") as held:
            bridge = await held.ready()
            for number in range(3):
                await until(lambda: bridge.state is EngineState.READY)
                assert (await outputs(bridge.submit(request())))[-1].finish_reason == "error"
                assert bridge.restarts_total == number + 1
            await until(lambda: bridge.state is EngineState.READY)

    run(main())


def test_an_engine_that_says_why_it_cannot_start_ends_the_run_with_its_text():
    async def main():
        async with running("fatal") as held:
            assert str(await held.failure()) == "the fake engine lacks a fake model"
            assert held.bridge.state is EngineState.FAILED
            assert held.bridge.restarts_total == 0
            with pytest.raises(RequestError, match="failed"):
                held.bridge.submit(request())

    run(main())


def test_an_engine_that_ends_before_it_was_ready_is_not_tried_again():
    async def main():
        async with running("early") as held:
            assert str(await held.failure()) == "the engine process ended with status 3"
            assert held.launcher.launched == 1

    run(main())


def test_an_engine_that_cannot_be_started_again_is_given_up():
    async def main():
        async with running("dies", "fatal") as held:
            bridge = await held.ready()
            queue = bridge.submit(request())
            error = str(await held.failure())
            assert f"{MAX_FAILED_STARTS} times in a row" in error
            assert "lacks a fake model" in error
            assert (await outputs(queue))[-1].finish_reason == "error"
            assert bridge.state is EngineState.FAILED
            assert held.launcher.launched == 1 + MAX_FAILED_STARTS

    run(main())


def test_a_failed_start_or_two_is_forgiven():
    async def main():
        async with running("dies", "early", "fatal", "normal") as held:
            bridge = await held.ready()
            await outputs(bridge.submit(request()))
            await until(lambda: bridge.state is EngineState.READY)
            assert bridge.restarts_total == 3

    run(main())


def test_a_running_engine_that_says_it_cannot_go_on_is_started_again():
    async def main():
        async with running("late_fatal", "normal") as held:
            bridge = await held.ready()
            got = await outputs(bridge.submit(request()))
            assert got[-1].finish_reason == "error"
            await until(lambda: bridge.state is EngineState.READY)
            assert bridge.restarts_total == 1

    run(main())


def test_garbage_is_counted_and_the_requests_are_served():
    async def main():
        async with running("garbage") as held:
            bridge = await held.ready()
            assert len(await outputs(bridge.submit(request()))) == 2
            assert bridge.undecodable_total > 0
            assert bridge.state is EngineState.READY

    run(main())


def test_a_silent_engine_is_ended_and_started_again():
    async def main():
        clock = VirtualClock()
        async with running("silent", "normal", clock=clock, silence_limit_s=60.0) as held:
            bridge = held.bridge
            await bridge.wait_ready()
            held.pids |= set(bridge.pids.values())
            queue = bridge.submit(request())
            clock.advance(59.0)
            await asyncio.sleep(0.05)  # several pings: none of them may end it
            assert bridge.state is EngineState.READY
            clock.advance(2.0)
            assert (await outputs(queue))[-1].finish_reason == "error"
            await until(lambda: bridge.state is EngineState.READY)
            assert bridge.restarts_total == 1

    run(main())


def test_silence_is_told_while_the_engine_is_ready_and_ends_with_what_it_says():
    async def main():
        clock = VirtualClock()
        async with running("silent", "normal", clock=clock, silence_limit_s=60.0) as held:
            bridge = held.bridge
            assert bridge.silence_s is None
            await bridge.wait_ready()
            clock.advance(7.0)
            assert bridge.silence_s == 7.0
            clock.advance(60.0)
            await until(lambda: bridge.state is EngineState.RESTARTING)
            assert bridge.silence_s is None
            await until(lambda: bridge.state is EngineState.READY and held.reports)
            assert bridge.silence_s == 0.0

    run(main())


def test_an_engine_that_ended_over_a_step_that_hung_is_started_again_and_says_so():
    async def main():
        async with running("hung", "normal") as held:
            bridge = await held.ready()
            with capture_logs() as logs:
                last = (await outputs(bridge.submit(request())))[-1]
                await until(lambda: bridge.state is EngineState.READY)
            assert last.finish_reason == "error"
            assert bridge.restarts_total == 1
            (line,) = [line for line in logs if line["event"] == "engine_restarts"]
            assert f"status {STEP_HUNG_STATUS}" in line["cause"]
            assert "--step-timeout-s" in line["cause"]

    run(main())


def test_a_step_that_may_take_its_time_is_not_taken_for_silence():
    assert silence_limit_s(120.0) > 120.0 + WAIT_S
    assert silence_limit_s(0.0) == float("inf")


def test_a_front_end_gives_its_engine_the_time_of_a_step_and_more():
    async def main():
        config = Config(engine=EngineConfig(step_timeout_s=7.0))
        launcher = Launcher(config.engine, command=(sys.executable, WORKER, "normal"))
        _, bridge = assemble(config, launcher)
        assert bridge._silence_limit_s == silence_limit_s(7.0)
        await bridge.stop()

    run(main())


def test_an_engine_that_answers_pings_is_never_silent():
    async def main():
        clock = VirtualClock()
        async with running("normal", clock=clock, silence_limit_s=60.0) as held:
            bridge = await held.ready()
            for _ in range(5):
                seen = len(held.reports)
                clock.advance(50.0)
                await until(lambda seen=seen: len(held.reports) > seen + 1)
            assert bridge.restarts_total == 0

    run(main())


def test_no_limit_holds_while_the_engine_loads():
    async def main():
        clock = VirtualClock()
        async with running("loads", clock=clock, silence_limit_s=60.0) as held:
            await until(lambda: held.folders)
            clock.advance(3600.0)
            await asyncio.sleep(0.05)  # several pings
            assert held.bridge.state is EngineState.STARTING
            assert held.bridge.pids

    run(main())


def test_a_folder_that_the_front_end_cannot_read_ends_the_start_with_its_text():
    def refuse(folder):
        raise ModelError(f"no tokenizer.json in {folder}")

    async def main():
        async with running("normal", on_resolved=refuse) as held:
            assert str(await held.failure()) == "no tokenizer.json in /model/folder"

    run(main())


def test_an_unforeseen_error_of_ours_ends_the_start_too():
    def fail(folder):
        raise OSError("disk on fire")

    async def main():
        async with running("normal", on_resolved=fail) as held:
            assert "disk on fire" in str(await held.failure())

    run(main())


# Stopping


def test_stopping_ends_open_requests_with_an_error():
    async def main():
        async with running("holds") as held:
            bridge = await held.ready()
            queue = bridge.submit(request())
            await bridge.stop()
            last = (await outputs(queue))[-1]
            assert last.finish_reason == "error"
            assert "stopping" in last.error
            with pytest.raises(RequestError, match="stopping") as caught:
                bridge.submit(request())
            assert caught.value.status == 503
            await held.task

    run(main())


def test_an_engine_that_will_not_go_is_ended():
    async def main():
        async with running("stubborn") as held:
            bridge = await held.ready()
            (pid,) = bridge.pids.values()
            await bridge.stop(0.05)
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(main())


@pytest.mark.parametrize("wait_for_folder", [False, True])
def test_stopping_while_the_engine_loads_does_not_wait_for_it(wait_for_folder):
    async def main():
        async with running("loads") as held:
            if wait_for_folder:
                await until(lambda: held.folders)
                held.pids |= set(held.bridge.pids.values())
            await held.bridge.stop(1000.0)
            await held.task

    run(main())


def test_stopping_between_two_starts_does_not_wait_for_the_next():
    async def main():
        async with running("dies", "normal", first_backoff_s=1000.0) as held:
            bridge = await held.ready()
            await outputs(bridge.submit(request()))
            await until(lambda: bridge.state is EngineState.RESTARTING)
            await bridge.stop()
            await held.task
            assert held.launcher.launched == 1

    run(main())


def test_stopping_twice_and_after_a_failure_is_harmless():
    async def main():
        async with running("early") as held:
            await held.failure()
            await held.bridge.stop()
            await held.bridge.stop()

    run(main())


def test_the_sockets_folder_is_private():
    async def main():
        async with running("normal") as held:
            await held.ready()
            assert held.launcher.folder.stat().st_mode & 0o077 == 0
            assert held.launcher.folder.parent == Path(tempfile.gettempdir())

    run(main())
