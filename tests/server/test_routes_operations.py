"""Probes and readings in every state of the engine."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tailrace import __version__
from tailrace.config import Config, ServerConfig
from tailrace.engine.step_meter import StepMeter
from tailrace.server.engine_client import EngineState
from tailrace.types import EngineStats, StepCosts
from tests.server.fake_engine import FakeEngine, Script
from tests.server.running_app import running_app


class ReportingEngine(FakeEngine):
    """A FakeEngine whose last report the test writes."""

    report = None

    @property
    def stats(self):
        return self.report


def report(**fields):
    known = {
        "time_s": 1.0,
        "running_requests": 3,
        "waiting_requests": 2,
        "total_blocks": 100,
        "free_blocks": 75,
        "block_size": 16,
        "live_tokens": 300,
        "held_blocks": 25,
    }
    return EngineStats(**known | fields)


@pytest.fixture
def app(tiny_folder):
    with running_app(tiny_folder, {"": Script(pause_after=1)}) as app:
        app.services.engine = ReportingEngine(app.engine.scripts)
        yield app


STATES = {
    "ok": (200, 200, 200),
    "draining": (200, 503, 200),
    "starting": (503, 503, 200),
    "restarting": (503, 503, 200),
    "failed": (503, 503, 503),
}


@pytest.mark.parametrize(("name", "statuses"), STATES.items())
def test_probes_by_state(app, name, statuses):
    if name == "draining":
        app.services.draining = True
    elif name != "ok":
        app.engine.state = EngineState(name)
    answers = [app.get(path) for path in ("/health", "/ready", "/live")]
    assert tuple(answer.status_code for answer in answers) == statuses
    assert answers[0].json()["status"] == answers[1].json()["status"] == name


def test_an_engine_without_its_text_side_is_still_starting(app):
    app.services.text = None
    assert app.get("/ready").status_code == 503
    answer = app.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "starting")
    assert answer.json()["model"] is None


def test_the_kv_pool_is_described_only_where_the_flag_allows_it(app, tiny_folder):
    answer = app.get("/debug/kv")
    assert answer.status_code == 404
    assert "--debug-kv" in answer.text
    config = Config(server=ServerConfig(debug_kv=True))
    with running_app(tiny_folder, config=config) as open_app:
        answer = open_app.get("/debug/kv")
        assert answer.status_code == 200
        described = answer.json()
        assert (described["total_blocks"], described["free_blocks"], described["fault"]) == (
            64,
            60,
            "",
        )
        assert described["tables"][0]["claim"] == 2
        open_app.engine.kv_fault = "unit 3 is in two places"
        answer = open_app.get("/debug/kv")
        assert (answer.status_code, answer.json()["fault"]) == (500, "unit 3 is in two places")


def test_health_before_the_first_report(app):
    app.engine.ready = None
    assert app.get("/health").json() == {
        "status": "ok",
        "model": "tiny",
        "device": None,
        "device_utilization": None,
        "tokens_per_second": None,
        "running_requests": 0,
        "pending_requests": 0,
        "engine_restarts": 0,
    }


def test_health_knows_the_pool_before_the_first_report(app):
    app.engine.report = None
    ready = app.engine.ready
    kv_cache = app.get("/health").json()["kv_cache"]
    assert kv_cache["total_tokens"] == ready.total_blocks * ready.block_size > 0
    assert (kv_cache["usage"], kv_cache["used_tokens"]) == (0.0, 0)


def test_health_shows_load_rates_and_kv(app):
    app.engine.report = report(total_blocks=64, free_blocks=48)
    app.engine.restarts_total = 2
    app.services.rates.add(report())
    app.services.rates.add(report(time_s=3.0, busy_s_total=1.0, generation_tokens_total=90))
    assert app.get("/health").json() == {
        "status": "ok",
        "model": "tiny",
        "device": "fake",
        "device_utilization": 0.5,
        "tokens_per_second": 45.0,
        "running_requests": 3,
        "pending_requests": 2,
        "engine_restarts": 2,
        "kv_cache": {"usage": 0.25, "total_tokens": 1024, "used_tokens": 256},
    }


@pytest.mark.parametrize(("steps", "status"), [(30, "ok"), (200, "off")])
def test_health_says_when_steps_have_been_mispredicted_for_long_and_stays_healthy(
    app, steps, status
):
    meter = StepMeter()
    for _ in range(steps):
        meter.add_step(1.0, idle_s=0.0, queue_s=0.0, predicted_s=0.5)
    app.engine.report = report(timings=meter.read())
    assert "step_prediction" not in app.get("/health").json()  # nothing was fitted
    costs = StepCosts(0.004, 2e-5, 128, 2e-9, 1e-5, 1e-8)
    app.engine.report = report(timings=meter.read(), step_costs=costs)
    answer = app.get("/health")
    assert answer.status_code == 200
    assert answer.json()["step_prediction"] == {
        "status": status,
        "recent_error": pytest.approx(0.5),
        "off_s": pytest.approx(steps),
    }


def test_a_busy_server_is_healthy(app):
    app.services.admission.sequences = app.services.places
    assert app.get("/health").status_code == 200
    assert app.get("/ready").status_code == 200


def test_metrics_show_requests_engine_and_drops(app):
    app.engine.report = report()
    app.engine.restarts_total = 1
    app.services.request_log.dropped_total = 5
    app.call(app.engine.scripts[""].go_on.set)
    assert app.post("/generate", {"prompt": "Hi", "max_tokens": 3}).status_code == 200
    app.settle()
    answer = app.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["tailrace:request_success_total", "length"] == 1
    assert samples["tailrace:request_generation_tokens_sum",] == 3
    assert samples["tailrace:num_requests_running",] == 3
    assert samples["tailrace:engine_restarts_total",] == 1
    assert samples["tailrace:engine_silence_seconds",] == app.engine.silence_s
    assert samples["tailrace:request_log_dropped_total",] == 5
    assert samples["tailrace:process_resident_memory_bytes", "frontend"] > 1_000_000


def test_version(app):
    assert app.get("/version").json() == {"version": __version__}


def test_readings_answer_while_the_engine_is_dead(app):
    app.engine.state = EngineState.RESTARTING
    assert app.get("/metrics").status_code == 200
    assert app.get("/version").status_code == 200


def test_the_states_of_the_table_are_all_there_are():
    assert {state.value for state in EngineState} - {"ready"} == set(STATES) - {"ok", "draining"}
