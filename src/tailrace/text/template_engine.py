"""Jinja as chat templates expect it, in a sandbox, with bounds.

A template comes with a downloaded model, so it is not trusted: the sandbox refuses attributes that
lead into Python (and changes to what it is given), and the length of what it writes, and of the
strings that it builds with `+` and `*`, is bounded. What it builds otherwise (`~` in a loop,
`center`) is bounded only when it is written, and a template that is merely slow stays possible.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_RENDERED_CHARS = 16 * 2**20


class RenderedTooLongError(jinja2.TemplateError):
    """The template wrote, or built in one string, more than `MAX_RENDERED_CHARS`."""

    def __init__(self) -> None:
        super().__init__(
            f"the rendered chat is longer than the limit of {MAX_RENDERED_CHARS} characters"
        )


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; serving just shows it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse operators whose result would be huge, before they run."""
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _check_length(len(left) + len(right))
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(times, int):
                    _check_length(len(sized) * times)
        elif operator == "**":
            raise SecurityError("the ** operator is not available to chat templates")
        return super().call_binop(context, operator, left, right)

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Return the rendered text.

        Raises:
            jinja2.TemplateError: The template raised, or wrote too much.
        """
        parts, length = [], 0
        for part in template.generate(variables):
            length += len(part)
            _check_length(length)
            parts.append(part)
        return "".join(parts)

    def free_names(self, source: str) -> frozenset[str]:
        """Return the variables that the template takes from outside."""
        names = jinja2.meta.find_undeclared_variables(self.parse(source))
        return frozenset(names) - self.globals.keys()


def _check_length(chars: int) -> None:
    if chars > MAX_RENDERED_CHARS:
        raise RenderedTooLongError


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    return dt.datetime.now().astimezone().strftime(fmt)
