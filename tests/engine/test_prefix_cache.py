import pytest

from tailrace.engine.prefix_cache import PrefixCache
from tailrace.errors import IntegrityError

SIZE = 4


def fill(cache: PrefixCache, tokens: list[int], units: list[int], salt: str = "") -> None:
    parent = salt
    for index, unit in enumerate(units):
        parent = cache.add(parent, tokens[index * SIZE : (index + 1) * SIZE], unit)


def test_the_longest_known_prefix_is_found_but_never_the_whole_prompt():
    cache = PrefixCache(20, SIZE)
    tokens = list(range(12))
    fill(cache, tokens, [5, 3, 9])
    assert cache.find(tokens, "")[0] == [5, 3]
    assert cache.find([*tokens, 1], "")[0] == [5, 3, 9]
    assert cache.find([*tokens[:8], 0, 0, 0, 0, 0], "")[0] == [5, 3]
    assert cache.find([0, *tokens], "")[0] == []
    assert cache.find([*tokens, 1], "other")[0] == []


def test_a_salt_that_looks_like_an_entry_is_still_a_salt():
    cache = PrefixCache(20, SIZE)
    fill(cache, list(range(8)), [0, 1])
    for salt in ("1", "\1", "\1\0\0\0\0\0\0\0"):
        assert cache.find([*range(4, 8), 0], salt)[0] == []


def test_the_end_of_a_salt_is_not_taken_for_tokens():
    cache = PrefixCache(20, SIZE)
    fill(cache, [1, 2, 3, 4], [0], salt="a")
    text = bytes([1, 0, 0, 0]).decode()
    assert cache.find([2, 3, 4, 0, 0], "a" + text)[0] == []


def test_the_second_unit_of_one_text_stays_unknown_and_what_follows_it_is_found():
    cache = PrefixCache(20, SIZE)
    tokens = list(range(9))
    fill(cache, tokens, [0])
    parent = cache.add("", tokens[:4], 7)
    assert 7 not in cache
    cache.add(parent, tokens[4:8], 8)
    assert cache.find(tokens, "")[0] == [0, 8]


def test_nothing_follows_a_unit_that_was_evicted_and_reused():
    cache = PrefixCache(20, SIZE)
    fill(cache, list(range(8)), [0, 1])
    cache.rest(0)
    assert cache.evict() == 0
    fill(cache, [9, 9, 9, 9], [0])
    assert cache.find([9, 9, 9, 9, 4, 5, 6, 7, 0], "")[0] == [0]
    # The same text again is another entry: what followed the former is not found any more.
    fill(cache, [0, 1, 2, 3], [2])
    assert cache.find(list(range(9)), "")[0] == [2]


def test_the_longest_idle_goes_first_and_a_held_one_never():
    cache = PrefixCache(20, SIZE)
    for unit in range(3):
        fill(cache, [unit] * SIZE, [unit])
    for unit in (1, 0, 2):
        cache.rest(unit)
    assert cache.wake(1)
    assert not cache.wake(1)
    assert cache.idle == 2
    assert [cache.evict(), cache.evict()] == [0, 2]
    assert 1 in cache
    assert len(cache) == 1


def test_a_forgotten_unit_is_neither_found_nor_idle():
    cache = PrefixCache(20, SIZE)
    fill(cache, [1] * SIZE, [4])
    cache.rest(4)
    cache.forget(4)
    cache.forget(4)
    assert cache.idle == len(cache) == 0
    assert cache.find([1] * 5, "")[0] == []
    cache.check_integrity()


@pytest.mark.parametrize(
    "harm",
    [
        lambda c: c._found.clear(),
        lambda c: c._keys.__setitem__(0, b""),
        lambda c: c._found.__setitem__(c._keys[0], 0),
        lambda c: c._found.__setitem__(c._keys[0], c._found[c._keys[1]]),
        lambda c: c._found.__setitem__(c._keys[0], c._found[c._keys[1]] - 1),
        lambda c: c._idle.__setitem__(17, None),
    ],
)
def test_check_integrity_sees_a_broken_structure(harm):
    cache = PrefixCache(20, SIZE)
    fill(cache, list(range(8)), [0, 1])
    cache.check_integrity()
    harm(cache)
    with pytest.raises(IntegrityError):
        cache.check_integrity()
