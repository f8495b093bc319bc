from __future__ import annotations

import dataclasses
import math
from importlib import import_module

import numpy as np
import pytest
import torch

from tailrace.engine import sampler as engine_sampler
from tailrace.engine.sampler import Sampler
from tailrace.errors import EngineError
from tailrace.kernels.sampling import reference
from tailrace.kernels.sampling.rows import (
    EVERYTHING,
    MAX_VOCAB,
    NOT_FINITE,
    NOTHING_LEFT,
    Asked,
    SamplingRows,
)
from tailrace.types import SamplingParams
from tests.kernels.compare import assert_close

EOS = 2
INF = float("inf")


def params(**given):
    return SamplingParams(**{"max_tokens": 1000, "seed": 7, **given})


def mask_of(token_ids, vocab_size):
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class FakeGrammar:
    """Allows the same tokens for ever."""

    error = ""
    is_complete = False

    def __init__(self, mask):
        self._mask = mask

    def mask(self):
        return self._mask

    def take(self, token_id):
        pass

    def look_ahead(self):
        pass


class Rows:
    """Requests as the kernels take them, and as the engine's sampler does."""

    def __init__(self, requests, vocab_size, *, histories=None, allowed=None):
        self.requests = requests
        self.vocab_size = vocab_size
        self.histories = histories or [([], [])] * len(requests)
        self.allowed = allowed or {}
        # In another order than the rows.
        masked = sorted(self.allowed, reverse=True)
        self.masked = [masked.index(row) if row in masked else -1 for row in range(len(requests))]
        self.masks = torch.zeros(len(masked), -(-vocab_size // 32), dtype=torch.int32)
        for place, row in enumerate(masked):
            self.masks[place] = torch.from_numpy(mask_of(self.allowed[row], vocab_size))

    def rows(self, device="cpu") -> SamplingRows:
        asked = self.requests
        edits = [
            self._edits(p, len(out)) for p, (_, out) in zip(asked, self.histories, strict=True)
        ]
        starts = [0]
        for row in edits:
            starts.append(starts[-1] + len(row))
        flat = [entry for row in edits for entry in row]
        kept, history = self._history()

        def column(values, dtype):
            return torch.tensor(values, dtype=dtype, device=device)

        return SamplingRows(
            temperatures=column([p.temperature for p in asked], torch.float32),
            top_k=column([p.top_k for p in asked], torch.int32),
            top_p=column([p.top_p for p in asked], torch.float64),
            min_p=column([p.min_p for p in asked], torch.float32),
            seeds=column([p.seed for p in asked], torch.int64),
            positions=column([len(out) for _, out in self.histories], torch.int64),
            presence=column([p.presence_penalty for p in asked], torch.float32),
            frequency=column([p.frequency_penalty for p in asked], torch.float32),
            repetition=column([p.repetition_penalty for p in asked], torch.float32),
            history_rows=column(kept, torch.int32),
            history=history.to(device),
            edit_starts=column(starts, torch.int32),
            edit_ids=column([i for i, _ in flat], torch.int32),
            edit_values=column([v for _, v in flat], torch.float32),
            mask_rows=column(self.masked, torch.int32),
            masks=self.masks.to(device),
            wants_rank=column([p.logprobs is not None for p in asked], torch.int32),
        )

    def _edits(self, p, position):
        edits = dict(p.logit_bias)
        if position < p.min_tokens:
            edits |= dict.fromkeys({EOS, *p.stop_token_ids}, -INF)
        return list(edits.items())

    def _history(self):
        """Rows of the pool in another order than the requests."""
        count = len(self.requests)
        history = torch.zeros(count, self.vocab_size, dtype=torch.int32)
        kept = [-1] * count
        for row, (p, (prompt, output)) in enumerate(
            zip(self.requests, self.histories, strict=True)
        ):
            if (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0, 0, 1):
                continue
            kept[row] = count - 1 - row
            for token in prompt:
                history[kept[row], token] |= 1
            for token in output:
                history[kept[row], token] = (history[kept[row], token] + 2) | 1
        return kept, history

    def by_engine(self, logits):
        sampler = Sampler(len(self.requests), self.vocab_size, [EOS], 0)
        for slot, (p, (prompt, output)) in enumerate(
            zip(self.requests, self.histories, strict=True)
        ):
            grammar = None
            if slot in self.allowed:
                grammar = FakeGrammar(mask_of(self.allowed[slot], self.vocab_size))
            sampler.admit(slot, p, prompt, output, grammar)
        return sampler.sample(logits.float().clone(), list(range(len(self.requests))))


def make_logits(rows, vocab_size, spread=4.0):
    """Whole steps of 1/8, so that ties are frequent, and bfloat16 and float16 hold them."""
    return (torch.randn(rows, vocab_size) * spread * 8).round().clamp(-250, 250) / 8


@pytest.fixture(params=["reference", "triton"])
def draw(request):
    """Draw by either implementation; tensors come from the CPU and go back there."""
    if request.param == "reference":
        return lambda logits, rows: (reference.sample(logits, rows), rows)
    if not torch.cuda.is_available():
        request.getfixturevalue("interpreter")
    pytest.importorskip("triton", reason="Triton is not installed")
    return draw_by_triton


def draw_by_triton(logits, rows, *, asked=EVERYTHING, scratch=None):
    triton = import_module("tailrace.kernels.sampling.triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    moved = SamplingRows(**{name: value.to(device) for name, value in vars(rows).items()})
    scratch = scratch or triton.SamplingScratch.allocate(len(logits) + 1, logits.shape[1], device)
    drawn = triton.sample(logits.to(device), moved, scratch, asked)
    back = [value.cpu() for value in vars(drawn).values()]
    return type(drawn)(*back), SamplingRows(**{n: v.cpu() for n, v in vars(moved).items()})


@pytest.fixture
def sampling_triton(request):
    """The module, on a GPU or in the interpreter."""
    if not torch.cuda.is_available():
        request.getfixturevalue("interpreter")
    return pytest.importorskip("tailrace.kernels.sampling.triton")


def assert_engine_agrees(draw, requests, logits, histories=None, allowed=None):
    case = Rows(requests, logits.shape[1], histories=histories, allowed=allowed)
    rows = case.rows()
    drawn, after = draw(logits, rows)
    expected = case.by_engine(logits)
    assert not expected.errors
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()
    for row, entry in enumerate(expected.logprobs):
        if entry is not None:
            assert drawn.logprobs[row].item() == pytest.approx(entry.logprob, abs=2e-4)
            assert drawn.ranks[row].item() == entry.rank
    _, before = case._history()
    for row, kept in enumerate(rows.history_rows.tolist()):
        if kept >= 0:
            token = int(drawn.token_ids[row])
            before[kept, token] = (before[kept, token] + 2) | 1
    assert torch.equal(after.history, before)


FILTERS = [
    {},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 40},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 400, "top_p": 0.95, "min_p": 0.01},
    {"top_p": 0.5, "min_p": 0.3},
    {"temperature": 0.3, "top_p": 0.95},
    {"temperature": 3.0, "top_p": 0.7},
    {"temperature": 1e-30},
    {"temperature": 1e30, "top_k": 5},
]


@pytest.mark.parametrize("vocab_size", [1, 300, 1024, 2050])
def test_every_filter_draws_what_the_engines_sampler_draws(draw, vocab_size):
    requests = [params(**f, seed=100 + i, logprobs=0) for i, f in enumerate(FILTERS)]
    logits = make_logits(len(requests), vocab_size)
    assert_engine_agrees(draw, requests, logits)


@pytest.mark.parametrize("spread", [0.0, 1.5, 20.0])
def test_flat_and_peaked_rows_draw_what_the_engines_sampler_draws(draw, spread):
    """A flat row has ties of thousands, and thresholds far from the top."""
    filters = [{"top_k": 700}, {"top_p": 0.95}, {"top_k": 2000, "top_p": 0.6}, {}]
    requests = [params(**f, seed=i) for i, f in enumerate(filters)]
    assert_engine_agrees(draw, requests, make_logits(len(requests), 4500, spread))


def test_weights_without_ties_draw_what_the_engines_sampler_draws(draw):
    filters = [{"top_k": 9}, {"top_k": 2999}, {"top_p": 0.97}, {"top_k": 60, "top_p": 0.5}]
    requests = [params(**f, seed=i) for i, f in enumerate(filters)]
    assert_engine_agrees(draw, requests, torch.randn(4, 3000) * 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_read_as_they_are(draw, dtype):
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("the interpreter has no bfloat16")
    requests = [params(**f, seed=i, logprobs=0) for i, f in enumerate(FILTERS[::2])]
    assert_engine_agrees(draw, requests, make_logits(len(requests), 1100).to(dtype))


def test_bias_masks_and_penalties_come_in_the_samplers_order(draw):
    some = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7}
    requests = [
        params(temperature=0.0, logit_bias={3: 100.0, 1500: 99.0}),
        params(temperature=0.0, min_tokens=2, stop_token_ids=(1100, 5)),
        params(temperature=0.0, min_tokens=1, logit_bias={EOS: 50.0}),
        params(**some),
        params(**some, top_p=0.9, logit_bias={7: -3.0, 8: 5.0}),
        params(**some, top_k=20, min_tokens=9, stop_token_ids=(4,)),
        params(repetition_penalty=0.5, temperature=0.0),
        params(presence_penalty=-1.5, seed=4),
        params(frequency_penalty=-0.5, temperature=0.5, seed=5),
    ]
    history = ([1, 2, 3, 2100, 8], [9, 9, 9, 10, 2, 1300])
    logits = make_logits(len(requests), 2200)
    logits[1, [EOS, 5, 1100]] = 31.0
    logits[2, EOS] = 31.0
    histories = [([], []), ([], [8]), ([], []), *[history] * 6]
    assert_engine_agrees(draw, requests, logits, histories)


def test_what_a_grammar_keeps_out_is_never_drawn(draw):
    """Tokens at the borders of words and blocks, and a row beside that knows no grammar."""
    some = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7}
    allowed = {
        0: {0, 31, 32, 63, 1023, 1024, 2199},
        1: {31},
        3: {1055, 2047, 2048},
        4: {3, 1300, 2198},
        5: {EOS},
    }
    requests = [
        params(logprobs=0),
        params(temperature=0.0, logit_bias={32: 90.0}),
        params(seed=3),
        params(top_k=2, top_p=0.9),
        params(**some, logit_bias={7: 80.0, 1300: 5.0}),
        params(temperature=0.0),
    ]
    history = ([1, 2, 3, 2100, 8], [9, 9, 9, 10, 2, 1300])
    logits = make_logits(len(requests), 2200)
    assert_engine_agrees(draw, requests, logits, [([], [])] * 4 + [history] * 2, allowed)
    drawn, _ = draw(logits, Rows(requests, 2200, allowed=allowed).rows())
    for row, ids in allowed.items():
        assert int(drawn.token_ids[row]) in ids


