"""What gpu_soak.py launches: families of kernels over inputs of random sizes, as a server has them.

    decode, decode-float8    Hopper's attention of decodes over 16 bits, and over float8
    prefill                  Hopper's attention of prompts: chunks, tiles without rows
    half, float8, int4       Hopper's products of few rows by weights of that kind
    mixed                    steps: attention of decodes, mostly beside that of prompts on a stream
                             of higher priority, then FP8 products and the head
    beside, in-a-row         such steps' attention alone, on two streams and on one
    triton                   the same as beside by Triton's kernels
    gemm, sdpa               nothing of ours: cuBLAS and PyTorch's attention, to compare with

A family is a function of a device; it makes what its launches share, weights and scratch, and
returns a function that makes a job of a random number generator. Shapes are those that serve, or
with `any_shape` those that a plan may choose. On the CPU Gluon's kernels run in our interpreter,
the mixed step's in Triton's, at tiny sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from benchmarks.gpu_attention import DIM, HEADS, KV_HEADS, SCALE, Case
from benchmarks.gpu_float8 import rows_amid_nan
from benchmarks.gpu_half import amid_nan, workspace_of
from benchmarks.hopper_layers import LAYERS
from torch.nn.functional import scaled_dot_product_attention

from tailrace.kernels.linear import hopper_float8_ways, hopper_half_ways, hopper_int4_ways
from tailrace.kernels.linear.float8 import quantize_blocks, quantize_channels
from tailrace.kernels.linear.int4 import quantize_groups
from tailrace.kernels.linear.packed_int4 import PackedInt4
from tailrace.kernels.linear.triton_float8_few import few_splits
from tailrace.kernels.linear.workspace import Workspace
from tailrace.kernels.paged_attention import decode_kernels, prefill_kernels
from tailrace.kernels.paged_attention.device_batch import DeviceBatch, cut_tiles
from tailrace.kernels.paged_attention.triton_decode import DecodeScratch
from tailrace.kernels.triton_kernels import TritonKernels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from torch import Tensor

    from tailrace.kernels.linear.ways import Ways

    Maker = Callable[[Random], "Job"]
    Chunks = list[tuple[int, int]]

UNIT = 8
"""Tokens of a unit of KV."""
SPARE_TILES = 12
"""Of a captured step, without rows, at most."""


@dataclass(frozen=True)
class Job:
    """Inputs, made once, and what is launched over them."""

    words: str
    results: tuple[tuple[int, ...], ...]
    """Their shapes; all are of the activations' dtype."""
    launch: Callable[[Sequence[Tensor]], object]
    """Queues the kernels, which write the results."""
    dtype: torch.dtype = torch.bfloat16
    arrivals: Tensor | None = None
    """Counted there, and taken back by who comes last."""
    may_depend: bool = True
    """Whether a server launches it dependently, too."""


@dataclass(frozen=True)
class Sizes:
    """Bounds of what is drawn."""

    rows: int = 128
    """Of decodes and of products."""
    keys: int = 5000
    chunk: int = 1024
    """Rows of a step's prompts."""
    rooms: tuple[int, ...] = (8192, 131_072)
    """Tokens that scratch is made for."""
    layers: tuple[tuple[int, int], ...] = tuple(LAYERS.values())
    """Outputs and inputs."""
    head: tuple[int, int] = (152_064, 3584)
    inner: int = 18_944

    @classmethod
    def of(cls, device: torch.device) -> Sizes:
        """A GPU's, or those of an interpreter."""
        if device.type == "cuda":
            return cls()
        return cls(3, 80, 20, (512, 1024), ((128, 256), (144, 128)), (192, 128), 128)


class Family(Protocol):
    def __call__(self, device: torch.device, *, any_shape: bool) -> Maker: ...


