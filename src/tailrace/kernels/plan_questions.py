"""What a GPU's plan asks, and how candidates are checked and timed.

    prompts' attention    tile shapes of Triton's kernel and, where it serves, of Hopper's, by the
                          length of the longest sequence and the cache's dtype
    decodes' attention    warps and stages of the same tiles
    linear layers         the ways of each size, for each class of rows (`linear/ways`)

What rounds differently (a 4-bit weight written out or not, activations in FP8 or not) is no
question: a plan must not change what is computed, only how fast.

A candidate may win only where its result is as near to the reference as the default's, or, of
decodes' attention, where it is the same to the last bit; one that raises, or strays, is refused,
with the reason; one that hangs, or is a fault on the device, ends the start, for the device serves
nobody then. One that finds no memory on the device is recorded as such, for it may serve where
there is more, and a question without memory for its reference or its default goes unanswered. Time
is bounded between candidates, so the last one's compilation may overrun it; what was not reached
keeps its default until it is asked again.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch
from torch.nn import functional

from tailrace.errors import ConfigError
from tailrace.kernels.attention_shapes import (
    BOUNDS,
    CLASSES,
    decode_candidates,
    key_words,
    prefill_candidates,
    prefill_shape,
)
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.linear.ways import class_words, words_of
from tailrace.kernels.paged_attention.device_batch import cut_tiles
from tailrace.kernels.paged_attention.prefill_kernels import (
    hopper_shapes,
    is_hopper,
    name_of,
    prefill,
)
from tailrace.kernels.paged_attention.triton_decode import DecodeScratch, decode
from tailrace.kernels.plan import Choice, Plan, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from tailrace.kernels.linear.ways import PlannedLinear, RoundedRows, Ways
    from tailrace.kernels.paged_attention.prefill_kernels import PrefillShape
    from tailrace.kernels.paged_attention.triton_decode import DecodeShape
    from tailrace.kernels.triton_kernels import TritonKernels

    Timer = Callable[[Callable[[], object]], float]

log = structlog.get_logger("tailrace.engine")

PREFILL, DECODE = "prefill attention", "decode attention"
ANY_LENGTH = "any length"
_STRAY = 2.0
"""A candidate errs at most so many times as much as the default."""
_ROWS = 256
_OUTPUTS = 8192
"""Of attention, and of a layer, that a reference computes at once, to need little memory."""
_ROUNDING = 1e-3
"""An error that any of them may have: half precision's own."""
_MOST_S, _POLL_S = 30.0, 1e-4
"""Of a candidate's first run, once it is compiled; and how often it is looked at."""
_MOST_WORDS = 300
"""Of a failure."""
_AGAIN = (
    "start again with --plan off (or --prefill-attention triton, if it is Hopper's), and report it "
    "with the GPU's name and torch's version"
)
_DECODES, _DECODE_KEYS = 32, 2048
"""Sequences of a step, and the most keys of each, that decodes' attention is timed with."""


@dataclass(frozen=True)
class Heads:
    """Of a model's attention."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Question:
    """One operation at sizes of one class; what it is asked with is made when it is asked."""

    operation: str
    sizes: str
    default: str
    candidates: Mapping[str, Callable[[], Tensor]]
    reference: Callable[[], Tensor]
    """The result in higher precision."""
    is_exact: bool = False
    """Whether a candidate must give the default's very bits."""

    @property
    def words(self) -> str:
        """What it asks."""
        return f"{self.operation}, {self.sizes}"


def measure(
    questions: Iterable[Question],
    timer: Timer,
    clock: Callable[[], float],
    bound_s: float,
    lacks_memory: Callable[[Exception], bool] = lambda _: False,
) -> list[Choice]:
    """Return choices for the questions that were reached in time and found memory.

    Args:
        questions: Asked in order.
        timer: Returns the seconds of one call of what it is given.
        clock: Monotonic seconds.
        bound_s: No candidate is begun after so many seconds.
        lacks_memory: Tells whether something failed for want of memory on the device.

    Raises:
        ConfigError: A default fails: nothing would serve.
    """
    end_s = clock() + bound_s
    choices = []
    for question in questions:
        if clock() >= end_s:
            break
        try:
            choice = _answer(question, timer, lambda: clock() >= end_s, lacks_memory)
        except Exception as failure:
            if not lacks_memory(failure):
                raise
            words = str(failure.__cause__ or failure).splitlines()[0]
        else:
            if choice is None:
                break
            choices.append(choice)
            continue
        log.warning("plan_question_without_memory", question=question.words, reason=words)
        _give_back()  # the failure is gone, and with it what its frames held
    return choices


