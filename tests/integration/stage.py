"""Workers over the loopback network, with caches small enough to check every byte of them."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from inside import send_by

from kvxfer import Released, shared_empty
from kvxfer.config import Config
from kvxfer.fabric.loopback import LoopbackTransport
from kvxfer.geometry import CacheTensor
from kvxfer.geometry.axes import EVERY_TOKEN
from kvxfer.tickets import EngineCard
from kvxfer.worker import Worker

KEY = bytes(range(32))
CANARY = 0xA5
"""The bytes of guards."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SOON = {"revoke_timeout": 0.3}
"""For scenes in which the answer stays away, and nothing but the end of that time is waited for."""
DEFAULTS = {
    "arena_bytes": "64KiB",
    "chunk_bytes": "2KiB",
    "trust": "full",
    "revoke_timeout": 5.0,
    "drain_timeout": 2.0,
    "connect_timeout": 20.0,
    "peer_timeout": 20.0,
}


def bits(tensor):
    """Its elements as integers: two that are no number are the same then."""
    return tensor.view(INTEGERS[tensor.itemsize])


def guarded(cache):
    """Whether the guards are as they were."""
    return all(bool((guard.view(torch.uint8) == CANARY).all()) for guard in cache.guards)


class Cache:
    """Layers of K and V (or of latents, without heads) in CPU memory; every element has a value of its own.

    `logical` and `expect` speak of tokens in the order layer, kv, token, head, dim, whatever the layout.
    """

    _values = itertools.count(1)
    guards: Sequence[torch.Tensor] = ()
    """Memory before and after each layer, which nobody may touch: of those that were placed, see `far`."""

    def __init__(
        self,
        *,
        blocks=16,
        block_tokens=4,
        layers: Sequence[int] = range(2),
        heads: range = range(4),
        dim=8,
        layout="NHD",
        dtype=torch.int32,
        group="default",
        turns=EVERY_TOKEN,
        shared=False,
    ):
        self.block_tokens, self.turns = block_tokens, turns
        self.heads, self.layers, self.group, self.layout = heads, list(layers), group, layout
        shape, self.axes, self._order = {
            "NHD": ((2, blocks, block_tokens, len(heads), dim), "kv block token head dim", (0, 1, 2, 3, 4)),
            "HND": ((2, blocks, len(heads), block_tokens, dim), "kv block head token dim", (0, 1, 3, 2, 4)),
            "MLA": ((1, blocks, block_tokens, 1, dim), "block token dim", (0, 1, 2, 3, 4)),
            "state": ((1, blocks, 1, len(heads), dim), "block head dim", (0, 1, 2, 3, 4)),
        }[layout]
        count = torch.Size(shape).numel()
        empty = shared_empty if shared else torch.empty  # shared: what peers may map
        self.memory = {
            layer: empty(shape, dtype=dtype).copy_(
                (torch.arange(count) + next(self._values) * 1_000_003).to(dtype).reshape(shape)
            )
            for layer in self.layers
        }

    @property
    def tensors(self):
        headless = self.layout == "MLA"
        drop = {"MLA": lambda t: t[0, :, :, 0], "state": lambda t: t[0, :, 0]}.get(self.layout, lambda t: t)
        return [
            CacheTensor(
                drop(memory),
                self.axes,
                layers=[layer],
                heads=None if headless else self.heads,
                group=self.group,
                tokens=self.turns,
            )
            for layer, memory in self.memory.items()
        ]

    def view(self, layer):
        """(kv, block, token, head, dim), writing through."""
        return self.memory[layer].permute(self._order)

    def clone(self):
        return {layer: memory.clone() for layer, memory in self.memory.items()}

    def at(self, ids, tokens, first=0):
        """Block and slot of each token."""
        where = torch.tensor([t - first for t in tokens], dtype=torch.int64)
        return torch.tensor(ids)[where // self.block_tokens], where % self.block_tokens

    def logical(self, ids, tokens):
        block, slot = self.at(ids, tokens)
        return torch.stack([self.view(layer)[:, block, slot] for layer in self.layers])


class Copied:
    """What a fetch must make of a destination: taken before it, compared with after it, every byte of it.

    Of a placed destination (`far.place`) `cache` holds the contents before.
    """

    def __init__(self, cache, placed=None):
        self.cache, self.placed = cache, placed or cache
        self.expected = cache.clone()

    def bring(self, source, source_ids, ids, tokens, source_first=0, first=0, layers: Sequence[int] | None = None):
        """These tokens come from `source`, of these layers or all; only layers and heads that both have."""
        cache = self.cache
        block, slot = cache.at(ids, tokens, first)
        for layer in set(cache.layers) & set(source.layers if layers is None else layers):
            view = self.expected[layer].permute(cache._order)
            from_block, from_slot = source.at(source_ids, tokens, source_first)
            taken = source.view(layer)[:, from_block, from_slot]
            for head in set(cache.heads) & set(source.heads):
                found = self.made(taken[:, :, source.heads.index(head)], source, layer, head, view.dtype)
                view[:, block, slot, cache.heads.index(head)] = found
        return self

    def made(self, values, source, layer, head, dtype):
        return values.to(dtype)

    def has_come(self, layers: Sequence[int] | None = None):
        """Whether the destination is so already, or these layers of it are."""
        return all(torch.equal(self.placed.memory[one], self.expected[one]) for one in layers or self.cache.layers)

    def check(self):
        for layer, expected in self.expected.items():
            wrong = int((bits(self.placed.memory[layer].cpu()) != bits(expected)).sum())
            assert not wrong, f"layer {layer} differs in {wrong} elements"
        assert guarded(self.placed), "bytes before or after a layer were written"


class Gate:
    """An event of the caller's that fires when it is told to."""

    def __init__(self):
        self.fired = False

    def query(self):
        return self.fired


class Broken:
    """An event of the caller's that cannot be queried."""

    def query(self):
        raise RuntimeError("no such event")


class Stage:
    """Opens workers on one loopback network and closes them all at the end; in the time of a runtime if it has one."""

    def __init__(self, network, stack, settings=DEFAULTS, runtime: Any = None):
        self.network, self.stack, self.runtime = network, stack, runtime
        self.caches = {}  # what each worker was made with
        self._settings = settings

    def make(
        self, name, caches, *, tensors=None, groups=(), loop: Any = "caller", transport: Any = None, **config
    ) -> Worker:
        """A worker that is not open yet."""
        settings = {**self._settings, **config}
        settings.setdefault("engine", name.rstrip("0123456789"))
        worker = Worker(
            tensors if tensors is not None else [t for cache in listed(caches) for t in cache.tensors],
            Config(**settings),
            groups=groups,
            transport=transport or LoopbackTransport(name, self.network),
            runtime=self.runtime,
            loop=loop,
        )
        self.caches[worker] = caches
        return worker

    async def worker(self, name, caches, **options) -> Worker:
        worker = await self.make(name, caches, **options).__aenter__()
        self.stack.push_async_callback(worker.aclose, drain=False)
        return worker

    async def pair(self, source, target, *, prefill=None, decode=None, **config) -> tuple[Worker, Worker]:
        return (
            await self.worker("prefill", source, **{**config, **(prefill or {})}),
            await self.worker("decode", target, **{**config, **(decode or {})}),
        )

    async def engine(self, name, caches, *, join=True, **config):
        world = len(caches)
        ranks = [
            await self.worker(f"{name}{rank}", cache, engine=name, rank=rank, world=world, **config)
            for rank, cache in enumerate(caches)
        ]
        card = EngineCard.of([rank.card for rank in ranks])
        if join and world > 1:
            for rank in ranks:
                rank.join(card, key=KEY)
        return ranks, card

    def begin(self, prefill, decode, request="r", ids=(1, 2), into=(3, 4), tokens=range(8), *, offered=None, **options):
        """An offer, and a fetch of it that has begun. `offered` are options of the offer."""
        offer = prefill.offer(request, list(ids), **{"tokens": tokens.stop, **(offered or {})})
        return offer, decode.start_fetch(**{"ticket": offer.ticket, "blocks": list(into), "tokens": tokens, **options})

    async def in_flight(self, prefill, decode, to="*", **which):
        """The same once bytes for the worker `to` are on their way, which the network holds."""
        self.network.hold(to)
        begun = self.begin(prefill, decode, **which)
        await eventually(lambda: self.network.held(to))
        return begun

    async def bring(self, prefill, decode, request="r", ids=(1, 2), into=(3, 4), tokens=range(8), **options):
        """Offer and fetch, compare every byte, and have it released. The result, and what the offer says."""
        copied = Copied(self.caches[decode]).bring(self.caches[prefill], ids, into, tokens)
        offer, transfer = self.begin(prefill, decode, request, ids, into, tokens, **{"timeout": 20, **options})
        result = await transfer
        copied.check()
        ending = await offer.released()
        assert isinstance(ending, Released)
        return result, ending


def listed(caches):
    return caches if isinstance(caches, list | tuple) else [caches]


class Tap:
    """Every message that the workers of a test send, which it may change before."""

    def __init__(self, monkeypatch):
        self.sent, self.change = [], {}

        def tapped(send, messages):
            changed = [self.change.get(type(message), lambda same: same)(message) for message in messages]
            self.sent += changed
            return send(*changed)

        send_by(tapped, monkeypatch)

    def of(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]


async def raised(awaitable, error: type[BaseException]) -> Any:
    """What it raised, which must be of this type."""
    (outcome,) = await asyncio.gather(awaitable, return_exceptions=True)
    assert isinstance(outcome, error), outcome
    return outcome


@contextlib.contextmanager
def turns():
    """How many seconds each turn of the loop takes: of this thread alone, since other processes do not count."""
    took: list[float] = []

    async def watch():
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            took.append(time.thread_time() - began)

    watching = asyncio.create_task(watch())
    try:
        yield took
    finally:
        watching.cancel()


def frames(worker, kind):
    """How many of a kind it has received."""
    return worker.describe()["metrics"]["frames_received"].get(kind, 0)


async def eventually(condition, timeout=30.0):
    """Wait until a condition holds that no event tells of; the time-out is for what never comes."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - nobody sets an event for it
            await asyncio.sleep(0.001)


def is_quiet(worker):
    """Nothing under way, nothing held: the arena is whole and custody empty."""
    seen = worker.describe()
    shares = (seen["arena"]["send"], seen["arena"]["receive"])
    return (
        all(share.free_bytes == share.capacity_bytes and share.waiting_requests == 0 for share in shares)
        and not seen["custody"].holders
        and not seen["written"]
        and seen["sending"] == seen["receiving"] == seen["in_doubt"] == 0
    )


async def quiet(*workers):
    try:
        await eventually(lambda: all(is_quiet(worker) for worker in workers))
    except TimeoutError:
        raise AssertionError([worker.describe() for worker in workers if not is_quiet(worker)]) from None


def quarantined(worker, side):
    """Bytes of a side of the arena ("send", "receive") that are in doubt."""
    return worker.describe()["arena"][side].quarantined_bytes


def extents(worker, side, state=None):
    """What of a side of the arena somebody holds; in this state, if one is asked for."""
    return [one for one in worker.describe()["arena"][side].extents if state in {None, one.state}]


def written(worker):
    """Bytes of its blocks that peers of a worker may be writing in place."""
    return sum(worker.describe()["written"].values())


def handshakes(worker):
    """How many of its streams have not completed theirs."""
    return worker.describe()["handshakes"]


def awake(worker):
    """For how many reasons it makes progress though nothing of its own is under way."""
    return worker.describe()["fabric"]["awake"]
