"""Every await of the public API, cancelled at each point at which it is suspended, in each of the ways that there are.

The list of awaits is found by inspection, and one without a scene here fails. A scene is played in virtual time: once
for each iteration of the loop until the call ends by itself. After each, whichever way it went, the memory that the
call was about is the caller's, or the error says that it is not; late bytes are let go and must not land.
"""
# the private state of workers that are open
# pyright: reportOptionalMemberAccess=false

import asyncio
import contextlib
import gc
import os
import random
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import pytest
from awaits import WAYS, Outcome, every_await, once
from stage import DEFAULTS, Cache, Copied, Stage, quiet

import kvxfer.testing
from kvxfer import Expired, KvxferError, MemoryInDoubt, Released, Withdrawn, Worker
from kvxfer.testing import LoopbackNetwork, simulate

TOKENS = range(8)
BLOCKS = [3, 4]
TURN_SECONDS = 20e-6
"""Virtual seconds of a loop iteration: about what a hop between a worker's services takes."""
SETTLE_SECONDS = 0.1
MAX_TURNS = 2000
"""More than any of these calls takes."""
CANARY = -1_234_567


class World:
    """A prefill and a decode worker, and what one scene does with them.

    In virtual time they run on the loop of the test; without a runtime on loops of their own, in real time.
    """

    def __init__(self, runtime: Any, route: str, stack: contextlib.AsyncExitStack, *, late: bool) -> None:
        self.route, self.late, self.network = route, late, LoopbackNetwork()
        settings = {**DEFAULTS, "revoke_timeout": 0.05, "no_progress_timeout": 300.0, "route": route}
        self.stage = Stage(self.network, stack, settings, runtime)
        self.options = {"loop": "caller" if runtime else "own"}
        self.source, self.target = (Cache(shared=route == "mapped") for _ in range(2))
        self.prefill: Worker
        self.decode: Worker
        self.offer: Any = None  # what the prefill worker offers as "r"
        self.left: list[str] = []  # agents that outlive their workers

    async def open(self) -> None:
        self.prefill, self.decode = await self.stage.pair(self.source, self.target, **self.options)

    def make(self) -> Worker:
        """Another decode worker."""
        return self.stage.make(f"decode{len(self.stage.caches)}", self.target, **self.options)

    def offered(self, **options: Any) -> Any:
        self.offer = self.prefill.offer("r", [1, 2], tokens=8, **options)
        return self.offer

    def start(self) -> Any:
        return self.decode.start_fetch(self.prefill.engine.ticket("r"), BLOCKS, tokens=TOKENS)

    def stall(self) -> None:
        """Bytes stay in flight until `land`."""
        if self.late:
            self.network.hold("*")

    def begun(self) -> Any:
        """A fetch that has begun, of which bytes are stalled."""
        self.offered()
        self.stall()
        return self.start()

    async def land(self) -> None:
        """Let go what was held: it lands wherever it may still land."""
        self.network.release("*")
        await asyncio.sleep(SETTLE_SECONDS)

    async def withdrawn(self) -> None:
        """The offer is over, and nobody reads its blocks."""
        try:
            await self.offer.withdraw()
        except MemoryInDoubt as doubt:
            await asyncio.wait_for(doubt.settled(), 5)

    async def given_back(self, error: BaseException | None) -> None:
        """The blocks of the fetch are the caller's, unless the error says otherwise: nothing lands there any more."""
        if isinstance(error, MemoryInDoubt):
            assert self.route != "staged", "only our own copies write the blocks"
            assert isinstance(error.__cause__, asyncio.CancelledError | TimeoutError)
            await self.land()
            await asyncio.wait_for(error.settled(), SETTLE_SECONDS)
        for memory in self.target.memory.values():
            memory.fill_(CANARY)
        await self.land()
        for memory in self.target.memory.values():
            assert bool((memory == CANARY).all()), "late bytes landed in blocks that were the caller's again"

    async def works(self) -> None:
        """What comes later succeeds, and nothing is left of what was."""
        await quiet(self.prefill, self.decode)
        await self.stage.bring(self.prefill, self.decode, "later", timeout=5)
        await quiet(self.prefill, self.decode)


