"""`tailrace compare PLAN --check` on plans that are refused, and on one that could start."""

import sys
from dataclasses import replace

import pytest

from tailrace.bench.engines.spec import EngineSpec
from tailrace.bench.limits import Limit
from tailrace.bench.plan import Plan, SearchPlan, SteadyPlan
from tailrace.bench.preview import preview
from tailrace.bench.traffic.workload import Workload
from tailrace.errors import ConfigError

OURS = EngineSpec(
    name="ours",
    kind="vllm",
    command=(sys.executable, "-m", "server", "--port", "{port}", "--api-key", "s3cret"),
    prefix_cache=False,
    env={"HF_TOKEN": "s3cret"},
)
FOUND = EngineSpec(name="found", kind="openai", url="http://127.0.0.1:9")
PLAN = Plan(
    title="A against B",
    engines=(OURS, FOUND),
    traffic=Workload(source="chat70", input_tokens="20", output_tokens="4"),
    limits=(Limit("ttft", 95, 1.0),),
    search=SearchPlan(low_rps=1, high_rps=16, start_rps=5.0, trial_s=20),
    steady=SteadyPlan(rates=(2.0,), users=(3,), trial_s=10),
)


def test_it_says_what_would_be_measured():
    lines = preview(PLAN)
    text = "\n".join(lines)
    assert lines[0] == "A against B"
    assert "limits: p95_ttft=1" in lines
    assert "-m server --port 8000 --api-key ... --no-enable-prefix-caching" in text
    assert "with HF_TOKEN in the environment" in text
    assert "s3cret" not in text
    assert "found running at http://127.0.0.1:9" in text
    assert "search from 1 to 16 requests/s, first: 5 requests/s for 20 s: " in text
    assert "20 prompt and 4 answer tokens in the mean, the longest of 24 together" in text
    assert "steady: 2 requests/s for 10 s: " in text
    assert "steady: 3 users for 10 s: at most " in text
    # Six pairs of two, each at least four search trials and two steady ones.
    assert "12 stays (6 pairs of 2), of 100 s of arrivals each at the least: 20 min" in text


def test_without_a_search_there_are_loads_only():
    text = "\n".join(preview(replace(PLAN, search=None, limits=())))
    assert "search" not in text
    assert "limits" not in text
    assert "12 stays (6 pairs of 2), of 20 s of arrivals each at the least: 4 min" in text


def test_what_a_start_would_refuse_is_refused(tmp_path):
    absent = replace(PLAN, engines=(replace(OURS, command=("no-such-program", "{port}")),))
    with pytest.raises(ConfigError, match="no such program"):
        preview(absent)
    with pytest.raises(ConfigError, match="give a folder with tokenizer.json"):
        preview(replace(PLAN, tokenizer=str(tmp_path)))
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n1,5,5\n2,5,5\n")
    with pytest.raises(ConfigError, match="ends after 3 requests"):
        preview(replace(PLAN, traffic=Workload(source=str(trace))))
