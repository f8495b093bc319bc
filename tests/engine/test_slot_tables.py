"""The device's block tables beside the block manager's, whatever happens to sequences."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tailrace.clock import VirtualClock
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.early_prompts import EARLY_SLOTS
from tailrace.engine.engine import Engine
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.slot_tables import SlotTables
from tailrace.engine.staging import Staging
from tailrace.errors import DeviceMemoryError
from tailrace.types import EngineRequest, GrowPrompt, ReserveKv, SamplingParams
from tests.support.fake_runner import VOCAB, FakeRunner, expected_output

SLOTS, UNIT, CONTEXT, BUDGET = 4, 8, 128, 40
CPU = torch.device("cpu")


@dataclass
class OnDevice:
    """A step's arrays on their way, and the truth when it was scheduled."""

    rows: list
    packed: object
    truth: list[list[int]]
    names: list[str]


@dataclass
class TableRunner(FakeRunner):
    """The fake device, reading through tables that came the way of a GPU's."""

    loses: frozenset[int] = frozenset()
    """Steps that find no memory before anything of theirs is sent."""
    tables: SlotTables = field(init=False)
    staging: Staging = field(init=False)
    sent: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What differed; the engine would take an error raised here for its requests'."""
    calls: int = 0
    lost: frozenset[str] = frozenset()
    """Whose entries the step before has lost: this one is void for them."""

    def __post_init__(self):
        self.tables = SlotTables(
            SLOTS, CONTEXT // UNIT, UNIT, max_sequences=SLOTS + EARLY_SLOTS + 1, device=CPU
        )
        self.staging = Staging(64 + self.tables.words, CPU)

    def prepare(self, step, blocks):
        rows = super().prepare(step, blocks)
        slots = [chunk.slot for chunk in step.chunks]
        growth = self.tables.extend(
            step, np.array(slots, np.int32), np.array([row.end for row in rows], np.int32), blocks
        )
        wanted = np.array([*slots, self.tables.no_slot], np.int32)
        packed = self.staging.pack({"table_rows": wanted, **growth})
        self.sent.append(len(growth["cells"]))
        truth = [row.table[: -(-row.end // UNIT)] for row in rows]
        names = [chunk.sequence.request_id for chunk in step.chunks]
        return OnDevice(rows, packed, truth, names)

    def execute(self, prepared):
        self.calls += 1
        lost, self.lost = self.lost, frozenset()
        if self.calls in self.loses:
            self.lost = frozenset(prepared.names)
            raise DeviceMemoryError("nothing was sent")
        arrays = self.staging.send(prepared.packed)
        self.tables.apply(arrays)
        self.tables.gather(arrays["table_rows"])
        found = self.tables.of_step(arrays["table_rows"])
        if found[-1].any():
            self.wrong.append("padding")
        for index, (row, truth) in enumerate(zip(prepared.rows, prepared.truth, strict=True)):
            if prepared.names[index] not in lost:
                row.table = found[index].tolist()
                if row.table[: len(truth)] != truth:
                    self.wrong.append(f"step {self.calls}: {row.table} is not {truth}")
        return super().execute(prepared.rows)


def make_engine(runner, blocks):
    scheduler = Scheduler(
        blocks,
        max_batch_size=SLOTS,
        token_budget=BUDGET,
        swap_pays=(lambda tokens, units: tokens > units) if blocks.host_places else None,
    )
    return Engine(
        scheduler,
        runner,
        submit=runner.submit,
        clock=VirtualClock(),
        context_length=CONTEXT,
        vocab_size=VOCAB,
        eos_token_ids=(),
    )


@dataclass
class Life:
    """What happens, at random, to an engine's requests; each ends as its prompt demands."""

    engine: Engine
    draw: random.Random
    prompts: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    arriving: list[str] = field(default_factory=list)

    def take(self, outputs):
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    def begin(self, index):
        """A prompt comes, whole or bit by bit."""
        draw, name = self.draw, f"r-{index}"
        stem = [1, 2, 3, 4, 5, 6, 7, 8] * draw.randrange(5)
        ids = stem + [draw.randrange(4) for _ in range(draw.randrange(1, 40))]
        self.prompts[name] = ids, draw.randrange(1, 56)
        if draw.random() < 0.4:
            self.engine.reserve(ReserveKv(name, len(ids), 30.0))
            self.engine.grow(GrowPrompt(name, 0, ids[: len(ids) // 2 + 1], 30.0))
            self.arriving.append(name)
        else:
            self.complete(name)

    def complete(self, name):
        ids, most = self.prompts[name]
        sampling = SamplingParams(max_tokens=most, ignore_eos=True)
        request = EngineRequest(
            request_id=name, token_ids=ids, sampling=sampling, arrival_s=float(name[2:])
        )
        assert self.engine.add(request) is None

    def act(self):
        draw = self.draw
        if self.arriving and draw.random() < 0.3:
            name = self.arriving.pop(draw.randrange(len(self.arriving)))
            if draw.random() < 0.2:
                self.reasons[name] = "abort"
                self.take(self.engine.abort([name]))
            else:
                self.complete(name)
        running = [name for name in self.prompts if name not in self.reasons]
        if running and draw.random() < 0.03:
            name = draw.choice(running)
            if name not in self.arriving:
                self.take(self.engine.abort([name]))


@pytest.mark.parametrize("seed", range(8))
def test_the_devices_tables_are_the_block_managers_in_every_step(seed):
    """Grown, preempted, swapped, lent, aborted, computed early, lost with a step: all the same."""
    draw = random.Random(seed)
    blocks = BlockManager(
        draw.randrange(16, 24),
        UNIT,
        prefix_cache=draw.random() < 0.7,
        host_places=draw.choice([0, 8, 40]),
    )
    runner = TableRunner(
        UNIT, loses=frozenset(range(7, 2000, 41)) if seed % 3 == 0 else frozenset()
    )
    life = Life(make_engine(runner, blocks), draw)
    began = 0
    for _ in range(3000):
        if began < 60 and draw.random() < 0.25:
            life.begin(began)
            began += 1
        life.act()
        if life.engine.has_work:
            life.take(life.engine.step())
            assert not runner.wrong
            blocks.check_integrity()
            life.engine.scheduler.answers.observe(1)  # taken for short, so that units are lent
        elif began == 60 and not life.arriving:
            break
    else:
        raise AssertionError("not done")
    for name, (ids, most) in life.prompts.items():
        wanted = expected_output(ids, most, frozenset())
        got = life.tokens.get(name, [])
        assert got == wanted[: len(got)]
        assert life.reasons[name] in ("length", "abort", "error")
        assert life.reasons[name] != "length" or got == wanted
    ended = list(life.reasons.values())
    assert ended.count("length") >= 20
    assert "error" not in ended or runner.loses  # twice without memory
    assert life.engine.scheduler.preemptions_total > 0
    assert blocks.lent_units_total > 0
    if blocks.host_places == 40:
        assert blocks.swapped_in_total > 0


def test_a_step_sends_what_tables_grew_by_and_nothing_twice():
    blocks = BlockManager(64, UNIT, prefix_cache=False)
    runner = TableRunner(UNIT)
    life = Life(make_engine(runner, blocks), random.Random(1))
    for index in range(SLOTS):
        life.prompts[f"r-{index}"] = [index + 1] * 10, 30
        life.complete(f"r-{index}")
    for _ in range(100):
        if not life.engine.has_work:
            break
        life.take(life.engine.step())
    assert not runner.wrong
    units = -(-39 // UNIT)  # the last token is drawn, and never computed
    assert sum(runner.sent) == SLOTS * units
    assert runner.sent.count(0) > len(runner.sent) / 2
    assert max(runner.sent) <= 2 * SLOTS


def test_a_slot_that_changes_hands_is_sent_whole():
    blocks = BlockManager(64, UNIT)
    runner = TableRunner(UNIT)
    life = Life(make_engine(runner, blocks), random.Random(1))
    stem = list(range(40))
    for index in range(3):  # one after the other, in the same slot, over the same cached units
        life.prompts[f"r-{index}"] = [*stem, index], 2
        life.complete(f"r-{index}")
        before = sum(runner.sent)
        for _ in range(20):
            if life.engine.has_work:
                life.take(life.engine.step())
        assert not runner.wrong
        assert sum(runner.sent) - before == -(-42 // UNIT)
    assert blocks.hit_tokens_total == 80


def test_what_is_packed_ahead_leaves_a_step_that_was_not_sent_yet_as_it_is():
    """Step N+1 is staged while N is still to be sent: N's arrays lie in a buffer of their own."""
    tables = SlotTables(1, 4, UNIT, max_sequences=2, device=CPU)
    staging = Staging(64 + tables.words, CPU)
    rows = np.zeros(1, np.int32)
    packed = [
        staging.pack(
            {
                "table_rows": rows,
                "cells": np.array([cell], np.int32),
                "entries": np.array([entry], np.int32),
            }
        )
        for cell, entry in ((0, 7), (1, 9))
    ]
    for step, wanted in zip(packed, ([7, 0, 0, 0], [7, 9, 0, 0]), strict=True):
        arrays = staging.send(step)
        tables.apply(arrays)
        tables.gather(arrays["table_rows"])
        assert tables.of_step(arrays["table_rows"]).tolist() == [wanted]


def test_an_early_prompts_slot_is_sent_anew_when_it_is_anothers():
    blocks = BlockManager(128, UNIT, prefix_cache=False)
    runner = TableRunner(UNIT)
    life = Life(make_engine(runner, blocks), random.Random(1))
    for index in range(3):
        name, ids = f"r-{index}", [index] * 33
        life.prompts[name] = ids, 2
        life.engine.grow(GrowPrompt(name, 0, ids[:30], 30.0))
        for _ in range(5):  # ten tokens a step, 24 in all
            if life.engine.has_work:
                life.take(life.engine.step())
        if index == 1:
            life.complete(name)  # the others are given up
        else:
            life.engine.abort([name])
    assert not runner.wrong
    starts = [(row.slot, row.start, row.end) for rows in runner.steps for row in rows]
    early = [start for start in starts if start[0] >= SLOTS]
    assert len({slot for slot, *_ in early}) == 1, "always the same slot"
    assert [start for start in early if start[1] == 0] == [(early[0][0], 0, 8)] * 3
