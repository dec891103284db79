"""The fabric: owns a transport, makes the calls that may take long in a thread of its own, and knows when it is over.

    loop                                  the fabric's thread
    register, connect, ...  -> inbox ->   run in order, answered through a future

What is posted is the mover's, which calls the same agent. One of the two calls it at a time: the thread claims it
first, and the mover goes on without it until the call has returned.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from kvxfer.copy.mover import Mover
from kvxfer.errors import FabricError, ProtocolError
from kvxfer.fabric import Transport, check_owner
from kvxfer.protocol.messages import MemorySpan
from kvxfer.protocol.session import PeerInfo
from kvxfer.runtime import Runtime, Stop
from kvxfer.telemetry import logger

__all__ = ["Fabric", "Holdings", "Lanes"]

# --- what an agent was told
#
# What it hands out stays valid then: tokens of registrations, and names of peers. A peer is told of again when
# something is to be posted to it, and not before: one that is gone may keep the caller waiting for seconds.


@dataclass(slots=True, eq=False)
class _Registered:
    """Memory that is registered; what is handed out for it."""

    memories: tuple[MemorySpan, ...]
    token: object
    """The transport's own."""


@dataclass(slots=True, eq=False)
class _Peer:
    """How a peer is reached, and by how many who said so."""

    metadata: list[bytes]
    users: int = 0


