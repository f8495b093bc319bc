"""The Prometheus text: names, values, buckets."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tailrace.engine.step_meter import StepMeter
from tailrace.telemetry.gpu import GpuReading, Gpus
from tailrace.telemetry.metrics import GAP_BUCKETS_S, LATENCY_BUCKETS_S, Metrics, fragmentation
from tailrace.telemetry.request_log import RequestRecord
from tailrace.types import EngineStats, StepCosts


def stats(**fields):
    known = {
        "time_s": 1.0,
        "running_requests": 3,
        "waiting_requests": 2,
        "total_blocks": 100,
        "free_blocks": 60,
        "block_size": 16,
        "live_tokens": 480,
        "held_blocks": 40,
    }
    return EngineStats(**known | fields)


def record(**fields):
    """Received at 10, submitted at 11, first step at 13, tokens from 16 to 20, done at 21."""
    known = {
        "request_id": "r",
        "route": "/generate",
        "unix_s": 0.0,
        "received_s": 10.0,
        "submitted_s": 11.0,
        "scheduled_s": 13.0,
        "first_token_s": 16.0,
        "last_token_s": 20.0,
        "finished_s": 21.0,
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "finish_reason": "stop",
    }
    return RequestRecord(**known | fields)


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(text, name, **labels):
    return samples(text)[(f"tailrace:{name}", *sorted(labels.items()))]


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("time_to_first_token_seconds", 6.0),
        ("e2e_request_latency_seconds", 11.0),
        ("request_queue_time_seconds", 2.0),
        ("request_prefill_time_seconds", 3.0),
        ("request_decode_time_seconds", 4.0),
        ("request_time_per_output_token_seconds", 1.0),
        ("request_prompt_tokens", 7.0),
        ("request_generation_tokens", 5.0),
    ],
)
def test_a_request_is_counted_phase_by_phase(name, seconds):
    metrics = Metrics()
    metrics.observe_request(record())
    text = metrics.render()
    assert value(text, f"{name}_sum") == pytest.approx(seconds)
    assert value(text, f"{name}_count") == 1


def test_a_request_without_a_token_counts_only_what_happened():
    metrics = Metrics()
    metrics.observe_request(
        record(
            submitted_s=None,
            scheduled_s=None,
            first_token_s=None,
            last_token_s=None,
            finish_reason="",
            completion_tokens=0,
        )
    )
    text = metrics.render()
    assert value(text, "request_success_total", finished_reason="unknown") == 1
    assert value(text, "e2e_request_latency_seconds_count") == 1
    for name in ("time_to_first_token", "request_queue_time", "request_decode_time"):
        assert value(text, f"{name}_seconds_count") == 0


def test_time_per_output_token_is_of_one_choice():
    metrics = Metrics()
    metrics.observe_request(record(completion_tokens=10, choices=2))
    assert value(metrics.render(), "request_time_per_output_token_seconds_sum") == pytest.approx(1)
    metrics.observe_request(record(completion_tokens=1))
    assert value(metrics.render(), "request_time_per_output_token_seconds_count") == 1


def test_requests_are_counted_by_why_they_ended():
    metrics = Metrics()
    for reason in ("stop", "stop", "length", "error"):
        metrics.observe_request(record(finish_reason=reason))
    text = metrics.render()
    for reason, count in {"stop": 2, "length": 1, "error": 1}.items():
        assert value(text, "request_success_total", finished_reason=reason) == count


def test_the_limit_that_users_ask_for_is_a_bucket():
    metrics = Metrics()
    metrics.observe_token_gap(0.3)
    metrics.observe_token_gap(0.301)
    assert value(metrics.render(), "inter_token_latency_seconds_bucket", le="0.3") == 1
    for buckets in (LATENCY_BUCKETS_S, GAP_BUCKETS_S):
        assert 0.3 in buckets
        assert list(buckets) == sorted(set(buckets))


def test_the_engine_is_shown_as_it_was_last_reported():
    reported = stats(
        prompt_tokens_total=11,
        generation_tokens_total=12,
        cached_tokens_total=13,
        prefix_query_tokens_total=14,
        preemptions_total=15,
        steps_total=16,
        busy_s_total=17.5,
        step_time_s=0.25,
        step_tokens=9,
        memory_failures_total=2,
    )
    text = Metrics().render(stats=reported, restarts=4, dropped_records=6)
    shown = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.4,
        "kv_cache_fragmentation": 0.25,
        "engine_step_seconds": 0.25,
        "engine_step_tokens": 9,
        "prompt_tokens_total": 11,
        "generation_tokens_total": 12,
        "prefix_cache_hits_total": 13,
        "prefix_cache_queries_total": 14,
        "num_preemptions_total": 15,
        "engine_steps_total": 16,
        "engine_busy_seconds_total": 17.5,
        "engine_restarts_total": 4,
        "engine_memory_failures_total": 2,
        "request_log_dropped_total": 6,
    }
    for name, expected in shown.items():
        assert value(text, name) == pytest.approx(expected), name
    assert value(text, "cache_config_info", block_size="16", num_gpu_blocks="100") == 1


def test_the_block_managers_state_is_shown_with_causes_and_sizes():
    text = Metrics().render(
        stats=stats(
            block_size=8,
            leased_blocks=20,
            lent_blocks=5,
            wide_share=0.75,
            preemptions_total=9,
            returns_total=2,
            lent_blocks_total=31,
            evictions_total=6,
            runs_total=(1, 2, 3),
        )
    )
    assert value(text, "kv_cache_leased_blocks") == 20
    assert value(text, "kv_cache_lent_blocks") == 5
    assert value(text, "kv_cache_wide_share") == 0.75
    assert value(text, "preemptions_by_cause_total", cause="lent_back") == 2
    assert value(text, "preemptions_by_cause_total", cause="outgrown") == 7
    assert value(text, "kv_cache_blocks_lent_total") == 31
    assert value(text, "kv_cache_evictions_total") == 6
    runs = [value(text, "kv_cache_runs_total", tokens=str(size)) for size in (8, 16, 32)]
    assert runs == [1, 2, 3]


def test_what_steps_cost_and_where_their_time_went_is_shown():
    meter = StepMeter()
    meter.add_schedule(0.001)
    meter.add_prepare(0.002)
    meter.add_publish(0.0015)
    meter.begin_turn()
    meter.add_step(0.02, idle_s=0.003, queue_s=0.0005, predicted_s=0.023)
    meter.add_step(3.0, idle_s=0.0, queue_s=0.0, predicted_s=3.0)
    costs = StepCosts(0.004, 2e-5, 128, 2e-9, 1e-5, 1e-8)
    text = Metrics().render(stats=stats(step_costs=costs, timings=meter.read()))
    assert value(text, "engine_step_cost_seconds", term="base") == 0.004
    assert value(text, "engine_step_cost_seconds", term="kv") == 1e-8
    assert value(text, "engine_step_free_rows") == 128
    assert value(text, "engine_host_seconds_total", phase="prepare") == 0.002
    assert value(text, "engine_host_seconds_total", phase="queue") == 0.0005
    assert value(text, "engine_device_idle_seconds_total") == 0.003
    assert value(text, "engine_step_predicted_seconds") == 3.0
    assert value(text, "engine_step_host_seconds_bucket", le="0.005") == 1
    assert value(text, "engine_step_host_seconds_bucket", le="0.003") == 0
    assert value(text, "engine_step_device_seconds_bucket", le="0.02") == 1
    assert value(text, "engine_step_device_seconds_bucket", le="+Inf") == 2
    assert value(text, "engine_step_device_seconds_sum") == 3.02
    assert value(text, "engine_step_prediction_error_ratio_bucket", le="0.15") == 2
    assert value(text, "engine_step_prediction_error_ratio_bucket", le="0.1") == 1
    assert value(text, "engine_step_measured_over_predicted_ratio_bucket", le="0.9") == 1
    assert value(text, "engine_step_measured_over_predicted_ratio_bucket", le="1.0") == 2
    assert value(text, "engine_step_measured_over_predicted_ratio_sum") == pytest.approx(
        1 + 0.02 / 0.023
    )
    assert 0.0 < value(text, "engine_step_prediction_recent_error_ratio") < 0.003 / 3.02
    assert value(text, "engine_step_prediction_off_seconds") == 0.0


def test_without_a_warm_up_no_costs_are_shown():
    names = {name for name, *_ in samples(Metrics().render(stats=stats()))}
    assert "tailrace:engine_steps_total" in names
    assert not any("step_cost" in name or "host_seconds" in name for name in names)


def test_what_is_swapped_is_shown_in_blocks_and_bytes_where_there_is_host_memory():
    swapping = stats(
        host_blocks=100,
        swapped_blocks=7,
        swapped_out_blocks_total=30,
        swapped_in_blocks_total=20,
        block_bytes=512,
    )
    text = Metrics().render(stats=swapping)
    assert value(text, "kv_cache_host_blocks") == 100
    assert value(text, "kv_cache_swapped_blocks") == 7
    assert value(text, "kv_cache_blocks_swapped_out_total") == 30
    assert value(text, "kv_cache_blocks_swapped_in_total") == 20
    assert value(text, "kv_cache_swapped_out_bytes_total") == 30 * 512
    assert value(text, "kv_cache_swapped_in_bytes_total") == 20 * 512
    assert b"swapped" not in Metrics().render(stats=stats())


def test_before_the_engine_has_reported_its_families_are_absent_not_zero():
    names = {name for name, *_ in samples(Metrics().render())}
    assert "tailrace:num_requests_running" not in names
    assert "tailrace:engine_silence_seconds" not in names
    assert "tailrace:engine_restarts_total" in names


def test_memory_is_shown_for_each_process_that_lives():
    text = Metrics().render(pids={"engine": os.getpid(), "gone": 2**30})
    shown = {
        labels["process"]
        for name, *pairs in samples(text)
        if name == "tailrace:process_resident_memory_bytes"
        for labels in [dict(pairs)]
    }
    assert shown == {"frontend", "engine"}


class FakeGpus(Gpus):
    def read(self):
        return [GpuReading(0, "GPU-a", 0.5, 10, 80), GpuReading(1, "GPU-b", None, None, 90)]


def test_gpus_show_what_they_tell():
    shown = {key: v for key, v in samples(Metrics(FakeGpus()).render()).items() if "gpu" in key[0]}
    first, second = [(("gpu", str(i)), ("gpu_uuid", f"GPU-{c}")) for i, c in enumerate("ab")]
    assert shown == {
        ("tailrace:gpu_utilization", *first): 0.5,
        ("tailrace:gpu_memory_used_bytes", *first): 10,
        ("tailrace:gpu_memory_total_bytes", *first): 80,
        ("tailrace:gpu_memory_total_bytes", *second): 90,
    }


def test_without_gpus_their_families_are_absent():
    assert b"gpu_" not in Metrics(Gpus()).render()


def test_two_servers_in_one_process_do_not_share_a_registry():
    one, other = Metrics(), Metrics()
    one.observe_token_gap(1.0)
    assert value(other.render(), "inter_token_latency_seconds_count") == 0


@pytest.mark.parametrize(
    ("live_tokens", "held_blocks", "share"), [(0, 0, 0.0), (16, 1, 0.0), (1, 1, 0.9375), (64, 2, 0)]
)
def test_fragmentation_is_the_share_of_held_kv_without_a_token(live_tokens, held_blocks, share):
    assert fragmentation(stats(live_tokens=live_tokens, held_blocks=held_blocks)) == share


def test_predictions_stand_beside_what_came():
    metrics = Metrics(Gpus())
    metrics.observe_request(record(predicted_ttft_s=7.0))  # of 6 s, 5 of them at the engine
    metrics.observe_request(record())  # nothing was predicted
    text = metrics.render()
    assert value(text, "ttft_prediction_error_ratio_sum") == pytest.approx(0.2)
    assert value(text, "ttft_prediction_error_ratio_count") == 1
    assert value(text, "ttft_prediction_error_seconds_sum") == pytest.approx(1.0)
    assert value(text, "predicted_time_to_first_token_seconds_sum") == 7.0
    assert value(text, "time_to_first_token_seconds_count") == 2


def test_refusals_are_counted_by_their_rule():
    metrics = Metrics(Gpus())
    for status, code in ((429, "first_token_late"), (503, None), (400, "x"), (429, "x")):
        metrics.count_error(status, code)
    text = metrics.render(stats=stats(late_refusals_total=4))
    found = {
        labels[0][1]: count
        for (name, *labels), count in samples(text).items()
        if name == "tailrace:admission_rejections_total"
    }
    assert found == {"first_token_late": 1, "service_unavailable": 1, "x": 1}
    assert value(text, "late_refusals_total") == 4


@settings(deadline=None, max_examples=50)
@given(gaps_s=st.lists(st.sampled_from(GAP_BUCKETS_S) | st.floats(0, 100), max_size=600))
def test_gaps_that_are_counted_together_are_counted_as_one_by_one(gaps_s):
    metrics = Metrics()
    for gap_s in gaps_s:
        metrics.observe_token_gap(gap_s)
    found = samples(metrics.render())
    name = "tailrace:inter_token_latency_seconds"
    assert found[f"{name}_count",] == len(gaps_s)
    assert found[f"{name}_sum",] == pytest.approx(sum(gaps_s))
    for bound in GAP_BUCKETS_S:
        fitting = sum(gap_s <= bound for gap_s in gaps_s)
        assert found[f"{name}_bucket", ("le", str(bound))] == fitting
    assert found[f"{name}_bucket", ("le", "+Inf")] == len(gaps_s)
