"""What a server says of itself, and whether it streams: asked once, before the run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailrace.bench.load import Load, Shot
from tailrace.bench.wire import Endpoint, WireError, fetch
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tailrace.bench.records import Record

CANARY_TOKENS = 4


@dataclass(frozen=True)
class Target:
    """The model behind an endpoint."""

    model: str
    context_tokens: int | None
    """Most tokens of prompt and output, where the server tells."""
    version: str
    """Empty where the server has no /version."""


async def inspect(endpoint: Endpoint, model: str | None) -> Target:
    """Ask /v1/models and /version.

    Raises:
        ConfigError: The server does not answer as an OpenAI-compatible one, or lacks the model.
    """
    listed = await _models(endpoint)
    chosen = listed[0] if model is None else next((m for m in listed if m["id"] == model), None)
    if chosen is None:
        names = ", ".join(m["id"] for m in listed)
        raise ConfigError(f"--model {model}: {endpoint.url} serves {names}")
    length = chosen.get("max_model_len")
    context = length if isinstance(length, int) else None
    return Target(chosen["id"], context, await _version(endpoint))


async def _models(endpoint: Endpoint) -> list[dict[str, Any]]:
    where = f"{endpoint.url}/v1/models"
    try:
        answer = await fetch(endpoint, "GET", "/v1/models", timeout_s=30.0)
        found = json.loads(answer.body) if answer.status == 200 else None
    except (OSError, WireError, ValueError) as error:
        raise ConfigError(f"{where}: {error or 'no answer within 30 s'}") from error
    listed = found.get("data") if isinstance(found, dict) else None
    models = [m for m in listed or [] if isinstance(m, dict) and isinstance(m.get("id"), str)]
    if not models:
        raise ConfigError(
            f"{where}: HTTP {answer.status} without a model; is it an OpenAI-compatible server, "
            "and is --api-key right?"
        )
    return models


async def _version(endpoint: Endpoint) -> str:
    try:
        answer = await fetch(endpoint, "GET", "/version", timeout_s=10.0)
        found = json.loads(answer.body) if answer.status == 200 else {}
    except (OSError, WireError, ValueError):  # a courtesy that not every server offers
        return ""
    return str(found.get("version", "")) if isinstance(found, dict) else ""


def completion_body(
    target: Target,
    prompt: str,
    output_tokens: int,
    *,
    temperature: float,
    seed: int | None = None,
    priority: int = 0,
    ignore_eos: bool = True,
    extra_body: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the body that asks for `output_tokens` tokens, streamed.

    Args:
        target: Whose model is asked.
        prompt: Its text.
        output_tokens: The most that may come; with `ignore_eos` also the fewest.
        temperature: Of the sampling.
        seed: Of the sampling.
        priority: 0 is not sent, since servers without priority scheduling refuse others. Tailrace
            and vLLM serve smaller numbers earlier; SGLang larger ones, unless it was started with
            `--schedule-low-priority-values-first`.
        ignore_eos: Go on past the end of the sequence, so that every answer is as long as planned.
        extra_body: Fields added over these; None takes a field out.
    """
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        # Not `min_tokens` as well: engines mask logits for it, work that no user asked for.
        body["ignore_eos"] = True
    if seed is not None:
        body["seed"] = seed
    if priority:
        body["priority"] = priority
    body |= extra_body or {}
    return json.dumps({name: value for name, value in body.items() if value is not None}).encode()


async def check_streaming(
    endpoint: Endpoint,
    target: Target,
    *,
    timeout_s: float,
    extra_body: Mapping[str, Any] | None = None,
) -> None:
    """Send one short request, so that a refusal shows before the run and not in every record.

    Raises:
        ConfigError: It failed.
    """
    body = completion_body(
        target, "Hello, my name is", CANARY_TOKENS, temperature=0.0, extra_body=extra_body
    )
    shot = Shot(0, 0.0, 0, CANARY_TOKENS, body)
    record: Record = (await Load(endpoint, [shot], timeout_s=timeout_s).run(asyncio.Event()))[0]
    if not record.is_ok:
        raise ConfigError(
            f"{endpoint.url}/v1/completions: a request of {CANARY_TOKENS} tokens failed before "
            f"the run ({record.status}: {record.error})"
        )
