import pytest

from tailrace.bench.masking import masked, masked_engine


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["vllm", "--api-key", "s3cret", "x"], ["vllm", "--api-key", "...", "x"]),
        (["vllm", "--api-key=s3cret"], ["vllm", "--api-key=..."]),
        (["sglang", "--hf-token", "s3cret"], ["sglang", "--hf-token", "..."]),
        (["env", "HF_TOKEN=s3cret", "vllm"], ["env", "HF_TOKEN=...", "vllm"]),
        (["sh", "-c", "serve --api-key s3cret"], ["sh", "-c", "serve --api-key ..."]),
        (
            ["--start", "serve 'a b' --port {port} --api-key=s3cret"],
            ["--start", "serve 'a b' --port {port} --api-key=..."],
        ),
        (["--start=serve --api-key s3cret"], ["--start=serve --api-key ..."]),
        (["say", "its' --api-key s3cret"], ["say", """'its'"'"'' --api-key ..."""]),
        (["serve", "--apikey", "s3cret-key"], ["serve", "--apikey", "..."]),
        (
            ["sh", "-c", "sh -c 'serve --api-key s3cret'"],
            ["sh", "-c", "sh -c 'serve --api-key ...'"],
        ),
    ],
)
def test_a_secret_is_known_by_the_name_before_it(words, shown):
    assert masked(words) == shown


def test_an_option_of_a_server_may_take_many_secrets():
    words = ["vllm", "--api-key", "one", "two", "--port", "1", "x"]
    shown = ["vllm", "--api-key", "...", "...", "--port", "1", "x"]
    assert masked(words, takes_many=True) == shown
    assert masked_engine({"command": words})["command"] == shown
    assert masked(["--start", " ".join(words)]) == ["--start", " ".join(shown)]


@pytest.mark.parametrize(
    "words",
    [
        ["tailrace", "--max-input-tokens", "20", "--api-key-env", "A_KEY"],
        ["serve", "--tokenizer", "dir", "two words", "--max-tokens=5", "it's fine"],
        ["serve", "--max-num-batched-tokens", "512"],
    ],
)
def test_other_words_stay_as_they_are(words):
    assert masked(words) == words


def test_a_secret_is_known_by_its_value_too():
    assert masked(["serve", "--config", "k=s3cret;x", "s3cret"], ["s3cret", ""]) == [
        "serve",
        "--config",
        "k=...;x",
        "...",
    ]


def test_an_engine_of_a_plan_is_masked_in_every_place():
    row = {
        "name": "a",
        "command": "serve --api-key s3cret --port {port}",
        "arguments": ["--hf-token", "s3cret"],
        "env": {"HF_TOKEN": "s3cret", "DEVICE": "1", "OTHER": "as s3cret"},
    }
    assert masked_engine(row, ["s3cret"]) == {
        "name": "a",
        "command": "serve --api-key ... --port {port}",
        "arguments": ["--hf-token", "..."],
        "env": {"HF_TOKEN": "...", "DEVICE": "1", "OTHER": "as ..."},
    }
