from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tailrace.engine.block_manager import BlockManager
from tailrace.errors import EngineError, IntegrityError

SIZE = 8


@dataclass
class ModelSequence:
    tokens: list[int]
    salt: str
    computed: int
    table: list[int]

    def content(self, index: int) -> tuple[str, tuple[int, ...]]:
        """What a full block holds, spelled out: the salt and every token up to its end."""
        return self.salt, tuple(self.tokens[: (index + 1) * Machine.size])


class Machine(RuleBasedStateMachine):
    """Drives the manager at random, and beside it a model without hashes and reference counts."""

    size = 2
    num_blocks = 10
    names = Bundle("names")

    def __init__(self):
        super().__init__()
        self.blocks = BlockManager(self.num_blocks, self.size)
        self.open_: dict[str, ModelSequence] = {}
        self.cached: dict[tuple[str, tuple[int, ...]], int] = {}
        self.idle: list[int] = []
        self.opened = self.hits = self.queries = self.evictions = 0

    @property
    def held(self) -> set[int]:
        return {block for sequence in self.open_.values() for block in sequence.table}

    def prefix(self, tokens: list[int], salt: str) -> list[int]:
        found = []
        for end in range(self.size, len(tokens), self.size):
            block = self.cached.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            found.append(block)
        return found

    @rule(
        target=names,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "a"]),
    )
    def open(self, tokens, salt):
        name = f"s{self.opened}"
        self.opened += 1
        found = self.prefix(tokens, salt)
        before = self.blocks.free_blocks
        assert self.blocks.lookup(tokens, salt) == len(found) * self.size < len(tokens)
        assert self.blocks.free_blocks == before
        assert self.blocks.open(name, tokens, salt) == len(found) * self.size
        assert self.blocks.table(name) == found
        self.idle = [block for block in self.idle if block not in found]
        self.open_[name] = ModelSequence(list(tokens), salt, len(found) * self.size, found)
        self.hits += len(found) * self.size
        self.queries += len(tokens)
        return name

    @rule(name=names, extra=st.integers(0, 6), more=st.lists(st.integers(0, 1), max_size=4))
    def compute(self, name, extra, more):
        sequence = self.open_[name]
        sequence.tokens += more
        end = min(len(sequence.tokens), sequence.computed + extra)
        missing = max(0, -(-end // self.size) - len(sequence.table))
        available = self.num_blocks - len(self.held)
        assert self.blocks.can_grow(name, end) is (missing <= available)
        if missing > available:
            with pytest.raises(EngineError, match="more blocks"):
                self.blocks.grow(name, end)
            assert self.blocks.table(name) == sequence.table
            return
        self.grow(name, end, max(0, missing - (available - len(self.idle))))
        self.blocks.commit(name, sequence.tokens, end)
        # Once: a block stays unregistered even when the one that had its content goes later.
        for index in range(sequence.computed // self.size, end // self.size):
            self.cached.setdefault(sequence.content(index), sequence.table[index])
        sequence.computed = end

    def grow(self, name, end, evicted):
        sequence = self.open_[name]
        gone, self.idle = self.idle[:evicted], self.idle[evicted:]
        self.cached = {key: block for key, block in self.cached.items() if block not in gone}
        held = self.held
        self.blocks.grow(name, end)
        new = self.blocks.table(name)[len(sequence.table) :]
        assert self.blocks.table(name)[: len(sequence.table)] == sequence.table
        assert new[len(new) - evicted :] == gone
        assert not held & set(new)
        assert not set(self.idle) & set(new)
        sequence.table = list(self.blocks.table(name))
        self.evictions += evicted

    @rule(name=consumes(names), forget=st.booleans())
    def close(self, name, forget):
        self.blocks.close(name, forget=forget)
        table = self.open_.pop(name).table
        if forget:
            self.cached = {key: block for key, block in self.cached.items() if block not in table}
        registered = set(self.cached.values())
        self.idle += [b for b in reversed(table) if b not in self.held and b in registered]
        with pytest.raises(EngineError, match=f"{name} holds no blocks"):
            self.blocks.table(name)

    @rule(name=names)
    def misuse(self, name):
        sequence = self.open_[name]
        with pytest.raises(EngineError, match="holds blocks already"):
            self.blocks.open(name, sequence.tokens, sequence.salt)
        with pytest.raises(EngineError, match="tokens computed, but"):
            self.blocks.commit(name, sequence.tokens, len(sequence.tokens) + 1)
        with pytest.raises(EngineError, match="nobody holds no blocks"):
            self.blocks.close("nobody")

    @invariant()
    def agrees(self):
        self.blocks.check_integrity()
        assert self.blocks.held_blocks == len(self.held)
        assert self.blocks.free_blocks == self.num_blocks - len(self.held)
        assert list(self.blocks._idle) == self.idle
        assert self.blocks.hit_tokens_total == self.hits
        assert self.blocks.query_tokens_total == self.queries
        assert self.blocks.evictions_total == self.evictions

    def teardown(self):
        for name in self.open_:
            self.blocks.close(name)
        self.blocks.check_integrity()
        assert self.blocks.held_blocks == 0


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


def run_through(blocks: BlockManager, name: str, tokens: list[int], salt: str = "") -> int:
    cached = blocks.open(name, tokens, salt)
    blocks.grow(name, len(tokens))
    blocks.commit(name, tokens, len(tokens))
    return cached


def test_a_closed_sequences_full_blocks_are_found_again_but_never_the_whole_prompt():
    blocks = BlockManager(8, SIZE)
    tokens = list(range(16))
    assert run_through(blocks, "a", tokens) == 0
    blocks.close("a")
    assert blocks.lookup(tokens, "") == 8
    assert blocks.lookup([*tokens, 1], "") == 16
    assert blocks.lookup([*tokens, 1], "other") == 0
    assert blocks.lookup([9, *tokens], "") == 0


def test_a_running_sequences_prefix_is_shared_and_counted_once():
    blocks = BlockManager(8, SIZE)
    tokens = list(range(20))
    run_through(blocks, "a", tokens)
    assert run_through(blocks, "b", tokens) == 16
    assert blocks.held_blocks == 4
    blocks.close("a")
    assert blocks.held_blocks == 3
    assert blocks.table("b")


def test_uncomputed_blocks_are_not_found():
    blocks = BlockManager(8, SIZE)
    tokens = list(range(20))
    blocks.open("a", tokens, "")
    blocks.grow("a", 20)
    blocks.commit("a", tokens, 15)
    assert blocks.lookup(tokens, "") == 8


def test_free_blocks_go_first_then_the_longest_idle_tails_before_prefixes():
    blocks = BlockManager(4, SIZE)
    old, young = list(range(16)), list(range(100, 108))
    run_through(blocks, "old", old)
    blocks.close("old")
    run_through(blocks, "young", young)
    blocks.close("young")
    blocks.open("c", [1], "")
    blocks.grow("c", 8)
    assert blocks.evictions_total == 0
    blocks.grow("c", 16)
    assert blocks.evictions_total == 1
    assert blocks.lookup([*old, 0], "") == 8
    assert blocks.lookup([*young, 0], "") == 8
    blocks.grow("c", 24)
    assert blocks.lookup([*old, 0], "") == 0
    assert blocks.lookup([*young, 0], "") == 8


def test_without_a_prefix_cache_nothing_is_found_and_everything_is_free_again():
    blocks = BlockManager(4, SIZE, prefix_cache=False)
    run_through(blocks, "a", list(range(16)))
    blocks.close("a")
    assert blocks.lookup(list(range(17)), "") == 0
    assert blocks.free_blocks == 4
    blocks.check_integrity()


def test_two_sequences_that_compute_the_same_keep_their_own_blocks():
    blocks = BlockManager(8, SIZE)
    tokens = list(range(20))
    for name in ("a", "b"):
        blocks.open(name, tokens, "")
        blocks.grow(name, 20)
    for name in ("a", "b"):
        blocks.commit(name, tokens, 20)
    assert not set(blocks.table("a")) & set(blocks.table("b"))
    blocks.close("b")
    assert blocks.held_blocks == 3
    blocks.check_integrity()
    assert blocks.open("c", tokens, "") == 16
    assert blocks.table("c") == blocks.table("a")[:2]


def test_commit_looks_only_at_blocks_that_became_full():
    class Watched(list):
        def __getitem__(self, key):
            touched.append(key)
            return super().__getitem__(key)

    touched: list[slice] = []
    blocks = BlockManager(8, SIZE)
    tokens = Watched(range(40))
    blocks.open("a", [1], "")
    blocks.grow("a", 40)
    blocks.commit("a", tokens, 33)
    assert len(touched) == 4
    touched.clear()
    for computed in range(34, 41):
        blocks.commit("a", tokens, computed)
    assert touched == [slice(32, 40)]


def test_wrong_use_is_an_error_that_names_the_sequence():
    blocks = BlockManager(2, SIZE)
    blocks.open("a", [1], "")
    with pytest.raises(EngineError, match="a holds blocks already"):
        blocks.open("a", [1], "")
    for use in (
        lambda: blocks.grow("b", 1),
        lambda: blocks.can_grow("b", 1),
        lambda: blocks.table("b"),
        lambda: blocks.commit("b", [1], 1),
        lambda: blocks.close("b"),
    ):
        with pytest.raises(EngineError, match="b holds no blocks"):
            use()
    with pytest.raises(EngineError, match="needs 3 more blocks, 2 are free"):
        blocks.grow("a", 17)
    with pytest.raises(EngineError, match="1 tokens computed, but 1 known and blocks for 0 held"):
        blocks.commit("a", [1], 1)
    with pytest.raises(EngineError, match="a pool of 0 blocks"):
        BlockManager(0, SIZE)


@pytest.mark.parametrize(
    "harm",
    [
        lambda b: b._free.append(b.table("a")[0]),
        lambda b: b._free.pop(),
        lambda b: b._holders.__setitem__(b.table("a")[0], 2),
        lambda b: b._keys.clear(),
        lambda b: b._cached.clear(),
        lambda b: b._idle.__setitem__(b._free.pop(), None),
        lambda b: b._idle.__setitem__(b.table("a")[0], None),
        lambda b: b._free.append(b.num_blocks),
        lambda b: b.table("a").append(b.table("a")[0]),
    ],
)
def test_check_integrity_sees_a_broken_structure(harm):
    blocks = BlockManager(4, SIZE)
    run_through(blocks, "a", list(range(8)))
    blocks.check_integrity()
    harm(blocks)
    with pytest.raises(IntegrityError):
        blocks.check_integrity()
