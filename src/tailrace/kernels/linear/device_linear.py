"""What linear layers on a GPU do beside `Linear`: they write into memory that is there.

A step's decodes and prompts may be multiplied by two layers; each writes its rows of one result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from tailrace.kernels.kernels import Linear

if TYPE_CHECKING:
    from torch import Tensor


class DeviceLinear(Linear, Protocol):
    """x @ weight.T + bias, on a GPU or in Triton's interpreter."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        ...

    def write(self, x_TI: Tensor, out_TO: Tensor) -> None:
        """Write the product into `out_TO`.

        Args:
            x_TI: Contiguous, in the activations' dtype.
            out_TO: Likewise; perhaps some rows of a larger one.
        """
        ...


class RoundsRows(ABC):
    """A `DeviceLinear` that rounds its rows, and can have them rounded where they are made."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""

    @abstractmethod
    def rounds(self, rows: int) -> bool:
        """Tell whether so many rows are rounded; else they are multiplied as they are."""

    @abstractmethod
    def write_normed(
        self,
        x_TI: Tensor | None,
        residual_TI: Tensor,
        weight_I: Tensor,
        eps: float,
        out_TO: Tensor,
    ) -> None:
        """Add x to residual in place (None: nothing), and write the product of the RMS norm.

        Args:
            x_TI: In the activations' dtype.
            residual_TI: float32.
            weight_I: The norm's, float32.
            eps: Added to the mean square.
            out_TO: As of `DeviceLinear.write`.
        """

    @abstractmethod
    def write_silu_mul(self, gate_up_T2I: Tensor, out_TO: Tensor) -> None:
        """Write the product of silu(x[:, :I]) * x[:, I:]."""
