"""Whose bytes are whose: a ledger that sees every byte moved, and says at once what nobody was entitled to move.

    books = ledger.cache("decode0", cache)          # the blocks of one rank; nobody may touch them yet
    ledger.arena("decode0", worker)                 # its staging memory; the worker's own books say whose it is
    books.writes(ids, tag); ...; books.writes(ids, 0)

Three pairs of eyes: every copy and every post is checked against the ledger when it is made and when its bytes land;
freed memory is filled with a canary that must still be there when it is taken again; and what the ranks, and their
agents, have said to each other decides who has a place of a ring: it is the peer's from when its chunk is granted, and
the chunk before it in that place is said to have left it, until the word, or the evidence, that the chunk has arrived
or never will, and of one chunk only.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from decoded import pieces
from inside import arena_shares, is_shut
from msgspec.structs import replace
from opened import opened, singly

from kvxfer.copy import records
from kvxfer.copy.mover import Flow, Mover, _Machine
from kvxfer.copy.port import CopyJob, Operation
from kvxfer.decode.receiver import Receiver, to_places
from kvxfer.errors import FabricError
from kvxfer.fabric.loopback import LoopbackNetwork, PostedPart
from kvxfer.memory.books import Extent, ExtentState, Share
from kvxfer.protocol.messages import WHOLE, Place, Status
from kvxfer.protocol.transfer import Receiving

CANARY = 0xA5
_WRITABLE = (ExtentState.WRITING, ExtentState.QUARANTINED)
_generations = itertools.count(1)


class BlockBooks:
    """Who may write and who may read the blocks of one rank: numbers, 0 for nobody."""

    def __init__(self, name, cache):
        # whether its process is; nobody answers for the memory of one that was killed
        self.name, self.cache, self.alive = name, cache, True
        blocks = cache.view(cache.layers[0]).shape[1]
        self.writer = np.zeros(blocks, np.int64)
        self.reader = np.zeros(blocks, np.int64)
        self._readers = np.zeros(blocks, np.int64)
        self._spare = {}  # what spare blocks hold
        self._cover = 0
        self.spare(range(blocks))

    def writes(self, ids, tag):
        """A fetch of this number may write these blocks from now on; 0: nobody may."""
        self.writer[list(ids)] = tag

    def offered(self, ids):
        """One more offer names these blocks."""
        for block in set(ids):
            self._readers[block] += 1
            self.reader[block] = self.reader[block] or next(_generations)

    def released(self, ids):
        """One offer less."""
        for block in set(ids):
            self._readers[block] -= 1
            if not self._readers[block]:
                self.reader[block] = 0

    def spare(self, ids):
        """Nobody uses these blocks: they hold a canary from now on."""
        self._cover += 1
        for block in ids:
            for number, layer in enumerate(self.cache.layers):
                view = self.cache.view(layer)[:, block]
                view.fill_(-(1 + block + 1000 * (number + 10 * self._cover)))
                self._spare[block, layer] = view.clone()

    def take(self, ids):
        """The same blocks are used again; returns what was written meanwhile."""
        ids = list(ids)
        return [
            f"block {block} of layer {layer} of {self.name} was written while it was spare"
            for block in ids
            for layer in self.cache.layers
            if (before := self._spare.pop((block, layer), None)) is not None
            and not before.equal(self.cache.view(layer)[:, block])
        ]

    def untaken(self):
        """What was written into blocks that are spare."""
        return self.take({block for block, _ in self._spare}) if self.alive else []


class _Layer:
    """One layer of a cache as addresses."""

    def __init__(self, books, memory, blocks):
        self.books, self.base, self.item = books, memory.data_ptr(), memory.element_size()
        self.end = self.base + memory.numel() * self.item
        self._blocks = blocks

    def claim(self, address, length, *, write, peer=None):
        """Who may do that with all of these bytes, as something that can be compared; None if nobody."""
        del peer
        first, last = (address - self.base) // self.item, -(-(address + length - self.base) // self.item)
        tags = (self.books.writer if write else self.books.reader)[self._blocks[first:last]]
        return tuple(tags.tolist()) if tags.all() or not self.books.alive else None

    def __str__(self):
        return f"blocks of {self.books.name}"


@dataclass
class _Held:
    """A place of staging memory in a peer's hands, for one chunk, which may have arrived though no loop knows it."""

    address: int
    end: int
    tag: int
    peer: bytes
    there: bool = False


