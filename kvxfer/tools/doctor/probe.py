"""Real workers move real bytes: every route, in both directions, each byte compared, and which way they really took.

Both sides run the same script over a channel, so both come to the same findings: one worker a route on each side, and
a few transfers each way, the first of which warms up. Items are plain data, since they may travel as JSON.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import kvxfer
from kvxfer.config import Config
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.mapped.host import elsewhere, here, unlike
from kvxfer.telemetry import overheard
from kvxfer.tools.bench.caches import Request, Slab, draw
from kvxfer.tools.bench.device import available_bytes
from kvxfer.tools.bench.layouts import MIB, Layout
from kvxfer.tools.doctor.findings import Finding, fail, ok, skipped, warn, words
from kvxfer.tools.doctor.lanes import LaneLog, is_tcp, lane_of
from kvxfer.tools.doctor.machine import Machine
from kvxfer.tools.doctor.trial import Channel
from kvxfer.tools.shown import size

__all__ = ["ROUTES", "Probe", "ProbeCache", "judge"]

ROUTES: Final = ("mapped", "staged", "direct", "pull")
_TRANSFERS: Final = 3
_FETCH_SECONDS: Final = 30.0
_LEAST_ARENA: Final = 64 * MIB
_REASONS: Final = frozenset(
    {"peer_not_mapped", "cache_not_exported", "route_fell_back", "blocks_not_registered", "locks_refused"}
)
"""Warnings of the library that say why a route was not taken."""
_SEED_BITS: Final = 48
_UNKNOWN_PEER: Final = "set KVXFER_SECRET to the same secret on both sides: without it peers are not told addresses"
_LAYOUT: Final = Layout("32KiB", 32 << 10, 2, 8, 16)
_NEEDED: Final = 12
"""How much memory there should be for each byte that is moved: the pool, what it is compared with, an arena, others."""


def _probe_bytes(device: str) -> int:
    """How much a probe moves here: enough to be worth timing, and little beside what is free."""
    wanted = 16 * MIB if device == "cpu" else 256 * MIB
    return max(MIB, min(wanted, available_bytes(device) // _NEEDED))


class ProbeCache:
    """A benchmark's cache, of which every transfer takes some blocks, and must leave all others as they are.

    Both sides have agreed on the bytes of a transfer, and on the seed of what it holds.
    """

    def __init__(self, device: str, nbytes: int, seed: int) -> None:
        self._seed: Final = seed
        self._blocks: Final = _LAYOUT.blocks(nbytes)
        self._pool: Final = _LAYOUT.pool(nbytes)
        self.cache: Final = Slab(device, [(_LAYOUT, self._pool)], source=False).cache(_LAYOUT, self._pool, "mapped")
        self.tensors: Final = self.cache.cache_tensors()

    @property
    def tokens(self) -> int:
        """Of one transfer."""
        return self._blocks * _LAYOUT.block_tokens

    def source(self, number: int) -> list[int]:
        """Blocks from which a transfer is read; they hold what belongs to it afterwards."""
        request = self._request(number, source=True)
        self.cache.write(request)
        return list(request.ids)

    def target(self, number: int) -> list[int]:
        """Blocks into which a transfer is written; the whole pool holds something else afterwards."""
        self.cache.scrub()
        return list(self._request(number, source=False).ids)

    def difference(self, number: int) -> str:
        """How the pool differs from what it should be after a transfer; empty if it does not."""
        return self.cache.difference(self._request(number, source=False))

    def _request(self, number: int, *, source: bool) -> Request:
        return draw(self._seed + number, self._pool, self._blocks, source=source)


@dataclass(frozen=True, slots=True)
class Probe:
    """One side of a probe."""

    channel: Channel
    first: bool  # whether this side is the source of the first direction
    device: str
    names: tuple[str, str]  # what this side and the other one are called in findings
    listen: str  # where the worker of a route listens: `unix:/...{route}...` or `tcp:host:0`
    lanes: LaneLog

    async def run(self) -> AsyncGenerator[Finding, None]:
        """Probe every route."""
        mine = {"nbytes": await asyncio.to_thread(_probe_bytes, self.device), "seed": secrets.randbits(_SEED_BITS)}
        theirs = await self._exchange(mine)
        seed = int((mine if self.first else theirs)["seed"])
        cache = await asyncio.to_thread(ProbeCache, self.device, min(mine["nbytes"], int(theirs["nbytes"])), seed)
        for route in ROUTES:
            for finding in await self._route(route, cache):
                yield finding

    async def _exchange(self, item: dict[str, Any]) -> dict[str, Any]:
        self.channel.send(item)
        heard: dict[str, Any] = await self.channel.hear()
        return heard

    async def _route(self, route: str, cache: ProbeCache) -> list[Finding]:
        with overheard(_REASONS) as reasons:
            async with AsyncExitStack() as stack:
                worker, why = None, ""
                self.lanes.forget()
                try:
                    worker = await stack.enter_async_context(kvxfer.Worker(cache.tensors, self._settings(route)))
                except KvxferError as error:
                    why = words(error)
                    forbidden = isinstance(error, ConfigError) and _forbidden(route)
                else:
                    forbidden = False
                theirs = await self._exchange({"why": why, "forbidden": forbidden, "host": here()})
                if worker is None or theirs["why"]:
                    return [_not_opened(route, self.names, why, theirs, forbidden=forbidden)]
                found = [
                    await self._direction(worker, route, cache, theirs["host"], reasons, outward=outward)
                    for outward in (self.first, not self.first)
                ]
                await self._exchange({"done": route})  # nobody closes while the other one still looks
                return found

    def _settings(self, route: str) -> Config:
        small: dict[str, Any] = {}
        if self.device == "cpu":
            small = {"arena_bytes": _LEAST_ARENA, "chunk_bytes": _LEAST_ARENA // 8, "arena_kind": "auto"}
        return Config.load(
            engine=f"doctor-{'a' if self.first else 'b'}",
            rank=0,
            world=1,
            model="",
            advertise=None,
            listen=self.listen.format(route=route),
            allow_peers=("unix:*", "tcp:*"),  # the settings name a service's peers, and not who is probed
            route=route,
            **small,
        )

    async def _direction(
        self, worker: kvxfer.Worker, route: str, cache: ProbeCache, host: str, reasons: list[str], *, outward: bool
    ) -> Finding:
        """A few transfers one way; both sides know what came of them."""
        came: list[dict[str, Any]] = []
        for number in range(_TRANSFERS):
            step = self._offer if outward else self._fetch
            came.append(await step(worker, f"{route}-{self.first is outward}-{number}", number, cache))
            if came[-1]["error"] or came[-1]["difference"]:
                break
        trusted = all(peer["trusted"] for peer in worker.describe()["peers"])
        operation: Literal["write", "read"] = "read" if route == "pull" else "write"
        mine: dict[str, Any] = {"lane": lane_of(self.lanes.text, operation), "reasons": reasons, "trusted": trusted}
        theirs = await self._exchange(mine)
        posts = mine if outward is not (route == "pull") else theirs
        name = f"{route} {' -> '.join(self.names if outward else reversed(self.names))}"
        facts: dict[str, Any] = {
            "lane": posts["lane"],
            "reasons": list(dict.fromkeys([*mine["reasons"], *theirs["reasons"]])),
            "trusted": trusted and theirs["trusted"],
            "gpu": self.device != "cpu",
            "tls": Machine().environment.get("UCX_TLS", ""),
        }
        return judge(name, route, came, facts, host)

    async def _offer(self, worker: kvxfer.Worker, request: str, number: int, cache: ProbeCache) -> dict[str, Any]:
        blocks = await asyncio.to_thread(cache.source, number)
        offer = worker.offer(request, blocks, tokens=cache.tokens, after=kvxfer.READY)
        came = await self._exchange({"ticket": worker.engine.ticket(request)})
        with suppress(KvxferError):
            await (offer.withdraw() if came["error"] else offer.released())
        return came

    async def _fetch(self, worker: kvxfer.Worker, _: str, number: int, cache: ProbeCache) -> dict[str, Any]:
        blocks = await asyncio.to_thread(cache.target, number)
        ticket = (await self.channel.hear())["ticket"]
        came: dict[str, Any] = {"error": "", "difference": "", "route": "", "why": "", "seconds": 0.0, "bytes": 0}
        began = time.perf_counter()
        try:
            result = await worker.fetch(
                ticket, blocks, tokens=range(cache.tokens), after=kvxfer.READY, timeout=_FETCH_SECONDS
            )
        except KvxferError as error:
            came["error"] = f"{type(error).__name__}: {words(error)}"
        else:
            came |= {"seconds": time.perf_counter() - began, "bytes": result.stats.bytes}
            came |= {"route": result.stats.route, "why": result.stats.why}
            came["difference"] = await asyncio.to_thread(cache.difference, number)
        self.channel.send(came)
        return came


def judge(name: str, route: str, came: list[dict[str, Any]], facts: dict[str, Any], host: str) -> Finding:
    """What a few transfers one way say.

    Args:
        name: Of the finding.
        route: Asked for.
        came: What each transfer came to, up to the first that went wrong.
        facts: `lane` that UCX took, `reasons` that were logged, whether both sides are `trusted`, whether it is a
            `gpu`, and what `tls` (UCX_TLS) is set to.
        host: Where the other side is, as it says.
    """
    last = came[-1]
    reasons = "; ".join(facts["reasons"])
    if last["difference"]:
        return fail(name, f"what arrived is wrong: {last['difference']}", _WRONG, **facts)
    if last["error"]:
        because = f" ({reasons})" if reasons else ""
        return fail(name, f"{last['error']}{because}", _BROKEN, **facts)
    timed = came[1:] or came
    speed = max(one["bytes"] / one["seconds"] for one in timed) / 1e9
    facts = {**facts, "gbps": speed, "route": last["route"], "bytes": last["bytes"]}
    went = f"{size(last['bytes'])} at {speed:.3g} GB/s"
    over = f" over {facts['lane']}" if facts["lane"] and last["route"] != "mapped" else ""
    if last["route"] != route:
        return _another(name, route, f"{last['route']} was taken instead, {went}{over}", reasons, facts, host)
    if is_tcp(facts["lane"]) and last["route"] != "mapped" and (facts["gpu"] or not elsewhere(host)):
        return warn(name, f"{went}{over}, which is the slowest lane there is", _slow(host, facts), **facts)
    return ok(name, f"{went}{over}, all bytes right", **facts)


_WRONG: Final = "do not use this route between these two; run again with KVXFER_INTEGRITY=full and report it"
_BROKEN: Final = "mend what the message names; NIXL_LOG_LEVEL=INFO UCX_LOG_LEVEL=info let the layers below say more"


def _another(name: str, route: str, seen: str, reasons: str, facts: dict[str, Any], host: str) -> Finding:
    """Another route was taken than was asked for."""
    apart = unlike(host)
    if not facts["trusted"] and route != "staged":
        return skipped(name, f"the two do not trust each other; {seen}", _UNKNOWN_PEER, **facts)
    if route == "mapped" and elsewhere(host):
        return skipped(name, f"memory of another host cannot be mapped; {seen}", **facts)
    because = "; ".join(filter(None, [apart if route == "mapped" else "", reasons]))
    remedy = (
        "mend what it names, or leave the choice to route=auto"
        if because
        else ("look at the checks of limits, GPUs and memory above; KVXFER_ROUTE and what peers allow decide it")
    )
    return warn(name, f"{seen}{': ' + because if because else ''}", remedy, **facts)


def _slow(host: str, facts: dict[str, Any]) -> str:
    if facts["tls"]:
        return f"UCX_TLS={facts['tls']} allows no better one: unset it"
    if elsewhere(host):
        return "UCX found no RDMA lane: look at the check of rdma on both sides, UCX_NET_DEVICES and UCX_TLS"
    if facts["gpu"]:
        return (
            "UCX found no cuda_ipc lane: UCX_TLS must name cuda_ipc and cuda_copy or be unset, the processes need a "
            "common PID and IPC namespace, and both GPUs peer access"
        )
    return (
        "UCX cannot reach into the other process: see the check of cross-memory attach, or UCX_TLS (cma, sysv, posix)"
    )


def _forbidden(route: str) -> bool:
    """Whether the settings in effect leave a route out, whatever else is wrong."""
    try:
        Config.load(route=route)
    except ConfigError:
        return True
    return False


def _not_opened(route: str, names: tuple[str, str], why: str, theirs: dict[str, Any], *, forbidden: bool) -> Finding:
    """A worker could not be opened on one side."""
    name = f"{route} {' <-> '.join(names)}"
    side, reason = (names[0], why) if why else (names[1], theirs["why"])
    if forbidden if why else theirs["forbidden"]:
        return skipped(name, f"the settings of {side} forbid it: {reason}", "change the setting if the route is wanted")
    return fail(name, f"no worker could be opened on {side}: {reason}", _BROKEN)
