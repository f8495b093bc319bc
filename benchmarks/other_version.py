"""Another version of a module of ours, which benchmarks time beside what serves.

`git show COMMIT:src/tailrace/... > FILE` has one.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


def load(path: Path, name: str) -> ModuleType:
    """Return a file's module, imported under a name of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
