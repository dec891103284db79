"""What a transfer itself does in the caller's blocks: copies, sums and reads, which are over before it is."""

from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from kvxfer.copy.mover import Copy
from kvxfer.copy.port import CopyJob, CopyOutcome, Direction
from kvxfer.copy.tables import Tables
from kvxfer.geometry import SumPlan
from kvxfer.protocol.session import PeerInfo
from kvxfer.rebuilding import want_end
from kvxfer.site import no_hold
from kvxfer.steps import Steps

__all__ = ["MakePost", "OwnWork"]

MakePost: TypeAlias = Callable[[Callable[[CopyOutcome], None], Callable[[bool], None]], CopyJob]
"""What is to be read, from `done` and `late`."""


class OwnWork:
    """Counts what of our own is under way.

    It does not hold the transfer, which holds it: without a cycle that is freed at once. `changed` is called after each
    end of something, when whoever waited for it was told.

    Args:
        peer: Who is read from.
    """

    def __init__(self, peer: PeerInfo) -> None:
        self._peer: Final = peer
        self._copies = 0
        self._reads = 0
        self._doubts = 0

    @property
    def reads(self) -> bool:
        """Whether a read of ours may be under way at the peer."""
        return self._reads > 0 or self._doubts > 0

    @property
    def copies(self) -> bool:
        """Whether a copy of ours is under way here, which needs no peer and no agent."""
        return self._copies > 0

    @property
    def writes(self) -> bool:
        """Whether something of ours may write the caller's blocks."""
        return self._copies > 0 or self.reads

    def copy(
        self,
        steps: Steps,
        changed: Callable[[], None],
        tables: Tables,
        nbytes: int,
        then: Callable[[CopyOutcome], None],
        sums: SumPlan | None = None,
    ) -> None:
        """Copy about so many bytes into the caller's blocks, or add up what is there.

        Raises:
            KvxferError: If no more copies are taken; nothing is copied then.
        """
        steps.copy(tables, Direction.SCATTER, partial(self._copied, changed, then), nbytes=nbytes, sums=sums)
        self._copies += 1

    def read(
        self,
        steps: Steps,
        changed: Callable[[], None],
        post: MakePost,
        then: Callable[[CopyOutcome], None],
    ) -> Copy:
        """Post a read into the caller's blocks.

        Raises:
            KvxferError: If no more is posted.
        """
        site, unwant = steps.site, no_hold

        def ended(result: CopyOutcome) -> None:
            nonlocal unwant
            if result.may_move:
                self._doubts += 1
                unwant = want_end(site, self._peer, urgent=True)
            self._reads -= 1
            then(result)
            changed()

        def over(_: bool) -> None:  # it has ended, or our agent has
            unwant()
            self._doubts -= 1
            changed()

        copy = site.mover.submit(post(partial(steps.run, ended), partial(steps.run, over)), Direction.SCATTER)
        self._reads += 1
        return copy

    def _copied(self, changed: Callable[[], None], then: Callable[[CopyOutcome], None], outcome: CopyOutcome) -> None:
        self._copies -= 1
        then(outcome)
        changed()
