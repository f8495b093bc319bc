import asyncio
import io
import json
import math
import re
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from tailrace.bench import compare as compare_module
from tailrace.bench import machine
from tailrace.bench.campaign import Campaign
from tailrace.bench.compare import EXIT_INTERRUPTED, EXIT_NO_VERDICT, EXIT_OK, compare
from tailrace.bench.engines.spec import EngineSpec
from tailrace.bench.limits import Limit
from tailrace.bench.plan import Plan, SearchPlan, SteadyPlan
from tailrace.bench.records import read_records
from tailrace.bench.result import read_result, write_result
from tailrace.bench.traffic.workload import Workload
from tailrace.errors import ConfigError, EngineError
from tests.bench.fake_contenders import Field

LIMIT = Limit("ttft", 95, 1.0)
TRAFFIC = Workload(source="chat70", input_tokens="20", output_tokens="4")
HIGHEST = 1 / -math.log(0.05)
"""Highest rate of a contender of capacity 1: the P95 of an exponential is -ln 0.05 means."""


def plan_of(*names, **changes):
    fields = {
        "title": "test",
        "engines": tuple(
            EngineSpec(name=name, kind="openai", command=("serve", "{port}")) for name in names
        ),
        "traffic": TRAFFIC,
        "limits": (LIMIT,),
        "search": SearchPlan(low_rps=0.5, high_rps=24, start_rps=4, resolution=0.2, trial_s=20),
        "steady": SteadyPlan(rates=(2.0,), trial_s=20),
        "pairs": 2,
        "raw": {"names": list(names)},
    }
    return Plan(**(fields | changes))


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Run a plan against a field of fakes; the report's pictures are not drawn here."""

    class Files:
        html = tmp_path / "report.html"

    monkeypatch.setattr(compare_module, "write_reports", lambda folders, out: Files)
    monkeypatch.setattr(compare_module, "adapter_for", lambda spec: None)

    def run(plan, field, *, out="out", resume=False):
        field.install(monkeypatch)
        console = Console(file=io.StringIO(), width=200)
        return compare(
            plan, tmp_path / out, command="tailrace compare", resume=resume, console=console
        )

    return run


def test_contenders_take_turns_and_the_order_turns_too(measure):
    field = Field({"a": 16, "b": 16})
    measure(plan_of("a", "b", pairs=3), field)
    starts = [line.split()[1] for line in field.log if line.startswith("start")]
    assert starts == ["a", "b", "b", "a", "a", "b"]
    assert field.running == []


def test_the_ratio_of_the_highest_rates_is_that_of_the_capacities(measure):
    field = Field({"a": 8, "b": 24})
    outcome = measure(plan_of("a", "b", pairs=6), field)
    comparison = outcome.comparison
    assert outcome.exit_code == EXIT_OK
    assert comparison.finished_unix_s is not None
    assert len(comparison.searches) == 12
    for search in comparison.searches:
        capacity = field.capacities[search.contender]
        assert search.max_rps == pytest.approx(capacity * HIGHEST, rel=0.4)
    (ratio,) = comparison.ratios
    assert (ratio.contender, ratio.baseline) == ("b", "a")
    assert len(ratio.pairs) == 6
    assert ratio.estimate == pytest.approx(3.0, rel=0.2)
    assert ratio.low is not None
    assert ratio.low < 3.0 * 1.1
    assert ratio.high > 3.0 * 0.9


def test_two_contenders_get_the_same_requests_at_the_same_load(measure):
    field = Field({"a": 16, "b": 10})
    measure(plan_of("a", "b"), field)
    steady = [(name, work) for name, work in field.trials if work.schedule.rate_rps < 3]
    first, second = (
        next(work for n, work in field.trials if n == name and work.seed % 1000 >= 800)
        for name in "ab"
    )
    assert steady
    assert first.schedule == second.schedule
    assert [p.text for p in first.prompts] == [p.text for p in second.prompts]
    # In the next pair the requests are others.
    third = [w for _, w in field.trials if w.seed % 1000 >= 800][-1]
    assert third.schedule != first.schedule


