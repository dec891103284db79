"""What a peer may be touching of ours: the gate before it, and how that ends without a word of the peer."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from kvxfer.evidence import seek
from kvxfer.gates import SHARED_GATE
from kvxfer.lazy import lazy
from kvxfer.link import Link
from kvxfer.protocol.messages import Route
from kvxfer.protocol.session import PeerInfo
from kvxfer.site import Site, no_hold, resolve
from kvxfer.telemetry import logger

__all__ = ["Exposure"]

_log: Final = logger("kvxfer.worker")
_ENDS_WITH_PROCESS: Final = frozenset({Route.MAPPED, Route.PULL})


class Exposure:
    """Memory that one transfer lets a peer write or read.

    Attributes:
        peer: Who.
        gate: What every grant leads through; there is one from the first grant on.
        fenced: Whether the peer passes it, or touches nothing.
        routes: Those on which the peer may touch it.
        ended: Nobody touches it any more.

    Args:
        site: The worker.
        link: The control stream on which it is granted.
        name: What it is, for logs.
        safe: Called once if there is evidence that nobody touches it any more, other than the peer's word.
        routes: As the attribute.
    """

    def __init__(self, site: Site, link: Link, name: str, safe: Callable[[], None], routes: Iterable[Route]) -> None:
        self.peer: Final[PeerInfo] = link.peer
        self.gate = SHARED_GATE
        self.fenced = False
        self.routes = frozenset(routes)
        self.ended = False
        self._renewals = link.renewals
        self._renewed = self._in_doubt = False  # as the peer has said
        self._site: Final = site
        self._granted_over: Final = link
        self._name: Final = name
        self._safe = safe
        self._granted = False
        self._found: Callable[[], None] | None = None

    @lazy
    def clueless(self) -> "asyncio.Future[None]":
        """Resolves when the peer has said `IN_DOUBT`, and that it has made its agent anew since the last grant.

        What it posted left for the agent that was here, and more it cannot tell before there is another.
        """
        return self._site.loop.create_future()

    @property
    def ends_with_process(self) -> bool:
        """Whether nothing of it goes on, or does harm, when the peer's process has ended.

        What a process left to a socket may still land, whoever reads that out: only a new agent of ours ends it. A
        reader's end harms nobody.
        """
        return self.routes <= _ENDS_WITH_PROCESS

    @property
    def in_doubt(self) -> bool:
        """Whether it may be memory of the caller's, and not staging memory."""
        return not self.routes <= {Route.STAGED}

    def grant(self, *, mapped: bool) -> int:
        """What a grant says of the gate that it leads through: 0 where the peer passes none.

        Args:
            mapped: Whether the peer's own copies write there.
        """
        if self.gate == SHARED_GATE:
            self.gate = self._site.gates.allot()
        generation = self._site.granted(self.peer, self.gate, mapped=mapped)
        self.fenced = (self.fenced or not self._granted) and generation > 0
        self._granted = True
        self._renewals, self._renewed = self._granted_over.renewals, False
        return generation

    def met(self, renewals: int) -> None:
        """The peer says how often it has made its agent anew."""
        self._renewed = self._renewed or renewals > self._renewals
        self._consider()

    def told_in_doubt(self) -> None:
        """The peer says that it does not know what became of it."""
        self._in_doubt = True
        self._consider()

    def _consider(self) -> None:
        if self._renewed and self._in_doubt:
            resolve(self.clueless, None)

    def void(self) -> None:
        """The peer touches nothing under what was granted so far."""
        self._granted = self.fenced = False

    def seek(self) -> None:
        """Nothing more is granted, or the peer says nothing: look for evidence, until there is some or it has ended."""
        if self._found is None and not self.ended:
            self._found = seek(self._site, self, f"kvxfer look after {self._name}")

    def safe(self, why: str) -> None:
        """There is evidence, other than the peer's word. To no effect if it has ended meanwhile."""
        if not self.ended:
            _log.info("doubt_ended", peer=self.peer.name, transfer=self._name, reason=why)
            safe = self._safe
            self.end()
            safe()

    def end(self) -> None:
        """Nobody touches it any more. Idempotent."""
        if not self.ended:
            self.ended = True
            self._safe = no_hold  # without a cycle, the transfer is freed at once
            self._site.gates.give_back(self.gate)
            if self._found is not None:
                self._found()
