"""Hopper's prefill kernel: what it serves, what fits, and on a GPU that it gives the formula.

What the kernel computes is seen on the CPU in our interpreter of Gluon, and on a GPU, here and,
with every candidate under a timeout, by benchmarks/gpu_prefill.py; test_compile_ahead compiles it.
"""

from __future__ import annotations

import pytest
import torch

from tailrace.errors import EngineError
from tailrace.kernels.paged_attention.device_batch import plan
from tailrace.kernels.paged_attention.reference import paged_attention
from tests.kernels.paged import NAN, Paged, make_batch

hopper = pytest.importorskip(
    "tailrace.kernels.paged_attention.triton_hopper_prefill",
    reason="Triton with Gluon is not installed",
)

gluon_interpreter = pytest.importorskip(
    "tests.kernels.gluon_interpreter", reason="Triton with Gluon is not installed"
)

SHAPES = [(dim, shape) for dim, shapes in hopper.CANDIDATES.items() for shape in shapes]


def cache_of(units=3, tokens=8, heads=2, dim=128, dtype=torch.bfloat16):
    """Return keys and values as `allocate_kv` lays them out."""
    k, v = (torch.zeros(units, tokens, heads, dim, dtype=dtype) for _ in range(2))
    return k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)


@pytest.mark.parametrize(("head_dim", "shape"), SHAPES, ids=str)
def test_rings_and_registers_fit_a_multiprocessor(head_dim, shape):
    rings = (shape.stages + shape.value_stages) * shape.block_n * head_dim * 2
    # Queries, and results on their way to the order of stores, a half at a time; then barriers.
    assert rings + hopper.BLOCK_M * head_dim * 3 + 1024 <= 227 << 10
    assert min(shape.stages, shape.value_stages) >= 2
    assert shape.registers % 8 == 0
    assert 3 * hopper.REGISTERS - 2 * shape.registers >= 24


@pytest.mark.parametrize("unit", [8, 16, 32, 128, 256])
def test_a_box_is_whole_atoms_and_divides_units_and_tiles(unit):
    for _, shape in SHAPES:
        box = hopper.box_tokens(unit, shape)
        assert box % 8 == 0
        assert unit % box == 0
        assert shape.block_n % box == 0


def test_the_pools_layout_is_served():
    for dim, dtype, tokens in ((64, torch.float16, 8), (128, torch.bfloat16, 32)):
        q = torch.zeros(5, 4, dim, dtype=dtype)
        assert hopper.serves(q, *cache_of(tokens=tokens, dim=dim, dtype=dtype)) is None


@pytest.mark.parametrize(
    ("q_dtype", "given", "reason"),
    [
        (torch.bfloat16, {"dim": 256}, "256 dimensions"),
        (torch.float32, {"dtype": torch.float32}, "queries in torch.float32"),
        (torch.bfloat16, {"dtype": torch.float8_e4m3fn}, "a cache in torch.float8_e4m3fn"),
        (torch.bfloat16, {"tokens": 4}, "units of 4 tokens"),
        (torch.bfloat16, {"tokens": 24}, "units of 24 tokens"),
    ],
    ids=["dimensions", "queries", "cache", "small units", "odd units"],
)
def test_what_is_not_served_is_refused_by_name(q_dtype, given, reason):
    k, v = cache_of(**given)
    q = torch.zeros(5, 4, k.shape[2], dtype=q_dtype)
    assert reason in hopper.serves(q, k, v)
    index = torch.zeros(1, 2, dtype=torch.int32)
    known = {"tiles": index, "query_starts": index[0], "kv_lens": index[0], "block_tables": index}
    with pytest.raises(EngineError, match=reason):
        hopper.hopper_prefill(q, k, v, torch.empty_like(q), **known, scale=1.0)


def test_dimensions_that_lie_apart_are_refused():
    k, v = cache_of()
    q = torch.zeros(5, 4, 128, dtype=torch.bfloat16)
    assert "lie apart" in hopper.serves(q, k.contiguous(), v)
    shifted = torch.zeros(v.numel() + 1, dtype=v.dtype)[1:].view(3, 8, 2, 128).permute(0, 2, 1, 3)
    assert "16 bytes" in hopper.serves(q, k, shifted)


