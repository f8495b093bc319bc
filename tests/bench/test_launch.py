from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from tailrace.bench import launch
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


def test_a_ports_number_is_none_that_the_kernel_hands_out(tmp_path, monkeypatch):
    kernels = tmp_path / "range"
    monkeypatch.setattr(launch, "_KERNELS_PORTS", kernels)
    kernels.write_text("32768\t60999\n")
    ports = {launch.free_port() for _ in range(20)}
    assert len(ports) > 1
    assert all(20_000 <= port < 32_768 for port in ports)


@pytest.mark.parametrize("text", ["1024\t60999\n", "", "?"])
def test_where_the_kernel_leaves_none_it_is_asked_for_one(tmp_path, monkeypatch, text):
    kernels = tmp_path / "range"
    monkeypatch.setattr(launch, "_KERNELS_PORTS", kernels)
    kernels.write_text(text)
    assert launch.free_port() > 0
    kernels.unlink()
    assert launch.free_port() > 0


def taken(used: socket.socket) -> int:
    """Bind to a port of those that servers get, wherever the kernel's own range lies."""
    for port in range(20_100, 32_000):
        with contextlib.suppress(OSError):
            used.bind(("127.0.0.1", port))
            return port
    pytest.fail("no free port of 12,000")


def test_a_port_that_is_used_is_left_out(monkeypatch):
    with socket.socket() as used:
        first = taken(used)
        tried = itertools.chain([first - 20_000] * 2, itertools.count(1))
        monkeypatch.setattr(launch, "_first_of_kernel", lambda: 65_000)
        monkeypatch.setattr(launch.secrets, "randbelow", lambda _: next(tried))
        assert 20_000 < launch.free_port() < first
        monkeypatch.setattr(launch.secrets, "randbelow", lambda _: first - 20_000)
        with pytest.raises(EngineError, match="100 of 20000 to 64999 are all in use"):
            launch.free_port()


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
