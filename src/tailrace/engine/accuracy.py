"""How far a model, as it is served, is from its reference: over real text, position by position.

Both models read the same windows of text, chunk by chunk through a paged cache, as the engine has
them read prompts. At every position their next-token distributions p (reference) and q (served) are
compared:

    agreement     the share of positions where both name the same likeliest token
    divergence    the mean of sum(p * (log p - log q)), in nats

Positions are whole windows spread evenly over the text. The tokens are the text's own, so an early
difference does not make later ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tailrace.engine.accuracy_record import LEAST_POSITIONS, Finding, remember
from tailrace.engine.runner import allocate_kv
from tailrace.engine.setup import resolve, thread_count
from tailrace.errors import ConfigError
from tailrace.kernels.attention_batch import AttentionBatch
from tailrace.kernels.select import select
from tailrace.models.config import load_config
from tailrace.models.loader import describe_weights, load_model
from tailrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from tailrace.config import EngineConfig
    from tailrace.kernels.kernels import WeightDtype
    from tailrace.models.causal_lm import CausalLM, KVCache

WINDOW_TOKENS = 1024
"""Most tokens that a position looks back on."""
_CHUNK_TOKENS = 128
"""Tokens of one step: their distributions are held in float64, twice."""
_BLOCK_TOKENS = 16
_BLOCKS = WINDOW_TOKENS // _BLOCK_TOKENS


@dataclass(frozen=True)
class Bound:
    """What a served model must keep to."""

    agreement: float = 0.99
    divergence: float = 0.005
    """Nats."""


@dataclass(frozen=True)
class Device:
    """Where models run, and how their KV caches are made there."""

    device: torch.device
    allocate_kv: Callable[[CausalLM, int, int], list[KVCache]]
    """Takes the model, a number of blocks and the tokens of one."""
    index: torch.dtype
    """Of rows' positions and slots, as the kernels there take them."""


CPU = Device(torch.device("cpu"), allocate_kv, torch.int64)


@dataclass(frozen=True)
class Accuracy:
    """What was found."""

    positions: int
    agreement: float
    """Share of positions with the same likeliest token."""
    divergence: float
    """Mean, in nats."""
    worst_divergence: float
    """Of any position, in nats."""
    perplexity: float
    """Of the served model, on the text."""
    reference_perplexity: float
    served: str
    """What was compared, in words."""
    reference: str

    def keeps(self, bound: Bound) -> bool:
        """Tell whether both figures are within their bounds."""
        return self.agreement >= bound.agreement and self.divergence <= bound.divergence

    def describe(self, bound: Bound) -> str:
        """Say it in a few lines."""
        kept = "kept" if self.keeps(bound) else "MISSED"
        return (
            f"served      {self.served}\n"
            f"reference   {self.reference}\n"
            f"positions   {self.positions:,}\n"
            f"agreement   {self.agreement:.4%} of likeliest tokens (bound {bound.agreement:.2%})\n"
            f"divergence  {self.divergence:.6f} nats in the mean (bound {bound.divergence:g}), "
            f"{self.worst_divergence:.4f} at worst\n"
            f"perplexity  {self.perplexity:.4f}, the reference's {self.reference_perplexity:.4f}\n"
            f"bound       {kept}"
        )


def check_accuracy(
    config: EngineConfig,
    text: str,
    *,
    positions: int,
    against: str = "",
    progress: Callable[[int], None] = lambda _: None,
) -> Accuracy:
    """Load a model as it is served and its reference, and compare them over a text.

    On a CPU the reference is computed in float32. On a GPU it is computed in the activations' dtype
    from unpacked weights, by the same attention. Where `config.prefill_weights` names a copy, every
    row goes by it, as prompts do.

    Args:
        config: The served model, as `tailrace serve` takes it.
        text: Real text of at least `positions` tokens.
        positions: How many are compared.
        against: The reference's path; empty: the same checkpoint.
        progress: Is told how many positions each step brought.

    Raises:
        ConfigError: The text is too short, or the models have different vocabularies.
        ModelError: A checkpoint cannot be read.
    """
    folder = resolve(config)
    behind = resolve(replace(config, model_path=against)) if against else folder
    longest = min(load_config(place).max_position for place in (folder, behind))
    windows = cut_windows(
        _token_ids(folder, behind, text), positions, window_tokens=min(longest, WINDOW_TOKENS)
    )
    device, served, reference = _load(config, folder, behind)
    if served.config.vocab_size != reference.config.vocab_size:
        raise ConfigError(
            f"--against {against}: its vocabulary of {reference.config.vocab_size} is not that of "
            f"{config.model_path}, {served.config.vocab_size}"
        )
    return compare(served, reference, windows, device, progress)