def dtype_on(device: torch.device) -> torch.dtype:
    """Of activations; Triton's interpreter has no bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def lengths(rng: Random, sizes: Sizes, rows: int) -> list[int]:
    """Draw the lengths of decodes: short, of a chat or any; rows at the end are padded."""
    used = rows if rng.random() < 0.5 else rng.randint(1, rows)
    bounds = [rng.choice((64, 600, sizes.keys)) for _ in range(used)]
    return [rng.randint(1, min(bound, sizes.keys)) for bound in bounds] + [0] * (rows - used)


def prompts(rng: Random, sizes: Sizes) -> Chunks:
    """Draw the chunks of a step, (rows, keys), at most as many rows as its budget."""
    left = rng.randint(1, sizes.chunk)
    found = []
    while left:
        rows = min(left, rng.randint(1, rng.choice((8, 200, sizes.chunk))))
        prefix = rng.choice((0, rng.randint(0, sizes.keys - rows)))
        found.append((rows, rows + prefix))
        left -= rows
    return found


def made_case(chunks: Chunks, device: torch.device, *, float8: bool = False) -> Case:
    """Return chunks over a cache as it is served, NaN where no token is."""
    case = Case(chunks, UNIT, False, float8, device.type)
    case.poison()
    return case


def padded_tiles(rng: Random, case: Case, block_m: int, first: int) -> Tensor:
    """Return a captured step's tiles of the chunks from `first` on.

    The last sequence has no rows: tiles without work are its.
    """
    rows, lens = case.starts.diff().cpu().numpy(), case.kv_lens.cpu().numpy()
    cut = cut_tiles(rows[first:], lens[first:], first_sequence=first, block_m=block_m)
    spare = rng.randint(0, SPARE_TILES) if len(cut) else 0
    whole = np.zeros((len(cut) + spare, 2), dtype=np.int32)
    whole[:, 0] = len(rows) - 1
    whole[: len(cut)] = cut
    return torch.from_numpy(whole).to(case.device)


def cut_words(lens: Sequence[int]) -> str:
    """Say how many rows there are, and how long."""
    used = [length for length in lens if length]
    return f"{len(lens)} rows ({len(lens) - len(used)} padded), {min(used)} to {max(used)} keys"


def decodes(device: torch.device, *, any_shape: bool, float8: bool = False) -> Maker:
    sizes = Sizes.of(device)
    shapes = decode_kernels.hopper_shapes(is_float8=float8)
    shapes = shapes if any_shape else shapes[:1]
    scratches = {
        room: DecodeScratch.allocate(sizes.rows, HEADS, DIM, room, shapes[0].split, device.type)
        for room in sizes.rooms
    }

    def make(rng: Random) -> Job:
        lens = lengths(rng, sizes, rng.randint(1, sizes.rows))
        case = made_case([(1, length) for length in lens], device, float8=float8)
        room, shape = rng.choice(sizes.rooms), rng.choice(shapes)

        def launch(out: Sequence[Tensor]) -> None:
            decode_kernels.decode(
                case.q, case.keys.transpose(2, 3), case.values, out[0], kv_lens=case.kv_lens,
                block_tables=case.tables, scale=SCALE, shape=shape, scratch=scratches[room],
                kv_scales=case.scales,
            )  # fmt: skip

        words = f"{cut_words(lens)}, room for {room}, {shape.words}"
        return Job(words, (tuple(case.q.shape),), launch, case.dtype, scratches[room].arrivals)

    return make


def decodes_float8(device: torch.device, *, any_shape: bool) -> Maker:
    return decodes(device, any_shape=any_shape, float8=True)


def prefills(device: torch.device, *, any_shape: bool) -> Maker:
    sizes = Sizes.of(device)
    shapes = prefill_kernels.hopper_shapes(DIM)
    shapes = shapes if any_shape else shapes[:1]

    def make(rng: Random) -> Job:
        chunks = prompts(rng, sizes)
        case = made_case([*chunks, (0, 0)], device)
        shape = rng.choice(shapes)
        tiles = padded_tiles(rng, case, shape.block_m, 0)

        def launch(out: Sequence[Tensor]) -> None:
            prefill_kernels.prefill(
                case.q, case.keys.transpose(2, 3), case.values, out[0], tiles=tiles,
                query_starts=case.starts, kv_lens=case.kv_lens, block_tables=case.tables,
                scale=SCALE, shape=shape,
            )  # fmt: skip

        words = f"chunks {chunks}, {len(tiles)} tiles, {shape.words}"
        return Job(words, (tuple(case.q.shape),), launch, case.dtype)

    return make


def ours(ways: Ways[Any], *, any_shape: bool) -> list[tuple[int, int, str, Any]]:
    """Return rows, from and to, of which Hopper's own kernels serve a layer, and the shapes."""
    found, least = [], 1
    for bound in ways.classes:
        for name in ways.options(bound) if any_shape else [ways.serving(bound)]:
            ways.serve(bound, name)
            shape = ways.of(bound)
            if "hopper" in type(shape).__module__:
                found.append((least, bound, name, shape))
        least = bound + 1
    return found