# --- scenes: each prepares, and gives what is called and what must hold after it

Checks = Callable[[Outcome], Awaitable[None]]
Scene = Callable[[World], Awaitable[tuple[Callable[[], Awaitable[Any]], Checks]]]
SCENES: dict[tuple[str, str], Scene] = {}


def scene(*names: str) -> Callable[[Scene], Scene]:
    """It is one for these members of the API, each as `Class.member`."""

    def note(played: Scene) -> Scene:
        for name in names:
            cls, member = name.split(".")
            SCENES[cls, member] = played
        return played

    return note


async def fetched(world: World, outcome: Outcome) -> None:
    """After a fetch that was cancelled."""
    await world.given_back(outcome.error)
    await world.withdrawn()
    await world.works()


@scene("Worker.fetch", "OwnLoopWorker.fetch")
async def fetch(world: World):
    world.offered()
    world.stall()
    ticket = world.prefill.engine.ticket("r")
    return lambda: world.decode.fetch(ticket, BLOCKS, tokens=TOKENS), lambda outcome: fetched(world, outcome)


@scene("Transfer.__await__", "OwnLoopTransfer.__await__")
async def transfer(world: World):
    transfer = world.begun()

    async def call():
        return await transfer

    async def check(outcome):
        if outcome.error is not None and not transfer.done:  # it was cancelled before it was awaited
            transfer.cancel()
            await asyncio.wait({transfer.outcome})
            outcome = Outcome(outcome.late, transfer.outcome.exception())
        await fetched(world, outcome)

    return call, check


async def lands(world: World, transfer: Any) -> None:
    """The fetch goes on whatever became of the call, and brings every byte."""
    copied = Copied(world.target).bring(world.source, [1, 2], BLOCKS, TOKENS)
    await world.land()
    await asyncio.wait_for(transfer, 5)
    copied.check()


async def arrives(world: World, transfer: Any) -> None:
    """The same, and what comes later works."""
    await lands(world, transfer)
    assert isinstance(await world.offer.released(), Released)
    await world.works()


@scene("Transfer.layers", "OwnLoopTransfer.layers")
async def layers(world: World):
    transfer = await world.begun().__aenter__()
    return lambda: transfer.layers(0, 2), lambda _: arrives(world, transfer)


@scene("Transfer.__aenter__", "OwnLoopTransfer.__aenter__")
async def use(world: World):
    """A whole block, cancelled in its body and as it is left."""
    world.offered()
    world.stall()

    async def call():
        async with world.start() as transfer:
            await transfer.layers(0, 2)

    return call, lambda outcome: fetched(world, outcome)


@scene("Transfer.__aexit__", "OwnLoopTransfer.__aexit__")
async def leave_by_an_error(world: World):
    world.offered()
    world.stall()

    async def call():
        with contextlib.suppress(LookupError):
            async with world.start():
                raise LookupError

    return call, lambda outcome: fetched(world, outcome)


@scene("Transfer.outcome", "OwnLoopTransfer.outcome")
async def outcome(world: World):
    transfer = world.begun()
    return lambda: transfer.outcome, lambda _: arrives(world, transfer)


@scene("Offer.released", "OwnLoopOffer.released")
async def released(world: World):
    transfer = world.begun()
    return world.offer.released, lambda _: arrives(world, transfer)


@scene("Offer.wait_end", "OwnLoopOffer.wait_end")
async def wait_end(world: World):
    transfer = world.begun()
    return world.offer.wait_end, lambda _: arrives(world, transfer)


