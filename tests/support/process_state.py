"""What belongs to the whole process, which a test must leave as it found it.

Tests of one worker run in one process: a setting that one of them leaves behind makes another fail,
another day, in another order. So each test is held to it (tests/conftest.py), in microseconds.
"""

from __future__ import annotations

import gc
import locale
import logging
import os
import resource
import signal
import sys

from tests.support import garbage

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
"""What servers and their parents handle; SIGALRM is the time limit's of pytest."""
THEIRS = (b"PYTEST_CURRENT_TEST", b"TORCHINDUCTOR_CACHE_DIR", b"CUDA_MODULE_LOADING")
"""Variables that pytest changes, and that torch sets for itself when something first asks it."""
VENDORED = "setuptools/_vendor"


def process_state() -> dict[str, object]:
    """The settings by name; those of a library only where it is imported."""
    state: dict[str, object] = {
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), garbage.is_frozen()),
        "working directory": os.getcwd(),  # noqa: PTH109 - a Path costs more than the question
        "locale": locale.setlocale(locale.LC_ALL),
        "signal handlers": tuple(map(signal.getsignal, SIGNALS)),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": os.sched_getaffinity(0),
        # Not the open files: a load raises how many there may be, and leaves it so.
        "memory limit": resource.getrlimit(resource.RLIMIT_AS),
        "logging": (logging.root.level, logging.root.manager.disable),
        # setuptools adds what it brings, once, whenever something first imports it.
        "import path": tuple(path for path in sys.path if not path.endswith(VENDORED)),
        "environment": _environment(),
    }
    if structlog := sys.modules.get("structlog"):
        config = structlog.get_config()
        state["structlog"] = (
            config["wrapper_class"], config["logger_factory"], tuple(config["processors"]),
        )  # fmt: skip
    if (torch := sys.modules.get("torch")) and hasattr(torch, "get_default_dtype"):
        state["torch"] = (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )
        state["threads"] = torch.get_num_threads()
    return state


def _environment() -> dict[bytes, bytes]:
    """Without its decoding, which would cost more than all else here."""
    variables = dict(os.environ._data)
    for name in THEIRS:
        variables.pop(name, None)
    return variables


def put_threads_back(before: dict[str, object]) -> None:
    """Give torch the threads that it had.

    Each set of kernels says how many there are (kernels/select.py), as a process has but one.
    """
    if "threads" in before and sys.modules["torch"].get_num_threads() != before["threads"]:
        sys.modules["torch"].set_num_threads(before["threads"])


def changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """What a test has changed, in words; what it has imported is no change."""
    found = []
    for name, was in before.items():
        now = after[name]
        if now == was:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            keys = [key for key in was | now if was.get(key) != now.get(key)]
            was_there, is_there = ({key: state.get(key) for key in keys} for state in (was, now))
            found.append(f"{name}: {was_there!r} became {is_there!r}")
        else:
            found.append(f"{name}: {was!r} became {now!r}")
    return found
