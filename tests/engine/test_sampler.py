import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tailrace.engine import sampler as sampler_module
from tailrace.engine.sampler import Sampler, score_rows, uniform
from tailrace.errors import EngineError
from tailrace.types import SamplingParams

EOS = 2


def params(**given_params) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, **given_params})


def make(vocab_size: int, num_slots: int = 16) -> Sampler:
    return Sampler(num_slots, vocab_size, [EOS], 0)


def draw(row, sampling, *, prompt=(), output=()):
    """One token from one row, by a fresh sampler."""
    sampler = make(len(row), 1)
    sampler.admit(0, sampling, prompt, output)
    sampled = sampler.sample(torch.tensor([list(row)], dtype=torch.float32), [0])
    assert not sampled.errors
    return int(sampled.token_ids[0])


# ---- The oracle: one row, plain float64, straight from the docstring of SamplingParams.


def oracle_logits(row, p, prompt=(), output=()):
    x = np.array(row, dtype=np.float64)
    for token, bias in p.logit_bias.items():
        x[token] += bias
    if len(output) < p.min_tokens:
        x[[EOS, *p.stop_token_ids]] = -np.inf
    for token in {*prompt, *output}:
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    for token in set(output):
        x[token] -= p.frequency_penalty * list(output).count(token) + p.presence_penalty
    return x


def oracle_weights(x, p, nudge=0.0):
    """What the filters leave; `nudge` moves their borders by a rounding error's worth."""
    w = np.exp((x - x.max()) / p.temperature)
    if 0 < p.top_k < len(w):
        w[w < np.sort(w)[::-1][p.top_k - 1] * (1 - abs(nudge))] = 0
    if p.top_p < 1:
        above = np.array([w[w > v * (1 + abs(nudge))].sum() for v in w])
        w[(above >= (p.top_p + nudge) * w.sum()) & (w < w.max())] = 0
    w[w < p.min_p * (1 + nudge) * w.max()] = 0
    return w


def oracle_tokens(row, p, prompt=(), output=()):
    """The tokens that are right up to rounding: nearly always one."""
    x = oracle_logits(row, p, prompt, output)
    if p.temperature == 0:
        return {int(i) for i in np.flatnonzero(x >= x.max() - 1e-5)}
    tokens = set()
    for nudge in (-1e-6, 0.0, 1e-6):
        sums = oracle_weights(x, p, nudge).cumsum()
        for shift in (-1e-5, 0.0, 1e-5):
            aim = np.clip(uniform(p.seed, len(output)) + shift, 0, 1 - 1e-12) * sums[-1]
            tokens.add(int(np.searchsorted(sums, aim, side="right")))
    return tokens


@st.composite
def cases(draw):
    vocab_size = draw(st.sampled_from([5, 17, 40, 129, 300]))
    # A byte each: hundreds of numbers drawn one by one take most of the test's time.
    row_bytes = draw(st.binary(min_size=vocab_size, max_size=vocab_size))
    row = [((byte + 12) % 25 - 12) / 4 for byte in row_bytes]  # coarse: ties are frequent
    ids = st.integers(0, vocab_size - 1)
    sampling = params(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 3, 4, 20, vocab_size, vocab_size + 9])),
        top_p=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.4, 1.0])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.6, -0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-100.0, -1.0, 2.5]), max_size=3)),
        stop_token_ids=tuple(draw(st.lists(ids, max_size=2))),
        min_tokens=draw(st.integers(0, 4)),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
    )
    return row, sampling, draw(st.lists(ids, max_size=6)), draw(st.lists(ids, max_size=6))


def check_scores(row, scored, token, top_n):
    x = np.array(row)
    expected = x - x.max() - math.log(np.exp(x - x.max()).sum())
    assert scored.token_id == token
    assert scored.logprob == pytest.approx(expected[token], abs=1e-4)
    assert scored.rank == 1 + int((x > x[token]).sum())
    assert len(scored.top_ids) == len(scored.top_logprobs) == min(top_n, len(row))
    assert scored.top_logprobs == pytest.approx(np.sort(expected)[::-1][:top_n], abs=1e-4)
    assert [expected[i] for i in scored.top_ids] == pytest.approx(scored.top_logprobs, abs=1e-4)
    assert len(set(scored.top_ids)) == len(scored.top_ids)


