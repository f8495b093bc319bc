"""The whole harness against a scripted server."""

from __future__ import annotations

import io
import json
import os
import signal
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from tailrace.bench.limits import read_limit
from tailrace.bench.monitor import read_readings
from tailrace.bench.records import read_records
from tailrace.bench.replay import ReplayOptions, command_line, replay
from tailrace.errors import ConfigError
from tests.bench.mock_server import Behaviour, running

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("matplotlib", reason="the report's pictures need it")

QUICK = Behaviour(ttft_s=0.02, gap_s=0.001)


@pytest.fixture
def trace(tmp_path) -> Path:
    file = tmp_path / "trace.csv"
    rows = [f"{0.05 * i},{40 + i},{5 + i % 3}" for i in range(12)]
    file.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    return file


def run(trace, tmp_path, server, **changes):
    """Return the outcome and what was printed. The lag bound is wide: the machine is shared."""
    stream = io.StringIO()
    fields = {"out_dir": tmp_path / "out", "max_lag_s": 5.0, "timeout_s": 30.0} | changes
    options = ReplayOptions(trace=str(trace), url=server.url, **fields)
    return replay(options, console=Console(file=stream, width=160)), stream.getvalue()


def test_a_replay_sends_the_traces_lengths_and_leaves_records_summary_and_report(trace, tmp_path):
    with running(script=lambda _: QUICK) as server:
        outcome, shown = run(trace, tmp_path, server, seed=100)
    assert outcome.exit_code == 0
    sent = sorted((b for b in server.completions if "seed" in b), key=lambda b: b["seed"])
    assert [body["seed"] for body in sent] == list(range(100, 112))
    assert [len(server.codec.encode_now(body["prompt"])) for body in sent] == list(range(40, 52))
    assert [body["max_tokens"] for body in sent] == [5 + i % 3 for i in range(12)]
    records = read_records(outcome.records_file)
    assert [record.status for record in records] == ["ok"] * 12
    assert [record.input_tokens for record in records] == list(range(40, 52))
    summary = json.loads(outcome.summary_file.read_text())
    assert summary["valid"] is True
    assert summary["completed"] == 12
    page = outcome.report_file.read_text()
    assert "Valid run; all 12 requests complete" in page
    assert "Time to first token" in shown
    assert f"report: {outcome.report_file}" in shown


def test_nothing_is_tokenised_during_the_run(trace, tmp_path):
    with running(script=lambda _: QUICK) as server:
        run(trace, tmp_path, server)
    first = server.paths.index("/v1/completions")
    assert "/tokenize" in server.paths[:first]
    assert {"/tokenize", "/detokenize"}.isdisjoint(server.paths[first:])


def test_the_servers_gauges_are_read_during_the_run(trace, tmp_path):
    with running(script=lambda _: QUICK) as server:
        outcome, _ = run(trace, tmp_path, server)
    assert outcome.run.scrape.values["kv_usage"][0] == 0.25


def test_failed_requests_give_status_1_and_are_in_the_report(trace, tmp_path):
    script = {3: Behaviour(fault="refuse"), 5: Behaviour(fault="cut")}
    with running(script=lambda index: script.get(index, QUICK)) as server:
        outcome, shown = run(trace, tmp_path, server)
    assert outcome.exit_code == 1
    assert "Failed: 2 (1 http, 1 stream)" in shown
    assert "HTTP 503" in outcome.report_file.read_text()


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (Behaviour(tokens_off=1), "INVALID: prompt lengths: 12 of 12"),
        (Behaviour(fault="no_usage"), "12 carry no usage"),
        (Behaviour(cached_tokens=30), "prompt tokens cached"),
    ],
)
def test_a_run_of_other_work_than_asked_for_is_invalid_and_says_so_first(
    trace, tmp_path, behaviour, words
):
    with running(script=lambda _: behaviour) as server:
        outcome, shown = run(trace, tmp_path, server)
    assert outcome.exit_code == 3
    assert words in shown
    assert shown.index("INVALID") < shown.index("Time to first token")
    assert json.loads(outcome.summary_file.read_text())["valid"] is False


def test_a_client_that_is_too_late_makes_the_run_invalid(trace, tmp_path):
    with running(script=lambda _: QUICK) as server:
        outcome, shown = run(trace, tmp_path, server, max_lag_s=1e-9)
    assert outcome.exit_code == 3
    assert "INVALID: the client was late: p99 dispatch lag" in shown


