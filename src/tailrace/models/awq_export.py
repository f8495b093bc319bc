"""Repacks compressed-tensors' 4-bit weights into AutoAWQ's classic gemm layout.

No number changes: codes, zero points and scales are moved, and scales must be exact in float16,
which the layout prescribes. One shard is in memory at a time; its name stays.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from tailrace.errors import ModelError
from tailrace.kernels.linear.int4 import GroupInt4
from tailrace.models.checkpoint import Checkpoint
from tailrace.models.config import load_config
from tailrace.models.int4_packing import PER_WORD, pack_awq
from tailrace.models.quantization import PackedInt4
from tailrace.models.weight_reader import WeightReader

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


_INDEX = "model.safetensors.index.json"
_PACKED = ".weight_packed"
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
_CPU = torch.device("cpu")


def export_awq(folder: Path, out: Path) -> None:
    """Write a compressed-tensors checkpoint in AutoAWQ's layout.

    Args:
        folder: The checkpoint; its weights are in 4 bits, in groups of one size.
        out: An empty or missing folder.

    Raises:
        ModelError: The checkpoint is no such one, or holds what the layout cannot; names it.
    """
    layout = _layout_of(folder)
    checkpoint = Checkpoint(folder)
    packed = {name.removesuffix(_PACKED) for name in checkpoint.names if name.endswith(_PACKED)}
    if not packed:
        raise ModelError(f"{folder}: no tensor ends in {_PACKED}; there is nothing to repack")
    others = sorted(name for name in packed if not name.endswith("_proj"))
    if others:
        raise ModelError(
            f"{checkpoint.place(others[0] + _PACKED)}: AutoAWQ's layout leaves everything but "
            "projections as it is"
        )
    out.mkdir(parents=True, exist_ok=True)
    homes: dict[str, str] = {}
    for shard, names in checkpoint.shards.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            module, _, end = name.rpartition(".")
            if module not in packed or end not in _PARTS:
                tensors[name] = checkpoint.as_stored(name)
            elif name.endswith(_PACKED):
                tensors |= _repacked(checkpoint, module, layout)
        save_file(tensors, out / shard, {"format": "pt"})
        homes |= dict.fromkeys(tensors, shard)
    if (folder / _INDEX).exists():
        _write_json(out / _INDEX, {"metadata": {}, "weight_map": homes})
    _write_config(folder, out, layout.group, _plain_modules(checkpoint, packed))


def _layout_of(folder: Path) -> PackedInt4:
    stored = load_config(folder).quantization
    layouts = set() if stored is None else {rule.layout for rule in stored.rules}
    only = next(iter(layouts)) if len(layouts) == 1 else None
    if not isinstance(only, PackedInt4):
        found = "plain weights" if stored is None else stored.describe()
        raise ModelError(
            f"{folder}: {found}; --format awq-gemm needs compressed-tensors' pack-quantized 4-bit "
            "weights, all of one kind"
        )
    return only


def _repacked(checkpoint: Checkpoint, module: str, layout: PackedInt4) -> dict[str, Tensor]:
    """Return a layer's tensors in AutoAWQ's layout; its shape is what its own tensor says."""
    shape = checkpoint.take(f"{module}.weight_shape", (2,), types=(torch.int64, torch.int32))
    weight = WeightReader(checkpoint, _CPU).read(module, layout, *shape.tolist())
    if not isinstance(weight, GroupInt4):
        raise ModelError(f"{checkpoint.place(module)} was not read as 4 bits")
    outputs, _ = weight.shape
    if outputs % PER_WORD:
        raise ModelError(
            f"{checkpoint.place(module + _PACKED)}: {outputs} outputs are no multiple of "
            f"{PER_WORD}, which the gemm layout packs into a word"
        )
    scales = weight.scales.to(torch.float16)
    if not torch.equal(scales.to(torch.float32), weight.scales.to(torch.float32)):
        raise ModelError(
            f"{checkpoint.place(module)}.weight_scale: scales in {weight.scales.dtype} that "
            "float16 does not hold exactly; quantise the model in float16"
        )
    return {
        f"{module}.qweight": pack_awq(weight.unpacked().t().contiguous()),
        f"{module}.qzeros": pack_awq(weight.zeros.t().contiguous()),
        f"{module}.scales": scales.t().contiguous(),
    }


def _plain_modules(checkpoint: Checkpoint, packed: set[str]) -> list[str]:
    """Return the linear layers that are not quantised, but for the head: it never is."""
    modules = {name.removesuffix(".weight") for name in checkpoint.names}
    return sorted(name for name in modules - packed if name.endswith("_proj"))


def _write_config(folder: Path, out: Path, group: int, plain: list[str]) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": plain or None,
    }
    _write_json(out / "config.json", config)
    for file in folder.iterdir():
        beside = file.suffix != ".safetensors" and file.name not in ("config.json", _INDEX)
        if beside and file.is_file():
            shutil.copy(file, out / file.name)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