def test_no_server_sees_a_text_twice(measure):
    field = Field({"a": 16})
    measure(plan_of("a", pairs=1), field)
    texts = [p.text for _, work in field.trials for p in work.prompts] + field.warm_prompts
    assert len(texts) > 100
    assert len(set(texts)) == len(texts)


def test_a_server_is_warmed_by_as_many_requests_as_the_plan_says(measure):
    for count in (1, 7):
        field = Field({"a": 16})
        measure(plan_of("a", pairs=1, warm_requests=count), field, out=f"out{count}")
        assert len(field.warm_prompts) == count


def test_the_result_on_disk_is_the_result(measure, tmp_path):
    outcome = measure(plan_of("a", "b"), Field({"a": 16, "b": 12}))
    stored = read_result(tmp_path / "out")
    assert stored == outcome.comparison
    for trial in stored.trials:
        assert read_records(tmp_path / "out" / trial.folder / "records.jsonl")
        assert trial.outcome in {"holds", "fails", "undecided"}
    assert {t.phase for t in stored.trials} == {"search", "steady"}
    assert stored.contenders[0].ready_s == [1.5, 1.5]
    assert stored.contenders[0].version == "1.0"
    assert stored.contenders[0].command == ["serve", "a"]


def test_a_server_that_dies_is_counted_started_again_and_the_trial_repeated(measure):
    field = Field({"a": 16}, deaths={2: "gone"})
    outcome = measure(plan_of("a", pairs=1), field)
    (contender,) = outcome.comparison.contenders
    assert contender.restarts == 1
    assert len(contender.ready_s) == 2
    died, repeated = outcome.comparison.trials[1:3]
    assert died.reasons[0].startswith("the server died in this trial: ended with status 9")
    assert repeated.reasons == []
    assert (died.rate_rps, died.seed) == (repeated.rate_rps, repeated.seed)
    assert outcome.exit_code == EXIT_OK


def test_a_server_that_dies_twice_at_a_load_has_failed_it(measure):
    field = Field({"a": 1000}, deaths={1: "", 2: ""})
    outcome = measure(
        plan_of("a", pairs=1, search=None, steady=SteadyPlan(rates=(4.0,), trial_s=20)), field
    )
    first, second = outcome.comparison.trials
    assert first.reasons
    assert second.reasons == []
    assert second.outcome == "fails"
    assert "again" in second.cautions[0]
    assert outcome.comparison.contenders[0].restarts == 2


def test_ctrl_c_keeps_what_was_measured_and_resume_measures_only_the_rest(measure, tmp_path):
    plan = plan_of("a", "b", pairs=2)
    whole = measure(plan, Field({"a": 16, "b": 12}), out="whole").comparison
    first = Field({"a": 16, "b": 12}, stop_at=7)
    outcome = measure(plan, first)
    assert outcome.exit_code == EXIT_INTERRUPTED
    stored = read_result(tmp_path / "out")
    assert stored.is_interrupted
    assert len(stored.trials) == 7
    assert first.running == []

    second = Field({"a": 16, "b": 12})
    outcome = measure(plan, second, resume=True)
    assert outcome.exit_code == EXIT_OK
    assert len(second.trials) == len(whole.trials) - 6
    resumed = read_result(tmp_path / "out")
    assert [s.max_rps for s in resumed.searches] == [s.max_rps for s in whole.searches]
    assert [(t.contender, t.pair, t.rate_rps, t.seed, t.outcome) for t in resumed.trials] == [
        (t.contender, t.pair, t.rate_rps, t.seed, t.outcome) for t in whole.trials
    ]
    assert resumed.ratios == whole.ratios
    # Folders are never given twice.
    assert len({t.folder for t in resumed.trials}) == len(resumed.trials)


def test_resuming_a_finished_comparison_starts_no_server(measure):
    plan = plan_of("a", pairs=1)
    measure(plan, Field({"a": 16}))
    again = Field({"a": 16})
    assert measure(plan, again, resume=True).exit_code == EXIT_OK
    assert again.log == []


