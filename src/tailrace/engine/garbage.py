"""Python's garbage collector, held still where what is made stays: it would look through all of it.

Modules stay, and so do captured graphs; a full collection goes through torch's modules each time.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Collect no garbage until the end; then as before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
