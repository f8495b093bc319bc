"""Kernels that are about to be launched, compiled by several processes before they are.

    collected    the work is done once with nothing launched: every kernel it wants is noted
    looked up    those that Triton's cache on disk has are left to it
    compiled     the others, by a process for each few of them (compile_worker.py)
    done         the work is done in earnest, and loads what it wants from disk

Whatever goes wrong costs time and nothing else: the kernel is compiled where it is launched, as
without all this, and the log says why.

In the collecting pass operations of torch's do run, on memory that no kernel has written. So the
work may not index by what a kernel writes, and must put back what it writes of lasting places.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Thread, get_ident
from typing import TYPE_CHECKING, Any, Self

import msgspec
import structlog
from triton import knobs
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from tailrace.kernels import compile_process
from tailrace.kernels.compile_order import CompileOrder, Launch, is_on_disk, order_of, settle_hashes
from tailrace.kernels.compile_worker import MOST_ORDERS, Batch, Compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import IO

log = structlog.get_logger("tailrace.kernels")

LEAST_KERNELS = 4
"""Fewer are compiled sooner than a worker is ready."""
PHASE = "kernels"
"""Of a start: what is compiled ahead."""
TIMEOUT_S = 120.0
"""Of a batch."""
_SENDING_S = 0.2


@dataclass
class Collected:
    """What a piece of work wants compiled."""

    orders: dict[str, CompileOrder] = field(default_factory=dict)
    """By their keys in the cache on disk."""
    left: dict[str, str] = field(default_factory=dict)
    """Kernels that no order can be given for, and why."""


@contextmanager
def collecting() -> Iterator[Collected]:
    """Have this thread's launches noted instead, of kernels that this process has not compiled.

    Those it has are not launched either. Other threads launch as ever.
    """
    found, owner = Collected(), get_ident()
    seen: set[tuple[int, int, str]] = set()  # every layer and every frame wants the same
    run, compile_ = JITFunction.run, JITFunction._do_compile  # noqa: SLF001 - no hook has it all

    def note(  # noqa: PLR0917 - as Triton calls it
        self: JITFunction,
        key: str,
        signature: dict[str, Any],
        device: int,
        constants: dict[tuple[int, ...], Any],
        options: Any,
        attributes: dict[tuple[int, ...], Any],
        warmup: bool,
    ) -> Any:
        if get_ident() != owner:
            return compile_(self, key, signature, device, constants, options, attributes, warmup)
        if (launched := (id(self), device, key)) in seen:
            return None
        seen.add(launched)
        launch = Launch(device, signature, constants, attributes, options.__dict__)
        try:
            order = order_of(self, launch)
        except TypeError as error:
            found.left[self.fn.__qualname__] = str(error)
        else:
            found.orders[order.key] = order
        return None  # neither compiled nor launched

    def skip(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        is_warmup = warmup or get_ident() == owner  # which launches nothing
        return run(self, *args, grid=grid, warmup=is_warmup, **kwargs)

    JITFunction.run, JITFunction._do_compile = skip, note  # noqa: SLF001
    try:
        yield found
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_  # noqa: SLF001


class EarlyCompile:
    """Compiles what work wants before it is done; one thread's. What it starts ends with it.

    Args:
        command: Of a worker.
        begun: A worker that has been begun already, which is this object's from now on.
        cores: To compile on; None: the process's.
        timeout_s: After which a batch is given up.
        mark: Is told what the time since the last mark was spent on (engine/start_times.py).
        meanwhile: Called whenever this process waits for others.
    """

    def __init__(
        self,
        command: Sequence[str] = compile_process.COMMAND,
        *,
        begun: subprocess.Popen[bytes] | None = None,
        cores: Sequence[int] | None = None,
        timeout_s: float = TIMEOUT_S,
        mark: Callable[[str], None] = lambda _: None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        self._cores = compile_process.own_cores() if cores is None else [*cores]
        self._command = [*command]
        self._timeout_s = timeout_s
        self._mark = mark
        self._meanwhile = meanwhile
        self._waiting = begun
        self._hashing: Thread | None = None
        self._listener: Any = None
        """Triton's, before this object's."""
        self._compiled_here: list[tuple[str, float]] = []
        """By this process: the kernel, and its seconds."""

    def __enter__(self) -> Self:
        """Begin to note what this process compiles after all."""
        self._listener = knobs.compilation.listener
        knobs.compilation.listener = self._hear
        return self

    def __exit__(self, *_: object) -> None:
        knobs.compilation.listener = self._listener
        self.close()
        if self._compiled_here:
            log.info(
                "kernels_compiled_here",
                count=len(self._compiled_here),
                seconds=round(sum(seconds for _, seconds in self._compiled_here), 2),
                names=sorted({name for name, _ in self._compiled_here}),
            )

    def _hear(self, *, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        """Be told by Triton what it compiled or loaded."""
        if not cache_hit:
            self._compiled_here.append((src.name, times.total / 1e6))
        if self._listener is not None:
            self._listener(src=src, times=times, cache_hit=cache_hit, **more)

    @property
    def most_workers(self) -> int:
        """At once; one core is this process's own."""
        return compile_process.most_workers(self._cores)

    def expect(self) -> None:
        """Start a worker if there will be work for it, so that it has imported all by then.

        Called before any kernel is compiled: the keys in the cache are to be the worker's. Triton's
        own part of every key, over 400 MB of its files, is hashed on a thread meanwhile.
        """
        settle_hashes()
        self._hashing = Thread(target=triton_key, name="triton-key", daemon=True)
        self._hashing.start()
        if self._waiting is None and self.most_workers > 1 and compile_process.cache_is_cold():
            self._waiting = self._start()

    def before(self, work: Callable[[], object], *, since: str) -> None:
        """Do work without its launches, and have compiled what it wants; see above.

        Args:
            work: Will be done in earnest after this.
            since: The phase that the time before this belongs to.

        Raises:
            Exception: What the work raises.
        """
        self._mark(since)
        begun_s = time.monotonic()
        if self._hashing is not None:
            self._hashing.join()  # Triton would not wait for it, but hash all over again
        with collecting() as found:
            work()
        self._compile(found, begun_s)
        self._mark(PHASE)

    def close(self) -> None:
        """End the worker that waits, if one does."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            compile_process.end(waiting)

    def _compile(self, found: Collected, begun_s: float) -> None:
        missing = [order for order in found.orders.values() if not is_on_disk(order)]
        # Gluon's take longest: none of them should be the last to begin.
        missing.sort(key=lambda order: not order.is_gluon)
        missing = missing[:MOST_ORDERS]
        workers = min(self.most_workers, len(missing))
        reasons = [f"{name}: {why}" for name, why in found.left.items()]
        answers: list[Compiled] = []
        if len(missing) >= LEAST_KERNELS and workers > 1:
            answers, why = self._sent(missing, workers)
            reasons += [why] if why else []
            reasons += [f"{missing[a.index].name}: {a.error}" for a in answers if a.error]
        else:
            workers = 0
        compiled = [answer for answer in answers if not answer.error]
        unbuilt = [answer.launcher_error for answer in compiled if answer.launcher_error]
        reasons += [f"launchers: {unbuilt[0]}"] if unbuilt else []
        log.info(
            "kernels_compiled_ahead",
            kernels=len(found.orders) + len(found.left),
            on_disk=len(found.orders) - len(missing),
            compiled=len(compiled),
            launchers=len(compiled) - len(unbuilt),
            workers=workers,
            seconds=round(time.monotonic() - begun_s, 2),
            longest_s=round(max([answer.seconds for answer in compiled], default=0.0), 2),
        )
        if reasons:
            left = len(found.left) + (len(missing) - len(compiled) if workers else 0)
            log.warning("kernels_left_to_be_compiled_here", count=left, reasons=reasons[:5])

    def _sent(self, orders: list[CompileOrder], workers: int) -> tuple[list[Compiled], str]:
        """Have orders compiled; return the answers that came, and why not all did."""
        worker, self._waiting = self._waiting or self._start(), None
        if worker is None:
            return [], "no worker could be started"
        # Where this much is missing, so will be what is wanted next.
        self._waiting = self._start()
        lines = [msgspec.json.encode(line) for line in (Batch(workers), *orders)]
        why, output = "", b""
        try:
            output = self._answered(worker, b"\n".join(lines))
        except subprocess.TimeoutExpired as late:
            output, why = late.stdout or b"", f"no end after {self._timeout_s:g} s"
        finally:
            compile_process.end(worker)
        answers = _answers(output, len(orders))
        if not why and len(answers) < len(orders):
            why = f"a worker died (status {worker.returncode})"
        return answers, why

    def _answered(self, worker: subprocess.Popen[bytes], lines: bytes) -> bytes:
        """Send lines and return all that comes back.

        Raises:
            subprocess.TimeoutExpired: It takes too long.
        """
        # A worker that still imports reads none of them, and they are more than a pipe holds.
        sender = Thread(target=_send, args=(worker.stdin, lines), daemon=True)
        worker.stdin = None  # the thread's
        sender.start()
        if self._meanwhile is not None:
            # What begins now may hold the interpreter: as much as can be is to be on its way.
            sender.join(_SENDING_S)
            self._meanwhile()
        return worker.communicate(timeout=self._timeout_s)[0]

    def _start(self) -> subprocess.Popen[bytes] | None:
        """Start a worker; None: it cannot be."""
        return compile_process.begin(self._command, self._cores)


def _send(pipe: IO[bytes], lines: bytes) -> None:
    """Write all lines to a worker and close its pipe, unless it ends before."""
    with suppress(BrokenPipeError), pipe:
        pipe.write(lines)


def _answers(output: bytes, count: int) -> list[Compiled]:
    """Return whole answers to `count` orders, the last line of which may be cut."""
    found: dict[int, Compiled] = {}
    for line in output.splitlines():
        try:
            answer = msgspec.json.decode(line, type=Compiled)
        except msgspec.DecodeError:
            continue
        if 0 <= answer.index < count:
            found[answer.index] = answer
    return [*found.values()]
