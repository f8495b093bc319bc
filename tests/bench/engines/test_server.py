from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tailrace.bench.engines import EngineSpec, start
from tailrace.bench.engines import server as server_module
from tailrace.bench.launch import free_port
from tailrace.errors import ConfigError, EngineError
from tests.bench.mock_server import MockServer
from tests.bench.plain_server import PlainServer

MOCK = str(Path(__file__).parents[1] / "mock_server.py")

pytestmark = pytest.mark.e2e


def spec(*arguments, **fields) -> EngineSpec:
    """A mock of Tailrace, started as Tailrace would be."""
    command = (sys.executable, MOCK, "--port", "{port}", *arguments)
    fields = {"command": command, "kind": "tailrace", "ready_timeout_s": 60.0} | fields
    return EngineSpec(name="mock", **fields)


def script(text: str, **fields) -> EngineSpec:
    """A server that is no more than a Python text; it gets its port as an argument."""
    return spec(command=(sys.executable, "-c", text, "{port}"), **fields)


def is_running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in {"Z", "X"}


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


class FakeGpus:
    """GPUs with so many bytes in use, of which a server takes `grown` while it starts.

    Where the driver numbers processes as we do, the server is on those that it `holds`.
    """

    def __init__(self, used, grown=None, *, holds=(), uuids=()):
        self.used = used
        self.grown = dict(grown or {})
        self.server = None
        self._holds = holds
        self._uuids = uuids

    def read(self):
        is_up = self.server is not None and self.server.pid is not None
        return [
            SimpleNamespace(
                index=index,
                uuid=self._uuids[index] if self._uuids else f"GPU-{index}",
                memory_used_bytes=used + (self.grown.get(index, 0) if is_up else 0),
            )
            for index, used in self.used.items()
        ]

    def processes(self):
        return {i: {1, self.server.pid} if i in self._holds else {1} for i in self.used}


async def until(holds) -> None:
    end_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.02)


def test_a_started_server_is_ready_in_the_block_and_gone_after_it(tmp_path):
    async def go():
        server = start(spec(env={"SOME": "thing"}), tmp_path / "logs" / "server.log")
        async with server:
            assert server.is_alive()
            assert server.death() == ""
            assert server.version == "0-mock"
            assert server.url == f"http://127.0.0.1:{server.endpoint.port}"
            assert str(server.endpoint.port) in server.command
            assert b"SOME=thing" in environment_of(server.pid)
            pid = server.pid
        assert not is_running(pid)
        assert server.pid is None
        assert len(server.ready_s) == 1
        assert server.ready_s[0] > 0
        assert (server.restarts, server.out_of_memory) == (0, 0)
        return server

    server = asyncio.run(go())
    assert "serving at" in server.log_file.read_text()


def test_a_server_that_died_is_told_of_and_counted_when_it_is_started_again(tmp_path):
    async def go():
        server = start(spec(), tmp_path / "log")
        async with server:
            os.kill(server.pid, signal.SIGTERM)
            await until(lambda: not server.is_alive())
            assert "the server ended with status 0" in server.death()
            assert "serving at" in server.death()
        async with server:
            assert server.death() == ""
            assert server.restarts == 1
        async with server:
            assert server.restarts == 1
        return server

    server = asyncio.run(go())
    assert len(server.ready_s) == 3
    assert server.log_file.read_text().count("serving at") == 3


def test_a_server_that_ends_early_is_an_error_with_its_last_words(tmp_path):
    async def go():
        async with start(spec("--stillborn"), tmp_path / "log"):
            pytest.fail("the block must not run")

    with pytest.raises(EngineError, match=r"status 4 before it was ready(.|\n)*no weights"):
        asyncio.run(go())


def test_a_server_that_is_never_ready_is_ended_and_its_start_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "TELL_S", 0.1)
    told = []
    server = start(
        spec("--never-ready", ready_timeout_s=3.0), tmp_path / "log", on_progress=told.append
    )
    pids = []

    async def go():
        task = asyncio.create_task(server.__aenter__())
        await until(lambda: server.pid or task.done())
        pids.append(server.pid)
        await task

    with pytest.raises(EngineError, match="not ready within 3 s"):
        asyncio.run(go())
    assert not is_running(pids[0])
    assert told
    assert told[-1].startswith("mock: ")


@pytest.mark.parametrize(
    ("words", "count", "said"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 1, True),
        ("cudaMalloc failed: out of memory", 1, True),
        ("RuntimeError: Not enough memory. Please try more.", 1, True),
        ("error loading model: unable to allocate CUDA0 buffer", 1, True),
        ("Decode out of memory. Try a smaller batch.", 1, True),
        ("Lower the fraction if you run out of memory.", 0, False),
    ],
)
def test_memory_that_ran_out_is_known_by_what_was_printed(tmp_path, words, count, said):
    server = start(script(f"print({words!r}); raise SystemExit(1)"), tmp_path / "log")

    async def go():
        async with server:
            pytest.fail("the block must not run")

    with pytest.raises(EngineError, match="status 1") as caught:
        asyncio.run(go())
    assert ("out of memory by its own words" in str(caught.value)) == said
    assert server.out_of_memory == count


