from __future__ import annotations

import math

import pytest

from tailrace.bench.root_cause import CAUSES, explain
from tailrace.errors import ConfigError
from tests.bench.scripted_trial import Script, reading, spaced, write_trial


def slow_in_a_hundred(**changes) -> list[Script]:
    """A hundred requests that never meet, of which the last five are slow."""
    return [*spaced(95), *(Script(due_s=200.0 + 9 * number, **changes) for number in range(5))]


@pytest.mark.parametrize(
    ("change", "cause", "word"),
    [
        ({"queue_s": 2.0}, "queue", "first step: 2 s on average, 1 ms in the median"),
        ({"lag_s": 2.0}, "client", "its own lateness"),
        ({"connect_s": 2.0}, "network", "connecting"),
        ({"ingest_s": 2.0}, "ingest", "tokenising"),
        ({"delivery_s": 2.0}, "emission", "from made to read"),
        ({"prefill_s": 2.0, "prompt_tokens": 2000}, "own_prefill", "2,000 against a median of 100"),
    ],
)
def test_the_cause_of_a_slow_first_token_is_found_in_the_request_log(tmp_path, change, cause, word):
    trial = write_trial(tmp_path, slow_in_a_hundred(**change))
    found = explain(tmp_path, trial)
    assert found.source == "request log"
    assert found.joined == 100
    for tail in found.tails:
        first = tail.causes[0]
        assert [request.index for request in tail.requests] == [95, 96, 97, 98, 99]
        assert (first.key, first.count) == (cause, 5)
        assert first.label == CAUSES[cause]
        assert first.examples == ("r95", "r96", "r97")
        assert word in first.evidence
        assert math.fsum(one.share for one in tail.causes) == pytest.approx(1)
        assert all(math.fsum(r.shares.values()) == pytest.approx(1) for r in tail.requests)
    ttft, e2e = found.tails
    assert ttft.causes[0].share > 0.85
    assert e2e.causes[0].share == pytest.approx(2.0 / 2.3, abs=0.06)
    assert (ttft.total, ttft.median_s) == (100, pytest.approx(0.1032, abs=1e-4))


def test_where_all_are_alike_no_cause_is_named(tmp_path):
    ttft, e2e = explain(tmp_path, write_trial(tmp_path, spaced(100))).tails
    for tail in (ttft, e2e):
        assert "hardly slower than the median: there is no slow tail to explain" in tail.sentence
        assert "mainly by" not in tail.sentence


def test_a_long_answer_makes_slow_only_where_it_is_longer_than_usual(tmp_path):
    """Decode takes most of everybody's time, and yet the queue is what sets the slow apart."""
    scripts = [
        *spaced(95, output_tokens=301),
        *(Script(due_s=500.0 + 9 * n, output_tokens=301, queue_s=1.0) for n in range(5)),
    ]
    _, e2e = explain(tmp_path, write_trial(tmp_path, scripts)).tails
    by_key = {cause.key: cause for cause in e2e.causes}
    assert by_key["own_decode"].share > by_key["queue"].share
    assert (by_key["queue"].count, by_key["own_decode"].count) == (5, 0)


def test_a_preempted_answer_says_how_often(tmp_path):
    trial = write_trial(tmp_path, slow_in_a_hundred(stall_s=2.0, preemptions=1))
    cause = explain(tmp_path, trial).tails[1].causes[0]
    assert (cause.key, cause.count) == ("preemption", 5)
    assert "preemptions by the request log: 5; their gaps beyond the usual: 2 s" in cause.evidence


def test_failed_requests_are_the_slowest(tmp_path):
    scripts = spaced(100)
    records = [script.record(number) for number, script in enumerate(scripts)]
    for record in records[40:43]:
        record.status, record.first_token_s, record.http_status = "http", None, 503
        record.error = "no room"
    trial = write_trial(tmp_path, scripts, records=records, has_log=False)
    ttft, _ = explain(tmp_path, trial).tails
    first = ttft.causes[0]
    assert (first.key, first.count) == ("failed", 3)
    assert first.evidence == (
        '3 of 100 requests failed; among the slow: 3 HTTP 503; most often "no room"'
    )
    assert [request.value_s for request in ttft.requests[:3]] == [math.inf] * 3
    assert math.isfinite(ttft.threshold_s)


def test_all_failed_and_nothing_ended(tmp_path):
    scripts = spaced(3)
    records = [script.record(number) for number, script in enumerate(scripts)]
    for record in records:
        record.status = "timeout"
    trial = write_trial(tmp_path / "failed", scripts, records=records, has_log=False)
    tail = explain(tmp_path / "failed", trial).tails[0]
    assert math.isinf(tail.threshold_s)
    assert "all of them failed; median failed" in tail.sentence
    for record in records:
        record.status = "cancelled"
    trial = write_trial(tmp_path / "ended", scripts, records=records, has_log=False)
    assert explain(tmp_path / "ended", trial).tails == ()


def test_without_a_log_readings_tell_and_the_notes_say_what_is_missing(tmp_path):
    readings = [
        reading("server", at_s, waiting=float(at_s >= 199), kv_usage=0.99 if at_s >= 199 else 0.3)
        for at_s in range(260)
    ]
    trial = write_trial(tmp_path, slow_in_a_hundred(queue_s=3.0), readings=readings, has_log=False)
    found = explain(tmp_path, trial)
    assert (found.source, found.joined) == ("records and readings", 0)
    assert found.tails[0].causes[0].key == "queue"
    names = {signal.name: signal for signal in found.signals}
    full = names["KV cache above 95% until its first token"]
    assert (full.slow_share, full.other_share) == (1.0, 0.0)
    assert "5 of 5 slow requests, 0% of the others" in full.sentence
    notes = " ".join(found.notes)
    assert "no request log" in notes
    assert "preemptions while it was served" in notes
    assert found.drafts.startswith("No draft tokens")


def test_records_alone_leave_the_server_unknown(tmp_path):
    trial = write_trial(tmp_path, slow_in_a_hundred(queue_s=3.0), has_log=False)
    found = explain(tmp_path, trial)
    assert found.source == "records"
    assert found.tails[0].causes[0].key == "unknown"
    assert found.kv_shape == "not known"


def test_the_trials_own_folder_will_do_and_a_missing_one_is_named(tmp_path):
    trial = write_trial(tmp_path, spaced(20))
    assert explain(tmp_path / trial.folder, trial) == explain(tmp_path, trial)
    with pytest.raises(ConfigError, match=r"elsewhere/records\.jsonl"):
        explain(tmp_path / "elsewhere", trial)
