"""The measuring itself: every pair, every stay, every trial, in an order that can be repeated.

A stay is one contender in one pair; it starts its server afresh. The result is written after
every trial. Whatever a trial's `Offer` asks for is first looked up among the trials on disk: rates
and seeds follow from the answers alone, so a resumed campaign asks for the same trials again, and
measures only what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.bench.codec import FileCodec
from tailrace.bench.comparison_progress import ComparisonProgress, ComparisonState
from tailrace.bench.load.canary import Peak, carry
from tailrace.bench.plan import MOST_LOADS, SERVER_TOKENIZER
from tailrace.bench.ratio import ratio_of
from tailrace.bench.records import read_records
from tailrace.bench.result import Comparison, Ratio, Search, Trial, write_result
from tailrace.bench.search import (
    SEEDS_PER_DRAW,
    FoundRate,
    Point,
    ProbeResult,
    SearchOptions,
    find_max_rate,
    probe_result,
)
from tailrace.bench.session import Served, Session
from tailrace.bench.traffic.arrivals import read_curve
from tailrace.bench.trial import RECORDS, Server, TrialOptions, make_shots, run_trial
from tailrace.bench.work_shelf import Offer, WorkShelf
from tailrace.clock import monotonic
from tailrace.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from tailrace.bench.engines import EngineSpec
    from tailrace.bench.load import LoadState
    from tailrace.bench.plan import Plan
    from tailrace.bench.records import Record
    from tailrace.bench.run import Run

STEADY_SEEDS = 800
"""Where the seeds of a pair's steady trials begin, beyond those of its search."""
SECOND_TRY = MOST_LOADS
"""From a steady trial's seed to that of its repetition."""
DIED = "the server died in this trial"
REQUEST_LOG = "requests.jsonl"


class _InterruptedError(BaseException):
    """The user asked to stop; what was measured is kept.

    No `Exception`, so that a server that is left by it is not waited for.
    """


