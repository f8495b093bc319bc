from __future__ import annotations

from dataclasses import replace

import pytest

from tailrace.bench.limits import read_limit
from tailrace.bench.report import write_reports
from tailrace.bench.report.findings import read_findings
from tailrace.bench.report.verdict import cautions, limits_in_words, statements
from tailrace.bench.result import read_result, write_result
from tests.bench.result_factory import LLAMACPP, TAILRACE, Setup, make_result

SMALL = Setup(engines=(LLAMACPP, TAILRACE), pairs=1, requests=20, rates_rps=())


@pytest.fixture
def changed(tmp_path):
    """Return what the report says of a small result after a change to its result.json."""

    def findings(change=lambda _: None, setup=SMALL):
        make_result(tmp_path, setup)
        comparison = read_result(tmp_path)
        change(comparison)
        write_result(tmp_path, comparison)
        return read_findings([tmp_path])

    return findings


def ratio(low, high, estimate=1.42, reasons=()):
    def change(comparison):
        found = comparison.ratios[0]
        found.estimate, found.low, found.high = estimate, low, high
        found.pairs, found.reasons = [1.3, 1.4, 1.5, 1.4, 1.45, 1.5], list(reasons)
        comparison.searches = [s for s in comparison.searches if s.max_rps is not None]

    return change


@pytest.mark.parametrize(
    ("low", "high", "kind", "words"),
    [
        (1.31, 1.55, "ahead", "tailrace holds 1.42 x the request rate of llamacpp at P95 TTFT"),
        (0.6, 0.8, "behind", "tailrace holds 1.42 x the request rate of llamacpp"),
        (0.97, 1.2, "even", "No difference shown between tailrace and llamacpp"),
        (1.0, 1.2, "even", "No difference shown"),
        (None, None, "none", "No verdict on tailrace against llamacpp"),
    ],
)
def test_a_winner_needs_an_interval_that_leaves_one_out(changed, low, high, kind, words):
    (said,) = statements(changed(ratio(low, high)))
    assert said.kind == kind
    assert words in said.sentence
    assert ("6 interleaved pairs" in said.sentence) == (low is not None)


def test_the_sentence_names_limits_interval_and_pairs(changed):
    (said,) = statements(changed(ratio(1.31, 1.55)))
    assert said.sentence == (
        "tailrace holds 1.42 x the request rate of llamacpp at P95 TTFT ≤ 2 s and P95 time per "
        "output token ≤ 60 ms (95 % interval 1.31 to 1.55, 6 interleaved pairs)."
    )


def test_no_verdict_says_every_reason(changed):
    def change(comparison):
        ratio(None, None, reasons=("4 pairs; an interval needs at least 6",))(comparison)
        comparison.searches[0].max_rps = None
        comparison.searches[0].reasons = ["held above a failure"]
        for trial in comparison.trials[:2]:
            trial.reasons = ["the client was late"]

    (said,) = statements(changed(change))
    assert said.reasons[0] == "4 pairs; an interval needs at least 6"
    assert any("held above a failure" in reason for reason in said.reasons)
    assert any("the client was late (2 trials)" in reason for reason in said.reasons)


def test_a_comparison_cut_off_before_its_ratios_gives_no_verdict(changed):
    def change(comparison):
        comparison.ratios, comparison.searches, comparison.finished_unix_s = [], [], None

    findings = changed(change)
    (said,) = statements(findings)
    assert said.kind == "none"
    assert said.reasons == ("no search for the highest rate was made or ended",)
    assert any("interrupted" in text for text in cautions(findings))


def test_without_limits_nothing_was_searched(changed):
    def change(comparison):
        comparison.limits, comparison.ratios, comparison.searches = [], [], []

    (said,) = statements(changed(change))
    assert "no limit was given" in said.reasons[0]


STEADY = Setup(engines=(LLAMACPP, TAILRACE), pairs=1, requests=30, rates_rps=(2.0,))


def unsearched(comparison):
    comparison.limits, comparison.ratios, comparison.searches = [], [], []
    comparison.plan.pop("search", None)
    comparison.trials = [t for t in comparison.trials if t.phase == "steady"]


