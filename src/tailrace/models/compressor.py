"""`tailrace quantize`: makes a 4-bit or FP8 checkpoint with llm-compressor, which is optional.

llm-compressor searches the scales (AWQ needs a calibration text for that) and writes
compressed-tensors. Here its input is prepared, its result is written whole or not at all, and where
the classic AWQ layout is asked for it is repacked. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tailrace.errors import ConfigError
from tailrace.models import gguf
from tailrace.models.awq_export import export_awq
from tailrace.models.config import load_config
from tailrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMES = ("awq", "fp8", "fp8-block")
_PRESETS = {"fp8": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK"}
"""What llm-compressor calls them; awq is put together, for its group is the user's."""
FORMATS = ("compressed-tensors", "awq-gemm")


@dataclass(frozen=True)
class Recipe:
    """What is made of a model."""

    scheme: str = "awq"
    """awq, fp8 (a scale for each output) or fp8-block (one for each 128 x 128)."""
    format: str = "compressed-tensors"
    """Or awq-gemm, AutoAWQ's classic layout, for scheme awq."""
    group: int = 128
    """Inputs that share a scale, for scheme awq."""
    samples: int = 128
    """Pieces of text that AWQ searches its scales on."""
    sample_tokens: int = 512

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ConfigError: One is unknown, or they do not go together.
        """
        for name, value, known in (
            ("scheme", self.scheme, SCHEMES),
            ("format", self.format, FORMATS),
        ):
            if value not in known:
                raise ConfigError(f"--{name} {value}: must be one of {', '.join(known)}")
        if self.format == "awq-gemm" and self.scheme != "awq":
            raise ConfigError(f"--format awq-gemm holds 4 bits, not --scheme {self.scheme}")
        if self.group < 8 or self.group % 8:
            raise ConfigError(f"--group-size {self.group}: must be a multiple of 8")
        if self.samples < 1 or self.sample_tokens < 1:
            raise ConfigError("--samples and --sample-tokens must be at least 1")


def quantize(model_path: str, out: Path, recipe: Recipe, text: str) -> None:
    """Write a quantised checkpoint; where the model is in 4 bits already, repack it.

    Args:
        model_path: As --model-path of `tailrace serve`.
        out: A folder that does not exist yet.
        recipe: What is made.
        text: What AWQ searches its scales on.

    Raises:
        ConfigError: `out` exists, the text is too short, or llm-compressor is not installed.
        ModelError: The checkpoint cannot be read, or not be held in the format.
    """
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; name a folder that is not")
    folder = gguf.resolve(model_path)
    config = load_config(folder)
    stored = config.quantization
    if stored is None:
        _require_groups(config.hidden_size, config.intermediate_size, recipe, folder)
        _require_compressor()
    elif recipe.format != "awq-gemm":
        raise ConfigError(
            f"{folder}: is quantised already ({stored.describe()}); only --format awq-gemm is "
            "left to make of it"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the result, so that it is renamed into place, whole.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch) / "compressed"
        if stored is None:
            _compress(folder, made, recipe, text)
        if recipe.format == "awq-gemm":
            export_awq(folder if stored is not None else made, Path(scratch) / "awq")
            made = Path(scratch) / "awq"
        made.rename(out)


def _require_groups(hidden: int, inner: int, recipe: Recipe, folder: Path) -> None:
    if recipe.scheme == "awq" and (hidden % recipe.group or inner % recipe.group):
        raise ConfigError(
            f"--group-size {recipe.group}: {folder} has layers with {hidden} and {inner} inputs, "
            "and both must be multiples of it"
        )


def _require_compressor() -> None:
    missing = [name for name in ("llmcompressor", "datasets") if not _is_installed(name)]
    if missing:
        raise ConfigError(
            f"`tailrace quantize` needs {' and '.join(missing)}, which is not installed: "
            "pip install 'tailrace[quantize]'"
        )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _compress(folder: Path, out: Path, recipe: Recipe, text: str) -> None:
    """Have llm-compressor write `out`."""
    samples = cut_samples(folder, recipe, text) if recipe.scheme == "awq" else []
    # It would ask the hub for a model card's sake.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from datasets import Dataset  # noqa: PLC0415 - an optional package
    from llmcompressor import oneshot  # noqa: PLC0415 - an optional package
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - it comes with the former

    # Processors multiply in half precision a hundred times slower.
    dtype = "auto" if torch.accelerator.is_available() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    calibration: dict[str, Any] = {}
    if samples:
        columns = {"input_ids": samples, "attention_mask": [[1] * len(ids) for ids in samples]}
        calibration = {
            "dataset": Dataset.from_dict(columns),
            "num_calibration_samples": len(samples),
            "max_seq_length": recipe.sample_tokens,
        }
    with _memory_that_can_be_pinned():
        oneshot(
            model=model,
            tokenizer=str(folder),
            recipe=_modifiers(recipe),
            output_dir=str(out),
            **calibration,
        )


def _modifiers(recipe: Recipe) -> list[Any]:
    from compressed_tensors.quantization import (  # noqa: PLC0415 - an optional package
        QuantizationArgs,
        QuantizationScheme,
    )
    from llmcompressor.modifiers.quantization import (  # noqa: PLC0415 - an optional package
        QuantizationModifier,
    )
    from llmcompressor.modifiers.transform.awq import (  # noqa: PLC0415 - an optional package
        AWQModifier,
    )

    if recipe.scheme != "awq":
        scheme = _PRESETS[recipe.scheme]
        return [QuantizationModifier(targets=["Linear"], scheme=scheme, ignore=["lm_head"])]
    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        strategy="group",
        group_size=recipe.group,
        symmetric=False,
        scale_dtype=torch.float16,  # what 4-bit layouts hold, whatever the model's dtype is
    )
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    return [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]


@contextlib.contextmanager
def _memory_that_can_be_pinned() -> Iterator[None]:
    """Without a GPU, have AWQ leave its memory as it is: 0.14 pins it, which torch then refuses."""
    if torch.accelerator.is_available():
        yield
        return
    from llmcompressor.pipelines.cache import (  # noqa: PLC0415 - an optional package
        IntermediatesCache,
    )

    pin = IntermediatesCache.pin_memory
    IntermediatesCache.pin_memory = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = pin


def cut_samples(folder: Path, recipe: Recipe, text: str) -> list[list[int]]:
    """Return the pieces of text, as token ids, spread evenly over it.

    Raises:
        ConfigError: The text is too short.
    """
    ids = Tokenizer.load(folder).encode(text, add_special_tokens=False, parse_special=False)
    size = recipe.sample_tokens
    if len(ids) < recipe.samples * size:
        raise ConfigError(
            f"--samples {recipe.samples} of --sample-tokens {size} need "
            f"{recipe.samples * size} tokens, and the text has {len(ids)}: give a longer one with "
            "--text, or lower them"
        )
    stride = len(ids) // recipe.samples
    return [ids[start * stride : start * stride + size] for start in range(recipe.samples)]
