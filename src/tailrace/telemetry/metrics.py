"""The Prometheus families of a front end.

Names follow vLLM's, with the prefix `tailrace:`: dashboards, the inference gateway's model-server
protocol and people know them. Buckets include 0.3 s, the limit that users ask for most, and are
finer than vLLM's below one second. The engine's own counters arrive with its reports and are
exported as they are; they start again from zero with a new engine process, as counters may.

Several front ends share a folder, named by PROMETHEUS_MULTIPROC_DIR before this is imported: each
keeps its values there in files of its own, and whichever is asked sums all of them, those of front
ends that have died included.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter as Tally
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, multiprocess
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tailrace.telemetry.gpu import Gpus
from tailrace.telemetry.phases import PHASES
from tailrace.telemetry.process import resident_bytes
from tailrace.types import (
    FORECAST_ERROR_BOUNDS,
    HOST_BOUNDS_S,
    STEP_BOUNDS_S,
    STEP_RATIO_BOUNDS,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tailrace.telemetry.gpu import GpuReading
    from tailrace.telemetry.request_log import RequestRecord
    from tailrace.types import EngineStats, StepTimings

PREFIX = "tailrace:"
SHARED_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""The library's own name for it."""
LATENCY_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
GAP_BUCKETS_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
GAPS_TOGETHER = 256
"""Gaps between tokens that are counted at once: one by one they cost as much as their texts."""
TOKEN_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class Metrics:
    """Everything that `/metrics` shows.

    Args:
        gpus: Where readings of GPUs come from; None looks for this machine's.
    """

    def __init__(self, gpus: Gpus | None = None) -> None:
        self._gpus = Gpus.find() if gpus is None else gpus
        self._registry = CollectorRegistry()
        self._shared_folder = os.environ.get(SHARED_FOLDER_VARIABLE)
        self._ttft = self._latency("time_to_first_token_seconds", "Received to first token")
        self._predicted_ttft = self._latency(
            "predicted_time_to_first_token_seconds",
            "As predicted when the engine got the request; of those that had a first token",
        )
        self._ttft_error = self._histogram(
            "ttft_prediction_error_ratio",
            "|predicted - actual| / actual time to the first token, from the engine's getting it",
            FORECAST_ERROR_BOUNDS,
        )
        self._ttft_error_s = self._histogram(
            "ttft_prediction_error_seconds",
            "|predicted - actual| time to the first token",
            LATENCY_BUCKETS_S,
        )
        self._e2e = self._latency(
            "e2e_request_latency_seconds", "First byte received to last byte handed to the kernel"
        )
        self._phases = Histogram(
            f"{PREFIX}request_phase_seconds",
            "A request's time by phase; see docs/why-slow.md",
            ["phase"],
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self._phase = {name: self._phases.labels(name) for name in PHASES}
        self._queue = self._latency("request_queue_time_seconds", "Submitted to first step")
        self._prefill = self._latency("request_prefill_time_seconds", "First step to first token")
        self._decode = self._latency("request_decode_time_seconds", "First to last token")
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Decode time over tokens", GAP_BUCKETS_S
        )
        self._gap = _GapHistogram(
            f"{PREFIX}inter_token_latency_seconds",
            "Between two outputs of one sequence",
            buckets=GAP_BUCKETS_S,
            registry=self._registry,
        )
        self._gaps_s: list[float] = []
        # What is in the shared folder is all that others see, and all that a death leaves.
        self._most_gaps = 1 if self._shared_folder else GAPS_TOGETHER
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens", TOKEN_BUCKETS)
        self._output = self._histogram(
            "request_generation_tokens", "Generated tokens", TOKEN_BUCKETS
        )
        self._requests = Counter(
            f"{PREFIX}request_success",
            "Requests by why they ended; abort-like ends carry their cause",
            ["finished_reason"],
            registry=self._registry,
        )
        self._errors = Counter(
            f"{PREFIX}http_errors",
            "Requests answered with an error before any of the answer was out",
            ["status"],
            registry=self._registry,
        )
        self._rejections = Counter(
            f"{PREFIX}admission_rejections",
            "Requests refused for want of room or time (429), or of a ready engine (503)",
            ["reason"],
            registry=self._registry,
        )
        self._dropped = Counter(
            f"{PREFIX}request_log_dropped",
            "Records that were not written",
            registry=self._registry,
        )
        self._noted_dropped = 0

    def note_dropped(self, total: int) -> None:
        """Count the records that this process has dropped by now."""
        self._dropped.inc(total - self._noted_dropped)
        self._noted_dropped = total

    def count_error(self, status: int, code: str | None = None) -> None:
        """Count a request that was refused or failed: 429 and 503 are admission's refusals.

        Args:
            status: The answer's.
            code: The error's, which says by which rule.
        """
        self._errors.labels(str(status)).inc()
        if status in (429, 503):
            self._rejections.labels(code or "service_unavailable").inc()

    def observe_phases(self, record: RequestRecord) -> None:
        """Count where a request's time went: each phase once for each request."""
        if record.phases is not None:
            for name, seconds in record.phases.by_name().items():
                self._phase[name].observe(seconds)

    def observe_request(self, record: RequestRecord) -> None:
        """Count a request that the engine had and that has ended."""
        self.observe_phases(record)
        self._requests.labels(record.finish_reason or "unknown").inc()
        self._prompt.observe(record.prompt_tokens)
        self._output.observe(record.completion_tokens)
        self._e2e.observe(record.finished_s - record.received_s)
        first, last = record.first_token_s, record.last_token_s
        if record.scheduled_s is not None and record.submitted_s is not None:
            self._queue.observe(max(0.0, record.scheduled_s - record.submitted_s))
        if first is None or last is None:
            return
        self._ttft.observe(first - record.received_s)
        self._observe_prediction(record, first)
        self._decode.observe(last - first)
        if record.scheduled_s is not None:
            self._prefill.observe(max(0.0, first - record.scheduled_s))
        per_choice = record.completion_tokens / record.choices
        if per_choice > 1:
            self._tpot.observe((last - first) / (per_choice - 1))

    def _observe_prediction(self, record: RequestRecord, first_s: float) -> None:
        if record.predicted_ttft_s is None or record.submitted_s is None:
            return
        predicted_s, actual_s = record.predicted_ttft_s, first_s - record.received_s
        off_s = abs(predicted_s - actual_s)
        self._predicted_ttft.observe(predicted_s)
        self._ttft_error_s.observe(off_s)
        # What had passed before the engine got it was known, not predicted.
        self._ttft_error.observe(off_s / max(1e-6, first_s - record.submitted_s))

    def observe_token_gap(self, seconds: float) -> None:
        """Count the time between two outputs of one sequence."""
        self._gaps_s.append(seconds)
        if len(self._gaps_s) >= self._most_gaps:
            self._count_gaps()

    def _count_gaps(self) -> None:
        gaps_s, self._gaps_s = self._gaps_s, []
        self._gap.observe_all(gaps_s)

    def render(
        self,
        *,
        stats: EngineStats | None = None,
        restarts: int = 0,
        silence_s: float | None = None,
        pids: dict[str, int] | None = None,
        dropped_records: int = 0,
        frontend_restarts: int = 0,
    ) -> bytes:
        """Return the text format: the families above, and the engine as it was last reported."""
        self.note_dropped(dropped_records)
        self._count_gaps()
        snapshot = CollectorRegistry()
        gpus = self._gpus.read()
        shown = _Snapshot(
            stats,
            restarts=restarts,
            frontend_restarts=frontend_restarts,
            silence_s=silence_s,
            pids=pids or {},
            gpus=gpus,
        )
        snapshot.register(shown)
        return self._own() + generate_latest(snapshot)

    def _own(self) -> bytes:
        if not self._shared_folder:
            return generate_latest(self._registry)
        summed = CollectorRegistry()
        multiprocess.MultiProcessCollector(summed, self._shared_folder)  # type: ignore[no-untyped-call]
        return generate_latest(summed)

    def _latency(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, LATENCY_BUCKETS_S)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}{name}", text, buckets=buckets, registry=self._registry)


