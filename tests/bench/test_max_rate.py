import io
import json

import pytest
from rich.console import Console

from tailrace.bench import compare as compare_module
from tailrace.bench.compare import EXIT_OK
from tailrace.bench.limits import Limit
from tailrace.bench.max_rate import Measuring, Subject, max_rate, run_once
from tailrace.bench.plan import PlatformPlan, SearchPlan, SteadyPlan
from tailrace.bench.result import read_result
from tailrace.bench.traffic.workload import Workload
from tailrace.errors import ConfigError
from tests.bench.fake_contenders import Field

TRAFFIC = Workload(source="chat70", input_tokens="20", output_tokens="4")
SEARCH = SearchPlan(low_rps=0.5, high_rps=24, start_rps=4, resolution=0.2, trial_s=20)
SUBJECT = Subject(url="http://127.0.0.1:9", name="mine", model="m")
CONSOLE = Console(file=io.StringIO(), width=200)


@pytest.fixture
def field(monkeypatch, tmp_path):
    class Files:
        html = tmp_path / "report.html"

    monkeypatch.setattr(compare_module, "write_reports", lambda folders, out: Files)
    found = Field({"mine": 16})
    found.install(monkeypatch)
    return found


def test_the_highest_rate_of_one_server_is_a_result_with_one_contender(field, tmp_path):
    measuring = Measuring(
        traffic=TRAFFIC,
        limits=(Limit("ttft", 95, 1.0),),
        repetitions=2,
        platform=PlatformPlan(name="here", price_per_hour=2.0),
    )
    outcome = max_rate(SUBJECT, measuring, SEARCH, tmp_path / "out", command="c", console=CONSOLE)
    assert outcome.exit_code == EXIT_OK
    stored = read_result(tmp_path / "out")
    assert [c.name for c in stored.contenders] == ["mine"]
    assert [s.pair for s in stored.searches] == [0, 1]
    assert all(3 < s.max_rps < 9 for s in stored.searches)
    assert stored.ratios == []
    assert stored.platform.price_per_hour == 2.0
    json.dumps(stored.plan)
    assert stored.plan["engine"] == [{"url": "http://127.0.0.1:9", "name": "mine", "model": "m"}]
    assert stored.plan["search"]["trial_s"] == 20
    assert stored.plan["traffic"]["source"] == "chat70"


def test_a_run_measures_the_loads_it_is_given(field, tmp_path):
    steady = SteadyPlan(rates=(1.0, 2.0), trial_s=10)
    outcome = run_once(
        SUBJECT, Measuring(traffic=TRAFFIC), steady, tmp_path / "out", command="c", console=CONSOLE
    )
    assert [t.rate_rps for t in outcome.comparison.trials] == [1.0, 2.0]
    assert outcome.comparison.searches == []
    assert outcome.exit_code == EXIT_OK


def test_a_closed_loop_of_the_traffic_is_a_load(field, tmp_path):
    measuring = Measuring(
        traffic=Workload(source="chat70", input_tokens="20", output_tokens="4", users=2)
    )
    outcome = run_once(
        SUBJECT, measuring, SteadyPlan(trial_s=2), tmp_path / "out", command="c", console=CONSOLE
    )
    assert [t.users for t in outcome.comparison.trials] == [2]


def test_no_limit_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="--limit"):
        max_rate(SUBJECT, Measuring(traffic=TRAFFIC), SEARCH, tmp_path / "out", command="c")


@pytest.mark.parametrize("fields", [{}, {"url": "http://x", "start": "serve {port}"}])
def test_one_server_is_given_one_way(fields):
    with pytest.raises(ConfigError, match="either --url"):
        Subject(**fields)


def test_a_command_is_taken_apart_as_a_shell_would():
    spec = Subject(start="serve --name 'two words' --port {port}", kind="vllm").spec()
    assert spec.command == ("serve", "--name", "two words", "--port", "{port}")
    assert spec.name == "vllm"


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": "{folder}"},
        {"timeout_s": 10.0},
        {"max_lag_s": 0.5},
        {"processes": 2},
        {"title": "another"},
    ],
)
def test_other_conditions_are_not_resumed(field, tmp_path, change, monkeypatch):
    monkeypatch.setattr("tailrace.bench.campaign.FileCodec", lambda folder: field.codec)
    steady = SteadyPlan(rates=(1.0,), trial_s=10)

    def run(*, resume, **fields):
        measuring = Measuring(traffic=TRAFFIC, **fields)
        out = tmp_path / "out"
        return run_once(
            SUBJECT, measuring, steady, out, command="c", resume=resume, console=CONSOLE
        )

    run(resume=False)
    filled = {k: v.format(folder=tmp_path) if k == "tokenizer" else v for k, v in change.items()}
    with pytest.raises(ConfigError, match="another plan"):
        run(resume=True, **filled)
    assert run(resume=True).exit_code == EXIT_OK


def test_no_key_is_stored(field, tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "s3cret")
    monkeypatch.setattr(compare_module, "adapter_for", lambda spec: None)
    subject = Subject(
        start="serve --api-key other --port {port} s3cret", name="mine", api_key_env="A_KEY"
    )
    steady = SteadyPlan(rates=(1.0,), trial_s=10)
    measuring = Measuring(traffic=TRAFFIC)
    run_once(subject, measuring, steady, tmp_path / "out", command="c", console=CONSOLE)
    text = (tmp_path / "out" / "result.json").read_text()
    assert "s3cret" not in text
    assert "other" not in text
    assert '"serve --api-key ... --port {port} ..."' in text