def record(config: EngineConfig, found: Accuracy, *, against: str) -> str:
    """Keep what was found of a prompts' copy, for `--prefill-weights auto`; say where, or why not.

    Args:
        config: The served model; `prefill_weights` names the copy.
        found: From `check_accuracy`.
        against: The reference's path; only a checkpoint's own precision is a measure of a copy.

    Raises:
        ConfigError: The record cannot be written.
    """
    if against:
        return "not recorded: the reference is another checkpoint"
    if found.positions < LEAST_POSITIONS:
        return f"not recorded: fewer than {LEAST_POSITIONS:,} positions"
    finding = Finding(
        prefill_weights=config.prefill_weights,
        dtype=activations(config),
        positions=found.positions,
        agreement=found.agreement,
        divergence=found.divergence,
    )
    return f"recorded    {remember(resolve(config), finding)}"


def cut_windows(
    token_ids: list[int], positions: int, *, window_tokens: int = WINDOW_TOKENS
) -> list[list[int]]:
    """Return windows of `positions` tokens in all, and spread evenly over the text.

    A window's last token is only the answer to the position before it.

    Args:
        token_ids: The text.
        positions: How many are to be compared.
        window_tokens: Positions of one window.

    Raises:
        ConfigError: The text is too short.
    """
    sizes = [window_tokens] * (positions // window_tokens)
    if positions % window_tokens:
        sizes.append(positions % window_tokens)
    needed = positions + len(sizes)
    if positions < 1 or len(token_ids) < needed:
        raise ConfigError(
            f"--positions {positions}: must be at least 1, and the text has {len(token_ids)} "
            f"tokens where {needed} are needed; give a longer one with --text, or lower it"
        )
    slack = (len(token_ids) - needed) // max(len(sizes) - 1, 1)
    windows, start = [], 0
    for size in sizes:
        windows.append(token_ids[start : start + size + 1])
        start += size + 1 + slack
    return windows


def compare(
    served: CausalLM,
    reference: CausalLM,
    windows: list[list[int]],
    device: Device,
    progress: Callable[[int], None] = lambda _: None,
) -> Accuracy:
    """Compare two loaded models over windows of tokens; see the module's docstring.

    Args:
        served: As the engine would run it.
        reference: What it is held to.
        windows: From `cut_windows`.
        device: Where both models are.
        progress: Is told how many positions each step brought.
    """
    agreed: list[Tensor] = []
    divergences: list[Tensor] = []
    surprises: list[Tensor] = []
    readers = [
        _Reader(model, device.allocate_kv(model, _BLOCKS, _BLOCK_TOKENS), device)
        for model in (served, reference)
    ]
    for window in windows:
        answers = torch.tensor(window[1:])
        chunks = zip(*(reader.read(window[:-1]) for reader in readers), strict=True)
        for start, (q, p) in zip(range(0, len(answers), _CHUNK_TOKENS), chunks, strict=True):
            agreed.append(q.argmax(-1) == p.argmax(-1))
            # A token of probability 0 in the reference costs nothing: 0 * log 0 is 0.
            costs = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
            divergences.append(costs.sum(-1))
            wanted = answers[start : start + len(q)].to(q.device).unsqueeze(1)
            surprises.append(-torch.stack([q.gather(1, wanted), p.gather(1, wanted)]).squeeze(-1))
            progress(len(q))
    divergence = torch.cat(divergences)
    perplexity, reference_perplexity = torch.cat(surprises, dim=1).mean(1).exp().tolist()
    return Accuracy(
        positions=len(divergence),
        agreement=torch.cat(agreed).double().mean().item(),
        divergence=divergence.mean().item(),
        worst_divergence=divergence.max().item(),
        perplexity=perplexity,
        reference_perplexity=reference_perplexity,
        served=describe_weights(served),
        reference=describe_weights(reference),
    )


@dataclass(frozen=True)
class _Reader:
    """Reads one window after the other, over a cache that holds one."""

    model: CausalLM
    caches: list[KVCache]
    device: Device

    @torch.inference_mode()
    def read(self, token_ids: list[int]) -> Iterator[Tensor]:
        """Yield natural-log probabilities, float64 [rows, V], of one chunk after the other."""
        for start in range(0, len(token_ids), _CHUNK_TOKENS):
            chunk = token_ids[start : start + _CHUNK_TOKENS]
            ids = torch.tensor(chunk, device=self.device.device)
            hidden = self.model.forward(ids, self._batch(start, len(chunk)), self.caches)
            yield self.model.logits(hidden).double().log_softmax(-1)

    def _batch(self, start: int, rows: int) -> AttentionBatch:
        end = start + rows
        places = torch.arange(start, end, dtype=self.device.index, device=self.device.device)

        def here(values: list[int] | range) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device.device)

        return AttentionBatch(
            query_starts=here([0, rows]),
            kv_lens=here([end]),
            block_tables=here(range(_BLOCKS)).unsqueeze(0),
            positions=places,
            slots=places,
            max_query_len=rows,
            max_kv_len=end,
        )


