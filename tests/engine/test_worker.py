from pathlib import Path

import pytest
import zmq

from tailrace.config import EngineConfig
from tailrace.types import (
    STEP_HUNG_STATUS,
    AbortRequests,
    EngineFatal,
    EngineOutputs,
    EngineReady,
    InspectKv,
    KvReport,
    ModelResolved,
    Ping,
)
from tests.support import hanging_engine
from tests.support.tiny import make_tiny_checkpoint
from tests.support.worker_client import WorkerClient

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def config(checkpoint: Path, **extra) -> EngineConfig:
    return EngineConfig(
        model_path=str(checkpoint), dtype="float32", threads=1, kv_cache_tokens=4096, **extra
    )


@pytest.fixture(scope="module")
def client(checkpoint):
    with WorkerClient(config(checkpoint)) as running:
        assert running.wait_for(ModelResolved).folder == str(checkpoint)
        running.wait_ready()
        yield running


def test_greedy_output_does_not_depend_on_company(client):
    prompts = {f"p{i}": [3 + i, 40, 7 * i + 1, 9] * (i + 1) for i in range(5)}
    alone = {}
    for name, prompt in prompts.items():
        client.add(name, prompt, max_tokens=12, temperature=0.0, ignore_eos=True)
        alone[name] = client.tokens(name)
    for name, prompt in prompts.items():
        client.add(f"{name}-b", prompt, max_tokens=12, temperature=0.0, ignore_eos=True)
    together = client.collect(*(f"{name}-b" for name in prompts))
    for name in prompts:
        outputs = together[f"{name}-b"]
        assert [t for output in outputs for t in output.token_ids] == alone[name]
        assert outputs[-1].finish_reason == "length"
        assert outputs[-1].times.first_token_s >= outputs[-1].times.scheduled_s


def test_late_binding_changes_no_token_and_steps_report_their_time(client, checkpoint):
    prompts = {f"late-{i}": [5 + i, 3, 60] * (i + 2) for i in range(3)}
    known = {}
    for name, prompt in prompts.items():
        client.add(name, prompt, max_tokens=12, temperature=0.0, ignore_eos=True)
        known[name] = client.tokens(name)
    with WorkerClient(config(checkpoint, late_binding=True, itl_target_ms=50)) as late:
        assert late.wait_ready().step_costs.base_s >= 0.0
        for name, prompt in prompts.items():
            late.add(name, prompt, max_tokens=12, temperature=0.0, ignore_eos=True)
        found = late.collect(*prompts)
        late.send(Ping())
        stats = late.wait_for(EngineOutputs).stats
    for name in prompts:
        assert [t for output in found[name] for t in output.token_ids] == known[name]
    timings = stats.timings
    assert sum(timings.device.counts) == sum(timings.error.counts) == stats.steps_total > 0
    assert min(timings.schedule_s_total, timings.prepare_s_total, timings.publish_s_total) > 0
    assert 0 < sum(timings.host.counts) <= stats.steps_total + len(prompts)
    assert stats.step_costs is not None


