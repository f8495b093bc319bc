"""Triton's loops carry a name that is given another value, but no literal: Python's carry both.

`begun = 0` at the end of a loop's body changes nothing there, and our interpreter, which is Python,
does not see it: a kernel that was right there hung on a GPU.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tailrace.kernels

FOLDER = Path(tailrace.kernels.__file__).parent
KERNELS = sorted(
    path for path in FOLDER.rglob("*.py") if "triton" in path.name and "jit" in path.read_text()
)


def uncarried(code):
    """Return names that a loop gives literals alone, and reads."""
    found = set()
    functions = (node for node in ast.walk(ast.parse(code)) if is_kernel(node))
    for function in functions:
        for loop in ast.walk(function):
            if isinstance(loop, ast.For | ast.While) and not is_static(loop):
                found |= literals_alone(loop)
    return found


def is_kernel(node):
    return isinstance(node, ast.FunctionDef) and any(
        "jit" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def is_static(loop):
    return isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter)


def literals_alone(loop):
    given, others, read = set(), set(), set()
    for node in (inner for part in loop.body for inner in ast.walk(part)):
        if isinstance(node, ast.Assign):
            is_literal = isinstance(node.value, ast.Constant)
            for target in node.targets:
                (given if is_literal else others).update(names_of(target))
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
            others |= names_of(node.target)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            read.add(node.id)
    return (given - others) & read


def names_of(target):
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_no_loop_gives_a_name_literals_alone(path):
    assert uncarried(path.read_text()) == set()


HUNG = """
@gluon.jit
def produce(begun, end):
    for split in range(end):
        for step in range(begun, 8):
            ask(step)
        begun = 0
"""
RIGHT = """
@gluon.jit
def produce(slot, end, STAGES: gl.constexpr):
    for split in range(end):
        slot += 1
        if slot == STAGES:
            slot = 0
"""


def test_the_kernel_that_hung_is_found():
    assert len(KERNELS) > 20
    assert uncarried(HUNG) == {"begun"}
    assert uncarried(RIGHT) == set()