def products(
    weights: Sequence[Any],
    ways: Callable[[Any], Ways[Any]],
    rows_of: Callable[[int, Any], Any],
    multiply: Callable[..., object],
    device: torch.device,
    *,
    any_shape: bool,
    workspace: Workspace,
) -> Maker:
    """Return a maker of products: `multiply(rows, weight, shape, out)` by what `ways` has.

    Raises:
        SystemExit: None of Hopper's own kernels serves any of the weights.
    """
    sizes = Sizes.of(device)
    offers = [
        (weight, found) for weight in weights if (found := ours(ways(weight), any_shape=any_shape))
    ]
    if not offers:
        raise SystemExit("no kernel of Hopper's own serves these weights: try --any-shape")

    def make(rng: Random) -> Job:
        weight, found = rng.choice(offers)
        least, bound, name, shape = rng.choice(found)
        rows = rng.randint(least, max(least, min(bound, sizes.rows)))
        x = rows_of(rows, weight)
        outputs, inputs = size_of(weight)
        return Job(
            f"{rows} rows by {outputs} x {inputs}, {name}",
            ((rows, outputs),),
            lambda out: multiply(x, weight, shape, out[0]),
            workspace.dtype,
            workspace.scratch.arrivals,
        )

    return make


def size_of(weight: Any) -> tuple[int, int]:
    """Return the outputs and inputs of a weight."""
    return (weight.outputs, weight.inputs) if isinstance(weight, PackedInt4) else weight.shape


def matrix(outputs: int, inputs: int, device: torch.device) -> Tensor:
    return torch.randn(outputs, inputs, device=device) * inputs**-0.5


def half(device: torch.device, *, any_shape: bool) -> Maker:
    sizes, dtype = Sizes.of(device), torch.bfloat16
    layers = (*sizes.layers, sizes.head)
    workspace = workspace_of(device, *layers)
    return products(
        [matrix(*layer, device).to(dtype) for layer in layers],
        lambda weight: hopper_half_ways.ways(*weight.shape, device),
        lambda rows, weight: amid_nan(matrix(rows, weight.shape[1], device).to(dtype), 140),
        lambda x, weight, shape, out: hopper_half_ways.multiply(
            x, weight, None, shape=shape, scratch=None, workspace=workspace, out_TO=out
        ),
        device,
        any_shape=any_shape,
        workspace=workspace,
    )


def float8(device: torch.device, *, any_shape: bool) -> Maker:
    sizes, dtype = Sizes.of(device), torch.bfloat16
    workspace = Workspace(device, dtype)
    weights = []
    for layer in sizes.layers:
        weights += [
            quantize(matrix(*layer, device)) for quantize in (quantize_channels, quantize_blocks)
        ]
        splits, _ = few_splits(*layer)
        room = hopper_float8_ways.room(*layer, device)
        workspace.reserve(outputs=layer[0], splits=splits, rows=128, **room)
    return products(
        weights,
        lambda weight: hopper_float8_ways.ways(*weight.shape, device),
        lambda rows, weight: rows_amid_nan(
            rows, weight.shape[1], 128 if weight.scheme == "block128" else 0, device
        ),
        lambda x, weight, shape, out: hopper_float8_ways.multiply(
            x, weight, None, dtype, shape=shape, scratch=workspace.scratch, out_TO=out
        ),
        device,
        any_shape=any_shape,
        workspace=workspace,
    )


def int4(device: torch.device, *, any_shape: bool) -> Maker:
    sizes, dtype = Sizes.of(device), torch.bfloat16
    workspace = Workspace(device, dtype)
    weights = []
    for layer in sizes.layers:
        weight = PackedInt4.of(quantize_groups(matrix(*layer, device), 128), device)
        weights.append(weight)
        room = hopper_int4_ways.room(weight, device)
        workspace.reserve(outputs=layer[0], splits=8, rows=128, **room)
    return products(
        weights,
        lambda weight: hopper_int4_ways.ways(weight, device),
        lambda rows, weight: amid_nan(matrix(rows, weight.inputs, device).to(dtype), 140),
        lambda x, weight, shape, out: hopper_int4_ways.multiply(
            x, weight, None, shape=shape, scratch=workspace.scratch, out_TO=out
        ),
        device,
        any_shape=any_shape,
        workspace=workspace,
    )


