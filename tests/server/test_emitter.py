"""The emitter: order, coalescing, and the bound on what waits."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tailrace.server.choice import Piece
from tailrace.server.emitter import Emitter


class Client:
    """Takes bytes, or blocks while `opens` is clear."""

    def __init__(self, *, is_open=True):
        self.received = []
        self.is_blocked = asyncio.Event()
        self.opens = asyncio.Event()
        if is_open:
            self.opens.set()

    async def send(self, data):
        self.is_blocked.set()
        await self.opens.wait()
        self.received.append(data)


def render(piece):
    return f"[{piece.index}:{piece.text}:{len(piece.token_ids)}]".encode()


def piece(index, text, tokens=1):
    return Piece(index, text, list(range(tokens)))


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def test_pieces_for_a_free_client_are_events_of_their_own():
    async def main():
        client = Client()
        emitter = Emitter(client.send, render, limit_bytes=1000)
        assert emitter.put(piece(0, "a"))
        assert emitter.put(piece(0, "b"))
        emitter.complete()
        await emitter.run()
        assert client.received == [b"[0:a:1][0:b:1]"]
        assert emitter.sent_bytes == len(client.received[0])

    run(main())


def test_pieces_that_come_while_a_send_is_blocked_are_absorbed_by_choice():
    async def main():
        client = Client(is_open=False)
        emitter = Emitter(client.send, render, limit_bytes=10_000)
        emitter.put(piece(0, "first"))
        writer = asyncio.create_task(emitter.run())
        await client.is_blocked.wait()
        for text in "abc":
            assert emitter.put(piece(0, text))
            assert emitter.put(piece(1, text.upper(), tokens=2))
        emitter.complete()
        client.opens.set()
        await writer
        assert client.received == [b"[0:first:1]", b"[0:abc:3][1:ABC:6]"]

    run(main())


def test_a_client_too_far_behind_is_told_no_and_what_waits_stays_bounded():
    async def main():
        client = Client(is_open=False)
        emitter = Emitter(client.send, render, limit_bytes=2000)
        emitter.put(piece(0, "first"))
        writer = asyncio.create_task(emitter.run())
        await client.is_blocked.wait()
        taken = 0
        while emitter.put(piece(0, "x" * 100)):
            taken += 1
            assert taken < 100
        assert 10 <= taken < 20
        writer.cancel()

    run(main())


def test_a_limit_of_zero_takes_what_a_free_client_takes_at_once():
    async def main():
        client = Client()
        emitter = Emitter(client.send, render, limit_bytes=0)
        assert emitter.put(piece(0, "a"))
        emitter.complete()
        await emitter.run()
        assert client.received == [b"[0:a:1]"]

    run(main())


def test_the_opening_goes_out_with_the_first_piece():
    async def main():
        client = Client()
        emitter = Emitter(client.send, render, limit_bytes=100, opening=b"<")
        emitter.put(piece(0, "a"))
        emitter.complete()
        await emitter.run()
        assert client.received == [b"<[0:a:1]"]

    run(main())


def test_a_piece_that_is_no_event_sends_nothing():
    async def main():
        client = Client()
        emitter = Emitter(client.send, lambda _: b"", limit_bytes=100)
        emitter.put(piece(0, ""))
        emitter.complete()
        await emitter.run()
        assert client.received == []

    run(main())


@given(
    st.lists(st.tuples(st.integers(0, 2), st.text("ab", max_size=3), st.integers(1, 3))),
    st.data(),
)
def test_text_and_token_counts_survive_any_pattern_of_blocking(script, data):
    async def main():
        client = Client()
        pieces_out = []

        def keep(piece):
            pieces_out.append((piece.index, piece.text, len(piece.token_ids)))
            return b"x"

        emitter = Emitter(client.send, keep, limit_bytes=10**6)
        writer = asyncio.create_task(emitter.run())
        for index, text, tokens in script:
            if data.draw(st.booleans()):
                client.opens.clear()
            assert emitter.put(piece(index, text, tokens))
            await asyncio.sleep(0)
            if data.draw(st.booleans()):
                client.opens.set()
                await asyncio.sleep(0)
        emitter.complete()
        client.opens.set()
        await writer
        for index in range(3):
            sent = [(t, n) for i, t, n in script if i == index]
            got = [(t, n) for i, t, n in pieces_out if i == index]
            assert "".join(t for t, _ in got) == "".join(t for t, _ in sent)
            assert sum(n for _, n in got) == sum(n for _, n in sent)
        assert emitter.pending_bytes == 0

    run(main())
