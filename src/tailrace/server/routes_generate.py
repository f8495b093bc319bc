"""POST /generate: one prompt, one answer, in the body that load scripts send, or in SGLang's.

    {"prompt", "max_tokens", "temperature", "top_p", "stream"} and the other sampling fields
    {"text" or "input_ids", "sampling_params": {"max_new_tokens", ...}, "stream"}

A stream is one `data: {"token": "..."}` event for each token, then `data: [DONE]`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from tailrace.clock import monotonic
from tailrace.errors import RequestError
from tailrace.server.admission import check_model, check_open
from tailrace.server.answering import answer
from tailrace.server.early_encoding import early_prompt
from tailrace.server.generation import Job
from tailrace.server.openai_format import DONE, error_event, event, json_bytes
from tailrace.server.prompts import encode_prompts
from tailrace.server.protocol import (
    AnswerMetrics,
    GenerateAnswer,
    GenerateBody,
    GenerateMetrics,
    SglangSampling,
)
from tailrace.server.sampling import (
    fit,
    read_max_tokens,
    read_sampling,
    read_terms,
)
from tailrace.server.structured import constrained, read_constraint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tailrace.server.choice import Piece
    from tailrace.server.early_encoding import EarlyEncoding
    from tailrace.server.generation import Generation
    from tailrace.server.http import Handler, Request
    from tailrace.server.sampling import Limits
    from tailrace.server.services import Services, TextServices


async def generate(services: Services, request: Request) -> None:
    """POST /generate."""
    received_s = request.timeline.received_s
    scope = services.cache_scope(request.holder)
    with early_prompt(services, "gen-", "prompt", "text", cache_scope=scope) as early:
        body = await request.decode(GenerateBody, early.see)
        text, limits = check_open(services)
        check_model(body.model, text)
        params = body.sampling_params
        with _named_by_sglang() if params is not None else contextlib.nullcontext():
            body = body if params is None else _from_sglang(body, params)
            request.timeline.enter("admission")
            with services.admission.admitted(1, services.places):
                request.timeline.enter("tokenise")
                job = await _job(body, text, limits, received_s, early)
                await answer(services, request, text, job, GenerateFormat())


ROUTES: dict[tuple[str, str], Handler] = {("POST", "/generate"): generate}


@dataclass
class GenerateFormat:
    """Of /generate."""

    every_token = True

    def opening(self) -> bytes:
        """Return nothing: a stream begins with its first token."""
        return b""

    def event(self, piece: Piece) -> bytes:
        """Return a token's event; what only ends the stream is none."""
        ends_without_text = piece.finish_reason == "stop" and not piece.text
        return b"" if ends_without_text else event({"token": piece.text})

    def closing(self, generation: Generation) -> bytes:
        """Return the stream's last event, before it the metrics where they were asked for."""
        metrics = generation.metrics()
        if metrics is UNSET:
            return DONE
        # Clients read "token" of every event.
        return event({"token": "", "metrics": metrics}) + DONE

    def failure(self, error: RequestError) -> bytes:
        """Return a failed stream's end."""
        return error_event(error)

    def whole(self, pieces: list[Piece], generation: Generation) -> bytes:
        """Return text, usage and where the time went."""
        piece = pieces[0]
        return json_bytes(
            GenerateAnswer(
                text=piece.text,
                finish_reason=piece.finish_reason or "stop",
                tokens=generation.completion_tokens,
                usage=generation.usage(),
                metrics=_metrics(generation),
            )
        )


def _metrics(generation: Generation) -> GenerateMetrics:
    times = generation.times
    asked = generation.metrics()
    known = msgspec.structs.asdict(asked) if isinstance(asked, AnswerMetrics) else {}
    return GenerateMetrics(
        request_latency_ms=_ms(times.received_s, times.finished_s) or 0.0,
        ttft_ms=_ms(times.received_s, times.first_token_s),
        queue_ms=_ms(times.submitted_s, times.scheduled_s),
        prefill_ms=_ms(times.scheduled_s, times.first_token_s),
        decode_ms=_ms(times.first_token_s, times.last_token_s),
        **known,
    )


def _ms(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else round(1000 * (end_s - start_s), 3)


async def _job(
    body: GenerateBody,
    text: TextServices,
    limits: Limits,
    received_s: float,
    early: EarlyEncoding[str],
) -> Job:
    name, prompt = _the_prompt(body)
    terms = read_terms(body, limits)
    if terms.n != 1:
        raise RequestError(
            f"n is {terms.n}: /generate gives one answer; use /v1/completions for several",
            param="n",
        )
    max_tokens = read_max_tokens("max_tokens", body.max_tokens)
    sampling = read_sampling(body, limits)
    sampling = await constrained(sampling, read_constraint(body), text.grammars)
    prompts = await encode_prompts(
        [prompt],
        text.tokenizer,
        limits,
        add_special_tokens=body.add_special_tokens is not False,
        keep_last=body.truncate_prompt_tokens,
        parse_special=limits.server.parse_special and body.parse_special is not False,
        param=name,
        early=early,
    )
    return Job(
        request_id=early.job_id,
        route="/generate",
        prompts=prompts,
        sampling=[
            fit(
                sampling,
                len(prompts[0].token_ids),
                max_tokens,
                limits,
                default=limits.server.default_max_tokens,
                prompt_name=name,
            )
        ],
        terms=terms,
        received_s=received_s,
        prompt_ready_s=monotonic(),
    )


def _the_prompt(body: GenerateBody) -> tuple[str, str | list[int]]:
    """Return the one prompt and the field that holds it."""
    fields = {"prompt": body.prompt, "text": body.text, "input_ids": body.input_ids}
    given = {name: value for name, value in fields.items() if value is not None}
    if len(given) != 1:
        raise RequestError(
            f"{' and '.join(given) or 'no prompt'} given: send exactly one of prompt, text and "
            "input_ids",
            param=next(iter(given), "prompt"),
        )
    return next(iter(given.items()))


# SGLang's names for what has another name here.
_SGLANG_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}


def _from_sglang(body: GenerateBody, params: SglangSampling) -> GenerateBody:
    """Return the body with SGLang's `sampling_params` under our names."""
    if params.structural_tag is not None:
        raise RequestError(
            "structural_tag is not served: send json_schema, regex or ebnf", param="structural_tag"
        )
    given = {
        _SGLANG_NAMES.get(name, name): value
        for name, value in msgspec.structs.asdict(params).items()
        if value is not None
    }
    return msgspec.structs.replace(body, **given)


@contextlib.contextmanager
def _named_by_sglang() -> Iterator[None]:
    """Name a refused field as the client did."""
    try:
        yield
    except RequestError as error:
        theirs = {ours: name for name, ours in _SGLANG_NAMES.items()}
        name = theirs.get(error.param or "", error.param)
        if name in SglangSampling.__struct_fields__:
            error.param = f"sampling_params.{name}"
        raise
