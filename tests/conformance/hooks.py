"""What is done to schemathesis' requests before they are sent, so that they reach the model.

Every one names the served model, which no schema knows, and asks for few tokens. It loses the
fields that this server refuses whatever they say: they would hide the others behind one refusal.

Two fields of a response are null where none was sent, as Open Responses and OpenAI's own client
have it; OpenAI's description allows no null there, so something is sent.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis

MODEL = os.environ["CONFORMANCE_MODEL"]
FEW_TOKENS = 2
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LENGTH_OF = {
    "/completions": "max_tokens",
    "/chat/completions": "max_completion_tokens",
    "/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
ECHOED = ("safety_identifier", "prompt_cache_key")
REFUSED = {
    "/completions": ("suffix", "best_of"),
    "/responses": ("prompt", "conversation", "previous_response_id", "background"),
    "/v1/messages": ("mcp_servers", "container"),
}


@schemathesis.hook
def before_call(_: schemathesis.HookContext, case: schemathesis.Case, __: dict[str, Any]) -> None:
    """Name the served model, ask for few tokens, and leave out what is always refused."""
    if isinstance(case.path_parameters.get("model"), str):
        case.path_parameters["model"] = MODEL
    body, path = case.body, case.operation.path
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model", ""), str):
        body["model"] = MODEL
    for name in LENGTHS:
        if type(body.get(name)) is int and body[name] > FEW_TOKENS:
            body[name] = FEW_TOKENS
    if path in LENGTH_OF and all(body.get(name) is None for name in LENGTHS):
        body[LENGTH_OF[path]] = FEW_TOKENS
    for name in REFUSED.get(path, ()):
        body.pop(name, None)
    if body.get("stream") is not True:
        body.pop("stream_options", None)
    for name in ECHOED if path == "/responses" else ():
        if body.get(name) is None:
            body[name] = "conformance"
