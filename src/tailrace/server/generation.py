"""One HTTP request at the engine: k prompts times n choices, merged into one stream of pieces.

    Job --start--> k*n EngineRequests --queues--> Choice.take --> pieces --> close(reason)

Rules
1. Whatever ends a generation (end, error, disconnect, slow reader), `close` aborts what is still
   open at the engine; it is safe to call twice, and the first reason counts.
2. A stop string ends a choice here, so the engine is told at once.
3. Times are monotonic. What only the engine knows comes with a sequence's first output, the first
   one after a preemption, and the last; of what is aborted the last comes after the end
   (`when_told`).
4. Of several sequences, the one that came first tells the time to the first token, the one that
   ended last the whole time: the request's own critical path.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from msgspec import UNSET

from tailrace.clock import monotonic
from tailrace.errors import RequestError
from tailrace.server.admission import FULL_CODE, full
from tailrace.server.choice import Choice, Piece
from tailrace.server.engine_client import EngineState
from tailrace.server.protocol import AnswerMetrics, PromptTokensDetails, Usage
from tailrace.server.sampling import for_choice
from tailrace.server.standing import Standing
from tailrace.server.timeline import Timeline
from tailrace.telemetry.request_log import RequestRecord
from tailrace.types import EngineRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from msgspec import UnsetType

    from tailrace.clock import Clock
    from tailrace.server.engine_client import OutputQueue
    from tailrace.server.prompts import Prompt
    from tailrace.server.sampling import Terms
    from tailrace.server.services import Services
    from tailrace.server.tool_choice import ToolRules
    from tailrace.telemetry.phases import Phases
    from tailrace.text.tokenizer import Tokenizer
    from tailrace.types import RequestTimes, SamplingParams, TokenOutput

ENGINE_RETRY_AFTER_S = 2.0
MEMORY_RETRY_AFTER_S = 5.0


def sequence_id(job_id: str, index: int) -> str:
    """Return what the engine knows one of a job's sequences by."""
    return f"{job_id}-{index}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request, checked and tokenised."""

    request_id: str
    route: str
    prompts: list[Prompt]
    sampling: list[SamplingParams]
    """One for each prompt."""
    terms: Terms
    tools: ToolRules | None = None
    """What the output is looked through for; None: it is text as it stands."""
    drops_output: bool = False
    """Of a request for no tokens: the one that the engine must make is thrown away."""
    received_s: float
    """When the HTTP request's first byte had come."""
    prompt_ready_s: float

    @property
    def n(self) -> int:
        """Choices of each prompt."""
        return self.terms.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; each counts once, whatever `n`."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


@dataclass
class Times:
    """When things happened, in monotonic seconds; None: it did not, or is not known."""

    received_s: float
    prompt_ready_s: float
    submitted_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    """First token of any choice, as this process got it."""
    last_token_s: float | None = None
    finished_s: float | None = None
    """The engine was done with it, or told to be."""


@dataclass
class _Member:
    """One sequence at the engine."""

    request_id: str
    choice: Choice
    queue: OutputQueue
    last_token_s: float | None = None
    first: RequestTimes | None = None
    """As the engine told with the first token."""
    times: RequestTimes | None = None
    predicted_ttft_s: float | None = None
    """From its arrival at the engine to its first token, as the engine expected then."""
    is_told_whole: bool = False
    """Whether that is the engine's last word."""

    def made_s(self, closed_s: float) -> float:
        """Return when the engine was done with it, as far as one can know."""
        if self.times is not None and self.is_told_whole:
            return self.times.finished_s
        if self.choice.is_finished and self.last_token_s is not None:
            return self.last_token_s
        return closed_s


