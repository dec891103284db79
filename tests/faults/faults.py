"""One fault at one step of a transfer between two processes, beside others that must not notice; and what must hold.

Three processes over NIXL: the *victim*, to which it happens; the *survivor*, with which it was transferring; and a
*third*, with which the survivor goes on transferring all the time.
"""

import asyncio
import itertools
import os
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from actors import Actor
from steps import STEPS, Step

from kvxfer import Config

EVERYTHING = os.environ.get("FAULTS") == "all"
"""Whether all cases are asked for (`make faults`), however long that takes."""
QUICK: dict[str, Any] = {
    "peer_timeout": 1.0,
    "revoke_timeout": 0.5,
    "grant_lease": 1.5,
    "offer_lease": 0.8,
    "unclaimed_timeout": 1.5,
    "no_progress_timeout": 0.8,
    "connect_timeout": 1.0,
    "drain_timeout": 0.0,
}
PATIENT: dict[str, Any] = dict.fromkeys(
    ["peer_timeout", "revoke_timeout", "grant_lease", "offer_lease", "unclaimed_timeout"], 15.0
) | {"no_progress_timeout": 15.0, "connect_timeout": 2.5}
"""A pause ends when others have moved a few times, however long these cores take for that."""
SIZES: dict[str, Any] = {
    "arena_bytes": "512KiB",
    "chunk_bytes": "16KiB",
    "fabric": {"max_post_bytes": "4KiB", "max_descriptors": 64},
}
"""Several chunks a transfer, and several posts a chunk."""
CONNECTING_SECONDS = 30.0
STARVED_SECONDS = 2.0
"""Scheduling comes on top of every bound, and all these processes share their cores; times the patience of a scene."""
SENDER_SEED, RECEIVER_SEED, THIRD_SEED = 1, 2, 3
_GPU = ",cuda_copy" if Path("/dev/nvidiactl").exists() else ""
LANES = {"cma": {"UCX_TLS": f"self,sm,tcp{_GPU}"}, "tcp": {"UCX_TLS": f"tcp{_GPU}"}}
"""Without NICs. Beside a GPU, NIXL's UCX backend refuses what cannot reach its memory."""
FAULTS = ("kill", "stop", "cut", "pause")
_HANDSHAKE = frozenset({"hello came", "agent came", "hello sent", "welcome came"})
_BESIDE = 3
"""Transfers beside it that are waited for before and after."""


class HarmError(AssertionError):
    """What no lack of time excuses: wrong bytes, memory that is said to be safe and is not, something left behind."""


def unharmed(holds: bool, what: object) -> None:
    """Assert it."""
    if not holds:
        raise HarmError(what)


async def same_bytes(actor: Actor, *memory: Any) -> None:
    """Memory over there is as it should be; see `Ranks.wrong`."""
    wrong = await actor.wrong(*memory)
    unharmed(not wrong, wrong)


async def whole(actor: Actor, name: str, within: float) -> None:
    """Wait until nothing is under way over there, and nothing in doubt."""
    state = await actor.quiet(name, doubts=True, within=within)
    assert (state["busy"], state["quarantined"], state["custody"]) == (0, 0, 0), state


async def brought(sender: Actor, receiver: Actor, card: dict[str, Any], request: str, name: str = "decode") -> float:
    """A fetch that succeeds, of which the blocks are as they were afterwards; the seconds that it took."""
    await sender.offer("prefill", request)
    began = asyncio.get_running_loop().time()
    outcome = await receiver.fetch(name, card, request, 20)
    took = asyncio.get_running_loop().time() - began
    assert outcome["ok"], outcome
    await same_bytes(receiver, name, "fetched", SENDER_SEED)
    await receiver.restore(name)
    return took


class Ends(IntEnum):
    """When memory that a fault puts in doubt is its owner's again."""

    HEARD = 0
    """When the caller hears of it, or within `revoke_timeout` after."""
    REBUILT = 1
    """When the agent was made anew, whatever the other process does."""
    BACK = 2
    """When the process goes on after a freeze."""


