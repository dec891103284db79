"""The two ends of one transfer, sans-I/O (PROTOCOL.md section 5).

Messages and news go in; messages to send and work for the shell come out. What the machine knows about memory is which
chunks are granted: those may be written by the peer, and only its word that they have arrived, or a terminal result,
takes them out of its hands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, islice
from typing import Final

from msgspec import Struct

from kvxfer.errors import Code, ProtocolError, Step
from kvxfer.protocol import messages as wire

__all__ = [
    "IN_PLACE",
    "RECEIVE_TRANSITIONS",
    "REPEAT_S",
    "SEND_TRANSITIONS",
    "UNTIMED",
    "Failure",
    "ReceiveState",
    "Receiving",
    "SendState",
    "Sending",
    "added",
    "build_result",
    "is_token",
]

# --- the prefill side
#
# Messages and news go in; messages to send and chunks to move come out. The machine promises what the results promise:
# a terminal result with any status but `IN_DOUBT` leaves only when no chunk is in the hands of the shell any more.

REPEAT_S: Final = 0.05
"""Where agents notify each other, the loops say the same that much later, should that not have come."""


class SendState(StrEnum):
    """Where a transfer stands at its prefill rank."""

    PARKED = "parked"  # the fetch came before its offer
    MOVING = "moving"
    STOPPING = "stopping"  # nothing new is moved; chunks in flight are waited for
    ENDED = "ended"


SEND_TRANSITIONS: Final[Mapping[tuple[SendState, str], SendState]] = {
    (SendState.PARKED, "accept"): SendState.MOVING,
    (SendState.PARKED, "refuse"): SendState.ENDED,
    (SendState.PARKED, "stop"): SendState.ENDED,
    (SendState.MOVING, "finish"): SendState.ENDED,
    (SendState.MOVING, "stop"): SendState.STOPPING,
    (SendState.STOPPING, "stop"): SendState.STOPPING,
    (SendState.STOPPING, "finish"): SendState.ENDED,
}
"""Legal events of `SendState`. ENDED is final."""

IN_PLACE: Final = frozenset({wire.Route.DIRECT, wire.Route.MAPPED})
"""Routes on which the prefill rank writes the decode rank's blocks."""
_OVER: Final = (SendState.STOPPING, SendState.ENDED)
UNTIMED: Final = wire.Timings()
"""Of what has taken no time that anybody measured."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a transfer is stopped, and how the decode rank is told; of a refusal also when to try again (0: unknown)."""

    status: wire.Status
    code: Code
    reason: str
    retry_after_ms: int = 0


def build_result(
    transfer: int, status: wire.Status, *, chunk: int = wire.WHOLE, last: bool = False, failure: Failure | None = None
) -> wire.KvAgentResult:
    """The one builder of results that are no success."""
    code, reason = (Code.UNKNOWN, "") if failure is None else (failure.code, failure.reason[:1024])
    return wire.KvAgentResult(transfer, chunk, status, 0, last, code, reason)


def is_token(token: bytes) -> bool:
    """Whether agents can notify each other by a token."""
    return len(token) == wire.TOKEN_BYTES and any(token[:8])