@scene("Offer.withdraw", "OwnLoopOffer.withdraw")
async def withdraw(world: World):
    transfer = world.begun()
    await asyncio.sleep(0.01)  # it is under way, or done

    async def check(outcome):
        await world.land()
        with contextlib.suppress(KvxferError):
            await asyncio.wait_for(transfer, 5)
        assert isinstance(await asyncio.wait_for(world.offer.released(), 5), Withdrawn | Released)
        await world.works()

    return world.offer.withdraw, check


@scene("MemoryInDoubtError.settled")
async def settled(world: World):
    world.offered()
    world.network.hold("*")
    transfer = world.start()
    await asyncio.sleep(0.01)
    transfer.cancel()
    doubt: MemoryInDoubt | None = None
    try:
        await transfer
    except MemoryInDoubt as error:
        doubt = error
    except asyncio.CancelledError:
        assert world.route in {"staged", "mapped"}

    async def call():
        if not world.late:  # else the bytes stay where they are for as long as it is waited for
            asyncio.get_running_loop().call_later(10 * TURN_SECONDS, world.network.release, "*")
        if doubt is not None:
            await doubt.settled()

    async def check(outcome):
        if doubt is not None and world.late:
            assert outcome.error is not None, "it was settled though the bytes were still to land"
        await world.given_back(doubt)
        await world.withdrawn()
        await world.works()

    return call, check


@scene("Worker.decline", "OwnLoopWorker.decline")
async def decline(world: World):
    world.offered()
    claim = world.decode.claim(world.prefill.engine.ticket("r"))

    async def check(outcome):
        claim.close()
        await world.offer.withdraw()
        assert isinstance(await world.offer.released(), Withdrawn | Released | Expired)
        await world.works()

    return lambda: world.decode.decline(world.prefill.engine.ticket("r")), check


@scene("Worker.drain", "OwnLoopWorker.drain")
async def drain(world: World):
    transfer = world.begun()
    await asyncio.sleep(0.01)
    return world.decode.drain, lambda _: lands(world, transfer)


async def closing(world: World, call: Callable[[], Awaitable[Any]]):
    transfer = world.begun()
    await asyncio.sleep(0.01)

    async def check(outcome):
        if outcome.error is not None and "closed" not in repr(world.decode):
            await world.decode.aclose(drain=False)  # it was cancelled before it began
        assert "closed" in repr(world.decode)
        assert transfer.done
        error = transfer.outcome.exception()
        left = [name for name in world.network.agents if name.startswith("decode")]
        if isinstance(error, MemoryInDoubt):
            await world.land()
            world.left = left  # its own read is stuck: left open, with the memory, for the life of the process
            if world.route == "pull":  # and nobody is left to say when that read has ended
                with pytest.raises(MemoryInDoubt):
                    await world.offer.withdraw()
                return
        else:
            assert not left, "the call has ended, and the worker is not closed"
            await world.given_back(error)
        world.decode = world.make()
        async with world.decode:
            await world.withdrawn()
            await world.works()

    return call, check


@scene("Worker.aclose", "OwnLoopWorker.aclose")
async def aclose(world: World):
    return await closing(world, world.decode.aclose)


@scene("Worker.__aexit__", "OwnLoopWorker.__aexit__")
async def leave(world: World):
    worker = world.decode
    return await closing(world, lambda: worker.__aexit__(None, None, None))


@scene("Worker.__aenter__", "OwnLoopWorker.__aenter__")
async def enter(world: World):
    await world.decode.aclose()
    worker = world.decode = world.make()

    async def check(outcome):
        if outcome.error is None:
            await worker.aclose()
        assert " open" not in repr(worker)
        assert not [name for name in world.network.agents if name.startswith("decode")]
        await worker.aclose()
        world.decode = world.make()
        async with world.decode:
            await world.works()

    return worker.__aenter__, check


# --- playing them


