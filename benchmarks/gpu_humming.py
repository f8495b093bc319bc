"""humming-kernels beside our 4-bit kernel on one GPU: is a library faster, and where?

    PYTHONPATH=src:. python benchmarks/gpu_humming.py [--out DIR] [--compile-s SECONDS]

humming (Apache-2.0) writes a CUDA kernel for each layer size and tile, compiles it at run time, and
keeps it in ~/.humming/cache. It needs torch 2.11 or newer, cuda-bindings, and NVRTC or nvcc with
CUDA's headers. The four layers of Qwen2.5-7B, 4 bits in groups of 128 with zero points:

    cublas         bfloat16 by torch
    int4           our own, as served
    fp8 rows       our own FP8 copy of the weight, as served, rounding of rows included
    fp8 mm         of that, the product alone
    hum a16        humming, rows in bfloat16
    hum fixed      likewise, with its promise that a row's result depends on no other row
    hum fp8, int8  humming, the same 4-bit weight against rows rounded to 8 bits; rounding included
    hum fp8 mm     of that, the product alone; likewise hum int8 mm

Every result of humming is compared with the product in float64 by what the codes stand for, into
memory full of NaN; what is wrong is told and not timed, and so is a kernel that does not compile,
or not within --compile-s. humming rounds scales to bfloat16. Times are as in gpu_gemm.py: CUDA
graphs through enough copies of a small weight that none comes from the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_gemm import (
    COLD_BYTES,
    DEPTH,
    LAYERS,
    Made,
    compile_way,
    make,
    product_s,
    setting_of,
    takes,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import torch
    from gpu_gemm import Setting

    from tailrace.kernels.linear.int4 import GroupInt4

ROWS = (1, 16, 32, 64, 128, 512, 2048)
GROUP = 128
OURS = {"cublas": 2.0, "int4": 0.53, "fp8 rows": 1.0, "fp8 mm": 1.0}
"""Bytes of a weight's element."""
WORKERS = 16
ALWAYS = 1 << 30


@dataclass(frozen=True)
class Way:
    """One way of calling humming."""

    name: str
    rows_dtype: str
    is_fixed: bool
    """Whether a row's result is promised to depend on no other row."""
    least_rows: int
    most_rows: int
    bound: float
    """Of |y - truth| / |truth|: rounding of rows, scales and results."""

    @property
    def rounds_rows(self) -> bool:
        return self.rows_dtype != "bfloat16"

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(rows for rows in ROWS if self.least_rows <= rows <= self.most_rows)


WAYS = (
    Way("hum a16", "bfloat16", False, 1, ALWAYS, 0.006),
    Way("hum fp8", "float8e4m3", False, 64, ALWAYS, 0.04),
    Way("hum int8", "int8", False, 64, ALWAYS, 0.02),
    Way("hum fixed", "bfloat16", True, 1, 128, 0.006),
)
COLUMNS = (
    *OURS,
    *(
        name
        for way in WAYS
        for name in ((way.name, f"{way.name} mm") if way.rounds_rows else (way.name,))
    ),
)


# humming: what it is told, what it compiles, how it is called


def choose_compiler() -> str:
    """Set humming's compiler to NVRTC if its library and headers are found, else to nvcc."""
    from humming.utils.cuda import filter_cuda_paths
    from humming.utils.nvrtc import get_nvrtc_library_path

    try:
        library = get_nvrtc_library_path()
        paths = filter_cuda_paths(required_headers=["cuda_runtime.h"])["include_paths"]
        missing = "" if any((Path(path) / "cuda/std/cstdint").exists() for path in paths) else paths
    except RuntimeError as error:
        library, missing = "", str(error)
    if not missing:
        os.environ["HUMMING_COMPILER"] = "nvrtc"
        return f"NVRTC at {library}"
    os.environ["HUMMING_COMPILER"] = "nvcc"
    nvcc = filter_cuda_paths(required_binaries=["nvcc"])["binaries"]["nvcc"]
    return f"nvcc at {nvcc}; NVRTC lacks its library or cuda/std/cstdint: {missing}"


def layer_config(way: Way, outputs: int, inputs: int, *, has_bias: bool) -> Any:
    """Return humming's description of one layer."""
    import torch
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_layer_config

    weight = HummingWeightSchema(
        b_dtype="uint4", weight_scale_group_size=GROUP, has_zero_point=True
    )
    rows = HummingInputSchema(a_dtype=way.rows_dtype)
    return prepare_layer_config(
        outputs, inputs, weight, rows, has_bias=has_bias, torch_dtype=torch.bfloat16
    )


