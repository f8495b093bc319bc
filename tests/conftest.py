"""What must be set before any test imports the package."""

from __future__ import annotations

import os
from pathlib import Path

# Triton reads it when a kernel is declared: without a GPU, kernels run in its interpreter. Asking
# torch would cost every run of a test that needs none the import.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
