"""Processes of peers on this host: whether they are still there, by a descriptor of each (pidfd).

A peer in this PID namespace names its process in the handle of its locks. One in another namespace, that of another
Pod say, has no number here; but the Unix socket that leads to it knows the process at its other end. That may be
another one than the peer's, such as one that passes everything on. So a peer says by which number the kernel tells its
process from all others, in whatever namespace, and only that process is watched.

That a process has ended is evidence for whatever it moved by itself: it fires when the last of its threads has left the
kernel and its descriptors were closed. A child that it has forked has descriptors of the same devices, and what was
left to a GPU goes on: so the end of a process that has forked is no evidence where a GPU may move the bytes.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvxfer.errors import FabricError
from kvxfer.mapped.host import check_process, may_be_elsewhere, number_of, own_number, process_of, unlike
from kvxfer.protocol.session import PeerInfo
from kvxfer.runtime import no_op, resolve
from kvxfer.safety.fence import Lineage
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
    users: set[object] = field(default_factory=set[object])
    wanted: bool = True


class Processes:
    """Watches the processes of peers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, gpu: bool) -> None:
        self._loop: Final = loop
        self._gpu: Final = gpu
        self._processes: dict[bytes, _Process] = {}

    def on_session(self, peer: PeerInfo, stream: Callable[[], int]) -> None:
        """A session with a peer begins: it is alive, and says which process it is.

        `stream` opens a descriptor of the process at the other end of the stream; -1 if there is none.
        """
        key = peer.identity.incarnation
        if key in self._processes:
            self._processes[key].wanted = True
            return
        lineage: Lineage | None = None
        try:
            if not peer.body.locks or unlike(peer.body.host):
                descriptor = self._by_stream(peer, stream)
            else:
                if self._by_gpu(peer):
                    lineage = Lineage(peer.body.locks)
                descriptor = _by_locks(peer)
        except (AttributeError, OSError, FabricError):
            descriptor = -1  # without it, only the peer's word and its gates are left
        if descriptor < 0:
            if lineage is not None:
                lineage.close()
            return
        process = self._processes[key] = _Process(descriptor, self._loop.create_future(), lineage)
        self._loop.add_reader(descriptor, self._on_exit, peer, process)

    def hold(self, peer: PeerInfo) -> Callable[[], None]:
        """Keep an eye on a peer's process, whether or not a link leads to it, until the returned function is called."""
        key = peer.identity.incarnation
        process = self._processes.get(key)
        if process is None:
            return no_op
        user = object()
        process.users.add(user)

        def leave() -> None:  # of no effect when called again
            process.users.discard(user)
            self._prune(key, process)

        return leave

    def when_ended(self, peer: PeerInfo, then: Callable[[], None]) -> Callable[[], None]:
        """Call `then` once the process of a peer has ended, if that can be known.

        Returns:
            What takes that back; `no_op` if it cannot.
        """
        ended = self.end_of(peer)
        if ended is None:
            return no_op
        leave = self.hold(peer)

        def told(_: "asyncio.Future[None]") -> None:
            leave()
            then()

        def withdraw() -> None:
            ended.remove_done_callback(told)
            leave()

        ended.add_done_callback(told)
        return withdraw

    def has_ended(self, peer: PeerInfo) -> bool:
        """Whether the process of a peer is known to have ended, and with it all that it moved. Call it under `hold`."""
        process = self._processes.get(peer.identity.incarnation)
        return process is not None and process.ended.done() and not process.survived

    def end_of(self, peer: PeerInfo) -> "asyncio.Future[None] | None":
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

    def _by_stream(self, peer: PeerInfo, stream: Callable[[], int]) -> int:
        """Of a peer whose locks cannot be opened here; -1 if nothing shows that the stream leads to its process.

        Nor does anything show whether it has forked, so that it is of no use where a GPU may move the bytes.
        """
        told = peer.body.process
        if not told or told == own_number() or may_be_elsewhere(peer.body.host) or self._by_gpu(peer):
            return -1
        return _if_process(stream(), told)

    def _by_gpu(self, peer: PeerInfo) -> bool:
        """Whether a GPU may move what goes from or to a peer."""
        return self._gpu or any(span.kind != "DRAM" for span in peer.body.staging)

    def _on_exit(self, peer: PeerInfo, process: _Process) -> None:
        process.survived = process.lineage is not None and process.lineage.forked
        if process.survived:
            _log.warning("process_had_forked", peer=peer.name, reason="a child of it may keep its GPU at work")
        self._drop(process)
        resolve(process.ended, None)

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


def _by_locks(peer: PeerInfo) -> int:
    """Of a peer that names its process in the handle of its locks; -1 if it is this one, or not the one it says.

    Raises:
        OSError: If it is not there.
        FabricError: If the kernel says that the peer is another one.
    """
    check_process(peer.body.locks, peer.process)
    number = process_of(peer.body.locks)
    if number == os.getpid():
        return -1
    descriptor = os.pidfd_open(number)
    told = peer.body.process
    return _if_process(descriptor, told) if told and number_of(descriptor) else descriptor


def _if_process(descriptor: int, told: int) -> int:
    """The same, if it is of the process with this number; else it is closed, and -1 is returned."""
    if descriptor >= 0 and number_of(descriptor) != told:
        os.close(descriptor)
        return -1
    return descriptor
