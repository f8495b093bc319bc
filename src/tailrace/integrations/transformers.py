"""Tailrace's prefill attention inside transformers' models.

    from tailrace.integrations import transformers as tailrace_attention

    tailrace_attention.register()
    model.set_attn_implementation("tailrace")      # and "sdpa" to go back

The model is not changed: transformers asks its registry for the attention function of that name in
every layer. Ours computes prompts, whole or in chunks over a cached prefix, with the kernel that
the server uses, and hands everything else to SDPA (`Reason`); `fallbacks` says what and how often.
What SDPA would silently leave out (soft caps, attention sinks, a paged cache) is an error.

A mask of [B, 1, Q, T] booleans does not say that it is causal but for padding, and reading it in
every layer would cost more than the attention. So the mask is built by a function of ours, which
knows: it returns SDPA's mask, and notes beside it which keys are real. A mask without a note is
the caller's own, and goes to SDPA. So does everything inside `torch.compile`, uncounted.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tailrace.errors import ConfigError, nearest

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import causal_mask_function, sdpa_mask
except ImportError as error:
    raise ConfigError(
        f"tailrace.integrations.transformers: {error}; pip install 'tailrace[transformers]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tailrace.kernels.paged_attention.contiguous import Spans

    _Rules = tuple[tuple["Reason", Callable[["_Call"], bool]], ...]

LOGGER = logging.getLogger(__name__)
HEAD_DIMS = (16, 32, 64, 128, 256)
HOPPER_HEAD_DIMS = (64, 128)
KERNELS = ("auto", "triton", "hopper")
HALVES = (torch.float16, torch.bfloat16)


class Reason(StrEnum):
    """Why a call went to SDPA."""

    GRADIENTS = "gradients are recorded: training, or no torch.no_grad() around the model"
    DROPOUT = "attention dropout"
    NO_GPU = "no GPU: the tensors are not on an NVIDIA GPU"
    NO_TRITON = "Triton is not installed"
    OLD_GPU = "a GPU before Ampere (compute capability 8.0)"
    CAPTURE = "a CUDA graph is being captured"
    DTYPE = "queries, keys and values must all be float16, or all bfloat16"
    HEAD_DIM = f"the head dimension is none of {HEAD_DIMS}, or the values have another"
    HEADS = "the query heads are no multiple of the key heads, or the batch sizes differ"
    DECODE = "a single query token: SDPA decodes"
    NOT_CAUSAL = "attention that is not causal"
    SLIDING_WINDOW = "a sliding window shorter than the keys"
    POSITION_BIAS = "a position bias"
    WEIGHTS_WANTED = "the attention weights are asked for (output_attentions)"
    TOO_FAR = "keys beyond the reach of 32-bit offsets"
    NOT_HOPPER = (
        "Hopper's kernel is asked for: not a Hopper GPU (compute capability 9.0) with Triton 3.6"
    )
    HOPPER_HEAD_DIM = "Hopper's kernel is asked for: the head dimension is neither 64 nor 128"
    MASK_OF_CALLER = "a mask that the caller made"
    MASK_NOT_CAUSAL = "a mask that is more than causal with padding"
    MASK_WITH_HOLES = "padding between real tokens"
    MASK_SHAPE = "a mask of another shape than the queries and keys"


@dataclass
class _Tally:
    """What became of the calls since the process began, or since `reset`."""

    served: int = 0
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    logged: set[Reason] = field(default_factory=set)

    def fall_back(self, reason: Reason) -> None:
        self.fallbacks[reason] += 1
        if reason not in self.logged:
            self.logged.add(reason)
            level = logging.INFO if reason is Reason.DECODE else logging.WARNING
            LOGGER.log(level, "attention goes to SDPA: %s", reason)


@dataclass(frozen=True)
class _Call:
    """One layer's attention, as transformers asks for it."""

    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    dropout: float
    is_causal: bool | None
    extras: dict[str, Any]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


