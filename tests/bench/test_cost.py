from __future__ import annotations

import math

import pytest

from tailrace.bench.cost import cost_at_limit, cost_per_million, max_rates_rps, mean_tokens
from tailrace.errors import ConfigError
from tests.bench.scripted_result import Offered, Subject, write


def test_a_million_tokens_at_a_thousand_a_second_take_as_many_seconds():
    assert cost_per_million(3.6, 1000.0) == pytest.approx(1.0)
    assert cost_per_million(0.0, 1000.0) == 0.0


@pytest.mark.parametrize(
    ("price", "tokens_per_s"), [(-1.0, 10.0), (math.nan, 10.0), (1.0, 0.0), (1.0, math.inf)]
)
def test_what_gives_no_cost_is_refused(price, tokens_per_s):
    with pytest.raises(ConfigError):
        cost_per_million(price, tokens_per_s)


def test_the_cost_at_the_limit_takes_tokens_from_the_nearest_valid_trials(tmp_path):
    subject = Subject(
        name="a",
        max_rps=(2.0, 4.0, None, 3.0),
        offered=(
            Offered(rate_rps=0.1, tokens=(9, 9)),
            Offered(rate_rps=2.5, tokens=(400, 100)),
            Offered(rate_rps=3.5, tokens=(400, 100)),
            Offered(rate_rps=3.2, tokens=(800, 400), requests=100),
            Offered(rate_rps=3.0, tokens=(9, 9), reasons=("the client was late",)),
        ),
    )
    comparison = write(tmp_path, subject, price=7.2)
    assert max_rates_rps(comparison, "a") == [2.0, 4.0, 3.0]
    cost = cost_at_limit(tmp_path, comparison, "a")
    assert (cost.max_rps, cost.currency, cost.reason) == (3.0, "USD", "")
    assert (cost.tokens.output_tokens, cost.tokens.requests) == (200.0, 300)
    assert cost.output_tokens_per_s == pytest.approx(600)
    assert cost.output_per_million == pytest.approx(7.2 / 3600 / 600 * 1e6)
    assert cost.total_per_million == pytest.approx(7.2 / 3600 / (3 * 2200 / 3) * 1e6)
    assert (cost.low, cost.high) == (
        pytest.approx(cost.output_per_million * 3 / 4),
        pytest.approx(cost.output_per_million * 3 / 2),
    )


def test_what_is_missing_is_named(tmp_path):
    resolved = Subject(name="a", max_rps=(2.0,))
    unresolved = Subject(name="b", max_rps=(None,))
    unsearched = Subject(name="c")
    uncounted = Subject(name="d", max_rps=(2.0,), offered=(Offered(rate_rps=2.0, tokens=(9, 0)),))
    comparison = write(tmp_path, resolved, unresolved, unsearched, uncounted)
    reasons = {name: cost_at_limit(tmp_path, comparison, name).reason for name in "abcd"}
    assert "no price_per_hour" in reasons["a"]
    assert reasons["b"] == (
        "no highest rate: no search resolved: it holds at the highest rate allowed"
    )
    assert reasons["c"] == "no highest rate was searched"
    assert "tokens the server counted" in reasons["d"]
    without_price = cost_at_limit(tmp_path, comparison, "a")
    assert (without_price.output_per_million, without_price.output_tokens_per_s) == (None, 200.0)
    assert mean_tokens(tmp_path, comparison, "nobody", 1.0) is None
