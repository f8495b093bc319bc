"""What config.json's `quantization_config` says: the layout of each linear layer's tensors.

Three families of checkpoints are read, told apart by `quant_method`:

    awq                 AutoAWQ's gemm layout: 4 bits, zero points, packed along the outputs
    compressed-tensors  pack-quantized (4 bits, packed along the inputs) and float-quantized (FP8),
                        each for the layers that `config_groups` name
    fp8                 FP8 with one scale, or a scale for each 128 x 128 block (`weight_scale_inv`)

`--quant-type fp8` makes FP8 of what is not: of plain weights, and of 4 bits by way of the values
that they stand for. FP8 checkpoints stay as they are.

A layout is plain data; `weight_reader` reads by it. Whatever else a config asks for is refused
here, before any tensor is touched: a checkpoint read by the wrong rule gives fluent nonsense.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from tailrace.config import QUANT_TYPES
from tailrace.errors import ModelError, nearest

if TYPE_CHECKING:
    from pathlib import Path

Float8Grain = Literal["tensor", "channel", "block128"]

_FileType = TypeVar("_FileType", bound=msgspec.Struct)


@dataclass(frozen=True)
class AwqInt4:
    """`qweight` int32 [K, N/8], `qzeros` int32 [K/group, N/8], `scales` [K/group, N]."""

    group: int
    """Inputs that share a scale; -1: all of a row's."""


@dataclass(frozen=True)
class PackedInt4:
    """`weight_packed` int32 [N, K/8], `weight_scale` [N, K/group], `weight_shape` [2].

    Where it is not symmetric also `weight_zero_point` int32 [N/8, K/group].
    """

    group: int
    symmetric: bool


@dataclass(frozen=True)
class StoredFloat8:
    """`weight` float8_e4m3fn [N, K] and its scales, which multiply whatever their name says."""

    grain: Float8Grain
    scale: str
    """The scales' name: weight_scale or weight_scale_inv."""
    static_inputs: bool
    """There is an `input_scale`. It is checked and left unused: activations are rounded to FP8 by
    scales of their own rows, or not at all, and either is nearer to the unrounded product."""


@dataclass(frozen=True)
class RoundedInt4:
    """A plain `weight`, rounded to 4 bits at load: dummy weights of a 4-bit checkpoint."""

    group: int


@dataclass(frozen=True)
class RoundedFloat8:
    """A plain `weight`, rounded to FP8 at load: `--quant-type fp8`, and dummy weights."""

    grain: Float8Grain


@dataclass(frozen=True)
class Float8OfInt4:
    """4 bits whose values are rounded to FP8 at load, a scale for each output."""

    stored: AwqInt4 | PackedInt4


Layout = AwqInt4 | PackedInt4 | StoredFloat8 | RoundedInt4 | RoundedFloat8 | Float8OfInt4


@dataclass(frozen=True)
class Rule:
    """Layers, and how their tensors are laid out."""

    targets: tuple[str, ...]
    """A layer's name, "re:" and a regular expression, or "Linear" for all of them."""
    layout: Layout


@dataclass(frozen=True)
class Quantization:
    """How the linear layers of one checkpoint are held in its files."""

    method: str
    """`quant_method`, or "fp8" where plain weights are rounded at load."""
    rules: tuple[Rule, ...]
    """The first whose targets name a layer counts."""
    plain: tuple[str, ...] = ()
    """Layers that are not quantised, named like targets."""
    to_float8: bool = False
    """Whether layers that are not in FP8 are rounded to it at load, all but the head."""

    def layout_of(self, module: str) -> Layout | None:
        """Return how a layer such as "model.layers.0.mlp.down_proj" is read; None is plain."""
        stored = self._stored_layout(module)
        return _float8_of(stored) if self.to_float8 and module != HEAD else stored

    def _stored_layout(self, module: str) -> Layout | None:
        if any(_names(target, module) for target in self.plain):
            return None
        for rule in self.rules:
            if any(_names(target, module) for target in rule.targets):
                return rule.layout
        return None

    def describe(self) -> str:
        """Say it in a few words, such as "awq, 4 bits in groups of 64, rounded to FP8"."""
        layouts = [rule.layout for rule in self.rules]
        if self.to_float8:
            layouts = [_float8_of(layout) for layout in layouts]
        kinds = list(dict.fromkeys(map(_in_words, layouts)))
        return f"{self.method}, {' and '.join(kinds)}"

    @property
    def is_float8(self) -> bool:
        """Whether every quantised layer is held in FP8."""
        return all(isinstance(rule.layout, StoredFloat8 | RoundedFloat8) for rule in self.rules)

    def rounded(self) -> Quantization:
        """Return the same formats made of plain weights, for a checkpoint of dummies."""
        rules = tuple(replace(rule, layout=_rounded(rule.layout)) for rule in self.rules)
        return replace(self, rules=rules)


