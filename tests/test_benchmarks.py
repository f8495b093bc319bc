"""Benchmarks run by hand, most of them on a GPU: that they find what they import is told here."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


def imported(node: ast.AST) -> list[tuple[str, str]]:
    """Return the modules of the package and the names that a script takes of them as it runs."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return []
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tailrace":
        return [(node.module, alias.name) for alias in node.names]
    return [found for child in ast.iter_child_nodes(node) for found in imported(child)]


def is_there(module: str, name: str) -> bool:
    """Whether a module has a name, or is a package of such a module."""
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    return hasattr(found, name) or (
        is_package and importlib.util.find_spec(f"{module}.{name}") is not None
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_what_a_benchmark_imports_of_the_package_is_there(file):
    wanted = imported(ast.parse(file.read_text()))
    assert [names for names in wanted if not is_there(*names)] == []
