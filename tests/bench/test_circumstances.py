from __future__ import annotations

import math

import pytest

from tailrace.bench.anatomy import dissect
from tailrace.bench.circumstances import (
    count_falls,
    drafts,
    increase,
    kv_curve,
    long_from,
    prefill_share,
    signals,
)
from tailrace.bench.scrape import Scrape
from tests.bench.scripted_trial import Script, spaced


def scraped(**series) -> Scrape:
    """One reading a second of each series."""
    scrape = Scrape()
    for at_s, values in enumerate(zip(*series.values(), strict=True)):
        scrape.add(float(at_s), dict(zip(series, map(float, values), strict=True)))
    return scrape


def dissected(scripts):
    return dissect([script.record(n) for n, script in enumerate(scripts)], None).requests


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ([0.5, 0.52, 0.48, 0.5, 0.51, 0.5], "flat"),
        ([0.2, 0.8, 0.3, 0.9, 0.2, 0.7, 0.1, 0.6], "sawtooth"),
        ([0.9, 0.97, 0.99, 1.0, 0.99, 0.96], "saturated"),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "rising"),
        ([0.5, 0.7, 0.5, 0.6, 0.55, 0.5], "varying"),
        ([0.5, 0.5], "not known"),
        ([math.nan] * 9, "not known"),
    ],
)
def test_shapes_of_the_kv_curve(values, shape):
    curve = kv_curve(scraped(kv_usage=values))
    assert curve.shape == shape
    assert shape in curve.sentence


def test_a_kv_curve_states_its_numbers_and_fragmentation():
    server = scraped(
        kv_usage=[0.2, 0.8] * 6, kv_fragmentation=[0.1, 0.3] * 6, preemptions_total=range(12)
    )
    sentence = kv_curve(server).sentence
    assert "50% on average, 20% to 80%, above 95% in 0% of 12 readings, 5 falls" in sentence
    assert "Fragmentation 20.0% on average, 30.0% at most" in sentence
    assert sentence.endswith("Preemptions: 11.")
    assert "exports no KV-cache use" in kv_curve(None).sentence


@pytest.mark.parametrize(
    ("values", "falls"),
    [
        ([1.0], 0),
        ([0.5, 0.45, 0.5, 0.45], 0),
        ([0.9, 0.5], 1),
        ([0.9, 0.7, 0.5, 0.3], 1),
        ([0.9, 0.5, 0.55, 0.4], 1),
        ([0.9, 0.5, 0.7, 0.5], 2),
        ([0.1, 0.9], 0),
    ],
)
def test_falls_are_counted_once_until_the_curve_rises_again(values, falls):
    assert count_falls(values, 0.1) == falls


def test_a_counter_that_fell_began_anew():
    assert increase([10, 15, 15, 2, 5]) == 5 + 2 + 3
    assert increase([7]) == increase([]) == 0


def test_drafts():
    server = scraped(
        draft_tokens_total=[0, 100, 200, 300, 400], accepted_tokens_total=[0, 80, 160, 180, 200]
    )
    assert drafts(server) == (
        "200 of 400 draft tokens were rejected: acceptance 50% (80% and 20% in the trial's halves)."
    )
    assert "acceptance 60% on average, 50% at least" in drafts(scraped(acceptance_rate=[0.5, 0.7]))
    assert "drafts none, or does not export" in drafts(scraped(waiting=[0, 0]))


def test_signals_compare_slow_requests_with_the_others():
    scripts = [*spaced(18), *(Script(due_s=40.0 + n / 10, prompt_tokens=900) for n in range(2))]
    requests = dissected(scripts)
    busy = [0.99 if at_s >= 39 else 0.2 for at_s in range(45)]
    scrapes = {
        "gpu": scraped(gpu0_utilisation=[0.1] * 45, gpu1_utilisation=busy),
        "client": scraped(cpu_steal=[0.0] * 45, cpu_busy=busy),
        "server": scraped(
            waiting=[1.0] * 45,
            preemptions_total=[0.0] * 41 + [5.0] * 4,
            draft_tokens_total=range(0, 450, 10),
            accepted_tokens_total=[9 * min(at_s, 39) for at_s in range(45)],
        ),
    }
    found, missing = signals(requests[-2:], requests[:-2], scrapes)
    met = {signal.name.partition(" (")[0]: signal for signal in found}
    for name in (
        "one of the longest prompts",
        "a GPU at 95% and more until its first token",
        "the client's CPUs at 95% and more while it was served",
        "preemptions while it was served",
        "drafts accepted at less than 80% of the trial's rate",
    ):
        assert (met[name].slow_share, met[name].other_share) == (1.0, 0.0), name
    assert not any("stolen" in name for name in met), "nobody met it"
    assert not any("waited" in name for name in met), "all met it"
    assert missing == ("KV cache above 95% until its first token",)
    assert [signal.lift for signal in found] == sorted((s.lift for s in found), reverse=True)


def test_a_burst_is_told_from_even_arrivals():
    scripts = [*spaced(30), *(Script(due_s=70 + n / 10) for n in range(6))]
    requests = dissected(scripts)
    found, _ = signals(requests[-3:], requests[:-3], {})
    assert [signal.name for signal in found] == ["arrived in a burst (3 and more within 1 s)"]
    even, _ = signals(requests[:3], requests[3:30], {})
    assert even == ()


@pytest.mark.parametrize(
    ("lengths", "bound"),
    [
        ([], None),
        ([5, 5, 5], None),
        ([*range(1, 101)], 91),
        ([100] * 90 + [900] * 10, 900),
        ([100] * 60 + [900] * 40, 900),
        ([1, 2], 2),
    ],
)
def test_long_is_what_at_most_a_tenth_is_where_lengths_allow(lengths, bound):
    assert long_from(lengths) == bound


def test_the_share_of_prefill_in_long_prompts():
    scripts = [
        *spaced(18),
        *(Script(due_s=60.0 + 5 * n, prefill_s=1, prompt_tokens=1000) for n in range(2)),
    ]
    sentence = prefill_share(dissected(scripts))
    assert "prompts of 1,000 tokens and more" in sentence
    assert "100% of the time to first token and 83% of the whole" in sentence
    assert "sent to first token, queueing included" in sentence
    assert "of one length" in prefill_share(dissected(spaced(20)))
    assert "not known" in prefill_share(
        dissected([Script(due_s=0), Script(due_s=9, prompt_tokens=5)])
    )
