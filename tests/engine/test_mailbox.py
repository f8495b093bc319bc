"""The engine's side of the socket, with several front ends: who is owed what, and who has died."""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest
import zmq

from tailrace.clock import VirtualClock
from tailrace.engine import worker
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.engine import Engine
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.worker import Mailbox, Worker, _awaited
from tailrace.errors import ModelError
from tailrace.types import (
    AbortRequests,
    EngineFatal,
    EngineMessage,
    EngineOutputs,
    ForgetFrontend,
    GrowPrompt,
    ModelResolved,
    Ping,
    ReserveKv,
)
from tests.engine.test_engine import CONTEXT, request
from tests.support.fake_runner import VOCAB, FakeRunner

DEADLINE_S = 120.0


class House:
    """An engine over the fake device, and its mailbox."""

    def __init__(self, path, places):
        runner = FakeRunner(8)
        self.blocks = BlockManager(64, 8)
        engine = Engine(
            Scheduler(self.blocks, max_batch_size=4, token_budget=64),
            runner,
            submit=runner.submit,
            clock=VirtualClock(),
            context_length=CONTEXT,
            vocab_size=VOCAB,
            eos_token_ids=(),
        )
        self.path = path
        self.mailbox = Mailbox(path)
        self.worker = Worker(self.mailbox, engine, places)
        self.engine = engine
        self.context = zmq.Context()
        self.sockets = []

    def front_end(self, identity=b""):
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        if identity:
            socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.connect(f"ipc://{self.path}")
        self.sockets.append(socket)
        return socket

    def hear(self, messages):
        """Take so many messages, that were sent before, in one go."""
        seen = 0
        deadline_s = time.monotonic() + DEADLINE_S
        while seen < messages:
            assert time.monotonic() < deadline_s, f"{seen} of {messages} came"
            got = self.mailbox.receive()
            seen += len(got)
            for message in got:
                self.worker._handle(message)

    def step(self):
        for _ in range(200):
            if not self.engine.has_work:
                break
            self.mailbox.post(self.engine.step())
        self.mailbox.flush(self.engine)


@pytest.fixture
def house(monkeypatch):
    """A house of two places."""
    reading, writing = os.pipe()
    # Not tmp_path: a socket's path may have 107 bytes.
    with os.fdopen(reading, "rb") as stdin, tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr("sys.stdin", stdin)
        made = House(f"{folder}/s", places=2)
        yield made
        for socket in made.sockets:
            socket.close()
        made.context.term()
        made.mailbox._socket.close()
    os.close(writing)


def send(socket, *messages):
    for message in messages:
        socket.send(msgspec.msgpack.encode(message))


def outputs_of(socket):
    """All outputs until nothing more comes."""
    decoder, outputs = msgspec.msgpack.Decoder(EngineMessage), []
    while socket.poll(200):
        message = decoder.decode(socket.recv())
        if isinstance(message, EngineOutputs):
            outputs += message.outputs
    return outputs


def test_each_front_end_gets_its_own_and_the_counts_of_all(house):
    first, second = house.front_end(b"frontend-0-1.1"), house.front_end(b"frontend-1-1.1")
    watcher = house.front_end()
    send(first, request("r-0", [1, 2], 3))
    send(second, request("r-1", [3, 4], 2))
    send(watcher, Ping())
    house.hear(3)
    stats = house.mailbox._with_frontends(house.engine.stats())
    assert stats.frontends == {"frontend-0-1": 1, "frontend-1-1": 1}
    house.step()
    assert [o.request_id for o in outputs_of(first)] == ["r-0"] * 3
    assert [o.request_id for o in outputs_of(second)] == ["r-1"] * 2
    assert outputs_of(watcher) == []
    stats = house.mailbox._with_frontends(house.engine.stats())
    assert stats.frontends == {"frontend-0-1": 0, "frontend-1-1": 0}


def test_who_comes_while_the_model_is_loaded_is_told_at_once_which_it_is(house):
    loaded = Future()
    house.mailbox.announce(ModelResolved("/models/tiny"))

    def come():
        late = house.front_end()
        send(late, Ping())
        told = late.poll(int(DEADLINE_S * 1e3)) and late.recv()
        loaded.set_result(told)

    with ThreadPoolExecutor(1) as elsewhere:
        coming = elsewhere.submit(come)
        told = _awaited(loaded, house.mailbox)
        coming.result()
    assert msgspec.msgpack.decode(told, type=EngineMessage) == ModelResolved("/models/tiny")


def test_what_could_not_be_loaded_is_raised(house):
    loading = Future()
    loading.set_exception(ModelError("no such model"))
    with pytest.raises(ModelError, match="no such model"):
        _awaited(loading, house.mailbox)


