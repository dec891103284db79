"""Finds out whether a prefill rank on this host moves by itself what it writes here (PROTOCOL.md section 5.7).

UCX takes one of several lanes and tells the writer alone which, whose word is no proof. Over CMA or CUDA IPC the
writer's process moves the bytes, through a socket or shared memory ours takes them in. What a process that died had
left to the latter may land at any later time; the former ends with it. So, once bytes have moved over a lane, the peer
is asked to write some that nobody could know, few and many, while our transport is not called. If they are there by
then, nothing here has moved them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Final

from kvxfer.config import Config
from kvxfer.gauging import repeated, spared
from kvxfer.link import Link
from kvxfer.loans import Loan
from kvxfer.mapped import unlike
from kvxfer.memory import peek
from kvxfer.protocol.messages import Capability, Route
from kvxfer.site import Site
from kvxfer.telemetry import logger

__all__ = ["Prover", "proof_bytes"]

_log: Final = logger("kvxfer.receive")
_LARGEST: Final = 1 << 20
"""Bytes that are written at most: what is larger goes the same way."""
_NONCE_BYTES: Final = 16
_PAUSE_S: Final = 0.02
"""Seconds for which the transport is not called at most."""
_TRIES: Final = 6
_APART_S: Final = 0.1
"""Seconds to the second try; each further one is twice as far away, up to"""
_APART_MAX_S: Final = 3.2
_POLITE: Final = 2
"""Tries that give way to whoever is held awake for. Later ones do not: for whom our transport has to move bytes, these
come that much later, a few times at most."""


def proof_bytes(config: Config, capacity: int) -> int:
    """How much of a share of staging memory is taken to prove a lane; 0 if there is too little to say anything.

    As much as is written at once at most, in place or not.

    Args:
        config: Of the worker.
        capacity: Of the share, in bytes.
    """
    nbytes = min(_LARGEST, max(config.chunk_bytes, config.in_place_chunk_bytes))
    return nbytes if spared(nbytes, config.chunk_bytes, capacity) else 0


@dataclass(slots=True, eq=False)
class _Lane:
    """What was done to find out about the lane that belongs to a link.

    Attributes:
        tries: So far.
        apart: Seconds to the next, or to the next look whether there is memory for one.
        timer: Until then.
    """

    tries: int = 0
    apart: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Prover:
    """Tries each lane a few times, until it is known.

    Args:
        site: The worker.
        lend: Takes so much staging memory to lend it to the peer of a link; None if it cannot be had now.
    """

    def __init__(self, site: Site, lend: Callable[[Link, int], Loan | None]) -> None:
        self._site: Final = site
        self._lend: Final = lend
        self._lanes: dict[Link, _Lane] = {}

    def due(self, link: Link) -> None:
        """Bytes have moved over this lane: begin, unless that was done before or is of no use."""
        if link not in self._lanes and link.is_open:
            lane = self._lanes[link] = _Lane()
            if self._possible(link):
                lane.timer = self._site.loop.call_later(0.0, self._begin, link)

    def renewed(self, link: Link) -> None:
        """An agent of one of both sides was made anew: what was seen before says nothing of the lane that is now."""
        link.proved = frozenset()
        self.lost(link)

    def lost(self, link: Link) -> None:
        """A link is gone."""
        lane = self._lanes.pop(link, None)
        if lane is not None and lane.timer is not None:
            lane.timer.cancel()

    def close(self) -> None:
        """Begin nothing any more."""
        for link in list(self._lanes):
            self.lost(link)

    def _begin(self, link: Link) -> None:
        self._site.tasks.spawn(self._try(link), f"kvxfer prove the lane to {link.peer.name}")

    async def _try(self, link: Link) -> None:
        lane = self._lanes.get(link)
        if lane is None or self._site.draining:
            return
        routes = self._routes(link)
        loan = self._lend(link, self._nbytes)
        if loan is not None:
            lane.tries += 1
            landed = await self._landed(link, loan, firm=lane.tries > _POLITE)
            if self._lanes.get(link) is not lane:
                return
            if landed:
                link.proved = routes
                _log.info("lane_proved", peer=link.peer.name, attempt=lane.tries)
                return
        if lane.tries == _TRIES:
            _log.info("lane_not_proved", peer=link.peer.name, attempt=lane.tries)
        elif link in self._lanes:
            lane.apart = min(2 * lane.apart or _APART_S, _APART_MAX_S)
            lane.timer = self._site.loop.call_later(lane.apart, self._begin, link)

    async def _landed(self, link: Link, loan: Loan, *, firm: bool) -> bool:
        """Lend memory, and see whether it was written while the transport was not called."""
        site = self._site
        try:
            pause = await asyncio.wrap_future(site.fabric.pause(_PAUSE_S, firm=firm))
        except BaseException:
            loan.take_back()
            raise
        if pause is None or not pause.intact or loan.ended or not link.is_open:
            loan.take_back()  # the peer was not told of it
            return False
        nonce = site.runtime.token(_NONCE_BYTES)
        written = loan.begin(nonce)
        try:
            await asyncio.wait({written, loan.over}, timeout=_PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
            if not written.done():
                return False
            memory = loan.memory
            look = partial(peek, memory.kind, memory.device, memory.address, memory.nbytes)
            found = await site.runtime.in_thread(look)
            return found == repeated(nonce, memory.nbytes) and pause.intact  # asked last: it was so all the while
        finally:
            pause.until = -inf
            loan.looked()

    @property
    def _nbytes(self) -> int:
        return proof_bytes(self._site.config, self._site.receive_desk.share.capacity)

    def _possible(self, link: Link) -> bool:
        """Whether the peer is on this host, and its end can be seen, and there is memory on both sides."""
        peer = link.peer
        locked = peer.body.locks and not unlike(peer.body.host)
        near = locked or self._site.processes.ended(peer) is not None
        able = Capability.PROBE in Capability(peer.identity.capabilities)
        return bool(near and able and self._nbytes)

    def _routes(self, link: Link) -> frozenset[Route]:
        """Routes on which bytes go between memory of the kinds that were seen.

        Blocks on a GPU may lie in memory that cannot be exported, whatever the arena is: then they go another way.
        """
        hosts = all(geometry.kind != "cuda" for geometry in (self._site.geometry, self._site.plans.geometry(link.peer)))
        return frozenset({Route.STAGED, Route.DIRECT} if hosts else {Route.STAGED})