@settings(max_examples=300, deadline=None)
@given(
    batch=st.lists(cases(), min_size=1, max_size=4),
    widths=st.sampled_from([(3, 4096), (3, 20), (256, 4096)]),
)
def test_every_row_draws_what_the_oracle_draws(batch, widths):
    vocab_size = len(batch[0][0])
    batch = [case for case in batch if len(case[0]) == vocab_size]
    sampler = make(vocab_size)
    slots = [3 * i + 1 for i in range(len(batch))]
    for slot, (_, sampling, prompt, output) in zip(slots, batch, strict=True):
        sampler.admit(slot, sampling, prompt, output)
    logits = torch.tensor([row for row, *_ in batch], dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_CANDIDATES", widths[0])
        patch.setattr(sampler_module, "_MORE_CANDIDATES", widths[1])
        sampled = sampler.sample(logits, slots)
    assert sampled.token_ids.dtype == torch.int64
    for i, (row, sampling, prompt, output) in enumerate(batch):
        x = oracle_logits(row, sampling, prompt, output)
        if np.isneginf(x).all():
            assert "no token can be drawn" in sampled.errors[i]
            continue
        assert int(sampled.token_ids[i]) in oracle_tokens(row, sampling, prompt, output)
        if sampling.logprobs is None:
            assert sampled.logprobs[i] is None
        else:
            check_scores(row, sampled.logprobs[i], int(sampled.token_ids[i]), sampling.logprobs)


POWERS_OF_TWO = st.sampled_from([1.0, 0.5, 0.25, 0.125, 0.0625, 0.0])


@settings(max_examples=300, deadline=None)
@given(
    rest=st.lists(POWERS_OF_TWO, min_size=1, max_size=11),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    min_p=st.sampled_from([0.0, 0.125, 0.25, 1.0]),
    candidates=st.integers(1, 12),
)
# top_p is a share of what top_k left; of everything without top_k; and of the k-th weight's ties.
@example(rest=[0.5, *[0.25] * 8], top_k=2, top_p=0.5, min_p=0.0, candidates=9)
@example(rest=[0.5, *[0.25] * 8], top_k=0, top_p=0.5, min_p=0.0, candidates=3)
@example(rest=[0.5] * 4, top_k=2, top_p=0.5, min_p=0.0, candidates=2)
def test_thresholds_are_exact_on_ties_and_borders_however_few_the_candidates(
    rest, top_k, top_p, min_p, candidates
):
    """Sums of powers of two are exact, so here no tolerance hides a border."""
    weights = np.array([*rest, 1.0])
    kept = weights >= np.sort(weights)[::-1][min(top_k or len(weights), len(weights)) - 1]
    mass = weights[kept].sum()
    before = np.array([weights[weights > w].sum() for w in weights])
    kept &= (top_p >= 1) | (before < top_p * mass) | (weights == 1)
    kept &= weights >= min_p
    state = sampler_module._Slot(params(top_k=top_k, top_p=top_p, min_p=min_p), 0, 0)
    rows = torch.tensor(np.array([weights]), dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_CANDIDATES", candidates)
        threshold = float(sampler_module._thresholds(rows, [state]))
    has_weight = weights > 0
    assert ((weights >= threshold) & has_weight).tolist() == (kept & has_weight).tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        params(seed=1),
        params(seed=1, temperature=0.7, top_p=0.95),
        params(seed=1, temperature=3.0, top_p=0.9),  # its nucleus lies beyond the candidates
        params(seed=1, top_k=40),
        params(seed=1, top_k=400, top_p=0.8),
        params(seed=1, min_p=0.02),
        params(seed=1, frequency_penalty=0.8, repetition_penalty=1.2),
        params(seed=1, min_tokens=5, logit_bias={7: 6.0}),
    ],
)
def test_a_stream_is_the_same_in_any_company_order_and_slot_and_after_a_preemption(sampling):
    vocab_size, steps = 1000, 12
    logits = torch.randn(steps, vocab_size, generator=torch.Generator().manual_seed(5)) * 2
    alone = make(vocab_size, 1)
    alone.admit(0, sampling, [4, 5], [])
    expected = [
        int(alone.sample(logits[i : i + 1].clone(), [0]).token_ids[0]) for i in range(steps)
    ]
    assert len(set(expected)) > 1

    crowd = make(vocab_size)
    others = [params(), params(top_k=3), params(temperature=0), params(top_p=0.5, top_k=999)]
    for slot in range(16):
        crowd.admit(slot, others[slot % 4], [1], [])
    slot, got = 11, []
    crowd.admit(slot, sampling, [4, 5], [])
    for step in range(steps):
        if step == 6:  # preempted, and back in another slot
            crowd.release(slot)
            slot = 2
            crowd.admit(slot, sampling, [4, 5], got)
        order = [s for s in range(16) if s not in (slot, 11)]
        order.insert(step % len(order), slot)
        batch = torch.randn(len(order), vocab_size, generator=torch.Generator().manual_seed(step))
        batch[order.index(slot)] = logits[step]
        sampled = crowd.sample(batch, order)
        got.append(int(sampled.token_ids[order.index(slot)]))
    assert got == expected


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_the_threshold_is_the_same_number_however_many_candidates_find_it(scale, monkeypatch):
    """To the bit: in the first candidates, in some more, and in a whole row."""
    vocab_size = 3000
    filters = [
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"min_p": 0.01},
        {"min_p": 1e-4},
        {"top_k": 30},
        {"top_k": 2999},
        {"top_k": 700, "top_p": 0.9},
        {"top_p": 0.999, "min_p": 1e-3},
        {"top_k": 64, "top_p": 0.5, "min_p": 0.1},
    ]
    logits = torch.randn(len(filters), vocab_size, generator=torch.Generator().manual_seed(6))
    logits = (logits * scale * 4).round() / 4  # ties are frequent
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    states = [sampler_module._Slot(params(**given_params), 0, 0) for given_params in filters]
    found = []
    for widths in [(1, 2), (8, 64), (8, 4096), (256, 1024), (vocab_size, 4096)]:
        monkeypatch.setattr(sampler_module, "_CANDIDATES", widths[0])
        monkeypatch.setattr(sampler_module, "_MORE_CANDIDATES", widths[1])
        found.append(sampler_module._thresholds(weights, states)[:, 0].tolist())
    assert all(thresholds == found[0] for thresholds in found)


