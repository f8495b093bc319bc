"""The switch of dependent launches; kernels compiled ahead show what they make of it."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tailrace.kernels import dependent_launch
from tailrace.kernels.dependent_launch import dependent_launches, has_dependent_launches

OFF, ON = {"DEPENDENT": False}, {"DEPENDENT": True, "launch_pdl": True}


def test_launches_are_plain_but_within_a_block():
    assert dependent_launch.launch_options() == OFF
    with dependent_launches():
        assert dependent_launch.launch_options() == ON
        with dependent_launches(on=False):
            assert dependent_launch.launch_options() == OFF
        assert dependent_launch.launch_options() == ON
    assert dependent_launch.launch_options() == OFF


def test_a_failure_within_the_block_ends_it():
    with pytest.raises(ValueError, match="no memory"), dependent_launches():
        raise ValueError("no memory")
    assert dependent_launch.launch_options() == OFF


def test_other_threads_launch_as_they_did():
    found = []
    with dependent_launches():
        thread = Thread(target=lambda: found.append(dependent_launch.launch_options()))
        thread.start()
        thread.join()
    assert found == [OFF]


@pytest.mark.parametrize(
    ("device", "capability", "known"),
    [
        ("cuda", (8, 0), False),
        ("cuda", (8, 9), False),
        ("cuda", (9, 0), True),
        ("cuda", (10, 0), True),
        ("cpu", (9, 0), False),  # what the interpreter passes for
    ],
)
def test_hopper_and_later_know_them(device, capability, known):
    assert has_dependent_launches(torch.device(device), capability) == known
