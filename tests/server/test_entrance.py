"""The engine is begun before the front end has imported what it serves with."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tailrace.config import Config
from tailrace.server import entrance, serve

HEAVY = {"numpy", "uvicorn", "llguidance", "tokenizers", "jinja2", "zmq", "prometheus_client"}


class Beginning:
    """A launcher that notes what is done with it, and of what was imported by then."""

    def __init__(self, told):
        self.told = told

    async def begin(self):
        self.told.append("begun")

    def clean(self):
        self.told.append("cleaned")


def test_what_takes_long_to_import_is_not_there_when_the_engine_is_begun():
    script = (
        "import sys\n"
        "import tailrace.cli, tailrace.server.entrance\n"
        f"sys.exit(' '.join({HEAVY} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.stderr.strip() == ""


def test_no_front_end_imports_what_only_engines_need():
    script = (
        "import sys, tailrace.cli, tailrace.server.serve, tailrace.server.front_ends\n"
        "unwanted = {'torch', 'triton', 'transformers', 'sympy', 'scipy', 'pandas'}\n"
        "print(*sorted(unwanted & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_the_front_end_serves_with_what_was_begun(monkeypatch):
    told = []

    async def serving(config, listener, launcher, stop):
        told.append(("served", config, listener, launcher.told is told, stop.is_set()))
        return 7

    monkeypatch.setattr(entrance, "Launcher", lambda _: Beginning(told))
    monkeypatch.setattr(serve, "serve", serving)
    config = Config()
    assert asyncio.run(entrance._serve(config, "listener")) == 7
    assert told == ["begun", ("served", config, "listener", True, False), "cleaned"]


def test_a_signal_while_the_front_end_is_imported_is_not_lost(monkeypatch):
    """The loop has other things to do then than to look for one."""
    begin = Beginning.begin

    async def signalled(self):
        await begin(self)
        os.kill(os.getpid(), signal.SIGTERM)

    async def serving(config, listener, launcher, stop):
        await asyncio.wait_for(stop.wait(), 60)
        return 0

    monkeypatch.setattr(Beginning, "begin", signalled)
    monkeypatch.setattr(entrance, "Launcher", lambda _: Beginning([]))
    monkeypatch.setattr(serve, "serve", serving)
    assert asyncio.run(entrance._serve(Config(), "listener")) == 0


def test_what_was_begun_ends_with_a_front_end_that_cannot_be_made(monkeypatch):
    told = []

    async def failing(*_):
        raise OSError("no room for the request log")

    monkeypatch.setattr(entrance, "Launcher", lambda _: Beginning(told))
    monkeypatch.setattr(serve, "serve", failing)
    with pytest.raises(OSError, match="no room"):
        asyncio.run(entrance._serve(Config(), "listener"))
    assert told == ["begun", "cleaned"]