def test_a_row_of_the_full_vocabulary_is_the_same_alone_and_among_sixteen():
    """To the bit, odd length and threads included: weights, not only the tokens they lead to."""
    vocab_size = 49153
    logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(7)) * 2
    sampling = [params(seed=i, temperature=0.7, top_p=0.95, logprobs=3) for i in range(16)]
    together = make(vocab_size)
    for slot in range(16):
        together.admit(slot, sampling[slot], [], [])
    crowd = together.sample(logits.clone(), range(16))
    for slot in (0, 7, 15):
        alone = make(vocab_size)
        alone.admit(0, sampling[slot], [], [])
        single = alone.sample(logits[slot : slot + 1].clone(), [0])
        assert int(single.token_ids[0]) == int(crowd.token_ids[slot])
        assert single.logprobs[0] == crowd.logprobs[slot]


@pytest.mark.parametrize(
    ("sampling", "candidates"),
    [
        (params(), 256),
        (params(temperature=0.5), 256),
        (params(top_k=20), 256),
        (params(top_p=0.8), 256),
        (params(top_p=0.8), 4),
        (params(temperature=1.5, top_k=100, top_p=0.9, min_p=0.05), 256),
    ],
)
def test_draws_follow_the_filtered_distribution(sampling, candidates, monkeypatch):
    """Chi-square over 8,000 fixed seeds: the outcome is the same at every run."""
    monkeypatch.setattr(sampler_module, "_CANDIDATES", candidates)
    row = torch.randn(200, generator=torch.Generator().manual_seed(1)) * 2
    expected = oracle_weights(row.double().numpy(), sampling)
    expected /= expected.sum()
    counts = np.zeros(200)
    sampler, rounds, width = make(200, 500), 16, 500
    for round_ in range(rounds):
        for slot in range(width):
            seeded = {f: getattr(sampling, f) for f in ("temperature", "top_k", "top_p", "min_p")}
            sampler.admit(slot, params(**seeded, seed=round_ * width + slot), [], [])
        ids = sampler.sample(row.repeat(width, 1), range(width)).token_ids.numpy()
        counts += np.bincount(ids, minlength=200)
    total = rounds * width
    assert counts[expected == 0].sum() == 0
    common = expected * total >= 5
    rest = ~common & (expected > 0)
    seen, due = counts[common], expected[common] * total
    if rest.any():
        seen, due = (
            np.append(seen, counts[rest].sum()),
            np.append(due, expected[rest].sum() * total),
        )
    freedom = len(due) - 1
    chi2 = ((seen - due) ** 2 / due).sum()
    # Far beyond any chance (mean = freedom, deviation = sqrt(2 x freedom)), far below any bug.
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_the_uniform_numbers_are_those_of_the_published_splitmix64():
    # Seed 0 of the reference implementation starts with these three.
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [uniform(0, i) for i in range(3)] == [(v >> 11) / 2**53 for v in published]
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    assert uniform(1, 0) != uniform(2, 0)


