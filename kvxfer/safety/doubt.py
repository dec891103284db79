"""Doubt about memory that a peer may be touching, and what ends it: evidence that needs no answer, or a new agent."""

import asyncio
import math
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kvxfer.errors import Code, FabricError
from kvxfer.mapped.host import elsewhere
from kvxfer.peers.link import Link
from kvxfer.protocol import messages as wire
from kvxfer.protocol.framing import decode_body, encode_body
from kvxfer.protocol.messages import Capability, Route, Status
from kvxfer.protocol.session import PeerInfo
from kvxfer.protocol.transfer import Failure
from kvxfer.runtime import Callback, no_op, resolve
from kvxfer.safety.fence import SHARED_GATE, Revoked
from kvxfer.telemetry import logger

if TYPE_CHECKING:
    from kvxfer.site import Site

__all__ = ["Exposure", "Grantor", "Rebuilding", "Stop", "may_outlive_agent", "request_rebuild", "severed"]

_log: Final = logger("kvxfer.worker")

# --- evidence
#
# Its gate is closed (`kvxfer.safety.fence`), its process has ended, or the agent that it reached was destroyed
# (`Rebuilding`). Elapsed time, a closed stream, deregistered memory and a peer's agent that was removed
# are no evidence: after each of them bytes were seen to land.

_SECONDS: Final = 0.005
_SECONDS_MAX: Final = 1.0

# --- what a peer may be touching

_ENDS_WITH_PROCESS: Final = frozenset({Route.MAPPED, Route.PULL})


