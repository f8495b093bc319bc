"""Each kernel, in the shapes chosen for each kind of GPU, fits that GPU: no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tailrace.kernels.attention_shapes import ADA, AMPERE, HOPPER
from tests.support import beside

if TYPE_CHECKING:
    from pathlib import Path

SHARED_BYTES = {AMPERE: 163 * 1024, ADA: 99 * 1024, HOPPER: 227 * 1024}
"""Most shared memory of one program."""

pytestmark = [
    pytest.mark.slow,
    # Several hundred kernels of Hopper's: minutes of the assembler's, on a crowded machine many.
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
]


@pytest.fixture(scope="session")
def results(tmp_path_factory, pytestconfig) -> Path:
    """Where all workers of a run, and what compiles beside them, leave what they found."""
    own = tmp_path_factory.getbasetemp()
    run = own.parent if hasattr(pytestconfig, "workerinput") else own
    (run / beside.FOLDER).mkdir(exist_ok=True)
    return run / beside.FOLDER


@pytest.mark.parametrize("kind", [AMPERE, ADA, HOPPER])
def test_every_kernel_compiles_within_the_gpus_means(kind, pytestconfig, tmp_path, results):
    # Triton's own cache knows each kernel by its source: a second run compiles what has changed.
    kept = getattr(pytestconfig, "cache", None)
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_ahead", f"sm_{kind}", "--into", results],
        env=beside.environment(kept.mkdir("triton") if kept else tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = (results / f"sm_{kind}.jsonl").read_text().splitlines()
    kernels = [json.loads(line) for line in lines]
    assert {entry["name"].split()[0] for entry in kernels} >= {
        "prefill", "decode", "rope_cache", "rms_norm", "silu_mul", "skinny", "int4", "int8",
        "sample_adjust", "sample_search", "sample_draw",
    }  # fmt: skip
    for name in (
        "hopper_int4", "hopper_int4_bands", "hopper_int4_few", "hopper_int8", "hopper_prefill",
        "hopper_float8", "hopper_decode", "hopper_half",
        "widen",
    ):  # fmt: skip
        assert any(entry["name"].split()[0] == name for entry in kernels) == (kind >= HOPPER)
    float8 = {entry["name"].split()[0] for entry in kernels if entry["name"].endswith("float8")}
    assert float8 == ({"prefill", "decode", "rope_cache"} if kind >= ADA else set())
    detours = [entry["detours"] for entry in kernels if "detours" in entry]
    assert bool(detours) == (kind >= ADA)
    assert not any(count for found in detours for count in found.values()), detours
    dependent = [entry for entry in kernels if entry["name"].endswith(" dependent")]
    assert {entry["name"].split()[0] for entry in dependent} == (
        {
            "decode", "rope_cache", "rms_norm", "silu_mul", "skinny", "int4", "float8_skinny",
            "quantize_rows", "rms_norm_float8", "silu_mul_float8", "hopper_int4", "float8_few",
            "tops", "likeliest",
            "hopper_int4_bands", "hopper_int4_few", "hopper_float8", "hopper_decode", "hopper_half",
        }
        if kind >= HOPPER
        else set()
    )  # fmt: skip
    for entry in kernels:
        is_dependent = entry in dependent
        if entry["name"].startswith(
            ("hopper_int4", "hopper_float8", "hopper_decode", "hopper_half")
        ):
            # One warp waits; what others write follows the rows that it loads after that, though
            # it stands before in the code.
            assert [entry["waits"] > 0, entry["signals"] > 0] == [is_dependent] * 2, entry
            continue
        assert (entry["waits"], entry["signals"]) == (is_dependent, is_dependent), entry
        assert entry["early"] == 0, entry
    for entry in kernels:
        assert entry["registers"] <= 255, entry
        # Sums fill the registers; what is spilled is read once a chunk of 128 x 256 weights, or
        # once a tile.
        spilled = 160 if entry["name"].startswith("hopper_int4 128") else 0
        spilled = 40 if "two units" in entry["name"] else spilled
        # The widest tiles: a few addresses and scales beside the sums.
        is_wide = any(f"FP8 Hopper {tile}/8" in entry["name"] for tile in (256, 512))
        spilled = 24 if is_wide else spilled
        if "float8_products" in entry:
            # The tensor cores add the 128 inputs of a chunk, and no more.
            products, begun = entry["float8_products"]
            assert products == 4 * begun > 0, entry
        # Likewise beside 192 sums a thread, and in the warp that loads boxes of 8 outputs.
        is_tight = "x64/8 whole" in entry["name"] or "40x128, 2 slices" in entry["name"]
        spilled = 24 if is_tight else spilled
        # An address or two, read once a split.
        spilled = 16 if entry["name"].startswith("decode 256") else spilled
        # Likewise: three programs of its eight warps fit a multiprocessor by 80 registers.
        spilled = 8 if "decode 128 128 keys, 8 warps, 3 stages" in entry["name"] else spilled
        # Two addresses in shared memory, stored where a warp begins.
        spilled = 8 if entry["name"].startswith("hopper_prefill") else spilled
        # Addresses, read once a split.
        is_crowded = entry["name"].startswith("hopper_decode float8") and "64 reg" in entry["name"]
        spilled = 72 if is_crowded else spilled
        # The producer's, which asks for keys before its turn: once a program.
        is_early = entry["name"].startswith("hopper_decode") and is_dependent
        spilled = max(24, spilled) if is_early else spilled
        assert entry["stack"] <= spilled, entry
        assert entry["local"] == 0, entry
        assert entry["shared"] <= SHARED_BYTES[kind], entry
        assert entry.get("faults", []) == [], entry
        assert entry.get("loose_barriers", []) == [], entry
        # Else they are written otherwise, and no load was looked for before one.
        assert entry.get("hand_backs", 1) > 0, entry
        if entry["name"].startswith("hopper_prefill"):
            # Both sides, with a mask and without: a thread's weights are softened while values
            # are multiplied.
            weights = 32 if "128x64" in entry["name"] else 64
            assert len(entry["overlap"]) == 4, entry
            assert min(entry["overlap"]) >= weights, entry
    check_pipelines(kernels)


def check_pipelines(kernels):
    """Products of 4 bits are in flight while the next one's weights are unpacked, elsewhere.

    Those in half precision while the next ones are queued, if the ring has the room.
    """
    for entry in kernels:
        is_half = entry["name"].startswith("hopper_half")
        is_one = entry["name"].startswith("hopper_int4_bands")
        loops = entry.get("pipelines", [])
        assert len(loops) == is_one or (is_half and loops), entry
        for loop in loops:
            assert loop["products"] == 4 * loop["commits"], entry  # of 16 inputs each
            # Once a chunk, or a unit.
            assert loop["drains"] == (not entry.get("is_ahead", False)), entry
