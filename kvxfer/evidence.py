"""Evidence that needs no answer: that a peer does not touch memory any more which it was allowed to touch.

Its gate is closed (`kvxfer.gates`), its process has ended, or the agent that it reached was destroyed
(`kvxfer.rebuilding`). Elapsed time, a closed stream, deregistered memory and a peer's agent that was removed are no
evidence: after each of them bytes were seen to land.
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from kvxfer.gates import SHARED_GATE
from kvxfer.mapped.locks import Revoked
from kvxfer.rebuilding import severed
from kvxfer.site import Callback, Site, no_hold, resolve

if TYPE_CHECKING:
    from kvxfer.exposure import Exposure

__all__ = ["seek"]

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
