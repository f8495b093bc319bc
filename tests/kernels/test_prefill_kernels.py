"""Which kernel computes prompts' attention, why Hopper's does not, and what either is called by."""

from __future__ import annotations

import re

import pytest
import torch

from tailrace.errors import ConfigError
from tests.kernels.compare import assert_close
from tests.kernels.paged import Paged

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.kernels.attention_shapes import PREFILL, key_words
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.paged_attention import prefill_kernels, triton_hopper_prefill
from tailrace.kernels.paged_attention.contiguous import attend
from tailrace.kernels.paged_attention.prefill_kernels import (
    HEAD_DIMS,
    describe,
    hopper_shapes,
    is_hopper,
    name_of,
    prefill,
    why_not_hopper,
)
from tailrace.kernels.paged_attention.triton_hopper_prefill import (
    CANDIDATES,
    USUAL,
    hopper_prefill_kernel,
    serves,
)
from tailrace.kernels.paged_attention.triton_prefill import Shape
from tailrace.kernels.torch_kernels import TorchKernels
from tailrace.kernels.triton_kernels import TritonKernels
from tests.kernels.hopper_stand_in import let_hopper_serve
from tests.kernels.on_triton import OnTriton
from tests.kernels.test_contiguous import PADDINGS, formula, random_case

SERVED = {
    "device": torch.device("cuda"), "capability": (9, 0), "dtype": torch.bfloat16,
    "kv_dtype": torch.bfloat16, "head_dim": 128, "unit": 8,
}  # fmt: skip
TRITON = Shape(64, 64, 4, 3)
# (rows, keys) of sequences: decodes, whole prompts, chunks over prefixes, a prompt's last row.
STEP = [(1, 70), (1, 9), (129, 129), (5, 300), (256, 300), (128, 128), (1, 41)]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": torch.device("cpu")}, "not in Triton's interpreter"),
        ({"capability": (8, 9)}, "capability is 8.9, .* those of Hopper"),
        ({"capability": (10, 0)}, "capability is 10.0"),
        ({"head_dim": 256}, "256 dimensions a head, .* 64 and 128"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "activations are float32"),
        ({"kv_dtype": torch.float8_e5m2}, "KV is kept in float8_e5m2"),
        ({"kv_dtype": torch.float16}, "KV is kept in float16, .* reads bfloat16 and float8"),
        ({"unit": 4}, "units of KV hold 4 tokens"),
        ({"unit": 24}, "units of KV hold 24 tokens"),
    ],
    ids=["cpu", "ada", "blackwell", "dims", "float32", "e5m2", "halves", "small", "odd"],
)
def test_hoppers_kernel_is_refused_with_the_missing_piece(given, reason):
    found = why_not_hopper(**SERVED | given)
    assert re.search(reason, found or "")


