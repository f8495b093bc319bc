"""From how many sequences on decode steps are launched dependently, by what multiplies them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.engine import decode_launches
from tailrace.engine.decode_launches import LEAST_DECODES, describe, least_decodes
from tailrace.engine.prefill_weights import with_copy
from tailrace.kernels.linear.cublas import CublasLinear
from tailrace.kernels.linear.float8_linear import Float8Linear
from tailrace.kernels.linear.int4_linear import Int4Linear
from tailrace.kernels.linear.prefill_format import FORMATS
from tailrace.kernels.linear.triton_skinny import SkinnyLinear
from tailrace.kernels.triton_kernels import TritonKernels
from tests.engine.test_quantised_runner import folder_of, loaded
from tests.support.interpreter import exact_float8

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HOPPER = (9, 0)
KINDS = {"awq": Int4Linear, "fp8 blocks": Float8Linear}


def layers(*kinds):
    """Return layers that are nothing but of these kinds; those in FP8 round all rows."""
    made = [kind.__new__(kind) for kind in kinds]
    for layer in made:
        if isinstance(layer, Float8Linear):
            layer.rounds = lambda _: True
    return made


@pytest.mark.parametrize("kind", [CublasLinear, SkinnyLinear])
def test_half_precision_wins_from_seventeen_sequences_on(kind):
    assert least_decodes(layers(kind, kind), CUDA, HOPPER) == 17


@pytest.mark.parametrize(("kind", "least"), [(Int4Linear, 1), (Float8Linear, 8)])
def test_fewer_bits_win_sooner(kind, least):
    assert least_decodes(layers(kind, kind), CUDA, HOPPER) == least


def test_half_precision_wins_from_the_first_on_by_hoppers_kernels():
    """Which wait for their turn when their weight is asked for."""
    made = layers(SkinnyLinear, SkinnyLinear)
    for layer in made:
        layer.has_hopper = True
    assert least_decodes(made, CUDA, HOPPER) == 1


@pytest.mark.parametrize("kind", [Int4Linear, SkinnyLinear])
def test_one_layer_that_was_not_measured_leaves_all_steps_plain(kind, monkeypatch):
    monkeypatch.setattr(decode_launches, "LEAST_DECODES", {**LEAST_DECODES, Float8Linear: None})
    assert least_decodes(layers(kind, Float8Linear, kind), CUDA, HOPPER) is None


def test_the_layer_that_wins_last_has_the_word():
    """As where a checkpoint in 4 bits leaves some layers as they were."""
    assert least_decodes(layers(Int4Linear, SkinnyLinear, Int4Linear), CUDA, HOPPER) == 17


def test_a_layer_that_the_table_does_not_know_is_not_guessed_at():
    assert least_decodes([object()], CUDA, HOPPER) is None
    assert least_decodes([], CUDA, HOPPER) is None


@pytest.mark.parametrize(
    ("device", "capability"),
    [(CUDA, (8, 0)), (CUDA, (8, 9)), (CUDA, (10, 0)), (CUDA, (12, 0)), (CPU, HOPPER)],
    ids=str,
)
def test_other_devices_than_the_measured_one_are_served_plainly(device, capability):
    assert least_decodes(layers(CublasLinear), device, capability) is None


@pytest.mark.parametrize("stored", KINDS)
def test_models_are_told_by_their_layers(stored, tmp_path, monkeypatch):
    exact_float8(monkeypatch)
    kernels = TritonKernels(CPU, "float32", rounds_all=True)
    model = loaded(folder_of(tmp_path, stored), kernels)
    assert least_decodes(model.layer_linears, CUDA, HOPPER) == LEAST_DECODES[KINDS[stored]]
    monkeypatch.setattr(decode_launches, "LEAST_DECODES", {KINDS[stored]: 9})
    assert least_decodes(model.layer_linears, CUDA, HOPPER) == 9


def test_over_fp8_that_is_widened_for_few_rows_it_was_not_measured(tmp_path, monkeypatch):
    exact_float8(monkeypatch)
    model = loaded(folder_of(tmp_path, "fp8 blocks"), TritonKernels(CPU, "float32"))
    assert least_decodes(model.layer_linears, CUDA, HOPPER) is None


def test_of_two_copies_the_one_that_serves_decodes_counts(tmp_path, monkeypatch):
    kernels = TritonKernels(CPU, "float32")
    model = with_copy(loaded(folder_of(tmp_path, "awq"), kernels), kernels, FORMATS["bf16"])
    assert least_decodes(model.layer_linears, CUDA, HOPPER) == 1
    monkeypatch.setattr(decode_launches, "LEAST_DECODES", {Int4Linear: 9, CublasLinear: None})
    assert least_decodes(model.layer_linears, CUDA, HOPPER) == 9


def test_it_is_said_in_words():
    assert describe(None) == "plain"
    assert describe(1) == "dependent"
    assert describe(17) == "dependent from 17 sequences on"
