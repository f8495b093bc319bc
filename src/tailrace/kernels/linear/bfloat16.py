"""A linear layer in bfloat16, for processors that multiply it in hardware (AVX512-BF16, AMX).

Weights AND activations are rounded to bfloat16's 8 bits of precision; products are summed in
float32, and the result is rounded once more. That is what GPUs serve by default, and on such a CPU
three to four times the rate of float32. Elsewhere oneDNN emulates it, slower than float32: there it
is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def require_hardware() -> None:
    """Refuse processors that would emulate bfloat16.

    Raises:
        ConfigError: This processor has neither AVX512-BF16 nor AMX tiles.
    """
    if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):  # noqa: SLF001 - torch offers no public name
        raise ConfigError(
            "--dtype bfloat16: this processor has neither AVX512-BF16 nor AMX, and would emulate "
            "it slower than float16; use --dtype auto"
        )


class Bfloat16Linear:
    """x @ weight.T + bias, both rounded to bfloat16; the weight given may be freed after packing.

    Raises:
        ConfigError: This processor has no bfloat16 products.
    """

    name = "oneDNN bfloat16"

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        require_hardware()
        weight_OI = weight_OI.to(torch.bfloat16).contiguous()
        self._bias_O = None if bias_O is None else bias_O.to(torch.bfloat16).contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)  # noqa: SLF001 - torch offers no public name
        self._nbytes = weight_OI.nbytes + (0 if self._bias_O is None else self._bias_O.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight and bias."""
        return self._nbytes

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return float32 [T, O], each value one that bfloat16 can hold."""
        y_TO = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - as above
            x_TI.to(torch.bfloat16), self._packed, self._bias_O, "none", [], ""
        )
        return cast("Tensor", y_TO).to(torch.float32)  # torch's operator namespace is untyped
