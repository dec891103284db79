"""An in-process transport that can be made to fail, for tests of kvxfer and of programs that use it.

    network = LoopbackNetwork()
    a, b = LoopbackTransport("a", network), LoopbackTransport("b", network)
    network.hold("b")              # posts to b stay in flight, their bytes unmoved
    ...                            # a's fabric gives up
    network.release("b")           # now they land: the late bytes that corrupt reused memory

Bytes are copied between addresses of this process, within what is registered; nothing happens outside of a call, there
is no thread and, unless `pace` brings one, no clock, so a test decides every interleaving. Faults are told to the
network by the name of the agent at the far end of a post, or `EVERY_PEER`. The network may be used from any thread.
"""

import ctypes
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy.port import MEMORIES, Descriptors, Native, Operation
from kvxfer.errors import FabricError
from kvxfer.protocol.messages import MemorySpan

__all__ = [
    "EVERY_PEER",
    "Fault",
    "Faults",
    "LogEntry",
    "LoopbackNetwork",
    "LoopbackTransport",
    "PostedPart",
]

# --- faults


class LogEntry(NamedTuple):
    """A range of bytes that was touched at the far end of a post, when it was touched."""

    operation: Operation  # what the initiator did
    src: str  # agent that posted
    dst: str  # agent whose memory was written or read
    address: int
    length: int


@dataclass(slots=True, eq=False)
class Fault:
    """What becomes of one post once `skip` others have passed: see `refuse_next`, `break_next` and `damage_next`."""

    skip: int
    refuse: bool
    after_bytes: int = 0
    at_post: bool = False
    disconnected: bool = False
    lingers: bool = False
    damage: int | None = None


@dataclass(slots=True, eq=False)
class PostedPart:
    """A posted part."""

    src: "LoopbackTransport"
    dst: str  # name of the agent at the far end
    operation: Operation
    copies: list[tuple[int, int, int]]  # what it still owes: (local address, remote address, bytes)
    keys: frozenset[int]  # the registrations on both sides that must still be in force when bytes move
    polls: int = 0  # polls to answer with "not yet"
    due: float = 0.0  # when its bytes land, by the clock of `LoopbackNetwork.pace`
    held: bool = False  # it waits for `LoopbackNetwork.release`
    offered: bool = False  # its bytes land when the agent at the far end makes progress
    wedged: bool = False  # it never ends
    released: bool = False
    error: FabricError | None = None  # what a poll raises
    carried: list[bytes] | None = None  # what its copies carry, once they are read already
    damage: int | None = None  # which of its bytes arrives with a bit flipped

    def leave(self) -> None:
        """Have no more to do with the initiator's memory: what a write carries was read, a read carries nothing."""
        if self.operation is Operation.READ:
            self.copies.clear()
        elif self.carried is None:
            self.carried = [ctypes.string_at(here, length) for here, _, length in self.copies]


@dataclass(slots=True)
class Faults:
    """The faults that one peer is under until it is mended: those of single posts that are coming, and of all.

    `bytes_per_second` is 0 for a link without a speed; `busy_until` is when it is through with what was posted so far.
    """

    coming: list[Fault] = field(default_factory=list[Fault])
    polls: int = 0
    held: bool = False
    wedged: bool = False
    needs_target: bool = False
    mute: bool = False
    echo: bool = False
    bytes_per_second: float = 0.0
    busy_until: float = 0.0


# --- the network

EVERY_PEER: Final = "*"
"""Instead of a name: the fault concerns posts to anybody."""


