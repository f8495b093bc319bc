"""What a test would leave behind is seen, whatever it is."""

from __future__ import annotations

import gc
import locale
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import structlog
import torch

from tests.support.process_state import changes, process_state, put_threads_back


def _set_signal(number, handler):
    before = signal.signal(number, handler)
    return lambda: signal.signal(number, before)


def _set_folder(folder):
    before = Path.cwd()
    os.chdir(folder)
    return lambda: os.chdir(before)


def _set_environment(name, value):
    os.environ[name] = value
    return lambda: os.environ.pop(name)


def _set_by(setter, value, before):
    setter(value)
    return lambda: setter(before)


def _change_locale():
    before = locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, "C.UTF-8" if before == "C" else "C")
    return lambda: locale.setlocale(locale.LC_ALL, before)


def _configure_structlog():
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    return lambda: structlog.configure(**before)


def _freeze():
    gc.freeze()
    return gc.unfreeze


def _add_path(folder):
    sys.path.append(folder)
    return lambda: sys.path.remove(folder)


CHANGES = {
    "switch interval": lambda: _set_by(sys.setswitchinterval, 0.001, sys.getswitchinterval()),
    "recursion limit": lambda: _set_by(sys.setrecursionlimit, 5000, sys.getrecursionlimit()),
    "garbage collection": _freeze,
    "working directory": lambda: _set_folder("/"),
    "locale": _change_locale,
    "signal handlers": lambda: _set_signal(signal.SIGTERM, signal.SIG_IGN),
    "logging": lambda: _set_by(logging.disable, logging.INFO, logging.root.manager.disable),
    "import path": lambda: _add_path("/nowhere"),
    "environment": lambda: _set_environment("TAILRACE_LEFT_BEHIND", "1"),
    "structlog": _configure_structlog,
    "torch": lambda: _set_by(torch.set_default_dtype, torch.float64, torch.get_default_dtype()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_left_behind_is_named(name):
    before = process_state()
    undo = CHANGES[name]()
    try:
        found = changes(before, process_state())
    finally:
        undo()
    assert [line.partition(":")[0] for line in found] == [name]
    assert changes(before, process_state()) == []


def test_of_the_environment_only_what_changed_is_told():
    before = process_state()
    undo = CHANGES["environment"]()
    found = changes(before, process_state())
    undo()
    was, now = "{b'TAILRACE_LEFT_BEHIND': None}", "{b'TAILRACE_LEFT_BEHIND': b'1'}"
    assert found == [f"environment: {was} became {now}"]


def test_threads_are_put_back():
    before = process_state()
    torch.set_num_threads(before["threads"] + 1)
    assert changes(before, process_state()) != []
    put_threads_back(before)
    assert changes(before, process_state()) == []


def test_what_is_imported_is_no_change():
    after = process_state()
    before = {name: value for name, value in after.items() if name != "torch"}
    assert changes(before, after) == []


def test_what_setuptools_brings_along_is_no_change():
    before = process_state()
    undo = _add_path("/usr/lib/python3/site-packages/setuptools/_vendor")
    found = changes(before, process_state())
    undo()
    assert found == []
