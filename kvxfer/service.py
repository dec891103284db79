"""A worker that is open: its two roles, and the control streams between them and peers."""

import asyncio
from collections.abc import Iterable
from itertools import chain
from typing import Final

from kvxfer.decode.role import Decode
from kvxfer.errors import BusyError, Code, KvxferError
from kvxfer.greeting import greeting
from kvxfer.link import Link, admitted, succeeded
from kvxfer.peers import Peers
from kvxfer.planning import Agreed
from kvxfer.prefill.role import Prefill
from kvxfer.protocol import messages as wire
from kvxfer.protocol.session import PeerInfo, Role, Session
from kvxfer.rebuilding import Rebuilding
from kvxfer.site import Site
from kvxfer.streams import Listener, Streams
from kvxfer.telemetry import logger
from kvxfer.watch import LoopWatch, TransportWatch

__all__ = ["Service"]

_log: Final = logger("kvxfer.worker")
_LEAVING: Final = wire.Goodbye(Code.DRAINING, "the worker is draining")


class Service:
    """One rank's service, on the loop on which it was made.

    Args:
        site: What it stands on.

    Attributes:
        site: As given.
        prefill: What peers fetch here.
        decode: What is fetched from peers.
        peers: Links to prefill ranks.
        links: All that are open.
        greeting: Those whose handshake is not complete.
        rebuilding: Makes the agent anew.
        listener: Where peers connect; None before `listen`.
        frames_sent: As of the worker's metrics.
    """

    def __init__(self, site: Site) -> None:
        self.site: Final = site
        self.links: Final[set[Link]] = set()
        self.greeting: Final[set[Link]] = set()
        self.listener: Listener | None = None
        self.frames_sent = site.metrics.frames_sent
        self._streams: Final = Streams(site.config, site.runtime, site.tasks, self._link)
        self.peers: Final = Peers(site, self._streams.connect)
        self.prefill: Final = Prefill(site)
        self.decode: Final = Decode(site, self.peers)
        roles = self.prefill, self.decode
        self.rebuilding: Final = Rebuilding(site, roles, lambda: self.links, self.decode.renewed)
        self._watch: Final = LoopWatch()
        look = TransportWatch(site, roles).look
        self._watch.start(site.now, site.at, site.metrics, look, own=site.config.loop == "own")

    async def listen(self) -> Listener:
        """Let peers connect."""
        self.listener = listener = await self._streams.listen()
        return listener

    def begin_drain(self) -> None:
        """Refuse new work from now on, and tell every peer. Idempotent."""
        if not self.site.draining:
            self.site.draining = True
            for link in self.links:
                link.send(_LEAVING)
            self.prefill.refuse_parked()

    async def end(self, until: float) -> None:
        """End all that is under way, bounded, and close every link.

        Args:
            until: When what has not ended is waited for no longer, by the worker's clock.
        """
        site = self.site
        site.draining = True
        self._watch.stop()
        if self.listener is not None:
            self.listener.close()
        self.rebuilding.close()
        self.decode.cancel_all()
        self.prefill.withdraw_all()
        await site.tasks.drain(until - site.now(), spare=False)
        self.decode.abandon_all()
        site.closing.set_result(None)  # whoever looks for evidence looks once more
        site.tasks.cancel()
        await site.tasks.drain(site.config.close_timeout)
        links = [*self.links, *self.greeting]
        for link in links:
            link.close("the worker was closed")
        await asyncio.gather(*(link.wait_gone(site.config.close_timeout) for link in links))
        if not await site.lookouts.drain(site.config.close_timeout):
            site.lookouts.cancel()
        self.decode.close()
        self.prefill.book.close()

    # --- links

    def session(self, role: Role, *, process: int | None, endpoint: str, since: float) -> tuple[Session, bool]:
        """A fresh session for a new stream, and whether its peer is trusted with addresses."""
        most = self.site.config.max_streams
        if role is Role.SERVER and admitted((*self.links, *self.greeting)) >= most:
            raise BusyError(f"as many control streams are open as may: max_streams={most}")
        return greeting(self.site, role, self._engaged, process=process, endpoint=endpoint, since=since)

    def meet(self, link: Link, peer: PeerInfo) -> "asyncio.Task[Agreed]":
        """A peer has said what it is."""
        looking = self.site.examine(peer, sending=link.role is Role.SERVER)
        return self.site.tasks.spawn(looking, f"kvxfer meet {peer.name}", spare=True)

    def opened(self, link: Link, peer: PeerInfo, found: Agreed) -> None:
        """A handshake is complete. A new session of an incarnation ends its old one."""
        site, sending = self.site, link.role is Role.SERVER
        older = succeeded(link, (*self.links, *self.greeting))
        site.meet(peer, found, trusted=link.trusted, sending=sending, process=link.process)
        self.links.add(link)  # before the old one is closed: else its end would be taken for that of the peer
        for other in older:
            other.close("a newer session of the same peer was opened")
        _log.info("peer_connected", peer=peer.name, role=link.role.value, endpoint=link.endpoint)
        if site.draining:
            link.send(_LEAVING)
        (self.prefill if sending else self.decode).opened(link)
        if link.outdated(site.body[link.trusted]):
            self.rebuilding.tell(link)

    def lost(self, link: Link, error: KvxferError) -> None:
        """A link is gone."""
        self.links.discard(link)
        _log.info("peer_disconnected", peer=link.peer.name, role=link.role.value, reason=str(error))
        if link.role is Role.CLIENT:
            self.peers.lost(link)
            self.decode.lost(link, error)
        else:
            self.prefill.lost(link)
        incarnation = link.peer.identity.incarnation
        if all(other.peer.identity.incarnation != incarnation for other in self.links):
            self.site.forget(link.peer)

    def received(self, link: Link, message: wire.Message) -> None:
        """Hand a message to the role that it is for."""
        self.site.metrics.frames_received[type(message).__name__] += 1
        if isinstance(message, wire.Goodbye):
            _log.info("goodbye_heard", peer=link.peer.name, role=link.role.value, reason=message.reason)
        elif isinstance(message, wire.Renewed):
            link.renewals = max(link.renewals, message.renewals)
            self.site.lanes.renewed(link.peer, message.renewals, message.metadata)
            self.prefill.renewed(link)
            self.decode.renewed(link)
        elif link.role is Role.SERVER:
            self.prefill.handle(link, message)
        else:
            self.decode.handle(link, message)

    def _engaged(self) -> Iterable[Link]:
        return chain(self.links, self.greeting, self.decode.owing)

    def _link(self, role: Role, endpoint: str) -> Link:
        link = Link(role, endpoint, self, self.site.runtime)
        self.greeting.add(link)
        link.ready.add_done_callback(lambda _: self.greeting.discard(link))
        return link
