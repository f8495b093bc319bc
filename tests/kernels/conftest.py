"""Both implementations; fresh memory holds NaN, so that what a kernel fails to write is seen."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

# As in tests/conftest.py, for a machine whose GPU this torch cannot use.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# What cuBLAS wants where torch is told to be deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from tailrace.errors import ConfigError
from tailrace.kernels.native import library
from tailrace.kernels.native_kernels import NativeKernels
from tailrace.kernels.torch_kernels import TorchKernels
from tests.kernels.on_triton import OnTriton
from tests.support.interpreter import exact_float8, quietly


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
        return library.load(len(os.sched_getaffinity(0)))
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


@pytest.fixture(
    params=[
        "float32",
        "float16",
        pytest.param("bfloat16", marks=pytest.mark.gpu),
    ]
)
def on_triton(request):
    """Triton's kernels: on the GPU where there is one, else in the interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from tailrace.kernels.triton_kernels import TritonKernels  # noqa: PLC0415

    if torch.cuda.is_available():
        if request.param == "float32":
            pytest.skip("in float32, which no GPU serves, the kernels take minutes to compile")
        yield OnTriton(TritonKernels(torch.device("cuda"), request.param))
        return
    if request.param == "bfloat16":
        pytest.skip("no GPU here, and the interpreter has no bfloat16")
    request.getfixturevalue("interpreter")
    yield OnTriton(TritonKernels(torch.device("cpu"), request.param))


@pytest.fixture
def interpreter(monkeypatch):
    """Triton's interpreter in silence, its float8 mended."""
    pytest.importorskip("triton", reason="Triton is not installed")
    exact_float8(monkeypatch)
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.fail("numpy 2.4 breaks Triton 3.6's interpreter; pip install 'numpy<2.4'")
    with quietly():
        yield


@pytest.fixture(params=["native", "reference"])
def kernels(request):
    return request.getfixturevalue(request.param)