def test_a_grammar_that_allows_nothing_is_that_rows_error(draw):
    case = Rows([params(), params()], 100, allowed={1: set()})
    drawn, _ = draw(make_logits(2, 100), case.rows())
    assert drawn.token_ids[0] >= 0
    assert drawn.token_ids[1] == NOTHING_LEFT


def test_a_request_draws_the_same_stream_as_the_engines_sampler(draw):
    """At twenty positions of one seed: the uniform numbers are the same."""
    logits = make_logits(1, 700, 1.0).expand(20, -1).contiguous()
    requests = [params(seed=2**63 - 5)] * 20
    assert_engine_agrees(draw, requests, logits, [([], [0] * i) for i in range(20)])


def test_uniform_is_the_engines():
    for seed in (0, 1, 2**63 - 1, -1):
        for position in (0, 1, 12345):
            assert reference.uniform(seed, position) == engine_sampler.uniform(seed, position)


def test_a_rows_neighbours_change_nothing(draw):
    logits = make_logits(6, 2100)
    filters = [
        {},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"top_k": 90},
    ]
    requests = [params(**f, seed=i, logprobs=0) for i, f in enumerate(filters)]
    together, _ = draw(logits, Rows(requests, 2100).rows())
    backwards, _ = draw(logits.flip(0), Rows(requests[::-1], 2100).rows())
    for row in range(6):
        alone, _ = draw(logits[row : row + 1], Rows(requests[row : row + 1], 2100).rows())
        for name in ("token_ids", "logprobs", "ranks"):
            expected = getattr(together, name)[row]
            assert torch.equal(getattr(alone, name)[0], expected)
            assert torch.equal(getattr(backwards, name)[5 - row], expected)


