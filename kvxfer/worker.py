"""The worker: one rank's service. How it is put together, opened, described and taken apart.

    async with kvxfer.Worker(tensors, config) as worker:
        offer = worker.offer("req-1", blocks, tokens=4096, after=event)      # prefill
        result = await worker.fetch(ticket, blocks, tokens=range(0, 4096), after=event)   # decode

What is done runs on the loop that entered it, and is refused elsewhere; copies and posts run in threads of its own.
"""

import asyncio
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, TypeVar, cast

from kvxfer import __version__
from kvxfer.config import Config, FabricConfig
from kvxfer.copy.mover import Mover, usual_threads
from kvxfer.decode.fetch import Fetch
from kvxfer.decode.role import Decode
from kvxfer.errors import (
    ArenaError,
    BusyError,
    ClosedError,
    Code,
    ConfigError,
    FabricError,
    GeometryError,
    KvxferError,
    RequestError,
    UsageError,
)
from kvxfer.fabric import Transport, agent_name
from kvxfer.fabric.calls import Fabric, Lanes
from kvxfer.geometry import Blocks, CacheGeometry, CacheTensor, Group, token_count
from kvxfer.mapped.host import Windows, elsewhere, here, may_be_elsewhere, own_number
from kvxfer.memory.books import Custody, Share
from kvxfer.memory.device import Backing, Kind, allocate, pci_bus_id
from kvxfer.names import MAX_CTAS
from kvxfer.peers.connections import Listener, Peers, Streams
from kvxfer.peers.link import Link, admitted, superseded
from kvxfer.plans.pairs import Agreed, PairPlans, geometry_to_wire
from kvxfer.plans.routes import Estimates, profile_of
from kvxfer.prefill.offers import Offer, given_payload
from kvxfer.prefill.role import Prefill
from kvxfer.prefill.sender import Sender
from kvxfer.protocol import messages as wire
from kvxfer.protocol.framing import encode_body
from kvxfer.protocol.messages import ROUTE_NAMES, Capability, Route, Status
from kvxfer.protocol.session import PRIVATE_BYTES, Identity, IdentityKey, Role, Session, Terms
from kvxfer.protocol.transfer import Failure
from kvxfer.runtime import Home, Placement, Runtime, ThreadRuntime, place
from kvxfer.safety.doubt import Rebuilding
from kvxfer.safety.fence import Exports, Gates, Mappings
from kvxfer.safety.processes import Processes
from kvxfer.site import Desk, Site, Tasks
from kvxfer.telemetry import Metrics, Observer, logger
from kvxfer.tickets import KEY_BYTES, EngineCard, Issuer, RankCard, Ticket
from kvxfer.transfers import Claim as ClaimHandle
from kvxfer.transfers import FetchResult, Transfer, given_seconds, see_through, soon

if TYPE_CHECKING:
    from kvxfer.copy.cuda import Gpu
    from kvxfer.fabric.nixl import NixlTransport

__all__ = [
    "Assembly",
    "Service",
    "Staging",
    "Watch",
    "Worker",
    "assemble",
    "check_offer",
    "given_config",
    "given_groups",
    "nixl_transport",
    "overview",
]

_T = TypeVar("_T")
_log: Final = logger("kvxfer.worker")

# --- staging memory
#
# On a GPU `auto` tries the GPU's own memory, then pinned host memory: where the one is refused, by CUDA or by the
# transport, the other is slower and works. Each refusal is logged, counted and kept for `Worker.describe()`. A kind
# that was asked for by name is not replaced.

_KINDS: Final[dict[str, tuple[Kind, ...]]] = {"cpu": ("cpu",), "cuda": ("cuda", "pinned")}
"""What `auto` tries, by the device of the cache, the best first."""
_REACHED: Final[dict[str, frozenset[Kind]]] = {
    "cpu": frozenset({"cpu", "pinned"}),
    "cuda": frozenset({"cuda", "fabric", "pinned"}),
}
"""Memory that the copies of such a cache can read and write."""


