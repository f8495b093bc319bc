from __future__ import annotations

import random
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.bench.traffic.lengths import draw_pair, read_lengths
from tailrace.errors import ConfigError

COUNT = 20_000


def drawn(lengths, seed=1):
    rng = random.Random(seed)
    return [lengths.draw(rng) for _ in range(COUNT)]


def test_a_truncated_normals_mean_and_deviation_are_those_of_what_is_drawn():
    lengths = read_lengths("normal:4200:1280:300:6800")
    values = drawn(lengths)
    # The error of the mean of 20,000 draws is 9 tokens, the deviation's 6.
    assert fmean(values) == pytest.approx(4200, abs=36)
    assert pstdev(values) == pytest.approx(1280, abs=26)
    assert 300 <= min(values) < 700
    assert 6750 < max(values) <= 6800
    assert "after truncation" in lengths.describe()


@given(
    low=st.integers(1, 500),
    width=st.integers(50, 5000),
    place=st.floats(0.2, 0.8),
    spread=st.floats(0.02, 0.15),
)
@settings(deadline=None)
def test_every_truncated_normal_that_is_accepted_stays_within_its_bounds(low, width, place, spread):
    high = low + width
    lengths = read_lengths(f"normal:{low + place * width}:{spread * width}:{low}:{high}")
    rng = random.Random(3)
    values = [lengths.draw(rng) for _ in range(400)]
    assert low <= min(values) <= max(values) <= high
    assert fmean(values) == pytest.approx(lengths.mean_tokens, abs=0.25 * spread * width + 0.5)


def test_the_mixture_has_its_shares_and_gaps():
    lengths = read_lengths("mix:0.7@32-128,0.3@512-2048")
    values = drawn(lengths)
    short = [value for value in values if value <= 128]
    assert len(short) / COUNT == pytest.approx(0.7, abs=0.015)
    assert not any(128 < value < 512 for value in values)
    assert (min(values), max(short), max(values)) == (32, 128, 2048)
    assert fmean(values) == pytest.approx(lengths.mean_tokens, rel=0.02)
    assert lengths.mean_tokens == pytest.approx(0.7 * 80 + 0.3 * 1280)


def test_one_number_and_one_range():
    assert set(drawn(read_lengths("512"))) == {512}
    assert set(drawn(read_lengths("3-5"))) == {3, 4, 5}


def test_a_file_of_pairs_keeps_prompt_and_answer_together(tmp_path):
    file = tmp_path / "pairs.txt"
    file.write_text("# input output\n10 1\n20,2\n\n30\t3\n")
    inputs = read_lengths(f"file:{file}")
    outputs = read_lengths(f"file:{file}", is_output=True)
    rng = random.Random(4)
    pairs = {draw_pair(rng, inputs, outputs) for _ in range(200)}
    assert pairs == {(10, 1), (20, 2), (30, 3)}
    assert draw_pair(rng, inputs, read_lengths("7"))[1] == 7
    assert outputs.mean_tokens == 2


def test_a_file_of_single_numbers_serves_either_side(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("5\n6\n")
    for is_output in (False, True):
        assert set(drawn(read_lengths(f"file:{file}", is_output=is_output))) == {5, 6}


@pytest.mark.parametrize(
    "text",
    [
        "x", "0", "-5", "9-3", "0-3", "mix:0.7@1-2", "mix:0.5@1-2,0.6@3-4", "mix:1@", "mix:-1@1-2",
        "normal:1:2", "normal:100:10:200:300", "normal:100:0:1:200", "normal:100:60:1:200",
        "file:/nowhere/at/all",
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(text):
    with pytest.raises(ConfigError):
        read_lengths(text)


@pytest.mark.parametrize("text", ["", "1 2 3\n", "1\n2 3\n", "0\n", "a\n"])
def test_a_bad_file_is_named(tmp_path, text):
    file = tmp_path / "bad.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match="bad.txt"):
        read_lengths(f"file:{file}")
