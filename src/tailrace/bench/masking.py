"""Command lines without their secrets: what a report may show to anyone.

A secret is known by the name of its option (`--api-key`, `--hf-token=...`, `HF_TOKEN=...`), or by
its value where the caller knows it. A word may be a whole command of its own, as after `--start`.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MASK = "..."

# `--api-key-env` and `--max-input-tokens` are none: the name must end in the word.
_NAME = re.compile(
    r"-{0,2}(?:[A-Za-z0-9]+[-_])*(?:(?:api)?key|token|secret|password)", re.IGNORECASE
)


def masked(
    words: Sequence[str], secrets: Iterable[str] = (), *, takes_many: bool = False
) -> list[str]:
    """Return the words of a command, each secret replaced by "...".

    Args:
        words: As a process gets them.
        secrets: Values to be hidden wherever they stand; empty ones hide nothing.
        takes_many: Whether an option may take several values, as vLLM's `--api-key` does: then all
            words up to the next option are hidden.
    """
    known = [secret for secret in secrets if secret]
    shown: list[str] = []
    is_due = False
    for word in words:
        if is_due and not word.startswith("--"):
            shown.append(MASK)
            is_due = takes_many
        else:
            shown.append(_hidden(_masked_word(word), known))
            is_due = word.startswith("-") and _is_secret(word)
    return shown


def masked_engine(row: dict[str, Any], secrets: Iterable[str] = ()) -> dict[str, Any]:
    """Return an `[[engine]]` table, the secrets of its command and its variables masked."""
    known = list(secrets)
    found = dict(row)
    for name in ("command", "start", "arguments"):
        value = row.get(name)
        if isinstance(value, str):
            found[name] = masked([value], known)[0]
        elif isinstance(value, list | tuple):
            found[name] = masked([str(word) for word in value], known, takes_many=True)
    env = row.get("env")
    if isinstance(env, dict):
        found["env"] = {
            name: MASK if _is_secret(name) else _hidden(str(value), known)
            for name, value in env.items()
        }
    return found


def _is_secret(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _masked_word(word: str) -> str:
    """Return a word without the secret it assigns, or those of the command that it is."""
    name, equals, _ = word.partition("=")
    if equals and _is_secret(name):
        return f"{name}={MASK}"
    if not re.search(r"\s", word):
        return word
    try:
        inner = shlex.split(word)
    except ValueError:  # quotes that do not close
        inner = word.split()
    if len(inner) < 2:
        return word
    shown = masked(inner, takes_many=True)
    # Written anew only where something was hidden; {port} and "..." need no quotes.
    return word if shown == inner else " ".join(map(_quoted, shown))


def _quoted(word: str) -> str:
    return shlex.quote(word) if re.search(r"[\s'\"\\]", word) or not word else word


def _hidden(word: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        word = word.replace(secret, MASK)
    return word
