"""Each row's largest logit, the lowest id of equals, by Triton and by torch."""

from __future__ import annotations

import math

import pytest
import torch

from tailrace.kernels.sampling.rows import NOT_FINITE

INF = float("inf")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def likeliest(request):
    """Choose on a GPU or in the interpreter; return ids and what is kept of them."""
    if DEVICE == "cpu":
        request.getfixturevalue("interpreter")
    module = pytest.importorskip("tailrace.kernels.sampling.triton_likeliest")

    def choose(logits, slots=None, kept=40):
        slots = range(len(logits)) if slots is None else slots
        last_tokens = torch.full((kept,), 77, dtype=torch.int64, device=DEVICE)
        places = torch.tensor(list(slots), dtype=torch.int32, device=DEVICE)
        ids = module.likeliest(logits.to(DEVICE), places, last_tokens)
        return ids.cpu(), last_tokens.cpu()

    return choose


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 300, 1024, 2050, 5003])
def test_it_is_the_lowest_id_of_the_largest_logit(likeliest, vocab_size, dtype):
    # Of whole numbers, so that there are equals in every row.
    logits = (torch.randn(9, vocab_size) * 2).round().to(dtype)
    ids, kept = likeliest(logits)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert ids.tolist() == kept[:9].tolist() == expected
    assert kept[9:].tolist() == [77] * 31


def test_ids_are_kept_by_slot(likeliest):
    logits = torch.randn(3, 70)
    ids, kept = likeliest(logits, slots=[5, 0, 39])
    assert ids.tolist() == logits.argmax(-1).tolist() == kept[[5, 0, 39]].tolist()
    assert kept.eq(77).sum() == 37


@pytest.mark.parametrize("most", [1, 14, 20])
def test_however_many_programs_share_a_row_its_id_is_the_same(likeliest, monkeypatch, most):
    """Equals in blocks of one program and of several, in one lane and in others."""
    logits = torch.randn(7, 4200)
    for row in range(5):
        logits[row, [row * 1024 + 3, row * 1024 + 70, 4199]] = 9.0
    logits[5, [4090, 4097]] = 9.0
    logits[6, [1029, 2053, 3077, 4101]] = 9.0
    monkeypatch.setattr("tailrace.kernels.sampling.triton.MOST_PROGRAMS", most)
    ids, _ = likeliest(logits)
    assert ids.tolist() == [3, 1027, 2051, 3075, 4099, 4090, 1029]


def test_a_row_that_is_not_finite_has_no_id_and_keeps_one_that_can_be(likeliest):
    logits = torch.randn(7, 2100)
    logits[0, 5] = math.nan
    logits[1, 2099] = INF
    logits[2] = -INF
    logits[3] = math.nan
    logits[4, 1500:] = math.nan
    logits[5, :2000] = -INF
    ids, kept = likeliest(logits)
    assert ids[:5].tolist() == [NOT_FINITE] * 5
    assert ids[5:].tolist() == logits[5:].argmax(-1).tolist()
    assert kept[:7].min() >= 0
    assert kept[:7].max() < 2100


def test_no_rows_are_no_error(likeliest):
    ids, kept = likeliest(torch.zeros(0, 50))
    assert ids.shape == (0,)
    assert kept.eq(77).all()