DOUBT_ENDS = {
    # the sender is struck: staging memory (staged) or blocks (direct, mapped) of the receiver that it may write
    ("sender", "staged"): {"kill": Ends.REBUILT, "stop": Ends.BACK},
    ("sender", "direct"): {"kill": Ends.REBUILT, "stop": Ends.BACK},
    # heard, but where it dies in its copy before its answer was: that might have named another route
    ("sender", "mapped"): {"kill": Ends.REBUILT, "stop": Ends.BACK},
    # on pull our own reads write our blocks, and none of them outlives our agent
    ("sender", "pull"): {"kill": Ends.REBUILT, "stop": Ends.REBUILT},
    # the receiver is struck: our own posts end, fail, or end with our agent; on pull it may still read
    ("receiver", "staged"): {"kill": Ends.HEARD, "stop": Ends.REBUILT},
    ("receiver", "direct"): {"kill": Ends.HEARD, "stop": Ends.REBUILT},
    ("receiver", "mapped"): {"kill": Ends.HEARD, "stop": Ends.HEARD},
    ("receiver", "pull"): {"kill": Ends.HEARD, "stop": Ends.BACK},
}
"""When it ends at the latest if memory was in the victim's hands, on every lane: more evidence sharpens the table."""


@dataclass(frozen=True)
class Case:
    """What happens to whom, where."""

    side: str
    step: str
    route: str
    fault: str
    lane: str

    def __str__(self) -> str:
        return f"{self.fault} {self.side} {self.step} {self.route} {self.lane}".replace(", ", " ").replace(" ", "-")

    @property
    def taken(self) -> Step:
        """The step."""
        return STEPS[self.side, self.step]

    @property
    def ends(self) -> Ends:
        """When a doubt that it leaves must have ended."""
        if self.fault in ("cut", "pause") or not self.taken.exposed:
            return Ends.HEARD
        return DOUBT_ENDS[self.side, self.route][self.fault]


def every_case() -> list[Case]:
    """All of them. No transport moves anything on `mapped`, so there is one lane."""
    return [
        Case(side, name, route, fault, lane)
        for (side, name), step in STEPS.items()
        for route in sorted(step.routes)
        for lane in LANES
        if not (route == "mapped" and lane == "tcp")
        for fault in FAULTS
    ]


def spread(cases: list[Case], count: int) -> list[Case]:
    """So many of them, in which each value and each pair of values is met about as often; always the same ones."""

    def pairs(case: Case) -> list[tuple[Any, ...]]:
        return list(itertools.combinations(enumerate([case.side, case.route, case.fault, case.lane]), 2))

    chosen: list[Case] = []
    times: Counter[Any] = Counter()
    left = {case: ((case.side, case.step), pairs(case)) for case in cases}

    def cost(case: Case) -> int:
        step, met = left[case]
        return count * times[step] + sum(times[pair] for pair in met)

    while left and len(chosen) < count:
        best = min(left, key=cost)
        step, met = left.pop(best)
        times.update([step, *met])
        chosen.append(best)
    return chosen


def scene(case: Case, *actors: Actor, **settings: Any) -> "Scene":
    """Of a case."""
    return (SenderStruck if case.side == "sender" else ReceiverStruck)(case, *actors, **settings)


