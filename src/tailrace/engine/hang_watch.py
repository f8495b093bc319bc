"""A step that the device never ends: seen from outside, told, and the process ended.

    main thread      wait for N ................................   in C, for ever
    runner thread    queue N+1 .................................   the same, where the queue is full
    watch              look      look      look      look: N is not done -> log, core dump, _exit

1. A wait in CUDA cannot be interrupted, and it may be anybody's: whoever commits a step, whoever
   wants its ids for a grammar's mask, reads scores, or queues behind it. So nobody's wait has a
   limit; steps have one, and a thread that waits for nothing looks after them.
2. A step's time begins when the one before is done. Queueing is part of it, and compiling what it
   launches for the first time.
3. Time is added up from look to look: a process that was stopped, as by a debugger, has not hung.
4. The process ends without a farewell: an orderly end would wait for the device. Whoever started it
   answers its requests and starts another (server/bridge.py).

Looking asks for a step's event, which would spoil a capture: graphs are captured before any step.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from tailrace.clock import monotonic
from tailrace.engine.core_dump import ask_for_core_dump
from tailrace.engine.exit import end_now
from tailrace.engine.step_runner import is_done
from tailrace.types import STEP_HUNG_STATUS

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from tailrace.clock import Clock

log = structlog.get_logger("tailrace.engine")

_MOST_PERIOD_S = 1.0
_LOOKS = 8
"""Within the limit, where that is short."""
_PACKAGE = str(Path(__file__).parents[1])


class WatchedRunner(Protocol):
    """What the watch needs of a runner."""

    def execute(self, prepared: Any) -> Any:
        """Run a step, or queue it: what is watched."""
        ...

    def describe(self, prepared: Any) -> dict[str, object]:
        """Say what a step is, without waiting for anything."""
        ...


class HangWatch:
    """Ends the process where a step takes longer than any step should.

    Args:
        submit: Starts a function on the runner's thread.
        runner: Whose steps are watched.
        limit_s: Most seconds from when the device can come to a step until it is done.
        clock: Monotonic seconds.
        dump: Has the driver write what the device is at, where it was told to; takes bounded time.
        end: Ends the process with a status, at once.
    """

    def __init__(
        self,
        submit: Callable[..., Future[Any]],
        runner: WatchedRunner,
        limit_s: float,
        *,
        clock: Clock = monotonic,
        dump: Callable[[], None] = ask_for_core_dump,
        end: Callable[[int], object] = end_now,
    ) -> None:
        self._submit = submit
        self._runner = runner
        self._limit_s = limit_s
        self._period_s = min(_MOST_PERIOD_S, limit_s / _LOOKS)
        self._clock = clock
        self._dump = dump
        self._end = end
        self._lock = threading.Lock()
        self._steps: deque[tuple[Future[Any], Any]] = deque()
        """That were submitted, and were not done when somebody last looked: result and input."""
        self._oldest: Future[Any] | None = None
        """At the last look."""
        self._is_stopped = threading.Event()
        self._looked_s = clock()
        self._waited_s = 0.0

    def submit(self, function: Callable[..., Future[Any]], *args: Any) -> Future[Any]:
        """Start a function on the runner's thread; if that is a step, keep an eye on it."""
        result = self._submit(function, *args)
        if function == self._runner.execute:
            with self._lock:
                self._forget_done()
                self._steps.append((result, args[0]))
        return result

    def start(self) -> None:
        """Look from now on, on a thread of its own."""
        threading.Thread(target=self._keep_looking, name="hang-watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._is_stopped.set()

    def look(self) -> None:
        """Look once; end the process where the oldest step has had its time."""
        now_s = self._clock()
        passed_s = min(now_s - self._looked_s, 2 * self._period_s)
        self._looked_s = now_s
        with self._lock:
            self._forget_done()
            oldest, prepared = self._steps[0] if self._steps else (None, None)
        if oldest is None or oldest is not self._oldest:
            self._oldest, self._waited_s = oldest, 0.0
            return
        self._waited_s += passed_s
        if self._waited_s >= self._limit_s:
            self._give_up(prepared)

    def _keep_looking(self) -> None:
        while not self._is_stopped.wait(self._period_s):
            self.look()

    def _forget_done(self) -> None:
        # In order: the device comes to a step when it is done with those before.
        while self._steps and _is_over(self._steps[0][0]):
            self._steps.popleft()

    def _give_up(self, prepared: Any) -> None:
        try:
            log.error(
                "step_hung",
                waited_s=round(self._waited_s, 1),
                **self._described(prepared),
                threads=_whereabouts(),
            )
            self._dump()
        finally:  # whatever fails here, the device is not waited for
            self._end(STEP_HUNG_STATUS)

    def _described(self, prepared: Any) -> dict[str, object]:
        try:
            return self._runner.describe(prepared)
        except Exception as error:  # noqa: BLE001 -- a line with less in it is better than none
            return {"not_described": repr(error)}


def _is_over(result: Future[Any]) -> bool:
    try:
        return is_done(result)
    except RuntimeError:  # the context is lost, as whoever waits is told
        return True


def _whereabouts() -> str:
    """Say where in our code the other threads stand: who waits for the device, and who for whom."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for number, top in sys._current_frames().items():  # noqa: SLF001 -- its documented name
        frame = None if number == threading.get_ident() else top
        while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        if frame is not None:
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            found.append(f"{names.get(number, number)} at {place} in {frame.f_code.co_name}")
    return "; ".join(sorted(found))