class Staging:
    """The arena's memory. Without one (`arena_bytes` is 0) it stays empty."""

    def __init__(self) -> None:
        self.kind: Kind | None = None  # of the memory; None without an arena
        self.refused: dict[Kind, str] = {}  # kinds that were tried before and could not be had, with the reason
        self.shares = _shares(0, 0, 0)
        # where gathers put what is written to peers, as descriptors name it
        self.sending: wire.MemorySpan | None = None
        self.receiving: wire.MemorySpan | None = None  # where peers write, as they see it
        self.reachable: list[object] = []  # registrations that peers are told of
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

        Raises:
            ConfigError: If copies of this cache cannot reach memory of the kind asked for.
            ArenaError: If no kind that may be taken has so much memory.
            FabricError: If CUDA or the transport refuses all of them.
            MissingExtraError: If a package is missing that every kind for a GPU needs.
        """
        kinds = _arena_kinds(config, geometry)
        for number, kind in enumerate(kinds if config.arena_bytes else ()):
            try:
                self._backing = place(partial(allocate, kind, config.arena_bytes, geometry.device))
                await self._register(config, geometry, fabric, self._backing)
            except (ArenaError, FabricError) as error:
                await self._give_up(fabric)
                self.refused[kind] = str(error)
                if kind == kinds[-1]:
                    every = (f"an arena of kind {kind!r} was refused: {why}" for kind, why in self.refused.items())
                    raise type(error)("; ".join(every)) from error
                metrics.memory_refused[kind] += 1
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
        self.shares = _shares(backing.address, config.send_bytes, config.receive_bytes)
        kind, device = ("DRAM", 0) if backing.kind in {"cpu", "pinned"} else ("VRAM", geometry.device)
        spans = [wire.MemorySpan(kind, device, share.base, share.capacity) for share in self.shares]
        for span in spans:  # apart, since what this side gathers into is nobody else's
            self.reachable.append(await asyncio.wrap_future(fabric.register([span])))
        self.sending, self.receiving = spans
        self.reachable = self.reachable[1:]

    async def _give_up(self, fabric: Fabric) -> None:
        """Undo a try. Nobody knows of its memory yet."""
        tokens, self.reachable = self.reachable, []
        for token in tokens:
            await asyncio.wrap_future(fabric.deregister(token))
        self.close()


def _shares(base: int, send_bytes: int, receive_bytes: int) -> tuple[Share, Share]:
    """The books of the share for sending, and of the one for receiving behind it."""
    sending = Share("send", base=base, capacity=send_bytes)
    return sending, Share("receive", base=base + send_bytes, capacity=receive_bytes)


def _arena_kinds(config: Config, geometry: CacheGeometry) -> tuple[Kind, ...]:
    """Kinds to try, the best first."""
    kind, device = config.arena_kind, geometry.kind
    if kind == "auto":
        return _KINDS[device]
    if config.arena_bytes and kind not in _REACHED[device]:
        where = "a GPU" if device == "cuda" else "a CPU"
        raise ConfigError(
            f"arena_kind is {kind!r} and the cache is on {where}, whose copies cannot reach such memory; it can be "
            f"'auto' or one of {sorted(_REACHED[device])}"
        )
    return (kind,)


# --- put together and taken apart

_COMPILED: Final = ("kvxfer.copy.machine", "kvxfer.copy.template")
"""What copies and what packs. They import a compiler, and compile on a machine where nobody has done that before."""
_UNDO_SECONDS: Final = 1.0
"""Several times as long as it takes to forget peers and memory and to destroy an agent."""
_leaked: Final[list[object]] = []
"""Tensors of workers that closed while a peer might still touch them: kept until the process ends."""


@dataclass(slots=True)
class Assembly:
    """What a worker is made of."""

    tensors: tuple[CacheTensor, ...]  # the caller's cache tensors; this reference keeps them alive
    geometry: CacheGeometry
    config: Config
    transport: Transport | None  # given by the caller, or None for NIXL
    runtime: Runtime
    staging: Staging = field(default_factory=Staging)
    exports: Exports = field(default_factory=Exports)  # what of its memory peers may map
    # where threads run and pinned memory lies; chosen when the worker opens
    placement: Placement = field(default_factory=Placement)
    home: Home = field(default_factory=Home)

    @classmethod
    def of(cls, tensors: Any, groups: Any, config: Any, transport: Transport | None, runtime: Runtime | None) -> Self:
        """What a worker was given, with what it left out.

        Raises:
            ConfigError: If `config` is no `Config`, or a setting is wrong.
            GeometryError: If `tensors` or `groups` hold something else, or cannot be expressed.
            UsageError: If `transport` or `runtime` is something else.
        """
        for name, given, method in (("transport", transport, "setup"), ("runtime", runtime, "placed")):
            if given is not None and (isinstance(given, type) or not hasattr(given, method)):
                raise UsageError(f"{name} must be one as kvxfer.testing has them, made already, not {given!r}")
        advice = "describe each tensor: [kvxfer.CacheTensor(tensor, axes, layers=...)]"
        listed = _given(tensors, CacheTensor, "tensors", advice)
        groups, config = given_groups(groups), given_config(config)
        return cls(listed, CacheGeometry.of(listed, groups), config, transport, runtime or ThreadRuntime())

    async def dismantle(
        self, fabric: Fabric | None, mover: Mover | None, site: Site | None, timeout: float = math.inf
    ) -> None:
        """Stop the threads within `timeout` seconds, and give the memory back. What is not quiescent is leaked.

        Of a site that could not be made, what there is: nobody knows of the memory yet.
        """
        timeout, threads = min(timeout, self.config.close_timeout), self.runtime  # those of the site may all be waiting
        if site is not None:
            site.send_desk.close()
            site.receive_desk.close()
        stopped = mover is None or await mover.close(max(timeout - _UNDO_SECONDS, timeout / 2))
        safe = (fabric is None or await _closed(fabric, timeout, threads)) and stopped
        doubtful_blocks = doubtful_bytes = 0
        if site is not None:
            if stopped:  # else a copy may still write to what is mapped
                await threads.in_thread(site.mappings.close)
            if safe:
                site.mover.give_back()
            site.peer_gates.close()
            site.processes.close()
            doubtful_bytes = site.receive_desk.share.quarantined_bytes() + site.send_desk.share.quarantined_bytes()
            doubtful_blocks = site.custody.snapshot().doubtful_blocks
        if not safe or doubtful_blocks:
            _leaked.append(self.tensors)
            self.exports.leak()
        self.exports.close()
        if safe and not doubtful_bytes:
            self.staging.close()
        else:
            self.staging.leak()


async def _closed(fabric: Fabric, timeout: float, runtime: Runtime) -> bool:
    """Whether a fabric was closed, and nothing is in flight any more.

    Calls of it may never return: a driver waits in some of them for all that is queued on a GPU.
    """
    closing, timeout = asyncio.ensure_future(fabric.close()), max(timeout, _UNDO_SECONDS)
    await asyncio.wait({closing}, timeout=timeout)
    if not closing.done():
        closing.cancel()
        _log.error("fabric_not_closed", error="a call of the transport does not return")
        return False
    await runtime.in_thread(lambda: fabric.join(timeout))  # it said that it is done, and ends a moment later
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


def given_groups(groups: Any) -> tuple[Group, ...]:
    """The groups as a caller passed them.

    Raises:
        GeometryError: If they are no `Group`s.
    """
    return _given(groups, Group, "groups", "describe each group: [kvxfer.Group(name, null_block=...)]")


def check_offer(blocks: Any, tokens: Any, *, after: Any, streaming: bool, payload: bytes) -> None:
    """See whether what a caller offers goes together.

    Raises:
        RequestError: If it does not.
    """
    if (blocks is None) != (tokens is None) or (blocks is None and not streaming):
        raise RequestError("an offer needs blocks= and tokens=, or streaming=True and none of them")
    if streaming and (payload or after is not None):
        raise RequestError("for a streaming offer, payload= belongs to Offer.finish and after= to Offer.ready")


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
    device = geometry.device if geometry.kind == "cuda" else None
    placement = parts.placement = place(config.affinity, device, bus_id=pci_bus_id)
    _log.debug("placement_chosen", cpus=placement.listed, why=placement.why)
    runtime = parts.runtime.placed(placement.cpus)
    key, staging, metrics = IdentityKey(runtime.token(PRIVATE_BYTES)), parts.staging, Metrics(_observer(config))
    fabric: Fabric | None = None
    mover: Mover | None = None
    try:
        for name in _COMPILED:
            await runtime.in_thread(partial(import_module, name))
        transport = parts.transport or nixl_transport(agent_name(key.incarnation), config.fabric, device)
        mover = await _mover(config, geometry, runtime, placement)
        fabric = Fabric(transport, runtime, mover)
        await fabric.open()  # a transport that does not work is told from refused memory
        await staging.open(config, geometry, fabric, metrics, place=placement.run)
        reachable = await _reachable(parts, fabric, metrics)
        in_place = len(reachable[True]) > len(reachable[False])
        body = await _body(parts, fabric, reachable, name=transport.name, in_place=in_place)
    except BaseException:
        await see_through(asyncio.create_task(parts.dismantle(fabric, mover, None), name="kvxfer abandon"))
        raise
    (sending, receiving), tasks, exports = staging.shares, Tasks(), parts.exports

    async def look(address: int, raised: bool) -> int:
        return await runtime.in_thread(partial(mover.writers_inside, address, raised=raised))

    def unmap(windows: Windows) -> None:
        tasks.spawn(runtime.in_thread(windows.close), "kvxfer unmap")

    site = Site(
        config=config,
        runtime=runtime,
        loop=loop,
        geometry=geometry,
        custody=Custody(),
        send_desk=Desk(sending, runtime.now, loop, metrics),
        receive_desk=Desk(receiving, runtime.now, loop, metrics),
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
        mappings=Mappings(geometry, runtime, unmap, key.incarnation),
        gates=Gates(exports.gates, exports.locks, look),
        processes=Processes(loop, gpu=geometry.kind == "cuda"),
        tasks=tasks,
    )
    mover.keep(parts, site.mappings)
    return site


def _observer(config: Config) -> Observer | None:
    """Who hears of transfers and offers, beside the counters.

    Raises:
        ConfigError: If the settings ask for what is not installed.
    """
    if config.traces == "off":
        return None
    from kvxfer.integrations.opentelemetry import Traces

    return Traces(config.engine, config.rank)


def _capabilities(parts: Assembly, *, in_place: bool) -> Capability:
    """What this rank tells its peers that it can do, or asks for."""
    capabilities, config = Capability.STREAMING | Capability.SUMS | Capability.RENEWED, parts.config
    if parts.staging.receiving is not None:
        capabilities |= Capability.STAGED
    if in_place:
        capabilities |= Capability.PULL | Capability.DIRECT
    if parts.exports.frames:
        capabilities |= Capability.MAPPED
    if config.convert:
        capabilities |= Capability.CONVERT
    if parts.exports.locks is not None:
        capabilities |= Capability.GATES
    return capabilities


async def _reachable(parts: Assembly, fabric: Fabric, metrics: Metrics) -> dict[bool, list[object]]:
    """What is registered and peers are told of, by whether they are trusted: the caller's blocks only then.

    Those are registered where routes are wanted that need it. Blocks that the transport refuses can still be staged;
    where the settings leave that open, they are.

    Raises:
        FabricError: If the transport refuses them, and the settings ask for such a route or leave no other.
    """
    config, found = parts.config, list(parts.staging.reachable)
    reachable = {False: found, True: found}
    if config.trust == "none" or config.route == "staged":
        return reachable
    try:
        blocks = await asyncio.wrap_future(fabric.register(_allocations(parts.tensors, parts.geometry)))
    except FabricError as error:
        if config.route != "auto" or not config.arena_bytes:
            raise
        metrics.memory_refused["blocks"] += 1
        _log.warning("blocks_not_registered", reason=str(error), route="staged")
    else:
        reachable[True] = [*found, blocks]
    return reachable


async def _body(
    parts: Assembly, fabric: Fabric, reachable: Mapping[bool, Sequence[object]], *, name: str, in_place: bool
) -> dict[bool, bytes]:
    """What peers are told, encoded, by whether they are trusted with addresses.

    An untrusted peer gets the metadata of the receiving share alone.
    """
    staging, exports, geometry = parts.staging, parts.exports, parts.geometry
    await exports.open(parts.config, geometry, parts.runtime, in_place=in_place)
    metadata = {known: await asyncio.wrap_future(fabric.metadata(tokens)) for known, tokens in reachable.items()}
    limit = parts.config.chunk_bytes
    if staging.receiving is not None and not in_place:
        limit = min(limit, parts.config.send_bytes)

    def encoded(trusted: bool) -> bytes:
        return encode_body(
            wire.AgentBody(
                fabric=name,
                metadata=metadata[trusted],
                tensors=geometry_to_wire(geometry, with_addresses=trusted and in_place),
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


def _allocations(tensors: Sequence[CacheTensor], geometry: CacheGeometry) -> list[wire.MemorySpan]:
    """The memory of all tensors, each allocation once."""
    kind = "VRAM" if geometry.kind == "cuda" else "DRAM"
    found = {t.tensor.untyped_storage().data_ptr(): t.tensor.untyped_storage().nbytes() for t in tensors}
    return [wire.MemorySpan(kind, geometry.device, base, size) for base, size in sorted(found.items())]


async def _mover(config: Config, geometry: CacheGeometry, runtime: Runtime, placement: Placement) -> Mover:
    gpu: Gpu | None = None
    if geometry.kind == "cuda":
        cuda = import_module("kvxfer.copy.cuda")
        gpu = await runtime.in_thread(lambda: placement.run(lambda: cuda.Gpu(geometry.device, ctas=config.copy_ctas)))
    return Mover(
        runtime,
        gpu=gpu,
        threads=usual_threads(placement.cpus),
        cpus=placement.cpus,
        max_descriptors=config.fabric.max_descriptors,
        max_post_bytes=config.fabric.max_post_bytes,
        no_progress_timeout=config.no_progress_timeout,
    )


def nixl_transport(name: str, config: FabricConfig, device: int | None) -> "NixlTransport":
    """A transport over NIXL for caches on this GPU, or on a CPU. Nothing of NIXL is opened yet."""
    from kvxfer.fabric.nixl import NixlTransport

    return NixlTransport(
        name,
        backends=config.backends,
        backend_params=config.backend_params,
        num_workers=config.num_workers,
        devices=config.devices,
        scatter_lists=config.scatter_lists,
        device=device,
    )


# --- what stands still and cannot say so
#
# With the loop, all transfers, leases and heartbeats of the worker stand still. With the transport, whatever was
# posted.

_PERIOD_SECONDS: Final = 0.25
_LATE_SECONDS: Final = 0.25
"""A beat so late is counted."""
_BLOCKED_SECONDS: Final = 1.0
"""A beat so late is said aloud."""
_STALLED_SECONDS: Final = 5.0
"""What owes something for less was only not given a processor: threads give way where many want one."""

_CALLER = "code that runs on the same loop did not yield; move it to a thread, or set loop='own'"
_OWN = "the loop has a thread of its own, so the whole process stood still or a thread held the GIL"


class Watch:
    """Looks four times a second whether the loop stands still, and whether the transport does.

    How late each beat is goes into the metrics, which count those that are very late. The first one that is later still
    is logged; the incident is over, and the next may be logged, once a beat was in time again. A loop that stands still
    for `t` seconds makes a beat late by something between `t - 0.25` and `t`.

    What waits for a post is ended while a call of the transport has not returned for `no_progress_timeout`, or 5 s: a
    post that makes no progress is given up by the thread that looks after it, and that one is in the call.

    Args:
        site: The worker.
        roles: What it does for peers.
        own_loop: Whether the loop has a thread of its own; decides which cause the log line names.
    """

    def __init__(self, site: Site, roles: Sequence[Prefill | Decode], *, own_loop: bool) -> None:
        self._site: Final = site
        self._roles: Final = roles
        self._reason: Final = _OWN if own_loop else _CALLER
        self._blocked = self._stalled = False  # whether that has been said of this incident
        self._arm()

    def stop(self) -> None:
        """No beat comes any more. Idempotent."""
        self._timer.cancel()

    def _arm(self) -> None:
        self._due = self._site.now() + _PERIOD_SECONDS
        self._timer = self._site.call_at(self._due, self._beat)

    def _beat(self) -> None:
        late = self._site.now() - self._due
        self._site.metrics.loop_late(late, blocked=late >= _LATE_SECONDS, at=self._due + late)
        if late < _LATE_SECONDS:
            self._blocked = False
        if late >= _BLOCKED_SECONDS and not self._blocked:
            self._blocked = True
            _log.warning("loop_blocked", lag=late, limit=_BLOCKED_SECONDS, reason=self._reason)
        self._arm()  # first: whatever comes of a look, the next beat comes
        if late < _LATE_SECONDS:  # else the process may have been stopped, and the transport with it
            self._look_at_transport()

    def _look_at_transport(self) -> None:
        late, limit = self._site.fabric.health()[0], max(self._site.config.no_progress_timeout, _STALLED_SECONDS)
        if late < limit:
            self._stalled = False
            return
        if not self._stalled:
            self._stalled = True
            _log.error("transport_stalled", lag=late, limit=limit)
        failure = Failure(Status.FAILED, Code.FABRIC, f"a call of the transport has not returned for {late:.1f} s")
        for stop in [stop for role in self._roles for stop in role.posted]:
            stop(failure)


# --- a worker that is open

_NONCE_BYTES: Final = 32
_LEAVING: Final = wire.Goodbye(Code.DRAINING, "the worker is draining")


class Service:
    """One rank's service, on the loop on which it was made."""

    def __init__(self, site: Site, *, own_loop: bool) -> None:
        self.site: Final = site
        self.links: Final[set[Link]] = set()  # all that are open
        self.greeting: Final[set[Link]] = set()  # those whose handshake is not complete
        self.listener: Listener | None = None  # where peers connect; None before `listen`
        self.frames_sent, self.frames_received = site.metrics.frames_sent, site.metrics.frames_received
        self._streams: Final = Streams(site, self._link)
        self.peers: Final = Peers(site, self._streams.connect)  # links to prefill ranks
        self.prefill: Final = Prefill(site)  # what peers fetch here
        self.decode: Final = Decode(site, self.peers)  # what is fetched from peers
        roles = self.prefill, self.decode
        self.rebuilding: Final = Rebuilding(site, roles, self.links)
        self._watch: Final = Watch(site, roles, own_loop=own_loop)

    async def listen(self) -> Listener:
        """Let peers connect."""
        self.listener = listener = await self._streams.listen()
        return listener

    def begin_drain(self) -> None:
        """Refuse new work from now on, and tell every peer. Idempotent."""
        if not self.site.draining:
            self.site.draining = True
            for link in self.links:
                link.send(_LEAVING)
            self.prefill.refuse_parked()

    async def end(self, until: float) -> None:
        """End all that is under way, bounded, and close every link.

        Args:
            until: When what has not ended is waited for no longer, by the worker's clock.
        """
        site = self.site
        site.draining = True
        self._watch.stop()
        if self.listener is not None:
            self.listener.close()
        self.rebuilding.close()
        self.decode.cancel_all()
        self.prefill.withdraw_all()
        await site.tasks.drain(until - site.now(), spare=False)
        self.decode.abandon_all()
        site.closing.set_result(None)  # whoever looks for evidence looks once more
        site.tasks.cancel()
        await site.tasks.drain(site.config.close_timeout)
        links = [*self.links, *self.greeting]
        for link in links:
            link.close("the worker was closed")
        await asyncio.gather(*(link.wait_gone(site.config.close_timeout) for link in links))
        if not await site.lookouts.drain(site.config.close_timeout):
            site.lookouts.cancel()
        self.decode.close()
        self.prefill.book.close()

    # --- links

    def new_session(self, link: Link, process: int | None) -> tuple[Session, bool]:
        """A fresh session for a new stream, and whether its peer is trusted with addresses.

        Args:
            link: The stream, which may have been opened a while ago: TLS takes some time.
            process: Of the same user on this host, by the credentials of a Unix socket: its number, 0 if it is in
                another namespace of processes; None if the peer is not such a process.

        Raises:
            BusyError: If there are as many streams as may be.
        """
        site, config = self.site, self.site.config
        if link.role is Role.SERVER and admitted((*self.links, *self.greeting)) >= config.max_offers:
            raise BusyError(f"as many control streams are open as may (max_transfers={config.max_transfers})")
        secret = config.secret.get_secret_value().encode() if config.secret is not None else None
        trusted = {"full": True, "none": False, "auto": process is not None or secret is not None}[config.trust]
        epoch = bytes.fromhex(site.issuer.card.epoch) if site.issuer is not None else site.key.incarnation
        identity = Identity(
            config.engine, epoch, site.key.incarnation, config.rank, config.world, int(site.capabilities), __version__
        )
        terms = Terms(
            facts=site.facts,
            body=site.body[trusted],
            key=site.key,
            secret=secret,
            endpoint=link.endpoint,
            engaged_at=self._engaged_at,
            heartbeat=config.heartbeat,
            peer_timeout=config.peer_timeout,
            handshake_timeout=config.handshake_timeout,
        )
        nonce = site.runtime.token(_NONCE_BYTES)
        return Session(link.role, identity, terms, nonce=nonce, now=link.since, process=process or 0), trusted

    def examine(self, link: Link) -> "asyncio.Task[Agreed]":
        """A peer has said what it is: look at it, off the loop if that takes long. What it says next waits for it.

        The task's result is given to `on_opened`; a `KvxferError` of it ends the link.
        """
        looking = self.site.examine(link.peer, sending=link.role is Role.SERVER)
        return self.site.tasks.spawn(looking, f"kvxfer meet {link.peer.name}", spare=True)

    def on_opened(self, link: Link, found: Agreed) -> None:
        """A handshake is complete; `found` is what `examine` has. A new session of an incarnation ends its old one."""
        site, role = self.site, self.prefill if link.role is Role.SERVER else self.decode
        older = superseded(link, (*self.links, *self.greeting))
        site.admit(link, found)
        self.decode.engines.clear()
        self.links.add(link)  # before the old one is closed: else its end would be taken for that of the peer
        for other in older:
            other.close("a newer session of the same peer was opened")
        _log.info("peer_connected", peer=link.peer.name, role=link.role.value, endpoint=link.endpoint)
        if site.draining:
            link.send(_LEAVING)
        link.on_message = role.on_message
        role.on_link_opened(link)
        if link.outdated(site.body[link.trusted]):
            self.rebuilding.send_renewed(link)

    def on_lost(self, link: Link, error: KvxferError) -> None:
        """A link is gone. Called once, and only if `on_opened` was."""
        self.links.discard(link)
        self.decode.engines.clear()
        _log.info("peer_disconnected", peer=link.peer.name, role=link.role.value, reason=str(error))
        if link.role is Role.CLIENT:
            self.peers.on_link_lost(link)
            self.decode.on_link_lost(link, error)
        else:
            self.prefill.on_link_lost(link)
        incarnation = link.peer.identity.incarnation
        if all(other.peer.identity.incarnation != incarnation for other in self.links):
            self.site.forget(link.peer)

    def on_peer_news(self, link: Link, message: wire.Message) -> None:
        """A peer says that it drains, or that its agent is another one.

        Raises:
            ProtocolError: If it says so too often, which closes the link.
        """
        if isinstance(message, wire.Goodbye):
            link.draining = True
            _log.info("goodbye_heard", peer=link.peer.name, role=link.role.value, reason=message.reason)
        elif isinstance(message, wire.Renewed):
            link.renewals = max(link.renewals, message.renewals)
            self.site.lanes.renewed(link.peer, message.renewals, message.metadata)
            self.prefill.on_agent_renewed(link)
            self.decode.on_agent_renewed(link)

    def _engaged_at(self, incarnation: bytes) -> str:
        """Where this rank has gone to an incarnation, and something is open or in doubt; empty if nowhere.

        A stream on which it has proved who it is counts from then on: whoever is there could do so elsewhere with that.
        """
        asked = (receiver.link for receiver in self.decode.incoming.values())  # on these; they may be gone
        ours = (link for link in (*self.links, *self.greeting, *asked) if link.role is Role.CLIENT)
        return next((link.endpoint for link in ours if link.proved_to == incarnation), "")

    def _link(self, role: Role, endpoint: str) -> Link:
        link = Link(role, endpoint, self, self.site.runtime)
        self.greeting.add(link)
        link.ready.add_done_callback(lambda _: self.greeting.discard(link))
        return link


