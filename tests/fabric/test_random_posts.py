"""Posts, cancels, leases, faults of the network and agents made anew, at random, against what must always hold.

KVXFER_POSTS_STEPS and KVXFER_POSTS_SEED play more of it, and other cases: `KVXFER_POSTS_STEPS=20000 pytest ...`.
"""

import asyncio
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from rigs import PART, Rig, Way

from kvxfer.copy import records
from kvxfer.copy.mover import Flow
from kvxfer.copy.port import CopyOutcome, Operation, Outcome, Post
from kvxfer.errors import FabricError
from kvxfer.fabric import calls
from kvxfer.fabric.loopback import LogEntry

STEPS = int(os.environ.get("KVXFER_POSTS_STEPS", "300"))
SEED = os.environ.get("KVXFER_POSTS_SEED")
SEEDS = [int(SEED)] if SEED else range(12)
ROOM = 4 * PART + 8
"""Of memory that each post has to itself."""
PEERS = ("b", "c")
MOST_WAYS = 200


@dataclass(eq=False)
class Sent:
    """A post, and what was heard of it."""

    number: int
    peer: str
    operation: Operation
    nbytes: int
    until: float
    runs_on: bool
    way: Way | None
    copy: Flow | None = None
    ended: list[CopyOutcome] = field(default_factory=list[CopyOutcome])
    late: list[bool] = field(default_factory=list[bool])
    cancelled: bool = False
    forgotten: bool = False
    still: bool = False
    """No byte of it may land at its destination any more."""
    apart: bool = False
    """Memory of this side is not read or written for it any more."""

    @property
    def span(self) -> slice:
        return slice(self.number * ROOM, self.number * ROOM + self.nbytes)


class Log(list[LogEntry]):
    """What has landed; somebody hears of each when it does."""

    def __init__(self, heard: Callable[[LogEntry], None]) -> None:
        super().__init__()
        self.append = heard


