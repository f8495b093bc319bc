"""A request's outputs: in order, waited for or taken when a listener is told."""

import asyncio

import pytest

from tailrace.server.engine_client import OutputQueue
from tailrace.types import TokenOutput


def output(number):
    return TokenOutput("r", [number])


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def test_outputs_are_waited_for_in_order():
    async def main():
        queue = OutputQueue()
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        for number in range(3):
            queue.put_nowait(output(number))
        assert await waiting == output(0)
        assert [await queue.get() for _ in range(2)] == [output(1), output(2)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 0.01)

    run(main())


def test_a_listener_is_told_of_each_output_and_of_those_that_are_there():
    async def main():
        queue, told = OutputQueue(), []
        queue.put_nowait(output(0))
        queue.listen(lambda: told.append(queue.take()))
        queue.put_nowait(output(1))
        assert told == [output(0), output(1)]
        assert queue.take() is None

    run(main())
