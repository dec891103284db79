"""Proves that a prefill rank on this host moves by itself what it writes here (PROTOCOL.md section 5.7).

UCX takes one of several lanes and tells the writer alone which, whose word is no proof. Over CMA or CUDA IPC the
writer's process moves the bytes, through a socket or shared memory ours takes them in. What a process that died had
left to the latter may land at any later time; the former ends with it. So, once bytes have moved over a lane, the peer
is lent staging memory, to write what nobody could know, few bytes and many, while our transport is not called. If they
are there by then, nothing here has moved them.

One peer at a time, and whoever has to wait for memory has it back as soon as the peer lets go of it. A loan that is
never given back leaves room for the largest chunk.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvxfer.config import Config
from kvxfer.copy.mover import Copy
from kvxfer.copy.port import CopyJob, CopyOutcome, Direction, Outcome, Post
from kvxfer.copy.tables import NOTHING
from kvxfer.errors import Code, KvxferError, ProtocolError, TransferFailedError
from kvxfer.exposure import Exposure
from kvxfer.fabric.port import Operation
from kvxfer.link import Link
from kvxfer.mapped import unlike
from kvxfer.memory import Extent, ExtentState, peek, poke
from kvxfer.planning import staging_pieces
from kvxfer.protocol.messages import WHOLE, Cancel, Capability, KvAgentResult, MemorySpan, Probe, Route, Status
from kvxfer.protocol.sending import Failure, build_result
from kvxfer.protocol.session import PeerInfo
from kvxfer.rebuilding import runs_on, want_end
from kvxfer.site import Callback, Site, no_hold, resolve
from kvxfer.telemetry import logger

__all__ = ["NOT_NOW", "Loan", "Prover", "Showing", "proof_bytes"]

_log: Final = logger("kvxfer.receive")
NOT_NOW: Final = Failure(Status.CANCELLED, Code.TOO_MANY, "nothing is written there now")
_NOWHERE: Final = MemorySpan("", 0, 0, 0)
_OVER_A_LANE: Final = frozenset({Route.STAGED, Route.DIRECT})
_FEW: Final = 64
_LARGEST: Final = 1 << 20
"""Bytes of the first write, and of both at most: what is larger goes the same way."""
_SHARE: Final = 8
"""At most one part in so many of a side's staging memory is taken."""
_NONCE_BYTES: Final = 16
_LEASE_MS: Final = 5000
_PAUSE_S: Final = 0.02
"""Seconds for which the transport is not called at most, and until memory is asked back."""
_TRIES: Final = 6
_APART_S: Final = 0.1
"""Seconds to the second try; each further one is twice as far away, up to"""
_APART_MAX_S: Final = 3.2
_POLITE: Final = 2
"""Tries that give way to whoever is held awake for. Later ones do not: for whom our transport has to move bytes, these
come that much later, a few times at most."""


def proof_bytes(config: Config, capacity: int) -> int:
    """How much staging memory is lent: as much as is written at once, or nothing if it cannot be spared."""
    nbytes = min(_LARGEST, max(config.chunk_bytes, config.in_place_chunk_bytes))
    return nbytes if _spared(nbytes, config.chunk_bytes, capacity) else 0


def _spared(nbytes: int, chunk_bytes: int, capacity: int) -> bool:
    """Whether there is room for a chunk beside so much, wherever it lies, though it be never given back."""
    return 0 < nbytes <= capacity // _SHARE and capacity - nbytes >= 2 * chunk_bytes


