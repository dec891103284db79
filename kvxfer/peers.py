"""Control streams that this rank opened: one per prefill rank, connected once, shared by all requests."""

import asyncio
from collections.abc import Callable
from typing import Final

from kvxfer.errors import MismatchError, UnreachableError
from kvxfer.link import Link, connect
from kvxfer.site import Site

__all__ = ["Peers"]


class Peers:
    """Opens links when they are first needed and keeps them.

    Args:
        site: The worker.
        factory: Makes a client link to an endpoint.
    """

    def __init__(self, site: Site, factory: Callable[[str], Link]) -> None:
        self._site: Final = site
        self._factory: Final = factory
        self._links: dict[str, Link] = {}
        self._opening: dict[str, asyncio.Task[Link]] = {}

    @property
    def links(self) -> list[Link]:
        """Every open link."""
        return list(self._links.values())

    def known(self, endpoint: str, epoch: bytes) -> Link | None:
        """The link to an endpoint if it is open and the engine there is of this epoch; else ask `link`."""
        link = self._links.get(endpoint)
        usable = link is not None and link.is_open and link.peer.identity.epoch == epoch
        return link if usable and self._site.config.admits(endpoint) else None

    async def link(self, endpoint: str, epoch: bytes | None) -> Link:
        """The open link to an endpoint; many callers at once make one handshake.

        Raises:
            UnreachableError: If `allow_peers` excludes the endpoint, or nobody answers there.
            MismatchError: If the engine there cannot work with this one, or has restarted since the ticket was made.
        """
        if not self._site.config.admits(endpoint):
            raise UnreachableError(
                f"{endpoint} is not admitted by allow_peers={list(self._site.config.allow_peers)}", peer=endpoint
            )
        link = self._links.get(endpoint)
        if link is None or not link.is_open:
            link = await self._open(endpoint)
        theirs = link.peer.identity.epoch
        if epoch is not None and theirs == link.peer.identity.incarnation:
            # it had not joined its engine when it was met; until it has, it refuses everything, so nothing runs there
            link.close("to meet it again")
            link = await self._open(endpoint)
            theirs = link.peer.identity.epoch
        if epoch is not None and theirs != epoch:
            raise MismatchError(
                f"the ticket is of epoch {epoch.hex()}, but the engine at {endpoint} is of epoch {theirs.hex()}: "
                "it has restarted, or was joined differently",
                peer=link.peer.name,
                fields={"epoch": (epoch.hex(), theirs.hex())},
            )
        return link

    async def _open(self, endpoint: str) -> Link:
        task = self._opening.get(endpoint)
        if task is None:
            task = self._site.tasks.spawn(self._connect(endpoint), f"kvxfer connect {endpoint}")
            self._opening[endpoint] = task
            task.add_done_callback(lambda _: self._opening.pop(endpoint, None))
        return await asyncio.shield(task)

    async def _connect(self, endpoint: str) -> Link:
        link = await connect(endpoint, lambda: self._factory(endpoint), self._site.config.connect_timeout)
        self._links[endpoint] = link
        return link

    def lost(self, link: Link) -> None:
        """A link is gone; the next caller opens a new one."""
        if self._links.get(link.endpoint) is link:
            del self._links[link.endpoint]

    def close(self, reason: str) -> None:
        """Close every link."""
        for link in self.links:
            link.close(reason)