def _give_back() -> None:
    """Return to the driver what a failed attempt had allocated."""
    gc.collect()
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Failed:
    """A candidate without a time."""

    why: str
    is_memory: bool = False


def _answer(
    question: Question,
    timer: Timer,
    is_over: Callable[[], bool],
    lacks_memory: Callable[[Exception], bool],
) -> Choice | None:
    """Return the choice, or None where time ran out before all candidates were timed."""
    truth = question.reference()
    expected, error = _of_default(question, truth)
    allowed = max(_STRAY * error, _ROUNDING)
    seconds = {question.default: timer(question.candidates[question.default])}
    refused, no_memory = {}, {}

    def fault(found: Tensor) -> str:
        error = _error(found, truth)
        if error > allowed:
            return f"its error is {error:.1e}, more than {allowed:.1e}"
        if question.is_exact and not torch.equal(found, expected):
            return "its bits are not the default's"
        return ""

    for name, work in question.candidates.items():
        if name == question.default:
            continue
        if is_over():
            return None
        tried = _try(f"{question.words}: {name}", work, fault, timer, lacks_memory)
        if not isinstance(tried, _Failed):
            seconds[name] = tried
        elif tried.is_memory:
            no_memory[name] = tried.why
            _give_back()
        else:
            refused[name] = tried.why
            log.info("plan_candidate_refused", question=question.words, name=name, why=tried.why)
    return choose(
        question.operation,
        question.sizes,
        question.default,
        seconds,
        refused,
        no_memory=no_memory,
    )


def _try(
    words: str,
    work: Callable[[], Tensor],
    fault: Callable[[Tensor], str],
    timer: Timer,
    lacks_memory: Callable[[Exception], bool],
) -> float | _Failed:
    """Check a candidate, then time it; return its seconds, or why it has none.

    Raises:
        ConfigError: It does not end, or is a fault on the device: whatever is asked of that next
            would wait for it, or fail as well.
        Exception: What passed the check fails while it is timed, and not for want of memory: the
            device is not to be relied on.
    """
    try:
        found = work()
        has_ended = _ends(found)
        why = fault(found) if has_ended else ""
    # Triton's compiler raises what it likes; a candidate that cannot run here is no fault.
    except Exception as failure:  # noqa: BLE001
        return _failed(words, failure, lacks_memory)
    if not has_ended:
        raise ConfigError(
            f"plan: {words} has not ended after {_MOST_S:.0f} s, and the GPU waits for it: {_AGAIN}"
        )
    if why:
        return _Failed(why)
    try:
        return timer(work)
    except Exception as failure:
        failed = _failed(words, failure, lacks_memory)
        if not failed.is_memory:
            raise
        return failed


def _failed(words: str, failure: Exception, lacks_memory: Callable[[Exception], bool]) -> _Failed:
    """Return what became of a candidate; the device is as good as it was.

    Raises:
        ConfigError: It took the device's context with it: whatever is asked next would fail too,
            and be taken for a fault of its own.
    """
    if lacks_memory(failure):
        return _Failed(_words(failure), is_memory=True)
    if _is_lost():
        raise ConfigError(
            f"plan: {words} is a fault on the GPU ({_words(failure)}): {_AGAIN}"
        ) from failure
    return _Failed(_words(failure))


