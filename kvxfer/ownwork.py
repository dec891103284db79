"""What a transfer itself does in the caller's blocks: copies, sums and reads, which are over before it is."""

from collections.abc import Callable
from functools import partial
from typing import Final

from kvxfer.copy.port import CopyOutcome, Direction
from kvxfer.fabric.port import Outcome, Post, PostResult
from kvxfer.geometry import CopyPlan, SumPlan
from kvxfer.protocol.session import PeerInfo
from kvxfer.rebuilding import strand
from kvxfer.site import Site
from kvxfer.steps import Steps

__all__ = ["OwnWork"]


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
        self._doubt = False

    @property
    def reads(self) -> bool:
        """Whether a read of ours may be under way at the peer."""
        return self._reads > 0 or self._doubt

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
        plan: CopyPlan,
        nbytes: int,
        then: Callable[[CopyOutcome], None],
        sums: SumPlan | None = None,
    ) -> None:
        """Copy about so many bytes into the caller's blocks, or add up what is there.

        Raises:
            KvxferError: If the executor takes no more copies; nothing is copied then.
        """
        steps.copy(plan, Direction.SCATTER, partial(self._copied, changed, then), nbytes=nbytes, sums=sums)
        self._copies += 1

    def read(
        self,
        steps: Steps,
        changed: Callable[[], None],
        post: Callable[[Callable[[PostResult], None]], Post],
        then: Callable[[PostResult], None],
    ) -> None:
        """Post a read into the caller's blocks."""
        site = steps.site
        wanted = post(partial(site.hand_over, steps.run, self._read, site, changed, then))
        self._reads += 1
        site.fabric.post(wanted)

    def _copied(self, changed: Callable[[], None], then: Callable[[CopyOutcome], None], outcome: CopyOutcome) -> None:
        self._copies -= 1
        then(outcome)
        changed()

    def _read(
        self, site: Site, changed: Callable[[], None], then: Callable[[PostResult], None], result: PostResult
    ) -> None:
        # where the transport says that the peer is gone, it has ended its own work too
        gone = result.error is not None and result.error.disconnected
        if result.outcome is Outcome.IN_DOUBT and not gone:
            self._doubt = True
            strand(site, self._peer, partial(self._rebuilt, changed), urgent=True)
        self._reads -= 1
        then(result)
        changed()

    def _rebuilt(self, changed: Callable[[], None]) -> None:
        """No read of ours writes the caller's blocks any more."""
        self._doubt = False
        changed()
