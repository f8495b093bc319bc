"""Pipes as CUDA's driver makes them, with a reader in its place."""

import os
import socket

import pytest
from structlog.testing import capture_logs

from tailrace.engine.core_dump import PIPE, SWITCH, WAIT_S, ask_for_core_dump


@pytest.fixture
def reader():
    """Open a pipe as the driver does, for reading; give its descriptor."""
    opened = []

    def open_pipe(path):
        os.mkfifo(path)
        opened.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        return opened[-1]

    yield open_pipe
    for descriptor in opened:
        os.close(descriptor)


def asked(**environ):
    """Ask; return what was waited for and what was logged."""
    waits = []
    with capture_logs() as logs:
        ask_for_core_dump(environ, pause=waits.append)
    return waits, [line["event"] for line in logs]


def test_a_byte_in_the_named_pipe_asks_and_the_driver_is_given_time(tmp_path, reader):
    driver = reader(tmp_path / f"pipe.{socket.gethostname()}.{os.getpid()}")
    waits, events = asked(**{SWITCH: "1", PIPE: f"{tmp_path}/pipe.%h.%p"})
    assert os.read(driver, 10)
    assert waits == [WAIT_S]
    assert events == ["gpu_core_dump_asked"]


def test_the_usual_pipe_is_in_the_working_directory(tmp_path, reader, monkeypatch):
    monkeypatch.chdir(tmp_path)
    driver = reader(tmp_path / f"corepipe.cuda.{socket.gethostname()}.{os.getpid()}")
    asked(**{SWITCH: "1"})
    assert os.read(driver, 10)


def test_a_folder_may_have_the_hosts_name_and_other_letters_stand_for_themselves(tmp_path, reader):
    folder = tmp_path / socket.gethostname()
    folder.mkdir()
    others = reader(folder / f"cora{os.getpid()}")
    driver = reader(folder / f"cor.{os.getpid()}")
    asked(**{SWITCH: "1", PIPE: f"{tmp_path}/%h/cor.%p"})
    assert os.read(driver, 10)
    assert os.read(others, 10) == b""


def test_of_pipes_with_a_time_in_their_name_the_latest_is_ours(tmp_path, reader):
    drivers = {}
    for time_s in (100, 300, 200):
        path = tmp_path / f"pipe.{time_s}.{os.getpid()}"
        drivers[time_s] = reader(path)
        os.utime(path, (time_s, time_s))
    asked(**{SWITCH: "1", PIPE: f"{tmp_path}/pipe.%t.%p"})
    assert {time_s for time_s, driver in drivers.items() if os.read(driver, 10)} == {300}


@pytest.mark.parametrize("switch", [{}, {SWITCH: "0"}])
def test_a_process_that_was_not_started_for_it_asks_nobody(tmp_path, reader, switch):
    driver = reader(tmp_path / "pipe")
    assert asked(**switch, **{PIPE: f"{tmp_path}/pipe"}) == ([], [])
    assert os.read(driver, 10) == b""


@pytest.mark.parametrize("there", ["nothing", "a pipe that nobody reads", "a file"])
def test_what_is_in_the_way_is_told_and_not_waited_for(tmp_path, there):
    path = tmp_path / "pipe"
    if there == "a file":
        path.write_text("kept")
    elif there != "nothing":
        os.mkfifo(path)
    assert asked(**{SWITCH: "1", PIPE: str(path)}) == ([], ["gpu_core_dump_failed"])
    if there == "a file":
        assert path.read_text() == "kept"
