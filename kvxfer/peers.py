"""Control streams that this rank opened: one per prefill rank, connected once, shared by all requests."""

import asyncio
import contextlib
import copy
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from kvxfer.backoff import Backoff
from kvxfer.errors import ClosedError, IdentityError, KvxferError, MismatchError, UnreachableError
from kvxfer.link import Link
from kvxfer.site import Site

__all__ = ["Peers"]


_RETRY_SECONDS: Final = 0.1
_RETRY_SECONDS_MAX: Final = 2.0
_REMEMBERED: Final = 1024
"""Endpoints of which it is known that they could not be reached."""


@dataclass(slots=True)
class _Away:
    """An endpoint that could not be reached.

    Attributes:
        backoff: How long it is left in peace.
        epoch: Of the ticket that led there; one of a later engine is tried at once, since that has restarted.
        until: When it is tried again.
        error: What happened: a copy, which keeps alive no frame that it was raised through, nor what that refers to.
    """

    backoff: Backoff
    epoch: bytes | None
    until: float
    error: KvxferError


class Peers:
    """Opens links when they are first needed and keeps them.

    An endpoint that could not be reached, or whose handshake failed, is left in peace for a while (0.1 s, doubling to 2
    s): who wants to go there meanwhile gets the same error at once, and with it the time after which to try again.

    Args:
        site: The worker.
        connect: Opens a link to an endpoint and completes its handshake.
    """

    def __init__(self, site: Site, connect: Callable[[str], Awaitable[Link]]) -> None:
        self._site: Final = site
        self._connect_to: Final = connect
        self._admits: Final = lru_cache(_REMEMBERED)(site.config.admits)
        self._links: dict[str, Link] = {}
        self._opening: dict[str, asyncio.Task[Link]] = {}
        self._away: OrderedDict[str, _Away] = OrderedDict()

    @property
    def links(self) -> list[Link]:
        """Every open link."""
        return list(self._links.values())

    def known(self, endpoint: str, epoch: bytes) -> Link | None:
        """The link to an endpoint if it is open and the engine there is of this epoch; else ask `link`."""
        link = self._links.get(endpoint)
        usable = link is not None and link.is_open and link.peer.identity.epoch == epoch
        return link if usable and self._admits(endpoint) else None

    @property
    def connecting(self) -> list[str]:
        """Endpoints that are being connected."""
        return list(self._opening)

    @property
    def unreachable(self) -> dict[str, float]:
        """Endpoints that could not be reached when they were last tried: seconds for which they are left in peace."""
        now = self._site.now()
        return {endpoint: max(0.0, away.until - now) for endpoint, away in self._away.items()}

    def opening(self, endpoint: str) -> bool:
        """Whether an endpoint is being connected."""
        return endpoint in self._opening

    async def link(self, endpoint: str, epoch: bytes | None) -> Link:
        """The open link to an endpoint; many callers at once make one handshake.

        Raises:
            UnreachableError: If `allow_peers` excludes the endpoint, or nobody answers there.
            IdentityError: If who answers there does not prove its incarnation, or that one is engaged elsewhere.
            MismatchError: If the engine there cannot work with this one, or has restarted since the ticket was made.
            ClosedError: If this worker was closed before.
        """
        if not self._admits(endpoint):
            raise UnreachableError(
                f"{endpoint} is not admitted by allow_peers={list(self._site.config.allow_peers)}", peer=endpoint
            )
        link = self._links.get(endpoint)
        if link is None or not link.is_open:
            try:
                link = await self._open(endpoint, epoch)
            except IdentityError as error:
                link = await self._where_engaged(error, endpoint, epoch)
        theirs = link.peer.identity.epoch
        if epoch is not None and theirs == link.peer.identity.incarnation:
            # it had not joined its engine when it was met; until it has, it refuses everything, so nothing runs there
            link.close("to meet it again")
            link = await self._open(link.endpoint, epoch)
            theirs = link.peer.identity.epoch
        if epoch is not None and theirs != epoch:
            raise MismatchError(
                f"the ticket is of epoch {epoch.hex()}, but the engine at {endpoint} is of epoch {theirs.hex()}: "
                "it has restarted, or was joined differently",
                peer=link.peer.name,
                fields={"epoch": (epoch.hex(), theirs.hex())},
            )
        return link

    async def _where_engaged(self, refused: IdentityError, endpoint: str, epoch: bytes | None) -> Link:
        """The link to where something with a worker is open, or in doubt, that is said to be elsewhere as well.

        Nothing is proved to whoever is there, and nothing is asked of him: if he speaks the truth, such as for a host
        that has two names, the worker itself does what is wanted. If it does not answer, and nothing is in doubt any
        more, it may have moved.
        """
        if not refused.engaged_at:
            raise refused
        link = self._links.get(refused.engaged_at)
        if link is None or not link.is_open:
            with contextlib.suppress(KvxferError):
                link = await self._open(refused.engaged_at, epoch)
        if link is not None and link.is_open and link.proved_to.hex() == refused.incarnation:
            return link
        self._away.pop(endpoint, None)
        return await self._open(endpoint, epoch)

    async def _open(self, endpoint: str, epoch: bytes | None) -> Link:
        task = self._opening.get(endpoint)
        if task is None:
            away = self._away.get(endpoint)
            if away is not None and away.epoch == epoch and (left := away.until - self._site.now()) > 0:
                error = copy.copy(away.error)
                error.retry_after, error.report = left, None
                raise error
            connecting = self._connect(endpoint, epoch)
            task = self._site.tasks.spawn(connecting, f"kvxfer connect {endpoint}", spare=True)
            self._opening[endpoint] = task
            task.add_done_callback(lambda _: self._opening.pop(endpoint, None))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled() or ((current := asyncio.current_task()) and current.cancelling()):
                raise
            raise ClosedError(f"the worker was closed before {endpoint} was reached") from None

    async def _connect(self, endpoint: str, epoch: bytes | None) -> Link:
        try:
            link = await self._connect_to(endpoint)
        except KvxferError as error:
            self._note(endpoint, epoch, error)
            raise
        self._away.pop(endpoint, None)
        self._links[endpoint] = link
        return link

    def _note(self, endpoint: str, epoch: bytes | None, error: KvxferError) -> None:
        """It could not be reached (again)."""
        before = self._away.pop(endpoint, None)
        if before is not None and before.epoch == epoch:
            backoff = before.backoff
        else:
            backoff = Backoff(self._site.runtime.token, least=_RETRY_SECONDS, most=_RETRY_SECONDS_MAX)
        wait = backoff.wait()
        error.retry_after = max(wait, error.retry_after or 0)
        self._away[endpoint] = _Away(backoff, epoch, self._site.now() + wait, copy.copy(error))
        if len(self._away) > _REMEMBERED:
            self._away.popitem(last=False)

    def lost(self, link: Link) -> None:
        """A link is gone; the next caller opens a new one."""
        if self._links.get(link.endpoint) is link:
            del self._links[link.endpoint]

    def close(self, reason: str) -> None:
        """Close every link."""
        for link in self.links:
            link.close(reason)
