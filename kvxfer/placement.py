"""Where a worker's memory lies and its threads run: the arena, allocated and registered, on the NUMA node of its GPU.

A thread on another node writes tables, launches kernels and polls over the link between the sockets, and so do the GPU
and the NIC that use memory there. Threads are bound to CPUs. Memory follows them: pinned memory gets its pages while
the call that allocates it runs, from the node of the thread that makes the call, so it is allocated by a bound thread.
A memory policy (`set_mempolicy`) would say the same more strongly, but the usual sandboxes of containers forbid it, and
it would override one that the whole process was started under.

The caller's own threads, and its event loop, are never bound.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

from kvxfer.config import Config, cpu_numbers
from kvxfer.errors import ArenaError, ConfigError, FabricError, KvxferError
from kvxfer.fabric.calls import Fabric
from kvxfer.fabric.port import Memory
from kvxfer.geometry import CacheGeometry
from kvxfer.memory import Arena, Backing, Kind, allocate
from kvxfer.memory.device import in_thread, pci_bus_id
from kvxfer.protocol import messages as wire
from kvxfer.runtime import allowed_cpus, bind
from kvxfer.telemetry import Metrics, logger

__all__ = ["Placement", "Staging", "place"]

# --- the memory
#
# On a GPU `auto` tries the GPU's own memory, then pinned host memory: where the one is refused, by CUDA or by the
# transport, the other is slower and works. Each refusal is logged, counted and kept for `Worker.describe()`. A kind
# that was asked for by name is not replaced.

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
        self.arena = Arena.split(backing.address, config.arena_bytes)
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


# --- CPUs and NUMA nodes

_T = TypeVar("_T")
_SYSFS: Final = Path("/sys")


@dataclass(frozen=True, slots=True)
class Placement:
    """What was chosen.

    Attributes:
        cpus: Where threads are kept; empty if they may run anywhere.
        why: Where that comes from.
    """

    cpus: frozenset[int] = frozenset()
    why: str = "not chosen yet"

    @property
    def listed(self) -> str:
        """The CPUs as text such as `0-7,16`; `any` if threads may run anywhere."""
        return _listed(sorted(self.cpus)) or "any"

    def run(self, work: Callable[[], _T]) -> _T:
        """Do work that allocates pinned memory: in a thread there, which is waited for, or here if there is no wish."""
        if not self.cpus:
            return work()

        def bound() -> _T:
            bind(self.cpus)
            return work()

        return in_thread(bound)

    def bind(self) -> None:
        """Keep the calling thread there."""
        if self.cpus:
            with suppress(OSError):  # what was possible when it was chosen is not any more: the thread runs on
                bind(self.cpus)

    def refusal(self) -> OSError | None:
        """Why no thread can be kept there, if that is so."""
        try:
            self.run(lambda: None)
        except OSError as error:
            return error
        return None

    def describe(self) -> dict[str, object]:
        """As plain data: the CPUs, None for any, and why."""
        return {"cpus": sorted(self.cpus) or None, "why": self.why}


def place(
    affinity: Literal["auto", "off"] | tuple[int, ...],
    device: int | None,
    *,
    sysfs: Path = _SYSFS,
    bus_id: Callable[[int], str] = pci_bus_id,
) -> Placement:
    """Choose CPUs, among those that this process may use.

    Args:
        affinity: The setting.
        device: Index of the GPU that holds the cache; None for a CPU.
        sysfs: Root of the kernel's view of the hardware.
        bus_id: Says where a GPU sits.

    Raises:
        ConfigError: If the setting names CPUs that the process may not use, or the system does not let it choose.
    """
    if affinity == "off":
        return _anywhere("affinity is off")
    if affinity != "auto":
        return _given(affinity, allowed_cpus())
    if device is None:
        return _anywhere("the cache is not on a GPU")
    return _next_to(device, allowed_cpus(), sysfs, bus_id)


def _given(cpus: tuple[int, ...], allowed: frozenset[int]) -> Placement:
    if outside := sorted(frozenset(cpus) - allowed):
        raise ConfigError(
            f"affinity names CPUs that this process may not use: {_listed(outside)}; it may use "
            f"{_listed(sorted(allowed)) or 'none that it could choose'}"
        )
    placement = Placement(frozenset(cpus), "affinity names them")
    if refusal := placement.refusal():
        raise ConfigError(f"affinity is {placement.listed}, but threads cannot be bound here: {refusal}")
    return placement


def _next_to(device: int, allowed: frozenset[int], sysfs: Path, bus_id: Callable[[int], str]) -> Placement:
    """CPUs of the GPU's node, if that leaves a choice. Nothing fails here: threads may run anywhere, only slower."""
    try:
        node, near = _node(sysfs, bus_id(device))
    except (KvxferError, OSError, ValueError) as error:
        return _anywhere(f"the NUMA node of GPU {device} is not known: {error}")
    chosen = near & allowed
    placement = Placement(chosen, f"they are on NUMA node {node}, where GPU {device} is")
    if not chosen:
        return _anywhere(f"this process may use no CPU of NUMA node {node}, where GPU {device} is")
    if chosen == allowed:
        return _anywhere(f"every CPU that this process may use is on NUMA node {node}, where GPU {device} is")
    if refusal := placement.refusal():
        return _anywhere(f"threads cannot be bound here: {refusal}")
    return placement


def _node(sysfs: Path, bus_id: str) -> tuple[int, frozenset[int]]:
    """The NUMA node of a PCI device, and its CPUs.

    Raises:
        OSError: If the kernel does not show them.
        ValueError: If it knows of no node.
    """
    node = int((sysfs / "bus/pci/devices" / bus_id / "numa_node").read_text())
    if node < 0:
        raise ValueError(f"the system gives none for {bus_id}")
    return node, frozenset(cpu_numbers((sysfs / f"devices/system/node/node{node}/cpulist").read_text()))


def _anywhere(why: str) -> Placement:
    return Placement(frozenset(), why)


def _listed(cpus: "list[int] | tuple[int, ...]") -> str:
    """Numbers as text such as `0-7,16`."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
