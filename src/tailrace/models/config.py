"""What a checkpoint's config.json says, checked and under one set of names.

Two generations of files exist: older ones hold `rope_theta` and `rope_scaling`, transformers 5
writes both into `rope_parameters`. What this package cannot compute is refused by name here,
before a weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tailrace.errors import ModelError
from tailrace.models.quantization import Quantization, read_quantization

if TYPE_CHECKING:
    from pathlib import Path

# These size what is made before any tensor can contradict them: a damaged file must not make
# this process run out of memory.
_LIMITS = {"num_layers": 10_000, "head_dim": 1024, "max_position": 2**24}

_FileType = TypeVar("_FileType", bound=msgspec.Struct)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's rotary scaling: slow waves are stretched by `factor`, fast ones are kept.

    A wave is slow where it turns fewer than `low_freq_factor` times within
    `original_max_position` tokens, fast where it turns more than `high_freq_factor` times, and is
    blended in between.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer."""

    architecture: str
    """The Hugging Face class name, such as "LlamaForCausalLM"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Most tokens of one sequence."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    """None is the plain rotary embedding."""
    tie_word_embeddings: bool
    attention_bias: bool
    """Biases on the q, k and v projections."""
    attention_out_bias: bool
    """A bias on the attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMS norm of each head's q and k before the rotation."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    quantization: Quantization | None = None
    """How the linear layers are stored; None is plain."""


@dataclass(frozen=True)
class _Traits:
    """What an architecture fixes without saying so in config.json."""

    attention_bias: bool | None = None
    """None: the file's `attention_bias` decides."""
    attention_out_bias: bool | None = None
    qk_norm: bool = False


_TRAITS = {
    "LlamaForCausalLM": _Traits(),
    "Qwen2ForCausalLM": _Traits(attention_bias=True, attention_out_bias=False),
    "Qwen3ForCausalLM": _Traits(qk_norm=True),
}


class _File(msgspec.Struct):
    """The fields of config.json that matter here; others are of no consequence."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    architectures: list[str] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28  # transformers' default for Qwen
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class _GenerationFile(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def load_config(folder: Path) -> ModelConfig:
    """Read config.json, and the end-of-sequence ids of generation_config.json where it exists.

    Args:
        folder: A Hugging Face checkpoint folder.

    Raises:
        ModelError: A file is missing or malformed, or asks for what is not supported.
    """
    file = folder / "config.json"
    raw = _read(file, _File)
    architecture = _architecture(raw, file)
    traits = _TRAITS[architecture]
    _refuse_unsupported(raw, file)
    eos = _eos_token_ids(raw, folder / "generation_config.json")
    theta, scaling = _rope(raw, file)
    stored = raw.quantization_config
    head_dim = raw.head_dim or raw.hidden_size // max(raw.num_attention_heads, 1)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=head_dim,
        max_position=raw.max_position_embeddings,
        rms_norm_eps=raw.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=raw.tie_word_embeddings,
        attention_bias=_trait(traits.attention_bias, raw.attention_bias),
        attention_out_bias=_trait(traits.attention_out_bias, raw.attention_bias),
        mlp_bias=raw.mlp_bias and architecture == "LlamaForCausalLM",
        qk_norm=traits.qk_norm,
        eos_token_ids=eos,
        bos_token_id=raw.bos_token_id,
        quantization=None if stored is None else read_quantization(stored, file),
    )
    _check_sizes(config, file)
    return config


def _trait(fixed: bool | None, from_file: bool) -> bool:
    return from_file if fixed is None else fixed


def _read(file: Path, kind: type[_FileType]) -> _FileType:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}; a checkpoint folder needs it") from error
    except msgspec.DecodeError as error:
        raise ModelError(f"{file}: {error}") from error


def _architecture(raw: _File, file: Path) -> str:
    named = raw.architectures or []
    if len(named) != 1 or named[0] not in _TRAITS:
        shown = ", ".join(named) or "none named"
        raise ModelError(
            f"{file}: architecture {shown} is not supported; supported are {', '.join(_TRAITS)}"
        )
    return named[0]


def _refuse_unsupported(raw: _File, file: Path) -> None:
    if raw.hidden_act != "silu":
        raise ModelError(f"{file}: hidden_act {raw.hidden_act!r} is not supported, only 'silu' is")
    if raw.partial_rotary_factor not in (None, 1.0):
        raise ModelError(
            f"{file}: partial_rotary_factor {raw.partial_rotary_factor} is not supported, "
            "only whole heads are rotated"
        )
    if _slides(raw):
        raise ModelError(
            f"{file}: sliding_window {raw.sliding_window} is in use and is not supported; "
            "only full attention is served"
        )


def _slides(raw: _File) -> bool:
    """Tell whether any layer attends through a sliding window."""
    if raw.layer_types is not None:
        return any(kind != "full_attention" for kind in raw.layer_types)
    if not raw.use_sliding_window or raw.sliding_window is None:
        return False
    return raw.max_window_layers < raw.num_hidden_layers


def _rope(raw: _File, file: Path) -> tuple[float, Llama3Scaling | None]:
    settings = dict(raw.rope_scaling or {}) | dict(raw.rope_parameters or {})
    theta = settings.get("rope_theta", raw.rope_theta)
    theta = 10000.0 if theta is None else theta
    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(theta, int | float) or theta <= 0:
        raise ModelError(f"{file}: rope_theta {theta!r} must be a number above 0")
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelError(f"{file}: partial_rotary_factor of the rope settings must be 1")
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise ModelError(f"{file}: rope type {kind!r} is not supported; default and llama3 are")
    return float(theta), _llama3(settings, file)


def _llama3(settings: dict[str, Any], file: Path) -> Llama3Scaling:
    def number(name: str) -> float:
        value = settings.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{file}: rope type llama3 needs {name} above 0, found {value!r}")
        return float(value)

    scaling = Llama3Scaling(
        factor=number("factor"),
        low_freq_factor=number("low_freq_factor"),
        high_freq_factor=number("high_freq_factor"),
        original_max_position=int(number("original_max_position_embeddings")),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ModelError(
            f"{file}: rope type llama3 needs low_freq_factor ({scaling.low_freq_factor}) below "
            f"high_freq_factor ({scaling.high_freq_factor})"
        )
    return scaling


def _eos_token_ids(raw: _File, generation_file: Path) -> tuple[int, ...]:
    """Return the ids that end a sequence; generation_config.json wins, as in `generate()`."""
    eos = raw.eos_token_id
    if generation_file.exists():
        named = _read(generation_file, _GenerationFile).eos_token_id
        eos = eos if named is None else named
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _check_sizes(config: ModelConfig, file: Path) -> None:
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "max_position",
        "rms_norm_eps",
    ):
        value = getattr(config, name)
        if value <= 0:
            raise ModelError(f"{file}: {name} is {value}, must be above 0")
    for name, limit in _LIMITS.items():
        if getattr(config, name) > limit:
            raise ModelError(
                f"{file}: {name} {getattr(config, name)} is above {limit}, which no known model is"
            )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{file}: {config.num_heads} attention heads cannot share "
            f"{config.num_kv_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise ModelError(f"{file}: head_dim {config.head_dim} is odd; rotation needs pairs")
    for token_id in config.eos_token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise ModelError(
                f"{file}: end-of-sequence id {token_id} is outside the vocabulary of "
                f"{config.vocab_size}"
            )
