from __future__ import annotations

import math

import pytest

from tailrace.bench.scrape import (
    FAMILIES,
    Scrape,
    combine_devices,
    combine_processes,
    known_family,
    parse,
    read_exposition,
)

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a}b"} 3.0
vllm:num_requests_running{engine="1",model_name="a}b"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 70.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 49.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:generation_tokens_total{engine="0",model_name="m"} 800.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0
process_resident_memory_bytes 7.5e+08
"""
SGLANG = """\
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 4.0
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 4.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.5
sglang:cache_hit_rate{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.1
sglang:spec_accept_rate{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.8
sglang:gen_throughput{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 321.5
sglang:num_retracted_requests_total{model_name="m"} 3.0
sglang:prompt_tokens_total{model_name="m"} 900.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 60.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 4.0
sglang:generation_tokens_total{model_name="m"} 128.0
"""
LLAMACPP = """\
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 640
llamacpp:prompt_tokens_cached_total 32
llamacpp:tokens_predicted_total 256
llamacpp:tokens_predicted_seconds_total 2.5
llamacpp:spec_decode_num_draft_tokens_total 0
llamacpp:spec_decode_num_accepted_tokens_total 0
llamacpp:requests_processing 2
llamacpp:requests_deferred 5
"""
TAILRACE = """\
tailrace:num_requests_running 2.0
tailrace:num_requests_waiting 0.0
tailrace:kv_cache_usage_perc 0.5
tailrace:kv_cache_fragmentation 0.125
tailrace:num_preemptions_total 1.0
tailrace:prefix_cache_queries_total 500.0
tailrace:prefix_cache_hits_total 16.0
tailrace:prompt_tokens_total 484.0
tailrace:generation_tokens_total 96.0
tailrace:engine_restarts_total 0.0
tailrace:process_resident_memory_bytes{process="engine"} 1e9
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(
            VLLM,
            {
                "running": 7,
                "waiting": 1,
                "kv_usage": 0.5,
                "preemptions_total": 2,
                "prefix_queries_total": 1000,
                "prefix_hits_total": 64,
                "draft_tokens_total": 70,
                "accepted_tokens_total": 49,
                "prompt_tokens_total": 1500,
                "generation_tokens_total": 800,
            },
            id="vllm",
        ),
        pytest.param(
            SGLANG,
            {
                "running": 4,
                "waiting": 2,
                "kv_usage": 0.5,
                "cache_hit_rate": 0.1,
                "acceptance_rate": 0.8,
                "generation_rate": 321.5,
                "preemptions_total": 3,
                "prompt_tokens_total": 900,
                "prefix_hits_total": 64,
                "generation_tokens_total": 128,
            },
            id="sglang",
        ),
        pytest.param(
            LLAMACPP,
            {
                "running": 2,
                "waiting": 5,
                "prompt_tokens_total": 640,
                "prefix_hits_total": 32,
                "generation_tokens_total": 256,
                "draft_tokens_total": 0,
                "accepted_tokens_total": 0,
            },
            id="llamacpp",
        ),
        pytest.param(
            TAILRACE,
            {
                "running": 2,
                "waiting": 0,
                "kv_usage": 0.5,
                "kv_fragmentation": 0.125,
                "preemptions_total": 1,
                "prefix_queries_total": 500,
                "prefix_hits_total": 16,
                "prompt_tokens_total": 484,
                "generation_tokens_total": 96,
                "engine_restarts_total": 0,
            },
            id="tailrace",
        ),
    ],
)
def test_every_engines_names_become_ours(text, found):
    assert parse(text) == pytest.approx(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# HELP vllm:num_requests_running x\nother_total 5\nvllm:num_requests_running x\n", {}),
        ("\x00 nonsense {", {}),
        ("vllm:num_requests_running", {}),
        ('vllm:num_requests_running{engine="0"', {}),
        ("vllm:kv_cache_usage_perc NaN\nvllm:num_requests_running +Inf\n", {}),
        # A timestamp, and an exemplar of OpenMetrics.
        ("vllm:num_requests_running 3 1700000000000\n", {"running": 3}),
        ('vllm:prompt_tokens_total{a="b"} 5 # {trace="x"} 1\n', {"prompt_tokens_total": 5}),
        # An old and a new name of one thing: not added up.
        (
            "vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.5\n",
            {"kv_usage": 0.5},
        ),
        ("vllm:gpu_cache_usage_perc 0.9\n", {"kv_usage": 0.9}),
    ],
)
def test_odd_lines_say_nothing_and_old_names_count_once(text, found):
    assert parse(text) == found


def test_ranks_that_repeat_count_once_and_ranks_of_their_own_add_up():
    def line(value, **labels):
        text = ",".join(f'{name}="{label}"' for name, label in labels.items())
        return f"sglang:num_running_reqs{{{text}}} {value}\n"

    repeated = line(4, tp_rank=0, pp_rank=0) + line(9, tp_rank=10, pp_rank=1)
    assert parse(repeated) == {"running": 4}
    # Data parallelism within attention: each group has its own first rank.
    groups = line(4, tp_rank=0, dp_rank=0) + line(5, tp_rank=4, dp_rank=1)
    assert parse(groups + line(5, tp_rank=5, dp_rank=1)) == {"running": 9}
    # With priorities: all of them, and each.
    assert parse(line(5, priority="") + line(2, priority=0) + line(3, priority=1)) == {"running": 5}
    assert parse(line(2, priority=0) + line(3, priority=1)) == {"running": 5}


def test_labels_may_hold_anything():
    (sample,) = read_exposition('vllm:num_requests_running{ a="x\\"y}", b="1\\\\2\\n", } 7\n')
    assert sample.labels == {"a": 'x"y}', "b": "1\\2\n"}
    assert sample.value == 7


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("vllm:num_requests_running", "vllm:num_requests_running"),
        ("vllm_num_requests_running", "vllm:num_requests_running"),
        ("mine:num_requests_running", "vllm:num_requests_running"),
        ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL"),
        ("sglang:num_requests_running", None),
        ("mine_num_requests_running", None),
        ("python_info", None),
    ],
)
def test_families_are_known_by_spellings_of_their_name(name, family):
    assert known_family(name) == family


