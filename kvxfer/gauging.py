"""What the lane to a decode rank takes, learned by writing memory that it lent for that (PROTOCOL.md section 5.7).

A task of its own, off the path of any request: some writes of one piece, small and large, and some of many pieces, each
repeated while there is time. What it learns corrects the profile by which `auto` chooses between posting each piece and
staging them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy import CopyJob, CopyOutcome, Direction
from kvxfer.errors import Code, KvxferError, TransferFailedError
from kvxfer.fabric.port import Cell, Descriptors, Operation, Outcome, Post, PostResult
from kvxfer.geometry.copyplan import Blank, CopyPlan
from kvxfer.link import Link
from kvxfer.memory import Extent, poke
from kvxfer.planning import staging_pieces
from kvxfer.protocol.messages import MemorySpan, Probe, Status
from kvxfer.protocol.sending import Failure, build_result
from kvxfer.rebuilding import runs_on, want_end
from kvxfer.routes.lane import LaneCosts, Sample
from kvxfer.site import Site, no_hold, resolve
from kvxfer.telemetry import logger

__all__ = ["LEAST_LOAN", "Gauging", "loan_bytes", "repeated", "spared"]

_log: Final = logger("kvxfer.send")

_LARGEST_LOAN: Final = 32 << 20
"""Bytes that are lent at most: large enough that on 400 GB/s a write of them takes longer than noticing its end."""
_PIECES: Final = 64
_PIECE_BYTES: Final = 4096
_APART: Final = 2 * _PIECE_BYTES
LEAST_LOAN: Final = _PIECES * _APART
"""Bytes below which there is no room for what is measured."""
_SIZES: Final = (256 << 10, 4 << 20, _LARGEST_LOAN)
_LONG_S: Final = 2e-3
"""No larger write follows one that took so long: it would tell no more."""
_ROUNDS: Final = 3
_BUDGET_S: Final = 0.05
"""No further round is begun after so many seconds."""
_SHARE: Final = 8
"""At most one part in so many of a side's staging memory is taken."""
_FEW: Final = 64
"""Bytes of the first of the two writes of a nonce."""