class _GapHistogram(Histogram):
    """A histogram that takes many values at once; it has no labels."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Count all of them, as `observe` counts one."""
        if not amounts:
            return
        self._sum.inc(sum(amounts))
        for bucket, count in Tally(bisect_left(self._upper_bounds, a) for a in amounts).items():
            self._buckets[bucket].inc(count)


class _Snapshot:
    """One report as metric families."""

    def __init__(
        self,
        stats: EngineStats | None,
        *,
        restarts: int,
        frontend_restarts: int,
        silence_s: float | None,
        pids: dict[str, int],
        gpus: Sequence[GpuReading],
    ) -> None:
        self._stats = stats
        self._restarts = restarts
        self._frontend_restarts = frontend_restarts
        self._silence_s = silence_s
        has_family = any(role.startswith("frontend") for role in pids)
        self._pids = pids if has_family else {"frontend": os.getpid()} | pids
        self._gpus = gpus

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield _counter("engine_restarts", "Engine processes started again", self._restarts)
        yield _counter("frontend_restarts", "Front ends started again", self._frontend_restarts)
        if self._silence_s is not None:
            yield _gauge(
                "engine_silence_seconds",
                "Since the engine last spoke: at most a second, and what a step takes",
                self._silence_s,
            )
        memory = GaugeMetricFamily(
            f"{PREFIX}process_resident_memory_bytes", "Resident memory", labels=["process"]
        )
        for role, pid in self._pids.items():
            size = resident_bytes(pid)
            if size is not None:
                memory.add_metric([role], size)
        yield memory
        if self._gpus:
            yield from _gpu_gauges(self._gpus)
        if self._stats is not None:
            yield from _engine_gauges(self._stats)
            if self._stats.frontends:
                yield from _frontend_gauges(self._stats.frontends)
            yield from _engine_counters(self._stats)
            yield from _step_costs(self._stats)
            if self._stats.timings is not None:
                yield from _step_timings(self._stats.timings)


