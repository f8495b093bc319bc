"""How far a model, as it is served, is from its reference: over real text, position by position.

Both models read the same windows of text through a paged cache, in steps as the engine has. On a
GPU, kernels and even formats are chosen by a step's rows and by whether it decodes; so the text is
read twice, and both readings are held to the bound:

    prompts    one window after the other, up to 1024 rows a step
    decodes    32 windows beside one another, a row of each a step

On a CPU no result depends on the rows of a step, and one reading says it all. At every position the
models' next-token distributions p (reference) and q (served) are compared:

    agreement     the share of positions where both name the same likeliest token
    divergence    the mean of sum(p * (log p - log q)), in nats

Windows are as long as one another, and spread evenly over the text. The tokens are the text's own,
so an early difference does not make later ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from tailrace.engine.accuracy_record import (
    LEAST_POSITIONS,
    Finding,
    Known,
    Numerics,
    remember,
    require_room,
)
from tailrace.engine.runner import allocate_kv
from tailrace.engine.setup import resolve, thread_count
from tailrace.errors import ConfigError
from tailrace.kernels.attention_batch import AttentionBatch
from tailrace.kernels.select import select
from tailrace.models.config import load_config
from tailrace.models.loader import describe_weights, load_model
from tailrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from tailrace.config import EngineConfig
    from tailrace.kernels.kernels import WeightDtype
    from tailrace.kernels.kv_scales import KVScales
    from tailrace.models.causal_lm import CausalLM, KVCache

WINDOW_TOKENS = 1024
"""Most tokens that a position looks back on."""
_LOGIT_ROWS = 128
"""Rows whose distributions are held at once, in float64, twice."""
_BLOCK_TOKENS = 16
_ROUNDING = (
    "activations are rounded to bfloat16, by which two exact ways of computing a model name other "
    "likeliest tokens at 2 of 100 positions (SmolLM2); --dtype float16 tells the weights' share"
)


@dataclass(frozen=True)
class Reading:
    """One way of going over the text."""

    name: str
    rows: int
    """Most of one step."""
    decodes: bool = False
    """Whether a step has one row of each of several windows, instead of many of one."""

    def cut(self, token_ids: list[int], positions: int, longest: int) -> list[list[int]]:
        """Return windows of at most `longest` positions; see `cut_windows`.

        Raises:
            ConfigError: The text is too short.
        """
        most = min(longest, WINDOW_TOKENS)
        if self.decodes:  # as many windows as a step has rows, where there is text for it
            most = min(most, -(-max(positions, 1) // self.rows))
        return cut_windows(token_ids, positions, window_tokens=most)


TEXT = Reading("text", 128)
PROMPTS = Reading("prompts", WINDOW_TOKENS)
"""Windows have 512 rows or more where the text and the context do: other formats begin below."""
DECODES = Reading("decodes", 32, decodes=True)


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
    allocate_served_kv: Callable[[CausalLM, int, int], list[KVCache]] | None = None
    """The served model's, where it keeps KV in another dtype than its reference."""
    kv_scales: Sequence[KVScales] | None = None
    """Of the served model's KV, where that is float8."""
    numerics: Numerics | None = None
    """Of the served model; None on a CPU, where no copy serves prompts."""


CPU = Device(torch.device("cpu"), allocate_kv, torch.int64)


@dataclass(frozen=True)
class Accuracy:
    """What one reading found."""

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
    reading: str = TEXT.name
    rows: int = 0
    """Of the largest step."""

    def keeps(self, bound: Bound) -> bool:
        """Tell whether both figures are within their bounds."""
        return self.agreement >= bound.agreement and self.divergence <= bound.divergence

    def describe(self, bound: Bound) -> str:
        """Say it in a few lines."""
        kept = "kept" if self.keeps(bound) else "MISSED"
        return (
            f"{self.reading:<12}{self.rows:,} rows a step\n"
            f"positions   {self.positions:,}\n"
            f"agreement   {self.agreement:.4%} of likeliest tokens (bound {bound.agreement:.2%})\n"
            f"divergence  {self.divergence:.6f} nats in the mean (bound {bound.divergence:g}), "
            f"{self.worst_divergence:.4f} at worst\n"
            f"perplexity  {self.perplexity:.4f}, the reference's {self.reference_perplexity:.4f}\n"
            f"bound       {kept}"
        )


