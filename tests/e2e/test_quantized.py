"""Quantised checkpoints served: the same words as the plain checkpoint that they stand for."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tailrace.bench.launch import LocalServer
from tests.e2e.conftest import tiny_settings
from tests.support.quantized import awq, compressed_float8, plain_beside, write_quantized

pytestmark = pytest.mark.e2e

BODY = {
    "prompt": "Where the river meets the sea, ",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 1,
}


def answer(server: LocalServer) -> dict:
    request = urllib.request.Request(  # noqa: S310 - our own server
        f"{server.url}/v1/completions",
        json.dumps(BODY).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310 - as above
        return json.load(reply)["choices"][0]


@pytest.mark.parametrize(
    ("form", "origin"),
    [
        (awq(32), "read from awq, 4 bits in groups of 32"),
        (compressed_float8("channel"), "read from compressed-tensors, FP8 with a scale a channel"),
    ],
    ids=["awq", "fp8"],
)
def test_a_quantised_model_answers_as_its_plain_twin(tiny_folder, tmp_path, form, origin):
    folder = write_quantized(tiny_folder, tmp_path / "quantized", form)
    answers = {}
    for name, path in (("quantized", folder), ("plain", plain_beside(folder))):
        settings = (*tiny_settings(path), "--no-warmup")
        with LocalServer(settings, log_file=tmp_path / f"{name}.log") as server:
            answers[name] = answer(server)
            with urllib.request.urlopen(f"{server.url}/health", timeout=60) as reply:  # noqa: S310
                device = json.load(reply)["device"]
        assert (origin in device) == (name == "quantized"), device
    assert answers["quantized"]["text"] == answers["plain"]["text"]
    assert answers["quantized"]["logprobs"] == answers["plain"]["logprobs"]
    assert len(answers["plain"]["text"]) > 0