def _is_lost() -> bool:
    """Whether the device refuses all work; a fault on it shows in whatever is called next."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own gap
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _ends(found: Tensor) -> bool:
    """Wait for a result, not for ever: a barrier that nobody reaches would hold the device."""
    if not found.is_cuda:
        return True
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own gap
    event.record()
    end_s = time.monotonic() + _MOST_S
    while not event.query():  # type: ignore[no-untyped-call]  # as above
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
    return True


def _words(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"[:_MOST_WORDS]


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
        raise ConfigError(f"{at} fails ({_words(failure)}): {then}") from failure
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
    heads: Heads,
    *,
    longest: int,
    kv_dtypes: Sequence[torch.dtype],
    unit: int,
) -> Iterator[Question]:
    """Yield what there is to choose for a loaded model.

    Args:
        kernels: Whose layers are asked about.
        heads: Of the model.
        longest: Tokens of the longest sequence; classes beyond are not asked.
        kv_dtypes: Of the caches that are asked about.
        unit: Tokens of a unit of the cache.
    """
    late = []
    for kv_dtype in kv_dtypes:
        prefills = _prefills(kernels, heads, longest, kv_dtype, unit)
        # Hopper's shapes take seconds to compile: a start's time is not to be theirs alone.
        if any(map(is_hopper, _asked_shapes(kernels, heads.dim, kv_dtype, unit))):
            late.append(prefills)
        else:
            yield from prefills
        if len(decode_candidates(heads.dim, kernels.capability)) > 1:
            yield _decode(kernels, heads, min(longest, _DECODE_KEYS), kv_dtype, unit)
    asked = set()
    for layer in kernels.planned_layers:
        for ways in kernels.ways_in_use(layer):
            for most_rows in ways.classes:
                question = (words_of(layer), most_rows)
                if len(ways.options(most_rows)) > 1 and question not in asked:
                    asked.add(question)
                    yield _linear(kernels, layer, ways, most_rows)
    for prefills in late:
        yield from prefills


def _prefills(
    kernels: TritonKernels, heads: Heads, longest: int, kv_dtype: torch.dtype, unit: int
) -> Iterator[Question]:
    if len(_asked_shapes(kernels, heads.dim, kv_dtype, unit)) == 1:
        return
    for low, bound in zip((0, *CLASSES), BOUNDS, strict=True):
        if low < longest:
            length = min(longest, max(low + low // 3, CLASSES[0] // 2))
            yield _prefill(kernels, heads, (length, bound), kv_dtype, unit)


def _shapes(
    kernels: TritonKernels, head_dim: int, kv_dtype: torch.dtype, unit: int
) -> tuple[PrefillShape, ...]:
    """Return every shape that can serve prompts here, whatever is asked for."""
    found = prefill_candidates(head_dim, kernels.capability, is_float8=kv_dtype == FLOAT8)
    if kernels.why_not_hopper(head_dim, kv_dtype, unit) is not None:
        return found
    return *found, *hopper_shapes(head_dim)


def _asked_shapes(
    kernels: TritonKernels, head_dim: int, kv_dtype: torch.dtype, unit: int
) -> tuple[PrefillShape, ...]:
    """Return those that are timed: Triton's, which others are held to, and any that may serve."""
    shapes = _shapes(kernels, head_dim, kv_dtype, unit)
    return tuple(s for s in shapes if not is_hopper(s) or kernels.may_serve_prompts(s))


