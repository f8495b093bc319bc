from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path

import pytest

from tailrace.bench.launch import LocalServer
from tailrace.errors import EngineError

MOCK = (sys.executable, str(Path(__file__).with_name("mock_server.py")))

pytestmark = pytest.mark.e2e


def local(tmp_path, *arguments, **fields) -> LocalServer:
    fields = {"ready_timeout_s": 60.0, "stop_timeout_s": 60.0} | fields
    return LocalServer(arguments, log_file=tmp_path / "log", command=MOCK, **fields)


def has_ended(server: LocalServer) -> bool:
    try:
        os.kill(server._process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_server_is_ready_inside_the_block_and_gone_after_it(tmp_path):
    with local(tmp_path) as server:
        with urllib.request.urlopen(server.url + "/v1/models") as answer:  # noqa: S310  # our own
            assert answer.status == 200
        assert "--port" in server.command
    assert has_ended(server)
    assert "serving at" in server.log_file.read_text()


def test_a_server_that_ends_early_is_an_error_with_its_last_words(tmp_path):
    with (
        pytest.raises(EngineError, match=r"status 4(.|\n)*no weights"),
        local(tmp_path, "--stillborn"),
    ):
        pytest.fail("the block must not run")


def test_a_server_that_is_never_ready_is_killed(tmp_path):
    server = local(tmp_path, "--never-ready", ready_timeout_s=2.0)
    with pytest.raises(EngineError, match="not ready within 2 s"), server:
        pytest.fail("the block must not run")
    assert has_ended(server)


def test_an_exit_status_other_than_0_is_an_error(tmp_path):
    with (
        pytest.raises(EngineError, match="ended with status 7"),
        local(tmp_path, "--exit-status", "7"),
    ):
        pass


def test_a_server_that_ignores_sigterm_is_killed_and_told_of(tmp_path):
    server = local(tmp_path, "--stubborn", stop_timeout_s=0.5)
    with pytest.raises(EngineError, match="was killed"), server:
        pass
    assert has_ended(server)


def test_an_error_inside_the_block_is_not_hidden_by_the_servers(tmp_path):
    with pytest.raises(KeyError), local(tmp_path, "--exit-status", "7"):
        raise KeyError
