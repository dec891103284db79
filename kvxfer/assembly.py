"""Puts a worker's site together and takes it apart: memory, transport, copies, and what peers are told of them."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

from kvxfer.config import Config
from kvxfer.copy.mover import Mover, usual_threads
from kvxfer.desk import Desk
from kvxfer.encoding import geometry_to_wire
from kvxfer.errors import ConfigError, FabricError, GeometryError
from kvxfer.exports import Exports
from kvxfer.fabric.calls import Fabric
from kvxfer.fabric.envelope import agent_name
from kvxfer.fabric.port import Memory, Transport
from kvxfer.gates import Gates
from kvxfer.geometry import CacheGeometry, CacheTensor, Group
from kvxfer.lanes import Lanes
from kvxfer.mapped import Windows, here, own_number
from kvxfer.mappings import Mappings
from kvxfer.memory import Custody
from kvxfer.metrics import Listener, Metrics
from kvxfer.onlookers import see_through
from kvxfer.placement import Placement, place
from kvxfer.planning import PairPlans
from kvxfer.processes import Processes
from kvxfer.protocol import messages as wire
from kvxfer.protocol.framing import encode_body
from kvxfer.protocol.incarnation import PRIVATE_BYTES, IdentityKey
from kvxfer.protocol.messages import Capability
from kvxfer.routes.cost import profile_of
from kvxfer.routes.estimates import Estimates
from kvxfer.runtime import Home, Runtime, ThreadRuntime
from kvxfer.site import Site, Tasks
from kvxfer.staging import Staging
from kvxfer.telemetry import logger

if TYPE_CHECKING:
    from kvxfer.copy.cuda import Gpu

__all__ = ["Assembly", "assemble", "given_config", "given_groups", "given_tensors"]

_T = TypeVar("_T")
_log: Final = logger("kvxfer.worker")
_COMPILED: Final = ("kvxfer.copy.machine", "kvxfer.copy.template")
"""What copies and what packs. They import a compiler, and compile on a machine where nobody has done that before."""
_UNDO_SECONDS: Final = 1.0
"""Several times as long as it takes to forget peers and memory and to destroy an agent."""
_leaked: Final[list[object]] = []
"""Tensors of workers that closed while a peer might still touch them: kept until the process ends."""


@dataclass(slots=True)
class Assembly:
    """What a worker is made of.

    Attributes:
        tensors: The caller's cache tensors; this reference keeps them alive.
        groups: Properties of their groups.
        geometry: What they hold.
        config: Settings.
        transport: Given by the caller, or None for NIXL.
        runtime: Clock, randomness, threads.
        staging: The arena's memory.
        exports: What of its memory peers may map.
        placement: Where threads run and pinned memory lies; chosen when the worker opens.
    """

    tensors: tuple[CacheTensor, ...]
    groups: tuple[Group, ...]
    geometry: CacheGeometry
    config: Config
    transport: Transport | None
    runtime: Runtime
    staging: Staging = field(default_factory=Staging)
    exports: Exports = field(default_factory=Exports)
    placement: Placement = field(default_factory=Placement)
    home: Home = field(default_factory=Home)

    @classmethod
    def of(cls, tensors: Any, groups: Any, config: Any, transport: Transport | None, runtime: Runtime | None) -> Self:
        """What a worker was given, with what it left out.

        Raises:
            ConfigError: If `config` is no `Config`, or a setting is wrong.
            GeometryError: If `tensors` or `groups` hold something else, or cannot be expressed.
        """
        listed, groups, config = given_tensors(tensors), given_groups(groups), given_config(config)
        return cls(listed, groups, CacheGeometry.of(listed, groups), config, transport, runtime or ThreadRuntime())

    async def abandon(self, fabric: Fabric | None, mover: Mover | None) -> None:
        """Undo a half-made site, in which nobody knows of the memory yet. It is leaked if some call does not return."""
        timeout = self.config.close_timeout
        if mover is not None:
            await mover.close(timeout)
        quiet = fabric is None or await _closed(fabric, timeout, self.runtime)
        if quiet:
            self.staging.close()
        else:
            _leaked.append(self.tensors)
            self.staging.leak()
            self.exports.leak()
        self.exports.close()

    async def dismantle(self, site: Site, timeout: float) -> None:
        """Stop the threads within `timeout` seconds, and give the memory back.

        What is not quiescent is leaked, never freed.
        """
        timeout = min(timeout, site.config.close_timeout)
        site.send_desk.close()
        site.receive_desk.close()
        threads = self.runtime  # those of the site may all be waiting
        stopped = await site.mover.close(max(timeout - _UNDO_SECONDS, timeout / 2))
        quiet = await _closed(site.fabric, timeout, threads)
        if stopped:  # else a copy may still write to what is mapped
            await threads.in_thread(site.mappings.close)
        if quiet and stopped:
            site.mover.give_back()
        site.keys.close()
        site.processes.close()
        doubt = site.receive_desk.share.quarantined_bytes() + site.send_desk.share.quarantined_bytes()
        safe = quiet and stopped
        if not safe or site.custody.snapshot().doubtful_blocks:
            _leaked.append(self.tensors)
            self.exports.leak()
        self.exports.close()
        if safe and not doubt:
            self.staging.close()
        else:
            self.staging.leak()


async def _closed(fabric: Fabric, timeout: float, runtime: Runtime) -> bool:
    """Whether a fabric was closed, and nothing is in flight any more.

    Calls of it may never return: a driver waits in some of them for all that is queued on a GPU.
    """
    closing = asyncio.ensure_future(fabric.close())
    await asyncio.wait({closing}, timeout=max(timeout, _UNDO_SECONDS))
    if not closing.done():
        closing.cancel()
        _log.error("fabric_not_closed", error="a call of the transport does not return")
        return False
    patience = max(timeout, _UNDO_SECONDS)
    await runtime.in_thread(lambda: fabric.join(patience))  # it said that it is done, and ends a moment later
    return closing.result()


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
    config, parts.home = parts.config, Home(loop := asyncio.get_running_loop())
    geometry = parts.geometry
    placement = parts.placement = place(config.affinity, geometry.device if geometry.kind == "cuda" else None)
    _log.debug("placement_chosen", cpus=placement.listed, why=placement.why)
    runtime = parts.runtime.placed(placement.cpus)
    key, staging, metrics = IdentityKey(runtime.token(PRIVATE_BYTES)), parts.staging, Metrics(_listener(config))
    fabric: Fabric | None = None
    mover: Mover | None = None
    try:
        for name in _COMPILED:
            await runtime.in_thread(partial(import_module, name))
        transport = parts.transport or _nixl(config, geometry, agent_name(key.incarnation))
        mover = await _mover(config, geometry, runtime, placement)
        fabric = Fabric(transport, runtime, mover)
        await fabric.open()  # a transport that does not work is told from refused memory
        await staging.open(config, geometry, fabric, metrics, place=placement.run)
        reachable = await _reachable(parts, fabric, geometry, metrics)
        body = await _body(parts, fabric, geometry, reachable, name=transport.name)
    except BaseException:
        await see_through(asyncio.create_task(parts.abandon(fabric, mover), name="kvxfer abandon"))
        raise
    in_place, arena, tasks = len(reachable[True]) > len(reachable[False]), staging.arena, Tasks()
    return Site(
        config=config,
        runtime=runtime,
        loop=loop,
        geometry=geometry,
        custody=Custody(),
        send_desk=Desk(arena.sending, runtime.now, loop, metrics),
        receive_desk=Desk(arena.receiving, runtime.now, loop, metrics),
        plans=PairPlans(geometry),
        estimates=Estimates(profile_of(geometry.kind)),
        fabric=fabric,
        lanes=Lanes(fabric),
        mover=mover,
        metrics=metrics,
        key=key,
        body=body,
        reachable=reachable,
        facts=[*([("model", config.model)] if config.model else []), *geometry.facts()],
        capabilities=_capabilities(parts, in_place=in_place),
        staging=staging.receiving,
        sending=staging.sending,
        in_place=in_place,
        mappings=Mappings(geometry, runtime, _unmapper(tasks, runtime), key.incarnation),
        gates=_gates(parts.exports, mover, runtime),
        processes=Processes(loop, gpu=geometry.kind == "cuda"),
        tasks=tasks,
    )


def _listener(config: Config) -> Listener | None:
    """Who hears of transfers and offers, beside the counters.

    Raises:
        ConfigError: If the settings ask for what is not installed.
    """
    if config.traces == "off":
        return None
    from kvxfer.traces import Traces

    return Traces(config.engine, config.rank)


def _gates(exports: Exports, mover: Mover, runtime: Runtime) -> Gates:
    """The books of this worker's gates."""

    async def look(address: int, raised: bool) -> int:
        return await runtime.in_thread(lambda: mover.inside(address, raised=raised))

    return Gates(exports.gates, exports.locks, look)


