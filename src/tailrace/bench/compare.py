"""`tailrace compare PLAN`: contenders measured in turn on one machine, on the same requests.

    pair 0   A: start, warm, search, steady loads, stop   B: the same, same seeds
    pair 1   B ...                                        A ...       order turned: drift cancels
    pair 2   A ...                                        B ...
    end      ratio of the highest rates, pair by pair; report

A stay (one contender in one pair) starts its server afresh. `result.json` is written after every
trial, so that an interrupt or a crash keeps what was measured. To resume is to do everything again
from the start, each trial found on disk taken from there instead of measured: rates and seeds
follow from the answers alone, so the second run asks for the same trials.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from tailrace.bench import machine
from tailrace.bench.campaign import Campaign
from tailrace.bench.comparison_table import print_comparison
from tailrace.bench.engines import adapter_for
from tailrace.bench.load import event_loop
from tailrace.bench.masking import masked, masked_engine
from tailrace.bench.report import require_report, write_reports
from tailrace.bench.result import (
    FILE,
    Comparison,
    Contender,
    Platform,
    Trial,
    read_result,
    write_result,
)
from tailrace.bench.session import secrets_of
from tailrace.errors import ConfigError
from tailrace.telemetry.gpu import Gpus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tailrace.bench.plan import Plan

EXIT_OK = 0
EXIT_NO_VERDICT = 3
"""A search did not resolve, or a steady trial stayed invalid: the report says why."""
EXIT_INTERRUPTED = 130

WRITER = "Tailrace"
"""The label of the version that measured, among those of the machine."""
FILE_WIDTH = 140
"""Characters of a line that is not printed on a terminal."""


@dataclass(frozen=True)
class Outcome:
    """What a comparison came to."""

    exit_code: int
    comparison: Comparison
    folder: Path
    report_file: Path | None
    """The HTML one; None where nothing was measured."""


def compare(
    plan: Plan,
    out: Path,
    *,
    command: str,
    resume: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Measure every engine of the plan, write the result folder and its report.

    Args:
        plan: What to measure. One engine alone is measured without ratios.
        out: The result folder; made where it is missing.
        command: This command line, for the report.
        resume: Go on with the comparison that `out` holds.
        console: Where progress and the summary are printed.

    Raises:
        ConfigError: The plan cannot be run here, `out` holds another comparison, or the traffic
            does not fit a server.
        EngineError: A server did not start in the first pair.
    """
    require_report()
    for spec in plan.engines:
        adapter_for(spec)
    console = console or _console()
    comparison = _opened(plan, out, command=command, resume=resume)
    campaign = Campaign(plan, out, comparison, console)
    # Whether anything is missing in a finished one, the campaign finds out.
    campaign.before_measuring = partial(_check_machine, comparison.platform, out)
    is_whole = event_loop.run(campaign.run())
    return _finished(plan, comparison, out, console, is_whole=is_whole)


def _console() -> Console:
    """Return the terminal; a file or a pipe has no width of its own, and tables need some."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def _opened(plan: Plan, out: Path, *, command: str, resume: bool) -> Comparison:
    """Return the comparison to go on with: a new one, or the one on disk."""
    raw = msgspec.json.decode(msgspec.json.encode(_shareable(plan)))
    plan_hash = fingerprint(plan)
    stored = read_result(out) if (out / FILE).exists() else None
    if stored is not None and stored.trials:
        if not resume:
            raise ConfigError(
                f"--out {out}: holds a comparison already; --resume goes on with it, or give "
                "another folder"
            )
        if stored.plan != raw:
            raise ConfigError(
                f"--out {out}: was measured by another plan, so its trials cannot be resumed; "
                "give another folder, or the plan as it was"
            )
        if stored.plan_hash != plan_hash:
            raise ConfigError(
                f"--out {out}: was measured under other conditions: the plan's text is the same, "
                f"but a variable in it, a file's place or a default is not{_versions(stored)}; "
                "give another folder, or the values as they were"
            )
        if stored.is_interrupted:
            _check_machine(stored.platform, out)
        return _resumable(stored, out)
    if resume and stored is None:
        raise ConfigError(f"--resume: {out} holds no comparison; leave --resume out")
    try:
        (out / "servers").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; give a folder to write to") from error
    gpus = Gpus.find().names()
    return Comparison(
        title=plan.title,
        command=command,
        started_unix_s=time.time(),
        plan=raw,
        plan_hash=plan_hash,
        traffic=plan.traffic.describe(),
        limits=[str(limit) for limit in plan.limits],
        platform=Platform(
            name=plan.platform.name or _platform_name(gpus),
            machine=machine.describe(),
            gpus=gpus,
            price_per_hour=plan.platform.price_per_hour,
            currency=plan.platform.currency,
        ),
        contenders=[
            Contender(
                name=spec.name,
                engine=spec.kind,
                strategy=spec.strategy,
                model=spec.model or "",
                command=masked(spec.command, secrets_of(spec), takes_many=True),
            )
            for spec in plan.engines
        ],
    )


def _versions(stored: Comparison) -> str:
    """Return whose defaults the stored plan and this one have."""
    wrote, this = stored.platform.machine.get(WRITER, ""), machine.describe()[WRITER]
    if wrote == this:
        return f" (both are of Tailrace {this}, unless its source was changed in between)"
    return f" (it was measured by Tailrace {wrote or 'of an unknown version'}, and this is {this})"


def _check_machine(measured: Platform, out: Path) -> None:
    """Check that a comparison goes on where it began: pairs of two machines are no pairs.

    Raises:
        ConfigError: This is another machine, or another part of it.
    """
    label = "Client machine"
    here, gpus = machine.describe()[label], Gpus.find().names()
    there = measured.machine.get(label, here)
    if (there, measured.gpus) == (here, gpus):
        return
    if (_whole(there), measured.gpus) == (_whole(here), gpus):
        raise ConfigError(
            f"--out {out}: was measured with another CPU affinity ({there}; now {here}); give "
            "this command the CPUs that it had (taskset, or the container's), or another folder"
        )
    raise ConfigError(
        f"--out {out}: was measured on another machine ({_machine_text(there, measured.gpus)}; "
        f"this is {_machine_text(here, gpus)}); give another folder, and merge both with "
        "`tailrace bench report`"
    )


def _whole(processor: str) -> str:
    """Return "model, CPUs" of "model, usable of CPUs": the machine, whatever we may use of it."""
    usable, _, count = processor.rpartition(" of ")
    return f"{usable.rpartition(', ')[0]}, {count}"


def _machine_text(processor: str, gpus: Sequence[str]) -> str:
    return ", ".join([*filter(None, [processor]), *gpus])


def _shareable(plan: Plan) -> dict[str, Any]:
    """Return the plan's text without the secrets that stand in it."""
    rows = plan.raw.get("engine", [])
    known = [secret for spec in plan.engines for secret in secrets_of(spec)]
    return plan.raw | ({"engine": [masked_engine(row, known) for row in rows]} if rows else {})


