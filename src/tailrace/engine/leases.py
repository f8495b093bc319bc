"""What sequences are promised of the pool before they need it, and who lives on whose promise.

Rules:
1. A lease is a number of units, not their places: nothing is kept from use for tokens that may
   never come, and a written unit is never moved to keep a promise.
2. Nothing is promised twice: surplus = available + lent - claims, and it is never below 0.
3. Whoever takes a unit uses its own claim first, then the surplus; what is left it borrows from the
   claims of all others, and the unit counts as lent until it is paid for.
4. So an owner (claim > 0) that finds no unit available has a borrower to get one back from: by rule
   2, nothing available and something claimed means something lent.
5. Whatever becomes free pays debts first, then fills leases that fell short, in the order of
   coming. New leases are cut from what remains; so there is no surplus while anybody is short.

    of one sequence's units     becomes      when
    short (wished for)          claim        something was given back (rule 5)
    claim (promised)            held         the sequence reaches it
    short, or beyond the lease  held         it reaches it while there is a surplus
    short, or beyond the lease  held, lent   it reaches it, and only others' claims are left
    held, lent                  held         something was given back (rule 5)
    any                         gone         the sequence ends or is preempted
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.errors import EngineError, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(eq=False, slots=True)
class Lease:
    """One sequence's account, in units; never a claim and a debt at once."""

    holder: str
    claim: int = 0
    """Promised and not yet taken."""
    short: int = 0
    """Wished for beyond that."""
    debt: int = 0
    """Taken of others' claims and not yet paid for."""

    @property
    def wanted(self) -> int:
        """Units that the holder is still expected to take."""
        return self.claim + self.short


class Leases:
    """The accounts of all sequences. The caller says what is available, and when it changed."""

    def __init__(self) -> None:
        self.claims = 0
        """Sum over all leases."""
        self.lent = 0
        """Sum of debts."""
        self.lent_total = 0
        """Units ever lent."""
        self._leases: dict[str, Lease] = {}
        self._unpaid: dict[str, Lease] = {}
        self._borrowers: dict[str, Lease] = {}

    def surplus(self, available: int) -> int:
        """Units that nobody has a claim to."""
        return available + self.lent - self.claims

    def borrowers(self) -> Iterable[str]:
        """Who lives on others' claims."""
        return self._borrowers

    def open(self, holder: str) -> Lease:
        """Start an account.

        Raises:
            EngineError: The holder has one.
        """
        if holder in self._leases:
            raise EngineError(f"{holder} has a lease already")
        lease = self._leases[holder] = Lease(holder)
        return lease

    def want(self, lease: Lease, units: int, available: int) -> None:
        """Set how many units the holder is still expected to take; promise what there is."""
        change = units - lease.wanted
        if change > 0:
            lease.short += change
            self._unpaid[lease.holder] = lease
        else:
            waived = min(-change, lease.short)
            lease.short -= waived
            lease.claim += change + waived
            self.claims += change + waived
            self._note_paid(lease)
        self.settle(available)

    def spend(self, lease: Lease, units: int, available: int) -> None:
        """Account for units that are about to be taken; `available` still counts them."""
        claimed = min(units, lease.claim)
        rest = units - claimed
        borrowed = max(0, rest - self.surplus(available)) if rest else 0
        lease.claim -= claimed
        self.claims -= claimed
        if not rest:
            return
        lease.short = max(0, lease.short - rest)
        if borrowed:
            lease.debt += borrowed
            self.lent += borrowed
            self.lent_total += borrowed
            self._unpaid[lease.holder] = self._borrowers[lease.holder] = lease
        else:
            self._note_paid(lease)

    def close(self, lease: Lease) -> None:
        """End an account; `settle` once its units are back."""
        del self._leases[lease.holder]
        self._unpaid.pop(lease.holder, None)
        self._borrowers.pop(lease.holder, None)
        self.claims -= lease.claim
        self.lent -= lease.debt

    def settle(self, available: int) -> None:
        """Give what has become free to those who are owed it.

            available  |######################|          all that could be handed out now
            claims     |==============|                  promised to owners
            lent                      .                  held by borrowers: not available
            surplus                   |-------| -> debts, then short leases, oldest account first

        A borrower whose units live on in another's table leaves less than it owed. Then the
        youngest claims are cut, so that rule 2 holds; their holders are short again.
        """
        surplus = self.surplus(available)
        if surplus < 0:
            self._cut(-surplus)
        while surplus > 0 and self._unpaid:
            lease = next(iter(self._unpaid.values()))
            paid = min(surplus, lease.debt)
            lease.debt -= paid
            self.lent -= paid
            granted = min(surplus - paid, lease.short)
            lease.short -= granted
            lease.claim += granted
            self.claims += granted
            surplus -= paid + granted
            self._note_paid(lease)

    def check_integrity(self, available: int) -> None:
        """Verify the rules.

        Raises:
            IntegrityError: One is broken.
        """
        leases = self._leases.values()
        if self.claims != sum(lease.claim for lease in leases):
            raise IntegrityError("the claims do not add up")
        if self.lent != sum(lease.debt for lease in leases):
            raise IntegrityError("the debts do not add up")
        for lease in leases:
            if min(lease.claim, lease.short, lease.debt) < 0 or (lease.claim and lease.debt):
                raise IntegrityError(f"impossible account: {lease}")
            if (lease.debt > 0) != (lease.holder in self._borrowers):
                raise IntegrityError(f"{lease.holder} is wrongly listed as borrower or not")
            if (lease.debt + lease.short > 0) != (lease.holder in self._unpaid):
                raise IntegrityError(f"{lease.holder} is wrongly listed as unpaid or not")
        if (self._unpaid.keys() | self._borrowers.keys()) - self._leases.keys():
            raise IntegrityError("an account that is closed is listed")
        surplus = self.surplus(available)
        if surplus < 0 or (surplus and self._unpaid):
            raise IntegrityError(f"surplus {surplus} with {len(self._unpaid)} accounts unpaid")

    def _cut(self, units: int) -> None:
        for lease in reversed(self._leases.values()):
            taken = min(units, lease.claim)
            if taken:
                lease.claim -= taken
                self.claims -= taken
                lease.short += taken
                self._unpaid[lease.holder] = lease
                units -= taken
            if not units:
                return

    def _note_paid(self, lease: Lease) -> None:
        if not lease.debt:
            self._borrowers.pop(lease.holder, None)
            if not lease.short:
                self._unpaid.pop(lease.holder, None)