HEAD = "lm_head"
"""The layer that gives logits: it stays as the checkpoint has it, whatever --quant-type rounds."""

ONLINE_FLOAT8 = Quantization("fp8", (Rule(("Linear",), RoundedFloat8("channel")),), plain=(HEAD,))
"""Plain weights rounded to FP8 at load, a scale for each output; the head stays as it is."""


def chosen(quant_type: str, stored: Quantization | None, file: Path) -> Quantization | None:
    """Return how weights are read: what --quant-type asks for and the checkpoint allows.

    Args:
        quant_type: One of `QUANT_TYPES`.
        stored: What the checkpoint says.
        file: Its config.json, for messages.

    Raises:
        ModelError: The checkpoint is in another format than the one asked for.
    """
    if quant_type == "auto":
        return stored
    if quant_type not in QUANT_TYPES:
        raise ModelError(
            f"--quant-type {quant_type}: must be one of {', '.join(QUANT_TYPES)}"
            f"{nearest(quant_type, QUANT_TYPES)}"
        )
    if stored is None:
        if quant_type == "none":
            return None
        if quant_type == "fp8":
            return ONLINE_FLOAT8
        raise ModelError(
            f"--quant-type {quant_type}: {file} has no quantization_config, so its weights are "
            "plain; `tailrace quantize` makes such a checkpoint"
        )
    if quant_type == "fp8":
        return stored if stored.is_float8 else replace(stored, to_float8=True)
    if quant_type == stored.method:
        return stored
    raise ModelError(
        f"--quant-type {quant_type}: {file} says quant_method {stored.method!r}; use auto"
    )


def read_quantization(raw: dict[str, Any], file: Path) -> Quantization:
    """Read `quantization_config`.

    Args:
        raw: Its value.
        file: config.json, for messages.

    Raises:
        ModelError: The method is unknown, or asks for what is not supported; says which.
    """
    readers = {"awq": _read_awq, "compressed-tensors": _read_compressed, "fp8": _read_float8}
    method = raw.get("quant_method")
    if not isinstance(method, str) or method not in readers:
        hint = nearest(method, readers) if isinstance(method, str) else ""
        raise ModelError(
            f"{file}: quantization_config with quant_method {method!r} is not supported{hint}; "
            f"supported are {', '.join(readers)}"
        )
    return readers[method](raw, f"{file}: quantization_config ({method})")


class _AwqFile(msgspec.Struct):
    bits: int = 4
    group_size: int = 128
    zero_point: bool = True
    version: str = "gemm"
    modules_to_not_convert: list[str] | None = None


def _read_awq(raw: dict[str, Any], at: str) -> Quantization:
    told = _converted(raw, _AwqFile, at)
    if told.bits != 4:
        raise ModelError(f"{at}: bits is {told.bits}, only 4 is supported")
    if told.version.lower() != "gemm":
        raise ModelError(f"{at}: version {told.version!r} is not supported, only 'gemm' is")
    if not told.zero_point:
        raise ModelError(f"{at}: zero_point false is not supported: the gemm layout has qzeros")
    layout = AwqInt4(_group(told.group_size, at))
    return Quantization("awq", (Rule(("Linear",), layout),), _parts(told.modules_to_not_convert))


class _Float8File(msgspec.Struct):
    activation_scheme: str = "dynamic"
    fmt: str = "e4m3"
    weight_block_size: list[int] | None = None
    ignored_layers: list[str] | None = None
    modules_to_not_convert: list[str] | None = None


