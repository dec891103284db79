"""The pump: owns a transport, calls it from one service only, and gives everybody else calls that never block.

    caller's thread                       the fabric's service
    register, connect, ...  -> inbox ->   run in order, answered through a future
    post                    -> inbox ->   cut into parts, posted in turn, polled in one pass, `done` called per pass
    hold_awake                            `transport.progress()` while others write into our memory
    pause                                 no call at all, for a while

A pass of the service: take what came in, post one part for each peer, poll every handle once, give up what is silent,
deliver the results together. Between passes it sleeps until shortly before the next part in flight should end and looks
closely around that time. Where it does not know how long a part takes, or the part is late, it spins briefly and then
sleeps in proportion to the wait, up to a millisecond. With nothing in flight, queued or held awake it sleeps until
woken.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Final, TypeVar

from kvxfer.errors import ConfigError, FabricError
from kvxfer.fabric.calls import Call, Renewal, broken_by
from kvxfer.fabric.holdings import Holdings
from kvxfer.fabric.holds import Holds
from kvxfer.fabric.parts import Limits, LivePost, restated
from kvxfer.fabric.pause import Pause
from kvxfer.fabric.port import Handle, Memory, Operation, Post, Told, Transport
from kvxfer.fabric.queues import Queues
from kvxfer.fabric.wire import Paces, Wire
from kvxfer.runtime import Runtime, Service
from kvxfer.telemetry import logger

__all__ = ["Fabric"]

_log: Final = logger("kvxfer.fabric")
_T = TypeVar("_T")

_LEAKED: Final[list[Transport]] = []
"""Transports left open because a write might be in flight: kept from being destroyed until the process ends."""

_LONGEST_STEP: Final = 1.0
"""Seconds that one pass counts towards a time-out at most: a stopped or starved process must not doubt its peers."""

_LOOK_BACK_S: Final = 0.01
"""Seconds between two looks at what was given up: over TCP it goes on in these alone."""

_STEPS_TO_DOUBT: Final = 4
"""Passes that a time-out takes at least, however short it is."""


class Fabric:
    """A transport behind one service. Every method may be called from any thread, and none but `join` blocks.

    Args:
        transport: Owned from now on: nobody else may call it, and `close` closes it.
        runtime: Clock and services.
        max_descriptors: Pieces in one part of a post at most. The lease is checked before each part.
        max_post_bytes: Bytes in one part at most; a larger piece is split.
        max_parts_in_flight: Parts of one post under way at once; what is beyond can still be stopped.
        no_progress_timeout: Seconds without any part of a post posted or ended until it is given up as `IN_DOUBT`. It
            counts time in which the service ran: a process that stood still does not doubt its peers for it.
        spin_time: Seconds during which a part is polled without pause if it is not known how long it takes.
        min_poll_interval: Shortest sleep in seconds between two passes after that.
        max_poll_interval: Longest one, whatever is known.
        hold_poll_interval: Longest sleep while a hold is out that is needed; grows to `max_poll_interval` within ten
            seconds without activity here. Over TCP the target moves the data, and 1 ms costs two thirds of the speed.

    Raises:
        ConfigError: A bound is not positive.
    """

    def __init__(
        self,
        transport: Transport,
        runtime: Runtime,
        *,
        max_descriptors: int = 1024,
        max_post_bytes: int = 4 << 20,
        max_parts_in_flight: int = 4,
        no_progress_timeout: float = 30.0,
        spin_time: float = 200e-6,
        min_poll_interval: float = 50e-6,
        max_poll_interval: float = 1e-3,
        hold_poll_interval: float = 100e-6,
    ) -> None:
        if min(max_descriptors, max_post_bytes, max_parts_in_flight) < 1 or no_progress_timeout <= 0:
            raise ConfigError("max_descriptors, max_post_bytes, max_parts_in_flight, no_progress_timeout must be > 0")
        if not 0 < min_poll_interval <= hold_poll_interval <= max_poll_interval or spin_time < 0:
            raise ConfigError("poll intervals must satisfy 0 < min <= hold <= max, and spin_time must be >= 0")
        self._transport = transport
        self._runtime = runtime
        self._limits = Limits(max_descriptors, max_post_bytes, max_parts_in_flight, no_progress_timeout)
        self._longest_step = min(_LONGEST_STEP, no_progress_timeout / _STEPS_TO_DOUBT)
        self._paces = Paces.of(spin_time, min_poll_interval, max_poll_interval)
        self._holds: Final = Holds(hold_poll_interval, max_poll_interval)
        # shared with the callers' threads, under the lock
        self._lock = threading.Lock()
        self._inbox: deque[Post | Call] = deque()
        self._refusal: FabricError | None = None
        self._closed: Future[bool] | None = None
        self._close_by = 0.0
        self._service: Service | None = None
        # the service's own
        self._ended: list[LivePost] = []
        self._holdings = Holdings(transport)
        self._posts = Queues(transport, self._holdings, self._release, runtime.now, no_progress_timeout)
        self._peers: dict[str, Wire] = {}
        self._defect: Exception | None = None
        self._lingering: list[LivePost] = []  # given up, and the transport may still touch their memory
        self._renewal: Renewal | None = None
        self._over = False
        self._pause: Pause | None = None
        self._clock = 0.0
        self._last_pass = self._active_at = runtime.now()
        self._due: float | None = None  # since when the service owes a pass, or is in one

    # ---- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the service. A transport that cannot be set up fails every later operation with the reason.

        Raises:
            FabricError: It was started or closed before.
        """
        with self._lock:
            if self._service is not None or self._closed is not None:
                raise FabricError("a fabric is started once")
            self._service = self._runtime.start("kvxfer-fabric", self._step, setup=self._set_up)

    def register(self, memories: Sequence[Memory]) -> Future[object]:
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

        def run() -> str:
            peer = self._holdings.connect(metadata)
            self._peers.setdefault(peer, Wire())
            return peer

        return self._submit(run)

    def disconnect(self, peer: str) -> Future[None]:
        """Undo one `connect`, and with the last forget the peer; harmless if it is not known. This is no fence.

        Whoever lies about how it is reached cannot have others forgotten so.
        Posts to it that have nothing in flight end as `FAILED`, the others as `IN_DOUBT`: wait for them first.
        """

        def run() -> None:
            self._leave(peer)

        return self._submit(run)

    def post(self, post: Post) -> None:
        """Move a chunk. `post.done` gets the result, whatever happens, on the fabric's thread.

        After `close`, or once the fabric is broken, the result is `FAILED` and `done` is called before this returns.
        """
        with self._lock:
            refusal = self._refusal
            if refusal is None:
                self._inbox.append(post)
        if refusal is None:
            self._wake()
        else:
            post.done(LivePost(post, self._limits, restated(refusal)).result(self._runtime.now()))

    def hold_awake(self, *, needed: bool = True) -> Callable[[], None]:
        """Keep the transport progressing, for peers that write into our memory, until the returned function is called.

        Args:
            needed: False where they were seen to move their bytes without it: then it progresses seldom, in case.

        Returns:
            Releases this hold; further calls do nothing.
        """
        release = self._holds.add(needed=needed)
        self._active_at = self._runtime.now()
        self._wake()
        return release

    def pause(self, seconds: float, *, firm: bool = False) -> Future[Pause | None]:
        """Let the transport be for so long at most, so that it can be seen what lands without its help.

        Returns:
            The pause once it has begun. It ends at once when a post or another call comes in, and when somebody is to
            be held awake for, unless it is `firm`. None if something is under way that stands against it, or if the
            transport works by itself, or a device may for which no process stands.
        """

        def run() -> Pause | None:
            pause, transport = Pause(self._runtime.now() + seconds, firm=firm), self._transport
            tells = transport.orderly and transport.attributable
            busy = self._posts or any(live.watched for live in self._lingering)
            if tells and not busy and (firm or not self._holds):
                self._pause = pause
            return self._pause

        return self._submit(run)

    def rebuild(self, timeout: float) -> Future[bool]:
        """Destroy the agent and make another in its place, which peers reach by new metadata only.

        Nothing is posted meanwhile. What is in flight has `timeout` seconds to end, and is `IN_DOUBT` if it does not,
        with an error that says `disconnected`, since this side has ended its own work; but for what runs on without an
        agent. All else goes on afterwards. Tokens and names of peers stay valid.

        Returns:
            True once it is done: what others have under way to the old agent does not land any more if it comes over a
            network, and nothing that was posted here touches memory of this side, but for what runs on. False if it
            cannot be done now: then nothing has changed, but for posts given up. The future cannot be cancelled.
        """
        renewal = Renewal(self._runtime.now() + timeout)

        def run() -> None:
            if self._renewal is not None:
                raise FabricError("the agent is being rebuilt already")
            self._renewal = renewal

        self._submit(run).add_done_callback(renewal.refused)
        return renewal.answer

    def told(self, peer: str) -> tuple[Told, ...] | str:
        """Over which lanes posts to this peer go, as far as there were any; or why the transport does not say it."""
        return self._transport.told(peer)

    @property
    def held_awake(self) -> int:
        """For how many reasons the service makes progress though nothing of its own is under way."""
        return len(self._holds)

    @property
    def lingering(self) -> int:
        """Posts that were given up, and may still touch memory."""
        return len(self._lingering)

    @property
    def agents(self) -> int:
        """Agents of peers that it knows."""
        return len(self._peers)

    def health(self) -> tuple[float, str]:
        """For how many seconds the service has owed a pass, and why the fabric is broken; 0.0 and "" if all is well."""
        due, refusal = self._due, self._refusal
        late = 0.0 if due is None or self._over else max(0.0, self._runtime.now() - due)
        return late, "" if refusal is None or self._closed is not None else str(refusal)

    def close(self, timeout: float) -> Future[bool]:
        """Refuse new work, let accepted posts end, then undo every connect and register once and close the transport.

        Args:
            timeout: Seconds until what has not ended is given up: `FAILED` where nothing is in flight, else `IN_DOUBT`.

        Returns:
            True once the transport is closed. False if it was left open instead, because something may still be in
            flight; then registered memory must never be freed. Further calls return the same one, never cancelled.
        """
        with self._lock:
            first = self._closed is None
            closed = self._closed = self._closed or Future()
            if first:
                closed.set_running_or_notify_cancel()
                self._refusal = self._refusal or FabricError("the fabric is closed")
                self._close_by = self._runtime.now() + timeout
            started = self._service is not None
        if started:
            self._wake()
        elif first:
            self._turn_away(self._refuse_inbox())
            closed.set_result(True)
        return closed

    def join(self, timeout: float) -> bool:
        """Wait for the end of the service, which comes when `close` is done. False if it has not within so long."""
        return self._service is None or self._service.stop(timeout)

    def _submit(self, run: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        with self._lock:
            refusal = self._refusal
            if refusal is None:
                self._inbox.append(Call(run, future))
        if refusal is None:
            self._wake()
        else:
            future.set_exception(restated(refusal))
        return future

    def _wake(self) -> None:
        if self._service is not None:
            self._due = self._due or self._runtime.now()
            self._service.wake()

    # ---- the service ------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        try:
            self._transport.setup()
            self._limits = replace(self._limits, listed=self._transport.takes_lists, flushes=self._transport.orderly)
        except Exception as error:  # noqa: BLE001 - the first step reports it; raised here it would end the service unseen
            self._defect = error

    def _step(self) -> float | None:
        if self._over:
            return None
        try:
            return self._pass()
        except Exception as error:  # noqa: BLE001 - the service is supervised here: a defect is named and answered
            self._break(error)
            return 0.0
        finally:
            self._due = None

    def _pass(self) -> float | None:
        now = self._runtime.now()
        self._due = self._due or now
        self._clock += min(max(now - self._last_pass, 0.0), self._longest_step)
        self._last_pass = now
        self._raise_defect()
        if self._pause is not None and not self._pause.lasts(now, held=bool(self._holds)):
            self._resume()
        if self._inbox:
            self._take()
        if self._posts:
            moved = self._renewal is None and self._posts.post(self._clock)
            moved |= self._posts.poll(self._clock)
            if moved:
                self._active_at = self._last_pass
            self._ended.extend(self._posts.settle(self._clock))
        if self._ended:
            self._deliver()  # before all that lets go of what was given up
        if self._lingering:
            self._look_back()
        if self._renewal is not None:
            self._renew(self._renewal)
        if self._ended:
            self._deliver()
        if self._holds and self._pause is None:
            self._transport.progress()
        self._raise_defect()
        idle = not self._posts and not self._inbox
        if self._closed is not None and (idle or self._runtime.now() >= self._close_by):
            self._shut(self._closed)
            return None
        return self._delay()

    def _take(self) -> None:
        """Run the calls and queue the posts that came in, in order."""
        while self._inbox:
            item = self._inbox.popleft()
            self._resume()
            self._active_at = self._last_pass
            if isinstance(item, Post):
                self._posts.add(LivePost(item, self._limits, wire=self._peers.get(item.peer)))
            else:
                item.make()

    def _resume(self) -> None:
        """The transport is about to be called."""
        if self._pause is not None:
            self._pause.intact = False
            self._pause = None

    def _deliver(self) -> None:
        """Call `done` for every post that ended in this pass."""
        batch, self._ended = self._ended, []
        now = self._runtime.now()
        for live in batch:
            if live.may_linger:
                self._lingering.append(live)
            if live.watched:
                self._holdings.stay(live.post.peer)  # else its parts could not be seen to end
            self._active_at = self._last_pass
            self._tell(live.post.done, live.result(now))

    def _tell(self, heard: Callable[[_T], None], what: _T) -> None:
        """Call back."""
        try:
            heard(what)
        except Exception as error:  # noqa: BLE001 - one broken callback must not strand the rest of its batch
            self._defect = error

    def _look_back(self) -> None:
        """See posts end that were given up: a peer that stood still goes on, and so do they."""
        for live in [live for live in self._lingering if live.watched]:
            if live.ends_late(self._transport, self._release):
                self._over_late(live, ended=True)
            if not live.watched:
                self._leave(live.post.peer)

    def _over_late(self, live: LivePost, *, ended: bool) -> None:
        """A post that was given up touches memory of this side no more."""
        self._lingering.remove(live)
        self._tell(live.post.late, ended)

    def _leave(self, peer: str) -> None:
        """Forget a peer if nobody needs it any more."""
        if self._holdings.leave(peer):
            error = FabricError(f"{peer} was disconnected while the post was under way")
            for live in self._posts.of(peer):
                live.give_up(error, self._release)
            del self._peers[peer]
            self._holdings.disconnect(peer)

    def _delay(self) -> float | None:
        """Seconds until the next pass: at once if a part can be posted, else when something is due next."""
        delays: list[float] = []
        if self._posts:
            if self._renewal is None and self._posts.wants_turn:
                return 0.0
            delays += self._posts.delays(self._paces)
        if self._pause is not None:
            delays.append(max(self._pause.until - self._runtime.now(), 0.0))
        elif self._holds:
            delays.append(self._holds.delay(self._runtime.now() - self._active_at))
        if any(live.watched for live in self._lingering):
            delays.append(_LOOK_BACK_S)
        return min(delays, default=None)

    def _raise_defect(self) -> None:
        if self._defect is not None:
            error, self._defect = self._defect, None
            raise error

    def _release(self, handle: Handle) -> None:
        try:
            self._transport.release(handle)
        except FabricError as error:
            _log.warning("fabric_handle_not_released", name=self._transport.name, error=str(error))
        except Exception as error:  # noqa: BLE001 - the pass goes on to keep its books, then reports the defect
            self._defect = error

    def _renew(self, renewal: Renewal) -> None:
        """Make the agent anew, once nothing is in flight or no longer waited for.

        Raises:
            FabricError: There is none any more.
        """
        runs_on = any(live.watched and live.post.runs_on for live in self._lingering)  # and would not be seen to end
        if self._runtime.now() < renewal.until and (runs_on or any(live.under_way for live in self._posts)):
            return
        self._resume()
        watched = [live for live in self._lingering if live.watched]
        for live in watched:
            live.let_go(self._release)
        caught = [live for live in self._posts if live.unsure]
        for live in caught:
            error = FabricError("the agent was rebuilt while the post was under way", disconnected=True)
            live.give_up(error, self._release)
        done = self._holdings.renew()  # if it raises, the fabric is broken, and `_break` answers
        self._renewal = None
        if done:
            for live in caught:
                live.cut_off()
            for live in [live for live in self._lingering if not live.post.runs_on]:
                if live.post.operation is Operation.READ:
                    live.post.cell.end()
                self._over_late(live, ended=False)
        self._ended.extend(self._posts.settle(self._clock))
        self._deliver()
        for live in watched:
            self._leave(live.post.peer)
        renewal.answer.set_result(done)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _break(self, error: Exception) -> None:
        """Answer everybody, now and from now on, with what went wrong. The service goes on, for `close`."""
        broken = error if isinstance(error, FabricError) else broken_by(error)
        with self._lock:
            self._refusal = self._refusal or broken
        self._end_all(broken)
        self._give_up_renewal(broken)
        self._turn_away(self._refuse_inbox())
        self._defect = None  # what went wrong on the way is a consequence
        _log.error("fabric_broken", name=self._transport.name, error=str(broken))

    def _end_all(self, error: FabricError) -> None:
        self._resume()
        for live in self._lingering:
            live.let_go(self._release)
        for live in self._posts:
            live.give_up(error, self._release)
        self._ended.extend(self._posts.take_all())
        self._deliver()

    def _give_up_renewal(self, error: FabricError) -> None:
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            renewal.answer.set_exception(restated(error))

    def _refuse_inbox(self) -> list[Post | Call]:
        with self._lock:
            refused, self._inbox = list(self._inbox), deque()
        return refused

    def _turn_away(self, items: Sequence[Post | Call]) -> None:
        for item in items:
            error = restated(self._refusal or FabricError("the fabric is closed"))
            if isinstance(item, Post):
                self._ended.append(LivePost(item, self._limits, error))
            else:
                item.refuse(error)
        self._deliver()

    def _shut(self, closed: Future[bool]) -> None:
        """Give up what is left, undo everything once unless a write may be in flight, and stop."""
        self._end_all(FabricError("the fabric was closed before the post had ended"))
        self._give_up_renewal(FabricError("the fabric was closed"))
        self._turn_away(self._refuse_inbox())
        clean = not self._lingering and self._undo()
        if not clean:
            _LEAKED.append(self._transport)
            _log.warning("fabric_left_open", name=self._transport.name, reason="a transfer may still be in flight")
        self._over = True
        if self._service is not None:
            self._service.stop(0.0)
        closed.set_result(clean)

    def _undo(self) -> bool:
        """Disconnect, deregister, close: each once, even if one of them fails. False after a defect."""
        self._peers = {}
        clean = True
        for step in [*self._holdings.undo(), self._transport.close]:
            try:
                step()
            except FabricError as error:
                _log.warning("fabric_undo_failed", name=self._transport.name, error=str(error))
            except Exception as error:  # noqa: BLE001 - the last step of the service: nobody else would see it
                _log.error("fabric_undo_failed", name=self._transport.name, error=repr(error))
                clean = False
        return clean
