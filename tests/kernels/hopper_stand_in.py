"""What stands in for Hopper's prefill kernel where there is no Hopper: its signature, in PyTorch.

It reads tables, lengths and caches as the kernel does, tile by tile of 128 rows, writes the rows of
tiles alone, and is strict about what the kernel would take for granted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tailrace.kernels.paged_attention import prefill_kernels, triton_hopper_prefill
from tailrace.kernels.paged_attention.reference import attend
from tailrace.kernels.paged_attention.triton_hopper_prefill import BLOCK_M, HopperShape
from tailrace.kernels.triton_kernels import TritonKernels


@dataclass
class Call:
    shape: HopperShape
    tiles: list[list[int]]
    rows: int
    """Of queries."""
    v_scale: float | None
    """Of values that were widened from float8."""


@dataclass
class HopperStandIn:
    """Takes the kernel's place, and remembers how it was called."""

    calls: list[Call] = field(default_factory=list)

    def __call__(
        self, q, k_cache, v_cache, out, *, tiles, query_starts, kv_lens, block_tables,
        scale, shape=None, unit=None, v_scale=None,
    ):  # fmt: skip
        assert isinstance(shape, HopperShape)
        assert q.is_contiguous()
        assert out.is_contiguous()
        for index in (tiles, query_starts, kv_lens, block_tables):
            assert index.dtype == torch.int32
        assert block_tables.stride(1) == 1 or block_tables.shape[1] == 1
        for by_token in (k_cache.transpose(2, 3), v_cache):
            *strides, dims = by_token.stride()
            assert dims == 1
            assert not any(stride % 8 for stride in strides)
        if unit is None:
            unit = v_cache.shape[2]
        else:
            assert unit >= shape.block_n
        assert unit % 8 == 0
        assert k_cache.dtype == v_cache.dtype == q.dtype
        self.calls.append(Call(shape, tiles.tolist(), len(q), v_scale))
        seen = set()
        for sequence, first in tiles.tolist():
            start, stop = query_starts[sequence : sequence + 2].tolist()
            kv_len = int(kv_lens[sequence])
            assert first % BLOCK_M == 0
            if start == stop:
                assert (first, kv_len) == (0, 0)
                continue
            assert first < stop - start
            assert (sequence, first) not in seen
            seen.add((sequence, first))
            rows = slice(start + first, min(start + first + BLOCK_M, stop))
            keys = kv_len - (stop - rows.stop)
            positions = torch.arange(keys, device=q.device)
            units = block_tables[sequence, positions // unit].long()
            assert 0 <= int(units.min()) <= int(units.max()) < k_cache.shape[0]
            k = k_cache[units, :, :, positions % unit].transpose(0, 1)
            v = v_cache[units, :, positions % unit].transpose(0, 1)
            out[rows] = attend(q[rows], k, v, scale) * (v_scale or 1.0)


def let_hopper_serve(monkeypatch):
    """Let a stand-in serve whatever Hopper's kernel has shapes for, on a CPU in float32 too."""
    stand_in = HopperStandIn()
    monkeypatch.setattr(triton_hopper_prefill, "hopper_prefill", stand_in)
    monkeypatch.setattr(prefill_kernels, "why_no_gluon", lambda *_: None)

    def why_not(_, head_dim, kv_dtype, unit):
        return None if head_dim in prefill_kernels.HEAD_DIMS else f"{head_dim} dimensions"

    monkeypatch.setattr(TritonKernels, "why_not_hopper", why_not)
    return stand_in