def fragmentation(stats: EngineStats) -> float:
    """1 - live tokens / (held blocks x block size): the share of held KV that no token fills.

    What several sequences share counts once on both sides. A block is the engine's unit, 8 tokens
    by default; what is promised to sequences ahead of need is not held (`kv_cache_leased_blocks`).
    """
    held = stats.held_blocks * stats.block_size
    return max(0.0, 1.0 - stats.live_tokens / held) if held else 0.0


def _engine_gauges(stats: EngineStats) -> Iterator[Metric]:
    used = (stats.total_blocks - stats.free_blocks) / stats.total_blocks
    yield _gauge("num_requests_running", "Requests in the batch", stats.running_requests)
    yield _gauge("num_requests_waiting", "Requests that wait for a place", stats.waiting_requests)
    yield _gauge("kv_cache_usage_perc", "Share of KV blocks held by requests, 0 to 1", used)
    yield _gauge("kv_cache_fragmentation", "Share of held KV without a token", fragmentation(stats))
    yield _gauge("kv_cache_leased_blocks", "KV blocks promised ahead of need", stats.leased_blocks)
    yield _gauge("kv_cache_lent_blocks", "Promised KV blocks that others hold", stats.lent_blocks)
    yield _gauge("kv_cache_wide_share", "Share of table entries in runs of 4", stats.wide_share)
    if stats.host_blocks:
        yield _gauge("kv_cache_host_blocks", "KV blocks that the host can hold", stats.host_blocks)
        yield _gauge("kv_cache_swapped_blocks", "KV blocks on the host", stats.swapped_blocks)
    yield _gauge("engine_step_seconds", "The last step's time", stats.step_time_s)
    yield _gauge("engine_step_tokens", "The last step's tokens", stats.step_tokens)
    info = GaugeMetricFamily(
        f"{PREFIX}cache_config_info", "The KV pool", labels=["block_size", "num_gpu_blocks"]
    )
    info.add_metric([str(stats.block_size), str(stats.total_blocks)], 1)
    yield info