def test_where_only_loads_were_asked_for_each_contender_is_measured_there(changed):
    findings = changed(unsearched, STEADY)
    said = statements(findings)
    assert [(s.kind, s.contender) for s in said] == [
        ("measured", "llamacpp"),
        ("measured", "tailrace"),
    ]
    assert said[0].sentence.startswith("llamacpp at 2 requests/s on 1 x H200: P95 TTFT ")
    assert said[0].sentence.endswith("30 of 30 requests complete.")
    assert said[0].reasons == ("no limit was given, so no highest rate was searched",)
    page = write_reports([findings[0].folder], findings[0].folder).markdown.read_text()
    assert "## At equal load" in page
    assert "## Highest request rate" not in page
    assert "## What it costs" not in page


def test_a_load_without_a_valid_trial_is_no_measurement(changed):
    def change(comparison):
        unsearched(comparison)
        for trial in comparison.trials:
            if trial.contender == "llamacpp":
                trial.reasons = ["the client was late"]

    first, second = statements(changed(change, STEADY))
    assert (first.kind, second.kind) == ("none", "measured")
    assert "No valid trial of llamacpp" in first.sentence
    assert any("the client was late" in reason for reason in first.reasons)


@pytest.mark.parametrize(("count", "last"), [(30, "P99 of a"), (12, "P95 and P99 of a")])
def test_few_requests_at_a_steady_load_are_said(changed, count, last):
    said = " ".join(cautions(changed(unsearched, replace(STEADY, requests=count))))
    for name in ("llamacpp", "tailrace"):
        assert f"{name} at 2 requests/s: {count} requests, so that {last} request's latency" in said


def test_one_contender_alone_is_measured_and_not_compared(changed):
    def change(comparison):
        comparison.searches[0].max_rps = 1.5

    (said,) = statements(changed(change, Setup(engines=(TAILRACE,), pairs=1, requests=20)))
    assert said.kind == "measured"
    assert "tailrace holds 1.5 requests/s on 1 x H200" in said.sentence
    assert "one search: how far another one, with other seeds, would lie" in said.reasons[0]


def test_the_cautions_of_searches_and_trials_stand_at_the_top(changed):
    def change(comparison):
        comparison.searches[0].cautions = ["trials of 4 s are too short, which flatters the server"]
        for trial in comparison.trials:
            trial.reasons, trial.cautions = [], ["somebody else was here"]

    said = cautions(changed(change))
    assert any("1 x H200: 1 of 2 searches (llamacpp 1): trials of 4 s are too" in s for s in said)
    assert any("valid trials (llamacpp" in s and "somebody else was here" in s for s in said)


@pytest.mark.parametrize(
    ("models", "is_said"),
    [(("/models/Qwen2.5-7B/", "qwen2.5-7b"), False), (("a", "b"), True), (("", "b"), False)],
)
def test_models_of_different_names_are_said(changed, models, is_said):
    def change(comparison):
        for contender, model in zip(comparison.contenders, models, strict=True):
            contender.model = model

    said = any("llamacpp a, tailrace b" in text for text in cautions(changed(change)))
    assert said == is_said


def test_a_contender_of_several_versions_is_named(changed):
    def change(comparison):
        comparison.contenders[1].versions = ["0.23.0", "0.24.0"]

    assert any(
        "tailrace was measured in several versions (0.23.0, 0.24.0): its figures mix" in text
        for text in cautions(changed(change))
    )


def test_deaths_and_invalid_trials_are_said_before_any_figure(changed):
    def change(comparison):
        comparison.trials[0].reasons = ["the client was late"]

    said = " ".join(cautions(changed(change)))
    assert "1 of 12 trials are invalid" in said
    assert "llamacpp died once" in said


def test_a_stay_that_was_lost_is_said_before_any_figure(changed):
    def change(comparison):
        comparison.contenders[0].cautions = ["not measured to the end in pair 2: gone"]

    assert any(
        "not measured to the end in pair 2: gone" in text for text in cautions(changed(change))
    )


def test_limits_are_written_in_the_units_people_use():
    limits = [read_limit(text) for text in ("p95_ttft=2", "p99.9_itl=0.25", "p99_e2e=30")]
    assert limits_in_words(limits) == (
        "P95 TTFT ≤ 2 s and P99.9 inter-token time ≤ 250 ms and P99 end-to-end time ≤ 30 s"
    )
