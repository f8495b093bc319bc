"""Sampling in PyTorch: a row at a time, with a sort."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tailrace.kernels.sampling.rows import (
    FIXED_BITS,
    NOT_FINITE,
    NOTHING_LEFT,
    Drawn,
    SamplingRows,
)

if TYPE_CHECKING:
    from torch import Tensor

_MASK64 = (1 << 64) - 1
_TINY, _HUGE = 2.0**-126, 2.0**100


def sample(logits_RV: Tensor, rows: SamplingRows) -> Drawn:
    """Draw one token a row and count it in the row's history.

    Args:
        logits_RV: Any float dtype; left as they are.
        rows: How to draw.
    """
    count = len(logits_RV)
    raw = logits_RV.float()
    ids = torch.empty(count, dtype=torch.int64, device=raw.device)
    logprobs = torch.full((count,), math.nan, device=raw.device)
    ranks = torch.ones(count, dtype=torch.int32, device=raw.device)
    for row in range(count):
        token_id = _draw(raw[row], rows, row)
        ids[row] = token_id
        if token_id < 0:
            continue
        logprobs[row] = raw[row].log_softmax(0)[token_id]
        if int(rows.wants_rank[row]):
            ranks[row] += (raw[row] > raw[row, token_id]).sum()
        kept = int(rows.history_rows[row])
        if kept >= 0:
            rows.history[kept, token_id] = (rows.history[kept, token_id] + 2) | 1
    return Drawn(ids, logprobs, ranks)


def _draw(raw_V: Tensor, rows: SamplingRows, row: int) -> int:
    if not math.isfinite(raw_V.amax().item()):
        return NOT_FINITE
    x_V = _adjusted(raw_V, rows, row)
    peak = x_V.amax()
    if not math.isfinite(peak.item()):
        return NOTHING_LEFT
    temperature = float(rows.temperatures[row])
    if temperature == 0.0:
        return int((x_V == peak).nonzero()[0])
    weights = ((x_V - peak) / min(max(temperature, _TINY), _HUGE)).exp()
    least = _threshold(
        weights, int(rows.top_k[row]), float(rows.top_p[row]), rows.min_p[row].float()
    )
    sums = _fixed(weights * (weights >= least)).cumsum(0)
    total = int(sums[-1])
    aim = int(uniform(int(rows.seeds[row]), int(rows.positions[row])) * float(total))
    return int((sums <= min(aim, total - 1)).sum())


def _adjusted(raw_V: Tensor, rows: SamplingRows, row: int) -> Tensor:
    x_V = raw_V.clone()
    edits = slice(int(rows.edit_starts[row]), int(rows.edit_starts[row + 1]))
    x_V.index_add_(0, rows.edit_ids[edits].long(), rows.edit_values[edits])
    masked = int(rows.mask_rows[row])
    if masked >= 0:
        ids = torch.arange(len(x_V), device=x_V.device)
        bits = rows.masks[masked][ids // 32] >> (ids % 32)
        x_V[bits & 1 == 0] = -math.inf
    kept = int(rows.history_rows[row])
    if kept < 0:
        return x_V
    history = rows.history[kept]
    repetition = rows.repetition[row]
    penalised = torch.where(x_V > 0, x_V / repetition, x_V * repetition)
    x_V = torch.where(history & 1 != 0, penalised, x_V)
    counts = history >> 1
    return x_V - rows.frequency[row] * counts - rows.presence[row] * (counts > 0)


def _threshold(weights: Tensor, top_k: int, top_p: float, min_p: Tensor) -> Tensor:
    """Return the least weight that the filters keep; the largest is 1."""
    ranked = weights.sort(descending=True).values
    is_kept = torch.ones_like(ranked, dtype=torch.bool)
    if 0 < top_k < len(ranked):
        is_kept = ranked >= ranked[top_k - 1]
    fixed = _fixed(ranked * is_kept)
    before = fixed.cumsum(0) - fixed
    if top_p < 1.0:
        is_kept &= before.double() < top_p * fixed.sum().double()
    is_kept &= ranked >= min_p
    return ranked[max(int(is_kept.sum()), 1) - 1]


def _fixed(weights: Tensor) -> Tensor:
    return (weights * 2.0**FIXED_BITS).long()


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on its arguments alone.

    SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014):
    the seed is mixed once, so that neighbouring seeds start far apart, and the position counts
    steps of the golden-ratio increment from there. The top 53 bits make the float.
    """
    start = _mix(seed & _MASK64)
    return (_mix((start + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64) >> 11) / (1 << 53)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