def imbalance(counts: Iterable[int]) -> float:
    """Return how much more than its share the busiest holds: 1 is even, and so is nothing."""
    held = list(counts)
    return max(held) * len(held) / sum(held) if any(held) else 1.0


def _frontend_gauges(frontends: dict[str, int]) -> Iterator[Metric]:
    """By index: a name is "frontend-0-1", the last being which life of it."""
    held: dict[str, int] = {}
    for name, count in frontends.items():
        index = name.split("-")[1] if name.count("-") > 1 else name
        held[index] = held.get(index, 0) + count
    family = GaugeMetricFamily(
        f"{PREFIX}frontend_requests", "Requests at the engine, by front end", labels=["frontend"]
    )
    for index, count in sorted(held.items()):
        family.add_metric([index], count)
    yield family
    yield _gauge(
        "frontend_imbalance",
        "Requests of the busiest front end over an equal share; 1 is even",
        imbalance(held.values()),
    )


def _engine_counters(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("prompt_tokens", "Prompt tokens computed", stats.prompt_tokens_total)
    yield _counter("generation_tokens", "Tokens generated", stats.generation_tokens_total)
    yield _counter(
        "prefix_cache_queries", "Prompt tokens looked up", stats.prefix_query_tokens_total
    )
    yield _counter("prefix_cache_hits", "Prompt tokens found cached", stats.cached_tokens_total)
    early = CounterMetricFamily(
        f"{PREFIX}early_prompt_tokens",
        "Prompt tokens computed while their bodies arrived: used, or dropped in the end",
        labels=["outcome"],
    )
    early.add_metric(["used"], stats.early_used_tokens_total)
    early.add_metric(["dropped"], stats.early_dropped_tokens_total)
    yield early
    yield _counter("num_preemptions", "Sequences sent back to wait", stats.preemptions_total)
    yield from _block_counters(stats)
    yield _counter("engine_steps", "Steps run", stats.steps_total)
    yield _counter(
        "engine_memory_failures",
        "Steps that found no memory on the device",
        stats.memory_failures_total,
    )
    yield _counter(
        "late_refusals",
        "Requests refused for a first token predicted beyond --max-ttft",
        stats.late_refusals_total,
    )
    yield _counter("engine_busy_seconds", "Time with a step to run", stats.busy_s_total)


def _block_counters(stats: EngineStats) -> Iterator[Metric]:
    outgrown = stats.preemptions_total - stats.returns_total
    causes = CounterMetricFamily(
        f"{PREFIX}preemptions_by_cause",
        "lent_back: the lender needed its blocks; outgrown: no block left beyond its lease",
        labels=["cause"],
    )
    causes.add_metric(["lent_back"], stats.returns_total)
    causes.add_metric(["outgrown"], outgrown)
    yield causes
    sizes = CounterMetricFamily(
        f"{PREFIX}kv_cache_runs", "Runs of KV blocks handed out, by their tokens", labels=["tokens"]
    )
    for order, count in enumerate(stats.runs_total):
        sizes.add_metric([str(stats.block_size << order)], count)
    yield sizes
    yield _counter("kv_cache_blocks_lent", "KV blocks ever lent", stats.lent_blocks_total)
    yield _counter("kv_cache_evictions", "Cached blocks given to others", stats.evictions_total)
    if stats.host_blocks:
        for way, blocks in (
            ("out", stats.swapped_out_blocks_total),
            ("in", stats.swapped_in_blocks_total),
        ):
            yield _counter(f"kv_cache_blocks_swapped_{way}", f"KV blocks swapped {way}", blocks)
            yield _counter(
                f"kv_cache_swapped_{way}_bytes", "The same, in bytes", blocks * stats.block_bytes
            )


def _step_costs(stats: EngineStats) -> Iterator[Metric]:
    """What steps cost, as learnt: one family, since a dashboard shows the terms together."""
    if stats.step_costs is None:
        return
    costs = GaugeMetricFamily(
        f"{PREFIX}engine_step_cost_seconds",
        "Of a step (base), of a row beyond the free ones (token), of a decode, and of a position "
        "that a prompt's token (attention) or a decode (kv) attends to; where a copy of the "
        "weights serves prompts, also of a step with prompts and one with decodes, of each decode "
        "beyond 32 (crowd), and of a prompt's token beyond twice the free ones (late_token)",
        labels=["term"],
    )
    for term, value in msgspec.structs.asdict(stats.step_costs).items():
        if term.endswith("_s"):
            costs.add_metric([term.removesuffix("_s")], value)
    yield costs
    yield _gauge(
        "engine_step_free_rows",
        "Rows of a step whose arithmetic hides behind reading the weights",
        stats.step_costs.free_rows,
    )


def _step_timings(timings: StepTimings) -> Iterator[Metric]:
    phases = CounterMetricFamily(
        f"{PREFIX}engine_host_seconds",
        "CPU time of steps; queue is the runner's thread's, the others are the engine's",
        labels=["phase"],
    )
    for phase in ("schedule", "prepare", "queue", "commit", "publish"):
        phases.add_metric([phase], getattr(timings, f"{phase}_s_total"))
    yield phases
    yield _counter(
        "engine_device_idle_seconds",
        "The device's time between two steps although the second was there",
        timings.idle_s_total,
    )
    yield _gauge("engine_step_predicted_seconds", "The last step's prediction", timings.predicted_s)
    yield _gauge(
        "engine_step_pace_margin_ratio",
        "What predictions of steps cut to --itl-target-ms are multiplied by, for 95 % to hold it",
        timings.pace_margin,
    )
    yield _gauge(
        "engine_step_prediction_recent_error_ratio",
        "Share by which predictions were off, over the device's last ten seconds or so",
        timings.recent_error,
    )
    yield _gauge(
        "engine_step_prediction_off_seconds",
        "Of the device's time, for which that has been more than 0.25 without a break",
        timings.off_s,
    )
    for name, text, bounds, found in (
        (
            "engine_step_host_seconds",
            "CPU time of one step: schedule, prepare, commit, publish",
            HOST_BOUNDS_S,
            timings.host,
        ),
        (
            "engine_step_device_seconds",
            "The device's time of one step",
            STEP_BOUNDS_S,
            timings.device,
        ),
        (
            "engine_step_prediction_error_ratio",
            "|predicted - measured| / measured of one step's device time",
            FORECAST_ERROR_BOUNDS,
            timings.error,
        ),
        (
            "engine_step_measured_over_predicted_ratio",
            "One step's device time over its prediction; above 1 it took longer",
            STEP_RATIO_BOUNDS,
            timings.ratio,
        ),
    ):
        labels = [*map(str, bounds), "+Inf"]
        buckets = list(zip(labels, accumulate(found.counts), strict=True))
        yield HistogramMetricFamily(f"{PREFIX}{name}", text, buckets, found.total)


def _gpu_gauges(gpus: Sequence[GpuReading]) -> Iterator[Metric]:
    for name, text, values in (
        ("gpu_utilization", "Share of the last second with a kernel", [g.busy_share for g in gpus]),
        ("gpu_memory_used_bytes", "Used by anyone", [g.memory_used_bytes for g in gpus]),
        ("gpu_memory_total_bytes", "Of the board", [g.memory_total_bytes for g in gpus]),
    ):
        family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=["gpu", "gpu_uuid"])
        for gpu, known in zip(gpus, values, strict=True):
            if known is not None:
                family.add_metric([str(gpu.index), gpu.uuid], known)
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}{name}", text, value=value)
