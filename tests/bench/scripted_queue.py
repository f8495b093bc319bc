"""An OpenAI-style server that is a queue: every latency is known before a request is sent.

    python tests/bench/scripted_queue.py --slots 2 --prefill 0.06 --token 0.02 --port 8001

First come, first served, on `slots` servers. A request holds one for
`(prefill + token * max_tokens) / speed` seconds; its first token is due after prefill and one
token, each other one a token later. All are due at absolute times that follow from the arrivals
alone (`queue_model.latencies_s` is the same queue in virtual time), so that a late timer delays
one chunk and nothing after it.

Each model name has a queue of its own, and `@0.8` at its end is its speed: one process stands in
for many engines. `/log` tells when each request came, when its tokens were due and when they were
written, on the machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tailrace.clock import monotonic
from tests.bench.mock_server import MockServer, _answer, _chunk, _event

if TYPE_CHECKING:
    from collections.abc import Iterator

OBJECT = "text_completion"
"""Real servers say so in every chunk, and some clients read no other."""


@dataclass(frozen=True)
class Script:
    """How long a request takes, once it is its turn."""

    slots: int = 2
    prefill_s: float = 0.06
    token_s: float = 0.02

    def first_s(self, speed: float = 1.0) -> float:
        """Return the time from its turn to its first token."""
        return (self.prefill_s + self.token_s) / speed

    def service_s(self, tokens: int, speed: float = 1.0) -> float:
        """Return how long it holds its slot."""
        return (self.prefill_s + self.token_s * tokens) / speed


def speed_of(model: str) -> float:
    """Return the speed that a model's name carries, as in "mock@0.8"."""
    _, _, speed = model.partition("@")
    return float(speed) if speed else 1.0


@dataclass
class ScriptedQueue(MockServer):
    """Serves on a loopback port inside `async with`."""

    queue: Script = field(default_factory=Script)
    log: list[dict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free_s: dict[str, list[float]] = defaultdict(lambda: [0.0] * self.queue.slots)

    def _plain(self, writer, path: str, body: dict) -> None:
        if path == "/log":
            _answer(writer, 200, self.log)
        elif path == "/health":
            _answer(writer, 200, {})
        else:
            super()._plain(writer, path, body)

    async def _complete(self, writer, reader, body: dict) -> None:
        arrived_s = monotonic()
        model, tokens = body["model"], body["max_tokens"]
        speed, free_s = speed_of(model), self._free_s[model]
        turn_s = max(heapq.heappop(free_s), arrived_s)
        heapq.heappush(free_s, turn_s + self.queue.service_s(tokens, speed))
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        due_s = [
            turn_s + self.queue.first_s(speed) + self.queue.token_s / speed * number
            for number in range(tokens)
        ]
        written_s = []
        for moment_s in due_s:
            await asyncio.sleep(moment_s - monotonic())
            written_s.append(monotonic())
            _event(writer, {"object": OBJECT, "choices": [{"index": 0, "text": " w"}]})
        self._finish(writer, body)
        self.log.append(
            {
                "model": model,
                "seed": body["seed"],
                "arrived_s": arrived_s,
                "due_s": due_s,
                "written_s": written_s,
            }
        )

    def _finish(self, writer, body: dict) -> None:
        _event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        usage = {
            "prompt_tokens": len(self.codec.encode_now(body["prompt"])),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """Run a queue in a process of its own, where no busy client can delay it; yield its URL."""
    command = [sys.executable, __file__]
    command += [f"--slots={script.slots}", f"--prefill={script.prefill_s}"]
    command += [f"--token={script.token_s}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            process.wait(120)


async def _serve(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    script = Script(options.slots, options.prefill, options.token)
    async with ScriptedQueue(queue=script, port=options.port) as server:
        sys.stdout.write(f"serving at {server.url}\n")
        sys.stdout.flush()
        await stop.wait()


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--prefill", type=float, default=0.06, help="seconds before token 1")
    parser.add_argument("--token", type=float, default=0.02, help="seconds a token")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