def test_a_kill_by_the_kernel_for_memory_is_told_from_another(tmp_path, monkeypatch):
    kills = [0]
    monkeypatch.setattr(server_module, "oom_kills", lambda _: kills[0])

    async def go():
        server = start(spec(), tmp_path / "log")
        for number, count, words in (
            (signal.SIGKILL, 0, "was ended by SIGKILL;"),
            (signal.SIGKILL, 1, "SIGKILL, by the kernel, which was out of memory;"),
            (signal.SIGTERM, 3, "status 0, after the kernel, out of memory, had killed"),
        ):
            async with server:
                kills[0] = count
                os.kill(server.pid, number)
                await until(lambda: not server.is_alive())
                assert words in server.death()
        return server.out_of_memory

    assert asyncio.run(go()) == 3


def test_an_interrupt_leaves_nothing_behind(tmp_path):
    pids = []

    async def go():
        async with start(spec(), tmp_path / "log") as server:
            pids.append(server.pid)
            await asyncio.sleep(60)

    async def interrupted():
        task = asyncio.create_task(go())
        await until(lambda: pids)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert not is_running(pids[0])


def test_an_interrupt_during_the_start_leaves_nothing_behind(tmp_path):
    server = start(spec("--never-ready"), tmp_path / "log")
    pids = []

    async def go():
        task = asyncio.create_task(server.__aenter__())
        await until(lambda: server.pid)
        pids.append(server.pid)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go())
    assert not is_running(pids[0])


def test_a_deaf_server_is_killed_and_an_error_of_the_block_stays(tmp_path):
    told = []
    deaf = spec("--stubborn", stop_timeout_s=0.3)

    async def go():
        async with start(deaf, tmp_path / "log", on_progress=told.append):
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(go())
    assert told == ["mock: killed, 0.3 s after SIGTERM"]


def test_a_gpu_that_stays_full_is_an_error_after_the_block(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "FREE_TIMEOUT_S", 0.5)
    used = [2**30]

    class Gpus:
        def read(self):
            return [SimpleNamespace(index=1, memory_used_bytes=used[0])]

        def processes(self):
            return {}

    async def go(left: int):
        used[0] = 2**30
        async with start(spec(), tmp_path / "log", gpus=Gpus()):
            used[0] = left

    asyncio.run(go(2**30 + 2**20))
    with pytest.raises(EngineError, match=r"GPU 1 still holds 3\.0 GiB more"):
        asyncio.run(go(2**32))


def test_a_gpu_that_the_server_does_not_see_is_somebody_elses(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "FREE_TIMEOUT_S", 0.0)
    used = {0: 2**30, 1: 2**30}

    async def go(index: int):
        used.update({0: 2**30, 1: 2**30})
        env = {"CUDA_VISIBLE_DEVICES": "1"}
        async with start(spec(env=env), tmp_path / "log", gpus=FakeGpus(used)):
            used[index] = 2**33

    asyncio.run(go(0))
    with pytest.raises(EngineError, match="GPU 1 still holds"):
        asyncio.run(go(1))


def neighbours(tmp_path, gpus: FakeGpus, **env) -> tuple[str, ...]:
    """Return what a server says of its GPUs, which are as before again at its end."""

    async def go():
        server = gpus.server = start(spec(env=env), tmp_path / "log", gpus=gpus)
        async with server:
            said = server.neighbours
            gpus.grown.clear()
        return said

    return asyncio.run(go())


MUCH = 3 * 2**30


def test_a_gpu_that_was_in_use_before_the_start_is_said(tmp_path):
    gpus = FakeGpus({0: 2**30, 1: MUCH}, holds=(0, 1))
    (said,) = neighbours(tmp_path, gpus)
    assert said.startswith("GPU 1 had 3.0 GiB in use before the server's start: somebody else")


def test_others_on_a_gpu_that_the_server_does_not_use_are_no_neighbours(tmp_path):
    assert neighbours(tmp_path, FakeGpus({0: 0, 1: MUCH}, holds=(0,))) == ()


@pytest.mark.parametrize(("index", "count"), [(0, 0), (1, 1)])
def test_where_the_driver_numbers_processes_otherwise_memory_tells(tmp_path, index, count):
    """The server is on the GPU of which it took memory while it started."""
    assert len(neighbours(tmp_path, FakeGpus({0: 0, 1: MUCH}, {index: 2**33}))) == count