def tile(config: Any, way: Way, rows: int) -> str:
    """Return the tile that humming chooses for so many rows, as JSON."""
    from humming.tune import get_heuristics_config

    return json.dumps(get_heuristics_config(config, rows, use_batch_invariant=way.is_fixed))


def compile_tile(config: Any, way: Way, chosen: str) -> tuple[torch.Tensor, float]:
    """Compile one kernel; return what a launch is told of it, and seconds."""
    from humming.kernel.humming import HummingKernel

    begun = time.monotonic()
    promise = json.dumps({"use_batch_invariant": True}) if way.is_fixed else None
    launch = HummingKernel.prepare_kernels(config.to_str(), promise, chosen)
    return launch, time.monotonic() - begun


def packed(config: Any, held: GroupInt4, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return a weight in humming's order.

    It takes codes as int32 [N, K / 8] and zero points as int32 [N / 8, groups], the first in the
    last bits, and scales as bfloat16 [N, groups].
    """
    import torch
    from humming.transform import transform_humming_tensors

    zeros = held.zeros.t()
    pairs = (zeros[:, 0::2] | (zeros[:, 1::2] << 4)).contiguous()
    tensors = {
        "weight": held.codes.view(torch.int32),
        "weight_scale": held.scales.to(torch.bfloat16),
        "zero_point": pairs.view(torch.int32).t().contiguous(),
    }
    if bias is not None:
        tensors["bias"] = bias
    return transform_humming_tensors(config, tensors)


def compile_small(way: Way, inputs: int) -> tuple[None, float]:
    """Compile what packs a weight, and what rounds rows of so many inputs, by running them."""
    import torch
    from humming.forward import may_quant_input

    from tailrace.kernels.linear.int4 import quantize_groups

    begun = time.monotonic()
    weight = torch.randn(256, inputs, device="cuda")
    config = layer_config(way, *weight.shape, has_bias=False)
    packed(config, quantize_groups(weight, GROUP), None)
    may_quant_input(config, torch.zeros(64, inputs, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    return None, time.monotonic() - begun


Jobs = dict[tuple, "Future[tuple[Any, float]]"]


def start_jobs(pool: ThreadPoolExecutor) -> Jobs:
    """Queue all that humming compiles: a kernel for each way, layer and tile."""
    jobs: Jobs = {}
    for inputs in sorted({inputs for _, inputs, _ in LAYERS.values()}):
        for way in WAYS:
            if not way.is_fixed:
                jobs["small", way.name, inputs] = pool.submit(compile_small, way, inputs)
    for way in WAYS:
        for outputs, inputs, has_bias in LAYERS.values():
            config = layer_config(way, outputs, inputs, has_bias=has_bias)
            for chosen in dict.fromkeys(tile(config, way, rows) for rows in way.rows):
                key = (way.name, outputs, inputs, chosen)
                jobs[key] = pool.submit(compile_tile, config, way, chosen)
    return jobs


def compile_all(limit_s: float) -> Jobs:
    """Compile humming's kernels and ours, at once; return humming's, done or not."""
    begun = time.monotonic()
    context = multiprocessing.get_context("spawn")
    pool = ThreadPoolExecutor(WORKERS)  # each waits for a compiler of its own
    with ProcessPoolExecutor(4, mp_context=context) as processes:
        ours = [
            processes.submit(compile_way, way, "cuda", has_bias)
            for way in ("int4", "fp8 rows")
            for has_bias in (False, True)
        ]
        jobs = start_jobs(pool)
        wait(jobs.values(), timeout=limit_s)
        pool.shutdown(wait=False, cancel_futures=True)
        for job in ours:
            job.result()
    done = [job for job in jobs.values() if job.done() and not job.cancelled()]
    seconds = [job.result()[1] for job in done if job.exception() is None]
    print(
        f"humming: {len(seconds)} of {len(jobs)} compiled in {time.monotonic() - begun:.0f} s by "
        f"{WORKERS} at a time, one in {sum(seconds) / max(1, len(seconds)):.1f} s on average and "
        f"{max(seconds, default=0):.1f} s at most",
        flush=True,
    )
    for key, job in jobs.items():
        reason = _reason(job)
        if reason:
            print(f"not compiled: {key[:3]}: {reason}", flush=True)
    return jobs


def _reason(job: Future[tuple[Any, float]]) -> str:
    """Return why a job gave nothing, or nothing."""
    if job.cancelled() or not job.done():
        return "not within --compile-s"
    error = job.exception()
    return "" if error is None else f"{type(error).__name__}: {str(error).strip()[-300:]}"


@dataclass
class Layer:
    """One layer of the model in one way of humming."""

    way: Way
    config: Any
    copies: list[dict[str, torch.Tensor]]
    locks: torch.Tensor
    """int32, zero between launches: where split sums meet."""

    @classmethod
    def of(cls, way: Way, held: GroupInt4, bias: torch.Tensor | None) -> Layer:
        import torch

        config = layer_config(way, *held.shape, has_bias=bias is not None)
        first = packed(config, held, bias)
        count = min(40, -int(-COLD_BYTES // _nbytes(first)))
        copies = [{name: part.clone() for name, part in first.items()} for _ in range(count)]
        return cls(way, config, copies, torch.zeros(2048, dtype=torch.int32, device="cuda"))

    def rounded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        from humming.forward import may_quant_input

        return may_quant_input(self.config, x)

    def run(
        self,
        launch: torch.Tensor,
        tensors: dict[str, torch.Tensor],
        rows: tuple[torch.Tensor, torch.Tensor | None],
        outputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from humming import ops

        return ops.launch_kernel(
            configs=launch, inputs=rows[0], input_scale=rows[1], outputs=outputs, locks=self.locks,
            **tensors,
        )  # fmt: skip

    def made(self, launch: torch.Tensor, *, is_alone: bool) -> Made:
        """Return the products over all copies; alone, of rows that are rounded once."""
        kept: list[tuple[torch.Tensor, tuple]] = []

        def rows_of(x: torch.Tensor) -> tuple:
            if not is_alone:
                return self.rounded(x)
            if not kept or kept[0][0] is not x:
                kept[:] = [(x, self.rounded(x))]
            return kept[0][1]

        def product(tensors: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda x: self.run(launch, tensors, rows_of(x))

        weight = self.copies[0]["weight"]
        products = [product(tensors) for tensors in self.copies]
        return Made(products, weight[:0], _nbytes(self.copies[0]), "bf16")


def _nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(part.nbytes for part in tensors.values())


# Comparison and times


@dataclass
class Bench:
    """What is measured, as it comes."""

    setting: Setting
    jobs: Jobs
    found: list[dict]
    wrong: list[str]

    def ours(self, name: str) -> None:
        """Time one layer in our ways."""
        weight, bias = _random_layer(name)
        for way, element_bytes in OURS.items():
            copies = min(40, -int(-COLD_BYTES // (element_bytes * weight.numel())))
            made = make(way, self.setting, weight, bias, copies)
            made.weight = weight[:0]
            for rows in (rows for rows in ROWS if takes(way, rows, self.setting)):
                self.time(name, way, made, rows)
            del made

    def theirs(self, name: str) -> None:
        """Compare and time one layer in humming's ways."""
        import torch

        from tailrace.kernels.linear.int4 import quantize_groups

        weight, bias = _random_layer(name)
        held = quantize_groups(weight, GROUP)
        x = torch.randn(max(ROWS), weight.shape[1], device="cuda").to(torch.bfloat16)
        truth = x.double() @ held.dequantize().double().t()
        if bias is not None:
            truth += bias.double()
        del weight
        for way in WAYS:
            try:
                self.way(name, way, Layer.of(way, held, bias), x, truth)
            except Exception as error:  # noqa: BLE001 - one way's failure is a result
                self.wrong.append(f"{name} {way.name}: {_line(error)}")

    def way(self, name: str, way: Way, layer: Layer, x: torch.Tensor, truth: torch.Tensor) -> None:
        """Compare and time one way of humming."""
        outputs, inputs = truth.shape[1], x.shape[1]
        alone: torch.Tensor | None = None
        for rows in way.rows:
            what = f"{name} {way.name} {rows} rows"
            job = self.jobs[way.name, outputs, inputs, tile(layer.config, way, rows)]
            reason = _reason(job)
            if reason:
                self.wrong.append(f"{what}: {reason}")
                continue
            launch = job.result()[0]
            try:
                y = poisoned(layer, launch, x[:rows])
                again = poisoned(layer, launch, x[:rows])
                error = float((y.double() - truth[:rows]).norm() / truth[:rows].norm())
                if not error < way.bound:
                    self.wrong.append(f"{what}: differs by {error:.4f}, more than {way.bound}")
                    continue
                alone = y[0].clone() if alone is None else alone
                entry = {
                    "error": error, "tile": json.loads(tile(layer.config, way, rows)),
                    "repeats": bool((y == again).all()), "as_alone": bool((y[0] == alone).all()),
                }  # fmt: skip
                self.time(name, way.name, layer.made(launch, is_alone=False), rows, more=entry)
                if way.rounds_rows:
                    made = layer.made(launch, is_alone=True)
                    self.time(name, f"{way.name} mm", made, rows)
            except Exception as error:  # noqa: BLE001 - one kernel's failure is a result
                self.wrong.append(f"{what}: {_line(error)}")

    def time(self, name: str, way: str, made: Made, rows: int, *, more: dict | None = None) -> None:
        outputs, inputs, _ = LAYERS[name]
        seconds = product_s(self.setting, made, rows, inputs)
        entry = {"layer": name, "way": way, "rows": rows, "us": 1e6 * seconds}
        entry["tflops"] = 2e-12 * rows * outputs * inputs / seconds
        entry["weight_bytes"] = made.weight_bytes
        self.found.append(entry | (more or {}))


def _random_layer(name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a weight, float32 [N, K], and its bias."""
    import torch

    outputs, inputs, has_bias = LAYERS[name]
    weight = torch.randn(outputs, inputs, device="cuda") * inputs**-0.5
    return weight, torch.randn(outputs, device="cuda").to(torch.bfloat16) if has_bias else None


def poisoned(layer: Layer, launch: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return one product, written over NaN."""
    import torch

    outputs = torch.full((x.shape[0], layer.config.shape_n), torch.nan, device="cuda")
    outputs = outputs.to(torch.bfloat16)
    layer.run(launch, layer.copies[0], layer.rounded(x), outputs)
    torch.cuda.synchronize()
    return outputs


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}"


# Printing


def print_rows(found: list[dict]) -> None:
    """Say where a row's bits depend on others, or a product's on chance."""
    for way in (way.name for way in WAYS):
        here = [entry for entry in found if entry["way"] == way]
        others = [(e["layer"], e["rows"]) for e in here if not e["as_alone"]]
        chance = [(e["layer"], e["rows"]) for e in here if not e["repeats"]]
        worst = max((entry["error"] for entry in here), default=0.0)
        print(
            f"{way}: differs from float64 by {worst:.4f} at most; a first row is not what it is "
            f"in the fewest rows at {others or 'none'}; two runs differ at {chance or 'none'}"
        )


def print_table(found: list[dict]) -> None:
    """Print microseconds by layer and rows, and the sum over the model in milliseconds."""
    times = {(e["layer"], e["way"], e["rows"]): e["us"] for e in found}
    print("\nmicroseconds of one product; at the foot, milliseconds of all layers of the model:")
    print(f"{'layer':<8}{'rows':>6}" + "".join(f"{way:>12}" for way in COLUMNS) + "   fastest")
    for name in LAYERS:
        for rows in ROWS:
            print_line(name, rows, {way: times.get((name, way, rows)) for way in COLUMNS}, 1)
    for rows in ROWS:
        sums: dict[str, float | None] = {}
        for way in COLUMNS:
            parts = [times.get((name, way, rows)) for name in LAYERS]
            whole = [part for part in parts if part is not None]
            sums[way] = sum(whole) * DEPTH / 1e3 if len(whole) == len(parts) else None
        print_line("all", rows, sums, 3)


def print_line(name: str, rows: int, cells: dict[str, float | None], digits: int) -> None:
    shown = "".join(f"{'-' if v is None else f'{v:.{digits}f}':>12}" for v in cells.values())
    whole = {way: v for way, v in cells.items() if v is not None and not way.endswith(" mm")}
    fastest = min(whole, key=lambda way: whole[way]) if whole else "-"
    print(f"{name:<8}{rows:>6}{shown}   {fastest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--compile-s", type=float, default=60.0)
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    begun = time.monotonic()
    try:
        import humming
    except ImportError as error:
        sys.exit(f"humming-kernels is not installed here: {error}")
    import torch

    torch.manual_seed(0)
    print(f"humming {humming.__version__}, {choose_compiler()}", flush=True)
    with torch.inference_mode():
        bench = Bench(setting_of("cuda"), compile_all(arguments.compile_s), [], [])
        # Ours first: a kernel that faults leaves a device on which nothing more runs.
        for part in (bench.ours, bench.theirs):
            for name in LAYERS:
                try:
                    part(name)
                except Exception as error:  # noqa: BLE001 - the table is printed all the same
                    bench.wrong.append(f"{name}, {part.__name__}: {_line(error)}")
                result = {"humming": humming.__version__, "torch": torch.__version__}
                result |= {"found": bench.found, "wrong": bench.wrong}
                (arguments.out / "gpu_humming.json").write_text(json.dumps(result))
                print(f"{name}, {part.__name__}: measured", flush=True)
    print(f"{len(bench.wrong)} missing:", *bench.wrong, sep="\n  ")
    print_rows(bench.found)
    where = torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, {time.monotonic() - begun:.0f} s in all")
    print_table(bench.found)
    sys.stdout.flush()
    os._exit(0)  # a compiler that is late would be waited for otherwise


if __name__ == "__main__":
    main()