class Campaign:
    """One run of `compare` from its first server to its last."""

    def __init__(self, plan: Plan, out: Path, comparison: Comparison, console: Console) -> None:
        self.plan = plan
        self.comparison = comparison
        self.out = out
        self.stop = asyncio.Event()
        self.is_loading = False
        """Whether a trial is in progress, which then ends in order at an interrupt."""
        self.state = ComparisonState(
            plan.title, tuple(spec.name for spec in plan.engines), plan.pairs, monotonic()
        )
        self.view = ComparisonProgress(self.state, console)
        codec = None if plan.tokenizer == SERVER_TOKENIZER else FileCodec(Path(plan.tokenizer))
        self.shelf = WorkShelf(plan.traffic, codec)
        self.options = TrialOptions(
            temperature=plan.temperature,
            timeout_s=plan.timeout_s,
            max_lag_s=plan.max_lag_s,
            limits=plan.limits,
            processes=plan.processes,
        )
        self.found: dict[str, FoundRate] = {}
        """The latest search of each contender that resolved: the next one starts there."""
        self.before_measuring: Callable[[], object] = lambda: None
        """Called once, before the first trial that is not on disk; raises what forbids it."""
        self._is_ready = False
        self._stored = list(comparison.trials)
        self._lost: set[tuple[str, int]] = set()
        """The stays, contender and pair, that ended early."""

    async def run(self) -> bool:
        """Measure everything; return whether the plan was carried out to its end.

        Raises:
            ConfigError: The plan cannot be carried out here.
            EngineError: A server did not start in the first pair.
        """
        self._check_traffic()
        body = asyncio.create_task(self._pairs())
        with self.view, _interrupts(lambda: self._interrupt(body)):
            try:
                await body
            except (_InterruptedError, asyncio.CancelledError):
                if not self.stop.is_set():
                    raise
                return False
            finally:
                self._rate()
                self.save()
        return True

    def _interrupt(self, body: asyncio.Task[None]) -> None:
        self.stop.set()
        if not self.is_loading:
            body.cancel()

    async def _pairs(self) -> None:
        for pair in range(self.plan.pairs):
            self.state.pair = pair
            for spec in order(self.plan.engines, pair):
                await self._stay(pair, spec)
            self._rate()
            self.save()
        self._drop_unasked()

    def _drop_unasked(self) -> None:
        """Take out stored trials that were not asked for again: their search went another way."""
        for trial in self._stored:
            if (trial.contender, trial.pair) in self._lost:
                continue  # nobody came to ask
            self.note_news()
            self.comparison.trials.remove(trial)
            shutil.rmtree(self.out / trial.folder, ignore_errors=True)
        self.save()

    def _check_traffic(self) -> None:
        """Draw what the first pair is sure to ask for, before anything starts."""
        seed = self.plan.draw_of(0) * SEEDS_PER_DRAW
        offers = [steady_offer(self.plan, load, seed) for load in self.plan.loads]
        if self.plan.search is not None:
            offers.append(first_probe(self.plan, seed))
        for offer in offers:
            self.shelf.schedule(offer)

    async def get_ready(self) -> None:
        """Check machine and client, once, where anything is to be measured at all.

        Raises:
            ConfigError: This machine, or this client, must not measure.
        """
        if self._is_ready:
            return
        self.before_measuring()
        if self.plan.canary:
            await self._check_client()
        self._is_ready = True

    async def _check_client(self) -> None:
        """Drive a local server at the planned peak, and note what this client itself adds.

        Raises:
            ConfigError: It adds too much, twice in a row: the trials would measure the client.
        """
        self.view.tell("checking the client against a local server")
        peak = peak_of(self.plan, self.shelf)
        for is_last in (False, True):
            carried = await carry(peak, processes=self.plan.processes)
            self.comparison.platform.machine["Client check"] = str(carried)
            if not carried.reasons:
                break
            if is_last:
                raise ConfigError(
                    f"{'; '.join(carried.reasons)}; or set canary = false and let each trial judge"
                )
        self.view.decide(str(carried))

    async def _stay(self, pair: int, spec: EngineSpec) -> None:
        """Measure one contender in one pair."""
        self.state.contender = spec.name
        contender = next(c for c in self.comparison.contenders if c.name == spec.name)
        session = Session(
            spec,
            f"p{pair}-{spec.name}",
            self.out / "servers",
            contender,
            warm_up=lambda served: self._warm_up(served, pair),
            on_progress=self.view.tell,
        )
        try:
            async with session:
                await _Stay(self, session, pair).run()
        except EngineError as error:
            self._give_up(spec.name, pair, error)
        self.state.stages_done += 1
        self.state.stages_kept += not session.was_started

    def _give_up(self, contender: str, pair: int, error: EngineError) -> None:
        """Note that a server could not be measured in this pair; in the first one that ends all."""
        if pair == 0:
            raise error
        self.note_news()
        self._lost.add((contender, pair))
        self.view.decide(f"pair {pair + 1}  {contender}: {error}")
        first_line = str(error).partition("\n")[0]
        found = next(c for c in self.comparison.contenders if c.name == contender)
        found.cautions.append(f"not measured to the end in pair {pair + 1}: {first_line}")
        if self.plan.search is not None and not self.has_search(contender, pair):
            self.comparison.searches.append(
                Search(
                    contender=contender,
                    pair=pair,
                    max_rps=None,
                    holds_rps=None,
                    fails_rps=None,
                    reasons=[first_line],
                )
            )
        self.save()

    def has_search(self, contender: str, pair: int) -> bool:
        """Whether a search of this stay has ended."""
        return any(s.contender == contender and s.pair == pair for s in self.comparison.searches)

    async def _warm_up(self, served: Served, pair: int) -> None:
        codec = served.server.codec(served.target.model)
        await self.shelf.agree(codec)
        work = await self.shelf.warm_work(
            codec,
            served.target,
            draw=self.plan.draw_of(pair),
            requests=self.plan.warm_requests,
        )
        shots = make_shots(as_server(served), work, self.options)
        await served.server.warm_up([shot.body for shot in shots], timeout_s=self.plan.timeout_s)

    def _rate(self) -> None:
        """Work out the ratios from the pairs so far."""
        baseline = self.plan.engines[0].name
        self.comparison.ratios = [
            ratio_between(self.comparison, spec.name, baseline)
            for spec in self.plan.engines[1:]
            if self.plan.search is not None
        ]

    def note_news(self) -> None:
        """Take a stored verdict back: what follows is not what it was made from."""
        self.comparison.finished_unix_s = None

    def save(self) -> None:
        """Write the result as it is now; a finished one stays until there is news."""
        if not self.comparison.is_interrupted:
            return
        if self.shelf.made:
            self.comparison.platform.machine["Prompts"] = self.shelf.about
        write_result(self.out, self.comparison)

    def take_stored(self, contender: str, pair: int, offer: Offer) -> Trial | None:
        """Return the trial of an offer that an earlier run measured, each of them once."""
        for trial in self._stored:
            if (
                (trial.contender, trial.pair) == (contender, pair)
                and (trial.phase, trial.seed) == (offer.phase, offer.seed)
                and (
                    trial.users == offer.users
                    if offer.rate_rps is None
                    else math.isclose(trial.rate_rps, offer.rate_rps, rel_tol=1e-9)
                )
                and (self.out / trial.folder / RECORDS).exists()
            ):
                self._stored.remove(trial)
                return trial
        return None

    def next_folder(self, contender: str, pair: int, offer: Offer) -> str:
        """Return the folder of a new trial, below the result's."""
        names = [trial.folder.rpartition("/")[2] for trial in self.comparison.trials]
        numbers = [int(name.partition("-")[0]) for name in names]
        load = f"{offer.users}users" if offer.rate_rps is None else f"{offer.rate_rps:.3g}rps"
        return f"trials/{max(numbers, default=0) + 1:04d}-{contender}-p{pair}-{load}"


