"""What is between the agents of one process: their bytes on the way, and the faults that meet them."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from kvxfer.errors import FabricError
from kvxfer.fabric.faults import Fault, Faults, LogEntry, Part
from kvxfer.fabric.port import Operation

if TYPE_CHECKING:
    from kvxfer.fabric.loopback import LoopbackTransport

__all__ = ["EVERY_PEER", "LoopbackNetwork"]

EVERY_PEER: Final = "*"
"""Instead of a name: the fault concerns posts to anybody."""


class LoopbackNetwork:
    """Agents of one process, and the faults between them.

    Attributes:
        log: Every range of bytes written or read at a far end, in the order in which it happened.
    """

    def __init__(self) -> None:
        self.log: list[LogEntry] = []
        self._lock = threading.RLock()
        self._agents: dict[str, LoopbackTransport] = {}
        self._faults: dict[str, Faults] = {}
        self._held: list[Part] = []
        self._flying: list[Part] = []
        self._offered: list[Part] = []  # until the far end makes progress
        self._notices: list[tuple[str, str, bytes]] = []  # from, to, what
        self._echoes: list[tuple[str, str, bytes]] = []  # those that come again, behind these
        self._now: Callable[[], float] = _no_clock
        self._dead: set[str] = set()
        self._first: dict[str, str] = {}  # by the name of an agent that was made anew, its first one
        self._keys = iter(range(1, 1 << 62))

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
            chosen = [part for part in self._held if peer in self._called(part.dst)][:posts]
            for part in chosen:
                self._held.remove(part)
                part.held = False
                self._land(part)
            return len(chosen)

    def held(self, peer: str) -> int:
        """How many posts wait for `release`."""
        with self._lock:
            return sum(peer in self._called(part.dst) for part in self._held)

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

    def damage_next(self, peer: str, *, byte: int = 0, skip: int = 0) -> None:
        """Flip a bit of a coming post on its way, and let it end as if nothing were.

        Args:
            peer: As in `hold`.
            byte: Which of its bytes is hit, counted from its first.
            skip: Posts that pass first.
        """
        with self._lock:
            self._of(peer).coming.append(Fault(skip, refuse=False, damage=byte))

    def disconnect(self, peer: str) -> None:
        """Cut everybody's connection to an agent: posts in flight and coming ones fail.

        Whoever posted has no more to do with it: reads bring nothing any more, and bytes that are under way, read
        already, can still land.
        """
        with self._lock:
            self._arrive()
            self._dead.add(peer)
            for part in [*self._held, *self._flying, *self._offered]:
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
            for part in [*self._held, *self._flying, *self._offered]:
                if part.src is transport:
                    part.leave()
                    part.keys -= transport.keys()
            self._agents[name] = transport
            self._first[name] = self._first.get(transport.name, transport.name)

    def key(self) -> int:
        """A number for a registration."""
        with self._lock:
            return next(self._keys)

    def begin(self, part: Part) -> None:
        """Put a part in flight, under the faults of its peer."""
        with self._lock:
            self._arrive()
            self._begin(part)

    def poll(self, part: Part) -> bool:
        """True when a part has ended."""
        with self._lock:
            self._arrive()
            self._check_alive(part.dst, in_doubt=True)
            if part.error is not None:
                raise part.error
            if part.copies and part.dst not in self._agents:
                raise FabricError(f"{part.dst} is gone", disconnected=True, in_doubt=True)
            if part.held or part.wedged or self._waits(part):
                return False
            if part.polls > 0:
                part.polls -= 1
                return False
            self._land(part)
            return True

    def _waits(self, part: Part) -> bool:
        """Whether a part is on its way, or one before it that has failed is."""
        return (
            part in self._flying
            or part in self._offered
            or any(one.error is not None and one.src is part.src and one.dst == part.dst for one in self._held)
        )

    def progress(self, agent: str) -> None:
        """An agent makes progress: what waits for that lands."""
        with self._lock:
            arrived = [part for part in self._offered if part.dst == agent]
            self._offered = [part for part in self._offered if part.dst != agent]
            for part in arrived:
                self._land(part)

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

    def _begin(self, part: Part) -> None:
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
            rest = part.owing(fault.after_bytes)
            self._land(part, fault.after_bytes)
            if fault.lingers:
                part.copies, part.held = rest, True
                self._held.append(part)
                if fault.disconnected:
                    part.leave()
            words = f"the loopback was told to break a {part.operation.value} to {part.dst}"
            part.error = FabricError(words, disconnected=fault.disconnected, in_doubt=True)
            if fault.at_post:
                raise part.error
            return
        if part.held and not part.wedged:
            self._held.append(part)
        elif part.due and not part.wedged:
            self._flying.append(part)
        elif any(faults.needs_target for faults in self._both(part.dst)) and not part.wedged:
            self._offered.append(part)
        elif not part.wedged and part.polls == 0:
            self._land(part)

    def _travels(self, part: Part, faults: Faults) -> float:
        """When the bytes of a part are through a link that has a speed; 0 for one that has none."""
        if not faults.bytes_per_second:
            return 0.0
        nbytes = sum(length for _, _, length in part.copies)
        faults.busy_until = max(faults.busy_until, self._now()) + nbytes / faults.bytes_per_second
        return faults.busy_until

    def _arrive(self) -> None:
        """Let every part land whose time has come."""
        if self._flying:
            now = self._now()
            due, self._flying = (
                [part for part in self._flying if part.due <= now],
                [part for part in self._flying if part.due > now],
            )
            for part in sorted(due, key=lambda part: part.due):
                self._land(part)

    def _land(self, part: Part, limit: int | None = None) -> None:
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
            left -= length


def _no_clock() -> float:
    return 0.0
