"""Which copy of the weights serves prompts: `--prefill-weights`, before anything is computed.

    same        one copy of the weights serves both phases
    fp8, bf16   that copy, or an error that says what is missing
    auto        for weights in 4 bits the fastest copy whose accuracy was measured on this very
                checkpoint and found within the bound, else half precision, which is what such
                weights are written out to for prompts anyway; for all others none

Where some layers are in 4 bits, those are copied and the others left as the checkpoint has them.
The head is never copied: only rows that are sampled come to it.

A copy must leave room for the largest step and for KV: for the pool that was asked for, or else for
one sequence of the context and, by `auto`, for half of what KV would have without. Where it does
not, `auto` gives it up and says so; asked for by name, it is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tailrace.engine.accuracy import Bound
from tailrace.engine.device_faults import is_out_of_memory
from tailrace.errors import ConfigError
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.float8_linear import Float8Linear
from tailrace.kernels.linear.int4_linear import Int4Linear
from tailrace.kernels.linear.prefill_format import FORMATS, HALF
from tailrace.kernels.linear.triton_skinny import SkinnyLinear

if TYPE_CHECKING:
    from tailrace.engine.accuracy_record import Finding, Known
    from tailrace.kernels.kernels import Linear
    from tailrace.kernels.linear.prefill_format import PrefillFormat
    from tailrace.kernels.triton_kernels import TritonKernels
    from tailrace.models.causal_lm import CausalLM

LEAST_KV_SHARE = 0.5
"""Of the KV pool without a copy, that one made by `auto` must leave."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, before it was made."""

    format: PrefillFormat | None
    """None: one copy serves both phases."""
    words: str
    """Why."""
    is_asked: bool = False
    """Whether it was named, so that nothing else will do."""

    @property
    def name(self) -> str:
        """As `--prefill-weights` names it."""
        return "same" if self.format is None else self.format.name

    def dropped(self, reason: str) -> Choice:
        """Return that none is made after all.

        Raises:
            ConfigError: It was asked for by name.
        """
        if self.is_asked:
            raise ConfigError(
                f"--prefill-weights {self.name}: {reason}; use auto or same, or lower "
                "--context-length, --max-num-batched-tokens or --kv-cache-tokens"
            )
        return Choice(None, f"{reason}; {self.words}")


def choose(asked: str, kernels: TritonKernels, model: CausalLM, known: Known) -> Choice:
    """Choose a copy for a model that is loaded.

    Args:
        asked: `--prefill-weights`.
        kernels: The model's.
        model: Without a copy.
        known: What was measured of this checkpoint as it is served.

    Raises:
        ConfigError: A copy was asked for that cannot be made here; says why.
    """
    if asked == "same":
        return Choice(None, "as asked")
    kinds = {_kind(linear) for linear in model.layer_linears}
    if asked != "auto":
        return _asked_for(asked, kernels, model, kinds, known)
    if "4 bits" not in kinds:
        return Choice(None, f"weights {' and '.join(sorted(kinds))} serve prompts as they are")
    figures = [_figures(name, known) for name, form in FORMATS.items() if form.rounds]
    words = ", ".join([*figures, _bound_in_words()])
    for form in FORMATS.values():
        if _obstacle(form, kernels, model):
            continue
        if not form.rounds:
            own = [_figures(form.name, known)] if form.name in known.found else []
            return Choice(form, ", ".join([*own, words]))
        if _keeps(known.found.get(form.name)):
            return Choice(form, words)
    return Choice(None, f"no copy can be made here; {words}")


def _asked_for(
    asked: str,
    kernels: TritonKernels,
    model: CausalLM,
    kinds: set[str],
    known: Known,
) -> Choice:
    form = FORMATS[asked]
    held = model.config.quantization
    if held is not None and held.to_float8:
        raise ConfigError(
            f"--prefill-weights {asked}: --quant-type fp8 has rounded the checkpoint's 4 bits to "
            "FP8, and one copy in FP8 serves prompts and decodes; use auto or same, or leave "
            "--quant-type out, so that decodes keep the 4 bits beside a copy for prompts"
        )
    if "4 bits" not in kinds:
        if "in FP8" in kinds:
            raise ConfigError(
                f"--prefill-weights {asked}: the checkpoint's weights are in FP8 and serve prompts "
                "so; a copy would be slower or the same; use auto or same"
            )
        if form == HALF:
            return Choice(None, f"weights are in {kernels.name_of_dtype} already", is_asked=True)
    obstacle = _obstacle(form, kernels, model)
    if obstacle:
        raise ConfigError(f"--prefill-weights {asked}: {obstacle}; use auto or same")
    figures = [_figures(asked, known)] if form.rounds or asked in known.found else []
    return Choice(form, ", ".join(["as asked", *figures, _bound_in_words()]), is_asked=True)


def _obstacle(form: PrefillFormat, kernels: TritonKernels, model: CausalLM) -> str:
    """Return why a format cannot be had, or nothing."""
    if kernels.capability < form.least_capability:
        has, needs = (
            ".".join(map(str, version)) for version in (kernels.capability, form.least_capability)
        )
        return f"this GPU's compute capability is {has}, and {form.words} needs {needs} or later"
    for linear in copied(model):
        sizes = linear.sizes
        if not form.takes(sizes):
            return (
                f"a layer of {sizes[0]} outputs and {sizes[1]} inputs cannot be copied in "
                f"{form.words}: both must be multiples of {form.alignment}"
            )
    return ""


