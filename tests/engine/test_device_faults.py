"""Lack of memory, told from a device's other faults."""

from __future__ import annotations

import pytest
import torch

from tailrace.engine.device_faults import is_out_of_memory


def hidden_by(error: Exception) -> Exception:
    """Return what a graph's context manager raises when its body failed."""
    try:
        try:
            raise error
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (hidden_by(torch.OutOfMemoryError("CUDA out of memory.")), True),
        (hidden_by(ValueError("a shape")), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
    ids=["torch", "driver", "cublas", "in-capture", "in-capture-other", "lost", "other", "none"],
)
def test_lack_of_memory_is_known_by_its_kind_or_words(error, expected):
    assert is_out_of_memory(error) is expected