@dataclass(frozen=True)
class Report:
    """What all readings found."""

    served: str
    """What was compared, in words."""
    reference: str
    readings: tuple[Accuracy, ...]
    numerics: Numerics | None = None
    """What decided the numbers, for a record; None on a CPU."""

    @property
    def first(self) -> Accuracy:
        """The reading of the text in large steps: by it prompts are judged."""
        return self.readings[0]

    def keeps(self, bound: Bound) -> bool:
        """Tell whether every reading is within the bound."""
        return all(found.keeps(bound) for found in self.readings)

    def describe(self, bound: Bound) -> str:
        """Say it in a few lines."""
        parts = [found.describe(bound) for found in self.readings]
        if self._may_be_rounding(bound):
            parts.append(f"note        {_ROUNDING}")
        return "\n".join((f"served      {self.served}\nreference   {self.reference}", *parts))

    def _may_be_rounding(self, bound: Bound) -> bool:
        """Tell whether a bound is missed as bfloat16 alone may miss it: by likeliest tokens."""
        is_coarse = self.numerics is not None and self.numerics.dtype == "bfloat16"
        return is_coarse and any(
            found.agreement < bound.agreement and found.divergence <= bound.divergence
            for found in self.readings
        )


def readings_of(config: EngineConfig) -> tuple[Reading, ...]:
    """Return how the text is read where this is served."""
    return (PROMPTS, DECODES) if config.gpus else (TEXT,)


def check_accuracy(
    config: EngineConfig,
    text: str,
    *,
    positions: int,
    against: str = "",
    progress: Callable[[int], None] = lambda _: None,
) -> Report:
    """Load a model as it is served and its reference, and compare them over a text.

    On a CPU the reference is computed in float32. On a GPU it is computed in the activations' dtype
    from unpacked weights, by the same attention, over KV in that dtype; the served model's KV is
    float8 where `config` says so. Where `config.prefill_weights` names a copy, prompts go by it,
    and decodes by the weights as they are.

    Args:
        config: The served model, as `tailrace serve` takes it.
        text: Real text of at least `positions` tokens.
        positions: How many are compared, in each reading.
        against: The reference's path; empty: the same checkpoint.
        progress: Is told how many positions each step brought.

    Raises:
        ConfigError: The text is too short, the models have different vocabularies, or what is to
            be recorded could not be.
        ModelError: A checkpoint cannot be read.
    """
    folder = resolve(config)
    behind = resolve(replace(config, model_path=against)) if against else folder
    longest = min(load_config(place).max_position for place in (folder, behind))
    token_ids = _token_ids(folder, behind, text)
    readings = readings_of(config)
    # Before models are loaded: the text may be too short.
    windows = [reading.cut(token_ids, positions, longest) for reading in readings]
    if _is_recordable(config, positions, against):
        require_room(folder)
    device, served, reference = _load(config, folder, behind)
    if served.config.vocab_size != reference.config.vocab_size:
        raise ConfigError(
            f"--against {against}: its vocabulary of {reference.config.vocab_size} is not that of "
            f"{config.model_path}, {served.config.vocab_size}"
        )
    return Report(
        served=describe_weights(served),
        reference=describe_weights(reference),
        readings=tuple(
            compare(served, reference, cut, device, progress, reading=reading)
            for reading, cut in zip(readings, windows, strict=True)
        ),
        numerics=device.numerics,
    )


def _is_recordable(config: EngineConfig, positions: int, against: str) -> bool:
    """Tell whether `record` will keep what is found, but for figures that are not finite."""
    has_copy = bool(config.gpus) and config.prefill_weights != "same"
    return has_copy and not against and positions >= LEAST_POSITIONS


