"""Which kernel computes decodes' attention: a shape is one kernel's, and is called by it here.

    Triton's    `triton_decode`: whatever is served
    Hopper's    `triton_hopper_decode`: what `why_not_hopper` does not name, for up to `TIMED_GROUP`
                query heads a KV head

Both cut sequences at the same tokens. They add in another order within, so a token's last bits are
its kernel's: one serves all steps of a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tailrace.kernels.kv_scales import UNSCALED, KVScales
from tailrace.kernels.paged_attention import prefill_kernels, triton_decode
from tailrace.kernels.paged_attention.triton_decode import DecodeScratch, DecodeShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tailrace.kernels.attention_shapes import Capability
    from tailrace.kernels.paged_attention.triton_hopper_decode import HopperDecodeShape

    AnyDecodeShape: TypeAlias = DecodeShape | HopperDecodeShape

TIMED_GROUP = 8
"""Query heads of a KV head that Hopper's kernel serves: of up to 16 it is right, and was not timed
beyond 8."""
_FASTER_HEAD_DIMS = (128,)
"""Those where it was timed beside Triton's (benchmarks/gpu_decode.py)."""


def why_not_hopper(
    *,
    device: torch.device,
    capability: Capability,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    unit: int,
) -> str | None:
    """Say why Hopper's kernel does not serve a model on a device, or None where it does.

    Args:
        device: Of the model.
        capability: The device's.
        dtype: Of activations.
        kv_dtype: Of the cache.
        head_dim: Of the model.
        unit: Tokens of a unit of the cache.
    """
    if head_dim not in _FASTER_HEAD_DIMS:
        return f"the model has {head_dim} dimensions a head, and the kernel was timed at 128"
    reason = prefill_kernels.why_not_hopper(
        device=device,
        capability=capability,
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dim=head_dim,
        unit=unit,
    )
    # Of a float8 cache, too: for prompts it is widened, into units of another size.
    return reason or prefill_kernels.why_no_boxes(unit)


def hopper_shapes(*, is_float8: bool) -> tuple[HopperDecodeShape, ...]:
    """Return the shapes of Hopper's kernel that cut and add alike, the usual one first.

    Args:
        is_float8: Whether the cache is.
    """
    from tailrace.kernels.paged_attention import triton_hopper_decode as hopper  # noqa: PLC0415 - Gluon changes still

    if is_float8:
        return hopper.USUAL_FLOAT8, *hopper.FLOAT8_RINGS
    return hopper.USUAL, *hopper.RINGS


def is_hopper(shape: AnyDecodeShape) -> bool:
    """Tell whose shape it is."""
    return not isinstance(shape, DecodeShape)


def decode(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_BHD: Tensor,
    *,
    kv_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    shape: AnyDecodeShape,
    scratch: DecodeScratch,
    kv_scales: KVScales = UNSCALED,
) -> None:
    """Write attention of one row a sequence, by the kernel that the shape is one of.

    Args:
        q_BHD: See `triton_decode.decode`, as for all of these.
        k_cache: As there.
        v_cache: As there.
        out_BHD: As there.
        kv_lens: As there.
        block_tables: As there.
        scale: As there.
        shape: Of either kernel.
        scratch: As there.
        kv_scales: Of a float8 cache.

    Raises:
        EngineError: Hopper's kernel does not serve these tensors.
    """
    if isinstance(shape, DecodeShape):
        triton_decode.decode(
            q_BHD,
            k_cache,
            v_cache,
            out_BHD,
            kv_lens=kv_lens,
            block_tables=block_tables,
            scale=scale,
            shape=shape,
            scratch=scratch,
            kv_scales=kv_scales,
        )
        return
    from tailrace.kernels.paged_attention import triton_hopper_decode  # noqa: PLC0415 - as above

    triton_hopper_decode.decode(
        q_BHD,
        k_cache,
        v_cache,
        out_BHD,
        kv_lens=kv_lens,
        block_tables=block_tables,
        scale=scale,
        shape=shape,
        scratch=scratch,
        kv_scales=kv_scales,
    )