def test_a_folder_that_holds_a_comparison_is_not_overwritten(measure):
    plan = plan_of("a", pairs=1)
    measure(plan, Field({"a": 16}))
    with pytest.raises(ConfigError, match="--resume"):
        measure(plan, Field({"a": 16}))


def test_another_plan_cannot_be_resumed(measure):
    measure(plan_of("a", pairs=1), Field({"a": 16}))
    with pytest.raises(ConfigError, match="another plan"):
        measure(plan_of("a", pairs=1, raw={"other": 1}), Field({"a": 16}), resume=True)


def interrupted(measure, plan):
    """Leave a comparison without its last trial."""
    assert measure(plan, Field({"a": 16}, stop_at=2)).exit_code == EXIT_INTERRUPTED


def elsewhere(monkeypatch, processor):
    here = machine.describe()
    monkeypatch.setattr(machine, "describe", lambda: here | {"Client machine": processor})


def test_a_comparison_goes_on_where_it_began_only(measure, monkeypatch):
    plan = plan_of("a", pairs=1)
    interrupted(measure, plan)
    elsewhere(monkeypatch, "Other CPU")
    field = Field({"a": 16})
    with pytest.raises(ConfigError, match=r"measured on another machine \(.*this is Other CPU"):
        measure(plan, field, resume=True)
    assert field.log == []


def test_a_finished_comparison_can_be_looked_at_anywhere(measure, monkeypatch, tmp_path):
    plan = plan_of("a", pairs=1, search=None, canary=True)
    checked = []

    async def check(campaign):
        checked.append(campaign)

    monkeypatch.setattr(Campaign, "_check_client", check)
    measure(plan, Field({"a": 1000}))
    assert len(checked) == 1
    elsewhere(monkeypatch, "Other CPU")
    field = Field({"a": 1000})
    assert measure(plan, field, resume=True).exit_code == EXIT_OK
    assert field.log == []
    assert len(checked) == 1
    # One that lacks a trial after all is not completed here, and stays as it was.
    stored = read_result(tmp_path / "out")
    stored.trials[0].seed = 7
    write_result(tmp_path / "out", stored)
    before = (tmp_path / "out" / "result.json").read_bytes()
    with pytest.raises(ConfigError, match="measured on another machine"):
        measure(plan, field, resume=True)
    assert field.log == []
    assert (tmp_path / "out" / "result.json").read_bytes() == before


def test_another_affinity_is_called_one(measure, monkeypatch):
    plan = plan_of("a", pairs=1)
    elsewhere(monkeypatch, "Some CPU, 8 of 16 CPUs usable")
    interrupted(measure, plan)
    for other, words in (
        ("Some CPU, 4 of 16 CPUs usable", "another CPU affinity .Some CPU, 8 of 16 .*now .*4 of"),
        ("Some CPU, 8 of 32 CPUs usable", "another machine"),
        ("Some other, 8 of 16 CPUs usable", "another machine"),
    ):
        elsewhere(monkeypatch, other)
        with pytest.raises(ConfigError, match=words):
            measure(plan, Field({"a": 16}), resume=True)


def test_a_comparison_of_another_version_says_so(measure, monkeypatch, tmp_path):
    plan = plan_of("a", pairs=1, search=None)
    measure(plan, Field({"a": 1000}))
    stored = read_result(tmp_path / "out")
    here = stored.platform.machine["Tailrace"]
    stored.plan_hash = "of a plan that had other fields"
    for version, words in (
        (here, rf"or a default is not \(both are of Tailrace {re.escape(here)}"),
        ("", "by Tailrace of an unknown version"),
        ("0.0.7", rf"by Tailrace 0\.0\.7, and this is {re.escape(here)}\); give"),
    ):
        stored.platform.machine["Tailrace"] = version
        write_result(tmp_path / "out", stored)
        with pytest.raises(ConfigError, match=words):
            measure(plan, Field({"a": 1000}), resume=True)


