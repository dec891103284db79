"""Evidence that needs no answer: that a peer does not touch memory any more which it was allowed to touch.

Its gate is closed (`kvxfer.gates`), or its process has ended. Elapsed time, a closed stream, deregistered memory and a
removed agent are no evidence: after each of them bytes were seen to land.
"""

import asyncio
from typing import Final, Protocol

from kvxfer.mapped.locks import Revoked
from kvxfer.protocol.session import PeerInfo
from kvxfer.site import Site

__all__ = ["Exposed", "seek"]

_SECONDS: Final = 0.005
_SECONDS_MAX: Final = 1.0


class Exposed(Protocol):
    """What a peer may still write, or read."""

    @property
    def peer(self) -> PeerInfo:
        """Who."""
        ...

    @property
    def gate(self) -> int:
        """The gate that leads to it."""
        ...

    @property
    def fenced(self) -> bool:
        """Whether the peer passes that gate, or touches nothing."""
        ...

    @property
    def ends_with_process(self) -> bool:
        """Whether nothing of it goes on, or does harm, when the peer's process has ended."""
        ...

    @property
    def ended(self) -> bool:
        """Whether it is known already that the peer is through with it."""
        ...

    def safe(self, why: str) -> None:
        """There is evidence. To no effect if the peer has answered meanwhile."""
        ...


def seek(site: Site, exposed: Exposed, name: str) -> "asyncio.Task[None]":
    """Close the gate that a peer was granted, or see its process end, in a task of the worker's.

    The task ends when either is evidence. Nothing but cancelling ends it otherwise: a peer that is stopped inside of
    its gate may go on at any time.
    """
    leave = site.processes.hold(exposed.peer)  # now: the last link to the peer may be gone when the task begins
    task = site.tasks.spawn(_seek(site, exposed), name)
    task.add_done_callback(lambda _: leave())
    return task


async def _seek(site: Site, exposed: Exposed) -> None:
    delay, found = _SECONDS, None
    while not exposed.ended:
        if found is None and exposed.fenced:
            found = await site.gates.revoke(exposed.gate)
        if why := await _evidence(site, exposed, found):
            exposed.safe(why)
            return
        await site.processes.wait(exposed.peer, delay)
        delay = min(2 * delay, _SECONDS_MAX)


async def _evidence(site: Site, exposed: Exposed, found: Revoked | None) -> str:
    """What shows that nothing is touched any more; empty if nothing does."""
    ends, own = exposed.ends_with_process, site.geometry.kind != "cuda"
    if found is not None and not await site.gates.inside(exposed.gate):
        if found is Revoked.IDLE:
            return "its gate was empty"
        if ends and own:  # what a thread of it copied by itself ends before its locks are given back
            return "it died inside of its gate"
    if ends and site.processes.gone(exposed.peer):
        if exposed.fenced:  # it may have died inside of a word
            site.gates.retire(exposed.gate)
        return "its process has ended"
    return ""
