"""The prefill side of one transfer, sans-I/O (PROTOCOL.md section 5).

Messages and news go in; messages to send and chunks to move come out. The machine promises what the results promise: a
terminal result with any status but `IN_DOUBT` leaves only when no chunk is in the hands of the shell any more.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvxfer.errors import Code, ProtocolError, Step
from kvxfer.protocol.messages import (
    WHOLE,
    Accept,
    Fetch,
    Grant,
    KvAgentResult,
    Landed,
    Message,
    Refuse,
    Reserve,
    Route,
    Span,
    Status,
    Sums,
    Timings,
    Want,
)
from kvxfer.protocol.packing import pack_u32, unpack_u32

__all__ = ["SEND_TRANSITIONS", "Failure", "SendState", "Sending", "build_result"]


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

_OVER: Final = (SendState.STOPPING, SendState.ENDED)


class _Chunk(StrEnum):
    WAITING = "waiting"
    WANTED = "wanted"
    MOVING = "moving"
    MOVED = "moved"
    DEAD = "dead"
    IN_DOUBT = "in_doubt"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a transfer is stopped, and how the decode rank is told; of a refusal also when to try again (0: unknown)."""

    status: Status
    code: Code
    reason: str
    retry_after_ms: int = 0


def build_result(
    transfer: int,
    status: Status,
    *,
    chunk: int = WHOLE,
    nbytes: int = 0,
    last: bool = False,
    failure: Failure | None = None,
    timings: Timings | None = None,
    payload: bytes = b"",
) -> KvAgentResult:
    """The one builder of results, for every outcome."""
    return KvAgentResult(
        transfer=transfer,
        chunk=chunk,
        status=status,
        bytes=nbytes,
        last=last,
        code=failure.code if failure else Code.UNKNOWN,
        reason=failure.reason[:1024] if failure else "",
        timings=timings or Timings(),
        payload=payload,
    )