@pytest.mark.parametrize("unit", [8, 16, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_that_is_not_refused_has_tensors_that_the_kernel_takes(dtype, head_dim, unit):
    given = {"dtype": dtype, "kv_dtype": dtype, "head_dim": head_dim, "unit": unit}
    assert why_not_hopper(**SERVED | given) is None
    k, v = (torch.zeros(3, unit, 2, head_dim, dtype=dtype) for _ in range(2))
    q = torch.zeros(5, 4, head_dim, dtype=dtype)
    assert serves(q, k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)) is None


def test_another_release_of_triton_is_named(monkeypatch):
    monkeypatch.setattr(prefill_kernels.triton, "__version__", "3.7.0")
    assert "Triton 3.7.0 is installed" in why_not_hopper(**SERVED)


def test_what_is_asked_for_and_cannot_serve_is_an_error_that_says_why():
    kernels = TritonKernels(torch.device("cpu"), "float16")
    known = {"head_dim": 64, "kv_dtype": torch.float16, "unit": 8}
    with pytest.raises(ConfigError, match=r"--prefill-attention hopper: .*interpreter; use auto"):
        kernels.serve_prompts_by("hopper", **known)
    for asked in ("auto", "triton"):
        kernels.serve_prompts_by(asked, **known)
        assert not is_hopper(kernels.prefill_shape(64, 5000))


@pytest.mark.parametrize("asked", ["auto", "triton", "hopper"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_dtype", [torch.float16, FLOAT8], ids=["half", "float8"])
def test_without_a_plan_hoppers_kernel_serves_where_it_was_faster(
    monkeypatch, asked, head_dim, kv_dtype
):
    let_hopper_serve(monkeypatch)
    kernels = TritonKernels(torch.device("cpu"), "float16")
    assert not is_hopper(kernels.prefill_shape(head_dim, 5000))  # nobody has said what is served
    kernels.serve_prompts_by(asked, head_dim=head_dim, kv_dtype=kv_dtype, unit=8)
    by_default = asked == "auto" and head_dim == 128
    for longest in (1, 1500, 1 << 20):
        shape = kernels.prefill_shape(head_dim, longest)
        assert is_hopper(shape) == (asked == "hopper" or by_default)
    widens = (asked == "hopper" or by_default) and kv_dtype == FLOAT8
    assert bool(kernels.wide_units(head_dim, sequences=3, longest=200)) == widens
    assert not is_hopper(kernels.prefill_shape(head_dim, 1500, has_room=False))


def test_every_shape_has_a_name_of_its_own_and_the_usual_one_is_first():
    assert set(HEAD_DIMS) == set(USUAL) == set(CANDIDATES)
    tables = [shape for rows in PREFILL.values() for row in rows.values() for _, shape in row]
    for head_dim in HEAD_DIMS:
        shapes = [*dict.fromkeys(tables), *hopper_shapes(head_dim)]
        assert hopper_shapes(head_dim)[0] == USUAL[head_dim]
        assert set(CANDIDATES[head_dim]) <= set(shapes)
        assert len({name_of(shape) for shape in shapes}) == len(shapes)
    assert hopper_shapes(256) == hopper_shapes(32) == ()


def test_what_serves_is_told_by_class_as_far_as_there_are_sequences():
    hopper = USUAL[128]
    assert describe(lambda _: TRITON, 8192) == f"Triton {TRITON.words}"
    assert describe(lambda _: hopper, 8192) == name_of(hopper)
    told = describe(lambda keys: hopper if keys >= 1024 else TRITON, 2000)
    assert told == (
        f"{key_words(1024)}: Triton {TRITON.words}; {key_words(3072)}: {name_of(hopper)}; "
        f"captured steps: {name_of(hopper)}"
    )
    assert describe(lambda keys: hopper if keys >= 1024 else TRITON, 1000) == (
        f"Triton {TRITON.words}"
    )


def paged_step(head_dim=64):
    lens = [keys for _, keys in STEP]
    return Paged(kv_lens=lens, num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=8)


def run(kernels, paged):
    """Attend for `STEP`, over a token-major cache; NaN in whatever is not written."""

    class OnDevice:
        def paged_attention(self, q, k, v, batch, scale):
            k = k.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
            v = v.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
            return kernels.paged_attention(q, k, v, batch, scale)

    chunks = [(index, rows, keys) for index, (rows, keys) in enumerate(STEP)]
    return torch.cat(paged.attend(OnDevice(), chunks))


def test_a_step_of_decodes_and_prompts_is_the_same_by_either_kernel(interpreter, monkeypatch):
    stand_in = let_hopper_serve(monkeypatch)
    paged = paged_step()
    expected = torch.cat(paged.attend(TorchKernels(), [(i, *part) for i, part in enumerate(STEP)]))
    for asked in ("triton", "hopper"):
        kernels = TritonKernels(torch.device("cpu"), "float32")
        kernels.serve_prompts_by(asked, head_dim=64, kv_dtype=torch.float32, unit=8)
        assert_close(asked, run(kernels, paged), expected, rtol=2e-5, atol=2e-5)
    (call,) = stand_in.calls
    assert call.shape == USUAL[64]
    # Two decodes; then 2 tiles of 129 rows, and a prompt's last row is one as well.
    assert sorted(call.tiles) == [[2, 0], [2, 128], [3, 0], [4, 0], [4, 128], [5, 0], [6, 0]]


# The kernel itself, in our interpreter of Gluon


@pytest.fixture
def interpreted(monkeypatch):
    """Let Hopper's kernel run on the CPU, in bfloat16 too."""
    interpreters = pytest.importorskip("tests.kernels.gluon_interpreter")
    kernel = interpreters.Interpreter(hopper_prefill_kernel, seed=5, undefined_reads={"_clear"})
    monkeypatch.setattr(triton_hopper_prefill, "hopper_prefill_kernel", kernel)
    monkeypatch.setattr(prefill_kernels, "why_no_gluon", lambda *_: None)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_without_rows_end_and_write_nothing(interpreted, head_dim):
    """As captured steps are padded: of a last sequence without rows or keys, at the rows' end."""
    paged = Paged(kv_lens=[20], num_heads=2, num_kv_heads=1, head_dim=head_dim, block_size=8)
    q = paged.queries[0].half()
    out = torch.full((22, 2, head_dim), float("nan"), dtype=torch.float16)
    k = paged.k_cache.half().permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    v = paged.v_cache.half().permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    tables = torch.tensor([paged.tables[0], [1 << 30] * 3], dtype=torch.int32)
    prefill(
        q,
        k,
        v,
        out[1:21],
        tiles=torch.tensor([[1, 0], [0, 0], [1, 0], [1, 0]], dtype=torch.int32),
        query_starts=torch.tensor([0, 20, 20], dtype=torch.int32),
        kv_lens=torch.tensor([20, 0], dtype=torch.int32),
        block_tables=tables,
        scale=paged.scale,
        shape=USUAL[head_dim],
    )
    assert bool(out[[0, 21]].isnan().all())
    assert_close("out", out[1:21].float(), paged.truth(0), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("name", ["none", "left", "prefix, left"])
def test_keys_in_one_piece_go_by_hoppers_kernel(interpreted, name):
    spans = PADDINGS[name]
    on_cpu = OnTriton(TritonKernels(torch.device("cpu"), "float16"))
    q, k, v = random_case(on_cpu, spans, head_dim=64, spare=0)
    halves = (x.half().contiguous() for x in (q, k, v))
    found = attend(*halves, spans, scale=0.3, capability=(9, 0), shape=USUAL[64])
    assert_close(name, found.float(), formula(q, k, v, spans, 0.3), **on_cpu.tolerance)


def test_a_step_by_the_kernel_itself_equals_the_reference(interpreted, interpreter):
    kernels = TritonKernels(torch.device("cpu"), "float16")
    kernels.serve_prompts_by("hopper", head_dim=64, kv_dtype=torch.float16, unit=8)
    chunks = [(1, 9), (1, 30), (7, 40), (130, 140)]
    lens = [keys for _, keys in chunks]
    paged = Paged(kv_lens=lens, num_heads=2, num_kv_heads=1, head_dim=64, block_size=8)
    parts = [(index, *chunk) for index, chunk in enumerate(chunks)]
    on_cpu = OnTriton(kernels)
    found = torch.cat(paged.attend(on_cpu, parts))
    expected = torch.cat(paged.attend(TorchKernels(), parts))
    assert_close("out", found, expected, **on_cpu.tolerance)
