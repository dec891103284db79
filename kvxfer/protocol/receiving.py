"""The decode side of one transfer with one prefill rank, sans-I/O (PROTOCOL.md section 5).

Messages and news go in; messages to send and work for the shell come out. What the machine knows about memory is which
chunks are granted: those may be written by the peer, and only its word that they have arrived, or a terminal result,
takes them out of its hands.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from kvxfer.errors import Code, ProtocolError, Step
from kvxfer.protocol.messages import (
    WHOLE,
    Abandon,
    Accept,
    Arrived,
    Cancel,
    Grant,
    KvAgentResult,
    Landed,
    Message,
    Refuse,
    Reserve,
    Route,
    Status,
    Want,
)
from kvxfer.protocol.sending import Failure

__all__ = ["RECEIVE_TRANSITIONS", "ReceiveState", "Receiving"]


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


class Receiving:
    """One transfer at the decode rank.

    Chunks go in their order, so how it stands is told by counts: of so many, from the first on, the peer said that they
    are ready; so many were granted to it (`pull`: have been read, and it is to confirm that they were unchanged); so
    many have arrived; so many are where they belong.

    Args:
        transfer: Its id, unique within this rank's incarnation.
        ahead: Whether `Fetch` grants every chunk, before the peer has said how many there are.
        staging: Whether that is staging memory, for one chunk; else they are granted in place.

    Attributes:
        transfer: Its id.
        state: See `ReceiveState`.
        ended: Whether the peer is known to be through with it.
        heard_last: Whether the last result of a success is in.
        ahead: Whether that grant holds: the peer has neither used nor voided it by its first answer.
        failure: Why it does not succeed, once that is known.
        payload: The offer's payload, once the last result is in.
        stale: Frames that were dropped because nothing waited for them.
        chunks: Chunks that the peer has cut it into; 0 before it was accepted.
        ready: The first so many are ready.
        reading: Of the first so many a read was begun (`pull`).
        granted: The first so many are, or were, in the peer's hands.
        arrived: The first so many have arrived.
        chunks_done: The first so many are where they belong.
    """

    def __init__(self, transfer: int, *, ahead: bool = False, staging: bool = False) -> None:
        self.transfer: Final = transfer
        self.state = ReceiveState.ASKED
        self.ended = self.heard_last = False
        self.ahead = ahead
        self._covered: Final = frozenset({Route.STAGED} if staging else {Route.DIRECT, Route.MAPPED})
        self.failure: Failure | None = None
        self.payload = b""
        self.stale = 0
        self.chunks = self.ready = self.reading = self.granted = self.arrived = self.chunks_done = 0
        self._accepted = False
        self._unsaid: list[Message] = []  # route pull: a Cancel that waits for our reads

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

    def accept(self, message: Accept) -> bool:
        """The peer made a plan of `message.chunks` chunks. False if the transfer was cancelled meanwhile.

        Raises:
            ProtocolError: If it uses a grant that there was not, or that does not cover its route.
        """
        covered = message.route in self._covered and (message.route is not Route.STAGED or message.chunks == 1)
        if message.ahead and not (self.ahead and covered):
            raise ProtocolError(f"transfer {self.transfer} was accepted under a grant that there is not")
        if self.state is not ReceiveState.ASKED:
            return False
        self._event("accept")
        self._accepted = True
        self.chunks = message.chunks
        if message.ahead:
            self.ready = self.granted = message.chunks
        self.ahead = False
        return True

    def refused(self, message: Refuse) -> None:
        """The peer refused: nothing is in flight and nothing will be."""
        if not self.ended:
            failure = Failure(Status.FAILED, message.code, message.reason, message.retry_after_ms)
            self.failure = self.failure or failure
            self._event("terminal")

    def wanted(self, message: Want) -> range:
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
        ring: Sequence[Grant] = (),
        copied: int = 0,
        token: bytes = b"",
    ) -> list[Message]:
        """Put chunks that are ready into the peer's hands, up to this count; not while the transfer is stopped.

        Args:
            chunks: As many as before only says anew how many have left their places.
            lease_ms: Within which those that are new are to be begun.
            generation: Of the gate before them.
            ring: Where they take turns, if that is another one now.
            copied: The first so many have left their places.
            token: By which the two agents notify each other, if they do.
        """
        self._begin("grant")
        if chunks != self.granted:
            self._advance(self.granted, chunks, self.ready)
        self.granted = chunks
        return [Reserve(self.transfer, chunks, lease_ms, generation, list(ring), copied, token)]

    def read(self, chunks: int) -> None:
        """Route `pull`: this side begins to read chunks that are ready; not while the transfer is being stopped."""
        self._begin("read")
        self._advance(self.reading, chunks, self.ready)
        self.reading = chunks

    def landed(self, chunks: int) -> list[Message]:
        """Route `pull`: the first so many chunks have been read; the peer confirms them."""
        self._advance(self.granted, chunks, self.reading)
        self.granted = chunks
        return [Landed(self.transfer, chunks)]

    def came(self, message: Arrived) -> range:
        """Chunks have arrived, to be scattered (and then counted by `done`).

        Raises:
            ProtocolError: If one of them was not granted.
        """
        if message.chunks > self.granted and self.state in (ReceiveState.ASKED, ReceiveState.MOVING):
            raise ProtocolError(
                f"{message.chunks} chunks of transfer {self.transfer} are said to have arrived, and "
                f"{self.granted} were granted"
            )
        if self.ended or message.chunks > self.granted:
            self.stale += 1
            return range(0)
        return self.notified(message.chunks)

    def notified(self, chunks: int) -> range:
        """The first so many have arrived, as the peer's agent has told ours; returns those that are new."""
        fresh, self.arrived = range(self.arrived, max(self.arrived, chunks)), max(self.arrived, chunks)
        return fresh

    def result(self, message: KvAgentResult) -> range:
        """A result came in.

        Returns:
            Chunks that have arrived by it, as of `came`.

        Raises:
            ProtocolError: If it reports the transfer as complete when it is not.
        """
        if message.chunk != WHOLE:
            open_yet = self.arrived <= message.chunk < self.ready and not (self.ended or self.heard_last)
            if message.status is not Status.OK and open_yet:
                # what was granted stays so: only the terminal result says that nothing of it is in flight
                self.failure = self.failure or Failure(message.status, message.code, message.reason)
            else:
                self.stale += 1
        elif self.ended or self.heard_last:
            self.stale += 1
        elif message.status is Status.OK:
            return self._finished(message)
        else:
            self.failure = self.failure or Failure(message.status, message.code, message.reason)
            self._event("lost" if message.status is Status.IN_DOUBT else "terminal")
        return range(0)

    def done(self, chunks: int) -> None:
        """The first so many chunks are where they belong, and visible."""
        self._advance(self.chunks_done, chunks, self.arrived)
        self.chunks_done = chunks
        self._complete()

    def cancel(self, failure: Failure, *, reading: bool = False) -> list[Message]:
        """Give up. The peer answers with a terminal result; `STOPPING` lasts until then. Idempotent.

        After the last result there is nothing to ask: the peer is through, and only our own copies are stopped.

        Args:
            failure: Why.
            reading: Route `pull`: whether a read of ours may be under way. `Cancel` follows then by `unread`.
        """
        if self.ended or self.state is ReceiveState.LOST:
            return []
        again = self.state is ReceiveState.STOPPING
        self.failure = self.failure or failure
        if self.heard_last:
            self._event("terminal")
            return []
        self._event("cancel")
        return [] if again else self._part(failure.code, reading=reading)

    def unread(self) -> list[Message]:
        """Route `pull`: nothing is read any more. The `Cancel` that waited for that, if there is one."""
        unsaid, self._unsaid = self._unsaid, []
        return [] if self.ended else unsaid

    def lost(self, failure: Failure) -> None:
        """The session is gone. After the last result that changes nothing: what remains is this side's own work."""
        if not (self.ended or self.heard_last):
            self.failure = self.failure or failure
            self._event("lost")

    def safe(self) -> None:
        """There is evidence, other than the peer's word, that it will not touch anything of this transfer any more."""
        self._event("terminal")

    def resume(self, *, reading: bool = False) -> list[Message]:
        """The same incarnation is back: ask what became of the transfer; `reading` as in `cancel`."""
        self._event("resume")
        return self._part(Code.PEER_LOST, reading=reading)

    def _part(self, code: Code, *, reading: bool) -> list[Message]:
        """What ends the transfer here: `Cancel` also says that nothing is read, so while something is, it waits."""
        self._unsaid = [Cancel(self.transfer, code)]
        return [Abandon(self.transfer, code)] if reading else self.unread()

    def _finished(self, message: KvAgentResult) -> range:
        """The last result of a success: all that was granted has arrived, and that is all of it."""
        running = self.state in (ReceiveState.ASKED, ReceiveState.MOVING)
        if running and (self.state is ReceiveState.ASKED or self.granted < self.chunks):
            raise ProtocolError(f"transfer {self.transfer} was reported as complete before every chunk was granted")
        self.heard_last, self.payload = True, message.payload
        fresh, self.arrived = range(self.arrived, self.granted), self.granted
        if self.state in (ReceiveState.STOPPING, ReceiveState.LOST):  # it succeeded there before our Cancel came
            self._event("terminal")
        self._complete()
        return fresh

    def _complete(self) -> None:
        whole = self.heard_last and self.chunks_done == self.chunks and self.failure is None
        if self.state is ReceiveState.MOVING and whole:
            self._event("complete")

    def _begin(self, what: str) -> None:
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
