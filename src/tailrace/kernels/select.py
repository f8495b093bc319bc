"""Which implementation of the operations this process uses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from tailrace.errors import ConfigError, nearest
from tailrace.kernels.native import library
from tailrace.kernels.native_kernels import NativeKernels
from tailrace.kernels.torch_kernels import TorchKernels

if TYPE_CHECKING:
    from tailrace.kernels.kernels import Kernels

PREFERENCES = ("auto", "native", "torch")


def select(preference: str, threads: int) -> Kernels:
    """Return the operations to use, and give torch the same number of threads.

    Args:
        preference: "native" is the compiled C (an error where it cannot be had), "torch" the
            reference, "auto" native where possible and else torch, whose name then says why.
        threads: CPU threads; 0 takes the cores that this process may use.

    Raises:
        ConfigError: The preference is unknown, or native kernels cannot be compiled here.
    """
    if preference not in PREFERENCES:
        raise ConfigError(
            f"--cpu-kernels {preference}: must be one of {', '.join(PREFERENCES)}"
            f"{nearest(preference, PREFERENCES)}"
        )
    threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    if preference == "torch":
        return TorchKernels()
    try:
        return NativeKernels(library.load(threads))
    except ConfigError as error:
        if preference == "native":
            raise ConfigError(f"--cpu-kernels native: {error}") from error
        reason = str(error).partition(";")[0]
        return TorchKernels(f"torch (native kernels unavailable: {reason})")
