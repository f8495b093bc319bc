"""How many multiprocessors a GPU has: what kernels are laid over that hand out work themselves."""

from __future__ import annotations

from functools import lru_cache

import torch

OF_THE_INTERPRETER = 3
"""So that its programs, too, take several pieces of work in turn."""


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Return how many a device has, Triton's interpreter as if it were one."""
    if device.type != "cuda":
        return OF_THE_INTERPRETER
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
