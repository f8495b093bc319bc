"""A request log explained: the slowest, where their time went, and by what they were slow."""

import io
import random
import re

import msgspec
import pytest
from rich.console import Console

from tailrace.bench.explain import CAUSES, explain, length_class
from tailrace.bench.explain_table import print_explanation
from tailrace.bench.report.explain_page import write_page
from tailrace.errors import ConfigError
from tailrace.telemetry.phases import PHASES, Phases
from tailrace.telemetry.request_log import RequestRecord


def a_record(number, *, prompt_tokens=100, finish_reason="stop", status=200, **changes):
    """A request of 0.36 s to the first token and 1.37 s in all; `changes` are phases' seconds."""
    known = {
        "body": 0.01,
        "tokenise": 0.02,
        "admission": 0.0,
        "queue": 0.05,
        "prefill": 0.2,
        "prefill_wait": 0.05,
        "decode": 1.0,
        "preempted": 0.0,
        "emit": 0.03,
        "socket": 0.01,
    }
    whole = known | {name: seconds for name, seconds in changes.items() if name in PHASES}
    others = {name: value for name, value in changes.items() if name not in PHASES}
    to_first = whole | {"decode": 0.0, "socket": 0.0}
    total_s = sum(whole.values())
    return RequestRecord(
        request_id=f"cmpl-{number}",
        http_request_id=f"r{number}",
        route="/v1/completions",
        unix_s=1_700_000_000.0 + number,
        received_s=10.0 * number,
        finished_s=10.0 * number + total_s,
        prompt_tokens=prompt_tokens,
        finish_reason=finish_reason,
        status=status,
        phases=Phases(**{f"{name}_s": seconds for name, seconds in whole.items()}),
        ttft_phases=Phases(**{f"{name}_s": seconds for name, seconds in to_first.items()})
        if finish_reason == "stop"
        else None,
        **others,
    )


def write(file, records):
    file.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return file


def a_log(tmp_path, *slow):
    """A hundred requests, of which the last are slow."""
    usual = [a_record(number) for number in range(100 - len(slow))]
    return write(tmp_path / "requests.jsonl", [*usual, *slow])


def tails(found):
    return {(tail.metric, tail.share): tail for tail in found.tails}


@pytest.mark.parametrize("phase", [name for name in PHASES if name not in ("decode", "socket")])
def test_the_phase_that_made_them_slow_is_the_cause(tmp_path, phase):
    slow = [a_record(95 + n, prompt_tokens=4000, **{phase: 3.0 + n}) for n in range(5)]
    found = tails(explain([a_log(tmp_path, *slow)]))
    for metric in ("ttft", "e2e"):
        tail = found[metric, 0.05]
        first = tail.causes[0]
        assert (first.phase, first.count) == (phase, 5)
        assert first.examples == ("r99", "r98", "r97")
        assert first.mean_s == pytest.approx(5.0)
        assert tail.slow.count == 5
        assert sum(tail.slow.phases.values()) == pytest.approx(tail.slow.mean_s)
        assert sum(tail.slow.share(name) for name in CAUSES) == pytest.approx(1)
        assert [(row.name, row.total, row.slow.count) for row in tail.lengths] == [(">3K", 5, 5)]
        assert found[metric, 0.01].slow.count == 1
        assert found[metric, 0.01].threshold_s > tail.threshold_s > tail.median_s
        assert PHASES[phase] in tail.sentence


def test_a_long_answer_is_no_cause_where_everybodys_is_long(tmp_path):
    slow = [a_record(95 + n, queue=2.0) for n in range(5)]
    usual = [a_record(n, decode=30.0) for n in range(95)]
    records = [*usual, *(msgspec.structs.replace(record) for record in slow)]
    records = [
        record
        if n < 95
        else msgspec.structs.replace(
            record, phases=msgspec.structs.replace(record.phases, decode_s=30.0)
        )
        for n, record in enumerate(records)
    ]
    tail = tails(explain([write(tmp_path / "log", records)]))["e2e", 0.05]
    by_phase = {row.phase: row for row in tail.causes}
    assert by_phase["decode"].share > by_phase["queue"].share
    assert (by_phase["queue"].count, by_phase["decode"].count) == (5, 0)


def test_an_answer_that_waited_for_prompts_of_others_was_not_slow_by_itself(tmp_path):
    slow = [a_record(95 + n, decode=4.0, decode_wait_s=3.0) for n in range(4)]
    slow.append(a_record(99, decode=9.0, decode_wait_s=0.0))
    found = tails(explain([a_log(tmp_path, *slow)]))
    tail = found["e2e", 0.05]
    assert [(row.phase, row.count) for row in tail.causes][:2] == [
        ("decode_wait", 4),
        ("decode", 1),
    ]
    assert tail.slow.phases["decode_wait"] == pytest.approx(12 / 5)
    assert sum(tail.slow.phases.values()) == pytest.approx(tail.slow.mean_s)
    # Before the first token there is no answer that could wait.
    assert found["ttft", 0.05].slow.phases["decode_wait"] == 0


def test_slow_requests_are_told_by_the_length_of_their_prompts(tmp_path):
    slow = [
        a_record(95, prompt_tokens=500, queue=9.0),
        a_record(96, prompt_tokens=2000, prefill=8.0),
        a_record(97, prompt_tokens=2000, prefill=6.0),
        a_record(98, prompt_tokens=9000, prefill=5.0),
        a_record(99, prompt_tokens=9000, prefill=7.0),
    ]
    tail = tails(explain([a_log(tmp_path, *slow)]))["ttft", 0.05]
    rows = {row.name: row for row in tail.lengths}
    assert {name: (row.slow.count, row.total) for name, row in rows.items()} == {
        "<1K": (1, 96),
        "1-3K": (2, 2),
        ">3K": (2, 2),
    }
    assert rows["1-3K"].slow.phases["prefill"] == pytest.approx(7.0)
    assert rows["<1K"].slow.share("queue") > 0.9
    assert [(row.phase, row.count) for row in tail.causes][:2] == [("prefill", 4), ("queue", 1)]


