"""An engine without a model, for benchmarks of the request path, and an application over it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tailrace.config import Config
from tailrace.server.engine_client import EngineState
from tailrace.server.services import Services, TextServices
from tailrace.telemetry.metrics import Metrics
from tailrace.telemetry.request_log import RequestLog
from tailrace.text.chat import ChatTemplate
from tailrace.types import EngineReady

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tailrace.server.engine_client import LastWord
    from tailrace.text.tokenizer import Tokenizer


class MockEngine:
    """What `EngineClient` has beside `submit`, which is each benchmark's own.

    Args:
        context_length: That it tells.
        vocab_size: Likewise.
    """

    state = EngineState.READY
    restarts_total = 0
    stats = None
    pids: dict[str, int] = {}  # noqa: RUF012 -- never changed
    silence_s: float | None = 0.0

    def __init__(self, context_length: int, vocab_size: int) -> None:
        self.ready = EngineReady(
            context_length=context_length,
            vocab_size=vocab_size,
            eos_token_ids=[],
            total_blocks=1,
            block_size=16,
            device="mock",
            load_s=0.0,
            warmup_s=0.0,
        )

    def abort(self, request_ids: Iterable[str], on_last: LastWord | None = None) -> None:
        pass


def services_of(engine: MockEngine, folder: Path, tokenizer: Tokenizer) -> Services:
    """Return the application's services over an engine, with a model's tokenizer and template."""
    return Services(
        config=Config(),
        engine=engine,
        metrics=Metrics(),
        request_log=RequestLog(""),
        started_s=time.monotonic(),
        text=TextServices("mock", tokenizer, ChatTemplate.load(folder, tokenizer)),
    )
