"""What a GPU's plan asks, and how candidates are checked and timed.

Prompts' attention: the tile shapes of `attention_shapes.CANDIDATES`, by the length of the longest
sequence. Plain linear layers of few rows: cuBLAS, or Triton with its inputs split or whole. What
rounds differently (a 4-bit weight written out or not, activations in FP8 or not) is no question: a
plan must not change what is computed, only how fast.

A candidate may win only where its result is as near to the reference as the default's; one that
raises, or strays, is refused, with the reason. Time is bounded between candidates, so the last
one's compilation may overrun it; what was not reached keeps its default until it is asked again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tailrace.errors import ConfigError
from tailrace.kernels.attention_shapes import CLASSES, prefill_candidates, prefill_shape
from tailrace.kernels.linear.triton_skinny import ROW_CLASSES
from tailrace.kernels.paged_attention.contiguous import Spans, attend
from tailrace.kernels.plan import Choice, Plan, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from tailrace.kernels.linear.cublas import CublasLinear
    from tailrace.kernels.linear.triton_skinny import SkinnyLinear
    from tailrace.kernels.paged_attention.triton_prefill import Shape
    from tailrace.kernels.triton_kernels import TritonKernels

ATTENTION = "prefill attention"
BOUNDS = (*CLASSES, 1 << 30)
_STRAY = 2.0
"""A candidate errs at most so many times as much as the default."""
_ROWS = 256
_OUTPUTS = 8192
"""Of attention, and of a layer, that a reference computes at once, to need little memory."""
_ROUNDING = 1e-3
"""An error that any of them may have: half precision's own."""


@dataclass(frozen=True)
class Question:
    """One operation at sizes of one class; candidates are made when asked."""

    operation: str
    sizes: str
    default: str
    candidates: Mapping[str, Callable[[], Tensor]]
    reference: Callable[[], Tensor]
    """The result in higher precision."""


def measure(
    questions: Iterable[Question],
    timer: Callable[[Callable[[], object]], float],
    clock: Callable[[], float],
    bound_s: float,
) -> list[Choice]:
    """Return choices for the questions that were reached in time.

    Args:
        questions: Asked in order.
        timer: Returns the seconds of one call of what it is given.
        clock: Monotonic seconds.
        bound_s: No candidate is begun after so many seconds.

    Raises:
        ConfigError: A default fails: nothing would serve.
    """
    end_s = clock() + bound_s
    choices = []
    for question in questions:
        if clock() >= end_s:
            break
        choice = _answer(question, timer, lambda: clock() >= end_s)
        if choice is None:
            break
        choices.append(choice)
    return choices


def _answer(
    question: Question,
    timer: Callable[[Callable[[], object]], float],
    is_over: Callable[[], bool],
) -> Choice | None:
    """Return the choice, or None where time ran out before all candidates were timed."""
    truth = question.reference()
    usual = question.candidates[question.default]
    _, error = _of_default(question, truth)
    allowed = max(_STRAY * error, _ROUNDING)
    seconds, refused = {question.default: timer(usual)}, {}
    for name, work in question.candidates.items():
        if name == question.default:
            continue
        if is_over():
            return None
        try:
            error = _error(work(), truth)
        # Triton's compiler raises what it likes; a candidate that cannot run here is no fault.
        except Exception as failure:  # noqa: BLE001
            refused[name] = f"{type(failure).__name__}: {failure}"[:300]
            continue
        if error <= allowed:
            seconds[name] = timer(work)
        else:
            refused[name] = f"its error is {error:.1e}, more than {allowed:.1e}"
    return choose(question.operation, question.sizes, question.default, seconds, refused)


def _of_default(question: Question, truth: Tensor) -> tuple[Tensor, float]:
    """Return the default's result and its error, which is finite.

    Raises:
        ConfigError: It fails: there is nothing to hold others to, and nothing would serve.
    """
    at = f"plan: {question.operation}, {question.sizes}: the default kernel ({question.default})"
    then = "it cannot serve this model here; report it with the GPU's name and torch's version"
    try:
        found = question.candidates[question.default]()
        error = _error(found, truth)
    except Exception as failure:  # as of candidates; but without this one nothing serves
        reason = f"{type(failure).__name__}: {failure}"[:300]
        raise ConfigError(f"{at} fails ({reason}): {then}") from failure
    if not error < math.inf:
        raise ConfigError(f"{at} gives numbers that are not finite: {then}")
    return found, error


def _error(found: Tensor, truth: Tensor) -> float:
    """Return |found - truth| / |truth|; infinite where found is not finite."""
    distance = (found.double() - truth.double()).norm()
    error = float(distance / truth.double().norm()) if distance != 0.0 else 0.0
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is not itself


