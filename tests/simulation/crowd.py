"""Transfers at once around one arena and one custody: both state machines, and the books of their memory.

Each is a `pair.Pair`, whose shells here take and give back memory as the worker's do: that of the decode rank by the
worker's own `Grants`. Whatever is still in somebody's hands could be written at any moment, so after every step all of
it must be in a live grant.
"""
# the model knows when there is a sender, and stands for a worker
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportArgumentType=false

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import msgspec
from pair import CALLER, GONE, Pair

from kvxfer.decode.receiver import Grants
from kvxfer.memory.books import Custody, Extent, ExtentState, Share
from kvxfer.protocol.messages import Accept, Place, Ready, Route
from kvxfer.protocol.transfer import ReceiveState, SendState
from kvxfer.site import Desk
from kvxfer.telemetry import Metrics

UNIT = 512
ROUTES = (Route.STAGED, Route.STAGED, Route.DIRECT, Route.PULL)
WINDOW = 4
"""Places of a ring at most."""
_LIVE = (ExtentState.WRITING, ExtentState.QUARANTINED)


class Books:
    """What the transfers share: the arena of both ranks, what may be written in place, and the caller's blocks."""

    def __init__(self):
        self.sending = Share("send", base=1 << 40, capacity=16 * UNIT)
        self.receiving = Share("receive", base=1 << 41, capacity=6 * UNIT)
        self.custody = Custody()
        self._peers = itertools.count()
        # nobody waits here, so there is neither a loop nor a clock
        desk = Desk(self.receiving, lambda: 0.0, None, Metrics())
        self.site = SimpleNamespace(receive_desk=desk, written_in_place=Counter(), lease_ms=lambda held: 1000 + held)

    def grants(self) -> Grants:
        """What one transfer puts into its peer's hands."""
        peer = SimpleNamespace(account="a", name="a", identity=SimpleNamespace(incarnation=next(self._peers)))
        return Grants(self.site, peer)


