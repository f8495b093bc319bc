"""What the monitor saw of a server, its GPUs and its processes, as one figure each.

Counters are summed over their rises, so that a restart (which sets them to zero) loses nothing
but what happened between two readings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.bench.scrape import Scrape

Scrapes = Mapping[str, "Scrape"]
"""By source: "server", "gpu", "process", "client"."""

LABELS = {
    "kv_usage_max": "KV cache in use, most",
    "kv_usage_mean": "KV cache in use, mean",
    "kv_fragmentation_max": "KV fragmentation, most",
    "preemptions": "Preemptions",
    "waiting_max": "Waiting, most",
    "running_max": "Running, most",
    "acceptance": "Draft tokens accepted",
    "prefix_hits": "Prompt tokens from the prefix cache",
    "gpu_utilisation_mean": "GPU utilisation, mean",
    "gpu_memory_max_bytes": "GPU memory, most (all GPUs)",
    "gpu_power_mean_w": "GPU power, mean (all GPUs)",
    "gpu_clock_mean_mhz": "GPU clock, mean",
    "gpu_held_back_mean": "GPU clock held back by power or heat",
    "rss_max_bytes": "Process memory, most",
    "cpu_cores_mean": "CPU cores used, mean",
    "oom_kills": "Out-of-memory kills",
    "cpu_steal_max": "CPU time stolen, most",
}
"""The figures' names and what a table calls them."""

SUMMED = frozenset({"preemptions", "oom_kills"})
"""These add up over trials; of the others, means are averaged and peaks compared."""


def figures_of(scrapes: Scrapes) -> dict[str, float]:
    """Return every figure that the readings can give; what was not read is not there."""
    server = _known(scrapes, "server")
    gpu, process, client = (_known(scrapes, name) for name in ("gpu", "process", "client"))
    found = {
        "kv_usage_max": _max(server, "kv_usage"),
        "kv_usage_mean": _mean(server, "kv_usage"),
        "kv_fragmentation_max": _max(server, "kv_fragmentation"),
        "preemptions": _rise(server, "preemptions_total"),
        "waiting_max": _max(server, "waiting"),
        "running_max": _max(server, "running"),
        "acceptance": _share(
            server, "accepted_tokens_total", "draft_tokens_total", "acceptance_rate"
        ),
        "prefix_hits": _share(
            server, "prefix_hits_total", "prefix_queries_total", "cache_hit_rate"
        ),
        "gpu_utilisation_mean": _over_gpus(gpu, "_utilisation", _mean_of),
        "gpu_memory_max_bytes": _summed_peak(gpu, "_memory_bytes"),
        "gpu_power_mean_w": _summed_mean(gpu, "_power_w"),
        "gpu_clock_mean_mhz": _over_gpus(gpu, "_sm_clock_mhz", _mean_of),
        "gpu_held_back_mean": _over_gpus(gpu, "_held_back", _mean_of),
        "rss_max_bytes": _max(process, "rss_bytes"),
        "cpu_cores_mean": _mean(process, "cpu_cores"),
        "oom_kills": _rise(process, "oom_kills_total"),
        "cpu_steal_max": _max(client, "cpu_steal"),
    }
    return {name: value for name, value in found.items() if value is not None}


def merge(several: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the figures of several trials as one: sums, means or peaks."""
    return {
        name: _merged(name, [figures[name] for figures in several if name in figures])
        for name in LABELS
        if any(name in figures for figures in several)
    }


def _merged(name: str, values: Sequence[float]) -> float:
    if name in SUMMED:
        return math.fsum(values)
    return max(values) if "_max" in name else _mean_of(values)


def written(name: str, value: float | None) -> str:
    """Return a figure as a table shows it."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    if name.endswith(("_w", "_mhz")):
        return f"{value:,.0f} {'W' if name.endswith('_w') else 'MHz'}"
    if name in SUMMED or name in {"waiting_max", "running_max"}:
        return f"{value:,.0f}"
    if name == "cpu_cores_mean":
        return f"{value:.2f}"
    return f"{value:.1%}"


def total_over_gpus(gpu: Scrape, ending: str) -> list[float]:
    """Return, for each reading, the sum over all devices of one value."""
    lists = [values for name, values in gpu.values.items() if name.endswith(ending)]
    return [math.fsum(at_once) for at_once in zip(*lists, strict=True)]


def mean_over_gpus(gpu: Scrape, ending: str) -> list[float]:
    """Return, for each reading, the mean over all devices of one value."""
    count = sum(name.endswith(ending) for name in gpu.values)
    return [total / count for total in total_over_gpus(gpu, ending)]


def _known(scrapes: Scrapes, source: str) -> dict[str, list[float]]:
    scrape = scrapes.get(source)
    return scrape.values if scrape is not None else {}


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean_of(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _max(values: Mapping[str, list[float]], name: str) -> float | None:
    return max(_finite(values.get(name, ())), default=None)


def _mean(values: Mapping[str, list[float]], name: str) -> float | None:
    finite = _finite(values.get(name, ()))
    return _mean_of(finite) if finite else None


def _rise(values: Mapping[str, list[float]], name: str) -> float | None:
    finite = _finite(values.get(name, ()))
    if len(finite) < 2:
        return None
    return math.fsum(max(later - earlier, 0.0) for earlier, later in itertools.pairwise(finite))


def _share(values: Mapping[str, list[float]], part: str, whole: str, gauge: str) -> float | None:
    """Return the rise of `part` over that of `whole`; else the mean of the engine's own gauge."""
    over = _rise(values, whole)
    if over:
        return (_rise(values, part) or 0.0) / over
    return _mean(values, gauge)


def _over_gpus(
    gpu: Mapping[str, list[float]], ending: str, of: Callable[[Sequence[float]], float]
) -> float | None:
    lists = [_finite(values) for name, values in gpu.items() if name.endswith(ending)]
    kept = [of(values) for values in lists if values]
    return _mean_of(kept) if kept else None


def _summed_peak(gpu: Mapping[str, list[float]], ending: str) -> float | None:
    peaks = [max(_finite(v), default=None) for name, v in gpu.items() if name.endswith(ending)]
    known = [peak for peak in peaks if peak is not None]
    return math.fsum(known) if known else None


def _summed_mean(gpu: Mapping[str, list[float]], ending: str) -> float | None:
    lists = [_finite(values) for name, values in gpu.items() if name.endswith(ending)]
    known = [_mean_of(values) for values in lists if values]
    return math.fsum(known) if known else None
