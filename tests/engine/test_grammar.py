"""Sequences with a grammar through the real scheduler, runners and samplers, on a tiny model."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tailrace.clock import VirtualClock
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.cuda_runner import CudaRunner
from tailrace.engine.device_result import DeviceResult
from tailrace.engine.device_sampler import DeviceSampler
from tailrace.engine.engine import Engine
from tailrace.engine.runner import Runner
from tailrace.engine.sampler import Sampler
from tailrace.engine.scheduler import Scheduler
from tailrace.kernels.torch_kernels import TorchKernels
from tailrace.models.loader import load_model
from tailrace.text.grammar import GrammarCompiler
from tailrace.types import EngineRequest, ReserveKv, SamplingParams, StepCosts, TokenOutput
from tests.support.interpreter import quietly
from tests.support.tiny import EOS_ID, VOCAB_SIZE, make_tiny_checkpoint

SLOTS, UNIT, UNITS, CONTEXT = 4, 8, 64, 192
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "s": {"type": "string", "maxLength": 6},
    },
    "required": ["ok", "n", "s"],
    "additionalProperties": False,
}
SHORT = LLMatcher.grammar_from_regex("(yes|no)[0-9]")  # Triton's interpreter is slow
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})


@pytest.fixture(autouse=True)
def _quiet_interpreter():
    """Triton's interpreter is NumPy, which warns of what a GPU does silently."""
    with quietly():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Heads of 32: Triton multiplies no narrower tiles than 16.
    return make_tiny_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=1)


@pytest.fixture(scope="module")
def grammars(folder):
    compiler = GrammarCompiler(folder, VOCAB_SIZE, [EOS_ID])
    yield compiler
    compiler.close()


@dataclass
class Ran:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, TokenOutput] = field(default_factory=dict)

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.last[output.request_id] = output

    def text(self, request_id: str) -> str:
        last = self.last[request_id]
        ids = self.tokens[request_id]
        return bytes(ids if last.stop_token_id is None else ids[:-1]).decode()


def make_runner(folder, kind="cpu", units=UNITS):
    if kind == "cpu":
        model = load_model(folder, dtype="float32", kernels=TorchKernels())
        sampler = Sampler(SLOTS, VOCAB_SIZE, [EOS_ID], 0)
        return Runner(model, sampler, num_blocks=units, block_size=UNIT, num_slots=SLOTS)
    triton_kernels = pytest.importorskip("tailrace.kernels.triton_kernels")
    device = torch.device("cpu")
    kernels = triton_kernels.TritonKernels(device, "float32")
    return CudaRunner(
        load_model(folder, dtype="float32", kernels=kernels),
        DeviceSampler(SLOTS, VOCAB_SIZE, [EOS_ID], 0, device=device),
        kernels,
        num_blocks=units,
        block_size=UNIT,
        num_slots=SLOTS,
        context_length=CONTEXT,
        token_budget=32,
        kv_dtype=torch.float32,
    )


def make_engine(folder, grammars, *, kind="cpu", submit=None, units=UNITS, surprised=False):
    """Make an engine; a surprised one has only ever seen answers of one token."""
    runner = make_runner(folder, kind, units)
    scheduler = Scheduler(
        BlockManager(units, UNIT, prefix_cache=False, mixed_sizes=True),
        max_batch_size=SLOTS,
        token_budget=32,
    )
    for _ in range(20 * surprised):
        scheduler.answers.observe(1)
    return Engine(
        scheduler,
        runner,
        submit=submit or run_now,
        clock=VirtualClock(),
        context_length=CONTEXT,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS_ID],
        grammars=grammars,
    )


def run_now(function, *args) -> Future:
    done: Future = Future()
    done.set_result(function(*args))
    return done


def request(name, grammar="", prompt=b"Say:", **sampling) -> EngineRequest:
    given = {"max_tokens": 100, "seed": len(name), **sampling}
    return EngineRequest(
        request_id=name,
        token_ids=list(prompt),
        sampling=SamplingParams(**given, grammar=grammar),
        arrival_s=0.0,
    )


def run(engine, requests, limit=20_000) -> Ran:
    ran = Ran()
    for one in requests:
        refused = engine.add(one)
        ran.take([] if refused is None else [refused])
    for _ in range(limit):
        if not engine.has_work:
            assert engine.scheduler.blocks.available_units == engine.scheduler.blocks.num_units
            return ran
        ran.take(engine.step())
    raise AssertionError("not done")


def fits(text) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"ok", "n", "s"}
        and isinstance(value["ok"], bool)
        and 0 <= value["n"] <= 999
        and len(value["s"]) <= 6
    )


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_output_fits_and_ends_with_its_last_brace(folder, grammars, temperature):
    names = ["a", "bb", "ccc", "dddd", "eeeee"]
    ran = run(
        make_engine(folder, grammars),
        [request(name, JSON, temperature=temperature) for name in names],
    )
    for name in names:
        assert fits(ran.text(name))
        assert ran.last[name].finish_reason == "stop"
        assert ran.last[name].stop_token_id is None
        assert ran.tokens[name][-1] == ord("}")