def test_a_gpu_that_others_use_is_said_of_each_trial(measure):
    field = Field({"a": 16}, neighbours=("GPU 0 had 3.0 GiB in use",))
    trials = measure(plan_of("a", pairs=1), field).comparison.trials
    assert all(trial.cautions == ["GPU 0 had 3.0 GiB in use"] for trial in trials)


def test_nothing_to_resume_is_an_error(measure):
    with pytest.raises(ConfigError, match="holds no comparison"):
        measure(plan_of("a"), Field({"a": 16}), resume=True)


def test_a_steady_trial_that_is_invalid_is_repeated_with_another_seed(measure):
    plan = plan_of("a", pairs=1, search=None)
    field = Field({"a": 16}, invalid={1: "the client was late"})
    outcome = measure(plan, field)
    first, second = outcome.comparison.trials
    assert first.reasons == ["the client was late"]
    assert first.outcome == ""
    assert second.reasons == []
    assert first.seed != second.seed
    assert outcome.exit_code == EXIT_OK


def test_a_load_without_a_valid_trial_is_no_verdict(measure):
    field = Field({"a": 16}, invalid={1: "late", 2: "late"})
    outcome = measure(plan_of("a", pairs=1, search=None), field)
    assert outcome.exit_code == EXIT_NO_VERDICT


def test_an_unresolved_search_is_no_verdict_and_says_why(measure):
    field = Field({"a": 1e9, "b": 16})
    outcome = measure(plan_of("a", "b"), field)
    assert outcome.exit_code == EXIT_NO_VERDICT
    unresolved = [s for s in outcome.comparison.searches if s.contender == "a"]
    assert all(s.max_rps is None and s.reasons for s in unresolved)
    (ratio,) = outcome.comparison.ratios
    assert ratio.estimate is None


def test_a_server_that_does_not_start_in_the_first_pair_ends_everything(measure):
    field = Field({"a": 16}, stillborn={"a": EngineError("no weights")})
    with pytest.raises(EngineError, match="no weights"):
        measure(plan_of("a"), field)


def test_one_that_does_not_start_later_costs_only_its_pair(measure):
    field = Field({"a": 16, "b": 16})
    plan = plan_of("a", "b", pairs=2, search=None)
    # Pair 0 is a then b; pair 1 is b then a.
    field.on_trial = lambda number, _: (
        field.stillborn.update({"b": EngineError("gone")}) if number == 2 else None
    )
    outcome = measure(plan, field)
    assert [t.contender for t in outcome.comparison.trials] == ["a", "b", "a"]


def test_contenders_that_count_tokens_otherwise_are_refused(measure):
    class Other:
        name = "other"

        async def encode(self, text):
            return [1, 2, 3]

        async def decode(self, ids):
            return "x"

    field = Field({"a": 16, "b": 16}, codecs={"b": Other()})
    with pytest.raises(ConfigError, match="tokenizer = DIR"):
        measure(plan_of("a", "b"), field)
    assert field.running == []


def test_a_closed_loop_is_measured_by_users(measure):
    plan = plan_of("a", pairs=1, search=None, limits=(), steady=SteadyPlan(users=(2, 4), trial_s=3))
    outcome = measure(plan, Field({"a": 1000}))
    assert [t.users for t in outcome.comparison.trials] == [2, 4]
    assert all(t.rate_rps > 0 for t in outcome.comparison.trials)
    assert outcome.exit_code == EXIT_OK


def test_each_trial_gets_the_part_of_the_request_log_that_is_its_own(measure, tmp_path):
    log = tmp_path / "out" / "servers" / "p0-a.requests.jsonl"
    spec = EngineSpec(name="a", kind="tailrace", command=("serve", "{port}"))
    plan = plan_of(
        "a", pairs=1, engines=(spec,), search=None, steady=SteadyPlan(rates=(2, 3), trial_s=5)
    )
    field = Field({"a": 16})

    def write(number, _):
        with log.open("a") as stream:
            stream.write(f'{{"trial": {number}}}\n')

    field.on_trial = write
    outcome = measure(plan, field)
    texts = [
        (tmp_path / "out" / t.folder / "requests.jsonl").read_text()
        for t in outcome.comparison.trials
    ]
    assert texts == ['{"trial": 1}\n', '{"trial": 2}\n']


