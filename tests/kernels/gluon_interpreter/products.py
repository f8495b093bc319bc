"""Products of tensor cores: queued, in flight while the warps go on, waited for in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from tests.kernels.gluon_interpreter.shared_memory import View
from tests.kernels.gluon_interpreter.values import (
    Array,
    GluonFaultError,
    InFlight,
    integer,
    plain,
    truth,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kernels.gluon_interpreter.language import Language

THEIRS = {
    name: getattr(hopper, name)
    for name in (
        "warpgroup_mma",
        "warpgroup_mma_wait",
        "fence_async_shared",
    )
}
_HALVES = (torch.bfloat16, torch.float16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(eq=False)
class Product:
    """One, of a partition; its operands are read at some time until it is waited for."""

    event: int
    left: Array | View
    right: View
    acc: Array | Product
    adds: bool
    read: tuple[torch.Tensor, torch.Tensor] | None = None
    result: torch.Tensor | None = None

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what lay in shared memory when this was first asked for."""
        if self.read is None:
            left = self.left.peek() if isinstance(self.left, View) else self.left.data
            self.read = left, self.right.peek()
        return self.read

    def finish(self) -> None:
        """Compute it."""
        left, right = self.operands()
        if left.dtype == torch.int8:
            total = (left.double() @ right.double()).long().int()
        else:
            total = left.float() @ right.float()
        before = self.acc.result if isinstance(self.acc, Product) else self.acc.data
        self.result = before + total if self.adds and before is not None else total


class Multiplier:
    """`warpgroup_mma` and the wait for it."""

    def __init__(self, language: Language) -> None:
        self._language = language

    def multiply(
        self,
        a: object,
        b: object,
        acc: object,
        *,
        use_acc: object = True,
        precision: object = None,
        max_num_imprecise_acc: object = None,
        is_async: object = False,
    ) -> object:
        language = self._language
        language.machine.pause()
        if not isinstance(acc, Array | InFlight) or not isinstance(b, View):
            raise GluonFaultError(f"{a!r} x {b!r} + {acc!r}: the right side is shared memory")
        if not isinstance(a, View | Array):
            raise GluonFaultError(f"the left side of a product is {a!r}")
        _check(a, b, acc, language.me.warps)
        event = language.machine.event()
        for view in (a, b):
            if isinstance(view, View):
                racing, words = view.allocation.unknown_to(
                    view.granules, language.me.known, language.machine.fenced
                )
                if racing:
                    raise GluonFaultError(f"race: {language.words('a product', view)}, and {words}")
                language.read(view, "a product", event, is_done=False)
        before = acc.product if isinstance(acc, InFlight) else acc
        product = Product(event, a, b, before, truth(use_acc))
        if language.machine.random.random() < 0.5:
            product.operands()
        language.me.products.append(product)
        pending = InFlight(product, acc.shape, acc.dtype, acc.layout)
        return self.wait(0, [pending]) if not truth(is_async) else pending

    def wait(self, num_outstanding: object = 0, deps: Sequence[object] | None = None) -> object:
        language = self._language
        if not deps:
            raise GluonFaultError("warpgroup_mma_wait without deps")
        language.machine.pause()
        queue = language.me.products
        while len(queue) > integer(num_outstanding):
            product = queue.popleft()
            product.finish()
            language.me.note(product.event)
        results = tuple(_settled(x) for x in deps)
        return results[0] if len(results) == 1 else results


def _settled(value: object) -> object:
    """Return an accumulator whose product is done as an array; anything else as it is."""
    if isinstance(value, InFlight) and value.product.result is not None:
        return Array(value.product.result, value.layout)
    return value


def _check(a: Array | View, b: View, acc: Array | InFlight, warps: int) -> None:
    """Refuse what the instruction does not take."""
    left = a.torch_dtype if isinstance(a, View) else a.data.dtype
    bits = left.itemsize * 8
    if left != b.torch_dtype or left not in (*_HALVES, *_FLOAT8, torch.int8):
        raise GluonFaultError(f"a product of {left} and {b.torch_dtype}")
    if acc.dtype != (gl.int32 if left == torch.int8 else gl.float32):
        raise GluonFaultError(f"sums in {acc.dtype} of products of {left}")
    (m, k), (k2, n) = a.shape, b.shape
    if k != k2 or acc.shape != [m, n]:
        raise GluonFaultError(f"shapes {a.shape} x {b.shape} + {acc.shape}")
    layout = plain(acc.layout)
    if not isinstance(layout, gl.NVMMADistributedLayout) or layout.version != [3, 0]:
        raise GluonFaultError(f"sums in {layout}: an NVMMADistributedLayout of version 3 is wanted")
    rows, columns, inputs = layout.instr_shape
    if rows != 16 or inputs * bits != 256 or n % columns or k % inputs or columns > 256:
        raise GluonFaultError(f"instructions of {layout.instr_shape} for {m}x{n}x{k} of {left}")
    if warps % 4 or list(layout.warps_per_cta) != [warps, 1] or m % (16 * warps):
        raise GluonFaultError(f"{warps} warps multiply {m} rows in {layout}")
    if isinstance(a, Array) and a.layout is not None:
        wanted = a.layout
        if not isinstance(wanted, gl.DotOperandLayout) or wanted.operand_index != 0:
            raise GluonFaultError(f"the left side lies in {wanted}")
        # The columns of its instructions do not matter to the left side.
        if (wanted.parent.version, wanted.parent.warps_per_cta) != (
            layout.version,
            layout.warps_per_cta,
        ):
            raise GluonFaultError(f"the left side is laid out for {wanted.parent}, not {layout}")
    _check_order(a, 1, bits)
    _check_order(b, 0, bits)


def _check_order(view: object, inputs: int, bits: int) -> None:
    """Refuse an operand of bytes whose inputs do not lie side by side.

    Whether the hardware can read a linear layout, the compiler knows.
    """
    if not isinstance(view, View):
        return
    if not isinstance(view.layout, gl.NVMMASharedLayout | gl.SharedLinearLayout):
        raise GluonFaultError(f"{view.name} lies in {view.layout}: products read NVMMA layouts")
    step = view.addresses.select(inputs, 1) - view.addresses.select(inputs, 0)
    if bits == 8 and not bool((step == 1).all()):
        raise GluonFaultError(f"{view.name}: products of bytes take inputs side by side")