def test_percentile_limits_are_judged_in_table_and_summary(trace, tmp_path):
    limits = (read_limit("p95_ttft=20"), read_limit("p50_e2e=0.001"))
    with running(script=lambda _: QUICK) as server:
        outcome, shown = run(trace, tmp_path, server, limit=limits)
    assert "Limit p95_ttft=20: holds" in shown
    assert "Limit p50_e2e=0.001: FAILS" in shown
    assert "Good: all of them: 0 (0.000/s)" in shown
    summary = json.loads(outcome.summary_file.read_text())
    assert summary["limits"] == {"p95_ttft=20": True, "p50_e2e=0.001": False}
    assert summary["goodput"]["ttft <= 20 s"]["requests"] == 12
    # A limit that fails is an answer, not a fault of the run.
    assert outcome.exit_code == 0


def test_the_readings_of_a_replay_are_kept(trace, tmp_path):
    with running(script=lambda _: QUICK) as server:
        outcome, _ = run(trace, tmp_path, server)
    found = read_readings(tmp_path / "out" / "monitor.jsonl")
    assert found["server"].values["kv_usage"][0] == 0.25
    assert outcome.run.scrapes["server"].values["kv_usage"][0] == 0.25


def test_ctrl_c_keeps_what_was_measured_and_writes_the_report(trace, tmp_path):
    def script(index: int) -> Behaviour:
        if index == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return Behaviour(fault="silent") if index == 2 else QUICK

    with running(script=script) as server:
        outcome, shown = run(trace, tmp_path, server, rate_scale=0.5)
    assert outcome.exit_code == 130
    assert "INVALID: interrupted" in shown
    records = read_records(outcome.records_file)
    assert records[0].status == "ok"
    assert records[2].status == "cancelled"
    assert len(records) < 12
    assert outcome.report_file.is_file()


@pytest.mark.slow
def test_ctrl_c_reaches_every_client_process(trace, tmp_path):
    def script(index: int) -> Behaviour:
        if index == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return Behaviour(fault="silent") if index in {2, 3} else QUICK

    with running(script=script) as server:
        outcome, shown = run(trace, tmp_path, server, rate_scale=0.5, processes=2)
    assert outcome.exit_code == 130
    assert "INVALID: interrupted" in shown
    records = {record.index: record for record in read_records(outcome.records_file)}
    assert records[0].status == "ok"
    assert (records[2].status, records[3].status) == ("cancelled", "cancelled")
    assert len(records) < 12
    assert {record.worker for record in records.values()} == {0, 1}
    assert "died" not in shown


def test_a_request_beyond_the_context_is_refused_before_the_run(trace, tmp_path):
    with (
        running(context_tokens=50) as server,
        pytest.raises(ConfigError, match="clip with --max-input-tokens"),
    ):
        run(trace, tmp_path, server)
    assert server.completions == []
    with running(context_tokens=50, script=lambda _: QUICK) as server:
        outcome, _ = run(trace, tmp_path, server, max_input_tokens=43)
    assert outcome.exit_code == 0
    assert outcome.run.conditions["Clipped"].startswith("8 prompts, 0 outputs")


def test_nobody_at_the_url_is_refused_before_anything_else_is_done(trace, tmp_path):
    with running() as server:
        pass
    with pytest.raises(ConfigError, match="cannot connect"):
        run(trace, tmp_path, server)


@pytest.mark.parametrize(
    "change", [{"timeout_s": 0}, {"max_lag_s": 0}, {"temperature": 3}, {"temperature": -1}]
)
def test_options_that_mean_nothing_are_refused(change):
    with pytest.raises(ConfigError):
        ReplayOptions(trace="azure-conv", **change)


def test_the_api_key_is_not_in_the_report(trace, tmp_path):
    with running(script=lambda _: QUICK, api_key="s3cret") as server:
        outcome, shown = run(trace, tmp_path, server, api_key="s3cret")
    assert outcome.exit_code == 0
    assert "s3cret" not in shown + outcome.report_file.read_text()
    shown = command_line(["tailrace", "--api-key", "s3cret", "x y", "--api-key=s3cret"])
    assert shown == "tailrace --api-key ... 'x y' --api-key=..."


def test_a_key_in_the_command_of_a_server_is_not_in_the_report(monkeypatch):
    monkeypatch.setenv("A_KEY", "s3cret")
    shown = command_line(["tailrace", "--start", "vllm serve --api-key other --port {port}"])
    assert shown == "tailrace --start 'vllm serve --api-key ... --port {port}'"
    shown = command_line(["tailrace", "--api-key-env", "A_KEY", "--start", "serve s3cret"])
    assert shown == "tailrace --api-key-env A_KEY --start 'serve ...'"


def test_a_folder_that_cannot_be_made_is_refused(trace, tmp_path):
    (tmp_path / "file").write_text("")
    with running() as server, pytest.raises(ConfigError, match="give a folder to write to"):
        run(trace, tmp_path, server, out_dir=tmp_path / "file" / "out")