@dataclass
class _Stay:
    """One contender's trials in one pair."""

    campaign: Campaign
    session: Session
    pair: int
    trials: list[Trial] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.session.contender.name

    async def run(self) -> None:
        if self.campaign.plan.search is not None:
            await self._search()
        await self._steady()

    async def _search(self) -> None:
        campaign = self.campaign
        options = search_options(campaign.plan, self.pair)

        async def probe(rate_rps: float, seed: int) -> ProbeResult:
            duration_s = options.duration_s(rate_rps)
            offer = Offer(phase="search", rate_rps=rate_rps, seed=seed, duration_s=duration_s)
            try:
                campaign.shelf.schedule(offer)
            except ConfigError as error:  # a trace that is too short for this rate, say
                return ProbeResult((), (str(error),))
            trial, records = await self._measured(offer)
            return probe_result(options.limits, records, trial.reasons)

        found = await find_max_rate(
            probe,
            options,
            warm=campaign.found.get(self.name),
            name=self.name,
            on_point=self._mark,
        )
        if found.is_resolved:
            campaign.found[self.name] = found
        campaign.comparison.searches.append(
            Search(
                contender=self.name,
                pair=self.pair,
                max_rps=found.max_rps,
                holds_rps=found.holds_rps,
                fails_rps=found.fails_rps,
                reasons=list(found.reasons),
                cautions=list(found.cautions),
            )
        )
        campaign.view.decide(f"pair {self.pair + 1}  {self.name}: {_found_text(found)}")
        campaign.save()

    def _mark(self, point: Point) -> None:
        """Write what is now known of a rate to its trials."""
        for trial in self.trials:
            if trial.phase == "search" and math.isclose(trial.rate_rps, point.rate_rps):
                trial.outcome = "" if trial.reasons else point.outcome
        self.campaign.view.decide(
            f"pair {self.pair + 1}  {self.name}  {point.rate_rps:.3g}/s {point.outcome}  "
            f"({_tally_text(self.campaign.plan, point)})"
        )

    async def _steady(self) -> None:
        plan = self.campaign.plan
        first_seed = plan.draw_of(self.pair) * SEEDS_PER_DRAW + STEADY_SEEDS
        for number, load in enumerate(plan.loads):
            for seed in (first_seed + number, first_seed + number + SECOND_TRY):
                trial, records = await self._measured(steady_offer(plan, load, seed))
                trial.outcome = steady_outcome(plan, records, trial)
                if not trial.reasons:
                    break
            self.campaign.save()

    async def _measured(self, offer: Offer) -> tuple[Trial, Sequence[Record]]:
        """Return the trial of an offer, repeated once where the server died in it."""
        trial, records = await self._stored_or_new(offer, may_die=False)
        if any(reason.startswith(DIED) for reason in trial.reasons):
            trial, records = await self._stored_or_new(offer, may_die=True)
        return trial, records

    async def _stored_or_new(
        self, offer: Offer, *, may_die: bool
    ) -> tuple[Trial, Sequence[Record]]:
        campaign = self.campaign
        trial = campaign.take_stored(self.name, self.pair, offer)
        if trial is None:
            return await self._new(offer, may_die=may_die)
        self.trials.append(trial)
        return trial, read_records(campaign.out / trial.folder / RECORDS)

    async def _new(self, offer: Offer, *, may_die: bool) -> tuple[Trial, Sequence[Record]]:
        """Measure.

        Args:
            offer: The load.
            may_die: Whether a death is now taken as the server's answer to this load: its requests
                have failed, and count as failures.
        """
        campaign = self.campaign
        await campaign.get_ready()
        served = await self.session.served()
        codec = served.server.codec(served.target.model)
        campaign.view.activity(f"making prompts for {offer.text}")
        work = await campaign.shelf.work(offer, codec, served.target)
        folder = campaign.next_folder(self.name, self.pair, offer)
        self.session.mark_request_log()
        started_unix_s = time.time()

        def watch(load: LoadState) -> None:
            state = campaign.state
            state.phase, state.load_text = offer.phase, offer.text
            state.trial_s = work.schedule.duration_s
            state.load = load
            state.trials += 1

        campaign.is_loading = True
        try:
            run = await run_trial(
                as_server(served),
                work,
                campaign.out / folder,
                campaign.options,
                stop=campaign.stop,
                on_state=watch,
            )
        finally:
            campaign.is_loading = False
        await self.session.copy_request_log(campaign.out / folder / REQUEST_LOG)
        trial = Trial(
            contender=self.name,
            phase=offer.phase,
            pair=self.pair,
            rate_rps=offered_rps(offer, run),
            users=offer.users,
            seed=offer.seed,
            duration_s=run.duration_s,
            started_unix_s=started_unix_s,
            folder=folder,
            reasons=list(run.verdict.reasons),
            cautions=[*run.verdict.cautions, *served.server.neighbours],
        )
        self.trials.append(trial)
        campaign.note_news()
        campaign.comparison.trials.append(trial)
        await self._after(trial, may_die=may_die)
        return trial, run.records

    async def _after(self, trial: Trial, *, may_die: bool) -> None:
        """Keep the trial on disk, and see to a server that died in it."""
        campaign = self.campaign
        campaign.save()
        if campaign.stop.is_set():
            raise _InterruptedError
        death = self.session.death()
        if death:
            first_line = death.partition("\n")[0]
            if may_die:
                trial.cautions.append(f"{DIED}, again; its requests count as failed: {first_line}")
            else:
                trial.reasons.append(f"{DIED}: {first_line}")
            campaign.save()
            await self.session.bury()
        if trial.reasons:
            campaign.view.decide(
                f"pair {self.pair + 1}  {self.name}  invalid trial: {'; '.join(trial.reasons)}"
            )