class Sending(Struct, eq=False):
    """One transfer at the prefill rank.

    Chunks go in their order: some have arrived, those up to `granted` are in the shell's hands, those up to `ready`
    were announced, and the rest was not. The shell says how many have arrived, and of how many it has given up.
    """

    fetch: wire.Fetch  # the message that began it
    state: SendState = SendState.PARKED  # see `SendState`
    route: wire.Route = wire.Route.UNKNOWN  # chosen route once accepted
    failure: Failure | None = None  # why it stops, once it does
    chunks: int = 0  # that it is cut into; 0 before it was accepted
    ready: int = 0  # the first so many were announced
    granted: int = 0  # the first so many were put into the shell's hands (`pull`: have been read)
    arrived: int = 0  # the first so many have arrived
    nbytes: int = 0  # of those
    _dropped: int = 0  # chunks that the shell has given up
    # how many batches of those may be under way yet, as the shell has not said otherwise (`pull`: the decode rank)
    doubts: int = 0
    _said: int = 0  # the first so many have arrived, as the decode rank was told
    _timings: wire.Timings = UNTIMED  # of those that have arrived since
    ring: Sequence[wire.Place] = ()  # places in the decode rank's staging memory, in which chunks take turns
    # by which the decode rank's agent says how many have left them, and ours how many have arrived; or empty
    token: bytes = b""
    copied: int = 0  # the first so many have left their places, by its last grant
    _ring_at: int = 0  # the chunk that its first place was for
    _unread: bool = False  # route pull: what was announced is not read any more
    _payload: bytes | None = None

    @property
    def moving(self) -> int:
        """Chunks in the hands of the shell: granted and not yet reported back."""
        return self.granted - self.arrived - self._dropped

    @property
    def step(self) -> Step:
        """What it waits for."""
        if self.state is SendState.PARKED:
            return Step.ASKING
        if self.moving or self.doubts or self.being_read:
            return Step.MOVING
        if self.granted < self.ready:
            return Step.RESERVING
        return Step.WAITING if self.ready < self.chunks else Step.ENDING

    @property
    def being_read(self) -> bool:
        """Route `pull`: whether the decode rank may be reading chunks, and has not said that it does no more."""
        return self.route is wire.Route.PULL and self.granted < self.ready and not self._unread

    def accept(self, message: wire.Accept) -> list[wire.Message]:
        """The offer is there and the plan is made.

        With `message.ahead` what `Fetch` grants is to be moved now.
        """
        self._event("accept")
        self.route, self.chunks = message.route, message.chunks
        if message.ahead:
            self.ready = self.granted = self.chunks
            if message.route is wire.Route.STAGED:
                self.ring, self.token = self.fetch.ring, self.fetch.token
                self.granted = min(self.chunks, self.fetch.ring_chunks)
        return [message]

    def refuse(self, code: Code, reason: str, *, retry_after_ms: int = 0) -> list[wire.Message]:
        """This transfer will not happen."""
        self._event("refuse")
        self.failure = Failure(wire.Status.FAILED, code, reason, retry_after_ms)
        return [wire.Refuse(self.fetch.transfer, code, reason[:1024], retry_after_ms)]

    def announce(
        self, ready: int, lease_ms: int = 0, spans: Sequence[wire.Span] = (), generation: int = 0
    ) -> list[wire.Message]:
        """The first so many chunks may go now. `spans` are block ids that were not said yet."""
        if self.state is not SendState.MOVING or self._unread or (ready <= self.ready and not spans):
            return []
        self.ready = max(self.ready, ready)
        return [wire.Ready(self.fetch.transfer, self.ready, lease_ms, list(spans), generation)]

    def finish_offer(self, payload: bytes) -> list[wire.Message]:
        """The offer is complete, and the plan of it was accepted: no chunk will be added, and this is the payload."""
        if self.state is SendState.PARKED:
            raise ProtocolError(f"finish is illegal for a transfer that is {self.state.value}")
        self._payload = payload
        return self._complete()

    def on_reserve(self, message: wire.Reserve) -> range:
        """The decode rank granted memory, or says which places are free again; returns the chunks that are new.

        They go where `places` says, and of those that take turns in one place each when the one before has left it.

        Raises:
            ProtocolError: If a chunk was not announced or was granted before, or there is no place for it. Nothing has
                changed then.
        """
        if self.state in _OVER:
            return range(0)  # it crossed our stop; the terminal result answers it
        if self.route is wire.Route.PULL:
            raise ProtocolError("Reserve is no message of the route pull")
        again = message.chunks == self.granted and not message.ring and self.granted > 0
        fresh = range(0) if again else self._added(message.chunks)
        if (message.ring or message.copied) and self.route is not wire.Route.STAGED:
            raise ProtocolError(f"transfer {message.transfer} was given a ring, and is written in place")
        if message.copied > self.granted:
            raise ProtocolError(f"{message.copied} chunks of transfer {message.transfer} cannot have left their places")
        # as its agents hear of each other, it may know sooner than we do what has arrived
        if message.ring and max(self.arrived, message.copied) < self.granted:
            raise ProtocolError(f"transfer {message.transfer} was given another ring while chunks are under way")
        if message.token and not (message.ring and is_token(message.token)):
            raise ProtocolError(f"transfer {message.transfer} was given a token that names no turns")
        if self.route is wire.Route.STAGED and not (message.ring or self.ring):
            raise ProtocolError(f"transfer {message.transfer} was granted no place to go to")
        if message.ring:
            self.ring, self.token, self._ring_at = message.ring, message.token, self.granted
        self.granted, self.copied = message.chunks, max(self.copied, message.copied)
        return fresh

    def places(self, chunks: range) -> list[wire.Place]:
        """Where in staging memory chunks go that were granted."""
        ring, first = self.ring, self._ring_at  # in a thread: they may be others a moment later
        at = (chunks.start - first) % len(ring)
        return list(islice(cycle(ring), at, at + len(chunks)))

    def on_read(self, message: wire.Read) -> range:
        """The decode rank has read chunks (`pull`); returns them, to be confirmed (`chunks_arrived`) or not (`stop`).

        Raises:
            ProtocolError: If a chunk was not announced, or was read before.
        """
        if self.state in _OVER:
            return range(0)
        if self.route is not wire.Route.PULL:
            raise ProtocolError("Read is a message of the route pull only")
        if self._unread:
            raise ProtocolError(f"transfer {self.fetch.transfer} was said to be read no more")
        fresh = self._added(message.chunks)
        self.granted = message.chunks
        return fresh

    def on_unread(self, *, in_doubt: bool = False) -> list[wire.Message]:
        """Route `pull`: the decode rank reads nothing any more; `in_doubt` if it is silent, and may be reading."""
        if self.being_read:
            self._unread = True
            if in_doubt:
                self.doubts += 1
        return self._complete()

    def chunks_arrived(self, chunks: int, nbytes: int, timings: wire.Timings = UNTIMED) -> list[wire.Message]:
        """The first so many chunks have arrived in full, with so many bytes more than were reported before.

        The decode rank is told by `take_news`, or with the last result.
        """
        if not self.arrived < chunks <= self.granted - self._dropped:
            raise ProtocolError(f"{chunks} chunks of transfer {self.fetch.transfer} cannot have arrived")
        self.arrived = chunks
        self.nbytes += nbytes
        self._timings = timings if self._timings is UNTIMED else added(self._timings, timings)
        return self._complete()

    def take_news(self) -> list[wire.Message]:
        """What has arrived since the decode rank was told last; for after a turn in which some did."""
        arrived = self.arrived
        if arrived <= self._said or self.state is not SendState.MOVING:
            return []
        self._said, timings, self._timings = arrived, self._timings, UNTIMED
        return [wire.Arrived(self.fetch.transfer, arrived, timings)]

    def chunks_dropped(self, chunks: int, *, in_doubt: bool = False) -> list[wire.Message]:
        """So many chunks in the shell's hands will not arrive; `in_doubt` if bytes of them may still be in flight.

        It ends the transfer; who can say why calls `stop` before.
        """
        if not 0 < chunks <= self.moving:
            raise ProtocolError(f"{chunks} chunks of transfer {self.fetch.transfer} are not under way")
        self._dropped += chunks
        self.doubts += in_doubt
        if self.state is SendState.MOVING:
            return self.stop(
                Failure(wire.Status.FAILED, Code.FAILED, f"chunk {self.granted - self._dropped} could not be moved")
            )
        return self._complete()

    def doubt_ended(self) -> None:
        """Nothing of what was dropped in doubt, in one call, is in flight any more."""
        if not self.doubts:
            raise ProtocolError(f"nothing of transfer {self.fetch.transfer} is in doubt")
        self.doubts -= 1

    def stop(self, failure: Failure) -> list[wire.Message]:
        """Give up: nothing new is moved. The terminal result follows once nothing is in the shell's hands.

        On `pull` a failed chunk asks the decode rank to read no more, and its `Cancel` says that it does not.
        Idempotent; the first reason stands.
        """
        if self.state is SendState.ENDED:
            return []
        self.failure = self.failure or failure
        before = self.state
        self._event("stop")
        if before is SendState.PARKED:
            return [build_result(self.fetch.transfer, failure.status, last=True, failure=failure)]
        if before is SendState.MOVING and self.being_read:
            return [build_result(self.fetch.transfer, failure.status, chunk=self.granted, failure=failure)]
        return self._complete()

    def give_up_waiting(self) -> list[wire.Message]:
        """Stopped, and what is in the shell's hands does not end: nothing is promised, but nobody need wait for it."""
        if self.state is not SendState.STOPPING or not self.moving or self.failure is None:
            return []
        return [build_result(self.fetch.transfer, self.failure.status, chunk=self.arrived, failure=self.failure)]

    def _complete(self) -> list[wire.Message]:
        """End the transfer if nothing is left to wait for."""
        over = SEND_TRANSITIONS.get((self.state, "finish"))
        if over is None or self.granted > self.arrived + self._dropped:
            return []
        if self.state is SendState.STOPPING:
            if self.being_read:
                return []
            self.state = over
            status = (
                wire.Status.IN_DOUBT if self.doubts else (self.failure.status if self.failure else wire.Status.FAILED)
            )
            return [build_result(self.fetch.transfer, status, last=True, failure=self.failure)]
        if self.granted < self.chunks or self._payload is None:
            return []
        self.state = over
        took, payload = self._timings, self._payload
        return [
            wire.KvAgentResult(
                self.fetch.transfer, wire.WHOLE, wire.Status.OK, self.nbytes, last=True, timings=took, payload=payload
            )
        ]

    def _added(self, chunks: int) -> range:
        """The chunks that a count adds."""
        if not self.granted < chunks <= self.ready:
            said = f"{chunks} of {self.ready} chunks that were announced, and {self.granted} were before"
            raise ProtocolError(f"transfer {self.fetch.transfer} was moved on to {said}")
        return range(self.granted, chunks)

    def _event(self, event: str) -> None:
        following = SEND_TRANSITIONS.get((self.state, event))
        if following is None:
            raise ProtocolError(f"{event} is illegal for a transfer that is {self.state.value}")
        self.state = following


