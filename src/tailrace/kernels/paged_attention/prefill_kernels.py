"""Which kernel computes prompts' attention: a shape is one kernel's, and is called by it here.

    Triton's    `triton_prefill`: whatever is served
    Hopper's    `triton_hopper_prefill`: what `why_not_hopper` does not name; a float8 cache by
                way of `triton_widened_kv`

Both read the same tables of tiles, (sequence, first row), cut for the shape's `block_m` rows of one
head. So who plans, captures or cuts knows shapes alone. They add in another order, so a prompt's
last bits are its kernel's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
import triton

from tailrace.errors import EngineError
from tailrace.kernels.attention_shapes import BOUNDS, key_words
from tailrace.kernels.kv_scales import UNSCALED, KVScales
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.paged_attention import triton_prefill
from tailrace.kernels.paged_attention.triton_prefill import Shape
from tailrace.kernels.paged_attention.triton_widened_kv import WidenedKv, widen

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailrace.kernels.attention_shapes import Capability
    from tailrace.kernels.paged_attention.triton_hopper_prefill import HopperShape

    PrefillShape: TypeAlias = Shape | HopperShape

_GLUON = "3.6."
"""The release of Triton whose Gluon Hopper's kernel is written in: it changes still."""
_HALVES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128)
"""Of Hopper's kernel."""
FASTER_HEAD_DIMS = (128,)
"""Those where it was timed beside Triton's, and was faster in every class of lengths over KV in the
activations' dtype. Over float8, which is widened for it first, from 1K keys on; below, Triton's was
timed as it read float8 before. At 64 dimensions it is slower below 1K keys, 0.69 of Triton's time
above 3K, and one kernel for all lengths keeps a prompt's bits free of its company's
(docs/performance.md)."""
_ATOM = 8
"""Tokens of the least unit of Hopper's kernel; larger ones are powers of two. A float8 cache
may have others: what is widened of it lies in units of its own."""


def why_not_hopper(
    *,
    device: torch.device,
    capability: Capability,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    unit: int,
) -> str | None:
    """Say why Hopper's kernel cannot serve a model on a device, or None where it can.

    Args:
        device: Of the model.
        capability: The device's.
        dtype: Of activations.
        kv_dtype: Of the cache.
        head_dim: Of the model.
        unit: Tokens of a unit of the cache.
    """
    if reason := why_no_gluon(device, capability):
        return reason
    if head_dim not in HEAD_DIMS:
        return f"the model has {head_dim} dimensions a head, and the kernel serves 64 and 128"
    if dtype not in _HALVES:
        return f"activations are {_name(dtype)}, and the kernel serves bfloat16 and float16"
    if kv_dtype not in (dtype, FLOAT8):
        return f"KV is kept in {_name(kv_dtype)}, and the kernel reads {_name(dtype)} and float8"
    return why_no_boxes(unit) if kv_dtype == dtype else None


def why_no_boxes(unit: int) -> str | None:
    """Say why no boxes can be cut of units of so many tokens, or None where they can."""
    if unit < _ATOM or unit & (unit - 1):
        return f"units of KV hold {unit} tokens, and the kernel reads powers of two from 8 on"
    return None


def why_no_gluon(device: torch.device, capability: Capability) -> str | None:
    """Say why no code of Hopper's own runs on a device, or None where it does."""
    if device.type != "cuda":
        return "the kernel runs on a Hopper GPU alone, not in Triton's interpreter"
    if capability != (9, 0):
        major, minor = capability
        return (
            f"this GPU's compute capability is {major}.{minor}, and the kernel's instructions are "
            "those of Hopper (9.0) alone"
        )
    if not triton.__version__.startswith(_GLUON):
        return f"Triton {triton.__version__} is installed, and the kernel is written for {_GLUON}x"
    return None


def hopper_shapes(head_dim: int) -> tuple[HopperShape, ...]:
    """Return the shapes of Hopper's kernel, the usual one first; none for other dimensions."""
    if head_dim not in HEAD_DIMS:
        return ()
    from tailrace.kernels.paged_attention.triton_hopper_prefill import (  # noqa: PLC0415 - see _GLUON
        CANDIDATES,
        USUAL,
    )

    return tuple(dict.fromkeys((USUAL[head_dim], *CANDIDATES[head_dim])))


