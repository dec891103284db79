"""Transfers at once around one arena and one custody: both state machines, and the books of their memory.

Each is a `pair.Pair`, whose shells here take and give back memory as the worker's do. Whatever is still in somebody's
hands could be written at any moment, so after every step all of it must be in a live grant.
"""
# the model knows when there is a sender
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import itertools
import random

from pair import CALLER, GONE, Pair, chosen

from kvxfer.memory import Custody, Extent, ExtentState, Share
from kvxfer.protocol.messages import Grant, KvAgentResult, Route
from kvxfer.protocol.receiving import ReceiveState
from kvxfer.protocol.sending import SendState

UNIT = 512
ROUTES = (Route.STAGED, Route.STAGED, Route.DIRECT, Route.PULL)
_LIVE = (ExtentState.WRITING, ExtentState.QUARANTINED)


class Books:
    """What the transfers share: the arena of both ranks, and the caller's blocks at the decode rank."""

    def __init__(self):
        self.sending = Share("send", base=1 << 40, capacity=16 * UNIT)
        self.receiving = Share("receive", base=1 << 41, capacity=6 * UNIT)
        self.custody = Custody()


class Kept(Pair):
    """A pair of machines with memory.

    Attributes:
        granted: Memory at the decode rank, by chunk; `Fetch` grants that of chunk 0.
        shipped: Memory at the prefill rank, by chunk.
        dead: The prefill worker was killed; whoever answers now is another incarnation.
    """

    def start(self, books, name, route, chunks, ahead, troubles, sticky):
        """Ask, with memory in the request itself if that is drawn and there is some."""
        self.books, self.name = books, name
        self.granted: dict[int, Extent] = {}
        self.shipped: dict[int, Extent] = {}
        self.dead = self.unused = False
        books.custody.hold(name, {"g": [int(name)]})
        self.custody = "held"
        extent = self.take() if ahead and route is Route.STAGED and chunks == 1 else None
        ahead = ahead and (route is not Route.STAGED or extent is not None)
        self.begin(route, chunks, ahead, sticky, troubles, [])
        if extent is not None:
            self.granted[0], self.unused = extent, True

    def take(self):
        extent = self.books.receiving.take("a", UNIT)
        if extent is not None:
            self.books.receiving.write(extent)
        return extent

    # --- troubles, each if it can happen

    def trouble(self, number):
        kinds = [self.cancel, self.stop, self.lose_the_session, self.die, self.refuse, self.lose_a_chunk]
        kinds += [self.peer_is_silent, self.reader_is_silent, self.twice]
        kinds[number % len(kinds)]() if self._possible(number % len(kinds)) else None
        self.check()

    def _possible(self, kind):
        sending = self.sender.state if self.live() else None
        return (
            self.troubles > 0,
            self.troubles > 0 and sending is not None,
            self.troubles > 0 and self.connected,
            self.troubles > 0 and self.sender is not None and not self.dead,
            self.troubles > 0 and sending is SendState.PARKED,
            bool(self.hands) and (self.troubles > 0 or sending is SendState.STOPPING),
            self.receiver.state is ReceiveState.STOPPING,
            sending is SendState.STOPPING and self.sender.being_read,
            bool(self.heard),
        )[kind]

    def lose_a_chunk(self):
        self.dropped(0, in_doubt=len(self.heard) % 2 == 0, reason=False)

    def twice(self):
        self.a_result_comes_twice(len(self.heard))

    def die(self):
        """The prefill worker is killed: what it has posted may land at any later time."""
        self.troubles -= 1
        if self.route is not Route.PULL:
            self.zombies |= self.hands
        self.hands = set()
        self.sender, self.dead, self.connected = None, True, False
        for extent in self.shipped.values():  # gone with it
            share = self.books.sending
            share.settle(extent) if extent.state is ExtentState.QUARANTINED else share.release(extent)
        self.shipped.clear()
        self.to_sender.clear()
        self.to_receiver.clear()
        self.heard.clear()
        self.given_up = True
        self.receiver.lost(GONE)

    def resume(self):
        if self.dead:
            self.connected = True  # another incarnation: it is not asked, since it cannot know
        else:
            super().resume()

    # --- memory

    def can_grant(self):
        if not super().can_grant() or self.route is not Route.STAGED:
            return super().can_grant()
        extent = self.books.receiving.take("a", UNIT)
        if extent is not None:
            self.books.receiving.release(extent)
        return extent is not None

    def grant(self, number):
        if self.route is not Route.STAGED:
            super().grant(number)
            return
        for chunk in sorted({chosen(number, self.readable), chosen(number // 4, self.readable)}):
            extent = self.take()
            if extent is not None:
                self.granted[chunk] = extent
                self.to_peer(self.receiver.grant([Grant(chunk, extent.address, extent.nbytes)], 1000))

    def deliver_to_receiver(self):
        before = set(self.landed)
        failed = self.to_receiver and isinstance(self.to_receiver[0], KvAgentResult) and self.given_up
        super().deliver_to_receiver()
        for chunk in self.landed - before:
            extent = self.granted.get(chunk)
            if extent is not None and extent.state is ExtentState.WRITING and not failed:
                self.books.receiving.scatter(extent)
        self._settle_receiver()

    def chunk_done(self, number):
        before = set(self.landed)
        super().chunk_done(number)
        for chunk in before - self.landed:
            extent = self.granted.get(chunk)
            if extent is not None and extent.state is ExtentState.SCATTERING:
                self.books.receiving.release(self.granted.pop(chunk))

    def settle(self):
        """What both shells do after every step."""
        self._settle_sender()
        self._settle_receiver()
        self._settle_custody()

    def _settle_sender(self):
        share = self.books.sending
        if self.route is not Route.STAGED:
            return
        for chunk in self.hands - self.shipped.keys():
            extent = share.take("b", UNIT)
            assert extent is not None
            share.write(extent)
            self.shipped[chunk] = extent
        for chunk in self.shipped.keys() - self.hands:
            extent = self.shipped[chunk]
            if chunk not in self.zombies:
                share.release(self.shipped.pop(chunk))
            elif extent.state is ExtentState.WRITING:
                share.quarantine(extent, "our own post did not end")

    def _settle_receiver(self):
        share, machine = self.books.receiving, self.receiver
        for chunk, extent in list(self.granted.items()):
            if extent.state is ExtentState.SCATTERING:
                continue
            void = self.unused and not machine.ahead and chunk not in machine.granted and chunk not in self.landed
            if machine.ended or void:
                del self.granted[chunk]
                share.settle(extent) if extent.state is ExtentState.QUARANTINED else share.release(extent)
            elif machine.state is ReceiveState.LOST and extent.state is ExtentState.WRITING:
                share.quarantine(extent, "a is silent")
        self.unused = self.unused and machine.ahead

    def _settle_custody(self):
        machine, custody = self.receiver, self.books.custody
        busy = self.reading or bool(self.landed)
        exposed = machine.exposed and self.route not in {Route.STAGED, Route.PULL}
        if self.custody == "held" and not busy and (machine.ended or machine.state is ReceiveState.LOST):
            self.custody = "in doubt" if exposed and not machine.ended else "free"
            (custody.doubt if self.custody == "in doubt" else custody.release)(self.name)
        elif self.custody == "in doubt" and machine.ended:
            self.custody = "free"
            custody.settle(self.name)

    # --- what must hold

    def check(self):
        self.settle()
        super().check()
        assert self.custody != "free" or not self.reading
        for chunk in self.hands | self.zombies:
            if self.route is Route.STAGED:
                assert self.granted[chunk].state in _LIVE, "it could be written outside of a live grant"
            elif self.route is Route.DIRECT:
                assert self.custody != "free", "it could be written though the fetch is over"
        for chunk, extent in self.shipped.items():
            assert extent.state in _LIVE, f"chunk {chunk} could be read where it was given back"

    def finish(self):
        """Nobody gives up any more: it ends, whoever is still there."""
        self.drain()
        if self.receiver.state in {ReceiveState.ASKED, ReceiveState.MOVING}:  # there is no memory for it
            self.give_up(CALLER)
            self.drain()
        if self.stuck:
            self.without_the_stuck_reads()
        if not self.connected:
            assert not self.live(), "without its decode rank the prefill rank would keep it for ever"
        if self.receiver.state is ReceiveState.LOST and not self.dead:
            if self.connected:
                self.lose_the_session()
            self.resume()
            self.drain()
        assert self.sender is None or self.sender.state is SendState.ENDED
        assert self.receiver.ended or (self.receiver.state is ReceiveState.LOST and (self.zombies or self.dead))
        self.check()
        in_doubt = not self.receiver.ended
        assert all(extent.state is ExtentState.QUARANTINED for extent in self.granted.values())
        assert in_doubt or (not self.granted and self.custody == "free")
        assert set(self.shipped) == (self.zombies if self.route is Route.STAGED and not self.dead else set())

    def teardown(self):
        """`finish` ends it; hypothesis has nothing to add."""


class Crowd:
    """Transfers at once, each with a number of troubles left; a read of some does not end."""

    def __init__(self, transfers):
        self.books = Books()
        self.transfers: list[Kept] = []
        for number, (route, chunks, ahead, troubles, sticky) in enumerate(transfers):
            one = Kept()
            one.start(self.books, str(number), route, chunks, ahead, troubles, sticky)
            self.transfers.append(one)
        self.check()

    def step(self, which, number, *, trouble):
        """Something happens to one of them."""
        one = self.transfers[which % len(self.transfers)]
        one.trouble(number) if trouble else one.work([number])
        self.check()

    def check(self):
        """No extent in two hands, and none in nobody's."""
        for one in self.transfers:
            one.check()
        for share, held in (
            (self.books.receiving, [e for one in self.transfers for e in one.granted.values()]),
            (self.books.sending, [e for one in self.transfers for e in one.shipped.values()]),
        ):
            live = share.extents()
            assert set(live) == set(held), "memory of nobody, or of two"
            assert len(live) == len(held)
            ends = sorted((extent.offset, extent.offset + extent.length) for extent in live)
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
        holders = self.books.custody.snapshot().holders
        assert holders.keys() == {one.name for one in self.transfers if one.custody != "free"}

    def finish(self):
        """Everything ends."""
        for one in self.transfers:
            one.finish()
        self.check()


def play(number):
    """Run the schedule of a number; returns how the first transfer of it ended.

    Raises:
        AssertionError: It saw what must not be; which schedule it was stands in a note.
    """
    draw = random.Random(number)
    try:
        crowd = Crowd(
            (
                draw.choice(ROUTES),
                draw.randint(1, 3),
                draw.random() < 0.5,
                draw.choice([0, 1, 1, 2, 3]),
                draw.random() < 0.2,
            )
            for _ in range(draw.choice([1, 2, 3]))
        )
        for _ in range(draw.choice([5, 20, 40])):
            crowd.step(draw.randrange(3), draw.randrange(1000), trouble=draw.random() < 0.12)
        crowd.finish()
    except BaseException as error:
        error.add_note(f"schedule {number}")
        raise
    return crowd.transfers[0].receiver.state