class Exposure(Struct, eq=False):
    """Memory that one transfer lets a peer write or read, as granted on one control stream."""

    site: "Site"
    link: Link  # over which it is granted
    name: str  # of the transfer
    # called once if there is evidence, other than the peer's word, that nobody touches it any more
    then: Callback = no_op
    routes: Collection[Route] = ()  # those on which the peer may touch it
    gate: int = SHARED_GATE  # what every grant leads through; there is one from the first grant on
    fenced: bool | None = None  # whether the peer passes it by all grants; None if it touches nothing
    ended: bool = False  # nobody touches it any more
    _renewals: int = sys.maxsize  # how often the peer had made its agent anew when the last grant was given
    _renewed: bool = False  # as the peer has said
    _in_doubt: bool = False  # likewise
    _news: "asyncio.Future[None] | None" = None  # for which whoever looks for evidence waits

    @property
    def ends_with_process(self) -> bool:
        """Whether nothing of it goes on, or does harm, when the peer's process has ended.

        Not of writes through sockets: what a process left in one lands after its death, until our agent is made anew.
        A reader that has ended does no harm.
        """
        return _ENDS_WITH_PROCESS.issuperset(self.routes)

    @property
    def in_doubt(self) -> bool:
        """Whether it may be memory of the caller's, and not staging memory."""
        return any(route is not Route.STAGED for route in self.routes)

    def grant(self, *, mapped: bool) -> int:
        """What a grant says of its gate: 0 where the peer passes none. `mapped`: the peer's own copies write there."""
        gates, gate, link = self.site.gates, self.gate, self.link
        if gate == SHARED_GATE and self.fenced is None:  # else one of its own tells nothing of what was granted before
            gate = self.gate = gates.allot()
        passes = gate != SHARED_GATE and self.site.fenced.get(link.peer.identity.incarnation, False)
        generation = gates.granted(gate) if passes or (mapped and gates.words) else 0
        self.fenced = generation > 0 and self.fenced is not False
        self._renewals, self._renewed = link.renewals, False
        return generation

    def on_renewals(self, renewals: int) -> None:
        """The peer says how often it has made its agent anew."""
        if renewals > self._renewals and not self._renewed:  # said once more it is no news, for a peer can say it often
            self._renewed = True
            self._wake()

    def on_in_doubt(self) -> None:
        """The peer says that it does not know what became of it."""
        if not self._in_doubt:
            self._in_doubt = True
            self._wake()

    def void(self) -> None:
        """The peer touches nothing under what was granted so far."""
        self.fenced = None

    def seek(self) -> None:
        """Nothing more is granted, or the peer says nothing: look for evidence, until there is some or it has ended.

        That is to close its gate, see the peer's process end, or wait for a new agent, in a task of the worker's. A
        peer that is stopped inside of its gate may go on at any time. A worker that is closing looks once more.
        """
        if self._news is None and not self.ended:
            site = self.site
            self._news = site.loop.create_future()
            leave = site.processes.hold(self.link.peer)  # now: the last link may be gone when the task begins
            task = site.lookouts.spawn(self._look(site.rebuilds.count), f"kvxfer look after {self.name}")
            task.add_done_callback(lambda _: leave())

    async def _look(self, before: int) -> None:
        site, peer = self.site, self.link.peer
        delay, found = _SECONDS, None
        leave = no_op  # the agent is wanted anew
        wanted = -1, False  # as often as it had been, and whether an answer is out of reach, when that was said
        try:
            while not self.ended:
                self._news, last = site.loop.create_future(), site.closing.done()
                if found is None and self.fenced:
                    found = await site.gates.revoke(self.gate)
                # its posts went to the agent that is here now: it can tell no more of them before there is another one
                count, gone = site.rebuilds.count, self._renewed and self._in_doubt
                if why := await self._evidence(found, rebuilt=count > before):
                    self.on_evidence(why)
                    return
                if last:
                    return
                news = [self._news, site.closing]
                if severed(site, peer) or (gone and count == before):
                    if wanted != (count, gone):
                        leave()
                        leave, wanted = site.rebuilds.request(urgent=self.in_doubt, answered=gone), (count, gone)
                    news.append(site.rebuilds.next)
                elif (ended := site.processes.end_of(peer)) is not None and not ended.done():
                    news.append(ended)
                # where a process has died in it nothing more will show, and an idle worker would look in vain for ever
                may_empty = self.fenced and self.gate != SHARED_GATE and found is not Revoked.DIED
                pause = delay if may_empty else None
                await asyncio.wait(news, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                delay = min(2 * delay, _SECONDS_MAX)
        finally:
            leave()

    async def _evidence(self, found: Revoked | None, *, rebuilt: bool) -> str:
        """What shows that nothing is touched any more; empty if nothing does.

        `rebuilt` if that was done since the doubt began, before which all was granted: only then does it tell anything.
        """
        site, peer, ends = self.site, self.link.peer, self.ends_with_process
        own = site.geometry.kind != "cuda" and all(span.kind == "DRAM" for span in peer.body.staging)  # no GPU writes
        if found is not None and not await site.gates.writers_inside(self.gate):
            if found is Revoked.IDLE:
                return "its gate was empty"
            if ends and own:  # what a thread of it copied by itself ends before its locks are given back
                return "it died inside of its gate"
        gone = site.processes.has_ended(peer)
        if gone and (ends or rebuilt):
            if self.fenced:  # it may have died inside of a word
                site.gates.retire(self.gate)
            return "its process has ended" if ends else "its process has ended, and the agent that it reached is gone"
        if rebuilt and severed(site, peer):
            return "it is on another host, and the agent that it reached is gone"
        return ""

    def on_evidence(self, why: str) -> None:
        """There is evidence, other than the peer's word. To no effect if it has ended meanwhile."""
        if not self.ended:
            _log.info("doubt_ended", peer=self.link.peer.name, transfer=self.name, reason=why)
            then = self.then
            self.end()
            then()

    def end(self) -> None:
        """Nobody touches it any more. Idempotent."""
        if not self.ended:
            self.ended = True
            self.then = no_op  # without a cycle, the transfer is freed at once
            self.site.gates.give_back(self.gate)
            self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            resolve(self._news, None)


# --- a new agent
#
# This worker's agent is destroyed and made anew, which ends doubts that nothing else does.
#
# Of the old agent no byte comes or goes over a network any more, whoever posted it. That is evidence for
#
# - memory that a peer on another host was granted,
# - memory that a peer on this host was granted, once its process has ended: what that left to a socket is gone, and
#   what it wrote by itself ended with it,
# - our own posts: where the peer is on this host they run inside of our calls, but for copies between GPUs.
#
# It is none for memory that a living process on this host may write, though it be stopped, and none for what is mapped.
#
# Who makes an agent for a GPU waits, and his process with him, until what was launched there has ended (seen with UCX).
# So while a copy of ours stands still there, no agent is made.
#
# Nothing that is healthy fails for it. Nothing is granted and nothing announced to be read, what was is waited for, and
# posts of ours wait in the fabric; then peers are told how the new agent is reached, and all goes on. Who does not move
# what it was granted in time has that taken back, which a retry cures.

_LOOK_SECONDS: Final = 0.002
_LOOK_SECONDS_MAX: Final = 0.05
_EARLY: Final = 1e-3
"""Seconds by which a timer may be early."""
_STEPS: Final = 5
"""Into so many parts `revoke_timeout` is divided: peers may answer; move what was granted; stop; our own copies end;
what these post ends, too."""
_CROWDED: Final = 4
"""A share of which more than one part in so many is in quarantine is crowded: then nothing waits for longer."""
_TAKEN_BACK: Final = Failure(Status.CANCELLED, Code.FABRIC, "the agent of a rank is being rebuilt: try again")


Stop: TypeAlias = Callable[[Failure], None]
"""Stops a transfer."""


class Grantor(Protocol):
    """One of the two roles of this worker, as far as peers can reach its memory through the agent."""

    @property
    def exposed(self) -> Sequence[Stop]:
        """What asks each peer to stop that answers, and may be touching memory that it was granted, or told of."""
        ...


class Rebuilding:
    """Decides when it is time, and does it.

    It is urgent if the caller's blocks are in doubt, or a quarter of a share is in quarantine: then the peer has a
    little time to answer, and none if it has made its own agent anew and knows no more. Otherwise it is done
    `peer_timeout` after it was noticed, for many together. It is never done twice within `peer_timeout`: whoever can
    bring it about must not be able to stop everybody else.
    """

    def __init__(self, site: "Site", roles: Sequence[Grantor], links: Collection[Link]) -> None:
        self._site: Final = site
        self._roles: Final = roles
        self._links: Final = links
        self._last = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        site.rebuilds.on_request = self._set_timer

    def close(self) -> None:
        """The worker is closing: begin no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def send_renewed(self, link: Link) -> None:
        """Tell a peer how the agent that there is now is reached."""
        told = decode_body(self._site.body[link.trusted])
        if link.peer.identity.capabilities & Capability.RENEWED:
            link.send(wire.Renewed(told.renewals, told.metadata))
        else:
            link.close("the agent of this rank was rebuilt: meet again")

    def _set_timer(self) -> None:
        """Arm the timer for the time at which it is due."""
        if self._timer is not None:
            self._timer.cancel()
        due = self._due_at()
        if due < math.inf and not self._closed and not self._site.rebuilds.paused:
            self._timer = self._site.call_at(due, self._on_timer)

    def _due_at(self) -> float:
        """When to begin, by what is known now; never, if nobody waits."""
        site, config = self._site, self._site.config
        shares = (site.send_desk.share, site.receive_desk.share)
        crowded = any(share.quarantined_bytes() * _CROWDED > share.capacity for share in shares)
        patience = {True: config.revoke_timeout / _STEPS, False: config.peer_timeout}
        due = min(
            (one.since + (0.0 if one.answered else patience[one.urgent or crowded]) for one in site.rebuilds.requests),
            default=math.inf,
        )
        return max(due, self._last + config.peer_timeout)

    def _on_timer(self) -> None:
        if self._due_at() > self._site.now() + _EARLY:  # whoever could not wait had an answer
            self._set_timer()
            return
        self._site.pause()
        self._site.tasks.spawn(self._run(), "kvxfer rebuild the agent")

    async def _run(self) -> None:
        site = self._site
        began, done, why = site.now(), False, "it cannot be done now, and is tried again"
        try:
            if not await self._wait_idle():
                for stop in self._exposed():
                    stop(_TAKEN_BACK)
                await self._wait_idle()
            since = site.now()
            if await self._wait_while(lambda: site.mover.has_copy_since(since)):
                done = await site.fabric.rebuild(site.config.revoke_timeout / _STEPS)
            else:
                why = "a copy of our own stands still on the GPU: it is tried again when that has ended"
            if done:
                await self._renew_bodies()
        except FabricError as error:
            self._closed = True
            _log.error("agent_not_rebuilt", error=str(error))
        finally:
            self._last = site.now()
            for link in list(self._links) if done else ():
                self.send_renewed(link)  # before anything is granted that is reached through the new agent
            site.resume(done=done)
            self._set_timer()
        took = site.now() - began
        if done:
            _log.warning("agent_rebuilt", count=site.rebuilds.count, duration=took)
        elif not self._closed:
            _log.warning("agent_not_rebuilt", reason=why)

    async def _wait_idle(self) -> bool:
        """Wait until no peer that answers has anything of ours in its hands; False if that takes too long."""
        return await self._wait_while(self._exposed)

    def _exposed(self) -> list[Stop]:
        return [stop for role in self._roles for stop in role.exposed]

    async def _wait_while(self, something: Callable[[], object]) -> bool:
        """Wait until something is not so any more; False if that takes too long."""
        site, delay = self._site, _LOOK_SECONDS
        until = site.now() + site.config.revoke_timeout / _STEPS
        while something():
            if site.now() >= until:
                return False
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LOOK_SECONDS_MAX)
        return True

    async def _renew_bodies(self) -> None:
        """What peers are told from now on."""
        site = self._site
        for trusted, tokens in site.reachable.items():
            metadata = await asyncio.wrap_future(site.fabric.metadata(tokens))
            told = decode_body(site.body[trusted])
            site.body[trusted] = encode_body(replace(told, metadata=metadata, renewals=site.rebuilds.count + 1))


def request_rebuild(site: "Site", peer: PeerInfo, *, urgent: bool) -> Callback:
    """A post of ours to or from a peer did not end, and the end of our agent would end it.

    Not where it may be a copy between GPUs of this host: that goes on without us.

    Returns:
        To be called when it has ended by itself.
    """
    return no_op if may_outlive_agent(site, peer) else site.rebuilds.request(urgent=urgent)


def may_outlive_agent(site: "Site", peer: PeerInfo) -> bool:
    """Whether a post of ours to or from a peer may be a copy between GPUs of this host, which needs no agent."""
    return site.geometry.kind == "cuda" and not elsewhere(peer.body.host)


def severed(site: "Site", peer: PeerInfo) -> bool:
    """Whether memory that a peer was granted is out of its reach once the agent is made anew."""
    return elsewhere(peer.body.host) or site.processes.has_ended(peer)
