"""Lends a prefill rank on this host staging memory to write, to see who moves the bytes (`kvxfer.proving`).

After the first transfer over a lane: before, nobody knows whether any will come, and the two transports would be wired
up for nothing. One peer at a time, and whoever has to wait for memory has the loan recalled. A loan that is never given
back leaves room for the largest chunk.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from kvxfer.errors import ProtocolError
from kvxfer.link import Link
from kvxfer.loans import Loan
from kvxfer.protocol.messages import Route
from kvxfer.proving import Prover
from kvxfer.site import Site

__all__ = ["Lender"]

_OVER_A_LANE: Final = frozenset({Route.STAGED, Route.DIRECT})
"""Routes on which the peer writes over the lane."""


class Lender:
    """Decides when to lend, and keeps the books of what is lent.

    Args:
        site: The worker.
        number: Draws a fresh transfer id.
        doubted: Seeks evidence that the peer of a loan writes nothing any more.
    """

    def __init__(self, site: Site, number: Callable[[], int], doubted: Callable[[Loan], None]) -> None:
        self.loans: Final[dict[int, Loan]] = {}
        self._site: Final = site
        self._number: Final = number
        self._doubted: Final = doubted
        self.prover: Final = Prover(site, self._lend)
        site.receive_desk.crowded = self.recall

    def used(self, link: Link, route: Route) -> None:
        """A transfer took this route: once its offer was released, have the lane proved."""
        if route in _OVER_A_LANE:
            self.prover.due(link)

    def _lend(self, link: Link, nbytes: int) -> Loan | None:
        """None if the memory is needed for what was asked for, or something is lent already."""
        site = self._site
        extent = None if self.loans or not link.is_open else site.receive_desk.take(link.peer.account, nbytes)
        if extent is None:
            return None
        loan = Loan(site, link, self._number(), extent, self._doubted, self._over)
        self.loans[loan.transfer] = loan
        return loan

    def find(self, link: Link, transfer: int) -> Loan | None:
        """A loan, by its number.

        Raises:
            ProtocolError: If it is another peer's.
        """
        loan = self.loans.get(transfer)
        if loan is not None and loan.peer.identity.incarnation != link.peer.identity.incarnation:
            raise ProtocolError(f"transfer {transfer} belongs to another peer", peer=link.peer.name)
        return loan

    def recall(self) -> "list[asyncio.Future[None]]":
        """Ask for everything back. Returns what resolves as it comes."""
        for loan in list(self.loans.values()):
            loan.cancel()  # what the peer was not told of yet is back at once
        return [loan.over for loan in self.loans.values() if not loan.is_lost]

    def lost(self, link: Link) -> None:
        """A link is gone."""
        self.prover.lost(link)
        for loan in list(self.loans.values()):
            if loan.link is link:
                loan.lost()

    def _over(self, loan: Loan) -> None:
        self.loans.pop(loan.transfer, None)
