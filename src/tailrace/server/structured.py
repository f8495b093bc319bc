"""What an output must match: the fields that say so, as one grammar, compiled before admission.

    response_format, guided_* ... --read--> Constraint --grammar--> checked text

Rules
1. One constraint a request; two that say different things are refused, not merged.
2. What cannot be enforced is refused with the reason: nothing is quietly looser than asked for.
3. Compiling happens on the compiler's thread, in bounds (see text/grammar), before the engine hears
   of the request; the engine compiles the same text again, from its own cache where it has it.
4. Between JSON's tokens a model may write nothing, one space, or a line's end with indentation: a
   free choice of white space is a way to never come to an end.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from tailrace.errors import RequestError
from tailrace.text.grammar import MAX_GRAMMAR_BYTES, GrammarError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tailrace.server.protocol import SamplingFields
    from tailrace.text.grammar import GrammarCompiler
    from tailrace.types import SamplingParams

MAX_SCHEMA_DEPTH = 64
MAX_MULTIPLE = 10_000
"""Least common multiple of a schema's `multipleOf`s. An automaton has that many states, and the
compiler's fuel does not count them: a million take 18 seconds."""
MAX_EBNF_CHARS = 8192
"""Of a grammar, whose translation to the library's own form is not fuelled."""
MAX_CHOICES = 1024
COMPILE_TIMEOUT_S = 5.0
MAX_COMPILING = 64

_WHITE_SPACE = r"[ ]?|\n[ \t]{0,32}"
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    # As SGLang's clients name them on OpenAI's routes.
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}


@dataclass(frozen=True)
class Constraint:
    """What a request's output must match."""

    kind: str
    """One of json, json_object, regex, choice and grammar."""
    value: Any
    param: str
    """The body's field, for messages."""
    white_space: str | None = _WHITE_SPACE
    """A pattern for what may stand between JSON's tokens; None: nothing may."""


def read_constraint(body: SamplingFields) -> Constraint | None:
    """Return what the body's fields ask for.

    Raises:
        RequestError: A field is malformed, or two of them are given.
    """
    pattern = body.guided_whitespace_pattern
    white_space = _WHITE_SPACE if pattern is None else _text(pattern, "guided_whitespace_pattern")
    found = [
        Constraint(kind, value, name, white_space)
        for name, kind in _GUIDED.items()
        if (value := getattr(body, name)) is not None
    ]
    if body.structured_outputs is not None:
        found.append(_from_structured_outputs(body.structured_outputs))
    response_format = getattr(body, "response_format", None)
    if response_format is not None:
        found += _from_response_format(response_format)
    if len(found) > 1:
        names = " and ".join(constraint.param for constraint in found)
        raise RequestError(f"{names} are given: send one of them", param=found[1].param)
    return found[0] if found else None


def grammar_of(constraint: Constraint) -> str:
    """Return a constraint as a grammar in the library's form.

    Raises:
        RequestError: The value is malformed, or beyond the bounds.
    """
    value, param = constraint.value, constraint.param
    match constraint.kind:
        case "json" | "json_object":
            return f"start: {json_rule(constraint)}"
        case "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(_text(value, param)))
        case "choice":
            return "start: " + " | ".join(literal(choice) for choice in _choices(value, param))
        case _:
            return _from_ebnf(_text(value, param), param)


