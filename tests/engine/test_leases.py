import pytest

from tailrace.engine.leases import Leases
from tailrace.errors import EngineError, IntegrityError


def accounts(lease):
    return lease.claim, lease.short, lease.debt


def test_a_lease_is_cut_from_what_nobody_claims_and_the_rest_is_short():
    leases = Leases()
    first, second = leases.open("a"), leases.open("b")
    leases.want(first, 7, 10)
    leases.want(second, 5, 10)
    assert accounts(first) == (7, 0, 0)
    assert accounts(second) == (3, 2, 0)
    leases.check_integrity(10)


def test_units_come_from_the_own_claim_then_the_surplus_then_others_claims():
    leases = Leases()
    owner, taker = leases.open("owner"), leases.open("taker")
    leases.want(owner, 6, 10)
    leases.want(taker, 2, 10)
    leases.spend(taker, 5, 10)  # 2 claimed, 2 of the surplus, 1 lent
    assert accounts(taker) == (0, 0, 1)
    assert list(leases.borrowers()) == ["taker"]
    assert leases.lent == leases.lent_total == 1
    leases.check_integrity(5)


def test_what_comes_back_pays_debts_first_then_short_leases_in_the_order_of_coming():
    leases = Leases()
    owner, taker, late = (leases.open(name) for name in ("owner", "taker", "late"))
    leases.want(owner, 6, 6)
    leases.spend(taker, 2, 6)
    leases.want(late, 3, 4)
    assert accounts(late) == (0, 3, 0)
    leases.settle(5)
    assert accounts(taker) == (0, 0, 1)
    leases.settle(7)
    assert (accounts(taker), accounts(late)) == ((0, 0, 0), (1, 2, 0))
    assert not list(leases.borrowers())
    leases.settle(20)
    assert accounts(late) == (3, 0, 0)
    leases.check_integrity(20)


def test_an_owner_without_an_available_unit_has_a_borrower():
    leases = Leases()
    owner, taker = leases.open("owner"), leases.open("taker")
    leases.want(owner, 4, 4)
    leases.spend(taker, 4, 4)
    leases.check_integrity(0)
    assert owner.claim == 4
    assert list(leases.borrowers()) == ["taker"]


def test_a_borrower_that_leaves_less_than_it_owed_cuts_the_youngest_claims():
    leases = Leases()
    old, young, taker = (leases.open(name) for name in ("old", "young", "taker"))
    leases.want(old, 3, 6)
    leases.want(young, 3, 6)
    leases.spend(taker, 2, 6)
    leases.close(taker)
    leases.settle(4)  # another table shares both units
    assert (accounts(old), accounts(young)) == ((3, 0, 0), (1, 2, 0))
    leases.check_integrity(4)


def test_wanting_less_gives_up_what_was_short_first():
    leases = Leases()
    lease, other = leases.open("a"), leases.open("b")
    leases.want(lease, 8, 6)
    leases.want(other, 2, 6)
    leases.want(lease, 7, 6)
    assert accounts(lease) == (6, 1, 0)
    leases.want(lease, 3, 6)
    assert (accounts(lease), accounts(other)) == ((3, 0, 0), (2, 0, 0))
    leases.check_integrity(6)


def test_a_second_account_of_one_holder_is_refused():
    leases = Leases()
    leases.open("a")
    with pytest.raises(EngineError, match="a has a lease already"):
        leases.open("a")


@pytest.mark.parametrize(
    "harm",
    [
        lambda leases: setattr(leases, "claims", 1),
        lambda leases: setattr(leases, "lent", 0),
        lambda leases: leases._borrowers.clear(),
        lambda leases: leases._unpaid.clear(),
        lambda leases: setattr(leases._leases["taker"], "claim", 1),
        lambda leases: leases._leases.pop("taker"),
    ],
)
def test_check_integrity_sees_a_broken_account(harm):
    leases = Leases()
    owner, taker = leases.open("owner"), leases.open("taker")
    leases.want(owner, 4, 4)
    leases.spend(taker, 2, 4)
    leases.check_integrity(2)
    harm(leases)
    with pytest.raises(IntegrityError):
        leases.check_integrity(2)
