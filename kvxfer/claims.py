"""Claims of this decode rank: requests that still wait for a place here, whose leases it renews at every prefill rank.

However many there are, a renewal takes one frame a prefill rank (or as few as hold them). What is claimed in one turn
of the loop is said together.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, TypeAlias

from kvxfer.errors import BusyError, KvxferError
from kvxfer.link import Link
from kvxfer.peers import Peers
from kvxfer.protocol.messages import MAX_TICKETS, Claim
from kvxfer.site import Site
from kvxfer.telemetry import logger
from kvxfer.tickets import Ticket

__all__ = ["Claims", "TicketKey"]

_log: Final = logger("kvxfer.receive")
_RENEWALS: Final = 3
"""A claim is renewed so many times within a lease."""
_MAX_CLAIMS: Final = 65_536

TicketKey: TypeAlias = tuple[str, str, int]
"""See `Ticket.key`."""


class Claims:
    """Keeps claims and renews them.

    Args:
        site: The worker.
        peers: Links to prefill ranks.
    """

    def __init__(self, site: Site, peers: Peers) -> None:
        self._site: Final = site
        self._peers: Final = peers
        self._kept: dict[TicketKey, Ticket] = {}
        self._unsaid: list[Ticket] = []
        self._away: set[tuple[str, bytes]] = set()  # what was not reached the last time, and has been logged
        self._renewal: asyncio.TimerHandle | None = None
        self._renewal_at = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, ticket: Ticket) -> None:
        """Claim a request from now on.

        Raises:
            BusyError: If there are too many claims.
        """
        if len(self._kept) >= _MAX_CLAIMS and ticket.key not in self._kept:
            raise BusyError(f"{len(self._kept)} claims are kept, which is as many as may")
        self._kept[ticket.key] = ticket
        if not self._unsaid:
            self._site.loop.call_soon(self._say_new)
        self._unsaid.append(ticket)
        self._arm(self._site.config.heartbeat)

    def drop(self, key: TicketKey) -> None:
        """Claim it no longer."""
        self._kept.pop(key, None)

    def close(self) -> None:
        """Stop renewing; for shutdown."""
        self._kept.clear()
        if self._renewal is not None:
            self._renewal.cancel()

    def _say_new(self) -> None:
        unsaid, self._unsaid = self._unsaid, []
        self._say(unsaid)

    def _renew(self) -> None:
        self._renewal = None
        self._say(self._kept.values())
        self._arm(self._site.config.heartbeat)

    def _say(self, tickets: Iterable[Ticket]) -> None:
        """Tell every prefill rank; one that is not connected (any more) is connected first, by one task."""
        by_rank: defaultdict[tuple[str, bytes], list[Ticket]] = defaultdict(list)
        for ticket in tickets:
            epoch = bytes.fromhex(ticket.epoch)
            for endpoint in ticket.rank_endpoints:
                by_rank[endpoint, epoch].append(ticket)
        for (endpoint, epoch), those in by_rank.items():
            link = self._peers.known(endpoint, epoch)
            if link is not None:
                self._send(link, those)
            else:
                reaching = self._reach(endpoint, epoch, those)
                self._site.tasks.spawn(reaching, f"kvxfer claim at {endpoint}", spare=True)

    async def _reach(self, endpoint: str, epoch: bytes, tickets: list[Ticket]) -> None:
        try:
            link = await self._peers.link(endpoint, epoch)
        except KvxferError as error:
            if (endpoint, epoch) not in self._away:  # once, however often it is tried
                self._away.add((endpoint, epoch))
                _log.warning(
                    "claim_not_sent",
                    request=tickets[0].request,
                    count=len(tickets),
                    endpoint=endpoint,
                    error=str(error),
                )
            return
        self._away.discard((endpoint, epoch))
        self._send(link, tickets)

    def _send(self, link: Link, tickets: list[Ticket]) -> None:
        refs = [ticket.ref() for ticket in tickets]
        for first in range(0, len(refs), MAX_TICKETS):
            link.send(Claim(refs[first : first + MAX_TICKETS]))
        self._arm(link.heartbeat)

    def _arm(self, heartbeat: float) -> None:
        """Renew after a heartbeat at the latest: of one that both ends keep, the lease is longer than two."""
        if not self._kept:
            self._away.clear()
            return
        at = self._site.now() + min(self._site.config.offer_lease / _RENEWALS, heartbeat)
        if self._renewal is not None:
            if self._renewal_at <= at:
                return
            self._renewal.cancel()
        self._renewal, self._renewal_at = self._site.at(at, self._renew), at
