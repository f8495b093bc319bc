"""A plan's winners, let serve: all of them, or, where one cannot, none.

A plan may come from elsewhere, or from an earlier version. So what it answers is held to what is
asked here, and its winners to what is a candidate here, before any of them serves.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from tailrace.errors import ConfigError
from tailrace.kernels.attention_shapes import BOUNDS, key_words
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.linear.ways import class_words, words_of
from tailrace.kernels.paged_attention.decode_kernels import is_hopper as is_hopper_decode
from tailrace.kernels.paged_attention.prefill_kernels import name_of
from tailrace.kernels.plan import Choice, Plan, choose
from tailrace.kernels.plan_questions import (
    ANY_LENGTH,
    DECODE,
    PREFILL,
    UNITS,
    over,
    prefill_shapes,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    import torch

    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape
    from tailrace.kernels.triton_kernels import TritonKernels


def strangers(
    plan: Plan, kernels: TritonKernels, head_dim: int, *, kv_dtype: torch.dtype, unit: int
) -> list[Choice]:
    """Return the choices that are not to be applied.

    Nobody asks here what they answer, or something else won than what is a candidate here.

    Args:
        plan: Of this machine and model.
        kernels: Whose layers it is about.
        head_dim: Of the model.
        kv_dtype: Of the cache.
        unit: Tokens of one of its units.
    """
    shapes = [name_of(shape) for shape in prefill_shapes(kernels, head_dim, kv_dtype, unit)]
    options = {(over(PREFILL, kv_dtype, unit), key_words(bound)): shapes for bound in BOUNDS}
    decodes = [shape.words for shape in kernels.decode_shapes(head_dim, kv_dtype, unit)]
    options[over(DECODE, kv_dtype, unit), ANY_LENGTH] = decodes
    for layer in kernels.planned_layers:
        for ways in layer.planned:
            for most_rows in ways.classes:
                options[words_of(layer), class_words(most_rows)] = ways.options(most_rows)
    asked = _operations(kernels)
    return [
        choice
        for choice in plan.choices
        if choice.operation not in asked
        or choice.winner not in options.get(choice.question, [choice.winner])
    ]


def _operations(kernels: TritonKernels) -> Collection[str]:
    """Return the operations that are asked about, over each kind of cache."""
    kinds = product((PREFILL, DECODE), (kernels.dtype, FLOAT8), UNITS)
    return {over(*kind) for kind in kinds} | {words_of(layer) for layer in kernels.planned_layers}


def apply(
    plan: Plan,
    kernels: TritonKernels,
    head_dim: int,
    file: Path,
    *,
    kv_dtype: torch.dtype,
    unit: int,
) -> None:
    """Let the plan's winners serve.

    Where one kernel alone may serve prompts (`TritonKernels.serve_prompts_by`), the best of its
    shapes does, by the same times. Where Hopper's serves decodes' attention, a plan that was
    measured without it does not undo that.

    Args:
        plan: Of this machine and model.
        kernels: Whose layers it is about.
        head_dim: Of the model.
        file: Where the plan lies, for errors.
        kv_dtype: Of the cache.
        unit: Tokens of one of its units.

    Raises:
        ConfigError: It answers what nobody asks here, names a kernel that is no candidate, or
            refuses every shape of the one that is asked for; nothing was changed.
    """
    asked = _operations(kernels)
    for choice in plan.choices:
        if choice.operation not in asked:
            raise ConfigError(
                f"plan {file}: {choice.operation}, {choice.sizes}: nothing here is chosen by that; "
                "`tailrace plan measure` makes one for this version"
            )
    shapes = {name_of(shape): shape for shape in prefill_shapes(kernels, head_dim, kv_dtype, unit)}
    usual = partial(kernels.usual_prefill_shape, head_dim)
    rows = []
    for bound in BOUNDS:
        question = over(PREFILL, kv_dtype, unit), key_words(bound)
        _winner(plan, *question, list(shapes), file)
        shape = _allowed_winner(plan.choice(*question), kernels, shapes, file)
        rows.append((bound, shape or usual(bound - 1)))
    usual_decode, *_ = all_decodes = kernels.decode_shapes(head_dim, kv_dtype, unit)
    decodes = {shape.words: shape for shape in all_decodes}
    decode_name = _winner(plan, over(DECODE, kv_dtype, unit), ANY_LENGTH, list(decodes), file)
    served = []
    for layer in kernels.planned_layers:
        for ways in layer.planned:
            for most_rows in ways.classes:
                words, options = class_words(most_rows), ways.options(most_rows)
                name = _winner(plan, words_of(layer), words, options, file)
                served.append((ways, most_rows, name))
    kernels.prefill_rows = tuple(rows)
    decode = usual_decode if decode_name is None else decodes[decode_name]
    is_allowed = is_hopper_decode(decode) == is_hopper_decode(usual_decode)
    kernels.decode_row = decode if is_allowed and decode_name is not None else None
    for ways, most_rows, name in served:
        if name is not None:
            ways.serve(most_rows, name)


def _winner(plan: Plan, operation: str, sizes: str, options: list[str], file: Path) -> str | None:
    name = plan.winner(operation, sizes)
    if name is not None and name not in options:
        raise ConfigError(
            f"plan {file}: {operation}, {sizes}: {name!r} is none of {', '.join(options)}; "
            "`tailrace plan measure` makes one for this version"
        )
    return name


def _allowed_winner(
    choice: Choice | None, kernels: TritonKernels, shapes: Mapping[str, PrefillShape], file: Path
) -> PrefillShape | None:
    """Return the winner among the shapes that may serve; None where none of them was asked about.

    Raises:
        ConfigError: All that were asked about are refused.
    """
    if choice is None:
        return None
    allowed = {name: s for name, s in shapes.items() if kernels.may_serve_prompts(s)}
    seconds = {name: s for name, s in choice.seconds.items() if name in allowed}
    if choice.winner in allowed:
        return allowed[choice.winner]
    if choice.default in seconds:
        again = choose(choice.operation, choice.sizes, choice.default, seconds, {})
        return allowed[again.winner]
    if seconds:
        return allowed[min(seconds, key=lambda name: seconds[name])]
    refused = [f"{name}: {why}" for name, why in choice.refused.items() if name in allowed]
    if refused:
        raise ConfigError(
            f"plan {file}: {choice.operation}, {choice.sizes}: no shape of the kernel that "
            f"--prefill-attention asks for is right here ({refused[0]}); use auto"
        )
    return None
