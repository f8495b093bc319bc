import asyncio

import pytest

from tailrace.bench.search import DRAWS_PER_SEED, SEEDS_PER_DRAW
from tailrace.bench.target import Target
from tailrace.bench.traffic.workload import Workload
from tailrace.bench.work_shelf import Offer, WorkShelf
from tailrace.errors import ConfigError
from tests.bench.mock_server import WordCodec

TRAFFIC = Workload(source="chat70", input_tokens="20", output_tokens="4")
TARGET = Target("m", 8192, "")


def offer(seed, rate_rps=2.0, **changes):
    fields = {"phase": "search", "rate_rps": rate_rps, "seed": seed, "duration_s": 20.0}
    return Offer(**(fields | changes))


@pytest.fixture
def shelf():
    return WorkShelf(TRAFFIC, WordCodec())


def work(shelf, asked, target=TARGET):
    return asyncio.run(shelf.work(asked, WordCodec(), target))


def test_one_offer_is_made_once_and_handed_out_twice(shelf):
    assert work(shelf, offer(3000)) is work(shelf, offer(3000))


def test_seeds_of_one_draw_share_the_traffic_but_no_text(shelf):
    one, other = work(shelf, offer(3000)), work(shelf, offer(3001))
    assert one.schedule == other.schedule
    assert not {p.text for p in one.prompts} & {p.text for p in other.prompts}


def test_another_rate_brings_the_same_requests_closer_together(shelf):
    slow, fast = work(shelf, offer(3000)), work(shelf, offer(3001, 4.0))
    both = list(zip(slow.schedule.arrivals, fast.schedule.arrivals, strict=False))
    assert len(both) > 10
    for before, after in both:
        assert after.arrival_s == pytest.approx(before.arrival_s / 2)


def test_the_next_pair_forgets_the_one_before(shelf):
    first = work(shelf, offer(3000))
    assert work(shelf, offer(3000)) is first
    work(shelf, offer(DRAWS_PER_SEED * SEEDS_PER_DRAW))
    again = work(shelf, offer(3000))
    assert again is not first
    assert [p.text for p in again.prompts] == [p.text for p in first.prompts]


def test_prompts_are_of_the_planned_length_by_the_shelf_s_own_tokenizer(shelf):
    made = work(shelf, offer(3000))
    assert {p.tokens for p in made.prompts} == {20}
    assert (shelf.made, shelf.misses) == (len(made.prompts), 0)


def test_what_warms_up_is_sent_by_no_trial(shelf):
    warm = asyncio.run(shelf.warm_work(WordCodec(), TARGET, draw=3, requests=4))
    assert len(warm.prompts) == 4
    measured = work(shelf, offer(3000))
    assert not {p.text for p in warm.prompts} & {p.text for p in measured.prompts}


@pytest.mark.parametrize(
    "changes",
    [
        {"users": 3, "think_s": "0.1"},
        {"arrivals": "ramp", "rates": "0:1,10:4"},
        {"arrivals": "gamma", "burstiness": 0.5},
        {"turns": 3},
        {"rate_rps": 3.0},
    ],
)
def test_any_traffic_can_be_warmed_up(changes):
    traffic = Workload(source="chat70", input_tokens="20", output_tokens="4", **changes)
    shelf = WorkShelf(traffic, WordCodec())
    warm = asyncio.run(shelf.warm_work(WordCodec(), TARGET, draw=3, requests=2))
    assert len(warm.prompts) == 2


def test_a_closed_loop_has_users(shelf):
    made = work(shelf, offer(3000, None, users=2, phase="steady", duration_s=2.0))
    assert made.users == 2
    assert {arrival.user for arrival in made.schedule.arrivals} == {0, 1}


def test_a_request_beyond_the_context_names_both_lengths(shelf):
    with pytest.raises(ConfigError, match=r"24 tokens.*does not fit.*10"):
        work(shelf, offer(3000), Target("m", 10, ""))


def test_tokenizers_must_agree_where_none_is_given():
    class Other(WordCodec):
        name = "other"

        async def encode(self, text):
            return [*await super().encode(text), 7]

    shelf = WorkShelf(TRAFFIC, None)
    asyncio.run(shelf.agree(WordCodec()))
    asyncio.run(shelf.agree(WordCodec()))
    with pytest.raises(ConfigError, match="other cuts a test sentence"):
        asyncio.run(shelf.agree(Other()))


def test_a_tokenizer_that_is_given_counts_for_all(shelf):
    class Broken:
        name = "broken"

        async def encode(self, text):
            raise AssertionError

    asyncio.run(shelf.agree(Broken()))