def json_rule(constraint: Constraint) -> str:
    """Return the right side of a rule for JSON that fits the constraint's schema.

    Raises:
        RequestError: The schema is malformed, or beyond the bounds.
    """
    schema = {"type": "object"}
    if constraint.kind == "json":
        schema = read_schema(constraint.value, constraint.param)
    options: dict[str, Any] = {"whitespace_flexible": constraint.white_space is not None}
    if constraint.white_space is not None:
        options["whitespace_pattern"] = constraint.white_space
    # What a client says to the library under this name is overridden.
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def literal(text: str) -> str:
    """Return a text as a literal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def check_terms(sampling: SamplingParams, param: str) -> None:
    """Refuse what would have to continue an output that is complete.

    Raises:
        RequestError: `min_tokens` or `ignore_eos` is set.
    """
    if sampling.min_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens} and {param} is given: an output that matches "
            "cannot go on; leave min_tokens out",
            param="min_tokens",
        )
    if sampling.ignore_eos:
        raise RequestError(
            f"ignore_eos is set and {param} is given: an output that matches cannot go on; leave "
            "ignore_eos out",
            param="ignore_eos",
        )


async def constrained(
    sampling: SamplingParams, constraint: Constraint | None, compiler: GrammarCompiler | None
) -> SamplingParams:
    """Return the parameters with the constraint's grammar, once that has been compiled.

    Raises:
        RequestError: As `grammar_of`, `check_terms` and `compiled`.
    """
    if constraint is None:
        return sampling
    check_terms(sampling, constraint.param)
    grammar = await asyncio.to_thread(grammar_of, constraint)
    return msgspec.structs.replace(
        sampling, grammar=await compiled(grammar, compiler, constraint.param)
    )


async def compiled(grammar: str, compiler: GrammarCompiler | None, param: str) -> str:
    """Return a grammar's text, once it has been compiled.

    Raises:
        RequestError: 400, it cannot be; 503, the compiler is busy with too many others.
    """
    if compiler is None:
        raise RequestError(f"{param}: this server has no grammar compiler", param=param)
    if compiler.kept(grammar) is not None:
        return grammar
    if compiler.waiting >= MAX_COMPILING:
        raise _busy(f"{MAX_COMPILING} grammars wait to be compiled", param)
    job = compiler.compile_soon(grammar)
    work = asyncio.wrap_future(job)
    try:
        await asyncio.wait([work], timeout=COMPILE_TIMEOUT_S)
        if job.cancel():  # it has not begun: that is not this grammar's fault
            raise _busy(f"others took the compiler for {COMPILE_TIMEOUT_S:g} s", param)
        await asyncio.wait_for(work, COMPILE_TIMEOUT_S)
    except GrammarError as error:
        raise RequestError(f"{param} cannot be served: {error}", param=param) from error
    except TimeoutError as error:
        raise RequestError(
            f"{param} takes more than {COMPILE_TIMEOUT_S:g} s to compile: simplify it", param=param
        ) from error
    finally:
        work.cancel()  # who asked may have gone
    return grammar


def _busy(why: str, param: str) -> RequestError:
    return RequestError(
        f"{why}; try again later",
        status=503,
        param=param,
        code="service_unavailable",
        retry_after_s=COMPILE_TIMEOUT_S,
    )


def read_schema(value: Any, param: str) -> dict[str, Any]:
    """Return a JSON schema, sent as an object or as its text.

    Raises:
        RequestError: It is neither, or nested too deeply, or one of its numbers is beyond bounds.
    """
    if isinstance(value, str):
        if len(value) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"{param} has {len(value)} characters; the limit is {MAX_GRAMMAR_BYTES} bytes",
                param=param,
            )
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param} is no JSON: {error}", param=param) from error
    if isinstance(value, bool):
        value = {} if value else {"not": {}}
    if not isinstance(value, dict):
        raise RequestError(
            f"{param} is a {type(value).__name__}: send a JSON schema as an object", param=param
        )
    multiple = 1
    for number in _multiples(value, param):
        multiple = math.lcm(multiple, number)
        if multiple > MAX_MULTIPLE:
            raise RequestError(
                f"{param}: the least common multiple of its multipleOf is more than "
                f"{MAX_MULTIPLE}: choose smaller ones",
                param=param,
            )
    return value


def _multiples(schema: Any, param: str) -> Iterator[int]:
    """Yield every multipleOf, in units of its last digit, without recursion."""
    todo = [(schema, 0)]
    size = 0
    while todo:
        inner, depth = todo.pop()
        size += 1 + (len(inner) if isinstance(inner, str | dict | list) else 0)
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"{param} is larger than the limit of {MAX_GRAMMAR_BYTES} bytes", param=param
            )
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(
                f"{param} is nested more than {MAX_SCHEMA_DEPTH} deep: flatten it", param=param
            )
        if isinstance(inner, dict):
            number = inner.get("multipleOf")
            if isinstance(number, int) and not isinstance(number, bool):
                yield abs(number) or 1
            elif isinstance(number, float) and math.isfinite(number):
                yield Fraction(str(number)).numerator or 1
            todo += [(value, depth + 1) for value in inner.values()]
        elif isinstance(inner, list):
            todo += [(value, depth + 1) for value in inner]


def _from_response_format(sent: dict[str, Any]) -> list[Constraint]:
    kind = sent.get("type", "text")
    if kind == "text":
        return []
    if kind == "json_object":
        return [Constraint("json_object", None, "response_format")]
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type is {str(kind)[:40]!r}: 'text', 'json_object' and 'json_schema' "
            "are served",
            param="response_format",
        )
    wrapped = sent.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if schema is None:
        raise RequestError(
            "response_format.json_schema.schema is missing: send a JSON schema",
            param="response_format",
        )
    return [Constraint("json", schema, "response_format")]


def _from_structured_outputs(sent: Any) -> Constraint:
    """Read vLLM's `structured_outputs`."""
    param = "structured_outputs"
    if not isinstance(sent, dict):
        raise RequestError(f"{param} is a {type(sent).__name__}: send an object", param=param)
    given = {name: value for name, value in sent.items() if value not in (None, False)}
    pattern = given.pop("whitespace_pattern", None)
    is_dense = given.pop("disable_any_whitespace", False) is True
    unknown = sorted(set(given) - set(_KINDS))
    if unknown:
        raise RequestError(
            f"{param}.{unknown[0][:40]} is not served: send one of {', '.join(_KINDS)}",
            param=f"{param}.{unknown[0][:40]}",
        )
    if len(given) != 1:
        raise RequestError(
            f"{param} has {' and '.join(sorted(given)) or 'nothing'}: send exactly one of "
            f"{', '.join(_KINDS)}",
            param=param,
        )
    kind, value = next(iter(given.items()))
    white_space = _WHITE_SPACE if pattern is None else _text(pattern, f"{param}.whitespace_pattern")
    return Constraint(kind, value, f"{param}.{kind}", None if is_dense else white_space)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"{param} is {'empty' if value == '' else 'a ' + type(value).__name__}: send a text",
            param=param,
        )
    return value


def _choices(value: Any, param: str) -> list[str]:
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    if not is_list or not all(isinstance(choice, str) and choice for choice in value):
        raise RequestError(
            f"{param}: send a list of 1 to {MAX_CHOICES} texts, none of them empty", param=param
        )
    return list(value)


def _from_ebnf(text: str, param: str) -> str:
    """Return a grammar in Lark's form; GBNF is translated."""
    if len(text) > MAX_EBNF_CHARS:
        raise RequestError(
            f"{param} has {len(text)} characters; the limit is {MAX_EBNF_CHARS}", param=param
        )
    # What such a directive holds would pass by the bounds on schemas.
    for directive in ("%json", "%regex", "%llguidance"):
        if directive in text:
            raise RequestError(
                f"{param} holds {directive}, which is not served: send a JSON schema or a regular "
                "expression in the field for it",
                param=param,
            )
    try:
        return str(any_to_lark(text))
    # The translator raises plain exceptions, RecursionError and IndexError among them.
    except Exception as error:
        raise RequestError(
            f"{param} is neither Lark nor GBNF: {str(error)[:200]}", param=param
        ) from error
