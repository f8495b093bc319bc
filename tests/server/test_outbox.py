from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.server.outbox import Outbox


@dataclass
class Stream:
    name: str
    written: list
    priority: int = 0
    has_begun: bool = False
    turn: int = 0

    def write_pending(self):
        self.written.append(self.name)
        self.has_begun = True


def test_what_arrived_together_goes_out_by_class_then_first_tokens_then_arrival():
    async def scenario():
        outbox, written = Outbox(), []
        later = Stream("later", written, has_begun=True)
        first = Stream("first", written)
        paying = Stream("paying", written, priority=-1, has_begun=True)
        for stream in (later, first, paying):
            outbox.add(stream)
        assert written == []  # the rest of the engine's message may still bring another
        await asyncio.sleep(0)
        assert written == ["paying", "first", "later"]

    asyncio.run(scenario())


def test_equals_go_out_in_order_of_arrival_and_each_time_they_are_added():
    async def scenario():
        outbox, written = Outbox(), []
        streams = [Stream(str(number), written) for number in range(20)]
        for stream in streams:
            outbox.add(stream)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert written == [stream.name for stream in streams]
        outbox.add(streams[3])
        await asyncio.sleep(0)
        assert written[20:] == ["3"]

    asyncio.run(scenario())


def test_a_stream_that_is_added_while_others_are_written_still_goes_out():
    async def scenario():
        outbox, written = Outbox(), []
        late = Stream("late", written)

        class Adds(Stream):
            def write_pending(self):
                super().write_pending()
                outbox.add(late)

        outbox.add(Adds("early", written))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert written == ["early", "late"]

    asyncio.run(scenario())


def test_what_comes_while_others_wait_overtakes_them_if_it_is_more_urgent():
    async def scenario():
        outbox, written = Outbox(streams_per_round=2), []
        for number in range(6):
            outbox.add(Stream(str(number), written, has_begun=True))
        await asyncio.sleep(0)
        assert written == ["0", "1"]
        outbox.add(Stream("later", written, has_begun=True))
        outbox.add(Stream("first", written))
        outbox.add(Stream("paying", written, priority=-1, has_begun=True))
        assert outbox.waiting == 7
        for _ in range(4):
            await asyncio.sleep(0)
        assert written[2:] == ["paying", "first", "2", "3", "4", "5", "later"]
        assert outbox.waiting == 0

    asyncio.run(scenario())


def test_a_stream_that_waits_keeps_its_place_and_is_written_once():
    async def scenario():
        outbox, written = Outbox(streams_per_round=1), []
        streams = [Stream(name, written) for name in "abc"]
        for stream in (*streams, streams[2], streams[1]):
            outbox.add(stream)
        for _ in range(8):
            await asyncio.sleep(0)
        assert written == ["a", "b", "c"]

    asyncio.run(scenario())


async def burst(outbox, *streams):
    """Have streams written that have something to say of one step, in the message's order."""
    for stream in streams:
        outbox.add(stream)
    await turns()


async def turns():
    for _ in range(8):
        await asyncio.sleep(0)


@settings(deadline=None, max_examples=30)
@given(steps=st.lists(st.permutations(range(7)), min_size=2, max_size=4))
def test_equals_keep_their_places_from_step_to_step_however_messages_order_them(steps):
    async def scenario():
        outbox, written = Outbox(streams_per_round=3), []
        streams = [Stream(number, written) for number in range(7)]
        for order in steps:
            await burst(outbox, *(streams[number] for number in order))
        places = [written[start : start + 7] for start in range(0, len(written), 7)]
        assert places == [list(steps[0])] * len(steps)

    asyncio.run(scenario())


def test_who_is_new_has_its_first_token_written_first_and_stays_there():
    async def scenario():
        outbox, written = Outbox(), []
        old = [Stream(name, written) for name in "abc"]
        await burst(outbox, *old)
        new = Stream("new", written)
        for _ in range(2):
            written.clear()
            await burst(outbox, *old, new)
            assert written == ["new", "a", "b", "c"]

    asyncio.run(scenario())


def test_who_had_nothing_in_a_step_is_the_first_of_its_equals_in_the_next():
    async def scenario():
        outbox, written = Outbox(), []
        a, b, c = (Stream(name, written) for name in "abc")
        await burst(outbox, a, b, c)
        await burst(outbox, a, b)
        written.clear()
        await burst(outbox, a, b, c)
        assert written == ["c", "a", "b"]

    asyncio.run(scenario())


def test_what_came_earlier_goes_first_whoever_was_written_longest_ago():
    async def scenario():
        outbox, written = Outbox(streams_per_round=1), []
        a, b, c = (Stream(name, written) for name in "abc")
        await burst(outbox, a, b, c)
        written.clear()
        outbox.add(b)
        outbox.add(c)
        await asyncio.sleep(0)
        outbox.add(a)
        await turns()
        assert written == ["b", "c", "a"]

    asyncio.run(scenario())
