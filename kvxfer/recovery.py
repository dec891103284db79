"""Ends doubts about memory that peers were granted: asks them, and looks for evidence that needs no answer."""

import asyncio
from typing import Final

from kvxfer.backoff import Backoff
from kvxfer.decode.receiver import Receiver
from kvxfer.errors import KvxferError
from kvxfer.link import Link
from kvxfer.peers import Peers
from kvxfer.site import Site
from kvxfer.telemetry import logger

__all__ = ["Recoveries"]

_log: Final = logger("kvxfer.receive")
_ASK_SECONDS: Final = 0.5
_ASK_SECONDS_MAX: Final = 10.0


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

    def begin(self, receiver: Receiver) -> None:
        """Something is in doubt: do what ends that, unless it is being done already."""
        receiver.exposure.seek()
        if receiver.transfer not in self._asking and not self._over:
            task = self._site.tasks.spawn(self._ask(receiver), f"kvxfer ask about {receiver.transfer}")
            self._asking[receiver.transfer] = task
            task.add_done_callback(lambda _: self._asking.pop(receiver.transfer, None))

    def cancel(self) -> None:
        """Ask nobody any more; for shutdown."""
        self._over = True
        for task in self._asking.values():
            task.cancel()

    async def _ask(self, receiver: Receiver) -> None:
        """Reach the same incarnation again, so that it can say what became of its writes."""
        backoff = Backoff(self._site.runtime.token, least=_ASK_SECONDS, most=_ASK_SECONDS_MAX)
        while not receiver.exposure.ended:
            if receiver.is_lost:
                try:
                    link = await self._peers.link(receiver.link.endpoint, None)
                except KvxferError:
                    link = None
                if link is not None and link.is_open and self._replaced(receiver, link):
                    if receiver.finished:
                        receiver.exposure.safe("nobody is left who waits to hear that nothing is read")
                    return
                # on the stream on which it was asked already, the answer will come or will not
                if link is not None and link.is_open and link is not receiver.link and receiver.is_lost:
                    receiver.resume(link)
            await asyncio.sleep(backoff.wait())

    @staticmethod
    def _replaced(receiver: Receiver, link: Link) -> bool:
        """Whether another incarnation has taken the peer's place, which knows nothing of what its predecessor did."""
        before = receiver.exposure.peer
        if link.peer.identity.incarnation == before.identity.incarnation:
            return False
        _log.warning("peer_replaced", peer=before.name, incarnation=link.peer.name)
        return True