@pytest.mark.parametrize("edge", [0.0, 1 - 2**-53, 0.5])
@pytest.mark.parametrize("vocab_size", [3, 128, 129, 1000])
def test_a_token_of_no_weight_is_never_drawn_at_the_ends_of_the_distribution(edge, vocab_size):
    weights = torch.zeros(vocab_size, vocab_size)
    weights[range(vocab_size), range(vocab_size)] = torch.logspace(-38, 0, vocab_size)
    draws = torch.full((vocab_size,), edge, dtype=torch.float64)
    chosen = sampler_module._invert(weights, draws)
    assert chosen.tolist() == list(range(vocab_size))


def test_an_aim_that_rounding_put_at_or_beyond_the_total_meets_the_last_token_of_weight():
    sums = torch.tensor([[0.0, 0.25, 1.0, 1.0]], dtype=torch.float64)
    for aim in (0.25, 1.0, 1.5):
        aims = torch.tensor([[aim]], dtype=torch.float64)
        assert sampler_module._first_above(sums, aims).tolist() == [[2]]


def test_greedy_takes_the_lowest_id_on_a_tie():
    row = [0.0, 3.0, 1.0, 3.0, 3.0]
    assert draw(row, params(temperature=0)) == 1
    assert draw(row, params(temperature=0, logit_bias={1: -1.0})) == 3
    wide = [0.0] * 5000
    wide[4097] = wide[4999] = 1.0
    assert draw(wide, params(temperature=0)) == 4097


