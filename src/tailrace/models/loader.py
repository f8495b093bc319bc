"""From a checkpoint folder to a model that runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tailrace.errors import ModelError
from tailrace.models.builder import Builder
from tailrace.models.checkpoint import Checkpoint, RandomTensors
from tailrace.models.config import load_config
from tailrace.models.kv_scales import KV_SCALE_NAMES
from tailrace.models.quantization import chosen
from tailrace.models.registry import builder_of

if TYPE_CHECKING:
    from pathlib import Path

    from tailrace.kernels.kernels import Kernels, WeightDtype
    from tailrace.models.causal_lm import CausalLM
    from tailrace.models.weight_reader import TensorSource

_DTYPES: dict[str, WeightDtype] = {
    "auto": "float16",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
}
"""On a CPU float16 weights are half the memory traffic; sums stay float32."""

_IGNORED = (r".*\.rotary_emb\.inv_freq", *KV_SCALE_NAMES)
"""Old Llama checkpoints store the rotary frequencies, which the config gives as well; KV scales are
read where the KV is float8."""


def load_model(
    folder: Path,
    *,
    dtype: str,
    kernels: Kernels,
    load_format: str = "auto",
    quant_type: str = "auto",
    seed: int = 0,
) -> CausalLM:
    """Load and pack a model.

    Args:
        folder: A Hugging Face folder; see `gguf.resolve` for other kinds of path.
        dtype: Of the weights: auto, float32, float16 or bfloat16. Activations are float32, but
            where bfloat16 matrices take them.
        kernels: Run the model, and pack its weights to their liking.
        load_format: "auto" reads safetensors; "dummy" needs config.json alone.
        quant_type: "auto" reads weights as the checkpoint says; "fp8" also rounds plain ones, and
            those in 4 bits; see `quantization.chosen`.
        seed: Of dummy weights.

    Raises:
        ModelError: The checkpoint is not supported, or not whole; names what is wrong. Or the GPU
            has no memory for it.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} must be one of {', '.join(_DTYPES)}")
    config = load_config(folder)
    source = _source(folder, load_format, seed, kernels.device)
    quantization = chosen(quant_type, config.quantization, folder / "config.json")
    if quantization is not None and load_format == "dummy":
        quantization = quantization.rounded()
    config = replace(config, quantization=quantization)
    builder = Builder(config, source, kernels, _DTYPES[dtype])
    try:
        model = builder_of(config.architecture)(builder)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{folder}: the GPU has no memory for its weights, or for packing them "
            f"({str(error).splitlines()[0]}); end what else runs there, or serve fewer bits"
        ) from error
    # A tied checkpoint may carry the head as well; transformers ignores it there, too.
    source.finish((*_IGNORED, r"lm_head\.weight") if config.tie_word_embeddings else _IGNORED)
    return model


def describe_weights(model: CausalLM) -> str:
    """Say in one line what the weights take, how they are computed, and what they were read from.

    Such as "256 MiB of weights: 121 x fbgemm float16; read from awq, 4 bits in groups of 64".
    """
    names = ", ".join(f"{count} x {name}" for name, count in model.linear_names.most_common())
    stored = model.config.quantization
    origin = "" if stored is None else f"; read from {stored.describe()}"
    return f"{model.weight_bytes / 2**20:,.0f} MiB of weights: {names}{origin}"


def _source(folder: Path, load_format: str, seed: int, device: torch.device) -> TensorSource:
    if load_format == "dummy":
        return RandomTensors(seed, device)
    if load_format == "auto":
        return Checkpoint(folder)
    raise ModelError(f"load format {load_format!r} must be auto or dummy")
