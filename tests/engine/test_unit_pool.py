import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tailrace.engine.unit_pool import NONE, UnitPool
from tailrace.errors import EngineError, IntegrityError


class Machine(RuleBasedStateMachine):
    """Takes and gives at random; a set of numbers knows what is free."""

    num_units = 22  # the last group has two units

    def __init__(self):
        super().__init__()
        self.pool = UnitPool(self.num_units)
        self.free = set(range(self.num_units))
        self.runs: list[list[int]] = []

    def has_run(self, order: int) -> bool:
        size = 1 << order
        starts = range(0, self.num_units - size + 1, size)
        return any(self.free >= set(range(start, start + size)) for start in starts)

    @rule(order=st.integers(0, 2))
    def take(self, order):
        could = self.has_run(order)
        first = self.pool.take(order)
        assert (first != NONE) is could
        if first == NONE:
            return
        run = list(range(first, first + (1 << order)))
        assert first % (1 << order) == 0
        assert self.free >= set(run)
        self.free -= set(run)
        self.runs.append(run)

    @rule(data=st.data())
    def give(self, data):
        if not self.runs:
            return
        run = self.runs.pop(data.draw(st.integers(0, len(self.runs) - 1)))
        unit = data.draw(st.sampled_from(run))
        self.pool.give(unit)
        self.free.add(unit)
        rest = [other for other in run if other != unit]
        if rest:
            self.runs.append(rest)

    @rule(unit=st.integers(0, num_units - 1))
    def give_twice(self, unit):
        if unit in self.free:
            with pytest.raises(IntegrityError, match=f"unit {unit} is given back, but it is free"):
                self.pool.give(unit)

    @invariant()
    def agrees(self):
        self.pool.check_integrity()
        assert set(self.pool.free_units()) == self.free
        assert self.pool.free == len(self.free)
        quads = [set(range(start, start + 4)) <= self.free for start in range(0, 20, 4)]
        assert self.pool.longest_free_runs() == sum(quads)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestMachine = Machine.TestCase


def test_single_units_are_cut_from_what_is_broken_already():
    pool = UnitPool(16)
    first = pool.take(0)
    pair = pool.take(1)
    other = pool.take(0)
    assert {u // 4 for u in (first, pair, other)} == {0}
    assert pool.longest_free_runs() == 3


def test_buddies_that_come_back_are_one_run_again():
    pool = UnitPool(4)
    units = [pool.take(0) for _ in range(4)]
    assert pool.take(0) == NONE
    for unit in (units[2], units[0], units[3]):
        pool.give(unit)
    assert pool.take(2) == NONE
    pool.give(units[1])
    assert pool.take(2) == 0


def test_a_pool_without_units_is_refused():
    with pytest.raises(EngineError, match="a pool of 0 units"):
        UnitPool(0)


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: p._masks.__setitem__(0, 0),
        lambda p: p._masks.__setitem__(1, 0b0101),
        lambda p: setattr(p, "free", 3),
        lambda p: p._next.__setitem__(p._heads + 2, p._heads + 2),
        lambda p: p._previous.__setitem__(1, 1),
    ],
)
def test_check_integrity_sees_a_broken_structure(harm):
    pool = UnitPool(12)
    pool.check_integrity()
    harm(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()
