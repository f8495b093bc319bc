"""Triton's kernels as the tests call them: float32 on the CPU in and out, rounded on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tailrace.kernels.rotary import Rotary

if TYPE_CHECKING:
    from tailrace.kernels.attention_batch import AttentionBatch
    from tailrace.kernels.triton_kernels import TritonKernels

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
INDEX_FIELDS = ("query_starts", "kv_lens", "block_tables", "positions", "slots")


@dataclass(frozen=True)
class OnTriton:
    """Moves tensors to the kernels' device and dtype, and results back."""

    kernels: TritonKernels

    @property
    def tolerance(self) -> dict[str, float]:
        """Of a result beside the same in float64 on rounded inputs."""
        value = TOLERANCE[self.kernels.dtype]
        return {"rtol": value, "atol": value}

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the kernel sees of x, in float32."""
        return x.to(self.kernels.dtype).float()

    def half(self, x: torch.Tensor) -> torch.Tensor:
        """Return x on the device in the activations' dtype."""
        return x.to(self.kernels.device, self.kernels.dtype)

    def float(self, x: torch.Tensor) -> torch.Tensor:
        """Return a float32 copy of x on the device."""
        return x.to(self.kernels.device, torch.float32, copy=True)

    def batch(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch on the device, its indices int32 as the runner's."""
        moved = {
            name: getattr(batch, name).to(self.kernels.device, torch.int32) for name in INDEX_FIELDS
        }
        return replace(batch, **moved)

    def rotary(self, rotary: Rotary) -> Rotary:
        """Return the tables on the device."""
        return Rotary(rotary.cos_PD.to(self.kernels.device), rotary.sin_PD.to(self.kernels.device))

    def token_major(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> list[torch.Tensor]:
        """Return both caches as the runner lays them out: tokens one after the other."""
        k = self.half(k_cache).permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
        v = self.half(v_cache).permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
        return [k, v]

    def paged_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:
        """Attend as `Kernels.paged_attention`, over a token-major cache."""
        k, v = self.token_major(k_cache, v_cache)
        out = self.kernels.paged_attention(self.half(q), k, v, self.batch(batch), scale)
        return out.cpu().float()
