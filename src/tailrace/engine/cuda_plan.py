"""The plan of a GPU and a model: found, measured where it is missing, applied before graphs.

`--plan off` asks nothing. `auto` takes the plan that was measured here; what it lacks is measured
within `BOUND_S` and added, and a plan of other versions is measured anew; what cannot be read or
kept, or names no kernel or question of here, costs a warning and that time, never the start. A FILE
is taken as it is, or refused.
"""

from __future__ import annotations

import hashlib
import math
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from tailrace import __version__
from tailrace.engine.device_faults import is_out_of_memory
from tailrace.errors import ConfigError
from tailrace.kept_file import OtherFormatError
from tailrace.kernels.attention_shapes import FLOAT8_CAPABILITY
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.linear.ways import words_of
from tailrace.kernels.plan import Key, Plan, is_pinned, read, require, usual_file, write
from tailrace.kernels.plan_answers import measure
from tailrace.kernels.plan_questions import Heads, questions
from tailrace.kernels.plan_winners import apply, strangers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tailrace.kernels.plan import Choice
    from tailrace.kernels.plan_answers import Timer
    from tailrace.kernels.plan_questions import Question
    from tailrace.kernels.triton_kernels import TritonKernels
    from tailrace.models.causal_lm import CausalLM

log = structlog.get_logger("tailrace.engine")

BOUND_S = 2.0
"""Of measuring at start; the last candidate's compilation may overrun it."""
_MOST_WORDS = 240
"""Of a key's layers."""


def key_of(kernels: TritonKernels, model: CausalLM) -> Key:
    """Return where a plan for these holds."""
    config = model.config
    major, minor = kernels.capability
    is_gpu = kernels.device.type == "cuda"
    name = torch.cuda.get_device_name(kernels.device) if is_gpu else "Triton's interpreter"
    return Key(
        gpu=f"{name} ({major}.{minor})",
        model=(
            f"{config.num_heads}/{config.num_kv_heads} heads of {config.head_dim}, "
            f"{_layers_of(kernels)}"
        ),
        dtype=str(kernels.dtype).removeprefix("torch."),
        tailrace=__version__,
        torch=str(torch.__version__),
        triton=metadata.version("triton"),
    )


def _layers_of(kernels: TritonKernels) -> str:
    """Name the kinds and sizes of layers; where they are too many to list, by a digest."""
    layers = sorted({words_of(layer) for layer in kernels.planned_layers})
    words = ", ".join(layers) or "no planned layers"
    if len(words) <= _MOST_WORDS:
        return words
    digest = hashlib.sha256(words.encode()).hexdigest()[:16]
    return f"{len(layers)} kinds of layers, {digest}"


def questions_of(
    kernels: TritonKernels,
    model: CausalLM,
    longest: int,
    kv_dtypes: Sequence[torch.dtype],
    unit: int,
) -> Iterator[Question]:
    """Yield what there is to choose for a model with sequences of at most so many tokens."""
    config = model.config
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    return questions(kernels, heads, longest=longest, kv_dtypes=kv_dtypes, unit=unit)


def settle(
    asked: str,
    kernels: TritonKernels,
    model: CausalLM,
    *,
    longest: int,
    timer: Timer,
    kv_dtype: torch.dtype,
    unit: int,
    clock: Callable[[], float] = time.monotonic,
    bound_s: float = BOUND_S,
) -> Plan | None:
    """Find or measure the plan that `--plan` asks for, and apply it.

    Args:
        asked: off, auto, or a plan's file.
        kernels: Of the model.
        model: Loaded.
        longest: Tokens of the longest sequence.
        timer: Returns the seconds of one call.
        kv_dtype: Of the cache, which attention reads.
        unit: Tokens of one of its units.
        clock: Monotonic seconds.
        bound_s: Of measuring, with auto.

    Returns:
        The plan that serves; None where none was asked for.

    Raises:
        ConfigError: A file that cannot be read, is stale or foreign, or a pinned plan that is
            stale; nothing was changed.
    """
    if asked == "off":
        return None
    key = key_of(kernels, model)
    if asked != "auto":
        file = Path(asked)
        plan = read(file)
        require(plan, key, file)
    else:
        file = usual_file(key)
        plan = known(file, key)
        if not plan.pinned:
            others = strangers(plan, kernels, model.config.head_dim, kv_dtype=kv_dtype, unit=unit)
            asked_for = questions_of(kernels, model, longest, [kv_dtype], unit)
            plan = complete(
                plan, file, asked_for, others, timer=timer, clock=clock, bound_s=bound_s
            )
    apply(plan, kernels, model.config.head_dim, file, kv_dtype=kv_dtype, unit=unit)
    log.info("plan", file=str(file), choices=len(plan.choices), changed=_changed(plan))
    return plan