def questions(
    kernels: TritonKernels,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    longest: int,
    kv_is_float8: bool = False,
) -> Iterator[Question]:
    """Yield what there is to choose for a loaded model.

    Args:
        kernels: Whose layers are asked about.
        num_heads: Query heads.
        num_kv_heads: Key heads.
        head_dim: Of both.
        longest: Tokens of the longest sequence; classes beyond are not asked.
        kv_is_float8: Attention over such a cache is another kernel, which no plan is about.
    """
    heads = (num_heads, num_kv_heads, head_dim)
    if len(prefill_candidates(head_dim, kernels.capability)) > 1 and not kv_is_float8:
        for low, bound in zip((0, *CLASSES), BOUNDS, strict=True):
            if low < longest:
                length = min(longest, max(low + low // 3, CLASSES[0] // 2))
                yield _attention(kernels, heads, length, bound)
    asked = set()
    for layer in kernels.skinny_layers:
        for most_rows in ROW_CLASSES:
            question = (layer.sizes, most_rows)
            if question not in asked:
                asked.add(question)
                yield _linear(kernels, layer, most_rows)


def apply(
    plan: Plan, kernels: TritonKernels, head_dim: int, file: Path, *, kv_is_float8: bool = False
) -> None:
    """Let the plan's winners serve.

    Args:
        plan: Of this machine and model.
        kernels: Whose layers it is about.
        head_dim: Of the model.
        file: Where the plan lies, for errors.
        kv_is_float8: As above: then attention stays as it is.

    Raises:
        ConfigError: It names a kernel that is no candidate here; nothing was changed.
    """
    shapes = {shape.words: shape for shape in prefill_candidates(head_dim, kernels.capability)}
    rows = []
    for bound in BOUNDS:
        usual = prefill_shape(head_dim, bound - 1, kernels.capability)
        name = _winner(plan, ATTENTION, key_words(bound), list(shapes), file)
        rows.append((bound, usual if name is None else shapes[name]))
    served = []
    for layer in kernels.skinny_layers:
        for most_rows in ROW_CLASSES:
            operation, sizes = linear_words(layer, most_rows)
            name = _winner(plan, operation, sizes, layer.options(most_rows), file)
            served.append((layer, most_rows, name))
    kernels.prefill_rows = () if kv_is_float8 else tuple(rows)
    for layer, most_rows, name in served:
        if name is not None:
            layer.serve(most_rows, name)


def _winner(plan: Plan, operation: str, sizes: str, options: list[str], file: Path) -> str | None:
    name = plan.winner(operation, sizes)
    if name is not None and name not in options:
        raise ConfigError(
            f"plan {file}: {operation}, {sizes}: {name!r} is none of {', '.join(options)}; "
            "`tailrace plan measure` makes one for this version"
        )
    return name


def key_words(bound: int) -> str:
    """Return what a plan calls the class of sequences with fewer keys than the bound."""
    return "longer" if bound == BOUNDS[-1] else f"below {bound} keys"


def linear_words(layer: SkinnyLinear, most_rows: int) -> tuple[str, str]:
    """Return what a plan calls a layer, and a class of its rows."""
    outputs, inputs = layer.sizes
    return f"linear {inputs} to {outputs}", f"up to {most_rows} rows"


def _attention(
    kernels: TritonKernels, heads: tuple[int, int, int], length: int, bound: int
) -> Question:
    """One whole prompt of so many tokens."""
    num_heads, num_kv_heads, head_dim = heads
    q, k, v = (
        _noise(kernels, (1, count, length, head_dim))
        for count in (num_heads, num_kv_heads, num_kv_heads)
    )
    spans = Spans.unpadded(1, length, 0)

    def by(shape: Shape) -> Tensor:
        scale = head_dim**-0.5
        return attend(q, k, v, spans, scale=scale, capability=kernels.capability, shape=shape)

    def truth() -> Tensor:
        return torch.cat([_exact_rows(q, k, v, row) for row in range(0, length, _ROWS)], 1)

    shapes = prefill_candidates(head_dim, kernels.capability)
    usual = prefill_shape(head_dim, bound - 1, kernels.capability)
    works = {shape.words: partial(by, shape) for shape in shapes}
    return Question(ATTENTION, key_words(bound), usual.words, works, truth)


def _linear(kernels: TritonKernels, layer: SkinnyLinear, most_rows: int) -> Question:
    """As many rows as the class has at most."""
    x_TI = _noise(kernels, (most_rows, layer.sizes[1]))

    def truth() -> Tensor:
        outputs = range(0, layer.sizes[0], _OUTPUTS)
        return torch.cat([_exact_outputs(x_TI, layer.plain, first) for first in outputs], 1)

    works = {name: partial(layer.by, name, x_TI) for name in layer.options(most_rows)}
    operation, sizes = linear_words(layer, most_rows)
    return Question(operation, sizes, layer.serving(most_rows), works, truth)


def _exact_rows(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Return the attention [1, rows, Hq, D] of some rows in float32; all at once take gigabytes."""
    rows = q[:, :, first : first + _ROWS].float()
    end = first + rows.shape[2]
    keys, values = k[:, :, :end].float(), v[:, :, :end].float()
    is_seen = torch.ones(rows.shape[2], end, dtype=torch.bool, device=q.device).tril(first)
    found = functional.scaled_dot_product_attention(
        rows, keys, values, attn_mask=is_seen, enable_gqa=True
    )
    return found.transpose(1, 2)


def _exact_outputs(x_TI: Tensor, plain: CublasLinear, first: int) -> Tensor:
    """Return the product [T, outputs] with some outputs' weights in float32, as above."""
    part = slice(first, first + _OUTPUTS)
    bias_O = None if plain.bias_O is None else plain.bias_O[part].float()
    return functional.linear(x_TI.float(), plain.weight_OI[part].float(), bias_O)


def _noise(kernels: TritonKernels, shape: tuple[int, ...]) -> Tensor:
    """Return values that do not depend on what was drawn before."""
    generator = torch.Generator(kernels.device).manual_seed(0)
    drawn = torch.randn(shape, generator=generator, device=kernels.device)
    return drawn.to(kernels.dtype)
