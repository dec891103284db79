"""The decode side of one transfer with one prefill rank, sans-I/O (PROTOCOL.md section 5).

Messages and news go in; messages to send and work for the shell come out. What the machine knows about memory is which
chunks are granted: those may be written by the peer, and only a result takes a chunk out of its hands.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from kvxfer.errors import Code, ProtocolError, Step
from kvxfer.protocol.messages import (
    WHOLE,
    Abandon,
    Accept,
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
from kvxfer.protocol.packing import pack_u32, unpack_u32
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


class _Chunk(StrEnum):
    OPEN = "open"
    WANTED = "wanted"
    READING = "reading"  # route pull: we read it; only then may the peer confirm it
    GRANTED = "granted"
    LANDED = "landed"
    DONE = "done"


_THERE: Final = frozenset({_Chunk.LANDED, _Chunk.DONE})


class Receiving:
    """One transfer at the decode rank.

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
        stale: Results that were dropped because nothing waited for them.
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
        self._chunks: list[_Chunk] = []
        self._done = 0
        self._accepted = False
        self._unsaid: list[Message] = []  # route pull: a Cancel that waits for our reads

    @property
    def chunks(self) -> int:
        """Chunks that the peer has cut it into; 0 before it was accepted."""
        return len(self._chunks)

    @property
    def chunks_done(self) -> int:
        """Chunks that are where they belong."""
        return self._done

    @property
    def step(self) -> Step:
        """What it waits for, or waited for when it ended."""
        if not self._accepted:
            return Step.ASKING
        if _Chunk.GRANTED in self._chunks or _Chunk.READING in self._chunks:
            return Step.MOVING
        if _Chunk.LANDED in self._chunks:
            return Step.SCATTERING
        if _Chunk.WANTED in self._chunks:
            return Step.RESERVING
        return Step.WAITING if _Chunk.OPEN in self._chunks else Step.ENDING

    @property
    def granted(self) -> list[int]:
        """Chunks in the peer's hands: it may write them, or (`pull`) is to confirm that they were read unchanged."""
        return [chunk for chunk, state in enumerate(self._chunks) if state is _Chunk.GRANTED]

    @property
    def exposed(self) -> bool:
        """Whether the peer may be writing what was granted: chunks, or all of it ahead."""
        return self.ahead or _Chunk.GRANTED in self._chunks

    @property
    def outstanding(self) -> int:
        """Chunks granted, being read or landed, and not yet done: what the credit window counts."""
        return sum(state in (_Chunk.READING, _Chunk.GRANTED, _Chunk.LANDED) for state in self._chunks)

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
        self._chunks = [_Chunk.GRANTED if message.ahead else _Chunk.OPEN] * message.chunks
        self.ahead = False
        return True

    def refused(self, message: Refuse) -> None:
        """The peer refused: nothing is in flight and nothing will be."""
        if not self.ended:
            failure = Failure(Status.FAILED, message.code, message.reason, message.retry_after_ms)
            self.failure = self.failure or failure
            self._event("terminal")

    def wanted(self, message: Want) -> list[int]:
        """Chunks that became ready at the peer.

        Raises:
            ProtocolError: If a chunk does not exist (nothing was accepted yet) or was announced before.
        """
        if self.state not in (ReceiveState.ASKED, ReceiveState.MOVING):
            return []  # it crossed our Cancel
        chunks = list(unpack_u32(message.chunks))
        self._advance(chunks, _Chunk.OPEN, _Chunk.WANTED)
        self.ahead = False  # last: a peer that breaks the protocol has voided nothing, and may be writing
        return chunks

    def grant(self, grants: Sequence[Grant], lease_ms: int, generation: int = 0) -> list[Message]:
        """Put wanted chunks into the peer's hands; not while the transfer is being stopped."""
        self._begin("grant")
        self._advance([grant.chunk for grant in grants], _Chunk.WANTED, _Chunk.GRANTED)
        return [Reserve(self.transfer, list(grants), lease_ms, generation)]

    def reading(self, chunks: Sequence[int]) -> None:
        """Route `pull`: this side begins to read wanted chunks; not while the transfer is being stopped."""
        self._begin("read")
        self._advance(chunks, _Chunk.WANTED, _Chunk.READING)

    def landed(self, chunks: Sequence[int]) -> list[Message]:
        """Route `pull`: chunks have been read; the peer confirms them with a result."""
        self._advance(chunks, _Chunk.READING, _Chunk.GRANTED)
        return [Landed(self.transfer, pack_u32(chunks))]

    def result(self, message: KvAgentResult) -> int | None:
        """A result came in.

        Returns:
            The chunk that has landed, to be scattered (and then reported by `chunk_done`), or None.

        Raises:
            ProtocolError: If it reports as `OK` what was not granted, or the transfer as complete when it is not.
        """
        if message.chunk == WHOLE:
            self._whole(message)
            return None
        state = self._chunks[message.chunk] if message.chunk < len(self._chunks) else None
        if message.status is not Status.OK and state in (_Chunk.WANTED, _Chunk.READING, _Chunk.GRANTED):
            # the chunk stays granted: only the terminal result says that nothing of it is in flight
            self.failure = self.failure or Failure(message.status, message.code, message.reason)
            return None
        if message.status is Status.OK and state is _Chunk.GRANTED:
            return self._landed(message)
        if message.status is Status.OK and state not in _THERE and self.state is ReceiveState.MOVING:
            self._expect(message.chunk, _Chunk.GRANTED)
        self.stale += 1
        return None

    def chunk_done(self, chunk: int) -> None:
        """A landed chunk is where it belongs, and visible."""
        self._expect(chunk, _Chunk.LANDED)
        self._chunks[chunk] = _Chunk.DONE
        self._done += 1
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

    def _whole(self, message: KvAgentResult) -> None:
        if self.ended or self.heard_last:
            self.stale += 1
        elif message.status is Status.OK:
            self._finished(message, self._chunks)
        elif message.status is Status.IN_DOUBT:
            self.failure = self.failure or Failure(message.status, message.code, message.reason)
            self._event("lost")
        else:
            self.failure = self.failure or Failure(message.status, message.code, message.reason)
            self._event("terminal")

    def _landed(self, message: KvAgentResult) -> int:
        chunk = message.chunk
        if message.last:
            self._finished(message, [*self._chunks[:chunk], *self._chunks[chunk + 1 :]])
        self._chunks[chunk] = _Chunk.LANDED
        return chunk

    def _finished(self, message: KvAgentResult, others: Sequence[_Chunk]) -> None:
        """The last result of a success, which every one of the other chunks must have gone before."""
        running = self.state in (ReceiveState.ASKED, ReceiveState.MOVING)
        if running and (self.state is ReceiveState.ASKED or not _THERE.issuperset(others)):
            raise ProtocolError(f"transfer {self.transfer} was reported as complete before every chunk had landed")
        self.heard_last, self.payload = True, message.payload
        if self.state in (ReceiveState.STOPPING, ReceiveState.LOST):  # it succeeded there before our Cancel came
            self._event("terminal")
        self._complete()

    def _complete(self) -> None:
        whole = self.heard_last and self._done == len(self._chunks) and self.failure is None
        if self.state is ReceiveState.MOVING and whole:
            self._event("complete")

    def _begin(self, what: str) -> None:
        if self.state is not ReceiveState.MOVING:
            raise ProtocolError(f"{what} is illegal for a transfer that is {self.state.value}")

    def _advance(self, chunks: Sequence[int], before: _Chunk, after: _Chunk) -> None:
        """Chunks go on by one step: all of them, or none if one of them must not."""
        for chunk in chunks:
            self._expect(chunk, before)
        if len(set(chunks)) < len(chunks):
            raise ProtocolError(f"a chunk of transfer {self.transfer} is named twice")
        for chunk in chunks:
            self._chunks[chunk] = after

    def _expect(self, chunk: int, state: _Chunk) -> None:
        if chunk >= len(self._chunks) or self._chunks[chunk] is not state:
            found = self._chunks[chunk].value if chunk < len(self._chunks) else "unknown"
            raise ProtocolError(f"chunk {chunk} of transfer {self.transfer} is {found}, not {state.value}")

    def _event(self, event: str) -> None:
        following = RECEIVE_TRANSITIONS.get((self.state, event))
        if following is None:
            raise ProtocolError(f"{event} is illegal for a transfer that is {self.state.value}")
        self.state = following
        self.ended = following is ReceiveState.DONE or following is ReceiveState.STOPPED
