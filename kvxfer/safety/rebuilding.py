"""When this worker's agent is destroyed and made anew, which ends doubts that nothing else does.

Of the old agent no byte comes or goes over a network any more, whoever posted it. That is evidence for

- memory that a peer on another host was granted,
- memory that a peer on this host was granted, once its process has ended: what that left to a socket is gone, and what
  it wrote by itself ended with it,
- our own posts: where the peer is on this host they run inside of our calls, but for copies between GPUs.

It is none for memory that a living process on this host may write, though it be stopped, and none for what is mapped.

Who makes an agent for a GPU waits, and his process with him, until what was launched there has ended (seen with UCX).
So while a copy of ours stands still there, no agent is made.

Nothing that is healthy fails for it. Nothing is granted and nothing announced to be read, what was is waited for, and
posts of ours wait in the fabric; then peers are told how the new agent is reached, and all goes on. Who does not move
what it was granted in time has that taken back, which a retry cures.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from kvxfer.errors import Code, FabricError
from kvxfer.mapped import elsewhere
from kvxfer.peers.link import Link
from kvxfer.protocol import messages as wire
from kvxfer.protocol.framing import decode_body, encode_body
from kvxfer.protocol.messages import Capability, Status
from kvxfer.protocol.session import PeerInfo
from kvxfer.protocol.transfer import Failure
from kvxfer.site import Callback, Site, no_hold
from kvxfer.telemetry import logger

__all__ = ["Grantor", "Rebuilding", "runs_on", "severed", "want_end"]

_log: Final = logger("kvxfer.worker")
_LOOK_SECONDS: Final = 0.002
_LOOK_SECONDS_MAX: Final = 0.05
_EARLY: Final = 1e-3
"""Seconds by which a timer may be early."""
_STEPS: Final = 4
"""Into so many parts `revoke_timeout` is divided: peers may answer; move what was granted; stop; our work ends."""
_CROWDED: Final = 4
"""A share of which more than one part in so many is in quarantine is crowded: then nothing waits for longer."""
_TAKEN_BACK: Final = Failure(Status.CANCELLED, Code.FABRIC, "the agent of a rank is being rebuilt: try again")


class Grantor(Protocol):
    """One of the two roles of this worker, as far as peers can reach its memory through the agent."""

    @property
    def exposed(self) -> bool:
        """Whether a peer that answers may be touching memory that it was granted, or told of."""
        ...

    def take_back(self, failure: Failure) -> None:
        """Ask every one of them to stop."""
        ...


class Rebuilding:
    """Decides when it is time, and does it.

    At once, but for the time in which a peer may still answer, if the caller's blocks are in doubt or a quarter of a
    share is in quarantine, and without that time if the peer has made its own agent anew and knows no more; for less,
    `peer_timeout` after it was noticed, so that it is done for many together. Twice within `peer_timeout` never: who
    can bring it about must not be able to stop everybody else.

    Args:
        site: The worker.
        roles: What it does for peers.
        links: Control streams that are open.
        renewed: Called with each of them when it was done.
    """

    def __init__(
        self,
        site: Site,
        roles: Sequence[Grantor],
        links: Callable[[], Iterable[Link]],
        renewed: Callable[[Link], None],
    ) -> None:
        self._site: Final = site
        self._roles: Final = roles
        self._links: Final = links
        self._renewed: Final = renewed
        self._last = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._running = self._over = False
        site.rebuilds.wanted = self._consider

    def close(self) -> None:
        """The worker is closing: begin no more."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def tell(self, link: Link) -> None:
        """Tell a peer how the agent that there is now is reached."""
        told = decode_body(self._site.body[link.trusted])
        if Capability.RENEWED in Capability(link.peer.identity.capabilities):
            link.send(wire.Renewed(told.renewals, told.metadata))
        else:
            link.close("the agent of this rank was rebuilt: meet again")

    def _consider(self) -> None:
        """Arm the timer for the time at which it is due."""
        if self._timer is not None:
            self._timer.cancel()
        due = self._due()
        if due < math.inf and not self._over and not self._running:
            self._timer = self._site.at(due, self._begin)

    def _due(self) -> float:
        """When to begin, by what is known now; never, if nobody waits."""
        site, config = self._site, self._site.config
        shares = (site.send_desk.share, site.receive_desk.share)
        crowded = any(share.quarantined_bytes() * _CROWDED > share.capacity for share in shares)
        patience = {True: config.revoke_timeout / _STEPS, False: config.peer_timeout}
        due = min(
            (want.since + (0.0 if want.answered else patience[want.urgent or crowded]) for want in site.rebuilds.wants),
            default=math.inf,
        )
        return max(due, self._last + config.peer_timeout)

    def _begin(self) -> None:
        if self._over or self._running:
            return
        if self._due() > self._site.now() + _EARLY:  # whoever could not wait had an answer
            self._consider()
            return
        self._running = True
        self._site.tasks.spawn(self._run(), "kvxfer rebuild the agent")

    async def _run(self) -> None:
        """Do it."""
        site = self._site
        began, done, why = site.now(), False, "it cannot be done now, and is tried again"
        site.pause()
        try:
            if not await self._idle():
                for role in self._roles:
                    role.take_back(_TAKEN_BACK)
                await self._idle()
            since = site.now()
            if await self._ended(lambda: site.mover.standing(since)):
                left = max(0.0, since + site.config.revoke_timeout / _STEPS - site.now())
                done = await site.fabric.rebuild(left)
            else:
                why = "a copy of our own stands still on the GPU: it is tried again when that has ended"
            if done:
                await self._renew_bodies()
        except FabricError as error:
            self._over = True
            _log.error("agent_not_rebuilt", error=str(error))
        finally:
            self._running, self._last = False, site.now()
            for link in list(self._links()) if done else ():
                self._renewed(link)
                self.tell(link)  # before anything is granted that is reached through the new agent
            site.resume(done=done)
            self._consider()
        took = site.now() - began
        if done:
            site.metrics.agent_rebuilt()
            _log.warning("agent_rebuilt", count=site.rebuilds.count, duration=took)
        elif not self._over:
            _log.warning("agent_not_rebuilt", reason=why)

    async def _idle(self) -> bool:
        """Wait until no peer that answers has anything of ours in its hands; False if that takes too long."""
        return await self._ended(lambda: any(role.exposed for role in self._roles))

    async def _ended(self, something: Callable[[], bool]) -> bool:
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


def want_end(site: Site, peer: PeerInfo, *, urgent: bool) -> Callback:
    """A post of ours to or from a peer did not end, and the end of our agent would end it.

    Not where it may be a copy between GPUs of this host: that goes on without us.

    Returns:
        To be called when it has ended by itself.
    """
    return no_hold if runs_on(site, peer) else site.rebuilds.want(urgent=urgent)


def runs_on(site: Site, peer: PeerInfo) -> bool:
    """Whether a post of ours to or from a peer may be a copy between GPUs of this host, which needs no agent."""
    return site.geometry.kind == "cuda" and not elsewhere(peer.body.host)


def severed(site: Site, peer: PeerInfo) -> bool:
    """Whether memory that a peer was granted is out of its reach once the agent is made anew."""
    return elsewhere(peer.body.host) or site.processes.gone(peer)
