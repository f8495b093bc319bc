"""What a chat says of tools: which there are, whether one must be called, and how that is enforced.

    auto      the model decides; its output is looked through for calls
    required  one call at least: a grammar of calls, in the model's own style
    named     a call of this function, likewise
    none      the template is not told of tools, and nothing is looked for

Where a function asks for `strict` arguments, `auto` has a grammar too: free text, in which what
begins like a call is one, with arguments that fit.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.errors import RequestError
from tailrace.server.structured import (
    Constraint,
    check_terms,
    compiled,
    constrained,
    json_rule,
    literal,
    read_schema,
)
from tailrace.text.tool_calls import MARKS, ToolCallParser, ToolStyle

if TYPE_CHECKING:
    from tailrace.server.protocol import ChatBody
    from tailrace.server.services import TextServices
    from tailrace.types import SamplingParams

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Function:
    """A function that may be called."""

    name: str
    parameters: dict[str, Any] | None
    param: str
    """Where its parameters stand in the body, for messages."""


@dataclass(frozen=True)
class ToolRules:
    """How calls are written, which there are, and which must be."""

    style: ToolStyle
    functions: tuple[Function, ...]
    must_call: bool = False
    """At least one of `functions`, which are only those that may be called."""
    is_strict: bool = False
    """Whether calls, where there are any, have to fit their function's schema."""
    is_parallel: bool = True
    """Whether there may be several calls."""

    def parser(self, *, streams: bool) -> ToolCallParser:
        """Return what looks one output through."""
        limit = None if self.is_parallel else 1
        return ToolCallParser(self.style, streams=streams, most_calls=limit)

    def grammar(self, answer: Constraint | None = None, *, is_special: bool = False) -> str:
        """Return the grammar of an output that is calls.

        Args:
            answer: What the output may be instead.
            is_special: Whether the tags are special tokens of the model's.

        Raises:
            RequestError: A function's parameters are no JSON schema, or beyond bounds.
        """
        marks = MARKS[self.style]
        # The bounds hold for all of them together: they become one grammar.
        read_schema({"tools": [function.parameters for function in self.functions]}, "tools")
        rules = []
        for index, function in enumerate(self.functions):
            head = f'{{"name": {literal(function.name)}, "{marks.arguments}": '
            rules.append(f"call_{index}: {literal(head)} arguments_{index} {literal('}')}")
            schema = {"type": "object", **(function.parameters or {})}
            rule = json_rule(Constraint("json", schema, function.param))
            rules.append(f"arguments_{index}: {rule}")
        names = " | ".join(f"call_{index}" for index in range(len(self.functions)))
        rules.append(f"call: {names}")
        if answer is None and not self.must_call:
            return "\n".join([*rules, *_free(self.style, is_special)])
        rules.append(f"calls: {_calls(self.style, is_special, self.is_parallel)}")
        rules.append("start: calls" if answer is None else "start: calls | answer")
        if answer is not None:
            rules.append(f"answer: {json_rule(answer)}")
        return "\n".join(rules)


