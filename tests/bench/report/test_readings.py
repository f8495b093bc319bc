from __future__ import annotations

import math

import pytest

from tailrace.bench.report.readings import (
    LABELS,
    figures_of,
    mean_over_gpus,
    merge,
    total_over_gpus,
    written,
)
from tailrace.bench.scrape import Scrape


def scrape(*readings: dict[str, float]) -> Scrape:
    found = Scrape()
    for at_s, reading in enumerate(readings):
        found.add(float(at_s), reading)
    return found


def test_a_counter_that_restarts_loses_nothing_but_the_gap():
    server = scrape(*({"preemptions_total": value} for value in (4.0, 9.0, 0.0, 2.0)))
    assert figures_of({"server": server})["preemptions"] == 7.0


def test_shares_come_from_counters_first_and_gauges_else():
    counters = scrape(
        {"draft_tokens_total": 100.0, "accepted_tokens_total": 90.0, "acceptance_rate": 0.1},
        {"draft_tokens_total": 200.0, "accepted_tokens_total": 150.0, "acceptance_rate": 0.1},
    )
    gauge = scrape({"acceptance_rate": 0.5}, {"acceptance_rate": 0.7})
    assert figures_of({"server": counters})["acceptance"] == pytest.approx(0.6)
    assert figures_of({"server": gauge})["acceptance"] == pytest.approx(0.6)


def test_gpus_are_summed_in_memory_and_power_and_averaged_in_use_and_clock():
    gpu = scrape(
        {
            "gpu0_utilisation": 0.4,
            "gpu1_utilisation": 0.8,
            "gpu0_memory_bytes": 10.0,
            "gpu1_memory_bytes": 20.0,
            "gpu0_power_w": 100.0,
            "gpu1_power_w": 300.0,
            "gpu0_sm_clock_mhz": 1400.0,
            "gpu1_sm_clock_mhz": 1900.0,
            "gpu0_held_back": 1.0,
            "gpu1_held_back": 0.0,
        }
    )
    found = figures_of({"gpu": gpu})
    assert found["gpu_utilisation_mean"] == pytest.approx(0.6)
    assert found["gpu_memory_max_bytes"] == 30.0
    assert found["gpu_power_mean_w"] == 400.0
    assert found["gpu_clock_mean_mhz"] == 1650.0
    assert found["gpu_held_back_mean"] == 0.5
    assert total_over_gpus(gpu, "_power_w") == [400.0]
    assert mean_over_gpus(gpu, "_utilisation") == pytest.approx([0.6])


def test_what_was_not_read_is_not_there():
    assert figures_of({}) == {}
    assert figures_of({"server": scrape({"kv_usage": math.nan})}) == {}
    assert "preemptions" not in figures_of({"server": scrape({"preemptions_total": 1.0})})


def test_trials_are_merged_by_what_each_figure_means():
    one = {"preemptions": 2.0, "kv_usage_max": 0.5, "kv_usage_mean": 0.2}
    two = {"preemptions": 3.0, "kv_usage_max": 0.9, "kv_usage_mean": 0.4, "acceptance": 0.7}
    merged = merge([one, two])
    assert merged["preemptions"] == 5.0
    assert merged["kv_usage_max"] == 0.9
    assert merged["kv_usage_mean"] == pytest.approx(0.3)
    assert merged["acceptance"] == 0.7


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("kv_usage_max", 0.934, "93.4%"),
        ("rss_max_bytes", 3 * 2**30, "3.0 GiB"),
        ("gpu_power_mean_w", 1234.4, "1,234 W"),
        ("gpu_clock_mean_mhz", 1650.4, "1,650 MHz"),
        ("preemptions", 12.0, "12"),
        ("cpu_cores_mean", 1.5, "1.50"),
        ("acceptance", None, "-"),
    ],
)
def test_figures_carry_their_unit(name, value, shown):
    assert name in LABELS
    assert written(name, value) == shown
