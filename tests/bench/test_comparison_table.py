import io
import re

import pytest
from rich.console import Console

from tailrace.bench.comparison_table import missing, print_comparison
from tailrace.bench.records import Record, write_records
from tailrace.bench.result import Comparison, Contender, Platform, Ratio, Search, Trial


def comparison(**changes):
    fields = {
        "title": "A [b]against[/b] B",
        "command": "",
        "started_unix_s": 0.0,
        "plan": {},
        "traffic": "",
        "limits": ["p95_ttft=2"],
        "platform": Platform(name="here", machine={}),
        "contenders": [Contender(name=name, engine="openai") for name in ("a", "b")],
    }
    return Comparison(**(fields | changes))


def search(contender, pair, max_rps, *reasons):
    return Search(
        contender=contender,
        pair=pair,
        max_rps=max_rps,
        holds_rps=max_rps,
        fails_rps=None,
        reasons=list(reasons),
    )


def steady(folder, contender, pair, ttft_s, reasons=(), **changes):
    name = f"trials/{contender}-{pair}-{changes.get('users', 0)}"
    (folder / name).mkdir(parents=True)
    record = Record(
        index=0,
        scheduled_s=0.0,
        planned_input_tokens=1,
        planned_output_tokens=1,
        status="ok",
        first_token_s=ttft_s,
        finished_s=2 * ttft_s,
    )
    write_records(folder / name / "records.jsonl", [record])
    fields = {"phase": "steady", "rate_rps": 1.5, "seed": 0, "duration_s": 1.0}
    return Trial(
        contender=contender,
        pair=pair,
        started_unix_s=0.0,
        folder=name,
        reasons=list(reasons),
        **(fields | changes),
    )


def printed(found, folder):
    console = Console(file=io.StringIO(), width=200)
    print_comparison(found, folder, console)
    return console.file.getvalue()


def row(text, *starts):
    """Return the cells of the row that begins with these cells."""
    for line in text.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if cells[: len(starts)] == list(starts):
            return cells
    raise AssertionError(text)


def test_rates_are_shown_with_their_range_and_ratio(tmp_path):
    found = comparison(
        searches=[search("a", 0, 2.0), search("a", 1, 2.2), search("b", 0, 3.0)],
        ratios=[Ratio(contender="b", baseline="a", pairs=[1.5], estimate=1.5, low=1.2, high=1.8)],
    )
    text = printed(found, tmp_path)
    assert "A [b]against[/b] B: highest rate that keeps p95_ttft=2" in text
    assert row(text, "a") == ["a", "2.1", "2 to 2.2", "2"]
    assert row(text, "b") == ["b", "3", "1", "1.500", "1.200 to 1.800 (95%)"]


def test_what_is_missing_is_said():
    ratio = Ratio(
        contender="b",
        baseline="a",
        pairs=[],
        estimate=None,
        low=None,
        high=None,
        reasons=["no pair in which both resolved"],
    )
    found = comparison(searches=[search("a", 1, None, "it died")], ratios=[ratio])
    assert missing(found) == [
        "a, pair 2: no highest rate: it died",
        "b to a: no pair in which both resolved",
    ]


def test_steady_loads_pool_their_valid_trials(tmp_path):
    trials = [
        steady(tmp_path, "b", 0, 0.3),
        steady(tmp_path, "a", 0, 0.1),
        steady(tmp_path, "a", 1, 0.2),
        steady(tmp_path, "a", 2, 9.0, reasons=["late"]),
        steady(tmp_path, "a", 3, 0.5, users=4),
    ]
    text = printed(comparison(trials=trials), tmp_path)
    assert row(text, "a", "1.5/s")[2:6] == ["2 of 3", "2", "0", "100 ms, 200 ms, 200 ms"]
    assert row(text, "b", "1.5/s")[5].startswith("300 ms")
    assert row(text, "a", "4 users")[5].startswith("500 ms")
    order = [line.split()[0] for line in text.splitlines() if "1.5/s" in line]
    assert order == ["a", "b"]


@pytest.mark.parametrize("phase", ["search", ""])
def test_without_steady_trials_there_is_no_such_table(tmp_path, phase):
    trials = [steady(tmp_path, "a", 0, 0.1, phase=phase)]
    assert "Steady" not in printed(comparison(trials=trials), tmp_path)
