"""Engine processes: order, folder, end."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tailrace.config import EngineConfig
from tailrace.errors import EngineError
from tailrace.server.supervisor import Launcher


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def script(text):
    """A command that runs Python."""
    return (sys.executable, "-c", text)


def test_the_order_arrives_on_standard_input_which_stays_open(tmp_path):
    async def main():
        told = tmp_path / "told"
        command = script(
            "import select, sys\n"
            "line = sys.stdin.buffer.readline()\n"
            "is_open = not select.select([0], [], [], 0)[0]\n"
            f"open({str(told)!r}, 'wb').write(line)\n"
            "sys.exit(7 if is_open else 8)"
        )
        launcher = Launcher(EngineConfig(block_size=8), command=command)
        process = await launcher.launch()
        assert await process.wait() == 7
        order = json.loads(told.read_bytes())
        assert Path(order["socket"]) == process.socket_path
        assert order["config"]["block_size"] == 8
        launcher.clean()

    run(main())


def test_one_that_was_begun_is_the_first_to_be_launched():
    async def main():
        launcher = Launcher(EngineConfig(), command=script("input()"))
        await launcher.begin()
        first, second = [await launcher.launch() for _ in range(2)]
        assert (first.number, second.number, launcher.launched) == (1, 2, 2)
        assert await first.wait() == await second.wait() == 0
        launcher.clean()

    run(main())


def test_one_that_was_begun_and_never_launched_is_ended():
    async def main():
        launcher = Launcher(EngineConfig(), command=script("import time; time.sleep(60)"))
        await launcher.begin()
        begun = launcher._begun
        launcher.clean()
        assert await begun.wait() == -signal.SIGKILL
        launcher.clean()

    run(main())


def test_our_death_is_the_end_of_its_standard_input():
    async def main():
        launcher = Launcher(EngineConfig(), command=script("import sys; sys.stdin.read()"))
        process = await launcher.launch()
        process.process.stdin.close()
        assert await process.wait() == 0
        launcher.clean()

    run(main())


def test_each_incarnation_has_a_socket_of_its_own_in_one_private_folder():
    async def main():
        launcher = Launcher(EngineConfig(), command=script(""))
        processes = [await launcher.launch() for _ in range(3)]
        assert len({process.socket_path for process in processes}) == 3
        assert {process.socket_path.parent for process in processes} == {launcher.folder}
        assert launcher.folder.stat().st_mode & 0o777 == 0o700
        for process in processes:
            await process.wait()
        launcher.clean()
        assert not launcher.folder.exists()
        launcher.clean()

    run(main())


def test_a_command_that_does_not_exist_is_named():
    async def main():
        launcher = Launcher(EngineConfig(), command=("/no/such/engine",))
        with pytest.raises(EngineError, match="cannot start /no/such/engine: No such file"):
            await launcher.launch()
        launcher.clean()

    run(main())


def test_a_folder_too_deep_for_a_socket_is_refused_with_the_remedy(tmp_path):
    async def main():
        launcher = Launcher(EngineConfig(), command=script(""), folder=tmp_path / ("x" * 100))
        with pytest.raises(EngineError, match="the system takes 107: set TMPDIR"):
            await launcher.launch()

    run(main())


def test_a_process_that_ends_at_once_is_no_error_of_the_launch():
    async def main():
        launcher = Launcher(EngineConfig(), command=script("import os; os._exit(5)"))
        process = await launcher.launch()
        assert await process.wait() == 5
        process.kill()
        await process.stop(1.0)
        launcher.clean()

    run(main())


def test_stop_waits_for_a_process_that_goes():
    async def main():
        launcher = Launcher(EngineConfig(), command=script("input()"))
        process = await launcher.launch()
        await process.stop(20.0)
        assert await process.wait() == 0
        launcher.clean()

    run(main())


@pytest.mark.parametrize("setup", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_stop_insists_with_a_process_that_stays(setup, tmp_path):
    async def main():
        is_set = tmp_path / "set"
        text = f"import signal\n{setup}\nopen({str(is_set)!r}, 'w')\nwhile True: signal.pause()"
        launcher = Launcher(EngineConfig(), command=script(text))
        process = await launcher.launch()
        while not is_set.exists():  # noqa: ASYNC110 -- another process sets it
            await asyncio.sleep(0.002)
        await process.stop(0.05)
        assert await process.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)
        launcher.clean()

    run(main())