# --- the state of a worker as plain data


def overview(card: RankCard, service: Service, parts: Assembly) -> dict[str, Any]:
    """Identity, peers, arena, threads, offers, transfers and counters."""
    site, sender, receiver, peers = service.site, service.prefill, service.decode, service.peers
    links, greeting, rebuilds = service.links, service.greeting, site.rebuilds
    staging, now = parts.staging, site.now()
    fabric_late, fabric_broken = site.fabric.health()
    receiver.finish_successes()  # what has ended in this turn, too
    return {
        "card": card.to_dict(),
        "epoch": site.issuer.card.epoch if site.issuer else None,
        "draining": site.draining,
        "closed": site.closing.done(),
        "peers": [_peer(site, parts, link, now) for link in links],
        "handshakes": len(greeting),
        "streams": admitted((*links, *greeting)),
        "connecting": peers.connecting,
        "unreachable": peers.unreachable,
        "arena": {
            "kind": staging.kind,
            "refused": dict(staging.refused),
            "send": site.send_desk.share.snapshot(),
            "receive": site.receive_desk.share.snapshot(),
        },
        "in_place": site.in_place,
        "written": {key.hex(): nbytes for key, nbytes in site.written_in_place.items()},
        "agent": {"rebuilt": rebuilds.count, "wanted": len(rebuilds.requests), "paused": rebuilds.paused},
        "fabric": {
            "transport": "NIXL" if parts.transport is None else type(parts.transport).__name__,
            "late": fabric_late,
            "broken": fabric_broken,
            "awake": site.mover.held_awake,
            "lingering": site.mover.lingering,
            "strange": site.mover.unknown_notifications,
            "agents": site.fabric.agents,
            "lanes": len(site.lanes),
        },
        "affinity": parts.placement.describe(),
        "offers": len(sender.book),
        "parked": sender.book.parked,
        "claims": len(receiver.claims),
        "sending": len(sender.transfers),
        "receiving": len(receiver.fetches),
        "in_doubt": sum(fetch.done for fetch in receiver.fetches),
        "sent_in_doubt": len(sender.doubts),
        "places": len(sender.places),
        "transfers": [
            *(_fetch(fetch, now) for fetch in receiver.fetches),
            *(_sending(one, now) for one in sender.transfers.values()),
        ],
        "custody": site.custody.snapshot(),
        "metrics": site.metrics.snapshot(),
    }


