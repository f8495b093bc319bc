from __future__ import annotations

import json

import pytest

from tailrace.bench.prompts import Prompt
from tailrace.bench.traffic.export import write_mooncake
from tailrace.bench.traffic.schedule import Arrival, Schedule
from tailrace.bench.traffic.trace import read_trace, shared_prefixes
from tailrace.bench.traffic.workload import Workload, build
from tailrace.errors import ConfigError


def written(folder, schedule, prompts=None):
    file = folder / "out.jsonl"
    write_mooncake(schedule, prompts, file)
    return file


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("source", ["chat70", "azure-conv", "mooncake-synthetic"])
def test_our_own_reader_gives_the_schedule_back(tmp_path, source):
    workload = Workload(source=source, max_input_tokens=6000)
    schedule = build(workload, rate_rps=4.0, duration_s=100.0, seed=3)
    trace = read_trace(written(tmp_path, schedule))
    kept = shared_prefixes(schedule.arrivals)
    assert trace.format == "mooncake"
    assert trace.block_tokens == schedule.block_tokens
    assert [(a.input_tokens, a.output_tokens, a.prefix_ids) for a in trace.arrivals] == [
        (a.input_tokens, a.output_tokens, a.prefix_ids) for a in kept
    ]
    first_s = kept[0].arrival_s
    for planned, read in zip(kept, trace.arrivals, strict=True):
        assert read.arrival_s == pytest.approx(planned.arrival_s - first_s, abs=1.1e-3)


def test_every_begun_block_has_an_id_and_only_shared_ones_are_equal(tmp_path):
    arrivals = (
        Arrival(0.0, 1025, 5, (7, 8)),
        Arrival(1.5, 1300, 6, (7, 9)),
        Arrival(2.25, 100, 7),
    )
    rows = rows_of(written(tmp_path, Schedule(arrivals, "x", 3.0, block_tokens=512)))
    assert rows[1] == {
        "timestamp": 1500, "input_length": 1300, "output_length": 6, "hash_ids": [7, 9, 11]
    }  # fmt: skip
    assert [row["hash_ids"] for row in rows] == [[7, 8, 10], [7, 9, 11], [12]]


def test_small_blocks_become_mooncakes(tmp_path):
    first = tuple(range(64))
    other = (*first[:40], *range(100, 124))
    arrivals = tuple(Arrival(float(i), 1100, 5, ids) for i, ids in enumerate([first, other, first]))
    one, two, three = (
        row["hash_ids"]
        for row in rows_of(written(tmp_path, Schedule(arrivals, "x", 3.0, block_tokens=16)))
    )
    # 32 small blocks make one: the second big block of `other` differs from its 8th small one on.
    assert one[:2] == three[:2]
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert len({one[2], two[2], three[2]}) == 3


def test_the_prompts_own_counts_are_written(tmp_path):
    schedule = Schedule((Arrival(0.0, 10, 5),), "x", 1.0)
    prompts = [Prompt(text="...", tokens=11, wanted_tokens=10)]
    assert rows_of(written(tmp_path, schedule, prompts))[0]["input_length"] == 11


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"users": 3}, "closed loop"),
        ({"turns": 2}, "later turns"),
        ({"priorities": "1:1"}, "priority"),
    ],
)
def test_what_the_format_cannot_say_is_refused(tmp_path, changed, words):
    rate_rps = None if "users" in changed else 2.0
    schedule = build(
        Workload(source="chat70", **changed), rate_rps=rate_rps, duration_s=20.0, seed=0
    )
    with pytest.raises(ConfigError, match=words):
        written(tmp_path, schedule)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    schedule = Schedule((Arrival(0.0, 10, 5),), "x", 1.0)
    with pytest.raises(ConfigError, match="No such file"):
        write_mooncake(schedule, None, tmp_path / "none" / "out.jsonl")