class Scene:
    """What both sides have in common."""

    ours = theirs = ""  # names of the survivor's and the victim's worker
    card: dict[str, Any]
    """Of the sender's engine."""
    content = "kept"
    """What lies in the survivor's blocks."""
    safe: bool
    """Whether these were said to be its own again."""
    acquainted = False
    """Whether the two have transferred before, so that the transports are connected."""
    may_lapse = 0
    """Of how many transfers beside it a lease may run out, since it is short and these cores are shared."""

    def __init__(
        self, case: Case, survivor: Actor, third: Actor, victim: Actor, *, patience: float = 1.0, **settings: Any
    ) -> None:
        self.case, self.survivor, self.third, self.victim = case, survivor, third, victim
        times = {**QUICK, **(PATIENT if case.fault == "pause" else {})}
        self.settings = {name: seconds * patience for name, seconds in times.items()}
        self.settings |= {**SIZES, "route": case.route, **settings}
        self.starved = STARVED_SECONDS * patience
        self.bounds = Config(**self.settings).bounds()
        self.alive = case.fault != "kill"

    def runs(self) -> list[Actor]:
        """Who is to have its share of the cores all the time."""
        return [self.survivor, self.third, *([self.victim] if self.case.fault == "cut" else [])]

    def everybody(self) -> list[Actor]:
        """Dead or alive."""
        return [self.survivor, self.third, self.victim]

    async def play(self) -> None:
        """Beside it, before, the fault, what is heard, what comes back, afterwards."""
        await self.raise_curtain()
        await self.survivor.moved(self.ours, _BESIDE)
        await self.begin()
        await self.victim.reached(self.case.step)
        struck = await self.strike()
        await self.hear(struck)
        await self.come_back()
        await self.survivor.moved(self.ours, _BESIDE)
        if self.alive:
            await self.again()
        await self.fall_curtain()

    async def strike(self) -> float:
        """The fault; when it began."""
        case, victim = self.case, self.victim
        if case.fault == "kill":
            return victim.kill()
        if case.fault == "stop":
            return victim.stop()
        if case.fault == "cut":
            at = asyncio.get_running_loop().time()
            victim.proceed("cut")
            return at
        victim.stop()
        await self.survivor.moved(self.ours, _BESIDE)
        victim.proceed()
        victim.thaw()
        return asyncio.get_running_loop().time()

    async def come_back(self) -> None:
        """Memory that was in doubt is its owner's again when the table says so, and a frozen process does no harm."""
        case = self.case
        if case.fault == "stop" and case.ends < Ends.BACK:
            await self.is_whole()  # while the other process is frozen
        if case.fault == "stop":
            self.victim.proceed()
            self.victim.thaw()
            await self.thawed()
        await self.is_whole()
        state = await self.survivor.quiet(self.ours, doubts=False, within=self.starved)
        assert not state["busy"], state
        if not self.safe:
            assert await self.survivor.settled(self.ours, "r", self.starved)
            await self.reuse()

    async def reuse(self) -> None:
        """The survivor's blocks are its own again: somebody else uses them."""
        unharmed(not await self.survivor.refuses(self.ours), "blocks that are said to be safe are refused")
        await self.survivor.reuse(self.ours)
        self.content = "canary"

    async def is_whole(self) -> None:
        """Nothing is held or in doubt at the survivor."""
        bound = self.bounds["rebuild"] if self.case.ends is Ends.REBUILT else self.settings["revoke_timeout"]
        await whole(self.survivor, self.ours, bound + self.starved)

    async def fall_curtain(self) -> None:
        """Every byte is as it should be, and nothing is left in any process."""
        await self.stop_beside()
        await self.check_bytes()
        actors = {self.survivor: self.ours, self.third: "third"} | ({self.victim: self.theirs} if self.alive else {})
        for actor, name in actors.items():  # what is under way as both ends close comes to be in doubt
            await actor.quiet(name, doubts=False, within=10.0)
        shared = [Path(path) for actor in actors for path in await actor.shared()]
        left = await asyncio.gather(*(actor.close(name) for actor, name in actors.items()))
        unharmed(left == [{}] * len(left), left)
        shared = [path for path in shared if path.exists()]
        unharmed(not shared, shared)

    async def raise_curtain(self) -> None:
        """Survivor and third transfer."""
        raise NotImplementedError

    async def move_beside(self, prefix: str) -> None:
        """Transfers between survivor and third, one after the other, until they are told to stop."""
        raise NotImplementedError

    def fetcher_first(self) -> list[tuple[Actor, str]]:
        """The two that go on, so that nobody waits for what is not offered any more."""
        both = [(self.survivor, self.ours), (self.third, "third")]
        return both if self.case.side == "sender" else both[::-1]

    async def stop_beside(self) -> None:
        """They stop; every one of them went well."""
        for actor, name in self.fetcher_first():
            failed = await actor.stop_traffic(name)
            assert failed == [], name

    async def begin(self) -> None:
        """The transfer begins that is struck."""
        raise NotImplementedError

    async def connect(self, *, giver: tuple[Actor, str], taker: tuple[Actor, str], card: dict[str, Any]) -> None:
        """Transfer something, so that transports are connected: on starved cores that outlasts a short patience."""
        async with asyncio.timeout(CONNECTING_SECONDS):
            for attempt in itertools.count():
                request = f"{taker[1]}-connects-{attempt}"
                await giver[0].offer(giver[1], request)
                outcome = await taker[0].fetch(taker[1], card, request)
                if outcome["ok"]:
                    break
                if not outcome["safe"]:
                    await taker[0].settled(taker[1], request, 10.0)
                await asyncio.sleep(outcome["retry_after"])
            for actor, name in (giver, taker):
                await whole(actor, name, 10.0)
        await taker[0].restore(taker[1])

    async def move_again(self, *, giver: tuple[Actor, str], taker: tuple[Actor, str]) -> None:
        """Transfer something afterwards; with time-outs as short as these, starved cores may take a retry or two."""
        outcomes: list[dict[str, Any]] = []
        for attempt in range(10):
            await giver[0].offer(giver[1], f"again-{attempt}")
            outcomes.append(await taker[0].fetch(taker[1], self.card, f"again-{attempt}", 10))
            if outcomes[-1]["ok"]:
                return
            await asyncio.sleep(outcomes[-1]["retry_after"])  # as the error tells its caller
        raise AssertionError(outcomes)

    async def hear(self, struck: float) -> None:
        """What the survivor's caller hears, and when; then what may be reused is."""
        raise NotImplementedError

    async def thawed(self) -> None:
        """The victim goes on, and comes to an end."""

    async def again(self) -> None:
        """Another transfer between the two."""
        raise NotImplementedError

    async def check_bytes(self) -> None:
        """What both hold."""
        raise NotImplementedError


