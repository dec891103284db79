"""Processes of peers on this host: whether they are still there, by a descriptor of each (pidfd).

That a process has ended is evidence for whatever it moved by itself: it fires when the last of its threads has left the
kernel and its descriptors were closed. A child that it has forked has descriptors of the same devices, and what was
left to a GPU goes on: so the end of a process that has forked is no evidence where a GPU may move the bytes.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvxfer.errors import FabricError
from kvxfer.lanes import once
from kvxfer.mapped import check_process, unlike
from kvxfer.mapped.locks import Lineage
from kvxfer.mapped.memfd import process_of
from kvxfer.protocol.session import PeerInfo
from kvxfer.telemetry import logger

__all__ = ["Processes"]

_log: Final = logger("kvxfer.worker")


@dataclass(slots=True, eq=False)
class _Process:
    """One process: its descriptor (-1 once closed), who needs to know of it, and whether a link leads to it.

    `lineage` is there where it matters whether it has forked; `survived` says that something of it may go on.
    """

    descriptor: int
    ended: "asyncio.Future[None]"
    lineage: Lineage | None
    survived: bool = False
    users: int = 0
    wanted: bool = True


class Processes:
    """Watches the processes of peers.

    Args:
        loop: The worker's event loop.
        gpu: Whether this worker's cache is on a GPU.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, gpu: bool) -> None:
        self._loop: Final = loop
        self._gpu: Final = gpu
        self._processes: dict[bytes, _Process] = {}

    def met(self, peer: PeerInfo) -> None:
        """A session with a peer begins: it is alive, and says which process it is."""
        key = peer.identity.incarnation
        if key in self._processes:
            self._processes[key].wanted = True
            return
        if not peer.body.locks or unlike(peer.body.host):
            return
        try:
            check_process(peer.body.locks, peer.process)
            number = process_of(peer.body.locks)
            if number == os.getpid():
                return
            lineage = Lineage(peer.body.locks) if self._by_gpu(peer) else None
        except (AttributeError, OSError, FabricError):
            return  # without it, only the peer's word and its gates are left
        try:
            descriptor = os.pidfd_open(number)
        except (AttributeError, OSError):
            if lineage is not None:
                lineage.close()
            return
        process = self._processes[key] = _Process(descriptor, self._loop.create_future(), lineage)
        self._loop.add_reader(descriptor, self._has_ended, peer, process)

    def hold(self, peer: PeerInfo) -> Callable[[], None]:
        """Keep an eye on a peer's process, whether or not a link leads to it, until the returned function is called."""
        key = peer.identity.incarnation
        process = self._processes.get(key)
        if process is None:
            return lambda: None
        process.users += 1

        def leave() -> None:
            process.users -= 1
            self._prune(key, process)

        return once(leave)

    def when_gone(self, peer: PeerInfo, then: Callable[[], None]) -> Callable[[], None]:
        """Call `then` once the process of a peer has ended, if that can be known.

        Returns:
            What takes that back.
        """
        ended = self.ended(peer)
        if ended is None:
            return lambda: None
        leave = self.hold(peer)

        def told(_: "asyncio.Future[None]") -> None:
            leave()
            then()

        def withdraw() -> None:
            ended.remove_done_callback(told)
            leave()

        ended.add_done_callback(told)
        return withdraw

    def gone(self, peer: PeerInfo) -> bool:
        """Whether the process of a peer is known to have ended, and with it all that it moved. Call it under `hold`."""
        process = self._processes.get(peer.identity.incarnation)
        return process is not None and process.ended.done() and not process.survived

    def ended(self, peer: PeerInfo) -> "asyncio.Future[None] | None":
        """Done once the process of a peer has ended; None if that cannot be known. Call it under `hold`."""
        process = self._processes.get(peer.identity.incarnation)
        return None if process is None else process.ended

    def forget(self, peer: PeerInfo) -> None:
        """The last link to a peer is gone."""
        key = peer.identity.incarnation
        process = self._processes.get(key)
        if process is not None:
            process.wanted = False
            self._prune(key, process)

    def close(self) -> None:
        """Watch nobody any more."""
        for process in self._processes.values():
            self._drop(process)
        self._processes.clear()

    def _by_gpu(self, peer: PeerInfo) -> bool:
        """Whether a GPU may move what goes from or to a peer."""
        return self._gpu or any(span.kind != "DRAM" for span in peer.body.staging)

    def _has_ended(self, peer: PeerInfo, process: _Process) -> None:
        process.survived = process.lineage is not None and process.lineage.forked
        if process.survived:
            _log.warning("process_had_forked", peer=peer.name, reason="a child of it may keep its GPU at work")
        self._drop(process)
        if not process.ended.done():
            process.ended.set_result(None)

    def _prune(self, key: bytes, process: _Process) -> None:
        if not process.users and not process.wanted and self._processes.get(key) is process:
            del self._processes[key]
            self._drop(process)

    def _drop(self, process: _Process) -> None:
        if process.descriptor >= 0:
            self._loop.remove_reader(process.descriptor)
            os.close(process.descriptor)
            process.descriptor = -1
            if process.lineage is not None:
                process.lineage.close()
