from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tailrace.bench.traffic import profiles
from tailrace.bench.traffic.prefixes import PrefixDraw, PrefixFigures, hit_share, measure_prefixes
from tailrace.bench.traffic.profile import draw
from tailrace.bench.traffic.schedule import Arrival
from tailrace.bench.traffic.trace import read_trace

TRACES = Path(__file__).parents[3].parent / "shared" / "traces"
BOUND = 0.03
"""How far the drawn share of tokens seen before may be from the trace's: what prefixes.py says."""


def figures(**changed) -> PrefixFigures:
    plain = {
        "block_tokens": 4,
        "common_blocks": 0,
        "follow_shares": (0.5,) * 10,
        "taken_shares": (0.5,) * 10,
        "taken_evenness": 10.0,
        "distances": (1, 1, 2, 3, 5, 8, 13, 20),
        "hit_share": 0.0,
    }
    return PrefixFigures(**(plain | changed))


def test_hits_are_counted_by_whole_leading_blocks():
    arrivals = [
        Arrival(0, 10, 1, (1, 2)),
        Arrival(1, 10, 1, (1, 3)),  # one block of four tokens
        Arrival(2, 10, 1, (9, 2)),  # 2 is no longer at the beginning
        Arrival(3, 10, 1, (1, 3)),  # two
    ]
    assert hit_share(arrivals, 4) == 12 / 40


def test_equal_ids_have_equal_ids_before_them():
    drawing = PrefixDraw(figures(common_blocks=1), seed=1)
    before: dict[int, tuple[int, ...]] = {}
    for number in range(500):
        chain = drawing.next(8 + number % 60, (number % 60) / 60)
        assert len(chain) == (8 + number % 60) // 4
        assert chain[0] == 0
        for place, block in enumerate(chain):
            assert before.setdefault(block, chain[:place]) == chain[:place]


def test_nobody_follows_where_the_figures_say_so():
    drawing = PrefixDraw(figures(follow_shares=(0.0,) * 10), seed=1)
    ids = [block for _ in range(50) for block in drawing.next(40, 0.5)]
    assert len(ids) == len(set(ids))


def test_the_distance_to_the_last_prompt_with_the_prefix_is_as_drawn():
    # Everybody follows whoever came three prompts before, with half of the blocks.
    drawing = PrefixDraw(
        figures(follow_shares=(1.0,) * 10, distances=(3,) * 8, taken_evenness=1e6), seed=1
    )
    chains = [drawing.next(80, 0.5) for _ in range(40)]
    assert all(chain[:10] == chains[place][:10] for place, chain in enumerate(chains[3:]))


@pytest.mark.parametrize("profile", [profiles.MOONCAKE_CONVERSATION, profiles.MOONCAKE_SYNTHETIC])
def test_draws_share_as_much_as_the_trace(profile):
    count = {"mooncake-conversation": 6635, "mooncake-synthetic": 3993}[profile.name]
    for seed in range(3):
        drawn = list(itertools.islice(draw(profile, seed=seed), count))
        assert hit_share(drawn, 512) == pytest.approx(profile.prefixes.hit_share, abs=BOUND)


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("mooncake_conversation.jsonl", profiles.MOONCAKE_CONVERSATION),
        ("mooncake_synthetic.jsonl", profiles.MOONCAKE_SYNTHETIC),
    ],
)
def test_the_figures_are_those_of_the_published_file(name, profile):
    file = TRACES / name
    if not file.is_file():
        pytest.skip(f"{file} is not here")
    trace = read_trace(file)
    found = measure_prefixes(trace.arrivals, trace.block_tokens)
    assert found.distances == profile.prefixes.distances
    assert found.common_blocks == profile.prefixes.common_blocks
    assert found.follow_shares == pytest.approx(profile.prefixes.follow_shares, abs=5e-4)
    assert found.taken_shares == pytest.approx(profile.prefixes.taken_shares, abs=5e-4)
    assert found.taken_evenness == pytest.approx(profile.prefixes.taken_evenness, abs=5e-4)
    assert found.hit_share == pytest.approx(profile.prefixes.hit_share, abs=5e-5)
