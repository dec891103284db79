"""Lends a prefill rank staging memory, so that it can measure the lane to this rank (PROTOCOL.md section 5.7).

Once for every peer with which there is a choice that the lane decides, after the first transfer over it: before, nobody
knows whether any will come, and the two transports would be wired up for nothing. One peer at a time, and whoever has
to wait for memory has the loan recalled. A loan that is never given back leaves room for the largest chunk.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from kvxfer.errors import Code, ProtocolError
from kvxfer.exposure import Exposure
from kvxfer.gauging import loan_bytes
from kvxfer.link import Link
from kvxfer.memory import Extent, ExtentState
from kvxfer.protocol.messages import WHOLE, Cancel, Capability, KvAgentResult, Probe, Route, Status
from kvxfer.site import Site, no_hold, resolve

__all__ = ["Lender", "Loan"]

_LEASE_S: Final = 5.0
"""Seconds after which memory is asked back: a hundred times as many as measuring takes."""
_DECIDED_BETWEEN: Final = frozenset({Route.STAGED, Route.DIRECT})
"""Routes between which the lane decides."""
_TRIES: Final = 8
"""Times that a peer is asked, if it has no time for it."""


class Loan:
    """Memory that one peer may write to measure the lane.

    Attributes:
        link: The control stream; replaced when the same incarnation is reached again.
        peer: The prefill rank.
        transfer: Its number.
        exposure: The gate before it. What a dead process left to a socket may still land.
        is_lost: The session is gone, or the peer is silent; it may still write.
        ended: The memory is this side's again.
        over: Resolves with the one or the other.
    """

    def __init__(
        self,
        site: Site,
        link: Link,
        transfer: int,
        extent: Extent,
        doubted: "Callable[[Loan], None]",
        over: "Callable[[Loan], None]",
    ) -> None:
        self.link = link
        self.peer: Final = link.peer
        self.transfer: Final = transfer
        self.is_lost = False
        self.ended = False
        self.over: Final[asyncio.Future[None]] = site.loop.create_future()
        self.exposure: Final = Exposure(site, link.peer, str(transfer), self._take_back, ends_with_process=False)
        self._doubted: Final = doubted
        self._ended: Final = over
        self._site: Final = site
        self._extent: Final = extent
        self._awake: Callable[[], None] = no_hold
        self._timer: asyncio.TimerHandle | None = None
        self._recalled = False

    @property
    def finished(self) -> bool:
        """Whether nothing of it is in doubt."""
        return self.ended

    def begin(self) -> None:
        """Tell the peer."""
        site, extent = self._site, self._extent
        site.receive_desk.share.write(extent)
        self._awake = site.fabric.hold_awake()  # over TCP the target moves the data
        lease = min(site.config.grant_lease, _LEASE_S)
        granted = self.exposure.grant(mapped=False)
        if self.link.send(Probe(self.transfer, extent.address, extent.nbytes, int(lease * 1000), granted)):
            self._timer = site.at(site.now() + lease, self.cancel)
        else:
            self._take_back()

    def cancel(self) -> None:
        """Ask for it back. It is in doubt if the peer does not answer that either."""
        if not self.ended and not self.is_lost and not self._recalled:
            self._recalled = True
            self._ask(Code.CANCELLED)

    def result(self, message: KvAgentResult) -> None:
        """The peer is through with it, or cannot say.

        Raises:
            ProtocolError: If it speaks of a part of it.
        """
        if message.chunk != WHOLE or not message.last:
            raise ProtocolError(f"transfer {self.transfer} has no chunks, and one result", peer=self.peer.name)
        if self.ended:
            self._site.metrics.result_dropped("stale")
        elif message.status is Status.IN_DOUBT:
            self.lost()
        else:
            self._take_back()

    def lost(self) -> None:
        """The session is gone: the peer may still write."""
        if not self.ended:
            self.is_lost = True
            self._awake()
            self._stop_timer()
            resolve(self.over, None)
            if self._extent.state is not ExtentState.QUARANTINED:
                self._site.receive_desk.quarantine(self._extent, f"{self.peer.name} is silent")
            self._doubted(self)

    def resume(self, link: Link) -> None:
        """The same incarnation is back: ask what became of it."""
        self.link, self.is_lost = link, False
        self._awake = self._site.fabric.hold_awake()
        self._ask(Code.PEER_LOST)

    def _ask(self, code: Code) -> None:
        """Ask what became of it; without an answer in time it is in doubt (again)."""
        self.link.send(Cancel(self.transfer, code))
        self._stop_timer()
        self._timer = self._site.at(self._site.now() + self._site.config.revoke_timeout, self.lost)

    def _take_back(self) -> None:
        self.ended, self.is_lost = True, False
        self._awake()
        self._stop_timer()
        desk = self._site.receive_desk
        give_back = desk.settle if self._extent.state is ExtentState.QUARANTINED else desk.release
        give_back(self._extent)
        self.exposure.end()
        self._ended(self)
        resolve(self.over, None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


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
        self._tries: dict[bytes, int] = {}  # that are left, by incarnation
        site.receive_desk.crowded = self.recall

    def used(self, link: Link, route: Route) -> None:
        """A transfer took this route: once its offer was released, have the lane measured if that matters."""
        if route in _DECIDED_BETWEEN and self._tries.get(link.peer.identity.incarnation, _TRIES):
            self._site.loop.call_soon(self._lend, link)

    def _lend(self, link: Link) -> None:
        site, key = self._site, link.peer.identity.incarnation
        left = self._tries.get(key, _TRIES)
        if not left or not link.is_open or site.draining or self.loans:
            return
        if not self._matters(link):
            self._tries[key] = 0
            return
        nbytes = loan_bytes(site.config.chunk_bytes, site.receive_desk.share.capacity)
        extent = site.receive_desk.take(link.peer.name, nbytes) if nbytes else None
        if extent is None:  # it is needed for what was asked for; a later transfer asks again
            return
        self._tries[key] = left - 1
        loan = Loan(site, link, self._number(), extent, self._doubted, self._over)
        self.loans[loan.transfer] = loan
        loan.begin()

    def result(self, loan: Loan, message: KvAgentResult) -> None:
        """What a peer says of its loan."""
        loan.result(message)
        if message.status is not Status.CANCELLED:  # it measured, or cannot
            self._tries[loan.peer.identity.incarnation] = 0

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
        """Ask for everything back; for shutdown. Returns what resolves as it comes."""
        for loan in self.loans.values():
            loan.cancel()
        return [loan.over for loan in self.loans.values() if not loan.is_lost]

    def lost(self, link: Link) -> None:
        """A link is gone, and what the peer learned with it."""
        self._tries.pop(link.peer.identity.incarnation, None)
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
        return _DECIDED_BETWEEN.issubset(open_routes)