def added(one: wire.Timings, other: wire.Timings) -> wire.Timings:
    """What several chunks took."""
    return wire.Timings(
        one.queued_us + other.queued_us,
        one.gather_us + other.gather_us,
        one.post_us + other.post_us,
        one.wire_us + other.wire_us,
    )


# --- the decode side


class ReceiveState(StrEnum):
    """Where a transfer stands at its decode rank."""

    ASKED = "asked"
    MOVING = "moving"
    STOPPING = "stopping"  # Cancel was sent, or the peer reported a failure; waiting for the terminal result
    DONE = "done"
    STOPPED = "stopped"  # ended without success, and the peer will not touch anything of it
    LOST = "lost"  # the session is gone; granted chunks are in doubt until the same incarnation answers


RECEIVE_TRANSITIONS: Final[Mapping[tuple[ReceiveState, str], ReceiveState]] = {
    (ReceiveState.ASKED, "accept"): ReceiveState.MOVING,
    (ReceiveState.ASKED, "terminal"): ReceiveState.STOPPED,
    (ReceiveState.ASKED, "cancel"): ReceiveState.STOPPING,
    (ReceiveState.ASKED, "lost"): ReceiveState.LOST,
    (ReceiveState.MOVING, "complete"): ReceiveState.DONE,
    (ReceiveState.MOVING, "terminal"): ReceiveState.STOPPED,
    (ReceiveState.MOVING, "cancel"): ReceiveState.STOPPING,
    (ReceiveState.MOVING, "lost"): ReceiveState.LOST,
    (ReceiveState.STOPPING, "terminal"): ReceiveState.STOPPED,
    (ReceiveState.STOPPING, "cancel"): ReceiveState.STOPPING,
    (ReceiveState.STOPPING, "lost"): ReceiveState.LOST,
    (ReceiveState.LOST, "resume"): ReceiveState.STOPPING,
    (ReceiveState.LOST, "terminal"): ReceiveState.STOPPED,
    (ReceiveState.LOST, "lost"): ReceiveState.LOST,
}
"""Legal events of `ReceiveState`. DONE and STOPPED are final."""


