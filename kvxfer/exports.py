"""What of a worker's memory peers on this host may map: its cache, and the gates in front of what they may write."""

from collections.abc import Callable
from typing import Final

from kvxfer.config import Config
from kvxfer.errors import FabricError, MissingExtraError
from kvxfer.gates import GATE_BYTES, GATES, first_words
from kvxfer.geometry import CacheGeometry
from kvxfer.limits import MAX_TENSORS
from kvxfer.mapped import Export, export
from kvxfer.mapped.descriptors import Descriptors
from kvxfer.mapped.locks import LockFile
from kvxfer.memory import Backing, allocate
from kvxfer.memory.driver import upload
from kvxfer.protocol import messages as wire
from kvxfer.runtime import Runtime
from kvxfer.telemetry import logger

__all__ = ["Exports"]

_log: Final = logger("kvxfer.worker")


class Exports:
    """The exports of a worker; none before `open`, nor where its memory cannot be mapped.

    Attributes:
        frames: As peers are told of them.
        locks: The gates that are locks; None where the system has none, or nobody is trusted.
    """

    def __init__(self) -> None:
        self.frames: list[wire.MappedMemory] = []
        self.locks: LockFile | None = None
        self._gates: Backing | None = None
        self._files: Final = Descriptors()

    @property
    def gates(self) -> int:
        """Address of the gates; 0 without any."""
        return self._gates.address if self._gates is not None else 0

    async def open(self, config: Config, geometry: CacheGeometry, runtime: Runtime, *, in_place: bool) -> None:
        """Export the cache. Memory that cannot be mapped is no error: other routes are taken, and the log says why.

        Args:
            config: Settings.
            geometry: Of the cache.
            runtime: CUDA is called in a thread.
            in_place: Whether peers may write the cache.
        """
        if config.trust != "none":
            try:
                self.locks = LockFile(GATES)
            except FabricError as error:
                _log.warning("locks_refused", reason=str(error))
        if not config.max_in_place_bytes or not in_place:
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
