"""The report of a comparison: HTML, Markdown, JSON and CSV from one or several result folders."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from markupsafe import Markup

from tailrace.bench.report.run_report import environment, require_report
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tailrace.bench.report.page import Content, Page

PICTURES = "report-pictures"
"""The folder of the pictures, beside report.md."""


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """What was written."""

    html: Path
    """One self-contained file."""
    markdown: Path
    json: Path
    csv: Path
    pictures: tuple[Path, ...] = ()
    """SVG files that the Markdown links to, where they were asked for."""


def write_reports(
    folders: Sequence[Path], out: Path, *, with_pictures: bool = False
) -> ReportFiles:
    """Write report.html, report.md, report.json and report.csv.

    Args:
        folders: Result folders, one for each platform.
        out: Where to write; made if missing.
        with_pictures: Also write the pictures as files, and link them from the Markdown.

    Raises:
        ConfigError: No folder, a folder that is no result, a file missing in it, or matplotlib
            is not installed.
    """
    if not folders:
        raise ConfigError("no result folder: give at least one that compare wrote")
    require_report()
    # Heavy, and matplotlib is an extra.
    from tailrace.bench.report import exports  # noqa: PLC0415
    from tailrace.bench.report.markdown import to_markdown  # noqa: PLC0415
    from tailrace.bench.report.page import compose  # noqa: PLC0415

    content = _content(folders)
    page = compose(content, version("tailrace"))
    out.mkdir(parents=True, exist_ok=True)
    links = _write_pictures(page, out) if with_pictures else {}
    files = ReportFiles(
        html=out / "report.html",
        markdown=out / "report.md",
        json=out / "report.json",
        csv=out / "report.csv",
        pictures=tuple(out / link for link in links.values()),
    )
    files.html.write_text(_html(page), encoding="utf-8")
    files.markdown.write_text(to_markdown(page, links), encoding="utf-8")
    files.json.write_text(exports.to_json(content), encoding="utf-8")
    files.csv.write_text(exports.to_csv(content.platforms), encoding="utf-8")
    return files


def _content(folders: Sequence[Path]) -> Content:
    from tailrace.bench.advise import decide  # noqa: PLC0415  # as above
    from tailrace.bench.cost import cost_at_limit  # noqa: PLC0415
    from tailrace.bench.report import figures_input, verdict  # noqa: PLC0415
    from tailrace.bench.report.comparison_figures import looks  # noqa: PLC0415
    from tailrace.bench.report.findings import read_findings  # noqa: PLC0415
    from tailrace.bench.report.page import Content  # noqa: PLC0415
    from tailrace.bench.report.slow_tail import explain_tails  # noqa: PLC0415

    platforms = read_findings(folders)
    shown = [figures_input.choose(platform) for platform in platforms]
    names = dict.fromkeys(row.contender.name for p in platforms for row in p.rates)
    comparisons = [platform.comparison for platform in platforms]
    return Content(
        platforms=platforms,
        statements=verdict.statements(platforms),
        cautions=verdict.cautions(platforms),
        shown=shown,
        tails=[
            tail
            for platform, choice in zip(platforms, shown, strict=True)
            if choice.load is not None
            for tail in explain_tails(platform, choice.load, choice.rows)
        ],
        costs=[
            (p.name, cost_at_limit(p.folder, p.comparison, row.contender.name))
            for p in platforms
            for row in p.rates
        ],
        advice=decide(comparisons, folders),
        styles=looks(list(names)),
    )


def _html(page: Page) -> str:
    # Our own drawings: every text in them was escaped by matplotlib.
    pictures = {name: Markup(picture) for name, picture in page.pictures.items()}  # noqa: S704
    template = environment().get_template("comparison.html")
    return template.render(page=page, pictures=pictures)


def _write_pictures(page: Page, out: Path) -> dict[str, str]:
    from tailrace.bench.report.canvas import standalone  # noqa: PLC0415  # as above

    (out / PICTURES).mkdir(exist_ok=True)
    links = {}
    for name, picture in page.pictures.items():
        links[name] = f"{PICTURES}/{name}.svg"
        (out / links[name]).write_text(standalone(picture), encoding="utf-8")
    return links