@dataclass
class _Ring:
    """Places in which chunks take turns: from which on, how many are granted, how many have left, named by what."""

    first: int
    places: list[Place]
    token: bytes
    granted: int
    given: int
    left: int = 0


class Hands:
    """What is in the hands of peers of all decode ranks, by what was said: staging memory, by transfer and chunk."""

    def __init__(self, say: Callable[[Iterable[str]], None]):
        self._say = say
        self._held: dict[Receiving, dict[int, _Held]] = {}
        self._rings: dict[Receiving, _Ring] = {}
        self._peers: dict[Receiving, bytes] = {}

    def asked(self, machine, peer: bytes):
        """A transfer begins with the peer of this incarnation."""
        self._peers[machine] = peer

    def ahead(self, machine, ring, chunks=1, token=b""):
        """`Fetch` grants chunks, before it is known that there are any."""
        self._rings[machine] = _Ring(0, list(ring), token, chunks, 0)
        self._give(machine)

    def accepted(self, machine):
        """There are so many of them, perhaps fewer."""
        if machine in self._rings:
            self._rings[machine].granted = machine.granted
            self._held[machine] = {at: held for at, held in self._held[machine].items() if at < machine.granted}

    def granted(self, machine, chunks: range, ring, copied, token):
        """`Reserve` grants chunks, perhaps in a new ring."""
        if ring:
            self._rings[machine] = _Ring(chunks.start, list(ring), token, chunks.stop, chunks.start, chunks.start)
        if machine in self._rings:  # else it is in place
            self._rings[machine].granted = chunks.stop
            self._left(machine, copied)

    def notified(self, message: bytes, passed: Callable[[bytes, int, int], None]):
        """An agent says how many chunks have arrived, or have left their places."""
        token, word = message[:16], int.from_bytes(message[16:], "little")
        for machine, ring in self._rings.items():
            if ring.token == token and word & 1:
                passed(token, 1, word >> 1)  # before anybody else has the places
                self._left(machine, word >> 1)
            elif ring.token == token:
                for chunk, held in self._held.get(machine, {}).items():
                    held.there |= chunk < word >> 1

    def _left(self, machine, copied):
        self._rings[machine].left = max(self._rings[machine].left, copied)
        self._give(machine)

    def _give(self, machine):
        ring = self._rings[machine]
        chunks = range(ring.given, min(ring.granted, ring.left + len(ring.places)))
        ring.given = max(ring.given, chunks.stop)
        for chunk in chunks:
            place = ring.places[(chunk - ring.first) % len(ring.places)]
            if self.who(place.address, place.length) is not None:
                self._say([f"chunk {chunk} of transfer {machine.transfer} is granted memory that is a peer's already"])
            held = _Held(place.address, place.address + place.length, next(_generations), self._peers[machine])
            self._held.setdefault(machine, {})[chunk] = held

    def arrived(self, machine, chunks):
        """The first so many chunks have, as the peer says."""
        held = self._held.get(machine, {})
        for chunk in [chunk for chunk in held if chunk < chunks]:
            del held[chunk]

    def over(self, machine):
        """Nothing of it is written any more, as the peer says, or other evidence."""
        self._held.pop(machine, None)
        self._rings.pop(machine, None)

    def who(self, address, length) -> int | None:
        """Which grant some of these bytes are in; None if they are in no peer's hands."""
        for places in self._held.values():
            for held in places.values():
                if held.address < address + length and address < held.end and not held.there:
                    return held.tag
        return None

    def may(self, address, length) -> bool:
        """Whether some of these bytes may be in a peer's hands, as far as the loop of their owner knows."""
        held = [one for places in self._held.values() for one in places.values()]
        return any(one.address < address + length and address < one.end for one in held)

    def writer(self, address, length, peer: bytes | None) -> int | None:
        """Which grant lets this peer write all of these bytes; None if there is none."""
        for places in self._held.values():
            for held in places.values():
                inside = held.address <= address and address + length <= held.end
                if inside and held.peer == peer and not held.there:
                    return held.tag
        return None

    def watch(self, monkeypatch):
        """Listen to what is said."""
        ask, grant, accept, wanted = Receiver.send_fetch, Receiving.grant, Receiving.on_accept, Receiving.on_ready
        came, result, refused = Receiving.on_notified, Receiving.on_result, Receiving.on_refuse

        def watched_ask(receiver):
            self.asked(receiver.protocol, receiver.peer.identity.incarnation)
            ask(receiver)
            machine, turns = receiver.protocol, receiver._turns
            if machine.ahead and machine.staged_ahead:
                token = b"" if turns is None else turns.token
                self.ahead(machine, to_places(receiver.grants.ring), machine.staged_ahead, token)

        def watched_grant(machine, chunks, lease_ms, generation=0, ring=(), copied=0, token=b""):
            before = machine.granted
            messages = grant(machine, chunks, lease_ms, generation, ring, copied, token)
            self.granted(machine, range(before, chunks), ring, copied, token)
            return messages

        def first_answer(hear):
            def heard(machine, message):
                ahead = machine.ahead
                found = hear(machine, message)
                if ahead and not machine.ahead and not machine.granted:
                    self.over(machine)  # what `Fetch` granted is void
                elif ahead and not machine.ahead:
                    self.accepted(machine)
                return found

            return heard

        def watched_came(machine, chunks):
            fresh = came(machine, chunks)
            self.arrived(machine, chunks)
            return fresh

        def watched_result(machine, message):
            fresh = result(machine, message)
            if message.chunk == WHOLE and message.status is not Status.IN_DOUBT:
                self.over(machine)
            return fresh

        def watched_end(end):
            def ended(machine, *message):
                end(machine, *message)
                self.over(machine)

            return ended

        monkeypatch.setattr(Receiver, "send_fetch", watched_ask)
        monkeypatch.setattr(Receiving, "grant", watched_grant)
        monkeypatch.setattr(Receiving, "on_accept", first_answer(accept))
        monkeypatch.setattr(Receiving, "on_ready", first_answer(wanted))
        monkeypatch.setattr(Receiving, "on_notified", watched_came)
        monkeypatch.setattr(Receiving, "on_result", watched_result)
        monkeypatch.setattr(Receiving, "on_refuse", watched_end(refused))
        monkeypatch.setattr(Receiving, "on_evidence", watched_end(Receiving.on_evidence))


