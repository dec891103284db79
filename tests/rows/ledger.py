"""What really moved: ports that note every copy and every post, and memory in which every byte has a name.

The ledger keeps a shadow of all memory, in which each byte of a request's cache is the code of its coordinates and
everything else is nothing. What the ports see is done to the shadow too, so that at the end it is known which byte of
the cache travelled where and how often. No plan is asked.
"""

import threading
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from decoded import accesses
from execute import byte_pairs
from inside import staging
from msgspec.structs import replace
from numpy.typing import NDArray
from opened import singly
from ranks import I64, World

from kvxfer.copy.mover import Flow, Mover
from kvxfer.copy.port import CopyJob, CopyOutcome, Descriptors, Direction, Operation
from kvxfer.fabric.loopback import Handle
from kvxfer.geometry import Pieces
from kvxfer.testing import LoopbackNetwork, LoopbackTransport

NOTHING = -1


class Ledger:
    """The shadow, and what was done to it.

    A copy from a rank's cache straight into another's crosses between them, as a post does. Where elements are
    converted, every byte of an element has the element's code, on either side.
    """

    def __init__(self) -> None:
        # by decode agent, the codes of all bytes that were sent to it, read by it, or copied into its cache from
        # another's
        self.wire: dict[str, list[I64]] = {}
        # by decode agent, the addresses of all bytes of its cache that were written, in order
        self.written: dict[str, list[I64]] = {}
        self.posts = 0  # how many posts there were
        self.turns: dict[bytes, tuple[Noted, int]] = {}  # scatters by what their turns are named by, and their first
        self.heard: dict[bytes, int] = {}  # by the same, how many chunks are there, perhaps before there is a scatter
        self._bases: list[int] = []  # of memory that is watched, ascending
        self._watched: dict[int, tuple[I64, str, bool]] = {}  # its shadow, whose cache it is, whether it is staging
        self._lock = threading.Lock()
        self._due: list[_Due] = []

    def watch(self, base: int, nbytes: int, *, agent: str = "", staging: bool = False) -> None:
        """Shadow some memory."""
        insort(self._bases, base)
        self._watched[base] = (np.full(nbytes, NOTHING), agent, staging)

    def begin(self, *named: I64) -> None:
        """A request begins: forget what was before, and name its bytes, int64 (n, 2): address and code."""
        self.wire, self.written, self.posts = {}, {}, 0
        for cells, _, _ in self._watched.values():
            cells[:] = NOTHING
        for each in named:
            self._put(each[:, 0], each[:, 1])

    def holds(self, addresses: I64) -> I64:
        """What these bytes are now."""
        found = np.empty(len(addresses), np.int64)
        for base, chosen in self._regions(addresses):
            found[chosen] = self._watched[base][0][addresses[chosen] - base]
        return found

    def copied(self, job: CopyJob) -> None:
        """A copy was given to a mover."""
        with self._lock:
            self._copied(job)

    def due(self, flow: "Noted", job: CopyJob, local: I64) -> None:
        """A copy will be made into staging memory that others may still have, and these pieces posted when it is."""
        with self._lock:
            self._due.append(_Due(flow, job, local, int(local[:, 1].sum())))

    def over(self, flow: "Noted") -> None:
        """Nothing more of a flow is."""
        with self._lock:
            self._due = [one for one in self._due if one.flow is not flow]

    def _copied(self, job: CopyJob) -> None:
        for one in accesses(job.tables):
            elements, number = one.elements, np.arange(one.width)
            src = (one.src[:, None] + number * elements.src_bytes).reshape(-1, 1) + np.arange(elements.src_bytes)
            dst = (one.dst[:, None] + number * elements.dst_bytes).reshape(-1, 1) + np.arange(elements.dst_bytes)
            codes = self.holds(src.ravel()).reshape(src.shape)
            if elements.converts:
                assert (codes == codes[:, :1]).all(), "half of an element is another's"
                codes = np.broadcast_to(codes[:, :1], dst.shape)
            agent = self._put(dst.ravel(), codes.ravel())
            if agent and not self._is_staging(src):
                self.wire.setdefault(agent, []).append(codes.ravel())

    def posted(self, agent: str, peer: str, operation: Operation, local: I64, remote: I64) -> None:
        """Pieces were posted: n addresses and lengths on either side."""
        writing = operation is Operation.WRITE
        src, dst = (local, remote) if writing else (remote, local)
        with self._lock:
            self.posts += 1
            if writing and self._is_staging(local[:, 0]):
                self._due_before(local)
            pairs = byte_pairs(Pieces(src[:, 0], dst[:, 0], src[:, 1]))
            moved = self.holds(pairs[:, 0])
            self._put(pairs[:, 1], moved)
            if self._is_staging(local[:, 0]):
                # the next chunk may leave some of it in gaps: no cache any more
                self._put(pairs[:, 0], np.full(len(pairs), NOTHING))
            self.wire.setdefault(peer if writing else agent, []).append(moved)

    def _due_before(self, local: I64) -> None:
        """A part is posted: what it is a part of has been copied, first of all that are due there."""
        due = next((one for one in self._due if one.covers(local)), None)
        assert due is not None, "nothing was copied to where this is posted from"
        if due.left == due.local[:, 1].sum():
            self._copied(due.job)
        due.left -= int(local[:, 1].sum())
        if not due.left:
            self._due.remove(due)

    def _put(self, addresses: I64, codes: I64) -> str:
        """Bytes are written; returns whose cache that is."""
        agents = {""}
        for base, chosen in self._regions(addresses):
            cells, agent, _ = self._watched[base]
            cells[addresses[chosen] - base] = codes[chosen]
            if agent:
                self.written.setdefault(agent, []).append(addresses[chosen])
            agents.add(agent)
        assert len(agents) <= 2, "one copy writes one rank's cache"
        return max(agents)

    def _is_staging(self, addresses: I64) -> bool:
        return any(self._watched[base][2] for base, _ in self._regions(addresses.ravel()))

    def _regions(self, addresses: I64) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Watched memory in which some of these bytes are, and which of them. None may be elsewhere."""
        at = np.searchsorted(self._bases, addresses, side="right") - 1
        for number in np.unique(at).tolist():
            base, chosen = self._bases[number], at == number
            assert number >= 0, "memory before all that is watched"
            assert addresses[chosen].max() < base + len(self._watched[base][0]), "memory beside what is watched"
            yield base, chosen


@dataclass(eq=False)
class _Due:
    """A copy that is made before something is posted."""

    flow: "Noted"  # of which it is a step
    job: CopyJob  # the copy
    local: I64  # the pieces that are posted
    left: int  # how many bytes of them are not yet

    def covers(self, local: I64) -> bool:
        """Whether these are parts of its pieces."""
        first, last = self.local[:, 0], self.local.sum(axis=1)
        return bool(((first <= local[0, 0]) & (local[0].sum() <= last)).any())


class Noted:
    """A flow: gathers are noted when posted, since staging memory is used again; others when they may begin.

    What takes turns with a flow of a peer's may when the peer, or its agent, has said that it is there.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._steps: list[CopyJob] = []
        self._allowed = self._begun = 0

    def add(self, steps: list[CopyJob], allowed: int) -> None:
        """There are more steps, and so many of all may begin."""
        steps = singly(steps)
        self._steps += steps
        for job in steps:
            if job.post is not None and any(accesses(job.tables)):
                self._ledger.due(self, job, job.post.local.pieces)
        self._allowed = max(self._allowed, allowed)
        while self._begun < min(self._allowed, len(self._steps)):
            job = self._steps[self._begun]
            self._begun += 1
            if job.post is None:
                self._ledger.copied(job)