class Kept(Pair):
    """A pair of machines with memory."""

    def start(self, books, name, route, chunks, ahead, troubles, sticky):
        """Ask, with memory in the request itself if that is drawn and there is some."""
        self.books, self.name = books, name
        self.grants = books.grants()  # memory at the decode rank
        self.extents: dict[int, Extent] = {}  # of each chunk; all of them the same where `Fetch` grants them in place
        self.copies: set[int] = set()  # chunks that are being scattered
        self.shipped: dict[int, Extent] = {}  # memory at the prefill rank, by chunk
        self.dead = False  # the prefill worker was killed; whoever answers now is another incarnation
        self.late = 0  # for so many steps the decode rank hears nothing: then it hears much at once
        books.custody.hold(name, {"g": [int(name)]})
        self.custody = "held"
        if ahead and route is Route.DIRECT:
            self.grants.count_in_place(chunks * UNIT)
        else:
            if ahead := ahead and route is Route.STAGED and chunks == 1:
                self.grants.ahead = books.site.receive_desk.take(self.grants.peer.account, UNIT, 1, ExtentState.WRITING)
                ahead = bool(self.grants.ahead)
        self.begin(route, chunks, ahead, sticky, troubles)
        if ahead and route is Route.STAGED:
            self.extents = {0: self.grants.ahead[0]}
            self.where = {0: self.grants.ahead[0].address}
            fetch = self.to_sender.popleft()
            self.to_sender.append(msgspec.structs.replace(fetch, ring=[Place(self.where[0], UNIT)], ring_chunks=1))

    # --- troubles, each if it can happen

    def trouble(self, number):
        if possible := self._possible():
            possible[number % len(possible)]()
        self.check()

    def _possible(self):
        sending = self.sender.state if self.live() else None
        kinds = [
            (self.troubles > 0, self.cancel),
            (self.troubles > 0 and sending is not None, self.stop),
            (self.troubles > 0 and self.connected, self.lose_the_session),
            (self.troubles > 0 and self.sender is not None and not self.dead, self.die),
            (self.troubles > 0 and sending is SendState.PARKED, self.refuse),
            (bool(self.hands) and (self.troubles > 0 or sending is SendState.STOPPING), self.lose_a_chunk),
            (self.receiver.state is ReceiveState.STOPPING, self.peer_is_silent),
            (self.receiver.ended or self.receiver.state is ReceiveState.LOST, self.cancel_too_late),
            (sending is SendState.STOPPING and self.sender.being_read, self.reader_is_silent),
            (bool(self.heard), self.twice),
            (self.connected and not self.late, self.hear_late),
            (self.troubles > 0 and self.late > 0, self.wait_in_vain),
        ]
        return [act for can_happen, act in kinds if can_happen]

    def hear_late(self):
        self.late = 15

    def wait_in_vain(self):
        """What it is then told has long been on its way."""
        self.cancel()
        if self.receiver.state is ReceiveState.STOPPING:
            self.peer_is_silent()

    def due(self):
        """What comes late is not due while anything else is."""
        due, self.late = super().due(), max(0, self.late - 1)
        others = [step for step in due if step[0] != self.deliver_to_receiver]
        return others if self.late and others else due

    def lose_a_chunk(self):
        self.dropped(len(self.heard), in_doubt=len(self.heard) % 2 == 0, reason=False)

    def twice(self):
        self.a_message_comes_twice(len(self.heard) - 1 if len(self.heard) % 2 else 0)

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
        self.receiver.on_link_lost(GONE)

    def resume(self):
        if self.dead:
            self.connected = True  # another incarnation: it is not asked, since it cannot know
        else:
            super().resume()

    # --- memory

    @property
    def staged(self):
        return self.route is Route.STAGED

    @property
    def unoccupied(self):
        """Of the first so many chunks no memory is needed any more."""
        return self.receiver.chunks_done if self.staged else self.receiver.arrived

    def grantable(self):
        """How many more chunks may be granted: in the ring that there is, or in a new one."""
        receiver, grants = self.receiver, self.grants
        wanted = receiver.ready - receiver.granted if self.running else 0
        if not self.staged:
            return wanted
        if wanted and grants.ring:
            return min(wanted, self.unoccupied + len(grants.ring) - receiver.granted)
        extents = grants.site.receive_desk.take("a", UNIT) if wanted else []
        if not extents:
            return 0
        grants.site.receive_desk.release(*extents)
        return min(wanted, WINDOW)

    def grant(self, number):
        """As the worker does: also with others who wait for memory, so that it goes on only with a new ring."""
        receiver, grants, ring = self.receiver, self.grants, []
        if not self.staged:
            grants.count_in_place((receiver.ready - receiver.granted) * UNIT)
            self.to_peer(receiver.grant(receiver.ready, grants.next_lease_ms()))
            return
        if grants.ring and number % 4 == 3:
            if self.unoccupied < receiver.granted:
                return
            grants.release()
        if not grants.ring:
            extents = grants.site.receive_desk.take("a", UNIT)
            if not extents:
                return  # others have made too much doubtful meanwhile
            most = min(receiver.ready - receiver.granted, WINDOW)
            ring = grants.begin_ring(*extents, most, receiver.granted)
        most = min(receiver.ready, self.unoccupied + len(grants.ring)) - receiver.granted
        upto = receiver.granted + (1 + number // 4 % most if number % 4 == 1 else most)
        for chunk in range(receiver.granted, upto):
            self.extents[chunk] = grants.places(range(chunk, chunk + 1))[0]
            self.where[chunk] = self.extents[chunk].address
        self.to_peer(receiver.grant(upto, grants.next_lease_ms(), ring=ring))

    def deliver_to_receiver(self):
        message, asked = self.to_receiver[0], self.receiver.state is ReceiveState.ASKED
        super().deliver_to_receiver()
        grants = self.grants
        if isinstance(message, Accept) and asked and message.ahead:
            grants.ring, grants.ahead = grants.ahead, ()
        elif (isinstance(message, Accept) and asked) or (isinstance(message, Ready) and not self.receiver.exposed):
            grants.release(ring=False)
        self._settle_receiver()

    def place(self, number):
        """Scatters begin, of all that has arrived, or some end; none begins once the transfer was given up."""
        if not self.staged:
            super().place(number)
            return
        fresh = sorted(self.landed - self.copies)
        if fresh and self.running and (number % 2 or not self.copies):
            assert fresh == [*range(fresh[0], fresh[-1] + 1)]
            self.copies.update(fresh)
            return
        ended = sorted(self.copies)[: 1 + number % max(1, len(self.copies))]
        self.copies.difference_update(ended)
        for chunk in ended or sorted(self.landed)[:1]:
            super().place(sorted(self.landed).index(chunk))

    def settle(self):
        """What both shells do after every step."""
        self._settle_sender()
        self._settle_receiver()
        self._settle_custody()

    def _settle_sender(self):
        share = self.books.sending
        if not self.staged:
            return
        for chunk in self.hands - self.shipped.keys():
            (self.shipped[chunk],) = share.take("b", UNIT, 1, ExtentState.WRITING)
        for chunk in self.shipped.keys() - self.hands:
            extent = self.shipped[chunk]
            if chunk not in self.zombies:
                share.release(self.shipped.pop(chunk))
            elif extent.state is ExtentState.WRITING:
                share.quarantine(extent, "our own post did not end")

    def _settle_receiver(self):
        machine, grants = self.receiver, self.grants
        lost = machine.state is ReceiveState.LOST
        if self.copies:  # which read it, whatever has ended
            return
        if machine.ended or lost:
            grants.quarantine(range(machine.arrived, machine.granted)) if lost else grants.release()
        elif self.running and grants.ring and self.unoccupied == machine.granted == machine.ready:
            grants.release()  # nothing is ready that could go there

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

    @property
    def held(self):
        """What it holds of the decode rank's memory, each extent once."""
        grants = self.grants
        return set(grants.ahead) | set(grants.ring) | {self.extents[chunk] for chunk in self.copies}

    @property
    def written(self):
        """Bytes that the peer may write in place, as counted."""
        return self.books.site.written_in_place[self.grants.peer.identity.incarnation]

    # --- what must hold

    def check(self):
        self.settle()
        super().check()
        assert self.custody != "free" or not self.reading
        hands = self.hands | self.zombies
        for chunk in hands if self.staged else ():
            assert self.extents[chunk].state in _LIVE, "it could be written outside of a live grant"
        if self.route is Route.DIRECT and hands:
            assert self.custody != "free", "it could be written though the fetch is over"
            assert self.written >= len(hands) * UNIT, "it counts no more, and could be written"
        for chunk in self.copies:
            assert self.extents[chunk].state is ExtentState.WRITING, "it is read all the same"
        for chunk, extent in self.shipped.items():
            assert extent.state in _LIVE, f"chunk {chunk} could be read where it was given back"
        self.no_more_is_in_doubt_than_may_be_written()

    def no_more_is_in_doubt_than_may_be_written(self):
        """Of a ring that is the places that are in the peer's hands, and those all."""
        machine = self.receiver
        if not self.staged:
            return
        theirs = {self.extents[chunk] for chunk in range(machine.arrived, machine.granted)}
        theirs.update(self.grants.ahead)
        doubtful = {extent for extent in self.held if extent.state is ExtentState.QUARANTINED}
        assert doubtful <= theirs
        assert machine.state is not ReceiveState.LOST or self.copies or doubtful == theirs

    def finish(self):
        """Nobody gives up any more: it ends, whoever is still there."""
        self.late = 0
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
        assert in_doubt or not self.written
        assert all(extent.state is ExtentState.QUARANTINED for extent in self.held)
        assert in_doubt or (not self.grants and self.custody == "free")
        assert set(self.shipped) == (self.zombies if self.staged and not self.dead else set())


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
        books, of_decode = self.books, [extent for one in self.transfers for extent in one.held]
        for one in self.transfers:
            one.check()
        self._check_share(books.receiving.live, of_decode)
        self._check_share(books.sending.live, [e for one in self.transfers for e in one.shipped.values()])
        holders = books.custody.snapshot().holders
        assert holders.keys() == {one.name for one in self.transfers if one.custody != "free"}

    @staticmethod
    def _check_share(live, held):
        assert set(live) == set(held), "memory of nobody, or of two"
        assert len(live) == len(held)
        ends = sorted((extent.address, extent.address + extent.length) for extent in live)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))

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
                draw.randint(1, 6),
                draw.random() < 0.5,
                draw.choice([0, 1, 1, 2, 3]),
                draw.random() < 0.2,
            )
            for _ in range(draw.choice([1, 2, 3]))
        )
        for _ in range(draw.choice([5, 20, 40, 80])):
            crowd.step(draw.randrange(3), draw.randrange(1000), trouble=draw.random() < 0.15)
        crowd.finish()
    except BaseException as error:
        error.add_note(f"schedule {number}")
        raise
    return crowd.transfers[0].receiver.state
