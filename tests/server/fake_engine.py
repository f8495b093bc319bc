"""A scripted `EngineClient`: outputs by prompt, pauses by events, errors and deaths on demand.

Token ids of the tiny tokenizer are bytes, so a script says a text and each byte is one token, sent
as one output. A script is found by the prompt's text, then under "", then by `Script()`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tailrace.clock import monotonic
from tailrace.errors import RequestError
from tailrace.server.engine_client import EngineState, OutputQueue
from tailrace.types import (
    EngineReady,
    EngineRequest,
    EngineStats,
    KvReport,
    KvTable,
    RequestTimes,
    TokenLogprobs,
    TokenOutput,
)

BOS_ID, IM_START_ID, EOS_ID = 256, 257, 258
VOCAB_SIZE = 259
DIED = "the engine died while it held this request"


@dataclass
class Script:
    """What one request brings.

    Attributes:
        text: Each of its bytes is a token; cut at `max_tokens`.
        token_ids: In its place, any ids.
        ends_with_eos: End with the EOS token and "stop" where `max_tokens` allows it.
        pause_after: After so many tokens, wait for `go_on`.
        go_on: Set it to let a paused request go on.
        error_after: After so many tokens, end with an error.
        may_retry: Whether that error says so.
        burst: Tokens per output.
        cached_tokens: As the engine would report.
    """

    text: str = "Hello, world"
    token_ids: list[int] | None = None
    ends_with_eos: bool = True
    pause_after: int | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    error_after: int | None = None
    may_retry: bool = False
    burst: int = 1
    cached_tokens: int = 0

    def ids(self, request: EngineRequest) -> list[int]:
        """Return the tokens before any EOS."""
        ids = list(self.text.encode()) if self.token_ids is None else self.token_ids
        return ids[: request.sampling.max_tokens]


class FakeEngine:
    """Implements `EngineClient`."""

    def __init__(
        self, scripts: dict[str, Script] | None = None, *, context_length: int = 512
    ) -> None:
        self.scripts = scripts or {}
        self.state = EngineState.READY
        self.ready: EngineReady | None = EngineReady(
            context_length=context_length,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS_ID],
            total_blocks=64,
            block_size=16,
            device="fake",
            load_s=0.0,
            warmup_s=0.0,
        )
        self.restarts_total = 0
        self.kv_fault = ""
        self.reserved: dict[str, int] = {}
        self.grown: dict[str, list[int]] = {}
        """Ids of prompts that are still arriving."""
        self.taken_over: dict[str, list[int]] = {}
        """The same, of those that have come whole."""
        self.grown_salts: dict[str, str] = {}
        self.pids: dict[str, int] = {}
        self.silence_s: float | None = 0.25
        self.requests: list[EngineRequest] = []
        """All that were submitted, in order."""
        self.aborted: list[str] = []
        self.was_aborted = asyncio.Event()
        self.was_paused = asyncio.Event()
        self.progress = asyncio.Event()
        """Set whenever an output was put; clear it to wait for the next."""
        self._queues: dict[str, OutputQueue] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stamps: dict[str, tuple[EngineRequest, float, float]] = {}

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            time_s=monotonic(),
            running_requests=len(self._queues),
            waiting_requests=0,
            total_blocks=64,
            free_blocks=64,
            block_size=16,
            live_tokens=0,
            held_blocks=0,
        )

    @property
    def open_requests(self) -> int:
        return len(self._queues)

    def submit(self, request: EngineRequest) -> OutputQueue:
        if self.state is not EngineState.READY:
            raise RequestError(f"the engine is {self.state.value}", status=503, retry_after_s=2.0)
        self.requests.append(request)
        self.reserved.pop(request.request_id, None)
        if request.request_id in self.grown:
            self.taken_over[request.request_id] = self.grown.pop(request.request_id)
        queue = OutputQueue()
        self._queues[request.request_id] = queue
        task = asyncio.get_running_loop().create_task(self._play(request))
        self._tasks[request.request_id] = task
        return queue

    def reserve(self, request_id, num_tokens, lifetime_s) -> None:
        del lifetime_s
        self.reserved[request_id] = num_tokens

    def grow(self, request_id, start, token_ids, lifetime_s, cache_salt="") -> None:
        del lifetime_s
        self.grown_salts[request_id] = cache_salt
        known = self.grown.setdefault(request_id, [])
        assert start == len(known), "pieces of a prompt follow on one another"
        known.extend(token_ids)

    async def inspect_kv(self) -> KvReport:
        return KvReport(
            fault=self.kv_fault,
            block_size=16,
            total_blocks=64,
            free_blocks=60,
            reserved_blocks=0,
            tables=[KvTable("r", held=4, shared=1, ahead=0, claim=2, short=0, debt=0)],
        )

    def abort(self, request_ids, on_last=None) -> None:
        for request_id in request_ids:
            if on_last is not None:
                on_last(request_id, self._last_word(request_id))
            self.reserved.pop(request_id, None)
            self.grown.pop(request_id, None)
            if self._queues.pop(request_id, None) is not None:
                self.aborted.append(request_id)
                self._tasks.pop(request_id).cancel()
                self.was_aborted.set()

    def die(self) -> None:
        """End as an engine that is killed: every open request gets an error."""
        self.state = EngineState.RESTARTING
        for request_id in list(self._queues):
            self._tasks.pop(request_id).cancel()
            self._put(TokenOutput(request_id, [], finish_reason="error", error=DIED))

    def _last_word(self, request_id: str) -> TokenOutput | None:
        if request_id not in self._queues:
            return None
        if request_id not in self._stamps:  # its turn has not come
            return None
        request, scheduled_s, first_s = self._stamps[request_id]
        times = _times(request, scheduled_s, first_s, 0)
        return TokenOutput(request_id, [], finish_reason="abort", times=times)

    async def _play(self, request: EngineRequest) -> None:
        script = self._script(request)
        ids = script.ids(request)
        scheduled_s = monotonic()
        self._stamps[request.request_id] = (request, scheduled_s, 0.0)
        has_room = len(ids) < request.sampling.max_tokens
        ends = script.ends_with_eos and has_room and not request.sampling.ignore_eos
        steps = [*ids, EOS_ID] if ends else ids
        first_s = 0.0
        for start in range(0, len(steps), script.burst):
            if script.pause_after is not None and start >= script.pause_after:
                self.was_paused.set()
                await script.go_on.wait()
            if script.error_after is not None and start >= script.error_after:
                self._put(
                    TokenOutput(
                        request.request_id,
                        [],
                        finish_reason="error",
                        error="the step failed",
                        may_retry=script.may_retry,
                    )
                )
                return
            await asyncio.sleep(0)
            part = steps[start : start + script.burst]
            is_last = start + script.burst >= len(steps)
            first_s = first_s or monotonic()
            self._stamps[request.request_id] = (request, scheduled_s, first_s)
            times = _times(request, scheduled_s, first_s, script.cached_tokens)
            self._put(self._output(request, part, start, times, is_last, ends))

    def _output(
        self,
        request: EngineRequest,
        part: list[int],
        start: int,
        times: RequestTimes,
        is_last: bool,
        ends: bool,
    ) -> TokenOutput:
        asked = request.sampling.logprobs
        asked_prompt = request.sampling.prompt_logprobs
        is_first = start == 0
        return TokenOutput(
            request.request_id,
            part,
            logprobs=None if asked is None else [scored(i, asked) for i in part],
            prompt_logprobs=[None, *(scored(i, asked_prompt) for i in request.token_ids[1:])]
            if is_first and asked_prompt is not None
            else None,
            finish_reason=("stop" if ends else "length") if is_last else None,
            stop_token_id=EOS_ID if is_last and ends else None,
            times=times if is_first or is_last else None,
        )

    def _script(self, request: EngineRequest) -> Script:
        text = bytes(i for i in request.token_ids if i < 256).decode("utf-8", "replace")
        return self.scripts.get(text) or self.scripts.get("") or Script()

    def _put(self, output: TokenOutput) -> None:
        if output.finish_reason is None:
            queue = self._queues.get(output.request_id)
        else:
            queue = self._queues.pop(output.request_id, None)
        if queue is not None:
            queue.put_nowait(output)
        self.progress.set()


def _times(
    request: EngineRequest, scheduled_s: float, first_s: float, cached_tokens: int
) -> RequestTimes:
    now_s = monotonic()
    return RequestTimes(
        arrival_s=request.arrival_s,
        scheduled_s=scheduled_s,
        first_token_s=first_s,
        finished_s=now_s,
        cached_tokens=cached_tokens,
        queue_s=scheduled_s - request.arrival_s,
        prefill_s=(first_s or now_s) - scheduled_s,
        decode_s=now_s - first_s if first_s else 0.0,
    )


def scored(token_id: int, top: int) -> TokenLogprobs:
    """Return log-probabilities that a test can foresee: the token first, then its neighbours."""
    top_ids = [(token_id + offset) % VOCAB_SIZE for offset in range(top)]
    return TokenLogprobs(
        token_id, -0.25, 1, top_ids, [-0.25 - offset for offset in range(len(top_ids))]
    )


def prompt_of(text: str) -> str:
    """Return what the tiny template makes of one user's message."""
    return f"user\n{text}\nassistant\n"


def usual_scripts() -> dict[str, Script]:
    """Return answers, and failures, by prompt: the same for every dialect."""
    return {
        prompt_of("Hi"): Script("Hello, wörld", cached_tokens=3),
        prompt_of("silence"): Script(""),
        prompt_of("broken"): Script("abc", error_after=1),
        prompt_of("broken at once"): Script("abc", error_after=0),
        "system\nBe brief.\nuser\nHi\nassistant\n": Script("Hey"),
        "user\nHi\nassistant\nI am": Script(" well"),
        **{prompt_of(f"prompt {i}"): Script(f"answer {i} " * 5) for i in range(8)},
    }
