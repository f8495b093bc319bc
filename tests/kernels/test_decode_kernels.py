"""Which kernel computes decodes' attention, why Hopper's does not, and that either is called."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tailrace.config import EngineConfig
from tailrace.engine.cuda_setup import attend_as_asked
from tailrace.errors import ConfigError, EngineError
from tests.kernels.compare import assert_close
from tests.kernels.paged import NAN, Paged, make_batch

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.kernels.attention_shapes import decode_candidates
from tailrace.kernels.kv_scales import KVScales
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.paged_attention import prefill_kernels, triton_hopper_decode
from tailrace.kernels.paged_attention.decode_kernels import (
    TIMED_GROUP,
    decode,
    hopper_shapes,
    is_hopper,
    why_not_hopper,
)
from tailrace.kernels.paged_attention.triton_decode import DecodeScratch
from tailrace.kernels.plan import Key, Plan, choose
from tailrace.kernels.plan_questions import ANY_LENGTH, DECODE, Heads, over, questions
from tailrace.kernels.plan_winners import apply
from tailrace.kernels.triton_kernels import TritonKernels
from tests.kernels.gluon_interpreter import Interpreter

SERVED = {
    "device": torch.device("cuda"), "capability": (9, 0), "dtype": torch.float16,
    "kv_dtype": torch.float16, "head_dim": 128, "unit": 8,
}  # fmt: skip
TRITON = decode_candidates(128, (9, 0))
KEY = Key(gpu="g", model="m", dtype="float16", tailrace="1", torch="2", triton="3")
HALF = {"head_dim": 128, "kv_dtype": torch.float16, "unit": 8}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": torch.device("cpu")}, "not in Triton's interpreter"),
        ({"capability": (8, 0)}, "capability is 8.0"),
        ({"head_dim": 64}, "64 dimensions a head, and the kernel was timed at 128"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "activations are float32"),
        ({"kv_dtype": torch.bfloat16}, "KV is kept in bfloat16"),
        ({"kv_dtype": FLOAT8, "unit": 24}, "units of KV hold 24 tokens"),
        ({"unit": 12}, "units of KV hold 12 tokens"),
    ],
    ids=["cpu", "ampere", "dims", "float32", "halves", "float8", "unit"],
)
def test_hoppers_kernel_is_refused_with_the_missing_piece(given, reason):
    assert re.search(reason, why_not_hopper(**SERVED | given) or "")
    assert why_not_hopper(**SERVED) is why_not_hopper(**SERVED | {"kv_dtype": FLOAT8}) is None


@pytest.fixture
def on_hopper(monkeypatch):
    """Let the kernel serve on a CPU, in our interpreter of Gluon."""
    monkeypatch.setattr(prefill_kernels, "why_no_gluon", lambda *_: None)
    kernel = Interpreter(triton_hopper_decode.hopper_decode_kernel)
    monkeypatch.setattr(triton_hopper_decode, "hopper_decode_kernel", kernel)


def kernels_over(kv_dtype=torch.float16, head_dim=128, *, asked=True):
    kernels = TritonKernels(torch.device("cpu"), "float16", hopper_decodes=asked)
    assert not is_hopper(kernels.decode_shape(head_dim))  # nobody has said what is served
    kernels.serve_prompts_by("triton", head_dim=head_dim, kv_dtype=kv_dtype, unit=8)
    return kernels


def test_it_serves_where_it_was_timed_and_a_plan_may_choose_its_ring(on_hopper):
    kernels = kernels_over()
    usual, *others = hopper_shapes(is_float8=False)
    assert kernels.decode_shape(128, TIMED_GROUP) == usual
    assert kernels.decode_shape(128, TIMED_GROUP + 1) == TRITON[0]
    kernels.decode_row = others[0]
    assert kernels.decode_shape(128, 7) == others[0]
    assert kernels.decode_shape(128, TIMED_GROUP + 1) == TRITON[0]
    assert kernels_over(FLOAT8).decode_shape(128) == hopper_shapes(is_float8=True)[0]
    assert not is_hopper(kernels_over(head_dim=64).decode_shape(64))
    assert not is_hopper(kernels_over(asked=False).decode_shape(128))


@pytest.mark.parametrize("kv_dtype", [torch.float16, FLOAT8], ids=["half", "float8"])
def test_both_kernels_cut_sequences_at_the_same_tokens(on_hopper, kv_dtype):
    """Scratch is made for either."""
    shapes = kernels_over().decode_shapes(**HALF | {"kv_dtype": kv_dtype})
    assert {is_hopper(shape) for shape in shapes} == {True, False}
    assert len({shape.split for shape in shapes}) == 1
    assert len({shape.words for shape in shapes}) == len(shapes)
    assert len({shape.tile for shape in hopper_shapes(is_float8=kv_dtype == FLOAT8)}) == 1


@pytest.mark.parametrize("group", [7, TIMED_GROUP + 1])
def test_a_plan_is_asked_about_shapes_of_the_kernel_that_serves(on_hopper, group):
    kernels = kernels_over()
    found = questions(kernels, Heads(group, 1, 128), longest=40, kv_dtypes=(torch.float16,), unit=8)
    asked = next(question for question in found if question.operation == DECODE)
    shapes = hopper_shapes(is_float8=False) if group <= TIMED_GROUP else TRITON
    assert list(asked.candidates) == [shape.words for shape in shapes]
    assert asked.default == shapes[0].words


@pytest.mark.parametrize("is_float8", [False, True], ids=["half", "float8"])
def test_a_plan_made_without_hoppers_kernel_does_not_undo_that_it_serves(on_hopper, is_float8):
    kv_dtype = FLOAT8 if is_float8 else torch.float16
    tables = decode_candidates(128, (9, 0), is_float8=is_float8)
    usual, ring, *_ = hopper_shapes(is_float8=is_float8)
    for winner, asked, serves in (
        (tables[1], True, usual),
        (ring, True, ring),
        (tables[1], False, tables[1]),
    ):
        kernels = kernels_over(kv_dtype, asked=asked)
        over_it = over(DECODE, kv_dtype)
        choice = choose(over_it, ANY_LENGTH, winner.words, {winner.words: 1.0}, {})
        plan = Plan(KEY, (choice,))
        apply(plan, kernels, 128, Path("plan.json"), kv_dtype=kv_dtype, unit=8)
        assert kernels.decode_shape(128, 7) == serves


def attended(shape, **known):
    """Return attention of some rows [B, Hq, D], by the kernel of a shape."""
    torch.manual_seed(0)
    lens = [130, 1, 600]
    paged = Paged(kv_lens=lens, num_heads=7, num_kv_heads=1, head_dim=128, block_size=8)
    q = torch.stack([rows[-1] for rows in paged.queries]).half()
    k_cache = paged.k_cache.half().permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    v_cache = paged.v_cache.half().permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    batch = make_batch([(1, n) for n in lens], 8, paged.tables)
    out = torch.full_like(q, NAN)
    decode(
        q, k_cache, v_cache, out, kv_lens=batch.kv_lens,
        block_tables=batch.block_tables, scale=paged.scale, shape=shape,
        scratch=DecodeScratch.allocate(len(q), 7, 128, max(lens), shape.split, "cpu"), **known,
    )  # fmt: skip
    return out


def test_a_shape_is_computed_by_its_kernel(on_hopper, interpreter):
    by_hopper, by_triton = attended(hopper_shapes(is_float8=False)[0]), attended(TRITON[0])
    assert_close("Hopper's beside Triton's", by_hopper, by_triton, rtol=1e-2, atol=1e-3)
    assert not torch.equal(by_hopper, by_triton)  # sums are added in another order


def test_scales_of_a_cache_that_has_none_are_an_error(on_hopper):
    with pytest.raises(EngineError, match="scales of a cache in .*float16: only float8 has them"):
        attended(hopper_shapes(is_float8=False)[0], kv_scales=KVScales(2.0, 1.0))


def test_what_is_asked_for_and_cannot_serve_is_an_error_that_says_why(on_hopper):
    heads = SimpleNamespace(num_heads=28, num_kv_heads=4, head_dim=128)
    model = SimpleNamespace(config=heads)
    asked = replace(EngineConfig(), gpus=(0,), decode_kernels="hopper")
    attend_as_asked(asked, kernels_over(), model, torch.float16)
    attend_as_asked(
        replace(asked, decode_kernels="triton"), kernels_over(asked=False), model, torch.float16
    )
    for known, reason in (
        ({"head_dim": 64}, "64 dimensions a head, and the kernel was timed at 128"),
        ({"num_heads": 64}, "16 query heads share one of KV, and the kernel was timed up to 8"),
    ):
        other = SimpleNamespace(config=SimpleNamespace(**vars(heads) | known))
        with pytest.raises(ConfigError, match=f"--decode-kernels hopper: .*{reason}; use auto"):
            attend_as_asked(asked, kernels_over(), other, torch.float16)
        by_triton = kernels_over()
        attend_as_asked(replace(asked, decode_kernels="auto"), by_triton, other, torch.float16)
        group = other.config.num_heads // other.config.num_kv_heads
        assert not is_hopper(by_triton.decode_shape(other.config.head_dim, group))
