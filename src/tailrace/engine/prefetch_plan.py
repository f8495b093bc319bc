"""`--weight-prefetch`: off, a budget for all, or for each class of rows what was measured.

    off     nothing is asked for ahead
    MIB     every decode step of up to 128 rows asks for so much in each gap
    auto    what the plan says; where it is `--plan auto` and lacks some budget, whole decode steps
            are captured with and without, timed in turns, and the plan keeps the winners

A step is timed twice, over short and over long sequences, and the sum counts: a budget must not win
at the one by what it costs at the other. No budget changes a bit, so nothing is compared. How long
attention leaves memory idle hangs on what it reads, so that each kind of cache has its own choices.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tailrace.engine.cuda_plan import dropped
from tailrace.engine.device_faults import is_out_of_memory
from tailrace.engine.graph_capture import quietly
from tailrace.engine.weight_prefetch import ROW_CLASSES, DeviceCache
from tailrace.errors import ConfigError
from tailrace.kernels.plan import choose, usual_file, write
from tailrace.kernels.plan_questions import over
from tailrace.kernels.weight_prefetch.gaps import MIB, Budget

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from tailrace.engine.step_graphs import StepGraphs
    from tailrace.engine.weight_prefetch import Budgets
    from tailrace.kernels.plan import Choice, Plan
    from tailrace.models.causal_lm import CausalLM

    Replay = Callable[[], float]
    """Runs a step and returns its seconds."""

log = structlog.get_logger("tailrace.engine")

OPERATION = "weight prefetch"
OFF = "off"
MARGIN = 0.01
"""By how much less time a budget wins: whole steps, timed in turns, spread less than kernels."""
CANDIDATES = (
    *(Budget(mib * MIB) for mib in (8, 16, 24)),
    Budget(16 * MIB, by_columns=True),
    Budget(16 * MIB, is_early=True),
)
BOUND_S = 5.0
"""Of measuring at start; the class that is being measured may overrun it."""
KEYS = (512, 4096)
"""Tokens of each sequence of the steps that are timed."""
ROUNDS = 7


@dataclass(frozen=True)
class Prefetching:
    """What a start knows of its budgets before graphs are captured."""

    budgets: Budgets
    is_asked: bool = True
    plan: Plan | None = None
    """Which what is missing is added to, once graphs are there; None: nothing is measured."""
    file: Path | None = None
    operation: str = OPERATION
    """What the plan calls it over the cache that serves."""


def sizes_of(most_rows: int) -> str:
    """Return what a plan calls a class of rows."""
    return f"decode steps up to {most_rows} rows"


def find(
    asked: str,
    plan_asked: str,
    plan: Plan | None,
    model: CausalLM,
    *,
    device: torch.device,
    kv_dtype: torch.dtype,
) -> Prefetching:
    """Return the budgets that are known before graphs are captured.

    Args:
        asked: `--weight-prefetch`.
        plan_asked: `--plan`.
        plan: What came of that: it holds here, whatever became of the model's layers since.
        model: As decodes are served.
        device: That serves.
        kv_dtype: Of its cache.

    Raises:
        ConfigError: The device cannot, has too little room, or a plan that is taken as it is names
            no budget of here.
    """
    if asked == OFF:
        return Prefetching({}, is_asked=False)
    cache = cache_for(asked, device)
    if asked != "auto":
        budget = Budget(int(asked) * MIB)
        cache.asks(model, budget)
        return Prefetching(dict.fromkeys(ROW_CLASSES, budget))
    if plan is None:
        raise ConfigError("--weight-prefetch auto: there is no plan to keep it in; add --plan auto")
    file = usual_file(plan.key) if plan_asked == "auto" else Path(plan_asked)
    operation, offered = over(OPERATION, kv_dtype), candidates(cache)
    cache.asks(model, CANDIDATES[0])
    is_open = plan_asked == "auto" and not plan.pinned
    if is_open:
        plan = _without_strangers(plan, offered, operation)
    elif not any(plan.choice(operation, sizes_of(bound)) for bound in ROW_CLASSES):
        log.warning(
            "weight_prefetch_not_in_plan",
            question=operation,
            file=str(file),
            remedy="start once with --plan auto and a plan that is not pinned, which measures it",
        )
    budgets = chosen(plan, offered, file, operation)
    return Prefetching(budgets, plan=plan if is_open else None, file=file, operation=operation)


def cache_for(asked: str, device: torch.device) -> DeviceCache:
    """Return the cache that is asked into, before anything is loaded.

    Args:
        asked: `--weight-prefetch`, not off.
        device: That serves.

    Raises:
        ConfigError: There is none, or it has too little room.
    """
    cache = DeviceCache.of(device)
    if cache is None:
        raise ConfigError(f"--weight-prefetch {asked}: needs a GPU; leave it out")
    if asked != "auto":
        cache.require(Budget(int(asked) * MIB))
    return cache


def candidates(cache: DeviceCache) -> list[Budget]:
    """Return the budgets that a GPU has room for."""
    return [budget for budget in CANDIDATES if budget.nbytes <= cache.room]


def _arms(offered: Sequence[Budget]) -> dict[str, Budget | None]:
    """Return what can win, by the name that a plan gives it."""
    return {OFF: None, **{budget.words: budget for budget in offered}}


def _without_strangers(plan: Plan, offered: Sequence[Budget], operation: str) -> Plan:
    """Return a plan without the choices that something else won than what is offered here."""
    arms = _arms(offered)
    return dropped(
        plan, [c for c in plan.choices if c.operation == operation and c.winner not in arms]
    )


def chosen(plan: Plan, offered: Sequence[Budget], file: Path, operation: str) -> Budgets:
    """Return a plan's budgets; a class that it says nothing about has none.

    Raises:
        ConfigError: It names a budget that is not offered here.
    """
    arms = _arms(offered)
    budgets: dict[int, Budget | None] = {}
    for bound in ROW_CLASSES:
        name = plan.winner(operation, sizes_of(bound)) or OFF
        if name not in arms:
            raise ConfigError(
                f"plan {file}: {operation}, {sizes_of(bound)}: {name!r} is none of "
                f"{', '.join(arms)}; remove the file, or name another with --plan"
            )
        budgets[bound] = arms[name]
    return budgets


def settle(
    prefetching: Prefetching,
    graphs: StepGraphs,
    *,
    clock: Callable[[], float] = time.monotonic,
    bound_s: float = BOUND_S,
) -> None:
    """Measure what the plan lacks, keep it, and let the winners serve; after `graphs.capture`.

    Where the device lacks memory for a second set of graphs, those that are there go on serving.
    """
    plan, file, operation = prefetching.plan, prefetching.file, prefetching.operation
    if plan is None or file is None or graphs.cache is None:
        return
    choices: list[Choice] = []
    try:
        choices = measure(
            plan, graphs, candidates(graphs.cache), operation, clock=clock, bound_s=bound_s
        )
        if not choices:
            return
        plan = plan.with_choices(choices)
        _keep(plan, file)
        graphs.prefetch_by(chosen(plan, candidates(graphs.cache), file, operation))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        log.warning("weight_prefetch_lacks_memory", reason=str(error).splitlines()[0])


def _keep(plan: Plan, file: Path) -> None:
    try:
        write(plan, file)
    except (ConfigError, OSError) as error:  # it serves all the same, this once
        log.warning("plan_not_kept", reason=str(error))


def measure(
    plan: Plan,
    graphs: StepGraphs,
    offered: Sequence[Budget],
    operation: str,
    *,
    clock: Callable[[], float],
    bound_s: float,
) -> list[Choice]:
    """Return choices for the classes of which a plan lacks what is offered, and time allows."""
    begun_s = clock()
    choices, arms = [], _arms(offered)
    for bound, rows in classes(graphs.decode_sizes):
        if plan.answers(operation, sizes_of(bound), arms):
            continue
        if clock() - begun_s >= bound_s:
            break
        with quietly():
            steps = {name: graphs.rehearsals(rows, KEYS, arm) for name, arm in arms.items()}
        seconds = timed(steps)
        choices.append(choose(operation, sizes_of(bound), OFF, seconds, {}, margin=MARGIN))
    if choices:
        log.info(
            "weight_prefetch_measured",
            choices=[f"{choice.sizes}: {gain(choice)}" for choice in choices],
            seconds=round(clock() - begun_s, 2),
        )
    return choices


def gain(choice: Choice) -> str:
    """Say a choice with what it saves."""
    usual, best = (choice.seconds[name] for name in (choice.default, choice.winner))
    return f"{choice.winner}, {1e6 * (usual - best):.0f} us of {1e6 * usual:.0f}"


def classes(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return each class that has captured sizes, and the largest of those."""
    found = []
    low = 0
    for bound in ROW_CLASSES:
        within = [size for size in sizes if low < size <= bound]
        if within:
            found.append((bound, max(within)))
        low = bound
    return found


def timed(arms: dict[str, list[Replay]]) -> dict[str, float]:
    """Return each arm's seconds: the medians of its steps, added up.

    Arms take turns, and each goes first as often as last: a GPU's clocks drift.
    """
    names = list(arms)
    total = dict.fromkeys(names, 0.0)
    for index in range(len(arms[names[0]])):
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(ROUNDS + 1):
            for name in names[:: 1 - 2 * (turn % 2)]:
                times[name].append(arms[name][index]())
        for name in names:
            total[name] += statistics.median(times[name][1:])  # the first one only warms
    return total