def is_hopper(shape: PrefillShape) -> bool:
    """Tell whose shape it is."""
    return not isinstance(shape, Shape)


def name_of(shape: PrefillShape) -> str:
    """Return what a plan and the log call a shape: Triton's by its tile alone."""
    return f"Hopper {shape.words}" if is_hopper(shape) else shape.words


def describe(shape_of: Callable[[int], PrefillShape], longest: int, *, wide_tokens: int = 0) -> str:
    """Say what serves each class of lengths, and steps that are captured.

    Args:
        shape_of: The shape of a step whose longest sequence has so many keys.
        longest: Tokens of the longest sequence that there can be: captured steps are cut for it.
        wide_tokens: Keys of a step's prompts that there is room to widen; 0: nothing is widened.
    """
    beyond = f"; more than {wide_tokens} keys of a step's prompts: Triton's" if wide_tokens else ""
    lasts = [(bound, min(bound - 1, longest)) for bound in BOUNDS]
    lows = (0, *BOUNDS)
    served = [
        (key_words(bound), _told(shape_of(last)))
        for (bound, last), low in zip(lasts, lows, strict=False)
        if low <= longest
    ]
    captured = _told(shape_of(longest))
    if {name for _, name in served} == {captured}:
        return captured + beyond
    told = "; ".join(f"{words}: {name}" for words, name in (*served, ("captured steps", captured)))
    return told + beyond


def _told(shape: PrefillShape) -> str:
    return name_of(shape) if is_hopper(shape) else f"Triton {shape.words}"


def prefill(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_THD: Tensor,
    *,
    tiles: Tensor,
    query_starts: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    shape: PrefillShape,
    kv_scales: KVScales = UNSCALED,
    unit: int | None = None,
    wide: WidenedKv | None = None,
    first_prompt: int = 0,
) -> None:
    """Write causal attention of the rows in `tiles`, by the kernel that the shape is one of.

    Args:
        q_THD: See `triton_prefill.prefill`, as for all of these.
        k_cache: As there.
        v_cache: As there.
        out_THD: As there.
        tiles: As there.
        query_starts: As there.
        kv_lens: As there.
        block_tables: As there.
        scale: As there.
        shape: Of either kernel.
        kv_scales: Of a float8 cache.
        unit: As there.
        wide: Where Hopper's kernel finds what a float8 cache holds; it has room for the keys of all
            sequences from `first_prompt` on.
        first_prompt: The first sequence that tiles are cut of.

    Raises:
        EngineError: Hopper's kernel does not serve these tensors, or there is no place to widen to.
    """
    if isinstance(shape, Shape):
        triton_prefill.prefill(
            q_THD,
            k_cache,
            v_cache,
            out_THD,
            tiles=tiles,
            query_starts=query_starts,
            kv_lens=kv_lens,
            block_tables=block_tables,
            scale=scale,
            shape=shape,
            kv_scales=kv_scales,
            unit=unit,
        )
        return
    from tailrace.kernels.paged_attention import triton_hopper_prefill  # noqa: PLC0415 - see _GLUON

    v_scale = None
    if v_cache.dtype == FLOAT8:
        if wide is None:
            raise EngineError(
                "Hopper's prefill kernel: a float8 cache, and no place to widen it to"
            )
        block_tables = widen(
            k_cache, v_cache, wide, kv_lens=kv_lens, block_tables=block_tables, first=first_prompt
        )
        k_cache, v_cache = wide.caches
        scale, v_scale = scale * kv_scales.k, kv_scales.v
    elif kv_scales != UNSCALED:
        raise EngineError("Hopper's prefill kernel: KV scales, and the cache is not float8")
    triton_hopper_prefill.hopper_prefill(
        q_THD,
        k_cache,
        v_cache,
        out_THD,
        tiles=tiles,
        query_starts=query_starts,
        kv_lens=kv_lens,
        block_tables=block_tables,
        scale=scale,
        shape=shape,
        unit=unit,
        v_scale=v_scale,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
