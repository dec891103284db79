"""The fence before memory that another process writes: a generation and a byte lock for each gate in it.

An owner of memory cannot recall what another process has begun to write. It can know that nothing has begun: the other
one takes the gate's lock, shared, *then* compares the generation with the one that it was granted, *then* writes, and
gives the lock back when nothing of it is under way. So whoever holds the lock alone, raises the generation and lets go
knows that nothing under the old one is being written or ever will be, however long the other process was stopped and
wherever. Locks of a process that dies are given back by the kernel.

Both sides open the same anonymous file, which goes with its last user: 8 bytes a gate, the generation (written by the
owner) and whether a writer is inside (written by that writer, so that a lock that was given back by a dying process is
told from one that was given back because all was done). Byte n of the file is also what is locked for gate n. The
locks are those of open file descriptions (OFD), so threads, and workers of one process, exclude each other too.

8 bytes more say whether the owner has forked. What a process left to a GPU ends when the last descriptor of it is
closed, and a child that was forked has them too: bytes were seen to land on an H200 after the end of such a parent.

Who writes into memory of a GPU by kernels passes a word there (`kvxfer.copy.port.Gate`); everybody else passes the
lock. Both have the same generation, which is raised in both or in neither.

At the end is the memory itself: what peers may map of this worker's, and what this worker has mapped of theirs.
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from msgspec import Struct

from kvxfer.config import Config
from kvxfer.copy.port import Gate
from kvxfer.errors import FabricError, KvxferError, MismatchError, MissingExtraError
from kvxfer.geometry.cache import CacheGeometry
from kvxfer.mapped.host import (
    OpenFiles,
    Window,
    Windows,
    check_process,
    create,
    export,
    handle_of,
    joined,
    open_handle,
    open_window,
    unlike,
)
from kvxfer.memory.device import Backing, allocate, upload
from kvxfer.names import MAX_TENSORS
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import Capability
from kvxfer.protocol.session import PeerInfo
from kvxfer.runtime import Runtime
from kvxfer.telemetry import logger

__all__ = [
    "FIRST_GENERATION",
    "GATES",
    "GATE_BYTES",
    "SHARED_GATE",
    "Exports",
    "Gates",
    "Lineage",
    "LockFile",
    "Mappings",
    "PeerGate",
    "PeerGates",
    "Permit",
    "Revoked",
    "first_words",
]

FIRST_GENERATION: Final = 1
_NAME: Final = "kvxfer-gates"
_FLOCK: Final = struct.Struct("hhqqi4x")
"""`struct flock`: type, whence, start, length, process (0 for these locks)."""
_LAST_GENERATION: Final = 0xFFFF_FFFF
_LOCK_BYTES: Final = 8
_FORKED: Final = -2
"""Behind the gates, as a u32 from the end."""
_NOBODY: Final = np.zeros(1, np.int64)
_NO_WAY: Final = (1 << 30, 0, 0, 0, int(_NOBODY.ctypes.data))
"""What a passage lends that nobody gets through: more than any descriptor is, so nothing is locked by it."""
_log: Final = logger("kvxfer.worker")
_BUSY: Final = frozenset({errno.EAGAIN, errno.EACCES})


class Revoked(StrEnum):
    """What the owner found when it had a gate's lock alone, and raised the generation."""

    IDLE = "idle"
    """Nobody was inside: whatever was begun under the old generation had ended before."""
    DIED = "died"
    """A process that was inside has died, or is dying. What it had begun by itself has ended; what it left to others (a
    GPU, a socket, a NIC) may not have."""


