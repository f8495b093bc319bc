"""An engine of somebody else's: when it is there, when it has ended, and when nobody waits."""

import asyncio

import pytest

from tailrace.errors import EngineError
from tailrace.server.borrowed_engine import BorrowedEngine
from tailrace.server.orders import EngineUp


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def test_each_life_is_lent_until_it_ends():
    async def main():
        engine = BorrowedEngine("frontend-0-1")
        assert (engine.identity, engine.is_owner) == (b"frontend-0-1", False)
        waiting = asyncio.create_task(engine.launch())
        await engine.is_up(EngineUp("/x/1", 11, 1))
        first = await waiting
        assert (first.pid, str(first.socket_path), first.number) == (11, "/x/1", 1)
        ended = asyncio.create_task(first.wait())
        await engine.is_down(7)  # another's
        assert not ended.done()
        await engine.is_down(1)
        assert await ended == 0
        waiting = asyncio.create_task(engine.launch())
        await asyncio.sleep(0)
        assert not waiting.done()
        await engine.is_up(EngineUp("/x/2", 12, 2))
        assert (await waiting).number == 2

    run(main())


def test_one_that_was_let_go_is_lent_again_while_it_lives():
    async def main():
        engine = BorrowedEngine("f")
        await engine.is_up(EngineUp("/x/1", 11, 1))
        first = await engine.launch()
        first.kill()
        assert await first.wait() == 0
        second = await engine.launch()
        assert second is not first
        assert second.number == 1
        await second.stop(0.0)
        assert await second.wait() == 0

    run(main())


def test_nobody_waits_after_the_release():
    async def main():
        engine = BorrowedEngine("f")
        waiting = asyncio.create_task(engine.launch())
        await asyncio.sleep(0)
        await engine.release()
        with pytest.raises(EngineError, match="going down"):
            await waiting

    run(main())