def test_where_the_server_is_seen_on_no_gpu_it_is_said_with_care(tmp_path):
    (said,) = neighbours(tmp_path, FakeGpus({0: 0, 1: MUCH}))
    assert "GPU 1 had 3.0 GiB in use before the server's start: a GPU of this machine" in said
    assert "may not use" in said
    assert neighbours(tmp_path, FakeGpus({0: 0, 1: MUCH}), CUDA_VISIBLE_DEVICES="GPU-0") == ()


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        (None, None),
        ("0, 2", {0, 2}),
        ("GPU-2,GPU-1b", {2, 1}),
        ("GPU-1", set()),  # of two
        ("0,-1,2", {0}),
        ("", set()),
        ("MIG-7,0", None),
    ],
)
def test_the_gpus_that_a_server_sees_are_those_that_cuda_shows_it(text, visible):
    gpus = FakeGpus({0: 0, 1: 0, 2: 0, 3: 0}, uuids=("GPU-0", "GPU-1b", "GPU-2", "GPU-1a"))
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert server_module.visible_devices(environ, gpus) == visible


def test_one_death_is_one_lack_of_memory_however_often_it_says_so(tmp_path):
    text = "print('CUDA out of memory\\n' * 5); raise SystemExit(1)"
    server = start(script(text), tmp_path / "log")

    async def go():
        async with server:
            pytest.fail("the block must not run")

    with pytest.raises(EngineError, match="out of memory by its own words"):
        asyncio.run(go())
    assert server.out_of_memory == 1


def test_a_port_that_is_taken_is_an_error_before_the_start(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"

        async def go():
            async with start(spec(url=url), tmp_path / "log"):
                pytest.fail("the block must not run")

        with pytest.raises(ConfigError, match="something else already listens"):
            asyncio.run(go())
    assert not (tmp_path / "log").exists()


def test_a_command_may_name_its_own_port(tmp_path):
    port = free_port()
    command = (sys.executable, MOCK, "--port", str(port))

    async def go():
        url = f"http://127.0.0.1:{port}"
        async with start(spec(command=command, url=url), tmp_path / "log") as server:
            return server.endpoint.port

    assert asyncio.run(go()) == port


def test_a_running_server_is_found_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")

    async def go():
        async with MockServer(api_key="secret") as mock:
            found = EngineSpec(name="m", kind="openai", url=mock.url + "/v1", api_key_env="A_KEY")
            server = start(found, tmp_path / "log")
            async with server:
                assert (server.pid, server.command, server.ready_s) == (None, [], [])
                assert server.is_alive()
                assert server.version == "0-mock"
                assert server.death() == ""
                await mock.__aexit__()
                assert not server.is_alive()
                assert "takes no connections" in server.death()

    asyncio.run(go())
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "openai", "url": "http://127.0.0.1:1"}, "cannot connect"),
        ({"kind": "openai", "url": "{url}"}, r"not ready as openai is \(/v1/models: HTTP 404"),
        ({"kind": "vllm", "url": "{url}", "api_key_env": "NO_SUCH_KEY"}, "variable is not set"),
    ],
)
def test_a_server_that_is_not_what_it_should_be_is_an_error(tmp_path, fields, words):
    async def go():
        async with PlainServer({"/health": {}}) as plain:
            filled = fields | {"url": fields["url"].format(url=plain.url)}
            async with start(EngineSpec(name="m", **filled), tmp_path / "log"):
                pytest.fail("the block must not run")

    with pytest.raises(ConfigError, match=words):
        asyncio.run(go())


def test_warm_up_waits_for_every_answer_and_tells_of_failures(tmp_path):
    body = b'{"prompt": "a", "max_tokens": 2}'

    async def go():
        async with MockServer() as mock:
            found = EngineSpec(name="m", kind="openai", url=mock.url)
            async with start(found, tmp_path / "log") as server:
                await server.warm_up([body] * 6)
                assert len(mock.completions) == 6
                with pytest.raises(EngineError, match="2 of 2 warm-up requests failed.*HTTP 404"):
                    await server.warm_up([body] * 2, path="/none")

    asyncio.run(go())


def test_its_monitor_reads_the_server_and_its_processes(tmp_path):
    async def go():
        seen = {}
        env = {"TAILRACE_MAX_BATCH_SIZE": "8"}
        async with start(spec(env=env), tmp_path / "log") as server:
            monitor = server.monitor()
            task = asyncio.create_task(
                monitor.watch(lambda: 1.0, lambda r: seen.setdefault(r.source, r.values))
            )
            await until(lambda: {"server", "process", "client"} <= seen.keys() or task.done())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return seen

    seen = asyncio.run(go())
    assert seen["server"] == {"running": 0.0, "kv_usage": 0.25, "max_running": 8.0}
    assert seen["process"]["processes"] >= 1
