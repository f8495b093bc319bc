"""How a step's tokens reach their clients: when the last does, and how steady places are.

    python benchmarks/bursts.py --streams 128 --step-ms 25 --rounds 4
    python benchmarks/bursts.py --against /tmp/before      two checkouts of the repository, in turns

The front end and the engine process of front_end.py: all that serves but the device. The engine
stamps each step's message when it is sent, this process each chunk when it is read, in a loop that
does nothing else; a stream that ends begins anew. Chunks belong to the latest message before them,
so steps must be longer than a burst. Printed for each run, P50 / P99:

    steps   between two messages of the engine, ms
    gaps    between two chunks of one stream, ms: what they have beyond the steps' is ours
    last    from a message to the last chunk of it, ms
    shift   between a chunk's delay and that of the same stream's next one, ms
    us      of the front end for a chunk: user / system; requests' beginnings and ends are in it
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from emitter import percentile

HERE = Path(__file__).resolve().parents[1]
WARM_S = 2.0


@dataclass
class Run:
    """What one run showed; all in seconds."""

    steps: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    shifts: list[float] = field(default_factory=list)
    user_s: float = 0.0
    system_s: float = 0.0
    """A chunk."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument(
        "--tokens", type=int, nargs=2, default=[64, 256], help="of a request, from and to"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--route", choices=["completions", "chat"], default="completions")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    options = parser.parse_args()
    trees = [HERE, *([options.against.resolve()] if options.against else [])]
    print(f"{'tree':<28}{'steps':>14}{'gaps':>14}{'last':>14}{'shift':>14}{'us':>10}")
    for round_ in range(options.rounds):
        for tree in trees if round_ % 2 == 0 else reversed(trees):
            with serving(tree, options.step_ms) as (process, port, stamps):
                show(str(tree)[-27:], measure(options, process, port, stamps))


def show(name: str, run: Run) -> None:
    columns = "".join(
        f"{percentile(found, 50):>7.1f} /{percentile(found, 99):>5.1f}"
        for found in (run.steps, run.gaps, run.last, run.shifts)
    )
    print(f"{name:<28}{columns}{1e6 * run.user_s:>5.0f} /{1e6 * run.system_s:>3.0f}", flush=True)


@contextlib.contextmanager
def serving(tree: Path, step_ms: float):  # noqa: ANN201
    """Run a checkout's front end and engine; yield the process, its port and the file of stamps."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        stamps = Path(folder) / "stamps"
        process = subprocess.Popen(
            [sys.executable, "benchmarks/front_end.py", "--serve", "--step-ms", str(step_ms)],
            cwd=tree,
            env=os.environ
            | {
                "PYTHONPATH": str(tree / "src"),
                "FRONT_END_PORT": str(port),
                "FRONT_END_STAMPS": str(stamps),
            },
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_ready(port)
            yield process, port, stamps
        finally:
            process.terminate()
            process.wait()


def wait_ready(port: int) -> None:
    for _ in range(300):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port)) as probe,
        ):
            probe.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            if probe.recv(64).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.2)
    raise SystemExit("the server did not become ready")


def measure(options: argparse.Namespace, process: subprocess.Popen, port: int, stamps: Path) -> Run:
    """Drive the streams, and read what came."""
    clients = Clients(port, options)
    clients.read_until(time.monotonic() + WARM_S)
    began_s, before = time.monotonic(), times_of(process.pid)
    clients.chunks.clear()
    clients.read_until(began_s + options.seconds)
    after, chunks = times_of(process.pid), clients.chunks
    clients.close()
    sent = [float(line) for line in stamps.read_text().split()]
    run = evaluate([s for s in sent if s >= began_s - 1.0], chunks, began_s)
    run.user_s, run.system_s = ((b - a) / len(chunks) for a, b in zip(before, after, strict=True))
    return run


def evaluate(sent: list[float], chunks: list[tuple[float, int, int]], began_s: float) -> Run:
    """Return a run's figures.

    Args:
        sent: When each message of the engine was sent.
        chunks: When a chunk was read, of which stream and request.
        began_s: Messages before are not looked at.
    """
    run = Run()
    run.steps = [b - a for a, b in itertools.pairwise(sent) if a >= began_s]
    previous: dict[tuple[int, int], tuple[float, float]] = {}
    last: dict[int, float] = {}
    for read_s, stream, number in chunks:
        step = bisect_right(sent, read_s) - 1
        if step < 0:
            continue
        delay_s = last[step] = read_s - sent[step]
        if (stream, number) in previous:
            was_s, was_delay_s = previous[stream, number]
            run.gaps.append(read_s - was_s)
            run.shifts.append(abs(delay_s - was_delay_s))
        previous[stream, number] = read_s, delay_s
    run.last = list(last.values())
    return run


class Clients:
    """All streams' ends: epoll, read, stamp."""

    def __init__(self, port: int, options: argparse.Namespace) -> None:
        self.chunks: list[tuple[float, int, int]] = []
        self._draw = random.Random(1)
        self._route = options.route
        self._tokens = options.tokens
        self._selector = selectors.EpollSelector()
        self._numbers = [0] * options.streams
        for stream in range(options.streams):
            connection = socket.create_connection(("127.0.0.1", port))
            self._selector.register(connection, selectors.EVENT_READ, stream)
            self._send(connection)
            time.sleep(0.002)  # or their first tokens would all be of one step

    def read_until(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            for key, _ in self._selector.select(0.1):
                data = key.fileobj.recv(1 << 16)
                now_s = time.monotonic()
                self.chunks.append((now_s, key.data, self._numbers[key.data]))
                if data.endswith(b"0\r\n\r\n"):
                    self._numbers[key.data] += 1
                    self._send(key.fileobj)
                elif not data:
                    raise SystemExit("the server closed a stream")

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _send(self, connection: socket.socket) -> None:
        text = "Tell me of the sea, and of ships upon it. " * 4
        asked = (
            {"prompt": text}
            if self._route == "completions"
            else {"messages": [{"role": "user", "content": text}]}
        )
        asked |= {"max_tokens": self._draw.randint(*self._tokens), "stream": True, "temperature": 0}
        body = json.dumps(asked).encode()
        path = "/v1/completions" if self._route == "completions" else "/v1/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)


def times_of(pid: int) -> tuple[float, float]:
    """Return the user and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    return int(fields[11]) * tick_s, int(fields[12]) * tick_s


if __name__ == "__main__":
    main()
