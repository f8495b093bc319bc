"""The engine in figures: `EngineStats` after a step, and `KvReport` when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tailrace.errors import IntegrityError
from tailrace.types import EngineStats, KvReport, KvTable

if TYPE_CHECKING:
    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.scheduler import Scheduler
    from tailrace.types import StepCosts, StepTimings

log = structlog.get_logger("tailrace.engine")


@dataclass
class Counters:
    """What the engine counts itself; the last step's figures among it."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_time_s: float = 0.0
    step_tokens: int = 0
    busy_s: float = 0.0
    memory_failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What the engine's other parts say at a moment.

    Attributes:
        time_s: Monotonic seconds.
        compiling: Complete requests whose grammar is being compiled.
        place_free_s: Until somebody who runs will have ended; None where nobody waits for it.
        block_bytes: Of KV in one unit.
        step_costs: As learnt up to now.
        timings: Of steps.
        late_refusals_total: Requests refused for their predicted time.
    """

    time_s: float
    compiling: int
    place_free_s: float | None
    block_bytes: int
    step_costs: StepCosts | None
    timings: StepTimings
    late_refusals_total: int


def engine_stats(scheduler: Scheduler, count: Counters, moment: Moment) -> EngineStats:
    """Describe the engine at a moment."""
    blocks, early, running = scheduler.blocks, scheduler.early, scheduler.running
    return EngineStats(
        time_s=moment.time_s,
        running_requests=len(running),
        waiting_requests=len(scheduler.waiting) + moment.compiling,
        total_blocks=blocks.num_units,
        free_blocks=blocks.available_units,
        block_size=blocks.unit_tokens,
        # A shared unit is full, and each of its holders counted its tokens.
        live_tokens=sum(sequence.num_computed for sequence in running)
        + sum(sequence.num_computed for sequence in early.holders)
        - blocks.duplicate_units * blocks.unit_tokens,
        held_blocks=blocks.held_units,
        leased_blocks=blocks.leased_units,
        lent_blocks=blocks.lent_units,
        wide_share=blocks.wide_share,
        prompt_tokens_total=count.prompt_tokens,
        generation_tokens_total=count.generation_tokens,
        cached_tokens_total=blocks.hit_tokens_total,
        prefix_query_tokens_total=blocks.query_tokens_total,
        preemptions_total=scheduler.preemptions_total,
        returns_total=scheduler.returns_total,
        lent_blocks_total=blocks.lent_units_total,
        evictions_total=blocks.evictions_total,
        runs_total=blocks.runs_total,
        host_blocks=blocks.host_places,
        swapped_blocks=blocks.swapped_units,
        swapped_out_blocks_total=blocks.swapped_out_total,
        swapped_in_blocks_total=blocks.swapped_in_total,
        block_bytes=moment.block_bytes,
        steps_total=count.steps,
        step_time_s=count.step_time_s,
        step_tokens=count.step_tokens,
        busy_s_total=count.busy_s,
        early_used_tokens_total=early.used_tokens_total,
        early_dropped_tokens_total=early.dropped_tokens_total,
        step_costs=moment.step_costs,
        timings=moment.timings,
        place_free_s=moment.place_free_s,
        late_refusals_total=moment.late_refusals_total,
        memory_failures_total=count.memory_failures,
    )


def kv_report(blocks: BlockManager) -> KvReport:
    """Check the KV pool and describe it; takes time in its size."""
    try:
        blocks.check_integrity()
        fault = ""
    except IntegrityError as error:
        log.exception("kv_pool_broken")
        fault = str(error)
    return KvReport(
        fault=fault,
        block_size=blocks.unit_tokens,
        total_blocks=blocks.num_units,
        free_blocks=blocks.available_units,
        reserved_blocks=blocks.reserved_units,
        host_blocks=blocks.host_places,
        swapped_blocks=blocks.swapped_units,
        tables=[
            KvTable(
                request_id=table.seq_id,
                held=len(table.units),
                shared=table.shared,
                ahead=len(table.ahead),
                claim=table.lease.claim,
                short=table.lease.short,
                debt=table.lease.debt,
            )
            for table in blocks.tables()
        ],
    )
