"""Two Locust load scripts, written by people who have never heard of Tailrace: no failure."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data import topics

import pytest

# Not importorskip: importing locust patches this process's threads and sockets for gevent.
if importlib.util.find_spec("locust") is None:
    pytest.skip("locust is not installed: pip install -e '.[bench]'", allow_module_level=True)
pytestmark = pytest.mark.e2e

SCRIPTS = Path(__file__).with_name("locustfiles")


@pytest.fixture
def run_locust(server, tmp_path):
    """Run a script headless; return requests and failures by name."""

    def run(script: str, *, users: int, seconds: int, **environment: str) -> dict[str, dict]:
        environment |= {"PYTHONWARNINGS": "ignore"}  # gevent's are none of ours
        command = [sys.executable, "-m", "locust", "-f", str(SCRIPTS / script), "--headless"]
        command += ["-u", str(users), "-r", "10", "-t", f"{seconds}s", "--stop-timeout", "120"]
        command += ["--host", server.url, "--json", "--only-summary"]
        done = subprocess.run(
            command,
            env=os.environ | environment,
            cwd=tmp_path,
            capture_output=True,
            check=False,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return {row["name"]: row for row in json.loads(done.stdout)}

    return run


def counts(row: dict[str, str]) -> tuple[int, int]:
    return row["num_requests"], row["num_failures"]


def logged_prompts() -> list[dict]:
    """1000 prompts that end amid a paragraph, so that a model has more than 10 tokens to say."""
    words = re.sub(r"[^a-z ]+", " ", topics.topics["exceptions"] + topics.topics["import"]).split()
    starts = itertools.cycle(range(0, len(words) - 200, 37))
    return [
        {
            "prompt": "Chapter one. " + " ".join(words[start : start + 40 + number % 120]),
            "output_tokens": 16 + number % 16,
        }
        for number, start in zip(range(1000), starts, strict=False)
    ]


def test_the_script_of_text_1_streams_without_a_failure(run_locust, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(p) + "\n" for p in logged_prompts()), "utf-8")
    rows = run_locust("text1.py", users=6, seconds=5, PROMPTS=str(prompts))
    requests, failures = counts(rows["generate"])
    assert failures == 0
    assert requests >= 6
    assert counts(rows["first token"]) == counts(rows["end to end"]) == (requests, 0)
    first, whole = (rows[name]["total_response_time"] for name in ("first token", "end to end"))
    assert 0 < first < whole


def test_the_script_of_text_2_reads_the_latency_of_each_answer(run_locust):
    rows = run_locust("text2.py", users=3, seconds=5, OUTPUT_TOKENS="24")
    requests, failures = counts(rows["/generate"])
    assert failures == 0
    assert requests >= 3
    breaches = rows.get("over 300 ms")
    if breaches is not None:  # on any machine that needs more than 12 ms a token
        assert breaches["min_response_time"] > 300
        assert counts(breaches)[0] <= requests
