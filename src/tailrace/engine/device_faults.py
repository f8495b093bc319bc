"""What a GPU's failures are: lack of memory, after which it can go on, or a context that is lost.

The second shows in whatever call comes next, and in all after it; so it is asked for.
"""

from __future__ import annotations

import torch

_NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it came of, is lack of memory on the device.

    Not all of them are torch's OutOfMemoryError: cuBLAS and the capture of a graph allocate too,
    and a capture that fails hides what made it fail.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def check_device(device: torch.device) -> None:
    """Raise where the context is lost: every later call of this process would fail."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
