from __future__ import annotations

import math

import pytest

from tailrace.bench.records import read_records, write_records
from tailrace.bench.report.findings import HIGHEST, Load, read_findings
from tailrace.bench.result import read_result, write_result
from tailrace.bench.stats import percentile, summarise, ttft_s
from tailrace.errors import ConfigError
from tests.bench.result_factory import LLAMACPP, TAILRACE, Setup, make_result

SMALL = Setup(engines=(LLAMACPP, TAILRACE), pairs=2, requests=25, rates_rps=(2.0, 3.0))


@pytest.fixture
def folder(tmp_path):
    make_result(tmp_path, SMALL)
    return tmp_path


def steady(folder, contender, rate_rps):
    comparison = read_result(folder)
    return [
        trial
        for trial in comparison.trials
        if (trial.contender, trial.phase, trial.rate_rps) == (contender, "steady", rate_rps)
    ]


def test_equal_loads_pool_the_observations_of_all_pairs(folder):
    (platform,) = read_findings([folder])
    row = next(r for r in platform.steady if (r.contender, r.load.rate_rps) == ("tailrace", 2.0))
    records = [
        record
        for trial in steady(folder, "tailrace", 2.0)
        for record in read_records(folder / trial.folder / "records.jsonl")
    ]
    expected = sorted(ttft_s(record) for record in records)
    assert row.trials == 2
    assert row.work.requests == 50
    assert row.work.latency_s["ttft"].p95 == percentile(expected, 95)
    assert row.work.latency_s["itl"].p99 == summarise(records).gap.at(99)


def test_invalid_trials_are_listed_and_in_no_figure(folder):
    comparison = read_result(folder)
    spoilt = steady(folder, "tailrace", 2.0)[0].folder
    next(t for t in comparison.trials if t.folder == spoilt).reasons = ["the client was late"]
    write_result(folder, comparison)
    (platform,) = read_findings([folder])
    row = next(r for r in platform.steady if (r.contender, r.load.rate_rps) == ("tailrace", 2.0))
    assert row.trials == 1
    assert [row.trial.folder for row in platform.invalid] == [spoilt]


def test_a_failed_request_is_infinitely_slow_and_not_good(folder):
    trial = steady(folder, "llamacpp", 3.0)[0]
    file = folder / trial.folder / "records.jsonl"
    records = read_records(file)
    for record in records[:10]:
        record.status = "http"
    write_records(file, records)
    (platform,) = read_findings([folder])
    row = next(row for row in platform.trials if row.trial.folder == trial.folder)
    assert row.work.latency_s["ttft"].p95 == math.inf
    assert row.limits["p95_ttft"] == math.inf
    assert row.work.failures["http"] == 10
    assert row.work.good <= 15


def test_the_pictures_show_the_hardest_load_that_someone_held(folder):
    comparison = read_result(folder)
    for trial in comparison.trials:
        trial.outcome = "fails" if trial.rate_rps == 3.0 else "holds"
    write_result(folder, comparison)
    assert read_findings([folder])[0].focus == Load(0, 2.0)
    for trial in comparison.trials:
        trial.outcome = "fails" if trial.contender == "llamacpp" else "holds"
    write_result(folder, comparison)
    assert read_findings([folder])[0].focus == Load(0, 3.0)


def test_a_load_that_one_contender_lacks_is_not_shown(folder):
    comparison = read_result(folder)
    comparison.trials = [
        t for t in comparison.trials if (t.contender, t.rate_rps) != ("llamacpp", 3.0)
    ]
    write_result(folder, comparison)
    assert read_findings([folder])[0].focus == Load(0, 2.0)


def test_without_steady_loads_each_contender_shows_its_highest_rate_that_held(tmp_path):
    make_result(tmp_path, Setup(engines=(TAILRACE,), pairs=2, requests=25, rates_rps=()))
    comparison = read_result(tmp_path)
    (platform,) = read_findings([tmp_path])
    assert platform.focus == HIGHEST
    shown = {row.trial.rate_rps for row in platform.samples["tailrace", HIGHEST].rows}
    assert shown == {search.holds_rps for search in comparison.searches}


def test_platforms_of_one_name_are_told_apart(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        make_result(folder, Setup(engines=(TAILRACE,), pairs=1, requests=5, rates_rps=()))
    names = [platform.name for platform in read_findings(folders)]
    assert names == ["1 x H200", "1 x H200 (run 2)", "1 x H200 (run 3)"]


def test_a_missing_trial_is_an_error_that_names_the_file(folder):
    trial = read_result(folder).trials[0]
    (folder / trial.folder / "records.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"records\.jsonl"):
        read_findings([folder])


def test_closed_loops_are_told_apart_by_their_users(folder):
    comparison = read_result(folder)
    for trial in comparison.trials:
        if trial.phase == "steady":
            trial.users = 8 if trial.rate_rps == 2.0 else 16
    write_result(folder, comparison)
    (platform,) = read_findings([folder])
    assert [str(row.load) for row in platform.steady] == ["8 users"] * 2 + ["16 users"] * 2
