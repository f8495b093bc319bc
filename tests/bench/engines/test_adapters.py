from __future__ import annotations

import asyncio
import sys
from importlib import util
from pathlib import Path

import pytest

from tailrace.bench.engines import EngineSpec, adapter_for, start
from tailrace.bench.engines.adapter import has_option, option
from tailrace.bench.wire import resolve
from tailrace.config import EngineConfig
from tailrace.errors import ConfigError
from tests.bench.plain_server import PlainServer

MODELS = {"data": [{"id": "m"}]}


def spec(kind, **fields) -> EngineSpec:
    return EngineSpec(name="x", kind=kind, **fields)


def program(folder: Path, name: str) -> dict[str, str]:
    """Put a program of that name on a PATH, and return the environment that finds it."""
    file = folder / name
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return {"PATH": str(folder)}


def test_tailrace_serves_weights_by_its_own_command(tmp_path):
    log = tmp_path / "requests.jsonl"
    given = spec(
        "tailrace", weights="smollm2", model="small", request_log=log, arguments=("--threads", "1")
    )
    command = adapter_for(given).command("127.0.0.1", 7)
    assert command[:4] == [sys.executable, "-m", "tailrace", "serve"]
    assert option(command, ("--port",)) == "7"
    assert option(command, ("--model-path",)) == "smollm2"
    assert option(command, ("--served-model-name",)) == "small"
    assert option(command, ("--request-log",)) == str(log)
    assert command[command.index("--threads") + 1] == "1"
    assert not has_option(command, "--no-prefix-cache")


@pytest.mark.parametrize(
    ("kind", "name", "start_of_command", "more", "no_cache"),
    [
        (
            "vllm",
            "vllm",
            ["vllm", "serve", "W", "--host", "h", "--port", "7"],
            ["--enable-prompt-tokens-details"],
            ["--no-enable-prefix-caching"],
        ),
        (
            "llamacpp",
            "llama-server",
            ["llama-server", "--model", "W", "--host", "h", "--port", "7"],
            ["--metrics"],
            ["--no-cache-prompt", "--cache-ram", "0"],
        ),
        ("tailrace", "x", [sys.executable, "-m", "tailrace"], [], ["--no-prefix-cache"]),
    ],
)
def test_each_kind_has_its_own_command(tmp_path, kind, name, start_of_command, more, no_cache):
    env = program(tmp_path, name)
    command = adapter_for(spec(kind, weights="W", env=env)).command("h", 7)
    assert command[: len(start_of_command)] == start_of_command
    assert set(more) <= set(command)
    assert not set(no_cache) & set(command)
    without = adapter_for(spec(kind, weights="W", env=env, prefix_cache=False)).command("h", 7)
    assert " ".join(no_cache) in " ".join(without)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_installed_package_is_enough(monkeypatch, tmp_path, kind):
    found = util.find_spec("json")
    monkeypatch.setattr(util, "find_spec", lambda name: found if name == kind else None)
    given = spec(kind, weights="W", model="m", env={"PATH": str(tmp_path)})
    command = adapter_for(given).command("h", 7)
    module = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}[kind]
    assert command[:3] == [sys.executable, "-m", module]
    assert "W" in command
    assert option(command, ("--served-model-name",)) == "m"
    if kind == "sglang":
        assert {"--enable-metrics", "--enable-cache-report"} <= set(command)


def test_the_plans_command_is_kept_and_completed(tmp_path):
    env = program(tmp_path, "llama-server")
    given = ("llama-server", "-m", "x.gguf", "--port", "{port}", "--host={host}", "--metrics")
    command = adapter_for(spec("llamacpp", command=given, env=env)).command("h", 7)
    assert command == ["llama-server", "-m", "x.gguf", "--port", "7", "--host=h", "--metrics"]
    # Braces of other uses, as of JSON, are left alone.
    env = program(tmp_path, "vllm")
    words = ("vllm", "serve", "m", "--port={port}", "--extra", '{"a": {"b": 1}}')
    command = adapter_for(spec("vllm", command=words, env=env)).command("h", 7)
    assert command[:6] == ["vllm", "serve", "m", "--port=7", "--extra", '{"a": {"b": 1}}']


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "vlm", "url": "http://x"}, r"kind 'vlm' is not one of .* 'vllm'"),
        ({"kind": "tailrace"}, "nothing to measure; give `weights`"),
        ({"kind": "openai", "weights": "w"}, "kind openai has no command of its own"),
        ({"kind": "vllm", "weights": "w"}, "vllm is not installed here"),
        ({"kind": "sglang", "weights": "w"}, "sglang is not installed in this Python"),
        ({"kind": "llamacpp", "weights": "w"}, "llama-server: no such program"),
        ({"kind": "vllm", "command": ("none", "{port}")}, "none: no such program"),
        ({"kind": "vllm", "command": ("sh", "x")}, r"`command` has no \{port\}"),
        (
            {"kind": "vllm", "command": (sys.executable,), "url": "http://10.0.0.1:8000"},
            "elsewhere; leave one",
        ),
        (
            {"kind": "vllm", "url": "http://x", "prefix_cache": False},
            "start the server with --no-enable-prefix-caching",
        ),
        (
            {"kind": "openai", "command": (sys.executable, "{port}"), "prefix_cache": False},
            "start the server with its own option",
        ),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(monkeypatch, tmp_path, fields, words):
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=words):
        adapter_for(EngineSpec(name="x", **{"env": {"PATH": str(tmp_path)}} | fields))