def read_tools(body: ChatBody, text: TextServices) -> ToolRules | None:
    """Return the rules of a chat; None: no calls.

    Raises:
        RequestError: A tool or the choice is malformed, or the model is not known to call tools.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice asks for a call, but there are no tools: send tools, or leave it out",
                param="tool_choice",
            )
        return None
    functions = tuple(_function(tool, index) for index, tool in enumerate(_listed(body.tools)))
    chosen, must_call = _chosen(choice, functions)
    if choice == "none" or (text.calls_are_text and not must_call):
        return None
    if text.tool_style is None:
        raise RequestError(
            "tools are given, but the model's chat template shows no style of calls that is known "
            "here: leave tools out, set tool_choice to 'none', or start the server with "
            "--tool-call-parser hermes or llama3_json (or none: calls stay text)",
            param="tools",
        )
    return ToolRules(
        text.tool_style,
        chosen,
        must_call=must_call,
        is_strict=any(tool["function"].get("strict") for tool in body.tools),
        is_parallel=body.parallel_tool_calls is not False and not isinstance(choice, dict),
    )


def _listed(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"tools holds {len(tools)} tools; the limit is {MAX_TOOLS}", param="tools"
        )
    return tools


def _function(tool: dict[str, Any], index: int) -> Function:
    where = f"tools[{index}]"
    if tool.get("type") != "function":
        raise RequestError(
            f"{where}.type is {str(tool.get('type'))[:40]!r}: only functions are served",
            param=f"{where}.type",
        )
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name: send 1 to 64 letters, digits, '_', '-' and '.'",
            param=f"{where}.function.name",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(
            f"{where}.function.parameters is a {type(parameters).__name__}: send a JSON schema",
            param=f"{where}.function.parameters",
        )
    return Function(name, parameters, f"{where}.function.parameters")


def _chosen(
    choice: str | dict[str, Any] | None, functions: tuple[Function, ...]
) -> tuple[tuple[Function, ...], bool]:
    """Return the functions that may be called, and whether one must be."""
    if choice in (None, "auto", "none"):
        return functions, False
    if choice == "required":
        return functions, True
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or name is None:
        raise RequestError(
            f"tool_choice is {str(choice)[:60]!r}: send 'none', 'auto', 'required', or "
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    found = tuple(function for function in functions if function.name == name)
    if not found:
        raise RequestError(
            f"tool_choice names {str(name)[:64]!r}, which is not among the tools",
            param="tool_choice",
        )
    return found[:1], True


async def constrained_chat(
    sampling: SamplingParams,
    rules: ToolRules | None,
    constraint: Constraint | None,
    text: TextServices,
) -> SamplingParams:
    """Return the parameters with the grammar of what a chat asks for.

    Raises:
        RequestError: It cannot be enforced, or a call and another constraint exclude each other.
    """
    if rules is None or not (rules.must_call or rules.is_strict or constraint):
        return await constrained(sampling, constraint, text.grammars)
    param = "tools" if constraint is None else constraint.param
    if constraint is not None and (
        rules.must_call or constraint.kind not in ("json", "json_object")
    ):
        raise RequestError(
            f"tools and {param} are given: only JSON, with tool_choice 'auto', goes with tools",
            param=param,
        )
    check_terms(sampling, param)
    is_special = has_special_marks(rules, text)
    grammar = await asyncio.to_thread(rules.grammar, constraint, is_special=is_special)
    return msgspec.structs.replace(sampling, grammar=await compiled(grammar, text.grammars, param))


def has_special_marks(rules: ToolRules, text: TextServices) -> bool:
    """Whether the tags around calls are special tokens, which text leaves out by default."""
    opening = MARKS[rules.style].opening
    return bool(opening) and text.tokenizer.find_special(opening) is not None


def _free(style: ToolStyle, is_special: bool) -> list[str]:
    """Return the rules of an output that is text with calls in it."""
    marks = MARKS[style]
    if not marks.opening:
        return ["start: call | TEXT |", "TEXT: /[^{<](.|\\n)*/"]
    closing = f'"\\n" {marks.closing if is_special else literal(marks.closing)}'
    rules = ["start: inner* TEXT", "TEXT: /(.|\\n)*/", f'inner: opened "\\n" call {closing}']
    if is_special:
        return [*rules, f"opened: TEXT {marks.opening}"]
    return [*rules, f"opened[lazy]: TEXT {literal(marks.opening)}"]


def _calls(style: ToolStyle, is_special: bool, is_parallel: bool) -> str:
    """Return the right side of the rule for one or several calls."""
    marks = MARKS[style]
    if not marks.opening:
        return f"call ({literal(marks.separator)} call)*" if is_parallel else "call"
    opening, closing = (
        (tag if is_special else literal(tag)) for tag in (marks.opening, marks.closing)
    )
    one = f'{opening} "\\n" call "\\n" {closing}'
    return f"{one} ({literal(marks.separator)} {one})*" if is_parallel else one
