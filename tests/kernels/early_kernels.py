"""Kernels that are compiled ahead, and a GPU of which only the name is there; run as a program.

`python -m tests.kernels.early_kernels NAME ...` in a process without TRITON_INTERPRET: kernels
are compiled, and cannot be launched: this machine has no GPU. Prints one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import structlog
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia import hopper as gluon_hopper
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.tools.tensor_descriptor import TensorDescriptor

from tailrace.kernels import compile_process, early_compile
from tailrace.kernels.compile_order import CompileOrder, source_of
from tailrace.kernels.dependent_launch import dependent_launches
from tailrace.kernels.early_compile import EarlyCompile, collecting

CORES = sorted(os.sched_getaffinity(0))


class NamedGpu:
    """What Triton asks of a driver before it launches: which GPU there is."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit
def plain_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < count), mask=at < count)


@triton.jit
def constants_kernel(
    x_ptr, bias_ptr, out_ptr,
    DTYPE: tl.constexpr, NAME: tl.constexpr, ON: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, SHAPE[0])
    x = tl.load(x_ptr + at)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at)
    if ON and NAME == "fp32":
        x *= SHAPE[1]
    tl.store(out_ptr + at, x.to(DTYPE))


@triton.jit(do_not_specialize=["count"])
def dependent_kernel(x_ptr, count, scale, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_wait()
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * scale, mask=at < count)
    tl.extra.cuda.gdc_launch_dependents()


@gluon.jit
def gluon_kernel(x_ptr, out_ptr, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, BLOCK, layout=layout)
    gl.store(out_ptr + at, gl.load(x_ptr + at))


@triton.jit
def boxes_kernel(boxes, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.sum(boxes.load([0, 0]), 0))


@gluon.jit
def gluon_boxes_kernel(boxes, out_boxes):
    box = gl.allocate_shared_memory(boxes.dtype, boxes.block_type.shape, boxes.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, boxes.block_type.nbytes)
    tma.async_copy_global_to_shared(boxes, [0, 0], bar, box)
    mbarrier.wait(bar, 0)
    tma.async_copy_shared_to_global(out_boxes, [0, 0], box)


FACTOR = tl.constexpr(3.0)


@triton.jit
def times_factor(x):
    return x * FACTOR


@triton.jit
def first_caller_kernel(x_ptr):
    tl.store(x_ptr, times_factor(tl.load(x_ptr)))


@triton.jit
def second_caller_kernel(x_ptr):
    tl.store(x_ptr, times_factor(tl.load(x_ptr) + 1.0))


@triton.jit
def failing_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 0, "never")
    tl.store(x_ptr, 0.0)


@triton.jit
def function_kernel(x_ptr, FUNCTION: tl.constexpr):
    tl.store(x_ptr, FUNCTION(tl.load(x_ptr)))


@triton.jit
def twice(x):
    return x * 2


def launches() -> None:
    """Launch each kernel that can be compiled once, some in two ways."""
    x, out = torch.ones(64), torch.zeros(64)
    plain_kernel[1,](x, out, 64, BLOCK=64)
    plain_kernel[lambda _: (1,)](x, out, 63, BLOCK=64, num_warps=2)
    constants_kernel[1,](x, None, out, tl.float32, "fp32", ON=True, SHAPE=(64, 2.5))
    constants_kernel[1,](x.half(), x, out.half(), tl.float16, "int8", ON=False, SHAPE=(64, 1.0))
    dependent_kernel[1,](x, 1, 2.0, BLOCK=64, launch_pdl=True)
    gluon_kernel[1,](x, out, BLOCK=128)
    gluon_kernel[1,](x, out, BLOCK=128, maxnreg=64)
    matrix = torch.ones(64, 64, dtype=torch.float16)
    boxes_kernel[1,](TensorDescriptor.from_tensor(matrix, [16, 64]), out, BLOCK=64)
    shape = [16, 64]
    layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float16)
    descs = [gluon_hopper.TensorDescriptor.from_tensor(matrix, shape, layout) for _ in range(2)]
    gluon_boxes_kernel[1,](*descs)
    # What the second calls was hashed before it, which the worker may do in another order.
    first_caller_kernel[1,](x)
    second_caller_kernel[1,](x)


