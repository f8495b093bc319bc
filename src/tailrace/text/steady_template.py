"""After whose messages a chat template's text stays as it is, whatever messages follow.

Found by trial, once for a template: conversations are rendered, each also with more messages after
it. A template that counts its messages is steady after none; one that cuts what assistants thought
out of earlier turns is steady after users and systems only. That something is steady is a reason to
begin work early, not a proof: whoever does so compares in the end.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from tailrace.errors import RequestError
from tailrace.text.incremental import Span, joined

if TYPE_CHECKING:
    from tailrace.text.chat import ChatTemplate

_TEXTS = {
    "system": "You are a miller by the river.",
    "user": "What does the mill do at night?",
    "assistant": "<think>\nIt has no lamps.\n</think>\n\nIt rests.",
}
_BASES = {
    "system": ("s",),
    "user": ("u", "su", "uau", "suau"),
    "assistant": ("ua", "sua", "uaua"),
}
_SEQUELS = {"system": ("u", "ua", "uau"), "user": ("a", "au", "aua"), "assistant": ("u", "ua")}
_ROLES = {"s": "system", "u": "user", "a": "assistant"}


@lru_cache(maxsize=8)
def steady_roles(template: ChatTemplate) -> frozenset[str]:
    """Return the roles after whose messages a template is steady; takes some milliseconds."""
    return frozenset(role for role in _BASES if _is_steady_after(template, role))


def _is_steady_after(template: ChatTemplate, role: str) -> bool:
    known = 0
    for base in _BASES[role]:
        beginning = _beginning(template, base)
        if beginning is None:
            continue  # the template refuses it, so it will not be asked for
        known += 1
        for sequel in _SEQUELS[role]:
            whole = _whole(template, base + sequel)
            if whole is not None and not begins_with(whole, beginning):
                return False
    return known > 0


def _messages(letters: str) -> list[dict[str, str]]:
    return [{"role": _ROLES[x], "content": _TEXTS[_ROLES[x]]} for x in letters]


def _beginning(template: ChatTemplate, letters: str) -> list[Span] | None:
    try:
        return template.beginning(_messages(letters)) or []
    except RequestError:
        return None


def _whole(template: ChatTemplate, letters: str) -> list[Span] | None:
    try:
        return joined(template.spans(_messages(letters)))
    except RequestError:
        return None


def begins_with(whole: list[Span], beginning: list[Span]) -> bool:
    """Whether joined spans begin with other joined spans; nothing begins with none."""
    if not beginning or len(whole) < len(beginning):
        return False
    last = len(beginning) - 1
    begun, there = beginning[last], whole[last]
    return (
        whole[:last] == beginning[:last]
        and begun.is_trusted == there.is_trusted
        and there.text.startswith(begun.text)
    )