class SenderStruck(Scene):
    """A prefill process is struck."""

    ours, theirs = "decode", "prefill"
    fetching: "asyncio.Task[dict[str, Any]]"

    async def raise_curtain(self) -> None:
        self.third_card = await self.third.open("third", seed=THIRD_SEED, layout="NHD", **self.settings)
        await self.survivor.open("decode", seed=RECEIVER_SEED, layout="HND", **self.settings)
        await self.connect(giver=(self.third, "third"), taker=(self.survivor, "decode"), card=self.third_card)
        await self.move_beside("beside-")

    async def move_beside(self, prefix: str) -> None:
        await self.third.serve("third", prefix)
        await self.survivor.keep_fetching("decode", self.third_card, prefix, THIRD_SEED, may_lapse=self.may_lapse)

    async def begin(self) -> None:
        case, victim = self.case, self.victim
        self.card = await victim.open("prefill", seed=SENDER_SEED, layout="NHD", **self.settings)
        if self.acquainted:
            await self.connect(giver=(victim, "prefill"), taker=(self.survivor, "decode"), card=self.card)
        await victim.halt(case.side, case.step)
        if case.taken.how != "parked":
            await victim.offer("prefill", "r", streamed=case.taken.how == "streamed")
        self.fetching = asyncio.create_task(self.survivor.fetch("decode", self.card, "r"))
        if case.taken.how == "streamed":
            await victim.ready("prefill", "r", 0)

    async def hear(self, struck: float) -> None:
        case = self.case
        if case.fault in ("cut", "pause"):
            if case.taken.how == "parked":
                await self.victim.offer("prefill", "r")
            elif case.taken.how == "streamed":
                await self.victim.ready("prefill", "r", 1)
        heard = await self.fetching
        self.safe = heard["ok"] or heard["safe"]
        kinds = {"kill": "dead_peer", "cut": "dead_peer", "stop": "silent_peer", "pause": "silent_peer"}
        kind = "handshake" if case.step in _HANDSHAKE else kinds[case.fault]
        late = heard["heard"] - struck
        assert late <= self.bounds[kind] + self.starved, f"heard {late:.2f} s after it: {heard}"
        assert heard["ok"] or case.fault != "pause", heard
        self.content = "fetched" if heard["ok"] else "partly"
        if case.fault in ("kill", "stop") and not heard["ok"]:
            unharmed(heard["safe"] or heard["refused"], heard)
            if heard["safe"]:
                await self.reuse()

    async def thawed(self) -> None:
        await self.victim.quiet("prefill", doubts=False, within=self.starved)

    async def again(self) -> None:
        await self.check_bytes()
        if await self.survivor.refuses("decode"):
            return
        await self.survivor.restore("decode")
        await self.move_again(giver=(self.victim, "prefill"), taker=(self.survivor, "decode"))
        self.content = "fetched"

    async def check_bytes(self) -> None:
        await same_bytes(self.survivor, "decode", self.content, SENDER_SEED)
        await same_bytes(self.third, "third", "kept")
        if self.alive:
            await same_bytes(self.victim, "prefill", "kept")


