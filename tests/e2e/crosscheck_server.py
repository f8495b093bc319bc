"""A scripted queue that also counts what came: prompts in real tokens, arrivals, latencies.

    python tests/e2e/crosscheck_server.py --tokenizer DIR --slots 6 --prefill 0.05 --token 0.01

Latencies are the scripted queue's. `/log` holds, for each completion, when it came, the ids of its
prompt by the given tokenizer, how many tokens it asked for, and when each token was written: what
two clients that replay one trace must agree on, seen from the other end of the wire.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tokenizers import Tokenizer

from tests.bench.mock_server import _chunk, _event
from tests.bench.scripted_queue import Script, ScriptedQueue

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class CountingQueue(ScriptedQueue):
    """Serves on a loopback port inside `async with`."""

    tokenizer: Tokenizer | None = None
    _counter: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    async def _complete(self, writer, reader, body: dict) -> None:
        # On another thread (it lets go of the GIL), so that no stream waits for a long prompt.
        body["ids"] = self._counter.submit(self._ids, body["prompt"])
        request_id = self.request_ids[-1]
        # Other tools send no seed; the queue only writes it down.
        body.setdefault("seed", -1)
        await super()._complete(writer, reader, body)
        # Nothing was awaited since the queue added this request's entry.
        self.log[-1] |= {
            "request_id": request_id,
            "ids": body["ids"].result(),
            "max_tokens": body["max_tokens"],
        }

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def _finish(self, writer, body: dict) -> None:
        ids: Future[list[int]] = body["ids"]
        _event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(ids.result()), "completion_tokens": body["max_tokens"]}
        _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


@contextmanager
def counting(script: Script, tokenizer: Path) -> Iterator[str]:
    """Run a queue in a process of its own; yield its URL."""
    command = [sys.executable, __file__, f"--slots={script.slots}", f"--token={script.token_s}"]
    command += [f"--prefill={script.prefill_s}", f"--tokenizer={tokenizer}"]
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
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    async with CountingQueue(queue=script, port=options.port, tokenizer=tokenizer) as server:
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
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder: tokenizer.json")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
