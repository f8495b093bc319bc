"""Readings of a kernel's machine code: what its source cannot promise and no other test sees.

A product of a Hopper GPU runs on while its warps do. Its sums, and a left side that lies in
registers, must be left alone until a wait covers it: the assembler takes care, if it knows. And a
warp that has handed registers over must not name them.

What is fetched from shared memory must be in registers before the warps meet and one of them hands
the memory back: a load that has only been asked for may be made after the next copy is there, if
contexts are switched meanwhile. An instruction that names its register has waited for it, and so
has a fence. Loads after the last wait at a barrier count: those before may be from elsewhere.

Every path through the code is followed, with the products in flight on it, the registers that the
warp has there and the loads that nothing has waited for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P[0-9T]+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_PRODUCT = re.compile(r"[A-Z]GMMA\.64x(\d+)x")
_OPERANDS = re.compile(r"R(\d+), (?:R(\d+), )?gdesc")
_MOST_GROUPS = 8
"""In flight at a time, of what we write."""
_HANDS_BACK = "SYNCS.ARRIVE.TRANS64.A1T0"
"""An arrival that expects no bytes."""
_ENDS = ("EXIT", "RET", "BRX", "BRA")


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly."""

    text: str
    name: str
    operands: str
    is_conditional: bool

    def registers(self) -> set[int]:
        """Return the registers it names, those of a wide operand too."""
        wide = 4 if ".128" in self.name or re.search(r"SM\.16\.\w+\.4", self.name) else 1
        wide = 2 if ".64" in self.name or self.name.startswith("CS2R") else wide
        parts = re.sub(r"\[[^]]*\]", "", self.operands).split(", ")
        found: set[int] = set()
        for place, part in enumerate(parts):
            width = wide
            if ".WIDE" in self.name:
                width = 2 if place in {0, len(parts) - 1} else 1
            for number in re.findall(r"\bR(\d+)\b", part):
                found.update(range(int(number), int(number) + width))
        for number, is_pair in re.findall(r"\[[^]]*?\bR(\d+)(\.64)?", self.operands):
            found.update(range(int(number), int(number) + (2 if is_pair else 1)))
        return found

    def loaded(self) -> set[int]:
        """Return the registers that it loads from shared memory."""
        if not self.name.startswith(("LDS", "LDSM")):
            return set()
        return replace(self, operands=self.operands.split(", ")[0]).registers()


@dataclass(frozen=True)
class State:
    """What holds at a point of a path."""

    share: int
    """Registers that a thread has."""
    groups: tuple[frozenset[int], ...] = ()
    """Registers of products in flight, by group, oldest first."""
    current: frozenset[int] = frozenset()
    """Of the group that is not closed yet."""
    sums: frozenset[int] = frozenset()
    """Of all those, the ones that hold sums."""
    loads: frozenset[int] = frozenset()
    """Registers that loads from shared memory since the last wait are on their way to."""
    is_early: bool = False
    """Whether there were such when the warps met last."""


def _parsed(code: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        label = _LABEL.match(line.strip())
        if label:
            labels[label[1]] = len(instructions)
        found = _LINE.search(line)
        if found:
            _, guard, name, operands = found.groups()
            # Comments in it are BRX's targets.
            text = f"{guard or ''}{name} {operands.strip()}".strip()
            is_conditional = guard is not None and guard.strip() != "@PT"
            instructions.append(Instruction(text, name, operands.strip(), is_conditional))
    return instructions, labels


def _multiplied(state: State, operands: str, columns: int) -> tuple[State, str]:
    """Return the state once a product is queued, and what is wrong with that."""
    found = _OPERANDS.match(operands)
    if found is None:
        return state, "operands that are not known"
    sums = frozenset(range(int(found[1]), int(found[1]) + columns // 2))
    left = frozenset(range(int(found[2]), int(found[2]) + 4)) if found[2] else frozenset()
    busy = state.current.union(*state.groups)
    fault = ""
    if left & state.sums & busy:
        fault = "the left side is a sum in flight"
    elif sums & (busy - state.sums):
        fault = "sums go where a left side is being read"
    current = state.current | sums | left
    known = state.sums | sums
    state = replace(state, loads=state.loads - left - sums)
    if len(state.groups) == _MOST_GROUPS:
        return state, "products that nobody waits for"
    if "gsb0" in operands:
        groups = (*state.groups, current)
        return replace(state, groups=groups, current=frozenset(), sums=known), fault
    return replace(state, current=current, sums=known), fault


def _stepped(state: State, instruction: Instruction) -> tuple[State, str]:
    """Return the state after an instruction, and what is wrong with it there."""
    name, operands = instruction.name, instruction.operands
    fault = ""
    named = instruction.registers()
    product = _PRODUCT.match(name)
    if product:
        state, fault = _multiplied(state, operands, int(product[1]))
    elif name.startswith("WARPGROUP.DEPBAR"):
        left = int(operands.split(", ")[1], 16)
        groups = state.groups[len(state.groups) - left :] if left else ()
        busy = state.current.union(*groups)
        state = replace(state, groups=groups, sums=state.sums & busy)
    elif name.startswith("USETMAXREG"):
        state = replace(state, share=int(operands.split(", ")[-1], 16))
    elif name.startswith(("SYNCS.PHASECHK", "MEMBAR")):
        state = replace(state, loads=frozenset(), is_early=False)
    elif name.startswith("BAR.SYNC"):
        state = replace(state, is_early=bool(state.loads))
    elif name.startswith(_HANDS_BACK):
        # A barrier of one arrival needs no meeting: then what is on its way here counts.
        if state.is_early or state.loads:
            fault = "memory is handed back from which a load is on its way"
    elif named & state.current.union(*state.groups):
        fault = "a register of a product in flight"
    if not product:
        loaded = instruction.loaded()
        state = replace(state, loads=state.loads - named | loaded)
    if not fault and named and max(named) >= state.share:
        fault = f"a register beyond the {state.share} of its warp"
    return state, fault


def _targets(instruction: Instruction, labels: dict[str, int]) -> Iterator[int]:
    for label in re.findall(r"\.L_x_\d+", instruction.operands):
        yield labels[label]


def hand_backs(code: str) -> int:
    """Return how many instructions hand memory back: each kernel with a ring has some."""
    return sum(line.name.startswith(_HANDS_BACK) for line in _parsed(code)[0])


def faults(code: str, registers: int) -> list[str]:
    """Return what is wrong on any path: nothing, or lines of the code and why.

    Args:
        code: A kernel as nvdisasm -c prints it.
        registers: Of a thread at its start.
    """
    instructions, labels = _parsed(code)
    starts = set(labels.values())
    found: set[str] = set()
    seen: set[tuple[int, State]] = set()
    left = [(0, State(registers))]
    while left:
        place, state = left.pop()
        while place < len(instructions):
            if place in starts:
                if (place, state) in seen:
                    break
                seen.add((place, state))
            instruction = instructions[place]
            state, fault = _stepped(state, instruction)
            if fault:
                found.add(f"{instruction.text}: {fault}")
            left.extend((target, state) for target in _targets(instruction, labels))
            if instruction.name.split(".")[0] in _ENDS and not instruction.is_conditional:
                break
            place += 1
    return sorted(found)
