"""`tailrace compare` as a user runs it: real processes, real sockets, a real report."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailrace.bench.compare import EXIT_INTERRUPTED, EXIT_NO_VERDICT, EXIT_OK
from tailrace.bench.result import read_result

ROOT = Path(__file__).parents[2]
MOCK = ROOT / "tests" / "bench" / "mock_server.py"

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PLAN = """
title = "Fast against slow"
pairs = {pairs}
tokenizer = "tokenizer.json"
max_lag_s = 1.0
canary = false

[traffic]
source = "chat70"
input_tokens = "12"
output_tokens = "5"

[limits]
p95_ttft = 0.5

[steady]
rates = [{rate}]
trial_s = {trial_s}

[[engine]]
name = "fast"
kind = "openai"
command = "{{PYTHON}} {{MOCK}} --host {{host}} --port {{port}} --ttft 0.02 {extra}"

[[engine]]
name = "slow"
kind = "openai"
command = "{{PYTHON}} {{MOCK}} --host {{host}} --port {{port}} --ttft 1.0"
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a tokenizer that counts as the mock server does: by words."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    from tailrace.bench.corpus import python_text  # noqa: PLC0415

    words = sorted(set(python_text().split()))
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def start(folder, *arguments, extra="", pairs=1, rate=8, trial_s=2):
    plan = folder / "plan.toml"
    plan.write_text(PLAN.format(extra=extra, pairs=pairs, rate=rate, trial_s=trial_s))
    return subprocess.Popen(
        [sys.executable, "-m", "tailrace", "compare", plan, "--out", folder / "out", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHON": sys.executable, "MOCK": str(MOCK)},
        cwd=folder,
    )


def finish(process):
    printed, _ = process.communicate(timeout=120)
    return printed


def mocks_of(process):
    """Return the pids of the mock servers that a comparison has started."""
    found = []
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has just ended
            if MOCK.name in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(int(pid))
    return found


def test_two_servers_are_compared_and_a_report_is_written(folder):
    process = start(folder, pairs=2)
    printed = finish(process)
    assert process.returncode == EXIT_OK, printed
    result = read_result(folder / "out")
    order = [t.contender for t in result.trials]
    assert order == ["fast", "slow", "slow", "fast"]
    outcomes = {t.contender: t.outcome for t in result.trials}
    assert outcomes["slow"] == "fails"
    assert outcomes["fast"] != "fails"
    assert all(t.reasons == [] for t in result.trials), result.trials
    assert result.contenders[0].command[-1] == "0.02"
    assert len(result.contenders[0].ready_s) == 2
    page = (folder / "out" / "report.html").read_text()
    assert "Fast against slow" in page
    assert json.loads((folder / "out" / "report.json").read_text())
    assert "report:" in printed


def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on(folder):
    process = start(folder, pairs=2, trial_s=3)
    deadline = time.monotonic() + 60
    # In the middle of the second trial.
    while not list((folder / "out").glob("trials/0002-*/records.jsonl")):
        assert time.monotonic() < deadline
        assert process.poll() is None, finish(process)
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    printed = finish(process)
    assert process.returncode == EXIT_INTERRUPTED, printed
    result = read_result(folder / "out")
    assert result.is_interrupted
    assert len(result.trials) == 2
    assert result.trials[0].reasons == []
    assert "interrupted" in result.trials[1].reasons[0]
    assert (folder / "out" / "report.html").exists()

    process = start(folder, "--resume", pairs=2, trial_s=3)
    printed = finish(process)
    assert process.returncode == EXIT_OK, printed
    resumed = read_result(folder / "out")
    assert len(resumed.trials) == 4
    assert resumed.trials[0] == result.trials[0]
    assert not resumed.is_interrupted


def test_a_server_that_does_not_start_is_one_readable_error(folder):
    process = start(folder, extra="--stillborn")
    printed = finish(process)
    assert process.returncode == 1
    assert "no weights to be found" in printed
    assert "Traceback" not in printed


def test_answers_of_the_wrong_length_are_no_verdict(folder):
    process = start(folder, extra="--fault no_usage")
    printed = finish(process)
    assert process.returncode == EXIT_NO_VERDICT, printed
    assert re.search(r"invalid trial: .*lengths", printed)


def test_ctrl_c_while_a_server_starts_leaves_no_process_behind(folder):
    process = start(folder, extra="--never-ready")
    deadline = time.monotonic() + 60
    while not (found := mocks_of(process)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # A moment later it is waited for, whatever made it visible.
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    printed = finish(process)
    assert process.returncode == EXIT_INTERRUPTED, printed
    assert "Traceback" not in printed
    assert not Path(f"/proc/{found[0]}").exists()


def test_a_server_that_is_killed_is_started_again_and_its_trial_repeated(folder):
    process = start(folder, trial_s=3)
    deadline = time.monotonic() + 60
    while not list((folder / "out").glob("trials/0001-*/records.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    (server,) = mocks_of(process)
    os.kill(server, signal.SIGKILL)
    printed = finish(process)
    assert process.returncode == EXIT_OK, printed
    result = read_result(folder / "out")
    assert [c.restarts for c in result.contenders] == [1, 0]
    died, repeated, other = result.trials
    assert "the server died in this trial" in died.reasons[0]
    assert "SIGKILL" in died.reasons[0]
    assert (repeated.contender, repeated.seed, repeated.reasons) == ("fast", died.seed, [])
    assert other.contender == "slow"
