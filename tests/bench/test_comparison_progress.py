import io

from rich.console import Console

from tailrace.bench.comparison_progress import ComparisonProgress, ComparisonState
from tailrace.bench.load import LoadState
from tailrace.bench.records import Record
from tailrace.clock import VirtualClock


def record(index, ttft_s, status="ok"):
    return Record(
        index=index,
        scheduled_s=1.0,
        planned_input_tokens=1,
        planned_output_tokens=1,
        status=status,
        first_token_s=1.0 + ttft_s,
        finished_s=1.5 + ttft_s,
    )


def state_with_a_trial():
    state = ComparisonState("A [bold]against[/] B", ("a", "b"), 3, started_s=0.0)
    state.contender, state.pair, state.phase = "b", 1, "search"
    state.load_text, state.trial_s, state.trials = "1.50 requests/s", 30.0, 7
    state.load = LoadState(total=40)
    state.load.started_s = 100.0
    state.load.sent, state.load.in_flight = 12, 2
    state.load.done += [record(i, 0.2) for i in range(9)] + [record(9, 0.3, "timeout")]
    state.stages_done = 2
    return state


def shown(state, *, terminal, clock):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    return ComparisonProgress(state, console, clock=clock), console


def test_a_line_says_where_it_is_and_how_it_goes():
    view, _ = shown(state_with_a_trial(), terminal=False, clock=VirtualClock(110.0))
    line = view.line()
    for part in ("pair 2/3", "b search", "1.50 requests/s", "12/40", "in flight 2", "failed 1"):
        assert part in line
    assert "TTFT p95 failed" in line
    assert "about 154 s left" in line or "min left" in line


def test_between_trials_a_line_says_what_goes_on():
    state = state_with_a_trial()
    view, _ = shown(state, terminal=False, clock=VirtualClock(110.0))
    view.activity("making prompts")
    assert state.load is None
    assert "making prompts" in view.line()


def test_the_panel_shows_percentiles_and_names_as_they_are():
    state = state_with_a_trial()
    view, console = shown(state, terminal=True, clock=VirtualClock(110.0))
    console.print(view.panel())
    text = console.file.getvalue()
    for part in ("A [bold]against[/] B", "pair 2 of 3", "P95", "200 ms"):
        assert part in text


def test_the_time_left_is_judged_by_the_stays_so_far():
    state = ComparisonState("t", ("a", "b"), 3, started_s=0.0)
    assert state.left_s(50.0) is None
    state.stages_done = 3
    # Three and about half of a stay took 350 s; two and a half are left.
    assert state.left_s(350.0) == 250.0
    # Stays taken from disk took no time, and say nothing.
    state.stages_kept = 3
    assert state.left_s(350.0) is None


def test_without_a_terminal_decisions_are_lines_of_their_own():
    state = ComparisonState("t", ("a",), 1, started_s=0.0)
    view, console = shown(state, terminal=False, clock=VirtualClock())
    with view:
        view.tell("starting a")
        view.tell("starting a")
        view.activity("making prompts")
        view.decide("a holds [at] 1/s")
    assert console.file.getvalue().splitlines() == ["starting a", "a holds [at] 1/s"]


def test_with_a_terminal_it_draws_and_ends():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with ComparisonProgress(state_with_a_trial(), console, clock=VirtualClock(110.0)) as view:
        view.decide("decided")
    assert "decided" in console.file.getvalue()
