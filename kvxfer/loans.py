"""One piece of staging memory that is lent to a prefill rank, from `Probe` to its answer, or to evidence."""

import asyncio
from collections.abc import Callable
from typing import Final

from kvxfer.errors import Code, ProtocolError
from kvxfer.exposure import Exposure
from kvxfer.fabric.port import Memory
from kvxfer.link import Link
from kvxfer.memory import Extent, ExtentState
from kvxfer.protocol.messages import WHOLE, Cancel, KvAgentResult, MemorySpan, Probe, Route, Status
from kvxfer.site import Site, no_hold, resolve

__all__ = ["Loan"]

_LEASE_S: Final = 5.0
"""Seconds after which memory is asked back: a hundred times as many as writing takes."""


class Loan:
    """Memory that one peer is told to write.

    Attributes:
        link: The control stream; replaced when the same incarnation is reached again.
        peer: The prefill rank.
        transfer: Its number.
        exposure: The gate before it.
        memory: What is lent.
        is_lost: The session is gone, or the peer is silent; it may still write.
        ended: The memory is this side's again.
        over: Resolves with the one or the other.

    Args:
        site: The worker.
        link: The control stream to the prefill rank.
        transfer: Its number.
        extent: What is lent; the loan gives it back.
        doubted: Called when the peer may still write, and nobody asks it.
        over: Called when the memory is this side's again.
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
        self.exposure: Final = Exposure(site, link, str(transfer), self.take_back, {Route.STAGED})
        span = site.staging or MemorySpan("", 0, 0, 0)
        self.memory: Final = Memory(span.kind, span.device, extent.address, extent.nbytes)
        self._doubted: Final = doubted
        self._ended: Final = over
        self._site: Final = site
        self._extent: Final = extent
        self._awake: Callable[[], None] = no_hold
        self._timer: asyncio.TimerHandle | None = None
        self._told = self._recalled = False
        self._written: asyncio.Future[None] | None = None  # until it was looked at

    @property
    def finished(self) -> bool:
        """Whether nothing of it is in doubt."""
        return self.ended

    def begin(self, nonce: bytes) -> "asyncio.Future[None]":
        """Tell the peer.

        Args:
            nonce: What to write there. Nothing is done for it to land before `looked`.

        Returns:
            Resolves when the peer has written.
        """
        site, extent = self._site, self._extent
        self._told = True
        site.receive_desk.share.write(extent)
        self._written = written = site.loop.create_future()
        lease = min(site.config.grant_lease, _LEASE_S)
        granted = self.exposure.grant(mapped=False)
        if self.link.send(Probe(self.transfer, extent.address, extent.nbytes, int(lease * 1000), granted, nonce)):
            self._timer = site.at(site.now() + lease, self.cancel)
        else:
            self.take_back()
        return written

    def looked(self) -> None:
        """Whoever looks at what is written has done so, or waits no longer."""
        written, self._written = self._written, None
        if written is not None and written.done():
            self.take_back()
        elif not self.ended and not self.is_lost:
            self._awake()  # it may have been resumed before this turn
            self._awake = self._site.fabric.hold_awake()

    def cancel(self) -> None:
        """Ask for it back. It is in doubt if the peer does not answer that either."""
        if not self._told:
            self.take_back()  # an answer to what is asked too early would be taken for one to what is told later
        elif not self.ended and not self.is_lost and not self._recalled:
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
            if self.is_lost:  # the peer is there, and its write may need this side to end
                self._awake = self._site.fabric.hold_awake()
                self.exposure.told_in_doubt()
        elif self._written is not None and message.status is Status.OK:
            resolve(self._written, None)
        else:
            self.take_back()

    def lost(self) -> None:
        """The session is gone: the peer may still write."""
        if not self._told:
            self.take_back()
        elif not self.ended:
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
        self.exposure.met(link.renewals)
        self._awake()
        self._awake = self._site.fabric.hold_awake()
        self._ask(Code.PEER_LOST)

    def _ask(self, code: Code) -> None:
        """Ask what became of it; without an answer in time it is in doubt (again)."""
        self.link.send(Cancel(self.transfer, code))
        self._stop_timer()
        self._timer = self._site.at(self._site.now() + self._site.config.revoke_timeout, self.lost)

    def take_back(self) -> None:
        """Nothing of it is written any more, or ever was. Idempotent."""
        if self.ended:
            return
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
