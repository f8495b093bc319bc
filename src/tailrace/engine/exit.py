"""The end of a process that may not wait for its device.

An orderly end joins the runner's thread and lets CUDA go, and either may wait for ever.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import NoReturn


def end_now(status: int) -> NoReturn:
    """End the process with a status, at once: nothing is waited for, no thread and no device."""
    with suppress(OSError, ValueError):  # standard error may be closed
        sys.stderr.flush()
    os._exit(status)
