"""Both implementations; fresh memory holds NaN, so that what a kernel fails to write is seen."""

from __future__ import annotations

import pytest
import torch

from tailrace.errors import ConfigError
from tailrace.kernels.native import library
from tailrace.kernels.native_kernels import NativeKernels
from tailrace.kernels.torch_kernels import TorchKernels


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """torch.empty fills with NaN while deterministic algorithms are on."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20)


@pytest.fixture(scope="session")
def native_library():
    try:
        return library.load(torch.get_num_threads())
    except ConfigError as error:
        if "no C compiler" in str(error):
            pytest.skip(f"native kernels cannot be compiled here: {error}")
        raise


@pytest.fixture
def native(native_library):
    return NativeKernels(native_library)


@pytest.fixture
def reference():
    return TorchKernels()


@pytest.fixture(params=["native", "reference"])
def kernels(request):
    return request.getfixturevalue(request.param)