Copied = Int4Linear | SkinnyLinear | CublasLinear


def copied(model: CausalLM) -> list[Copied]:
    """Return the layers that a copy is made of: those in 4 bits, or where there are none, plain."""
    linears = model.layer_linears
    fours: list[Copied] = [linear for linear in linears if isinstance(linear, Int4Linear)]
    plain: list[Copied] = [
        linear for linear in linears if isinstance(linear, SkinnyLinear | CublasLinear)
    ]
    return fours or plain


def copy_bytes(form: PrefillFormat, model: CausalLM) -> int:
    """Return what a copy will take."""
    return sum(form.weight_bytes(*linear.sizes) for linear in copied(model))


def with_copy(model: CausalLM, kernels: TritonKernels, form: PrefillFormat) -> CausalLM:
    """Return the model with a copy for prompts; the one given stays as it is.

    Raises:
        RuntimeError: The device has no memory for it (`is_out_of_memory`).
    """
    chosen = {id(linear) for linear in copied(model)}

    def change(linear: Linear) -> Linear:
        return kernels.with_copy(linear, form) if id(linear) in chosen else linear

    return model.with_linears(change)


@dataclass(frozen=True)
class Prefill:
    """What serves prompts, and the model that does."""

    choice: Choice
    model: CausalLM
    without: CausalLM
    """The model as it was loaded; shares everything with `model` but the copy."""
    copy_bytes: int = 0
    kv_bytes: int = 0
    """Left for KV; 0 before that is known."""

    def in_room(self, *, kv_bytes: int, needed_bytes: int, is_fixed: bool = False) -> Prefill:
        """Return this, or the model without the copy where too little is left for KV.

        Args:
            kv_bytes: Left for KV, with the copy.
            needed_bytes: For what must fit in any case: the pool that was asked for, or one
                sequence of the context.
            is_fixed: Whether that pool was asked for: it gains nothing from more room.

        Raises:
            ConfigError: The copy was asked for by name, and leaves less than is needed.
        """
        if self.choice.format is None:
            return self
        takes = f"the copy takes {_gib(self.copy_bytes)} and leaves {_gib(kv_bytes)} for KV"
        least = LEAST_KV_SHARE * (kv_bytes + self.copy_bytes)
        if kv_bytes < needed_bytes:
            return self.dropped(f"{takes}, which needs {_gib(needed_bytes)}")
        if kv_bytes < least and not (is_fixed or self.choice.is_asked):
            return self.dropped(f"{takes}, less than half of what it has without")
        return replace(self, kv_bytes=kv_bytes)

    def dropped(self, reason: str) -> Prefill:
        """Return the model without the copy.

        Raises:
            ConfigError: The copy was asked for by name.
        """
        return Prefill(self.choice.dropped(reason), self.without, self.without)

    def describe(self) -> str:
        """Say in one line what serves prompts, what that takes, and why."""
        if self.choice.format is None:
            return f"{self.choice.name}: {self.choice.words}"
        return (
            f"{self.choice.name} ({_gib(self.copy_bytes)}, leaves {_gib(self.kv_bytes)} for KV): "
            f"{self.choice.words}"
        )


def make(choice: Choice, model: CausalLM, kernels: TritonKernels, *, free_bytes: int) -> Prefill:
    """Make the copy that was chosen, or do without where memory does not hold it.

    Args:
        choice: From `choose`.
        model: As it was loaded.
        kernels: The model's; nothing was multiplied by them yet.
        free_bytes: Of the device's memory, that may be taken.

    Raises:
        ConfigError: The copy was asked for by name, and does not fit.
    """
    form = choice.format
    if form is None:
        return Prefill(choice, model, model)
    size = copy_bytes(form, model)
    if size > free_bytes:
        reason = f"the copy takes {_gib(size)}, and {_gib(free_bytes)} are free"
        return Prefill(choice.dropped(reason), model, model)
    try:
        made = with_copy(model, kernels, form)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = f"the copy takes {_gib(size)}: {str(error).splitlines()[0]}"
    else:
        return Prefill(choice, made, model, size)
    return Prefill(choice.dropped(reason), model, model)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _kind(linear: Linear) -> str:
    if isinstance(linear, Int4Linear):
        return "4 bits"
    return "in FP8" if isinstance(linear, Float8Linear) else "in half precision"


def _keeps(found: Finding | None) -> bool:
    bound = Bound()
    return found is not None and found.keeps(bound.agreement, bound.divergence)


def _figures(name: str, known: Known) -> str:
    found = known.found.get(name)
    if found is None:
        other = known.otherwise.get(name)
        outcome = f"measured under {other}" if other else "not measured"
        return f"{name} {outcome} (tailrace check-accuracy MODEL --prefill-weights {name})"
    return f"{name} measured {found.describe()} over {found.positions:,} positions"


def _bound_in_words() -> str:
    bound = Bound()
    return f"bound {bound.agreement:.0%} / {bound.divergence:g} nats"
