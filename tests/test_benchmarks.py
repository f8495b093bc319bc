"""Benchmarks for GPUs: results lie beside one another, none in place of another."""

import json

import pytest
from benchmarks.gpu_engine import STEPS, WHOLE, parser_of_options, write_result


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
        "kv_cache_dtype": ("fp8",),
        "plan": ("auto", *map(str, plans)),
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