def order(engines: Sequence[EngineSpec], pair: int) -> list[EngineSpec]:
    """Return who is measured when: as listed in even pairs, backwards in odd ones."""
    return list(engines) if pair % 2 == 0 else list(reversed(engines))


PEAK_OVER_START = 4
"""A search is taken to go no further than this many times its first rate."""


def peak_of(plan: Plan, shelf: WorkShelf) -> Peak:
    """Return the hardest load that the plan is expected to come to, for the client."""
    users = max((users for _, users in plan.loads), default=0)
    trial_s = plan.steady.trial_s
    rates = [_peak_rps(plan, rate_rps, trial_s) for rate_rps in plan.steady.rates]
    # The plan's own first load: it is drawn anyway, so a trace that carries it is long enough.
    seed = plan.draw_of(0) * SEEDS_PER_DRAW
    if plan.search is not None:
        search = search_options(plan, 0)
        offer = first_probe(plan, seed)
        rate_rps = min(search.high_rps, PEAK_OVER_START * search.start_rps)
        rates.append(_peak_rps(plan, rate_rps, offer.duration_s))
    elif rates:
        offer = steady_offer(plan, (plan.steady.rates[0], 0), seed)
    else:
        return Peak(rate_rps=float(users), streams=users)
    arrivals = shelf.schedule(offer).arrivals
    peak = Peak.of(
        max(rates),
        input_tokens=sum(a.input_tokens for a in arrivals) / len(arrivals),
        output_tokens=sum(a.output_tokens for a in arrivals) / len(arrivals),
    )
    return replace(peak, streams=max(peak.streams, users))


