"""What a fetch grants ahead of any answer: all of its chunks in place, or staging memory for the only one."""

from typing import Final

from kvxfer.copy.port import READY
from kvxfer.desk import Desk
from kvxfer.geometry import ChunkGrid, PairPlan, cut_digest
from kvxfer.landing import Host, seen
from kvxfer.memory import Extent, ExtentState
from kvxfer.need import Need
from kvxfer.protocol.messages import Accept, KvAgentResult, Route
from kvxfer.protocol.session import PeerInfo
from kvxfer.site import Site

__all__ = ["IN_PLACE", "Ahead"]

IN_PLACE: Final = frozenset({Route.DIRECT, Route.MAPPED})
"""Routes on which the peer writes the caller's blocks."""


class Ahead:
    """The grant of `Fetch`: a transfer needs no second exchange where its prefill rank has it ready.

    The prefill rank compares the agreement before it writes, as the decode rank would before it grants. So in place
    this side makes no plan of its own, only knows how the transfer is cut; and what is staged it plans meanwhile.

    Args:
        pair: The plan of the pair.
        need: What is asked for.
        desk: Where its extent is taken from: staging memory, or in place its part of what may be under way.
        peer: Name of the prefill rank.
        staged: Which of the two it is.

    Attributes:
        agreement: What both sides must mean alike.
        lease_ms: Milliseconds for which the grant holds, from its arrival on.
        generation: Of the gate that it leads through; set by whoever has one.
        staged: As given.
        desk: As given.
    """

    def __init__(self, pair: PairPlan, need: Need, desk: Desk, *, peer: str, staged: bool) -> None:
        self.agreement: Final = pair.agreement(need.spans, need.tokens)
        self.lease_ms = 0
        self.generation = 0
        self.staged: Final = staged
        self.desk: Final = desk
        self._pair: Final = pair
        self._peer: Final = peer
        self._need: Final = need
        self._extent: Extent | None = None
        self._host: Host | None = None
        self._left = 0
        self._began = 0.0

    @classmethod
    def of(cls, site: Site, peer: PeerInfo, need: Need, routes: list[Route]) -> "Ahead | None":
        """Memory or admission for a whole transfer; None where its chunks are to be granted one by one.

        That is so unless all of it may be under way at once; where a route in place comes first, the caller's blocks
        may be written now; and where `STAGED` does, it is one chunk at the most.
        """
        staged = routes[:1] == [Route.STAGED]
        if not staged and not (routes and routes[0] in IN_PLACE and (need.after is READY or need.after.query())):
            return None
        pair = site.plans.incoming(peer, need.selections)
        desk = site.receive_desk if staged else site.in_place_desk(peer)
        most = max(1, pair.most_staged_bytes(need.tokens) if staged else pair.most_bytes(need.spans, need.tokens))
        if staged and most > site.config.chunk_bytes:
            return None
        made = cls(pair, need, desk, peer=peer.name, staged=staged)
        made._extent = desk.take(peer.account, most)  # last: what raises before has taken nothing
        if made._extent is None:
            return None
        desk.share.write(made._extent)
        made.lease_ms = site.lease_ms(desk.share.held_bytes(peer.account))
        return made

    @property
    def staging(self) -> tuple[int, int]:
        """Address and length of what the peer may write, if that is staging memory."""
        extent = self._extent
        return (extent.address, extent.nbytes) if self.staged and extent is not None else (0, 0)

    def give(self) -> Extent | None:
        """Its extent, which is another's to give back from now on."""
        extent, self._extent = self._extent, None
        return extent

    @property
    def holds(self) -> bool:
        """Whether the peer may be writing under it."""
        return self._extent is not None

    @property
    def limited_by(self) -> str:
        """What keeps pieces from being longer."""
        return self._pair.limited_by

    def grid(self, message: Accept) -> ChunkGrid | None:
        """How the peer cut the transfer; None if it means something else by it."""
        if message.digest != cut_digest(self.agreement, message.layers_per_chunk, message.tokens_per_chunk):
            return None
        tokens = self._need.tokens
        grid = ChunkGrid(
            self._pair.layers, message.layers_per_chunk, message.tokens_per_chunk, tokens.start, tokens.stop
        )
        return grid if len(grid) == message.chunks else None

    def used(self, host: Host, chunks: int) -> None:
        """The peer moves this many chunks of a transfer under it."""
        self._host, self._left, self._began = host, chunks, host.site.now()

    def arrived(self, message: KvAgentResult) -> None:
        """The bytes of a chunk are where they belong."""
        host = self._host
        if host is None:
            return
        host.tally.arrived(self._began, host.site.now(), message.timings)
        if host.moving:
            self._left -= 1
            if not self._left:
                self.void()
            seen(host, message.chunk, message.bytes)

    def give_up(self) -> None:
        """It waits for nothing."""

    def void(self) -> None:
        """The peer writes nothing under it, or nothing any more."""
        extent, self._extent = self._extent, None
        self._host = None
        if extent is not None:
            give_back = self.desk.settle if extent.state is ExtentState.QUARANTINED else self.desk.release
            give_back(extent)

    def settle(self, *, lost: bool) -> None:
        """The transfer has ended at the peer; or the peer is lost, and may still write."""
        extent = self._extent
        if not lost:
            self.void()
        elif extent is not None and extent.state is not ExtentState.QUARANTINED:
            self.desk.quarantine(extent, f"{self._peer} is silent")