class LoopbackNetwork:
    """Agents of one process, and the faults between them."""

    def __init__(self) -> None:
        # every range of bytes written or read at a far end, in the order in which it happened
        self.log: list[LogEntry] = []
        self.keys: Final = itertools.count(1)  # numbers for registrations
        self._lock = threading.RLock()
        self._agents: dict[str, LoopbackTransport] = {}
        self._faults: dict[str, Faults] = {}
        self._flying: list[PostedPart] = []  # whose bytes land without a poll
        self._notices: list[tuple[str, str, bytes]] = []  # from, to, what
        self._echoes: list[tuple[str, str, bytes]] = []  # those that come again, behind these
        self._now: Callable[[], float] = _no_clock
        self._dead: set[str] = set()
        self._first: dict[str, str] = {}  # by the name of an agent that was made anew, its first one

    def hold(self, peer: str) -> None:
        """Keep coming posts in flight, their bytes unmoved, until `release`."""
        with self._lock:
            self._of(peer).held = True

    def release(self, peer: str, posts: int | None = None) -> int:
        """Let held posts land, also those that were given up; returns how many did.

        Args:
            peer: As in `hold`.
            posts: Only this many, oldest first, and go on holding. None: all of them, and hold no more.
        """
        with self._lock:
            self._arrive()
            if posts is None:
                self._of(peer).held = False
            return self._bring([part for part in self._flying if part.held and peer in self._called(part.dst)][:posts])

    def held(self, peer: str) -> int:
        """How many posts wait for `release`."""
        with self._lock:
            return sum(part.held and peer in self._called(part.dst) for part in self._flying)

    def delay(self, peer: str, polls: int) -> None:
        """Let bytes of coming posts land, and their end be seen, at the poll after `polls` polls; not if given up."""
        with self._lock:
            self._of(peer).polls = polls

    def pace(self, peer: str, bytes_per_second: float, now: Callable[[], float]) -> None:
        """Let coming posts take time, one after the other: their bytes land when it has passed, given up or not.

        Args:
            peer: As in `hold`; posts to everybody share one link.
            bytes_per_second: Of that link. 0: coming posts take no time (again).
            now: The clock, in seconds; one for the whole network.
        """
        with self._lock:
            self._now = now
            self._of(peer).bytes_per_second = bytes_per_second

    def wedge(self, peer: str) -> None:
        """Never end coming posts, and never move their bytes."""
        with self._lock:
            self._of(peer).wedged = True

    def need_target(self, peer: str) -> None:
        """Let bytes of coming posts land when the agent at the far end makes progress, as TCP does."""
        with self._lock:
            self._of(peer).needs_target = True

    def refuse_next(self, peer: str, *, skip: int = 0) -> None:
        """Fail a coming post before any byte moved: `skip` posts pass first."""
        with self._lock:
            self._of(peer).coming.append(Fault(skip, refuse=True))

    def break_next(
        self,
        peer: str,
        *,
        after_bytes: int = 0,
        skip: int = 0,
        at_post: bool = False,
        disconnected: bool = False,
        lingers: bool = False,
    ) -> None:
        """Fail a coming post in the middle.

        Args:
            peer: As in `hold`.
            after_bytes: Bytes that land before.
            skip: Posts that pass first.
            at_post: The call that posts fails, instead of a poll.
            disconnected: The error says that the peer is gone.
            lingers: The rest of its bytes stays in flight until `release`; no later post to the peer ends before.
        """
        with self._lock:
            self._of(peer).coming.append(Fault(skip, False, after_bytes, at_post, disconnected, lingers))

    def mute(self, peer: str) -> None:
        """Lose coming notifications to a peer."""
        with self._lock:
            self._of(peer).mute = True

    def echo(self, peer: str) -> None:
        """Deliver coming notifications to a peer twice, the second time behind those that came meanwhile."""
        with self._lock:
            self._of(peer).echo = True

    def damage_next(self, peer: str, *, byte: int = 0) -> None:
        """Flip a bit of the next post on its way, and let it end as if nothing were.

        Args:
            peer: As in `hold`.
            byte: Which of its bytes is hit, counted from its first.
        """
        with self._lock:
            self._of(peer).coming.append(Fault(0, refuse=False, damage=byte))

    def disconnect(self, peer: str) -> None:
        """Cut everybody's connection to an agent: posts in flight and coming ones fail.

        Whoever posted has no more to do with it: reads bring nothing any more, and bytes that are under way, read
        already, can still land.
        """
        with self._lock:
            self._arrive()
            self._dead.add(peer)
            for part in self._flying:
                if peer in self._called(part.dst):
                    part.leave()

    def mend(self, peer: str) -> None:
        """Take back every fault of a peer for posts to come. What is held or wedged stays so."""
        with self._lock:
            self._faults.pop(peer, None)
            self._dead.discard(peer)

    @property
    def agents(self) -> list[str]:
        """Names of those that are open: of workers that are, or were left open because something may still move."""
        with self._lock:
            return list(self._agents)

    # ---- called by the transports ------------------------------------------------------------------------------------

    def attach(self, transport: "LoopbackTransport") -> None:
        """Let an agent join."""
        with self._lock:
            if transport.name in self._agents:
                raise FabricError(f"an agent {transport.name!r} is open already")
            self._agents[transport.name] = transport

    def detach(self, transport: "LoopbackTransport") -> None:
        """Let an agent leave, if it had joined."""
        with self._lock:
            if self._agents.get(transport.name) is transport:
                del self._agents[transport.name]
                self.heard(transport.name)  # whoever comes by its name was told nothing

    def renew(self, transport: "LoopbackTransport", name: str) -> None:
        """Let an agent come back under another name, under the same faults, without what is under way to it.

        What it has under way itself was read by now, or is not any more: writes may still land.
        """
        with self._lock:
            self._arrive()
            self.detach(transport)
            for part in self._flying:
                if part.src is transport:
                    part.leave()
                    part.keys -= transport.keys()
            self._agents[name] = transport
            self._first[name] = self._first.get(transport.name, transport.name)

    def begin(self, part: PostedPart) -> None:
        """Put a part in flight, under the faults of its peer."""
        with self._lock:
            self._arrive()
            self._begin(part)

    def poll(self, part: PostedPart) -> bool:
        """True when a part has ended."""
        with self._lock:
            self._arrive()
            self._check_alive(part.dst, in_doubt=True)
            if part.error is not None:
                raise part.error
            if part.copies and part.dst not in self._agents:
                raise FabricError(f"{part.dst} is gone", disconnected=True, in_doubt=True)
            if part.wedged or self._waits(part):
                return False
            if part.polls > 0:
                part.polls -= 1
                return False
            self._land(part)
            return True

    def _waits(self, part: PostedPart) -> bool:
        """Whether a part is on its way, or one before it that has failed is."""
        return part in self._flying or any(
            one.error is not None and one.src is part.src and one.dst == part.dst for one in self._flying
        )

    def progress(self, agent: str) -> None:
        """An agent makes progress: what waits for that lands."""
        with self._lock:
            self._bring([part for part in self._flying if part.offered and part.dst == agent])

    def notify(self, src: str, dst: str, message: bytes) -> None:
        """An agent tells another something."""
        with self._lock:
            self._check_alive(dst, in_doubt=False)
            if dst not in self._agents:
                raise FabricError(f"{dst} is gone", disconnected=True)
            if not any(faults.mute for faults in self._both(dst)):
                self._notices.append((src, dst, message))
                if any(faults.echo for faults in self._both(dst)):
                    self._echoes.append((src, dst, message))

    def heard(self, agent: str) -> list[tuple[str, bytes]]:
        """What an agent was told."""
        with self._lock:
            found = [(src, message) for src, dst, message in self._notices + self._echoes if dst == agent]
            self._notices = [notice for notice in self._notices if notice[1] != agent]
            self._echoes = [notice for notice in self._echoes if notice[1] != agent]
            return found

    def _of(self, peer: str) -> Faults:
        return self._faults.setdefault(peer, Faults())

    def _both(self, peer: str) -> Iterator[Faults]:
        return (self._faults[name] for name in self._called(peer) if name in self._faults)

    def _called(self, peer: str) -> dict[str, None]:
        """Names under which faults are told of an agent: its own, its first one, and everybody's; each once."""
        return dict.fromkeys([peer, self._first.get(peer, peer), EVERY_PEER])

    def _check_alive(self, peer: str, *, in_doubt: bool) -> None:
        if not self._dead.isdisjoint(self._called(peer)):
            raise FabricError(f"{peer} is disconnected", disconnected=True, in_doubt=in_doubt)

    def _due(self, peer: str) -> Fault | None:
        """The fault that this very post meets, if any."""
        due: Fault | None = None
        for faults in self._both(peer):
            for fault in list(faults.coming):
                if fault.skip == 0 and due is None:
                    due = fault
                    faults.coming.remove(fault)
                else:
                    fault.skip = max(fault.skip - 1, 0)
        return due

    def _begin(self, part: PostedPart) -> None:
        self._check_alive(part.dst, in_doubt=False)
        if part.dst not in self._agents:
            raise FabricError(f"{part.dst} is gone", disconnected=True)
        fault = self._due(part.dst)
        if fault is not None and fault.refuse:
            raise FabricError(f"the loopback was told to refuse a {part.operation.value} to {part.dst}")
        for faults in self._both(part.dst):
            part.polls = max(part.polls, faults.polls)
            part.held |= faults.held
            part.wedged |= faults.wedged
            part.due = max(part.due, self._travels(part, faults))
        if fault is not None and fault.damage is not None:
            part.damage = fault.damage
        elif fault is not None:
            self._land(part, fault.after_bytes)
            if fault.lingers:
                part.held = True
                self._flying.append(part)
                if fault.disconnected:
                    part.leave()
            else:
                part.copies = []
            words = f"the loopback was told to break a {part.operation.value} to {part.dst}"
            part.error = FabricError(words, disconnected=fault.disconnected, in_doubt=True)
            if fault.at_post:
                raise part.error
            return
        if part.wedged:
            return
        part.offered = not (part.held or part.due) and any(faults.needs_target for faults in self._both(part.dst))
        if part.held or part.due or part.offered:
            self._flying.append(part)
        elif part.polls == 0:
            self._land(part)

    def _travels(self, part: PostedPart, faults: Faults) -> float:
        """When the bytes of a part are through a link that has a speed; 0 for one that has none."""
        if not faults.bytes_per_second:
            return 0.0
        nbytes = sum(length for _, _, length in part.copies)
        faults.busy_until = max(faults.busy_until, self._now()) + nbytes / faults.bytes_per_second
        return faults.busy_until

    def _arrive(self) -> None:
        """Let every part land whose time has come."""
        now = self._now()
        due = [part for part in self._flying if not part.held and 0.0 < part.due <= now]
        self._bring(sorted(due, key=lambda part: part.due))

    def _bring(self, parts: Sequence[PostedPart]) -> int:
        """Let these parts land that are in flight; returns how many."""
        for part in parts:
            self._flying.remove(part)
            part.held = False
            self._land(part)
        return len(parts)

    def _land(self, part: PostedPart, limit: int | None = None) -> None:
        """Move the bytes that a part still owes, at most `limit`, unless either side deregistered the memory since.

        A real transport would write there all the same; here the address may belong to somebody else by now.
        """
        target = self._agents.get(part.dst)
        if target is None:
            return
        copies, part.copies = part.copies, []
        left = sum(length for _, _, length in copies) if limit is None else limit
        if not part.keys <= target.keys() | part.src.keys():
            return
        for number, (here, there, whole) in enumerate(copies):
            length = min(whole, left)
            if length > 0:
                to, fro = (there, here) if part.operation is Operation.WRITE else (here, there)
                ctypes.memmove(to, part.carried[number] if part.carried is not None else fro, length)
                if part.damage is not None:
                    if 0 <= part.damage < length:
                        hit = ctypes.c_ubyte.from_address(to + part.damage)
                        hit.value ^= 1
                    part.damage -= length
                self.log.append(LogEntry(part.operation, part.src.name, part.dst, there, length))
            if length < whole:
                part.copies.append((here + length, there + length, whole - length))
            left -= length