class Receiving(Struct, eq=False):
    """One transfer at the decode rank. Chunks go in their order, so how it stands is told by counts."""

    transfer: int  # its id, unique within this rank's incarnation
    # whether `Fetch` has granted chunks before the peer said how many there are, and that holds: the peer has neither
    # used nor voided it by its first answer
    ahead: bool = False
    staged_ahead: int = 0  # how many, the first ones, if they are granted staging memory; else all are granted in place
    state: ReceiveState = ReceiveState.ASKED
    ended: bool = False  # whether the peer is known to be through with it
    was_lost: bool = False  # whether it has ever been lost, though the peer may be back
    heard_last: bool = False  # whether the last result of a success is in
    failure: Failure | None = None  # why it does not succeed, once that is known
    payload: bytes = b""  # the offer's payload, once the last result is in
    chunks: int = 0  # that the peer has cut it into; 0 before it was accepted
    nbytes: int = 0  # of the peer's plan
    ready: int = 0  # the first so many are ready
    reading: int = 0  # of the first so many a read was begun (`pull`)
    # the first so many are, or were, in the peer's hands (`pull`: have been read, and it is to confirm that they were
    # unchanged)
    granted: int = 0
    arrived: int = 0  # the first so many have arrived
    chunks_done: int = 0  # the first so many are where they belong
    _accepted: bool = False
    _unsaid: list[wire.Message] = []  # route pull: a Cancel that waits for our reads

    @property
    def step(self) -> Step:
        """What it waits for, or waited for when it ended."""
        if not self._accepted:
            return Step.ASKING
        if self.arrived < max(self.granted, self.reading):
            return Step.MOVING
        if self.chunks_done < self.arrived:
            return Step.SCATTERING
        if self.granted < self.ready:
            return Step.RESERVING
        return Step.WAITING if self.ready < self.chunks else Step.ENDING

    @property
    def exposed(self) -> bool:
        """Whether the peer may be writing what was granted: chunks, or all of it ahead."""
        return self.ahead or self.arrived < self.granted

    def on_accept(self, message: wire.Accept) -> bool:
        """The peer made a plan of `message.chunks` chunks. False if the transfer was cancelled meanwhile.

        Raises:
            ProtocolError: If it uses a grant that there was not, or that does not cover its route.
        """
        chunks, staging, route = message.chunks, self.staged_ahead, message.route
        if message.ahead:
            covered = route is wire.Route.STAGED and chunks > 0 if staging else route in IN_PLACE
            if not (self.ahead and covered):
                raise ProtocolError(f"transfer {self.transfer} was accepted under a grant that there is not")
        following = RECEIVE_TRANSITIONS.get((self.state, "accept"))
        if following is None:
            return False
        self.state, self.chunks, self.nbytes, self._accepted = following, chunks, message.bytes, True
        if message.ahead:
            self.ready, self.granted = chunks, min(chunks, staging) if staging else chunks
        self.ahead = False
        return True

    def on_refuse(self, message: wire.Refuse) -> None:
        """The peer refused: nothing is in flight and nothing will be."""
        if not self.ended:
            failure = Failure(wire.Status.FAILED, message.code, message.reason, message.retry_after_ms)
            self.failure = self.failure or failure
            self._event("terminal")

    def on_ready(self, message: wire.Ready) -> range:
        """Chunks that became ready at the peer.

        Raises:
            ProtocolError: If it names one that does not exist (nothing was accepted yet), or fewer than before.
        """
        if self.state not in (ReceiveState.ASKED, ReceiveState.MOVING):
            return range(0)  # it crossed our Cancel
        if not self.ready <= message.chunks <= self.chunks:
            raise ProtocolError(
                f"{message.chunks} chunks of transfer {self.transfer} are said to be ready, of {self.chunks}, after "
                f"{self.ready}"
            )
        fresh, self.ready = range(self.ready, message.chunks), message.chunks
        self.ahead = False  # last: a peer that breaks the protocol has voided nothing, and may be writing
        return fresh

    def grant(
        self,
        chunks: int,
        lease_ms: int,
        generation: int = 0,
        ring: Sequence[wire.Place] = (),
        copied: int = 0,
        token: bytes = b"",
    ) -> list[wire.Message]:
        """Put chunks that are ready into the peer's hands, up to this count; not while the transfer is stopped.

        Args:
            chunks: As many as before only says anew how many have left their places.
            lease_ms: Within which those that are new are to be begun.
            generation: Of the gate before them.
            ring: Where they take turns, if that is another one now.
            copied: The first so many have left their places.
            token: By which the two agents notify each other, if they do.
        """
        self._check_moving("grant")
        if chunks != self.granted:
            self._advance(self.granted, chunks, self.ready)
        self.granted = chunks
        return [wire.Reserve(self.transfer, chunks, lease_ms, generation, list(ring), copied, token)]

    def begin_reads(self, chunks: int) -> None:
        """Route `pull`: this side begins to read chunks that are ready; not while the transfer is being stopped."""
        self._check_moving("read")
        self._advance(self.reading, chunks, self.ready)
        self.reading = chunks

    def chunks_read(self, chunks: int) -> list[wire.Message]:
        """Route `pull`: the first so many chunks have been read; the peer confirms them."""
        self._advance(self.granted, chunks, self.reading)
        self.granted = chunks
        return [wire.Read(self.transfer, chunks)]

    def on_arrived(self, message: wire.Arrived) -> range | None:
        """Chunks have arrived, to be scattered and then counted by `chunks_landed`. None if nothing waits for them.

        Raises:
            ProtocolError: If one of them was not granted.
        """
        if message.chunks > self.granted and self.state in (ReceiveState.ASKED, ReceiveState.MOVING):
            raise ProtocolError(
                f"{message.chunks} chunks of transfer {self.transfer} are said to have arrived, and "
                f"{self.granted} were granted"
            )
        return None if self.ended or message.chunks > self.granted else self.on_notified(message.chunks)

    def on_notified(self, chunks: int) -> range:
        """The first so many have arrived, as the peer's agent has told ours; returns those that are new."""
        fresh, self.arrived = range(self.arrived, max(self.arrived, chunks)), max(self.arrived, chunks)
        return fresh

    def on_result(self, message: wire.KvAgentResult) -> range | None:
        """A result came in.

        Returns:
            Chunks that have arrived by it, as of `on_arrived`; None if nothing waits for it any more.

        Raises:
            ProtocolError: If it reports the transfer as complete when it is not.
        """
        whole, status = message.chunk == wire.WHOLE, message.status
        if self.ended or self.heard_last:
            return None
        if status is not wire.Status.OK:  # only the terminal result says that nothing of what was granted is in flight
            if not (whole or self.arrived <= message.chunk < self.ready):
                return None
            self.failure = self.failure or Failure(status, message.code, message.reason)
            if whole:
                self._event("lost" if status is wire.Status.IN_DOUBT else "terminal")
            return range(0)
        if not whole:
            return None
        running = self.state is ReceiveState.MOVING
        if self.state is ReceiveState.ASKED or (running and self.granted < self.chunks):
            raise ProtocolError(f"transfer {self.transfer} was reported as complete before every chunk was granted")
        self.heard_last, self.payload = True, message.payload
        fresh, self.arrived = range(self.arrived, self.granted), self.granted
        if not running:  # it succeeded there before our Cancel came
            self._event("terminal")
        elif self.chunks_done == self.chunks:
            self._complete()
        return fresh

    def chunks_landed(self, chunks: int) -> None:
        """The first so many chunks are where they belong, and visible."""
        self._advance(self.chunks_done, chunks, self.arrived)
        self.chunks_done = chunks
        if self.heard_last:
            self._complete()

    def cancel(self, failure: Failure, *, reading: bool = False) -> list[wire.Message]:
        """Give up. The peer answers with a terminal result; `STOPPING` lasts until then. Idempotent.

        After the last result there is nothing to ask: the peer is through, and only our own copies are stopped.

        Args:
            failure: Why.
            reading: Route `pull`: whether a read of ours may be under way. `Cancel` follows then by `reads_ended`.
        """
        if self.ended or self.state is ReceiveState.LOST:
            return []
        again = self.state is ReceiveState.STOPPING
        self.failure = self.failure or failure
        if self.heard_last:
            self._event("terminal")
            return []
        self._event("cancel")
        return [] if again else self._release_peer(failure.code, reading=reading)

    def reads_ended(self) -> list[wire.Message]:
        """Route `pull`: nothing is read any more. The `Cancel` that waited for that, if there is one."""
        unsaid, self._unsaid = self._unsaid, []
        return [] if self.ended else unsaid

    def on_link_lost(self, failure: Failure) -> None:
        """The session is gone. After the last result that changes nothing: what remains is this side's own work."""
        if not (self.ended or self.heard_last):
            self.failure = self.failure or failure
            self._event("lost")

    def on_evidence(self) -> None:
        """There is evidence, other than the peer's word, that it will not touch anything of this transfer any more."""
        self._event("terminal")

    def resume(self, *, reading: bool = False) -> list[wire.Message]:
        """The same incarnation is back: ask what became of the transfer; `reading` as in `cancel`."""
        self._event("resume")
        return self._release_peer(Code.PEER_LOST, reading=reading)

    def _release_peer(self, code: Code, *, reading: bool) -> list[wire.Message]:
        """What ends the transfer here: `Cancel` also says that nothing is read, so while something is, it waits."""
        self._unsaid = [wire.Cancel(self.transfer, code)]
        return [wire.Abandon(self.transfer, code)] if reading else self.reads_ended()

    def _complete(self) -> None:
        over = RECEIVE_TRANSITIONS.get((self.state, "complete"))
        if over is not None and self.chunks_done == self.chunks and self.failure is None:
            self.state, self.ended = over, True

    def _check_moving(self, what: str) -> None:
        if self.state is not ReceiveState.MOVING:
            raise ProtocolError(f"{what} is illegal for a transfer that is {self.state.value}")

    def _advance(self, before: int, chunks: int, most: int) -> None:
        """Check that a count goes on, and not too far."""
        if not before < chunks <= most:
            raise ProtocolError(f"transfer {self.transfer} cannot go on from {before} to {chunks} chunks of {most}")

    def _event(self, event: str) -> None:
        following = RECEIVE_TRANSITIONS.get((self.state, event))
        if following is None:
            raise ProtocolError(f"{event} is illegal for a transfer that is {self.state.value}")
        self.state = following
        self.ended = following is ReceiveState.DONE or following is ReceiveState.STOPPED
        self.was_lost |= following is ReceiveState.LOST
