"""One request's time in this process, and the whole of it by phase.

    first byte  body  tokenise  admission   submitted ... engine ... made   emit   socket   end
    ----------|------|---------|----------|------------------------------|-------|--------|
     enter(...) switches, so each moment    the engine's account of the    sends that waited,
     before counts once                     sequence that is told          and the last one's drain

The engine's account comes with its outputs, and may lack the end: in an answer that tells of
itself, or where the engine died. What it does not cover is the decode's after the first token,
before it the queue's. Where the stamps of the two processes cross, the parts are cut so that they
add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.clock import monotonic
from tailrace.telemetry.phases import Phases

if TYPE_CHECKING:
    from tailrace.clock import Clock
    from tailrace.types import RequestTimes

LEAST_BLOCK_S = 1e-4
"""A send that took less did not wait for the client."""


class Timeline:
    """Stamps of one request; all in monotonic seconds.

    Args:
        received_s: When its first byte came.
        clock: Monotonic seconds.
    """

    def __init__(self, received_s: float, clock: Clock = monotonic) -> None:
        self.received_s = received_s
        self.submitted_s: float | None = None
        """Handed to the engine; None for one that was refused before."""
        self.begun_s: float | None = None
        """The answer's head was given to the socket."""
        self.written_s: float | None = None
        """The answer's latest part was given to the socket."""
        self.is_complete = False
        """The answer's last part was."""
        self._clock = clock
        self._phase = "body"
        self._since_s = received_s
        self._spent = dict.fromkeys(("body", "tokenise", "admission", "emit", "socket"), 0.0)
        self._blocked: list[tuple[float, float]] = []
        self._sending_since_s: float | None = None

    def enter(self, phase: str) -> None:
        """Say that the request is in another phase from now on.

        Args:
            phase: "tokenise", "admission", or, of one that is refused, "emit". After `submit`
                nothing is counted here any more.
        """
        if self.submitted_s is None:
            self._switch(phase, self._clock())

    def submit(self) -> float:
        """Say that the engine has it from now on; return when that was."""
        now_s = self._clock()
        self._switch("emit", now_s)
        self.submitted_s = now_s
        return now_s

    def send_began(self) -> None:
        """Say that a part of the answer is being given to the socket."""
        self._sending_since_s = self._clock()

    def send_ended(self) -> None:
        """Say that it was, or was given up."""
        now_s = self._clock()
        began_s, self._sending_since_s = self._sending_since_s, None
        self.written_s = now_s
        self.begun_s = self.begun_s or now_s
        if began_s is not None and now_s - began_s > LEAST_BLOCK_S:
            self._blocked.append((began_s, now_s))

    def part_written(self) -> None:
        """Say that a part of the answer was given to the socket, which took it at once."""
        self.written_s = self._clock()
        self.begun_s = self.begun_s or self.written_s

    def token_came(self) -> None:
        """Forget how sends waited so far: the engine was still at work meanwhile."""
        self._blocked.clear()

    def refused(self, end_s: float) -> Phases:
        """Return the phases of a request that the engine never had.

        Args:
            end_s: When the kernel had the answer's last byte, or the client was gone.
        """
        written_s = self.written_s
        spent = dict(self._spent)
        last_s = end_s if written_s is None else min(max(written_s, self._since_s), end_s)
        spent[self._phase] += max(0.0, last_s - self._since_s)
        spent["socket"] += max(0.0, end_s - max(last_s, self._since_s))
        return Phases(**{f"{phase}_s": seconds for phase, seconds in spent.items()})

    def phases(self, told: RequestTimes | None, made_s: float, end_s: float) -> Phases:
        """Return the phases of a request that was submitted, up to a moment.

        Args:
            told: The engine's account of the sequence that is told, as far as it came.
            made_s: When the engine was done with it.
            end_s: The moment: the last one, or now.
        """
        submitted_s = self.received_s if self.submitted_s is None else self.submitted_s
        end_s = max(end_s, submitted_s)
        made_s = min(max(made_s, submitted_s), end_s)
        socket_s = self._waited_s(made_s, end_s)
        return Phases(
            body_s=self._spent["body"],
            tokenise_s=self._spent["tokenise"],
            admission_s=self._spent["admission"],
            **_of_engine(told, submitted_s, made_s),
            emit_s=self._spent["emit"] + end_s - made_s - socket_s,
            socket_s=socket_s,
        )

    def _switch(self, phase: str, now_s: float) -> None:
        self._spent[self._phase] += max(0.0, now_s - self._since_s)
        self._phase, self._since_s = phase, max(now_s, self._since_s)

    def _waited_s(self, start_s: float, end_s: float) -> float:
        """Return for how long, between two moments, the client had not taken what was sent."""
        spans = list(self._blocked)
        if self._sending_since_s is not None:
            spans.append((self._sending_since_s, end_s))
        elif self.is_complete and self.written_s is not None:
            spans.append((self.written_s, end_s))
        return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in spans)


def _of_engine(told: RequestTimes | None, submitted_s: float, made_s: float) -> dict[str, float]:
    """Divide the time at the engine as it told; what it left open is decode's, or the queue's."""
    left_s = made_s - submitted_s
    if told is None:
        return {"queue_s": left_s}
    known = {
        "queue_s": told.queue_s + max(0.0, told.arrival_s - submitted_s),
        "prefill_s": told.prefill_s,
        "prefill_wait_s": told.prefill_wait_s,
        "preempted_s": told.preempted_s,
    }
    found = {}
    for phase, seconds in known.items():
        found[phase] = min(max(0.0, seconds), left_s)
        left_s -= found[phase]
    rest = "decode_s" if told.first_token_s else "prefill_s" if told.scheduled_s else "queue_s"
    found[rest] = found.get(rest, 0.0) + left_s
    return found
