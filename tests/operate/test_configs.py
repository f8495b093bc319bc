"""The collectors' configurations that we ship: readable, and about families that exist."""

from __future__ import annotations

import asyncio
import json
import re
import time
import tomllib
from importlib.resources import files
from urllib.parse import urlsplit

import pytest

from tailrace.bench.metrics_source import source_at
from tailrace.bench.scrape import ALL_FAMILIES
from tailrace.bench.wire import Endpoint
from tailrace.config import ServerConfig

CONFIGS = files("tailrace.operate") / "configs"
ENGINES = {"tailrace", "vllm", "sglang", "llamacpp"}
KNOWN = set(ALL_FAMILIES)


def text_of(name: str) -> str:
    return (CONFIGS / name).read_text(encoding="utf-8")


def test_prometheus_scrapes_every_engine_and_the_gpus():
    yaml = pytest.importorskip("yaml", reason="PyYAML, which huggingface_hub brings, is missing")
    config = yaml.safe_load(text_of("prometheus.yml"))
    assert config["global"]["scrape_interval"] == "1s"
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs.keys() == ENGINES | {"dcgm"}
    for job in jobs.values():
        (target,) = job["static_configs"][0]["targets"]
        assert urlsplit(f"http://{target}").port
    assert jobs["tailrace"]["static_configs"][0]["targets"] == [f"127.0.0.1:{ServerConfig().port}"]


def test_the_families_that_it_names_are_real():
    text = text_of("prometheus.yml")
    named = set(re.findall(r"\b(?:tailrace|vllm|sglang|llamacpp):[a-z_]+|DCGM_[A-Z_]+", text))
    assert len(named) > 20
    assert named <= KNOWN


def telegraf() -> dict:
    return tomllib.loads(text_of("telegraf.conf"))


def test_telegraf_keeps_all_that_we_read_and_nothing_else():
    (scraped,) = telegraf()["inputs"]["prometheus"]
    assert set(scraped["fieldinclude"]) == KNOWN
    assert scraped["metric_version"] == 2
    assert len(scraped["urls"]) == len(ENGINES) + 1


def test_what_telegraf_is_told_to_write_is_what_we_read(tmp_path):
    """The file's layout as the configuration asks for it, and the plan's line in its comment."""
    text = text_of("telegraf.conf")
    (output,) = telegraf()["outputs"]["file"]
    assert (output["data_format"], output["json_timestamp_units"]) == ("json", "1ms")
    (line,) = re.findall(r'metrics_url = "([^"]+)"', text)
    assert output["files"] == [urlsplit(line.removeprefix("telegraf+")).path]
    file = tmp_path / "tailrace.json"
    file.touch()
    url = line.replace(output["files"][0], str(file))
    tags = {"url": "http://127.0.0.1:8000/metrics", "engine": "0"}
    row = {
        "fields": {"vllm:num_requests_running": 3.0},
        "name": "prometheus",
        "tags": tags,
        "timestamp": int(time.time() * 1000) + 5000,
    }

    other = {**row, "tags": tags | {"url": "http://127.0.0.1:8001/metrics"}}

    async def go():
        source = await source_at(url, Endpoint("", "", "", 0))
        file.write_text(json.dumps(row) + "\n" + json.dumps(other) + "\n")
        return await source.read()

    (figures,) = asyncio.run(go())
    assert figures.server == {"running": 3}
