"""Memory that processes share: what peers may map of this worker's, and what this worker has mapped of theirs."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvxfer.config import Config
from kvxfer.copy.port import Gate
from kvxfer.errors import FabricError, KvxferError, MismatchError, MissingExtraError
from kvxfer.geometry import CacheGeometry
from kvxfer.mapped import Export, Window, Windows, check_process, export, joined, open_window, unlike
from kvxfer.mapped.window import OpenFiles
from kvxfer.memory import Backing, allocate
from kvxfer.memory.device import upload
from kvxfer.names import MAX_TENSORS
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import Capability
from kvxfer.protocol.session import PeerInfo
from kvxfer.runtime import Runtime
from kvxfer.safety.fence import GATE_BYTES, GATES, LockFile, first_words
from kvxfer.telemetry import logger

__all__ = ["Exports", "Mappings"]

# --- what peers may map

_log: Final = logger("kvxfer.worker")


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

        def make() -> list[Export]:
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
            self.frames = [
                wire.MappedMemory(one.kind, one.device, one.address, one.length, one.handle) for one in found
            ]

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

_MAPPED: Final = int(Capability.MAPPED)
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

    def __len__(self) -> int:
        return sum(mapping.windows is not None for mapping in self._mappings.values())

    @staticmethod
    def offered(peer: PeerInfo) -> bool:
        """Whether a peer lets this rank map its memory."""
        return bool(peer.identity.capabilities & _MAPPED) and bool(peer.body.mapped)

    async def open(self, peer: PeerInfo, theirs: CacheGeometry) -> None:
        """Map what a decode rank holds, unless that was tried before. What speaks against it is logged, once."""
        key = peer.identity.incarnation
        known = self._mappings.get(key)
        if known is not None:
            known.wanted = True
            await known.tried.wait()
            try:
                self.met(peer, theirs)
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

    def met(self, peer: PeerInfo, theirs: CacheGeometry) -> None:
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
            told = (Export(one.kind, one.device, one.address, one.length, one.handle) for one in peer.body.mapped)
            for given in joined(told):
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
        return ["process"] if self.own(peer) else sorted({one.kind for one in peer.body.mapped})

    @staticmethod
    def own(peer: PeerInfo) -> bool:
        """Whether a peer is another worker of this process."""
        return peer.identity.incarnation in _here

    def why_not(self, peer: PeerInfo) -> str:
        """Why nothing is mapped of a peer; empty if that is not known, or something is."""
        mapping = self._mappings.get(peer.identity.incarnation)
        return mapping.why if mapping is not None else ""

    def way(self, peer: PeerInfo, granted: int) -> tuple[Windows, Gate | None]:
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