def test_a_request_that_does_not_fit_the_context_is_refused_before_it_is_sent(measure, monkeypatch):
    monkeypatch.setattr("tests.bench.fake_contenders.CONTEXT_TOKENS", 10)
    field = Field({"a": 16})
    with pytest.raises(ConfigError, match="does not fit the context"):
        measure(plan_of("a"), field)
    assert field.trials == []


def test_the_client_is_checked_at_the_planned_peak_and_the_finding_kept(measure):
    field = Field({"a": 16})
    outcome = measure(plan_of("a", pairs=1), field)
    (peak,) = field.peaks
    assert peak.rate_rps == 16.0  # four times the search's first rate
    assert outcome.comparison.platform.machine["Client check"] == "client check: fake"


def test_a_client_that_is_too_slow_twice_starts_no_server(measure):
    field = Field({"a": 16}, client_reasons=[("too slow",), ("too slow",)])
    with pytest.raises(ConfigError, match="too slow; or set canary = false"):
        measure(plan_of("a", pairs=1), field)
    assert field.log == []


def test_one_slow_moment_of_the_client_is_checked_again(measure):
    field = Field({"a": 16}, client_reasons=[("too slow",), ()])
    assert measure(plan_of("a", pairs=1, search=None), field).exit_code == EXIT_OK


def test_the_check_can_be_left_out(measure):
    field = Field({"a": 16})
    measure(plan_of("a", pairs=1, canary=False, search=None), field)
    assert field.peaks == []


@pytest.mark.parametrize(
    ("rates", "peak_rps"), [("0:1,10:3", 3.0), ("0:0,10:2", 4.0), ("0:1,30:9", 2.0)]
)
def test_the_client_is_checked_at_the_peak_of_a_curve(measure, rates, peak_rps):
    field = Field({"a": 1000})
    traffic = replace(TRAFFIC, arrivals="step", rates=rates)
    measure(plan_of("a", pairs=1, search=None, traffic=traffic), field)
    (peak,) = field.peaks
    assert peak.rate_rps == pytest.approx(peak_rps)


def test_a_curve_that_is_0_for_a_whole_trial_is_refused_before_any_server(measure):
    field = Field({"a": 16})
    traffic = replace(TRAFFIC, arrivals="step", rates="0:0,20:5")
    with pytest.raises(ConfigError, match="give a longer trial"):
        measure(plan_of("a", pairs=1, search=None, traffic=traffic), field)
    assert field.log == []


def test_a_trace_that_carries_the_plan_is_long_enough_for_the_client_check(measure, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 500 * i, "input_length": 20, "output_length": 4} for i in range(50)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    traffic = Workload(source=str(trace), input_tokens="20", output_tokens="4")
    field = Field({"a": 1000})
    steady = SteadyPlan(rates=(2.0,), trial_s=20)
    measure(plan_of("a", pairs=1, search=None, steady=steady, traffic=traffic), field)
    assert len(field.peaks) == 1


def lost_in_pair_1(measure, **more):
    """Measure a and b where b is gone after its first pair."""
    field = Field({"a": 1000, "b": 1000})
    field.on_trial = lambda number, _: (
        field.stillborn.update({"b": EngineError("<gone>\nlog")}) if number == 2 else None
    )
    return measure(plan_of("a", "b", pairs=2, search=None), field, **more)


def test_a_load_that_a_lost_stay_never_measured_is_no_verdict(measure):
    outcome = lost_in_pair_1(measure)
    assert outcome.exit_code == EXIT_NO_VERDICT
    assert outcome.comparison.contenders[0].cautions == []
    assert outcome.comparison.contenders[1].cautions == [
        "not measured to the end in pair 2: <gone>"
    ]