def _peer(site: Site, parts: Assembly, link: Link, now: float) -> dict[str, Any]:
    """One session. What is said of the way to it was seen: what is mapped, and what moved by which route."""
    peer, moved = link.peer, {ROUTE_NAMES[route]: nbytes for route, nbytes in link.moved.items() if nbytes}
    if link.role is Role.SERVER:
        mapped = site.mappings.kinds(peer)  # by this side, which copies
    elif ROUTE_NAMES[Route.MAPPED] not in moved:
        mapped = []
    else:  # by the peer, which has copied through what it was told of
        mapped = ["process"] if site.mappings.is_local(peer) else sorted({one.kind for one in parts.exports.frames})
    host = peer.body.host
    return {
        "peer": peer.name,
        "role": link.role.value,
        "trusted": link.trusted,
        "encrypted": link.encrypted,
        "endpoint": link.endpoint,
        "draining": link.draining,
        "connected_seconds": now - link.since,
        "silent_seconds": now - link.heard,
        "host": "this" if not may_be_elsewhere(host) else "another" if elsewhere(host) else "unknown",
        "mapped": mapped,
        "not_mapped": site.mappings.reason_unmapped(peer),
        "moved": moved,
    }


def _fetch(fetch: Fetch, now: float) -> dict[str, Any]:
    at = fetch.stands()
    return {
        "side": "receive",
        "id": fetch.id,
        "request": fetch.request,
        "peers": [receiver.peer.name for receiver in fetch.receivers],
        "route": "+".join(sorted({ROUTE_NAMES[r.route] for r in fetch.receivers if r.route is not Route.UNKNOWN})),
        "step": at.step.value,
        "in_doubt": fetch.done,
        "bytes": at.bytes,
        "chunks_done": at.chunks_done,
        "chunks": at.chunks,
        "seconds": now - fetch.began,
    }