def strangers(
    plan: Plan, kernels: TritonKernels, head_dim: int, *, kv_dtype: torch.dtype, unit: int
) -> list[Choice]:
    """Return the choices that something else won than what is a candidate here: not to be applied.

    Args:
        plan: Of this machine and model.
        kernels: Whose layers it is about.
        head_dim: Of the model.
        kv_dtype: Of the cache.
        unit: Tokens of one of its units.
    """
    shapes = [name_of(shape) for shape in _shapes(kernels, head_dim, kv_dtype, unit)]
    options = {(over(PREFILL, kv_dtype), key_words(bound)): shapes for bound in BOUNDS}
    decodes = [shape.words for shape in decode_candidates(head_dim, kernels.capability)]
    options[over(DECODE, kv_dtype), ANY_LENGTH] = decodes
    for layer in kernels.planned_layers:
        for ways in layer.planned:
            for most_rows in ways.classes:
                options[words_of(layer), class_words(most_rows)] = ways.options(most_rows)
    return [c for c in plan.choices if c.winner not in options.get(c.question, [c.winner])]


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
    shapes does, by the same times.

    Args:
        plan: Of this machine and model.
        kernels: Whose layers it is about.
        head_dim: Of the model.
        file: Where the plan lies, for errors.
        kv_dtype: Of the cache.
        unit: Tokens of one of its units.

    Raises:
        ConfigError: It names a kernel that is no candidate here, or refuses every shape of the one
            that is asked for; nothing was changed.
    """
    shapes = {name_of(shape): shape for shape in _shapes(kernels, head_dim, kv_dtype, unit)}
    rows = []
    for bound in BOUNDS:
        question = over(PREFILL, kv_dtype), key_words(bound)
        _winner(plan, *question, list(shapes), file)
        shape = _allowed_winner(plan.choice(*question), kernels, shapes, file)
        rows.append((bound, shape or kernels.usual_prefill_shape(head_dim, bound - 1)))
    decodes = {shape.words: shape for shape in decode_candidates(head_dim, kernels.capability)}
    decode_name = _winner(plan, over(DECODE, kv_dtype), ANY_LENGTH, list(decodes), file)
    served = []
    for layer in kernels.planned_layers:
        for ways in layer.planned:
            for most_rows in ways.classes:
                words, options = class_words(most_rows), ways.options(most_rows)
                name = _winner(plan, words_of(layer), words, options, file)
                served.append((ways, most_rows, name))
    kernels.prefill_rows = tuple(rows)
    kernels.decode_row = None if decode_name is None else decodes[decode_name]
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


def over(operation: str, kv_dtype: torch.dtype) -> str:
    """Return what a plan calls an operation over a cache: float8 has kernels of its own."""
    return f"{operation} over float8" if kv_dtype == FLOAT8 else operation


@dataclass(frozen=True)
class _Sequences:
    """Sequences of one length in a paged cache, their units anywhere in it."""

    q: Tensor
    """[B, Hq, rows, D]."""
    k: Tensor
    """[B, Hkv, L, D], as the cache holds them."""
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    kv_lens: Tensor

    @classmethod
    def of(
        cls,
        kernels: TritonKernels,
        heads: Heads,
        sizes: tuple[int, int, int],
        kv_dtype: torch.dtype,
        unit: int,
    ) -> _Sequences:
        """Make up sequences, their rows at the end of each, of sizes (sequences, keys, rows)."""
        count, length, rows = sizes
        device, width = kernels.device, -(-length // unit)
        generator = torch.Generator(device).manual_seed(0)
        places = torch.randperm(count * width, generator=generator, device=device)
        k, v = (_noise(kernels, (count, heads.kv, length, heads.dim)).to(kv_dtype) for _ in "kv")
        lens = torch.full((count,), length, dtype=torch.int32, device=device)
        return cls(
            q=_noise(kernels, (count, heads.query, rows, heads.dim)),
            k=k,
            v=v,
            k_cache=_paged(k, places, unit).permute(0, 2, 3, 1),
            v_cache=_paged(v, places, unit).permute(0, 2, 1, 3),
            tables=places.view(count, width).to(torch.int32),
            kv_lens=lens,
        )


def _paged(x: Tensor, places: Tensor, unit: int) -> Tensor:
    """Return [blocks, unit, Hkv, D] of x [B, Hkv, L, D]; the i-th unit of all lies at places[i]."""
    count, num_heads, length, dim = x.shape
    width = len(places) // count
    padded = torch.zeros(count, width * unit, num_heads, dim, dtype=x.dtype, device=x.device)
    padded[:, :length] = x.transpose(1, 2)
    cache = torch.empty(len(places), unit, num_heads, dim, dtype=x.dtype, device=x.device)
    # Bytes are copied: not everything works on float8.
    cache.view(torch.uint8)[places] = padded.view(cache.shape).view(torch.uint8)
    return cache


def _prefill(
    kernels: TritonKernels,
    heads: Heads,
    sizes: tuple[int, int],
    kv_dtype: torch.dtype,
    unit: int,
) -> Question:
    """One whole prompt of so many tokens, in a class."""
    length, bound = sizes
    starts = torch.tensor([0, length], dtype=torch.int32, device=kernels.device)

    @cache
    def given() -> tuple[_Sequences, Tensor]:
        at = _Sequences.of(kernels, heads, (1, length, length), kv_dtype, unit)
        return at, at.q[0].transpose(0, 1).contiguous()

    def by(shape: PrefillShape) -> Tensor:
        at, q_THD = given()
        out_THD = torch.empty_like(q_THD)
        prefill(
            q_THD,
            at.k_cache,
            at.v_cache,
            out_THD,
            tiles=tiles[shape.block_m],
            query_starts=starts,
            kv_lens=at.kv_lens,
            block_tables=at.tables,
            scale=heads.dim**-0.5,
            shape=shape,
        )
        return out_THD

    def truth() -> Tensor:
        at, _ = given()
        parts = [_exact_rows(at.q, at.k, at.v, row) for row in range(0, length, _ROWS)]
        return torch.cat(parts, 1)[0]

    shapes = _asked_shapes(kernels, heads.dim, kv_dtype, unit)
    tiles = {shape.block_m: _tiles(length, shape.block_m, kernels.device) for shape in shapes}
    usual = prefill_shape(heads.dim, bound - 1, kernels.capability)
    works = {name_of(shape): partial(by, shape) for shape in shapes}
    return Question(over(PREFILL, kv_dtype), key_words(bound), name_of(usual), works, truth)


def _tiles(length: int, block_m: int, device: torch.device) -> Tensor:
    lengths = np.array([length], dtype=np.int32)
    cut = cut_tiles(lengths, lengths, first_sequence=0, block_m=block_m)
    return torch.from_numpy(cut).to(device)


def _decode(
    kernels: TritonKernels, heads: Heads, length: int, kv_dtype: torch.dtype, unit: int
) -> Question:
    """One row of each of some sequences."""
    usual, *_ = shapes = decode_candidates(heads.dim, kernels.capability)

    @cache
    def given() -> tuple[_Sequences, Tensor, DecodeScratch]:
        at = _Sequences.of(kernels, heads, (_DECODES, length, 1), kv_dtype, unit)
        scratch = DecodeScratch.allocate(
            _DECODES, heads.query, heads.dim, length, usual.split, str(kernels.device)
        )
        return at, at.q.squeeze(2).contiguous(), scratch

    def by(shape: DecodeShape) -> Tensor:
        at, q_BHD, scratch = given()
        out_BHD = torch.empty_like(q_BHD)
        decode(
            q_BHD,
            at.k_cache,
            at.v_cache,
            out_BHD,
            kv_lens=at.kv_lens,
            block_tables=at.tables,
            scale=heads.dim**-0.5,
            shape=shape,
            scratch=scratch,
        )
        return out_BHD

    def truth() -> Tensor:
        at, *_ = given()
        rows = [(at.q[i : i + 1], at.k[i : i + 1], at.v[i : i + 1]) for i in range(_DECODES)]
        return torch.cat([_attended(q, k, v)[:, 0] for q, k, v in rows])

    works = {shape.words: partial(by, shape) for shape in shapes}
    return Question(over(DECODE, kv_dtype), ANY_LENGTH, usual.words, works, truth, is_exact=True)


def _linear(
    kernels: TritonKernels, layer: PlannedLinear, ways: Ways[object], most_rows: int
) -> Question:
    """As many rows as the class has at most."""

    @cache
    def given() -> Tensor | RoundedRows:
        return layer.given(_noise(kernels, (ways.timed_rows(most_rows), layer.sizes[1])))

    def by(name: str) -> Tensor:
        serving = ways.serving(most_rows)
        ways.serve(most_rows, name)
        try:
            return layer(given())
        finally:
            ways.serve(most_rows, serving)

    def truth() -> Tensor:
        x = given()
        wide_TI = x.float() if isinstance(x, torch.Tensor) else x.dequantize()
        outputs = layer.sizes[0]
        parts = []
        for first in range(0, outputs, _OUTPUTS):
            end = min(first + _OUTPUTS, outputs)
            bias_O = None if layer.bias_O is None else layer.bias_O[first:end].float()
            parts.append(functional.linear(wide_TI, layer.weight_rows(first, end), bias_O))
        return torch.cat(parts, 1)

    works = {name: partial(by, name) for name in ways.options(most_rows)}
    words = class_words(most_rows)
    usual = ways.serving(most_rows)
    return Question(words_of(layer), words, usual, works, truth, is_exact=ways.is_exact)


def _exact_rows(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Return the attention [1, rows, Hq, D] of some rows in float32; all at once take gigabytes."""
    rows = q[:, :, first : first + _ROWS]
    end = first + rows.shape[2]
    is_seen = torch.ones(rows.shape[2], end, dtype=torch.bool, device=q.device).tril(first)
    return _attended(rows, k[:, :, :end], v[:, :, :end], is_seen)


def _attended(q: Tensor, k: Tensor, v: Tensor, is_seen: Tensor | None = None) -> Tensor:
    """Return attention [B, rows, Hq, D] in float32."""
    found = functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=is_seen, enable_gqa=True
    )
    return found.transpose(1, 2)


def _noise(kernels: TritonKernels, shape: tuple[int, ...]) -> Tensor:
    """Return values that do not depend on what was drawn before."""
    generator = torch.Generator(kernels.device).manual_seed(0)
    drawn = torch.randn(shape, generator=generator, device=kernels.device)
    return drawn.to(kernels.dtype)
