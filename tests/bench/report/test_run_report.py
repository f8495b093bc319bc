from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from tailrace.bench.limits import read_limit
from tailrace.bench.report import require_report, run_report, write_report
from tailrace.bench.run import Run
from tailrace.bench.scrape import Scrape
from tailrace.bench.stats import Limits, summarise
from tailrace.bench.table import figure, print_run
from tailrace.bench.validity import Verdict
from tailrace.errors import ConfigError
from tests.bench.test_stats import ok

pytest.importorskip("matplotlib", reason="the report's pictures need it")

CONDITIONS = {"Model": "m", "Server": "http://x", "Started": "now", "Tailrace": "1", "Command": "c"}


def a_run(records, reasons=(), cautions=(), **changes) -> Run:
    limits = Limits(ttft_s=2.5)
    fields = {
        "title": "A <b>run</b>",
        "conditions": CONDITIONS,
        "records": records,
        "stats": summarise(records, limits),
        "verdict": Verdict(reasons, cautions),
        "limits": limits,
        "duration_s": 15.0,
    }
    return Run(**(fields | changes))


EVIL = "</style><script>alert(1)</script>"


def _scraped() -> Scrape:
    scrape = Scrape()
    scrape.add(0.0, {"running": 1.0, "kv_usage": 0.5})
    scrape.add(9.0, {"running": 2.0})
    return scrape


def _gpu() -> Scrape:
    scrape = Scrape()
    scrape.add(0.0, {"gpu0_utilisation": 0.4, "gpu1_utilisation": 0.9})
    scrape.add(9.0, {"gpu0_utilisation": 0.5, "gpu1_utilisation": 0.8})
    return scrape


RUNS = {
    "whole": a_run([ok(), ok(1, scheduled_s=11.0, input_tokens=300)]),
    "failures": a_run([ok(), ok(1, status="http", error=EVIL, first_token_s=None, chunk_s=[])]),
    "all failed": a_run([ok(i, status="connect", first_token_s=None, chunk_s=[]) for i in (0, 1)]),
    "none": a_run([], reasons=("interrupted",)),
    "cut off": a_run([ok(0, status="cancelled", first_token_s=None, chunk_s=[])]),
    "one token": a_run([ok(output_tokens=1, planned_output_tokens=1, chunk_s=[12.0])]),
    "many": a_run([ok(i, scheduled_s=10.0 - i / 100) for i in range(500)]),
    "wide": a_run([ok(i, scheduled_s=11.9, first_token_s=11.91 + 1.5**i) for i in range(20)]),
    "metrics": a_run([ok()], scrape=_scraped(), scrapes={"gpu": _gpu(), "server": _scraped()}),
}
INVALID = a_run([ok()], reasons=("the client was late",), cautions=("few",))


class _Tags(HTMLParser):
    """Collects tags and whatever a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetches: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "xlink:href"} and not (value or "").startswith("#"):
                self.fetches.append(value)
            if name == "id":
                self.ids.append(value)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Give a run's page, written once for all tests that read it."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {}

    def page_of(run) -> str:
        if id(run) not in pages:
            file = folder / f"report{len(pages)}.html"
            write_report(run, file)
            pages[id(run)] = run, file.read_text(encoding="utf-8")
        return pages[id(run)][1]

    return page_of


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_gives_one_self_contained_page(written, name):
    page = written(RUNS[name])
    tags = _Tags()
    tags.feed(page)
    assert tags.fetches == []
    assert "script" not in tags.tags
    assert "link" not in tags.tags
    assert tags.tags.count("svg") >= 5
    assert len(tags.ids) == len(set(tags.ids))
    assert "@import" not in page
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL).lower().split()


def test_pictures_refer_only_to_ids_they_have(written):
    page = written(RUNS["metrics"])
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        tree = ET.fromstring(svg)  # noqa: S314  # our own drawing
        ids = {element.get("id") for element in tree.iter()}
        wanted = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
        assert wanted <= ids


def test_gpu_readings_are_drawn_where_there_are_any(written):
    assert "GPU busy" in written(RUNS["metrics"])
    assert "GPU busy" not in written(RUNS["whole"])


def test_what_servers_say_is_text_and_not_markup(written):
    page = written(RUNS["failures"])
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "A &lt;b&gt;run&lt;/b&gt;" in page


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (RUNS["whole"], "Valid run; all 2 requests complete"),
        (RUNS["failures"], "Valid run; 1 of 2 requests failed"),
        (
            a_run([ok()], limit=(read_limit("p95_ttft=2.5"),)),
            "Valid run; all 1 requests complete; p95_ttft=2.5 holds",
        ),
        (
            a_run([ok()], limit=(read_limit("p95_ttft=1"), read_limit("p95_e2e=9"))),
            "Valid run; all 1 requests complete; p95_ttft=1 does not hold",
        ),
        (INVALID, "Invalid run: do not use its figures"),
    ],
)
def test_the_verdict_comes_before_every_figure(written, run, words):
    page = written(run)
    assert page.index(words) < page.index('class="tile"')


def test_reasons_are_on_the_page_and_first_on_the_terminal(written):
    assert "the client was late" in written(INVALID)
    stream = io.StringIO()
    print_run(INVALID, Console(file=stream, width=120))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "INVALID: the client was late"
    assert lines[-1] == "note: few"


def test_the_table_shows_percentiles_and_goodput():
    stream = io.StringIO()
    print_run(RUNS["failures"], Console(file=stream, width=120))
    shown = stream.getvalue()
    assert re.search(r"Time to first token \(s\)\D+2\D+2\.000\D+failed", shown)
    assert "1 of 2 requests" in shown
    assert "time to first token at most 2.5 s" in shown
    assert "Failed: 1 (1 http)" in shown


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (None, "s", "-"),
        (float("inf"), "ms", "failed"),
        (0.01234, "ms", "12.3"),
        (1.23456, "s", "1.235"),
        (123.456, "s", "123.5"),
    ],
)
def test_figures_have_the_digits_that_mean_something(value, unit, shown):
    assert figure(value, unit) == shown


@pytest.mark.parametrize("name", RUNS)
def test_the_summary_is_json_of_seconds(name):
    run = RUNS[name]
    summary = json.loads(run.summary_json())
    assert summary["requests"] == len(run.records)
    assert set(summary["latency_s"]["ttft"]) == {"n", "p50", "p90", "p95", "p99", "max"}


def test_failures_are_infinite_in_the_summary():
    summary = json.loads(RUNS["failures"].summary_json())
    assert summary["latency_s"]["ttft"]["p99"] == "inf"
    assert summary["latency_s"]["ttft"]["p50"] == 2.0


def test_without_matplotlib_the_error_names_the_remedy(monkeypatch):
    monkeypatch.setattr(run_report.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'tailrace\[bench\]'"):
        require_report()