def test_minus_infinity_is_valid_and_never_drawn(draw):
    logits = torch.full((6, 1300), -INF)
    logits[:, [17, 1200]] = torch.tensor([1.0, 2.0])
    filters = [{}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 1e-9}, {"temperature": 1e38}, {}]
    requests = [params(**f, seed=i, logprobs=0) for i, f in enumerate(filters)]
    assert_engine_agrees(draw, requests, logits)
    drawn, _ = draw(logits, Rows(requests, 1300).rows())
    assert set(drawn.token_ids.tolist()) <= {17, 1200}


def test_a_row_without_a_valid_token_fails_alone(draw):
    logits = make_logits(7, 1300)
    logits[0, 1290] = math.nan
    logits[1, 3] = INF
    logits[2] = -INF
    everything = dict.fromkeys(range(1300), -INF)
    requests = [params(logprobs=0, presence_penalty=0.5, seed=i) for i in range(7)]
    requests[3] = params(logit_bias=everything, presence_penalty=0.5)
    requests[4] = params(logit_bias={5: INF}, presence_penalty=0.5)
    requests[6] = params(temperature=0.0, logit_bias=everything, top_k=5)
    case = Rows(requests, 1300)
    drawn, after = draw(logits, case.rows())
    broken = [NOT_FINITE] * 3 + [NOTHING_LEFT] * 2
    assert drawn.token_ids[:5].tolist() == broken
    assert drawn.token_ids[6] == NOTHING_LEFT
    assert drawn.token_ids[5] >= 0
    assert drawn.logprobs.isnan().tolist() == [True] * 5 + [False, True]
    # Only the good row's token is counted.
    assert after.history.sum() == 3
    expected = case.by_engine(logits)
    assert sorted(expected.errors) == [0, 1, 2, 3, 4, 6]
    assert drawn.token_ids[5] == expected.token_ids[5]