def fingerprint(plan: Plan) -> str:
    """Return a hash of all that the trials hang on, secrets left out: a new key is no new plan."""
    engines = [masked_engine(asdict(spec), secrets_of(spec)) for spec in plan.engines]
    source, tokenizer = (_settled(text) for text in (plan.traffic.source, plan.tokenizer))
    whole = {
        **{name: value for name, value in asdict(plan).items() if name not in {"raw", "teams"}},
        "engines": engines,
        "traffic": asdict(plan.traffic) | {"source": source},
        "tokenizer": tokenizer,
    }
    text = json.dumps(whole, sort_keys=True, default=_settled)
    return hashlib.sha256(text.encode()).hexdigest()


def _settled(value: object) -> str:
    """Return the whole path of a file, and any other value as text."""
    path = Path(str(value))
    return str(path.resolve() if path.exists() else value)


def _platform_name(gpus: Sequence[str]) -> str:
    """Return "2 x H200" where there are GPUs, else the processor's name."""
    if not gpus:
        return machine.describe()["Client machine"]
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))


def _resumable(stored: Comparison, out: Path) -> Comparison:
    """Return a stored comparison without what an interrupt left half done.

    A finished one stays so until there is news, so that to look at it again costs no verdict.
    """
    for trial in filter(_was_interrupted, stored.trials):
        shutil.rmtree(out / trial.folder, ignore_errors=True)
    stored.trials = [trial for trial in stored.trials if not _was_interrupted(trial)]
    stored.searches = []
    stored.ratios = []
    for contender in stored.contenders:
        contender.cautions = []
    return stored


def _was_interrupted(trial: Trial) -> bool:
    return any(reason.startswith("interrupted") for reason in trial.reasons)


def _finished(
    plan: Plan, comparison: Comparison, out: Path, console: Console, *, is_whole: bool
) -> Outcome:
    status = EXIT_INTERRUPTED
    if is_whole:
        comparison.finished_unix_s = time.time()
        write_result(out, comparison)
        status = exit_code(comparison, plan)
    elif not comparison.is_interrupted:
        comparison = read_result(out)  # nothing was measured anew, so its verdict stands
    report_file = None
    if comparison.trials:
        print_comparison(comparison, out, console)
        report_file = write_reports([out], out).html
        console.print(f"report: {report_file}", highlight=False, soft_wrap=True)
    return Outcome(status, comparison, out, report_file)


def exit_code(comparison: Comparison, plan: Plan) -> int:
    """Return the exit status of a comparison that is whole: 0, or 3 without a whole verdict."""
    unresolved = any(search.max_rps is None for search in comparison.searches)
    return EXIT_NO_VERDICT if unresolved or _invalid_steady(comparison, plan) else EXIT_OK


def _invalid_steady(comparison: Comparison, plan: Plan) -> bool:
    """Whether some steady load of the plan has no valid trial in some stay, or no trial at all."""
    asked = {
        (spec.name, pair, users, rate_rps or 0.0)
        for spec in plan.engines
        for pair in range(plan.pairs)
        for rate_rps, users in plan.loads
    }
    steady = (trial for trial in comparison.trials if trial.phase == "steady")
    return not asked <= {_load_key(trial) for trial in steady if not trial.reasons}


def _load_key(trial: Trial) -> tuple[str, int, int, float]:
    # A closed loop's rate is what it reached; its users name the load.
    rate_rps = 0.0 if trial.users else trial.rate_rps
    return trial.contender, trial.pair, trial.users, rate_rps
