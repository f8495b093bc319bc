"""One error tree; each class says whose fault it is.

`RequestError` is the client's fault and becomes a 4xx answer in OpenAI's shape.
`ConfigError` and `ModelError` are the operator's fault and stop the start with one readable line.
`EngineError` is ours.
Every message gives the value, the limit and the remedy.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class TailraceError(Exception):
    """The root of every error that this package raises on purpose."""


class ConfigError(TailraceError):
    """A setting is unknown, malformed, contradictory, or not available here."""


class ModelError(TailraceError):
    """A checkpoint cannot be served: unknown architecture, or a missing or misshapen tensor."""


class EngineError(TailraceError):
    """The engine failed, or died, while it held work."""


class DeviceMemoryError(EngineError):
    """A step found no memory on the device; the device is sound, and smaller steps may run."""


class IntegrityError(EngineError):
    """A data structure contradicts itself: a bug here, never the client's doing."""


class RequestError(TailraceError):
    """The client's request cannot be served as sent.

    Args:
        message: What is wrong, with the value, the limit and the remedy.
        param: The body's field at fault, in OpenAI's dotted form, where there is one.
        status: The HTTP status of the answer.
        code: OpenAI's machine-readable error code, where there is one.
        retry_after_s: Seconds after which a retry may succeed, for 429 and 503.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name closest to `name`, or ""."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
