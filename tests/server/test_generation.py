"""One HTTP request at the engine, over the scripted one."""

import asyncio
from types import SimpleNamespace

import pytest

from tailrace.clock import monotonic
from tailrace.config import Config
from tailrace.errors import RequestError
from tailrace.server.engine_client import EngineState
from tailrace.server.generation import Generation, Job
from tailrace.server.prompts import Prompt
from tailrace.server.sampling import Terms, TextRules
from tailrace.text.tokenizer import Tokenizer
from tailrace.types import SamplingParams
from tests.server.fake_engine import EOS_ID, FakeEngine, Script


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return Tokenizer.load(tiny_folder)


class Gaps:
    """Metrics that only count gaps."""

    def __init__(self):
        self.gaps_s = []

    def observe_token_gap(self, seconds):
        self.gaps_s.append(seconds)


def a_job(*texts, n=1, max_tokens=64, rules=None, **sampling):
    prompts = [Prompt(list(text.encode()), text) for text in texts or ("Hi",)]
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    now = monotonic()
    return Job(
        request_id="job",
        route="/test",
        prompts=prompts,
        sampling=[params] * len(prompts),
        terms=Terms(n=n, text_rules=rules or TextRules()),
        received_s=now,
        prompt_ready_s=now,
    )


def a_generation(tokenizer, job, scripts=None):
    engine = FakeEngine(scripts)
    services = SimpleNamespace(config=Config(), engine=engine, metrics=Gaps(), draining=False)
    return Generation(services, tokenizer, job), engine


async def collect(generation):
    return [piece async for piece in generation.pieces()]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def texts_by_choice(pieces):
    texts = {}
    for piece in pieces:
        texts[piece.index] = texts.get(piece.index, "") + piece.text
    return texts


def test_one_choice_streams_its_tokens_and_eos_is_no_text(tokenizer):
    async def main():
        generation, engine = a_generation(tokenizer, a_job(), {"Hi": Script("yes")})
        generation.start()
        pieces = await collect(generation)
        assert [piece.text for piece in pieces] == ["y", "e", "s", ""]
        assert pieces[-1].finish_reason == "stop"
        assert pieces[-1].stop_reason is None
        assert pieces[-1].token_ids == [EOS_ID]
        generation.close()
        usage = generation.usage()
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 4, 6)
        assert generation.finish_reason == "stop"
        assert engine.aborted == []

    run(main())


def test_prompts_times_choices_are_merged_with_openais_indices(tokenizer):
    async def main():
        scripts = {"a": Script("one"), "b": Script("two", cached_tokens=1)}
        job = a_job("a", "b", n=2, seed=5)
        generation, engine = a_generation(tokenizer, job, scripts)
        generation.start()
        pieces = await collect(generation)
        assert texts_by_choice(pieces) == {0: "one", 1: "one", 2: "two", 3: "two"}
        assert [p.index for p in pieces if p.finish_reason] == [0, 1, 2, 3]
        assert generation.usage().prompt_tokens == 2
        assert generation.usage().prompt_tokens_details.cached_tokens == 1
        seeds = [request.sampling.seed for request in engine.requests]
        assert seeds[0] == seeds[2] == 5
        assert seeds[1] == seeds[3] != 5
        assert len({request.request_id for request in engine.requests}) == 4

    run(main())


def test_a_stop_string_ends_the_choice_within_an_output_of_several_tokens(tokenizer):
    async def main():
        rules = TextRules(stops=("lo", "unused"), include_stop=True)
        generation, engine = a_generation(tokenizer, a_job(rules=rules), {"Hi": Script(burst=7)})
        generation.start()
        pieces = await collect(generation)
        assert [piece.text for piece in pieces] == ["Hello"]
        assert generation.completion_tokens == 7
        assert engine.open_requests == 0

    run(main())


def test_a_stop_string_across_tokens_is_held_back_and_cut(tokenizer):
    async def main():
        rules = TextRules(stops=("o, w",))
        generation, engine = a_generation(tokenizer, a_job(rules=rules))
        generation.start()
        pieces = await collect(generation)
        assert [p.text for p in pieces] == ["H", "e", "l", "l", "", "", "", ""]
        assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "o, w")
        assert generation.completion_tokens == len("Hello, w")
        assert engine.aborted == ["job-0"]

    run(main())