async def perform(played: Scene, way: Any, turn: int, runtime: Any, route: str, *, late: bool) -> Outcome:
    """One scene, cancelled after `turn` iterations, and all that must hold after it."""
    async with contextlib.AsyncExitStack() as stack:
        world = World(runtime, route, stack, late=late)
        await world.open()
        stack.callback(world.network.release, "*")
        call, check = await played(world)
        outcome: Outcome = await way(call, turn, TURN_SECONDS)
        let_through = asyncio.CancelledError | TimeoutError | MemoryInDoubt
        assert outcome.error is None or isinstance(outcome.error, let_through), repr(outcome.error)
        await check(outcome)
    assert world.network.agents == world.left
    return outcome


def play(played: Scene, way: Any, turn: int, route: str, *, late: bool, own: bool = False) -> Outcome:
    """The same in a loop of its own, of which no task and no complaint may be left."""
    complaints: list[Any] = []

    async def scenario(runtime: Any = None) -> Outcome:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        before = asyncio.all_tasks()
        outcome = await perform(played, way, turn, runtime, route, late=late)
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - before
        assert not left, left
        return outcome

    outcome = asyncio.run(scenario()) if own else simulate(scenario, seed=turn, limit=600)
    gc.collect(0)  # what was never retrieved complains when it is collected
    assert not complaints, complaints
    return outcome


@pytest.fixture(autouse=True)
def longer_turns(monkeypatch):
    monkeypatch.setattr(kvxfer.testing, "_STEP_SECONDS", TURN_SECONDS)


def name_of(value: Any) -> Any:
    return ".".join(value) if isinstance(value, tuple) else getattr(value, "__name__", value)


HERE = sorted(key for key in SCENES if not key[0].startswith("OwnLoop"))
THERE = sorted(key for key in SCENES if key[0].startswith("OwnLoop"))
EVERYTHING = os.environ.get("CANCELLATIONS") == "all"
ROUTES = ["staged", "direct", "pull", "mapped"]


def routes_for(*what: Any) -> list[str]:
    """All, or in a quick run one that differs from case to case."""
    return ROUTES if EVERYTHING else [random.Random(str(list(map(name_of, what)))).choice(ROUTES)]


def test_every_await_has_a_scene():
    assert set(SCENES) == every_await()


@pytest.mark.parametrize("key", HERE, ids=name_of)
def test_cancelled_at_every_point(key):
    for route in routes_for(key):
        turn, outcome = 0, Outcome(late=False, error=None)
        while not outcome.late:
            outcome = play(SCENES[key], once, turn, route, late=False)
            turn += 1
            assert turn < MAX_TURNS
        for stuck in range(0, turn, 1 if EVERYTHING else 4):
            play(SCENES[key], once, stuck, route, late=True)


@cache
def length_of(key: tuple[str, str], route: str) -> int:
    """Iterations until a scene ends that nobody cancels."""
    return play(SCENES[key], once, MAX_TURNS, route, late=False).turns


@pytest.mark.parametrize("key", HERE, ids=name_of)
def test_cancelled_in_every_way(key):
    """In a quick run each way at one point, with the bytes held back or not."""
    for way in WAYS[1:]:
        drawn = random.Random(f"{key} {way.__name__}")
        for route in ROUTES if EVERYTHING else [drawn.choice(ROUTES)]:
            length = length_of(key, route)
            for turn in range(length + 1) if EVERYTHING else [drawn.randint(0, length)]:
                for late in (False, True) if EVERYTHING else [drawn.random() < 0.5]:
                    play(SCENES[key], way, turn, route, late=late)


IN_TURN = [(key, way) for k, key in enumerate(THERE) for w, way in enumerate(WAYS) if EVERYTHING or (k + w) % 3 == 0]
"""In a quick run a third of the ways for each await."""


@pytest.mark.parametrize(("key", "way"), IN_TURN, ids=name_of)
def test_cancelled_while_the_worker_has_a_loop_of_its_own(key, way):
    drawn = random.Random(f"{key} {way.__name__}")
    for route in routes_for(key, way):
        for late in (False, True) if EVERYTHING else (drawn.random() < 0.5,):
            play(SCENES[key], way, drawn.choice([0, 1, 2, 5, 20, 100]), route, late=late, own=True)