def test_length_classes_meet_without_a_gap():
    named = [length_class(tokens) for tokens in (0, 1023, 1024, 3071, 3072, 10**9)]
    assert named == ["<1K", "<1K", "1-3K", "1-3K", ">3K", ">3K"]


def test_rotated_files_are_read_and_damaged_lines_counted(tmp_path):
    log = tmp_path / "requests.jsonl"
    write(tmp_path / "requests.jsonl.2", [a_record(n) for n in range(3)])
    write(tmp_path / "requests.jsonl.1", [a_record(n) for n in range(3, 5)])
    line = msgspec.json.encode(a_record(5))
    log.write_bytes(line[:30] + b"\n" + line + b"\n\xff\xfe\n{}\n\n" + line[:-20])
    found = explain([log])
    assert found.total == found.answered == 6
    assert [file.rsplit("requests", 1)[1] for file in found.files] == [
        ".jsonl.2",
        ".jsonl.1",
        ".jsonl",
    ]
    assert "4 damaged lines were left out" in found.notes
    assert any("only 6 requests" in note for note in found.notes)


def test_records_of_an_earlier_version_are_left_out_and_counted(tmp_path):
    old = msgspec.structs.replace(a_record(0), phases=None, ttft_phases=None)
    log = write(tmp_path / "log", [old, a_record(1)])
    found = explain([log])
    assert found.total == 1
    assert "1 records of an earlier version have no phases and were left out" in found.notes
    with pytest.raises(ConfigError, match="no record with phases among 1"):
        explain([write(log, [old])])


def test_a_log_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match="missing: there is no such request log"):
        explain([tmp_path / "missing"])


def test_requests_without_a_whole_answer_are_in_no_tail_and_told_beside(tmp_path):
    cut = [
        a_record(200, finish_reason="disconnect", queue=50.0, status=499),
        a_record(201, finish_reason="disconnect", queue=70.0, status=499),
        a_record(202, finish_reason="refused", body=30.0, status=408, reason="request timeout: x"),
    ]
    log = write(tmp_path / "log", [*(a_record(n) for n in range(20)), *cut])
    found = explain([log])
    assert (found.total, found.answered) == (23, 20)
    assert all(tail.threshold_s < 2 for tail in found.tails)
    gone, refused = found.endings
    assert (gone.finish_reason, gone.status, gone.count, gone.phase) == (
        "disconnect",
        499,
        2,
        "queue",
    )
    assert (refused.status, refused.phase, refused.reason) == (408, "body", "request timeout: x")


def test_only_refusals_have_no_tail(tmp_path):
    log = write(tmp_path / "log", [a_record(1, finish_reason="refused", status=429)])
    found = explain([log])
    assert found.tails == ()
    assert len(found.endings) == 1


def test_the_error_of_predictions_is_noted(tmp_path):
    records = [a_record(n, predicted_ttft_s=0.36 + 0.1) for n in range(10)]
    notes = " ".join(explain([write(tmp_path / "log", records)]).notes)
    assert "predicted for 10 requests, and off by 100 ms at the median" in notes


def mixed(tmp_path):
    draw = random.Random(3)
    records = []
    for number in range(400):
        tokens = int(draw.lognormvariate(6.5, 1.2))
        others = draw.random() < 0.08
        records.append(
            a_record(
                number,
                prompt_tokens=tokens,
                queue=draw.expovariate(8),
                prefill=0.0004 * tokens,
                prefill_wait=draw.uniform(0.5, 3.0) if others else draw.expovariate(20),
                decode=draw.uniform(0.5, 4),
                preempted=draw.uniform(1, 5) if draw.random() < 0.02 else 0.0,
                socket=2.0 if number == 17 else 0.0,
                decode_wait_s=draw.expovariate(10),
            )
        )
    records[5].http_request_id = '<script>alert("id")</script>[bold]'
    records[5].phases = msgspec.structs.replace(records[5].phases, queue_s=99.0)
    records.append(
        a_record(900, finish_reason="refused", status=404, reason="model_not_found: <b>[red]x")
    )
    return write(tmp_path / "requests.jsonl", records)


def test_the_table_names_the_causes_and_takes_ids_as_text(tmp_path):
    log = mixed(tmp_path)
    hostile = a_record(901, finish_reason="error", status=500, reason="\x1b]0;title\x07\x1b[2J")
    log.write_bytes(log.read_bytes() + msgspec.json.encode(hostile))
    console = Console(width=200, file=io.StringIO())
    print_explanation(explain([log]), console)
    text = console.file.getvalue()
    assert "\x1b" not in text
    assert "The slowest 5% by time to first token (20 of 400;" in text
    assert "prompts of others (prefill_wait)" in text
    assert '<script>alert("id")</script>[bold]' in text
    assert "model_not_found: <b>[red]x" in text


def test_the_page_is_whole_escaped_and_needs_nothing_else(tmp_path):
    file = tmp_path / "why.html"
    found = explain([mixed(tmp_path)])
    write_page(found, file)
    page = file.read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(?:src|href)=", page)
    assert not re.search(r"url\(", page)
    widths = re.findall(r'width:([\d.]+)%" title', page)
    assert widths
    assert max(map(float, widths)) <= 100.0
    for tail in found.tails:
        assert tail.sentence.split("(")[0] in page.replace("\N{NO-BREAK SPACE}", " ")
    with pytest.raises(ConfigError, match="--html"):
        write_page(found, tmp_path / "missing" / "why.html")
