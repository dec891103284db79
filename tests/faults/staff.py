"""What an actor does: opens workers over NIXL, offers, fetches, compares every byte, and counts what it has left."""

import asyncio
import contextlib
import ctypes
import functools
import gc
import itertools
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flows
import inside
import numpy as np
import torch
from actors import Halts
from far import place
from stage import KEY, Cache
from starving import Starving
from steps import STEPS

from kvxfer import BlocksError, Code, Config, KvxferError, MemoryInDoubt, TransferFailedError, Worker
from kvxfer.decode.receiver import Grants, Receiver
from kvxfer.fabric import calls
from kvxfer.fabric.nixl import NixlTransport
from kvxfer.tickets import EngineCard, Issuer

BLOCK_TOKENS = 16
BLOCKS = 16
LAYERS = range(2)
TOKENS = 6 * BLOCK_TOKENS - 3
MAIN = [9, 2, 12, 5, 7, 0]
"""Blocks of the transfer that is struck, on both sides."""
OTHER = [3, 10, 1]
"""Blocks of the transfers beside it."""
CANARY = 0x5A5A5A5A
_SETTLE_SECONDS = 20.0
_LINGER_SECONDS = 5.0
"""A thread that has told its result lets go of it a moment later, whenever it gets the time."""
_UCX = "fd /memfd:kvxfer-ucx"


def cache(seed: int, layout: str, blocks: int = BLOCKS) -> Cache:
    """Every process makes the same of the same seed."""
    kept, Cache._values = Cache._values, itertools.count(1000 * seed)
    try:
        return Cache(blocks=blocks, block_tokens=BLOCK_TOKENS, layers=LAYERS, dim=16, layout=layout)
    finally:
        Cache._values = kept


@dataclass
class Rank:
    """One open worker and its memory."""

    worker: Worker
    placed: Any
    mirror: Cache
    offers: dict[str, Any] = field(default_factory=dict)
    fetches: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    traffic: "asyncio.Task[None] | None" = None
    moved: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    stopping: bool = False
    taken: list[Any] = field(default_factory=list)


