"""Puts a worker's site together and takes it apart: memory, transport, copies, and what peers are told of them."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar, cast

from msgspec import structs

from kvxfer.config import Config
from kvxfer.copy.port import Executor
from kvxfer.desk import Desk
from kvxfer.encoding import geometry_to_wire
from kvxfer.errors import ConfigError, FabricError, GeometryError, MissingExtraError
from kvxfer.fabric.port import Memory, Transport
from kvxfer.fabric.pump import Fabric
from kvxfer.geometry import CacheGeometry, CacheTensor, Group
from kvxfer.lanes import Lanes
from kvxfer.mapped import Export, Windows, export, here
from kvxfer.mappings import GATE_BYTES, GATES, Gates, Mappings
from kvxfer.memory import Arena, Backing, Custody, Kind, allocate
from kvxfer.memory.cudart import upload
from kvxfer.planning import PairPlans
from kvxfer.protocol.framing import encode_body
from kvxfer.protocol.messages import AgentBody, Capability, MappedMemory, MemorySpan
from kvxfer.runtime import Runtime, ThreadRuntime
from kvxfer.site import Site, Tasks
from kvxfer.telemetry import Metrics, logger

__all__ = ["Assembly", "assemble", "given_config", "given_groups", "given_tensors"]

_T = TypeVar("_T")
_log: Final = logger("kvxfer.worker")
_INCARNATION_BYTES: Final = 16
_leaked: Final[list[object]] = []
"""Tensors of workers that closed while a peer might still touch them: kept until the process ends."""


@dataclass(slots=True)
class Assembly:
    """What a worker is made of.

    Attributes:
        tensors: The caller's cache tensors; this reference keeps them alive.
        groups: Properties of their groups.
        config: Settings.
        transport: Given by the caller, or None for NIXL.
        runtime: Clock, randomness, threads.
        backing: The arena's memory, once it is allocated.
        gates: Memory of the gates in front of GPU memory that peers may map, once it is allocated.
    """

    tensors: tuple[CacheTensor, ...]
    groups: tuple[Group, ...]
    config: Config
    transport: Transport | None
    runtime: Runtime
    backing: Backing | None = None
    gates: Backing | None = None

    @classmethod
    def of(cls, tensors: Any, groups: Any, config: Any, transport: Transport | None, runtime: Runtime | None) -> Self:
        """What a worker was given, with what it left out.

        Raises:
            ConfigError: If `config` is no `Config`, or a setting is wrong.
            GeometryError: If `tensors` or `groups` hold something else.
        """
        return cls(
            given_tensors(tensors), given_groups(groups), given_config(config), transport, runtime or ThreadRuntime()
        )

    async def abandon(self, fabric: Fabric | None, executor: Executor | None) -> None:
        """Undo a half-made site, in which nobody knows of the memory yet."""
        timeout = self.config.close_timeout
        if fabric is not None:
            await asyncio.wrap_future(fabric.close(timeout))
        if executor is not None:
            await self.runtime.in_thread(lambda: executor.close(timeout))
        for backing in (self.backing, self.gates):
            if backing is not None:
                backing.close()
        self.backing = self.gates = None

    async def dismantle(self, site: Site, timeout: float) -> None:
        """Stop the threads, each within `timeout` seconds, and give the memory back.

        What is not quiescent is leaked, never freed.
        """
        timeout = min(timeout, site.config.close_timeout)
        site.send_desk.close()
        site.receive_desk.close()
        try:
            quiet = await asyncio.wrap_future(site.fabric.close(timeout))
        except FabricError as error:
            _log.error("fabric_not_closed", error=str(error))
            quiet = False
        stopped = await site.runtime.in_thread(lambda: site.executor.close(timeout))
        if stopped:  # else a copy may still write to what is mapped
            await site.runtime.in_thread(site.mappings.close)
        doubt = site.receive_desk.share.quarantined_bytes() + site.send_desk.share.quarantined_bytes()
        safe = quiet and stopped
        if not safe or site.custody.snapshot().doubtful_blocks:
            _leaked.append(self.tensors)
        if self.backing is not None:
            if safe and not doubt:
                self.backing.close()
            else:
                self.backing.leak()
                _log.warning("memory_leaked", bytes=self.backing.length, reason="it may still be written")
            self.backing = None
        if self.gates is not None:
            if site.custody.snapshot().doubtful_blocks:
                self.gates.leak()
            else:
                self.gates.close()
            self.gates = None


def given_config(config: Any) -> Config:
    """The settings as a caller passed them; `Config.load()` if they were left out.

    Raises:
        ConfigError: If they are no `Config`, or a setting is wrong.
    """
    if config is None:
        return Config.load()
    if not isinstance(config, Config):
        raise ConfigError(
            f"config must be a kvxfer.Config, not {type(config).__name__}; "
            "pass kvxfer.Config(**settings), or leave it out for the environment and the defaults"
        )
    return config


def given_tensors(tensors: Any) -> tuple[CacheTensor, ...]:
    """The cache tensors as a caller passed them.

    Raises:
        GeometryError: If they are no `CacheTensor`s.
    """
    return _given(
        tensors, CacheTensor, "tensors", "describe each tensor: [kvxfer.CacheTensor(tensor, axes, layers=...)]"
    )


def given_groups(groups: Any) -> tuple[Group, ...]:
    """The groups as a caller passed them.

    Raises:
        GeometryError: If they are no `Group`s.
    """
    return _given(groups, Group, "groups", "describe each group: [kvxfer.Group(name, null_block=...)]")


def _given(items: Any, kind: type[_T], name: str, advice: str) -> tuple[_T, ...]:
    if isinstance(items, kind) or not isinstance(items, Iterable):
        given = f"one {kind.__name__}" if isinstance(items, kind) else type(items).__name__
        raise GeometryError(f"{name} must be a list of kvxfer.{kind.__name__}, not {given}; {advice}")
    listed = tuple(cast("Iterable[object]", items))
    for at, item in enumerate(listed):
        if not isinstance(item, kind):
            raise GeometryError(
                f"{name} must be a list of kvxfer.{kind.__name__}, but item {at} is of type {type(item).__name__}; "
                f"{advice}"
            )
    return cast("tuple[_T, ...]", listed)


async def assemble(parts: Assembly) -> Site:
    """Allocate, register, start threads.

    Raises:
        KvxferError: Whatever failed; nothing is left behind.
    """
    config, runtime = parts.config, parts.runtime
    geometry = CacheGeometry.of(parts.tensors, parts.groups)
    incarnation = runtime.token(_INCARNATION_BYTES)
    if config.arena_bytes:
        parts.backing = allocate(_arena_kind(config, geometry), config.arena_bytes, geometry.device)
    backing = parts.backing
    in_place = config.trust != "none" and config.route != "staged"
    metrics = Metrics()
    fabric: Fabric | None = None
    executor: Executor | None = None
    try:
        arena = Arena.split(backing.address if backing else 0, config.arena_bytes, config.send_share)
        transport = parts.transport or _nixl(config, geometry, f"kvxfer-{incarnation.hex()}")
        fabric = _fabric(config, transport, runtime)
        executor = _executor(config, geometry, runtime)
        fabric.start()
        sending, staging = _spans(backing, arena, geometry)
        exports = await _export(parts, geometry) if in_place and config.max_in_place_bytes else []
        metadata = await _register(parts, fabric, geometry, (sending, staging), in_place=in_place)
    except BaseException:
        await asyncio.shield(parts.abandon(fabric, executor))
        raise
    tasks, loop = Tasks(), asyncio.get_running_loop()
    return Site(
        config=config,
        runtime=runtime,
        loop=loop,
        hand_over=runtime.hand_over(loop),
        geometry=geometry,
        custody=Custody(),
        send_desk=Desk(arena.sending, runtime.now, loop, metrics),
        receive_desk=Desk(arena.receiving, runtime.now, loop, metrics),
        plans=PairPlans(geometry),
        fabric=fabric,
        lanes=Lanes(fabric),
        executor=executor,
        metrics=metrics,
        incarnation=incarnation,
        body=_bodies(parts, geometry, transport.name, metadata, staging, exports, in_place=in_place),
        facts=[*([("model", config.model)] if config.model else []), *geometry.facts()],
        capabilities=_capabilities(config, staging=staging is not None, in_place=in_place, mapped=bool(exports)),
        staging=staging,
        sending=sending,
        in_place=in_place,
        mappings=Mappings(geometry, runtime, _unmapper(tasks, runtime)),
        gates=Gates(parts.gates.address if parts.gates else 0),
        tasks=tasks,
    )


def _unmapper(tasks: Tasks, runtime: Runtime) -> Callable[[Windows], None]:
    """What unmaps windows off the loop."""

    def unmap(windows: Windows) -> None:
        tasks.spawn(runtime.in_thread(windows.close), "kvxfer unmap")

    return unmap


async def _export(parts: Assembly, geometry: CacheGeometry) -> list[Export]:
    """Let peers on this host map the cache, if its memory can be; on a GPU with gates in front of it."""
    addresses = [tensor.tensor.untyped_storage().data_ptr() for tensor in parts.tensors]
    kind, device = geometry.kind, geometry.device

    def make() -> list[Export]:
        exports = export(kind, device, addresses)
        if kind == "cuda":
            parts.gates = allocate("cuda", GATES * GATE_BYTES, device)
            upload(device, parts.gates.address, Gates.memory())
            exports += export(kind, device, [parts.gates.address])
        return exports

    try:
        return await parts.runtime.in_thread(make)
    except (FabricError, MissingExtraError) as error:
        log = _log.warning if kind == "cuda" or parts.config.route == "mapped" else _log.debug
        log("cache_not_exported", reason=str(error))
        return []


def _capabilities(config: Config, *, staging: bool, in_place: bool, mapped: bool) -> Capability:
    """What this rank tells its peers that it can do, or asks for."""
    capabilities = Capability.STREAMING
    if staging:
        capabilities |= Capability.STAGED
    if in_place:
        capabilities |= Capability.PULL | (Capability.DIRECT if config.max_in_place_bytes else Capability(0))
    if mapped:
        capabilities |= Capability.MAPPED
    if config.convert:
        capabilities |= Capability.CONVERT
    return capabilities


async def _register(
    parts: Assembly,
    fabric: Fabric,
    geometry: CacheGeometry,
    shares: tuple[MemorySpan | None, MemorySpan | None],
    *,
    in_place: bool,
) -> dict[bool, bytes]:
    """Register memory; what peers need to reach it, by whether they are trusted with addresses.

    An untrusted peer gets the metadata of the receiving share alone.
    """
    tokens: list[object] = []
    for span in shares:
        if span is not None:
            memory = Memory(span.kind, span.device, span.address, span.length)
            tokens.append(await asyncio.wrap_future(fabric.register([memory])))
    reachable = tokens[1:]  # what peers may write; what this side gathers into is nobody else's
    bounded = await asyncio.wrap_future(fabric.metadata(reachable))
    if not in_place:
        return {False: bounded, True: bounded}
    blocks = await asyncio.wrap_future(fabric.register(_allocations(parts.tensors, geometry)))
    return {False: bounded, True: await asyncio.wrap_future(fabric.metadata([*reachable, blocks]))}


def _bodies(
    parts: Assembly,
    geometry: CacheGeometry,
    name: str,
    metadata: Mapping[bool, bytes],
    receiving: MemorySpan | None,
    exports: Sequence[Export],
    *,
    in_place: bool,
) -> dict[bool, bytes]:
    """What peers are told, encoded, by whether they are trusted with addresses."""
    config = parts.config
    staged_only = receiving is not None and not in_place
    plain = AgentBody(
        fabric=name,
        metadata=metadata[False],
        tensors=geometry_to_wire(geometry, with_addresses=False),
        staging=[receiving] if receiving is not None else [],
        max_chunk_bytes=min(config.chunk_bytes, config.send_bytes) if staged_only else config.chunk_bytes,
    )
    if not in_place:
        return dict.fromkeys((False, True), encode_body(plain))
    trusting = structs.replace(
        plain,
        metadata=metadata[True],
        tensors=geometry_to_wire(geometry, with_addresses=True),
        host=here(),
        mapped=[MappedMemory(one.kind, one.device, one.address, one.length, one.handle) for one in exports],
        gates=parts.gates.address if parts.gates is not None else 0,
    )
    return {False: encode_body(plain), True: encode_body(trusting)}


def _allocations(tensors: Sequence[CacheTensor], geometry: CacheGeometry) -> list[Memory]:
    """The memory of all tensors, each allocation once."""
    kind = "VRAM" if geometry.kind == "cuda" else "DRAM"
    found = {t.tensor.untyped_storage().data_ptr(): t.tensor.untyped_storage().nbytes() for t in tensors}
    return [Memory(kind, geometry.device if kind == "VRAM" else 0, base, size) for base, size in sorted(found.items())]


def _spans(
    backing: Backing | None, arena: Arena, geometry: CacheGeometry
) -> tuple[MemorySpan | None, MemorySpan | None]:
    """The shares for sending and for receiving, as descriptors name them."""
    if backing is None:
        return None, None
    kind, device = ("VRAM", geometry.device) if backing.kind == "cuda" else ("DRAM", 0)
    sending, receiving = arena.sending, arena.receiving
    return (
        MemorySpan(kind, device, sending.base, sending.capacity),
        MemorySpan(kind, device, receiving.base, receiving.capacity),
    )


def _arena_kind(config: Config, geometry: CacheGeometry) -> Kind:
    if config.arena_kind != "auto":
        return config.arena_kind
    return "cuda" if geometry.kind == "cuda" else "cpu"


def _fabric(config: Config, transport: Transport, runtime: Runtime) -> Fabric:
    return Fabric(
        transport,
        runtime,
        max_descriptors=config.fabric.max_descriptors,
        max_post_bytes=config.fabric.max_post_bytes,
        no_progress_timeout=config.no_progress_timeout,
    )


def _executor(config: Config, geometry: CacheGeometry, runtime: Runtime) -> Executor:
    if geometry.kind == "cuda":
        from kvxfer.copy.cuda import CudaExecutor

        return CudaExecutor(runtime, geometry.device, ctas=config.copy_ctas)
    from kvxfer.copy.host import HostExecutor

    return HostExecutor(runtime)


def _nixl(config: Config, geometry: CacheGeometry, name: str) -> Transport:
    from kvxfer.fabric.nixl import NixlTransport

    return NixlTransport(
        name,
        backends=config.fabric.backends,
        backend_params=config.fabric.backend_params,
        num_workers=config.fabric.num_workers,
        devices=config.fabric.devices,
        device=geometry.device if geometry.kind == "cuda" else None,
    )
