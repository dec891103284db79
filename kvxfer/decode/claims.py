"""Claims of this decode rank: requests that still wait for a place here, whose leases it renews at every prefill rank.

However many there are, a renewal takes one frame a prefill rank (or as few as hold them). What is claimed in one turn
of the loop is said together. Each prefill rank is told as often as its session asks for, whatever others ask for.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, TypeAlias

from kvxfer.errors import BusyError, IdentityError, KvxferError, MismatchError
from kvxfer.link import Link
from kvxfer.peers import Peers
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import MAX_TICKETS
from kvxfer.site import Site
from kvxfer.telemetry import logger
from kvxfer.tickets import Ticket

__all__ = ["Claims", "TicketKey"]

_log: Final = logger("kvxfer.receive")
_MAX_CLAIMS: Final = 65_536
_RETRY_SECONDS: Final = 1.0
"""After how long a rank that was not reached is tried again at most; or a heartbeat of ours, if that is shorter."""
_SLOWER: Final = 6
"""How often the pause doubles for a rank that answers, and is not the one that is meant."""
_RANKS_A_TURN: Final = 512
"""To how many ranks something new is said in one turn of the loop."""

TicketKey: TypeAlias = tuple[str, str, int]
"""See `Ticket.key`."""


@dataclass(slots=True, eq=False)
class _Kept:
    """One request that is claimed.

    Attributes:
        ticket: The latest one.
        holders: How many claims of it were made and not ended.
        given_up: Whether the last fetch of it was given up by its caller: then nothing needs it when they have ended.
    """

    ticket: Ticket
    holders: int = 0
    given_up: bool = False


@dataclass(slots=True, eq=False)
class _Rank:
    """One prefill rank.

    Attributes:
        endpoint: Where it is said to be.
        at: Where the last link to it led: hosts can have two names.
        reaching: Whether it is being connected: it is told everything when it is there, and nothing before.
        failures: How often in a row it was not reached; the first has been logged.
        due: When it is told everything again.
        timer: Fires then.
    """

    endpoint: str
    at: str
    reaching: bool = False
    failures: int = 0
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
        unsaid: What was claimed in this turn of the loop; some of it may have ended since.
    """

    place: object
    epoch: bytes
    ranks: list[_Rank]
    busy: int = 0
    kept: dict[TicketKey, _Kept] = field(default_factory=dict[TicketKey, _Kept])
    unsaid: list[TicketKey] = field(default_factory=list[TicketKey])


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
        self._closed = False

    def __len__(self) -> int:
        return len(self._engine_of)

    def keep(self, ticket: Ticket) -> Callable[[], bool]:
        """Claim a request from now on.

        Returns:
            Ends this claim, to be called once. The request stays claimed while others of it have not ended. If this was
            the last one, it says whether the prefill ranks need not keep the request any longer.

        Raises:
            BusyError: If there are too many claims.
        """
        if len(self) >= _MAX_CLAIMS and ticket.key not in self._engine_of:
            raise BusyError(f"{len(self)} claims are kept, which is as many as may")
        kept = self.drop(ticket.key) or _Kept(ticket)  # a ticket of the same request may name other endpoints
        kept.ticket, kept.holders = ticket, kept.holders + 1
        place = ticket.epoch, ticket.world, ticket.endpoints
        engine = self._engines.get(place)
        if engine is None:
            ranks = [_Rank(endpoint, endpoint) for endpoint in ticket.rank_endpoints]
            engine = self._engines[place] = _Engine(place, bytes.fromhex(ticket.epoch), ranks)
        self._engine_of[ticket.key] = engine
        engine.kept[ticket.key] = kept
        if not engine.unsaid:
            self._site.loop.call_soon(self._say_new, engine)
        engine.unsaid.append(ticket.key)
        return partial(self._let_go, kept)

    def drop(self, key: TicketKey) -> _Kept | None:
        """Claim it no longer, whoever did."""
        engine = self._engine_of.pop(key, None)
        if engine is None:
            return None
        kept = engine.kept.pop(key)
        self._forget(engine)
        return kept

    def note_fetch(self, key: TicketKey, *, given_up: bool) -> bool:
        """A fetch of it begins, or was given up by its caller. Whether it is claimed."""
        engine = self._engine_of.get(key)
        if engine is not None:
            engine.kept[key].given_up = given_up
        return engine is not None

    def close(self) -> None:
        """Stop renewing, and connect nobody; for shutdown."""
        self._closed = True
        for engine in self._engines.values():
            for rank in engine.ranks:
                if rank.timer is not None:
                    rank.timer.cancel()
            engine.kept.clear()  # for those that are being connected
        self._engine_of.clear()
        self._engines.clear()

    def _let_go(self, kept: _Kept) -> bool:
        kept.holders -= 1
        engine = self._engine_of.get(kept.ticket.key)
        last = not kept.holders and engine is not None and engine.kept[kept.ticket.key] is kept
        if last:
            self.drop(kept.ticket.key)
        return last and kept.given_up

    def _forget(self, engine: _Engine) -> None:
        """If nothing is claimed there, and nothing to come would find it here."""
        if not (engine.kept or engine.unsaid or engine.busy):
            self._engines.pop(engine.place, None)

    def _say_new(self, engine: _Engine) -> None:
        unsaid, engine.unsaid = engine.unsaid, []
        engine.busy += 1
        self._say_on(engine, unsaid, iter(engine.ranks))

    def _say_on(self, engine: _Engine, unsaid: list[TicketKey], ranks: Iterator[_Rank]) -> None:
        """Tell some of the ranks, and leave the others to the next turn, also if this one fails."""
        rank, kept = None, [engine.kept[key] for key in unsaid if key in engine.kept]
        try:
            for rank in islice(ranks, _RANKS_A_TURN):
                self._say(engine, rank, kept)
        finally:
            if rank is not None:
                self._site.loop.call_soon(self._say_on, engine, unsaid, ranks)
            else:
                engine.busy -= 1
                self._forget(engine)

    def _renew(self, engine: _Engine, rank: _Rank) -> None:
        rank.timer = None
        engine.busy -= 1
        self._say(engine, rank, list(engine.kept.values()))
        self._forget(engine)

    def _say(self, engine: _Engine, rank: _Rank, kept: list[_Kept]) -> None:
        """Tell a prefill rank; one that is not connected (any more) is connected first, by one task."""
        if not kept or rank.reaching:
            return
        link = self._peers.known(rank.at, engine.epoch)
        if link is not None:
            rank.failures = 0
            self._arm(engine, rank, link.heartbeat)  # its leases are longer than two of its own
            _send(link, kept)
        else:
            rank.reaching = True
            engine.busy += 1
            self._site.tasks.spawn(self._reach(engine, rank), f"kvxfer claim at {rank.endpoint}", spare=True)

    async def _reach(self, engine: _Engine, rank: _Rank) -> None:
        pause = _RETRY_SECONDS
        try:
            link = await self._peers.link(rank.endpoint, engine.epoch)
            rank.at, rank.failures, pause = link.endpoint, 0, link.heartbeat
            _send(link, engine.kept.values())
        except KvxferError as error:
            if isinstance(error, (IdentityError, MismatchError)):  # whoever answers may well say so again
                pause *= 2 ** min(rank.failures, _SLOWER)
            pause = max(min(pause, self._site.config.heartbeat), error.retry_after or 0.0)
            rank.failures += 1
            if rank.failures == 1:
                _log.warning("claim_not_sent", count=len(engine.kept), endpoint=rank.endpoint, error=str(error))
        finally:
            rank.reaching = False
            engine.busy -= 1
            self._arm(engine, rank, pause)

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


def _send(link: Link, kept: Iterable[_Kept]) -> None:
    refs = [one.ticket.ref() for one in kept]
    for first in range(0, len(refs), MAX_TICKETS):
        link.send(wire.Claim(refs[first : first + MAX_TICKETS]))
