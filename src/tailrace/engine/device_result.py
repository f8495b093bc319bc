"""A queued step's ids on their way to the host, and the device's own clock beside them.

    runner thread    queue: kernels, copy of the ids, event
    any thread       wait: the event, then ids are read, once; grammars go on with them

Whoever waits first settles it: the engine that commits the step, or the next step's masks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tailrace.engine.device_sampler import NO_TOKEN
from tailrace.engine.runner import StepResult

if TYPE_CHECKING:
    from tailrace.text.grammar import GrammarState
    from tailrace.types import TokenLogprobs


@dataclass
class DeviceResult:
    """A step that is queued; `wait` gives what it brought."""

    token_ids: torch.Tensor
    """Pinned int64 [S]; valid after the event."""
    event: torch.cuda.Event | None
    """None on a CPU, where nothing is queued."""
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    before: torch.cuda.Event | None = None
    """When the device had done the step before."""
    came: torch.cuda.Event | None = None
    """When it came to this one, or to the copies for it between pool and host."""
    began: torch.cuda.Event | None = None
    """When those were made, and its own kernels began."""
    queue_s: float = 0.0
    grammars: dict[int, GrammarState] = field(default_factory=dict)
    """By row; they go on when this is settled."""
    _settled: StepResult | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_done(self) -> bool:
        """Whether the device is done with it; does not wait."""
        if self.event is None:
            return True
        return bool(self.event.query())  # type: ignore[no-untyped-call]  # torch's own gap

    @property
    def is_settled(self) -> bool:
        """Whether its grammars have gone on."""
        return self._settled is not None

    def wait(self) -> StepResult:
        """Wait for the device, and let the rows' grammars go on; once, whoever comes first.

        Raises:
            RuntimeError: The device failed in this step or one before.
        """
        with self._lock:
            if self._settled is None:
                self._settled = self._settle()
            return self._settled

    def _settle(self) -> StepResult:
        if self.event is not None:
            self.event.synchronize()
        ids = self.token_ids.tolist()
        errors = dict(self.errors)
        for row, token_id in enumerate(ids):
            if token_id < 0:
                errors.setdefault(row, NO_TOKEN[token_id])
        return StepResult(
            ids,
            self.logprobs,
            errors,
            self.prompt_logprobs,
            device_s=seconds_between(self.began, self.event),
            idle_s=seconds_between(self.before, self.came),
            queue_s=self.queue_s,
            completed=self._follow(ids, errors),
        )

    def _follow(self, ids: list[int], errors: dict[int, str]) -> frozenset[int]:
        """Let grammars go on with what was drawn; return the rows of those that are complete."""
        completed = set()
        for row, grammar in self.grammars.items():
            if row in errors:
                continue
            grammar.take(ids[row])
            if grammar.is_complete:
                completed.add(row)
            grammar.look_ahead()
        return frozenset(completed)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Have the device note the time when it comes here; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own gap
    event.record()
    return event


def seconds_between(first: torch.cuda.Event | None, then: torch.cuda.Event | None) -> float:
    """Return the device's seconds between two events that have happened; 0 without them."""
    if first is None or then is None:
        return 0.0
    return float(first.elapsed_time(then)) / 1e3
