"""What anybody can see of a running server: its routes, and its processes under /proc."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tailrace.bench.launch import LocalServer

DEADLINE_S = 120.0
POLL_S = 0.02


def wait_until(holds: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Ask again and again; fail when it still does not hold at the deadline."""
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, f"after {deadline_s:g} s still not: {what}"
        time.sleep(POLL_S)


def health(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/health", timeout=120).json()


def load(url: str) -> tuple[int, int]:
    """Requests that the engine holds, and tokens of KV that they hold."""
    seen = health(url)
    requests = seen["running_requests"] + seen["pending_requests"]
    # A moment after the start the engine has not yet reported: not idle, as far as one can see.
    kv_cache = seen.get("kv_cache", {"used_tokens": -1})
    return requests, kv_cache["used_tokens"]


def wait_idle(url: str) -> None:
    wait_until(lambda: load(url) == (0, 0), "no request and no KV is held")


def assert_baseline(server: LocalServer) -> None:
    """Wait until the KV pool, of a server with --debug-kv, is whole and nobody's."""
    wait_idle(server.url)

    def is_clean() -> bool:
        report = httpx.get(f"{server.url}/debug/kv", timeout=120).json()
        assert report["fault"] == ""
        is_free = report["free_blocks"] == report["total_blocks"]
        return is_free and not report["tables"] and report["reserved_blocks"] == 0

    wait_until(is_clean, "all KV is back")


def metric(url: str, name: str) -> float:
    """The sum of a family's samples in /metrics; the family must be there."""
    lines = httpx.get(f"{url}/metrics", timeout=120).text.splitlines()
    samples = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    values = [sample.rsplit(" ", 1)[1] for sample in samples]
    assert values, f"/metrics has no {name}"
    return sum(map(float, values))


def ready_status(url: str) -> int:
    return httpx.get(f"{url}/ready", timeout=120).status_code


def events(lines: Iterable[str]) -> Iterator[Any]:
    """The `data:` values of a stream of server-sent events; "[DONE]" stays text."""
    for line in lines:
        if line.startswith("data: "):
            value = line.removeprefix("data: ")
            yield value if value == "[DONE]" else json.loads(value)
        else:
            assert line == "", f"a line that no event has: {line!r}"


def child_pids(server: LocalServer) -> list[int]:
    pid = server._process.pid
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_pid(server: LocalServer) -> int:
    """The one child of the front end."""
    (pid,) = child_pids(server)
    return pid


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
