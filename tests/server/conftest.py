import contextlib
import os
import signal
import tempfile

import pytest

from tests.server.served import CONTEXT_TOKENS, DEADLINE_S, Served
from tests.support.tiny import write_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder with the tiny byte-level tokenizer and its chat template."""
    folder = tmp_path_factory.mktemp("tiny_text")
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    from tests.support.tiny import make_tiny_checkpoint  # noqa: PLC0415 -- brings torch

    folder = tmp_path_factory.mktemp("served") / "tiny-model"
    return make_tiny_checkpoint(folder, max_position_embeddings=CONTEXT_TOKENS)


@pytest.fixture
def start(checkpoint):
    """Start a server on the tiny model; nothing of it outlives the test."""
    started = []

    def start(*options, model=checkpoint):
        small = (
            "--threads",
            "1",
            "--kv-cache-tokens",
            str(CONTEXT_TOKENS),
            "--cpu-kernels",
            "torch",
        )
        server = Served(folder, "--model-path", str(model), *small, *options)
        started.append(server)
        return server

    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield start
        for server in started:
            for pid in server.family():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            server.process.wait()
            server._reader.join(DEADLINE_S)
            server.process.stderr.close()
