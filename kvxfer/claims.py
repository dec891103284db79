"""Claims of this decode rank: requests that still wait for a place here, whose leases it renews at every prefill rank.

However many there are, a renewal takes one frame a prefill rank (or as few as hold them). What is claimed in one turn
of the loop is said together. Each prefill rank is told as often as its session asks for, whatever others ask for.
"""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
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
_MAX_CLAIMS: Final = 65_536
_RETRY_SECONDS: Final = 1.0
"""After how long a rank that was not reached is tried again at most; or a heartbeat of ours, if that is shorter."""
_REMEMBERED: Final = 4096
"""Ranks of which it has been logged that they were not reached."""

TicketKey: TypeAlias = tuple[str, str, int]
"""See `Ticket.key`."""


@dataclass(slots=True, eq=False)
class _Rank:
    """One prefill rank.

    Attributes:
        endpoint: Where it is.
        reaching: Whether it is being connected: it is told everything when it is there, and nothing before.
        due: When it is told everything again.
        timer: Fires then.
    """

    endpoint: str
    reaching: bool = False
    due: float = 0.0
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Engine:
    """One prefill engine, as tickets name it. It is kept for a heartbeat when nothing is claimed there any more.

    Attributes:
        place: By what it is found.
        epoch: Its epoch.
        ranks: All of them.
        busy: How many timers they have, and how many of them are being connected.
        kept: What is claimed there.
        unsaid: What was claimed in this turn of the loop.
    """

    place: object
    epoch: bytes
    ranks: list[_Rank]
    busy: int = 0
    kept: dict[TicketKey, Ticket] = field(default_factory=dict[TicketKey, Ticket])
    unsaid: list[Ticket] = field(default_factory=list[Ticket])


class Claims:
    """Keeps claims and renews them.

    Args:
        site: The worker.
        peers: Links to prefill ranks.
    """

    def __init__(self, site: Site, peers: Peers) -> None:
        self._site: Final = site
        self._peers: Final = peers
        self._engine_of: dict[TicketKey, _Engine] = {}
        self._engines: dict[object, _Engine] = {}
        self._away: dict[tuple[str, bytes], None] = {}  # who was not reached the last time, which has been logged
        self._closed = False

    def __len__(self) -> int:
        return len(self._engine_of)

    def keep(self, ticket: Ticket) -> None:
        """Claim a request from now on.

        Raises:
            BusyError: If there are too many claims.
        """
        if len(self) >= _MAX_CLAIMS and ticket.key not in self._engine_of:
            raise BusyError(f"{len(self)} claims are kept, which is as many as may")
        self.drop(ticket.key)  # a ticket of the same request may name other endpoints
        place = ticket.epoch, ticket.world, ticket.endpoints
        engine = self._engines.get(place)
        if engine is None:
            ranks = [_Rank(endpoint) for endpoint in ticket.rank_endpoints]
            engine = self._engines[place] = _Engine(place, bytes.fromhex(ticket.epoch), ranks)
        self._engine_of[ticket.key] = engine
        engine.kept[ticket.key] = ticket
        if not engine.unsaid:
            self._site.loop.call_soon(self._say_new, engine)
        engine.unsaid.append(ticket)

    def drop(self, key: TicketKey) -> None:
        """Claim it no longer."""
        engine = self._engine_of.pop(key, None)
        if engine is not None:
            del engine.kept[key]
            self._forget(engine)

    def close(self) -> None:
        """Stop renewing, and connect nobody; for shutdown."""
        self._closed = True
        for engine in self._engines.values():
            for rank in engine.ranks:
                if rank.timer is not None:
                    rank.timer.cancel()
        self._engine_of.clear()
        self._engines.clear()

    def _forget(self, engine: _Engine) -> None:
        """If nothing is claimed there, and nothing to come would find it here."""
        if not (engine.kept or engine.unsaid or engine.busy):
            self._engines.pop(engine.place, None)

    def _say_new(self, engine: _Engine) -> None:
        unsaid, engine.unsaid = engine.unsaid, []
        for rank in engine.ranks:
            self._say(engine, rank, unsaid)
        self._forget(engine)

    def _renew(self, engine: _Engine, rank: _Rank) -> None:
        rank.timer = None
        engine.busy -= 1
        self._say(engine, rank, engine.kept.values())
        self._forget(engine)

    def _say(self, engine: _Engine, rank: _Rank, tickets: Collection[Ticket]) -> None:
        """Tell a prefill rank; one that is not connected (any more) is connected first, by one task."""
        if not tickets or rank.reaching or self._closed:
            return
        link = self._peers.known(rank.endpoint, engine.epoch)
        if link is not None:
            self._arm(engine, rank, link.heartbeat)  # its leases are longer than two of its own
            _send(link, tickets)
        elif engine.kept:
            rank.reaching = True
            engine.busy += 1
            self._site.tasks.spawn(self._reach(engine, rank), f"kvxfer claim at {rank.endpoint}", spare=True)

    async def _reach(self, engine: _Engine, rank: _Rank) -> None:
        place, pause = (rank.endpoint, engine.epoch), min(self._site.config.heartbeat, _RETRY_SECONDS)
        try:
            link = await self._peers.link(*place)
            self._away.pop(place, None)
            pause = link.heartbeat
            _send(link, engine.kept.values())
        except KvxferError as error:
            pause = max(pause, error.retry_after or 0.0)
            self._log_away(place, engine, error)
        finally:
            rank.reaching = False
            engine.busy -= 1
            self._arm(engine, rank, pause)

    def _log_away(self, place: tuple[str, bytes], engine: _Engine, error: KvxferError) -> None:
        """Once, however often it is tried."""
        if place not in self._away:
            _log.warning("claim_not_sent", count=len(engine.kept), endpoint=place[0], error=str(error))
            if len(self._away) >= _REMEMBERED:
                del self._away[next(iter(self._away))]
            self._away[place] = None

    def _arm(self, engine: _Engine, rank: _Rank, seconds: float) -> None:
        """Tell a rank everything after so many seconds at the latest."""
        if self._closed:
            return
        due = self._site.now() + seconds
        if rank.timer is None:
            engine.busy += 1
        elif rank.due <= due:
            return
        else:
            rank.timer.cancel()
        rank.due, rank.timer = due, self._site.at(due, partial(self._renew, engine, rank))


def _send(link: Link, tickets: Iterable[Ticket]) -> None:
    refs = [ticket.ref() for ticket in tickets]
    for first in range(0, len(refs), MAX_TICKETS):
        link.send(Claim(refs[first : first + MAX_TICKETS]))
