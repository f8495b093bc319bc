"""What a GPU's plan asks, and what each question is asked with.

    prompts' attention    tile shapes of Triton's kernel and, where it serves, of Hopper's, by the
                          length of the longest sequence and the cache's dtype and unit; over
                          float8, widening it for Hopper's is a part of what is timed
    decodes' attention    warps and stages of the same tiles
    linear layers         the ways of each size, for each class of rows (`linear/ways`)

What rounds differently (a 4-bit weight written out or not, activations in FP8 or not) is no
question: a plan must not change what is computed, only how fast.

What a question is asked with is made when it is asked, and goes when the next one comes: there is
room for one. `plan_answers` checks candidates and times them, `plan_winners` lets winners serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from tailrace.config import BLOCK_SIZES
from tailrace.kernels.attention_shapes import (
    BOUNDS,
    CLASSES,
    key_words,
    prefill_candidates,
    prefill_shape,
)
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.linear.ways import class_words, words_of
from tailrace.kernels.paged_attention.decode_kernels import TIMED_GROUP, decode
from tailrace.kernels.paged_attention.decode_kernels import is_hopper as is_hopper_decode
from tailrace.kernels.paged_attention.device_batch import cut_tiles
from tailrace.kernels.paged_attention.prefill_kernels import (
    hopper_shapes,
    is_hopper,
    name_of,
    prefill,
)
from tailrace.kernels.paged_attention.triton_decode import DecodeScratch
from tailrace.kernels.paged_attention.triton_widened_kv import (
    UNIT_TOKENS,
    USUAL_TOKENS,
    WidenedKv,
    units_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from tailrace.kernels.linear.ways import PlannedLinear, RoundedRows, Ways
    from tailrace.kernels.paged_attention.decode_kernels import AnyDecodeShape
    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape
    from tailrace.kernels.triton_kernels import TritonKernels

PREFILL, DECODE = "prefill attention", "decode attention"
ANY_LENGTH = "any length"
UNITS = tuple(int(size) for size in BLOCK_SIZES if size != "auto")
"""Tokens of a cache's unit, for which kernels are compiled."""
USUAL_UNIT = UNITS[0]
"""That plans need not name."""
_ROWS = 256
_OUTPUTS = 8192
"""Of attention, and of a layer, that a reference computes at once, to need little memory."""
_DECODES, _DECODE_KEYS = 32, 2048
"""Sequences of a step, and the most keys of each, that decodes' attention is timed with."""


@dataclass(frozen=True)
class Heads:
    """Of a model's attention."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Question:
    """One operation at sizes of one class; what it is asked with is made when it is asked."""

    operation: str
    sizes: str
    default: str
    candidates: Mapping[str, Callable[[], Tensor]]
    reference: Callable[[], Tensor]
    """The result in higher precision."""
    is_exact: bool = False
    """Whether a candidate must give the default's very bits."""
    mend: Callable[[], bool] = lambda: False
    """Puts right what a candidate left behind for others to find; tells whether there was such."""

    @property
    def words(self) -> str:
        """What it asks."""
        return f"{self.operation}, {self.sizes}"


def questions(
    kernels: TritonKernels,
    heads: Heads,
    *,
    longest: int,
    kv_dtypes: Sequence[torch.dtype],
    unit: int,
) -> Iterator[Question]:
    """Yield what there is to choose for a loaded model.

    Args:
        kernels: Whose layers are asked about.
        heads: Of the model.
        longest: Tokens of the longest sequence; classes beyond are not asked.
        kv_dtypes: Of the caches that are asked about.
        unit: Tokens of a unit of the cache.
    """
    late = []
    for kv_dtype in kv_dtypes:
        prefills = _prefills(kernels, heads, longest, kv_dtype, unit)
        # Hopper's shapes take seconds to compile: a start's time is not to be theirs alone. Those
        # of 4-bit layers are the most.
        if any(map(is_hopper, _asked_shapes(kernels, heads.dim, kv_dtype, unit))):
            late.append(prefills)
        else:
            yield from prefills
        if len(_decode_shapes(kernels, heads, kv_dtype, unit)) > 1:
            yield _decode(kernels, heads, min(longest, _DECODE_KEYS), kv_dtype, unit)
    yield from _linears(kernels, compile_long=False)
    for prefills in late:
        yield from prefills
    yield from _linears(kernels, compile_long=True)