class ReceiverStruck(Scene):
    """A decode process is struck."""

    ours, theirs = "prefill", "decode"
    fetching: "asyncio.Task[dict[str, Any]]"
    fetched = "partly"

    async def raise_curtain(self) -> None:
        self.card = await self.survivor.open("prefill", seed=SENDER_SEED, layout="NHD", **self.settings)
        await self.third.open("third", seed=THIRD_SEED, layout="HND", **self.settings)
        await self.connect(giver=(self.survivor, "prefill"), taker=(self.third, "third"), card=self.card)
        await self.move_beside("beside-")

    async def move_beside(self, prefix: str) -> None:
        await self.survivor.serve("prefill", prefix)
        await self.third.keep_fetching("third", self.card, prefix, SENDER_SEED, may_lapse=self.may_lapse)

    async def begin(self) -> None:
        case, victim = self.case, self.victim
        await victim.open("decode", seed=RECEIVER_SEED, layout="HND", **self.settings)
        if self.acquainted:
            await self.connect(giver=(self.survivor, "prefill"), taker=(victim, "decode"), card=self.card)
        await victim.halt(case.side, case.step)
        if case.taken.how != "parked":
            await self.survivor.offer("prefill", "r")
        self.fetching = asyncio.create_task(victim.fetch("decode", self.card, "r", late=case.taken.how == "late"))

    async def hear(self, struck: float) -> None:
        case, survivor = self.case, self.survivor
        if case.fault == "kill":
            await asyncio.wait({self.fetching})
        if case.taken.how == "parked":
            await survivor.offer("prefill", "r")
            struck = asyncio.get_running_loop().time()
        ending, at, safe, refused = await survivor.released("prefill", "r")
        bound = max(self.bounds["released_by_lease"], self.bounds["unclaimed_offer"])
        assert at - struck <= bound + self.starved, f"{ending} was heard {at - struck:.2f} s after it"
        self.safe = safe
        if case.fault == "pause":
            assert ending == "Released", ending
        if case.fault in ("kill", "stop"):
            unharmed(safe or refused, ending)
            if safe:
                await self.reuse()
        if case.fault in ("cut", "pause"):
            await self.ended()

    async def ended(self) -> None:
        """The victim's own caller hears of it too, and is never told that what is not whole has arrived."""
        outcome = await self.fetching
        assert outcome["ok"] or self.case.fault != "pause", outcome
        self.fetched = "fetched" if outcome["ok"] else "partly"
        await same_bytes(self.victim, "decode", self.fetched, SENDER_SEED)

    async def thawed(self) -> None:
        await self.ended()

    async def again(self) -> None:
        await self.check_bytes()
        if await self.survivor.refuses("prefill"):
            return
        if self.case.ends is Ends.REBUILT and await self.victim.refuses("decode"):
            return  # the survivor lives, and cannot say what became of its post: to the victim that is a doubt
        await self.survivor.restore("prefill")
        await self.victim.restore("decode")
        await self.move_again(giver=(self.survivor, "prefill"), taker=(self.victim, "decode"))
        self.content, self.fetched = "kept", "fetched"

    async def check_bytes(self) -> None:
        await same_bytes(self.survivor, "prefill", self.content)
        await same_bytes(self.third, "third", "kept")
        if self.alive:
            await same_bytes(self.victim, "decode", self.fetched, SENDER_SEED)
