"""`tailrace bench replay` against a real server: records, and a report that needs no network."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib", reason="the report's pictures need it: pip install '.[bench]'")
pytestmark = pytest.mark.e2e

REQUESTS = 8


def test_a_replay_leaves_records_and_a_self_contained_report(tiny_server, tmp_path):
    out = tmp_path / "replay"
    command = [sys.executable, "-m", "tailrace", "bench", "replay", "azure-conv"]
    command += ["--max-requests", str(REQUESTS), "--max-input-tokens", "400"]
    command += ["--max-output-tokens", "40", "--rate-scale", "0.8", "--out", str(out)]
    # The client shares this machine's cores with the server and with other tests.
    command += ["--max-lag", "10"]
    with tiny_server() as server:
        done = subprocess.run(
            [*command, "--url", server.url],
            capture_output=True,
            check=False,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Time to first token" in done.stdout

    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert len(records) == REQUESTS
    summary = json.loads((out / "summary.json").read_text())
    assert summary["valid"] is True

    report = (out / "report.html").read_text("utf-8")
    assert "<svg" in report or "data:image/" in report
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']([^"'#][^"']*)""", report)
    assert [where for where in loaded if not where.startswith("data:")] == []
    assert "<script src" not in report
    assert "@import" not in report