class World:
    """A rig that is played with, and every post that was."""

    def __init__(self, rng: random.Random, steps: int) -> None:
        self.rng = rng
        self.rig = Rig(*PEERS, nbytes=ROOM * (steps + 1), no_progress_timeout=rng.choice([1.0, 5.0]))
        self.sent: list[Sent] = []
        self.holds: list[Callable[[], None]] = []
        self.wrong: list[str] = []
        self.rig.network.log = Log(self.landed)
        self.at = {peer: memory.ctypes.data for peer, memory in self.rig.memory.items()}
        self.pristine = self.rig.source.copy()

    # --- what is done

    def post(self) -> None:
        rng, rig = self.rng, self.rig
        if (number := len(self.sent)) == rig.source.nbytes // ROOM:
            return
        nbytes = rng.choice([1, 8, PART, PART + 1, 2 * PART, 3 * PART + 5, 4 * PART])
        way = self.way() if rng.random() < 0.5 else None
        until = rig.runtime.time + rng.choice([0.3, 2.0]) if rng.random() < 0.2 else 1e9
        peer, operation = rng.choice(PEERS), rng.choice(list(Operation))
        one = Sent(number, peer, operation, nbytes, until, rng.random() < 0.1, way)
        if operation is Operation.READ:
            rig.source[one.span] = 0
            rig.memory[peer][one.span] = self.pristine[one.span]
        self.sent.append(one)
        sides = rig.piece(nbytes, peer=peer, at=number * ROOM)
        post = Post(peer, operation, *sides, one.runs_on, lambda ended: self.heard_late(one, ended))
        one.copy = rig.submit(str(number), post, until=until, passage=way.passage if way else None)
        one.copy.job = replace(one.copy.job, done=lambda outcome: self.heard(one, outcome))

    def way(self) -> Way | None:
        """One that is new, or after many of them, one that nobody uses."""
        if len(self.rig.ways) < MOST_WAYS:
            return self.rig.way()
        return next((way for way in self.rig.ways if not way.lent), None)

    def cancel(self) -> None:
        if self.sent:
            one = self.rng.choice(self.sent[-8:])
            one.cancelled = True
            assert one.copy is not None
            self.rig.mover.cancel(one.copy)

    def forget(self) -> None:
        left = [(one, one.copy) for one in self.sent if one.copy is not None and one.copy.left]
        if left:
            one, copy = self.rng.choice(left)
            one.forgotten = True
            self.rig.mover.forget(copy)

    def fault(self) -> None:
        rng, network, peer = self.rng, self.rig.network, self.rng.choice(PEERS)
        match rng.randrange(7):
            case 0:
                network.hold(peer)
            case 1:
                network.release(peer, posts=rng.choice([1, 2, None]))
            case 2:
                network.refuse_next(peer, skip=rng.randrange(4))
            case 3 | 4:
                network.break_next(
                    peer, after_bytes=rng.choice([0, 1, 100, PART]), skip=rng.randrange(4), at_post=rng.random() < 0.5,
                    disconnected=rng.random() < 0.3, lingers=rng.random() < 0.6,
                )  # fmt: skip
            case 5:
                network.delay(peer, rng.choice([0, 1, 5]))
            case _:
                rng.choice([network.wedge, network.disconnect, network.mend, network.mend])(peer)
                self.rig.step()  # who is lost is seen to be so, before it is there again as if nothing had been

    def hold_awake(self) -> None:
        if self.holds and self.rng.random() < 0.6:
            self.holds.pop(self.rng.randrange(len(self.holds)))()
        else:
            self.holds.append(self.rig.mover.hold_awake())

    async def rebuild(self) -> None:
        rng, rig = self.rng, self.rig
        renew = rig.transport.renew
        if rng.random() < 0.2:
            rig.transport.renew = lambda: False
        answer = asyncio.ensure_future(rig.fabric.rebuild(rng.choice([0.0, 0.0, 0.5])))
        while not answer.done():
            rig.step(seconds=0.05)
            if rng.random() < 0.2:
                self.post()
            rig.serve()
            await rig.settle()
        assert answer.result() is (rig.transport.renew == renew)
        rig.transport.renew = renew
        left = rig.state[records.SENDING_COUNT] + rig.state[records.WATCHED]
        assert rig.transport.open_handles == 0 or left, "of the old agent"

    async def turn(self) -> None:
        """One thing, and then some steps."""
        rng = self.rng
        what = rng.choices("pcfahmr", [30, 8, 20, 4, 6, 6, 2])[0]
        if what == "r":
            await self.rebuild()
        else:
            mend = partial(self.rig.network.mend, rng.choice(PEERS))
            acts = {
                "p": self.post,
                "c": self.cancel,
                "f": self.fault,
                "a": self.forget,
                "h": self.hold_awake,
                "m": mend,
            }
            acts[what]()
        for _ in range(rng.randrange(5)):
            self.rig.step(seconds=rng.choice([0.0, 0.0, 0.01, 0.3]))
        if rng.random() < 0.3:
            self.rig.serve()
            await self.rig.settle()

    # --- what must hold

    def heard(self, one: Sent, outcome: CopyOutcome) -> None:
        assert not one.ended, "it ended twice"
        one.ended.append(outcome)
        error, memory = outcome.error, self.rig.memory[one.peer]
        if outcome.outcome is Outcome.IN_DOUBT:
            assert isinstance(error, FabricError)
            assert error.in_doubt
            one.apart = not outcome.may_move
            one.still = one.apart and one.operation is Operation.READ
        else:
            assert not outcome.may_move
            one.still = one.apart = True
            assert (error is not None) is (outcome.outcome is Outcome.FAILED)
        if outcome.outcome is Outcome.DONE:
            assert np.array_equal(memory[one.span], self.rig.source[one.span])
            assert np.array_equal(memory[one.span], self.pristine[one.span])
        if outcome.outcome is Outcome.STOPPED:
            assert one.cancelled or self.rig.runtime.time >= one.until - 1e-6
        self.part(one)

    def heard_late(self, one: Sent, ended: bool) -> None:
        assert one.ended
        assert one.ended[0].may_move, "there was nothing to be late"
        assert not one.late, "it was late twice"
        one.late.append(ended)
        assert not (one.runs_on and not ended), "no agent has it under way"
        one.apart = True
        one.still = ended or one.operation is Operation.READ
        self.part(one)

    def part(self, one: Sent) -> None:
        """What is known of it has changed.

        Its gate is passed as long as bytes may land. Memory of this side that is not used for it any more is somebody
        else's from now on: what is there must not be seen at the peer.
        """
        if one.way is not None and not one.forgotten and len(self.rig.ways) < MOST_WAYS:
            assert one.way.inside == (not one.still)
        if one.apart and one.operation is Operation.WRITE:
            self.rig.source[one.span] = 255

    def landed(self, entry: LogEntry) -> None:
        """Bytes land, at this moment."""
        one = self.sent[(entry.address - self.at[entry.dst]) // ROOM]
        if one.still:
            self.wrong.append(f"bytes of {one.number} landed after its end")
        if not (one.way is None or one.way.inside or one.forgotten):
            self.wrong.append(f"bytes of {one.number} landed when its gate was not passed")

    async def finish(self) -> None:
        rig = self.rig
        for peer in PEERS:
            rig.network.mend(peer)
            rig.network.release(peer)
        for _ in range(60):
            rig.step(10, seconds=0.3)
            rig.serve()
            await rig.settle()
            if not rig.mover._unreported:
                break
        assert all(len(one.ended) == 1 for one in self.sent), "some were never told"
        for release in self.holds:
            release()
        for one in self.sent:
            if one.copy is not None and one.copy.left:
                one.forgotten = True
                rig.mover.forget(one.copy)
        rig.step(5, seconds=0.3)
        assert rig.counted() == [0] * 5
        assert rig.transport.open_handles == 0
        assert {way.inside for way in rig.ways} <= {0}
        assert {way.lent for way in rig.ways} <= {0}
        assert rig.step() is None, "it sleeps"
        for one in self.sent:
            if one.operation is Operation.WRITE:
                found = rig.memory[one.peer][one.span]
                assert 255 not in found, f"memory of {one.number} was read when it was somebody else's"
                assert ((found == 0) | (found == self.pristine[one.span])).all()
        assert await rig.close() is True


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_happens_every_post_ends_once_and_moves_nothing_afterwards(seed, monkeypatch):
    defects: list[Any] = []
    monkeypatch.setattr(calls, "_LOOK_S", 0.0)  # a case depends on its seed alone
    monkeypatch.setattr(sys, "unraisablehook", lambda said: defects.append(said.exc_value))
    failed: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: failed.append(said))
    world = World(random.Random(seed), STEPS)
    await world.rig.open()
    for _ in range(STEPS):
        await world.turn()
        assert (defects, failed, world.wrong) == ([], [], [])
    await world.finish()
    assert (defects, failed, world.wrong) == ([], [], [])
    outcomes = {one.ended[0].outcome for one in world.sent}
    assert STEPS < 300 or outcomes == set(Outcome), "not everything was played"