def _read_float8(raw: dict[str, Any], at: str) -> Quantization:
    told = _converted(raw, _Float8File, at)
    if told.fmt != "e4m3":
        raise ModelError(f"{at}: fmt {told.fmt!r} is not supported, only 'e4m3' is")
    if told.activation_scheme not in ("dynamic", "static"):
        raise ModelError(
            f"{at}: activation_scheme {told.activation_scheme!r} must be dynamic or static"
        )
    static = told.activation_scheme == "static"
    if told.weight_block_size is None:
        layout = StoredFloat8("tensor", "weight_scale", static)
    else:
        _require_blocks(told.weight_block_size, f"{at}: weight_block_size")
        if static:
            raise ModelError(f"{at}: activation_scheme static does not go with blocks of weights")
        layout = StoredFloat8("block128", "weight_scale_inv", static_inputs=False)
    skipped = (told.ignored_layers or []) + (told.modules_to_not_convert or [])
    return Quantization("fp8", (Rule(("Linear",), layout),), _parts(skipped))


class _Numbers(msgspec.Struct):
    """One `QuantizationArgs` of compressed-tensors."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None


class _Group(msgspec.Struct):
    targets: list[str]
    weights: _Numbers | None = None
    input_activations: _Numbers | None = None
    output_activations: _Numbers | None = None
    format: str | None = None


class _CompressedFile(msgspec.Struct):
    config_groups: dict[str, _Group]
    format: str = "dense"
    ignore: list[str] | None = None
    quantization_status: str = "compressed"
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def _read_compressed(raw: dict[str, Any], at: str) -> Quantization:
    told = _converted(raw, _CompressedFile, at)
    if told.quantization_status != "compressed":
        raise ModelError(
            f"{at}: quantization_status {told.quantization_status!r} is not supported, only "
            "'compressed' is: save the checkpoint compressed"
        )
    for name in ("sparsity_config", "transform_config"):
        if getattr(told, name):
            raise ModelError(f"{at}: {name} is not empty; pruned or rotated weights are not served")
    rules = [
        _compressed_rule(group, group.format or told.format, f"{at}: {name}")
        for name, group in told.config_groups.items()
    ]
    if not rules:
        raise ModelError(f"{at}: config_groups is empty")
    # A name is more to the point than a pattern, and that more than the class of all layers.
    rules.sort(key=lambda rule: min(map(_breadth, rule.targets)))
    plain = tuple(told.ignore or ())
    for pattern in (*plain, *(target for rule in rules for target in rule.targets)):
        _require_pattern(pattern, at)
    return Quantization("compressed-tensors", tuple(rules), plain)


def _compressed_rule(group: _Group, form: str, at: str) -> Rule:
    weights = group.weights
    if weights is None:
        raise ModelError(f"{at}: no weights are described; that is not supported")
    if group.output_activations is not None:
        raise ModelError(f"{at}: output_activations are not supported")
    if not group.targets:
        raise ModelError(f"{at}: targets is empty")
    if form == "pack-quantized":
        layout: Layout = _packed_layout(weights, group.input_activations, at)
    elif form in ("float-quantized", "naive-quantized"):
        layout = _float8_layout(weights, group.input_activations, at)
    else:
        raise ModelError(
            f"{at}: format {form!r} is not supported; supported are pack-quantized and "
            "float-quantized"
        )
    return Rule(tuple(group.targets), layout)


def _packed_layout(weights: _Numbers, inputs: _Numbers | None, at: str) -> PackedInt4:
    if (weights.type, weights.num_bits) != ("int", 4):
        raise ModelError(
            f"{at}: weights of type {weights.type!r} in {weights.num_bits} bits are not supported "
            "in pack-quantized, only 'int' in 4 is"
        )
    if inputs is not None:
        raise ModelError(f"{at}: quantised input_activations beside 4-bit weights")
    if weights.actorder in (True, "group", "dynamic"):
        raise ModelError(
            f"{at}: actorder {weights.actorder!r} reorders inputs by weight_g_idx, which is not "
            "supported; 'weight' is"
        )
    if weights.strategy == "channel":
        return PackedInt4(-1, weights.symmetric)
    if weights.strategy != "group" or weights.group_size is None:
        raise ModelError(
            f"{at}: strategy {weights.strategy!r} (group_size {weights.group_size}) is not "
            "supported for 4-bit weights; group with a size, and channel, are"
        )
    return PackedInt4(_group(weights.group_size, at), weights.symmetric)


def _float8_layout(weights: _Numbers, inputs: _Numbers | None, at: str) -> StoredFloat8:
    if (weights.type, weights.num_bits, weights.symmetric) != ("float", 8, True):
        raise ModelError(
            f"{at}: weights of type {weights.type!r} in {weights.num_bits} bits are not supported "
            "here, only symmetric 'float' in 8 is"
        )
    static = False
    if inputs is not None:
        if (inputs.type, inputs.num_bits, inputs.symmetric) != ("float", 8, True):
            raise ModelError(
                f"{at}: input_activations of type {inputs.type!r} in {inputs.num_bits} bits are "
                "not supported beside FP8 weights, only symmetric 'float' in 8 is"
            )
        static = inputs.dynamic is False
        if static and inputs.strategy != "tensor":
            raise ModelError(
                f"{at}: static input_activations of strategy {inputs.strategy!r} are not "
                "supported, only 'tensor' is"
            )
    if weights.strategy == "block":
        _require_blocks(weights.block_structure, f"{at}: block_structure")
        return StoredFloat8("block128", "weight_scale", static)
    if weights.strategy == "tensor":
        return StoredFloat8("tensor", "weight_scale", static)
    if weights.strategy == "channel":
        return StoredFloat8("channel", "weight_scale", static)
    raise ModelError(
        f"{at}: strategy {weights.strategy!r} is not supported for FP8 weights; tensor, channel "
        "and block are"
    )


def _converted(raw: dict[str, Any], kind: type[_FileType], at: str) -> _FileType:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{at}: {error}") from error


def _group(size: int, at: str) -> int:
    if size != -1 and (size < 8 or size % 8):
        raise ModelError(f"{at}: group_size {size} must be -1 or a multiple of 8")
    return size


def _require_blocks(size: list[int] | None, at: str) -> None:
    if size != [128, 128]:
        raise ModelError(f"{at} {size} is not supported, only [128, 128] is")


def _require_pattern(pattern: str, at: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ModelError(f"{at}: {pattern!r} is no regular expression: {error}") from error


def _parts(names: list[str] | None) -> tuple[str, ...]:
    """Return AWQ's and fp8's exceptions as patterns; their heads are never quantised.

    A name there means that module and all below it, wherever in the tree it hangs.
    """
    inner = [rf"re:(.*\.)?{re.escape(name.strip('.'))}(\..*)?$" for name in names or []]
    return (HEAD, *inner)


def _breadth(target: str) -> int:
    return 2 if target == "Linear" else int(target.startswith("re:"))


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target in ("Linear", module)


def _rounded(layout: Layout) -> Layout:
    if isinstance(layout, AwqInt4 | PackedInt4):
        return RoundedInt4(layout.group)
    if isinstance(layout, StoredFloat8):
        return RoundedFloat8(layout.grain)
    return layout


def _float8_of(stored: Layout | None) -> Layout:
    """Return how a layer is read that is to be in FP8."""
    if isinstance(stored, AwqInt4 | PackedInt4):
        return Float8OfInt4(stored)
    if stored is None or isinstance(stored, RoundedInt4):
        # Dummies are plain: they are rounded once.
        return RoundedFloat8("channel")
    return stored


def _in_words(layout: Layout) -> str:
    if isinstance(layout, Float8OfInt4):
        return f"{_in_words(layout.stored)}, rounded to FP8"
    if isinstance(layout, StoredFloat8 | RoundedFloat8):
        words = f"FP8 with a scale a {layout.grain.replace('block128', 'block')}"
    else:
        words = f"4 bits in groups of {layout.group}" if layout.group != -1 else "4 bits by rows"
    return words + (" (rounded here)" if isinstance(layout, RoundedInt4 | RoundedFloat8) else "")
