import random
from concurrent.futures import Future
from types import SimpleNamespace

from tailrace.clock import VirtualClock
from tailrace.engine.late_binding import LateBinding
from tests.engine.test_engine import make_bench, request


def serve(binding: LateBinding, steps: int, error: float, seed: int = 1) -> float:
    """Run steps whose time is predicted within `error`; return the device's share of idle time."""
    draw = random.Random(seed)
    idle_s = busy_s = 0.0
    for _ in range(steps):
        predicted_s = draw.uniform(0.01, 0.04)
        took_s = predicted_s * (1 + draw.uniform(-error, error))
        host_s = draw.uniform(0.001, 0.002)
        bound_s = max(0.0, binding.due_s(0.0, predicted_s)) + host_s
        gap_s = max(0.0, bound_s - took_s)
        binding.observe(device_s=took_s, idle_s=gap_s, host_s=host_s)
        idle_s, busy_s = idle_s + gap_s, busy_s + took_s
    return idle_s / busy_s


def test_good_predictions_let_it_wait_for_most_of_a_step_at_no_cost():
    binding = LateBinding()
    assert serve(binding, 500, error=0.05) < 0.001
    assert binding.due_s(10.0, 0.03) > 10.0 + 0.6 * 0.03


def test_bad_predictions_make_it_bind_early_instead_of_leaving_the_device_idle():
    assert serve(LateBinding(), 1000, error=0.6) < 0.02


def test_a_device_that_is_idle_whatever_is_done_ends_the_waiting():
    binding = LateBinding()
    for _ in range(10):
        binding.observe(device_s=0.02, idle_s=0.005, host_s=0.001)
    assert binding.margin == 1.0
    assert binding.due_s(10.0, 0.02) < 10.0


def test_a_slow_turn_of_the_host_is_remembered_for_a_while():
    binding = LateBinding()
    binding.observe(device_s=0.02, idle_s=0.0, host_s=0.01)
    for _ in range(5):
        binding.observe(device_s=0.02, idle_s=0.0, host_s=0.001)
    late = binding.due_s(0.0, 0.03)
    for _ in range(200):
        binding.observe(device_s=0.02, idle_s=0.0, host_s=0.001)
    assert binding.due_s(0.0, 0.03) > late + 0.005


def test_an_engine_holds_its_next_step_only_while_one_runs_whose_end_is_predicted():
    clock = VirtualClock(100.0)
    bench = make_bench(clock=clock, late=True)
    assert bench.engine.hold_s() == 0.0
    bench.engine.add(request("r-0", [1, 2, 3], 8))
    bench.step()
    assert bench.engine.hold_s() == 0.0  # nothing was fitted

    fitted = make_bench(clock=clock, late=True, predicted_s=0.1)
    fitted.engine.add(request("r-0", [1, 2, 3], 8))
    fitted.step()
    held_s = fitted.engine.hold_s()
    assert 0.05 < held_s < 0.08
    clock.advance(held_s + 0.001)
    assert fitted.engine.hold_s() == 0.0
    fitted.run()
    assert fitted.reasons == {"r-0": "length"}


def test_nothing_is_held_once_the_step_has_ended_or_where_nobody_could_start():
    bench = make_bench(clock=VirtualClock(100.0), late=True, predicted_s=0.1)
    results = []

    def submit(function, *args):
        results.append(Future())
        return results[-1]

    bench.engine._submit = submit
    bench.engine.add(request("r-0", [1, 2, 3], 8))
    bench.step()
    assert bench.engine.hold_s() > 0.05
    results[0].set_result(running := SimpleNamespace(is_done=False))  # queued on a device
    assert bench.engine.hold_s() > 0.05
    running.is_done = True
    assert bench.engine.hold_s() == 0.0
    running.is_done = False
    bench.engine.scheduler._free_slots.clear()
    assert bench.engine.hold_s() == 0.0


def test_nothing_is_held_after_a_step_that_failed():
    bench = make_bench(clock=VirtualClock(100.0), late=True, predicted_s=0.1)
    failed = Future()
    failed.set_exception(RuntimeError())
    bench.engine._submit = lambda function, *args: failed
    bench.engine.add(request("r-0", [1, 2, 3], 8))
    bench.step()
    assert bench.engine.hold_s() == 0.0


def test_without_late_binding_nothing_is_held():
    bench = make_bench(clock=VirtualClock(100.0), predicted_s=0.1)
    bench.engine.add(request("r-0", [1, 2, 3], 8))
    bench.step()
    assert bench.engine.hold_s() == 0.0
