from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tailrace.engine.block_manager import BlockManager, Table
from tailrace.errors import EngineError, IntegrityError

SIZE = 8


@dataclass
class ModelSequence:
    tokens: list[int]
    salt: str
    table: Table
    computed: int
    units: list[int] = field(default_factory=list)

    def text(self, end: int) -> tuple[str, tuple[int, ...]]:
        return self.salt, tuple(self.tokens[:end])


class Machine(RuleBasedStateMachine):
    """Drives the manager at random over a device that remembers what was written where.

    At each position it keeps the salt and every token up to it, so a unit that was taken from its
    table, or found by another text, shows at once.
    """

    size = 2
    num_units = 14
    names = Bundle("names")
    swapped_names = Bundle("swapped_names")
    mixed_sizes = True

    def __init__(self):
        super().__init__()
        self.blocks = BlockManager(
            self.num_units, self.size, mixed_sizes=self.mixed_sizes, host_places=6
        )
        self.blocks._loose_units = 4  # which a larger pool affords
        self.kv: dict[tuple[int, int], tuple] = {}
        self.host: dict[tuple[int, int], tuple] = {}
        self.open_: dict[str, ModelSequence] = {}
        self.swapped: dict[str, ModelSequence] = {}
        self.opened = 0

    def name(self) -> str:
        self.opened += 1
        return f"s{self.opened}"

    @rule(
        target=names,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "a"]),
        answer=st.sampled_from([0, 1, 4, 20]),
        order=st.integers(0, 2),
        name=st.none(),
    )
    def open(self, tokens, salt, answer, order, name):
        name = name or self.name()
        found = self.blocks.lookup(tokens, salt)
        taken = self.blocks.demand(tokens, salt, len(tokens) + 1)
        before = self.blocks.available_units
        table = self.blocks.open(name, tokens, salt, len(tokens) + answer)
        assert found == table.cached_tokens == len(table.units) * self.size < len(tokens)
        assert 0 <= before - self.blocks.available_units <= taken
        assert before - self.blocks.available_units == len(table.units) - table.shared
        # The tokens that send a table to longer runs are beyond this pool.
        table.order = order if self.mixed_sizes else 0
        self.open_[name] = ModelSequence(list(tokens), salt, table, found, list(table.units))
        return name

    @rule(target=names, tokens=st.integers(1, 12))
    def reserve(self, tokens):
        """A request is arriving; it comes at once or its client goes away."""
        name = self.name()
        unclaimed = self.blocks.unclaimed_units
        promised = self.blocks.reserve(name, tokens)
        assert promised == min(self.blocks.units_for(tokens), unclaimed)
        with pytest.raises(EngineError, match=f"{name} has a lease already"):
            self.blocks.reserve(name, tokens)
        if tokens % 2:
            self.blocks.release(name)
            assert self.blocks.unclaimed_units == unclaimed
        return self.open([1] * tokens, "", 2, 1, name)

    @rule(name=names, extra=st.integers(0, 7), more=st.lists(st.integers(0, 1), max_size=5))
    def compute(self, name, extra, more):
        sequence = self.open_[name]
        sequence.tokens += more
        end = min(len(sequence.tokens), sequence.computed + extra)
        if not self.grow(sequence, end):
            return
        for position in range(sequence.computed, end):
            place = sequence.units[position // self.size], position % self.size
            self.kv[place] = sequence.text(position + 1)
        self.blocks.commit(sequence.table, sequence.tokens, end)
        sequence.computed = end

    @rule(name=names, tokens=st.integers(1, 24))
    def take_ahead_of_the_tokens(self, name, tokens):
        self.grow(self.open_[name], tokens)

    def grow(self, sequence, tokens) -> bool:
        table = sequence.table
        missing = max(0, self.blocks.units_for(tokens) - len(sequence.units))
        available = self.blocks.available_units
        lent = self.blocks.lent_units
        claim, unclaimed = table.lease.claim, self.blocks.unclaimed_units
        assert self.blocks.missing(table, tokens) == missing
        assert self.blocks.can_grow(table, tokens) is (missing <= available)
        if missing > available:
            with pytest.raises(EngineError, match="more units"):
                self.blocks.grow(table, tokens)
            assert table.units == sequence.units
            return False
        self.blocks.grow(table, tokens)
        assert self.blocks.available_units == available - missing
        assert self.blocks.lent_units - lent == max(0, missing - claim - unclaimed)
        assert len(set(table.units)) == len(table.units)
        sequence.units = table.units[: len(sequence.units)] + table.units[len(sequence.units) :]
        return True

    @rule()
    def advance(self):
        """Each gets one unit where its lease promises one; nobody borrows or loses anything."""
        before = {name: list(s.table.units) for name, s in self.open_.items()}
        claims = {name: s.table.lease.claim for name, s in self.open_.items()}
        lent = self.blocks.lent_units
        self.blocks.advance([s.table for s in self.open_.values()])
        assert self.blocks.lent_units == lent
        for name, sequence in self.open_.items():
            units, taken = sequence.table.units, claims[name] - sequence.table.lease.claim
            assert len(units) - len(before[name]) == taken <= min(1, claims[name])
            sequence.units = before[name] + units[len(before[name]) :]

    @rule(name=names, tokens=st.integers(0, 24))
    def expect(self, name, tokens):
        self.blocks.expect(self.open_[name].table, tokens)

    @rule(name=consumes(names), forget=st.booleans())
    def close(self, name, forget):
        sequence = self.open_.pop(name)
        self.blocks.close(sequence.table, forget=forget)
        with pytest.raises(EngineError, match=f"{name} holds no units"):
            self.blocks.table(name)
        with pytest.raises(EngineError, match=f"{name} holds no units"):
            self.blocks.close(sequence.table)

    @rule(target=swapped_names, name=consumes(names))
    def preempt(self, name):
        """What is computed goes to the host where it has the places, else it is lost."""
        sequence = self.open_.pop(name)
        used, total = self.blocks.swapped_units, self.blocks.swapped_out_total
        count = self.blocks.units_for(sequence.computed)
        copy = self.blocks.swap_out(sequence.table, sequence.computed) if count else None
        assert (copy is not None) is (0 < count <= 6 - used)
        if copy is not None:
            assert copy.units == sequence.units[:count]
            self.copy(self.kv, copy.units, self.host, copy.places)
            assert self.blocks.swapped_out_total == total + count
        else:
            sequence.computed = 0
        self.blocks.close(sequence.table)
        self.swapped[name] = sequence
        return name

    @rule(target=names, name=consumes(swapped_names), answer=st.sampled_from([1, 4, 20]))
    def resume(self, name, answer):
        sequence = self.swapped[name]
        needed = self.blocks.demand(sequence.tokens, sequence.salt, len(sequence.tokens) + 1)
        if needed > self.blocks.available_units:
            self.blocks.drop_swapped(name)
            del self.swapped[name]
            return self.open(sequence.tokens, sequence.salt, answer, 1, self.name())
        self.open(sequence.tokens, sequence.salt, answer, 1, name)
        resumed = self.open_[name]
        assert self.blocks.swapped_tokens(name) == sequence.computed
        if sequence.computed > resumed.computed:
            copy = self.blocks.swap_in(resumed.table)
            self.copy(self.host, copy.places, self.kv, copy.units)
            resumed.units = list(resumed.table.units)
            resumed.computed = sequence.computed
        else:
            self.blocks.drop_swapped(name)
        del self.swapped[name]
        return name

    @rule(name=consumes(swapped_names))
    def abort_while_swapped_out(self, name):
        self.blocks.drop_swapped(name)
        del self.swapped[name]

    def copy(self, source, froms, target, tos):
        for from_, to in zip(froms, tos, strict=True):
            for offset in range(self.size):
                target[to, offset] = source.get((from_, offset))

    @rule(name=names)
    def misuse(self, name):
        sequence = self.open_[name]
        with pytest.raises(EngineError, match="holds units already"):
            self.blocks.open(name, sequence.tokens, sequence.salt)
        with pytest.raises(EngineError, match="tokens computed, but"):
            self.blocks.commit(sequence.table, sequence.tokens, len(sequence.tokens) + 1)

    @invariant()
    def agrees(self):
        blocks = self.blocks
        blocks.check_integrity()
        held = {unit for sequence in self.open_.values() for unit in sequence.units}
        assert blocks.held_units == len(held) == self.num_units - blocks.available_units
        entries = sum(len(sequence.units) for sequence in self.open_.values())
        assert blocks.duplicate_units == entries - len(held)
        for name, sequence in self.open_.items():
            assert blocks.table(name) == sequence.units, "an entry changed"
            for position in range(sequence.computed):
                place = sequence.units[position // self.size], position % self.size
                assert self.kv[place] == sequence.text(position + 1)
        on_host = sum(blocks.units_for(s.computed) for s in self.swapped.values())
        assert blocks.swapped_units == on_host <= blocks.host_places
        owners = [s for s in self.open_.values() if s.table.lease.claim]
        if owners and not blocks.available_units:
            assert set(blocks.borrowers()) - {s.table.seq_id for s in owners}

    def teardown(self):
        for sequence in self.open_.values():
            self.blocks.close(sequence.table)
        for name in self.swapped:
            self.blocks.drop_swapped(name)
        self.blocks.check_integrity()
        assert self.blocks.held_units == self.blocks.swapped_units == 0
        assert self.blocks.leased_units == self.blocks.lent_units == 0
        assert self.blocks.available_units == self.blocks.unclaimed_units == self.num_units


class OneSize(Machine):
    mixed_sizes = False


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
OneSize.TestCase.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestMachine = Machine.TestCase
TestOneSize = OneSize.TestCase


def run_through(blocks: BlockManager, name: str, tokens: list[int], salt: str | None = "") -> Table:
    table = blocks.open(name, tokens, salt)
    blocks.grow(table, len(tokens))
    blocks.commit(table, tokens, len(tokens))
    return table


def test_a_closed_sequences_full_units_are_found_again_but_never_the_whole_prompt():
    blocks = BlockManager(8, SIZE)
    tokens = list(range(16))
    blocks.close(run_through(blocks, "a", tokens))
    assert blocks.lookup(tokens, "") == 8
    assert blocks.lookup([*tokens, 1], "") == 16
    assert blocks.lookup([*tokens, 1], "other") == 0
    assert blocks.lookup([9, *tokens], "") == 0


def test_a_32_block_serves_a_sequence_that_shares_only_24_of_its_tokens():
    blocks = BlockManager(256, SIZE)
    tokens = list(range(600))
    table = run_through(blocks, "a", tokens)
    assert table.units[:4] == list(range(table.units[0], table.units[0] + 4))
    other = blocks.open("b", [*tokens[:24], *[7] * 30], "")
    assert other.units == table.units[:3]
    assert other.cached_tokens == 24


def test_a_running_sequences_prefix_is_shared_and_counted_once():
    blocks = BlockManager(8, SIZE)
    tokens = list(range(20))
    first = run_through(blocks, "a", tokens)
    assert blocks.demand(tokens, "", 21) == 1
    second = run_through(blocks, "b", tokens)
    assert (second.cached_tokens, second.shared) == (16, 2)
    assert (blocks.held_units, blocks.duplicate_units) == (4, 2)
    blocks.close(first)
    assert blocks.held_units == 3
    assert blocks.table("b") == second.units


def test_uncomputed_units_are_not_found():
    blocks = BlockManager(8, SIZE)
    tokens = list(range(20))
    table = blocks.open("a", tokens, "")
    blocks.grow(table, 20)
    blocks.commit(table, tokens, 15)
    assert blocks.lookup(tokens, "") == 8


def test_free_units_go_first_then_the_longest_idle_tails_before_prefixes():
    blocks = BlockManager(4, SIZE)
    old, young = list(range(16)), list(range(100, 108))
    blocks.close(run_through(blocks, "old", old))
    blocks.close(run_through(blocks, "young", young))
    table = blocks.open("c", [1], "")
    blocks.grow(table, 8)
    assert blocks.evictions_total == 0
    blocks.grow(table, 16)
    assert blocks.evictions_total == 1
    assert blocks.lookup([*old, 0], "") == 8
    assert blocks.lookup([*young, 0], "") == 8
    blocks.grow(table, 24)
    assert blocks.lookup([*old, 0], "") == 0
    assert blocks.lookup([*young, 0], "") == 8


def test_without_a_prefix_cache_nothing_is_found_and_everything_is_free_again():
    blocks = BlockManager(4, SIZE, prefix_cache=False)
    blocks.close(run_through(blocks, "a", list(range(16))))
    assert blocks.lookup(list(range(17)), "") == 0
    assert blocks.demand(list(range(17)), "", 18) == 3
    assert blocks.available_units == 4
    blocks.check_integrity()


def test_a_sequence_without_a_salt_finds_nothing_and_leaves_nothing_to_find():
    blocks = BlockManager(8, SIZE)
    tokens = list(range(20))
    run_through(blocks, "a", tokens)
    assert blocks.lookup(tokens, None) == 0
    assert blocks.demand(tokens, None, 21) == 3
    private = run_through(blocks, "b", tokens, None)
    assert (private.cached_tokens, blocks.duplicate_units) == (0, 0)
    blocks.close(private)
    assert blocks.available_units == 5
    blocks.check_integrity()
    own = list(range(100, 120))
    blocks.close(run_through(blocks, "c", own, None))
    assert blocks.lookup(own, "") == 0


def test_two_sequences_that_compute_the_same_keep_their_own_units():
    blocks = BlockManager(8, SIZE)
    tokens = list(range(20))
    tables = [blocks.open(name, tokens, "") for name in ("a", "b")]
    for table in tables:
        blocks.grow(table, 20)
    for table in tables:
        blocks.commit(table, tokens, 20)
    assert not set(tables[0].units) & set(tables[1].units)
    blocks.close(tables[1])
    assert blocks.held_units == 3
    blocks.check_integrity()
    assert blocks.open("c", tokens, "").units == tables[0].units[:2]


def test_commit_looks_only_at_units_that_became_full():
    class Watched(list):
        def __getitem__(self, key):
            touched.append(key)
            return super().__getitem__(key)

    touched: list[slice] = []
    blocks = BlockManager(8, SIZE)
    tokens = Watched(range(40))
    table = blocks.open("a", [1], "")
    blocks.grow(table, 40)
    blocks.commit(table, tokens, 33)
    assert len(touched) == 4
    assert table.commit_at == 40
    touched.clear()
    for computed in range(34, 41):
        blocks.commit(table, tokens, computed)
    assert touched == [slice(32, 40)]


def test_long_sequences_take_32s_and_short_ones_8s():
    blocks = BlockManager(256, SIZE)
    short = blocks.open("short", [1] * 20, "", 60)
    blocks.grow(short, 20)
    assert not short.ahead
    long = blocks.open("long", [2] * 600, "", 700)
    blocks.grow(long, 600)
    assert long.quads == 18
    assert len(long.units) == 75
    assert len(long.ahead) == 1
    assert blocks.runs_total == (3, 0, 19)
    assert blocks.wide_share == 72 / 78
    assert blocks.held_units == 78  # a unit ahead is available to all
    before = list(long.units)
    blocks.grow(long, 608)
    assert long.units == [*before, before[-1] + 1]
    assert blocks.runs_total == (3, 0, 19)


def test_runs_stay_whole_in_a_pool_that_is_full_of_cached_prefixes():
    blocks = BlockManager(2048, SIZE)
    lengths = [520 + 37 * i % 200 for i in range(120)]
    running: list[Table] = []
    for i, length in enumerate(lengths):
        if len(running) == 12:
            blocks.close(running.pop(i % 12))
        tokens = list(range(1000 * i, 1000 * i + length))
        table = blocks.open(str(i), tokens, "", length + 40)
        for end in (*range(64, length, 64), length):
            blocks.grow(table, end)
            blocks.commit(table, tokens, end)
        running.append(table)
    blocks.check_integrity()
    assert blocks.evictions_total > 4000
    assert blocks.wide_share > 0.9


def test_blocks_of_one_size_are_single_units():
    blocks = BlockManager(256, 16, mixed_sizes=False)
    table = blocks.open("a", [2] * 1000, "", 2000)
    blocks.grow(table, 1000)
    assert not table.ahead
    assert blocks.runs_total == (63, 0, 0)


def test_units_set_aside_are_lent_from_the_far_end_and_equal_ones_come_back():
    blocks = BlockManager(8, SIZE, prefix_cache=False)
    owner = blocks.open("owner", [1] * 8, "", 40)
    owner.order = 2
    blocks.grow(owner, 8)
    assert (owner.units, owner.ahead) == ([0], [3, 2, 1])
    other = blocks.open("other", [2] * 40, "", 40)
    assert (other.lease.claim, other.lease.short) == (3, 2)
    blocks.grow(other, 40)
    assert other.units[-1] == 3
    assert owner.ahead == [2, 1]
    assert blocks.lent_units == other.lease.debt == 2
    blocks.grow(owner, 24)
    assert owner.units == [0, 1, 2]
    assert not blocks.available_units
    assert list(blocks.borrowers()) == ["other"]
    blocks.close(other)
    blocks.grow(owner, 40)
    assert len(owner.units) == 5
    assert blocks.lent_units == 0
    blocks.check_integrity()


def test_a_reservation_is_taken_over_by_its_table_or_given_up():
    blocks = BlockManager(8, SIZE)
    assert blocks.reserve("a", 33) == 5
    assert blocks.reserve("b", 100) == 3
    assert blocks.reserve("c", 8) == 0
    assert blocks.reserved_units == blocks.leased_units == 8
    blocks.release("b")
    assert blocks.unclaimed_units == 3
    table = blocks.open("a", [1] * 33, "")
    assert table.lease.claim == 5
    assert blocks.reserved_units == 0
    blocks.release("a")
    blocks.check_integrity()


def test_a_reservation_is_kept_from_others_that_are_short():
    blocks = BlockManager(8, SIZE)
    blocks.reserve("a", 40)
    other = blocks.open("other", [1] * 64, "")
    assert (other.lease.claim, other.lease.short) == (3, 5)
    assert blocks.open("a", [2] * 40, "").lease.claim == 5
    blocks.check_integrity()


def test_swapping_more_than_there_is_or_a_running_sequence_is_an_error():
    blocks = BlockManager(8, SIZE, host_places=8)
    table = run_through(blocks, "a", list(range(20)))
    with pytest.raises(EngineError, match="a: 25 tokens to swap out of 24"):
        blocks.swap_out(table, 25)
    with pytest.raises(EngineError, match="a: 0 tokens to swap out"):
        blocks.swap_out(table, 0)
    with pytest.raises(EngineError, match="a is not swapped out"):
        blocks.swap_in(table)
    blocks.swap_out(table, 20)
    with pytest.raises(IntegrityError, match="a table and is swapped out"):
        blocks.check_integrity()
    blocks.close(table)
    blocks.check_integrity()


def test_wrong_use_is_an_error_that_names_the_sequence():
    blocks = BlockManager(2, SIZE)
    table = blocks.open("a", [1], "")
    with pytest.raises(EngineError, match="a holds units already"):
        blocks.open("a", [1], "")
    with pytest.raises(EngineError, match="b holds no units"):
        blocks.table("b")
    with pytest.raises(EngineError, match="needs 3 more units, 2 are available"):
        blocks.grow(table, 17)
    with pytest.raises(EngineError, match="1 tokens computed, but 1 known and units for 0 held"):
        blocks.commit(table, [1], 1)
    with pytest.raises(EngineError, match="a pool of 0 units"):
        BlockManager(0, SIZE)
    with pytest.raises(EngineError, match="units of 0 tokens"):
        BlockManager(1, 0)


@pytest.mark.parametrize(
    "harm",
    [
        lambda b, t: b._pool.give(t.units[0]),
        lambda b, t: b._pool.take(0),
        lambda b, t: b._holders.__setitem__(t.units[0], 2),
        lambda b, t: b._cache._keys.__setitem__(t.units[0], b""),
        lambda b, t: b._cache.rest(t.units[0]),
        lambda b, t: b._cache.rest(b._pool.take(0)),
        lambda b, t: t.units.append(t.units[0]),
        lambda b, t: t.units.append(b.num_units),
        lambda b, t: t.ahead.clear(),
        lambda b, t: b._spare.clear(),
        lambda b, t: setattr(t, "capacity", 8),
        lambda b, t: setattr(t, "quads", 7),
        lambda b, t: setattr(b, "_quads", 7),
        lambda b, t: setattr(t.lease, "claim", 0),
        lambda b, t: b._reservations.__setitem__("a", t.lease),
    ],
)
def test_check_integrity_sees_a_broken_structure(harm):
    blocks = BlockManager(16, SIZE)
    table = blocks.open("a", list(range(40)), "", 60)
    table.order = 2
    blocks.grow(table, 40)
    blocks.commit(table, list(range(40)), 40)
    assert table.ahead
    blocks.check_integrity()
    harm(blocks, table)
    with pytest.raises(IntegrityError):
        blocks.check_integrity()