def record(config: EngineConfig, report: Report, *, against: str) -> str:
    """Keep what was found of prompts' copy, for `--prefill-weights auto`; say where, or why not.

    Args:
        config: The served model; `prefill_weights` names the copy.
        report: Of `check_accuracy`; its first reading is of prompts.
        against: The reference's path; only a checkpoint's own precision is a measure of a copy.

    Raises:
        ConfigError: The record cannot be written.
    """
    found = report.first
    if against:
        return "not recorded: the reference is another checkpoint"
    if report.numerics is None:
        return "not recorded: on a CPU no copy serves prompts"
    if found.positions < LEAST_POSITIONS:
        return f"not recorded: fewer than {LEAST_POSITIONS:,} positions"
    if not (math.isfinite(found.agreement) and math.isfinite(found.divergence)):
        return "not recorded: not finite"
    finding = Finding(
        prefill_weights=config.prefill_weights,
        under=report.numerics,
        positions=found.positions,
        agreement=found.agreement,
        divergence=found.divergence,
    )
    return f"recorded    {remember(resolve(config), finding)}"


def cut_windows(
    token_ids: list[int], positions: int, *, window_tokens: int = WINDOW_TOKENS
) -> list[list[int]]:
    """Return windows of `positions` tokens in all, as long as one another, and spread evenly.

    A window's last token is only the answer to the position before it.

    Args:
        token_ids: The text.
        positions: How many are to be compared.
        window_tokens: Most positions of one window.

    Raises:
        ConfigError: The text is too short.
    """
    count = max(1, -(-positions // window_tokens))
    sizes = [positions // count + (index < positions % count) for index in range(count)]
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
    *,
    reading: Reading = TEXT,
) -> Accuracy:
    """Compare two loaded models over windows of tokens; see the module's docstring.

    Args:
        served: As the engine would run it.
        reference: What it is held to.
        windows: From `cut_windows`.
        device: Where both models are.
        progress: Is told how many positions each step brought.
        reading: How windows are cut into steps.
    """
    agreed: list[Tensor] = []
    divergences: list[Tensor] = []
    surprises: list[Tensor] = []
    width = -(-max(map(len, windows)) // _BLOCK_TOKENS)
    places = min(len(windows), reading.rows) if reading.decodes else 1
    blocks = width * places
    allocate = device.allocate_served_kv or device.allocate_kv
    caches = allocate(served, blocks, _BLOCK_TOKENS)
    others = device.allocate_kv(reference, blocks, _BLOCK_TOKENS)
    readers = [
        _Reader(served, caches, device, width, device.kv_scales),
        _Reader(reference, others, device, width),
    ]
    largest = 0
    for step in _steps(windows, reading):
        largest = max(largest, len(step.token_ids))
        answers = torch.tensor(step.answers, device=device.device)
        hidden = [reader.hidden(step) for reader in readers]
        for start in range(0, len(answers), _LOGIT_ROWS):
            part = slice(start, start + _LOGIT_ROWS)
            q, p = (reader.log_probs(x[part]) for reader, x in zip(readers, hidden, strict=True))
            agreed.append(q.argmax(-1) == p.argmax(-1))
            # A token of probability 0 in the reference costs nothing: 0 * log 0 is 0. What is no
            # number costs no number, whose ever it is.
            costs = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))
            divergences.append(costs.sum(-1))
            wanted = answers[part].unsqueeze(1)
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
        reading=reading.name,
        rows=largest,
    )


@dataclass(frozen=True)
class _Step:
    """Rows of one step, and the tokens that follow them."""

    token_ids: list[int]
    answers: list[int]
    spans: list[tuple[int, int]]
    """First position and end of each sequence's rows; a sequence's place is its index."""
    decodes: int


def _steps(windows: list[list[int]], reading: Reading) -> Iterator[_Step]:
    """Yield all positions of all windows, each after those that it looks back on."""
    if not reading.decodes:
        for window in windows:
            for start in range(0, len(window) - 1, reading.rows):
                end = min(start + reading.rows, len(window) - 1)
                yield _Step(window[start:end], window[start + 1 : end + 1], [(start, end)], 0)
        return
    for first in range(0, len(windows), reading.rows):
        # The longest ones first: a sequence that ends leaves every other in its place.
        group = sorted(windows[first : first + reading.rows], key=len, reverse=True)
        for start in range(len(group[0]) - 1):
            here = [window for window in group if start < len(window) - 1]
            yield _Step(
                [window[start] for window in here],
                [window[start + 1] for window in here],
                [(start, start + 1)] * len(here),
                len(here),
            )


