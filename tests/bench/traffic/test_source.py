from __future__ import annotations

import pytest

from tailrace.bench.traffic.schedule import Shape
from tailrace.bench.traffic.source import schedule_for
from tailrace.errors import ConfigError


def test_a_profile_is_drawn_for_the_stretched_time():
    schedule = schedule_for("azure-conv", Shape(rate_scale=0.1, duration_s=600.0), seed=0)
    assert 250 < len(schedule.arrivals) < 420
    assert schedule.arrivals[-1].arrival_s < 600
    assert "CC-BY-4.0" in schedule.source


def test_a_profile_can_be_drawn_by_count():
    assert len(schedule_for("azure-conv", Shape(max_requests=7), seed=0).arrivals) == 7


def test_a_profile_without_an_end_is_an_error():
    with pytest.raises(ConfigError, match="--duration"):
        schedule_for("azure-conv", Shape(), seed=0)


def test_an_unknown_name_brings_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'azure-conv'"):
        schedule_for("azure-cov", Shape(), seed=0)


def test_a_preset_is_sent_to_the_command_that_takes_it():
    with pytest.raises(ConfigError, match="`tailrace bench run` takes it"):
        schedule_for("chat70", Shape(), seed=0)


def test_a_file_is_read_and_its_format_named(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n0,5,6\n1,0,6\n3,7,8\n")
    schedule = schedule_for(str(file), Shape(), seed=0)
    assert [a.input_tokens for a in schedule.arrivals] == [5, 7]
    assert "tailrace format" in schedule.source
    assert "1 rows of zero tokens left out" in schedule.source
    assert "prefixes" not in schedule.source


def test_a_trace_of_shared_prefixes_keeps_them_and_says_so(tmp_path):
    file = tmp_path / "trace.jsonl"
    row = '{{"timestamp": 0, "input_length": 1300, "output_length": 6, "hash_ids": [1, {}, 9]}}\n'
    file.write_text(row.format(2) + row.format(2) + row.format(3))
    schedule = schedule_for(str(file), Shape(max_input_tokens=1023), seed=0)
    assert "prefixes shared in blocks of 512" in schedule.source
    assert schedule.block_tokens == 512
    assert [a.prefix_ids for a in schedule.arrivals] == [(1,)] * 3
