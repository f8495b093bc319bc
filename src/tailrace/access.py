"""Who may ask, and how much of the server is theirs: keys and their classes, in the config file.

    [[classes]]
    name = "interactive"
    priority = 0            # of its requests, and the most urgent that they may ask for
    share = 4.0             # of the tokens, against other keys of the same priority
    max-sequences = 16      # of each key, running or waiting; 0: no limit of its own

    [keys.alice]
    key = "sk-..."          # or key-env = "ALICE_KEY": the environment variable that holds it
    class = "interactive"

A key's name may be told (the engine, the request log); the key itself stays here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tailrace.errors import ConfigError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

TABLES = ("classes", "keys")
"""Of the config file, that are read here."""
MAX_PRIORITY = 2**31 - 1
_MAX_KEYS = 10_000
_MAX_SHARE = 1e6
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class KeyClass:
    """What keys of a kind may have."""

    name: str
    priority: int = 0
    share: float = 1.0
    max_sequences: int = 0


@dataclass(frozen=True, kw_only=True)
class KeyHolder:
    """One key."""

    name: str
    key: str = field(repr=False)
    key_class: KeyClass


@dataclass(frozen=True)
class Access:
    """All keys that have a name; where there are any, a request needs one, or `api_key`."""

    holders: tuple[KeyHolder, ...] = ()


def read_access(tables: Mapping[str, Any], environ: Mapping[str, str], source: str) -> Access:
    """Return the keys of a config file's tables.

    Args:
        tables: `classes` and `keys`, as TOML has them; either may be missing.
        environ: Where `key-env` looks.
        source: The file's name, for messages.

    Raises:
        ConfigError: What is wrong, and where.
    """
    classes = _read_classes(tables.get("classes", []), source)
    entries = tables.get("keys", {})
    if not isinstance(entries, dict):
        raise ConfigError(f"{source}: keys must be tables, each [keys.NAME]")
    if len(entries) > _MAX_KEYS:
        raise ConfigError(f"{source}: {len(entries)} keys; at most {_MAX_KEYS} are served")
    holders = tuple(
        _read_holder(name, entry, classes, environ, source) for name, entry in entries.items()
    )
    names: dict[str, str] = {}
    for holder in holders:
        other = names.setdefault(holder.key, holder.name)
        if other != holder.name:
            raise ConfigError(f"{source}: keys {other!r} and {holder.name!r} are the same key")
    return Access(holders)


def key_variables(tables: Mapping[str, Any]) -> set[str]:
    """Return the environment variables that hold keys, of tables that `read_access` took."""
    return {entry["key-env"] for entry in tables.get("keys", {}).values() if "key-env" in entry}


def _read_classes(entries: Any, source: str) -> dict[str, KeyClass]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{source}: classes must be tables, each under [[classes]]")
    found: dict[str, KeyClass] = {}
    for number, entry in enumerate(entries):
        where = f"{source}: [[classes]] number {number + 1}"
        _check_names(entry, ("name", "priority", "share", "max-sequences"), where)
        name = _name_of(entry.get("name"), where)
        if name in found:
            raise ConfigError(f"{where}: there is a class {name!r} already")
        found[name] = KeyClass(
            name=name,
            priority=int(_number(entry, "priority", 0, (-MAX_PRIORITY, MAX_PRIORITY), where)),
            share=float(_number(entry, "share", 1.0, (1 / _MAX_SHARE, _MAX_SHARE), where)),
            max_sequences=int(_number(entry, "max-sequences", 0, (0, MAX_PRIORITY), where)),
        )
    return found


def _read_holder(
    name: str,
    entry: Any,
    classes: dict[str, KeyClass],
    environ: Mapping[str, str],
    source: str,
) -> KeyHolder:
    where = f"{source}: [keys.{name[:64]}]"
    _name_of(name, where)
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be a table with key (or key-env) and class")
    _check_names(entry, ("key", "key-env", "class"), where)
    chosen = entry.get("class")
    if not isinstance(chosen, str) or chosen not in classes:
        hint = nearest(str(chosen), classes)
        known = ", ".join(classes) or "none"
        raise ConfigError(f"{where}: class {chosen!r} is none of [[classes]] ({known}){hint}")
    return KeyHolder(name=name, key=_key_of(entry, environ, where), key_class=classes[chosen])


def _key_of(entry: dict[str, Any], environ: Mapping[str, str], where: str) -> str:
    if ("key" in entry) == ("key-env" in entry):
        raise ConfigError(f"{where}: needs one of key and key-env")
    if "key" in entry:
        key = entry["key"]
    else:
        variable = entry["key-env"]
        key = environ.get(variable) if isinstance(variable, str) else None
        if not key:
            raise ConfigError(f"{where}: key-env {variable!r} names no environment variable")
    if not isinstance(key, str) or not key or key != key.strip(" \t"):
        raise ConfigError(f"{where}: the key must be text, not empty, without blanks at its ends")
    return key


def _name_of(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(
            f"{where}: the name {str(value)[:80]!r} must be 1 to 64 letters, digits, dots, dashes "
            "and underscores"
        )
    return value


def _check_names(entry: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in entry:
        if name not in known:
            raise ConfigError(f"{where}: unknown setting {name!r}{nearest(name, known)}")


def _number(
    entry: dict[str, Any], name: str, default: float, bounds: tuple[float, float], where: str
) -> float:
    low, high = bounds
    value = entry.get(name, default)
    kinds = (int,) if isinstance(default, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        kind = "a whole number" if kinds == (int,) else "a number"
        raise ConfigError(f"{where}: {name} is {value!r}; must be {kind} from {low:g} to {high:g}")
    return value
