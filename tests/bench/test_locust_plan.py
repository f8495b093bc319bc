"""What the Locust driver is to send: prepared, written, read; shapes and pauses as written."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys

import msgspec
import pytest

from tailrace.bench.load.shot import chains
from tailrace.bench.locust_plan import (
    Stage,
    Think,
    Wanted,
    locustfile_path,
    prepare,
    read_plan,
    read_stages,
    read_think,
    users_at,
    write_plan,
)
from tailrace.errors import ConfigError
from tests.bench.mock_server import WordCodec, running

CLOSED = {"source": "chat70", "input_tokens": "20", "output_tokens": "6", "max_requests": 8}


@pytest.fixture
def server():
    with running() as started:
        yield started


def test_a_closed_loop_has_the_lengths_and_belongs_to_no_user(server):
    plan, shots = asyncio.run(prepare(Wanted(url=server.url, users=3, **CLOSED)))
    assert (plan.requests, plan.loop, plan.duration_s) == (8, "closed", 0.0)
    assert (plan.model, plan.address, plan.port) == ("mock", "127.0.0.1", server.port)
    assert plan.think_s == "0.1-2.0"  # chat70's own
    assert "3 users" in plan.traffic
    assert len(chains(shots)) == 8
    for shot in shots:
        body = json.loads(shot.body)
        assert len(WordCodec().encode_now(body["prompt"])) == shot.input_tokens == 20
        assert body["max_tokens"] == shot.output_tokens == 6
        assert body["stream"] is True
        assert shot.user is None
    assert len({shot.request_id for shot in shots}) == 8
    # The streaming check is the only request that the server has seen.
    assert len(server.completions) == 1


def test_an_open_loop_has_the_schedule(server):
    wanted = Wanted(
        url=server.url,
        source="chat70",
        loop="open",
        arrivals="constant",
        rate_rps=4.0,
        duration_s=2.0,
        input_tokens="10",
        output_tokens="3",
        extra_body={"top_p": 0.5, "min_tokens": None},
    )
    plan, shots = asyncio.run(prepare(wanted))
    assert (plan.loop, plan.duration_s, plan.think_s) == ("open", 2.0, "")
    gaps = [b.scheduled_s - a.scheduled_s for a, b in itertools.pairwise(shots)]
    assert gaps == pytest.approx([0.25] * len(gaps))
    assert len(shots) in {7, 8}
    body = json.loads(shots[0].body)
    assert body["top_p"] == 0.5
    assert "min_tokens" not in body


def test_the_turns_of_a_session_stay_in_one_chain(server):
    _, shots = asyncio.run(prepare(Wanted(url=server.url, turns=2, **CLOSED)))
    assert [len(chain) for chain in chains(shots)] == [2] * 4


def test_a_plan_survives_its_file(server, tmp_path):
    plan, shots = asyncio.run(prepare(Wanted(url=server.url, turns=2, **CLOSED)))
    file = tmp_path / "plan.jsonl"
    write_plan(file, plan, shots)
    assert read_plan(file) == (plan, shots)
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(ConfigError, match="7 of 8 requests"):
        read_plan(file)
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match="not a file of prepared requests"):
        read_plan(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_plan(tmp_path / "none")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rate_rps": 3.0}, "rate"),
        ({"duration_s": 3.0}, "--loop open"),
        ({"source": "chat77"}, "chat70"),
        ({"loop": "open", "max_requests": None}, "chat70"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_sent(server, more, words):
    with pytest.raises(ConfigError, match=words):
        asyncio.run(prepare(Wanted(**({"url": server.url} | CLOSED | more))))
    assert not server.completions


def run_main(wanted: Wanted, file) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tailrace.bench.locust_plan", str(file)],
        input=msgspec.json.encode(wanted),
        capture_output=True,
        check=False,
        timeout=60,
    )


def test_the_program_writes_the_plan(server, tmp_path):
    done = run_main(Wanted(url=server.url, **CLOSED), tmp_path / "new" / "plan.jsonl")
    assert done.returncode == 0, done.stderr
    plan, _ = read_plan(tmp_path / "new" / "plan.jsonl")
    assert json.loads(done.stdout) == {"requests": 8, "traffic": plan.traffic}


def test_the_program_says_in_one_line_what_is_wrong(tmp_path):
    done = run_main(Wanted(url="http://127.0.0.1:9", **CLOSED), tmp_path / "plan.jsonl")
    assert done.returncode == 2
    assert b"cannot connect" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "plan.jsonl").exists()


def test_stages_ramp_hold_and_step():
    stages = read_stages("0-64@30, 64@120,16@60")
    assert stages == (Stage(0, 64, 30.0), Stage(64, 64, 120.0), Stage(16, 16, 60.0))
    due = {0.0: 0, 15.0: 32, 29.99: 64, 30.0: 64, 149.0: 64, 150.0: 16, 209.0: 16, 210.0: None}
    assert {at_s: users_at(stages, at_s) for at_s in due} == due


@pytest.mark.parametrize("text", ["", "64", "a@3", "1-@3", "3@0", "3@-1", "3@inf", "1-2-3@4"])
def test_a_stage_that_cannot_be_read_is_named(text):
    with pytest.raises(ConfigError, match="--shape"):
        read_stages(text)


def test_a_pause_is_a_number_or_a_range():
    assert read_think("0.3") == Think(0.3, 0.3)
    think = read_think("0.1-0.5")
    rng = random.Random(1)
    drawn = [think.draw(rng) for _ in range(200)]
    assert 0.1 <= min(drawn) < 0.15
    assert 0.45 < max(drawn) <= 0.5


@pytest.mark.parametrize("text", ["", "x", "0.5-0.1", "-1", "1-inf", "nan"])
def test_a_pause_that_cannot_be_read_is_named(text):
    with pytest.raises(ConfigError, match="--think-s"):
        read_think(text)


def test_the_path_is_found_without_importing_locust():
    code = (
        "import sys; from tailrace.bench.locust_plan import locustfile_path; "
        "print(locustfile_path()); assert not {'locust', 'gevent'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == str(locustfile_path())
    assert locustfile_path().name == "locustfile.py"


def test_what_prompts_share_by_plan_is_told_to_the_verdict(server, tmp_path):
    trace = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 100 * i, "input_length": 700 + i, "output_length": 4, "hash_ids": [1, 2 + i]}
        for i in range(3)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = Wanted(url=server.url, source=str(trace), loop="open")
    plan, shots = asyncio.run(prepare(wanted))
    assert plan.shared_tokens == {1: 512, 2: 512}
    write_plan(tmp_path / "plan.jsonl", plan, shots)
    assert read_plan(tmp_path / "plan.jsonl")[0].shared_tokens == {1: 512, 2: 512}
