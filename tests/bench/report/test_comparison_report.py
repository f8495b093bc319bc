from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from tailrace.bench.records import read_records, write_records
from tailrace.bench.report import write_reports
from tailrace.bench.report.exports import _cell, _plain
from tailrace.bench.report.markdown import escaped, table
from tailrace.bench.report.run_report import unbroken
from tailrace.bench.report.tables import Table
from tailrace.bench.result import read_result, write_result
from tailrace.errors import ConfigError
from tests.bench.result_factory import LLAMACPP, TAILRACE, VLLM, Setup, make_result

pytest.importorskip("matplotlib", reason="the report's pictures need it")

EVIL = "</style><script>alert(1)</script>"
TWO = (LLAMACPP, TAILRACE)


def _changed(folder, change):
    comparison = read_result(folder)
    change(comparison)
    write_result(folder, comparison)


def _without_everything(comparison):
    comparison.ratios, comparison.searches, comparison.trials = [], [], []
    comparison.finished_unix_s = None


def _all_invalid(comparison):
    for trial in comparison.trials:
        trial.reasons = ["the client was late"]


def _closed_loop(comparison):
    comparison.searches, comparison.ratios, comparison.limits = [], [], []
    comparison.trials = [t for t in comparison.trials if t.phase == "steady"]
    for trial in comparison.trials:
        trial.users, trial.outcome = 8, ""


SMALL = Setup(engines=TWO, pairs=1, requests=30, rates_rps=(2.0,))
KINDS = {
    "one pair": (SMALL, lambda _: None),
    "alone, no steady load": (replace(SMALL, engines=(TAILRACE,), rates_rps=()), lambda _: None),
    "nothing measured": (SMALL, _without_everything),
    "all invalid": (SMALL, _all_invalid),
    "closed loop": (SMALL, _closed_loop),
    "no GPU, no price": (replace(SMALL, gpus=(), price_per_hour=None), lambda _: None),
}


class _Tags(HTMLParser):
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