@pytest.mark.parametrize(
    "strict", [{"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-6}]
)
def test_the_strictest_filters_leave_the_most_likely_token(strict):
    row = torch.randn(500, generator=torch.Generator().manual_seed(3)).tolist()
    for seed in range(20):
        assert draw(row, params(seed=seed, **strict)) == int(np.argmax(row))


def test_a_temperature_that_float32_cannot_hold_is_no_nan():
    assert draw([0.0, 2.0, 2.5], params(seed=0, temperature=1e-60)) == 2
    hot = [draw([-math.inf, 9.0, 1.0], params(seed=i, temperature=1e60)) for i in range(40)]
    assert set(hot) == {1, 2}


@pytest.mark.parametrize("temperature", [math.inf, math.nan, -0.5])
def test_a_temperature_that_means_nothing_fails_its_own_request_only(temperature):
    sampler = make(4, 2)
    sampler.admit(0, params(temperature=temperature), [], [])
    sampler.admit(1, params(temperature=0), [], [])
    sampled = sampler.sample(torch.tensor([[-math.inf, 1.0, 2.0, 0.0]] * 2), [0, 1])
    assert sampled.errors == {0: f"temperature {temperature}: must be finite and at least 0"}
    assert int(sampled.token_ids[1]) == 2


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {}, {"top_p": 0.9}, {"temperature": 2}])
def test_a_bias_against_every_token_but_one_leaves_that_one(sampling):
    row = torch.randn(300, generator=torch.Generator().manual_seed(8)).tolist()
    bias = {i: -100.0 for i in range(300) if i != 123}
    for seed in range(10):
        assert draw(row, params(seed=seed, logit_bias=bias, **sampling)) == 123


def test_top_k_beyond_the_vocabulary_keeps_all():
    row = [0.0, 0.1, 0.2]
    for seed in range(30):
        assert draw(row, params(seed=seed, top_k=10**9)) == draw(row, params(seed=seed))


@pytest.mark.parametrize(
    "sampling", [params(temperature=0), params(), params(top_p=0.9), params(top_k=5)]
)
def test_a_row_of_minus_infinities_but_one_draws_that_one(sampling):
    row = [-math.inf] * 300
    row[170] = -5.0
    assert draw(row, sampling) == 170


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "sampling", [params(temperature=0), params(seed=1), params(seed=1, top_p=0.5)]
)
def test_a_broken_row_is_an_error_of_its_own_and_its_stream_stands_still(bad, sampling):
    sampler, fresh = make(50), make(50)
    good = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    for slot in range(3):
        sampler.admit(slot, sampling, [], [])
        fresh.admit(slot, sampling, [], [])
    broken = good.clone()
    broken[1, 7] = bad
    sampled = sampler.sample(broken, [0, 1, 2])
    assert list(sampled.errors) == [1]
    assert "not finite" in sampled.errors[1]
    assert int(sampled.token_ids[1]) == 0
    whole = fresh.sample(good.clone(), [0, 1, 2]).token_ids
    assert sampled.token_ids[[0, 2]].tolist() == whole[[0, 2]].tolist()
    assert int(sampler.sample(good[1:2].clone(), [1]).token_ids[0]) == int(whole[1])


def test_a_row_without_any_possible_token_is_an_error_even_if_it_asked_for_logprobs():
    sampler = make(3)
    sampler.admit(0, params(temperature=0, logprobs=1), [], [])
    sampler.admit(1, params(min_tokens=1, stop_token_ids=(0, 1), logprobs=1), [], [])
    logits = torch.zeros(2, 3)
    logits[0] = -math.inf
    sampled = sampler.sample(logits, [0, 1])
    assert set(sampled.errors) == {0, 1}
    assert sampled.logprobs == [None, None]


def test_min_tokens_holds_back_eos_and_stop_ids_until_reached():
    sampler = make(6)
    row = torch.tensor([[0.0, 1.0, 9.0, 8.0, 2.0, 1.0]])
    sampler.admit(0, params(temperature=0, min_tokens=2, stop_token_ids=(3, 77)), [], [])
    ids = [int(sampler.sample(row.clone(), [0]).token_ids[0]) for _ in range(3)]
    assert ids == [4, 4, EOS]
    sampler.admit(0, params(temperature=0, min_tokens=2, stop_token_ids=(3,)), [], [4])
    ids = [int(sampler.sample(row.clone(), [0]).token_ids[0]) for _ in range(2)]
    assert ids == [4, EOS]


