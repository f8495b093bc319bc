from __future__ import annotations

import asyncio
import sys

import pytest

from tailrace.bench.load import event_loop


async def name() -> str:
    return type(asyncio.get_running_loop()).__module__


@pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop for it")
def test_work_runs_on_uvloop():
    assert event_loop.run(name()).startswith("uvloop")


def test_without_uvloop_it_runs_on_asyncios_own_loop(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert event_loop.run(name()).startswith("asyncio")