def dropped(plan: Plan, strangers: Sequence[Choice]) -> Plan:
    """Return a plan that may be measured again, without what names nothing of here."""
    for choice in strangers:
        log.warning(
            "plan_choice_dropped",
            question=f"{choice.operation}, {choice.sizes}",
            reason=f"{choice.winner!r} is no candidate here; what is asked here is measured again",
        )
    return plan.without(strangers)


def _changed(plan: Plan) -> list[str]:
    """Return the choices that are not the default."""
    return [f"{c.operation}, {c.sizes}: {c.winner}" for c in plan.choices if c.winner != c.default]


def measure_whole(
    kernels: TritonKernels,
    model: CausalLM,
    longest: int,
    out: Path | None,
    timer: Timer,
    *,
    unit: int,
) -> tuple[Plan, Path]:
    """Measure everything, however long it takes, and write it.

    Attention over a cache in half precision, and in float8 where the GPU has it.

    Raises:
        ConfigError: There is nothing to choose, no memory for it, or the file is a pinned plan or
            cannot be written.
    """
    key = key_of(kernels, model)
    file = usual_file(key) if out is None else out
    if is_pinned(file):
        raise ConfigError(f"plan {file}: is pinned; remove it, or name another file with --out")
    kv_dtypes = [kernels.dtype]
    if kernels.capability >= FLOAT8_CAPABILITY:
        kv_dtypes.append(FLOAT8)
    asked = 0

    def told() -> Iterator[Question]:
        nonlocal asked
        # One at a time: what a question is asked with goes when the next one comes.
        for question in questions_of(kernels, model, longest, kv_dtypes, unit):
            asked += 1
            yield question

    choices = measure(told(), timer, time.monotonic, math.inf, is_out_of_memory)
    if not asked:
        raise ConfigError(
            f"plan measure: nothing to choose for {key.model} on {key.gpu}: there is one kernel "
            "for each of its operations"
        )
    if not choices:
        raise ConfigError(
            f"plan measure: {key.gpu} has no memory for any question: end what else uses it, or "
            "lower --context-length"
        )
    plan = Plan(key, tuple(choices))
    write(plan, file)
    return plan, file


def complete(
    plan: Plan,
    file: Path,
    asked: Iterable[Question],
    others: Sequence[Choice],
    *,
    timer: Timer,
    clock: Callable[[], float],
    bound_s: float,
) -> Plan:
    """Measure what a plan lacks, as far as time allows, and write it where there is news.

    A question that was asked of fewer candidates is asked again; `others`, which name nothing of
    here, are left out.
    """
    plan = dropped(plan, others)
    missing = (q for q in asked if not plan.answers(q.operation, q.sizes, q.candidates))
    begun_s = clock()
    choices = measure(missing, timer, clock, bound_s, is_out_of_memory)
    if choices or others:
        plan = plan.with_choices(choices)
        try:
            write(plan, file)
        except (ConfigError, OSError) as error:  # it serves all the same, this once
            log.warning("plan_not_kept", reason=str(error))
    if choices:
        log.info("plan_measured", choices=len(choices), seconds=round(clock() - begun_s, 2))
    return plan


def known(file: Path, key: Key) -> Plan:
    """Return the file's plan, or an empty one where it is missing, damaged or of other versions.

    Raises:
        ConfigError: The file is a pinned plan of other versions.
    """
    try:
        plan = read(file)
    except OtherFormatError as error:
        if is_pinned(file):
            raise
        log.warning("plan_measured_anew", reason=str(error))
        return Plan(key, ())
    except ConfigError as error:
        if not isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            log.warning("plan_not_read", reason=str(error), remedy=f"remove {file}")
        return Plan(key, ())
    try:
        require(plan, key, file)
    except ConfigError as error:
        if plan.pinned:
            raise
        log.warning("plan_measured_anew", reason=str(error))
        return Plan(key, ())
    return plan