def _unmapper(tasks: Tasks, runtime: Runtime) -> Callable[[Windows], None]:
    """What unmaps windows off the loop."""

    def unmap(windows: Windows) -> None:
        tasks.spawn(runtime.in_thread(windows.close), "kvxfer unmap")

    return unmap


def _capabilities(parts: Assembly, *, in_place: bool) -> Capability:
    """What this rank tells its peers that it can do, or asks for."""
    capabilities, config = Capability.STREAMING | Capability.SUMS | Capability.RENEWED, parts.config
    if parts.staging.receiving is not None:
        capabilities |= Capability.STAGED
    if in_place:
        capabilities |= Capability.PULL | (Capability.DIRECT if config.max_in_place_bytes else Capability(0))
    if parts.exports.frames:
        capabilities |= Capability.MAPPED
    if config.convert:
        capabilities |= Capability.CONVERT
    if parts.exports.locks is not None:
        capabilities |= Capability.GATES
    return capabilities


async def _reachable(
    parts: Assembly, fabric: Fabric, geometry: CacheGeometry, metrics: Metrics
) -> dict[bool, list[object]]:
    """What is registered and peers are told of, by whether they are trusted: the caller's blocks only then."""
    blocks = await _register_blocks(parts, fabric, geometry, metrics)
    return {False: list(parts.staging.reachable), True: [*parts.staging.reachable, *blocks]}