class _Staging:
    """One share of an arena: where peers write by what they were granted, and where our own gathers do."""

    def __init__(self, name, share: Share, hands: Hands | None):
        self.name, self.share, self.base, self.end = name, share, share.base, share.base + share.capacity
        self._hands = hands

    def claim(self, address, length, *, write, peer=None):
        for extent in list(self.share.live):
            if extent.address <= address and address + length <= extent.address + extent.length:
                if write and extent.state not in _WRITABLE:
                    return None
                if self._hands is None:
                    return extent
                if write:
                    return self._hands.writer(address, length, peer)
                return extent if self._hands.who(address, length) is None else None
        return None

    def __str__(self):
        return f"{self.share.name} memory of {self.name}"


class Ledger:
    """All memory of a simulation."""

    def __init__(self, alarmed: Callable[[str], None] = lambda _: None):
        self.faults: list[str] = []  # what was seen that must not be, in the order in which it was
        self.alarmed = alarmed  # called with each
        self.hands = Hands(self.say)
        self._incarnations: dict[str, bytes] = {}
        self._areas: list[_Layer | _Staging] = []

    def say(self, faults: Iterable[str]):
        for fault in faults:
            self.faults.append(fault)
            self.alarmed(fault)

    def cache(self, name, cache) -> BlockBooks:
        books = BlockBooks(name, cache)
        for layer in cache.layers:
            memory = cache.memory[layer]
            shape = cache.view(layer).shape
            numbers = np.broadcast_to(np.arange(shape[1])[None, :, None, None, None], shape)
            order = np.argsort(cache._order)
            self._areas.append(_Layer(books, memory, np.ascontiguousarray(numbers.transpose(order)).reshape(-1)))
        return books

    def arena(self, name, worker):
        self._incarnations[name] = bytes.fromhex(worker.card.incarnation)
        for share in arena_shares(worker):
            if share.base:
                self._areas.append(_Staging(name, share, self.hands if share.name == "receive" else None))
                ctypes.memset(share.base, CANARY, share.capacity)

    def forget_arena(self, name):
        """Its memory is given back to the system."""
        self._areas = [area for area in self._areas if not (isinstance(area, _Staging) and area.name == name)]

    def claim(self, address, length, *, write, by=""):
        """Who is entitled to these bytes, and in which memory they are; `by` which agent they are posted."""
        for area in self._areas:
            if area.base <= address < area.end:
                peer = self._incarnations.get(by.partition(".")[0])  # an agent that was made anew has a number
                return area.claim(address, length, write=write, peer=peer), area
        return None, None

    def is_staging(self, address):
        """Whether it is in staging memory."""
        return any(isinstance(area, _Staging) and area.base <= address < area.end for area in self._areas)

    def check(self, what, source, target, length, expected=None, *, by=""):
        """Bytes are about to be moved.

        Args:
            what: By whom.
            source: Address that is read; None if it was read before.
            target: Address that is written.
            length: How many.
            expected: What this said when the post was made: it must still be so.
            by: The agent that has posted it, if one has.

        Returns:
            Who is entitled to both sides.
        """
        claims = []
        for address, write in ((source, False), (target, True)):
            if address is None:
                claims.append(None)
                continue
            claim, area = self.claim(address, length, write=write, by=by)
            claims.append(claim)
            doing = "writes" if write else "reads"
            if area is None:
                self.say([f"{what} {doing} {length} bytes that nobody knows"])
            elif claim is None:
                self.say([f"{what} {doing} {length} bytes of the {area} that are nobody's"])
            elif expected is not None and expected[write] is not None and claim != expected[write]:
                self.say([f"{what} {doing} {length} bytes of the {area} that are somebody else's by now"])
        return claims