def test_penalties_count_sampled_tokens_and_a_slots_next_owner_starts_clean():
    sampler = make(4)
    row = torch.tensor([[3.0, 2.6, 0.0, 2.2]])
    sampling = params(temperature=0, frequency_penalty=0.5)
    sampler.admit(0, sampling, [0, 0, 0], [])  # the prompt does not count here
    ids = [int(sampler.sample(row.clone(), [0]).token_ids[0]) for _ in range(4)]
    assert ids == [0, 1, 0, 3]
    sampler.admit(0, sampling, [], [])
    assert int(sampler.sample(row.clone(), [0]).token_ids[0]) == 0
    sampler.admit(0, params(temperature=0, repetition_penalty=2.0), [0], [])
    ids = [int(sampler.sample(row.clone(), [0]).token_ids[0]) for _ in range(3)]
    assert ids == [1, 3, 0]


def test_logprobs_are_those_of_the_raw_logits():
    row = [1.0, 5.0, 2.0, 0.5]
    sampler = make(4)
    sampler.admit(0, params(temperature=0, logit_bias={1: -100.0}, logprobs=2), [], [])
    sampler.admit(1, params(temperature=0, logprobs=0), [], [])
    sampled = sampler.sample(torch.tensor([row, row]), [0, 1])
    assert sampled.token_ids.tolist() == [2, 1]
    check_scores(row, sampled.logprobs[0], 2, 2)
    assert sampled.logprobs[0].rank == 2
    assert sampled.logprobs[0].top_ids == [1, 2]
    check_scores(row, sampled.logprobs[1], 1, 0)


def test_equally_likely_tokens_are_listed_by_id_whatever_a_neighbour_asks_for():
    vocab_size = 5000
    row = torch.zeros(vocab_size)
    row[[300, 100, 4000, 200]] = 1.0
    sampler = make(vocab_size)
    for neighbour in (None, 0, 3, 20):
        sampler.admit(0, params(temperature=0, logprobs=2), [], [])
        sampler.admit(1, params(temperature=0, logprobs=neighbour), [], [])
        sampled = sampler.sample(row.repeat(2, 1), [0, 1])
        assert sampled.logprobs[0].token_id == 100
        assert sampled.logprobs[0].top_ids == [100, 200]
    assert sampled.logprobs[1].top_ids == [100, 200, 300, 4000, *range(16)]
    sampler.admit(0, params(temperature=0, logprobs=4), [], [])  # the tie ends at the border
    alone = sampler.sample(row[None].clone(), [0])
    assert alone.logprobs[0].top_ids == [100, 200, 300, 4000]