class Ranks:
    """The workers of this process, by name."""

    def __init__(self, halts: Halts) -> None:
        self._halts = halts
        self._ranks: dict[str, Rank] = {}
        self._before: Counter[str] = Counter()
        self._leaked = 0
        self._in_doubt = False
        self._flows: dict[str, asyncio.Task[None]] = {}
        self._takers: dict[tuple[str, tuple[int, int]], flows.Taker] = {}
        self._given, self._taken = flows.Tally(), flows.Tally()
        self._starving = Starving()
        self._starving.start()
        torch.set_num_threads(1)

    def starved(self, stalled: float) -> bool:
        """See `Starving.told`."""
        return self._starving.told(stalled)

    # --- steps

    def halt(self, side: str, name: str) -> None:
        """Stand still at this step when it is next taken."""

        def here() -> None:
            if self._halts.halt(name) == "cut":
                self.cut()

        STEPS[side, name].hook(here)
        self._halts.armed.add(name)

    def cut(self) -> None:
        """Shut down every control stream of this process, as a network would; from any thread."""
        for rank in self._ranks.values():
            inside.shut_down(rank.worker)

    # --- workers

    async def open(self, name: str, *, seed: int, layout: str, blocks: int = BLOCKS, **config: Any) -> dict[str, Any]:
        """Open a worker; its engine's card. Everybody may make its tickets."""
        if not self._ranks:
            _meet_gpus()
            self._before, self._leaked = held(), len(calls._LEAKED)
        mirror = cache(seed, layout, blocks)
        placed = place(mirror, "cpu")
        worker = Worker(placed.tensors, Config(engine=name, **config))
        await worker.__aenter__()
        card = EngineCard.of([worker.card])
        worker.join(card, key=KEY)
        self._ranks[name] = Rank(worker, placed, mirror)
        return card.to_dict()

    async def close(self, name: str) -> dict[str, int]:
        """Close it and forget it; when it was the last one, what is held now and was not before the first."""
        rank = self._ranks.pop(name)
        self._takers = {key: taker for key, taker in self._takers.items() if key[0] != name}  # they know the worker
        self._in_doubt = self._in_doubt or any(self._doubts(rank).values())
        await rank.worker.aclose(drain=False)
        del rank
        if self._ranks:
            return {}
        until = time.monotonic() + _LINGER_SECONDS
        while (left := self._left()) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._in_doubt = False
        return left

    def _left(self) -> dict[str, int]:
        """What is held that was not before the first worker."""
        gc.collect()
        left, open_still = held() - self._before, len(calls._LEAKED) > self._leaked
        # memory that was in doubt is kept to the end of the process, and an agent whose own post did not end
        kept = "fd" if open_still else "fd /memfd:" if self._in_doubt else "nothing"
        return {what: number for what, number in left.items() if not what.startswith(kept)}

    def _doubts(self, rank: Rank) -> dict[str, int]:
        seen = rank.worker.describe()
        shares = seen["arena"]["send"], seen["arena"]["receive"]
        return {
            "quarantined": sum(share.quarantined_bytes for share in shares),
            "custody": seen["custody"].doubtful_blocks,
            "receiving": seen["in_doubt"],
        }

    def shared(self) -> list[str]:
        """Files of shared memory that this process has open."""
        return [what.removeprefix("fd ") for what in held() if what.startswith("fd /dev/shm/")]

    def state(self, name: str) -> dict[str, Any]:
        """What is under way, held, and in doubt; and whether every byte of the arena is accounted for."""
        rank = self._ranks[name]
        seen = rank.worker.describe()
        shares = seen["arena"]["send"], seen["arena"]["receive"]
        for share in shares:
            counted = share.free_bytes + share.reserved_bytes + share.writing_bytes
            assert counted + share.quarantined_bytes == share.capacity_bytes, share
            assert all(bool(row.reason) is (row.state.value == "quarantined") for row in share.extents), share
        busy = sum(s.reserved_bytes + s.writing_bytes + s.waiting_requests for s in shares)
        under_way = seen["receiving"] - seen["in_doubt"]
        return {
            "busy": busy + seen["sending"] + under_way + seen["custody"].held_blocks,
            **self._doubts(rank),
            "rebuilt": seen["agent"]["rebuilt"],
            "reasons": [row.reason for share in shares for row in share.extents if row.reason],
        }

    async def quiet(self, name: str, *, doubts: bool, within: float) -> dict[str, Any]:
        """Wait until nothing is under way (and, if asked, nothing in doubt); the state then, or after `within`."""
        until = time.monotonic() + within
        while True:
            state = self.state(name)
            calm = not state["busy"] and not (doubts and (state["quarantined"] or state["custody"]))
            if calm or time.monotonic() > until:
                return state
            await asyncio.sleep(0.005)

    # --- the transfer that is struck

    def offer(self, name: str, request: str, *, streamed: bool = False) -> None:
        """Offer the main blocks."""
        offer = self._ranks[name].worker.offer(request, MAIN, tokens=TOKENS, streaming=streamed)
        self._ranks[name].offers[request] = offer

    def ready(self, name: str, request: str, layer: int) -> None:
        """One more layer of a streamed offer; with the last one it is finished."""
        offer = self._ranks[name].offers[request]
        offer.ready(layers=[layer])
        if layer == LAYERS[-1]:
            offer.finish()

    async def released(self, name: str, request: str) -> tuple[str, float, bool, bool]:
        """How it ended, when that was heard, whether nobody reads the blocks now, and whether they were refused."""
        rank, refused = self._ranks[name], False
        try:
            ending = type(await rank.offers[request].released()).__name__
        except KvxferError as error:
            refused = isinstance(error, MemoryInDoubt) and await self.refuses(name)  # a moment later it may have ended
            rank.errors[request] = error
            ending = type(error).__name__
        return ending, time.monotonic(), request not in rank.errors, refused

    async def fetch(
        self,
        name: str,
        card: dict[str, Any],
        request: str,
        timeout: float | None = None,
        *,
        late: bool = False,
        cancel_after: float | None = None,
    ) -> dict[str, Any]:
        """Fetch it into the main blocks; what became of that, and when it was heard.

        `late`: they may be written only when that has been asked for a second time.
        """
        rank = self._ranks[name]
        ticket = Issuer(EngineCard.from_dict(card), KEY).ticket(request)
        error: BaseException | None = None
        refused = False
        try:
            after = _Late() if late else None
            transfer = rank.worker.start_fetch(ticket, MAIN, tokens=range(TOKENS), after=after, timeout=timeout)
            rank.fetches[request] = transfer
            if cancel_after is not None:
                asyncio.get_running_loop().call_later(cancel_after, transfer.cancel)
            await transfer
        except asyncio.CancelledError as raised:  # as it was told to be
            error = raised
        except KvxferError as raised:
            refused = isinstance(raised, MemoryInDoubt) and await self.refuses(name)  # a moment later it may have ended
            error = raised
            rank.errors[request] = raised
        return {
            "ok": error is None,
            "refused": refused,
            "error": "" if error is None else f"{type(error).__name__}: {error}",
            "heard": time.monotonic(),
            "safe": not isinstance(error, MemoryInDoubt),
            "retry_after": (isinstance(error, KvxferError) and error.retry_after) or 0.0,
        }

    async def layer_landed(self, name: str, request: str, layer: int) -> None:
        """Wait until a layer of a fetch has landed."""
        await self._ranks[name].fetches[request].layers(layer, layer + 1)

    async def settled(self, name: str, request: str, within: float) -> bool:
        """Wait until blocks that were in doubt are not any more; False if they still are then."""
        error = self._ranks[name].errors[request]
        assert isinstance(error, MemoryInDoubt)
        try:
            async with asyncio.timeout(within):
                await error.settled()
        except TimeoutError:
            return False
        return True

    async def refuses(self, name: str) -> bool:
        """Whether the main blocks are refused in a new offer, because they are in doubt."""
        worker = self._ranks[name].worker
        try:
            offer = worker.offer(f"probe-{time.monotonic_ns()}", MAIN, tokens=TOKENS)
        except BlocksError:
            return True
        await offer.withdraw()
        return False

    # --- bytes

    def reuse(self, name: str) -> None:
        """Give the main blocks to somebody else, who writes a canary."""
        rank = self._ranks[name]
        for layer in LAYERS:
            rank.placed.view(layer)[:, MAIN] = CANARY

    def restore(self, name: str) -> None:
        """The main blocks as they were at first."""
        rank = self._ranks[name]
        for layer in LAYERS:
            rank.placed.view(layer)[:, MAIN] = rank.mirror.view(layer)[:, MAIN]

    def harm(self) -> list[str]:
        """What was seen that must not be, whatever else is under way."""
        return [problem for rank in self._ranks.values() for problem in [*rank.wrong, *_overrun(rank)]]

    def wrong(self, name: str, main: str, source: int | None = None) -> list[str]:
        """What is not as it should be.

        Args:
            name: Whose memory.
            main: The main blocks hold: `fetched` what `source` has, `kept` what they held at first, `canary`, or
                `partly` what was fetched, what was there, token by token.
            source: Seed of the cache that was fetched from.
        """
        rank = self._ranks[name]
        problems = list(rank.wrong)
        given = None if source is None else cache(source, "NHD")
        for layer in LAYERS:
            found, expected = rank.placed.view(layer).clone(), rank.mirror.view(layer).clone()
            if rank.moved or rank.traffic is not None:
                expected[:, OTHER] = found[:, OTHER]  # compared transfer by transfer
            if main == "canary":
                expected[:, MAIN] = CANARY
            elif given is not None and main in ("fetched", "partly"):
                block, slot = rank.mirror.at(MAIN, range(TOKENS))
                theirs = given.view(layer)[:, block, slot]
                mine = found[:, block, slot]
                if main == "fetched":
                    expected[:, block, slot] = theirs
                else:
                    old = expected[:, block, slot]
                    odd = (mine != theirs) & (mine != old) & (mine != CANARY)
                    if odd.any():
                        problems.append(f"layer {layer}: {int(odd.sum())} elements are neither old nor new")
                    expected[:, block, slot] = mine
            if not torch.equal(found, expected):
                blocks = sorted(set((found != expected).nonzero()[:, 1].tolist()))
                problems.append(f"layer {layer} differs in {int((found != expected).sum())} elements, blocks {blocks}")
        return problems + _overrun(rank)

    def hold_interpreter(self, seconds: float) -> None:
        """A call into C that does not let go of the interpreter: no thread of this process runs Python meanwhile."""
        ctypes.PyDLL(None).usleep(ctypes.c_uint(round(seconds * 1e6)))

    def fill_arena(self, name: str) -> None:
        """Take all staging memory that is free for peers, and write a canary."""
        rank = self._ranks[name]
        for number in itertools.count():  # a peer may hold a part of it only
            gap = rank.worker.describe()["arena"]["receive"].largest_gap_bytes
            extent = None
            while gap and extent is None:
                extent = inside.take_if_free(rank.worker, "receive", gap, f"somebody {number}")
                gap //= 2
            if extent is None:
                break
            rank.taken.append(extent)
            _bytes_at(extent).fill(CANARY & 0xFF)

    def stay_awake(self, name: str) -> None:
        """Let whatever a peer has under way to this worker land, until it is closed."""
        inside.mover(self._ranks[name].worker).hold_awake()

    def arena_intact(self, name: str) -> bool:
        """Whether what was taken holds the canary still."""
        taken = self._ranks[name].taken
        assert taken
        return all(bool((_bytes_at(extent) == CANARY & 0xFF).all()) for extent in taken)

    def empty_arena(self, name: str) -> None:
        """Give it back."""
        rank = self._ranks[name]
        while rank.taken:
            rank.taken.pop().release()

    def forget_doubts(self) -> None:
        """Break the product in this process: memory of a silent peer is given back at once."""
        setattr(Grants, "quarantine", lambda holder, _: holder.release())  # noqa: B010
        setattr(Receiver, "in_doubt", False)  # noqa: B010 - it is a property

    # --- transfers beside it

    def serve(self, name: str, prefix: str) -> None:
        """Keep something on offer until told to stop."""
        rank = self._ranks[name]
        rank.stopping = False

        async def run() -> None:
            for number in itertools.count():
                offer = rank.worker.offer(f"{prefix}{number}", OTHER, tokens=len(OTHER) * BLOCK_TOKENS)
                rank.offers["traffic"] = offer
                try:
                    ending = await offer.released()
                    if type(ending).__name__ != "Released" and not rank.stopping:
                        rank.failed.append(f"offer {prefix}{number}: {ending}")
                except KvxferError as error:
                    rank.failed.append(f"offer {prefix}{number}: {error!r}")
                if rank.stopping:
                    return
                rank.moved += 1
                rank.more.set()

        rank.traffic = asyncio.create_task(run())

    def keep_fetching(self, name: str, card: dict[str, Any], prefix: str, source: int, *, may_lapse: int = 0) -> None:
        """Fetch what somebody keeps on offer, and compare it, until told to stop.

        `may_lapse`: how many are fetched again as a lease ran out before the write; starved cores outlast short ones.
        """
        rank, given = self._ranks[name], cache(source, "NHD")
        issuer = Issuer(EngineCard.from_dict(card), KEY)
        tokens = range(len(OTHER) * BLOCK_TOKENS)
        rank.stopping = False
        lapses = 0

        async def fetched(number: int) -> None:
            nonlocal lapses
            while True:
                try:
                    await rank.worker.fetch(issuer.ticket(f"{prefix}{number}"), OTHER, tokens=tokens, timeout=30)
                except TransferFailedError as error:
                    if error.code is not Code.TIMEOUT or lapses == may_lapse:
                        raise
                    lapses += 1
                else:
                    return

        async def run() -> None:
            for number in itertools.count():
                if rank.stopping:
                    return
                for layer in LAYERS:
                    rank.placed.view(layer)[:, OTHER] = -number
                try:
                    await fetched(number)
                except KvxferError as error:
                    rank.failed.append(f"fetch {prefix}{number}: {error!r}")
                    return
                if any(
                    not torch.equal(rank.placed.view(layer)[:, OTHER], given.view(layer)[:, OTHER]) for layer in LAYERS
                ):
                    rank.wrong.append(f"fetch {prefix}{number} brought other bytes")
                rank.moved += 1
                rank.more.set()
                await asyncio.sleep(0.01)  # the other processes share these cores

        rank.traffic = asyncio.create_task(run())

    # --- streams of transfers

    def give(self, name: str, flow: str) -> None:
        """Begin the prefill end of one."""
        rank = self._ranks[name]
        self._flows[flow] = asyncio.create_task(flows.give(rank.worker, rank.mirror, flow, self._given))

    def take(
        self, name: str, card: dict[str, Any], flow: str, *, seed: int, blocks: int, pool: tuple[int, int]
    ) -> None:
        """Begin the decode end of one, into blocks of a pool."""
        rank, key = self._ranks[name], (name, pool)
        if key not in self._takers:
            given = cache(seed, "NHD", blocks)
            taker = flows.Taker(rank.worker, rank.placed, given, range(*pool), self._taken, self.cut)
            self._takers[key] = taker
        self._flows[flow] = asyncio.create_task(self._takers[key].take(card, flow))

    async def end_flow(self, flow: str) -> None:
        """End one, if it runs."""
        task = self._flows.pop(flow, None)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def tally(self) -> dict[str, Any]:
        """What became of them, and what this process holds."""
        return {
            "given": self._given,
            "taken": self._taken,
            "resident_bytes": _resident_bytes(),
            "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "threads": sum(1 for _ in Path("/proc/self/task").iterdir()),
            "stalled": [flow for flow, task in self._flows.items() if task.done()],
        }

    # --- transfers beside it, once more

    async def moved(self, name: str, more: int) -> None:
        """Wait until it has moved so many more."""
        rank = self._ranks[name]
        wanted = rank.moved + more
        async with asyncio.timeout(_SETTLE_SECONDS):
            while rank.moved < wanted:
                if rank.traffic is not None and rank.traffic.done():
                    raise AssertionError(f"the transfers beside it have ended: {rank.failed}")
                rank.more.clear()
                another = asyncio.ensure_future(rank.more.wait())
                await asyncio.wait({another, rank.traffic or another}, return_when=asyncio.FIRST_COMPLETED)
                another.cancel()

    async def stop_traffic(self, name: str) -> list[str]:
        """Stop it; what failed."""
        rank = self._ranks[name]
        rank.stopping = True
        if rank.traffic is not None:
            if "traffic" in rank.offers:
                await asyncio.wait({rank.traffic}, timeout=0.2)
                with contextlib.suppress(KvxferError):
                    await rank.offers.pop("traffic").withdraw()
            async with asyncio.timeout(_SETTLE_SECONDS):
                await rank.traffic
        return rank.failed


