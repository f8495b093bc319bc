"""Clients as people use them, over real sockets: openai (sync, async, streaming) and httpx."""

import asyncio
import json

import openai
import pytest

from tailrace.config import Config, ServerConfig
from tests.server.fake_engine import Script
from tests.server.running_app import DEADLINE_S, read_to_end, running_app

HI = [{"role": "user", "content": "Hi"}]
CHAT_PROMPT = "user\nHi\nassistant\n"


@pytest.fixture(scope="module")
def app(tiny_folder):
    scripts = {
        CHAT_PROMPT: Script("Hello, wörld"),
        "broken": Script("abc", error_after=1),
        "broken at once": Script("abc", error_after=0),
        **{f"prompt {i}": Script(f"answer {i} " * 5) for i in range(16)},
    }
    with running_app(tiny_folder, scripts) as app:
        yield app


@pytest.fixture(scope="module")
def client(app):
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_sync_chat(client):
    answer = client.chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == "Hello, wörld"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("Hello, wörld".encode()) + 1


def test_a_sync_chat_stream(client):
    stream = client.chat.completions.create(
        model="tiny",
        messages=HI,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=1,
    )
    texts, reasons, usage = ["", ""], [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == ["Hello, wörld"] * 2
    assert reasons == ["stop", "stop"]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_completion_with_everything(client):
    answer = client.completions.create(
        model="tiny", prompt=["prompt 1", "prompt 2"], n=2, best_of=2, echo=True, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[3].text == "prompt 2" + "answer 2 " * 5
    scores = answer.choices[3].logprobs
    assert scores.token_logprobs[0] is None
    assert len(scores.tokens) == len(scores.text_offset) == len(scores.top_logprobs)
    assert "".join(scores.tokens[:8]) == "prompt 2"


def test_many_async_streams_at_once_keep_their_texts_apart(app):
    async def one(client, i):
        stream = await client.completions.create(model="tiny", prompt=f"prompt {i}", stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none") as client:
            return await asyncio.gather(*[one(client, i) for i in range(16)])

    assert asyncio.run(main()) == [f"answer {i} " * 5 for i in range(16)]


@pytest.mark.parametrize(
    ("kind", "status", "param", "fields"),
    [
        (openai.NotFoundError, 404, "model", {"model": "gpt-4"}),
        (openai.BadRequestError, 400, "temperature", {"temperature": 9}),
        (openai.BadRequestError, 400, "max_tokens", {"max_tokens": 100_000}),
        (openai.BadRequestError, 400, "top_k", {"extra_body": {"top_k": "many"}}),
        (openai.BadRequestError, 400, "logit_bias", {"logit_bias": {"99999": 1}}),
    ],
)
def test_refusals_become_the_clients_own_exceptions(client, kind, status, param, fields):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": HI} | fields)
    assert (caught.value.status_code, caught.value.param) == (status, param)


def test_an_engine_error_is_a_500_and_midway_an_error_of_the_stream(client):
    with pytest.raises(openai.InternalServerError, match="the step failed"):
        client.completions.create(model="tiny", prompt="broken")
    with pytest.raises(openai.InternalServerError, match="the step failed"):
        client.completions.create(model="tiny", prompt="broken at once", stream=True)
    stream = client.completions.create(model="tiny", prompt="broken", stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="the step failed"):  # noqa: PT012 -- the loop raises
        for chunk in stream:
            texts.append(chunk.choices[0].text)  # noqa: PERF401 -- kept when the loop raises
    assert texts == ["a"]


def test_a_load_script_counts_its_tokens(app):
    body = {"prompt": "prompt 3", "max_tokens": 12, "temperature": 0.7, "stream": True}
    with app.client.stream("POST", "/generate", json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["token"] for line in lines) == "answer 3 answer 3 "[:12]
    assert len(lines) == 12
    whole = app.post("/generate", {**body, "stream": False}).json()
    assert whole["usage"]["completion_tokens"] == 12
    assert whole["metrics"]["request_latency_ms"] > 0


def test_the_metrics_know_of_requests_and_gaps(app):
    app.post("/generate", {"prompt": "prompt 4", "max_tokens": 3})
    text = app.get("/metrics").text
    assert 'tailrace:request_success_total{finished_reason="length"}' in text
    counted = [line for line in text.splitlines() if "inter_token_latency_seconds_count" in line]
    assert float(counted[0].split()[-1]) >= 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_gives_everything_back(tiny_folder, stream):
    with running_app(tiny_folder, {"": Script("abc", pause_after=1)}) as app:
        body = json.dumps({"prompt": "Hi", "stream": stream, "n": 2}).encode()
        with app.connect() as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            app.wait(app.engine.was_paused.wait())
            assert app.engine.open_requests == 2
        app.wait(app.engine.was_aborted.wait())
        assert app.engine.open_requests == 0
        # Another request is answered, and the place of the first is free again.
        assert app.call(lambda: app.services.admission.sequences) == 0


def test_a_dead_engine_ends_streams_with_an_error_and_then_refuses(tiny_folder):
    with (
        running_app(tiny_folder, {"": Script("abc", pause_after=1)}) as app,
        openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(model="tiny", prompt="Hi", stream=True)
        assert next(stream).choices[0].text == "a"
        app.call(app.engine.die)
        with pytest.raises(openai.APIError, match="died"):
            next(stream)
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny", prompt="Hi")
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_full_house_answers_429_with_retry_after(tiny_folder):
    config = Config(server=ServerConfig(max_waiting=0))
    places = config.engine.max_batch_size
    with running_app(tiny_folder, {"": Script(pause_after=0)}, config) as app:
        app.call(lambda: setattr(app.services.admission, "sequences", places))
        refused = app.post("/generate", {"prompt": "Hi"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_reader_that_stops_is_dropped_and_others_are_served(tiny_folder):
    """Scored events are large, so that the sockets' own buffers fill soon."""
    config = Config(server=ServerConfig(stream_buffer_bytes=64 * 1024))
    scripts = {"slow": Script("x" * 15_000), "fast": Script("y" * 50)}
    with running_app(tiny_folder, scripts, config, context_length=20_000) as app:
        body = json.dumps(
            {"prompt": "slow", "stream": True, "max_tokens": 15_000, "logprobs": 20}
        ).encode()
        with app.connect() as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            app.wait(app.engine.was_aborted.wait())
            assert app.post("/generate", {"prompt": "fast"}).json()["text"] == "y" * 50
            connection.settimeout(DEADLINE_S)
            assert b"[DONE]" not in read_to_end(connection)[-100:]
        assert 'finished_reason="slow_reader"' in app.get("/metrics").text