@contextmanager
def only_from_disk():
    """Let a compilation fail that Triton's cache on disk does not spare."""

    def refuse(self: ASTSource, *_: Any, **__: Any) -> None:
        raise AssertionError(f"{self.name} is compiled here")

    from triton.experimental.gluon._runtime import GluonASTSource  # noqa: PLC0415

    with (
        mock.patch.object(ASTSource, "make_ir", refuse),
        mock.patch.object(GluonASTSource, "make_ir", refuse),
    ):
        yield


@contextmanager
def told():
    """Collect what is logged."""
    with structlog.testing.capture_logs() as lines:
        yield lines


def compiled() -> dict[str, Any]:
    """Compile ahead, then load what the launches want; nothing is compiled here."""
    marks, meanwhile, hashed = [], [], triton_key.cache_info().misses
    begun = compile_process.begin(compile_process.COMMAND, CORES)
    with (
        EarlyCompile(
            begun=begun,
            cores=CORES * 4,
            mark=marks.append,
            meanwhile=lambda: meanwhile.append(begun.poll()),
        ) as early,
        told() as lines,
    ):
        early.expect()
        is_ready = early._waiting is begun is not None
        early.before(launches, since="before")
        is_used = begun.returncode == 0
        early.before(launches, since="between")
    loaded = []
    with only_from_disk(), mock.patch.object(triton.runtime.JITFunction, "run", _warm(loaded)):
        launches()
    return {
        "log": lines,
        "loaded": loaded,
        "marks": marks,
        "is_ready": is_ready,
        "is_used": is_used,
        "meanwhile": meanwhile,
        "hashed": triton_key.cache_info().misses - hashed,
    }


