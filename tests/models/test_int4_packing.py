"""The words below were made by AutoAWQ 0.2.9's and compressed-tensors 0.19's own packing."""

import torch

from tailrace.models.int4_packing import pack_awq, pack_pairs, pack_words, unpack_awq, unpack_words
from tests.support.quantized import AWQ_ORDER, words_along_columns

OUTPUTS, INPUTS = 32, 8

# fmt: off
AWQ_CODES = [
    [1603480672, -686054168, 1603480672, -686054168],
    [421123541, 421123541, 421123541, 421123541],
    [-744518070, 1528235714, -744518070, 1528235714],
    [-1659553857, -1659553857, -1659553857, -1659553857],
    [1469833252, -552376148, 1469833252, -552376148],
    [286366105, 286366105, 286366105, 286366105],
    [-610844146, 1394592390, -610844146, 1394592390],
    [-1793197197, -1793197197, -1793197197, -1793197197],
]
AWQ_ZEROS = [[897175042, -1108261238, 897175042, -1108261238]]
PACKED_CODES = [
    1049950800, -686071917, 1888662742, 421075225, -1299153316, 1528288159, -190957358, -1659527915,
    916255320, -552380517, 2023406814, 286331153, -1164413356, 1394596759, -57265958, -1793223395,
] * 2
PACKED_ZEROS = [[1012822162], [-1260980198], [1012822162], [-1260980198]]
# fmt: on


def codes():
    n, k = torch.arange(OUTPUTS)[:, None], torch.arange(INPUTS)[None]
    return ((3 * n + 5 * k + n * k) % 16).to(torch.uint8)


def zeros():
    return ((7 * torch.arange(OUTPUTS)[:, None] + 2) % 16).to(torch.uint8)


def words(values):
    return torch.tensor(values, dtype=torch.int32)


def test_awqs_words_are_read_and_written():
    assert torch.equal(unpack_awq(words(AWQ_CODES)).t(), codes())
    assert torch.equal(unpack_awq(words(AWQ_ZEROS)).t(), zeros())
    assert torch.equal(pack_awq(codes().t()), words(AWQ_CODES))
    assert torch.equal(pack_awq(zeros().t()), words(AWQ_ZEROS))


def test_compressed_tensors_words_are_read_and_written():
    assert torch.equal(unpack_words(words(PACKED_CODES)[:, None]), codes())
    assert torch.equal(unpack_words(words(PACKED_ZEROS).t()).t(), zeros())
    assert torch.equal(pack_words(codes()), words(PACKED_CODES)[:, None])
    assert torch.equal(pack_words(zeros().t()).t(), words(PACKED_ZEROS))


def test_a_last_word_is_filled_up_with_zeros():
    odd = codes()[:5, :3]
    packed = pack_words(odd)
    assert packed.shape == (5, 1)
    assert torch.equal(unpack_words(packed)[:, :3], odd)
    assert not unpack_words(packed)[:, 3:].any()


def test_pairs_hold_the_even_input_low():
    assert pack_pairs(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[33, 15]]


def test_the_tests_own_packing_gives_the_public_tools_words():
    assert torch.equal(words_along_columns(codes().t(), AWQ_ORDER), words(AWQ_CODES))
    assert torch.equal(words_along_columns(codes()), words(PACKED_CODES)[:, None])
