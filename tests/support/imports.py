"""Workers of one run import the tests in different orders, before they collect them in the same.

On a clean checkout nothing that is imported has been compiled, neither the tests, whose assertions
pytest rewrites, nor most of what is installed: 15 s of a processor. Workers that go the same way at
the same time all compile the same. So each begins at another file, and finds the rest compiled.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def names(root: Path, worker: int, workers: int) -> list[str]:
    """Return the modules below `root`/tests, from the first of this worker's share on.

    The conftests lead, as they do where pytest collects: a module may read what they set.
    """
    conftests, modules = (
        [
            ".".join(file.relative_to(root).with_suffix("").parts)
            for file in sorted((root / "tests").rglob(pattern))
        ]
        for pattern in ("conftest.py", "test_*.py")
    )
    begin = len(modules) * worker // workers
    return [*conftests, *modules[begin:], *modules[:begin]]


def import_all(root: Path, worker: int, workers: int):
    """Import every test module, by the name under which pytest will look for it.

    One that cannot be imported, or is to be skipped, is left to the collection, which tries again
    and says so.
    """
    for name in names(root, worker, workers):
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)