async def _register_blocks(parts: Assembly, fabric: Fabric, geometry: CacheGeometry, metrics: Metrics) -> list[object]:
    """Register the caller's blocks, if routes are wanted that need it.

    Returns:
        The registration, if there is one. Blocks that the transport refuses can still be staged; where the settings
        leave that open, they are.

    Raises:
        FabricError: If the transport refuses them, and the settings ask for such a route or leave no other.
    """
    config = parts.config
    if config.trust == "none" or config.route == "staged":
        return []
    try:
        return [await asyncio.wrap_future(fabric.register(_allocations(parts.tensors, geometry)))]
    except FabricError as error:
        if config.route != "auto" or not config.arena_bytes:
            raise
        metrics.memory_refused("blocks")
        _log.warning("blocks_not_registered", reason=str(error), route="staged")
        return []


async def _body(
    parts: Assembly, fabric: Fabric, geometry: CacheGeometry, reachable: Mapping[bool, Sequence[object]], *, name: str
) -> dict[bool, bytes]:
    """What peers are told, encoded, by whether they are trusted with addresses.

    An untrusted peer gets the metadata of the receiving share alone.
    """
    staging = parts.staging
    exports, blocks = parts.exports, len(reachable[True]) > len(reachable[False])
    await exports.open(parts.config, geometry, parts.runtime, in_place=blocks)
    metadata = {known: await asyncio.wrap_future(fabric.metadata(tokens)) for known, tokens in reachable.items()}
    limit = parts.config.chunk_bytes
    if staging.receiving is not None and not blocks:
        limit = min(limit, parts.config.send_bytes)

    def encoded(trusted: bool) -> bytes:
        return encode_body(
            wire.AgentBody(
                fabric=name,
                metadata=metadata[trusted],
                tensors=geometry_to_wire(geometry, with_addresses=trusted and blocks),
                staging=[staging.receiving] if staging.receiving is not None else [],
                max_chunk_bytes=limit,
                host=here(),
                process=own_number(),
                mapped=exports.frames if trusted else [],
                gates=exports.gates if trusted else 0,
                locks=exports.locks.handle if trusted and exports.locks is not None else b"",
            )
        )

    return await parts.runtime.in_thread(lambda: {trusted: encoded(trusted) for trusted in (False, True)})


def _allocations(tensors: Sequence[CacheTensor], geometry: CacheGeometry) -> list[Memory]:
    """The memory of all tensors, each allocation once."""
    kind = "VRAM" if geometry.kind == "cuda" else "DRAM"
    found = {t.tensor.untyped_storage().data_ptr(): t.tensor.untyped_storage().nbytes() for t in tensors}
    return [Memory(kind, geometry.device if kind == "VRAM" else 0, base, size) for base, size in sorted(found.items())]


async def _mover(config: Config, geometry: CacheGeometry, runtime: Runtime, placement: Placement) -> Mover:
    gpu: Gpu | None = None
    if geometry.kind == "cuda":
        cuda = import_module("kvxfer.copy.cuda")
        gpu = await runtime.in_thread(lambda: placement.run(lambda: cuda.Gpu(geometry.device)))
    return Mover(
        runtime,
        gpu=gpu,
        ctas=config.copy_ctas,
        threads=config.copy_threads or usual_threads(),
        cpus=placement.cpus,
        max_descriptors=config.fabric.max_descriptors,
        max_post_bytes=config.fabric.max_post_bytes,
        no_progress_timeout=config.no_progress_timeout,
    )


def _nixl(config: Config, geometry: CacheGeometry, name: str) -> Transport:
    from kvxfer.fabric.nixl import NixlTransport

    return NixlTransport(
        name,
        backends=config.fabric.backends,
        backend_params=config.fabric.backend_params,
        num_workers=config.fabric.num_workers,
        devices=config.fabric.devices,
        scatter_lists=config.fabric.scatter_lists,
        device=geometry.device if geometry.kind == "cuda" else None,
    )
