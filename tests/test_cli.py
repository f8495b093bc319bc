import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tailrace import cli
from tailrace.bench.max_rate import Measuring, Subject
from tailrace.bench.plan import SearchPlan
from tailrace.bench.traffic.workload import Workload, build
from tailrace.config import EngineConfig, ServerConfig
from tailrace.kernels.plan import Key, Plan, choose, write

PACKAGE = str(Path(cli.__file__).parents[1])


def run(
    *arguments: str, cwd: Path | None = None, cache: Path | None = None
) -> subprocess.CompletedProcess[str]:
    known = {} if cache is None else {"TAILRACE_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, "-m", "tailrace", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
        # The same code as this process runs, in a worktree too; nothing else of its environment.
        env={"COLUMNS": "200", "NO_COLOR": "1", "PATH": "", "PYTHONPATH": PACKAGE, **known},
    )


def test_serve_has_one_option_for_each_setting():
    shown = run("serve", "--help").stdout
    for entry in [*fields(EngineConfig), *fields(ServerConfig)]:
        assert f"--{entry.name.replace('_', '-')}" in shown
        assert entry.metadata["help"]


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["serve", "--help"],
        ["bench", "--help"],
        ["compare", "--help"],
        ["check-accuracy", "--help"],
        ["quantize", "--help"],
        ["plan", "measure", "--help"],
        ["plan", "--help"],
        ["bench", "max-rate", "--help"],
        ["bench", "locustfile"],
    ],
)
def test_help_imports_neither_torch_nor_the_server(command):
    probe = (
        "import sys; from tailrace.cli import app\n"
        f"try: app({command!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'uvicorn', 'transformers', 'matplotlib', 'numpy', 'locust', 'gevent',\n"
        "         'tailrace.bench.plan', 'tailrace.bench.report'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_print_config_shows_what_would_run():
    shown = run("serve", "--print-config", "--port", "9", "--no-prefix-cache").stdout
    assert "port = 9\n" in shown
    assert "prefix-cache = False\n" in shown


def test_a_bad_setting_is_one_readable_line_and_status_1():
    done = run("serve", "--block-size", "7")
    assert done.returncode == 1
    assert done.stderr == "tailrace: --block-size 7: must be one of auto, 8, 16, 32\n"


def test_plans_are_shown_and_pinned(tmp_path):
    done = run("plan", "show", cache=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tailrace: plan show: {tmp_path}/plans holds none")
    key = Key(gpu="H200", model="m", dtype="bfloat16", tailrace="1", torch="2", triton="3")
    seconds = {"usual": 2e-3, "other": 1e-3}
    file = tmp_path / "plans" / "a.json"
    write(Plan(key, (choose("attention", "longer", "usual", seconds, {}),)), file)
    shown = run("plan", "show", cache=tmp_path).stdout
    assert shown.startswith(f"{file}\n  gpu: H200\n")
    assert "attention, longer: other\n" in shown
    old = tmp_path / "plans" / "0.json"
    old.write_text('{"format": 0}')
    both = run("plan", "show", cache=tmp_path).stdout
    assert both.startswith(f"{old}\n  not read: plan {old}: format 0, and this version reads ")
    assert both.endswith(f"\n{shown}")
    alone = run("plan", "show", str(old))
    assert (alone.returncode, alone.stderr.startswith(f"tailrace: plan {old}: ")) == (1, True)
    pinned = tmp_path / "pinned.json"
    assert str(pinned) in run("plan", "pin", str(file), str(pinned)).stdout
    assert "\n  pinned\n" in run("plan", "show", str(pinned)).stdout


@pytest.mark.parametrize(
    "command", [("plan", "measure", "smollm2"), ("serve", "--print-config", "--plan", "auto")]
)
def test_on_a_cpu_a_plan_has_nothing_to_choose(command):
    done = run(*command)
    assert done.returncode == 1
    assert "on a CPU there is nothing to choose" in done.stderr


def test_a_mistyped_option_names_the_nearest():
    done = run("serve", "--blok-size", "8")
    assert done.returncode == 2
    assert "--block-size" in done.stderr


def test_traffic_options_are_the_workload_s_fields():
    given_otherwise = {"source", "rate_rps", "users", "seed"}
    known = {entry.name for entry in fields(Workload) if entry.init} - given_otherwise
    assert set(cli._TRAFFIC) == known


def test_measuring_options_are_the_harness_s_fields():
    assert set(cli._SUBJECT) == {entry.name for entry in fields(Subject)}
    given_otherwise = {"traffic", "limits", "platform"}
    assert set(cli._MEASURING) == {entry.name for entry in fields(Measuring)} - given_otherwise
    assert set(cli._SEARCH) == {entry.name for entry in fields(SearchPlan)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "nowhere.toml", "--out", "o"], "nowhere.toml: No such file or directory"),
        (
            ["bench", "max-rate", "chat70", "--url", "http://x", "--limit", "p95_tfft=1"],
            "did you mean 'ttft'?",
        ),
        (["bench", "max-rate", "chat70", "--limit", "p95_ttft=1"], "give either --url"),
        (["bench", "run", "chat70", "--url", "http://x"], "nothing to measure"),
        (
            ["bench", "run", "chat7", "--url", "http://x", "--rate", "1"],
            "did you mean 'chat70'?",
        ),
        (["bench", "report", "nowhere"], "nowhere/result.json"),
    ],
)
def test_what_cannot_be_measured_is_one_readable_line(arguments, said, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.startswith("tailrace: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_plan_can_be_looked_at_without_a_folder_and_measured_only_into_one(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[traffic]\nsource = "chat70"\n[steady]\nrates = [2]\n'
        '[[engine]]\nname = "a"\nkind = "openai"\nurl = "http://127.0.0.1:9"\n'
    )
    shown = run("compare", str(plan), "--check")
    assert shown.returncode == 0, shown.stderr
    assert "found running at http://127.0.0.1:9" in shown.stdout
    refused = run("compare", str(plan))
    assert refused.returncode == 2
    assert "give the result folder" in refused.stderr


def test_an_export_is_read_back_as_the_same_traffic(tmp_path):
    file = tmp_path / "out.jsonl"
    options = ["--rate", "5", "--duration", "10", "--seed", "3", "--max-input-tokens", "900"]
    done = run("bench", "export", "chat70", "--out", str(file), *options)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    planned = build(
        Workload(source="chat70", max_input_tokens=900), rate_rps=5, duration_s=10, seed=3
    ).arrivals
    assert [row["input_length"] for row in rows] == [a.input_tokens for a in planned]
    assert done.stdout == f"{file}: {len(rows)} requests in 10.0 s\n"


def test_the_locustfile_is_where_the_command_says():
    path = Path(run("bench", "locustfile").stdout.strip())
    assert path.name == "locustfile.py"
    assert path.is_file()


class AskedError(Exception):
    """What a command would have measured."""


AS_SERVED = {
    "gpus": ("0", "1"),
    "dtype": ("float16", "auto"),
    "quant_type": ("fp8", "auto"),
    "fp8_activations": ("all", "many"),
    "kv_cache_dtype": ("fp8", "auto"),
    "prefill_attention": ("triton", "auto"),
    "decode_kernels": ("triton", "auto"),
}
"""Options that decide what is served: as they are asked for, and otherwise."""


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return the settings that a measuring command arrives at."""
    pytest.importorskip("triton", reason="Triton is not installed")
    text = tmp_path / "text.txt"
    text.write_text("A text. " * 200)
    more = {"check-accuracy": ["--text", str(text)], "plan measure": ["--context-length", "64"]}

    def measure(config, *_, **__):
        raise AskedError(config)

    for name in ("engine.accuracy.check_accuracy", "engine.cuda_setup.measure_plan"):
        monkeypatch.setattr(f"tailrace.{name}", measure)
    # They would pin this process's threads, for good, and look for the model.
    monkeypatch.setattr("tailrace.engine.setup.pin_threads", lambda _: None)
    monkeypatch.setattr("tailrace.engine.setup.resolve", lambda _: tmp_path)

    def ask(command, *arguments):
        with pytest.raises(AskedError) as asked:
            cli.app([*command.split(), "model", *more[command], *arguments])
        return asked.value.args[0]

    return ask


@pytest.mark.parametrize("source", ["command line", "environment", "both"])
@pytest.mark.parametrize("command", ["check-accuracy", "plan measure"])
def test_what_measures_a_model_as_it_is_served_takes_every_option_of_it(
    measured, monkeypatch, command, source
):
    flags = []
    for name, (wanted, other) in AS_SERVED.items():
        if source != "command line":
            told = wanted if source == "environment" else other
            monkeypatch.setenv(f"TAILRACE_{name.upper()}", told)
        if source != "environment":
            flags += [f"--{name.replace('_', '-')}", wanted]
    config = measured(command, *flags)
    expected = {name: wanted for name, (wanted, _) in AS_SERVED.items()} | {"gpus": (0,)}
    assert {name: getattr(config, name) for name in AS_SERVED} == expected
