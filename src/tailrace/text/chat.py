r"""Chat messages to a prompt, through the model's own template, without trusting the messages.

What a client wrote must never become a control token, yet the ids must be those of encoding the
rendered text as a whole wherever it spells none. So the template is rendered twice: once plainly,
and once with the core of each message's text (all but its outer white space) hidden behind an
unguessable placeholder. If filling the placeholders gives the plain rendering, it is known which
stretches are the client's, and control tokens are looked for in the template's stretches only:

    hidden   <|im_start|>user\n [ph 0] <|im_end|>\n
    plain    <|im_start|>user\n Say <|im_end|> ! <|im_end|>\n
    trusted  ------------------                  ------------

Some templates transform text, and then the two differ. The steps down, first that fits:

1. every message is hidden: nothing is refused;
2. assistant messages are shown (templates cut `<think>` blocks out of them): one that spells a
   special token is refused, while markup such as `</think>` counts as the template's;
3. all messages are shown: any control token in a message that the assistant did not write is
   refused, as are special tokens in those it did.

In 2 and 3 the rendering must hold the very special tokens that it holds in 1, or it is refused:
so that a template that builds one out of harmless text (`lower`, `replace`) does no harm either.
Strings of messages other than the text (names, tool calls), tools and template_kwargs are always
shown, and refused where they spell a control token.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.exceptions import SecurityError

from tailrace.errors import ModelError, RequestError, nearest
from tailrace.text.incremental import joined
from tailrace.text.messages import read_messages, refuse_control_tokens
from tailrace.text.template_engine import ChatEnvironment
from tailrace.text.tokenizer import Span, read_json
from tailrace.text.tool_calls import style_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tailrace.text.tokenizer import Tokenizer

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
# What a template may raise on messages it was not written for, besides jinja2's own errors.
_TEMPLATE_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class _Call:
    """One rendering as asked for."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    template: jinja2.Template
    continue_final_message: bool