def loan_bytes(chunk_bytes: int, capacity: int) -> int:
    """How much of a share of staging memory is taken to measure; 0 if that would be too little, or too much."""
    nbytes = min(_LARGEST_LOAN, capacity // _SHARE)
    return nbytes if nbytes >= LEAST_LOAN and spared(nbytes, chunk_bytes, capacity) else 0


def spared(nbytes: int, chunk_bytes: int, capacity: int) -> bool:
    """Whether a share of staging memory can do without so much: it is a small part.

    Wherever it lies, and though it be never given back, there is room beside it for a chunk.
    """
    return 0 < nbytes <= capacity // _SHARE and capacity - nbytes >= 2 * chunk_bytes


def repeated(nonce: bytes, nbytes: int) -> bytes:
    """What is written of a nonce to show that it was."""
    return (nonce * -(-nbytes // len(nonce)))[:nbytes]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Pieces of one write: where they begin, and their lengths."""

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def whole(cls, nbytes: int, *, offset: int = 0) -> "_Shape":
        return cls(np.asarray([offset], np.int64), np.asarray([nbytes], np.int64))

    @classmethod
    def scattered(cls) -> "_Shape":
        return cls(np.arange(_PIECES, dtype=np.int64) * _APART, np.full(_PIECES, _PIECE_BYTES, np.int64))

    def at(self, span: MemorySpan, address: int) -> Descriptors:
        return Descriptors(span.kind, span.device, np.stack([address + self.offsets, self.lengths], axis=1))


class Gauging:
    """One measurement, from `Probe` to its answer. Or, if the decode rank wants to see who moves the bytes: its nonce.

    Attributes:
        link: The control stream; replaced when the decode rank asks over another one.
        peer: The decode rank.
        transfer: Its number.
        in_doubt: It is over, but a write of it may still be under way, and the peer was told so.
        severed: That write has left this side.
        cells: Of that write.
        failure: Why it ended, unless it went well.
        renewals: How often the decode rank had made its agent anew when it lent that.

    Args:
        site: The worker.
        link: The control stream to the decode rank.
        probe: What it lends.
        ended: Called when nothing of it is posted any more, after the answer.

    Raises:
        ProtocolError: If what was lent is not staging memory of the peer.
    """

    def __init__(self, site: Site, link: Link, probe: Probe, ended: Callable[["Gauging"], None]) -> None:
        self.link = link
        self.peer: Final = link.peer
        self.transfer: Final = probe.transfer
        self.in_doubt = self.severed = False
        self.cells: list[Cell] = []
        self._site: Final = site
        self._probe: Final = probe
        self._ended: Final = ended
        self.renewals: Final = link.renewals
        self._until: Final = site.now() + probe.lease_ms / 1000
        self._theirs: Final = self.peer.body.staging[0] if self.peer.body.staging else MemorySpan("", 0, 0, 0)
        self._cell: Cell | None = None  # of the last write
        self._writing = self._reading = False  # it may write the peer's memory, read ours
        self.failure: Failure | None = None
        self._release: Callable[[], None] = no_hold
        self._kept: Extent | None = None  # while our own post may read it
        self._unwant: Callable[[], None] = no_hold
        self._answered = False
        staging_pieces(self._theirs, probe.address, probe.bytes)

    def begin(self) -> None:
        """Measure, in a task of the worker's."""
        self._site.tasks.spawn(self._run(), f"kvxfer measure {self.peer.name}")

    def stop(self, failure: Failure) -> None:
        """Post nothing more; it is answered when what is posted has ended."""
        self.failure = self.failure or failure
        if self._cell is not None:
            self._cell.kill()

    def cancelled(self, link: Link, failure: Failure) -> None:
        """The decode rank wants its memory back, or asks (after a lost session) what became of it."""
        self.link = link
        self.stop(failure)

    def _answer(self) -> None:
        status = Status.OK if self.failure is None else self.failure.status
        self.link.send(build_result(self.transfer, status, last=True, failure=self.failure))

    async def _run(self) -> None:
        site, desk = self._site, self._site.send_desk
        nonce, sizes = self._probe.nonce, (site.config.chunk_bytes, desk.share.capacity)
        if nonce:
            room, enough = self._probe.bytes, spared(self._probe.bytes, *sizes)
        else:
            room = min(self._probe.bytes, loan_bytes(*sizes))
            enough = room >= LEAST_LOAN
        extent = desk.take(self.peer.account, room) if enough else None
        try:
            if extent is None:
                self.failure = Failure(Status.CANCELLED, Code.TOO_MANY, "there is no memory to measure with")
            else:
                desk.share.write(extent)
                await (self._show(extent, nonce) if nonce else self._measure(extent, room))
        except KvxferError as error:
            self.failure = self.failure or Failure(Status.FAILED, error.code, str(error))
        except BaseException as error:
            self.failure = self.failure or Failure(Status.FAILED, Code.FAILED, repr(error))
            raise
        finally:
            self._release()
            if self._writing:
                self.cells = [self._cell] if self._cell is not None else []
                self.in_doubt, self.severed = True, not self._reading and not runs_on(site, self.peer)
                self.failure = Failure(Status.IN_DOUBT, Code.FABRIC, "a write of the measurement did not end")
            if extent is not None and self._reading:
                desk.quarantine(extent, "our own post did not end")
                self._unwant = want_end(site, self.peer, urgent=False)
                self._kept = extent
            elif extent is not None:
                desk.release(extent)
            self._answer()
            self._answered = True
            self._ended(self)

    def _late(self, ended: bool) -> None:
        """The write in doubt has ended after all; or our agent has, and what had left it may still land."""
        self._writing, self._reading = not ended, False
        if self._answered:  # else all that remains is said then
            self._unwant()
            if self._kept is not None:
                self._site.send_desk.settle(self._kept)
            self.in_doubt, self.severed = not ended, True
            self._ended(self)

    async def _connected(self) -> str:
        self._release = self._site.lanes.hold(self.peer)
        return await asyncio.shield(self._site.lanes.connect(self.peer, self.renewals))

    async def _show(self, extent: Extent, nonce: bytes) -> None:
        """Write what the decode rank looks for: few bytes, then many."""
        arena, nbytes = self._site.arena, self._probe.bytes
        fill = partial(poke, arena.kind, arena.device, extent.address, repeated(nonce, nbytes))
        await self._site.runtime.in_thread(fill)
        lane, few = await self._connected(), min(_FEW, nbytes)
        await self._write(lane, extent.address, _Shape.whole(few))
        if nbytes > few:
            await self._write(lane, extent.address, _Shape.whole(nbytes - few, offset=few))

    async def _measure(self, extent: Extent, room: int) -> None:
        """Write some pieces, of several sizes, as often as there is time for."""
        site, write = self._site, partial(self._write, await self._connected(), extent.address)
        await self._clear(extent, room)
        await write(_Shape.whole(_PIECE_BYTES))  # wires the two agents up, where nothing has yet
        samples: list[Sample] = []
        began = site.now()
        for _ in range(_ROUNDS):
            samples.append(await write(_Shape.scattered()))
            for nbytes in (size for size in _SIZES if size <= room):
                samples.append(await write(_Shape.whole(nbytes)))
                if samples[-1].seconds > _LONG_S:
                    break
            if site.now() - began > _BUDGET_S:
                break
        self._learn(samples)

    async def _clear(self, extent: Extent, room: int) -> None:
        """Zero what is about to be written: it held other requests, which are none of the peer's business.

        Raises:
            KvxferError: If it could not be.
        """
        site, done = self._site, self._site.loop.create_future()
        plan = CopyPlan((), (Blank(extent.address, room),))
        site.executor.submit(CopyJob(plan, partial(site.hand_over, resolve, done), nbytes=room), Direction.GATHER)
        self._reading = True  # until it has ended, nobody else may have that memory
        outcome: CopyOutcome = await done
        self._reading = False
        if outcome.error is not None:
            raise outcome.error

    async def _write(self, lane: str, address: int, shape: _Shape) -> Sample:
        """Write once.

        Raises:
            TransferFailedError: If it was not written, or nobody can say.
        """
        site, done = self._site, self._site.loop.create_future()
        if self.failure is not None:
            raise TransferFailedError(self.failure.reason)

        def posted(result: PostResult) -> None:  # and not after `await`: what comes late may come before that goes on
            self._writing = result.outcome is Outcome.IN_DOUBT
            # where the transport says that the peer is gone, it has ended its own work
            self._reading = self._writing and not (result.error is not None and result.error.disconnected)
            resolve(done, result)

        self._cell = cell = Cell(self._until, site.keys.passage(self.peer, self._probe.generation))
        local, remote = shape.at(site.arena, address), shape.at(self._theirs, self._probe.address)
        self._writing = self._reading = True
        heard = partial(site.hand_over, posted)
        stays, late = runs_on(site, self.peer), partial(site.hand_over, self._late)
        site.fabric.post(Post(lane, Operation.WRITE, local, remote, cell, heard, stays, late))
        result: PostResult = await done
        if result.outcome is not Outcome.DONE:
            raise result.error or TransferFailedError(
                "the lease of what was lent ran out, or the measurement was stopped"
            )
        return Sample(len(shape.offsets), int(shape.lengths.sum()), result.finished - result.first)

    def _learn(self, samples: list[Sample]) -> None:
        site, peer = self._site, self.peer
        timed = [sample for sample in samples if sample.seconds > 0]
        if self.failure is not None or not any(sample.pieces == 1 for sample in timed):
            return
        lane = LaneCosts.of(timed)
        kinds = {
            "VRAM" if geometry.kind == "cuda" else "DRAM" for geometry in (site.geometry, site.plans.geometry(peer))
        }
        site.estimates.measured(peer.identity.incarnation, lane, listed={site.arena.kind, self._theirs.kind} == kinds)
        told = site.lanes.told(peer)
        _log.info(
            "lane_measured",
            peer=peer.name,
            lane=told if isinstance(told, str) else "; ".join(f"{one.operation} over {one.over}" for one in told),
            gbps=lane.bytes_per_s / 1e9,
            posting=lane.post_s,
            per_piece=lane.piece_s,
        )
