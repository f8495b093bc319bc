"""What is done to schemathesis' requests before they are sent, so that they reach the model.

Every request that names a model names the served one, which no schema knows, and asks for few
tokens. A request that its schema calls valid also loses the fields that this server refuses
whatever they say: they would hide all the others behind one refusal.

A response says `"safety_identifier": null` where none was sent, as Open Responses and OpenAI's own
client have it; OpenAI's description allows no null, so one is sent.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from schemathesis.generation import GenerationMode

MODEL = os.environ["CONFORMANCE_MODEL"]
FEW_TOKENS = 4
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LENGTH_OF = {
    "/completions": "max_tokens",
    "/chat/completions": "max_completion_tokens",
    "/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
REFUSED = {
    "/completions": ("suffix", "best_of"),
    "/responses": ("prompt", "conversation", "previous_response_id", "background"),
    "/v1/messages": ("mcp_servers", "container"),
}


@schemathesis.hook
def before_call(_: schemathesis.HookContext, case: schemathesis.Case, __: dict[str, Any]) -> None:
    """Name the served model, and ask for few tokens."""
    if isinstance(case.path_parameters.get("model"), str):
        case.path_parameters["model"] = MODEL
    body, path = case.body, case.operation.path
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    for name in LENGTHS:
        if type(body.get(name)) is int and body[name] > FEW_TOKENS:
            body[name] = FEW_TOKENS
    if path in LENGTH_OF and not any(name in body for name in LENGTHS):
        body[LENGTH_OF[path]] = FEW_TOKENS
    if case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE:
        _lead_to_the_model(body, path)


def _lead_to_the_model(body: dict[str, Any], path: str) -> None:
    if path in LENGTH_OF:
        body["model"] = MODEL
    if path == "/responses":
        body.setdefault("safety_identifier", "conformance")
    for name in REFUSED.get(path, ()):
        body.pop(name, None)
    if body.get("stream") is not True:
        body.pop("stream_options", None)
