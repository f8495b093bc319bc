"""A Mooncake export replays in other public tools with the numbers that our own client has.

    pip install aiperf                # each in a virtual environment of its own
    pip install guidellm torch        # (torch's CPU build will do)
    TAILRACE_AIPERF=/that/bin/aiperf TAILRACE_GUIDELLM=/other/bin/guidellm \
        pytest tests/e2e/test_crosscheck.py

Requests, prompt lengths, answer lengths and shared prefixes must be equal, token for token, as the
server counted them (GuideLLM misses a token in one prompt of a few hundred). Arrivals and latencies
are times on a machine that does other things, too: they must agree within LATENESS_S, and SLACK_S
plus SLACK_SHARE, in the better of ROUNDS.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tailrace.models import gguf
from tests.e2e.crosscheck import (
    PERCENTILE_RULES,
    PERCENTS,
    PROGRAMS,
    REPLAYS,
    SCRIPT,
    Replayed,
    arrival_errors_s,
    at,
    by_lengths,
    export,
    planned_reuse,
    program_of,
    reuse,
    scripted,
)
from tests.e2e.crosscheck_server import counting

ROUNDS = 3
DURATION_S = 8.0
LATENESS_S = 0.03
SLACK_S, SLACK_SHARE = 0.01, 0.05
SLACK_TOKENS = {"guidellm": 2}
"""A prompt may be so far off: where GuideLLM joins two blocks, two tokens can become one."""
TOOLS = [
    pytest.param(
        tool,
        marks=pytest.mark.skipif(
            program_of(tool) is None,
            reason=f"{tool} is not installed: neither {variable} nor PATH names its program",
        ),
    )
    for tool, variable in PROGRAMS.items()
]


def differences(rows, found):
    """Return what is further apart than it may be: each from the other, and from the script."""
    late = [
        f"{replayed.client}: p95 of arrivals {late_s:.3f} s late"
        for replayed in found
        if (late_s := at(arrival_errors_s(rows, replayed), 95)) > LATENESS_S
    ]
    accounts = [scripted(rows), *(replayed.figures for replayed in found)]
    apart = [
        f"p{percent} {metric}: {values} s"
        for metric in accounts[0]
        for percent in PERCENTS
        if spread(values := [at(each[metric], percent) for each in accounts if each[metric]])
    ]
    unsound = [f"{each.client}: {reason}" for each in found for reason in each.reasons]
    return unsound + late + apart


def spread(values):
    return max(values) - min(values) > SLACK_S + SLACK_SHARE * min(values)


def measure(tool, rows_folder, label):
    tokenizer = gguf.resolve(gguf.EMBEDDED_MODEL)
    with counting(SCRIPT, tokenizer) as url:
        return REPLAYS[tool](rows_folder / "trace.jsonl", url, tokenizer, rows_folder / label)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)  # the tools themselves take up to a minute to start
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_agrees_with_our_client(has_smollm2, tmp_path, tool):
    rows = export(tmp_path / "trace.jsonl", duration_s=DURATION_S)
    apart = []
    for round_ in range(ROUNDS):
        found = [measure(name, tmp_path, f"{name}-{round_}") for name in ("tailrace", tool)]
        for replayed in found:
            assert replayed.failed == 0
            slack = SLACK_TOKENS.get(replayed.client, 0)
            for length, row in zip(replayed.lengths, rows, strict=True):
                assert abs(length - row["input_length"]) <= slack
            assert replayed.asked_tokens == [row["output_length"] for row in rows]
            # A token too many or too few also moves the block after it.
            planned = planned_reuse(rows)
            assert planned > 0
            assert abs(reuse(replayed.prompts) - planned) <= slack * planned / 100
            for metric, printed in replayed.printed.items():
                rule = PERCENTILE_RULES[replayed.client]
                own = [rule(replayed.figures[metric], percent) for percent in PERCENTS]
                assert printed == pytest.approx(own, rel=1e-6)
        apart = differences(rows, found)
        if not apart:
            return
    pytest.fail("; ".join(apart))


# --- the yardstick itself -------------------------------------------------------------------------

ROWS = [
    {"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 7]},
    {"timestamp": 1200, "input_length": 1100, "output_length": 9, "hash_ids": [0, 2, 8]},
    {"timestamp": 1900, "input_length": 1024, "output_length": 5, "hash_ids": [0, 2]},
]


def perfect() -> Replayed:
    """Return the account of a tool that does everything right, on a clock of its own."""
    truth = scripted(ROWS)
    return Replayed(
        client="perfect",
        failed=0,
        prompts=[[hash(i) for i in row["hash_ids"] for _ in range(512)] for row in ROWS],
        asked_tokens=[row["output_length"] for row in ROWS],
        arrived_s=[77.0 + row["timestamp"] / 1e3 for row in ROWS],
        ttft_s=truth["ttft"],
        e2e_s=truth["e2e"],
        tpot_s=truth["tpot"],
        gap_s=truth["gap"],
    )


def test_a_perfect_replay_has_no_differences():
    assert differences(ROWS, [perfect(), perfect()]) == []


@pytest.mark.parametrize("metric", ["ttft_s", "e2e_s", "tpot_s", "gap_s"])
def test_a_tool_that_tells_other_latencies_is_found(metric):
    values = [1.1 * value + 0.02 for value in getattr(perfect(), metric)]
    other = replace(perfect(), **{metric: values})
    assert len(differences(ROWS, [perfect(), other])) == len(PERCENTS)


def test_a_tool_that_sends_late_is_found():
    arrived_s = perfect().arrived_s
    other = replace(perfect(), arrived_s=[*arrived_s[:-1], arrived_s[-1] + 0.2])
    assert differences(ROWS, [other]) == ["perfect: p95 of arrivals 0.200 s late"]


def test_a_run_that_is_invalid_by_its_own_account_is_found():
    other = replace(perfect(), reasons=("the client was late",))
    assert differences(ROWS, [other]) == ["perfect: the client was late"]


def test_reuse_counts_leading_blocks_that_came_before():
    # The second shares its first block; the third its two, with all that precedes them.
    assert planned_reuse(ROWS) == 3 * 512
    assert reuse(perfect().prompts) == 3 * 512
    # An equal block behind another beginning is not the same prefix.
    assert reuse([[1] * 16 + [2] * 16, [3] * 16 + [2] * 16]) == 0


def test_entries_without_an_id_are_joined_by_their_lengths():
    log = [{"ids": [0] * row["input_length"], "max_tokens": row["output_length"]} for row in ROWS]
    assert by_lengths([log[1], log[0], log[2]], ROWS) == log
    # One that came out two tokens long is still its row's.
    log[0]["ids"] += [0, 0]
    assert by_lengths([log[2], log[1], log[0]], ROWS) == log
    with pytest.raises(AssertionError, match="not the trace's"):
        by_lengths(log[:2], ROWS)