def _lock(descriptor: int, kind: int, number: int) -> bool:
    """Take or give back the lock of one gate, without waiting. False if somebody else has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0))
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


class _Forks:
    """Notes that this process forks, before it does: in every file of its own."""

    def __init__(self) -> None:
        self.any = False
        self.files: Final = weakref.WeakSet[LockFile]()
        os.register_at_fork(before=self._begin, after_in_child=self._begin_anew)

    def _begin(self) -> None:
        self.any = True
        for file in list(self.files):
            with contextlib.suppress(ValueError):  # it is being closed by another thread
                file.say_forked()

    def _begin_anew(self) -> None:
        self.any = False
        self.files.clear()


class LockFile:
    """The owner's side, whose `handle` a peer on this host needs to open it. All calls come from one thread.

    Raises:
        FabricError: If the system has no such files or locks.
    """

    def __init__(self, gates: int) -> None:
        try:
            self._descriptor: Final = create(_NAME, _LOCK_BYTES * (gates + 1))
        except (AttributeError, OSError) as error:
            raise FabricError(f"this system has no anonymous files to lock: {error}") from error
        try:
            self._pages: Final = mmap.mmap(self._descriptor, _LOCK_BYTES * (gates + 1))
            _lock(self._descriptor, fcntl.F_UNLCK, 0)
        except (AttributeError, OSError, ValueError) as error:
            os.close(self._descriptor)
            raise FabricError(f"this system has no locks of open file descriptions: {error}") from error
        # of gate n word 2n says how often it was raised, the next one whether a writer is inside
        self.words: Final = memoryview(self._pages).cast("I")
        self.handle: Final = handle_of(self._descriptor)
        _forks.files.add(self)
        if _forks.any:
            self.say_forked()

    def say_forked(self) -> None:
        """A child of this process will have, or may have, its descriptors."""
        self.words[_FORKED] = 1

    def revoke(self, number: int) -> Revoked | None:
        """Raise the generation of a gate if nobody holds its lock.

        Returns:
            What was found; None if somebody is inside, or is about to be: then nothing has changed.
        """
        if not _lock(self._descriptor, fcntl.F_WRLCK, number):
            return None
        try:
            words, at = self.words, 2 * number
            inside, words[at + 1] = words[at + 1], 0
            words[at] = (words[at] + 1) % _LAST_GENERATION
        finally:
            _lock(self._descriptor, fcntl.F_UNLCK, number)
        return Revoked.DIED if inside else Revoked.IDLE

    def close(self) -> None:
        """Close it. Peers that have it open keep it, and pass its gates to no effect."""
        _forks.files.discard(self)
        self.words.release()
        self._pages.close()
        os.close(self._descriptor)


_forks: Final = _Forks()


class Lineage:
    """Whether a peer's process has forked, which can be asked until it is closed: also when the process has ended.

    Raises:
        FabricError: If they are not there, or are not what was named.
    """

    def __init__(self, handle: bytes) -> None:
        descriptor = open_handle(handle, _NAME, 2 * _LOCK_BYTES)
        try:
            self._pages: Final = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise FabricError(f"its gates cannot be opened: {error}") from error
        finally:
            os.close(descriptor)

    @property
    def forked(self) -> bool:
        """Whether it has, or is about to."""
        return any(self._pages[_FORKED * 4 :])

    def close(self) -> None:
        """Close it."""
        self._pages.close()


class PeerGate:
    """A peer's gates, opened here: for what this process writes there. Safe from any thread.

    The mover (`kvxfer.copy.machine`) passes only one that was lent to it. Until that is given back it may be inside,
    and the gates stay open.

    Raises:
        FabricError: If it is not there, or is not what was named.
    """

    def __init__(self, handle: bytes) -> None:
        self._descriptor: Final = open_handle(handle, _NAME, 2 * _LOCK_BYTES)
        try:
            whole = os.fstat(self._descriptor).st_size // _LOCK_BYTES  # whatever is behind the last one is none
            self._pages: Final = mmap.mmap(self._descriptor, _LOCK_BYTES * min(whole, GATES + 1))
        except (OSError, ValueError) as error:
            os.close(self._descriptor)
            raise FabricError(f"its gates cannot be opened: {error}") from error
        self._words: Final = memoryview(self._pages).cast("I")
        self._mutex: Final = threading.Lock()
        self._inside: Final = np.zeros(len(self._words) // 2 - 1, np.int64)  # by gate: this process's writers
        self._words_at: Final = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._inside_at: Final = int(self._inside.ctypes.data)
        self._borrowers = 0
        self._closing = False

    def close(self) -> None:
        """Close it, as soon as nothing of it is lent.

        Whoever is still inside then (a mover that has ended with something in doubt) is left there, and the owner finds
        it as it would after this process had died.
        """
        with self._mutex:
            self._closing = True
            self._end_if_free()

    def lend(self, number: int, generation: int) -> tuple[int, int, int, int, int]:
        """See `Permit.lend`."""
        with self._mutex:
            self._borrowers += 1
            if self._pages.closed or not 0 <= number < len(self._inside):
                return _NO_WAY
            granted = 0 if self._closing else generation  # which no gate has ever had
            words_at, inside_at = self._words_at + _LOCK_BYTES * number, self._inside_at + 8 * number
            return self._descriptor, number, granted, words_at, inside_at

    def give_back(self) -> None:
        """See `Permit.give_back`."""
        with self._mutex:
            self._borrowers -= 1
            if self._closing:
                self._end_if_free()

    def _end_if_free(self) -> None:
        if not self._borrowers and not self._pages.closed:
            self._words.release()
            self._pages.close()
            os.close(self._descriptor)


class Permit(Struct, frozen=True, eq=False):
    """One writer's way through a gate, under the generation that it was granted; without a key nobody gets through."""

    key: PeerGate | None
    number: int  # of the gate; through one that there is not nobody gets
    generation: int

    def lend(self) -> tuple[int, int, int, int, int]:
        """Let the mover enter and leave, until `give_back`.

        Returns:
            The descriptor of the file whose byte is locked, the number of the gate, the generation as granted, where
            the gate's words are, and where it is counted how many of this process are inside.
        """
        return _NO_WAY if self.key is None else self.key.lend(self.number, self.generation)

    def give_back(self) -> None:
        """The mover is not inside, and does not enter any more."""
        if self.key is not None:
            self.key.give_back()


