"""Lends a prefill rank staging memory to write, so that one of both learns of the lane (PROTOCOL.md section 5.7).

Once for every peer with which there is a choice that the lane decides, to be measured; and then, if it is on this host,
to see who moves the bytes (`kvxfer.proving`). After the first transfer over it: before, nobody knows whether any will
come, and the two transports would be wired up for nothing. One peer at a time, and whoever has to wait for memory has
the loan recalled. A loan that is never given back leaves room for the largest chunk.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from kvxfer.errors import ProtocolError
from kvxfer.gauging import loan_bytes
from kvxfer.link import Link
from kvxfer.loans import Loan
from kvxfer.protocol.messages import Capability, KvAgentResult, Route, Status
from kvxfer.proving import Prover
from kvxfer.site import Site

__all__ = ["Lender"]

_OVER_A_LANE: Final = frozenset({Route.STAGED, Route.DIRECT})
"""Routes on which the peer writes over the lane, and between which it decides."""
_TRIES: Final = 8
"""Times that a peer is asked, if it has no time for it."""


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
        self._tries: dict[bytes, int] = {}  # to measure that are left, by incarnation
        self.prover: Final = Prover(site, self._lend)
        site.receive_desk.crowded = self.recall

    def used(self, link: Link, route: Route) -> None:
        """A transfer took this route: once its offer was released, have the lane looked into as far as that matters."""
        left = self._tries.get(link.peer.identity.incarnation, _TRIES)
        if route in _OVER_A_LANE and (left or not self.prover.knows(link)):
            self._site.loop.call_soon(self._look_into, link)

    def _look_into(self, link: Link) -> None:
        site, key = self._site, link.peer.identity.incarnation
        if not link.is_open or site.draining:
            return
        nbytes = loan_bytes(site.config.chunk_bytes, site.receive_desk.share.capacity)
        left = self._tries.get(key, _TRIES) if nbytes and self._matters(link) else 0
        loan = self._lend(link, nbytes) if left else None
        if loan is not None:
            self._tries[key] = left - 1
            loan.begin()
        elif not left:
            self._tries[key] = 0
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

    def result(self, loan: Loan, message: KvAgentResult) -> None:
        """What a peer says of its loan."""
        measured = not loan.nonce and message.status is not Status.CANCELLED  # or cannot
        loan.result(message)
        if measured:
            self._tries[loan.peer.identity.incarnation] = 0
            self.prover.due(loan.link)

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
        """A link is gone, and what the peer learned with it."""
        self._tries.pop(link.peer.identity.incarnation, None)
        self.prover.lost(link)
        for loan in list(self.loans.values()):
            if loan.link is link:
                loan.lost()

    def _over(self, loan: Loan) -> None:
        self.loans.pop(loan.transfer, None)

    def _matters(self, link: Link) -> bool:
        """Whether this side leaves a choice to the peer that the lane decides, and the peer can measure it."""
        site, peer = self._site, link.peer
        free = site.config.route in ("auto", "mapped")
        able = Capability.PROBE in Capability(peer.identity.capabilities)
        open_routes = site.routes(peer, trusted=link.trusted, sending=False) if free and able else ()
        return _OVER_A_LANE.issubset(open_routes)