def _repeated(nonce: bytes, nbytes: int) -> bytes:
    return (nonce * -(-nbytes // len(nonce)))[:nbytes]


@dataclass(slots=True, eq=False)
class _Lane:
    """How often the lane of a link was tried, and what resolves when it is known, or nobody wants to know any more."""

    over: asyncio.Future[None]
    tries: int = 0


class Prover:
    """Tries each lane over which peers write here a few times, until it is known: then it is in `Link.proved`."""

    def __init__(self, site: Site, number: Callable[[], int], doubted: "Callable[[Loan], None]") -> None:
        self.loans: Final[dict[int, Loan]] = {}  # by number; one at a time
        self.doubted: Final = doubted
        self._site: Final = site
        self._number: Final = number
        self._lanes: Final[dict[Link, _Lane]] = {}
        site.receive_desk.crowded = self.recall

    def used(self, link: Link, route: Route) -> None:
        """A transfer took this route: begin with its lane, unless that was done before or is of no use."""
        if route in _OVER_A_LANE and link not in self._lanes and link.is_open:
            lane = self._lanes[link] = _Lane(self._site.loop.create_future())
            if self._possible(link):
                self._site.tasks.spawn(self._prove(link, lane), f"kvxfer prove the lane to {link.peer.name}")

    def renewed(self, link: Link) -> None:
        """An agent of one of both sides was made anew: what was seen before says nothing of the lane that is now."""
        link.proved = frozenset()
        self._forget(link)

    def lost(self, link: Link) -> None:
        """A link is gone."""
        self._forget(link)
        for loan in list(self.loans.values()):
            if loan.link is link:
                loan.lost()

    def close(self) -> None:
        """Begin nothing any more. What is lent is a task's that waits for it."""
        for link in list(self._lanes):
            self._forget(link)
        self.recall()

    def recall(self) -> None:
        """Ask for what is lent."""
        for loan in list(self.loans.values()):
            loan.recall()

    def _forget(self, link: Link) -> None:
        if (lane := self._lanes.pop(link, None)) is not None:
            resolve(lane.over, None)

    async def _prove(self, link: Link, lane: _Lane) -> None:
        apart = _APART_S
        while not (lane.over.done() or self._site.draining):
            landed, loan = False, self._lend(link)
            if loan is not None:
                lane.tries += 1
                landed = await self._landed(link, loan, firm=lane.tries > _POLITE)
                await asyncio.wait({loan.over})
            if lane.over.done():
                return
            if landed:
                link.proved = self._routes(link)
            if landed or lane.tries == _TRIES:
                _log.info("lane_proved" if landed else "lane_not_proved", peer=link.peer.name, attempt=lane.tries)
                lane.over.set_result(None)
            await asyncio.wait({lane.over}, timeout=apart)
            apart = min(2 * apart, _APART_MAX_S)

    def _lend(self, link: Link) -> "Loan | None":
        """None if the memory is needed for what was asked for, or something is lent already."""
        site, desk = self._site, self._site.receive_desk
        extent = None if self.loans else desk.take(link.peer.account, proof_bytes(site.config, desk.share.capacity))
        return None if extent is None else Loan(site, self, link, self._number(), extent)

    async def _landed(self, link: Link, loan: "Loan", *, firm: bool) -> bool:
        """Whether the peer writes what it is told to while the transport is not called."""
        site, pause = self._site, None
        try:
            pause = await asyncio.wrap_future(site.fabric.pause(_PAUSE_S, firm=firm))
            if pause is None or not pause.intact or loan.finished or not link.is_open:
                return False
            nonce = site.runtime.token(_NONCE_BYTES)
            loan.tell(nonce)
            await asyncio.wait({loan.written}, timeout=_PAUSE_S)
            if not (loan.written.done() and loan.written.result()):
                return False
            found = await site.runtime.in_thread(loan.read)
            return found == _repeated(nonce, len(found)) and pause.intact  # asked last: it was so all the while
        finally:
            if pause is not None:
                pause.end()
            loan.end()

    def _possible(self, link: Link) -> bool:
        """Whether the peer is on this host, and its end can be seen, and there is memory on both sides."""
        peer, site = link.peer, self._site
        near = (peer.body.locks and not unlike(peer.body.host)) or site.processes.ended(peer) is not None
        able = Capability.PROBE in Capability(peer.identity.capabilities)
        return bool(near and able and proof_bytes(site.config, site.receive_desk.share.capacity))

    def _routes(self, link: Link) -> frozenset[Route]:
        """Routes on which bytes go between memory of the kinds that were seen.

        Blocks on a GPU may lie in memory that cannot be exported, whatever the arena is: then they go another way.
        """
        hosts = all(geometry.kind != "cuda" for geometry in (self._site.geometry, self._site.plans.geometry(link.peer)))
        return _OVER_A_LANE if hosts else frozenset({Route.STAGED})


class Loan:
    """Staging memory that a prefill rank is told to write, until it says that it does not, or there is evidence."""

    def __init__(self, site: Site, prover: Prover, link: Link, transfer: int, extent: Extent) -> None:
        self.link = link  # another one when the same incarnation is reached again
        self.transfer: Final = transfer
        self.is_lost = False  # the session is gone, or the peer is silent, and may still write
        self.written: Final[asyncio.Future[bool]] = site.loop.create_future()  # by its word; False: nobody waits for it
        self.over: Final[asyncio.Future[None]] = site.loop.create_future()  # the memory is back, or it is lost
        self.exposure: Final = Exposure(site, link, str(transfer), self._take_back, {Route.STAGED})
        self._site: Final = site
        self._prover: Final = prover
        self._extent: Final = extent
        self._awake: Callback = no_hold
        self._timer: asyncio.TimerHandle | None = None
        prover.loans[transfer] = self

    @property
    def peer(self) -> PeerInfo:
        """The prefill rank."""
        return self.link.peer

    @property
    def finished(self) -> bool:
        """Whether nothing of it is in doubt."""
        return self._extent.state is ExtentState.FREE

    def tell(self, nonce: bytes) -> None:
        """Tell the peer what to write. Nothing is done for it to land before `end`."""
        extent, lease = self._extent, min(int(self._site.config.grant_lease * 1000), _LEASE_MS)
        self._site.receive_desk.share.write(extent)
        granted = self.exposure.grant(mapped=False)
        if not self.link.send(Probe(self.transfer, extent.address, extent.nbytes, lease, granted, nonce)):
            self._take_back()

    def read(self) -> bytes:
        """What lies there now; off the loop."""
        span = self._site.staging or _NOWHERE
        return peek(span.kind, span.device, self._extent.address, self._extent.nbytes)

    def recall(self) -> None:
        """Somebody needs the memory: the peer has had its time."""
        if self._extent.state is ExtentState.RESERVED:
            self._take_back()  # it was not told: its answer to a question now would be taken for one to the next
        resolve(self.written, False)

    def end(self) -> None:
        """Whoever looks at what is written has done so, or waits no longer: ask for it, if the peer still has it."""
        resolve(self.written, False)
        if self.written.result() or self._extent.state is ExtentState.RESERVED:
            self._take_back()
        elif not (self.finished or self.is_lost):
            self._ask(Code.CANCELLED)

    def result(self, link: Link, message: KvAgentResult) -> None:
        """The peer is through with it, or cannot say.

        Raises:
            ProtocolError: If it speaks of a part of it, or is another peer.
        """
        if link.peer.identity.incarnation != self.peer.identity.incarnation:
            raise ProtocolError(f"transfer {self.transfer} belongs to another peer", peer=link.peer.name)
        if message.chunk != WHOLE or not message.last:
            raise ProtocolError(f"transfer {self.transfer} has no chunks, and one result", peer=self.peer.name)
        if message.status is Status.IN_DOUBT:
            self.lost()
            if self.is_lost:  # the peer is there, and its write may need this side to end
                self._awake = self._site.mover.hold_awake()
                self.exposure.told_in_doubt()
        elif message.status is Status.OK and self._extent.state is ExtentState.WRITING and not self.written.done():
            self.written.set_result(True)
        else:
            self._take_back()

    def lost(self) -> None:
        """The session is gone, or no answer came: the peer may still write."""
        if self._extent.state is ExtentState.RESERVED:
            self._take_back()
        elif not self.finished:
            self.is_lost = True
            self._rest()
            if self._extent.state is not ExtentState.QUARANTINED:
                self._site.receive_desk.quarantine(self._extent, f"{self.peer.name} is silent")
            self._prover.doubted(self)

    def resume(self, link: Link) -> None:
        """The same incarnation is back: ask what became of it."""
        self.link, self.is_lost = link, False
        self.exposure.met(link.renewals)
        self._ask(Code.PEER_LOST)

    def _ask(self, code: Code) -> None:
        """Ask what became of it, while it may land. Without an answer in time it is in doubt (again)."""
        self._awake()
        self._awake = self._site.mover.hold_awake()
        self.link.send(Cancel(self.transfer, code))
        self._timer = self._site.at(self._site.now() + self._site.config.revoke_timeout, self.lost)

    def _rest(self) -> None:
        self._awake()
        if self._timer is not None:
            self._timer.cancel()
        resolve(self.written, False)
        resolve(self.over, None)

    def _take_back(self) -> None:
        """Nothing of it is written any more, or ever was. Idempotent."""
        if not self.finished:
            self.is_lost = False
            self._prover.loans.pop(self.transfer, None)
            desk = self._site.receive_desk
            (desk.settle if self._extent.state is ExtentState.QUARANTINED else desk.release)(self._extent)
            self._rest()
            self.exposure.end()


class Showing:
    """What a prefill rank writes of a nonce, from `Probe` to its answer, and beyond that while a write is in doubt.

    Raises:
        ProtocolError: If what was lent is not staging memory of the peer.
    """

    def __init__(self, site: Site, link: Link, probe: Probe, ended: "Callable[[Showing], None]") -> None:
        self.link = link  # another one when the decode rank asks over it
        self.probe: Final = probe
        self.renewals: Final = link.renewals  # of the decode rank's agent, when it lent that
        self.failure: Failure | None = None
        self.in_doubt = self.severed = False  # a write may be under way; and has left this side
        self.copies: list[Copy] = []  # the last write
        self._site: Final = site
        self._ended: Final = ended  # called after the answer, and again if more is known of what ended in doubt
        self._until: Final = site.now() + probe.lease_ms / 1000
        self._theirs: Final = link.peer.body.staging[0] if link.peer.body.staging else _NOWHERE
        self._reading = False  # our memory may be read for it
        self._unwant: Callback = no_hold
        self._let_go: Callback | None = None  # of that memory; there is one once it was answered
        staging_pieces(self._theirs, probe.address, probe.bytes)

    def begin(self) -> None:
        """Write, in a task of the worker's."""
        self._site.tasks.spawn(self._run(), f"kvxfer show the lane to {self.link.peer.name}")

    def stop(self, failure: Failure) -> None:
        """Post nothing more; it is answered when what is posted has ended."""
        self.failure = self.failure or failure
        for copy in self.copies:
            self._site.mover.cancel(copy)

    async def _run(self) -> None:
        site, desk, peer, nbytes = self._site, self._site.send_desk, self.link.peer, self.probe.bytes
        spared = _spared(nbytes, site.config.chunk_bytes, desk.share.capacity)
        extent, leave = desk.take(peer.account, nbytes) if spared else None, no_hold
        try:
            if extent is None:
                self.stop(NOT_NOW)
            else:
                desk.share.write(extent)
                data = _repeated(self.probe.nonce, nbytes)
                await site.runtime.in_thread(partial(poke, site.arena.kind, site.arena.device, extent.address, data))
                leave = site.lanes.hold(peer)
                lane = await asyncio.shield(site.lanes.connect(peer, self.renewals))
                await self._write(lane, extent.address, 0, min(_FEW, nbytes))
                if nbytes > _FEW:
                    await self._write(lane, extent.address, _FEW, nbytes - _FEW)
        except KvxferError as error:
            self.stop(Failure(Status.FAILED, error.code, str(error)))
        except BaseException as error:
            self.stop(Failure(Status.FAILED, Code.FAILED, repr(error)))
            raise
        finally:
            leave()
            if self.in_doubt:
                self.severed = not self._reading and not runs_on(site, peer)
                self.failure = Failure(Status.IN_DOUBT, Code.FABRIC, "a write of what was to be shown did not end")
            self._let_go = no_hold
            if extent is not None and self._reading:
                desk.quarantine(extent, "our own post did not end")
                self._unwant = want_end(site, peer, urgent=False)
                self._let_go = partial(desk.settle, extent)
            elif extent is not None:
                desk.release(extent)
            status = Status.OK if self.failure is None else self.failure.status
            self.link.send(build_result(self.probe.transfer, status, last=True, failure=self.failure))
            self._ended(self)

    async def _write(self, lane: str, address: int, offset: int, nbytes: int) -> None:
        """Write a part, or raise."""
        site, done = self._site, self._site.loop.create_future()
        if self.failure is not None:
            raise TransferFailedError(self.failure.reason)

        def posted(result: CopyOutcome) -> None:  # and not after `await`: what comes late may come before that goes on
            self.in_doubt, self._reading = result.in_doubt, result.may_move
            resolve(done, result)

        passage = site.keys.passage(self.link.peer, self.probe.generation)
        local = staging_pieces(site.arena, address + offset, nbytes)
        remote = staging_pieces(self._theirs, self.probe.address + offset, nbytes)
        post = Post(lane, Operation.WRITE, local, remote, runs_on(site, self.link.peer), self._late)
        job = CopyJob(NOTHING, posted, until=self._until, passage=passage, owner=self, post=post)
        self.copies, self.in_doubt, self._reading = [site.mover.submit(job, Direction.GATHER)], True, True
        result: CopyOutcome = await done
        if result.outcome is not Outcome.DONE:
            raise result.error or TransferFailedError("the lease of what was lent ran out, or it was asked for")

    def _late(self, ended: bool) -> None:
        """The write in doubt has ended after all; or our agent has, and what had left it may still land."""
        self.in_doubt, self._reading, self.severed = not ended, False, True
        if self._let_go is not None:  # else all that remains is said with the answer
            self._unwant()
            self._let_go()
            self._ended(self)
