from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the report's pictures need it")

from tailrace.bench.anatomy import CAUSES
from tailrace.bench.records import Record
from tailrace.bench.report.canvas import VARIABLES, standalone, svg
from tailrace.bench.report.comparison_figures import (
    LENGTH_BINS,
    MAX_DOTS,
    MAX_STEPS,
    binned,
    fitted,
    looks,
    thinned_ranks,
)
from tailrace.bench.report.tail_figures import COLOURS, ON_COLOUR
from tailrace.bench.report.time_figures import (
    MAX_READINGS,
    dips,
    peaks,
    slowest_first_tokens,
)


@pytest.mark.parametrize("count", [1, 399, 400, 401, 5000, 1_000_000])
def test_a_cdf_has_few_steps_and_keeps_both_ends(count):
    ranks = thinned_ranks(count)
    assert len(ranks) <= MAX_STEPS
    assert ranks[0] == 0
    assert ranks[-1] == count - 1
    assert (np.diff(ranks) > 0).all()


def test_a_cdf_is_finest_in_the_tail():
    ranks = thinned_ranks(100_000)
    assert sum(ranks >= 90_000) >= MAX_STEPS // 2 - 1


def test_length_groups_have_nearest_rank_percentiles():
    lengths = np.arange(600.0)
    values = np.arange(600.0)[::-1].copy()
    middles, p50s, p95s = binned(lengths, values)
    assert len(middles) == LENGTH_BINS
    assert p50s[0] == 549.0  # the 50th smallest of 500..599
    assert p95s[0] == 594.0
    assert middles == sorted(middles)


def test_a_group_whose_p95_failed_has_no_point():
    values = np.full(40, 1.0)
    values[:4] = math.inf
    _, p50s, p95s = binned(np.full(40, 8.0), values)
    assert p50s[0] == 1.0
    assert math.isnan(p95s[0])


def test_thinned_time_lines_keep_every_peak():
    values = [0.0] * 5000
    values[3333] = 9.0
    times, highest = peaks([float(at) for at in range(5000)], values)
    assert len(times) == len(highest) <= MAX_READINGS
    assert max(highest) == 9.0
    assert min(highest) == 0.0


def test_thinned_clocks_keep_every_dip():
    values = [1980.0] * 5000
    values[3333], values[4444] = 1200.0, math.nan
    times, lowest = dips([float(at) for at in range(5000)], values)
    assert len(times) == len(lowest) <= MAX_READINGS
    assert (min(lowest), max(lowest)) == (1200.0, 1980.0)


def test_what_was_not_read_is_skipped():
    assert peaks([0.0, 1.0, 2.0], [1.0, math.nan, 3.0]) == ([0.0, 2.0], [1.0, 3.0])
    assert peaks([0.0], [math.nan]) == ([], [])


def test_thinned_requests_keep_the_slowest():
    records = [
        Record(
            index=index,
            scheduled_s=float(index),
            first_token_s=index + (50.0 if index == 1234 else 1.0),
            planned_input_tokens=1,
            planned_output_tokens=1,
            status="ok",
        )
        for index in range(3000)
    ]
    shown = slowest_first_tokens(records)
    assert len(shown) <= MAX_DOTS
    assert records[1234] in shown


def test_contenders_look_different_in_colour_mark_and_dash():
    found = looks([str(number) for number in range(6)])
    for of in ("colour", "mark", "dash"):
        assert len({str(getattr(look, of)) for look in found.values()}) == 6


def test_a_second_round_of_colours_has_other_marks():
    found = looks([str(number) for number in range(18)])
    assert len({(look.colour, look.mark, str(look.dash)) for look in found.values()}) == 18


def test_names_are_cut_to_their_column():
    assert fitted("tailrace", 4) == "tailrace"
    assert len(fitted("x" * 200, 4)) == 28


def test_dark_mode_leaves_the_causes_their_colour_under_white_labels():
    assert not {ON_COLOUR, *COLOURS.values()} & VARIABLES.keys()
    assert COLOURS.keys() == CAUSES.keys()


def test_colours_are_variables_in_a_page_and_plain_in_a_file():
    drawn = svg("p", (2, 1), lambda figure: figure.subplots().plot([0, 1], color="#0f62a8"))
    assert "var(--series-0, #0f62a8)" in drawn
    alone = standalone(drawn)
    assert "var(" not in alone
    assert "#0f62a8" in alone
    assert 'fill="#ffffff"' in alone
