"""A request's time by phase: every moment from its first byte to its answer's last is in one.

    client's bytes   front end              engine                          front end   kernel
    body             tokenise, admission    queue, prefill, prefill_wait,   emit        socket
                                            decode, preempted

docs/why-slow.md defines each phase to the moment. They follow one critical path: while the engine
decodes, what is written meanwhile costs nothing, so emit and socket begin where the engine ended.
"""

from __future__ import annotations

import msgspec

PHASES = {
    "body": "the body arrived",
    "tokenise": "parsed and tokenised",
    "admission": "waited to be let in",
    "queue": "waited for a place in the batch",
    "prefill": "its own prompt",
    "prefill_wait": "prompts of others",
    "decode": "its answer was made",
    "preempted": "preempted and computed again",
    "emit": "made, and on its way through the server",
    "socket": "waited for the client to read",
}
"""Name and label of each phase, in the order of a request's life."""


class Phases(msgspec.Struct, kw_only=True, frozen=True):
    """Seconds of one request in each phase."""

    body_s: float = 0.0
    tokenise_s: float = 0.0
    admission_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    prefill_wait_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    emit_s: float = 0.0
    socket_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The sum: the time that they divide."""
        return sum(self.by_name().values())

    def by_name(self) -> dict[str, float]:
        """Return the seconds by the phases' names."""
        return dict(zip(PHASES, msgspec.structs.astuple(self), strict=True))
