import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tailrace.engine.block_manager import BlockManager
from tailrace.errors import EngineError, IntegrityError

SIZE = 8


class Machine(RuleBasedStateMachine):
    """Drives the manager at random; `content` is the oracle: the tokens each block really holds."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.blocks = BlockManager(12, SIZE)
        self.tokens: dict[str, list[int]] = {}
        self.salts: dict[str, str] = {}
        self.computed: dict[str, int] = {}
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.opened = 0

    def write(self, name: str, end: int) -> None:
        table = self.blocks.table(name)
        for i in range(self.computed[name] // SIZE, -(-end // SIZE)):
            prefix = tuple(self.tokens[name][: (i + 1) * SIZE][: max(end, 0)])
            self.content[table[i]] = (self.salts[name], prefix)

    @rule(
        target=sequences,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        salt=st.sampled_from(["", "a"]),
    )
    def open(self, tokens, salt):
        name = f"s{self.opened}"
        self.opened += 1
        expected = self.blocks.lookup(tokens, salt)
        cached = self.blocks.open(name, tokens, salt)
        assert cached == expected
        assert cached % SIZE == 0
        assert cached < len(tokens)
        for i, block in enumerate(self.blocks.table(name)):
            assert self.content[block] == (salt, tuple(tokens[: (i + 1) * SIZE]))
        self.tokens[name], self.salts[name], self.computed[name] = list(tokens), salt, cached
        return name

    @rule(name=sequences, extra=st.integers(1, 20), more=st.lists(st.integers(0, 1), max_size=12))
    def compute(self, name, extra, more):
        self.tokens[name] += more
        end = min(len(self.tokens[name]), self.computed[name] + extra)
        if not self.blocks.can_grow(name, end):
            before = (self.blocks.free_blocks, list(self.blocks.table(name)))
            with pytest.raises(EngineError):
                self.blocks.grow(name, end)
            assert before == (self.blocks.free_blocks, self.blocks.table(name))
            return
        self.blocks.grow(name, end)
        assert len(self.blocks.table(name)) * SIZE >= end
        self.write(name, end)
        self.computed[name] = end
        self.blocks.commit(name, self.tokens[name], end)

    @rule(name=consumes(sequences))
    def close(self, name):
        self.blocks.close(name)
        with pytest.raises(EngineError):
            self.blocks.table(name)

    @invariant()
    def is_whole(self):
        self.blocks.check_integrity()

    def teardown(self):
        for name in list(self.blocks._tables):
            self.blocks.close(name)
        self.blocks.check_integrity()
        assert self.blocks.held_blocks == 0
        assert self.blocks.free_blocks == 12


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


def test_wrong_use_is_an_error_that_names_the_sequence():
    blocks = BlockManager(2, SIZE)
    blocks.open("a", [1], "")
    with pytest.raises(EngineError, match="a holds blocks already"):
        blocks.open("a", [1], "")
    with pytest.raises(EngineError, match="b holds no blocks"):
        blocks.grow("b", 1)
    with pytest.raises(EngineError, match="needs 3 more blocks, 2 are free"):
        blocks.grow("a", 17)


@pytest.mark.parametrize(
    "harm",
    [
        lambda b: b._free.append(b.table("a")[0]),
        lambda b: b._free.pop(),
        lambda b: b._holders.__setitem__(b.table("a")[0], 2),
        lambda b: b._keys.clear(),
    ],
)
def test_check_integrity_sees_a_broken_structure(harm):
    blocks = BlockManager(4, SIZE)
    run_through(blocks, "a", list(range(8)))
    blocks.check_integrity()
    harm(blocks)
    with pytest.raises(IntegrityError):
        blocks.check_integrity()