class Calls(TorchDispatchMode):
    """Counts what is asked of the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("levels", [3, 10**6], ids=["tied", "distinct"])
def test_scores_ask_the_device_as_often_for_many_rows_as_for_two(levels):
    logits = torch.randint(levels, (64, 500), generator=torch.Generator().manual_seed(1)).float()
    asked = []
    for rows in (2, 64):
        with Calls() as calls:
            score_rows(logits[:rows], torch.zeros(rows, dtype=torch.int64), [5, *[3] * (rows - 1)])
        asked.append(calls.count)
    assert asked[0] == asked[1]


@pytest.mark.parametrize("levels", [1, 2, 40, 400])
def test_scores_are_those_of_a_sort_by_likelihood_and_id(levels):
    logits = torch.randint(levels, (20, 300), generator=torch.Generator().manual_seed(levels))
    logits = logits.float()
    logits[3, 7:] = -math.inf
    tops = list(range(20))
    scored = score_rows(logits, torch.arange(20), tops)
    for row, (entry, count) in enumerate(zip(scored, tops, strict=True)):
        values = logits[row].tolist()
        wanted = sorted(range(300), key=lambda i, v=values: (-v[i], i))[:count]
        assert entry.top_ids == wanted
        exact = torch.log_softmax(logits[row], dim=-1).tolist()
        assert entry.top_logprobs == pytest.approx([exact[i] for i in wanted])
        assert (entry.token_id, entry.logprob) == (row, pytest.approx(exact[row]))
        assert entry.rank == 1 + sum(value > values[row] for value in values)


def test_a_number_of_logprobs_beyond_its_range_lists_all_or_none():
    sampler = make(3, 2)
    sampler.admit(0, params(temperature=0, logprobs=-1), [], [])
    sampler.admit(1, params(temperature=0, logprobs=9), [], [])
    sampled = sampler.sample(torch.tensor([[0.0, 2.0, 1.0]] * 2), [0, 1])
    assert [entry.top_ids for entry in sampled.logprobs] == [[], [1, 2, 0]]
    assert sampler.prompt_logprobs(torch.zeros(1, 3), torch.tensor([1]), -1)[0].top_ids == []


def test_prompt_logprobs_of_logits_that_are_not_finite_are_nan_and_no_crash():
    logits = torch.zeros(2, 6)
    logits[0, 3] = math.nan
    broken, whole = make(6).prompt_logprobs(logits, torch.tensor([1, 1]), 2)
    assert math.isnan(broken.logprob)
    assert whole.logprob == pytest.approx(-math.log(6))


def test_prompt_logprobs_score_the_given_tokens():
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(4))
    scored = make(20).prompt_logprobs(logits, torch.tensor([5, 0, 19]), 4)
    for row, entry, token in zip(logits.tolist(), scored, [5, 0, 19], strict=True):
        check_scores(row, entry, token, 4)
    assert make(20).prompt_logprobs(logits[:0], torch.tensor([], dtype=torch.int64), 4) == []


def test_requests_without_a_seed_draw_differently_but_a_replayed_run_repeats_itself():
    row = torch.zeros(8, 1000)
    runs = []
    for _ in range(2):
        sampler = make(1000)
        for slot in range(8):
            sampler.admit(slot, params(), [], [])
        runs.append(sampler.sample(row.clone(), range(8)).token_ids.tolist())
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 4


def test_penalty_tensors_exist_only_where_they_are_needed():
    sampler = make(1000)
    sampler.admit(0, params(), [1], [2])
    sampler.admit(1, params(presence_penalty=0.5), [1], [2])
    assert sampler._slots[0].counts is None
    assert sampler._slots[0].seen is None
    assert sampler._slots[1].counts.dtype == torch.int32
    sampler.release(1)
    assert sampler._slots[1] is None


def test_state_made_in_inference_mode_serves_outside_of_it_and_the_other_way_round():
    sampler = make(10)
    sampling = params(temperature=0, presence_penalty=1.0, repetition_penalty=1.1)
    with torch.inference_mode():
        sampler.admit(0, sampling, [1], [])
    sampler.sample(torch.zeros(1, 10), [0])
    sampler.admit(0, sampling, [1], [])
    with torch.inference_mode():
        sampler.sample(torch.zeros(1, 10), [0])


def test_wrong_use_is_an_error_with_the_value_and_the_limit():
    sampler = make(10, 2)
    with pytest.raises(EngineError, match="slot 1 is not admitted"):
        sampler.sample(torch.zeros(1, 10), [1])
    with pytest.raises(EngineError, match="slot 2: slots are 0 to 1"):
        sampler.admit(2, params(), [], [])
    with pytest.raises(EngineError, match="slots are 0 to 1"):
        sampler.release(-1)
    sampler.admit(0, params(), [], [])
    with pytest.raises(EngineError, match="vocabulary of 10"):
        sampler.sample(torch.zeros(1, 11), [0])


def test_a_logit_bias_outside_the_vocabulary_fails_its_own_request_only():
    sampler = make(10, 2)
    sampler.admit(0, params(temperature=0, logit_bias={10: 1.0}), [], [])
    sampler.admit(1, params(temperature=0), [], [])
    logits = torch.zeros(2, 10)
    logits[:, 4] = 1.0
    sampled = sampler.sample(logits, [0, 1])
    assert list(sampled.errors) == [0]
    assert "10 is no token id; ids are 0 to 9" in sampled.errors[0]
    assert int(sampled.token_ids[1]) == 4