def _token_ids(folder: Path, behind: Path, text: str) -> list[int]:
    """Return the text's tokens, after making sure that both models read it alike."""
    ids = Tokenizer.load(folder).encode(text, add_special_tokens=False, parse_special=False)
    if behind != folder:
        other = Tokenizer.load(behind).encode(text, add_special_tokens=False, parse_special=False)
        if other != ids:
            raise ConfigError(
                f"{behind}: its tokenizer cuts the text differently from {folder}'s; only models "
                "of one vocabulary can be compared"
            )
    return ids


def _load(config: EngineConfig, folder: Path, behind: Path) -> tuple[Device, CausalLM, CausalLM]:
    if config.gpus:
        return _load_on_gpu(config, folder, behind)
    kernels = select(config.cpu_kernels, thread_count(config.threads))
    dtype = "float16" if config.dtype == "auto" else config.dtype
    served = load_model(folder, dtype=dtype, kernels=kernels, quant_type=config.quant_type)
    return CPU, served, load_model(behind, dtype="float32", kernels=kernels)


def _load_on_gpu(
    config: EngineConfig, folder: Path, behind: Path
) -> tuple[Device, CausalLM, CausalLM]:
    # Triton is imported with these: a CPU build of torch has none.
    from tailrace.engine import cuda_runner  # noqa: PLC0415
    from tailrace.engine.cuda_setup import load_device  # noqa: PLC0415
    from tailrace.engine.prefill_weights import choose, with_copy  # noqa: PLC0415
    from tailrace.kernels.triton_kernels import TritonKernels, UnpackedTritonKernels  # noqa: PLC0415

    device = load_device(config.gpus[0])
    dtype = activations(config)
    kernels = TritonKernels(device, dtype)
    served = load_model(folder, dtype=dtype, kernels=kernels, quant_type=config.quant_type)
    if config.prefill_weights != "auto":
        choice = choose(config.prefill_weights, kernels, served, {})
        if choice.format is not None:
            served = with_copy(served, kernels, choice.format)
        elif config.prefill_weights != "same":
            raise ConfigError(
                f"--prefill-weights {config.prefill_weights}: {choice.words}, so no copy is made "
                "that could be measured; leave it out"
            )
    reference = load_model(behind, dtype=dtype, kernels=UnpackedTritonKernels(device, dtype))

    def allocate(model: CausalLM, blocks: int, block_tokens: int) -> list[KVCache]:
        return cuda_runner.allocate_kv(model, blocks, block_tokens, kernels.dtype, device)

    return Device(device, allocate, torch.int32), served, reference


def activations(config: EngineConfig) -> WeightDtype:
    """Return the dtype of activations on a GPU."""
    return "bfloat16" if config.dtype == "auto" else config.dtype  # type: ignore[return-value]  # checked by the config