def test_a_seed_gives_the_same_tokens_whatever_the_company(client):
    request = {"max_tokens": 10, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    client.add("alone", [1, 2, 3], **request)
    alone = client.tokens("alone")
    client.add("x", [4] * 30, max_tokens=30, temperature=1.0, ignore_eos=True)
    client.add("again", [1, 2, 3], **request)
    outputs = client.collect("x", "again")["again"]
    assert [t for output in outputs for t in output.token_ids] == alone


def test_logprobs_and_prompt_logprobs_come_with_their_tokens(client):
    client.add("l", [1, 2, 3, 4], max_tokens=2, temperature=0.0, logprobs=3, prompt_logprobs=2)
    outputs = client.collect("l")["l"]
    first = outputs[0]
    assert first.logprobs[0].token_id == first.token_ids[0]
    assert first.logprobs[0].rank == 1
    assert len(first.logprobs[0].top_ids) == 3
    assert first.prompt_logprobs[0] is None
    assert [entry.token_id for entry in first.prompt_logprobs[1:]] == [2, 3, 4]
    assert all(len(entry.top_ids) == 2 for entry in first.prompt_logprobs[1:])
    assert all(output.prompt_logprobs is None for output in outputs[1:])


def test_an_abort_returns_every_block(client):
    client.add("long", [5] * 20, max_tokens=2000, temperature=0.0, ignore_eos=True)
    while not any(o.request_id == "long" for o in client.wait_for(EngineOutputs).outputs):
        pass
    client.send(AbortRequests(["long", "unknown"]))
    assert client.collect("long")["long"][-1].finish_reason == "abort"
    client.send(Ping())
    while True:
        stats = client.wait_for(EngineOutputs).stats
        if stats.running_requests == 0:
            break
    assert stats.held_blocks == 0
    assert stats.free_blocks == stats.total_blocks


def test_the_kv_pool_is_checked_and_described_while_a_request_runs(client):
    client.add("held", [5] * 20, max_tokens=400, temperature=0.0, ignore_eos=True)
    while not any(o.request_id == "held" for o in client.wait_for(EngineOutputs).outputs):
        pass
    client.send(InspectKv())
    report = client.wait_for(KvReport)
    client.send(AbortRequests(["held"]))
    client.collect("held")
    assert report.fault == ""
    assert [table.request_id for table in report.tables] == ["held"]
    assert report.tables[0].held >= 3
    assert report.free_blocks < report.total_blocks


def test_a_bad_request_and_garbage_frames_leave_the_others_alone(client):
    client.add("good", [1, 2, 3], max_tokens=8, temperature=0.0, ignore_eos=True)
    client.socket.send(b"\xc1 not messagepack")
    client.socket.send_multipart([b"a", b"b", b""])
    client.add("bad", [10**6], max_tokens=1)
    outputs = client.collect("good", "bad")
    assert outputs["bad"][-1].finish_reason == "error"
    assert "outside 0.." in outputs["bad"][-1].error
    assert len([t for o in outputs["good"] for t in o.token_ids]) == 8


def test_shutdown_ends_with_status_0_after_the_last_request(checkpoint):
    with WorkerClient(config(checkpoint)) as client:
        client.wait_ready()
        client.add("last", [1, 2], max_tokens=5, ignore_eos=True)
        status = client.shut_down()
        assert client.collect("last")["last"][-1].finish_reason == "length"
        assert status == 0


def test_the_worker_exits_when_its_parent_does(checkpoint):
    with WorkerClient(config(checkpoint)) as client:
        client.wait_ready()
        client.process.stdin.close()
        assert client.process.wait(60) == 1


def test_a_worker_whose_parent_dies_while_it_loads_loads_no_further(checkpoint):
    with WorkerClient(config(checkpoint)) as client:
        client.wait_for(ModelResolved)
        client.process.stdin.close()
        assert client.process.wait(60) == 1
        while client.socket.poll(100):
            assert not isinstance(client.receive(), EngineReady)


def test_a_worker_whose_step_cannot_be_queued_ends_with_a_status_of_its_own(checkpoint):
    limited = config(checkpoint, step_timeout_s=3.0)
    with WorkerClient(limited, command=hanging_engine.COMMAND) as client:
        client.wait_ready()
        client.add("well", [1, 2, 3], max_tokens=200, ignore_eos=True)
        assert client.collect("well")["well"][-1].finish_reason == "length"
        client.add("stuck", list(hanging_engine.FULL_QUEUE_PROMPT.encode()), max_tokens=5)
        assert client.process.wait(60) == STEP_HUNG_STATUS


def test_a_worker_that_cannot_go_on_ends_though_its_runners_thread_waits(checkpoint):
    with WorkerClient(config(checkpoint), command=hanging_engine.COMMAND) as client:
        client.wait_ready()
        client.add("lost", list(hanging_engine.LOST_PROMPT.encode()), max_tokens=5)
        assert "the device is lost" in client.wait_for(EngineFatal).error
        assert client.process.wait(60) == 1


def test_the_socket_is_private(client):
    path = client.socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("ipc://")
    assert Path(path).stat().st_mode & 0o077 == 0


def test_a_model_that_cannot_be_loaded_is_told_and_ends_with_status_1(tmp_path):
    with WorkerClient(EngineConfig(model_path=str(tmp_path / "nothing"))) as client:
        assert "nothing" in client.wait_for(EngineFatal).error
        assert client.process.wait(60) == 1
