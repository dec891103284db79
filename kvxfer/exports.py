"""What of a worker's memory peers on this host may map: its cache, and the gates in front of what they may write."""

from collections.abc import Callable, Sequence
from typing import Final

from kvxfer.config import Config
from kvxfer.errors import FabricError, MissingExtraError
from kvxfer.gates import GATE_BYTES, GATES, first_words
from kvxfer.geometry import CacheGeometry, CacheTensor
from kvxfer.mapped import Export, export
from kvxfer.mapped.locks import LockFile
from kvxfer.memory import Backing, allocate
from kvxfer.memory.driver import upload
from kvxfer.protocol.messages import MappedMemory
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
        self.frames: list[MappedMemory] = []
        self.locks: LockFile | None = None
        self._gates: Backing | None = None

    @property
    def gates(self) -> int:
        """Address of the gates; 0 without any."""
        return self._gates.address if self._gates is not None else 0

    async def open(
        self, config: Config, geometry: CacheGeometry, tensors: Sequence[CacheTensor], runtime: Runtime
    ) -> None:
        """Export the cache. Memory that cannot be mapped is no error: other routes are taken, and the log says why.

        Args:
            config: Settings.
            geometry: Of the cache.
            tensors: The cache, if peers may write it in place.
            runtime: CUDA is called in a thread.
        """
        if config.trust != "none":
            try:
                self.locks = LockFile(GATES)
            except FabricError as error:
                _log.warning("locks_refused", reason=str(error))
        if not config.max_in_place_bytes or not tensors:
            return
        addresses = [tensor.tensor.untyped_storage().data_ptr() for tensor in tensors]
        kind, device = geometry.kind, geometry.device

        def make() -> list[Export]:
            found = export(kind, device, addresses)
            if kind == "cuda":
                self._gates = allocate("cuda", GATES * GATE_BYTES, device)
                upload(device, self._gates.address, first_words())
                found += export(kind, device, [self._gates.address])
            return found

        try:
            found = await runtime.in_thread(make)
        except (FabricError, MissingExtraError) as error:
            log = _log.warning if kind == "cuda" or config.route == "mapped" else _log.debug
            log("cache_not_exported", reason=str(error))
            self._end(Backing.close)
        else:
            self.frames = [MappedMemory(one.kind, one.device, one.address, one.length, one.handle) for one in found]

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
        gates, self._gates = self._gates, None
        if gates is not None:
            end(gates)