def _linears(kernels: TritonKernels, *, compile_long: bool) -> Iterator[Question]:
    asked = set()
    for layer in kernels.planned_layers:
        for ways in kernels.ways_in_use(layer):
            for most_rows in ways.classes if ways.compiles_long == compile_long else ():
                question = (words_of(layer), most_rows)
                if len(ways.options(most_rows)) > 1 and question not in asked:
                    asked.add(question)
                    yield _linear(kernels, layer, ways, most_rows)


def _prefills(
    kernels: TritonKernels, heads: Heads, longest: int, kv_dtype: torch.dtype, unit: int
) -> Iterator[Question]:
    if len(_asked_shapes(kernels, heads.dim, kv_dtype, unit)) == 1:
        return
    for low, bound in zip((0, *CLASSES), BOUNDS, strict=True):
        if low < longest:
            length = min(longest, max(low + low // 3, CLASSES[0] // 2))
            yield _prefill(kernels, heads, (length, bound), kv_dtype, unit)


def prefill_shapes(
    kernels: TritonKernels, head_dim: int, kv_dtype: torch.dtype, unit: int
) -> tuple[PrefillShape, ...]:
    """Return every shape that can serve prompts here, whatever is asked for."""
    found = prefill_candidates(head_dim, kernels.capability)
    if kernels.why_not_hopper(head_dim, kv_dtype, unit) is not None:
        return found
    return *found, *hopper_shapes(head_dim)


def _decode_shapes(
    kernels: TritonKernels, heads: Heads, kv_dtype: torch.dtype, unit: int
) -> tuple[AnyDecodeShape, ...]:
    """Return the usual shape and others of its kernel: another one's bits differ."""
    shapes = kernels.decode_shapes(heads.dim, kv_dtype, unit)
    by_hopper = is_hopper_decode(shapes[0]) and heads.query // heads.kv <= TIMED_GROUP
    return tuple(shape for shape in shapes if is_hopper_decode(shape) == by_hopper)


def _asked_shapes(
    kernels: TritonKernels, head_dim: int, kv_dtype: torch.dtype, unit: int
) -> tuple[PrefillShape, ...]:
    """Return those that are timed: Triton's, which others are held to, and any that may serve."""
    shapes = prefill_shapes(kernels, head_dim, kv_dtype, unit)
    return tuple(s for s in shapes if not is_hopper(s) or kernels.may_serve_prompts(s))


def over(operation: str, kv_dtype: torch.dtype, unit: int = USUAL_UNIT) -> str:
    """Return what a plan calls an operation over a cache: each kind has kernels of its own.

    Args:
        operation: `PREFILL` or `DECODE`.
        kv_dtype: Of the cache.
        unit: Tokens of one of its units.
    """
    words = f"{operation} over float8" if kv_dtype == FLOAT8 else operation
    return words if unit == USUAL_UNIT else f"{words} by units of {unit}"


@dataclass(frozen=True)
class _Sequences:
    """Sequences of one length in a paged cache, their units anywhere in it."""

    q: Tensor
    """[B, Hq, rows, D]."""
    k: Tensor
    """[B, Hkv, L, D], as the cache holds them."""
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    kv_lens: Tensor

    @classmethod
    def of(
        cls,
        kernels: TritonKernels,
        heads: Heads,
        sizes: tuple[int, int, int],
        kv_dtype: torch.dtype,
        unit: int,
    ) -> _Sequences:
        """Make up sequences, their rows at the end of each, of sizes (sequences, keys, rows)."""
        count, length, rows = sizes
        device, width = kernels.device, -(-length // unit)
        generator = torch.Generator(device).manual_seed(0)
        places = torch.randperm(count * width, generator=generator, device=device)
        k, v = (_noise(kernels, (count, heads.kv, length, heads.dim)).to(kv_dtype) for _ in "kv")
        lens = torch.full((count,), length, dtype=torch.int32, device=device)
        return cls(
            q=_noise(kernels, (count, heads.query, rows, heads.dim)),
            k=k,
            v=v,
            k_cache=_paged(k, places, unit).permute(0, 2, 3, 1),
            v_cache=_paged(v, places, unit).permute(0, 2, 1, 3),
            tables=places.view(count, width).to(torch.int32),
            kv_lens=lens,
        )


def _paged(x: Tensor, places: Tensor, unit: int) -> Tensor:
    """Return [blocks, unit, Hkv, D] of x [B, Hkv, L, D]; the i-th unit of all lies at places[i]."""
    count, num_heads, length, dim = x.shape
    width = len(places) // count
    padded = torch.zeros(count, width * unit, num_heads, dim, dtype=x.dtype, device=x.device)
    padded[:, :length] = x.transpose(1, 2)
    cache = torch.empty(len(places), unit, num_heads, dim, dtype=x.dtype, device=x.device)
    # Bytes are copied: not everything works on float8.
    cache.view(torch.uint8)[places] = padded.view(cache.shape).view(torch.uint8)
    return cache


def _prefill(
    kernels: TritonKernels,
    heads: Heads,
    sizes: tuple[int, int],
    kv_dtype: torch.dtype,
    unit: int,
) -> Question:
    """One whole prompt of so many tokens, in a class."""
    length, bound = sizes
    is_float8 = kv_dtype == FLOAT8
    starts = torch.tensor([0, length], dtype=torch.int32, device=kernels.device)

    @cache
    def given() -> tuple[_Sequences, Tensor]:
        at = _Sequences.of(kernels, heads, (1, length, length), kv_dtype, unit)
        return at, at.q[0].transpose(0, 1).contiguous()

    @cache
    def wide() -> WidenedKv:
        # As much room as a server has: programs without a piece of it take their time too.
        units = max(units_of(np.array([length])), USUAL_TOKENS // UNIT_TOKENS)
        return WidenedKv.allocate(units, heads.kv, heads.dim, kernels.dtype, kernels.device)

    def by(shape: PrefillShape) -> Tensor:
        at, q_THD = given()
        out_THD = torch.empty_like(q_THD)
        prefill(
            q_THD,
            at.k_cache,
            at.v_cache,
            out_THD,
            tiles=tiles[shape.block_m],
            query_starts=starts,
            kv_lens=at.kv_lens,
            block_tables=at.tables,
            scale=heads.dim**-0.5,
            shape=shape,
            wide=wide() if is_float8 and is_hopper(shape) else None,
        )
        return out_THD

    def truth() -> Tensor:
        at, _ = given()
        parts = [_exact_rows(at.q, at.k, at.v, row) for row in range(0, length, _ROWS)]
        return torch.cat(parts, 1)[0]

    shapes = _asked_shapes(kernels, heads.dim, kv_dtype, unit)
    tiles = {shape.block_m: _tiles(length, shape.block_m, kernels.device) for shape in shapes}
    usual = kernels.usual_prefill_shape(heads.dim, bound - 1)
    if usual not in shapes:  # of another dtype of KV
        usual = prefill_shape(heads.dim, bound - 1, kernels.capability)
    works = {name_of(shape): partial(by, shape) for shape in shapes}
    return Question(over(PREFILL, kv_dtype, unit), key_words(bound), name_of(usual), works, truth)


def _tiles(length: int, block_m: int, device: torch.device) -> Tensor:
    lengths = np.array([length], dtype=np.int32)
    cut = cut_tiles(lengths, lengths, first_sequence=0, block_m=block_m)
    return torch.from_numpy(cut).to(device)


def _decode(
    kernels: TritonKernels, heads: Heads, length: int, kv_dtype: torch.dtype, unit: int
) -> Question:
    """One row of each of some sequences."""
    usual, *_ = shapes = _decode_shapes(kernels, heads, kv_dtype, unit)

    @cache
    def given() -> tuple[_Sequences, Tensor, DecodeScratch]:
        at = _Sequences.of(kernels, heads, (_DECODES, length, 1), kv_dtype, unit)
        scratch = DecodeScratch.allocate(
            _DECODES, heads.query, heads.dim, length, usual.split, str(kernels.device)
        )
        return at, at.q.squeeze(2).contiguous(), scratch

    def by(shape: AnyDecodeShape) -> Tensor:
        at, q_BHD, scratch = given()
        out_BHD = torch.empty_like(q_BHD)
        decode(
            q_BHD,
            at.k_cache,
            at.v_cache,
            out_BHD,
            kv_lens=at.kv_lens,
            block_tables=at.tables,
            scale=heads.dim**-0.5,
            shape=shape,
            scratch=scratch,
        )
        return out_BHD

    def truth() -> Tensor:
        at, *_ = given()
        rows = [(at.q[i : i + 1], at.k[i : i + 1], at.v[i : i + 1]) for i in range(_DECODES)]
        return torch.cat([_attended(q, k, v)[:, 0] for q, k, v in rows])

    works = {shape.words: partial(by, shape) for shape in shapes}
    return Question(
        over(DECODE, kv_dtype, unit), ANY_LENGTH, usual.words, works, truth, is_exact=True
    )


def _linear(
    kernels: TritonKernels, layer: PlannedLinear, ways: Ways[object], most_rows: int
) -> Question:
    """As many rows as the class has at most."""

    @cache
    def given() -> Tensor | RoundedRows:
        return layer.given(_noise(kernels, (ways.timed_rows(most_rows), layer.sizes[1])))

    def by(name: str) -> Tensor:
        serving = ways.serving(most_rows)
        ways.serve(most_rows, name)
        try:
            return layer(given())
        finally:
            ways.serve(most_rows, serving)

    def truth() -> Tensor:
        x = given()
        wide_TI = x.float() if isinstance(x, torch.Tensor) else x.dequantize()
        outputs = layer.sizes[0]
        parts = []
        for first in range(0, outputs, _OUTPUTS):
            end = min(first + _OUTPUTS, outputs)
            bias_O = None if layer.bias_O is None else layer.bias_O[first:end].float()
            parts.append(functional.linear(wide_TI, layer.weight_rows(first, end), bias_O))
        return torch.cat(parts, 1)

    works = {name: partial(by, name) for name in ways.options(most_rows)}
    words = class_words(most_rows)
    usual = ways.serving(most_rows)
    return Question(
        words_of(layer), words, usual, works, truth, is_exact=ways.is_exact, mend=kernels.mend
    )


def _exact_rows(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Return the attention [1, rows, Hq, D] of some rows in float32; all at once take gigabytes."""
    rows = q[:, :, first : first + _ROWS]
    end = first + rows.shape[2]
    is_seen = torch.ones(rows.shape[2], end, dtype=torch.bool, device=q.device).tril(first)
    return _attended(rows, k[:, :, :end], v[:, :, :end], is_seen)


def _attended(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor | None = None) -> Tensor:
    """Return attention [B, rows, Hq, D] in float32."""
    found = functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=is_seen, enable_gqa=True
    )
    return found.transpose(1, 2)


def _noise(kernels: TritonKernels, shape: tuple[int, ...]) -> Tensor:
    """Return values that do not depend on what was drawn before."""
    generator = torch.Generator(kernels.device).manual_seed(0)
    drawn = torch.randn(shape, generator=generator, device=kernels.device)
    return drawn.to(kernels.dtype)
