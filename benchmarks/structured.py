"""What constrained streams cost their neighbours, and themselves, on a server that runs.

    python benchmarks/structured.py --url http://127.0.0.1:8001 [--streams 64] [--tokens 128]

Four rounds, each of `--streams` streams of `--tokens` tokens that start together: all of them free;
half of them held to a regular expression; half of them held to a schema; all of them held to it.
Gaps between a stream's events are those that the client saw, without its first one; a stream that
ends before its tokens are out counts with the gaps that it has. The first round is repeated at the
end: where the two differ, the machine was not quiet.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

PERSONS = {
    "type": "array",
    "minItems": 50,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
KINDS = {
    "free": {"ignore_eos": True},
    "regex": {"structured_outputs": {"regex": "([a-z]{1,9} ){500}"}},
    "schema": {"structured_outputs": {"json": PERSONS}},
}
ROUNDS = {
    "all free": ("free",),
    "half regex": ("free", "regex"),
    "half schema": ("free", "schema"),
    "all schema": ("schema",),
    "all free again": ("free",),
}


def stream(url: str, body: dict, start: threading.Barrier, gaps_s: list[float]) -> None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
    start.wait()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:300]!r}")
    last_s = None
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        now_s = time.perf_counter()
        if last_s is not None:
            gaps_s.append(now_s - last_s)
        last_s = now_s


def run(args: argparse.Namespace, kinds: tuple[str, ...]) -> dict[str, list[float]]:
    gaps: dict[str, list[float]] = {kind: [] for kind in kinds}
    start = threading.Barrier(args.streams)
    with ThreadPoolExecutor(args.streams) as pool:
        running = []
        for number in range(args.streams):
            kind = kinds[number % len(kinds)]
            body = {
                "prompt": f"{number}. Persons, as JSON: ",
                "max_tokens": args.tokens,
                "temperature": 1.0,
                "seed": number,
                "stream": True,
                **KINDS[kind],
            }
            running.append(pool.submit(stream, args.url, body, start, gaps[kind]))
        for one in running:
            one.result()
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8001")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    print(f"{args.streams} streams of {args.tokens} tokens; gaps in ms")
    print(f"{'round':16} {'streams':8} {'gaps':>7} {'median':>8} {'P95':>8} {'P99':>8}")
    for name, kinds in ROUNDS.items():
        for kind, gaps_s in run(args, kinds).items():
            cuts = statistics.quantiles(gaps_s, n=100)
            row = " ".join(f"{1e3 * cuts[place]:8.2f}" for place in (49, 94, 98))
            print(f"{name:16} {kind:8} {len(gaps_s):7} {row}", flush=True)


if __name__ == "__main__":
    main()