def test_every_family_is_read_back_under_its_own_name():
    for family, name in FAMILIES.items():
        assert parse(f'{family}{{a="b"}} 0.5\n') == {name: 0.5}


def test_dcgm_figures_get_our_units():
    text = (
        'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a"} 50\n'
        'DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a"} 2\n'
        'DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-b"} 71.5\n'
        'DCGM_FI_DEV_SM_CLOCK{gpu="1",UUID="GPU-b"} 1410\n'
        'DCGM_FI_DEV_POWER_USAGE{UUID="GPU-c"} 1\n'
    )
    assert combine_devices(read_exposition(text)) == {
        "gpu0_utilisation": 0.5,
        "gpu0_memory_bytes": 2 * 2**20,
        "gpu1_power_w": 71.5,
        "gpu1_sm_clock_mhz": 1410.0,
    }


def test_what_tailrace_says_of_its_machine_is_read_too():
    text = (
        'tailrace:gpu_utilization{gpu="0",gpu_uuid="GPU-a"} 0.5\n'
        'tailrace:gpu_memory_used_bytes{gpu="1",gpu_uuid="GPU-b"} 3e9\n'
        'tailrace:process_resident_memory_bytes{process="frontend"} 1e8\n'
        'tailrace:process_resident_memory_bytes{process="engine"} 9e8\n'
        "process_resident_memory_bytes 5\n"
    )
    samples = list(read_exposition(text))
    assert combine_devices(samples) == {"gpu0_utilisation": 0.5, "gpu1_memory_bytes": 3e9}
    assert combine_processes(samples) == {"rss_bytes": 1e9, "processes": 2}
    assert combine_processes([]) == {}


def test_a_gauge_that_was_missing_once_leaves_a_gap():
    scrape = Scrape()
    scrape.add(0.0, {"running": 1.0})
    scrape.add(1.0, {"waiting": 2.0})
    assert scrape.at_s == [0.0, 1.0]
    assert scrape.values["running"][0] == 1.0
    assert math.isnan(scrape.values["running"][1])
    assert math.isnan(scrape.values["waiting"][0])
    assert scrape.values["waiting"][1] == 2.0