@dataclass(frozen=True)
class _Note:
    """What is known of a mask that `tailrace_mask` made: its spans, or why it has none."""

    found: Spans | Reason
    shape: tuple[int, int, int]
    """Sequences, queries, keys."""


_TALLY = _Tally()
_NOTES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


# What a layer may ask for and SDPA does not look at.
_LEFT_OUT = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "read_index": "the paged cache of continuous batching",
}


def register(name: str = "tailrace", *, prefill_attention: str = "auto") -> None:
    """Make the attention known to transformers; again does no harm.

    Args:
        name: For `model.set_attn_implementation` and `attn_implementation=`.
        prefill_attention: Whose kernel computes: "auto" (Hopper's where it serves and was measured
            to be faster, which is heads of 128, else Triton's), "triton", or "hopper" (what that
            does not serve goes to SDPA, with the reason). Each name has its own.

    Raises:
        ConfigError: There is no such kernel.
    """
    if prefill_attention not in KERNELS:
        raise ConfigError(
            f"prefill_attention {prefill_attention!r}: must be one of {', '.join(KERNELS)}"
            f"{nearest(prefill_attention, KERNELS)}"
        )
    AttentionMaskInterface.register(name, tailrace_mask)
    AttentionInterface.register(
        name, partial(tailrace_attention, prefill_attention=prefill_attention)
    )


def fallbacks() -> dict[str, int]:
    """Return how many calls (layers) went to SDPA, by reason."""
    return {str(reason): count for reason, count in _TALLY.fallbacks.items()}


def served() -> int:
    """Return how many calls (layers) Tailrace's kernel computed."""
    return _TALLY.served


def reset() -> None:
    """Count from 0 again, and log each reason once more."""
    _TALLY.served = 0
    _TALLY.fallbacks.clear()
    _TALLY.logged.clear()


