"""Writes quantised checkpoints in the public layouts, and beside each the plain one it stands for.

The rounding is the nearest value (no calibration), and the packing is written out with shifts, one
column at a time: by another way than the program's own, which the tests hold beside it.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny import write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Written:
    """A quantised layer: its tensors by the end of their names, and the weight they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


@dataclass(frozen=True)
class Format:
    """A layout: config.json's `quantization_config`, and what becomes of a weight [N, K]."""

    config: dict[str, Any]
    write: Callable[[Tensor], Written]


def words_along_columns(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack int [R, C] into int32 [R, C/8]: bits 4i.. of a word hold its column order[i]."""
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= numbers[:, column::8].to(torch.int64) << (4 * place)
    return (words - (words >> 31 << 32)).to(torch.int32)


def rounded(
    weight: Tensor, group: int, *, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return codes 0..15 [N, K], zeros [N, K/g], scales [N, K/g] of `dtype`, and the values."""
    groups = weight.float().unflatten(1, (-1, group))
    if symmetric:
        scales = (groups.abs().amax(-1) / 7.5).clamp(min=1e-5).to(dtype)
        zeros = torch.full(scales.shape, 8)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=1e-5).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, 15).long()
    wide, middle = scales.float().unsqueeze(-1), zeros.unsqueeze(-1)
    codes = ((groups / wide).round() + middle).clamp(0, 15).long()
    values = (codes - middle) * wide
    return codes.flatten(1), zeros, scales, values.flatten(1)


def awq(group: int, dtype: torch.dtype = torch.float16, **config: Any) -> Format:
    """AutoAWQ's gemm layout."""

    def write(weight: Tensor) -> Written:
        size = weight.shape[1] if group == -1 else group
        codes, zeros, scales, values = rounded(weight, size, symmetric=False, dtype=dtype)
        tensors = {
            "qweight": words_along_columns(codes.t().contiguous(), AWQ_ORDER),
            "qzeros": words_along_columns(zeros.t().contiguous(), AWQ_ORDER),
            "scales": scales.t().contiguous(),
        }
        return Written(tensors, values)

    told = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return Format(told | {"version": "gemm", "modules_to_not_convert": None} | config, write)


def packed(
    group: int, *, symmetric: bool, dtype: torch.dtype = torch.bfloat16, **config: Any
) -> Format:
    """compressed-tensors' pack-quantized; group -1 is strategy "channel"."""

    def write(weight: Tensor) -> Written:
        size = weight.shape[1] if group == -1 else group
        codes, zeros, scales, values = rounded(weight, size, symmetric=symmetric, dtype=dtype)
        tensors = {
            "weight_packed": words_along_columns(codes),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            packed_zeros = words_along_columns(zeros.t().contiguous()).t().contiguous()
            tensors["weight_zero_point"] = packed_zeros
        return Written(tensors, values)

    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False}
    if group == -1:
        weights |= {"strategy": "channel", "group_size": None}
    else:
        weights |= {"strategy": "group", "group_size": group}
    return Format(_compressed("pack-quantized", weights, None) | config, write)


def compressed_float8(strategy: str, *, static: bool = False, **config: Any) -> Format:
    """compressed-tensors' float-quantized: strategy tensor, channel or block."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    weights |= {"strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    inputs = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs |= {"strategy": "tensor" if static else "token", "dynamic": not static}
    told = _compressed("float-quantized", weights, inputs)
    scale_dtype = torch.bfloat16 if strategy == "channel" else torch.float32
    return Format(told | config, _float8_writer(strategy, "weight_scale", scale_dtype, static))


def float8(*, blocks: bool, static: bool = False, **config: Any) -> Format:
    """`quant_method: fp8`: with blocks as Qwen and DeepSeek publish, else one scale."""
    told: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3"}
    told["activation_scheme"] = "static" if static else "dynamic"
    if blocks:
        told["weight_block_size"] = [128, 128]
    name = "weight_scale_inv" if blocks else "weight_scale"
    strategy = "block" if blocks else "scalar"
    return Format(told | config, _float8_writer(strategy, name, torch.float32, static))


def _float8_writer(
    strategy: str, name: str, scale_dtype: torch.dtype, static: bool
) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        wide = weight.float()
        if strategy == "block":
            scales, spread = _block_scales(wide, scale_dtype)
        else:
            peaks = wide.abs().amax(1, keepdim=True) if strategy == "channel" else wide.abs().amax()
            scales = (peaks / 448).clamp(min=1e-12).to(scale_dtype)
            scales = scales.reshape(1) if strategy == "tensor" else scales
            spread = scales.float()
        values = (wide / spread).clamp(-448, 448).to(FLOAT8)
        tensors = {"weight": values, name: scales}
        if static:
            tensors["input_scale"] = torch.tensor([0.03])
        return Written(tensors, values.float() * spread)

    return write


def _block_scales(wide: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = (-(-size // 128) for size in wide.shape)
    scales = torch.empty(rows, columns, dtype=dtype)
    spread = torch.empty_like(wide)
    for row in range(rows):
        for column in range(columns):
            at = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scales[row, column] = wide[at].abs().amax() / 448
            spread[at] = scales[row, column].float()
    return scales, spread


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group | {"output_activations": None}},
    }


def write_quantized(
    source: Path,
    folder: Path,
    form: Format,
    *,
    layers: str = "_proj",
    plain: tuple[str, ...] = (),
) -> Path:
    """Write a checkpoint with its projections quantised; return its folder.

    Beside it, `folder`-plain holds the float32 weights that it stands for.

    Args:
        source: A plain checkpoint in one safetensors file.
        folder: Where to.
        form: The layout.
        layers: Part of the names of the layers that are quantised.
        plain: Names of layers that are not, whatever `layers` says.
    """
    tensors, stands_for = {}, {}
    for name, value in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_linear = layers in name and name.endswith(".weight") and value.ndim == 2
        if not is_linear or module in plain:
            tensors[name] = stands_for[name] = value
            continue
        written = form.write(value)
        tensors |= {f"{module}.{end}": part for end, part in written.tensors.items()}
        stands_for[name] = written.weight.contiguous()
    config = json.loads((source / "config.json").read_text())
    beside = plain_beside(folder)
    for target, values, told in (
        (folder, tensors, config | {"quantization_config": form.config}),
        (beside, stands_for, config),
    ):
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
        write_json(target / "config.json", told)
        save_file(values, target / "model.safetensors", {"format": "pt"})
    return folder


def plain_beside(folder: Path) -> Path:
    """Return where `write_quantized` puts the plain checkpoint."""
    return folder.with_name(f"{folder.name}-plain")


TINY_FORMATS = {
    "awq": lambda: awq(32),
    "awq-bfloat16": lambda: awq(32, torch.bfloat16),
    "awq-row": lambda: awq(-1),
    "packed": lambda: packed(32, symmetric=False),
    "packed-symmetric": lambda: packed(32, symmetric=True),
    "packed-channel": lambda: packed(-1, symmetric=False),
    "compressed-tensor": lambda: compressed_float8("tensor"),
    "compressed-channel": lambda: compressed_float8("channel"),
    "compressed-block": lambda: compressed_float8("block"),
    "compressed-static": lambda: compressed_float8("tensor", static=True),
    "fp8": lambda: float8(blocks=False),
    "fp8-static": lambda: float8(blocks=False, static=True),
    "fp8-block": lambda: float8(blocks=True),
}
"""Every layout at the tiny checkpoints' sizes."""
