"""Where a text that was encoded before another is known lies within that other, exactly.

Ids of spans hold from a control token on, whatever is before it: nothing is encoded across one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tailrace.text.incremental import Span

if TYPE_CHECKING:
    from tailrace.text.incremental import IncrementalSpans

_MAX_JOINTS = 6
"""Spans of a whole prompt at which what was encoded early is looked for: a system's is the second,
or the one after a default's."""


class Joint(NamedTuple):
    """How a text is made of another's ids, which hold from a control token on."""

    ahead: list[Span]
    """What is to be encoded ahead of them."""
    skipped: list[Span]
    """What of the other has no place in the text."""
    rest: list[Span]
    """What is to be encoded after them."""


def joint_of(whole: list[Span], fed: list[Span], encoder: IncrementalSpans) -> Joint | None:
    r"""Return how `whole` has `fed` in it, from its beginning's last control token on; or None.

        fed     <bos><user>\n | Grind
        whole   <bos><system>\n | Be brief. | <end><user>\n | Grind it. | <end>
                ---------------- ahead ------------   -- kept --        rest

    A control token's ids, and those after it, do not depend on what is before it.
    """
    if len(fed) < 2 or not fed[0].is_trusted:
        return None
    begins = fed[0].text
    start = encoder.last_control(begins)
    if start is None:
        return None
    for index in range(min(len(whole), _MAX_JOINTS)):
        span = whole[index]
        if not span.is_trusted or not span.text.endswith(begins[start:]):
            continue
        at = len(span.text) - len(begins) + start
        if encoder.last_control(span.text) != at:  # one that overlaps it counts there
            continue
        rest = rest_of(whole[index + 1 :], fed[1:])
        if rest is not None:
            ahead = [*whole[:index], Span(span.text[:at], is_trusted=True)]
            skipped = [Span(begins[:start], is_trusted=True)]
            return Joint(ahead, skipped, rest)
    return None


def rest_of(spans: list[Span], fed: list[Span]) -> list[Span] | None:
    """Return `spans` without `fed`, both joined; None where they do not begin with it."""
    if not fed:
        return spans
    last = len(fed) - 1
    if len(spans) <= last or spans[:last] != fed[:last]:
        return None
    begun, whole = fed[last], spans[last]
    if begun.is_trusted != whole.is_trusted or not whole.text.startswith(begun.text):
        return None
    return [Span(whole.text[len(begun.text) :], whole.is_trusted), *spans[last + 1 :]]