def test_who_comes_long_after_a_start_has_failed_is_told_why(house, monkeypatch):
    """A front end has things of its own to import, from a cold disk for many seconds."""
    monkeypatch.setattr(worker, "_IDLE_POLL_MS", 20)
    monkeypatch.setattr(house.mailbox, "close", lambda: None)

    def come():
        time.sleep(0.3)
        late = house.front_end()
        send(late, Ping())
        return late.poll(int(DEADLINE_S * 1e3)) and late.recv()

    with ThreadPoolExecutor(1) as elsewhere:
        coming = elsewhere.submit(come)
        worker._announce_fatal(house.mailbox, ModelError("no such model"))
        assert house.mailbox.has_company
        told = coming.result()
    assert msgspec.msgpack.decode(told, type=EngineMessage) == EngineFatal("no such model")


def test_an_engine_that_nobody_asks_why_it_failed_ends_all_the_same(house, monkeypatch):
    monkeypatch.setattr(worker, "_IDLE_POLL_MS", 20)
    monkeypatch.setattr(worker, "_HEARING_S", 0.1)
    monkeypatch.setattr(house.mailbox, "close", lambda: None)
    worker._announce_fatal(house.mailbox, ModelError("no such model"))
    assert not house.mailbox.has_company


def test_a_request_beyond_the_places_is_refused_and_gives_its_early_work_back(house):
    first, second = house.front_end(b"frontend-0-1.1"), house.front_end(b"frontend-1-1.1")
    send(first, request("r-0", [1], 3), request("r-1", [2], 3))
    house.hear(2)
    send(second, GrowPrompt("r-2", 0, [1] * 20, 30.0), request("r-2", [1] * 21, 3))
    house.hear(2)
    house.mailbox.flush(house.engine)
    (refused,) = outputs_of(second)
    assert (refused.request_id, refused.finish_reason) == ("r-2", "refused")
    assert "2 of 2 sequences" in refused.error
    house.step()
    assert house.blocks.held_units == house.blocks.reserved_units == 0
    send(second, request("r-3", [1], 1))  # there is room again
    house.hear(1)
    house.step()
    assert [o.finish_reason for o in outputs_of(second)] == ["length"]


def test_what_a_dead_front_end_asked_for_ends_though_its_last_words_come_late(house):
    dying, other = house.front_end(b"frontend-0-1.1"), house.front_end(b"frontend-1-1.1")
    watcher = house.front_end()
    send(other, request("r-9", [5], 40))
    send(dying, request("r-0", [1] * 10, 40), ReserveKv("r-1", 20, 30.0))
    house.hear(3)
    house.mailbox.post(house.engine.step())
    send(dying, GrowPrompt("r-2", 0, [1] * 30, 30.0))
    send(watcher, ForgetFrontend("frontend-0-1"))
    house.hear(2)
    send(dying, request("r-4", [1] * 10, 40))  # read after the news
    send(other, Ping())
    house.hear(1)
    assert house.mailbox.receive() == []
    assert house.engine.requests == 1
    assert house.blocks.reserved_units == 0
    assert house.engine.scheduler.early.units == 0
    stats = house.mailbox._with_frontends(house.engine.stats())
    assert stats.frontends == {"frontend-1-1": 1}
    house.step()
    assert len(outputs_of(other)) == 40
    assert house.blocks.held_units == 0


def test_nobody_ends_or_replaces_what_another_front_end_asked_for(house):
    first, second = house.front_end(b"frontend-0-1.1"), house.front_end(b"frontend-1-1.1")
    send(first, ReserveKv("r-1", 20, 30.0), request("r-0", [1, 2], 3))
    house.hear(2)
    leased = house.blocks.reserved_units
    assert leased > 0
    send(second, request("r-0", [7], 1), GrowPrompt("r-1", 0, [9] * 20, 30.0))
    send(second, AbortRequests(["r-0", "r-1"]))
    house.hear(1)  # the abort, of nothing: what came before it is the mailbox's to answer
    house.step()
    (told,) = outputs_of(second)
    assert (told.request_id, told.finish_reason) == ("r-0", "error")
    assert "another front end" in told.error
    heard = outputs_of(first)
    assert [o.request_id for o in heard] == ["r-0"] * 3
    assert heard[-1].finish_reason == "length"
    assert house.blocks.reserved_units == leased
    assert house.engine.scheduler.early.units == 0
    send(first, AbortRequests(["r-1"]))
    house.hear(1)
    assert house.blocks.reserved_units == 0
    assert house.mailbox._owners == {}


def test_who_chose_no_name_is_not_forgotten_by_any(house):
    nameless = house.front_end()
    send(nameless, request("r-0", [1], 3), ForgetFrontend(""))
    house.hear(2)
    house.step()
    assert len(outputs_of(nameless)) == 3
