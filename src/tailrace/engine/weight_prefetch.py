"""Which budget of bytes asked for ahead serves a decode step, and what the GPU has room for.

    rows      ..16      ..32      ..64      ..128       more
    budget    none      8 MiB     16 MiB    16 MiB      none: products are bound by arithmetic

A graph does not know how long its sequences will be. Where they are long, attention leaves memory
no time; but those that ask start when its last programs do, so they take little from it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tailrace.errors import ConfigError
from tailrace.kernels.weight_prefetch.gaps import MIB, Streamed, asking, asks_in_bulk, schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tailrace.kernels.weight_prefetch.gaps import Ask, Budget
    from tailrace.models.causal_lm import CausalLM

    Budgets = Mapping[int, Budget | None]
    """By the most rows of a class, ascending."""

ROW_CLASSES = (16, 32, 64, 128)
"""The most rows of each class of decode steps."""


def budget_of(budgets: Budgets, rows: int) -> Budget | None:
    """Return the budget of a decode step of so many rows; None: it asks for nothing."""
    return next((budget for bound, budget in budgets.items() if rows <= bound), None)


def describe(budgets: Budgets) -> str:
    """Say in one line what serves which steps."""
    shown = [
        f"up to {rows} rows {budget.words if budget else 'off'}" for rows, budget in budgets.items()
    ]
    return ", ".join(shown) or "off"


@dataclass(frozen=True)
class DeviceCache:
    """A GPU's second-level cache, as far as asking ahead needs it."""

    nbytes: int
    multiprocessors: int
    capability: tuple[int, int]

    @classmethod
    def of(cls, device: torch.device) -> DeviceCache | None:
        """Return a GPU's; None on a CPU, whose interpreter has no such instruction."""
        if device.type != "cuda":
            return None
        known = torch.cuda.get_device_properties(device)
        capability = (known.major, known.minor)
        return cls(known.L2_cache_size, known.multi_processor_count, capability)

    @property
    def room(self) -> int:
        """Bytes that may be ahead at once: the other half is for what kernels stream by."""
        return self.nbytes // 2

    def require(self, budget: Budget) -> None:
        """Refuse a budget that there is no room for.

        Raises:
            ConfigError: Says what there is.
        """
        if budget.nbytes > self.room:
            raise ConfigError(
                f"--weight-prefetch {budget.nbytes / MIB:g}: this GPU's L2 cache has "
                f"{self.nbytes / MIB:g} MiB, and half of it is for other data; name at most "
                f"{self.room // MIB}"
            )

    def asks(self, model: CausalLM, budget: Budget) -> list[Ask]:
        """Return what a decode step of the model asks for.

        Raises:
            ConfigError: A layer does not tell how its weight is read.
        """
        weights = []
        for linear in model.layer_linears:
            if not isinstance(linear, Streamed):
                raise ConfigError(
                    f"--weight-prefetch: layers by {linear.name} do not tell how their weight is "
                    "read; leave it out"
                )
            weights.append(linear.streamed())
        return schedule(weights, budget, self.room)

    def asking(self, model: CausalLM, budget: Budget | None) -> AbstractContextManager[None]:
        """Have one decode step of the model, within the block and on this thread, ask ahead."""
        if budget is None:
            return nullcontext()
        asks = self.asks(model, budget)
        return asking(
            asks,
            hosts=self.multiprocessors,
            is_bulk=asks_in_bulk(self.capability),
            is_kept=budget.is_kept,
        )
