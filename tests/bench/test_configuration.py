from __future__ import annotations

import msgspec
import pytest

from tailrace.bench.configuration import Configuration
from tailrace.bench.limits import read_limit
from tests.bench.scripted_result import Offered, Subject, write
from tests.bench.scripted_trial import reading


def configured(folder, subject, **changes) -> Configuration:
    comparison = write(folder, subject, **changes)
    return Configuration(comparison, folder, comparison.contenders[0])


PLANNED = (read_limit("p95_ttft=2"),)
STRICT = (read_limit("p95_ttft=1"),)


def test_for_the_plans_limits_the_lowest_of_the_searches_counts(tmp_path):
    subject = Subject(name="a", max_rps=(3.0, None, 2.5, 4.0), offered=(Offered(rate_rps=9.0),))
    capacity = configured(tmp_path, subject).capacity(PLANNED)
    assert capacity.rate_rps == 2.5
    assert capacity.by_pair == {0: 3.0, 2: 2.5, 3: 4.0}
    assert "3 requests/s in the median of 3 pairs, 2.5 to 4" in capacity.source


def test_other_limits_are_answered_by_trials_up_to_the_first_failing_rate(tmp_path):
    subject = Subject(
        name="a",
        max_rps=(3.0,),
        offered=(
            Offered(rate_rps=1.0, ttft_s=0.5),
            Offered(rate_rps=2.0, ttft_s=0.9, slow=5),
            Offered(rate_rps=2.0, ttft_s=0.9, slow=5),
            Offered(rate_rps=2.5, ttft_s=0.9, slow=6),
            Offered(rate_rps=3.0, ttft_s=0.9),
        ),
    )
    capacity = configured(tmp_path, subject).capacity(STRICT)
    assert capacity.rate_rps == 2.0
    assert capacity.by_pair == {}
    assert "held in 2 trials at 2 requests/s (trials/0001-a)" in capacity.source
    assert "p95_ttft=1 exceeded by 10 of 200" in capacity.source
    assert "failed at 2.5 requests/s: p95_ttft=1 exceeded by 6 of 100" in capacity.source


def test_trials_of_one_rate_are_pooled(tmp_path):
    subject = Subject(
        name="a", offered=(Offered(rate_rps=2.0, slow=6), Offered(rate_rps=2.0, slow=3))
    )
    assert configured(tmp_path, subject).capacity(STRICT).rate_rps == 2.0


@pytest.mark.parametrize(
    ("offered", "why"),
    [
        (
            (Offered(rate_rps=1.0, ttft_s=5.0),),
            "failed at 1 requests/s: p95_ttft=1 exceeded by 100",
        ),
        ((Offered(rate_rps=1.0, requests=19),), "too few requests"),
        ((Offered(rate_rps=1.0, reasons=("late",)),), "no valid trial"),
        ((Offered(rate_rps=1.0, users=4),), "no valid trial"),
    ],
)
def test_no_rate_where_no_trial_shows_one(tmp_path, offered, why):
    capacity = configured(tmp_path, Subject(name="a", offered=offered)).capacity(STRICT)
    assert capacity.rate_rps is None
    assert why in capacity.source


def test_the_allowed_share_is_allowed_in_floating_point(tmp_path):
    """0.29 x 100 is less than 29 there."""
    subject = Subject(name="a", offered=(Offered(rate_rps=1.0, slow=29),))
    assert configured(tmp_path, subject).capacity((read_limit("p71_ttft=1"),)).rate_rps == 1.0


def test_unresolved_searches_leave_it_to_the_trials(tmp_path):
    subject = Subject(name="a", max_rps=(None, None), offered=(Offered(rate_rps=6.0),))
    capacity = configured(tmp_path, subject).capacity(PLANNED)
    assert capacity.rate_rps == 6.0
    assert "no higher rate was tried" in capacity.source
    assert configured(tmp_path / "b", subject).capacity(()).rate_rps is None


def test_cost_at_a_rate_and_the_name(tmp_path):
    subject = Subject(name="a", fields={"strategy": "chunked 512"})
    found = configured(tmp_path, subject, price=3.6, platform="1 x H200")
    assert found.output_cost(10.0) == pytest.approx(1.0)
    assert found.name == "a (chunked 512) on 1 x H200"
    assert configured(tmp_path / "b", subject).output_cost(10.0) is None


def test_processes_are_those_that_were_seen(tmp_path):
    found = configured(tmp_path, Subject(name="a"))
    lines = [
        reading("process", at_s, processes=count) for at_s, count in enumerate((2.0, 9.0, 3.0))
    ]
    file = tmp_path / "trials/0000-a/monitor.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert found.complexity().why == ("9 processes (+1)",)
