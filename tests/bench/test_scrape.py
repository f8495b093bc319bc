from __future__ import annotations

import math

import pytest

from tailrace.bench.scrape import Scrape, parse


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            (
                'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
                'vllm:num_requests_waiting{engine="0",model_name="m"} 1\n'
                'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
            ),
            {"running": 3.0, "waiting": 1.0, "kv_usage": 0.25},
        ),
        (
            'sglang:num_running_reqs{model="m"} 4\nsglang:num_queue_reqs 2\nsglang:token_usage 0.5',
            {"running": 4.0, "waiting": 2.0, "kv_usage": 0.5},
        ),
        ("tailrace_requests_running 2\ntailrace_requests_waiting 0", {"running": 2, "waiting": 0}),
        ('vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 4', 7),
        ("# HELP vllm:num_requests_running x\nother_total 5\nvllm:num_requests_running x\n", {}),
        ("\x00 nonsense {", {}),
    ],
)
def test_gauges_are_known_by_any_engines_name(text, found):
    assert parse(text) == ({"running": float(found)} if isinstance(found, int) else found)


def test_a_gauge_that_was_missing_once_leaves_a_gap():
    scrape = Scrape()
    scrape.add(0.0, {"running": 1.0})
    scrape.add(1.0, {"waiting": 2.0})
    assert scrape.at_s == [0.0, 1.0]
    assert scrape.values["running"][0] == 1.0
    assert math.isnan(scrape.values["running"][1])
    assert math.isnan(scrape.values["waiting"][0])
    assert scrape.values["waiting"][1] == 2.0