class _Placeholders:
    """Unguessable stand-ins for the texts of one call."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._cores = [text.strip() for text in texts]
        self._nonce = secrets.token_hex(16)
        self._pattern = re.compile(f"\ue000{self._nonce}:([0-9]+)\ue001")
        self.end_mark = f"\ue000{self._nonce}:end\ue001"

    def hide(self, index: int, text: str) -> str:
        """Return `text` with its core hidden; outer white space stays for `trim` to see."""
        core = self._cores[index]
        if not core:
            return text
        start = text.index(core)
        placeholder = f"\ue000{self._nonce}:{index}\ue001"
        return text[:start] + placeholder + text[start + len(core) :]

    def fill(self, rendered: str) -> list[Span]:
        """Return the rendering as spans: what was hidden is not trusted."""
        parts = self._pattern.split(rendered)
        return [
            Span(self._cores[int(part)], is_trusted=False)
            if index % 2
            else Span(part, is_trusted=True)
            for index, part in enumerate(parts)
        ]


class ChatTemplate:
    """The chat template of one model folder; make it with `ChatTemplate.load`."""

    def __init__(self, sources: dict[str, str], tokenizer: Tokenizer) -> None:
        """Compile the templates.

        Args:
            sources: Template texts by name: "default", and "tool_use" where tools have their own.
            tokenizer: The model's tokenizer.

        Raises:
            ModelError: A template is malformed, or does what the sandbox forbids.
        """
        self._tokenizer = tokenizer
        self._environment = ChatEnvironment()
        self._templates: dict[str, jinja2.Template] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._special = {
            name: token for name in _SPECIAL_NAMES if (token := tokenizer.special_token(name))
        }
        self.tool_style = style_of(sources)
        """How it writes tool calls; None: not at all, or in a style that is not known here."""
        for name, source in sources.items():
            self._compile(name, source)

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Load chat_template.jinja, or else the template in tokenizer_config.json.

        A folder with neither is fine until a chat is rendered.

        Raises:
            ModelError: The template is malformed, or does what the sandbox forbids.
        """
        try:
            return cls(_read_sources(folder), tokenizer)
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error

    @property
    def exists(self) -> bool:
        """Whether the model has a template."""
        return bool(self._templates)

    def variables(self, *, has_tools: bool) -> frozenset[str]:
        """Return the names that `template_kwargs` may give a chat with or without tools."""
        names = self._names.get(self._name(has_tools), frozenset())
        return names - _RESERVED - set(_SPECIAL_NAMES)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt as text, to show; serving takes `encode`.

        Args:
            messages: OpenAI's messages. Text parts are joined with line breaks.
            add_generation_prompt: End with the opening of an assistant message.
            tools: OpenAI's tools, as parsed JSON.
            continue_final_message: End inside the last message, for the model to go on with it.
            template_kwargs: Further variables that the template names.

        Raises:
            RequestError: No template, or malformed input, or the template refused.
        """
        call = self._call(
            messages, add_generation_prompt, tools, continue_final_message, template_kwargs
        )
        return self._render(call, call.messages, _Placeholders([]))

    def encode(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Return the prompt's ids; no message text yields a control token. See `render`.

        Raises:
            RequestError: As `render`, or a text that cannot be told from the template's.
        """
        return self._tokenizer.encode_spans(
            self.spans(
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
            )
        )

    def spans(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[Span]:
        """Return the prompt as spans, for `Tokenizer.encode_spans`. See `render`.

        Raises:
            RequestError: As `render`, or a text that cannot be told from the template's.
        """
        call = self._call(
            messages, add_generation_prompt, tools, continue_final_message, template_kwargs
        )
        return self._spans(call)

    def beginning(self, messages: Sequence[dict[str, Any]]) -> list[Span] | None:
        """Return what the prompt may well begin with, if the last message is not yet whole.

        That is the rendering up to the end of the last message's text, its outer white space left
        out, joined. It is a guess: later messages, tools and the like may change any of it. None:
        the template does not write that text as it is.

        Raises:
            RequestError: As `spans`.
        """
        core = messages[-1]["content"].strip()
        spans = joined(self.spans(messages))
        while spans and spans[-1].is_trusted:
            spans.pop()
        return spans if core and spans and spans[-1].text.endswith(core) else None

    def _compile(self, name: str, source: str) -> None:
        try:
            template = self._environment.from_string(source)
            self._names[name] = self._environment.free_names(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template {name!r} is malformed: {error}") from error
        trial = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True}
        try:
            self._environment.render(template, {**self._special, **trial})
        except SecurityError as error:
            raise ModelError(
                f"the chat template {name!r} is refused by the sandbox: {error}. "
                "Do not use this checkpoint's template; put a chat_template.jinja that you trust "
                "in the folder"
            ) from error
        except (jinja2.TemplateError, RecursionError, *_TEMPLATE_FAULTS):
            # It may want other messages than the trial's; requests will tell.
            pass
        self._templates[name] = template

    def _call(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None,
        continue_final_message: bool,
        template_kwargs: dict[str, Any] | None,
    ) -> _Call:
        """Check the input and gather what a rendering needs."""
        if not self._templates:
            raise RequestError(
                "the model has no chat template: use /v1/completions with a prompt, or put a "
                "chat_template.jinja in the model's folder",
                param="messages",
            )
        name = self._name(bool(tools))
        extra = self._checked_kwargs(template_kwargs or {}, self.variables(has_tools=bool(tools)))
        checked = read_messages(messages, self._tokenizer)
        refuse_control_tokens(tools, "tools", self._tokenizer)
        if continue_final_message:
            _check_continuation(checked, add_generation_prompt)
        variables = {
            **self._special,
            **extra,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return _Call(checked, variables, self._templates[name], continue_final_message)

    def _name(self, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._templates else "default"

    def _checked_kwargs(self, kwargs: dict[str, Any], allowed: frozenset[str]) -> dict[str, Any]:
        for name in kwargs:
            if name not in allowed:
                raise RequestError(
                    f"the chat template takes no {name!r}{nearest(name, allowed)}; "
                    f"it takes: {', '.join(sorted(allowed)) or 'nothing'}",
                    param=f"chat_template_kwargs.{name}",
                )
        refuse_control_tokens(kwargs, "chat_template_kwargs", self._tokenizer)
        return kwargs

    def _spans(self, call: _Call) -> list[Span]:
        """Return the rendering, with what is the client's told apart: see the module's steps."""
        texts = [message["content"] for message in call.messages]
        placeholders = _Placeholders(texts)
        plain = self._render(call, call.messages, placeholders)
        reference: list[str] | None = None
        for shown in _steps_down(call.messages):
            self._refuse_specials_in_shown(call.messages, shown)
            hidden = [
                message
                if index in shown
                else {**message, "content": placeholders.hide(index, message["content"])}
                for index, message in enumerate(call.messages)
            ]
            spans = placeholders.fill(self._render(call, hidden, placeholders))
            specials = self._trusted_specials(spans)
            reference = specials if reference is None else reference
            if specials != reference:
                raise _indistinct("a special token appears that the template alone does not write")
            if "".join(span.text for span in spans) == plain:
                return spans
        raise _indistinct("two renderings of the same messages differ")

    def _trusted_specials(self, spans: list[Span]) -> list[str]:
        trusted = "\0".join(span.text for span in spans if span.is_trusted)
        return self._tokenizer.specials_in(trusted)

    def _refuse_specials_in_shown(
        self, messages: list[dict[str, Any]], shown: frozenset[int]
    ) -> None:
        for index in sorted(shown):
            message = messages[index]
            is_ours = message["role"] == "assistant"
            find = self._tokenizer.find_special if is_ours else self._tokenizer.find_control
            found = find(message["content"])
            if found:
                raise RequestError(
                    f"messages[{index}].content spells the model's control token {found!r}, and "
                    "the model's chat template transforms the text, so that the two could not be "
                    "told apart: remove it",
                    param="messages",
                )

    def _render(
        self, call: _Call, messages: list[dict[str, Any]], placeholders: _Placeholders
    ) -> str:
        if call.continue_final_message:
            # The space behind the mark is gone afterwards if the template trims.
            last = messages[-1]
            marked = {**last, "content": last["content"] + placeholders.end_mark + " "}
            messages = [*messages[:-1], marked]
        try:
            rendered = self._environment.render(
                call.template, {**call.variables, "messages": messages}
            )
        except (jinja2.TemplateError, RecursionError, *_TEMPLATE_FAULTS) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        if call.continue_final_message:
            return _cut_at(rendered, placeholders.end_mark)
        return rendered


def _steps_down(messages: list[dict[str, Any]]) -> Iterator[frozenset[int]]:
    """Yield the indices of the messages that are shown to the template in each step."""
    yield frozenset()
    ours = frozenset(i for i, message in enumerate(messages) if message["role"] == "assistant")
    everything = frozenset(range(len(messages)))
    if ours and ours != everything:
        yield ours
    yield everything


def _indistinct(reason: str) -> RequestError:
    return RequestError(
        "the model's chat template transforms the messages so that their text cannot be told from "
        f"the template's control tokens ({reason}): render the prompt yourself and use "
        "/v1/completions",
        param="messages",
    )


def _check_continuation(messages: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: set one to false",
            param="continue_final_message",
        )
    if not messages[-1]["content"]:
        raise RequestError(
            "continue_final_message is set, but the last message has no text to go on with",
            param="continue_final_message",
        )


def _cut_at(rendered: str, mark: str) -> str:
    end = rendered.rfind(mark)
    if end < 0:
        raise RequestError(
            "the model's chat template does not keep the last message's text whole, so it cannot "
            "be continued: leave continue_final_message out",
            param="continue_final_message",
        )
    keeps_space = rendered.startswith(mark + " ", end)
    return rendered[:end] if keeps_space else rendered[:end].rstrip()


def _read_sources(folder: Path) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file.name} cannot be read: {error}") from error
    template = read_json(folder / "tokenizer_config.json").get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    try:
        sources = {entry["name"]: entry["template"] for entry in template}
    except (TypeError, KeyError) as error:
        raise ModelError(
            f"chat_template is {json.dumps(template)[:80]}: expected a text, or a list of "
            '{"name", "template"}'
        ) from error
    if "default" not in sources:
        raise ModelError(f'chat_template names {sorted(sources)}, but no "default"')
    return sources
