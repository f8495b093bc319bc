from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.bench.anatomy import CAUSES, LogLine, _Flow, dissect, join, read_log
from tailrace.bench.scrape import Scrape
from tests.bench.scripted_trial import LOG_ZERO_S, Script, spaced

STAMPS = (
    "received_s",
    "prompt_ready_s",
    "submitted_s",
    "scheduled_s",
    "first_token_s",
    "last_token_s",
    "finished_s",
)
"""Of a line, all counted from one zero."""
DELAYS = st.floats(1e-5, 0.5)


def dissected(scripts, *, has_log=True, server=None):
    records = [script.record(number) for number, script in enumerate(scripts)]
    lines = [line_of(script, number) for number, script in enumerate(scripts)] if has_log else []
    log, _ = join(records, lines)
    assert (log is not None) is has_log
    return dissect(records, log, server)


def line_of(script, number, **changes) -> LogLine:
    return LogLine(**(msgspec.structs.asdict(script.line(number)) | changes))


def waiting(*values) -> Scrape:
    """One reading a second."""
    scrape = Scrape()
    for at_s, value in enumerate(values):
        scrape.add(float(at_s), {"waiting": float(value)})
    return scrape


@given(
    connect_s=st.lists(DELAYS, min_size=1, max_size=9), delivery_s=DELAYS, zero_s=st.floats(0, 1e6)
)
def test_the_distance_of_the_clocks_lies_within_the_stated_error(connect_s, delivery_s, zero_s):
    scripts = [
        Script(due_s=float(number), connect_s=connect, delivery_s=delivery_s)
        for number, connect in enumerate(connect_s)
    ]
    records = [script.record(number) for number, script in enumerate(scripts)]
    lines = []
    for number, script in enumerate(scripts):
        line = line_of(script, number)
        for name in STAMPS:
            setattr(line, name, getattr(line, name) - LOG_ZERO_S + zero_s)
        lines.append(line)
    log, why = join(records, lines)
    assert not why
    assert abs(log.offset_s - zero_s) <= log.error_s + 1e-6


def test_clocks_that_contradict_each_other_are_not_joined():
    scripts = spaced(4)
    records = [script.record(number) for number, script in enumerate(scripts)]
    # The server's clock runs fast: a millisecond more with each request.
    lines = [
        line_of(
            script,
            number,
            received_s=script.line(number).received_s - 0.01 * number,
            prompt_ready_s=script.line(number).prompt_ready_s - 0.01 * number,
        )
        for number, script in enumerate(scripts)
    ]
    log, why = join(records, lines)
    assert log is None
    assert "contradicts" in why


def test_a_log_is_joined_by_the_clients_own_id():
    script = Script(due_s=0.0)
    records = [script.record(0)]
    unknown = line_of(script, 0, request_id="cmpl-1")
    log, why = join(records, [unknown])
    assert log is None
    assert "X-Request-Id" in why
    log, _ = join(records, [line_of(script, 0, request_id="cmpl-1", http_request_id="r0")])
    assert log.lines[0].request_id == "cmpl-1"
    assert join(records, []) == (None, "no request log")


def test_torn_lines_of_a_log_are_counted(tmp_path):
    file = tmp_path / "requests.jsonl"
    line = msgspec.json.encode(Script(due_s=0.0).line(0))
    file.write_bytes(line + b"\n" + line[:40] + b"\n")
    found, torn = read_log(file)
    assert [record.request_id for record in found] == ["r0"]
    assert torn == 1
    assert read_log(tmp_path / "missing") == ([], 0)


