"""Our client against another tool: the same Mooncake export, the same server, two accounts.

    TAILRACE_AIPERF=/venv-of-aiperf/bin/aiperf python benchmarks/crosscheck.py \
        [--tool aiperf guidellm] [--seconds 60] [--rounds 3] [--out agreement.md]

The server is a scripted queue in a process of its own, so the right answer is known: the first
column of figures is the script in virtual time. Lengths and prefixes are what the server counted
with SmolLM2's tokenizer; latencies are what each client reports, from its own send. Clients take
turns, `--rounds` times, and each one's figures are those of its least disturbed round (the lowest
p95 of arrival errors): other work on the machine can only add. The load average stands below.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tailrace.models import gguf
from tests.e2e.crosscheck import (
    PERCENTS,
    PROGRAMS,
    RATE_RPS,
    REPLAYS,
    SCRIPT,
    Replayed,
    arrival_errors_s,
    at,
    export,
    planned_reuse,
    program_of,
    reuse,
    scripted,
)
from tests.e2e.crosscheck_server import counting

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = dict[str, Any]
NAMES = {"ttft": "TTFT", "tpot": "time per output token", "gap": "gap between chunks", "e2e": "E2E"}


def main() -> None:
    """Replay with each client and print the table."""
    options = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = export(folder / "trace.jsonl", duration_s=options.seconds)
        found: dict[str, list[Replayed]] = {name: [] for name in ("tailrace", *options.tool)}
        for round_ in range(options.rounds):
            for name, runs in found.items():
                runs.append(measure(name, folder, f"{name}-{round_}"))
                error_s = at(arrival_errors_s(rows, runs[-1]), 95)
                print(f"{name} {round_ + 1}: arrivals p95 {error_s * 1e3:.1f} ms", flush=True)
    best = [
        min(runs, key=lambda run: at(arrival_errors_s(rows, run), 95)) for runs in found.values()
    ]
    text = table(rows, best)
    for run in best:
        for reason in run.reasons:
            print(f"{run.client}: INVALID by its own account: {reason}")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{text}\n\n{os.cpu_count()} cores, load average {load}")
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def measure(name: str, folder: Path, label: str) -> Replayed:
    """Replay once against a server of its own."""
    tokenizer = gguf.resolve(gguf.EMBEDDED_MODEL)
    with counting(SCRIPT, tokenizer) as url:
        return REPLAYS[name](folder / "trace.jsonl", url, tokenizer, folder / label)


def table(rows: Sequence[Row], found: Sequence[Replayed]) -> str:
    """Return the agreement in Markdown."""
    lengths = [row["input_length"] for row in rows]
    lines = [
        ["", "trace and script", *(replayed.client for replayed in found)],
        ["---"] * (2 + len(found)),
        ["requests (failed)", f"{len(rows)}", *(count(replayed) for replayed in found)],
        ["prompt tokens", f"{sum(lengths):,}", *(f"{sum(map(len, r.prompts)):,}" for r in found)],
        ["prompts of the row's length", "", *(equal(lengths, r.lengths) for r in found)],
        ["answers asked of the row's length", "", *(asked(rows, r) for r in found)],
        [
            "prompt tokens shared with earlier prompts",
            f"{planned_reuse(rows):,}",
            *(f"{reuse(replayed.prompts):,}" for replayed in found),
        ],
        ["arrival error p50 / p95 / max, ms", "", *(arrivals(rows, r) for r in found)],
    ]
    truth = scripted(rows)
    for metric, title in NAMES.items():
        values = [truth[metric], *(replayed.figures[metric] for replayed in found)]
        lines.append([f"{title} p50 / p95, ms", *map(figures, values)])
        if any(metric in replayed.printed for replayed in found):
            own = [printed(replayed, metric) for replayed in found]
            lines.append(["... as its own summary has it", "", *own])
    ours = next(replayed for replayed in found if replayed.due_ttft_s)
    blank = [""] * (len(found) - 1)
    lines.append(["TTFT from the schedule p50 / p95, ms", "", figures(ours.due_ttft_s), *blank])
    lines.append(["E2E from the schedule p50 / p95, ms", "", figures(ours.due_e2e_s), *blank])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def count(replayed: Replayed) -> str:
    return f"{len(replayed.prompts)} ({replayed.failed})"


def equal(wanted: Sequence[int], got: Sequence[int]) -> str:
    same = sum(one == other for one, other in zip(wanted, got, strict=True))
    furthest = max(abs(one - other) for one, other in zip(wanted, got, strict=True))
    return f"{same} of {len(wanted)}" + (f" (furthest {furthest} off)" if furthest else "")


def asked(rows: Sequence[Row], replayed: Replayed) -> str:
    return equal([row["output_length"] for row in rows], replayed.asked_tokens)


def arrivals(rows: Sequence[Row], replayed: Replayed) -> str:
    errors_s = arrival_errors_s(rows, replayed)
    return " / ".join(f"{at(errors_s, percent) * 1e3:.1f}" for percent in (50, 95, 100))


def figures(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return " / ".join(f"{at(values, percent) * 1e3:.1f}" for percent in PERCENTS)


def printed(replayed: Replayed, metric: str) -> str:
    if not replayed.printed:
        return "the same"
    values_s = replayed.printed.get(metric, ())
    return " / ".join(f"{value_s * 1e3:.1f}" for value_s in values_s) or "-"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=f"{RATE_RPS:g} requests/s against {SCRIPT.slots} scripted slots"
    )
    parser.add_argument("--tool", nargs="+", choices=sorted(PROGRAMS), default=["aiperf"])
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for tool in options.tool:
        if program_of(tool) is None:
            parser.error(f"{tool}: neither {PROGRAMS[tool]} nor PATH names the program")
    return options


if __name__ == "__main__":
    main()