class WatchedNetwork(LoopbackNetwork):
    """A loopback network of which a ledger sees every byte."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger
        self._entitled: dict[PostedPart, list] = {}
        self._used: dict[int, PostedPart] = {}  # what was posted to a place, by the grant
        self.notices: list[tuple[str, str, bytes]] = []  # from, to, what
        self.gone: set[str] = set()  # agents of processes that have ended, which move nothing any more

    @staticmethod
    def _ways(part):
        for here, there, length in part.copies:
            here = here if part.carried is None else None  # noqa: PLW2901 - it was read already
            yield (here, there, length) if part.operation is Operation.WRITE else (there, here, length)

    @staticmethod
    def passed(token, lane, chunks):
        """So many are done by who has them in this direction."""

    def notify(self, src, dst, message):
        self.notices.append((src, dst, message))
        self.ledger.hands.notified(message, self.passed)
        super().notify(src, dst, message)

    def forge(self, src, dst, message):
        """An agent says what it must not. To one that is gone, or disconnected, it can say nothing."""
        with suppress(FabricError):
            super().notify(src, dst, message)

    def _begin(self, part):
        what = f"a {part.operation.value} that {part.src.name} posts to {part.dst}"
        self._entitled[part] = [self.ledger.check(what, *way, by=part.src.name) for way in self._ways(part)]
        for (_, target, _), (_, grant) in zip(self._ways(part), self._entitled[part], strict=True):
            if grant is None or not self.ledger.is_staging(target):
                continue
            # a post that failed may be flushed by another one to where it went
            if grant in self._used and self._used[grant].error is None:
                self.ledger.say([f"{what} goes where another went under the same grant"])
            self._used[grant] = part
        try:
            super()._begin(part)
        finally:
            if part.error is not None:  # what it owes now lands later, if ever
                self._entitled[part] = [self.ledger.check(what, *way, by=part.src.name) for way in self._ways(part)]

    def _land(self, part, limit=None):
        if {part.src.name, part.dst} & self.gone:
            return
        target = self._agents.get(part.dst)
        if limit != 0 and target is not None and part.keys <= target.keys() | part.src.keys():
            what = f"a {part.operation.value} of {part.src.name} that lands at {part.dst}"
            for way, entitled in zip(self._ways(part), self._entitled.pop(part, ()), strict=False):
                self.ledger.check(what, *way, entitled, by=part.src.name)
        super()._land(part, limit)


def _claims(ledger: Ledger, tables, before=()):
    """Who is entitled to all that a copy reads and writes; it must be who was `before`."""
    ways = [("a copy", source, target, length) for source, _, target, length in pieces(tables)]
    ways += [
        ("a gather that clears its gaps", None, blank.address + line * blank.pitch, blank.width)
        for one in opened(tables)
        for blank in one.blanks
        for line in range(blank.lines)
    ]
    return [ledger.check(*way, expected) for way, expected in zip(ways, before or [None] * len(ways), strict=True)]


class _Steps:
    """Steps of a flow, and whose the memory was of those that might begin.

    That a step is done is seen when the machine knows it: a peer whose gate it has left may have its memory back before
    anybody is told.
    """

    def __init__(self, ledger: Ledger, jobs: list[CopyJob]):
        self.ledger, self.jobs = ledger, jobs
        self._claims: list[list] = []
        self._passed = self._heard = 0

    def may_begin(self, flow: Flow):
        """Those that are allowed may, if they are known and the flow is not over, and its gate is not shut for good."""
        if flow.cancelled or flow.over or is_shut(flow.job.passage):
            return
        for job in self.jobs[len(self._claims) : self._most(flow)]:
            self._claims.append(_claims(self.ledger, job.tables))

    def _most(self, flow: Flow):
        """How many may begin."""
        turns, heard = flow.turns, max(flow.peer_steps, self._heard)
        if turns is None:
            return flow.allowed
        return min(flow.allowed, heard + (turns.places if flow.lane == 0 else 0))

    def look(self, flow: Flow, rows):
        """The machine has gone on."""
        row = rows[flow.slot]
        if row[records.STEPS_AT] == flow.table.ctypes.data:  # else it does not know of the flow yet
            self._heard = int(row[records.HEARD])
            self.passed(int(row[records.PASSED]))
            self.may_begin(flow)

    def passed(self, steps: int):
        """The first so many are done."""
        if steps > len(self._claims):
            self.ledger.say([f"{steps} steps of a flow are done, and {len(self._claims)} might begin"])
        for step in range(self._passed, min(steps, len(self._claims))):
            _claims(self.ledger, self.jobs[step].tables, self._claims[step])
        self._passed = max(self._passed, steps)

    def ended(self, outcome, *, gated: bool):
        """It is over. Until it was told so, others might have been under way: nobody else may have had their memory.

        But for what is copied past a gate, which all have left by then.
        """
        self.passed(outcome.steps if outcome.in_doubt or gated else max(outcome.steps, len(self._claims)))


def watch(monkeypatch, ledger: Ledger):
    """Let the ledger see the copies of this process, and canaries be put into staging memory that is given back."""
    submit, move, reserve = Mover.submit, Share._move, Share._reserve
    begin, add, allow, hear = Mover.flow, Mover.add, Mover.allow, Mover.note_peer_steps
    step = _Machine.step
    steps_of: dict[Flow, _Steps] = {}
    running: list[Flow] = []
    ledger.hands.watch(monkeypatch)

    def watched_submit(mover, job, direction):
        """Nobody else may have its memory from when it is asked for until it is told that it has ended."""
        claims = _claims(ledger, job.tables)

        def done(outcome):
            if outcome.error is None and not outcome.stopped:
                _claims(ledger, job.tables, claims)
            job.done(outcome)

        return submit(mover, replace(job, done=done), direction)

    def watched_flow(mover, job, direction, steps, *, total, allowed, progress, **options):
        """The same of each step, from when it may begin until it is told to be done."""
        steps = list(steps)
        watched = _Steps(ledger, singly(steps))

        def done(outcome):
            watched.ended(outcome, gated=job.post is None and job.passage is not None)
            running.remove(flow)
            job.done(outcome)

        def more(outcome):
            watched.passed(outcome.steps)
            progress(outcome)

        options |= {"total": total, "allowed": allowed, "progress": more}
        flow = begin(mover, replace(job, done=done), direction, steps, **options)
        steps_of[flow] = watched
        running.append(flow)
        watched.may_begin(flow)
        return flow

    def watched_add(mover, flow, steps, **options):
        steps = list(steps)
        add(mover, flow, steps, **options)
        steps_of[flow].jobs += singly(steps)
        steps_of[flow].may_begin(flow)

    def watched_allow(mover, flow, steps, until=None):
        allow(mover, flow, steps, until)
        steps_of[flow].may_begin(flow)

    def watched_hear(mover, flow, steps):
        hear(mover, flow, steps)
        steps_of[flow].may_begin(flow)

    def passed(token, lane, chunks):
        for flow in running:
            if flow.turns is not None and flow.turns.token == token and flow.lane == lane:
                steps_of[flow].passed(chunks - flow.turns.first)

    def watched_step(machine):
        delay = step(machine)
        for flow in running:
            if machine._held.get(flow.slot) is flow:
                steps_of[flow].look(flow, machine.jobs)
        return delay

    def watched_move(share: Share, extent: Extent, target: ExtentState):
        place = extent.address, extent.length
        if target is ExtentState.FREE and ledger.hands.who(*place) is not None:
            ledger.say([f"{share.name} memory was given back while a peer had it"])
        elif target is ExtentState.QUARANTINED and share.name == "receive" and not ledger.hands.may(*place):
            ledger.say([f"{share.name} memory is in doubt though no peer has it"])
        move(share, extent, target)
        if target is ExtentState.FREE and share.base:
            ctypes.memset(extent.address, CANARY, extent.length)

    def watched_reserve(share: Share, peer, nbytes, length, *state):
        extent = reserve(share, peer, nbytes, length, *state)
        held = ctypes.string_at(extent.address, length) if share.base else b""
        if held.strip(bytes([CANARY])):
            ledger.say([f"{share.name} memory was written while it was free"])
        return extent

    monkeypatch.setattr(Mover, "submit", watched_submit)
    monkeypatch.setattr(_Machine, "step", watched_step)
    monkeypatch.setattr(Mover, "flow", watched_flow)
    monkeypatch.setattr(Mover, "add", watched_add)
    monkeypatch.setattr(Mover, "allow", watched_allow)
    monkeypatch.setattr(Mover, "note_peer_steps", watched_hear)
    monkeypatch.setattr(WatchedNetwork, "passed", staticmethod(passed))
    monkeypatch.setattr(Share, "_move", watched_move)
    monkeypatch.setattr(Share, "_reserve", watched_reserve)