def _peak_rps(plan: Plan, rate_rps: float, duration_s: float) -> float:
    """Return the highest rate of a trial whose mean is `rate_rps`."""
    if not plan.traffic.rates:
        return rate_rps
    curve = read_curve(plan.traffic.rates, is_ramp=plan.traffic.arrivals == "ramp")
    return curve.scaled_to(rate_rps, duration_s).peak_rps(duration_s)


def first_probe(plan: Plan, seed: int) -> Offer:
    """Return the first load of a plan's searches."""
    options = search_options(plan, 0)
    rate_rps = options.start_rps
    return Offer(
        phase="search", rate_rps=rate_rps, seed=seed, duration_s=options.duration_s(rate_rps)
    )


def steady_offer(plan: Plan, load: tuple[float | None, int], seed: int) -> Offer:
    """Return one of a plan's steady loads: requests/s and users, as in `Plan.loads`."""
    rate_rps, users = load
    return Offer(
        phase="steady",
        rate_rps=rate_rps,
        users=users,
        seed=seed,
        duration_s=plan.steady.trial_s,
    )


def search_options(plan: Plan, pair: int) -> SearchOptions:
    """Return how a pair's highest rates are searched.

    Raises:
        ConfigError: The plan's figures do not fit the search.
    """
    search = plan.search
    assert search is not None  # noqa: S101  # callers have looked
    start_rps = search.start_rps or math.sqrt(search.low_rps * search.high_rps)
    return SearchOptions(
        limits=plan.limits,
        start_rps=start_rps,
        low_rps=search.low_rps,
        high_rps=search.high_rps,
        resolution=search.resolution,
        repeats=search.repeats,
        trial_s=search.trial_s,
        seed=plan.seed_of(pair),
    )


def as_server(served: Served) -> Server:
    """Return a served contender as a trial wants it."""
    return Server(
        served.server.endpoint, served.target, served.server.extra_body, served.server.monitor()
    )


def offered_rps(offer: Offer, run: Run) -> float:
    """Return the offered rate; in a closed loop, which has none, that at which requests left."""
    if offer.rate_rps is not None:
        return offer.rate_rps
    return len(run.records) / run.duration_s if run.duration_s > 0 else 0.0


def steady_outcome(plan: Plan, records: Sequence[Record], trial: Trial) -> str:
    """Return how a steady trial stands to the plan's limits; "" where that cannot be said."""
    if not plan.limits or trial.reasons:
        return ""
    outcomes = set()
    for limit, tally in zip(plan.limits, probe_result(plan.limits, records).tallies, strict=True):
        low, high = tally.bounds()
        if high <= limit.allowed_share:
            outcomes.add("holds")
        else:
            outcomes.add("fails" if low > limit.allowed_share else "undecided")
    return next(name for name in ("fails", "undecided", "holds") if name in outcomes)


def ratio_between(comparison: Comparison, contender: str, baseline: str) -> Ratio:
    """Return the ratio of two contenders' highest rates over the pairs that both have ended."""
    rates = {(s.contender, s.pair): s.max_rps for s in comparison.searches}
    pairs = sorted({pair for _, pair in rates})
    both = [
        (rates[contender, pair], rates[baseline, pair])
        for pair in pairs
        if (contender, pair) in rates and (baseline, pair) in rates
    ]
    figures = ratio_of(both)
    return Ratio(
        contender=contender,
        baseline=baseline,
        pairs=list(figures.pairs),
        estimate=figures.estimate,
        low=figures.low,
        high=figures.high,
        confidence=figures.confidence,
        reasons=list(figures.reasons),
    )


@contextlib.contextmanager
def _interrupts(on_interrupt: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM end the comparison in order, the second the program."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def interrupt() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
        on_interrupt()

    try:
        for number in signals:
            loop.add_signal_handler(number, interrupt)
    except (RuntimeError, ValueError):  # not the main thread: its owner handles signals
        yield
        return
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _found_text(found: FoundRate) -> str:
    if found.max_rps is None:
        return f"no highest rate: {'; '.join(found.reasons)}"
    return f"highest rate {found.max_rps:.3g}/s after {found.trials} trials"


def _tally_text(plan: Plan, point: Point) -> str:
    return ", ".join(
        f"{limit}: {tally.share:.1%} over, of {tally.observations}"
        for limit, tally in zip(plan.limits, point.tallies, strict=True)
    )
