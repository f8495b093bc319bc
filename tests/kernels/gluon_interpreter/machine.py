"""The machine: partitions take turns, barriers count, copies and products are in flight.

One thread runs at a time. At each step that others could see, the machine may let another go on,
or complete a copy; a seed draws which. Every few steps it draws anew who is favoured and how slow
copies are, so that a partition starves for a while, as under a busy scheduler.

A barrier completes a phase once so many have arrived and all bytes that were announced have come.
Who waits names the phase's parity only, so hardware lets a waiter pass that is two phases behind;
here that is an error, as is a second arrival of one partition in a phase.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.kernels.gluon_interpreter.values import GluonFaultError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from tests.kernels.gluon_interpreter.products import Product

_MOST_STEPS = 1_000_000
_MOOD_STEPS = 25


class _AbandonedError(BaseException):
    """Another partition has failed: this one ends."""


@dataclass(eq=False)
class Partition:
    """Warps that run one function: what they know, and what they have in flight."""

    name: str
    warps: int
    known: int = 0
    """Events that happened before, a bit each."""
    unsynced: int = 0
    """Of its own, those that not all of its warps are past: until `thread_barrier`."""
    products: deque[Product] = field(default_factory=deque)
    stores: deque[tuple[Copy, int]] = field(default_factory=deque)
    """Copies to global memory, and their events."""
    waited: dict[Barrier, int] = field(default_factory=dict)
    """By barrier: the last phase that it has waited for."""
    blocked: Callable[[], bool] | None = None
    waits_for: Callable[[], str] | None = None
    is_done: bool = False
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @property
    def published(self) -> int:
        """What one of its threads may vouch for."""
        return self.known & ~self.unsynced

    def note(self, event: int) -> None:
        """Know an event of its own."""
        self.known |= 1 << event
        if self.warps > 1:
            self.unsynced |= 1 << event


@dataclass(eq=False)
class Barrier:
    """An mbarrier."""

    name: str
    count: int
    pending: int = field(init=False)
    """Arrivals that the phase still wants."""
    nbytes: int = 0
    """Bytes that the phase still wants."""
    completed: int = 0
    """Phases."""
    arrived: list[Partition] = field(default_factory=list)
    """In this phase."""
    known: int = 0
    """What those who arrived knew."""
    published: int = 0
    """The same, of the phases that are complete."""

    def __post_init__(self) -> None:
        self.pending = self.count

    def __str__(self) -> str:
        wanted = f"{self.pending} of {self.count} arrivals"
        if self.nbytes:
            wanted += f" and {self.nbytes} bytes"
        return f"{self.name}, whose phase {self.completed} wants {wanted}"

    def arrive(self, partition: Partition, count: int, nbytes: int = 0) -> None:
        """Count an arrival, and the bytes it announces."""
        if partition in self.arrived:
            raise GluonFaultError(
                f"{partition.name} arrives twice at {self.name} in phase {self.completed}"
            )
        if count > self.pending:
            raise GluonFaultError(f"{count} arrivals at {self}")
        self.arrived.append(partition)
        self.pending -= count
        self.nbytes += nbytes
        self.known |= partition.published

    def receive(self, nbytes: int, known: int) -> None:
        """Count bytes that a copy has brought, and what is known by it."""
        if nbytes > self.nbytes:
            raise GluonFaultError(f"a copy brings {nbytes} bytes to {self}")
        self.nbytes -= nbytes
        self.known |= known

    def complete(self, partitions: list[Partition]) -> None:
        """Complete the phase if all has come."""
        if self.pending or self.nbytes:
            return
        self.published |= self.known
        self.completed += 1
        self.pending = self.count
        self.arrived.clear()
        for partition in partitions:
            last = partition.waited.get(self)
            if last is not None and self.completed > last + 2:
                raise GluonFaultError(
                    f"{self.name} has completed phase {self.completed - 1}, but {partition.name} "
                    f"has not yet waited for phase {last + 1}"
                )

    def passes(self, parity: int) -> bool:
        """Whether hardware lets a waiter for this parity go on."""
        return self.completed & 1 != parity


def awaited(partition: Partition, barrier: Barrier, parity: int) -> int:
    """Return which phase a partition means that waits for a parity: the next, or the last again."""
    last = partition.waited.get(barrier)
    if last is not None:
        return last if last & 1 == parity else last + 1
    if parity == 0:
        return 0
    # A new barrier's phase before its first counts as complete.
    return barrier.completed - 1 if barrier.passes(parity) else barrier.completed


@dataclass(eq=False)
class Copy:
    """A copy to or from global memory that is under way."""

    words: str
    perform: Callable[[], None]
    is_done: bool = False


class Machine:
    """What one program of the grid runs on."""

    def __init__(self, seed: str, events: Iterator[int]) -> None:
        self.random = random.Random(seed)
        self.main = Partition("the program", 4)
        self.current = self.main
        self.partitions = [self.main]
        self.barriers: dict[object, Barrier] = {}
        self.copies: list[Copy] = []
        self.fenced = 0
        """Stores that the asynchronous side sees."""
        self._events = events
        self._steps = 0
        self._fault: BaseException | None = None
        self._favour: dict[Partition, float] = {}
        self._promptness = 1.0

    def event(self) -> int:
        """Return the next event's number."""
        return next(self._events)

    def pause(self) -> None:
        """Let copies complete and other partitions go on, perhaps."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise GluonFaultError(f"no end after {_MOST_STEPS} steps")
        if self._steps % _MOOD_STEPS == 1:
            self._favour = {p: self.random.choice((0.02, 1.0, 1.0, 8.0)) for p in self.partitions}
            self._promptness = self.random.choice((0.0, 0.1, 0.5, 1.0))
        for copy in list(self.copies):
            if self.random.random() < self._promptness:
                self._perform(copy)
        self._switch(self._next())

    def wait(self, test: Callable[[], bool], words: Callable[[], str]) -> None:
        """Go on once a test holds; `words` says what for."""
        me = self.current
        self.pause()
        if not test():
            line = kernel_line()
            me.blocked, me.waits_for = test, lambda: f"{words()}, at line {line}"
            self._switch(self._next())
            me.blocked = None

    def finish_copies(self, copies: list[Copy]) -> None:
        """Perform those of some copies that are not done."""
        for copy in copies:
            if not copy.is_done:
                self._perform(copy)

    def _perform(self, copy: Copy) -> None:
        self.copies.remove(copy)
        copy.is_done = True
        copy.perform()

    def _next(self) -> Partition:
        while True:
            ready = [
                p for p in self.partitions if not p.is_done and (p.blocked is None or p.blocked())
            ]
            if ready:
                weights = [self._favour.get(p, 1.0) for p in ready]
                return self.random.choices(ready, weights)[0]
            if not self.copies:
                waiting = [
                    f"{p.name} waits for {p.waits_for()}"
                    for p in self.partitions
                    if not p.is_done and p.waits_for is not None
                ]
                raise GluonFaultError(f"deadlock: {'; '.join(waiting)}")
            self._perform(self.random.choice(self.copies))

    def _switch(self, other: Partition) -> None:
        me = self.current
        if other is me:
            return
        self.current = other
        other.turn.release()
        me.turn.acquire()
        if self._fault is not None:
            raise _AbandonedError

    def specialize(self, work: list[tuple[Partition, Callable[[], None]]]) -> None:
        """Run functions as partitions; return when all have ended.

        Raises:
            GluonFaultError: Or whatever else one of them raises first.
        """
        ended = threading.Semaphore(0)
        # The engine's steps: a thread has its own mode.
        is_inference = torch.is_inference_mode_enabled()

        def run(partition: Partition, function: Callable[[], None]) -> None:
            with torch.inference_mode(is_inference):
                work_off(partition, function)

        def work_off(partition: Partition, function: Callable[[], None]) -> None:
            partition.turn.acquire()
            try:
                if self._fault is None:
                    function()
                    self._leave(partition)
            except _AbandonedError:
                pass
            except BaseException as error:  # noqa: BLE001 - it is raised again where all is run
                error.add_note(f"in {partition.name}")
                self._fault = self._fault or error
            partition.is_done = True
            self._hand_over(ended)

        for partition, _ in work:
            partition.known = self.main.known
        self.partitions = [partition for partition, _ in work]
        threads = [threading.Thread(target=run, args=item, daemon=True) for item in work]
        for thread in threads:
            thread.start()
        self.current = self._next()
        self.current.turn.release()
        ended.acquire()
        for thread in threads:
            thread.join()
        self.current = self.main
        for partition in self.partitions:
            self.main.known |= partition.known
        self.partitions = [self.main]
        if self._fault is not None:
            raise self._fault

    def _hand_over(self, ended: threading.Semaphore) -> None:
        """A partition has ended: another goes on, or all end."""
        left = [p for p in self.partitions if not p.is_done]
        if not left:
            ended.release()
            return
        if self._fault is None:
            try:
                self.current = self._next()
            except BaseException as error:  # noqa: BLE001 - it is raised again where all is run
                self._fault = error
        if self._fault is not None:
            self.current = left[0]
        self.current.turn.release()

    def _leave(self, partition: Partition) -> None:
        if partition.products or partition.stores:
            what = "product" if partition.products else "copy to global memory"
            raise GluonFaultError(f"it ends with a {what} that it has not waited for")

    def check_end(self) -> None:
        """Refuse to end with work in flight."""
        self._leave(self.main)
        if self.copies:
            raise GluonFaultError(f"it ends while {self.copies[0].words} is in flight")
        for barrier in self.barriers.values():
            if barrier.nbytes:
                raise GluonFaultError(f"it ends before {barrier} has them")


_HERE = str(Path(__file__).parent)


def kernel_frame() -> FrameType | None:
    """Return where the kernel's own source is being run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame


def kernel_line() -> int:
    """Return the line of the kernel's source that is being run."""
    frame = kernel_frame()
    return frame.f_lineno if frame else 0


def kernel_function() -> str:
    """Return the name of the kernel's function that is being run."""
    frame = kernel_frame()
    return frame.f_code.co_name if frame else ""