def _check_page(page):
    tags = _Tags()
    tags.feed(page)
    assert tags.fetches == []
    assert "script" not in tags.tags
    assert "link" not in tags.tags
    assert len(tags.ids) == len(set(tags.ids))
    text = re.sub(r"<svg.*?</svg>|<style.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL)
    assert not {"nan", "None", "inf"} & set(text.split())


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_result_gives_a_whole_report(tmp_path, name):
    setup, change = KINDS[name]
    make_result(tmp_path / "in", setup)
    _changed(tmp_path / "in", change)
    files = write_reports([tmp_path / "in"], tmp_path / "out")
    _check_page(files.html.read_text(encoding="utf-8"))
    assert json.loads(files.json.read_text())["version"] == 1
    trials = read_result(tmp_path / "in").trials
    with files.csv.open(newline="") as stream:
        assert len(list(csv.DictReader(stream))) == len(trials)
    assert files.markdown.read_text().startswith("# Synthetic comparison")


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """Two platforms, three contenders, six pairs: the size of a real result."""
    at = tmp_path_factory.mktemp("merged")
    make_result(at / "gpu", Setup(engines=(LLAMACPP, TAILRACE, VLLM), requests=60))
    make_result(at / "cpu", Setup(engines=TWO, requests=60, platform="2-core CPU", gpus=()))
    return write_reports([at / "gpu", at / "cpu"], at / "out", with_pictures=True)


@pytest.mark.slow
def test_platforms_merge_into_one_page_of_bounded_size(merged):
    page = merged.html.read_text(encoding="utf-8")
    _check_page(page)
    assert len(page) < 2_000_000
    for platform in ("1 x H200", "2-core CPU"):
        assert f"the request rate of llamacpp on {platform}" in page
    assert page.index("the request rate of llamacpp") < page.index("<svg")


@pytest.mark.slow
def test_all_four_files_say_the_same(merged):
    whole = json.loads(merged.json.read_text())
    sentences = [said["sentence"] for said in whole["verdict"]]
    markdown = merged.markdown.read_text(encoding="utf-8")
    page = merged.html.read_text(encoding="utf-8")
    assert len(sentences) == 3
    for sentence in sentences:
        assert escaped(sentence) in markdown
        assert unbroken(sentence) in page
    with merged.csv.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    trials = [trial for platform in whole["platforms"] for trial in platform["trials"]]
    assert len(rows) == len(trials)
    for row, trial in zip(rows, trials, strict=True):
        p95 = trial["work"]["latency_s"]["ttft"]["p95"]
        assert float(row["ttft_p95_s"]) == float(p95)


@pytest.mark.slow
def test_pictures_beside_the_markdown_are_linked_and_well_formed(merged):
    links = re.findall(r"!\[[^]]*\]\(([^)]+)\)", merged.markdown.read_text(encoding="utf-8"))
    assert [merged.markdown.parent / link for link in links] == list(merged.pictures)
    for picture in merged.pictures:
        tree = ET.fromstring(picture.read_text(encoding="utf-8"))  # noqa: S314  # our own drawing
        assert tree.tag.endswith("svg")


def test_what_a_plan_or_a_server_says_is_text_and_not_markup(tmp_path):
    evil = replace(TAILRACE, name=f"t{EVIL}", strategy=EVIL, version=EVIL)
    # A name makes folders: only result.json is made evil.
    make_result(tmp_path / "in", SMALL)

    def change(comparison):
        comparison.title = comparison.traffic = comparison.command = EVIL
        comparison.platform.name = comparison.platform.machine["x"] = EVIL
        comparison.plan[EVIL] = EVIL
        comparison.trials[0].reasons = comparison.trials[1].cautions = [EVIL]
        comparison.searches[0].reasons, comparison.searches[0].max_rps = [EVIL], None
        contender = comparison.contenders[1]
        contender.name, contender.strategy = evil.name, evil.strategy
        contender.version, contender.command = evil.version, ["run", EVIL]
        for owned in (*comparison.trials, *comparison.searches, *comparison.ratios):
            if owned.contender == "tailrace":
                owned.contender = evil.name

    _changed(tmp_path / "in", change)
    for trial in read_result(tmp_path / "in").trials:
        file = tmp_path / "in" / trial.folder / "records.jsonl"
        records = read_records(file)
        records[0].status, records[0].error = "http", EVIL
        write_records(file, records)
    files = write_reports([tmp_path / "in"], tmp_path / "out")
    page = files.html.read_text(encoding="utf-8")
    _check_page(page)
    assert "<script" not in page
    assert page.count("</style>") == len(re.findall(r"<style\b", page))
    assert page.count("&lt;script&gt;alert(1)") > 10
    outside_code = re.sub(r"```.*?```", "", files.markdown.read_text(), flags=re.DOTALL)
    assert "<script" not in outside_code


def test_markdown_cannot_be_broken_by_a_cell():
    content = Table(
        title="t",
        headings=("a", "b"),
        rows=(("x|y\nz", "`<b>` *_[l](u)"), ("x|y\nz", "2")),
        is_grouped=True,
        hot=1,
    )
    assert table(content).splitlines()[2:] == [
        "| a | b |",
        "| :-- | --: |",
        r"| x\|y z | **\`&lt;b&gt;\` \*\_\[l\](u)** |",
        "|  | **2** |",
    ]


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """The report of a plan that quotes code, and of searches that found no highest rate."""
    folder = tmp_path_factory.mktemp("odd")

    def change(comparison):
        comparison.plan = {"note": "```\n# out"}
        for search in comparison.searches:
            search.max_rps, search.reasons = None, ["it holds at the highest rate allowed"]

    make_result(folder, replace(SMALL, requests=10))
    _changed(folder, change)
    return write_reports([folder], folder)


def test_a_code_block_cannot_be_left_from_within(odd):
    text = odd.markdown.read_text()
    assert re.search(r"^````text\n.*^````$", text, flags=re.DOTALL | re.MULTILINE)


def test_why_a_cost_is_missing_stands_below_the_table_and_widens_no_column(odd):
    page = odd.html.read_text()
    told = re.search(r'<p class="note">[^<]*No cost of ([^<]*)</p>', page)
    assert told is not None
    assert "it holds at the highest rate allowed" in told[1]
    assert not re.search(r"<td[^>]*>no highest rate", page)


def test_units_stay_with_their_numbers():
    assert unbroken("P95 ≤ 60 ms (95 % of 2 servers)") == "P95 ≤\xa060\xa0ms (95\xa0% of 2 servers)"


def test_long_tables_are_folded_in_markdown(odd):
    text = odd.markdown.read_text()
    assert text.count("<details>") == text.count("</details>") >= 3
    assert "<summary>Every trial on 1 x H200</summary>\n\n**Trials on 1 x H200**" in text


def test_infinite_and_missing_numbers_are_words_in_json():
    assert _plain({"a": float("inf"), "b": float("nan"), "c": (1.5, None)}) == {
        "a": "inf",
        "b": None,
        "c": [1.5, None],
    }


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-2", "@x", "\tx"])
def test_no_text_becomes_a_formula_in_a_spreadsheet(text):
    assert _cell(text) == f"'{text}"
    assert _cell(-2.5) == -2.5


def test_no_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="at least one"):
        write_reports([], tmp_path)
    with pytest.raises(ConfigError, match=r"result\.json"):
        write_reports([tmp_path], tmp_path)
