"""What a comparison leaves behind: one `result.json`, and a folder for each trial.

    OUT/result.json                    a `Comparison`: everything but the records
    OUT/trials/0007-vllm-p2-1.50rps/   records.jsonl   one record a request (records.Record)
                                       monitor.jsonl   readings over the trial (monitor.Reading)
                                       requests.jsonl  Tailrace's own request log, if any
    OUT/servers/03-vllm.log            what each started server printed
    OUT/report.{html,md,json,csv}      and report-pictures/, where they were asked for

Percentiles are not kept here: readers compute them from the records, so that they cannot differ.
A report may merge several of these folders, one for each platform.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
FILE = "result.json"


class Platform(msgspec.Struct, kw_only=True):
    """The machine, and what an hour of it costs."""

    name: str
    """As the plan calls it, such as "1 x H200"."""
    machine: dict[str, str]
    """Label and value, from machine.describe()."""
    gpus: list[str] = []
    """Product names, one for each device in use; empty on a CPU."""
    price_per_hour: float | None = None
    """Of the whole platform, in `currency`."""
    currency: str = "USD"


class Contender(msgspec.Struct, kw_only=True):
    """One configuration that was measured: an engine with its strategy."""

    name: str
    """Unique within the comparison, such as "tailrace" or "vllm-chunked-2048"."""
    engine: str
    """The adapter's kind: tailrace, vllm, sglang, llamacpp, openai."""
    strategy: str = "default"
    version: str = ""
    """The last one that was measured."""
    versions: list[str] = []
    """Every version that was measured, where a resumed comparison met several."""
    model: str = ""
    command: list[str] = []
    """Empty where the server was already running."""
    ready_s: list[float] = []
    """From process start to ready, one for each start."""
    restarts: int = 0
    """How often it died by itself in a trial, and was started again."""
    out_of_memory: int = 0
    """Deaths for want of memory."""
    cautions: list[str] = []
    """Why it was not measured to the end in a pair, say."""


class Trial(msgspec.Struct, kw_only=True):
    """One measured run of one contender at one offered load."""

    contender: str
    phase: str
    """"search" (part of a max-rate search) or "steady" (a rate that the plan names)."""
    pair: int
    """0-based interleaved round; trials of one pair saw the same requests at the same rate."""
    rate_rps: float
    """Offered; in a closed loop what was reached."""
    users: int = 0
    """Closed loop; 0 is open loop."""
    seed: int
    duration_s: float
    """The span in which requests arrived."""
    started_unix_s: float
    folder: str
    """Relative to the result's folder."""
    outcome: str = ""
    """"holds", "fails" or "undecided" against the plan's limits; empty where none was asked."""
    reasons: list[str] = []
    """Why the trial is invalid; empty means valid."""
    cautions: list[str] = []


class Search(msgspec.Struct, kw_only=True):
    """The highest rate of one contender in one pair."""

    contender: str
    pair: int
    max_rps: float | None
    """The estimate; None where the search did not resolve."""
    holds_rps: float | None
    """The highest rate that held."""
    fails_rps: float | None
    """The lowest rate that failed above it."""
    reasons: list[str] = []
    """Why it did not resolve."""
    cautions: list[str] = []
    """What to keep in mind of an answer: rates that stayed in doubt, say."""


class Ratio(msgspec.Struct, kw_only=True):
    """Highest rate of `contender` over that of `baseline`, at an equal limit."""

    contender: str
    baseline: str
    pairs: list[float]
    """One ratio for each pair in which both searches resolved."""
    estimate: float | None
    low: float | None
    high: float | None
    confidence: float = 0.95
    reasons: list[str] = []
    """Why there is no interval (too few pairs, say)."""


class Comparison(msgspec.Struct, kw_only=True):
    """Everything but the records."""

    version: int = VERSION
    title: str
    command: str
    started_unix_s: float
    finished_unix_s: float | None = None
    """None: interrupted."""
    plan: dict[str, Any]
    """The plan file as it was read, for the appendix; without secrets."""
    plan_hash: str = ""
    """Of the plan with its variables filled in, without secrets: what a resume must meet again."""
    traffic: str
    """One sentence: where requests come from, how long they are."""
    limits: list[str]
    """As `p95_ttft=2`."""
    platform: Platform
    contenders: list[Contender]
    trials: list[Trial] = []
    searches: list[Search] = []
    ratios: list[Ratio] = []

    @property
    def is_interrupted(self) -> bool:
        """Whether it ended before its plan did."""
        return self.finished_unix_s is None


def write_result(folder: Path, comparison: Comparison) -> None:
    """Write `result.json`, whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(comparison), indent=2)
    part = folder / f"{FILE}.part"
    part.write_bytes(text + b"\n")
    part.replace(folder / FILE)


def read_result(folder: Path) -> Comparison:
    """Read a result folder.

    Raises:
        ConfigError: There is none, or it was written by another version.
    """
    file = folder / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Comparison)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a folder that compare wrote") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file}: not a result of this version ({error})") from error