def test_a_client_stop_token_is_named_as_the_reason(tokenizer):
    async def main():
        job = a_job(stop_token_ids=(EOS_ID,))
        generation, _ = a_generation(tokenizer, job, {"Hi": Script("x")})
        generation.start()
        assert (await collect(generation))[-1].stop_reason == EOS_ID

    run(main())


def test_closing_aborts_what_is_open_once(tokenizer):
    async def main():
        generation, engine = a_generation(tokenizer, a_job(n=3), {"Hi": Script(pause_after=1)})
        generation.start()
        await engine.was_paused.wait()
        generation.close("disconnect")
        generation.close("other")
        assert engine.aborted == ["job-0", "job-1", "job-2"]
        assert generation.finish_reason == "disconnect"
        assert engine.open_requests == 0

    run(main())


@pytest.mark.parametrize("n", [1, 3])
def test_an_engine_error_is_a_500_with_its_text(tokenizer, n):
    async def main():
        generation, engine = a_generation(tokenizer, a_job(n=n), {"Hi": Script(error_after=2)})
        generation.start()
        with pytest.raises(RequestError, match="the step failed") as caught:
            await collect(generation)
        assert caught.value.status == 500
        generation.close("error")
        assert engine.open_requests == 0

    run(main())


def test_an_engine_without_memory_is_a_503_that_may_be_tried_again(tokenizer):
    async def main():
        script = Script(error_after=0, may_retry=True)
        generation, _ = a_generation(tokenizer, a_job(), {"Hi": script})
        generation.start()
        with pytest.raises(RequestError, match="the step failed") as caught:
            await collect(generation)
        assert (caught.value.status, caught.value.code) == (503, "out_of_memory")
        assert caught.value.retry_after_s > 0

    run(main())


def test_an_engine_that_dies_is_a_503_that_may_be_tried_again(tokenizer):
    async def main():
        generation, engine = a_generation(tokenizer, a_job(), {"Hi": Script(pause_after=2)})
        generation.start()
        collecting = asyncio.create_task(collect(generation))
        await engine.was_paused.wait()
        engine.die()
        with pytest.raises(RequestError) as caught:
            await collecting
        assert caught.value.status == 503
        assert caught.value.retry_after_s > 0

    run(main())


def test_an_error_while_the_server_goes_down_is_a_503(tokenizer):
    async def main():
        generation, _ = a_generation(tokenizer, a_job(), {"Hi": Script(error_after=1)})
        generation.start()
        generation.services.draining = True
        with pytest.raises(RequestError) as caught:
            await collect(generation)
        assert caught.value.status == 503

    run(main())


def test_an_engine_that_is_not_ready_refuses_and_nothing_stays_open(tokenizer):
    async def main():
        generation, engine = a_generation(tokenizer, a_job(n=2))
        engine.state = EngineState.RESTARTING
        with pytest.raises(RequestError) as caught:
            generation.start()
        assert caught.value.status == 503
        generation.close("error")
        assert engine.open_requests == 0

    run(main())


def test_times_are_in_order_and_each_gap_is_observed(tokenizer):
    async def main():
        generation, _ = a_generation(tokenizer, a_job(), {"Hi": Script("abc")})
        generation.start()
        await collect(generation)
        generation.close()
        times = generation.times
        in_order = [
            times.received_s,
            times.prompt_ready_s,
            times.submitted_s,
            times.scheduled_s,
            times.first_token_s,
            times.last_token_s,
            times.finished_s,
        ]
        assert in_order == sorted(in_order)
        assert len(generation.services.metrics.gaps_s) == 3
        assert all(gap >= 0 for gap in generation.services.metrics.gaps_s)

    run(main())


def test_the_record_tells_what_became_of_the_request(tokenizer):
    async def main():
        job = a_job("Hi", "a", n=2)
        generation, _ = a_generation(tokenizer, job, {"": Script("ab", cached_tokens=1)})
        generation.start()
        await collect(generation)
        generation.close()
        record = generation.record()
        assert (record.request_id, record.route, record.choices) == ("job", "/test", 4)
        assert (record.prompt_tokens, record.completion_tokens) == (3, 12)
        assert (record.cached_tokens, record.finish_reason) == (2, "stop")
        assert record.received_s <= record.first_token_s <= record.finished_s

    run(main())