def attended(chunks, head_dim, shape, dtype, unit, heads=(4, 2), device="cpu"):
    """Return attention of chunks of [(rows, keys), ...] by the kernel, and in float64."""
    lens = [keys for _, keys in chunks]
    paged = Paged(
        kv_lens=lens, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=unit
    )  # fmt: skip
    batch = make_batch(chunks, unit, paged.tables)
    rows = [q[keys - n :] for q, (n, keys) in zip(paged.queries, chunks, strict=True)]
    q = torch.cat(rows).to(dtype)
    truth = paged_attention(
        q.double(), paged.k_cache.to(dtype).double(), paged.v_cache.to(dtype).double(), batch,
        paged.scale,
    )  # fmt: skip
    planned = plan(batch, shape)
    out = torch.full((len(q) + 2, *q.shape[1:]), NAN, dtype=dtype, device=device)
    hopper.hopper_prefill(
        q.to(device),
        paged.k_cache.to(device, dtype).permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        paged.v_cache.to(device, dtype).permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
        out[1:-1],
        tiles=planned.tiles.to(device),
        query_starts=batch.query_starts.to(device),
        kv_lens=batch.kv_lens.to(device),
        block_tables=batch.block_tables.to(device),
        scale=paged.scale,
        shape=shape,
    )
    assert bool(out[[0, -1]].isnan().all()), "rows beyond the result are written"
    return out[1:-1].cpu(), truth.view_as(q)


KERNEL = hopper.hopper_prefill_kernel


def interpret(monkeypatch, seed):
    """Run the kernel on the CPU; `_clear` may load what the other side is clearing too."""
    kernel = gluon_interpreter.Interpreter(KERNEL, seed=seed, undefined_reads={"_clear"})
    monkeypatch.setattr(hopper, "hopper_prefill_kernel", kernel)


INTERPRETED = [
    (dim, shape, (torch.bfloat16, torch.float16)[place % 2], unit)
    for place, (dim, shape) in enumerate(SHAPES)
    for unit in ((8, 256), (16,), (256,), (8,), (16,))[place % 5]
]


@pytest.mark.parametrize(("head_dim", "shape", "dtype", "unit"), INTERPRETED, ids=str)
def test_in_the_interpreter_it_equals_the_reference(monkeypatch, head_dim, shape, dtype, unit):
    """The first keys, the last of a tile, rings that go round, more rows than a tile has."""
    interpret(monkeypatch, seed=unit)
    chunks = [(5, 5), (2, 128), (3, 900), (130, 260)]
    out, truth = attended(chunks, head_dim, shape, dtype, unit, heads=(2, 1))
    error = float((out.double() - truth).norm() / truth.norm())
    assert error < (0.003 if dtype == torch.bfloat16 else 0.0004)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_row_has_the_same_bits_in_whatever_order_warps_and_copies_come(monkeypatch, head_dim):
    seen = []
    for seed in range(6):
        torch.manual_seed(3)
        interpret(monkeypatch, seed)
        chunks = [(70, 333), (2, 9)]
        shape = hopper.USUAL[head_dim]
        out, _ = attended(chunks, head_dim, shape, torch.bfloat16, 16, heads=(1, 1))
        seen.append(out)
    assert all(torch.equal(seen[0], out) for out in seen[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("unit", [8, 16, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("head_dim", "shape"), SHAPES, ids=str)
def test_it_equals_the_reference(head_dim, shape, dtype, unit):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Gluon's kernel needs a Hopper GPU")
    chunks = [(5, 5), (64, 64), (3, 300), (129, 400), (257, 257), (300, 1333)]
    out, truth = attended(chunks, head_dim, shape, dtype, unit, heads=(14, 2), device="cuda")
    error = (out.double() - truth).norm() / truth.norm()
    assert float(error) < 0.01
