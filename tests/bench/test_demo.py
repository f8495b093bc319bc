from __future__ import annotations

import functools
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tailrace.bench import demo
from tailrace.bench.launch import LocalServer
from tailrace.errors import EngineError

pytest.importorskip("matplotlib", reason="the report's pictures need it")
pytestmark = pytest.mark.e2e

MOCK = (sys.executable, str(Path(__file__).with_name("mock_server.py")))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the demo with a scripted server in the place of `tailrace serve`."""
    local = functools.partial(LocalServer, command=MOCK, ready_timeout_s=60.0)
    monkeypatch.setattr(demo, "LocalServer", local)
    monkeypatch.setattr(demo, "MAX_LAG_S", 5.0)

    def go(*server_arguments: str) -> tuple[int, str]:
        stream = io.StringIO()
        status = demo.run_demo(
            tmp_path,
            duration_s=1.5,
            rate_rps=6.0,
            server_arguments=server_arguments,
            console=Console(file=stream, width=160),
        )
        return status, stream.getvalue()

    return go


def test_the_demo_prints_a_table_and_the_reports_path_and_ends_well(run, tmp_path):
    status, shown = run()
    assert status == 0
    assert "Time to first token" in shown
    assert f"report: {tmp_path / 'report.html'}" in shown
    assert json.loads((tmp_path / "summary.json").read_text())["valid"] is True
    assert (tmp_path / "server.log").is_file()


def test_a_failed_request_makes_the_demo_fail(run):
    assert run("--fault", "cut")[0] != 0


def test_a_server_that_ends_badly_makes_the_demo_fail(run):
    with pytest.raises(EngineError, match="status 7"):
        run("--exit-status", "7")