MIXED = [
    params(temperature=0.0, logprobs=0),
    params(seed=1),
    params(top_p=0.9, seed=2, logprobs=0),
    params(temperature=0.0, min_p=0.4, top_k=3, top_p=0.5),
    params(temperature=0.0, presence_penalty=0.7, repetition_penalty=1.3, logprobs=0),
    params(top_k=40, top_p=0.8, frequency_penalty=0.4, seed=3),
    params(temperature=0.0, logit_bias={7: 30.0, 4100: 31.0}),
    params(min_p=0.2, logit_bias={4499: 9.0}, seed=4, logprobs=0),
    params(temperature=0.0),
    params(top_k=7, seed=5),
]
"""Greedy rows beside drawn ones, filtered, changed and ranked in turn."""
PAST = ([1, 2, 3, 2100, 8], [9, 9, 9, 10, 2, 1300])


def mixed_case():
    allowed = {8: {3, 31, 4400}, 9: set(range(0, 4500, 3))}
    logits = make_logits(len(MIXED), 4500)
    return logits, Rows(MIXED, 4500, histories=[PAST] * len(MIXED), allowed=allowed)


@pytest.mark.parametrize("most", [1, 23, 40])
def test_however_many_programs_share_a_row_no_bit_changes(sampling_triton, monkeypatch, most):
    """All five blocks by one program, two or three by each of two, and one or two."""
    logits, case = mixed_case()
    expected, _ = draw_by_triton(logits, case.rows())  # each block its own program
    assert expected.token_ids.tolist() == case.by_engine(logits).token_ids.tolist()
    monkeypatch.setattr(sampling_triton, "MOST_PROGRAMS", most)
    assert sampling_triton.programs_a_row(len(MIXED), 5) == {1: 1, 23: 2, 40: 3}[most]
    found, after = draw_by_triton(logits, case.rows())
    for name, value in vars(expected).items():
        assert torch.equal(getattr(found, name), value), name
    wanted, after_reference = reference.sample(logits, rows := case.rows()), rows
    assert_close("logprobs", found.logprobs, wanted.logprobs, rtol=0, atol=2e-4)
    assert torch.equal(found.ranks, wanted.ranks)
    assert torch.equal(after.history, after_reference.history)