def _overrun(rank: Rank) -> list[str]:
    intact = all(bool((guard.view(torch.uint8) == 0xA5).all()) for guard in rank.placed.guards)
    return [] if intact else ["bytes before or after a layer were written"]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _bytes_at(extent: Any) -> Any:
    return np.frombuffer((ctypes.c_uint8 * extent.nbytes).from_address(extent.address), np.uint8)


class _Late:
    """An event that has not fired when it is first looked at."""

    _fired = False

    def query(self) -> bool:
        fired, self._fired = self._fired, True
        return fired


@functools.cache
def _meet_gpus() -> None:
    """Make an agent and drop it: where there is a GPU, its driver opens files for the first one and keeps them."""
    if Path("/dev/nvidiactl").exists():
        first = NixlTransport("first")
        first.setup()
        first.close()


def held() -> Counter[str]:
    """Threads, file descriptors and socket files that this process has now."""
    found: Counter[str] = Counter()
    for thread in threading.enumerate():
        if not thread.name.startswith("AnyIO"):  # of the loop's pool: they serve whoever comes next, and end with it
            found[f"thread {thread.name}"] += 1
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            kind, _, rest = target.partition(":")
            found[f"fd {kind}" if rest and kind in ("socket", "pipe") else f"fd {target.partition(' (')[0]}"] += 1
    found[_UCX] -= min(found[_UCX], 2)  # this process's end and UCX's, from the first agent to the end of the process
    for path in Path(os.environ.get("TMPDIR", "/tmp")).rglob("*"):
        found[f"file {path.name}" if path.is_dir() else f"file {path.parent.name}/{path.name}"] += 1
    return found
