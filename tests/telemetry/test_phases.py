"""The phases' names, and their sum."""

import pytest

from tailrace.telemetry.phases import PHASES, Phases


def test_each_phase_has_a_field_in_the_same_order():
    assert Phases.__struct_fields__ == tuple(f"{name}_s" for name in PHASES)


def test_the_sum_is_of_all_of_them():
    seconds = {f"{name}_s": 2.0**number for number, name in enumerate(PHASES)}
    phases = Phases(**seconds)
    assert phases.total_s == 2 ** len(PHASES) - 1
    assert phases.by_name()["queue"] == seconds["queue_s"]
    assert Phases().total_s == pytest.approx(0)