def step_kernels(device: torch.device, sizes: Sizes, *, by: str = "hopper") -> TritonKernels:
    """Return kernels as a server has them; `by` computes attention."""
    dtype = dtype_on(device)
    kernels = TritonKernels(
        device,
        str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        rounds_all=True,
        hopper_decodes=by == "hopper",
    )
    asked = "auto" if by == "hopper" else by
    kernels.serve_prompts_by(asked, head_dim=DIM, kv_dtype=dtype, unit=UNIT)
    kernels.reserve(
        rows=sizes.rows, sequences=2 * sizes.rows, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, max_kv_len=sizes.rooms[0],
    )  # fmt: skip
    return kernels


@dataclass(frozen=True)
class DrawnStep:
    """A step of decodes and, mostly, prompts."""

    case: Case
    batch: DeviceBatch
    decodes: list[int]
    """Their lengths."""
    chunks: Chunks

    @classmethod
    def of(cls, rng: Random, sizes: Sizes, kernels: TritonKernels, share: float) -> DrawnStep:
        """Draw one; so large a share of them has prompts."""
        chunks = prompts(rng, sizes) if rng.random() < share else []
        lens = lengths(rng, sizes, rng.randint(1, sizes.rows // 2 if chunks else sizes.rows))
        last = [(0, 0)] if chunks else []
        case = made_case([*((1, length) for length in lens), *chunks, *last], kernels.device)
        return cls(case, step_of(rng, case, len(lens), kernels), lens, chunks)

    @property
    def words(self) -> str:
        tiles = len(self.batch.tiles)
        return f"{cut_words(self.decodes)}, chunks {self.chunks}, {tiles} tiles"

    def attended(self, kernels: TritonKernels) -> Tensor:
        """Return its attention [rows, HEADS * DIM]."""
        case = self.case
        keys = case.keys.transpose(2, 3)
        return kernels.paged_attention(case.q, keys, case.values, self.batch, SCALE)


def step_of(rng: Random, case: Case, count: int, kernels: TritonKernels) -> DeviceBatch:
    """Return a step of so many decodes and the case's other chunks."""
    longest = int(case.kv_lens.max())
    shape = kernels.prefill_shape(DIM, longest)
    nothing = torch.zeros(len(case.q), dtype=torch.int64, device=case.device)
    return DeviceBatch(
        query_starts=case.starts, kv_lens=case.kv_lens, block_tables=case.tables,
        positions=nothing, slots=nothing, max_query_len=int(case.starts.diff().max()),
        max_kv_len=longest, num_decodes=count,
        tiles=padded_tiles(rng, case, shape.block_m, count), shape=shape,
    )  # fmt: skip


def mixed(device: torch.device, *, any_shape: bool) -> Maker:  # noqa: ARG001 - the server's own
    """Whole steps, but for what stands before attention."""
    sizes, dtype = Sizes.of(device), dtype_on(device)
    heads, width = HEADS * DIM, sizes.head[1]
    kernels = step_kernels(device, sizes)
    layers = ((width, heads), (2 * sizes.inner, width), (width, sizes.inner))
    o, gate_up, down = (
        kernels.pack_linear(quantize_channels(matrix(*layer, device)), None, kernels.name_of_dtype)
        for layer in layers
    )
    head = kernels.pack_linear(matrix(*sizes.head, device).to(dtype), None, kernels.name_of_dtype)

    def make(rng: Random) -> Job:
        step = DrawnStep.of(rng, sizes, kernels, 0.6)
        rows, drawn = len(step.case.q), min(len(step.decodes) + len(step.chunks), sizes.rows)

        def launch(out: Sequence[Tensor]) -> None:
            attention = step.attended(kernels)
            inner = kernels.multiply(gate_up, kernels.multiply(o, attention))
            x = kernels.silu_mul_into(down, inner)
            logits = kernels.multiply(head, x[:drawn])
            for into, found in zip(out, (attention, x, logits), strict=True):
                into.copy_(found)

        shapes = ((rows, heads), (rows, width), (drawn, sizes.head[0]))
        words = f"{step.words}, {drawn} logits"
        return Job(words, shapes, launch, dtype, may_depend=not step.chunks)

    return make


def attention(
    device: torch.device,
    *,
    any_shape: bool,  # noqa: ARG001 - the server's own
    by: str = "hopper",
    two_streams: bool = True,
) -> Maker:
    """Steps' attention."""
    sizes, dtype = Sizes.of(device), dtype_on(device)
    kernels = step_kernels(device, sizes, by=by)
    if not two_streams:
        kernels._beside = None  # noqa: SLF001 - no server asks for it

    def make(rng: Random) -> Job:
        step = DrawnStep.of(rng, sizes, kernels, 0.8)
        shape = (len(step.case.q), HEADS * DIM)
        return Job(
            step.words, (shape,), lambda out: out[0].copy_(step.attended(kernels)), dtype,
            may_depend=not step.chunks,
        )  # fmt: skip

    return make


def gemms(device: torch.device, *, any_shape: bool) -> Maker:  # noqa: ARG001 - there are no shapes
    """Products by cuBLAS."""
    sizes = Sizes.of(device)
    weights = [matrix(*layer, device).bfloat16() for layer in sizes.layers]

    def make(rng: Random) -> Job:
        weight, rows = rng.choice(weights), rng.randint(1, 4 * sizes.chunk)
        x = matrix(rows, weight.shape[1], device).bfloat16()
        words = f"{rows} rows by {tuple(weight.shape)}"
        return Job(
            words, ((rows, len(weight)),), lambda out: torch.mm(x, weight.T, out=out[0]),
            may_depend=False,
        )  # fmt: skip

    return make


def sdpa(device: torch.device, *, any_shape: bool) -> Maker:  # noqa: ARG001 - there are no shapes
    """Attention by PyTorch, causal."""
    sizes = Sizes.of(device)

    def make(rng: Random) -> Job:
        rows = rng.randint(1, 2 * sizes.chunk)
        q, k, v = (
            torch.randn(1, HEADS, rows, DIM, device=device, dtype=torch.bfloat16) for _ in range(3)
        )

        def launch(out: Sequence[Tensor]) -> None:
            out[0].copy_(scaled_dot_product_attention(q, k, v, is_causal=True))

        return Job(f"{rows} rows", (tuple(q.shape),), launch, may_depend=False)

    return make


FAMILIES: dict[str, Family] = {
    "decode": decodes,
    "half": half,
    "mixed": mixed,
    "float8": float8,
    "prefill": prefills,
    "decode-float8": decodes_float8,
    "int4": int4,
    "beside": attention,
    "in-a-row": partial(attention, two_streams=False),
    "triton": partial(attention, by="triton"),
    "gemm": gemms,
    "sdpa": sdpa,
}
"""What is suspected most comes first."""


def interpret(put: Callable[[object, str, object], None] = setattr) -> None:
    """Let this process's kernels run on the CPU: Gluon's in our interpreter, the rest in Triton's.

    That one is there where Triton was imported under TRITON_INTERPRET=1.
    """
    from tailrace.kernels.linear import (
        triton_hopper_float8,
        triton_hopper_half,
        triton_hopper_int4,
        triton_hopper_int4_bands,
        triton_hopper_int4_few,
    )
    from tailrace.kernels.paged_attention import triton_hopper_decode, triton_hopper_prefill
    from tests.kernels.gluon_interpreter import Interpreter
    from tests.support.interpreter import exact_float8

    exact_float8(SimpleNamespace(setattr=put))
    for module in (
        triton_hopper_float8, triton_hopper_half, triton_hopper_int4, triton_hopper_int4_bands,
        triton_hopper_int4_few, triton_hopper_decode, triton_hopper_prefill,
    ):  # fmt: skip
        name = next(name for name in vars(module) if name.endswith("_kernel"))
        # Prefill's producers may load what others clear: see tests/kernels.
        kernel = Interpreter(getattr(module, name), undefined_reads={"_clear"})
        put(module, name, kernel)
