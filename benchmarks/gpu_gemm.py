"""Linear layers by format and rows on one GPU: bfloat16, FP8 and 4 bits beside floor and ceiling.

    PYTHONPATH=src:. python benchmarks/gpu_gemm.py [--out DIR] [--sweep] [--only-check]
                                                   [--ways WAY ...]
    PYTHONPATH=src:. python benchmarks/gpu_gemm.py --plan FILE
    PYTHONPATH=src:. python benchmarks/gpu_gemm.py --ways cublas int4 --int4 "128/8/1/4 whole"
    PYTHONPATH=src:. python benchmarks/gpu_gemm.py --device cpu
                                                        (in Triton's interpreter: does it run?)

Every way is compared with the product in float64 first, on odd sizes and with NaN in the memory
around its rows and in its results; one of ours that differs ends the run, a yardstick (torch's own
product by blocks) that differs or is refused is left out. Then the four layers of
Qwen2.5-7B are timed for 1 to 8192 rows, in CUDA graphs that go through enough copies of a small
weight that none comes from the L2 cache. The ways:

    cublas         bfloat16 by torch
    bf16           as served: Triton for few rows, else cuBLAS
    fp8 rows       as served, a scale an output: few rows by widened weights, many in FP8
    fp8 mm         of that, the product alone: rows come in FP8
    fp8 few        up to 128 rows, rounded and multiplied by our kernel of few FP8 rows: as served
                   where all rows are rounded, but that there the norm or SiLU-mul rounds them
    fp8 few mm     of that, the product alone: rows come in FP8
    fp8 few blocks, fp8 few blocks mm
                   the same over a scale a block of 128 x 128
    fp8 hopper, fp8 hopper mm
                   as "fp8 few" and "fp8 few mm", by the fastest shape of Hopper's own kernel, where
                   the GPU is one: all are compared and timed, and the fastest are printed by layer
                   and rows. Only where --ways names them, and gpu_float8.py --only-check comes
                   first: a kernel that waits for ever is ended there, and here holds the GPU
    fp8 blocks     as served, a scale a block of 128 x 128: many rows by torch on Hopper, elsewhere
                   by our own kernel
    fp8 torch      blocks by torch.nn.functional.scaled_mm, the product alone, where it takes them
    int8 rows      prompts by an int8 copy: rows rotated and rounded, then our own kernel
    int8 mm        of that, the product alone: rows come in int8
    int8 hopper    the product alone by Hopper's own kernel, where the GPU is one
    int8 torch     by torch._int_mm, the product alone, whose scales are left to be done
    int4           as served, groups of 128: by the codes, or written out and multiplied by cuBLAS

The floor of a way is what is larger: its bytes over the copy rate that is measured first, or its
arithmetic at 663 (bfloat16) or 1268 TFLOP/s (FP8), the best that this model's shapes reached on an
H200 (docs/performance.md); int8's is taken to be FP8's, as the tensor cores' is. --sweep times
shapes instead: of the kernels of few rows, and of int8's for all. With --plan, what is "as served"
is served as that plan chooses (`tailrace plan measure`). With --int4, "int4" is served by the shape
of that name, as plans and gpu_int4.py have it, in the classes of rows that it is for. What was
found is written after every layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.hopper_layers import event_s, graph_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from tailrace.kernels.linear.float8 import Float8Weight
    from tailrace.kernels.linear.float8_rows import Float8Rows
    from tailrace.kernels.linear.int8 import Int8Weight
    from tailrace.kernels.linear.int8_rows import Int8Rows
    from tailrace.kernels.plan import Plan

    Save = Callable[[list[dict]], None]

CEILINGS = {"bf16": 663e12, "fp8": 1268e12, "int8": 1268e12}
LAYERS = {
    "qkv": (4608, 3584, True),
    "o": (3584, 3584, False),
    "gate_up": (37888, 3584, False),
    "down": (3584, 18944, False),
}
"""Outputs, inputs, and whether there is a bias."""
TINY_LAYERS = {"qkv": (48, 128, True), "down": (128, 256, False)}
DEPTH = 28
ROWS = (1, 8, 16, 32, 64, 100, 128, 256, 512, 1024, 2048, 4096, 8192)
TINY_ROWS = (1, 7, 70, 130)
ODD = ((1, 128, 48), (7, 256, 112), (33, 640, 208), (100, 384, 144), (131, 512, 272))
"""Rows, inputs, outputs of the comparison."""
WHOLE_BLOCKS = ((100, 384, 256), (131, 512, 384))
"""Likewise for torch, which takes only whole blocks of 128, as every layer timed here has."""
WAYS = (
    "cublas", "bf16", "fp8 rows", "fp8 mm", "fp8 few", "fp8 few mm", "fp8 blocks", "fp8 few blocks",
    "fp8 few blocks mm", "fp8 hopper", "fp8 hopper mm", "fp8 torch", "int8 rows", "int8 mm",
    "int8 hopper", "int8 torch", "int4",
)  # fmt: skip
COMPILED = (
    "bf16", "fp8 rows", "fp8 few", "fp8 blocks", "fp8 few blocks", "fp8 hopper", "int8 rows",
    "int4",
)  # fmt: skip
"""Ways with kernels of Triton, which are compiled before anything is timed."""
ALONE = (
    "fp8 mm", "fp8 few mm", "fp8 few blocks mm", "fp8 hopper mm", "fp8 torch", "int8 mm",
    "int8 hopper", "int8 torch",
)  # fmt: skip
"""Ways without the rounding of their rows, which nobody is served by."""
BY_HOPPER = ("fp8 hopper", "fp8 hopper mm")
"""Ways by the fastest of Hopper's own shapes."""
YARDSTICKS = ("fp8 torch", "int8 torch")
"""Torch's own ways: left out where it refuses them or they differ."""
LEAST_TORCH_ROWS = 17
"""Of torch._int_mm."""
SWEPT = {
    "int4": (16, 32, 64, 128),
    "fp8 rows": (16, 32),
    "fp8 few mm": (16, 32, 64, 128),
    "fp8 few blocks mm": (16, 32, 64, 128),
    "int8 mm": (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    "int8 hopper": (128, 256, 512, 1024, 2048, 4096, 8192),
}
"""By way, the rows that --sweep times shapes for."""
COLD_BYTES = 200e6
"""Copies of a weight take as much: four times an H200's L2."""


@dataclass
class Setting:
    """Where and what is run."""

    device: str
    dtype: torch.dtype
    layers: dict[str, tuple[int, int, bool]]
    rows: tuple[int, ...]
    ways: tuple[str, ...] = WAYS
    int4_kind: str = ""
    """The name of a shape that serves 4-bit layers where it can."""

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def is_hopper(self) -> bool:
        import torch

        return self.is_gpu and torch.cuda.get_device_capability() == (9, 0)


def setting_of(device: str) -> Setting:
    import torch

    if device == "cpu":
        return Setting(device, torch.float16, TINY_LAYERS, TINY_ROWS)
    return Setting(device, torch.bfloat16, LAYERS, ROWS)


@dataclass
class Made:
    """One layer in one way: copies of it, and what one product moves and computes."""

    products: list[Callable[[torch.Tensor], torch.Tensor]]
    weight: torch.Tensor
    """What it stands for, float32; empty where nothing is to be compared."""
    weight_bytes: int
    arithmetic: str
    """Whose ceiling: "bf16" or "fp8"."""
    layers: list = field(default_factory=list)
    """That a plan may choose ways for."""

    def serve_by(self, plan: Plan) -> int:
        """Let the layers be served as a plan chooses; return for how many classes of rows."""
        from tailrace.kernels.linear.ways import class_words, words_of

        chosen = 0
        for layer in self.layers:
            for ways in layer.planned:
                for most_rows in ways.classes:
                    name = plan.winner(words_of(layer), class_words(most_rows))
                    if name is not None:
                        ways.serve(most_rows, name)
                        chosen += 1
        return chosen // max(len(self.layers), 1)

    def shapes(self, way: str, rows: int) -> Iterator[str]:
        """Let the layers be served by each shape of a way that has several, one after another."""
        if way not in BY_HOPPER:
            yield ""
            return
        few = self.layers[0].planned[0]
        most_rows = next(most_rows for most_rows in few.classes if rows <= most_rows)
        for name in few.options(most_rows):
            if name.startswith("FP8 Hopper"):
                for layer in self.layers:
                    layer.planned[0].serve(most_rows, name)
                yield name


def make(
    way: str, setting: Setting, weight: torch.Tensor, bias: torch.Tensor | None, copies: int
) -> Made:
    """Pack one weight, float32 [N, K] on the device, as many times as asked."""
    if way in ("cublas", "bf16"):
        return _make_plain(way, setting, weight, bias, copies)
    if way == "int4":
        return _make_int4(setting, weight, bias, copies)
    if way.startswith("int8"):
        return _make_int8(way, setting, weight, bias, copies)
    return _make_float8(way, setting, weight, bias, copies)


def _workspace(setting: Setting):  # noqa: ANN202
    import torch

    from tailrace.kernels.linear.workspace import Workspace

    return Workspace(torch.device(setting.device), setting.dtype)


def _make_plain(
    way: str, setting: Setting, weight: torch.Tensor, bias: torch.Tensor | None, copies: int
) -> Made:
    import torch

    from tailrace.kernels.linear.cublas import CublasLinear
    from tailrace.kernels.linear.triton_skinny import SkinnyLinear, SkinnyScratch

    device = torch.device(setting.device)
    layers = [CublasLinear(weight, bias, setting.dtype, device) for _ in range(copies)]
    products: list[Callable[[torch.Tensor], torch.Tensor]] = list(layers)
    if way == "bf16":
        scratch = SkinnyScratch.allocate(device)
        products = [SkinnyLinear(layer, scratch) for layer in layers]
    planned = products if way == "bf16" else []
    wide = weight.to(setting.dtype).float()
    return Made(products, wide, layers[0].nbytes, "bf16", planned)


def _make_int4(
    setting: Setting, weight: torch.Tensor, bias: torch.Tensor | None, copies: int
) -> Made:
    from tailrace.kernels.linear.int4 import quantize_groups
    from tailrace.kernels.linear.int4_linear import Int4Linear

    held = quantize_groups(weight, 128)
    workspace = _workspace(setting)
    layers = [Int4Linear(held, bias, workspace) for _ in range(copies)]
    for layer in layers:
        for most_rows in layer.by_codes.classes:
            if setting.int4_kind in layer.by_codes.options(most_rows):
                layer.by_codes.serve(most_rows, setting.int4_kind)
    return Made(list(layers), held.dequantize(), layers[0].nbytes, "bf16", layers)


def with_int4_kind(setting: Setting, name: str, parser: argparse.ArgumentParser) -> Setting:
    """Let 4-bit layers be served by a shape, which must be one that can serve a small layer."""
    import torch

    if not name:
        return setting
    weight = torch.randn(128, 256, device=setting.device)
    (layer,) = make("int4", setting, weight, None, 1).layers
    names = (layer.by_codes.options(most_rows) for most_rows in layer.by_codes.classes)
    known = dict.fromkeys(itertools.chain.from_iterable(names))
    if name not in known:
        parser.error(f"--int4: {name!r} is none of {'; '.join(known)}")
    return replace(setting, int4_kind=name)


def _make_float8(
    way: str, setting: Setting, weight: torch.Tensor, bias: torch.Tensor | None, copies: int
) -> Made:
    from tailrace.kernels.linear.float8 import Float8Weight, quantize_blocks, quantize_channels
    from tailrace.kernels.linear.float8_linear import Float8Linear
    from tailrace.kernels.linear.triton_float8_rows import quantize_rows

    by_rows = way in ("fp8 rows", "fp8 mm", "fp8 few", "fp8 few mm", *BY_HOPPER)
    held = (quantize_channels if by_rows else quantize_blocks)(weight)
    workspace = _workspace(setting)
    kept = [
        Float8Weight(held.values.clone(), held.scales.clone(), held.scheme) for _ in range(copies)
    ]
    rounds_all = way.startswith("fp8 few") or way in BY_HOPPER
    layers = [Float8Linear(one, bias, workspace, rounds_all=rounds_all) for one in kept]
    products: list[Callable[[torch.Tensor], torch.Tensor]] = list(layers)
    if way.endswith(" mm"):
        products = _rounded_once(layers, lambda x: quantize_rows(x, layers[0].group))
    elif way == "fp8 torch":
        ours = [_torch_blocks(one, bias) for one in kept]
        products = _rounded_once(ours, lambda x: _torch_rows(quantize_rows(x, 128)))
    return Made(products, held.dequantize(), layers[0].nbytes, "fp8", layers)


def _make_int8(
    way: str, setting: Setting, weight: torch.Tensor, bias: torch.Tensor | None, copies: int
) -> Made:
    from tailrace.kernels.linear.int8 import Int8Weight, quantize_channels
    from tailrace.kernels.linear.triton_int8 import int8_product
    from tailrace.kernels.linear.triton_int8_rows import quantize_rows

    held = quantize_channels(weight)
    kept = [Int8Weight(held.values.clone(), held.scales.clone()) for _ in range(copies)]

    def product(one: Int8Weight) -> Callable:
        if way == "int8 torch":
            return _torch_int8(one, bias, setting.dtype)
        multiply = _int8_hopper() if way == "int8 hopper" else int8_product
        return lambda x: multiply(x, one, bias, setting.dtype)

    products = [product(one) for one in kept]
    if way == "int8 rows":
        products = [lambda x, ours=ours: ours(quantize_rows(x)) for ours in products]
    else:
        products = _rounded_once(products, quantize_rows)
    return Made(products, held.dequantize(), held.nbytes, "int8")


def _int8_hopper() -> Callable:
    from tailrace.kernels.linear.triton_hopper_int8 import int8_hopper

    return int8_hopper


def _torch_int8(held: Int8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Callable:
    """Return torch's product; in a graph, where it is timed, without what is not its own."""
    import torch

    def run(x: Int8Rows) -> torch.Tensor:
        sums = torch._int_mm(x.values, held.values.t())  # noqa: SLF001 - its only name
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return sums
        y = sums * x.scales.unsqueeze(1) * held.scales
        return (y if bias is None else y + bias).to(dtype)

    return run


def _rounded_once(products: list[Callable], quantize: Callable) -> list[Callable]:
    """Have rows rounded outside what is timed; they are kept, so that no others pass for them."""
    kept: list[tuple[torch.Tensor, object]] = []

    def alone(product: Callable) -> Callable:
        def run(x: torch.Tensor) -> torch.Tensor:
            if not kept or kept[0][0] is not x:
                kept[:] = [(x, quantize(x))]
            return product(kept[0][1])

        return run

    return [alone(product) for product in products]


@dataclass
class TorchRows:
    """Rows as torch's product by blocks wants them: fours of rows, their scales together."""

    values: torch.Tensor
    scales: torch.Tensor
    rows: int
    """Without those that fill up the last four."""


def _torch_rows(x: Float8Rows) -> TorchRows:
    import torch
    from torch.nn import functional

    rows = x.values.shape[0]
    values = functional.pad(x.values.view(torch.uint8), (0, 0, 0, -rows % 4))
    scales = functional.pad(x.scales, (0, 0, 0, -rows % 4)).t().contiguous().t()
    return TorchRows(values.view(x.values.dtype), scales, rows)


def _torch_blocks(held: Float8Weight, bias: torch.Tensor | None) -> Callable:
    """Return torch's product by 1 x 128 and 128 x 128 blocks; cuBLAS has its own order of scales.

    Those of the weight are [blocks of K, rounded up to 4; blocks of N], the blocks of K together;
    those of the rows are [T, blocks of K], the rows together, and rows come in fours.
    """
    import torch
    from torch.nn import functional

    steps = held.scales.shape[1]
    padded = functional.pad(held.scales, (0, -steps % 4))
    kinds = functional.ScalingType

    def run(x: TorchRows) -> torch.Tensor:
        y = functional.scaled_mm(
            x.values, held.values.t(), x.scales, kinds.BlockWise1x128,
            padded.t(), kinds.BlockWise128x128, output_dtype=torch.bfloat16,
        )[: x.rows]  # fmt: skip
        return y if bias is None else y + bias

    return run


def takes(way: str, rows: int, setting: Setting) -> bool:
    """Tell whether a way has something of its own to say about so many rows."""
    from tailrace.kernels.linear.triton_float8 import MOST_ROWS
    from tailrace.kernels.linear.triton_float8_few import MOST_FEW_ROWS

    if way == "fp8 torch":
        return setting.is_gpu and rows > MOST_ROWS
    if way.startswith("fp8 few"):
        return rows <= MOST_FEW_ROWS
    if way in BY_HOPPER:
        return setting.is_hopper and _has_gluon() and rows <= MOST_FEW_ROWS
    if way == "int8 torch":
        return rows >= LEAST_TORCH_ROWS
    if way == "int8 hopper":
        return setting.is_hopper
    return way != "fp8 mm" or rows > MOST_ROWS


def _has_gluon() -> bool:
    import triton

    from tailrace.kernels.linear.int4_linear import has_hopper_kernel

    return has_hopper_kernel((9, 0), triton.__version__)


# Comparison


def check(setting: Setting) -> tuple[list[str], set[str]]:
    """Return what differs, and the yardsticks to leave out, whose reasons are printed."""
    import torch

    torch.use_deterministic_algorithms(True)  # fresh memory is NaN while this is on
    wrong: list[str] = []
    left_out: set[str] = set()
    for way in setting.ways:
        is_yardstick = way in YARDSTICKS
        cases = WHOLE_BLOCKS if is_yardstick else ODD
        if way.startswith(("fp8 blocks", "fp8 few blocks")):
            cases = (*ODD, *WHOLE_BLOCKS)
        for sizes, has_bias in itertools.product(cases, (False, True)):
            if not takes(way, sizes[0], setting) or way in left_out:
                continue
            error = _difference(way, setting, sizes, has_bias=has_bias)
            if isinstance(error, float) and error < BOUNDS[way]:
                continue
            case = f"{way} {sizes} bias {has_bias}: {error}"
            if is_yardstick:
                left_out.add(way)
                print(f"left out: {case}", flush=True)
            else:
                wrong.append(case)
    torch.use_deterministic_algorithms(False)
    return wrong, left_out


ROUNDING = dict.fromkeys((way for way in WAYS if way.startswith("fp8")), 0.04)
"""Ways whose many rows are rounded to 3 bits of mantissa: 1/16 at most, 0.026 on average."""
FINE = dict.fromkeys(("int8 rows", "int8 mm", "int8 hopper", "int8 torch"), 0.015)
"""Likewise to 1/254 of a row's largest value at most: 0.008 on average where they are normal."""
BOUNDS = dict.fromkeys(WAYS, 0.006) | ROUNDING | FINE


def _difference(
    way: str, setting: Setting, sizes: tuple[int, int, int], *, has_bias: bool
) -> float | str:
    """Return |y - truth| / |truth| over the whole result, or why torch does not compute it."""
    import torch

    from tailrace.kernels.linear.triton_float8 import MOST_ROWS

    rows, inputs, outputs = sizes
    weight = torch.randn(outputs, inputs, device=setting.device) * inputs**-0.5
    bias = torch.randn(outputs, device=setting.device).to(setting.dtype) if has_bias else None
    whole = torch.full((rows + 40, inputs), float("nan"), device=setting.device)
    whole[:rows] = torch.randn(rows, inputs, device=setting.device)
    x = whole.to(setting.dtype)[:rows]
    try:
        made = make(way, setting, weight, bias, 1)
        results = [made.products[0](x).double() for _ in made.shapes(way, rows)]
    except (RuntimeError, ValueError, AttributeError) as error:
        if way not in YARDSTICKS:
            raise
        return _first_line(error)
    truth = x.double() @ made.weight.double().t()
    if bias is not None:
        truth += bias.double()
    norms = torch.stack([(y - truth).norm() for y in results])
    error = float(norms.amax() / truth.norm())
    # These ways round no activation of few rows, whatever the format of their weight.
    is_tight = way in ("fp8 rows", "fp8 blocks") and rows <= MOST_ROWS
    return error * (BOUNDS[way] / BOUNDS["cublas"]) if is_tight else error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


# Times


def copy_rate(setting: Setting) -> float:
    """Return bytes a second of the fastest copy, read and write counted.

    In a graph torch's copy is a node that the driver carries out in its own way, and slower than
    a kernel may be: so a kernel that copies is timed as well.
    """
    import torch

    if not setting.is_gpu:
        return 1e10
    source = torch.ones(COPIED_BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    ways = {
        "copy": lambda: target.copy_(source),
        "kernel": lambda: torch.bitwise_not(source, out=target),
    }
    rates = {}
    for name, work in ways.items():

        def copies(work: Callable[[], object] = work) -> None:
            for _ in range(COPIES):
                work()

        rates[name] = 2 * source.nbytes * COPIES / graph_s(copies, 10)
        alone = [event_s(work) for _ in range(12)]
        rates[f"{name}, no graph"] = 2 * source.nbytes / statistics.median(alone[2:])
    told = ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in rates.items())
    print(f"TB/s of copying {source.nbytes >> 20} MiB: {told}", flush=True)
    return max(rates.values())


COPIED_BYTES, COPIES = 4 << 30, 4
"""Of one copy, and how many are timed as one."""


def product_s(setting: Setting, made: Made, rows: int, inputs: int) -> float:
    """Return the seconds of one product, over all copies in turn."""
    import torch

    x = torch.randn(rows, inputs, device=setting.device).to(setting.dtype)
    products = made.products if rows <= 512 else made.products[:1]

    def all_copies() -> None:
        for product in products:
            product(x)

    if setting.is_gpu:
        repeats = 15 if rows <= 512 else 5
        return graph_s(all_copies, repeats) / len(products)
    begun = time.perf_counter()
    all_copies()
    return (time.perf_counter() - begun) / len(products)


def floor_s(made: Made, rows: int, outputs: int, inputs: int, rate: float) -> float:
    moved = made.weight_bytes + 2 * rows * (inputs + outputs)
    return max(moved / rate, 2 * rows * outputs * inputs / CEILINGS[made.arithmetic])


def measure(
    setting: Setting, rate: float, left_out: set[str], save: Save, plan: Plan | None
) -> list[dict]:
    """Time every way but those left out; what is found so far is saved after each layer."""
    import torch

    found: list[dict] = []
    for name, (outputs, inputs, has_bias) in setting.layers.items():
        weight = torch.randn(outputs, inputs, device=setting.device) * inputs**-0.5
        bias = torch.randn(outputs, device=setting.device).to(setting.dtype) if has_bias else None
        for way in setting.ways:
            if way in left_out:
                continue
            half_bytes = {"int4": 0.53, "cublas": 2, "bf16": 2}.get(way, 1) * outputs * inputs
            copies = min(40, -int(-COLD_BYTES // half_bytes)) if setting.is_gpu else 1
            made = make(way, setting, weight, bias, copies)
            made.weight = weight[:0]
            if plan is not None and made.layers:
                chosen = made.serve_by(plan)
                print(f"{name} {way}: the plan chooses for {chosen} classes of rows", flush=True)
            if way == "int4" and setting.int4_kind:
                print(f"{name} int4: {made.layers[0].name}", flush=True)
            entry = {"layer": name, "way": way, "weight_bytes": made.weight_bytes}
            for rows in setting.rows:
                if not takes(way, rows, setting):
                    continue
                try:
                    by_shape = {
                        name: product_s(setting, made, rows, inputs)
                        for name in made.shapes(way, rows)
                    }
                except (RuntimeError, ValueError) as error:
                    if way not in YARDSTICKS:
                        raise
                    print(f"left out: {name} {way} {rows} rows: {_first_line(error)}", flush=True)
                    continue
                floor = floor_s(made, rows, outputs, inputs, rate)
                shape = min(by_shape, key=lambda name: by_shape[name])
                seconds = by_shape[shape]
                found.append(
                    entry | {
                        "rows": rows, "shape": shape, "us": 1e6 * seconds, "floor_us": 1e6 * floor,
                        "tflops": 2e-12 * rows * outputs * inputs / seconds,
                    }
                )  # fmt: skip
            del made
        save(found)
        print(f"{name} measured", flush=True)
    return found


def compile_way(way: str, device: str, has_bias: bool, classes: tuple[int, ...]) -> None:
    """Fill Triton's cache on disk with a way's kernels of few rows; in a process of its own."""
    import torch

    setting = setting_of(device)
    # As large as decides alignment and splits: one that splits its inputs, one that does not.
    for outputs, inputs in ((512, 1024), (40960, 256)):
        weight = torch.zeros(outputs, inputs, device=device)
        bias = torch.zeros(outputs, device=device) if has_bias else None
        made = make(way, setting, weight, bias, 1)
        for rows in classes:
            if takes(way, rows, setting):
                for _ in made.shapes(way, rows):
                    made.products[0](torch.zeros(rows, inputs, dtype=setting.dtype, device=device))
    torch.cuda.synchronize()


def compile_all(setting: Setting) -> None:
    if not setting.is_gpu:
        return
    begun = time.monotonic()
    context = multiprocessing.get_context("spawn")
    usual = ((1, 17, 33, 65, 129, 257),)
    with ProcessPoolExecutor(len(COMPILED) * 2, mp_context=context) as pool:
        jobs = [
            pool.submit(compile_way, way, setting.device, has_bias, classes)
            for way in COMPILED
            if any(asked.split()[0] == way.split()[0] for asked in setting.ways)
            if "few" not in way or any("few" in asked for asked in setting.ways)
            if "hopper" not in way or any(asked in BY_HOPPER for asked in setting.ways)
            for has_bias in (False, True)
            # Of the one there are many shapes in each class.
            for classes in (((1,), (17,), (33,), (65,)) if way in BY_HOPPER else usual)
        ]
        for job in jobs:
            job.result()
    print(f"kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)


# Sweep


def hopper_int8_shapes() -> tuple[object, ...]:
    """Return the shapes of Hopper's kernel, none where Triton's release has no Gluon."""
    try:
        from tailrace.kernels.linear.triton_hopper_int8 import CANDIDATES
    except ImportError:
        return ()
    return CANDIDATES


def sweep_shapes() -> list[tuple[str, int, object, int]]:
    """Return (way, rows of the tile, shape, splits) to time."""
    from tailrace.kernels.linear.triton_float8 import SkinnyFloat8Shape
    from tailrace.kernels.linear.triton_float8_few import FewFloat8Shape
    from tailrace.kernels.linear.triton_int4 import Int4Shape
    from tailrace.kernels.linear.triton_int8 import SHAPES_TO_TIME

    sizes = [
        (block_n, warps, stages)
        for block_n, warps, stages in itertools.product((64, 128), (4, 8), (3, 4, 5))
        if (block_n, warps) != (64, 8)
    ]
    found: list[tuple[str, int, object, int]] = [
        ("int4", rows, Int4Shape(*size), splits)
        for rows, size, splits in itertools.product(SWEPT["int4"], sizes, (1, 2, 4, 8))
    ]
    found += [
        ("fp8 rows", rows, SkinnyFloat8Shape(*size), 0)
        for rows, size in itertools.product(SWEPT["fp8 rows"], sizes)
    ]
    few = [
        (block_n, warps, stages)
        for block_n, warps in ((64, 4), (64, 8), (128, 4), (128, 8))
        for stages in (2, 3, 4, 5, 6, 8)
    ]
    found += [
        (way, rows, FewFloat8Shape(*size), 0)
        for way in ("fp8 few mm", "fp8 few blocks mm")
        for rows, size in itertools.product(SWEPT[way], few)
    ]
    found += [
        ("int8 mm", rows, shape, 0)
        for rows, shape in itertools.product(SWEPT["int8 mm"], SHAPES_TO_TIME)
    ]
    found += [
        ("int8 hopper", rows, shape, 0)
        for rows, shape in itertools.product(SWEPT["int8 hopper"], hopper_int8_shapes())
    ]
    return found


def sweep(setting: Setting, rate: float, save: Save) -> list[dict]:
    """Time tiles and splits of the kernels of few rows; saved after each layer."""
    import torch

    found = []
    for name, (outputs, inputs, _) in setting.layers.items():
        weight = torch.randn(outputs, inputs, device=setting.device) * inputs**-0.5
        for way in (way for way in SWEPT if way in setting.ways and takes(way, 128, setting)):
            candidates = [entry for entry in sweep_shapes() if entry[0] == way]
            if not setting.is_gpu:
                candidates = candidates[:2]
            makers = {
                splits: _swept(way, setting, weight, splits)
                for splits in {splits for *_, splits in candidates}
            }
            for _, rows, shape, splits in candidates:
                run, made = makers[splits]
                x = torch.randn(rows, inputs, device=setting.device).to(setting.dtype)
                entry = {"layer": name, "way": way, "rows": rows, "shape": vars(shape)}
                entry["splits"] = splits
                try:
                    entry["us"] = 1e6 * run(x, shape)
                except Exception as error:  # noqa: BLE001 - a shape may exceed the GPU's means
                    entry["error"] = _first_line(error)
                entry["floor_us"] = 1e6 * floor_s(made, rows, outputs, inputs, rate)
                found.append(entry)
        save(found)
        print_sweep(name, [entry for entry in found if entry["layer"] == name])
    return found


def _swept(way: str, setting: Setting, weight: torch.Tensor, splits: int) -> tuple[Callable, Made]:
    """Return what times one shape over copies of the weight, and what one of them moves."""
    from tailrace.kernels.linear.float8 import quantize_channels
    from tailrace.kernels.linear.int4 import quantize_groups
    from tailrace.kernels.linear.packed_int4 import PackedInt4
    from tailrace.kernels.linear.triton_float8 import float8_skinny
    from tailrace.kernels.linear.triton_int4 import int4_linear

    workspace = _workspace(setting)
    outputs = weight.shape[0]
    workspace.reserve(outputs=outputs, splits=8, rows=128)
    if way.startswith("int8"):
        return _swept_int8(way, setting, weight)
    if way.startswith("fp8 few"):
        return _swept_float8_few(way, setting, weight)
    if way == "int4":
        first = PackedInt4.of(quantize_groups(weight, 128), setting.device, splits)
        count = min(40, -int(-COLD_BYTES // first.nbytes)) if setting.is_gpu else 1
        kept = [
            replace(first, codes=first.codes.clone(), meta=first.meta.clone()) for _ in range(count)
        ]
        kernel = int4_linear
    else:
        first = quantize_channels(weight)
        count = min(40, -int(-COLD_BYTES // first.nbytes)) if setting.is_gpu else 1
        kept = [
            replace(first, values=first.values.clone(), scales=first.scales.clone())
            for _ in range(count)
        ]
        kernel = float8_skinny

    def run(x: torch.Tensor, shape: object) -> float:
        def all_copies() -> None:
            for one in kept:
                kernel(x, one, None, scratch=workspace.scratch, shape=shape)

        if setting.is_gpu:
            return graph_s(all_copies, 7) / len(kept)
        begun = time.perf_counter()
        all_copies()
        return (time.perf_counter() - begun) / len(kept)

    return run, Made([], weight[:0], first.nbytes, "bf16")


def _swept_float8_few(way: str, setting: Setting, weight: torch.Tensor) -> tuple[Callable, Made]:
    from tailrace.kernels.linear.float8 import quantize_blocks, quantize_channels
    from tailrace.kernels.linear.triton_float8_few import float8_few
    from tailrace.kernels.linear.triton_float8_rows import quantize_rows

    workspace = _workspace(setting)
    workspace.reserve(outputs=weight.shape[0], splits=8, rows=128)
    by_blocks = way == "fp8 few blocks mm"
    first = (quantize_blocks if by_blocks else quantize_channels)(weight)
    count = min(40, -int(-COLD_BYTES // first.nbytes)) if setting.is_gpu else 1
    kept = [
        replace(first, values=first.values.clone(), scales=first.scales.clone())
        for _ in range(count)
    ]

    def run(x: torch.Tensor, shape: object) -> float:
        rows = quantize_rows(x, 128 if by_blocks else 0)

        def all_copies() -> None:
            for one in kept:
                float8_few(rows, one, None, setting.dtype, scratch=workspace.scratch, shape=shape)

        if setting.is_gpu:
            return graph_s(all_copies, 7) / len(kept)
        begun = time.perf_counter()
        all_copies()
        return (time.perf_counter() - begun) / len(kept)

    return run, Made([], weight[:0], first.nbytes, "fp8")


def _swept_int8(way: str, setting: Setting, weight: torch.Tensor) -> tuple[Callable, Made]:
    from tailrace.kernels.linear.int8 import quantize_channels
    from tailrace.kernels.linear.triton_int8 import int8_product
    from tailrace.kernels.linear.triton_int8_rows import quantize_rows

    multiply = _int8_hopper() if way == "int8 hopper" else int8_product
    first = quantize_channels(weight)
    count = min(40, -int(-COLD_BYTES // first.nbytes)) if setting.is_gpu else 1
    kept = [
        replace(first, values=first.values.clone(), scales=first.scales.clone())
        for _ in range(count)
    ]

    def run(x: torch.Tensor, shape: object) -> float:
        rows = quantize_rows(x)
        used = kept if len(x) <= 512 else kept[:1]

        def all_copies() -> None:
            for one in used:
                multiply(rows, one, None, setting.dtype, shape=shape)

        if setting.is_gpu:
            return graph_s(all_copies, 7) / len(used)
        begun = time.perf_counter()
        all_copies()
        return (time.perf_counter() - begun) / len(used)

    return run, Made([], weight[:0], first.nbytes, "int8")


def compile_shapes(part: list[tuple[str, int, object, int]]) -> None:
    """Fill Triton's cache on disk; in a process of its own."""
    import torch

    setting = setting_of("cuda")
    weight = torch.zeros(4096, 4096, device="cuda")
    makers = {
        (way, splits): _swept(way, setting, weight, splits)
        for way, splits in {(way, splits) for way, _, _, splits in part}
    }
    for way, rows, shape, splits in part:
        x = torch.zeros(rows, 4096, dtype=setting.dtype, device="cuda")
        try:
            makers[way, splits][0](x, shape)
        except Exception as error:  # noqa: BLE001 - told where it is timed
            print(way, rows, shape, _first_line(error), flush=True)


def compile_sweep(setting: Setting) -> None:
    if not setting.is_gpu:
        return
    # A kernel of int8 is the same for any rows.
    shapes = [
        (way, rows, shape, splits)
        for way, rows, shape, splits in sweep_shapes()
        if way in setting.ways and takes(way, rows, setting) and splits in (0, 1, 4)
        if not way.startswith("int8") or rows == SWEPT[way][0]
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(8, mp_context=context) as pool:
        list(pool.map(compile_shapes, [shapes[index::8] for index in range(8)]))


# Printing


def print_sweep(name: str, found: list[dict]) -> None:
    for way in SWEPT:
        for rows in sorted({entry["rows"] for entry in found if entry["way"] == way}):
            timed = [e for e in found if e["way"] == way and e["rows"] == rows and "us" in e]
            best = sorted(timed, key=lambda entry: entry["us"])[:3]
            shown = "; ".join(
                f"{e['us']:.1f} us by {'/'.join(map(str, e['shape'].values()))} x {e['splits']}"
                for e in best
            )
            if best:
                print(f"{name} {way} {rows} rows, floor {best[0]['floor_us']:.1f} us: {shown}")


def print_layers(found: list[dict], rows: int) -> None:
    """Print every layer at one number of rows, each way beside its floor."""
    print(f"\n{rows} rows, microseconds (times the floor):")
    for name in dict.fromkeys(entry["layer"] for entry in found):
        here = [e for e in found if e["layer"] == name and e["rows"] == rows]
        cells = [f"{e['way']} {e['us']:.1f} ({e['us'] / e['floor_us']:.2f})" for e in here]
        print(f"  {name:<8} " + ", ".join(cells))


def print_shapes(found: list[dict]) -> None:
    """Print by layer and rows which shape of Hopper's own was the fastest."""
    for way in BY_HOPPER:
        for name in dict.fromkeys(entry["layer"] for entry in found if entry["way"] == way):
            here = [e for e in found if (e["layer"], e["way"]) == (name, way)]
            shown = "; ".join(f"{e['rows']} rows {e['us']:.1f} us by {e['shape']}" for e in here)
            print(f"{name} {way}: {shown}")


def print_table(found: list[dict], setting: Setting) -> None:
    """Print all layers of the model by rows: one product each, DEPTH times, in milliseconds."""
    ways = [way for way in WAYS if any(entry["way"] == way for entry in found)]
    width = max(11, *(len(way) + 2 for way in ways))
    print(f"\nall linear layers ({DEPTH} x {', '.join(setting.layers)}), milliseconds by rows:")
    head = "".join(f"{way:>{width}}" for way in ways)
    floors = ("cublas", "fp8 rows", "int4")
    titles = "".join(f"{f'floor {name}':>{width + 3}}" for name in ("bf16", "fp8", "int4"))
    print(f"{'rows':>6}{head}{'fastest':>{width}}{titles}")
    for rows in setting.rows:
        sums = {way: _sum_ms(found, way, rows, "us") for way in ways}
        served = {way: ms for way, ms in sums.items() if ms and way not in ALONE}
        cells = "".join(f"{f'{ms:.3f}' if ms else '-':>{width}}" for ms in sums.values())
        fastest = min(served, key=lambda way: served[way], default="-")
        bounds = "".join(
            f"{_sum_ms(found, way, rows, 'floor_us'):>{width + 3}.3f}" for way in floors
        )
        print(f"{rows:>6}{cells}{fastest:>{width}}{bounds}")


def _sum_ms(found: list[dict], way: str, rows: int, key: str) -> float:
    """Return the sum over all layers, or 0 where one of them is left out."""
    layers = {entry["layer"] for entry in found}
    here = [e[key] for e in found if e["way"] == way and e["rows"] == rows]
    return DEPTH * sum(here) / 1e3 if len(here) == len(layers) else 0.0


def print_verdict(found: list[dict], rate: float, setting: Setting) -> None:
    """Say how near the 4-bit kernel is to what is asked of it."""
    print(f"\ncopy rate {rate / 1e12:.2f} TB/s; the 4-bit weights of all layers over the time:")
    for rows in (rows for rows in setting.rows if rows <= 128):
        here = [e for e in found if e["way"] == "int4" and e["rows"] == rows]
        moved = sum(entry["weight_bytes"] for entry in here)
        share = moved / (sum(entry["us"] for entry in here) / 1e6) / rate
        asked = ""
        if rows <= 16:
            asked = f" (asked: 85 %, {'reached' if share >= 0.85 else 'MISSED'})"
        elif rows == 64:
            asked = f" (asked: 1 / 1.4 = 71 %, {'reached' if share >= 1 / 1.4 else 'MISSED'})"
        print(f"  {rows:>4} rows: {100 * share:5.1f} % of it{asked}")


def exact_interpreter() -> None:
    """Mend the interpreter's float8, for the life of this process."""
    import warnings

    import pytest

    from tests.support.interpreter import exact_float8

    warnings.simplefilter("ignore")  # of its own loops, which are NumPy's
    exact_float8(pytest.MonkeyPatch())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sweep", action="store_true")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--plan", type=Path)
    chosen.add_argument("--int4", default="", metavar="NAME", help="a shape for 4-bit layers")
    parser.add_argument("--only-check", action="store_true")
    usual = [way for way in WAYS if way not in BY_HOPPER]
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=usual)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        exact_interpreter()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    from tailrace.kernels.plan import read

    torch.manual_seed(0)
    setting = replace(setting_of(arguments.device), ways=tuple(arguments.ways))
    setting = with_int4_kind(setting, arguments.int4, parser)
    begun = time.monotonic()
    with torch.inference_mode():
        compile_all(setting)
        wrong, left_out = check(setting)
        print(f"comparison: {len(wrong)} wrong", *wrong[:20], sep="\n", flush=True)
        if wrong:
            raise SystemExit(1)
        if arguments.only_check:
            return
        rate = copy_rate(setting)
        name = "gpu_gemm_sweep.json" if arguments.sweep else "gpu_gemm.json"
        file = arguments.out / name

        def save(found: list[dict]) -> None:
            file.write_text(json.dumps({"copy_bytes_s": rate, "found": found}))

        if arguments.sweep:
            compile_sweep(setting)
            found = sweep(setting, rate, save)
        else:
            plan = None if arguments.plan is None else read(arguments.plan)
            found = measure(setting, rate, left_out, save, plan)
    where = torch.cuda.get_device_name() if setting.is_gpu else "Triton's interpreter: no times"
    print(f"{where}, torch {torch.__version__}, {time.monotonic() - begun:.0f} s in all")
    if arguments.sweep:
        return
    for rows in (16, 64, 1024):
        if rows in setting.rows:
            print_layers(found, rows)
    print_shapes(found)
    if setting.is_gpu and "int4" in setting.ways:
        print_verdict(found, rate, setting)
    print_table(found, setting)


if __name__ == "__main__":
    main()
