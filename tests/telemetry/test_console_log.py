"""The log of a process, as it comes out of its standard error."""

import subprocess
import sys

import pytest

FAILS = """
import structlog
from tailrace.telemetry.console_log import configure_log

configure_log("{level}")
log = structlog.get_logger("x")

def fails(prompt):
    key = prompt.upper()
    raise ValueError("no" + key[:0])

log.info("begun", number=3)
try:
    fails("my secret" + " prompt")
except ValueError as error:
    log.error("failed", exc_info=error)
    log.exception("failed_again")
"""


@pytest.fixture(scope="module", params=["info", "error"])
def logged(request):
    code = FAILS.format(level=request.param)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return request.param, done.stderr


def test_a_traceback_holds_no_local_variables(logged):
    _, text = logged
    assert text.count("ValueError: no") == 2
    assert text.count("in fails") == 2
    assert "SECRET" not in text
    assert "my secret prompt" not in text


def test_lines_below_the_level_are_left_out(logged):
    level, text = logged
    assert ("begun" in text) == (level == "info")
    assert "\x1b[" not in text  # no colours where nobody looks
