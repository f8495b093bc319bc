"""JSON schemas at random, and whether a value fits one of them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_NAMES = ("a", "name", "size é", 'quo"te', "z\\n")

_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-5, 5).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 120}),
    st.integers(0, 3).map(
        lambda size: {"type": "string", "minLength": size, "maxLength": size + 2}
    ),
    st.lists(st.sampled_from([1, "one", None, True, "z\n", -2.5]), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([{"const": "é"}, {"type": "string", "pattern": "^[a-c]{1,3}$"}]),
)


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {
                "type": "array",
                "items": pair[0],
                "minItems": pair[1],
                "maxItems": pair[1] + 1,
            }
        ),
        st.tuples(st.dictionaries(st.sampled_from(_NAMES), inner, max_size=3), st.booleans()).map(
            lambda pair: {
                "type": "object",
                "properties": pair[0],
                "required": list(pair[0]) if pair[1] else [],
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    )


SCHEMAS = st.recursive(_LEAVES, _deeper, max_leaves=6)


def fits(value: Any, schema: dict[str, Any]) -> bool:  # noqa: PLR0911 -- one for each kind
    """Whether a value satisfies one of `SCHEMAS`."""
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        wanted = schema.get("enum", [schema.get("const")])
        return any(type(value) is type(one) and value == one for one in wanted)
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            return is_integer and schema["minimum"] <= value <= schema["maximum"]
        case "string" if "pattern" in schema:
            return isinstance(value, str) and 0 < len(value) <= 3 and set(value) <= set("abc")
        case "string":
            return (
                isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
            )
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(fits(item, schema["items"]) for item in value)
            )
        case _:
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(schema["properties"])
                and all(fits(item, schema["properties"][name]) for name, item in value.items())
            )