def test_llamacpp_leaves_its_cache_out_by_request_too():
    fields = {"url": "http://127.0.0.1:1", "extra_body": {"top_k": 1}}
    assert adapter_for(spec("llamacpp", **fields)).extra_body() == {"top_k": 1}
    off = adapter_for(spec("llamacpp", prefix_cache=False, **fields)).extra_body()
    assert off == {"cache_prompt": False, "top_k": 1}


def entered(kind, answers, use, **fields):
    """Enter a running server that gives `answers`; return what `use` makes of it."""

    async def go():
        async with PlainServer({"/v1/models": MODELS} | answers) as plain:
            given = spec(kind, url=plain.url, **fields)
            async with start(given, Path("/nowhere/log")) as server:
                return await use(server, plain)

    return asyncio.run(go())


async def version_and_slots(server, _):
    constants = server.monitor()._constants
    return server.version, {k: v for k, v in constants.items() if k == "max_running"}


def test_sglangs_counters_are_zero_before_it_shows_them():
    async def constants(server, _):
        return server.monitor()._constants

    found = entered("sglang", {"/health_generate": {}}, constants)
    assert found == {"prefix_hits_total": 0.0, "preemptions_total": 0.0}
    assert entered("vllm", {"/health": {}}, constants) == {}


def test_llamacpp_tells_the_context_of_a_slot_by_its_own_route():
    async def context(server, _):
        return server.context_tokens

    answers = {"/health": {}, "/props": {"default_generation_settings": {"n_ctx": 2048}}}
    assert entered("llamacpp", answers, context) == 2048
    assert entered("llamacpp", {"/health": {}}, context) is None


@pytest.mark.parametrize(
    ("kind", "answers", "found"),
    [
        ("vllm", {"/health": {}, "/version": {"version": "0.33.0"}}, ("0.33.0", {})),
        ("sglang", {"/health_generate": {}, "/server_info": {"version": "5"}}, ("5", {})),
        (
            "sglang",
            {
                "/health_generate": {},
                "/get_server_info": {
                    "version": "4",
                    "internal_states": [{"effective_max_running_requests_per_dp": 256}] * 2,
                },
            },
            ("4", {"max_running": 512.0}),
        ),
        (
            "llamacpp",
            {"/health": {}, "/props": {"build_info": "b1-ab", "total_slots": 4}},
            ("b1-ab", {"max_running": 4.0}),
        ),
        ("tailrace", {"/ready": {}, "/version": {"version": "0.1"}}, ("0.1", {})),
        ("openai", {}, ("", {})),
    ],
)
def test_each_kind_is_found_ready_and_asked_for_its_version(kind, answers, found):
    assert entered(kind, answers, version_and_slots) == found


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("vllm", "/health"),
        ("sglang", "/health_generate"),
        ("llamacpp", "/health"),
        ("tailrace", "/ready"),
    ],
)
def test_each_kind_has_its_own_sign_of_not_being_ready(kind, path):
    with pytest.raises(ConfigError, match=rf"{path}: HTTP 503"):
        entered(kind, {path: 503}, version_and_slots)


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        (
            "vllm",
            {
                "/health": {},
                "/tokenize": lambda body: {"tokens": [len(body["prompt"])]},
                "/detokenize": lambda body: {"prompt": str(body["tokens"])},
            },
        ),
        (
            "sglang",
            {
                "/health_generate": {},
                "/tokenize": lambda body: {"tokens": [len(body["prompt"])]},
                "/detokenize": lambda body: {"text": str(body["tokens"])},
            },
        ),
        (
            "llamacpp",
            {
                "/health": {},
                "/tokenize": lambda body: {
                    "tokens": [len(body["content"])]
                    if "content" in body and body["add_special"]
                    else []
                },
                "/detokenize": lambda body: {"content": str(body["tokens"])},
            },
        ),
    ],
)
@pytest.mark.parametrize("is_known", [True, False])
def test_each_kinds_tokenizer_is_spoken_to_in_its_own_words(kind, answers, is_known):
    async def use(server, _):
        codec = server.codec("m")
        return await codec.encode("four"), await codec.decode([1, 2])

    found = entered(kind if is_known else "openai", answers, use)
    assert found == ([4], "[1, 2]")


@pytest.mark.parametrize(
    ("arguments", "env", "found"),
    [
        (("--max-batch-size", "7"), {}, 7),
        (("--max-batch-size=7",), {}, 7),
        ((), {"TAILRACE_MAX_BATCH_SIZE": "9"}, 9),
        ((), {}, EngineConfig().max_batch_size),
        (("--config", "file.toml"), {}, None),
    ],
)
def test_tailraces_largest_batch_is_known_without_asking(monkeypatch, arguments, env, found):
    monkeypatch.delenv("TAILRACE_MAX_BATCH_SIZE", raising=False)

    async def go():
        async with PlainServer({}) as plain:
            given = spec("tailrace", weights="w", arguments=arguments, env=env)
            adapter = adapter_for(given)
            endpoint = await resolve(plain.url)
            return await adapter.max_running(endpoint, adapter.command("h", 1))

    assert asyncio.run(go()) == found


def test_options_are_read_in_both_spellings():
    command = ["x", "--a", "1", "--b=2", "--a=3", "--end"]
    assert option(command, ("--a",)) == "3"
    assert option(command, ("--b",)) == "2"
    assert option(command, ("--end",)) == ""
    assert option(command, ("--none",)) == ""
    assert has_option(command, "--b")
    assert not has_option(command, "--c", "2")
