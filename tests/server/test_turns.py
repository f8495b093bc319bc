"""Turns: the order of streams, rounds, and streams that leave."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.server.turns import Turns
from tailrace.types import TokenOutput


def output(token=1, name="r"):
    return TokenOutput(name, [] if token is None else [token])


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


async def spin(rounds=3):
    for _ in range(rounds):
        await asyncio.sleep(0)


def reader(queue, name, log):
    async def read():
        while True:
            taken = [(await queue.get()).token_ids]
            while not queue.empty():
                taken.append(queue.get_nowait().token_ids)
            log.append((name, len(taken)))

    return asyncio.create_task(read())


def test_the_order_is_priority_then_first_tokens_then_arrival():
    async def main():
        turns, log = Turns(streams_per_round=1), []
        queues = {
            name: turns.queue(priority)
            for name, priority in [("late", 0), ("old", 0), ("new", 0), ("low", 1), ("high", -1)]
        }
        tasks = [reader(queue, name, log) for name, queue in queues.items()]
        await spin()
        for name in ("old", "late"):  # these have had their first tokens
            queues[name].put_nowait(output())
        await spin(9)
        log.clear()
        for name in ("low", "old", "late", "new", "high"):
            queues[name].put_nowait(output())
        assert turns.waiting == 5
        await spin(9)
        assert [name for name, _ in log] == ["high", "new", "old", "late", "low"]
        for task in tasks:
            task.cancel()

    run(main())


def test_an_urgent_output_overtakes_those_that_wait_already():
    async def main():
        turns, log = Turns(streams_per_round=2), []
        queues = [turns.queue(0) for _ in range(20)]
        urgent = turns.queue(-1)
        tasks = [reader(queue, i, log) for i, queue in enumerate([*queues, urgent])]
        await spin()
        for queue in queues:
            queue.put_nowait(output())
        await spin(3)
        before = len(log)
        assert 0 < before < 10
        urgent.put_nowait(output())
        await spin(3)
        assert [name for name, _ in log].index(20) <= before + 4
        await spin(20)
        assert sorted(name for name, _ in log) == list(range(21))
        for task in tasks:
            task.cancel()

    run(main())


def test_a_turn_takes_all_that_is_there():
    async def main():
        turns, log = Turns(streams_per_round=1), []
        busy, other = turns.queue(0), turns.queue(0)
        for _ in range(5):
            busy.put_nowait(output())
        tasks = [reader(busy, "busy", log), reader(other, "other", log)]
        await spin()
        other.put_nowait(output())
        await spin(6)
        assert log == [("busy", 5), ("other", 1)]
        for task in tasks:
            task.cancel()

    run(main())


def test_an_output_without_tokens_leaves_the_first_token_first():
    async def main():
        turns, log = Turns(streams_per_round=1), []
        talked, silent = turns.queue(0), turns.queue(0)
        talked.put_nowait(output())
        silent.put_nowait(output(None))
        await talked.get()
        await silent.get()
        tasks = [reader(talked, "talked", log), reader(silent, "silent", log)]
        talked.put_nowait(output())
        silent.put_nowait(output())
        await spin(6)
        assert [name for name, _ in log] == ["silent", "talked"]
        for task in tasks:
            task.cancel()

    run(main())


def test_a_stream_that_leaves_holds_nobody_up_and_may_come_back():
    async def main():
        turns, log = Turns(streams_per_round=1), []
        left, other = turns.queue(0), turns.queue(0)
        task = reader(left, "left", log)
        await spin()
        left.put_nowait(output())
        task.cancel()
        other.put_nowait(output())
        staying = reader(other, "other", log)
        await spin(6)
        assert log == [("other", 1)]
        again = reader(left, "left", log)
        await spin(6)
        assert log == [("other", 1), ("left", 1)]
        assert turns.waiting == 0
        staying.cancel()
        again.cancel()

    run(main())


def test_an_output_that_comes_between_a_grant_and_its_use_is_taken_once():
    async def main():
        turns, log = Turns(), []
        queue = turns.queue(0)
        task = reader(queue, "reader", log)
        await spin()
        queue.put_nowait(output())
        queue.go_on()  # granted, and not yet resumed
        queue.put_nowait(output())
        await spin(6)
        assert log == [("reader", 2)]
        queue.put_nowait(output())
        await spin(6)
        assert log == [("reader", 2), ("reader", 1)]
        assert not task.done()
        task.cancel()

    run(main())


def test_nothing_to_take_is_said_so():
    async def main():
        queue = Turns().queue(0)
        assert queue.empty()
        with pytest.raises(asyncio.QueueEmpty):
            queue.get_nowait()

    run(main())


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60),
    st.integers(1, 4),
    st.booleans(),
)
def test_every_output_comes_once_and_in_order(script, per_round, drains):
    async def main():
        turns = Turns(per_round)
        queues = [turns.queue(index % 3) for index in range(5)]
        got = [[] for _ in queues]

        async def read(index):
            while True:
                got[index].append((await queues[index].get()).token_ids[0])
                while drains and not queues[index].empty():
                    got[index].append(queues[index].get_nowait().token_ids[0])

        tasks = [asyncio.create_task(read(index)) for index in range(5)]
        put = [[] for _ in queues]
        for number, (index, pauses) in enumerate(script):
            queues[index].put_nowait(output(number))
            put[index].append(number)
            await spin(pauses)
        await spin(2 * len(script) + 4)
        assert got == put
        for task in tasks:
            task.cancel()

    run(main())
