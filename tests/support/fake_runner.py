"""A device made of dictionaries: KV holds token ids, and the "model" hashes what it can see.

The next token is a hash of every token that the block table leads to. So a wrong block, a stale
prefix-cache hit, a lost or doubled position, or a neighbour's write changes the output, and the
oracle (`expected_output`) knows nothing of batches, blocks or steps.

Like a sampler it counts each slot's draws, from what it is told when somebody is admitted: a slot
that nobody holds fails the step, and a draw at another position than its own is another token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tailrace.engine.runner import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.scheduler import Step
    from tailrace.engine.step_time import StepLoad

VOCAB = 50
GARBAGE = -1
"""What nobody has written: a device does not complain of it, and computes a wrong token."""


def next_token(history: list[int]) -> int:
    digest = hashlib.blake2b(repr(history).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def expected_output(prompt: list[int], max_output: int, stop_ids: frozenset[int]) -> list[int]:
    history = list(prompt)
    for _ in range(max_output):
        history.append(next_token(history))
        if history[-1] in stop_ids:
            break
    return history[len(prompt) :]


@dataclass
class Row:
    slot: int
    inputs: list[int] | None
    start: int
    end: int
    table: list[int]
    samples: bool
    drawn: int
    """Tokens drawn for its sequence before."""


class Rows(list):
    """A step's rows, and what is copied before they are computed."""

    swapped_out: list[tuple[list[int], list[int]]]
    swapped_in: list[tuple[list[int], list[int]]]
    released: list[int]
    admitted: dict[int, int]
    """By slot: tokens drawn before."""


class LazyFuture:
    """Runs only when asked for its result, i.e. after the next step was scheduled and prepared."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def done(self) -> bool:
        return False

    def result(self) -> Any:
        return self._work()


@dataclass
class FakeRunner:
    block_size: int
    fail_when: Callable[[list[Row]], bool] = lambda rows: False
    failure: type[Exception] = RuntimeError
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    host: dict[tuple[int, int], int] = field(default_factory=dict)
    drawn: dict[int, int] = field(default_factory=dict)
    """By slot: tokens drawn for who holds it."""
    steps: list[list[Row]] = field(default_factory=list)

    def submit(self, function: Callable[..., Any], *args: Any) -> LazyFuture:
        return LazyFuture(lambda: function(*args))

    @staticmethod
    def padded_decodes(decodes: int) -> int:
        return decodes

    @staticmethod
    def whole_prompts(decodes: int, tokens: int) -> int:
        return tokens

    @staticmethod
    def computed(step: Step) -> StepLoad:
        return step.load

    def touch_kv(self, units: list[int]) -> None:
        pass

    def check_device(self) -> None:
        pass

    def prepare(self, step: Step, blocks: BlockManager) -> Rows:
        rows = Rows(
            Row(
                slot=chunk.slot,
                inputs=None
                if chunk.from_device
                else chunk.sequence.token_ids[chunk.start : chunk.end],
                start=chunk.start,
                end=chunk.end,
                table=list(blocks.table(chunk.sequence.request_id)),
                samples=chunk.samples,
                # This chunk's own is pending already.
                drawn=chunk.sequence.num_output + chunk.sequence.pending_tokens - chunk.samples,
            )
            for chunk in step.chunks
        )
        rows.swapped_out = [(copy.units, copy.places) for _, copy in step.swapped_out]
        rows.swapped_in = [(copy.units, copy.places) for _, copy in step.swapped_in]
        rows.released = list(step.released)
        rows.admitted = {sequence.slot: sequence.num_output for sequence in step.admitted}
        return rows

    def execute(self, rows: Rows) -> StepResult:
        self.steps.append(rows)
        if self.fail_when(rows):
            for row in rows:  # whoever reads on reads what no model ever wrote
                self._write(replace(row, inputs=[-1] * (row.end - row.start)))
                self.last[row.slot] = -1
                if row.samples and row.slot in self.drawn:
                    self.drawn[row.slot] += 1
            raise self.failure("the device said no")
        for units, places in rows.swapped_out:
            self._copy(self.kv, units, self.host, places)
        for units, places in rows.swapped_in:
            self._copy(self.host, places, self.kv, units)
        for slot in rows.released:
            self.drawn.pop(slot, None)
        self.drawn.update(rows.admitted)
        for row in rows:
            self._write(row)
        tokens = [self._draw(row) for row in rows if row.samples]
        return StepResult(tokens, [None] * len(tokens))

    def _draw(self, row: Row) -> int:
        if row.slot not in self.drawn:
            raise RuntimeError(f"slot {row.slot} is not admitted")
        is_misplaced = self.drawn[row.slot] != row.drawn
        self.drawn[row.slot] += 1
        self.last[row.slot] = (next_token(self._read(row)) + is_misplaced) % VOCAB
        return self.last[row.slot]

    def _copy(self, source: dict, froms: list[int], target: dict, tos: list[int]) -> None:
        for from_, to in zip(froms, tos, strict=True):
            for offset in range(self.block_size):
                target.pop((to, offset), None)
                if (from_, offset) in source:
                    target[to, offset] = source[from_, offset]

    def _write(self, row: Row) -> None:
        inputs = [self.last.get(row.slot, GARBAGE)] if row.inputs is None else row.inputs
        assert len(inputs) == row.end - row.start
        for position, token in zip(range(row.start, row.end), inputs, strict=True):
            block, offset = divmod(position, self.block_size)
            self.kv[row.table[block], offset] = token

    def _read(self, row: Row) -> list[int]:
        size = self.block_size
        places = ((row.table[p // size], p % size) for p in range(row.end))
        return [self.kv.get(place, GARBAGE) for place in places]
