"""Greedy output does not depend on batch composition, chunking, cache hits or preemption.

Exact on tiny float32 models, through the real scheduler, runner, kernels and sampler.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.clock import VirtualClock
from tailrace.config import EngineConfig
from tailrace.engine.engine import Engine
from tailrace.engine.host_kv import CopyCosts
from tailrace.engine.runner import Runner
from tailrace.engine.sampler import Sampler
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.setup import HostMemory, make_blocks
from tailrace.kernels.select import select
from tailrace.models.loader import load_model
from tailrace.types import EngineRequest, GrowPrompt, SamplingParams
from tests.support.tiny import make_tiny_checkpoint

NUM_BLOCKS = 24
SLOTS = 6
CONTEXT = 128


def run_now(function, *args) -> Future:
    done: Future = Future()
    done.set_result(function(*args))
    return done


@dataclass
class Model:
    model: object

    def engine(
        self,
        *,
        budget: int,
        block_size: int | str = "auto",
        prefix_cache: bool = True,
        surprised: bool = False,
        num_units: int = NUM_BLOCKS,
        host_places: int = 0,
    ) -> Engine:
        """Make an engine; a surprised one has only ever seen answers of one token."""
        config = self.model.config
        settings = EngineConfig(block_size=block_size)
        unit = settings.kv_unit_tokens
        sampler = Sampler(SLOTS, config.vocab_size, config.eos_token_ids, 0)
        runner = Runner(self.model, sampler, num_blocks=num_units, block_size=unit, num_slots=SLOTS)
        host = None
        if host_places:
            kept = runner.keep_on_host(host_places)
            kept._host.fill_(-1)  # all bits set: NaN in any dtype
            host = HostMemory(host_places, kept.unit_bytes, CopyCosts(0.0, 0.0, 1))
        for k_cache, v_cache in runner.kv_caches:
            k_cache.fill_(torch.nan)
            v_cache.fill_(torch.nan)
        scheduler = Scheduler(
            make_blocks(settings, num_units, prefix_cache=prefix_cache, host=host),
            max_batch_size=SLOTS,
            token_budget=budget,
            swap_pays=None if host is None else lambda tokens, units: True,
        )
        for _ in range(20 * surprised):
            scheduler.answers.observe(1)
        return Engine(
            scheduler,
            runner,
            submit=run_now,
            clock=VirtualClock(),
            context_length=CONTEXT,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )


def generate(engine: Engine, prompts: list[list[int]], max_tokens: int, **sampling) -> list:
    for i, prompt in enumerate(prompts):
        params = {"temperature": 0.0, "ignore_eos": True} | sampling
        refused = engine.add(
            EngineRequest(
                request_id=f"r{i}",
                token_ids=prompt,
                sampling=SamplingParams(max_tokens=max_tokens, **params),
                arrival_s=float(i),
            )
        )
        assert refused is None
    tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
        engine.scheduler.blocks.check_integrity()
    return list(tokens.values())


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request, tmp_path_factory) -> Model:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), family=request.param)
    kernels = select("auto", 1)
    return Model(load_model(folder, dtype="float32", kernels=kernels))


prompts = st.lists(
    st.builds(
        lambda stem, tail: (
            [7, 3, 200, 41, 9, 9, 120, 5, 66, 31, 8, 250, 1, 2, 90, 17][:stem] + tail
        ),
        st.integers(0, 16),
        st.lists(st.integers(0, 255), min_size=1, max_size=24),
    ),
    min_size=1,
    max_size=6,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompts=prompts,
    budget=st.integers(SLOTS, 40),
    block_size=st.sampled_from(["auto", "8", "16", "32"]),
    prefix_cache=st.booleans(),
    surprised=st.booleans(),
)
def test_greedy_tokens_are_those_of_the_request_alone_in_one_chunk(
    model, prompts, budget, block_size, prefix_cache, surprised
):
    alone = [generate(model.engine(budget=1000), [prompt], 12)[0] for prompt in prompts]
    engine = model.engine(
        budget=budget, block_size=block_size, prefix_cache=prefix_cache, surprised=surprised
    )
    assert generate(engine, prompts, 12) == alone
    # Once more on the same engine: with a prefix cache, now out of it.
    assert generate(engine, prompts, 12) == alone


def send_pieces(engine: Engine, prompts: list[list[int]], lengths: list[int]) -> None:
    """Have prompts arrive in pieces, those of the last wrong, with steps between them."""
    for start_of_all in range(0, 40, sum(lengths)):
        for index, prompt in enumerate(prompts):
            start = start_of_all
            for length in lengths:
                piece = prompt[start : start + length]
                if index == len(prompts) - 1:
                    piece = [(token + 1) % 256 for token in piece]
                if piece:
                    engine.grow(GrowPrompt(f"r{index}", start, piece, 30.0))
                start += length
                if engine.has_work:
                    assert engine.step() == []


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompts=prompts,
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    budget=st.integers(SLOTS, 80),
    prefix_cache=st.booleans(),
)
def test_greedy_tokens_are_the_same_where_prompts_were_computed_while_they_arrived(
    model, prompts, lengths, budget, prefix_cache
):
    alone = [generate(model.engine(budget=1000), [prompt], 8)[0] for prompt in prompts]
    engine = model.engine(budget=budget, prefix_cache=prefix_cache, num_units=64)
    send_pieces(engine, prompts, lengths)
    assert generate(engine, prompts, 8) == alone


def test_preempted_sequences_continue_as_if_nothing_had_happened(model):
    prompts = [[i * 11 + 1] * 30 for i in range(5)]
    alone = [generate(model.engine(budget=1000), [prompt], 40)[0] for prompt in prompts]
    engine = model.engine(budget=64, prefix_cache=False, surprised=True)
    assert generate(engine, prompts, 40) == alone
    assert engine.scheduler.preemptions_total > 0
    assert engine.scheduler.blocks.lent_units_total > 0


@pytest.mark.parametrize("block_size", ["auto", "16"])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
def test_swapped_sequences_continue_as_if_nothing_had_happened(model, block_size, prefix_cache):
    prompts = [[i * 11 + 1] * 30 for i in range(5)]
    alone = [generate(model.engine(budget=1000), [prompt], 40)[0] for prompt in prompts]
    engine = model.engine(
        budget=64,
        block_size=block_size,
        prefix_cache=prefix_cache,
        surprised=True,
        num_units=24 if block_size == "auto" else 12,
        host_places=40,
    )
    assert generate(engine, prompts, 40) == alone
    blocks = engine.scheduler.blocks
    assert blocks.swapped_in_total > 0
    assert blocks.swapped_units == 0


def test_seeded_sampling_is_the_same_in_any_company_and_after_a_preemption(model):
    prompts = [[i * 11 + 1] * 30 for i in range(5)]
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    alone = [generate(model.engine(budget=1000), [p], 40, **sampling)[0] for p in prompts]
    engine = model.engine(budget=64, prefix_cache=False, surprised=True)
    assert generate(engine, prompts, 40, **sampling) == alone
    assert engine.scheduler.preemptions_total > 0


def test_prompt_logprobs_do_not_depend_on_chunking(model):
    def scores(budget: int) -> list[float]:
        engine = model.engine(budget=budget)
        engine.add(
            EngineRequest(
                request_id="r",
                token_ids=list(range(50)),
                sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
                arrival_s=0.0,
            )
        )
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert outputs[0].prompt_logprobs[0] is None
        return [entry.logprob for entry in outputs[0].prompt_logprobs[1:]]

    whole, chunked = scores(1000), scores(7)
    assert len(whole) == 49
    assert chunked == pytest.approx(whole, abs=1e-4)