class Holdings:
    """Registrations and peers of one transport. Belongs to the fabric's thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport: Final = transport
        self._registered: list[_Registered] = []
        self._peers: dict[str, _Peer] = {}
        self.untold: Final[set[str]] = set()  # peers that the present agent does not know; read from any thread

    def __len__(self) -> int:
        return len(self._peers)

    def register(self, memories: Sequence[MemorySpan]) -> object:
        """Make memory reachable; returns a token."""
        held = _Registered(tuple(memories), self._transport.register(memories))
        self._registered.append(held)
        return held

    def deregister(self, token: object) -> None:
        """Undo one `register`.

        Raises:
            FabricError: If that was done before, or the transport fails to.
        """
        held = self._of(token)
        self._registered.remove(held)
        self._transport.deregister(held.token)

    def metadata(self, tokens: Sequence[object]) -> bytes:
        """What a peer needs to reach these memories, by way of the present agent."""
        return self._transport.metadata([self._of(token).token for token in tokens])

    def connect(self, metadata: bytes) -> str:
        """Learn about a peer, or about more of its memory; returns its name."""
        name = self._transport.connect(metadata)
        peer = self._peers.setdefault(name, _Peer([]))
        peer.users += 1
        if metadata not in peer.metadata:
            peer.metadata.append(metadata)
        return name

    def disconnect(self, name: str) -> None:
        """Undo one `connect`, and with the last forget the peer; harmless if it is not known."""
        peer = self._peers.get(name)
        if peer is None:
            return
        peer.users -= 1
        if not peer.users:
            del self._peers[name]
            if name not in self.untold:
                self._transport.disconnect(name)
            self.untold.discard(name)

    def load_peer(self, name: str) -> None:
        """Have the present agent know a peer."""
        if name in self.untold:
            for metadata in self._peers[name].metadata:
                self._transport.connect(metadata)
            self.untold.discard(name)

    def renew(self) -> bool:
        """Make the agent anew, with the same memory. False if that cannot be done now: nothing has changed.

        Raises:
            FabricError: The new one does not take the memory.
        """
        if not self._transport.renew():
            return False
        for held in self._registered:
            held.token = self._transport.register(held.memories)
        self.untold.update(self._peers)
        return True

    def undo(self) -> list[Callable[[], None]]:
        """What undoes all of it, each once. Nothing is held from now on."""
        steps: list[Callable[[], None]] = [
            partial(self._transport.disconnect, name) for name in self._peers if name not in self.untold
        ]
        steps += [partial(self._transport.deregister, held.token) for held in self._registered]
        self._peers, self._registered = {}, []
        self.untold.clear()
        return steps

    def _of(self, token: object) -> _Registered:
        held = next((held for held in self._registered if held is token), None)
        if held is None:
            raise FabricError("this memory is not registered (any more)")
        return held


# --- the fabric

_log: Final = logger("kvxfer.fabric")
_T = TypeVar("_T")

_LEAKED: Final[list[Transport]] = []
"""Transports left open because a write might be in flight: kept from being destroyed until the process ends."""
_CLAIM_S: Final = 50e-6
_LOOK_S: Final = 0.002
_SLOW_S: Final = 0.1


class Fabric:
    """A transport, and the calls of it that may take long. None of the methods blocks.

    Those that return a future may be called from any thread; the others belong to the mover's loop. It owns the
    transport: nobody else may call that but the mover, which posts by it, and `close` closes it.
    """

    def __init__(self, transport: Transport, runtime: Runtime, mover: Mover) -> None:
        self._transport: Final = transport
        self._runtime: Final = runtime
        self._mover: Final = mover
        # shared with the callers' threads, under the lock
        self._lock: Final = threading.Lock()
        self._inbox: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._refusal: FabricError | None = None
        self._closing: asyncio.Task[bool] | None = None
        self._called: Final = threading.Event()  # something came in
        self._wake: Callable[[], None] | None = None
        self._stop: Stop | None = None
        # its thread's own
        self._holdings: Final = Holdings(transport)
        self._set_up = False
        self._claiming = False  # whether it waits for the mover to be out of the agent
        self._gone = False  # the agent
        self._due: float | None = None  # since when it owes a pass, or is in one
        mover.ready = self._ready

    # ---- what others ask for ----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start its thread, set the transport up, and give its agent to the mover.

        Raises:
            FabricError: The transport does not work; every later call fails with the same.
        """
        self._stop, self._wake = self._runtime.drive("kvxfer-fabric", self, gives_way=True)
        await asyncio.wrap_future(self.metadata(()))
        self._attach()

    def register(self, memories: Sequence[MemorySpan]) -> Future[object]:
        """Make memory reachable. The owner keeps it allocated until `deregister` is done, or for ever if that fails.

        Returns:
            A token for `metadata` and `deregister`, or `FabricError`.
        """
        return self._submit(lambda: self._holdings.register(memories))

    def deregister(self, token: object) -> Future[None]:
        """Undo one `register`. This is no fence: what was posted may still land."""
        return self._submit(lambda: self._holdings.deregister(token))

    def metadata(self, tokens: Sequence[object]) -> Future[bytes]:
        """What a peer needs to reach the memories of these registrations, and only those."""
        return self._submit(lambda: self._holdings.metadata(tokens))

    def connect(self, metadata: bytes) -> Future[str]:
        """Learn about a peer, or about more of its memory; returns its name, for posts and for one `disconnect`."""
        return self._submit(lambda: self._holdings.connect(metadata))

    def disconnect(self, peer: str) -> None:
        """Undo one `connect`, and with the last forget the peer; harmless if it is not known. This is no fence.

        Whoever lies about how it is reached cannot have others forgotten so. While something that was posted to it is
        looked at, it stays: else that could not be seen to end.
        """
        self._mover.part_with(peer, lambda: self._submit(lambda: self._holdings.disconnect(peer)))

    async def rebuild(self, timeout: float) -> bool:
        """Destroy the agent and make another in its place, which peers reach by new metadata only.

        Nothing is posted meanwhile. What is in flight has `timeout` seconds to end, and is `IN_DOUBT` if it does not,
        with an error that says `disconnected`, since this side has ended its own work; but for what runs on without an
        agent. All else goes on afterwards. Tokens and names of peers stay valid. It is not cancelled with the caller,
        who asks for one at a time.

        Returns:
            True once it is done: what others have under way to the old agent does not land any more if it comes over a
            network, and nothing that was posted here touches memory of this side, but for what runs on. False if it
            cannot be done now: then nothing has changed, but for posts given up.
        """
        if self._refusal is not None:
            raise _restated(self._refusal)
        return await asyncio.shield(asyncio.ensure_future(self._rebuild(self._runtime.now() + timeout)))

    @property
    def agents(self) -> int:
        """Agents of peers that it knows."""
        return len(self._holdings)

    def health(self) -> tuple[float, str]:
        """For how many seconds a call of the transport was owed, and why the fabric is broken; 0.0 and "" if not."""
        if self._refusal is None and (broken := self._mover.failure()) is not None:
            self._break(broken)
        due, refusal = self._due, self._refusal
        late = 0.0 if due is None else max(0.0, self._runtime.now() - due)
        if self._closing is not None:
            return late, ""
        return max(late, self._mover.owed_seconds()), "" if refusal is None else str(refusal)

    async def close(self) -> bool:
        """Refuse new work, undo every connect and register once, and close the transport. Call it behind the mover's.

        Returns:
            True once the transport is closed. False if it was left open instead, because something may still be in
            flight; then registered memory must never be freed. Further calls return the same. It is not cancelled with
            the caller.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        return await asyncio.shield(self._closing)

    def join(self, timeout: float) -> bool:
        """Wait for the end of its thread, which comes when `close` is done. False if it has not within so long."""
        return self._stop is None or self._stop(timeout)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _attach(self, *, anew: bool = False) -> None:
        self._mover.attach(self._transport.native(), anew=anew)

    def _ready(self, peer: str) -> "asyncio.Future[Any] | None":
        """What is to be waited for before something is posted to a peer."""
        well = self._refusal is None  # else there may be no agent, and nobody would hear of what waits for one
        return None if well and peer not in self._holdings.untold else asyncio.wrap_future(self._tell(peer))

    def _tell(self, peer: str) -> Future[None]:
        return self._submit(lambda: self._holdings.load_peer(peer))

    async def _rebuild(self, until: float) -> bool:
        mover, now = self._mover, self._runtime.now
        mover.stop_posting()
        while (mover.posting or mover.under_way) and self._closing is None and now() < until:  # noqa: ASYNC110 - nobody says it
            await asyncio.sleep(_LOOK_S)
        await mover.abandon_posts()
        before = self._transport.name
        try:
            done = await asyncio.wrap_future(self._submit(self._holdings.renew))
        except FabricError as error:
            if self._closing is None:  # else it was refused, and nobody posts any more
                self._break(error)
                # where that was refused, or failed at once, the old one is there, and what was given up runs on
                mover.attach(None, anew=self._transport.name != before)
                mover.cancel_posts()
            raise
        for peer in mover.peers if done else ():
            try:
                await asyncio.wrap_future(self._tell(peer))
            except FabricError as error:  # what is posted to it fails with its own error
                _log.warning("peer_not_met_again", peer=peer, error=str(error))
        self._attach(anew=done)
        return done

    async def _close(self) -> bool:
        with self._lock:
            self._refusal = self._refusal or FabricError("the fabric is closed")
        clean = not self._mover.lingering
        if self._stop is not None:
            self._mover.attach(None)
            shut = self._submit(lambda: self._shut(clean=clean), closing=True)
            clean = await asyncio.shield(asyncio.wrap_future(shut))  # it is made though the loop may end before
            self._stop(0.0)
        return clean

    def _submit(self, run: Callable[[], _T], *, closing: bool = False) -> Future[_T]:
        future: Future[_T] = Future()
        with self._lock:
            refusal = None if closing else self._refusal
            if refusal is None:
                self._inbox.append((run, future))
        if refusal is not None:
            future.set_exception(_restated(refusal))
        elif self._stop is not None:
            self._due = self._due or self._runtime.now()
            self._called.set()
            if self._wake is not None:
                self._wake()
        return future

    # ---- its thread ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Make the calls as they come in, until everything is undone or left: in a thread."""
        delay = self.step()
        while not self._gone:
            self._called.wait(delay)
            self._called.clear()  # here, not behind the step: what comes in from now on wakes it again
            delay = self.step()

    def step(self) -> float | None:
        """Set the transport up, and make the calls that came in, in order."""
        try:
            if not self._set_up:
                self._set_up = True
                self._transport.setup()
            if self._inbox or self._claiming:  # who waited may have been refused meanwhile: the mover has to hear of it
                self._claiming = not self._mover.acquire_agent()
                if self._claiming:
                    return _CLAIM_S
                self._take()
        except Exception as error:  # noqa: BLE001 - the thread is supervised here: a defect is named and answered
            self._break(error if isinstance(error, FabricError) else _broken_by(error))
        self._due = None
        return None

    def _take(self) -> None:
        try:
            while True:
                with self._lock:  # what is taken is refused no more
                    if not self._inbox:
                        return
                    run, future = self._inbox.popleft()
                self._due = began = self._runtime.now()
                _make(run, future)
                if (took := self._runtime.now() - began) > _SLOW_S:
                    _log.info("slow_call_ended", name=self._transport.name, duration=took)
        finally:
            if not self._gone:  # else the mover, if it still runs, must never call the agent again
                self._mover.release_agent()

    def _break(self, error: FabricError) -> None:
        """Answer everybody, now and from now on, with what went wrong. The thread goes on, for `close`."""
        with self._lock:
            self._refusal = self._refusal or error
            refused, self._inbox = list(self._inbox), deque()
        for _, future in refused:
            if future.set_running_or_notify_cancel():
                future.set_exception(_restated(self._refusal))
        _log.error("fabric_broken", name=self._transport.name, error=str(error))

    def _shut(self, *, clean: bool) -> bool:
        """Undo everything once unless a write may be in flight."""
        self._gone = True
        if clean:
            clean = self._undo()
        if not clean:
            _LEAKED.append(self._transport)
            _log.warning("fabric_left_open", name=self._transport.name, reason="a transfer may still be in flight")
        return clean

    def _undo(self) -> bool:
        """Disconnect, deregister, close: each once, even if one of them fails. False after a defect."""
        clean = True
        for step in [*self._holdings.undo(), self._transport.close]:
            try:
                step()
            except FabricError as error:
                _log.warning("fabric_undo_failed", name=self._transport.name, error=str(error))
            except Exception as error:  # noqa: BLE001 - the last step of the thread: nobody else would see it
                _log.error("fabric_undo_failed", name=self._transport.name, error=repr(error))
                clean = False
        return clean


