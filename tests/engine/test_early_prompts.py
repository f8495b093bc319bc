"""Work on prompts that are still arriving: exact, private, bounded, and behind everybody else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.engine.early_prompts import EARLY_SLOTS
from tailrace.types import GrowPrompt, ReserveKv
from tests.engine.test_engine import CONTEXT, make_bench, prompts, request
from tests.support.fake_runner import expected_output


def grow(bench, request_id, start, ids, lifetime_s=30.0):
    bench.engine.grow(GrowPrompt(request_id, start, list(ids), lifetime_s))


def rest(bench, limit=200):
    """Step until nothing can be done any more."""
    for _ in range(limit):
        if not bench.engine.has_work:
            bench.engine.scheduler.early.check_integrity()
            return
        bench.step()
    raise AssertionError(f"still at work after {limit} steps")


def computed(bench):
    """Positions computed so far, and those of the last steps that ran."""
    return [(row.start, row.end) for rows in bench.runner.steps for row in rows]


def assert_empty(bench):
    bench.blocks.check_integrity()
    bench.engine.scheduler.early.check_integrity()
    assert bench.blocks.held_units == 0
    assert bench.blocks.leased_units == bench.blocks.reserved_units == 0
    assert not bench.engine.has_work


PROMPT = list(range(1, 41))


def test_a_request_goes_on_from_what_was_computed_while_it_arrived():
    bench = make_bench(num_blocks=64, budget=64)
    grow(bench, "r-0", 0, PROMPT[:20])
    rest(bench)
    grow(bench, "r-0", 20, PROMPT[20:30])
    rest(bench)
    assert computed(bench) == [(0, 16), (16, 24)]
    bench.engine.add(request("r-0", PROMPT, 5))
    bench.run()
    assert computed(bench)[2] == (24, 40)
    assert bench.tokens["r-0"] == expected_output(PROMPT, 5, frozenset())
    stats = bench.engine.stats()
    assert (stats.early_used_tokens_total, stats.early_dropped_tokens_total) == (24, 0)
    assert stats.prompt_tokens_total == 40
    assert_empty(bench)


def test_early_work_under_a_salt_finds_and_serves_only_that_salts_prefixes():
    bench = make_bench(num_blocks=64, budget=64)
    for index, salt in enumerate(("1:a:", "1:b:", "1:a:")):
        name = f"r-{index}"
        bench.engine.grow(GrowPrompt(name, 0, PROMPT, 30.0, salt))
        rest(bench)
        bench.engine.add(request(name, PROMPT, 3, cache_salt=salt))
        bench.run()
        assert bench.tokens[name] == expected_output(PROMPT, 3, frozenset())
    stats = bench.engine.stats()
    assert stats.early_dropped_tokens_total == 0
    assert stats.early_used_tokens_total == 64  # the third finds what the first has left
    assert_empty(bench)


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        ([9, *PROMPT[1:]], {}),
        (PROMPT[:10], {}),
        (PROMPT[-12:], {}),
        (PROMPT, {"cache_salt": "pepper"}),
        (PROMPT, {"prompt_logprobs": 0}),
    ],
    ids=["another", "shorter", "its end", "another salt", "scored"],
)
def test_a_request_that_is_not_what_it_seemed_starts_anew(ids, options):
    bench = make_bench(num_blocks=64, budget=64)
    grow(bench, "r-0", 0, PROMPT[:30])
    rest(bench)
    bench.engine.add(request("r-0", ids, 4, **options))
    bench.run()
    assert computed(bench)[:3] == [(0, 16), (16, 24), (0, len(ids))]
    assert bench.tokens["r-0"] == expected_output(ids, 4, frozenset())
    assert bench.engine.stats().early_dropped_tokens_total == 24
    assert_empty(bench)


def test_what_has_not_come_whole_cannot_be_found_by_others():
    bench = make_bench(num_blocks=64, budget=64)
    grow(bench, "r-0", 0, PROMPT)
    rest(bench)
    assert bench.blocks.lookup(PROMPT, "") == 0
    bench.engine.add(request("r-1", PROMPT, 1))
    bench.run()
    assert bench.engine.stats().cached_tokens_total == 0
    assert bench.engine.abort(["r-0"]) == []
    assert_empty(bench)


def test_further_choices_of_the_request_find_what_was_computed():
    bench = make_bench(num_blocks=64, budget=256)
    grow(bench, "r-0", 0, PROMPT)
    rest(bench)
    for index in range(2):
        bench.engine.add(request(f"r-{index}", PROMPT, 2))
    bench.run()
    assert computed(bench)[1:3] == [(32, 40), (32, 40)]
    assert_empty(bench)


def test_what_is_cached_is_not_computed_again_however_the_prompt_arrives():
    bench = make_bench(num_blocks=64, budget=64)
    bench.engine.add(request("r-0", PROMPT, 1))
    bench.run()
    for start in range(0, 40, 10):
        grow(bench, "r-1", start, PROMPT[start : start + 10])
        rest(bench)
    bench.engine.add(request("r-1", PROMPT, 3))
    bench.run()
    assert computed(bench)[1] == (32, 40)
    assert bench.tokens["r-1"] == expected_output(PROMPT, 3, frozenset())
    assert_empty(bench)


def test_the_last_known_token_is_left_to_sample_from():
    bench = make_bench(num_blocks=64, budget=64)
    grow(bench, "r-0", 0, PROMPT[:16])
    rest(bench)
    assert computed(bench) == [(0, 8)]
    bench.engine.add(request("r-0", PROMPT[:16], 2))
    bench.run()
    assert bench.tokens["r-0"] == expected_output(PROMPT[:16], 2, frozenset())


def test_nothing_arriving_overtakes_and_it_takes_a_quarter_of_a_step():
    bench = make_bench(num_blocks=128, budget=64, slots=1)
    grow(bench, "r-9", 0, PROMPT)
    bench.engine.add(request("r-0", [1] * 20, 3))
    bench.engine.add(request("r-1", [2] * 20, 3))
    bench.step()
    bench.step()
    assert all(len(rows) == 1 for rows in bench.runner.steps)  # r-1 waits: no early work
    rest(bench)
    early = [
        row
        for rows in bench.runner.steps
        for row in rows
        if row.slot >= 1  # beyond the batch
    ]
    assert [(row.start, row.end) for row in early] == [(0, 16), (16, 32)]
    assert not any(row.samples for row in early)
    bench.engine.abort(["r-9"])
    assert_empty(bench)


def test_it_takes_no_time_from_streams_that_have_a_target():
    class Strict:
        """A pace by which a step with decodes has time for nothing else."""

        def limit(self, load, prompts, most):
            return most

        def fitting(self, load, start, wanted):
            assert load.decodes
            return 0

    bench = make_bench(num_blocks=128, budget=64)
    bench.engine.scheduler.pace = Strict()
    grow(bench, "r-9", 0, PROMPT)
    bench.engine.add(request("r-0", [1], 6))
    rest(bench)
    mixed = [rows for rows in bench.runner.steps if len(rows) > 1]
    assert mixed == []
    assert bench.engine.scheduler.early.get("r-9").num_computed == 32


def test_it_holds_a_quarter_of_the_pool_and_never_borrows():
    bench = make_bench(num_blocks=32, budget=256)
    for index in range(3):
        grow(bench, f"r-{index}", 0, [index + 1] * 50)
        rest(bench)
        assert bench.engine.scheduler.early.units <= 8
        assert bench.blocks.lent_units == 0
    for index in range(3):
        bench.engine.add(request(f"r-{index}", [index + 1] * 50, 3))
    bench.run()
    for index in range(3):
        assert bench.tokens[f"r-{index}"] == expected_output([index + 1] * 50, 3, frozenset())
    assert_empty(bench)


def test_its_units_go_to_whoever_needs_them():
    bench = make_bench(num_blocks=16, budget=256, prefix_cache=False)
    grow(bench, "r-0", 0, PROMPT)
    rest(bench)
    assert bench.blocks.held_units == 4
    bench.engine.add(request("r-1", [1] * 60, 4))
    bench.engine.add(request("r-2", [2] * 55, 8))
    bench.step()
    assert bench.engine.stats().running_requests == 2
    assert bench.engine.scheduler.early.get("r-0") is None
    grow(bench, "r-0", 40, [7] * 10)  # a piece of what was given up
    bench.engine.add(request("r-0", [*PROMPT, *[7] * 10], 4))
    bench.run()
    assert bench.engine.scheduler.preemptions_total == 0
    assert bench.tokens["r-0"] == expected_output([*PROMPT, *[7] * 10], 4, frozenset())
    assert_empty(bench)


def test_requests_that_came_whole_and_hold_early_work_do_not_block_each_other():
    bench = make_bench(num_blocks=12, budget=256, slots=4, prefix_cache=False)
    for index in range(2):
        grow(bench, f"r-{index}", 0, [index + 1] * 20)
    rest(bench)
    bench.engine.add(request("r-1", [2] * 60, 30))
    bench.engine.add(request("r-0", [1] * 60, 30))
    bench.run()
    for index in range(2):
        wanted = expected_output([index + 1] * 60, 4, frozenset())
        assert bench.tokens[f"r-{index}"][:4] == wanted
    assert_empty(bench)


def test_early_work_ends_with_its_deadline_an_abort_or_a_refusal():
    bench = make_bench(num_blocks=64, budget=64)
    for name in ("r-0", "r-1", "r-2"):
        grow(bench, name, 0, PROMPT[:20], 5.0)
    rest(bench)
    held = bench.blocks.held_units
    assert held >= 2
    bench.engine.abort(["r-1"])
    assert bench.blocks.held_units < held
    assert bench.engine.add(request("r-2", [], 1)).finish_reason == "error"
    bench.engine._clock.advance(5.0)
    bench.engine.inspect_kv()
    assert_empty(bench)


def test_a_failing_step_gives_early_work_up_and_says_nothing():
    bench = make_bench(
        num_blocks=64,
        budget=64,
        fail_when=lambda rows: any(row.slot >= 4 for row in rows),
    )
    grow(bench, "r-0", 0, PROMPT)
    rest(bench)
    assert bench.reasons == {}
    assert_empty(bench)
    bench.engine.add(request("r-0", PROMPT, 2))
    bench.run()
    assert bench.reasons == {"r-0": "length"}


def test_pieces_that_do_not_fit_together_are_ignored():
    bench = make_bench(num_blocks=64, budget=64)
    grow(bench, "r-0", 5, PROMPT[5:])  # its beginning never came
    grow(bench, "r-1", 0, [10**6])
    grow(bench, "r-2", 0, [])
    grow(bench, "r-3", 0, [1] * CONTEXT)
    assert_empty(bench)
    grow(bench, "r-4", 0, PROMPT[:20])
    grow(bench, "r-4", 25, PROMPT[25:])
    rest(bench)
    assert len(bench.engine.scheduler.early.get("r-4").token_ids) == 20
    for index in range(5, 5 + 2 * EARLY_SLOTS):
        grow(bench, f"r-{index}", 0, PROMPT[:20])
    assert len(list(bench.engine.scheduler.early.holders)) == EARLY_SLOTS
    rest(bench)
    bench.engine.add(request("r-4", PROMPT, 1))
    bench.run()
    grow(bench, "r-4", 20, PROMPT[20:])
    bench.engine.abort([f"r-{index}" for index in range(40)])
    assert_empty(bench)


def test_a_budget_that_was_cut_below_a_unit_leaves_nothing_to_do():
    bench = make_bench(num_blocks=64, budget=64)
    grow(bench, "r-0", 0, PROMPT[:20])
    rest(bench)
    bench.engine.scheduler.token_budget = 4
    grow(bench, "r-0", 20, PROMPT[20:])
    assert not bench.engine.has_work
    bench.engine.add(request("r-0", PROMPT, 3))
    bench.run()
    assert bench.tokens["r-0"] == expected_output(PROMPT, 3, frozenset())


def test_a_lease_is_taken_over_by_early_work():
    bench = make_bench(num_blocks=64, budget=64)
    bench.engine.reserve(ReserveKv("r-0", 32, 5.0))
    assert bench.blocks.reserved_units == 4
    grow(bench, "r-0", 0, PROMPT)
    rest(bench)
    assert bench.blocks.reserved_units == 0
    assert bench.engine.scheduler.early.units == 5
    bench.engine.abort(["r-0"])
    assert_empty(bench)


jobs = st.tuples(
    prompts,
    st.integers(1, 20),  # most tokens
    st.integers(0, 12),  # the step of the first piece
    st.lists(st.integers(1, 12), max_size=4),  # lengths of pieces
    st.sampled_from(["same", "same", "same", "another", "salt", "gone", "late"]),
)


@settings(max_examples=120, deadline=None)
@given(
    jobs=st.lists(jobs, min_size=1, max_size=10),
    num_blocks=st.integers(8, 40),
    budget=st.integers(8, 80),
    slots=st.integers(1, 4),
    prefix_cache=st.booleans(),
    surprised=st.booleans(),
)
def test_output_is_the_models_whatever_was_computed_early(
    jobs, num_blocks, budget, slots, prefix_cache, surprised
):
    bench = make_bench(
        num_blocks=num_blocks,
        budget=budget,
        slots=slots,
        prefix_cache=prefix_cache,
        surprised=surprised,
    )
    plan = {}
    whole = {}
    for i, (prompt, most, begins, pieces, end) in enumerate(jobs):
        name, start, step = f"r-{i}", 0, begins
        for length in pieces:
            piece = prompt[start : start + length]
            if piece:
                plan.setdefault(step, []).append(("grow", name, start, piece))
            start, step = start + length, step + 1
        ids = [*prompt[:-1], prompt[-1] + 1] if end == "another" else prompt
        if end == "gone":
            plan.setdefault(step, []).append(("abort", name, 0, []))
            continue
        whole[name] = (ids, most)
        options = {"cache_salt": "x"} if end == "salt" else {}
        later = step + (15 if end == "late" else 0)
        plan.setdefault(later, []).append(("add", request(name, ids, most, **options), 0, []))
    last = max(plan)
    for step in range(3000):
        for what, about, start, piece in plan.get(step, []):
            if what == "grow":
                grow(bench, about, start, piece)
            elif what == "abort":
                bench.take(bench.engine.abort([about]))
            else:
                assert bench.engine.add(about) is None
        if step > last and not bench.engine.has_work:
            break
        bench.step()
        bench.engine.scheduler.early.check_integrity()
    else:
        raise AssertionError("not done")
    for name, (ids, most) in whole.items():
        context = min(CONTEXT, num_blocks * 8)
        assert bench.tokens[name] == expected_output(
            ids, min(most, context - len(ids)), frozenset()
        )
    assert_empty(bench)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_request_that_is_late_gives_up_what_was_computed_early_also_in_flight(steps):
    bench = make_bench(num_blocks=64, budget=64, predicted_s=1.0)
    grow(bench, "r-0", 0, PROMPT[:20])
    for _ in range(steps):
        bench.step()
    bench.engine.gate.max_ttft_s = 0.5
    late = bench.engine.add(request("r-0", PROMPT, 4))
    assert late.refusal == "first_token_late"
    rest(bench)
    assert bench.reasons == {}
    assert_empty(bench)


FRAMES = (16, 32, 64)


def whole(decodes, tokens):
    """Of a device that has captured steps of those prompt tokens, beside any decodes."""
    return max((size for size in FRAMES if size <= tokens), default=tokens)


def early_steps(bench):
    """Prompt tokens of requests, and those computed early, of each step with some of these."""
    steps = []
    for rows in bench.runner.steps:
        sizes = [(row.slot >= 4, row.end - row.start) for row in rows if row.end - row.start > 1]
        early = sum(size for is_early, size in sizes if is_early)
        if early:
            steps.append((sum(size for is_early, size in sizes if not is_early), early))
    return steps


def test_a_cut_of_what_arrives_fills_a_captured_size_together_with_other_prompts():
    """20 tokens beside a quarter of 160 would be 60 of a frame of 64; 32 are a frame."""
    bench = make_bench(num_blocks=256, budget=160)
    bench.engine.scheduler._whole_prompts = whole
    grow(bench, "r-9", 0, [3] * 60)
    bench.engine.add(request("r-0", [1] * 20, 1))
    rest(bench)
    # Of 12, whole units; of 40, a frame; what is left is not cut, and fits as it is.
    assert early_steps(bench) == [(20, 8), (0, 32), (0, 16)]


def test_what_arrives_is_not_cut_where_all_of_it_goes_into_the_step():
    bench = make_bench(num_blocks=256, budget=256)
    bench.engine.scheduler._whole_prompts = whole
    grow(bench, "r-9", 0, [3] * 50)
    rest(bench)
    assert early_steps(bench) == [(0, 48)]


def test_what_arrives_beside_streams_with_a_target_is_cut_to_time_and_then_to_a_size():
    """One decode costs 1.1 ms, a token 0.1 ms: 39 tokens are in time, 32 are a frame."""
    bench = make_bench(num_blocks=256, budget=256, target_s=0.0051)
    bench.engine.scheduler._whole_prompts = whole
    bench.engine.add(request("r-0", [1], 30))
    bench.step()
    grow(bench, "r-9", 0, [3] * 62)
    rest(bench)
    assert early_steps(bench) == [(0, 32), (0, 24)]


def test_what_arrives_is_left_out_of_a_step_whose_frame_is_full():
    bench = make_bench(num_blocks=256, budget=130)
    bench.engine.scheduler._whole_prompts = whole
    grow(bench, "r-9", 0, [3] * 60)
    bench.engine.add(request("r-0", [1] * 60, 1))
    rest(bench)
    assert early_steps(bench)[0][0] == 0
