"""One sequence's life, as a table.

    from      event     to         what happens
    ARRIVING  complete  WAITING    its request came whole; keeps its blocks (early_prompts.py)
    ARRIVING  finish    FINISHED   its body came to nothing, or its blocks are needed
    WAITING   admit     RUNNING    gets a slot and a block table (a prefix-cache hit included)
    RUNNING   preempt   WAITING    gives slot and blocks back; computed from the start again later
    RUNNING   finish    FINISHED   gives slot and blocks back
    WAITING   finish    FINISHED   aborted, or refused, before it ran

Steps overlap: step N+1 is scheduled while step N still runs, so a sequence can have a token that
was sampled but whose id nobody on the Python side knows yet. `pending_tokens` counts those:

    token_ids   p p p p p p o o      known: prompt and committed output
    pending                     ?    sampled by the step in flight
    num_computed ------------->|     positions whose KV is written once all issued steps are done

The next token to compute stands at position `num_computed`; when that is the pending one, the
runner takes its id from the device, not from here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tailrace.engine.phases import Spent
from tailrace.errors import EngineError
from tailrace.types import SamplingParams

if TYPE_CHECKING:
    from tailrace.engine.block_manager import Table
    from tailrace.engine.outlook import Ahead
    from tailrace.text.grammar import Grammar
    from tailrace.types import EngineRequest, TokenLogprobs


class Status(enum.Enum):
    """Where a sequence is in its life."""

    ARRIVING = "arriving"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: dict[tuple[Status, str], Status] = {
    (Status.ARRIVING, "complete"): Status.WAITING,
    (Status.ARRIVING, "finish"): Status.FINISHED,
    (Status.WAITING, "admit"): Status.RUNNING,
    (Status.RUNNING, "preempt"): Status.WAITING,
    (Status.RUNNING, "finish"): Status.FINISHED,
    (Status.WAITING, "finish"): Status.FINISHED,
}

NO_SLOT = -1


@dataclass(eq=False)
class Sequence:
    """A prompt, what was generated so far, and how far its KV is computed."""

    request_id: str
    token_ids: list[int]
    """Prompt, then committed output."""
    num_prompt: int
    sampling: SamplingParams
    max_output: int
    """`max_tokens`, or what the context leaves."""
    arrival_s: float
    priority: int = 0
    key: str = ""
    """Whose it is, for fair shares; "" is everybody without a name."""
    share: float = 1.0
    start: float | None = None
    """Its place among the keys of its priority (shares.py); None before it was queued."""
    expected_cost: int = 0
    """Tokens that it was expected to cost, prompt and answer, when it was queued."""
    likely_cached: int = 0
    """Prompt tokens found in the prefix cache when it was queued."""
    outlook: Ahead | None = None
    """What others who wait expect of it, as of when it was queued."""
    predicted_ttft_s: float | None = None
    """From `arrival_s` to its first token, as expected when it was queued."""
    cache_salt: str | None = ""
    """Whose cached prefixes it shares; None: nobody's, and it leaves none."""
    status: Status = Status.WAITING
    slot: int = NO_SLOT
    num_computed: int = 0
    pending_tokens: int = 0
    steps_in_flight: int = 0
    preemptions: int = 0
    memory_failures: int = 0
    """Steps of its that found no memory on the device, in a row: computing the same anew, or what
    comes before it."""
    failed_end: int = 0
    """Where the chunk ended that found none; what reaches it again ends the row."""
    cached_tokens: int = 0
    kv: Table | None = None
    """Its units, while it runs."""
    expected_output: int = 0
    """Tokens of the whole answer, as guessed when it was last admitted or outgrew the guess."""
    recover_to: int = 0
    """Positions that a preemption took: until they are computed again it only catches up."""
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    prompt_counted: int = 0
    """Prompt positions before this one are in the counters; a preempted prompt counts once."""
    spent: Spent = field(init=False)
    grammar: Grammar | None = None
    """What its output must match, compiled."""
    prompt_scored: int = 0
    """Prompt positions whose log-probabilities were asked of the runner."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """What came back, the first prompt token's being None."""

    def __post_init__(self) -> None:
        self.spent = Spent(self.arrival_s)

    @classmethod
    def from_request(cls, request: EngineRequest, context_length: int) -> Sequence:
        """Make a waiting sequence of a request whose prompt is shorter than the context."""
        sequence = cls._empty(request.request_id)
        _take(sequence, request, context_length)
        return sequence

    @classmethod
    def arriving(
        cls, request_id: str, token_ids: list[int], arrival_s: float, cache_salt: str = ""
    ) -> Sequence:
        """Make a sequence of a prompt's beginning; what is not known yet is as most have it."""
        sequence = cls._empty(request_id)
        sequence.status = Status.ARRIVING
        sequence.token_ids = list(token_ids)
        sequence.num_prompt = len(token_ids)
        sequence.arrival_s = arrival_s
        sequence.cache_salt = cache_salt
        return sequence

    def begins(self, request: EngineRequest) -> bool:
        """Whether what was computed of this arriving sequence is the request's."""
        ids = self.token_ids
        return request.token_ids[: len(ids)] == ids and _salt_of(request) == self.cache_salt

    def complete(self, request: EngineRequest, context_length: int) -> None:
        """Turn an arriving sequence, which `begins` the request, into a waiting one."""
        self.move("complete")
        _take(self, request, context_length)

    @classmethod
    def _empty(cls, request_id: str) -> Sequence:
        return cls(request_id, [], 0, SamplingParams(max_tokens=1), 1, 0.0)

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.num_prompt

    @property
    def length(self) -> int:
        """Tokens, the pending one included."""
        return len(self.token_ids) + self.pending_tokens

    @property
    def uncomputed(self) -> int:
        """Tokens that are still to go through the model: 1 for a decode."""
        return len(self.token_ids) + self.pending_tokens - self.num_computed

    @property
    def wants_work(self) -> bool:
        """Whether a further step can bring this sequence anything."""
        return self.length - self.num_prompt < self.max_output

    @property
    def is_recovering(self) -> bool:
        """Whether it runs again after a preemption, and is not yet where it was."""
        return self.recover_to > 0 and self.status is Status.RUNNING

    @property
    def order(self) -> tuple[int, float, float, str]:
        """Who comes first: priority, then fair share, then age; the id makes it total."""
        return (self.priority, self.start or 0.0, self.arrival_s, self.request_id)

    def move(self, event: str) -> None:
        """Follow the table.

        Raises:
            EngineError: The table has no such transition.
        """
        target = TRANSITIONS.get((self.status, event))
        if target is None:
            raise EngineError(f"sequence {self.request_id}: {event} in state {self.status.value}")
        self.status = target


def _salt_of(request: EngineRequest) -> str | None:
    # Prompt log-probabilities need every prompt position computed: no cached prefix.
    return request.cache_salt if request.sampling.prompt_logprobs is None else None


def _take(sequence: Sequence, request: EngineRequest, context_length: int) -> None:
    """Make a sequence that of a request."""
    sequence.token_ids = list(request.token_ids)
    sequence.num_prompt = len(request.token_ids)
    sequence.sampling = request.sampling
    sequence.max_output = min(request.sampling.max_tokens, context_length - sequence.num_prompt)
    sequence.arrival_s = request.arrival_s
    sequence.spent = Spent(request.arrival_s)  # what was computed before cost it no time
    sequence.priority = request.priority
    sequence.key, sequence.share = request.key, request.share
    sequence.cache_salt = _salt_of(request)