def _make(run: Callable[[], Any], future: Future[Any]) -> None:
    """Make a call, unless nobody waits any more. Lets out what is no `FabricError`: that is a defect."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = run()
    except FabricError as error:
        future.set_exception(error)
    except Exception as error:
        future.set_exception(_broken_by(error))
        raise
    else:
        future.set_result(value)


def _broken_by(error: Exception) -> FabricError:
    """What everybody gets to hear after a defect."""
    broken = FabricError(f"the fabric is broken by a defect: {error!r}")
    broken.__cause__ = error
    return broken


def _restated(error: FabricError) -> FabricError:
    """The same error as an object of its own: one that is raised to many would collect all their tracebacks."""
    again = FabricError(str(error), disconnected=error.disconnected)
    again.__cause__ = error.__cause__
    return again


# --- peers
#
# Each is known once per incarnation, and connected when the first bytes are to move. One that has made its agent anew
# is connected again, under another name, by whatever needs it from then on.

_MOST_OLD: Final = 16
"""Agents of a peer's past that are known at most."""


@dataclass(slots=True, eq=False)
class _Lane:
    """A peer's lane."""

    renewals: int  # how often the peer had made its agent anew when it said `metadata`
    metadata: bytes  # how its agent is reached
    name: "asyncio.Future[str] | None" = None  # that agent's name in the fabric
    # names of earlier agents, each kept until the users that it had are gone
    old: "list[tuple[asyncio.Future[str], set[object]]]" = field(default_factory=list)
    users: set[object] = field(default_factory=set[object])  # whoever posts to it, or is about to
    wanted: bool = True  # whether a link still leads to the peer