class Sending:
    """One transfer at the prefill rank.

    Attributes:
        fetch: The message that began it.
        transfer: Its id, unique within the decode rank's incarnation.
        state: See `SendState`.
        route: Chosen route once accepted.
        failure: Why it stops, once it does.
    """

    def __init__(self, fetch: Fetch) -> None:
        self.fetch: Final = fetch
        self.transfer: Final = fetch.transfer
        self.state = SendState.PARKED
        self.route = Route.UNKNOWN
        self.failure: Failure | None = None
        self._chunks: list[_Chunk] = []
        self._moving = 0
        self._moved = 0
        self._announced = 0  # route pull: chunks that the decode rank may be reading
        self._payload: bytes | None = None
        self._last_sent = False

    @property
    def moving(self) -> int:
        """Chunks in the hands of the shell: granted and not yet reported back."""
        return self._moving

    @property
    def chunks(self) -> int:
        """Chunks that it is cut into; 0 before it was accepted."""
        return len(self._chunks)

    @property
    def chunks_done(self) -> int:
        """Chunks that have arrived."""
        return self._moved

    @property
    def step(self) -> Step:
        """What it waits for."""
        if self.state is SendState.PARKED:
            return Step.ASKING
        taken = _Chunk.MOVING in self._chunks or _Chunk.IN_DOUBT in self._chunks
        if taken or self._announced:
            return Step.MOVING
        if _Chunk.WANTED in self._chunks:
            return Step.RESERVING
        return Step.WAITING if _Chunk.WAITING in self._chunks else Step.ENDING

    @property
    def in_doubt(self) -> bool:
        """Whether some chunk's writes may still be in flight, or (`pull`) its reads."""
        return _Chunk.IN_DOUBT in self._chunks

    @property
    def being_read(self) -> bool:
        """Route `pull`: whether the decode rank may be reading chunks, and has not said that it does no more."""
        return self._announced > 0

    def accept(self, message: Accept) -> list[Message]:
        """The offer is there and the plan is made.

        With `message.ahead` every chunk is to be moved now, under the grant of `Fetch`.
        """
        self._event("accept")
        self.route = message.route
        self._chunks = [_Chunk.MOVING if message.ahead else _Chunk.WAITING] * message.chunks
        self._moving = message.chunks if message.ahead else 0
        return [message, *self._complete()]

    def refuse(self, code: Code, reason: str, *, retry_after_ms: int = 0) -> list[Message]:
        """This transfer will not happen."""
        self._event("refuse")
        self.failure = Failure(Status.FAILED, code, reason, retry_after_ms)
        return [Refuse(self.transfer, code, reason[:1024], retry_after_ms)]

    def ready(
        self, chunks: Iterable[int], lease_ms: int = 0, spans: Sequence[Span] = (), generation: int = 0
    ) -> list[Message]:
        """These chunks may go now, but those announced before. `spans` are block ids that were not said yet."""
        if self.state is not SendState.MOVING:
            return []
        fresh = [chunk for chunk in dict.fromkeys(chunks) if self._chunks[chunk] is _Chunk.WAITING]
        for chunk in fresh:
            self._chunks[chunk] = _Chunk.WANTED
        self._announced += len(fresh) if self.route is Route.PULL else 0
        return [Want(self.transfer, pack_u32(fresh), lease_ms, list(spans), generation)] if fresh else []

    def finish_offer(self, payload: bytes) -> list[Message]:
        """The offer is complete: no chunk will be added, and this is the payload."""
        self._payload = payload
        return self._complete()

    def reserve(self, message: Reserve) -> list[Grant]:
        """The decode rank granted memory; returns the chunks to move now.

        Raises:
            ProtocolError: If a chunk does not exist, was not announced, or was granted before.
        """
        if self.state in _OVER:
            return []  # it crossed our stop; the terminal result answers it
        if self.route is Route.PULL:
            raise ProtocolError("Reserve is no message of the route pull")
        self._take([grant.chunk for grant in message.grants])
        return list(message.grants)

    def landed(self, message: Landed) -> list[int]:
        """The decode rank has read chunks (`pull`); returns them, to be confirmed by `moved` or denied by `stop`.

        Raises:
            ProtocolError: If a chunk does not exist or was not announced.
        """
        if self.state in _OVER:
            return []
        if self.route is not Route.PULL:
            raise ProtocolError("Landed is a message of the route pull only")
        chunks = list(unpack_u32(message.chunks))
        self._take(chunks)
        self._announced -= len(chunks)
        return chunks

    def unread(self, *, in_doubt: bool = False) -> list[Message]:
        """Route `pull`: the decode rank reads nothing any more; `in_doubt` if it is silent, and may be reading."""
        if self._announced:
            after = _Chunk.IN_DOUBT if in_doubt else _Chunk.DEAD
            self._chunks = [after if chunk is _Chunk.WANTED else chunk for chunk in self._chunks]
            self._announced = 0
        return self._complete()

    def moved(self, chunk: int, nbytes: int, timings: Timings, sums: bytes = b"") -> list[Message]:
        """A chunk has arrived in full; `sums`, if wanted, are what it adds up to here."""
        self._report(chunk, _Chunk.MOVED)
        self._moved += 1
        done = self._moved == len(self._chunks) and self._payload is not None and self.state is SendState.MOVING
        self._last_sent = self._last_sent or done
        payload = self._payload or b""
        result = build_result(
            self.transfer,
            Status.OK,
            chunk=chunk,
            nbytes=nbytes,
            last=done,
            timings=timings,
            payload=payload if done else b"",
        )
        return [*([Sums(self.transfer, chunk, sums)] if sums else []), result, *self._complete()]

    def dropped(self, chunk: int, *, in_doubt: bool = False) -> list[Message]:
        """A chunk in the shell's hands will not arrive; `in_doubt` if some of its bytes may still be in flight.

        It ends the transfer; who can say why calls `stop` before.
        """
        self._report(chunk, _Chunk.IN_DOUBT if in_doubt else _Chunk.DEAD)
        if self.state is SendState.MOVING:
            return self.stop(Failure(Status.FAILED, Code.FAILED, f"chunk {chunk} could not be moved"))
        return self._complete()

    def settled(self, chunk: int) -> None:
        """Nothing of a chunk that was dropped in doubt is in flight any more."""
        self._expect(chunk, _Chunk.IN_DOUBT)
        self._chunks[chunk] = _Chunk.DEAD

    def stop(self, failure: Failure) -> list[Message]:
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
            return [build_result(self.transfer, failure.status, last=True, failure=failure)]
        if before is SendState.MOVING and self._announced:
            chunk = self._chunks.index(_Chunk.WANTED)
            return [build_result(self.transfer, failure.status, chunk=chunk, failure=failure)]
        return self._complete()

    def overdue(self) -> list[Message]:
        """Stopped, and what is in the shell's hands does not end: nothing is promised, but nobody need wait for it."""
        if self.state is not SendState.STOPPING or _Chunk.MOVING not in self._chunks or self.failure is None:
            return []
        chunk = self._chunks.index(_Chunk.MOVING)
        return [build_result(self.transfer, self.failure.status, chunk=chunk, failure=self.failure)]

    def _complete(self) -> list[Message]:
        """End the transfer if nothing is left to wait for."""
        if self._moving or self.state not in (SendState.MOVING, SendState.STOPPING):
            return []
        if self._announced and self.state is SendState.STOPPING:
            return []
        if self.state is SendState.STOPPING:
            self._event("finish")
            status = Status.IN_DOUBT if self.in_doubt else (self.failure.status if self.failure else Status.FAILED)
            return [build_result(self.transfer, status, last=True, failure=self.failure)]
        if self._moved < len(self._chunks) or self._payload is None:
            return []
        self._event("finish")
        if self._last_sent:
            return []
        return [build_result(self.transfer, Status.OK, last=True, payload=self._payload)]

    def _expect(self, chunk: int, state: _Chunk) -> None:
        if chunk >= len(self._chunks) or self._chunks[chunk] is not state:
            found = self._chunks[chunk].value if chunk < len(self._chunks) else "unknown"
            raise ProtocolError(f"chunk {chunk} of transfer {self.transfer} is {found}, not {state.value}")

    def _take(self, chunks: list[int]) -> None:
        """Chunks come into the shell's hands: all of them, or none if one of them must not."""
        for chunk in chunks:
            self._expect(chunk, _Chunk.WANTED)
        if len(set(chunks)) < len(chunks):
            raise ProtocolError(f"a chunk of transfer {self.transfer} is named twice in one message")
        for chunk in chunks:
            self._chunks[chunk] = _Chunk.MOVING
        self._moving += len(chunks)

    def _report(self, chunk: int, state: _Chunk) -> None:
        self._expect(chunk, _Chunk.MOVING)
        self._chunks[chunk] = state
        self._moving -= 1

    def _event(self, event: str) -> None:
        following = SEND_TRANSITIONS.get((self.state, event))
        if following is None:
            raise ProtocolError(f"{event} is illegal for a transfer that is {self.state.value}")
        self.state = following
