"""Who may enter: an open house, the right model, and a place for each sequence.

A place is one sequence (prompt times choice). Places are taken before any text is tokenised and
given back when the answer has ended, however it did.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tailrace.errors import RequestError
from tailrace.server.engine_client import EngineState
from tailrace.server.sampling import Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tailrace.server.services import Services, TextServices

FULL_CODE = "rate_limit_exceeded"
FULL_RETRY_AFTER_S = 1.0
MOST_RETRY_S = 600.0
CLOSED_RETRY_AFTER_S = 2.0


class Admission:
    """Counts the sequences in the house.

    Args:
        place_free_s: Says in how many seconds the next place is expected to be free; None where
            that is not known.
    """

    def __init__(self, place_free_s: Callable[[], float | None] = lambda: None) -> None:
        self._place_free_s = place_free_s
        self.sequences = 0
        """Admitted and not yet ended."""
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def can_admit(self, sequences: int, places: int) -> bool:
        """Say whether so many more fit."""
        return self.sequences + sequences <= places

    @contextmanager
    def admitted(self, sequences: int, places: int) -> Iterator[None]:
        """Hold places for as long as the block runs.

        Args:
            sequences: How many the request means.
            places: How many there are: running and waiting ones.

        Raises:
            RequestError: 429, no place is free; 400, there will never be as many.
        """
        if sequences > places:
            raise RequestError(
                f"the request means {sequences} sequences (prompts times n); this server holds "
                f"{places} at once: send several requests",
                param="n",
            )
        if not self.can_admit(sequences, places):
            raise full(
                f"the server is full: {self.sequences} of {places} sequences are running or "
                f"waiting, and this request means {sequences} more; try again later",
                self._place_free_s(),
            )
        self.sequences += sequences
        self._is_empty.clear()
        try:
            yield
        finally:
            self.sequences -= sequences
            if not self.sequences:
                self._is_empty.set()

    async def wait_empty(self) -> None:
        """Wait until every admitted request has been answered."""
        await self._is_empty.wait()


def full(
    message: str, retry_after_s: float | None = None, *, code: str = FULL_CODE
) -> RequestError:
    """Return what a request gets for which there is no place.

    Args:
        message: Why.
        retry_after_s: When there will be one; None: that is not known.
        code: Which rule it was.
    """
    return RequestError(
        message,
        status=429,
        code=code,
        retry_after_s=FULL_RETRY_AFTER_S if retry_after_s is None else retry_after_s,
    )


def check_open(services: Services) -> tuple[TextServices, Limits]:
    """Return what a request needs of the model, once it can be served.

    Raises:
        RequestError: 503, the server is starting, going down, or its engine is being restarted.
    """
    if services.draining:
        raise _closed("the server is going down and takes no new requests")
    if services.engine.state is not EngineState.READY:
        raise _closed(f"the engine is {services.engine.state.value}")
    ready = services.engine.ready
    if ready is None or services.text is None:
        raise _closed("the model is still being loaded")
    return services.text, Limits(services.config.server, ready.vocab_size, ready.context_length)


def check_model(asked: str | None, text: TextServices) -> None:
    """Refuse a model that is not served; a body without one means the model at hand.

    Raises:
        RequestError: 404.
    """
    if asked and asked != text.model_name:
        raise RequestError(
            f"the model {asked[:200]!r} does not exist here; this server serves "
            f"{text.model_name!r}",
            param="model",
            status=404,
            code="model_not_found",
        )


def _closed(message: str) -> RequestError:
    return RequestError(
        f"{message}; try again later",
        status=503,
        code="service_unavailable",
        retry_after_s=CLOSED_RETRY_AFTER_S,
    )
