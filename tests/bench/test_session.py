import asyncio

import pytest

from tailrace.bench.engines.spec import EngineSpec
from tailrace.bench.result import Contender
from tailrace.bench.session import Session
from tailrace.errors import EngineError
from tests.bench.fake_contenders import Field


@pytest.fixture
def field(monkeypatch):
    found = Field({"a": 1})
    found.install(monkeypatch)
    return found


def session(folder, spec=None, warm_up=None):
    spec = spec or EngineSpec(name="a", kind="openai", url="http://127.0.0.1:9")
    told = []

    async def warm(served):
        told.append("warm")

    made = Session(
        spec, "p0-a", folder, Contender(name="a", engine=spec.kind), warm_up=warm_up or warm
    )
    return made, told


def test_nothing_is_started_until_a_trial_needs_it(field, tmp_path):
    async def stay():
        made, told = session(tmp_path)
        async with made:
            assert not made.was_started
        assert field.log == []
        async with made:
            await made.served()
            await made.served()
            assert told == ["warm"]
        assert field.log == ["start a", "stop a"]

    asyncio.run(stay())


def test_every_version_that_was_met_is_kept(field, tmp_path):
    async def stay():
        made, _ = session(tmp_path)
        for version in ("1.0", "1.0", "2.0"):
            field.version = version
            async with made:
                await made.served()
        return made.contender

    contender = asyncio.run(stay())
    assert (contender.version, contender.versions) == ("2.0", ["1.0", "2.0"])


def test_a_server_that_cannot_be_warmed_is_stopped_at_once(field, tmp_path):
    async def fail(served):
        raise EngineError("no answer")

    async def stay():
        made, _ = session(tmp_path, warm_up=fail)
        async with made:
            with pytest.raises(EngineError, match="no answer"):
                await made.served()
            assert field.running == []

    asyncio.run(stay())


def test_deaths_and_lack_of_memory_are_counted(field, tmp_path):
    async def stay():
        made, told = session(tmp_path)
        async with made:
            assert made.death() == ""
            served = await made.served()
            assert made.death() == ""
            served.server.has_died = True
            served.server.out_of_memory = 1
            assert made.death().startswith("ended with status 9")
            await made.bury()
            assert made.death() == ""
            await made.served()
        assert told == ["warm", "warm"]
        assert made.contender.restarts == 1
        assert made.contender.out_of_memory == 1
        assert made.contender.ready_s == [1.5, 1.5]

    asyncio.run(stay())


def test_lack_of_memory_at_the_start_and_while_warming_is_counted(field, tmp_path):
    async def fail(served):
        served.server.out_of_memory = 1
        raise EngineError("no answer")

    async def stay(made):
        async with made:
            with pytest.raises(EngineError):
                await made.served()
        return made.contender.out_of_memory

    assert asyncio.run(stay(session(tmp_path, warm_up=fail)[0])) == 1
    field.stillborn["a"] = EngineError("no memory")
    field.starved = 1
    assert asyncio.run(stay(session(tmp_path)[0])) == 1


def test_a_server_that_is_left_while_warming_knows_of_the_interrupt(field, tmp_path):
    async def fail(served):
        raise asyncio.CancelledError

    async def stay():
        made, _ = session(tmp_path, warm_up=fail)
        async with made:
            await made.served()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stay())
    assert field.exits == [asyncio.CancelledError]


def test_the_command_that_is_kept_has_no_key(field, tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "s3cret")
    spec = EngineSpec(
        name="a",
        kind="vllm",
        command=("serve", "{port}"),
        arguments=("--hf-token", "other", "--config=s3cret"),
        api_key_env="A_KEY",
    )

    async def stay():
        made, _ = session(tmp_path, spec)
        async with made:
            await made.served()
        return made.contender.command

    assert asyncio.run(stay()) == ["serve", "a", "--hf-token", "...", "--config=..."]


@pytest.mark.parametrize(
    ("fields", "log"),
    [
        ({"kind": "tailrace", "command": ("serve", "{port}")}, "p0-a.requests.jsonl"),
        (
            {"kind": "tailrace", "command": ("serve", "--request-log", "mine.jsonl", "{port}")},
            "mine.jsonl",
        ),
        ({"kind": "tailrace", "url": "http://127.0.0.1:9"}, None),
        ({"kind": "vllm", "command": ("serve", "{port}")}, None),
    ],
)
def test_tailrace_that_we_start_has_a_request_log(field, tmp_path, fields, log, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def stay():
        made, _ = session(tmp_path, EngineSpec(name="a", **fields))
        async with made:
            await made.served()
            made.mark_request_log()
            if log is not None:
                (tmp_path / log).write_text('{"old": 1}\n')
                made.mark_request_log()
                with (tmp_path / log).open("a") as stream:
                    stream.write('{"new": 1}\n{"half')
            await made.copy_request_log(tmp_path / "out.jsonl")

    asyncio.run(stay())
    if log is None:
        assert not (tmp_path / "out.jsonl").exists()
    else:
        assert (tmp_path / "out.jsonl").read_text() == '{"new": 1}\n'
