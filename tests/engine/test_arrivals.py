"""Requests before the scheduler has them; through an engine: test_early_prompts, test_grammar."""

from concurrent.futures import Future

import pytest

from tailrace.clock import VirtualClock
from tailrace.engine.arrivals import Arrivals
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.scheduler import Scheduler
from tailrace.text.grammar import GrammarError
from tailrace.types import EngineRequest, GrowPrompt, ReserveKv, SamplingParams

CONTEXT, VOCAB = 64, 100


class Compiler:
    """Compiles when it is told to."""

    def __init__(self):
        self.asked = []

    def compile_soon(self, text):
        self.asked.append(Future())
        return self.asked[-1]


class Bench:
    def __init__(self):
        self.clock, self.compiler, self.queued = VirtualClock(), Compiler(), {}
        self.blocks = BlockManager(64, 8)
        self.arrivals = Arrivals(
            Scheduler(self.blocks, max_batch_size=4, token_budget=32),
            self.clock,
            self.queued.keys(),
            context_length=CONTEXT,
            vocab_size=VOCAB,
            grammars=self.compiler,
        )

    def compile(self, name, key=""):
        asked = request(name, key=key, grammar="a")
        self.arrivals.compile(asked, self.compiler)
        return self.compiler.asked[-1]


@pytest.fixture
def bench():
    return Bench()


def request(name, ids=(1, 2, 3), key="", grammar=""):
    sampling = SamplingParams(max_tokens=4, grammar=grammar)
    return EngineRequest(
        request_id=name, token_ids=list(ids), sampling=sampling, arrival_s=0.0, key=key
    )


def test_grammars_come_back_as_they_are_done_with_what_is_wrong_with_them(bench):
    done = {name: bench.compile(name, key=name[0]) for name in ("a-0", "a-1", "b-0", "b-1")}
    assert (bench.arrivals.compiling, bench.arrivals.compiling_of("a")) == (4, 2)
    assert list(bench.arrivals.compiled(is_idle=False)) == []
    done["b-0"].set_result("grammar")
    done["a-0"].set_exception(GrammarError("no such rule"))
    done["b-1"].set_exception(ZeroDivisionError())
    found = {
        asked.request_id: (grammar, fault)
        for asked, grammar, fault in bench.arrivals.compiled(is_idle=True)
    }
    assert found == {
        "a-0": (None, "the grammar is refused: no such rule"),
        "b-0": ("grammar", ""),
        "b-1": (None, "the engine failed at this grammar"),
    }
    assert (bench.arrivals.compiling, bench.arrivals.is_whole("a-1")) == (1, True)
    assert not bench.arrivals.is_whole("a-0")


def test_a_cancelled_grammar_is_not_compiled(bench):
    compiled = bench.compile("a-0")
    assert bench.arrivals.cancel("a-0")
    assert compiled.cancelled()
    assert not bench.arrivals.cancel("a-0")
    assert bench.arrivals.compiling == 0


def test_a_lease_ends_with_its_deadline_or_goes_over_to_its_request(bench):
    for name in ("late", "comes"):
        bench.arrivals.reserve(ReserveKv(name, 16, lifetime_s=5.0))
    assert bench.blocks.reserved_units == 4
    sequence = bench.arrivals.sequence_of(request("comes"))
    assert (sequence.request_id, sequence.num_prompt) == ("comes", 3)
    bench.clock.advance(5.0)
    bench.arrivals.expire()
    assert bench.blocks.reserved_units == 2  # the request's own, which the scheduler takes over


@pytest.mark.parametrize("where", ["queued", "compiling", "leased"])
def test_who_is_known_gets_no_second_lease(bench, where):
    if where == "queued":
        bench.queued["r"] = None
    elif where == "compiling":
        bench.compile("r")
    else:
        bench.arrivals.reserve(ReserveKv("r", 8, lifetime_s=5.0))
    before = bench.blocks.reserved_units
    bench.arrivals.reserve(ReserveKv("r", 16, lifetime_s=5.0))
    assert bench.blocks.reserved_units == before


@pytest.mark.parametrize(
    "ids", [[], [-1], [VOCAB], list(range(CONTEXT))], ids=["none", "negative", "unknown", "long"]
)
def test_a_piece_that_no_prompt_can_have_is_ignored(bench, ids):
    bench.arrivals.grow(GrowPrompt("r", 0, ids, lifetime_s=5.0))
    assert bench.blocks.reserved_units == 0
    bench.arrivals.grow(GrowPrompt("r", 0, [1] * 8, lifetime_s=5.0))
    assert bench.blocks.reserved_units > 0
