"""A front end without HTTP: starts an engine process and talks to it over its socket."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import zmq

from tailrace.server.supervisor import WORKER
from tailrace.types import (
    EngineMessage,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    Ping,
    SamplingParams,
    Shutdown,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.config import EngineConfig


class WorkerClient:
    def __init__(
        self, config: EngineConfig, deadline_s: float = 120.0, command: Sequence[str] = WORKER
    ) -> None:
        folder = Path(tempfile.mkdtemp())
        self.deadline_s = time.monotonic() + deadline_s
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        order = msgspec.json.encode({"socket": str(folder / "engine.sock"), "config": config})
        self.process.stdin.write(order + b"\n")
        self.process.stdin.flush()
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"ipc://{folder / 'engine.sock'}")
        self.decoder = msgspec.msgpack.Decoder(EngineMessage)
        self.send(Ping())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()

    def send(self, message: object) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self) -> EngineMessage:
        left_ms = max(0, int((self.deadline_s - time.monotonic()) * 1000))
        assert self.socket.poll(left_ms), "the engine said nothing before the deadline"
        return self.decoder.decode(self.socket.recv())

    def wait_for(self, kind: type) -> EngineMessage:
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message

    def wait_ready(self) -> EngineReady:
        return self.wait_for(EngineReady)

    def add(self, request_id: str, prompt: list[int], **sampling: object) -> None:
        self.send(
            EngineRequest(
                request_id=request_id,
                token_ids=prompt,
                sampling=SamplingParams(**sampling),
                arrival_s=time.monotonic(),
            )
        )

    def collect(self, *request_ids: str) -> dict[str, list]:
        """Outputs of the named requests, until each has ended."""
        found: dict[str, list] = {i: [] for i in request_ids}
        open_ids = set(request_ids)
        while open_ids:
            message = self.receive()
            if isinstance(message, EngineOutputs):
                for output in message.outputs:
                    found.setdefault(output.request_id, []).append(output)
                    if output.finish_reason is not None:
                        open_ids.discard(output.request_id)
        return found

    def tokens(self, request_id: str) -> list[int]:
        outputs = self.collect(request_id)[request_id]
        return [token for output in outputs for token in output.token_ids]

    def shut_down(self) -> int:
        self.send(Shutdown())
        return self.process.wait(60)