def test_an_end_of_sequence_token_ends_it_where_more_could_follow(folder, grammars):
    digits = LLMatcher.grammar_from_regex("[0-9]+")
    bias = {EOS_ID: 50.0}
    ran = run(make_engine(folder, grammars), [request("a", digits, logit_bias=bias)])
    assert ran.last["a"].stop_token_id == EOS_ID
    assert len(ran.text("a")) == 1  # never before the first digit
    assert ran.text("a").isdigit()


def test_a_result_that_is_settled_is_not_kept_for_the_next_grammar(folder, grammars):
    engine = make_engine(folder, grammars, kind="gpu")
    run(engine, [request("a", LLMatcher.grammar_from_regex("y"))])
    run(engine, [request("b", max_tokens=1)])
    assert engine.runner._unsettled == []


def test_waiting_for_the_ids_that_a_mask_needs_is_no_queueing(folder, grammars, monkeypatch):
    """Else a step with a grammar seems to take the host as long as the one before the device."""
    engine, clock = make_engine(folder, grammars, kind="gpu"), VirtualClock()
    settle, execute, found = DeviceResult._settle, engine.runner.execute, []

    def settled(result):
        clock.advance(8.0)  # until the device is done
        return settle(result)

    def timed(prepared):
        clock.advance(1.0)
        result = execute(prepared)
        found.append(result.queue_s)
        return result

    def drawn(*args):
        clock.advance(2.0)
        return sample(*args)

    sample = engine.runner.sampler.sample
    monkeypatch.setattr(DeviceResult, "_settle", settled)
    monkeypatch.setattr(engine.runner.sampler, "sample", drawn)
    monkeypatch.setattr(engine.runner, "execute", timed)
    monkeypatch.setattr("tailrace.engine.cuda_runner.time", SimpleNamespace(perf_counter=clock))
    run(engine, [request("a", SHORT)])
    assert set(found) == {2.0}


def test_max_tokens_cuts_with_length_and_a_complete_one_is_a_stop(folder, grammars):
    yes = LLMatcher.grammar_from_regex("yes")
    ran = run(
        make_engine(folder, grammars),
        [request("cut", yes, max_tokens=2), request("whole", yes, max_tokens=3)],
    )
    assert (ran.text("cut"), ran.last["cut"].finish_reason) == ("ye", "length")
    assert (ran.text("whole"), ran.last["whole"].finish_reason) == ("yes", "stop")


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_neighbours_draw_what_they_draw_alone(folder, grammars, kind):
    free = [
        request("free", temperature=0.9, max_tokens=4),
        request("greedy", temperature=0.0, max_tokens=3, prompt=b"Other"),
    ]
    bound = [request("bound", SHORT), request("b2", SHORT, temperature=0.0)]
    alone = run(make_engine(folder, grammars, kind=kind), free)
    beside = run(make_engine(folder, grammars, kind=kind), [free[0], *bound, free[1]])
    for name in ("free", "greedy"):
        assert beside.tokens[name] == alone.tokens[name]
    assert re.fullmatch("(yes|no)[0-9]", beside.text("bound"))


def test_the_gpus_runner_draws_the_cpus_tokens(folder, grammars):
    requests = [
        request("a", JSON, max_tokens=6),
        request("bb", SHORT, temperature=0.0, logprobs=2),
        request("ccc", LLMatcher.grammar_from_regex("[a-f]{4}"), top_p=0.9),
        request("dddd", SHORT, repetition_penalty=1.3, logit_bias={ord("n"): 50.0}),
    ]
    on_cpu = run(make_engine(folder, grammars), requests)
    on_gpu = run(make_engine(folder, grammars, kind="gpu"), requests)
    assert on_gpu.tokens == on_cpu.tokens
    assert on_gpu.text("dddd").startswith("no")
    assert on_gpu.last["bb"].finish_reason == "stop"


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_overlapped_steps_bring_the_same_tokens(folder, grammars, kind):
    """The runner on a thread of its own, a step ahead, as in the worker."""
    grammar, names = (JSON, ["a", "bb", "ccc", "dddd", "eeeee"]) if kind == "cpu" else (SHORT, "ab")
    requests = [request(name, grammar) for name in names]
    expected = run(make_engine(folder, grammars, kind=kind), requests)
    with ThreadPoolExecutor(1) as pool:
        engine = make_engine(folder, grammars, kind=kind, submit=pool.submit)
        assert run(engine, requests).tokens == expected.tokens


@pytest.mark.slow
def test_a_preempted_sequence_goes_on_in_its_grammar(folder, grammars):
    long = LLMatcher.grammar_from_regex("([a-z]{3}-){24}end")
    requests = [request(name, long, prompt=b"x" * 20) for name in ("a", "bb", "ccc", "dddd")]
    engine = make_engine(folder, grammars, units=26, surprised=True)
    ran = run(engine, requests)
    assert engine.scheduler.preemptions_total > 0
    for one in requests:
        text = ran.text(one.request_id)
        assert text.endswith("-end")
        assert len(text) == 99
    roomy = run(make_engine(folder, grammars), requests)
    assert ran.tokens == roomy.tokens


