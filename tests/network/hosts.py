"""Two hosts, a cable between them, and ranks on both: each host is a process with a network namespace of its own."""

import asyncio
import contextlib
import os
import time
from typing import Any

from cable import DEVICE, HOSTS, Cable, Way, crossed, join_cable, own_network
from far import Far, Ranks
from inside import sessions

from kvxfer import KvxferError, MemoryInDoubt
from kvxfer import worker as assembly
from kvxfer.mapped import host as home

__all__ = ["Host", "Hosts"]


class Host(Ranks):
    """Ranks of an engine on a host of their own, with a boot of its own as peers are told.

    Without `UCX_TLS` UCX would see one machine and not use the cable.
    """

    def __init__(self) -> None:
        own_network()
        os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE}
        home.here = assembly.here = lambda: f"boot-of-{os.getpid()} pid:[1]"
        super().__init__()
        self._watching: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._doubts: dict[str, MemoryInDoubt] = {}
        self._sessions: list[Any] = []

    def pid(self) -> int:
        """Who answers has a namespace."""
        return os.getpid()

    def plug_in(self, way: Way) -> None:
        join_cable(way)

    def crossed(self) -> dict[str, int]:
        return crossed()

    def begin(self, request, ticket, ids, **options) -> None:
        """Start to fetch, and watch how it ends."""
        transfer = self.workers[0].start_fetch(ticket, ids, **options)
        self._fetches[0, request] = transfer
        self._watching[request] = asyncio.create_task(self._watch(request, transfer))

    async def _watch(self, request, transfer) -> dict[str, Any]:
        error, route = None, ""
        try:
            route = (await transfer).stats.route
        except KvxferError as raised:
            error = raised
        except asyncio.CancelledError as raised:
            error = raised
        at = time.monotonic()
        if isinstance(error, MemoryInDoubt):
            self._doubts[request] = error
        kinds = [kind.__name__ for kind in type(error).__mro__] if error else []
        said = {"error": kinds, "text": str(error or ""), "retry_after": getattr(error, "retry_after", None) or 0.0}
        return {**said, "at": at, "safe": transfer.memory_safe, "route": route}

    def cancel(self, request) -> None:
        self._fetches[0, request].cancel()

    async def outcome(self, request) -> dict[str, Any]:
        """How a fetch ended: the error's type or nothing, and when."""
        return await self._watching[request]

    def over(self, request) -> bool:
        """Whether it has."""
        return self._watching[request].done()

    async def no_more_doubt(self, request) -> None:
        """Wait until blocks that were in doubt are this host's again."""
        await self._doubts.pop(request).settled()

    def contents(self) -> dict[int, Any]:
        """What the cache of the one rank holds."""
        return self.caches[0].clone()

    async def ended(self, request) -> str:
        """How an offer ended; what was in doubt is waited for."""
        try:
            ending = await self._offers[0, request].released()
        except MemoryInDoubt as doubt:
            await doubt.settled()
            return "in doubt, settled"
        return type(ending).__name__

    def books(self) -> dict[str, Any]:
        """What is under way, held, in quarantine or in doubt."""
        (worker,) = self.workers
        arena = worker.describe()["arena"]
        return {**self.quiet()[0], "quarantined": sum(arena[side].quarantined_bytes for side in ("send", "receive"))}

    def rebuilt(self) -> int:
        """How often the agent was made anew."""
        (worker,) = self.workers
        return worker.describe()["agent"]["rebuilt"]

    def session(self) -> int:
        """Number of the session that is open, counted from the first that was asked for; 0 if none is."""
        (worker,) = self.workers
        for link in sessions(worker):
            if link not in self._sessions:
                self._sessions.append(link)
            return self._sessions.index(link) + 1
        return 0


class Hosts:
    """The two hosts and the cable, of which everything is gone when `end` returns."""

    def __init__(self) -> None:
        self._all: list[Far] = []
        self.cable = self._start(Cable)
        self.prefill = self._start(Host)
        self.decode = self._start(Host)

    def _start(self, kind: Any) -> Far:
        far = Far(kind)
        self._all.append(far)
        return far

    async def plug(self) -> None:
        """Connect the hosts."""
        await self.cable.plug({way: await self.of(way).pid() for way in HOSTS})
        for way in HOSTS:
            await self.of(way).plug_in(way)

    async def rest(self) -> None:
        """Mend the cable and close all workers."""
        await self.cable.mend()
        await self.prefill.close()
        await self.decode.close()

    def of(self, way: Way) -> Far:
        return self.prefill if way == "prefill" else self.decode

    def end(self) -> None:
        """Kill and reap the three processes; their namespaces and interfaces go with them."""
        with contextlib.ExitStack() as stack:
            for far in self._all:
                stack.callback(far.end)
