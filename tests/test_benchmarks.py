"""Benchmarks: they find and run what serves, and results lie beside one another."""

import ast
import importlib
import importlib.util
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks import gpu_engine, gpu_serving, step_cost
from benchmarks.gpu_engine import STEPS, WHOLE, parser_of_options, write_result

from tailrace.bench.records import Record
from tailrace.engine import phase_overlap

FILES = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


def imported(node):
    """Return the modules of the package and the names that a script takes of them as it runs."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return []
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tailrace":
        return [(node.module, alias.name) for alias in node.names]
    return [found for child in ast.iter_child_nodes(node) for found in imported(child)]


def is_there(module, name):
    """Whether a module has a name, or is a package of such a module."""
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    return hasattr(found, name) or (
        is_package and importlib.util.find_spec(f"{module}.{name}") is not None
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_what_a_benchmark_imports_of_the_package_is_there(file):
    """Most run on a GPU alone, by hand."""
    wanted = imported(ast.parse(file.read_text()))
    assert [names for names in wanted if not is_there(*names)] == []


def written(out, options, *arguments):
    """Return the settings in the files that runs with these arguments leave."""
    given = parser_of_options().parse_args(["--out", str(out), *arguments])
    write_result("gpu", given, options, {"rows": []})
    return [json.loads(file.read_text()) for file in sorted(out.iterdir())]


@pytest.mark.parametrize("options", [STEPS, WHOLE], ids=["steps", "whole"])
def test_runs_of_the_engine_under_different_settings_leave_a_file_each_that_names_them(
    tmp_path, options
):
    plans = [tmp_path / "deep" / "plan.json", tmp_path / "plan.json"]
    plans[0].parent.mkdir()
    for number, plan in enumerate(plans):
        plan.write_text(f"{number}")
    asked = {
        "weights": ("awq", "fp8"),
        "fp8_activations": ("all",),
        "kv_cache_dtype": ("fp8",),
        "plan": ("auto", *map(str, plans)),
        "decode_kernels": ("triton", "hopper"),
        "prefill_weights": ("same", "fp8"),
        "prefill_attention": ("triton", "hopper"),
        "phase_overlap": ("on", "off"),
    }
    out = tmp_path / "out"
    out.mkdir()
    runs = 1
    written(out, options)
    for option in options:
        for value in asked[option]:
            runs += 1
            found = written(out, options, f"--{option.replace('_', '-')}", value)
            assert len(found) == runs
            assert [entry[option] for entry in found].count(value) == 1
    assert len(written(out, options)) == runs


@pytest.mark.parametrize("weights", ["bf16", "awq", "fp8"])
def test_both_kinds_of_launches_are_captured_anew_whatever_serves(weights, tmp_path, monkeypatch):
    served, checked = [], []
    graphs = SimpleNamespace(
        captured_decodes=lambda *, dependent: "dependent" if dependent else "plain",
        serve_by=served.append,
    )
    loaded = SimpleNamespace(runner=SimpleNamespace(step_graphs=graphs))
    monkeypatch.setattr(gpu_engine, "make", lambda *_: ("engine", {"loaded": loaded}))

    def check(_, serve, batch, __):
        checked.append(batch)
        for arm in ("plain", "dependent"):
            serve(arm)

    monkeypatch.setattr(gpu_engine, "check_launches", check)
    steps = gpu_engine.ROUNDS * gpu_engine.TIMED_STEPS
    times = {"plain": [2.0] * steps, "dependent": [1.5] * steps}
    monkeypatch.setattr(gpu_engine, "decode_steps", lambda *_: (times, 1000))
    arguments = parser_of_options().parse_args(
        ["--out", str(tmp_path), "--launches", "--weights", weights]
    )
    with ThreadPoolExecutor(1) as runner:
        gpu_engine.compare_launches(tmp_path, runner, arguments)
    assert len(checked) == len(gpu_engine.CHECKED)
    assert served == ["plain", "dependent"] * len(checked)
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    assert found["weights"] == weights
    sizes = [(row["batch"], row["context"]) for row in found["rows"]]
    assert tuple(sizes) == gpu_engine.LAUNCHES
    assert all(row["ms"] == times for row in found["rows"])


def compare_overlap(tmp_path, monkeypatch, scored):
    """Run the comparison over engines that are their settings."""

    def make(config, *_):
        return (config.phase_overlap, phase_overlap.PRIORITIES), {}

    monkeypatch.setattr(gpu_engine, "make", make)
    monkeypatch.setattr(gpu_engine, "scored", scored)
    monkeypatch.setattr(gpu_engine, "mixed_step", lambda engine, *_: engine[1][1])
    arguments = parser_of_options().parse_args(
        ["--out", str(tmp_path), "--mixed", "106x4500x1024", "--phase-priorities", "0,0", "0,1"]
    )
    with ThreadPoolExecutor(1) as runner:
        gpu_engine.time_mixed(tmp_path, runner, arguments)


def left(tmp_path):
    (file,) = tmp_path.iterdir()
    return json.loads(file.read_text())


def test_ways_of_overlap_are_timed_beside_none_by_the_same_answers(tmp_path, monkeypatch):
    usual = phase_overlap.PRIORITIES
    compare_overlap(tmp_path, monkeypatch, lambda *_, **__: {"0": [(1, -0.5)]})
    assert usual == phase_overlap.PRIORITIES
    found = left(tmp_path)
    assert [(row["overlap"], tuple(row["priorities"]), row["ms"]) for row in found["rows"]] == [
        ("off", (0, 0), 0),
        ("on", (0, 0), 0),
        ("on", (0, -1), -1),
    ]
    sizes = {(row["batch"], row["context"], row["budget"]) for row in found["rows"]}
    assert sizes == {(106, 4500, 1024)}
    assert found["differing"] == 0


def test_answers_that_depend_on_the_way_of_overlap_fail_the_run_once_it_is_timed(
    tmp_path, monkeypatch
):
    def scored(engine, *_, **__):
        return {"0": [(1, -0.5)], "1": [(1, -0.5 if engine[0] == "off" else -0.25)]}

    answers = 2 * len(gpu_engine.CHECKED)
    with pytest.raises(SystemExit, match=f"^{answers} answers depend on the way"):
        compare_overlap(tmp_path, monkeypatch, scored)
    assert left(tmp_path)["differing"] == answers


@pytest.mark.parametrize("work", [step_cost.decodes, step_cost.prompts], ids=["decodes", "prompts"])
def test_the_hosts_part_of_a_step_is_still_measured_by_the_real_runner(work):
    engine, queued = step_cost.make_engine(1024)
    step_cost.start(engine, 4, 50, 40, random.Random(1))
    before = len(queued)
    work(engine, 5)
    assert len(queued) >= before + 5
    assert engine.scheduler.running


def wave(start_s, lasts_s, user):
    """Return one user's request of a wave: it begins and ends with everybody's."""
    chunk_s = [start_s + lasts_s * share for share in (0.5, 0.75, 1.0)]
    return Record(
        index=user, scheduled_s=start_s, planned_input_tokens=8, planned_output_tokens=3,
        status="ok", dispatched_s=start_s, sent_s=start_s, first_token_s=chunk_s[0],
        chunk_s=chunk_s, finished_s=chunk_s[-1], input_tokens=8, output_tokens=3,
        request_id=f"r{user}",
    )  # fmt: skip


def test_users_over_the_mean_time_is_the_rate_though_a_window_cuts_the_waves():
    early = [wave(5.0 * turn, 5.0, user) for turn in range(3) for user in range(6)]
    late = [wave(2.5 + 5.0 * turn, 5.0, user) for turn in range(2) for user in (6, 7)]
    run = SimpleNamespace(records=early + late, verdict=SimpleNamespace(reasons=()), scrapes={})
    told = gpu_serving.figures(gpu_serving.Cell("chat70:c8:30"), "ours", run)
    # The window, from 7.5 to 10 s, holds the end of the large wave alone.
    assert (told["rps"], told["users_s"]) == pytest.approx((6 / 2.5, 8 / 5.0))
    assert "1.60 users/s" in gpu_serving.line(told)


def test_a_window_without_a_request_has_no_rate():
    records = [wave(0.0, 5.0, user) for user in range(8)]
    run = SimpleNamespace(records=records, verdict=SimpleNamespace(reasons=()), scrapes={})
    told = gpu_serving.figures(gpu_serving.Cell("chat70:c8:30"), "ours", run)
    assert (told["counted"], told["users_s"], told["rps"]) == (0, 0.0, 0.0)


def test_an_open_loop_has_no_users():
    records = [wave(float(turn), 5.0, turn) for turn in range(30)]
    run = SimpleNamespace(records=records, verdict=SimpleNamespace(reasons=()), scrapes={})
    assert gpu_serving.figures(gpu_serving.Cell("chat70:r1:30"), "ours", run)["users_s"] == 0.0