def _sending(sender: Sender, now: float) -> dict[str, Any]:
    protocol = sender.protocol
    return {
        "side": "send",
        "id": sender.name,
        "request": protocol.fetch.ticket.request,
        "peers": [sender.peer.name],
        "route": ROUTE_NAMES[protocol.route],
        "step": sender.step.value,
        "in_doubt": sender.in_doubt,
        "bytes": sender.tally.bytes,
        "chunks_done": protocol.arrived,
        "chunks": protocol.chunks,
        "seconds": now - sender.began,
    }


# --- the worker

_NAMED: Final = 5
"""Offers that a warning names at most."""


class Worker:
    """One rank's transfer service. Enter it with `async with`; it may offer and fetch at once.

    Args:
        tensors: The cache tensors of this rank, all on one device. They stay registered, and must stay allocated, until
            the worker is closed.
        config: Settings; `Config.load()` (environment, file, defaults) if left out.
        groups: Properties of layer groups that their tensors do not show.
        transport: What moves the bytes; NIXL if left out. `kvxfer.testing` has an in-process one.
        runtime: Clock, randomness and threads; tests pass a deterministic one.
        loop: It runs on the loop that enters it (`"caller"`), or on one of its own in a thread (`"own"`).

    Raises:
        GeometryError: If the tensors contradict each other or cannot be expressed.
        ConfigError: If a setting is wrong.
        UsageError: If `transport`, `runtime` or `loop` is something else.
    """

    _own_loop: ClassVar[bool] = False
    _assembly: Assembly
    _entered = False
    _service: Service | None = None  # once it is open, and after
    _opening: asyncio.Task[None] | None = None  # while it opens
    _draining: asyncio.Task[bool] | None = None
    _hurried = False  # closes without draining
    _closing: asyncio.Task[None] | None = None

    def __new__(
        cls,
        tensors: Iterable[CacheTensor],
        config: Config | None = None,
        *,
        groups: Iterable[Group] = (),
        transport: Transport | None = None,
        runtime: Runtime | None = None,
        loop: Literal["caller", "own"] = "caller",
    ) -> Self:
        """An `OwnLoopWorker` for `loop="own"`."""
        if loop not in ("caller", "own"):
            raise UsageError(f"loop is {loop!r}: it is 'caller', the loop that enters the worker, or 'own'")
        own = cls is Worker and loop == "own"
        # which stands on this module
        return super().__new__(cast("type[Self]", import_module("kvxfer.blocking").OwnLoopWorker) if own else cls)

    def __init__(
        self,
        tensors: Iterable[CacheTensor],
        config: Config | None = None,
        *,
        groups: Iterable[Group] = (),
        transport: Transport | None = None,
        runtime: Runtime | None = None,
        loop: Literal["caller", "own"] = "caller",
    ) -> None:
        del loop  # said which class this is
        self._assembly = Assembly.of(tensors, groups, config, transport, runtime)

    async def __aenter__(self) -> Self:
        self._enter()
        self._opening = asyncio.create_task(self._open(), name="kvxfer open")
        try:
            await see_through(self._opening, self._opening.cancel)
            if self._closing is not None:
                raise ClosedError("this worker was closed while it opened")
        except BaseException:
            await self.aclose(drain=False)
            raise
        finally:
            self._opening = None  # which keeps its error, and that the tensors
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(drain=error is None)

    def __del__(self) -> None:
        if self._service is not None and self._closing is None and self._assembly.home.here:
            warnings.warn(f"{self!r} was never closed: use `async with`", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        state = "closed" if self._closing is not None else "new" if self._service is None else "open"
        return f"<kvxfer.Worker {self.config.engine}[{self.config.rank}/{self.config.world}] {state}>"

    # --- identity

    @property
    def config(self) -> Config:
        """Effective settings."""
        return self._assembly.config

    @property
    def card(self) -> RankCard:
        """What this rank says of itself; the launcher collects one of each rank.

        Raises:
            ClosedError: If the worker is not open.
        """
        service = self._assembly.home.read(self._service)
        site, listener = service.site, service.listener
        if listener is None:
            raise ClosedError("the worker does not listen yet")
        return RankCard(
            engine=site.config.engine,
            rank=site.config.rank,
            world=site.config.world,
            endpoint=listener.reached_at(site.config.advertise),
            incarnation=site.key.incarnation.hex(),
        )

    @property
    def engine(self) -> Issuer:
        """The engine that this rank belongs to: `worker.engine.ticket(request)`.

        Raises:
            TicketError: If it has not joined yet.
        """
        return self._assembly.home.read(self._service).site.engine_issuer

    def join(self, card: EngineCard | Mapping[str, Any], *, key: bytes) -> None:
        """Join an engine of several ranks. One of a single rank has joined itself.

        Args:
            card: Made of the cards of all ranks.
            key: 32 random bytes that all ranks (and the scheduler, if it issues tickets) share.

        Raises:
            TicketError: If this rank is not part of the card, or the key has the wrong length.
        """
        service, issuer = self._assembly.home.own(self._service), Issuer(card, key)
        issuer.card.check_member(self.card)
        site = service.site
        if site.issuer is None or site.issuer.card.epoch != issuer.card.epoch:
            for link in [*service.links, *service.greeting]:
                link.close_once_met("this rank joined an engine")  # it was told another epoch
        site.issuer = issuer

    # --- prefill

    def offer(
        self,
        request: str,
        blocks: Blocks | None = None,
        *,
        tokens: int | None = None,
        after: Any = None,
        attempt: int = 0,
        streaming: bool = False,
        payload: bytes = b"",
    ) -> Offer:
        """Offer a request's cache to whoever holds its ticket.

        The blocks belong to the offer until `released()` returns; until then they must not change, beyond what a
        streaming offer has not yet marked as ready.

        Args:
            request: Unique id of the request.
            blocks: Its block ids: a list, an array, or a mapping from group to ids or `Span`.
            tokens: How many tokens the blocks hold, from token 0.
            after: On CUDA required: the blocks may be read once this event (or the work on this stream) has completed.
            attempt: Raise it to offer the same id again.
            streaming: Layers and tokens become ready step by step (`Offer.extend`, `Offer.ready`, `Offer.finish`).
                `blocks` and `tokens` may be given at once or step by step.
            payload: Travels with the last result; for streaming offers give it to `Offer.finish`.

        Raises:
            RequestError: If the id is in use or was just used, or arguments do not go together; `BusyError` if there
                are too many offers.
            BlocksError: If ids are out of range, too few, or in custody.
            TokensError: If there are no tokens, or the payload is too large.
            EventError: If `after` is missing or was never recorded.
            ClosedError: If the worker is draining.
        """
        service = self._assembly.home.own(self._service)
        book, payload = service.prefill.book, given_payload(payload)
        if service.site.draining or self._closing is not None:
            raise ClosedError("this worker is draining or closed: offer on another one")
        check_offer(blocks, tokens, after=after, streaming=streaming, payload=payload)
        entry = book.open(request, attempt)
        offer = Offer(entry)
        try:
            if blocks is not None and tokens is not None:
                offer.extend(blocks, tokens=token_count(tokens))
            if not streaming:
                offer.ready(after=after)
                offer.finish(payload)
        except BaseException:
            book.discard(entry)
            raise
        book.publish(entry)
        return offer

    # --- decode

    def claim(self, ticket: Mapping[str, Any] | Ticket) -> ClaimHandle:
        """Keep a request's lease while it waits for blocks here.

        A fetch that is cancelled or fails while the claim is open can be tried again. When the claim is closed after
        that, the prefill engine frees the blocks, unless the fetch was to keep them.

        Raises:
            TicketError: If the ticket is malformed.
            BusyError: If there are too many claims.
            ClosedError: If the worker is not open.
        """
        decode, parsed = self._shown(ticket)
        return decode.claim(parsed)

    async def fetch(
        self,
        ticket: Mapping[str, Any] | Ticket,
        blocks: Blocks,
        *,
        tokens: range,
        after: Any = None,
        timeout: float | None = None,
        keep: bool = False,
    ) -> FetchResult:
        """Bring a request's cache into these blocks. `start_fetch` and waiting in one.

        When it returns or raises, no peer writes the blocks any more (`MemoryInDoubtError` alone says otherwise).

        When it is cancelled (`task.cancel()`, `asyncio.wait_for`, a sibling that fails), the prefill ranks that are
        connected free the request's blocks at once, as after `decline`, and its ticket is spent. After an error or a
        time-out they do so 2 s later. `keep=True`, or a `claim` that is open, holds them for a retry.

        With a time-out it has returned or raised after `timeout` and `config.bounds()["fetch"]` (15 s) more, in which
        a peer that still writes is asked to stop. Without one it waits as long as its request may come;
        `config.bounds()` says after how many seconds it hears of each kind of failure.

        Args:
            ticket: As the prefill side issued it.
            blocks: Destination ids in token order, from the block of token 0 on (a `Span` begins elsewhere), covering
                `tokens`; those that hold some of these are the fetch's until it ends.
            tokens: Which tokens; blocks keep what they hold of others, byte for byte. `range(n, n)` if all n are held
                already: then only state and the payload are brought.
            after: On CUDA required: the blocks may be written once this event (or the work on this stream) has
                completed.
            timeout: Seconds; left out, it waits as long as the offer may come.
            keep: Hold the request's blocks for a retry if this is cancelled or fails, for as long as the lease runs.

        Raises:
            UsageError: If an argument is wrong; nothing was sent.
            PeerError: If the peer cannot be reached, differs, refuses, or is lost.
            TransferError: If the transfer fails or times out.
        """
        return await self.start_fetch(ticket, blocks, tokens=tokens, after=after, timeout=timeout, keep=keep)

    def start_fetch(
        self,
        ticket: Mapping[str, Any] | Ticket,
        blocks: Blocks,
        *,
        tokens: range,
        after: Any = None,
        timeout: float | None = None,
        keep: bool = False,
    ) -> Transfer:
        """Begin a fetch, to do something while it goes on: `async with worker.start_fetch(...) as transfer:`.

        It returns at once; leaving the block waits for the fetch's end, or cancels it, as `Transfer` says. See `fetch`
        for arguments and errors, and for what a cancellation frees.
        """
        decode, parsed = self._shown(ticket)
        progress = decode.start(parsed, blocks, tokens=tokens, after=after, timeout=timeout, keep=keep)
        return Transfer(progress, self._assembly.home)

    async def decline(self, ticket: Mapping[str, Any] | Ticket) -> None:
        """No fetch will come: every prefill rank frees the request's blocks at once. Also while this worker drains.

        Raises:
            PeerError: If a rank could not be told; its lease bounds the wait.
        """
        decode, parsed = self._shown(ticket, ends=True)
        await decode.decline(parsed)

    # --- watching and closing

    def occupy(self, ctas: int) -> None:
        """Let copies on the GPU occupy so many thread blocks from now on, instead of `copy_ctas`. From any thread.

        Args:
            ctas: 1 to 4096: more while the model leaves the GPU idle. On a CPU it changes nothing.

        Raises:
            ConfigError: If it is out of range.
            ClosedError: If the worker is not open.
        """
        if type(ctas) is not int or not 1 <= ctas <= MAX_CTAS:
            raise ConfigError(f"copies cannot occupy {ctas!r} thread blocks: give a number from 1 to {MAX_CTAS}")
        if self._closing is not None:
            raise ClosedError("this worker is closed")
        self._assembly.home.read(self._service).site.mover.occupy(ctas)

    def describe(self) -> dict[str, Any]:
        """The worker's state as plain data: identity, peers, arena, threads, offers, transfers and counters."""
        return overview(self.card, self._assembly.home.own(self._service), self._assembly)

    def describe_soon(self) -> "Future[dict[str, Any]]":
        """`describe` on the worker's loop, asked for from any thread. Never done while that loop stands still.

        If the loop is closed, the future has `ClosedError`.
        """
        return soon(self._assembly.home.read(self._service).site.loop, lambda: Worker.describe(self))

    def begin_drain(self) -> None:
        """Refuse new work from now on, and tell every peer. What is under way goes on. Idempotent.

        Requests that are on offer may still be fetched. Fetches that wait for an offer are refused: it cannot come.
        """
        self._assembly.home.own(self._service).begin_drain()

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new work, tell every peer, and wait for what is under way.

        Args:
            timeout: Seconds to wait at most; the setting `drain_timeout` if left out.

        Returns:
            False if some of it did not end in time; it goes on until the worker is closed.
        """
        service = self._assembly.home.own(self._service)
        site = service.site
        deadline = site.now() + given_seconds(timeout, site.config.drain_timeout)
        self.begin_drain()
        ends = [offer.wait_end() for offer in service.prefill.book.offers] + service.decode.outcomes()
        try:
            if ends:
                await asyncio.wait(ends, timeout=max(0.0, deadline - site.now()))
            return all(end.done() for end in ends)
        finally:
            for end in ends:  # else each would be kept until then, of whoever drains again and again
                end.cancel()

    async def aclose(self, *, drain: bool = True) -> None:
        """Close the worker: drain (bounded), stop the rest, close links, stop threads, give memory back. Idempotent.

        Cancelling it cuts the drain short, and is let through once the worker is closed; so does a further call without
        `drain`. Memory that a silent peer may still write is not given back but left to the process's end. A worker
        that is opening is opened no further, and whoever opens it gets `ClosedError`.
        """
        if self._entered:
            self._assembly.home.own(self)
            if not drain:
                self._hurry()
            if self._closing is None:
                self._closing = asyncio.create_task(self._close(), name="kvxfer close")
            await see_through(self._closing, self._hurry)

    def _warn_of_a_wait(self, service: Service) -> None:
        """Somebody leaves the worker, and will wonder what takes so long."""
        offers, fetches = [offer.key[0] for offer in service.prefill.book.offers], len(service.decode.outcomes())
        if offers or fetches:
            some = ", ".join(offers[:_NAMED]) + ("" if len(offers) <= _NAMED else ", ...")
            reason = f"{len(offers)} offers that nobody has released ({some}) and {fetches} fetches are waited for"
            _log.warning("close_delayed", timeout=self.config.drain_timeout, reason=reason)

    def _hurry(self) -> None:
        self._hurried = True
        if self._draining is not None:
            self._draining.cancel()

    async def _close(self) -> None:
        if self._opening is not None:  # it is opened no further
            self._hurry()
            self._opening.cancel()
            await asyncio.wait({self._opening})
        service = self._service
        if service is None:
            return
        if not self._hurried:
            self._warn_of_a_wait(service)
            self._draining = asyncio.create_task(self.drain(), name="kvxfer drain")
            await asyncio.wait({self._draining})
        site = service.site
        until = site.now() + site.config.revoke_timeout + site.config.close_timeout
        await service.end(until)
        await self._assembly.dismantle(site.fabric, site.mover, site, max(0.0, until - site.now()))
        await site.tasks.drain(site.config.close_timeout)  # memory of peers is unmapped when the last link is gone
        _log.info("worker_closed", rank=site.config.rank, world=site.config.world)

    # --- inside

    def _enter(self) -> None:
        """What it is made of serves once, also if it could not be opened."""
        if self._entered:
            raise ClosedError("a worker is entered once: make another one")
        self._entered = True

    async def _open(self) -> None:
        try:
            site = await assemble(self._assembly)
            service = self._service = Service(site, own_loop=self._own_loop)
            listener = await service.listen()
            if site.config.world == 1:
                self.join(EngineCard.of([self.card]), key=site.runtime.token(KEY_BYTES))
        except asyncio.CancelledError:
            if self._closing is None:
                raise
        else:
            _log.info("worker_opened", endpoint=listener.endpoint, rank=site.config.rank, world=site.config.world)

    def _shown(self, ticket: Mapping[str, Any] | Ticket, *, ends: bool = False) -> tuple[Decode, Ticket]:
        """The side that fetches, and the ticket of what it is to fetch, or to leave (`ends`): also while it drains."""
        service = self._assembly.home.own(self._service)
        if self._closing is not None or (service.site.draining and not ends):
            raise ClosedError("this worker is draining or closed: use another one")
        _ = service.site.engine_issuer  # ranks of one engine must be known as such before they fetch
        return service.decode, Ticket.parse(ticket)
