"""The arena's memory: which kind it is, allocated and registered, and given back or leaked in the end.

On a GPU `auto` tries the GPU's own memory, then pinned host memory: where the one is refused, by CUDA or by the
transport, the other is slower and works. Each refusal is logged, counted and kept for `Worker.describe()`. A kind that
was asked for by name is not replaced.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from kvxfer.config import Config
from kvxfer.errors import ArenaError, ConfigError, FabricError
from kvxfer.fabric.calls import Fabric
from kvxfer.fabric.port import Memory
from kvxfer.geometry import CacheGeometry
from kvxfer.memory import Arena, Backing, Kind, allocate
from kvxfer.metrics import Metrics
from kvxfer.protocol import messages as wire
from kvxfer.telemetry import logger

__all__ = ["Staging"]

_log: Final = logger("kvxfer.worker")
_KINDS: Final[dict[str, tuple[Kind, ...]]] = {"cpu": ("cpu",), "cuda": ("cuda", "pinned")}
"""What `auto` tries, by the device of the cache, the best first."""
_REACHED: Final[dict[str, frozenset[Kind]]] = {
    "cpu": frozenset({"cpu", "pinned"}),
    "cuda": frozenset({"cuda", "fabric", "pinned"}),
}
"""Memory that the copies of such a cache can read and write."""


class Staging:
    """The arena's memory. Without one (`arena_bytes` is 0) it stays empty.

    Attributes:
        kind: Of the memory; None without an arena.
        refused: Kinds that were tried before and could not be had, with the reason.
        arena: The books of both shares.
        sending: Where gathers put what is written to peers, as descriptors name it.
        receiving: Where peers write, as they see it.
        reachable: Registrations that peers are told of.
    """

    def __init__(self) -> None:
        self.kind: Kind | None = None
        self.refused: dict[Kind, str] = {}
        self.arena = Arena.split(0, 0)
        self.sending: wire.MemorySpan | None = None
        self.receiving: wire.MemorySpan | None = None
        self.reachable: list[object] = []
        self._backing: Backing | None = None

    async def open(
        self,
        config: Config,
        geometry: CacheGeometry,
        fabric: Fabric,
        metrics: Metrics,
        *,
        place: Callable[[Callable[[], Backing]], Backing],
    ) -> None:
        """Allocate and register the arena; does nothing if there is to be none. `close` or `leak` ends what is there.

        Args:
            config: Settings.
            geometry: What the arena serves.
            fabric: Where it is registered.
            metrics: Count what was refused.
            place: Runs the work that allocates it, on the right CPUs.

        Raises:
            ConfigError: If copies of this cache cannot reach memory of the kind asked for.
            ArenaError: If no kind that may be taken has so much memory.
            FabricError: If CUDA or the transport refuses all of them.
            MissingExtraError: If a package is missing that every kind for a GPU needs.
        """
        kinds = _kinds(config, geometry)
        for number, kind in enumerate(kinds if config.arena_bytes else ()):
            try:
                self._backing = place(partial(allocate, kind, config.arena_bytes, geometry.device))
                await self._register(config, geometry, fabric, self._backing)
            except (ArenaError, FabricError) as error:
                await self._give_up(fabric)
                self.refused[kind] = str(error)
                if kind == kinds[-1]:
                    raise type(error)(_refusals(self.refused)) from error
                metrics.memory_refused(kind)
                _log.warning("arena_fell_back", kind=kind, value=kinds[number + 1], reason=str(error))
            else:
                self.kind = kind
                _log.debug("arena_allocated", kind=kind, bytes=config.arena_bytes)
                return

    def close(self) -> None:
        """Give the memory back. Nobody may touch it any more."""
        backing, self._backing = self._backing, None
        if backing is not None:
            backing.close()

    def leak(self) -> None:
        """Keep the memory to the end of the process: it may still be written."""
        backing, self._backing = self._backing, None
        if backing is not None:
            backing.leak()
            _log.warning("memory_leaked", bytes=backing.length, reason="it may still be written")

    async def _register(self, config: Config, geometry: CacheGeometry, fabric: Fabric, backing: Backing) -> None:
        self.arena = Arena.split(backing.address, config.arena_bytes, config.send_share)
        kind, device = ("DRAM", 0) if backing.kind in {"cpu", "pinned"} else ("VRAM", geometry.device)
        shares = (self.arena.sending, self.arena.receiving)
        spans = [wire.MemorySpan(kind, device, share.base, share.capacity) for share in shares]
        for span in spans:  # apart, since what this side gathers into is nobody else's
            memory = Memory(span.kind, span.device, span.address, span.length)
            self.reachable.append(await asyncio.wrap_future(fabric.register([memory])))
        self.sending, self.receiving = spans
        self.reachable = self.reachable[1:]

    async def _give_up(self, fabric: Fabric) -> None:
        """Undo a try. Nobody knows of its memory yet."""
        tokens, self.reachable = self.reachable, []
        for token in tokens:
            await asyncio.wrap_future(fabric.deregister(token))
        self.close()


def _kinds(config: Config, geometry: CacheGeometry) -> tuple[Kind, ...]:
    """Kinds to try, the best first.

    Raises:
        ConfigError: If copies of this cache cannot reach memory of the kind asked for.
    """
    kind, device = config.arena_kind, "cuda" if geometry.kind == "cuda" else "cpu"
    if kind == "auto":
        return _KINDS[device]
    if config.arena_bytes and kind not in _REACHED[device]:
        where = "a GPU" if device == "cuda" else "a CPU"
        raise ConfigError(
            f"arena_kind is {kind!r} and the cache is on {where}, whose copies cannot reach such memory; it can be "
            f"'auto' or one of {sorted(_REACHED[device])}"
        )
    return (kind,)


def _refusals(refused: dict[Kind, str]) -> str:
    return "; ".join(f"an arena of kind {kind!r} was refused: {reason}" for kind, reason in refused.items())
