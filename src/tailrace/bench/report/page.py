"""What a comparison's report says, in order, before it is HTML or Markdown.

Nothing in here is escaped: each writer does that for its own language. Pictures are our own
drawings, every text in them escaped by matplotlib.
"""

from __future__ import annotations

import datetime as dt
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from tailrace.bench.report import comparison_figures as figures
from tailrace.bench.report import tables
from tailrace.bench.report.run_report import DEFINITIONS
from tailrace.bench.report.tail_figures import slow_tail
from tailrace.bench.report.time_figures import timelines
from tailrace.bench.report.verdict import limits_in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tailrace.bench.advise import Advice
    from tailrace.bench.cost import Cost
    from tailrace.bench.report.figures_input import Shown
    from tailrace.bench.report.findings import PlatformFindings
    from tailrace.bench.report.slow_tail import SlowTail
    from tailrace.bench.report.tables import Table
    from tailrace.bench.report.verdict import Statement

MORE_DEFINITIONS = (
    (
        "Highest request rate",
        (
            "the rate at which every limit still holds, searched by bracketing and bisection; "
            "where trials do not decide, the search did not resolve and there is no rate."
        ),
    ),
    (
        "Interleaved pairs",
        (
            "in each pair the contenders run in turn on the same machine with the same requests, "
            "in alternating order, so that drift of the machine meets all of them alike."
        ),
    ),
    (
        "Interval of a ratio",
        (
            "resamples whole pairs, because requests within a run are not independent; fewer "
            "than 6 pairs give no interval."
        ),
    ),
    (
        "KV fragmentation",
        "1 - live tokens / (allocated blocks x block size), where the engine exports it.",
    ),
    (
        "Invalid trial",
        (
            "the client was late, its CPU was taken away, lengths were not as asked, prompts "
            "were cached by accident, or it was interrupted: in no figure, and listed."
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One piece of a section; any of its parts may be missing."""

    heading: str = ""
    picture_id: str = ""
    picture: str | None = None
    """An `<svg>` element, drawn by us."""
    alt: str = ""
    note: str = ""
    table: Table | None = None
    facts: tuple[tuple[str, str], ...] = ()
    lines: tuple[str, ...] = ()
    code: str = ""
    is_folded: bool = False
    """In HTML, shown on demand."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with its blocks."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """The whole report."""

    title: str
    subtitle: str
    statements: tuple[tuple[str, str, tuple[str, ...]], ...]
    """Kind, sentence, reasons."""
    cautions: tuple[str, ...]
    sections: tuple[Section, ...]
    version: str

    @property
    def pictures(self) -> dict[str, str]:
        """Every picture by its id."""
        return {
            block.picture_id: block.picture
            for section in self.sections
            for block in section.blocks
            if block.picture is not None
        }


@dataclass(frozen=True, kw_only=True)
class Content:
    """Everything that was computed for a report."""

    platforms: Sequence[PlatformFindings]
    statements: Sequence[Statement]
    cautions: Sequence[str]
    shown: Sequence[Shown]
    tails: Sequence[SlowTail]
    costs: Sequence[tuple[str, Cost]]
    advice: Sequence[Advice]
    styles: Mapping[str, figures.Look] = field(repr=False)


def compose(content: Content, version: str) -> Page:
    """Return the report's page."""
    sections = [
        _verdict_pictures(content),
        _decisions(content),
        _money(content),
        _equal_rates(content),
        _curves(content),
        _distributions(content),
        _over_time(content),
        _slow_tail(content),
        _resources(content),
        _measured(content),
        _every_trial(content),
    ]
    return Page(
        title=" + ".join(dict.fromkeys(p.comparison.title for p in content.platforms)),
        subtitle=_subtitle(content.platforms),
        statements=tuple((s.kind, s.sentence, s.reasons) for s in content.statements),
        cautions=tuple(content.cautions),
        sections=tuple(section for section in sections if section.blocks),
        version=version,
    )


def _subtitle(platforms: Sequence[PlatformFindings]) -> str:
    names = ", ".join(platform.name for platform in platforms)
    models = dict.fromkeys(
        c.model for platform in platforms for c in platform.comparison.contenders if c.model
    )
    started = min(platform.comparison.started_unix_s for platform in platforms)
    return " · ".join(filter(None, (", ".join(models), names, moment(started))))


def moment(unix_s: float) -> str:
    """Return a time of day with its date, in UTC."""
    at = dt.datetime.fromtimestamp(unix_s, dt.UTC)
    return at.strftime("%Y-%m-%d %H:%M UTC")


def _section(title: str, blocks: Sequence[Block]) -> Section:
    kept = tuple(
        block
        for block in blocks
        if block.picture or block.table or block.facts or block.lines or block.code
    )
    return Section(title=title, blocks=kept)


def _verdict_pictures(content: Content) -> Section:
    several = len(content.platforms) > 1
    rows = [
        (f"{row.contender.name}\n{platform.name}" if several else row.contender.name, row)
        for platform in content.platforms
        for row in platform.rates
    ]
    others = [(label, row) for label, row in rows if not row.is_baseline]
    searched = any(platform.is_searched for platform in content.platforms)
    return _section(
        "Highest request rate",
        [
            Block(
                picture_id="ratios",
                picture=figures.forest("ratios", others, content.styles),
                alt="Ratio of the highest request rates, each pair and the interval",
                note=(
                    "Large mark and bar: the ratio and its interval. Small marks: each "
                    "interleaved pair. An interval that leaves 1 out shows a difference."
                ),
            ),
            Block(
                picture_id="rates",
                picture=figures.highest_rates("rates", rows, content.styles),
                alt="Highest request rate of each contender, each pair and the median",
            ),
            Block(table=_alone(tables.rates(content.platforms), content) if searched else None),
        ],
    )


def _equal_rates(content: Content) -> Section:
    blocks = []
    for platform in content.platforms:
        for load in dict.fromkeys(row.load for row in platform.steady):
            blocks.append(Block(table=tables.latencies(platform, load)))
            blocks.append(Block(table=tables.work(platform, load)))
    are_equal = not any(row.load.is_highest for p in content.platforms for row in p.steady)
    title = "At equal load" if are_equal else "At the highest rate that held"
    return _section(title, blocks)


def _curves(content: Content) -> Section:
    blocks = []
    for number, platform in enumerate(content.platforms):
        name = f"curves-{number}"
        blocks.append(
            Block(
                heading=_heading(content, platform.name),
                picture_id=name,
                picture=figures.rate_curves(name, platform, content.styles),
                alt=f"Offered rate against the limited percentiles on {platform.name}",
                note=(
                    "Each mark is a valid trial, hollow where a limit failed; the curve joins "
                    "medians of neighbouring rates. Dotted: each contender's highest rate."
                ),
            )
        )
    return _section("Rate against latency", blocks)


def _heading(content: Content, name: str) -> str:
    return name if len(content.platforms) > 1 else ""


def _distributions(content: Content) -> Section:
    blocks = []
    for number, (platform, shown) in enumerate(zip(content.platforms, content.shown, strict=True)):
        if shown.load is None:
            continue
        cdf, lengths = f"cdf-{number}", f"lengths-{number}"
        at = (
            f"{platform.name} at {shown.load}" if len(content.platforms) > 1 else f"At {shown.load}"
        )
        blocks += [
            Block(
                heading=at,
                picture_id=cdf,
                picture=figures.cdfs(cdf, platform, shown.load, content.styles),
                alt=f"Cumulative distributions of the latencies at {shown.load}",
                note=(
                    "Share of observations at or below a value, valid trials of all pairs "
                    "together; a curve that ends below 100 % leaves the rest to failures. Red "
                    f"tick: a limit. Drawn with at most {figures.MAX_STEPS} steps each."
                ),
            ),
            Block(
                picture_id=lengths,
                picture=figures.ttft_by_length(lengths, platform, shown.load, content.styles),
                alt=f"Time to first token by prompt length at {shown.load}",
                note=(
                    "Requests in groups of equal size by prompt length: median and P95 of each "
                    f"group. At most {figures.MAX_DOTS} requests are drawn for each contender."
                ),
            ),
        ]
    return _section("Distributions and prompt length", blocks)


def _over_time(content: Content) -> Section:
    blocks = []
    for number, (platform, shown) in enumerate(zip(content.platforms, content.shown, strict=True)):
        name = f"time-{number}"
        blocks.append(
            Block(
                heading=f"{platform.name}, {shown.load}, pair {shown.pair + 1}",
                picture_id=name,
                picture=timelines(
                    name, shown.lines[: figures.MAX_COLUMNS], platform.limits, content.styles
                ),
                alt=f"Requests, queue, KV cache, GPU and memory over time on {platform.name}",
                note=(
                    f"One trial of each contender{_same_requests(shown)}. Top: each request's time "
                    "to first token, drawn at its scheduled arrival; x failed." + _left_out(shown)
                ),
            )
        )
    return _section("Over time", blocks)


def _same_requests(shown: Shown) -> str:
    is_same = shown.load is not None and not shown.load.is_highest
    return ", the same requests at the same times" if is_same else " at its own highest rate"


def _left_out(shown: Shown) -> str:
    rest = [line.contender for line in shown.lines[figures.MAX_COLUMNS :]]
    return f" Not drawn, for want of room: {', '.join(rest)}." if rest else ""


def _slow_tail(content: Content) -> Section:
    if not content.tails:
        return Section(title="", blocks=())
    blocks = [
        Block(
            picture_id="tail",
            picture=slow_tail("tail", content.tails),
            alt="Where the time of the slowest requests went",
            note="The slowest 5 % of the requests of every valid trial at this load.",
        )
    ]
    for tail in content.tails:
        shown = tail.shown
        sentences = [part.sentence for part in shown.tails]
        sentences += [signal.sentence for signal in shown.signals[:3]]
        sentences += [shown.prefill, shown.kv, shown.drafts, *shown.notes]
        where = f" on {tail.platform}" if len(content.platforms) > 1 else ""
        blocks.append(
            Block(
                heading=f"{tail.contender}{where}, from its {shown.source}",
                lines=tuple(as_sentence(text) for text in sentences if text),
            )
        )
    return _section("Why the slow tail is slow", blocks)


def as_sentence(text: str) -> str:
    """Return text with a capital at its start and a full stop at its end."""
    ended = text if text.endswith((".", "!", "?")) else f"{text}."
    return ended[:1].upper() + ended[1:]


def _resources(content: Content) -> Section:
    blocks = []
    for platform, shown in zip(content.platforms, content.shown, strict=True):
        if shown.load is not None and not shown.load.is_highest:
            blocks.append(Block(table=tables.resources_at(platform, shown.load)))
        blocks.append(Block(table=tables.resources(platform)))
    return _section("Memory, queue and faults", blocks)


def _money(content: Content) -> Section:
    # The price is that at the highest rate: where none was asked for there is none to tell.
    searched = any(platform.is_searched for platform in content.platforms)
    table = _alone(tables.costs(content.costs), content) if searched else None
    return _section("What it costs", [Block(table=table)])


def _decisions(content: Content) -> Section:
    if not content.advice:
        return Section(title="", blocks=())
    blocks = [Block(table=tables.decisions(content.advice))]
    blocks += [
        Block(
            heading=f"Rules and numbers for {each.team}",
            lines=tuple(map(as_sentence, each.because)),
            table=_rules(each) if each.candidates else None,
            is_folded=True,
        )
        for each in content.advice
    ]
    return _section("What to run", blocks)


def _rules(advice: Advice) -> Table:
    return tables.Table(
        title=f"{advice.team}: {advice.needs}",
        headings=("configuration", "rule", "numbers", "met"),
        rows=tuple(
            (candidate.configuration, line.rule, line.numbers, "yes" if line.passes else "no")
            for candidate in advice.candidates
            for line in candidate.lines
        )
        + tuple(
            (candidate.configuration, f"complexity {candidate.complexity}", why, "")
            for candidate in advice.candidates
            for why in candidate.complexity_why
        ),
        words=frozenset({0, 1, 2, 3}),
    )


def _measured(content: Content) -> Section:
    blocks = []
    for platform in content.platforms:
        comparison = platform.comparison
        ended = comparison.finished_unix_s
        facts = [
            ("Platform", platform.name),
            ("GPUs", ", ".join(comparison.platform.gpus) or "none"),
            ("Traffic", comparison.traffic),
            ("Limits", limits_in_words(platform.limits) or "none"),
            ("Started", moment(comparison.started_unix_s)),
            ("Ended", "interrupted" if ended is None else moment(ended)),
            ("Command", comparison.command),
            *comparison.platform.machine.items(),
        ]
        for contender in comparison.contenders:
            command = shlex.join(contender.command) or "was already running"
            facts.append((f"Server of {contender.name}", command))
        blocks.append(Block(heading=_heading(content, platform.name), facts=tuple(facts)))
    blocks.append(Block(heading="Definitions", facts=(*DEFINITIONS, *MORE_DEFINITIONS)))
    return _section("How it was measured", blocks)


def _alone(table: Table, content: Content) -> Table:
    return tables.without_single_platform(table, len(content.platforms))


def _every_trial(content: Content) -> Section:
    invalid = tables.invalid(content.platforms)
    blocks = [
        Block(table=_alone(invalid, content) if invalid else None),
        Block(
            heading="Every search",
            table=_alone(tables.searches(content.platforms), content),
            is_folded=True,
        ),
    ]
    blocks += [
        Block(
            heading=f"Every trial on {platform.name}",
            table=tables.trials(platform),
            is_folded=True,
        )
        for platform in content.platforms
    ]
    for platform in content.platforms:
        plan = msgspec.json.format(msgspec.json.encode(platform.comparison.plan), indent=2)
        blocks.append(
            Block(heading=f"The plan of {platform.name}", code=plan.decode(), is_folded=True)
        )
    return _section("Trials and plan", blocks)
