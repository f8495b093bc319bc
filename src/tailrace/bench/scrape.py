"""The server's own figures: from an exposition's families to one set of names for all engines.

Engines name the same thing differently; `FAMILIES` says which names mean what, and what several
label sets of one family come to: requests of several engines add up, a share of a cache does not.
A family that is not listed is not looked at, which also keeps a long exposition cheap to read.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_ADDED = {
    "running": (
        "tailrace:num_requests_running",
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "llamacpp:requests_processing",
    ),
    "waiting": (
        "tailrace:num_requests_waiting",
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "llamacpp:requests_deferred",
    ),
    "preemptions_total": (
        "tailrace:num_preemptions_total",
        "vllm:num_preemptions_total",
        "sglang:num_retracted_requests_total",
    ),
    "prefix_queries_total": (
        "tailrace:prefix_cache_queries_total",
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
    ),
    "prefix_hits_total": (
        "tailrace:prefix_cache_hits_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
        "sglang:cached_tokens_total",
        "llamacpp:prompt_tokens_cached_total",
    ),
    "draft_tokens_total": (
        "tailrace:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "llamacpp:spec_decode_num_draft_tokens_total",
    ),
    "accepted_tokens_total": (
        "tailrace:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "llamacpp:spec_decode_num_accepted_tokens_total",
    ),
    "prompt_tokens_total": (
        "tailrace:prompt_tokens_total",
        "vllm:prompt_tokens_total",
        "sglang:prompt_tokens_total",
        "llamacpp:prompt_tokens_total",
    ),
    "generation_tokens_total": (
        "tailrace:generation_tokens_total",
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
        "llamacpp:tokens_predicted_total",
    ),
    "engine_restarts_total": ("tailrace:engine_restarts_total",),
    "generation_rate": ("sglang:gen_throughput",),
}
_AVERAGED = {
    "kv_usage": (
        "tailrace:kv_cache_usage_perc",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "llamacpp:kv_cache_usage_ratio",
    ),
    "kv_fragmentation": ("tailrace:kv_cache_fragmentation",),
    "acceptance_rate": ("sglang:spec_accept_rate",),
    "cache_hit_rate": ("sglang:cache_hit_rate",),
}

FAMILIES: dict[str, str] = {
    family: name
    for table in (_ADDED, _AVERAGED)
    for name, families in table.items()
    for family in families
}
"""The engines' names to ours."""

_DCGM = {
    "DCGM_FI_DEV_GPU_UTIL": ("utilisation", 0.01),
    "DCGM_FI_DEV_FB_USED": ("memory_bytes", 2.0**20),
    "DCGM_FI_DEV_POWER_USAGE": ("power_w", 1.0),
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_mhz", 1.0),
}
"""What NVIDIA's DCGM exporter says of each GPU: in percent, MiB, watts and MHz there."""
_DEVICES = _DCGM | {
    "tailrace:gpu_utilization": ("utilisation", 1.0),
    "tailrace:gpu_memory_used_bytes": ("memory_bytes", 1.0),
}
_RESIDENT = "tailrace:process_resident_memory_bytes"
"""Of each of its processes. What others export under such a name is their front end alone."""

DCGM_FAMILIES = frozenset(_DCGM)
ALL_FAMILIES = (*FAMILIES, *_DEVICES, _RESIDENT)
"""Whatever is read of an exposition."""

