"""One request, ready to send, and when it is due.

    open loop     a shot is due at `scheduled_s`, whatever the server does
    a chain       a shot with `after` is due `think_s` after the answer to that shot ended:
                  the next turn of a session, or the next request of a closed-loop user

Chains are the one idea behind sessions and users: everything else about a shot is the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.bench.records import Record

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Shot:
    """One request, ready to send."""

    index: int
    scheduled_s: float
    """From the run's start; of a shot with `after` only what orders it among others."""
    input_tokens: int
    output_tokens: int
    body: bytes
    request_id: str = ""
    """Sent as X-Request-Id; empty sends none."""
    priority: int = 0
    user: int | None = None
    session: int | None = None
    turn: int = 0
    after: int | None = None
    """The index of the shot whose answer must have ended; None waits for the clock alone."""
    think_s: float = 0.0
    """From that answer's end until this shot is due."""


def new_run_id() -> str:
    """Return what makes the request ids of one run unlike those of any other."""
    return os.urandom(4).hex()


def blank_record(shot: Shot, *, scheduled_s: float | None = None, worker: int = 0) -> Record:
    """Return the record of a shot that nothing has happened to yet."""
    return Record(
        index=shot.index,
        scheduled_s=shot.scheduled_s if scheduled_s is None else scheduled_s,
        planned_input_tokens=shot.input_tokens,
        planned_output_tokens=shot.output_tokens,
        request_id=shot.request_id,
        priority=shot.priority,
        user=shot.user,
        session=shot.session,
        turn=shot.turn,
        worker=worker,
    )


def chains(shots: Iterable[Shot]) -> list[list[Shot]]:
    """Return the shots as chains, each in the order it is sent, chains in order of time.

    Raises:
        ValueError: A shot waits for one that is not there, or that another waits for already.
    """
    by_index = {shot.index: shot for shot in shots}
    heads = [shot for shot in by_index.values() if shot.after is None]
    followers: dict[int, Shot] = {}
    for shot in by_index.values():
        if shot.after is None:
            continue
        if shot.after not in by_index or shot.after in followers:
            raise ValueError(f"request {shot.index} cannot come after request {shot.after}")
        followers[shot.after] = shot
    heads.sort(key=lambda shot: (shot.scheduled_s, shot.index))
    found = [_follow(head, followers) for head in heads]
    if sum(map(len, found)) != len(by_index):
        raise ValueError("some requests wait for each other in a circle")
    return found


def _follow(head: Shot, followers: dict[int, Shot]) -> list[Shot]:
    chain = [head]
    while chain[-1].index in followers:
        chain.append(followers[chain[-1].index])
    return chain
