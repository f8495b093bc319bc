"""Requests whose pieces are known, as the client's records and Tailrace's request log show them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tailrace.bench.records import Record, write_records
from tailrace.bench.result import Trial
from tailrace.telemetry.phases import Phases
from tailrace.telemetry.request_log import RequestRecord

LOG_ZERO_S = 5000.0
"""The log's clock at the trial's start."""


@dataclass(kw_only=True)
class Script:
    """How long each piece of a request takes, in seconds."""

    due_s: float
    lag_s: float = 0.0002
    connect_s: float = 0.0005
    ingest_s: float = 0.001
    queue_s: float = 0.001
    prefill_s: float = 0.1
    delivery_s: float = 0.0005
    token_s: float = 0.01
    prompt_tokens: int = 100
    output_tokens: int = 21
    preemptions: int = 0
    stall_s: float = 0.0
    """Added before the tenth token."""
    closing_s: float = 0.0005
    others_s: float | None = None
    """Of the prefill: prompts of others. None: the log is of a version that tells no phases."""
    decode_wait_s: float = 0.0
    """Of the answer's time, by the log."""

    def after_s(self, number: int) -> float:
        """Return the time from the first token to token `number`, counted from 0."""
        return number * self.token_s + (self.stall_s if number >= 9 else 0.0)

    def _phases(self, others_s: float, answer_s: float) -> dict[str, object]:
        """Return what a log that tells the phases has besides."""
        ttft = Phases(
            body_s=self.ingest_s / 2,
            tokenise_s=self.ingest_s / 2,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s - others_s,
            prefill_wait_s=others_s,
        )
        preempted_s = self.stall_s if self.preemptions and self.output_tokens > 9 else 0.0
        whole = msgspec.structs.replace(
            ttft, decode_s=answer_s - preempted_s, preempted_s=preempted_s
        )
        return {"phases": whole, "ttft_phases": ttft, "decode_wait_s": self.decode_wait_s}

    def record(self, index: int) -> Record:
        """Return what the client saw."""
        sent_s = self.due_s + self.lag_s + self.connect_s
        first_s = sent_s + self.ingest_s + self.queue_s + self.prefill_s + self.delivery_s
        chunk_s = [first_s + self.after_s(number) for number in range(self.output_tokens)]
        return Record(
            index=index,
            scheduled_s=self.due_s,
            planned_input_tokens=self.prompt_tokens,
            planned_output_tokens=self.output_tokens,
            status="ok",
            dispatched_s=self.due_s + self.lag_s,
            sent_s=sent_s,
            first_token_s=first_s,
            chunk_s=chunk_s,
            finished_s=chunk_s[-1] + self.closing_s,
            input_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            request_id=f"r{index}",
        )

    def line(self, index: int) -> RequestRecord:
        """Return what the server logged."""
        received_s = LOG_ZERO_S + self.due_s + self.lag_s + self.connect_s
        submitted_s = received_s + self.ingest_s
        slot_s = submitted_s + self.queue_s
        first_s = slot_s + self.prefill_s
        last_s = first_s + self.after_s(self.output_tokens - 1)
        told = {} if self.others_s is None else self._phases(self.others_s, last_s - first_s)
        return RequestRecord(
            **told,
            request_id=f"r{index}",
            route="/v1/completions",
            unix_s=0.0,
            received_s=received_s,
            prompt_ready_s=received_s + self.ingest_s / 2,
            submitted_s=submitted_s,
            scheduled_s=slot_s,
            first_token_s=first_s,
            last_token_s=last_s,
            finished_s=last_s,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens,
            preemptions=self.preemptions,
        )


def spaced(count, **changes) -> list[Script]:
    """Return requests that never meet: one every two seconds."""
    return [Script(due_s=2.0 * number, **changes) for number in range(count)]


def write_trial(folder, scripts, *, records=None, readings=(), has_log=True) -> Trial:
    """Write a trial's folder below `folder` and return the trial."""
    trial = Trial(
        contender="tailrace",
        phase="steady",
        pair=0,
        rate_rps=0.5,
        seed=1,
        duration_s=2.0 * len(scripts),
        started_unix_s=0.0,
        folder="trials/0000-tailrace",
    )
    inside = folder / trial.folder
    inside.mkdir(parents=True)
    found = [script.record(number) for number, script in enumerate(scripts)]
    write_records(inside / "records.jsonl", found if records is None else records)
    if readings:
        _write(inside / "monitor.jsonl", readings)
    if has_log:
        lines = [script.line(number) for number, script in enumerate(scripts)]
        _write(inside / "requests.jsonl", lines)
    return trial


def reading(source, at_s, **values) -> dict:
    """Return one line of monitor.jsonl."""
    return {"source": source, "at_s": float(at_s), "values": values}


def _write(file, values) -> None:
    file.write_bytes(b"".join(msgspec.json.encode(value) + b"\n" for value in values))