def test_a_lost_stay_can_be_made_good_by_a_resume(measure):
    lost_in_pair_1(measure)
    field = Field({"a": 1000, "b": 1000})
    outcome = measure(plan_of("a", "b", pairs=2, search=None), field, resume=True)
    assert outcome.exit_code == EXIT_OK
    assert outcome.comparison.contenders[1].cautions == []
    assert len(field.trials) == 1


def test_an_interrupt_does_not_look_like_an_error_to_a_server(measure):
    field = Field({"a": 16}, stop_at=2)
    assert measure(plan_of("a", pairs=1), field).exit_code == EXIT_INTERRUPTED
    assert field.exits
    assert not issubclass(field.exits[-1], Exception)


def test_a_filled_in_plan_that_differs_is_not_resumed_and_a_new_key_is_no_difference(
    measure, tmp_path
):
    def plan(variant, key):
        spec = EngineSpec(
            name="a",
            kind="openai",
            command=("serve", "--variant", variant, "--api-key", key, "{port}"),
        )
        return plan_of("a", pairs=1, search=None, engines=(spec,))

    measure(plan("x", "s3cret"), Field({"a": 16}))
    assert "s3cret" not in (tmp_path / "out" / "result.json").read_text()
    with pytest.raises(ConfigError, match="other conditions"):
        measure(plan("y", "s3cret"), Field({"a": 16}), resume=True)
    assert measure(plan("x", "other"), Field({"a": 16}), resume=True).exit_code == EXIT_OK


def test_a_key_in_the_plan_itself_is_not_stored(measure, tmp_path):
    raw = {"engine": [{"name": "a", "command": "serve --api-key s3cret"}]}
    measure(plan_of("a", pairs=1, search=None, raw=raw), Field({"a": 16}))
    assert "s3cret" not in (tmp_path / "out" / "result.json").read_text()


def test_stored_trials_that_nobody_asks_for_are_dropped(measure, tmp_path):
    plan = plan_of("a", pairs=1, search=None)
    measure(plan, Field({"a": 16}))
    stored = read_result(tmp_path / "out")
    stray = msgspec.structs.replace(stored.trials[0], seed=7, folder="trials/0099-a-p0-stray")
    stored.trials.append(stray)
    write_result(tmp_path / "out", stored)
    (tmp_path / "out" / stray.folder).mkdir()
    outcome = measure(plan, Field({"a": 16}), resume=True)
    assert outcome.exit_code == EXIT_OK
    assert len(read_result(tmp_path / "out").trials) == 1
    assert not (tmp_path / "out" / stray.folder).exists()


def test_a_lost_stay_keeps_its_stored_trials(measure, tmp_path):
    plan = plan_of("a", "b", pairs=2, search=None, steady=SteadyPlan(rates=(2.0, 3.0), trial_s=20))
    measure(plan, Field({"a": 1000, "b": 1000}))
    stored = read_result(tmp_path / "out")
    first = next(t for t in stored.trials if (t.contender, t.pair) == ("b", 1))
    stored.trials.remove(first)
    write_result(tmp_path / "out", stored)
    field = Field({"a": 1000, "b": 1000}, stillborn={"b": EngineError("gone")})
    assert measure(plan, field, resume=True).exit_code == EXIT_NO_VERDICT
    assert len(read_result(tmp_path / "out").trials) == 7


def test_a_resume_that_is_interrupted_at_once_leaves_a_finished_result_as_it_was(
    measure, tmp_path, monkeypatch
):
    plan = plan_of("a", "b")
    measure(plan, Field({"a": 16, "b": 12}))
    before = (tmp_path / "out" / "result.json").read_bytes()

    async def interrupted(self, pair, spec):
        if spec.name == "b":
            self.stop.set()
            raise asyncio.CancelledError
        await stay(self, pair, spec)

    stay = Campaign._stay
    monkeypatch.setattr(Campaign, "_stay", interrupted)
    outcome = measure(plan, Field({"a": 16, "b": 12}), resume=True)
    assert outcome.exit_code == EXIT_INTERRUPTED
    assert (tmp_path / "out" / "result.json").read_bytes() == before
    assert len(outcome.comparison.searches) == 4