def _warm(loaded: list[str]):
    run = triton.runtime.JITFunction.run

    def warm(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        loaded.append(kernel.name)
        return kernel

    return warm


def faulty() -> dict[str, Any]:
    """One kernel does not compile, and one cannot be ordered; the others are."""

    def work() -> None:
        launches()
        failing_kernel[1,](torch.ones(1), BLOCK=16)
        function_kernel[1,](torch.ones(1), FUNCTION=twice)

    with EarlyCompile(cores=CORES * 4) as early, told() as lines:
        early.before(work, since="")
    return {"log": lines}


def dying() -> dict[str, Any]:
    """Workers that die, that never answer, that are killed, and that do not exist."""
    lines = []
    for script, timeout_s in (
        ("import sys; sys.exit(3)", 60),
        ("import time; time.sleep(60)", 1),
        ("import os; os.kill(os.getpid(), 9)", 60),
    ):
        command = (sys.executable, "-c", script)
        with EarlyCompile(command, cores=CORES * 4, timeout_s=timeout_s) as early, told() as said:
            early.before(launches, since="")
        lines += said
    with EarlyCompile(("/nowhere",), cores=CORES * 4) as early, told() as said:
        early.before(launches, since="")
    return {"log": [*lines, *said]}


def few() -> dict[str, Any]:
    """What is not worth a worker starts none: few kernels, or no core for it."""
    x = torch.ones(64)
    with mock.patch.object(EarlyCompile, "_start", side_effect=AssertionError), told() as lines:
        with EarlyCompile(cores=CORES * 4) as early:
            early.before(lambda: plain_kernel[1,](x, x, 64, BLOCK=64), since="")
            with mock.patch.object(triton.runtime.JITFunction, "run", _warm([])):
                plain_kernel[1,](x, x, 64, BLOCK=64)
                plain_kernel.device_caches.clear()
                plain_kernel[1,](x, x, 64, BLOCK=64)  # from disk
        plain_kernel.device_caches.clear()
        early = EarlyCompile(cores=[0, 1])
        early.expect()
        early.before(launches, since="")
    return {"log": lines}


def collected() -> dict[str, Any]:
    """What is collected is neither compiled nor launched, nor is what is in memory already."""
    x = torch.ones(64)
    with mock.patch.object(triton.runtime.JITFunction, "run", _warm([])):
        plain_kernel[1,](x, x, 64, BLOCK=64)  # compiled: is in memory
    kept = triton.runtime.JITFunction.run
    made = mock.Mock(side_effect=early_compile.order_of)
    with (
        mock.patch.object(early_compile, "order_of", made),
        only_from_disk(),
        collecting() as found,
    ):
        launches()  # a launch would ask NamedGpu for what it does not have
        launches()
    assert triton.runtime.JITFunction.run is kept
    with suppress(ZeroDivisionError), collecting():
        1 / 0  # noqa: B018
    assert triton.runtime.JITFunction.run is kept
    names = sorted(order.name for order in found.orders.values())
    return {"names": names, "left": found.left, "made": made.call_count}


def hopper() -> dict[str, Any]:
    """Hopper's own kernels, by their launchers: what goes over a line is what was launched."""
    from tailrace.kernels.linear import (  # noqa: PLC0415 - the other runs do without
        triton_hopper_half,
        triton_hopper_int4,
        triton_hopper_int4_bands,
    )
    from tailrace.kernels.linear.packed_int4 import PackedInt4  # noqa: PLC0415
    from tailrace.kernels.linear.workspace import Workspace  # noqa: PLC0415
    from tailrace.kernels.paged_attention.triton_decode import DecodeScratch  # noqa: PLC0415
    from tailrace.kernels.paged_attention.triton_hopper_decode import USUAL, decode  # noqa: PLC0415
    from tailrace.kernels.paged_attention.triton_hopper_prefill import (  # noqa: PLC0415
        hopper_prefill,
    )
    from tests.kernels.on_gluon import Layer  # noqa: PLC0415

    layer, cpu, half = Layer(), torch.device("cpu"), torch.bfloat16
    weight = PackedInt4.of(layer.weight(), "cpu")
    bias = torch.zeros(layer.outputs, dtype=half)
    ways = (
        (triton_hopper_int4, triton_hopper_int4.int4_hopper),
        (triton_hopper_int4_bands, triton_hopper_int4_bands.int4_bands),
    )
    q, kv = torch.zeros(40, 8, 128, dtype=half), torch.zeros(3, 2, 16, 128, dtype=half)
    index = {
        "tiles": torch.tensor([[0, 0]], dtype=torch.int32),
        "query_starts": torch.tensor([0, 40], dtype=torch.int32),
        "kv_lens": torch.tensor([40], dtype=torch.int32),
        "block_tables": torch.tensor([[0, 1, 2]], dtype=torch.int32),
    }
    with collecting() as found:
        for rows, (module, multiplied), on in itertools.product((16, 64, 128), ways, (False, True)):
            x, workspace = torch.zeros(rows, layer.inputs, dtype=half), Workspace(cpu, half)
            workspace.reserve(outputs=layer.outputs, splits=1, rows=rows, parts=1 << 20)
            with (
                mock.patch.object(module, "multiprocessors", return_value=132),
                dependent_launches(on=on),
            ):
                multiplied(x, weight, bias, scratch=workspace.scratch)
        plain = torch.zeros(layer.outputs, layer.inputs, dtype=half)
        for (rows, shapes), on in itertools.product(
            triton_hopper_half.CANDIDATES.items(), (False, True)
        ):
            x = torch.zeros(rows, layer.inputs, dtype=half)
            with (
                mock.patch.object(triton_hopper_half, "multiprocessors", return_value=132),
                dependent_launches(on=on),
            ):
                triton_hopper_half.half_hopper(
                    x, plain, bias, shape=shapes[0], scratch=workspace.scratch
                )
        hopper_prefill(q, kv.transpose(2, 3), kv, torch.empty_like(q), **index, scale=1.0)
        known = {"kv_lens": index["kv_lens"], "block_tables": index["block_tables"]}
        for on in (False, True):
            with dependent_launches(on=on):
                decode(
                    q[:1], kv.transpose(2, 3), kv, torch.empty_like(q[:1]), **known, scale=1.0,
                    shape=USUAL, scratch=DecodeScratch.allocate(1, 8, 128, 600, 512, "cpu"),
                )  # fmt: skip
    for order in found.orders.values():
        line = msgspec.json.encode(order)
        source_of(msgspec.json.decode(line, type=CompileOrder))  # whose key is the order's
    return {
        "names": sorted(order.name for order in found.orders.values()),
        "gluon": all(order.is_gluon for order in found.orders.values()),
        "left": found.left,
    }


def models() -> dict[str, Any]:
    """What a runner rehearses is all that its requests want, on memory that holds anything."""
    # They bring pytest and all of the engine, which the other runs do without.
    from tailrace.kernels import triton_kernels  # noqa: PLC0415
    from tailrace.models.loader import load_model  # noqa: PLC0415
    from tests.engine.test_cuda_runner import (  # noqa: PLC0415
        CPU,
        generate,
        make_requests,
        make_runner,
    )
    from tests.engine.test_quantised_runner import FORMATS, folder_of  # noqa: PLC0415
    from tests.support.tiny import make_tiny_checkpoint  # noqa: PLC0415

    said = {}
    for name in ("plain", *FORMATS):
        with tempfile.TemporaryDirectory() as place:
            path = Path(place)
            folder = folder_of(path, name) if name in FORMATS else make_tiny_checkpoint(path)
            kernels = triton_kernels.TritonKernels(CPU, "bfloat16")
            model = load_model(
                folder, dtype="bfloat16", kernels=kernels, load_format="dummy", seed=3
            )
        runner = make_runner(model, kernels, kv_dtype=torch.bfloat16)
        runner.forward_pass.last_tokens.fill_(7)
        torch.use_deterministic_algorithms(True)  # which fills what torch.empty returns
        with collecting() as rehearsed:
            runner._rehearse("all")
        kept = set(runner.forward_pass.last_tokens.tolist()) == {7}
        largest = [
            _of_the_largest_step(*part, kernels) for part in ((model, None), model.shallow())
        ]
        torch.use_deterministic_algorithms(False)
        # Tokens that no kernel draws: all are 0.
        with collecting() as wanted, mock.patch.object(torch, "empty", torch.zeros):
            for temperature in (0.0, 1.0):
                generate(runner, make_requests(temperature=temperature))
        said[name] = {
            "kept": kept,
            "largest": sorted(set(largest[0].values())),
            "is_found_by_few_layers": largest[0] == largest[1],
            "rehearsed": sorted({order.name for order in rehearsed.orders.values()}),
            "missing": sorted(
                order.name for key, order in wanted.orders.items() if key not in rehearsed.orders
            ),
            "left": {**rehearsed.left, **wanted.left},
        }
    return said


def _of_the_largest_step(model: Any, layers: list[int] | None, kernels: Any) -> dict[str, str]:
    """Return the names of the kernels that measuring the largest step wants, by their keys."""
    from tailrace.engine.cuda_setup import measure_step  # noqa: PLC0415 - as above

    with (
        mock.patch.multiple(
            torch.cuda,
            memory_allocated=lambda: 0,
            max_memory_allocated=lambda: 0,
            reset_peak_memory_stats=lambda: None,
            synchronize=lambda: None,
        ),
        collecting() as found,
    ):
        measure_step(model, kernels, rows=96, sampled=2, context=64, layers=layers)
    return {key: order.name for key, order in found.orders.items()}


def main(*names: str) -> None:
    """Run what is named, each with nothing compiled, on disk or in memory."""
    driver.set_active(NamedGpu())
    said = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            said[name] = globals()[name]()
        for value in globals().values():
            if isinstance(value, triton.runtime.JITFunction):
                value.device_caches.clear()
    print(json.dumps(said))  # noqa: T201


if __name__ == "__main__":
    # Workers import the kernels by the name of their module, which is another here.
    import_module("tests.kernels.early_kernels").main(*sys.argv[1:])
