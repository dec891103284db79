"""What really moved: ports that note every copy and every post, and memory in which every byte has a name.

The ledger keeps a shadow of all memory, in which each byte of a request's cache is the code of its coordinates and
everything else is nothing. What the ports see is done to the shadow too, so that at the end it is known which byte of
the cache travelled where and how often. No plan is asked.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from execute import byte_pairs, table_pairs
from ranks import I64, Rank, World

from kvxfer.copy.host import HostExecutor
from kvxfer.copy.port import CopyJob, Direction
from kvxfer.fabric.port import Descriptors, Handle, Operation
from kvxfer.geometry import Pieces
from kvxfer.testing import LoopbackNetwork, LoopbackTransport

NOTHING = -1


class Ledger:
    """The shadow, and what was done to it.

    Attributes:
        wire: By decode agent, the codes of all bytes that were sent to it or read by it.
        written: By decode agent, the offsets of all bytes of its cache that were written, in order.
        posts: How many posts there were.
    """

    def __init__(self) -> None:
        self.wire: dict[str, list[I64]] = {}
        self.written: dict[str, list[I64]] = {}
        self.posts = 0
        self._regions: list[tuple[int, I64, str]] = []
        self._staging: list[range] = []
        self._lock = threading.Lock()

    def watch(self, base: int, nbytes: int, *, agent: str = "") -> None:
        """Shadow some memory; writes to it count as the agent's if it has a name."""
        self._regions.append((base, np.full(nbytes, NOTHING), agent))

    def watch_staging(self, base: int, nbytes: int) -> None:
        """Shadow memory that chunks are gathered into, or scattered from."""
        self.watch(base, nbytes)
        self._staging.append(range(base, base + nbytes))

    def begin(self, world: World) -> None:
        """A request begins: name its bytes, and forget what was before."""
        self.wire, self.written, self.posts = {}, {}, 0
        for _, cells, _ in self._regions:
            cells[:] = NOTHING
        for rank in world.prefill:
            at, codes = rank.cells(world.coder).T
            self._region(rank.base)[1][at] = codes

    def holds(self, rank: Rank) -> I64:
        """What the bytes of a rank's cache are now."""
        return self._region(rank.base)[1]

    def copied(self, job: CopyJob) -> None:
        """A copy was given to an executor."""
        with self._lock:
            self._move(table_pairs(job.plan))

    def posted(self, agent: str, peer: str, operation: Operation, local: I64, remote: I64) -> None:
        """Pieces were posted: n addresses and lengths on either side."""
        writing = operation is Operation.WRITE
        src, dst = (local, remote) if writing else (remote, local)
        with self._lock:
            self.posts += 1
            pairs = byte_pairs(Pieces(src[:, 0], dst[:, 0], src[:, 1]))
            moved = self._move(pairs)
            if any(int(local[0, 0]) in staging for staging in self._staging):
                base, cells, _ = self._region(int(local[0, 0]))
                cells[pairs[:, 0] - base] = NOTHING  # the next chunk may leave some of it in gaps: no cache any more
            self.wire.setdefault(peer if writing else agent, []).append(moved)

    def _move(self, pairs: I64) -> I64:
        if not len(pairs):
            return np.zeros(0, np.int64)
        (src_base, src, _), (dst_base, dst, agent) = (self._region(int(side.min())) for side in pairs.T)
        to = pairs[:, 1] - dst_base
        moved = src[pairs[:, 0] - src_base]
        dst[to] = moved
        if agent:
            self.written.setdefault(agent, []).append(to)
        return moved

    def _region(self, address: int) -> tuple[int, I64, str]:
        return next(region for region in self._regions if region[0] <= address < region[0] + len(region[1]))


class RecordingNetwork(LoopbackNetwork):
    """A loopback network with a ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()


class RecordingTransport(LoopbackTransport):
    """The shipped loopback, of which every post is noted."""

    def __init__(self, name: str, network: RecordingNetwork) -> None:
        super().__init__(name, network)
        self._ledger = network.ledger

    def post(self, peer: str, operation: Operation, local: Descriptors, remote: Descriptors) -> Handle:
        """Note it, and make it."""
        assert np.array_equal(local.pieces[:, 1], remote.pieces[:, 1])
        self._ledger.posted(self.name, peer, operation, local.pieces, remote.pieces)
        return super().post(peer, operation, local, remote)


def recording_executor(ledger: Ledger) -> type[HostExecutor]:
    """The shipped copies on CPU memory, of which every job is noted."""

    class RecordingExecutor(HostExecutor):
        def submit(self, job: CopyJob, direction: Direction) -> None:
            ledger.copied(job)
            super().submit(job, direction)

    return RecordingExecutor


def watch_all(ledger: Ledger, world: World, workers: Sequence[Any]) -> None:
    """Shadow the caches of all ranks, and the staging memory of their workers."""
    for side, ranks in (("", world.prefill), ("decode", world.decode)):
        for rank in ranks:
            ledger.watch(rank.base, len(rank.memory), agent=f"{side}{rank.number}" if side else "")
    for worker in workers:
        for span in (worker._site.sending, worker._site.staging):
            ledger.watch_staging(span.address, span.length)