_ALL = frozenset(ALL_FAMILIES)
_PREFIXES = frozenset({family.partition(":")[0] for family in FAMILIES})
_REPEATING = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
_LABEL = re.compile(r'\s*([a-zA-Z_][\w.]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPE = re.compile(r"\\(.)")


@dataclass
class Scrape:
    """Readings of one source over one run."""

    at_s: list[float] = field(default_factory=list)
    """Seconds from the run's start."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """One list for each name that was read, as long as `at_s`; NaN where one was missing."""

    def add(self, at_s: float, reading: Mapping[str, float]) -> None:
        """Keep one reading."""
        for name in reading.keys() - self.values.keys():
            self.values[name] = [math.nan] * len(self.at_s)
        self.at_s.append(at_s)
        for name, values in self.values.items():
            values.append(reading.get(name, math.nan))


@dataclass(frozen=True)
class Sample:
    """One number of one family; the family under the engine's own name, with its colon."""

    family: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> dict[str, float]:
    """Return what an exposition says, under our names."""
    return combine(read_exposition(text))


def read_exposition(text: str) -> Iterator[Sample]:
    """Yield the samples of known families; a malformed line says nothing, as does NaN."""
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        family = known_family(name)
        if family is None:
            continue
        labels, rest = _labels(line[len(name) :])
        number = rest.split()
        value = _number(number[0]) if number else None
        if value is not None:
            yield Sample(family, labels, value)


def known_family(name: str) -> str | None:
    """Return the name as `FAMILIES` has it, or None for one that we do not read.

    Many servers follow vLLM's names under a prefix of their own (`mine:num_requests_running`), and
    collectors that know no colon turn `vllm:x` into `vllm_x`.
    """
    if name in _ALL:
        return name
    engine, colon, rest = name.partition(":")
    if not colon:
        engine, _, rest = name.partition("_")
        family = f"{engine}:{rest}"
        return family if engine in _PREFIXES and family in _ALL else None
    family = f"vllm:{rest}"
    return family if engine not in _PREFIXES and family in FAMILIES else None


def _labels(text: str) -> tuple[dict[str, str], str]:
    """Return the labels that `text` opens with, and what follows them."""
    if not text.startswith("{"):
        return {}, text
    labels: dict[str, str] = {}
    at = 1
    while found := _LABEL.match(text, at):
        labels[found[1]] = _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], found[2])
        at = found.end()
    closing = text.find("}", at)
    return labels, text[closing + 1 :] if closing >= 0 else ""


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def combine(samples: Iterable[Sample]) -> dict[str, float]:
    """Return one number for each of our names.

    Where an engine exports a family under its old and its new name, the new one counts.
    """
    by_family: dict[str, list[Sample]] = {}
    for sample in samples:
        by_family.setdefault(sample.family, []).append(sample)
    found: dict[str, float] = {}
    for family, name in FAMILIES.items():
        if name not in found and family in by_family:
            values = [sample.value for sample in _distinct(by_family[family])]
            found[name] = fmean(values) if name in _AVERAGED else math.fsum(values)
    return found


def _distinct(samples: Sequence[Sample]) -> Iterable[Sample]:
    """Leave out what further ranks of one engine repeat.

    Under tensor or pipeline parallelism each rank may report the same requests; ranks of data
    parallelism, which have numbers of their own, report different ones. With priorities, SGLang
    gives a sample for each beside the one of all.
    """
    samples = [sample for sample in samples if not sample.labels.get("priority")] or samples
    first: dict[frozenset[tuple[str, str]], tuple[tuple[int, int], Sample]] = {}
    for sample in samples:
        rank = (_rank(sample, "pp_rank"), _rank(sample, "tp_rank"))
        rest = frozenset(item for item in sample.labels.items() if item[0] not in _REPEATING)
        if rest not in first or rank < first[rest][0]:
            first[rest] = (rank, sample)
    return [sample for _, sample in first.values()]


def _rank(sample: Sample, label: str) -> int:
    text = sample.labels.get(label, "")
    return int(text) if text.isdigit() else 0


def combine_devices(samples: Iterable[Sample]) -> dict[str, float]:
    """Return what is known of each GPU under our names, such as `gpu0_power_w`."""
    found: dict[str, float] = {}
    for sample in samples:
        known = _DEVICES.get(sample.family)
        index = sample.labels.get("gpu", "")
        if known is not None and index.isdigit():
            name, factor = known
            found[f"gpu{index}_{name}"] = sample.value * factor
    return found


def combine_processes(samples: Iterable[Sample]) -> dict[str, float]:
    """Return what the server says of its own processes, all together."""
    sizes = [sample.value for sample in samples if sample.family == _RESIDENT]
    return {"rss_bytes": math.fsum(sizes), "processes": float(len(sizes))} if sizes else {}
