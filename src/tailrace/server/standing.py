"""What a request is worth beside others: its key's class, and the priority that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.access import MAX_PRIORITY
from tailrace.errors import RequestError

if TYPE_CHECKING:
    from tailrace.access import KeyHolder

PRIORITY_HEADER = "x-tailrace-priority"


@dataclass(frozen=True)
class Standing:
    """As the engine is told; see `types.EngineRequest`."""

    priority: int = 0
    key: str = ""
    share: float = 1.0
    max_sequences: int = 0


def standing_of(
    holder: KeyHolder | None, *, in_body: int | None, in_header: str | None
) -> Standing:
    """Return the standing of a request.

    Args:
        holder: Whose key it brought; None: one without a name, or none.
        in_body: The body's `priority`, checked already.
        in_header: The header X-Tailrace-Priority; counts where the body says nothing.

    Raises:
        RequestError: 400, the header is no priority, or is more urgent than the key may ask for.
    """
    asked = _of_header(in_header) if in_body is None and in_header is not None else in_body
    if holder is None:
        return Standing(priority=asked or 0)
    its = holder.key_class
    if asked is not None and asked < its.priority:
        raise RequestError(
            f"priority is {asked}; smaller is more urgent, and keys of the class {its.name!r} may "
            f"ask for {its.priority} at the least: send that or more, or leave it out",
            param="priority",
        )
    return Standing(
        priority=its.priority if asked is None else asked,
        key=holder.name,
        share=its.share,
        max_sequences=its.max_sequences,
    )


def _of_header(value: str) -> int:
    text = value.strip()
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= len(str(MAX_PRIORITY)):
        asked = int(text)
        if -MAX_PRIORITY <= asked <= MAX_PRIORITY:
            return asked
    raise RequestError(
        f"the header X-Tailrace-Priority is {value[:40]!r}; must be a whole number from "
        f"{-MAX_PRIORITY} to {MAX_PRIORITY}",
        param="priority",
    )
