import pytest

from tailrace.engine.host_units import HostUnits
from tailrace.errors import EngineError, IntegrityError


def test_places_are_held_by_one_sequence_and_handed_out_again_in_order():
    host = HostUnits(5)
    assert host.put("a", 17, 3) == [0, 1, 2]
    assert host.put("b", 8, 1) == [3]
    assert host.put("c", 16, 2) is None
    assert (host.used, host.holders) == (4, {"a", "b"})
    assert host.take("a").tokens == 17
    assert host.put("c", 25, 4) == [0, 1, 2, 4]
    host.check_integrity(8)


def test_wrong_use_is_an_error_that_names_the_sequence():
    host = HostUnits(4)
    host.put("a", 1, 1)
    with pytest.raises(EngineError, match="a is swapped out already"):
        host.put("a", 1, 1)
    with pytest.raises(EngineError, match="b is not swapped out"):
        host.take("b")
    assert host.get("b") is None


@pytest.mark.parametrize(
    "harm",
    [
        lambda h: h._free.pop(),
        lambda h: h._free.append(0),
        lambda h: h.get("a").places.append(7),
        lambda h: h.get("a").places.clear(),
    ],
    ids=["lost", "twice", "unknown", "none"],
)
def test_check_integrity_sees_a_broken_structure(harm):
    host = HostUnits(4)
    host.put("a", 9, 2)
    host.check_integrity(8)
    harm(host)
    with pytest.raises(IntegrityError):
        host.check_integrity(8)


def test_more_tokens_than_places_hold_are_seen():
    host = HostUnits(4)
    host.put("a", 25, 3)
    with pytest.raises(IntegrityError, match="3 places for 25 tokens"):
        host.check_integrity(8)