@dataclass(frozen=True)
class _Reader:
    """Reads step after step, over a cache with a place for each sequence of one."""

    model: CausalLM
    caches: list[KVCache]
    device: Device
    width: int
    """Blocks of one place."""
    kv_scales: Sequence[KVScales] | None = None

    @torch.inference_mode()
    def hidden(self, step: _Step) -> Tensor:
        """Return hidden states [rows, H]."""
        ids = torch.tensor(step.token_ids, device=self.device.device)
        return self.model.forward(ids, self._batch(step), self.caches, self.kv_scales)

    @torch.inference_mode()
    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return natural-log probabilities, float64 [rows, V], of hidden states [rows, H]."""
        return self.model.logits(hidden).double().log_softmax(-1)

    def _batch(self, step: _Step) -> AttentionBatch:
        sizes = [end - start for start, end in step.spans]
        positions = [p for start, end in step.spans for p in range(start, end)]
        place_tokens = self.width * _BLOCK_TOKENS
        slots = [
            place * place_tokens + position
            for place, (start, end) in enumerate(step.spans)
            for position in range(start, end)
        ]

        def here(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device.device)

        return AttentionBatch(
            query_starts=here([0, *accumulate(sizes)]),
            kv_lens=here([end for _, end in step.spans]),
            block_tables=here(list(range(len(sizes) * self.width))).view(-1, self.width),
            positions=here(positions, self.device.index),
            slots=here(slots, self.device.index),
            max_query_len=max(sizes),
            max_kv_len=max(end for _, end in step.spans),
            num_decodes=step.decodes,
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
    from tailrace.engine import device_kv  # noqa: PLC0415
    from tailrace.engine.cuda_setup import (  # noqa: PLC0415
        attend_as_asked,
        check_fp8_activations,
        kernels_as_asked,
        kv_dtype_of,
        load_device,
    )
    from tailrace.engine.kv_calibration import find_scales  # noqa: PLC0415
    from tailrace.engine.prefill_weights import choose, with_copy  # noqa: PLC0415
    from tailrace.kernels.triton_kernels import UnpackedTritonKernels  # noqa: PLC0415

    device = load_device(config.gpus[0])
    dtype = activations(config)
    kernels = kernels_as_asked(config, device, dtype)
    served = load_model(folder, dtype=dtype, kernels=kernels, quant_type=config.quant_type)
    check_fp8_activations(config, served)
    kv_dtype = kv_dtype_of(config, kernels)
    attend_as_asked(config, kernels, served, kv_dtype)
    if config.prefill_weights != "auto":
        choice = choose(config.prefill_weights, kernels, served, Known())
        if choice.format is not None:
            served = with_copy(served, kernels, choice.format)
        elif config.prefill_weights != "same":
            raise ConfigError(
                f"--prefill-weights {config.prefill_weights}: {choice.words}, so no copy is made "
                "that could be measured; leave it out"
            )
    is_float8 = kv_dtype != kernels.dtype
    scales = find_scales(served, kernels, folder, "auto").scales if is_float8 else None
    reference = load_model(behind, dtype=dtype, kernels=UnpackedTritonKernels(device, dtype))

    def allocating(kv_dtype: torch.dtype) -> Callable[[CausalLM, int, int], list[KVCache]]:
        def allocate(model: CausalLM, blocks: int, block_tokens: int) -> list[KVCache]:
            return device_kv.allocate_kv(model, blocks, block_tokens, kv_dtype, device)

        return allocate

    place = Device(
        device,
        allocating(kernels.dtype),
        torch.int32,
        allocate_served_kv=allocating(kv_dtype),
        kv_scales=scales,
        numerics=Numerics.of(config, kernels.name_of_dtype, kernels.capability),
    )
    return place, served, reference


def activations(config: EngineConfig) -> WeightDtype:
    """Return the dtype of activations on a GPU."""
    return "bfloat16" if config.dtype == "auto" else config.dtype  # type: ignore[return-value]  # checked by the config