class Lanes:
    """Connects the fabric to peers, once per incarnation, however many links lead there."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric: Final = fabric
        self._lanes: dict[bytes, _Lane] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def hold(self, peer: PeerInfo) -> Callable[[], None]:
        """Keep a peer's lane until the returned function is first called, though the last link to it be lost meanwhile.

        Disconnecting gives up whatever is posted, and a post that was given up is in doubt.
        """
        key, lane, user = peer.identity.incarnation, self._of(peer), object()
        lane.users.add(user)

        def leave() -> None:  # of no effect when called again
            lane.users.discard(user)
            for _, users in lane.old:
                users.discard(user)
            if lane.old or not lane.wanted:
                self._prune(key, lane)

        return leave

    def connect(self, peer: PeerInfo, renewals: int) -> "asyncio.Future[str]":
        """The fabric's name of a peer, connecting it if it is new. Call it under `hold`; never cancel what it returns.

        The future fails with `FabricError` if the transport refuses the peer's metadata. `renewals` is how often the
        peer had made its agent anew by its own word, on the stream on which it granted what is to be moved.

        Raises:
            FabricError: If it has done so since, by what it said elsewhere: it counts on the old agent's end. Or if its
                agent goes by the name of another worker's.
        """
        lane = self._of(peer)
        if lane.renewals > renewals:
            raise FabricError(f"{peer.name} has made its agent anew since this was granted: try again")
        name = lane.name
        if name is None:
            check_owner(lane.metadata, peer.identity.incarnation)
            name = lane.name = asyncio.wrap_future(self._fabric.connect(lane.metadata))
            name.add_done_callback(lambda done: self._failed(lane, done))
        return name

    def wanted(self, peer: PeerInfo) -> None:
        """A link to this peer is open (again)."""
        key = peer.identity.incarnation
        if key in self._lanes:
            lane = self._of(peer)
            lane.wanted = True
            self._prune(key, lane)

    def renewed(self, peer: PeerInfo, renewals: int, metadata: bytes) -> None:
        """A peer says how it is reached now; of no effect if it said so before, or something later.

        Raises:
            ProtocolError: If it did so too often while one transfer lasted: what is known of its agents would pile up.
        """
        lane = self._of(peer)
        _renew(lane, renewals, metadata)
        self._prune(peer.identity.incarnation, lane)

    def forget(self, peer: PeerInfo) -> None:
        """The last link to this peer is gone: disconnect when nothing is posted. Not a fence."""
        key = peer.identity.incarnation
        lane = self._lanes.get(key)
        if lane is not None:
            lane.wanted = False
            self._prune(key, lane)

    def _of(self, peer: PeerInfo) -> _Lane:
        """Its lane, by the latest that is known of it: its session may be older, or younger, than that.

        Raises:
            ProtocolError: As `renewed` does.
        """
        key, body = peer.identity.incarnation, peer.body
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(body.renewals, body.metadata)
        if body.renewals > lane.renewals:
            _renew(lane, body.renewals, body.metadata)
        return lane

    @staticmethod
    def _failed(lane: _Lane, name: "asyncio.Future[str]") -> None:
        """Forget a connection that failed, so that the next one who needs it tries again."""
        if (name.cancelled() or name.exception() is not None) and lane.name is name:
            lane.name = None

    def _prune(self, key: bytes, lane: _Lane) -> None:
        if self._lanes.get(key) is not lane:
            return
        over = not lane.wanted and not lane.users
        gone = [name for name, users in lane.old if not users]
        gone += [lane.name] if over and lane.name is not None else []
        for name in gone:
            if not name.done():
                # who comes back meanwhile must find it here: a second connection would be cut by the end of the first
                name.add_done_callback(lambda _: self._prune(key, lane))
                return
        lane.old = [(name, users) for name, users in lane.old if users]
        if over:
            del self._lanes[key]
        for name in gone:
            if not name.cancelled() and name.exception() is None:
                self._fabric.disconnect(name.result())


def _renew(lane: _Lane, renewals: int, metadata: bytes) -> None:
    """The peer is reached so now, unless something later is known."""
    if renewals <= lane.renewals:
        return
    if len(lane.old) >= _MOST_OLD:
        raise ProtocolError(f"it has made its agent anew {len(lane.old)} times while one transfer lasted")
    lane.renewals, lane.metadata = renewals, metadata
    if lane.name is not None:
        lane.old.append((lane.name, set(lane.users)))
        lane.name = None
