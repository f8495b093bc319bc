"""What a plan would do, without doing it: `tailrace compare PLAN --check`.

Everything that can be refused before a server runs is checked here as at a real start: programs
that are not installed, variables that are not set, a trace too short for its rates. What is shown
beside it (commands, requests, the least time) is what one asks of a plan that takes hours.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.bench.campaign import first_probe, search_options, steady_offer
from tailrace.bench.codec import FileCodec
from tailrace.bench.engines import adapter_for
from tailrace.bench.masking import masked
from tailrace.bench.plan import SERVER_TOKENIZER
from tailrace.bench.report import require_report
from tailrace.bench.search import SEEDS_PER_DRAW
from tailrace.bench.session import secrets_of
from tailrace.bench.work_shelf import WorkShelf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tailrace.bench.engines import EngineSpec
    from tailrace.bench.plan import Plan
    from tailrace.bench.traffic.schedule import Schedule
    from tailrace.bench.work_shelf import Offer

EXAMPLE_PORT = 8000
"""Stands where a free port will be."""
FEWEST_SEARCH_TRIALS = 4
"""Both ends of the last bracket, twice each."""


def preview(plan: Plan) -> list[str]:
    """Check a plan as a start does, and return what it would measure, a line each.

    Raises:
        ConfigError: It could not be started here.
    """
    require_report()
    if plan.tokenizer != SERVER_TOKENIZER:
        FileCodec(Path(plan.tokenizer))
    return [
        plan.title,
        f"traffic: {plan.traffic.describe()}",
        *(["limits: " + ", ".join(map(str, plan.limits))] if plan.limits else []),
        *(line for spec in plan.engines for line in _engine(spec)),
        *_loads(plan),
        _least_time(plan),
    ]


def _engine(spec: EngineSpec) -> Iterator[str]:
    adapter = adapter_for(spec)
    yield f"engine {spec.name} ({spec.kind}, {spec.strategy})"
    if not adapter.is_ours:
        yield f"  found running at {spec.url}"
        return
    words = masked(adapter.command("127.0.0.1", EXAMPLE_PORT), secrets_of(spec), takes_many=True)
    yield f"  {shlex.join(words)}"
    if spec.env:
        yield f"  with {', '.join(sorted(spec.env))} in the environment"


def _loads(plan: Plan) -> Iterator[str]:
    shelf = WorkShelf(plan.traffic, None)
    seed = plan.draw_of(0) * SEEDS_PER_DRAW
    if plan.search is not None:
        options = search_options(plan, 0)
        offer = first_probe(plan, seed)
        yield (
            f"search from {options.low_rps:g} to {options.high_rps:g} requests/s, first: "
            f"{_schedule_text(offer, shelf.schedule(offer))}"
        )
        yield f"  {options.advice()}"
    for load in plan.loads:
        offer = steady_offer(plan, load, seed)
        yield f"steady: {_schedule_text(offer, shelf.schedule(offer))}"


def _schedule_text(offer: Offer, schedule: Schedule) -> str:
    arrivals = schedule.arrivals
    longest = max(a.input_tokens + a.output_tokens for a in arrivals)
    # A closed loop is given more requests than its users can send.
    most = "at most " if offer.users else ""
    return (
        f"{offer.text} for {offer.duration_s:g} s: {most}{len(arrivals):,} requests of "
        f"{sum(a.input_tokens for a in arrivals) / len(arrivals):,.0f} prompt and "
        f"{sum(a.output_tokens for a in arrivals) / len(arrivals):,.0f} answer tokens in the mean, "
        f"the longest of {longest:,} together"
    )


def _least_time(plan: Plan) -> str:
    stay_s = plan.steady.trial_s * len(plan.loads)
    if plan.search is not None:
        options = search_options(plan, 0)
        stay_s += FEWEST_SEARCH_TRIALS * options.duration_s(options.start_rps)
    stays = plan.pairs * len(plan.engines)
    minutes = stay_s * stays / 60
    return (
        f"{stays} stays ({plan.pairs} pairs of {len(plan.engines)}), of {stay_s:g} s of arrivals "
        f"each at the least: {minutes:,.0f} min, and as a rule twice as long; starts, warming and "
        "the answers that follow the last arrival come on top"
    )