def _no_clock() -> float:
    return 0.0


# --- as the mover calls it
#
# They are called from compiled code without the interpreter's lock, and take it. What is a pointer elsewhere is the
# address of a number here. What a call raises is kept under a code of its own, for whoever hears of that.

_GONE: Final = -10
_IN_DOUBT, _REFUSED = -2000, -1_000_000
"""Codes of errors begin here and there, downwards: what may still move, and what does not."""
_KINDS: Final = tuple(MEMORIES)
_OPERATIONS: Final = (Operation.READ, Operation.WRITE)
_MOST_ERRORS: Final = 1000
_UNDER_WAY: Final = 1


class _Request:
    """What is to be moved, and that once it is posted."""

    def __init__(self, operation: Operation, near: Descriptors, far: Descriptors, peer: str) -> None:
        self.moves: Final = (peer, operation, near, far)
        self.part: Any = None
        self.gone = False


class _Ported:
    """The functions, and what they work on."""

    def __init__(self, transport: "LoopbackTransport") -> None:
        self._transport: Final = transport
        self._numbers: Final = itertools.count(1)
        self._places: Final[dict[int, ctypes.c_int64]] = {}
        self._lists: Final[dict[int, tuple[int, list[tuple[int, int, int]]]]] = {}
        self._requests: Final[dict[int, _Request]] = {}
        self._errors: Final[dict[int, FabricError]] = {}
        self._functions: Final[list[Any]] = []
        self._agent: Final = self._place()
        self._heard: Final[dict[bytes, list[bytes]]] = {}  # since it was forgotten, by agent
        self._told: Final[list[ctypes.Array[ctypes.c_char]]] = []  # what pointers point to that were given out of it

    def native(self) -> Native:
        """All of it."""
        table = [
            self._function(2, self._create_list),
            self._function(4, self._add_piece),
            self._function(1, self._destroy_list),
            self._function(7, self._make),
            self._function(3, self._begin),
            self._function(2, self._status),
            self._function(2, self._release),
            self._function(1, self._destroy),
            self._function(3, self._notices),
            self._function(1, self._forget_notices),
            self._function(5, self._notify),
            self._function(2, self._notice_agents),
            self._function(3, self._notice_agent),
            self._function(3, self._notice_count),
            self._function(5, self._notice),
            self._function(2, self._cause),
        ]
        # a part is done when every earlier one to its peer has ended, but for those that were told to be held
        return Native(np.array(table, np.int64), self._agent, 0, self._error, orderly=True)

    def _function(self, count: int, function: Callable[..., int]) -> int:
        made = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * count)(partial(self._call, function))
        self._functions.append(made)
        return ctypes.cast(made, ctypes.c_void_p).value or 0

    def _place(self) -> int:
        """What stands for a pointer: the address of a number of its own."""
        word = ctypes.c_int64(next(self._numbers))
        self._places[ctypes.addressof(word)] = word
        return ctypes.addressof(word)

    def _call(self, function: Callable[..., int], *arguments: int) -> int:
        try:
            return function(*arguments)
        except FabricError as error:
            return self._kept(error, _IN_DOUBT)
        except BaseException as error:  # noqa: BLE001 - nobody is above a C function
            told: Any = SimpleNamespace(
                exc_type=type(error), exc_value=error, exc_traceback=error.__traceback__, err_msg=None, object=function
            )
            sys.unraisablehook(told)
            return self._kept(FabricError(f"a defect of the transport: {error!r}"), _IN_DOUBT)

    def _kept(self, error: FabricError, base: int) -> int:
        code = base - next(self._numbers)
        self._errors[code] = error
        if len(self._errors) > _MOST_ERRORS:
            del self._errors[next(iter(self._errors))]
        return code

    def _error(self, code: int, doing: str, gone: bool, in_doubt: bool) -> FabricError:
        kept = self._errors.pop(code, None)
        text = f"could not {doing}: code {code}" if kept is None else str(kept)
        error = FabricError(text, disconnected=gone, in_doubt=in_doubt)
        error.__cause__ = None if kept is None else kept.__cause__
        return error

    # --- the functions

    def _create_list(self, kind: int, out: int) -> int:
        made = self._place()
        self._lists[made] = kind, []
        ctypes.c_int64.from_address(out).value = made
        return 0

    def _add_piece(self, made: int, address: int, nbytes: int, device: int) -> int:
        self._lists[made][1].append((address, nbytes, device))
        return 0

    def _destroy_list(self, made: int) -> int:
        del self._lists[made], self._places[made]
        return 0

    def _make(self, _agent: int, operation: int, near: int, far: int, peer: int, out: int, _options: int) -> int:
        here, there = (
            Descriptors(_KINDS[kind], pieces[0][2], np.array(pieces, np.int64)[:, :2])
            for kind, pieces in (self._lists[near], self._lists[far])
        )
        made = self._place()
        self._requests[made] = _Request(_OPERATIONS[operation], here, there, ctypes.string_at(peer).decode())
        ctypes.c_int64.from_address(out).value = made
        return 0

    def _begin(self, _agent: int, made: int, _options: int) -> int:
        request = self._requests[made]
        try:
            request.part = self._transport.post(*request.moves)
        except FabricError as error:
            request.gone = error.disconnected
            return self._kept(error, _IN_DOUBT if error.in_doubt else _REFUSED)
        return _UNDER_WAY

    def _status(self, _agent: int, made: int) -> int:
        request = self._requests[made]
        try:
            return 0 if self._transport.poll(request.part) else _UNDER_WAY
        except FabricError as error:
            request.gone = error.disconnected
            raise

    def _release(self, _agent: int, made: int) -> int:
        if (part := self._requests[made].part) is not None:
            self._transport.release(part)
        return 0

    def _destroy(self, made: int) -> int:
        del self._requests[made], self._places[made]
        return 0

    def _notices(self, _agent: int, _notices: int, _options: int) -> int:
        self._transport.progress()
        for name, message in self._transport.heard():
            self._heard.setdefault(name.encode(), []).append(message)
        return 0

    def _forget_notices(self, _notices: int) -> int:
        self._heard.clear()
        self._told.clear()
        return 0

    def _notify(self, _agent: int, peer: int, message: int, nbytes: int, _options: int) -> int:
        self._transport.notify(ctypes.string_at(peer).decode(), ctypes.string_at(message, nbytes))
        return 0

    def _notice_agents(self, _notices: int, out: int) -> int:
        return self._out(out, len(self._heard))

    def _notice_agent(self, _notices: int, number: int, out: int) -> int:
        return self._out(out, self._pointer(list(self._heard)[number]))

    def _notice_count(self, _notices: int, agent: int, out: int) -> int:
        return self._out(out, len(self._heard[ctypes.string_at(agent)]))

    def _notice(self, _notices: int, agent: int, number: int, out: int, nbytes: int) -> int:
        message = self._heard[ctypes.string_at(agent)][number]
        self._out(nbytes, len(message))
        return self._out(out, self._pointer(message))

    @staticmethod
    def _out(at: int, number: int) -> int:
        ctypes.c_int64.from_address(at).value = number
        return 0

    def _pointer(self, text: bytes) -> int:
        self._told.append(ctypes.create_string_buffer(text))
        return ctypes.addressof(self._told[-1])

    def _cause(self, _agent: int, number: int) -> int:
        found = next((one for at, one in self._requests.items() if self._places[at].value == number), None)
        return _GONE if found is not None and found.gone else 0