SCRIPTS = st.lists(
    st.builds(
        Script,
        due_s=st.floats(0, 20),
        lag_s=DELAYS,
        connect_s=DELAYS,
        ingest_s=DELAYS,
        queue_s=DELAYS,
        prefill_s=DELAYS,
        delivery_s=DELAYS,
        token_s=st.floats(1e-4, 0.05),
        prompt_tokens=st.integers(1, 4000),
        output_tokens=st.integers(1, 30),
        preemptions=st.integers(0, 2),
        stall_s=DELAYS,
        closing_s=DELAYS,
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=50)
@given(scripts=SCRIPTS, has_log=st.booleans(), crowd=st.booleans())
def test_the_pieces_of_a_request_sum_to_its_latency(scripts, has_log, crowd):
    server = waiting(*[int(crowd)] * 30)
    for request in dissected(scripts, has_log=has_log, server=server).requests:
        record = request.record
        assert sum(request.ttft.values()) == pytest.approx(
            record.first_token_s - record.scheduled_s, abs=1e-6
        )
        assert sum(request.e2e.values()) == pytest.approx(
            record.finished_s - record.scheduled_s, abs=1e-6
        )
        assert all(seconds > 0 for seconds in request.e2e.values())
        assert list(request.e2e) == [cause for cause in CAUSES if cause in request.e2e]


@pytest.mark.parametrize(
    ("change", "cause", "seconds"),
    [
        ({"lag_s": 0.7}, "client", 0.7),
        ({"connect_s": 0.7}, "network", 0.7),
        ({"ingest_s": 0.7}, "ingest", 0.7),
        ({"queue_s": 0.7}, "queue", 0.7),
        ({"prefill_s": 0.8, "prompt_tokens": 800}, "own_prefill", 0.8),
        ({"delivery_s": 0.7}, "emission", 0.7),
    ],
)
def test_each_delay_before_the_first_token_goes_to_its_cause(change, cause, seconds):
    scripts = [*spaced(20), Script(due_s=60.0, **change)]
    last = dissected(scripts).requests[-1]
    assert last.ttft[cause] == pytest.approx(seconds, abs=0.002)
    assert last.e2e[cause] >= last.ttft[cause]


def test_a_long_answer_is_its_own_and_a_slow_one_is_not():
    scripts = [
        *spaced(20),
        Script(due_s=60.0, output_tokens=101),
        Script(due_s=80.0, token_s=0.05),
        Script(due_s=100.0, stall_s=0.8, preemptions=1),
        Script(due_s=120.0, prefill_s=0.9, preemptions=1),
    ]
    long, slow, preempted, before = dissected(scripts).requests[-4:]
    assert long.e2e["own_decode"] == pytest.approx(1.0)
    assert "unknown" not in long.e2e
    # Alone on the machine, nothing that is logged explains a pace five times the usual.
    assert slow.e2e["own_decode"] == pytest.approx(0.2)
    assert slow.e2e["unknown"] == pytest.approx(0.8)
    assert preempted.e2e["preemption"] == pytest.approx(0.8)
    assert "preemption" not in preempted.ttft
    # No gap in the stream shows it, so it came before the first token.
    assert before.ttft["preemption"] == pytest.approx(0.8)


def test_prompts_of_others_are_charged_at_the_trials_own_pace():
    # Two prompts of equal length share the steps: each takes twice as long as alone.
    together = [
        Script(due_s=60.0, prefill_s=1.0, prompt_tokens=500),
        Script(due_s=60.0, prefill_s=1.0, prompt_tokens=500),
    ]
    requests = dissected([*spaced(20), *together]).requests
    for request in requests[-2:]:
        assert request.ttft["own_prefill"] == pytest.approx(0.5, rel=0.02)
        assert request.ttft["others_prefill"] == pytest.approx(0.5, rel=0.02)
        assert request.waiting.tokens == pytest.approx(500, rel=0.02)


def test_prompts_of_others_explain_no_more_than_they_cost():
    together = [Script(due_s=60.0, prefill_s=1.5, prompt_tokens=500) for _ in range(2)]
    request = dissected([*spaced(20), *together]).requests[-1]
    assert request.ttft["others_prefill"] == pytest.approx(0.5, rel=0.02)
    assert request.ttft["unknown"] == pytest.approx(0.5, rel=0.02)


def test_the_usual_amount_of_others_prompts_does_not_explain_a_slow_answer():
    """Every answer meets the next request's prompt; the slow one meets no more of them a second."""
    scripts = [Script(due_s=0.15 * number) for number in range(60)]
    scripts[20].token_s = 0.05
    slow = dissected(scripts).requests[20]
    assert slow.answering.tokens > 300
    while_answering = slow.e2e.get("others_prefill", 0.0) - slow.ttft.get("others_prefill", 0.0)
    assert while_answering < 0.2
    # Twice as many prompts a second would.
    crowded = [*scripts, *(Script(due_s=3.1 + 0.15 * number) for number in range(6))]
    slow = dissected(crowded).requests[20]
    assert slow.e2e["others_prefill"] - slow.ttft.get("others_prefill", 0.0) > 0.4


def test_a_slow_answer_beside_more_streams_than_usual_is_slowed_by_the_batch():
    crowd = [Script(due_s=60.0 + 0.2 * n, token_s=0.05) for n in range(4)]
    requests = dissected([*spaced(20), *crowd]).requests
    assert requests[-2].answering.streams > 1
    assert requests[-2].e2e["batch"] > 0.5


def test_without_a_log_queueing_is_told_by_readings_and_else_not_known():
    scripts = [*spaced(10), Script(due_s=30.0, queue_s=3.0)]
    alone = dissected(scripts, has_log=False).requests[-1]
    assert alone.ttft["unknown"] == pytest.approx(3.0, abs=0.01)
    seen = dissected(scripts, has_log=False, server=waiting(*[0] * 30, *[2] * 5)).requests[-1]
    assert seen.ttft["queue"] == pytest.approx(3.0, abs=0.01)
    assert "unknown" not in seen.ttft
    partly = dissected(scripts, has_log=False, server=waiting(*[0] * 32, 2, 2)).requests[-1]
    assert partly.ttft["queue"] == pytest.approx(2.0, abs=0.01)  # in 2 of 3 readings
    # A request that meets nobody's queue is not charged with one.
    assert seen.ttft["own_prefill"] == pytest.approx(0.1, abs=0.01)


def test_too_few_requests_tell_no_pace():
    request = dissected(spaced(3)).requests[0]
    assert request.ttft["unknown"] == pytest.approx(0.1)


def test_failed_and_cancelled_requests():
    records = [script.record(number) for number, script in enumerate(spaced(3))]
    records[1].status, records[1].first_token_s, records[1].finished_s = "timeout", None, 32.0
    records[2].status = "cancelled"
    found = dissect(records, None).requests
    assert [request.record.index for request in found] == [0, 1]
    assert found[1].ttft == found[1].e2e == {"failed": 30.0}
    assert dissect([], None).requests == ()


@given(
    spans=st.lists(
        st.tuples(st.floats(0, 50), st.floats(0.01, 20), st.floats(0, 1e4)), min_size=1, max_size=9
    ),
    start_s=st.floats(-5, 60),
    width_s=st.floats(0, 30),
)
def test_amounts_between_two_moments_agree_with_adding_them_up(spans, start_s, width_s):
    end_s = start_s + width_s
    flow = _Flow(
        np.array([(start, start + width) for start, width, _ in spans]),
        np.array([amount for *_, amount in spans]),
    )
    inside = [
        amount * max(min(end_s, start + width) - max(start_s, start), 0.0) / width
        for start, width, amount in spans
    ]
    for index, own in enumerate(inside):
        assert flow.others(index, start_s, end_s) == pytest.approx(sum(inside) - own, abs=1e-3)


def test_without_a_log_the_pace_comes_from_prompts_that_did_not_queue():
    scripts = [*spaced(6), *(Script(due_s=20.0 + 4 * n, queue_s=1.0 + n) for n in range(90))]
    server = waiting(*[0] * 15, *[1] * 500)
    assert dissected(scripts, has_log=False, server=server).pace_s == pytest.approx(1e-3, rel=0.05)
    # Where all queued, the fastest comes nearest.
    assert dissected(scripts[6:], has_log=False, server=server).pace_s == pytest.approx(
        0.011, rel=0.05
    )


@settings(max_examples=50)
@given(scripts=SCRIPTS, share=st.floats(0, 1), wait_s=DELAYS)
def test_the_pieces_sum_to_the_latency_where_the_log_tells_phases(scripts, share, wait_s):
    for script in scripts:
        script.others_s, script.decode_wait_s = share * script.prefill_s, wait_s
    for request in dissected(scripts).requests:
        record = request.record
        assert sum(request.ttft.values()) == pytest.approx(
            record.first_token_s - record.scheduled_s, abs=1e-6
        )
        assert sum(request.e2e.values()) == pytest.approx(
            record.finished_s - record.scheduled_s, abs=1e-6
        )
        assert all(seconds > 0 for seconds in request.e2e.values())


def test_what_the_engine_measured_is_taken_as_it_is():
    """Two requests: too few for any figure of the trial, and none is needed."""
    usual = Script(due_s=0.0, others_s=0.0)
    slow = Script(
        due_s=10.0,
        prefill_s=2.0,
        others_s=1.5,
        preemptions=1,
        stall_s=0.7,
        token_s=0.03,
        decode_wait_s=0.4,
    )
    _, request = dissected([usual, slow]).requests
    assert request.ttft["own_prefill"] == pytest.approx(0.5, abs=0.01)
    assert request.ttft["others_prefill"] == pytest.approx(1.5, abs=0.01)
    assert "preemption" not in request.ttft
    assert request.e2e["preemption"] == pytest.approx(0.7, abs=0.01)
    assert request.e2e["others_prefill"] == pytest.approx(1.9, abs=0.01)
    # Its own answer: the median of 10 ms and (600 - 400) / 20 ms a token.
    assert request.e2e["own_decode"] == pytest.approx(0.2, abs=0.01)
    assert "unknown" not in request.ttft
