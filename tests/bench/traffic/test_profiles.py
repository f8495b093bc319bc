from __future__ import annotations

import itertools
from pathlib import Path
from statistics import fmean, pvariance

import pytest

from tailrace.bench.traffic import profiles
from tailrace.bench.traffic.profile import LEVELS, draw, measure
from tailrace.bench.traffic.source import PROFILES
from tailrace.bench.traffic.trace import read_trace

TRACES = Path(__file__).parents[3].parent / "shared" / "traces"
FILES = {
    "azure-code": "azure2023_code.csv",
    "mooncake-conversation": "mooncake_conversation.jsonl",
    "mooncake-synthetic": "mooncake_synthetic.jsonl",
    "servegen-deepseek-r1": "servegen_deepseek_r1_reason.csv",
    "servegen-m-large": "servegen_m_large_chat.csv",
    "burstgpt": "burstgpt1_first400.csv",
}
DRAWN = 20_000


def test_every_shared_trace_has_a_profile():
    assert {profile.name for profile in profiles.ALL} == set(FILES)
    assert set(PROFILES) == {"azure-conv", *FILES}


@pytest.mark.parametrize("profile", profiles.ALL, ids=lambda p: p.name)
def test_the_figures_are_those_of_the_published_file(profile):
    file = TRACES / FILES[profile.name]
    if not file.is_file():
        pytest.skip(f"{file} is not here")
    trace = read_trace(file)
    real = measure(trace.arrivals, name="", source="")
    assert real.input_tokens == profile.input_tokens
    assert real.output_tokens == profile.output_tokens
    assert real.rate_rps == pytest.approx(profile.rate_rps, rel=5e-4)
    assert real.arrival_cv == pytest.approx(profile.arrival_cv, rel=5e-4)
    assert real.rank_correlation == pytest.approx(profile.rank_correlation, abs=5e-4)
    assert real.gaps == pytest.approx(profile.gaps, rel=5e-4)


@pytest.mark.parametrize("profile", profiles.ALL, ids=lambda p: p.name)
def test_draws_have_the_profiles_rate_variation_and_lengths(profile):
    drawn = list(itertools.islice(draw(profile, seed=1), DRAWN))
    found = measure(drawn, name="", source="")
    # A mean over gaps of variation c wanders by c / sqrt(n): four times that, and 2 %.
    wander = 4 * profile.arrival_cv / DRAWN**0.5 + 0.02
    assert found.rate_rps == pytest.approx(profile.rate_rps, rel=wander)
    # Lines between quantiles lose some of a long tail: up to a fifth of the variation.
    assert found.arrival_cv == pytest.approx(profile.arrival_cv, rel=0.2)
    assert found.rank_correlation == pytest.approx(profile.rank_correlation, abs=0.04)
    for name in ("input_tokens", "output_tokens"):
        lengths = sorted(getattr(arrival, name) for arrival in drawn)
        for level, value in zip(LEVELS, getattr(profile, name), strict=True):
            at_most = sum(length <= value for length in lengths) / DRAWN
            below = sum(length < value for length in lengths) / DRAWN
            assert below - 0.015 <= level <= at_most + 0.015, (name, level, value)


def test_azure_codes_pauses_do_not_turn_into_instants():
    """The dispersion of counts in 1 s: the trace's is 13, a gamma draw of the same CV has 67."""
    drawn = list(itertools.islice(draw(profiles.AZURE_CODE, seed=2), 8819))
    counts = [0] * (int(drawn[-1].arrival_s) + 1)
    for arrival in drawn:
        counts[int(arrival.arrival_s)] += 1
    assert 7 < pvariance(counts) / fmean(counts) < 20


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda p: p.name)
def test_a_profile_names_its_licence_and_paper(profile):
    assert "CC-BY-4.0" in profile.source or "Apache-2.0" in profile.source
    assert "et al." in profile.source
