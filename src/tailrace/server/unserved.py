"""Fields of other servers that are not served here and would change the answer: refused by name.

Unknown fields are ignored, as clients of OpenAI's API expect. These are known: whoever sends one
wants another answer than the one without it. What changes no answer (`store`, `user`,
`service_tier`, `prediction`, a rank of some engine ...) is ignored like an unknown one. So is
`function_call`, which says which of `functions` is called, where those are not sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.errors import RequestError
from tailrace.server.protocol import ChatBody

if TYPE_CHECKING:
    from tailrace.server.protocol import SamplingFields

_BIAS = "send logit_bias, or a constraint such as guided_choice or guided_regex"
_TEXT_ONLY = "the model takes and gives text only; leave it out"
_EVERYWHERE = {
    "use_beam_search": "send n and temperature for several answers",
    "bad_words": _BIAS,
    "allowed_token_ids": _BIAS,
    "logits_processors": _BIAS,
    "custom_logit_processor": _BIAS,
    "stop_regex": "send stop with the strings themselves",
    "no_stop_trim": "send include_stop_str_in_output",
    "truncation_side": "prompts are cut at their beginning ('left') only",
    "logprob_token_ids": "send top_logprobs for the likeliest",
    "token_ids_logprob": "send logprobs to /v1/completions for the likeliest",
    "return_logprob": "send logprobs to /v1/completions",
    "return_tokens_as_token_ids": "send return_token_ids",
    "return_hidden_states": "leave it out",
    "lora_path": "one model is served, without adapters; leave it out",
    "prompt_embeds": "send the prompt as text or token ids",
    "input_embeds": "send the prompt as text or token ids",
    "image_data": _TEXT_ONLY,
    "audio_data": _TEXT_ONLY,
    "video_data": _TEXT_ONLY,
}
_OF_CHATS = {
    "chat_template": "the model's own is used; send chat_template_kwargs for what it takes",
    "add_special_tokens": "the chat template writes them; leave it out",
    "documents": "put their text into the messages",
    "echo": "send continue_final_message to go on with a message, or leave it out",
    "functions": "send tools, and tool_choice in place of function_call",
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "web_search_options": "this server runs no tools; leave it out",
}
_NOTHING: tuple[Any, ...] = (None, False, "", [])
_USUAL = {"modalities": ["text"], "truncation_side": "left"}
_BESIDE = {"truncation_side": "truncate_prompt_tokens"}
"""Fields that say how another one is meant, which must be there to change anything."""


def check_unserved(body: SamplingFields) -> None:
    """Refuse fields that are known and not served.

    Raises:
        RequestError: One is there and asks for something; it names the field.
    """
    _check(body, _EVERYWHERE)
    if isinstance(body, ChatBody):
        _check(body, _OF_CHATS)


def _check(body: SamplingFields, hints: dict[str, str]) -> None:
    for name, hint in hints.items():
        beside = _BESIDE.get(name)
        if beside is not None and getattr(body, beside) is None:
            continue
        value = getattr(body, name)
        if value not in _NOTHING and value != _USUAL.get(name):
            raise RequestError(f"{name} is not served: {hint}", param=name)
