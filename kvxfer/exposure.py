"""What a decode rank may be reading of ours (route `pull`): the gate before it, and how that ends without its word."""

import asyncio
from collections.abc import Callable
from typing import Final

from kvxfer.evidence import seek
from kvxfer.protocol.session import PeerInfo
from kvxfer.site import Site, no_hold
from kvxfer.telemetry import logger

__all__ = ["Exposure"]

_log: Final = logger("kvxfer.send")


class Exposure:
    """The blocks of one transfer that are announced to be read.

    Attributes:
        peer: Who reads.
        gate: What every announcement leads through.
        fenced: Whether the reader passes it, or reads nothing.
        ends_with_process: Always: a dead reader makes nothing of what it reads.
        ended: Nobody reads any more.

    Args:
        site: The worker.
        peer: The decode rank.
        unread: Called if there is evidence that nobody reads any more, without a word of the reader.
    """

    def __init__(self, site: Site, peer: PeerInfo, unread: Callable[[], None]) -> None:
        self.peer: Final = peer
        self.gate: Final = site.gates.allot()
        self.generation: Final = site.granted(peer, self.gate, mapped=False)
        self.fenced: Final = self.generation > 0
        self.ends_with_process: Final = True
        self.ended = False
        self._site: Final = site
        self._unread = unread
        self._seeking: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Nothing may be read any more: see to it that nothing is."""
        if self._seeking is None and not self.ended:
            self._seeking = seek(self._site, self, f"kvxfer end reads of {self.peer.name}")

    def safe(self, why: str) -> None:
        """There is evidence, other than the reader's word."""
        if not self.ended:
            _log.info("doubt_ended", peer=self.peer.name, reason=why)
            unread = self._unread
            self.end()
            unread()

    def end(self) -> None:
        """Nobody reads any more. Idempotent."""
        if not self.ended:
            self.ended = True
            self._unread = no_hold  # without a cycle, the transfer is freed at once
            self._site.gates.give_back(self.gate)

    def close(self) -> None:
        """The worker is closing: seek no longer."""
        if self._seeking is not None:
            self._seeking.cancel()