def test_few_rows_have_a_program_a_block_and_many_fill_the_gpu_once(sampling_triton):
    most = sampling_triton.MOST_PROGRAMS
    assert [sampling_triton.programs_a_row(rows, 149) for rows in (1, 8, 14)] == [149] * 3
    for rows in (15, 32, 50, 128, 512, most, 3 * most):
        programs = sampling_triton.programs_a_row(rows, 149)
        assert rows * (programs - 1) < most
        # None of them could be spared: one fewer would have a block more each.
        assert programs == 1 or -(-149 // (programs - 1)) > -(-149 // programs)


def test_what_a_row_does_not_ask_for_is_neither_written_nor_read(sampling_triton):
    """Over memory that holds NaN, and over what another step has left, the same is drawn."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, case = mixed_case()
    scratch = sampling_triton.SamplingScratch.allocate(len(MIXED), 4500, device)
    expected, _ = draw_by_triton(logits, case.rows(), scratch=scratch)
    has_weights = scratch.weights.isfinite().all(dim=1).tolist()
    has_sums = (scratch.sums != torch.iinfo(torch.int64).max).any(dim=1).tolist()
    assert has_weights == has_sums == [p.temperature != 0 for p in MIXED]
    # As many rows that ask for all of it, and now these again.
    everything = [params(top_k=99, top_p=0.7, min_p=0.1, seed=i, logprobs=0) for i in range(10)]
    draw_by_triton(-logits, Rows(everything, 4500).rows(), scratch=scratch)
    found, _ = draw_by_triton(logits, case.rows(), scratch=scratch)
    for name, value in vars(expected).items():
        assert torch.equal(getattr(found, name), value), name


NEEDED = {
    "greedy": ({"temperature": 0.0, "top_p": 0.5, "min_p": 0.1}, set()),
    "plain": ({}, {"weigh"}),
    "min_p": ({"min_p": 0.1}, {"weigh", "sum_kept"}),
    "top_p": ({"top_p": 0.5}, {"weigh", "aim", "gather", "search", "sum_kept"}),
    "top_k": ({"top_k": 3}, {"weigh", "aim", "gather", "search", "sum_kept"}),
    "rank": ({"logprobs": 0}, {"weigh", "rank"}),
}


@pytest.mark.parametrize("name", NEEDED)
def test_kernels_that_no_row_asks_for_are_not_launched(sampling_triton, monkeypatch, name):
    settings, needed = NEEDED[name]
    requests = [params(temperature=0.0), params(**settings, seed=3), params(temperature=0.0)]
    logits, case = make_logits(3, 1100), Rows(requests, 1100)
    expected, _ = draw_by_triton(logits, case.rows())
    launched = set()

    class Noted:
        def __init__(self, kernel, kind):
            self.kernel, self.kind = kernel, kind

        def __getitem__(self, grid):
            launched.add(self.kind)
            return self.kernel[grid]

    for attribute, kernel in list(vars(sampling_triton).items()):
        if attribute.endswith("_kernel"):
            noted = Noted(kernel, attribute.removesuffix("_kernel"))
            monkeypatch.setattr(sampling_triton, attribute, noted)
    asked = Asked.by_all(
        [
            Asked.by(
                temperature=p.temperature,
                top_k=p.top_k,
                top_p=p.top_p,
                min_p=p.min_p,
                ranks=p.logprobs is not None,
            )
            for p in requests
        ]
    )
    found, _ = draw_by_triton(logits, case.rows(), asked=asked)
    assert launched == {"adjust", "draw", *needed}
    for field in dataclasses.fields(expected):
        value = getattr(expected, field.name)
        assert torch.equal(getattr(found, field.name), value), field.name


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.5, "min_p": 0.3}])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_value_that_is_not_finite_breaks_its_row_however_it_is_drawn(draw, settings, penalty):
    """First, last and amid, alone and beside others of its kind; the row beside goes on."""
    logits = make_logits(6, 1100)
    logits[0, 0] = math.nan
    logits[1, [1050, 1099]] = INF
    logits[2, 1030:] = math.nan
    logits[3, [5, 6]] = torch.tensor([INF, -INF])
    logits[4] = math.nan
    logits[5, :1024] = -INF
    requests = [params(**settings, presence_penalty=penalty, seed=i) for i in range(6)]
    drawn, _ = draw(logits, Rows(requests, 1100).rows())
    assert drawn.token_ids[:5].tolist() == [NOT_FINITE] * 5
    assert drawn.token_ids[5] >= 1024
    assert drawn.logprobs.isnan().tolist() == [True] * 5 + [False]


def test_the_draws_follow_the_distribution():
    weights = torch.tensor([0.5, 0.0, 0.2, 0.3])
    logits = weights.log().expand(600, -1).contiguous()
    drawn = reference.sample(logits, Rows([params(seed=i) for i in range(600)], 4).rows())
    shares = torch.bincount(drawn.token_ids, minlength=4) / 600
    assert_close("shares", shares, weights, rtol=0, atol=0.06)


def test_no_rows_are_no_error(draw):
    drawn, _ = draw(torch.zeros(0, 50), Rows([], 50, histories=[]).rows())
    assert drawn.token_ids.shape == (0,)


def test_scratch_that_does_not_fit_is_an_error(interpreter):
    triton = pytest.importorskip("tailrace.kernels.sampling.triton")
    scratch = triton.SamplingScratch.allocate(2, 50, "cpu")
    rows = Rows([params()], 60).rows()
    with pytest.raises(EngineError, match=r"logits \[1, 60\] do not fit scratch \[2, 50\]"):
        triton.sample(torch.zeros(1, 60), rows, scratch)
    with pytest.raises(EngineError, match="the sampler takes 262144"):
        triton.SamplingScratch.allocate(1, MAX_VOCAB + 1, "cpu")
