"""A GPU's context, made by the driver while torch is still being imported.

Either takes a second or more, and neither needs the other: torch finds the context that is there,
which is the device's primary one. What fails here is left to torch, which says what is missing.
"""

from __future__ import annotations

import ctypes
import os

DRIVER = "libcuda.so.1"


def open_context(index: int, library: str = DRIVER) -> bool:
    """Make the context of a GPU; on any thread, without holding the interpreter.

    Args:
        index: Of the GPU, as torch counts them.
        library: Of the driver.

    Returns:
        Whether it is there now.
    """
    # As torch asks for it, which is too late once the driver runs.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    # Each returns 0 where it succeeds, and the next one needs the one before.
    for function, given in (
        (driver.cuInit, (0,)),
        (driver.cuDeviceGet, (ctypes.byref(device), index)),
        (driver.cuDevicePrimaryCtxRetain, (ctypes.byref(context), device)),
    ):
        if function(*given) != 0:
            return False
    return True
