"""From process start to the first token, with a cold and a warm cache.

    python benchmarks/start_time.py --rounds 3

Cold: an empty TAILRACE_CACHE_DIR, so the GGUF is converted and the native kernels are compiled.
Warm: the same folder again. Each start is a new `tailrace serve`; the clock runs from before the
process is created to the first event of a streamed /generate that is retried until it is answered.
(The operating system's page cache is warm in both; packages are compiled to .pyc.)
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from tailrace.bench.launch import free_port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    times: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for name, measured in times.items():
                measured.append(start(cache))
                print(name, *(f"{seconds:.2f} s" for seconds in measured[-1]), flush=True)
    print(f"\n{'cache':<8}{'/live':>10}{'first token':>14}   (medians of {rounds})")
    for name, measured in times.items():
        live, token = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"{name:<8}{live:>8.2f} s{token:>12.2f} s")


def start(cache: str) -> tuple[float, float]:
    """Seconds to the first answer of /live, and to the first token."""
    port = free_port()
    began = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, "-m", "tailrace", "serve", "--port", str(port)],
        env=os.environ | {"TAILRACE_CACHE_DIR": cache},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(port, lambda connection: ask(connection, "GET", "/live"))
        live = time.monotonic() - began
        body = json.dumps({"prompt": "Hello", "max_tokens": 1, "stream": True})
        wait_for(port, lambda connection: ask(connection, "POST", "/generate", body))
        return live, time.monotonic() - began
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: str = "") -> bool:
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status == 200 and bool(answer.readline())


def wait_for(port: int, question) -> None:  # noqa: ANN001 -- one of the lambdas above
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            if question(connection):
                return
        time.sleep(0.02)
    raise SystemExit("the server gave no answer within 120 s")


if __name__ == "__main__":
    main()
