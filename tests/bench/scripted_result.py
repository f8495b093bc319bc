"""Result folders with highest rates and trials that a test chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tailrace.bench.records import Record, write_records
from tailrace.bench.result import Comparison, Contender, Platform, Search, Trial

SLOW_S = 30.0


@dataclass(kw_only=True)
class Offered:
    """One trial."""

    rate_rps: float
    ttft_s: float = 0.5
    slow: int = 0
    """Requests that took SLOW_S."""
    requests: int = 100
    tokens: tuple[int, int] = (400, 100)
    reasons: tuple[str, ...] = ()
    users: int = 0


@dataclass(kw_only=True)
class Subject:
    """One contender: its searches' results by pair (None: not resolved), and its trials."""

    name: str
    max_rps: tuple[float | None, ...] = ()
    offered: tuple[Offered, ...] = (Offered(rate_rps=1.0),)
    fields: dict[str, Any] = field(default_factory=dict)
    """Of its Contender."""


def write(folder, *subjects, platform="one", price=None, gpus=1, limits=("p95_ttft=2",), **changes):
    """Write the trials' records below `folder`; return the comparison."""
    comparison = Comparison(
        **(
            {
                "title": "scripted",
                "command": "",
                "started_unix_s": 0.0,
                "finished_unix_s": 1.0,
                "plan": {},
                "traffic": "100 requests",
                "limits": list(limits),
                "platform": Platform(
                    name=platform, machine={}, gpus=["GPU"] * gpus, price_per_hour=price
                ),
                "contenders": [],
            }
            | changes
        )
    )
    for subject in subjects:
        comparison.contenders.append(
            Contender(**({"name": subject.name, "engine": "openai"} | subject.fields))
        )
        comparison.searches += [
            Search(
                contender=subject.name,
                pair=pair,
                max_rps=rate,
                holds_rps=rate,
                fails_rps=None,
                reasons=[] if rate else ["it holds at the highest rate allowed"],
            )
            for pair, rate in enumerate(subject.max_rps)
        ]
        for offered in subject.offered:
            comparison.trials.append(_trial(folder, subject, offered, len(comparison.trials)))
    return comparison


def _trial(folder, subject, offered, number) -> Trial:
    where = f"trials/{number:04d}-{subject.name}"
    (folder / where).mkdir(parents=True)
    write_records(
        folder / where / "records.jsonl", [_record(i, offered) for i in range(offered.requests)]
    )
    return Trial(
        contender=subject.name,
        phase="steady",
        pair=0,
        rate_rps=offered.rate_rps,
        users=offered.users,
        seed=1,
        duration_s=60.0,
        started_unix_s=0.0,
        folder=where,
        reasons=list(offered.reasons),
    )


def _record(index, offered) -> Record:
    first_s = SLOW_S if index < offered.slow else offered.ttft_s
    prompt, output = offered.tokens
    return Record(
        index=index,
        scheduled_s=0.0,
        planned_input_tokens=prompt,
        planned_output_tokens=output,
        status="ok",
        first_token_s=first_s,
        chunk_s=[first_s, first_s + 1],
        finished_s=first_s + 1,
        input_tokens=prompt,
        output_tokens=output,
    )
