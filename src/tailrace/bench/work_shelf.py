"""The work of every trial, made once and handed to each contender alike.

Arrivals and lengths are drawn by `draw_of(seed)`, so that the rates of a search, and the contenders
of a pair, see the same traffic; texts are made from the whole seed, so that no server ever sees one
twice.
What was made stays until the next pair, since the second contender asks for much of it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tailrace.bench.prompts import PromptMaker, corpus_text
from tailrace.bench.search import DRAWS_PER_SEED, SEEDS_PER_DRAW, draw_of
from tailrace.bench.traffic.workload import build
from tailrace.bench.trial import Work
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.bench.codec import Codec
    from tailrace.bench.prompts import Prompt
    from tailrace.bench.target import Target
    from tailrace.bench.traffic.schedule import Schedule
    from tailrace.bench.traffic.workload import Workload

PROBE_TEXT = "Each request leaves on time; 尾延迟 is the product, isn't it?\n  42 x 3.14"
"""Told to every contender's tokenizer, which must count it alike."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One load that is offered to a server."""

    phase: str
    """"search" or "steady"."""
    rate_rps: float | None = None
    """Open loop; None in a closed one."""
    users: int = 0
    seed: int
    duration_s: float

    @property
    def text(self) -> str:
        """As a person reads it."""
        if self.rate_rps is None:
            return f"{self.users} users"
        return f"{self.rate_rps:.3g} requests/s"


class WorkShelf:
    """Makes and keeps work.

    Args:
        workload: The plan's traffic.
        codec: Counts tokens for everyone; None takes the tokenizer of each server as it runs,
            which must all agree.
    """

    def __init__(self, workload: Workload, codec: Codec | None) -> None:
        self._workload = workload
        self._codec = codec
        self._corpus, self.text_name = corpus_text(workload.text_file)
        self._maker: PromptMaker | None = None
        self._made: dict[Offer, Work] = {}
        self._pair_seed = -1
        self._agreed: list[int] | None = None
        self.misses = 0
        self.made = 0

    @property
    def about(self) -> str:
        """For the report: where texts come from, who counted them, how exact they are."""
        counter = self._codec.name if self._codec else "each server's own tokenizer, which agree"
        return (
            f"cut from {self.text_name}, counted by {counter}; {self.misses} of {self.made} are "
            "not of the exact length"
        )

    async def agree(self, codec: Codec) -> None:
        """Check that a server's tokenizer counts as those before it did.

        Raises:
            ConfigError: It does not, so one prompt would have two lengths.
        """
        if self._codec is not None:
            return
        ids = await codec.encode(PROBE_TEXT)
        if self._agreed is None:
            self._agreed = ids
        if ids != self._agreed:
            raise ConfigError(
                f"{codec.name} cuts a test sentence into {len(ids)} tokens, the first engine into "
                f"{len(self._agreed)}, or into others: their models differ, or one adds a special "
                "token; give tokenizer = DIR with the tokenizer.json that should count"
            )

    async def work(self, offer: Offer, codec: Codec, target: Target) -> Work:
        """Return the requests of an offer, the same ones for every contender.

        Raises:
            ConfigError: The traffic cannot be drawn, the tokenizer does not answer, or a request
                does not fit the model's context.
        """
        pair_seed = draw_of(offer.seed) // DRAWS_PER_SEED
        if pair_seed != self._pair_seed:
            self._made.clear()
            self._pair_seed = pair_seed
        if offer not in self._made:
            self._made[offer] = await self._make(offer, codec)
        check_context(self._made[offer], target)
        return self._made[offer]

    async def warm_work(self, codec: Codec, target: Target, *, draw: int, requests: int) -> Work:
        """Return a few requests of the run's lengths that no trial sends.

        Raises:
            ConfigError: As `work`.
        """
        workload = replace(
            self._workload, users=0, arrivals="", rates="", burstiness=1.0, rate_rps=None, turns=1
        )
        schedule = build(workload, rate_rps=1.0, duration_s=None, max_requests=requests, seed=draw)
        seed = draw * SEEDS_PER_DRAW + SEEDS_PER_DRAW - 1
        prompts = await self._prompts(schedule, codec, seed=seed)
        work = Work(schedule, prompts, seed=draw)
        check_context(work, target)
        return work

    def schedule(self, offer: Offer) -> Schedule:
        """Draw the arrivals of an offer, without their texts.

        Raises:
            ConfigError: The traffic cannot be drawn so: a trace too short for the rate, say.
        """
        workload = replace(self._workload, users=offer.users) if offer.users else self._workload
        return build(
            workload,
            rate_rps=offer.rate_rps,
            duration_s=offer.duration_s,
            seed=draw_of(offer.seed),
        )

    async def _make(self, offer: Offer, codec: Codec) -> Work:
        schedule = self.schedule(offer)
        prompts = await self._prompts(schedule, codec, seed=offer.seed)
        self.made += len(prompts)
        self.misses += sum(prompt.is_miss for prompt in prompts)
        return Work(schedule, prompts, users=offer.users, seed=offer.seed)

    async def _prompts(self, schedule: Schedule, codec: Codec, *, seed: int) -> list[Prompt]:
        codec = self._codec or codec
        if self._maker is None:
            self._maker = await PromptMaker.create(codec, self._corpus, seed=seed)
        return await self._maker.reseeded(codec, seed=seed).make_all(schedule)


def check_context(work: Work, target: Target) -> None:
    """Check that every request fits the model.

    Raises:
        ConfigError: One does not.
    """
    if target.context_tokens is None:
        return
    longest = max(a.input_tokens + a.output_tokens for a in work.schedule.arrivals)
    if longest > target.context_tokens:
        raise ConfigError(
            f"a request of {longest} tokens, prompt and answer, does not fit the context of "
            f"{target.model}, {target.context_tokens}; clip with max_input_tokens and "
            "max_output_tokens in [traffic]"
        )