def tailrace_attention(  # noqa: PLR0917 - transformers' order
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    prefill_attention: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, Q, Hq, D] and no weights: an entry of `AttentionInterface`.

    Queries that are padding give zeros, where SDPA computes something that nothing reads.

    Args:
        module: The layer; `is_causal` is read of it.
        query: [B, Hq, Q, D].
        key: [B, Hkv, T, D].
        value: [B, Hkv, T, D].
        attention_mask: None where attention is causal from the first key on.
        dropout: Of the weights.
        scaling: Of the scores; 1/sqrt(D) where None.
        is_causal: Over `module.is_causal`.
        prefill_attention: Whose kernel computes, as a name is registered for.
        kwargs: What else the model says; see `Reason`.

    Raises:
        ConfigError: What SDPA would leave out: soft-capped scores, sinks, a paged cache.
    """
    _refuse_what_sdpa_leaves_out(kwargs)
    found: Spans | Reason | None = None
    if not _is_traced():
        call = _Call(module, query, key, value, dropout, is_causal, kwargs)
        by_hopper = prefill_attention == "hopper"
        found = _why_not(call, by_hopper=by_hopper) or _spans(call, attention_mask)
        if not isinstance(found, Reason):
            _TALLY.served += 1
            by_hopper |= prefill_attention == "auto" and _is_faster_by_hopper(call)
            return _prefill(call, found, scaling, by_hopper=by_hopper), None
        _TALLY.fall_back(found)
    output, _ = sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **kwargs,
    )
    return output, None


def tailrace_mask(**kwargs: Any) -> Tensor | None:
    """Return SDPA's mask, with a note of what it stands for: an entry of `AttentionMaskInterface`.

    Args:
        kwargs: What `transformers.masking_utils.sdpa_mask` takes.
    """
    mask: Tensor | None = sdpa_mask(**kwargs)
    if mask is None or _is_traced():
        return mask
    batch, _, queries, keys = mask.shape
    _NOTES[mask] = _Note(_read(kwargs, batch, queries, keys), (batch, queries, keys))
    return mask


def _refuse_what_sdpa_leaves_out(extras: dict[str, Any]) -> None:
    for name, what in _LEFT_OUT.items():
        if extras.get(name) is not None:
            raise ConfigError(
                f"{what} ({name}): neither Tailrace's kernel nor SDPA follows that here; "
                'model.set_attn_implementation("eager")'
            )


def _is_traced() -> bool:
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return torch.compiler.is_compiling() or tracing


def _why_not(call: _Call, *, by_hopper: bool = False) -> Reason | None:
    """Return what keeps the kernel from the call, whatever the mask."""
    rules = (*_RULES, *_HOPPER_RULES) if by_hopper else _RULES
    return next((reason for reason, holds in rules if holds(call)), None)


def _records_gradients(call: _Call) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors)


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _has_no_gpu(call: _Call) -> bool:
    # Under ROCm a tensor also says that it is on "cuda".
    if torch.version.hip is not None:
        return True
    return any(x.device != call.query.device for x in call.tensors) or not (
        call.query.is_cuda or (call.query.device.type == "cpu" and _is_interpreted())
    )


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_before_ampere(call: _Call) -> bool:
    device = call.query.device
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def _is_captured(call: _Call) -> bool:
    return call.query.is_cuda and torch.cuda.is_current_stream_capturing()


def _has_other_dtypes(call: _Call) -> bool:
    dtype = call.query.dtype
    # In float32 the kernel takes minutes to compile; the interpreter has no bfloat16.
    served = HALVES if call.query.is_cuda else (torch.float16, torch.float32)
    return dtype not in served or any(x.dtype != dtype for x in call.tensors)


def _has_other_head_dims(call: _Call) -> bool:
    head_dim = call.query.shape[3]
    return head_dim not in HEAD_DIMS or any(x.shape[3] != head_dim for x in call.tensors)


def _has_odd_heads(call: _Call) -> bool:
    batch, heads = call.query.shape[:2]
    kv_heads = call.key.shape[1]
    return heads % kv_heads != 0 or any(
        x.shape[:3] != (batch, kv_heads, call.key.shape[2]) for x in (call.key, call.value)
    )


def _is_not_causal(call: _Call) -> bool:
    if call.is_causal is not None:
        return not call.is_causal
    return not getattr(call.module, "is_causal", True)


def _has_window(call: _Call) -> bool:
    window = call.extras.get("sliding_window")
    return window is not None and window < call.key.shape[2]


def _reaches_not(call: _Call) -> bool:
    from tailrace.kernels.paged_attention.contiguous import reaches  # noqa: PLC0415 - as below

    return not (reaches(call.key) and reaches(call.value))


def _is_no_hopper(call: _Call) -> bool:
    from tailrace.kernels.paged_attention import prefill_kernels  # noqa: PLC0415 - as below
    from tailrace.kernels.triton_kernels import capability_of  # noqa: PLC0415 - as below

    device = call.query.device
    return prefill_kernels.why_no_gluon(device, capability_of(device)) is not None


# Triton is imported only past the rule that it is installed.
_RULES: _Rules = (
    (Reason.GRADIENTS, _records_gradients),
    (Reason.DROPOUT, lambda call: call.dropout > 0),
    (Reason.NO_GPU, _has_no_gpu),
    (Reason.NO_TRITON, lambda _: not _has_triton()),
    (Reason.OLD_GPU, _is_before_ampere),
    (Reason.CAPTURE, _is_captured),
    (Reason.DTYPE, _has_other_dtypes),
    (Reason.HEAD_DIM, _has_other_head_dims),
    (Reason.HEADS, _has_odd_heads),
    (Reason.DECODE, lambda call: call.query.shape[2] == 1),
    (Reason.NOT_CAUSAL, _is_not_causal),
    (Reason.SLIDING_WINDOW, _has_window),
    (Reason.POSITION_BIAS, lambda call: call.extras.get("position_bias") is not None),
    (Reason.WEIGHTS_WANTED, lambda call: bool(call.extras.get("output_attentions"))),
    (Reason.TOO_FAR, _reaches_not),
)
_HOPPER_RULES: _Rules = (
    (Reason.NOT_HOPPER, _is_no_hopper),
    (Reason.HOPPER_HEAD_DIM, lambda call: call.query.shape[3] not in HOPPER_HEAD_DIMS),
)


def _is_faster_by_hopper(call: _Call) -> bool:
    from tailrace.kernels.paged_attention.prefill_kernels import (  # noqa: PLC0415 - needs Triton
        FASTER_HEAD_DIMS,
    )

    is_served = not any(holds(call) for _, holds in _HOPPER_RULES)
    return is_served and call.query.shape[3] in FASTER_HEAD_DIMS


def _spans(call: _Call, mask: Tensor | None) -> Spans | Reason:
    """Return which queries and keys the mask leaves, or why that cannot be said."""
    from tailrace.kernels.paged_attention.contiguous import Spans  # noqa: PLC0415 - needs Triton

    batch, _, queries, _ = call.query.shape
    keys = call.key.shape[2]
    if mask is None:
        # As SDPA: a key for each query, from the first on; the rest of a static cache is unused.
        return Spans.unpadded(batch, queries, 0) if keys >= queries else Reason.MASK_SHAPE
    note: _Note | None = _NOTES.get(mask)  # type: ignore[no-untyped-call]
    if note is None:
        return Reason.MASK_OF_CALLER
    return note.found if note.shape == (batch, queries, keys) else Reason.MASK_SHAPE


def _read(kwargs: dict[str, Any], batch: int, queries: int, keys: int) -> Spans | Reason:
    """Return the spans of the mask that `sdpa_mask` makes of these arguments."""
    is_plain = (
        kwargs.get("mask_function") is causal_mask_function
        and kwargs.get("local_size") is None
        and not kwargs.get("use_vmap")
        and not kwargs.get("kv_offset")
    )
    if not is_plain or not _has_triton():
        return Reason.MASK_NOT_CAUSAL
    from tailrace.kernels.paged_attention.contiguous import Spans  # noqa: PLC0415 - needs Triton

    # An integer, a tensor of one for a static cache, or (in older releases) every position.
    offset = kwargs.get("q_offset", kwargs.get("cache_position", 0))
    if isinstance(offset, torch.Tensor):
        offset = int(offset.flatten()[0])
    end = offset + queries
    if end > keys:
        return Reason.MASK_SHAPE
    padding: Tensor | None = kwargs.get("attention_mask")
    if padding is None:
        return Spans.unpadded(batch, queries, offset)
    is_real = padding[:, :end].to(device="cpu", dtype=torch.bool).numpy()
    firsts, ends = [], []
    for row in is_real:
        real = row.nonzero()[0]
        first, after = (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 0)
        if after - first != len(real):
            return Reason.MASK_WITH_HOLES
        firsts.append(first)
        ends.append(after)
    return Spans(queries, offset, tuple(firsts), tuple(ends))


def _prefill(call: _Call, spans: Spans, scaling: float | None, *, by_hopper: bool) -> Tensor:
    from tailrace.kernels.paged_attention.contiguous import attend  # noqa: PLC0415 - needs Triton
    from tailrace.kernels.paged_attention.prefill_kernels import (  # noqa: PLC0415 - needs Triton
        hopper_shapes,
    )
    from tailrace.kernels.triton_kernels import capability_of  # noqa: PLC0415 - needs Triton

    device, head_dim = call.query.device, call.query.shape[3]
    # Triton launches on the current device, which need not be this layer's.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return attend(
            *call.tensors,
            spans,
            scale=head_dim**-0.5 if scaling is None else scaling,
            capability=capability_of(device),
            shape=hopper_shapes(head_dim)[0] if by_hopper else None,
        )