# --- our own gates

GATE_BYTES: Final = 128
"""From one gate's word to the next: a cache line of a GPU."""
GATES: Final = 1 << 14
"""Gates of a worker."""
SHARED_GATE: Final = 0
"""The gate of all transfers for which there is none of their own: it is never raised."""


def first_words() -> bytes:
    """What the gates' words in GPU memory hold at first: every gate open for the first generation, nobody inside."""
    words = np.zeros(GATES * GATE_BYTES // 8, np.int64)
    words[:: GATE_BYTES // 8] = FIRST_GENERATION << 32
    return words.tobytes()


class Gates:
    """Which gate is whose.

    `words` is the address of the words in GPU memory, 0 without any. `look` tells how many writers are inside of the
    word at an address, whose generation is raised before if so told.
    """

    def __init__(self, words: int, locks: LockFile | None, look: Callable[[int, bool], Awaitable[int]]) -> None:
        self.words: Final = words
        self._locks: Final = locks
        self._look: Final = look
        self._raised: dict[int, int] = {}  # without locks, how often each was
        self._free: list[int] = []
        self._retired: set[int] = set()
        self._raising: dict[int, bool] = {}  # whose words are being raised; whether they were given back meanwhile
        self._fresh = SHARED_GATE + 1

    def allot(self) -> int:
        """A gate for a transfer, until `give_back`."""
        if self._free:
            return self._free.pop()
        if self._fresh == GATES or not (self.words or self._locks):
            return SHARED_GATE
        self._fresh += 1
        return self._fresh - 1

    def give_back(self, number: int) -> None:
        """Nobody writes through a gate any more, by the word of whoever did or because it was revoked."""
        if number in self._raising:  # or it would be granted with a generation that its word does not have yet
            self._raising[number] = True
        elif number != SHARED_GATE and number not in self._retired:
            self._free.append(number)

    def retire(self, number: int) -> None:
        """Never allot a gate again: a writer has died inside of its word, and is counted there for ever."""
        if self.words:
            self._retired.add(number)

    def granted(self, number: int) -> int:
        """What a grant says of a gate: its number (the high 32 bits) and its generation."""
        raised = self._raised.get(number, 0) if self._locks is None else self._locks.words[2 * number]
        return number << 32 | raised + FIRST_GENERATION

    async def revoke(self, number: int) -> Revoked | None:
        """Let nobody in any more who was granted a gate.

        Returns:
            What was found at its lock. None if somebody has passed that and is inside, or if the gate is shared: then
            nothing was changed. Of writers by kernels only `writers_inside` tells.
        """
        if number == SHARED_GATE:
            return None
        found: Revoked | None = Revoked.IDLE
        if self._locks is not None:
            found = self._locks.revoke(number)
        else:
            self._raised[number] = self._raised.get(number, 0) + 1
        if found is not None and self.words:
            await self._raise_word(number)
        return found

    async def _raise_word(self, number: int) -> None:
        self._raising[number] = False
        try:
            await self._look(self._word(number), True)
        except BaseException:
            self.retire(number)  # nobody knows whether its two generations are still the same
            raise
        finally:
            if self._raising.pop(number):
                self.give_back(number)

    async def writers_inside(self, number: int) -> int:
        """How many thread blocks write through a gate that was revoked."""
        return (await self._look(self._word(number), False)) if self.words else 0

    def _word(self, number: int) -> int:
        return self.words + number * GATE_BYTES


# --- gates of peers


class PeerGates:
    """What leads through the gates of peers."""

    def __init__(self) -> None:
        self._keys: dict[bytes, PeerGate | None] = {}

    def on_session(self, peer: PeerInfo) -> None:
        """A session with a peer begins: open its gates, if it has any, unless that was tried before.

        It takes some 50 us. What speaks against it is logged, once.
        """
        incarnation = peer.identity.incarnation
        if incarnation in self._keys or not peer.body.locks or unlike(peer.body.host):
            return
        try:
            check_process(peer.body.locks, peer.process)
            self._keys[incarnation] = PeerGate(peer.body.locks)
        except FabricError as error:
            self._keys[incarnation] = None
            _log.warning("gates_not_opened", peer=peer.name, reason=str(error))

    def has(self, peer: PeerInfo) -> bool:
        """Whether this rank passes the gates that a peer's grants name."""
        return self._keys.get(peer.identity.incarnation) is not None

    def passage(self, peer: PeerInfo, granted: int) -> Permit | None:
        """What a write or a read under a grant has to pass, which names a gate (the high 32 bits) and its generation.

        Returns:
            None if there is nothing to pass. What nobody gets through, if there is no such gate, or no key to it.
        """
        if not granted:
            return None
        return Permit(self._keys.get(peer.identity.incarnation), granted >> 32, granted & 0xFFFF_FFFF)

    def forget(self, peer: PeerInfo) -> None:
        """The last link to this peer is gone: its gates are closed here when nothing of this rank is inside."""
        key = self._keys.pop(peer.identity.incarnation, None)
        if key is not None:
            key.close()

    def close(self) -> None:
        """Close all of them, each when the mover has none of it."""
        for key in self._keys.values():
            if key is not None:
                key.close()
        self._keys.clear()


# --- what peers may map


class Exports:
    """The exports of a worker; none before `open`, nor where its memory cannot be mapped."""

    def __init__(self) -> None:
        self.frames: list[wire.MappedMemory] = []  # as peers are told of them
        # the gates that are locks; None where the system has none, or nobody is trusted
        self.locks: LockFile | None = None
        self._gates: Backing | None = None
        self._files: Final = OpenFiles()

    @property
    def gates(self) -> int:
        """Address of the gates; 0 without any."""
        return self._gates.address if self._gates is not None else 0

    async def open(self, config: Config, geometry: CacheGeometry, runtime: Runtime, *, in_place: bool) -> None:
        """Export the gates and, if peers may write `in_place`, the cache.

        Memory that cannot be mapped is no error: other routes are taken, and the log says why.
        """
        if config.trust != "none":
            try:
                self.locks = LockFile(GATES)
            except FabricError as error:
                _log.warning("locks_refused", reason=str(error))
        if not in_place:
            return
        spans = [range(spec.base, spec.base + spec.extent_bytes) for spec in geometry.tensors]
        kind, device = geometry.kind, geometry.device

        def make() -> list[wire.MappedMemory]:
            found = export(kind, device, spans, self._files)
            if kind == "cuda":
                gates = self._gates = allocate("cuda", GATES * GATE_BYTES, device)
                upload(device, gates.address, first_words())
                found += export(kind, device, [range(gates.address, gates.address + gates.length)], self._files)
            if len(found) > MAX_TENSORS:
                raise FabricError(
                    f"its memory is {len(found)} allocations, and a peer is told of {MAX_TENSORS} at most"
                )
            return found

        try:
            found = await runtime.in_thread(make)
        except (FabricError, MissingExtraError) as error:
            log = _log.warning if kind == "cuda" or config.route == "mapped" else _log.debug
            log("cache_not_exported", reason=str(error))
            self._end(Backing.close)
        else:
            self.frames = found

    def close(self) -> None:
        """Give the gates back. Nobody may write the cache any more."""
        self._end(Backing.close)
        if self.locks is not None:
            self.locks.close()
            self.locks = None

    def leak(self) -> None:
        """Keep the gates to the end of the process: somebody may still come through them."""
        self._end(Backing.leak)
        self.locks = None  # its file stays open

    def _end(self, end: Callable[[Backing], None]) -> None:
        self._files.close()  # what peers have opened stays open there
        gates, self._gates = self._gates, None
        if gates is not None:
            end(gates)


# --- what is mapped of peers

_send_log: Final = logger("kvxfer.send")

_here: Final[set[bytes]] = set()
"""Incarnations of the workers of this process: nobody else may name its memory."""


@dataclass(slots=True, eq=False)
class _Mapping:
    """One peer: its windows once they are open, or why there are none; whose copies need them."""

    gates: int  # where its gates are, as it addresses them; 0 if it has none
    windows: Windows | None = None
    words: int = 0  # where they are, as this process addresses them
    seen: CacheGeometry | None = None  # what was last found to lie in its windows
    why: str = ""
    users: set[object] = field(default_factory=set[object])
    wanted: bool = True
    tried: asyncio.Event = field(default_factory=asyncio.Event)


class Mappings:
    """What of its peers' memory this rank can address."""

    def __init__(
        self, geometry: CacheGeometry, runtime: Runtime, retire: Callable[[Windows], None], incarnation: bytes
    ) -> None:
        self._geometry: Final = geometry
        self._incarnation: Final = incarnation
        _here.add(incarnation)
        self._runtime: Final = runtime
        self._retire: Final = retire
        self._mappings: dict[bytes, _Mapping] = {}

    @staticmethod
    def is_offered(peer: PeerInfo) -> bool:
        """Whether a peer lets this rank map its memory."""
        return bool(peer.identity.capabilities & Capability.MAPPED and peer.body.mapped)

    async def open(self, peer: PeerInfo, theirs: CacheGeometry) -> None:
        """Map what a decode rank holds, unless that was tried before. What speaks against it is logged, once."""
        key = peer.identity.incarnation
        known = self._mappings.get(key)
        if known is not None:
            known.wanted = True
            await known.tried.wait()
            try:
                self.check_session(peer, theirs)
            except MismatchError as error:
                known.why = str(error)
            return
        mapping = self._mappings[key] = _Mapping(peer.body.gates)
        try:
            if reason := unlike(peer.body.host):
                raise FabricError(reason)
            mapping.windows, mapping.words = await self._runtime.in_thread(lambda: self._open(peer, theirs))
            mapping.seen = theirs
        except KvxferError as error:
            mapping.why = str(error)
            _send_log.warning("peer_not_mapped", peer=peer.name, reason=mapping.why)
        finally:
            mapping.why = "" if mapping.windows is not None else mapping.why or "it could not be opened"
            mapping.tried.set()
        self._prune(key, mapping)

    def check_session(self, peer: PeerInfo, theirs: CacheGeometry) -> None:
        """A session of a peer begins. What is mapped of it already must hold what it now says to hold. From any thread.

        Raises:
            MismatchError: If it does not.
        """
        mapping = self._mappings.get(peer.identity.incarnation)
        if mapping is None or mapping.windows is None:
            return
        try:
            if mapping.gates != peer.body.gates:
                raise FabricError("its gates are elsewhere")
            if mapping.seen is not theirs:
                self._check(mapping.windows, theirs)
                mapping.seen = theirs
        except FabricError as error:
            text = f"{peer.name} describes another cache than before, and {error}"
            raise MismatchError(text, peer=peer.name) from error

    def _open(self, peer: PeerInfo, theirs: CacheGeometry) -> tuple[Windows, int]:
        """Open every allocation, and see that they hold what the geometry says, and all gates; where those are."""
        kind, device = self._geometry.kind, self._geometry.device
        own = peer.identity.incarnation in _here
        opened: list[Window] = []
        try:
            for given in joined(peer.body.mapped):
                check_process(given.handle, peer.process)
                opened.append(open_window(given, kind, device, own=own))
            windows = Windows(opened)
            self._check(windows, theirs)
            words = windows.locate(peer.body.gates, GATES * GATE_BYTES) if peer.body.gates else 0
        except BaseException:
            for window in opened:
                window.close()
            raise
        return windows, words

    @staticmethod
    def _check(windows: Windows, theirs: CacheGeometry) -> None:
        for spec in theirs.tensors:
            windows.locate(spec.base, spec.extent_bytes)

    def kinds(self, peer: PeerInfo) -> list[str]:
        """By which kinds of handles a peer's memory is mapped; `process` if it is this one's. Empty if it is not."""
        mapping = self._mappings.get(peer.identity.incarnation)
        if mapping is None or mapping.windows is None:
            return []
        return ["process"] if self.is_local(peer) else sorted({one.kind for one in peer.body.mapped})

    @staticmethod
    def is_local(peer: PeerInfo) -> bool:
        """Whether a peer is another worker of this process."""
        return peer.identity.incarnation in _here

    def reason_unmapped(self, peer: PeerInfo) -> str:
        """Why nothing is mapped of a peer; empty if that is not known, or something is."""
        mapping = self._mappings.get(peer.identity.incarnation)
        return mapping.why if mapping is not None else ""

    def windows_of(self, peer: PeerInfo, granted: int) -> tuple[Windows, Gate | None]:
        """How this rank's copies reach a peer's memory, and the gate that a grant lets them through on a GPU.

        Call it under `hold`. A grant names a gate (the high 32 bits) and its generation.

        Raises:
            FabricError: If nothing is mapped, or there is no such gate.
        """
        mapping, windows = self._mapped(peer)
        number, generation = granted >> 32, granted & 0xFFFF_FFFF
        if not mapping.gates:
            return windows, None
        if number >= GATES:
            raise FabricError(f"gate {number} was granted, but {peer.name} has {GATES}")
        return windows, Gate(mapping.words + number * GATE_BYTES, generation)

    def hold(self, peer: PeerInfo) -> Callable[[], None]:
        """Keep a peer's memory mapped until the returned function is first called.

        Raises:
            FabricError: If it is not.
        """
        key = peer.identity.incarnation
        (mapping, _), user = self._mapped(peer), object()
        mapping.users.add(user)

        def leave() -> None:  # of no effect when called again
            mapping.users.discard(user)
            if not mapping.wanted:
                self._prune(key, mapping)

        return leave

    def forget(self, peer: PeerInfo) -> None:
        """The last link to this peer is gone: unmap its memory when no copy uses it."""
        key = peer.identity.incarnation
        mapping = self._mappings.get(key)
        if mapping is not None:
            mapping.wanted = False
            self._prune(key, mapping)

    def close(self) -> None:
        """Unmap everything. No copy may be under way."""
        _here.discard(self._incarnation)
        for mapping in self._mappings.values():
            if mapping.windows is not None:
                mapping.windows.close()
        self._mappings.clear()

    def _mapped(self, peer: PeerInfo) -> tuple[_Mapping, Windows]:
        mapping = self._mappings.get(peer.identity.incarnation)
        if mapping is None or mapping.windows is None or mapping.why:
            raise FabricError(f"the memory of {peer.name} is not mapped")
        return mapping, mapping.windows

    def _prune(self, key: bytes, mapping: _Mapping) -> None:
        if mapping.users or mapping.wanted or self._mappings.get(key) is not mapping:
            return
        if mapping.windows is None and not mapping.why:
            return  # it is being opened, and looked at again then
        del self._mappings[key]
        if mapping.windows is not None:
            self._retire(mapping.windows)