class RecordingNetwork(LoopbackNetwork):
    """A loopback network with a ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def notify(self, src: str, dst: str, message: bytes) -> None:
        """An agent says that chunks are there, or that they have left: of the latter nothing is noted."""
        token, word = message[:16], int.from_bytes(message[16:], "little")
        if not word & 1:
            self.ledger.heard[token] = word >> 1
            if token in self.ledger.turns:
                noted, first = self.ledger.turns[token]
                noted.add([], (word >> 1) - first)
        super().notify(src, dst, message)


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


def recording_mover(ledger: Ledger) -> type[Mover]:
    """The shipped copies, of which every job and every step of a flow is noted."""
    flows: dict[Flow, Noted] = {}
    waiting: set[Noted] = set()

    class RecordingMover(Mover):
        def submit(self, job: CopyJob, direction: Direction) -> Flow:
            ledger.copied(job)
            return super().submit(job, direction)

        def flow(
            self, job: CopyJob, direction: Direction, steps: Iterable[CopyJob], *, allowed: int, **how: Any
        ) -> Flow:
            noted, listed, turns = Noted(ledger), list(steps), how.get("turns")
            waits = turns is not None and direction is Direction.SCATTER
            noted.add(listed, how.get("heard", 0) if waits else allowed)
            if turns is not None and waits:
                waiting.add(noted)
                ledger.turns[turns.token] = noted, turns.first
                noted.add([], ledger.heard.get(turns.token, turns.first) - turns.first)

            def done(outcome: CopyOutcome) -> None:
                ledger.over(noted)
                job.done(outcome)

            made = super().flow(replace(job, done=done), direction, listed, allowed=allowed, **how)
            flows[made] = noted
            return made

        def add(self, flow: Flow, steps: Iterable[CopyJob]) -> None:
            listed = list(steps)
            flows[flow].add(listed, 0)
            super().add(flow, listed)

        def allow(self, flow: Flow, steps: int, until: float | None = None) -> None:
            if flows[flow] not in waiting:
                flows[flow].add([], steps)
            super().allow(flow, steps, until)

        def note_peer_steps(self, flow: Flow, steps: int) -> None:
            if flows[flow] in waiting:
                flows[flow].add([], steps)
            super().note_peer_steps(flow, steps)

    return RecordingMover


def watch_all(ledger: Ledger, world: World, workers: Sequence[Any]) -> None:
    """Shadow the caches of all ranks, and the staging memory of their workers."""
    for side, ranks in (("", world.prefill), ("decode", world.decode)):
        for rank in ranks:
            ledger.watch(rank.base, len(rank.memory), agent=f"{side}{rank.number}" if side else "")
    watch_staging(ledger, workers)


def watch_staging(ledger: Ledger, workers: Sequence[Any]) -> None:
    """Shadow the staging memory of workers."""
    for worker in workers:
        for span in (staging(worker, "send"), staging(worker, "receive")):
            ledger.watch(span.address, span.length, staging=True)