@dataclass
class Generation:
    """Runs one job.

    Args:
        services: The engine and the telemetry.
        tokenizer: The model's.
        job: What to generate.
        clock: Monotonic seconds.
        timeline: The HTTP request's; None makes one that begins with the job.
        wants_metrics: Whether the answer tells where its time went.
        standing: What it is worth beside others; None: as the body asks, without a key.
        cache_scope: See `Services.cache_scope`.
    """

    services: Services
    tokenizer: Tokenizer
    job: Job
    clock: Clock = monotonic
    timeline: Timeline | None = None
    wants_metrics: bool = False
    standing: Standing | None = None
    cache_scope: str = ""
    completion_tokens: int = 0
    finish_reason: str = ""
    """Why it ended: stop, length, or what `close` was told."""
    _members: list[_Member] = field(default_factory=list)
    _is_closed: bool = False
    _unheard: set[str] = field(default_factory=set)
    """Sequences that were aborted and of which the engine's last word has not come."""
    _then: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._standing = self.standing or Standing(self.job.terms.priority or 0)
        self._timeline = self.timeline or Timeline(self.job.received_s, self.clock)
        self.times = Times(self._timeline.received_s, self.job.prompt_ready_s)

    def start(self) -> None:
        """Submit every sequence.

        Raises:
            RequestError: The engine is not ready.
        """
        self.times.submitted_s = self._timeline.submit()
        for index in range(len(self.job.prompts) * self.job.n):
            self._submit(index)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield what each engine output brings, until every choice is finished.

        Raises:
            RequestError: 500, the engine failed in this request; 503, it died or is going down.
        """
        if len(self._members) == 1:
            member = self._members[0]
            while not member.choice.is_finished:
                yield self._take(member, await member.queue.get())
            return
        async with self._merged() as outputs:
            while not all(member.choice.is_finished for member in self._members):
                member, output = await outputs.get()
                if not member.choice.is_finished:
                    yield self._take(member, output)

    def listen(self, on_outputs: Callable[[], None]) -> None:
        """Be told that outputs have come, to take them with `drain`: in place of `pieces`.

        Args:
            on_outputs: Must not raise; called for each output, also for those that are there now.
        """
        for member in self._members:
            member.queue.listen(on_outputs)

    def drain(
        self, on_piece: Callable[[Piece], None], on_end: Callable[[Exception | None], None]
    ) -> None:
        """Take all outputs that are there, without waiting.

        Args:
            on_piece: Called with each piece.
            on_end: Called when every choice is finished, or with what ended it: the errors that
                `pieces` raises, or what `on_piece` raised.
        """
        for member in self._members:
            while (output := member.queue.take()) is not None:
                if member.choice.is_finished or self._is_closed:
                    continue
                try:
                    piece = self._take(member, output)
                    on_piece(piece)
                except Exception as error:  # noqa: BLE001 -- the caller serves other requests too
                    on_end(error)
                    continue
                is_end = piece.finish_reason is not None
                if is_end and all(m.choice.is_finished for m in self._members):
                    on_end(None)

    def usage(self) -> Usage:
        """Return what the request cost so far."""
        prompt, completion = self.job.prompt_tokens, self.completion_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(self.cached_tokens),
        )

    @property
    def priority(self) -> int:
        """Of its requests and its stream: smaller is served sooner."""
        return self._standing.priority

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, by the first choice of each prompt."""
        firsts = self._members[:: self.job.n]
        return sum(member.times.cached_tokens for member in firsts if member.times)

    @property
    def predicted_ttft_s(self) -> float | None:
        """From the request's first byte to its first token, as expected when the engine got it."""
        told = [m.predicted_ttft_s for m in self._members if m.predicted_ttft_s is not None]
        submitted_s = self.times.submitted_s
        if not told or submitted_s is None:
            return None
        return submitted_s - self.times.received_s + min(told)

    def close(self, reason: str | None = None) -> None:
        """End: abort what is open at the engine. The first reason counts."""
        if self._is_closed:
            return
        self._is_closed = True
        self.times.finished_s = self.clock()
        self.finish_reason = reason or self.finish_reason
        self._abort([m for m in self._members if not m.choice.is_finished])
        for member in self._members:
            member.queue.ignore()  # whose listener leads back here

    def when_told(self, then: Callable[[], None]) -> None:
        """Call `then` once the engine has had its last word of what was aborted, or is gone."""
        if self._unheard:
            self._then = then
        else:
            then()

    def _abort(self, members: list[_Member]) -> None:
        if members:
            self._unheard |= {member.request_id for member in members}
            self.services.engine.abort([m.request_id for m in members], self._hear_last)

    def _hear_last(self, request_id: str, output: TokenOutput | None) -> None:
        """Keep the times of a sequence that was aborted."""
        if output is not None and output.times is not None:
            member = next(m for m in self._members if m.request_id == request_id)
            member.times = output.times
        self._unheard.discard(request_id)
        if not self._unheard and self._then is not None:
            then, self._then = self._then, None
            then()

    def metrics(self) -> AnswerMetrics | UnsetType:
        """Return where the time went until now, for an answer that shall tell; else UNSET."""
        if not self.wants_metrics:
            return UNSET
        now_s = self.clock()
        first = self._to_first_token()
        predicted_s = self.predicted_ttft_s
        return AnswerMetrics(
            e2e_s=now_s - self.times.received_s,
            ttft_s=None if first is None else first.total_s,
            predicted_ttft_s=UNSET if predicted_s is None else predicted_s,
            phases=self._phases(now_s),
            ttft_phases=first,
        )

    def record(
        self, http_request_id: str = "", *, status: int = 200, delivered_s: float | None = None
    ) -> RequestRecord:
        """Return what became of the request, for the log and the metrics.

        Args:
            http_request_id: See `RequestRecord`.
            status: The answer's.
            delivered_s: When the kernel had its last byte, or the client was gone; None: now.
        """
        closed_s = self.times.finished_s or self.clock()
        end_s = max(closed_s, delivered_s or 0.0)
        stamps = asdict(self.times) | {"finished_s": end_s}
        told = self._told(closed_s)
        phases = self._phases(end_s)
        waited_s = told.times.decode_wait_s if told and told.times else 0.0
        to_first = self._to_first_token()
        return RequestRecord(
            request_id=self.job.request_id,
            http_request_id=http_request_id,
            key=self._standing.key,
            route=self.job.route,
            # The one reading of the wall clock: to find the record, not to subtract from it.
            unix_s=time.time(),
            prompt_tokens=self.job.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            preemptions=sum(m.times.preemptions for m in self._members if m.times),
            choices=len(self.job.prompts) * self.job.n,
            is_streaming=self.job.terms.is_streaming,
            finish_reason=self.finish_reason,
            status=status,
            ttft_s=None if to_first is None else to_first.total_s,
            predicted_ttft_s=self.predicted_ttft_s,
            phases=phases,
            ttft_phases=to_first,
            decode_wait_s=min(waited_s, phases.decode_s),  # the engine's may go on a step longer
            **stamps,
        )

    def _told(self, closed_s: float) -> _Member | None:
        """Return the sequence that ended last: it tells the whole time."""
        return max(self._members, key=lambda member: member.made_s(closed_s), default=None)

    def _phases(self, end_s: float) -> Phases:
        closed_s = self.times.finished_s or end_s
        told = self._told(closed_s)
        if told is None:
            return self._timeline.phases(None, closed_s, end_s)
        return self._timeline.phases(told.times, told.made_s(closed_s), end_s)

    def _to_first_token(self) -> Phases | None:
        """Divide the time to the first token: of a stream, to its first event at the socket."""
        first_s = self.times.first_token_s
        if first_s is None:
            return None
        told = [member.first for member in self._members if member.first is not None]
        first = min(told, key=lambda times: times.first_token_s, default=None)
        begun_s = self._timeline.begun_s if self.job.terms.is_streaming else None
        end_s = max(first_s, begun_s or 0.0)
        made_s = first_s if first is None else first.first_token_s
        return self._timeline.phases(first, made_s, end_s)

    def _submit(self, index: int) -> None:
        job = self.job
        standing = self._standing
        prompt_index, choice_index = divmod(index, job.n)
        sampling = job.sampling[prompt_index]
        request = EngineRequest(
            request_id=sequence_id(job.request_id, index),
            token_ids=job.prompts[prompt_index].token_ids,
            sampling=for_choice(sampling, choice_index),
            arrival_s=self.clock(),
            priority=standing.priority,
            key=standing.key,
            share=standing.share,
            max_sequences=standing.max_sequences,
            cache_salt=self.cache_scope + job.terms.cache_salt,
        )
        choice = Choice(
            index,
            self.tokenizer,
            job.terms.text_rules,
            sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
        )
        queue = self.services.engine.submit(request)
        self._members.append(_Member(request.request_id, choice, queue))

    @contextlib.asynccontextmanager
    async def _merged(self) -> AsyncIterator[asyncio.Queue[tuple[_Member, TokenOutput]]]:
        """Forward all members' outputs into one queue."""
        merged: asyncio.Queue[tuple[_Member, TokenOutput]] = asyncio.Queue()

        async def forward(member: _Member) -> None:
            while True:
                output = await member.queue.get()
                merged.put_nowait((member, output))
                if output.finish_reason is not None:
                    return

        tasks = [asyncio.create_task(forward(member)) for member in self._members]
        try:
            yield merged
        finally:
            for task in tasks:
                task.cancel()

    def _take(self, member: _Member, output: TokenOutput) -> Piece:
        if output.predicted_ttft_s is not None:
            member.predicted_ttft_s = output.predicted_ttft_s
        if output.finish_reason in ("error", "abort", "refused"):
            member.choice.is_finished = True
            raise self._failure(output)
        self._stamp(member, output)
        piece = member.choice.take(output)
        if self.job.drops_output:
            piece = Piece(
                piece.index, prompt_logprobs=piece.prompt_logprobs, finish_reason="length"
            )
        self.completion_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            if output.finish_reason is None:
                self._abort([member])
        return piece

    def _stamp(self, member: _Member, output: TokenOutput) -> None:
        if output.times is not None:
            member.times = output.times
            member.first = member.first or output.times
            member.is_told_whole = output.finish_reason is not None
            earliest = self.times.scheduled_s
            if earliest is None or output.times.scheduled_s < earliest:
                self.times.scheduled_s = output.times.scheduled_s
        if not output.token_ids:
            return
        now = self.clock()
        self._timeline.token_came()
        if self.times.first_token_s is None:
            self.times.first_token_s = now
        if member.last_token_s is not None:
            self.services.metrics.observe_token_gap(now - member.last_token_s)
        member.last_token_s = self.times.last_token_s = now

    def _failure(self, output: TokenOutput) -> RequestError:
        if output.finish_reason == "refused":
            return full(
                output.error or "the server is full; try again later",
                output.retry_after_s,
                code=output.refusal or FULL_CODE,
            )
        message = output.error or "the request was ended by the server: it is going down"
        services = self.services
        stays = services.engine.state is EngineState.READY and not services.draining
        if stays and output.may_retry:
            return RequestError(
                message, status=503, code="out_of_memory", retry_after_s=MEMORY_RETRY_AFTER_S
            )
        if stays and output.finish_reason == "error":
            return RequestError(message, status=500, code="engine_error")
        return RequestError(
            message, status=503, code="engine_unavailable", retry_after_s=ENGINE_RETRY_AFTER_S
        )
