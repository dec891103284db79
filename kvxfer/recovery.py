"""Ends doubts about memory that peers were granted: asks them, and looks for evidence that needs no answer."""

import asyncio
from typing import Final, Protocol

from kvxfer.backoff import Backoff
from kvxfer.errors import KvxferError
from kvxfer.exposure import Exposure
from kvxfer.link import Link
from kvxfer.peers import Peers
from kvxfer.site import Site
from kvxfer.telemetry import logger

__all__ = ["Owed", "Recoveries"]

_log: Final = logger("kvxfer.receive")
_ASK_SECONDS: Final = 0.5
_ASK_SECONDS_MAX: Final = 10.0


class Owed(Protocol):
    """A transfer, or a loan, whose peer may still write what it was granted, and has not said what became of it.

    Or it is the peer that waits for an answer (`pull`).
    """

    @property
    def transfer(self) -> int:
        """Its number."""
        ...

    @property
    def exposure(self) -> Exposure:
        """What the peer may touch."""
        ...

    @property
    def link(self) -> Link:
        """The control stream on which it was granted."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing of it is in doubt on this side: only the peer may wait to hear that."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the peer was not asked what became of it since the session was lost."""
        ...

    def resume(self, link: Link) -> None:
        """The same incarnation is back: ask what became of it."""
        ...


class Recoveries:
    """What is in doubt: peers are asked, and evidence is sought, until either has ended the doubt.

    Args:
        site: The worker.
        peers: Links to prefill ranks.
    """

    def __init__(self, site: Site, peers: Peers) -> None:
        self._site: Final = site
        self._peers: Final = peers
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._over = False

    def begin(self, owed: Owed) -> None:
        """Something is in doubt: do what ends that, unless it is being done already."""
        owed.exposure.seek()
        if owed.transfer not in self._asking and not self._over:
            task = self._site.tasks.spawn(self._ask(owed), f"kvxfer ask about {owed.transfer}")
            self._asking[owed.transfer] = task
            task.add_done_callback(lambda _: self._asking.pop(owed.transfer, None))

    def cancel(self) -> None:
        """Ask nobody any more; for shutdown."""
        self._over = True
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, owed: Owed) -> None:
        """Reach the same incarnation again, so that it can say what became of its writes."""
        backoff = Backoff(self._site.runtime.token, least=_ASK_SECONDS, most=_ASK_SECONDS_MAX)
        while not owed.exposure.ended:
            if owed.is_lost:
                try:
                    link = await self._peers.link(owed.link.endpoint, None)
                except KvxferError:
                    link = None
                if link is not None and link.is_open and self._replaced(owed, link):
                    if owed.finished:
                        owed.exposure.safe("nobody is left who waits to hear that nothing is read")
                    return
                # on the stream on which it was asked already, the answer will come or will not
                if link is not None and link.is_open and link is not owed.link and owed.is_lost:
                    owed.resume(link)
            await asyncio.sleep(backoff.wait())

    @staticmethod
    def _replaced(owed: Owed, link: Link) -> bool:
        """Whether another incarnation has taken the peer's place, which knows nothing of what its predecessor did."""
        before = owed.exposure.peer
        if link.peer.identity.incarnation == before.identity.incarnation:
            return False
        _log.warning("peer_replaced", peer=before.name, incarnation=link.peer.name)
        return True