# --- the transport


class LoopbackTransport:
    """A `Transport` between agents of one `LoopbackNetwork`. Memory is `"DRAM"` of this process.

    It is stricter than NIXL: pieces outside the registrations named by the peer's metadata are refused, and so is a
    part that is given back twice (a `RuntimeError`: that is a defect, no outcome).

    Args:
        name: Unique in the network while it is open.
        network: Shared by all agents that shall meet.
    """

    def __init__(self, name: str, network: LoopbackNetwork) -> None:
        self.open_handles = 0  # parts that were posted and not yet given back
        self.progressed = 0  # how often `progress` was called
        self._name = name
        self._names: Final = (f"{name}.{number}" for number in itertools.count(1))  # of the agents that come after it
        self._network = network
        self._registered: dict[int, tuple[MemorySpan, ...]] = {}
        self._peers: dict[str, dict[int, tuple[MemorySpan, ...]]] = {}
        self._open = False

    @property
    def name(self) -> str:
        """Unique name of this agent."""
        return self._name

    def keys(self) -> frozenset[int]:
        """Numbers of the registrations that are in force."""
        return frozenset(self._registered)

    def setup(self) -> None:
        """Join the network."""
        self._network.attach(self)
        self._open = True

    def native(self) -> Native:
        """Its functions, for compiled code."""
        return _Ported(self).native()

    def register(self, memories: Sequence[MemorySpan]) -> object:
        """Note memory as reachable; its owner keeps it allocated until `deregister`."""
        self._check_open()
        for memory in memories:
            if memory.kind != "DRAM" or memory.address <= 0 or memory.length <= 0:
                raise FabricError(f"the loopback takes memory of this process only: {memory}")
        key = next(self._network.keys)
        self._registered = {**self._registered, key: tuple(memories)}
        return key

    def deregister(self, token: object) -> None:
        """Undo one `register`."""
        self._check_open()
        if token not in self._registered:
            raise FabricError(f"{token!r} is not registered (any more)")
        self._registered = {key: memories for key, memories in self._registered.items() if key != token}

    def metadata(self, tokens: Sequence[object]) -> bytes:
        """Name of this agent, and what these registrations cover."""
        self._check_open()
        if unknown := [token for token in tokens if token not in self._registered]:
            raise FabricError(f"{unknown} is not registered (any more)")
        covered = {
            key: [(memory.address, memory.length) for memory in memories]
            for key, memories in self._registered.items()
            if key in tokens
        }
        return json.dumps({"agent": self._name, "memories": covered}).encode()

    def connect(self, metadata: bytes) -> str:
        """Learn about a peer of the same network, or about more of its memory."""
        self._check_open()
        try:
            content = json.loads(metadata)
            peer = str(content["agent"])
            memories = {
                int(key): tuple(MemorySpan("DRAM", 0, int(address), int(nbytes)) for address, nbytes in ranges)
                for key, ranges in content["memories"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise FabricError(f"this is no metadata of a loopback agent: {error!r}") from error
        self._peers.setdefault(peer, {}).update(memories)
        return peer

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Not a fence: held bytes may still land."""
        self._check_open()
        self._peers.pop(peer, None)

    def post(self, peer: str, operation: Operation, local: Descriptors, remote: Descriptors) -> PostedPart:
        """Move pieces, or begin to, as the network's faults have it."""
        self._check_open()
        if peer not in self._peers:
            raise FabricError(f"{peer!r} is not connected")
        here = _covering(local.pieces, self._registered, f"{self._name} (local)")
        there = _covering(remote.pieces, self._peers[peer], peer)
        copies = [
            (int(a), int(b), int(length))
            for (a, length), (b, _) in zip(local.pieces.tolist(), remote.pieces.tolist(), strict=True)
        ]
        part = PostedPart(self, peer, operation, copies, here | there)
        self._network.begin(part)
        self.open_handles += 1
        return part

    def poll(self, part: PostedPart) -> bool:
        """True when a part is done."""
        self._check_open()
        _check_held(part)
        return self._network.poll(part)

    def release(self, part: PostedPart) -> None:
        """Give back a part, once. What it still owes can land later."""
        _check_held(part)
        part.released = True
        self.open_handles -= 1

    def progress(self) -> None:
        """Count the call, and take in what waits for it."""
        self._check_open()
        self.progressed += 1
        self._network.progress(self._name)

    def notify(self, agent: str, message: bytes) -> None:
        """Tell another agent something, which comes with the next thing it is asked for (`heard`)."""
        self._check_open()
        self._network.notify(self._name, agent, message)

    def heard(self) -> list[tuple[str, bytes]]:
        """What agents have told this one since it was asked last: who, and what."""
        return self._network.heard(self._name)

    def renew(self) -> bool:
        """Come back as another agent, which knows nothing."""
        self._check_open()
        name = next(self._names)
        self._network.renew(self, name)
        self._name, self._registered, self._peers = name, {}, {}
        return True

    def close(self) -> None:
        """Leave the network; no byte moves from or to its memory any more. Idempotent."""
        self._open = False
        self._registered = {}
        self._network.detach(self)

    def _check_open(self) -> None:
        if not self._open:
            raise FabricError(f"agent {self._name!r} is not open")


def _check_held(part: PostedPart) -> None:
    if part.released:
        raise RuntimeError(f"a defect: {part!r} was given back before")


def _covering(pieces: NDArray[np.int64], registered: dict[int, tuple[MemorySpan, ...]], whose: str) -> frozenset[int]:
    """Numbers of the registrations that hold these pieces."""
    keys: set[int] = set()
    inside = np.zeros(len(pieces), dtype=np.bool_)
    for key, memories in registered.items():
        for memory in memories:
            within = pieces[:, 0] >= memory.address
            within &= pieces.sum(axis=1) <= memory.address + memory.length
            if within.any():
                keys.add(key)
                inside |= within
    if not inside.all():
        address, nbytes = pieces[int(np.argmin(inside))].tolist()
        raise FabricError(f"{nbytes} bytes at {address:#x} are outside of what {whose} has registered")
    return frozenset(keys)
