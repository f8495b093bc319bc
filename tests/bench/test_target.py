from __future__ import annotations

import asyncio
import json

import pytest

from tailrace.bench.target import Target, check_streaming, completion_body, inspect
from tailrace.bench.wire import resolve
from tailrace.errors import ConfigError
from tests.bench.mock_server import Behaviour, MockServer


def with_server(use, *, key="", **fields):
    async def go():
        async with MockServer(**fields) as server:
            return await use(await resolve(server.url, api_key=key), server)

    return asyncio.run(go())


def test_the_first_model_is_taken_and_its_context_known():
    target = with_server(lambda endpoint, _: inspect(endpoint, None), context_tokens=99)
    assert target == Target("mock", 99, "0-mock")


def test_a_model_that_is_not_served_is_an_error_naming_those_that_are():
    with pytest.raises(ConfigError, match="serves mock"):
        with_server(lambda endpoint, _: inspect(endpoint, "other"))


def test_a_wrong_key_shows_before_the_run():
    with pytest.raises(ConfigError, match="HTTP 401"):
        with_server(lambda endpoint, _: inspect(endpoint, None), api_key="secret", key="wrong")
    assert (
        with_server(
            lambda endpoint, _: inspect(endpoint, None), api_key="secret", key="secret"
        ).model
        == "mock"
    )


def test_the_body_asks_for_exactly_so_many_tokens():
    body = json.loads(completion_body(Target("m", None, ""), "hi", 7, temperature=0.5, seed=3))
    assert body == {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 7,
        "ignore_eos": True,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
    }


def test_the_body_may_be_changed_by_the_server_it_is_for():
    target = Target("m", None, "")
    changes = {"priority": -3, "ignore_eos": False, "extra_body": {"seed": None, "top_k": 5}}
    body = json.loads(completion_body(target, "hi", 7, temperature=0.5, seed=3, **changes))
    assert body["priority"] == -3
    assert body["top_k"] == 5
    assert {"seed", "ignore_eos", "min_tokens"}.isdisjoint(body)


def test_a_server_that_streams_passes_the_check():
    async def use(endpoint, server):
        await check_streaming(endpoint, Target("mock", None, ""), timeout_s=5)
        return server.completions

    assert len(with_server(use)) == 1


def test_a_server_that_does_not_stream_fails_the_check(monkeypatch):
    async def use(endpoint, server):
        refuse = Behaviour(fault="refuse")
        original = type(server)._complete

        async def complete(self, writer, reader, body):
            self.script = lambda _: refuse
            await original(self, writer, reader, {**body, "seed": 0})

        monkeypatch.setattr(type(server), "_complete", complete)
        await check_streaming(endpoint, Target("mock", None, ""), timeout_s=5)

    with pytest.raises(ConfigError, match="HTTP 503"):
        with_server(use)
