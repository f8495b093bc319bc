"""What the operating system says of our processes."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes(pid: int) -> int | None:
    """Return a process's resident memory; None where it is gone or the system has no /proc."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