def test_log_probabilities_are_of_the_raw_logits(folder, grammars):
    ran = Ran()
    engine = make_engine(folder, grammars)
    engine.add(request("a", LLMatcher.grammar_from_regex("zzz"), logprobs=0))
    scores = []
    for _ in range(200):
        if not engine.has_work:
            break
        outputs = engine.step()
        ran.take(outputs)
        scores += [score for output in outputs for score in output.logprobs or []]
    assert ran.text("a") == "zzz"
    assert all(score.logprob < -0.01 for score in scores)  # certain only by force
    assert any(score.rank > 1 for score in scores)


def test_a_grammar_that_does_not_compile_is_its_own_requests_error(folder, grammars):
    bad = request("bad", LLMatcher.grammar_from_regex("(a"))
    ran = run(make_engine(folder, grammars), [bad, request("good", JSON)])
    assert ran.last["bad"].finish_reason == "error"
    assert "the grammar is refused" in ran.last["bad"].error
    assert fits(ran.text("good"))


def test_a_grammar_that_fails_on_the_way_ends_its_own_request(folder, grammars):
    grammar = grammars.compile(LLMatcher.grammar_from_regex("[ab]{5}"))

    class Failing:
        def __init__(self, state):
            self._state, self._left, self.error = state, 3, ""

        def mask(self):
            self._left -= 1
            self.error = "" if self._left else "too many states"
            return self._state.mask()

        def __getattr__(self, name):
            return getattr(self._state, name)

    class FailingGrammar:
        def start(self, token_ids=()):
            return Failing(grammar.start(token_ids))

    class Compiler:
        def compile_soon(self, text):
            return run_now(FailingGrammar if text == "fails" else lambda: grammar)

    for kind in ("cpu", "gpu"):
        engine = make_engine(folder, Compiler(), kind=kind)
        ran = run(engine, [request("bad", "fails"), request("good", "x")])
        assert ran.last["bad"].finish_reason == "error"
        assert "cannot follow its grammar any further: too many states" in ran.last["bad"].error
        assert len(ran.tokens["bad"]) == 2
        assert len(ran.text("good")) == 5


class SlowCompiler:
    """Compiles when told to."""

    def __init__(self, grammars):
        self.grammars = grammars
        self.asked: list[tuple[str, Future]] = []

    def compile_soon(self, text):
        self.asked.append((text, Future()))
        return self.asked[-1][1]

    def finish(self):
        for text, future in self.asked:
            if not future.done():
                future.set_result(self.grammars.compile(text))


def test_a_request_whose_grammar_compiles_counts_for_its_key_and_may_be_late(folder, grammars):
    slow = SlowCompiler(grammars)
    engine = make_engine(folder, slow)
    engine.step_time.start(StepCosts(0.5, 0.0, 0, 0.0, 0.0, 0.0), np.ones(5))
    bound = msgspec.structs.replace(request("bound", JSON), key="k", max_sequences=1)
    second = msgspec.structs.replace(request("second", max_tokens=1), key="k", max_sequences=1)
    assert engine.add(bound) is None
    assert engine.add(second).refusal == "key_limit_exceeded"
    engine.gate.max_ttft_s = 0.1
    slow.finish()
    ran = Ran()
    ran.take(engine.step())
    assert ran.last["bound"].refusal == "first_token_late"
    assert not engine.has_work
    assert engine.requests == 0


def test_others_go_on_while_a_grammar_compiles(folder, grammars):
    slow = SlowCompiler(grammars)
    engine = make_engine(folder, slow)
    ran = Ran()
    engine.add(request("bound", JSON))
    engine.add(request("free", max_tokens=5, ignore_eos=True))
    for _ in range(20):
        ran.take(engine.step())
    assert ran.last["free"].finish_reason == "length"
    assert "bound" not in ran.tokens
    assert engine.has_work
    assert engine.stats().waiting_requests == 1
    slow.finish()
    for _ in range(300):
        ran.take(engine.step())
    assert fits(ran.text("bound"))


def test_a_request_that_is_aborted_while_its_grammar_compiles_is_gone(folder, grammars):
    slow = SlowCompiler(grammars)
    engine = make_engine(folder, slow)
    engine.reserve(ReserveKv("bound", 40, lifetime_s=60.0))
    engine.add(request("bound", JSON))
    assert engine.add(request("bound", JSON)).error == "request id 'bound' is already running"
    (output,) = engine.abort(["bound"])
    assert output.finish_reason == "abort"
    assert not engine.has_work
    slow.finish()
    assert engine.step() == []
    blocks = engine.scheduler.blocks
    assert (blocks.available_units, blocks.reserved_units) == (blocks.num_units, 0)


def test_an_engine_without_a_compiler_refuses(folder):
    refused = make_engine(folder, None).add(request("a", JSON))
    assert refused.error == "this engine serves no grammars"
