"""`tailrace` with an engine whose device never ends a step of a certain prompt.

python -m tests.support.hanging_engine serve ...     the server
python -m tests.support.hanging_engine               its engine's process
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tailrace import cli
from tailrace.engine import setup, worker
from tailrace.server import entrance
from tailrace.server.supervisor import Launcher

if TYPE_CHECKING:
    from tailrace.engine.setup import Loaded

PROMPT = "hang"
"""A step of a prompt with this in it is queued, and never done."""
FULL_QUEUE_PROMPT = "full"
"""One with this is never even queued: the runner's thread waits for the device."""
LOST_PROMPT = "lost"
"""A step of one with this loses the device: it fails, and whatever comes next waits for ever."""
COMMAND = (sys.executable, "-m", "tests.support.hanging_engine")


class NeverDone:
    """A step on a device that does not end it; who waits for it waits as in C."""

    is_done = False

    def wait(self) -> Any:
        threading.Event().wait()


def hanging(loaded: Loaded) -> Loaded:
    runner, execute = loaded.runner, loaded.runner.execute

    is_lost = threading.Event()

    def check_device() -> None:
        if is_lost.is_set():
            raise RuntimeError("the device is lost")

    def execute_or_hang(prepared: Any) -> Any:
        if is_lost.is_set():
            threading.Event().wait()
        for chunk in prepared.step.chunks:
            # The tiny tokenizer's tokens are bytes.
            prompt = bytes(token for token in chunk.sequence.token_ids if token < 256)
            if PROMPT.encode() in prompt:
                return NeverDone()
            if FULL_QUEUE_PROMPT.encode() in prompt:
                threading.Event().wait()
            if LOST_PROMPT.encode() in prompt:
                is_lost.set()
                raise RuntimeError("this step lost the device")
        return execute(prepared)

    runner.execute, runner.check_device = execute_or_hang, check_device
    return replace(loaded, runner=runner)


def main() -> int:
    if sys.argv[1:]:
        entrance.Launcher = partial(Launcher, command=COMMAND)
        cli.main()
        return 0
    load = setup.load
    setup.load = lambda *args, **options: hanging(load(*args, **options))
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
