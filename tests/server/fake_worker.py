"""An engine process without an engine: speaks the protocol, then misbehaves as told.

    python fake_worker.py BEHAVIOUR ...      one for each incarnation; the last one stays

The incarnation's number is read from the socket's name, "engine-N.sock".
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import msgspec
import zmq

from tailrace.types import (
    STEP_HUNG_STATUS,
    AbortRequests,
    EngineFatal,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    EngineStats,
    FrontendMessage,
    InspectKv,
    KvReport,
    ModelResolved,
    Ping,
    ReserveKv,
    Shutdown,
    TokenOutput,
)

READY = EngineReady(
    context_length=512,
    vocab_size=259,
    eos_token_ids=[258],
    total_blocks=64,
    block_size=16,
    device="fake",
    load_s=0.0,
    warmup_s=0.0,
)
GARBAGE = (b"", b"\xc1", b"not msgpack", b"\x91" * 100_000, b"\x83\xa4type", b"\x92\x01\x02")


class FakeWorker:
    """Serves one front end.

    Behaviours: normal, holds (takes requests, says nothing of them), dies (at a request, after
    one token), hung (the same, as over a step that hung), silent (once ready), stubborn (ends only
    by SIGKILL), garbage (before each answer), fatal, late_fatal (at a request), early (ends before
    ready), loads (for ever).
    """

    def __init__(self, socket_path: str, behaviour: str) -> None:
        self.behaviour = behaviour
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{socket_path}")
        self.identity = b""
        self.decoder = msgspec.msgpack.Decoder(FrontendMessage)
        self.aborted: list[str] = []
        self.reserved: set[str] = set()

    def run(self) -> int:
        if self.behaviour == "early":
            return 3
        self.receive()
        if self.behaviour == "fatal":
            self.send(EngineFatal("the fake engine lacks a fake model"))
            return 1
        self.send(ModelResolved("/model/folder"))
        if self.behaviour == "loads":
            signal.pause()
        self.send(READY)
        if self.behaviour == "silent":
            signal.pause()
        if self.behaviour == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            message = self.receive()
            if isinstance(message, Shutdown) and self.behaviour != "stubborn":
                return 0
            self.handle(message)

    def handle(self, message: FrontendMessage) -> None:
        match message:
            case Ping():
                self.send(EngineOutputs([], self.stats()))
            case InspectKv():
                if self.behaviour == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                self.send(KvReport("", 16, 64, 64, len(self.reserved), []))
            case ReserveKv(request_id):
                self.reserved.add(request_id)
            case AbortRequests(request_ids):
                self.aborted += request_ids
                self.reserved -= set(request_ids)
                if self.behaviour == "holds":
                    last = [TokenOutput(i, [], finish_reason="abort") for i in request_ids]
                    self.send(EngineOutputs(last, self.stats()))
            case EngineRequest():
                self.reserved.discard(message.request_id)
                self.answer(message.request_id)

    def answer(self, request_id: str) -> None:
        if self.behaviour in ("holds", "stubborn"):
            return
        if self.behaviour == "garbage":
            for frame in GARBAGE:
                self.socket.send_multipart([self.identity, frame])
        self.send(EngineOutputs([TokenOutput(request_id, [1])], self.stats()))
        if self.behaviour == "late_fatal":
            self.send(EngineFatal("the fake device fell off"))
            self.socket.close()
            zmq.Context.instance().term()
            sys.exit(1)
        if self.behaviour == "hung":
            os._exit(STEP_HUNG_STATUS)
        if self.behaviour == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        last = TokenOutput(request_id, [2], finish_reason="length")
        # A request that nobody knows (an aborted one, say) must do no harm.
        self.send(EngineOutputs([TokenOutput("unknown", [9]), last], self.stats()))

    def stats(self) -> EngineStats:
        return EngineStats(
            time_s=time.monotonic(),
            running_requests=0,
            waiting_requests=0,
            total_blocks=64,
            free_blocks=64,
            block_size=16,
            live_tokens=0,
            held_blocks=0,
            preemptions_total=len(self.aborted),  # for the test to read
        )

    def receive(self) -> FrontendMessage:
        self.identity, frame = self.socket.recv_multipart()
        return self.decoder.decode(frame)

    def send(self, message: object) -> None:
        self.socket.send_multipart([self.identity, msgspec.msgpack.encode(message)])


def main() -> int:
    order = json.loads(sys.stdin.buffer.readline())
    behaviours = sys.argv[1:]
    number = int(re.search(r"engine-(\d+)\.sock", order["socket"])[1])
    return FakeWorker(order["socket"], behaviours[min(number, len(behaviours)) - 1]).run()


if __name__ == "__main__":
    sys.exit(main())
