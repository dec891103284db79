"""What is over at a prefill rank and may still move: its decode rank may come back and ask, so it is not forgotten.

Forgotten it is

- when what was given up has ended after all;
- when the peer's process has ended;
- when the peer has made its agent anew, so that nothing lands any more which was on its way to the old one, and either
  it is on another host or our own agent was made anew too, which writes by itself on this one;
- on `pull`, when the peer has said that it reads nothing.

Until then it keeps its place among the transfers. Of a peer whose process cannot be watched that is so only while it is
connected: it may never come back, and its places would be lost to everybody. Of its writes the numbers are kept.
"""

from dataclasses import dataclass
from functools import partial
from typing import Final

from kvxfer.link import Link
from kvxfer.mapped import elsewhere
from kvxfer.prefill.sender import Sender
from kvxfer.quota import Quota
from kvxfer.site import Callback, Site, no_hold

__all__ = ["Doubt", "Doubts"]

_MOST: Final = 1 << 14
"""Numbers that are kept without a place at most, of all peers; beyond them places are kept too."""


@dataclass(slots=True, eq=False)
class Doubt:
    """A transfer of which something may still move.

    Attributes:
        ended: Which.
        severed: Whether what may move has left this side, and is on its way to the agent that the peer had then.
        watched: Whether the end of the peer's process will be seen.
        placed: Whether it has a place.
        unwatch: Ends the watch over the peer's process.
        unwant: Says that it needs no new agent.
    """

    ended: Sender
    severed: bool
    watched: bool
    placed: bool = True
    unwatch: Callback = no_hold
    unwant: Callback = no_hold

    @property
    def reader(self) -> Sender | None:
        """Route `pull`: the transfer whose blocks the peer may be reading."""
        return self.ended if self.ended.is_read else None


class Doubts:
    """The books of them.

    Args:
        site: The worker.
        places: Of transfers.
    """

    def __init__(self, site: Site, places: Quota) -> None:
        self._site: Final = site
        self._places: Final = places
        self._doubts: dict[bytes, dict[int, Doubt]] = {}
        self._unplaced = 0

    def __len__(self) -> int:
        return sum(map(len, self._doubts.values()))

    def keep(self, transfer: int, ended: Sender, *, connected: bool) -> None:
        """Something has ended in doubt.

        Args:
            transfer: Its number.
            ended: What it is.
            connected: Whether its peer is.
        """
        peer, processes = ended.link.peer, self._site.processes
        who, far = peer.identity.incarnation, elsewhere(peer.body.host)
        doubt = Doubt(ended, ended.severed or far, processes.ended(peer) is not None)
        if ended.severed and not far:  # so that the peer hears that only its own agent is left
            doubt.unwant = self._site.rebuilds.want(urgent=False)
        self._doubts.setdefault(who, {})[transfer] = doubt
        doubt.unwatch = processes.when_gone(peer, partial(self.forget, who, transfer))
        if not connected:
            self.lost(who)

    def find(self, incarnation: bytes, transfer: int) -> Doubt | None:
        """What is remembered of a transfer."""
        doubts = self._doubts.get(incarnation)
        return None if doubts is None else doubts.get(transfer)

    def of(self, incarnation: bytes) -> list[Doubt]:
        """All of a peer's."""
        return list(self._doubts.get(incarnation, {}).values())

    def lost(self, incarnation: bytes) -> None:
        """A peer is not connected any more."""
        for doubt in self.of(incarnation):
            bound = doubt.watched or doubt.reader is not None
            if doubt.placed and not bound and self._unplaced < _MOST:
                doubt.placed = False
                self._unplaced += 1
                self._places.give(incarnation)

    def renewed(self, link: Link) -> dict[int, Doubt]:
        """By number, what is over since a peer has made its agent anew as often as it says on this link."""
        who = link.peer.identity.incarnation
        over = {
            transfer: doubt
            for transfer, doubt in self._doubts.get(who, {}).items()
            if doubt.severed and doubt.reader is None and doubt.ended.renewals < link.renewals
        }
        for transfer in over:
            self.forget(who, transfer)
        return over

    def forget(self, incarnation: bytes, transfer: int) -> None:
        """Nothing of a transfer is in doubt any more, or nobody is left who could ask. Harmless if it is not known."""
        doubts = self._doubts.get(incarnation, {})
        doubt = doubts.pop(transfer, None)
        if doubt is None:
            return
        if not doubts:
            del self._doubts[incarnation]
        for copy in doubt.ended.copies:  # they keep the peer's gates
            self._site.mover.forget(copy)
        doubt.unwatch()
        doubt.unwant()
        if doubt.placed:
            self._places.give(incarnation)
        else:
            self._unplaced -= 1
