"""The KV scales that a checkpoint brings: one number for a layer's keys and one for its values.

The tools spell them in three ways, each a tensor of one element that multiplies what was kept:

    model.layers.N.self_attn.k_scale                 compressed-tensors' `kv_cache_scheme`
    model.layers.N.self_attn.k_proj.k_scale          ModelOpt
    model.layers.N.self_attn.k_proj.output_scale     AutoFP8, Quark

and likewise for v. Scales of queries or probabilities (`q_scale`, `prob_scale`) serve kernels that
compute attention in float8; ours does not, so they are left alone.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from tailrace.errors import ModelError
from tailrace.kernels.kv_scales import KVScales
from tailrace.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

KV_SCALE_NAMES = (
    r"model\.layers\.\d+\.self_attn\.(q|k|v|prob|p)_scale",
    r"model\.layers\.\d+\.self_attn\.(q|k|v)_proj\.((q|k|v)_scale|output_scale)",
    r"model\.layers\.\d+\.self_attn\.prob_output_scale",
)
"""Names that `Checkpoint.finish` may find left over, whatever the KV's dtype."""

_OURS = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"((?P<short>[kv])_scale|(?P<long>[kv])_proj\.((?P=long)_scale|output_scale))"
)


def find_kv_scales(checkpoint: Checkpoint, num_layers: int) -> list[KVScales] | None:
    """Return the checkpoint's scales, one a layer, or None where it has none at all.

    Raises:
        ModelError: Some layers have scales and others have none, or one is no positive number.
    """
    found = _places(checkpoint.names)
    if not found:
        return None
    wanted = [(layer, which) for layer in range(num_layers) for which in "kv"]
    missing = [f"layer {layer}'s {which}" for layer, which in wanted if (layer, which) not in found]
    if missing:
        raise ModelError(
            f"{checkpoint.folder}: KV scales are there for some layers only; missing: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
        )
    return [_layer(checkpoint, found[layer, "k"], found[layer, "v"]) for layer in range(num_layers)]


class _Scheme(msgspec.Struct):
    """compressed-tensors' `kv_cache_scheme`, as far as it matters here."""

    num_bits: int = 8
    type: str = "float"
    strategy: str | None = "tensor"
    symmetric: bool = True
    dynamic: bool | str = False


class _Quantization(msgspec.Struct):
    kv_cache_scheme: _Scheme | None = None


class _Config(msgspec.Struct):
    quantization_config: _Quantization | None = None


def read_kv_scales(folder: Path, num_layers: int) -> list[KVScales] | None:
    """Return the scales of a checkpoint's folder, or None where it neither has nor promises any.

    Raises:
        ModelError: As `find_kv_scales`; or config.json's `kv_cache_scheme` is of another kind, or
            promises static scales that are not there.
    """
    file = folder / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{file}: {error}") from error
    scheme = config.quantization_config and config.quantization_config.kv_cache_scheme
    if scheme and (scheme.type, scheme.num_bits, scheme.symmetric, scheme.strategy) != (
        "float", 8, True, "tensor",
    ):  # fmt: skip
        raise ModelError(
            f"{file}: kv_cache_scheme {scheme.type!r} in {scheme.num_bits} bits by "
            f"{scheme.strategy!r} is not supported, only symmetric 'float' in 8 by 'tensor' is; "
            "use --kv-cache-dtype auto"
        )
    found = find_kv_scales(Checkpoint(folder), num_layers)
    if found is None and scheme and scheme.dynamic is False:
        raise ModelError(
            f"{file}: kv_cache_scheme promises static scales, and the checkpoint has none such as "
            "model.layers.0.self_attn.k_scale; use --kv-cache-dtype auto"
        )
    return found


def _places(names: Iterable[str]) -> dict[tuple[int, str], str]:
    places = {}
    for name in names:
        match = _OURS.fullmatch(name)
        if match is not None:
            places[int(match["layer"]), match["short"] or match["long"]] = name
    return places


def _layer(checkpoint: Checkpoint, k_name: str, v_name: str) -> KVScales:
    k, v = (checkpoint.take_number(name) for name in (k_name, v_name))
    try:
        return KVScales(k, v)
    except ModelError as error:
        raise ModelError(f"{checkpoint.folder}: {k_name}, {v_name}: {error}") from error
