"""Shows a decode rank who moves the bytes: writes its nonce into memory that it lent (PROTOCOL.md section 5.7).

A task of its own, off the path of any request: few bytes, then many.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from kvxfer.errors import Code, KvxferError, TransferFailedError
from kvxfer.fabric.port import Cell, Operation, Outcome, Post, PostResult
from kvxfer.link import Link
from kvxfer.memory import Extent, poke
from kvxfer.planning import staging_pieces
from kvxfer.protocol.messages import MemorySpan, Probe, Status
from kvxfer.protocol.sending import Failure, build_result
from kvxfer.rebuilding import runs_on, want_end
from kvxfer.site import Site, no_hold, resolve

__all__ = ["Gauging", "repeated", "spared"]

_SHARE: Final = 8
"""At most one part in so many of a side's staging memory is taken."""
_FEW: Final = 64
"""Bytes of the first of the two writes of a nonce."""


def spared(nbytes: int, chunk_bytes: int, capacity: int) -> bool:
    """Whether a share of staging memory can do without so much: it is a small part.

    Wherever it lies, and though it be never given back, there is room beside it for a chunk.
    """
    return 0 < nbytes <= capacity // _SHARE and capacity - nbytes >= 2 * chunk_bytes


def repeated(nonce: bytes, nbytes: int) -> bytes:
    """What is written of a nonce to show that it was."""
    return (nonce * -(-nbytes // len(nonce)))[:nbytes]


class Gauging:
    """What is shown to one decode rank, from `Probe` to its answer.

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
        """Write, in a task of the worker's."""
        self._site.tasks.spawn(self._run(), f"kvxfer show the lane to {self.peer.name}")

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
        room = self._probe.bytes
        enough = spared(room, site.config.chunk_bytes, desk.share.capacity)
        extent = desk.take(self.peer.account, room) if enough else None
        try:
            if extent is None:
                self.failure = Failure(Status.CANCELLED, Code.TOO_MANY, "there is no memory to write from")
            else:
                desk.share.write(extent)
                await self._show(extent, self._probe.nonce)
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
                self.failure = Failure(Status.IN_DOUBT, Code.FABRIC, "a write of what was to be shown did not end")
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
        await self._write(lane, extent.address, 0, few)
        if nbytes > few:
            await self._write(lane, extent.address, few, nbytes - few)

    async def _write(self, lane: str, address: int, offset: int, nbytes: int) -> None:
        """Write once, from an address on both sides.

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
        local = staging_pieces(site.arena, address + offset, nbytes)
        remote = staging_pieces(self._theirs, self._probe.address + offset, nbytes)
        self._writing = self._reading = True
        heard = partial(site.hand_over, posted)
        stays, late = runs_on(site, self.peer), partial(site.hand_over, self._late)
        site.fabric.post(Post(lane, Operation.WRITE, local, remote, cell, heard, stays, late))
        result: PostResult = await done
        if result.outcome is not Outcome.DONE:
            raise result.error or TransferFailedError("the lease of what was lent ran out, or it was asked back")
