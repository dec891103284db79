"""What a peer may be touching of ours, and evidence that needs no answer that it touches that no more."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from kvxfer.mapped.locks import Revoked
from kvxfer.names import lazy
from kvxfer.peers.link import Link
from kvxfer.protocol.messages import Route
from kvxfer.protocol.session import PeerInfo
from kvxfer.safety.fence import SHARED_GATE
from kvxfer.safety.rebuilding import severed
from kvxfer.site import Callback, Site, no_hold, resolve
from kvxfer.telemetry import logger

__all__ = ["Exposure", "seek"]

# --- evidence
#
# Its gate is closed (`kvxfer.safety.fence`), its process has ended, or the agent that it reached was destroyed
# (`kvxfer.safety.rebuilding`). Elapsed time, a closed stream, deregistered memory and a peer's agent that was removed
# are no evidence: after each of them bytes were seen to land.

_SECONDS: Final = 0.005
_SECONDS_MAX: Final = 1.0


def seek(site: Site, exposed: "Exposure", name: str) -> Callback:
    """Close the gate that a peer was granted, see its process end, or wait for a new agent, in a task of the worker's.

    The task ends when one of them is evidence. A peer that is stopped inside of its gate may go on at any time, so
    nothing else ends it but what is returned: to be called when the doubt has ended otherwise. A worker that is closing
    looks once more.
    """
    over: asyncio.Future[None] = site.loop.create_future()
    leave = site.processes.hold(exposed.peer)  # now: the last link to the peer may be gone when the task begins
    task = site.lookouts.spawn(_seek(site, exposed, over, site.rebuilds.count), name)
    task.add_done_callback(lambda _: leave())
    return partial(resolve, over, None)


async def _seek(site: Site, exposed: "Exposure", over: "asyncio.Future[None]", before: int) -> None:
    delay, found = _SECONDS, None
    leave = no_hold  # the agent is wanted anew
    wanted = -1, False  # as often as it had been, and whether an answer is out of reach, when that was said
    try:
        while not over.done():
            last = site.closing.done()
            if found is None and exposed.fenced:
                found = await site.gates.revoke(exposed.gate)
            count, clueless = site.rebuilds.count, exposed.clueless.done()
            if why := await _evidence(site, exposed, found, rebuilt=count > before):
                exposed.safe(why)
                return
            if last:
                return
            news = [over, site.closing]
            if severed(site, exposed.peer) or (clueless and count == before):
                if wanted != (count, clueless):
                    leave()
                    leave, wanted = site.rebuilds.want(urgent=exposed.in_doubt, answered=clueless), (count, clueless)
                news.append(site.rebuilds.next)
            elif (ended := site.processes.ended(exposed.peer)) is not None and not ended.done():
                news.append(ended)
            if not clueless:
                news.append(exposed.clueless)
            pause = delay if _may_empty(exposed, found) else None  # else an idle worker would look in vain for ever
            await asyncio.wait(news, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            delay = min(2 * delay, _SECONDS_MAX)
    finally:
        leave()


def _may_empty(exposed: "Exposure", found: Revoked | None) -> bool:
    """Whether there is a gate that is worth another look: where a process has died in it, nothing more will show."""
    return exposed.fenced and exposed.gate != SHARED_GATE and found is not Revoked.DIED


async def _evidence(site: Site, exposed: "Exposure", found: Revoked | None, *, rebuilt: bool) -> str:
    """What shows that nothing is touched any more; empty if nothing does.

    `rebuilt` if that was done since the doubt began, before which all was granted: only then does it tell anything.
    """
    ends, spans = exposed.ends_with_process, exposed.peer.body.staging
    own = site.geometry.kind != "cuda" and all(span.kind == "DRAM" for span in spans)  # no GPU writes for it
    if found is not None and not await site.gates.inside(exposed.gate):
        if found is Revoked.IDLE:
            return "its gate was empty"
        if ends and own:  # what a thread of it copied by itself ends before its locks are given back
            return "it died inside of its gate"
    gone = site.processes.gone(exposed.peer)
    if gone and (ends or rebuilt):
        if exposed.fenced:  # it may have died inside of a word
            site.gates.retire(exposed.gate)
        return "its process has ended" if ends else "its process has ended, and the agent that it reached is gone"
    if rebuilt and severed(site, exposed.peer):
        return "it is on another host, and the agent that it reached is gone"
    return ""


# --- what a peer may be touching

_log: Final = logger("kvxfer.worker")
_ENDS_WITH_PROCESS: Final = frozenset({Route.MAPPED, Route.PULL})


class Exposure:
    """Memory that one transfer lets a peer write or read.

    Attributes:
        peer: Who.
        gate: What every grant leads through; there is one from the first grant on.
        fenced: Whether the peer passes it, or touches nothing.
        routes: Those on which the peer may touch it.
        ended: Nobody touches it any more.

    Args:
        site: The worker.
        link: The control stream on which it is granted.
        name: What it is, for logs.
        safe: Called once if there is evidence that nobody touches it any more, other than the peer's word.
        routes: As the attribute.
    """

    def __init__(self, site: Site, link: Link, name: str, safe: Callable[[], None], routes: Iterable[Route]) -> None:
        self.peer: Final[PeerInfo] = link.peer
        self.gate = SHARED_GATE
        self.fenced = False
        self.routes = frozenset(routes)
        self.ended = False
        self._renewals = link.renewals
        self._renewed = self._in_doubt = False  # as the peer has said
        self._site: Final = site
        self._granted_over: Final = link
        self._name: Final = name
        self._safe = safe
        self._granted = False
        self._found: Callable[[], None] | None = None

    @lazy
    def clueless(self) -> "asyncio.Future[None]":
        """Resolves when the peer has said `IN_DOUBT`, and that it has made its agent anew since the last grant.

        What it posted left for the agent that was here, and more it cannot tell before there is another.
        """
        return self._site.loop.create_future()

    @property
    def ends_with_process(self) -> bool:
        """Whether nothing of it goes on, or does harm, when the peer's process has ended.

        What a process left to a socket may still land, whoever reads that out: only a new agent of ours ends it. A
        reader's end harms nobody.
        """
        return self.routes <= _ENDS_WITH_PROCESS

    @property
    def in_doubt(self) -> bool:
        """Whether it may be memory of the caller's, and not staging memory."""
        return not self.routes <= {Route.STAGED}

    def grant(self, *, mapped: bool) -> int:
        """What a grant says of the gate that it leads through: 0 where the peer passes none.

        Args:
            mapped: Whether the peer's own copies write there.
        """
        if self.gate == SHARED_GATE:
            self.gate = self._site.gates.allot()
        generation = self._site.granted(self.peer, self.gate, mapped=mapped)
        self.fenced = (self.fenced or not self._granted) and generation > 0
        self._granted = True
        self._renewals, self._renewed = self._granted_over.renewals, False
        return generation

    def met(self, renewals: int) -> None:
        """The peer says how often it has made its agent anew."""
        self._renewed = self._renewed or renewals > self._renewals
        self._consider()

    def told_in_doubt(self) -> None:
        """The peer says that it does not know what became of it."""
        self._in_doubt = True
        self._consider()

    def _consider(self) -> None:
        if self._renewed and self._in_doubt:
            resolve(self.clueless, None)

    def void(self) -> None:
        """The peer touches nothing under what was granted so far."""
        self._granted = self.fenced = False

    def seek(self) -> None:
        """Nothing more is granted, or the peer says nothing: look for evidence, until there is some or it has ended."""
        if self._found is None and not self.ended:
            self._found = seek(self._site, self, f"kvxfer look after {self._name}")

    def safe(self, why: str) -> None:
        """There is evidence, other than the peer's word. To no effect if it has ended meanwhile."""
        if not self.ended:
            _log.info("doubt_ended", peer=self.peer.name, transfer=self._name, reason=why)
            safe = self._safe
            self.end()
            safe()

    def end(self) -> None:
        """Nobody touches it any more. Idempotent."""
        if not self.ended:
            self.ended = True
            self._safe = no_hold  # without a cycle, the transfer is freed at once
            self._site.gates.give_back(self.gate)
            if self._found is not None:
                self._found()
