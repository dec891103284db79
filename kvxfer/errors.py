"""Every error that kvxfer raises, in one tree with stable codes, and what is known of a transfer that failed.

    KvxferError
    +-- UsageError                 the caller's mistake; nothing was sent and nothing is lost
    |   +-- ConfigError            a setting is unknown, malformed or out of range
    |   +-- GeometryError          a cache was described wrongly, or cannot be expressed
    |   +-- BlocksError            a block list is out of range, repeated, empty or too short
    |   +-- TokensError            a token range is empty, outside the offer, or unusable for state
    |   +-- EventError             `after=` is missing or was never recorded
    |   +-- RequestError           a request id is in use or was just used, or something of it makes no sense
    |   |   +-- BusyError          this worker has as much under way as its settings allow
    |   +-- TicketError            a ticket or an engine card is malformed or does not belong here
    |   +-- ClosedError            the worker is not open, or draining, or was closed meanwhile
    |   +-- ForkedError            the worker runs in the process that this one was forked off
    |   +-- MissingExtraError      an optional package is not installed
    |   +-- ArenaError             there is not so much memory for an arena, or to share
    +-- PeerError                  the other side, or the way to it
    |   +-- UnreachableError       no connection, or no handshake in time
    |   +-- IdentityError          no proof that it is the process that it says to be
    |   +-- MismatchError          the two engines cannot exchange this cache; names each field
    |   +-- RefusedError           the peer refused one request and said why
    |   +-- PeerLostError          the peer died, or was silent too long
    |   +-- ProtocolError          the peer sent what the protocol forbids
    +-- TransferError              a transfer that had begun did not succeed
    |   +-- TransferTimeoutError   the caller's deadline passed
    |   +-- TransferFailedError    a copy or a write failed on one of the two sides
    |   +-- IntegrityError         what arrived is not what the prefill rank holds
    |   +-- MemoryInDoubtError     a silent peer may still touch memory; kvxfer keeps it in custody
    +-- FabricError                the transport below (NIXL) refused or failed

A local mistake (`UsageError`) and a remote one (`PeerError`) are different types on purpose. `TransferTimeoutError` and
`UnreachableError` are also `TimeoutError` and `ConnectionError`, so generic handlers work.

Codes are part of the wire (`proto/registry.toml`): they are appended to, never renumbered.
"""

import copyreg
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum, unique
from typing import Any, ClassVar, Final

__all__ = [
    "ArenaError",
    "BlocksError",
    "BusyError",
    "ClosedError",
    "Code",
    "ConfigError",
    "EventError",
    "FabricError",
    "FailureReport",
    "ForkedError",
    "GeometryError",
    "IdentityError",
    "IntegrityError",
    "KvxferError",
    "MemoryInDoubt",
    "MemoryInDoubtError",
    "MismatchError",
    "MissingExtraError",
    "PeerError",
    "PeerLostError",
    "ProtocolError",
    "RefusedError",
    "RequestError",
    "Step",
    "TicketError",
    "TokensError",
    "TransferError",
    "TransferFailedError",
    "TransferTimeoutError",
    "UnreachableError",
    "UsageError",
]

# --- codes


class OpenEnum(IntEnum):
    """Numbers on the wire: what a newer peer says, and this version does not know, is 0."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls(0) if isinstance(value, int) else None


@unique
class Code(OpenEnum):
    """Stable error codes: what travels in `Refuse`, `KvAgentResult` and `Goodbye`, and what logs and metrics count.

    A code that this version does not know decodes as `UNKNOWN`, so that a newer peer's refusal is still a refusal.
    """

    UNKNOWN = 0
    # the caller's mistakes
    USAGE = 1
    CONFIG = 2
    GEOMETRY = 3
    BLOCKS = 4
    TOKENS = 5
    EVENT = 6
    REQUEST = 7
    TICKET = 8
    CLOSED = 9
    MISSING_EXTRA = 10
    ARENA = 11
    FORKED = 12
    # the peer
    PEER = 20
    UNREACHABLE = 21
    MISMATCH = 22
    REFUSED = 23
    PEER_LOST = 24
    PROTOCOL = 25
    IDENTITY = 26
    # a transfer
    TRANSFER = 30
    TIMEOUT = 31
    FAILED = 32
    IN_DOUBT = 33
    INTEGRITY = 34
    FABRIC = 40
    # reasons that a peer gives in `Refuse`
    TICKET_UNKNOWN = 50
    TICKET_FORGED = 51
    TICKET_EXPIRED = 52
    TICKET_RELEASED = 53
    OFFER_WITHDRAWN = 55
    NEVER_OFFERED = 57
    TOKENS_OUTSIDE_OFFER = 58
    WANTS_NOT_HELD = 60
    NO_COMMON_ROUTE = 61
    CHUNK_TOO_LARGE = 62
    TOO_MANY = 63
    DRAINING = 64
    SUPERSEDED = 65
    PLAN_DIFFERS = 67
    CANCELLED = 68


# --- reports


@unique
class Step(StrEnum):
    """How far a transfer had come: what it waited for when it failed. In the order in which they are reached."""

    CONNECTING = "connecting"
    """For a stream to a prefill rank and its handshake."""
    ASKING = "asking"
    """For the answer of the prefill rank, which may wait for its offer."""
    PLANNING = "planning"
    """For a plan of its own."""
    WAITING = "waiting"
    """For chunks that the prefill side has not computed yet."""
    RESERVING = "reserving"
    """For memory of chunks that are ready, or for blocks that may be written."""
    MOVING = "moving"
    """For chunks that are granted: to be gathered, posted, on the wire."""
    SCATTERING = "scattering"
    """For the copy of what has landed into the blocks."""
    ENDING = "ending"
    """For the last word: every chunk is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """What is known of a transfer that failed, as one side saw it.

    Attributes:
        request: The request's id.
        transfer: The transfer's id, as in the logs of both sides.
        peer: Whose part failed; where it cannot be told, all that were waited for, joined by a comma.
        step: What was waited for when it failed.
        elapsed: Seconds from its begin to its end.
        route: How its bytes travelled; empty if none was chosen.
        bytes: Bytes of cache that had arrived.
        chunks_done: Chunks that had arrived.
        chunks: Chunks that it was cut into, as far as that was known.
        code: Why, as a number.
        reason: Why, in words.
        blocks: At the decode side the destination blocks, which hold no usable data of the request. At the prefill side
            the offered blocks. By group.
        memory_safe: Whether no peer touches those blocks any more.
    """

    request: str
    transfer: str
    peer: str
    step: Step
    elapsed: float
    code: Code
    reason: str
    route: str = ""
    bytes: int = 0
    chunks_done: int = 0
    chunks: int = 0
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    memory_safe: bool = True

    def log_fields(self) -> dict[str, object]:
        """What the one line of a failed transfer says besides its stats, which have route, bytes and chunks.

        Block ids are many, so they are counted.
        """
        return {
            "request": self.request,
            "transfer": self.transfer,
            "peer": self.peer,
            "step": self.step.value,
            "elapsed": self.elapsed,
            "chunks_done": self.chunks_done,
            "code": self.code.name.lower(),
            "reason": self.reason,
            "blocks": sum(map(len, self.blocks.values())),
            "memory_safe": self.memory_safe,
        }


# --- errors


class KvxferError(Exception):
    """Base of every error that kvxfer raises.

    Attributes:
        code: Stable number of this kind of error, as on the wire and in metrics.
        report: What is known of the transfer that it ended: peer, step, elapsed time, bytes, blocks, whether memory is
            safe. None if it ended none.
        retry_after: Seconds after which the same call may succeed, where that is known; otherwise None.
    """

    code: ClassVar[Code] = Code.UNKNOWN
    report: FailureReport | None = None
    retry_after: float | None = None

    def __reduce__(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        # who runs workers in other processes gets their errors pickled; by default that calls __init__ with the message
        return copyreg.__newobj__, (type(self), *self.args), {**self.__dict__, "args": self.args}  # type: ignore[attr-defined]


class UsageError(KvxferError):
    """The caller asked for something impossible. Nothing was sent, and no memory changed hands (but see `ClosedError`).

    Cause: an argument that contradicts the documentation, or another thread or event loop than the worker's.
    Remedy: the message names the argument, its value and the bound, or where to call; mend the call.
    """

    code: ClassVar[Code] = Code.USAGE


class ConfigError(UsageError, ValueError):
    """A setting is unknown, malformed or out of range.

    Cause: a misspelt name (also in a `KVXFER_*` variable or the file), or a value outside its bounds.
    Remedy: the message gives the nearest known name or the bound; `kvxfer config` prints what is in effect and why.
    """

    code: ClassVar[Code] = Code.CONFIG


class GeometryError(UsageError, ValueError):
    """A cache was described wrongly, or in a way that cannot be expressed as strided arrays.

    Cause: an axis string that does not fit the tensor, coordinates given twice, a device that is neither cpu nor cuda.
    Remedy: the message names the tensor (group, part, layers) and both the expected and the given value.
    """

    code: ClassVar[Code] = Code.GEOMETRY


class BlocksError(UsageError, ValueError):
    """A block list cannot be used.

    Cause: an id that is negative or beyond the pool, an id named twice at the receiver, an empty or too short list, or
    blocks that are in custody after `MemoryInDoubtError`.
    Remedy: the message names the group, the position in the list and the id.
    """

    code: ClassVar[Code] = Code.BLOCKS


class TokensError(UsageError, ValueError):
    """A token range cannot be used.

    Cause: it is empty, has a step, or does not go with this side's offer. What only the prefill rank can see of a fetch
    is a `RefusedError`: it goes beyond the offer (`TOKENS_OUTSIDE_OFFER`), or ends before it although the request has
    state, which belongs to the last token only (`TOKENS`).
    Remedy: ask for a range inside the offer; with state groups, up to its end.
    """

    code: ClassVar[Code] = Code.TOKENS


class EventError(UsageError):
    """`after=` is missing for CUDA memory, or names an event that was never recorded.

    Cause: without it, kvxfer would read blocks before prefill wrote them, or write blocks that still are in use.
    Remedy: pass a recorded `torch.cuda.Event`, a stream, or `kvxfer.READY` when the work is known to be complete.
    """

    code: ClassVar[Code] = Code.EVENT


class RequestError(UsageError):
    """A request cannot be offered or fetched this way now.

    Cause: the id (with this attempt) is live, ended less than ten minutes ago, or the offer is already finished; or a
    time-out, a layer or a payload is none.
    Remedy: use an id once; raise `attempt` to offer the same request again.
    """

    code: ClassVar[Code] = Code.REQUEST


class BusyError(RequestError):
    """This worker has as much under way as its settings allow. Nothing was begun.

    Cause: more fetches or offers than `max_transfers` allows, 65,536 claims, or events that nobody polls.
    Remedy: wait for one of them to end, or about `retry_after` seconds; give the request to another worker.
    """

    code: ClassVar[Code] = Code.TOO_MANY

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.retry_after = 1.0


class TicketError(UsageError, ValueError):
    """A ticket or an engine card is malformed, or does not belong to this engine.

    Cause: it was cut, edited, or made for another engine; the worker has not joined an engine yet.
    Remedy: carry tickets unchanged; on engines of several ranks call `worker.join(card, key=...)` first.
    """

    code: ClassVar[Code] = Code.TICKET


class ClosedError(UsageError):
    """The worker is not open: not entered yet, draining, or closed.

    Cause: a call outside `async with Worker(...)`, or after a drain had begun. A fetch that was under way when its
    worker was closed raises it too: the blocks in its `report` hold no usable data.
    Remedy: send new requests to another worker.
    """

    code: ClassVar[Code] = Code.CLOSED


class ForkedError(UsageError):
    """A worker was used in a process that was forked off the one that it runs in.

    Cause: `os.fork`, or `multiprocessing` with the start method `fork`, after the worker was opened. Its threads, its
    NIXL agent and its CUDA context stay behind in the parent, where they go on as before.
    Remedy: open a worker of its own in the child, and start children with `spawn` or `forkserver`.
    """

    code: ClassVar[Code] = Code.FORKED


class MissingExtraError(UsageError, ImportError):
    """An optional package is needed and not installed, or not in a version that is known.

    Cause: the feature belongs to an extra, or NIXL was replaced by a version whose C library may take other arguments.
    Remedy: run the command that the message gives.
    """

    code: ClassVar[Code] = Code.MISSING_EXTRA


class ArenaError(UsageError):
    """There is not so much memory for the staging arena, or to share.

    Cause: the system, or the GPU, has less than `arena_bytes`, or than `shared_empty` was asked for. Transfers for
    which an arena has no room fail with `TransferFailedError`, whose `reason` is `ARENA`: their message has the cause.
    Remedy: lower `arena_bytes`.
    """

    code: ClassVar[Code] = Code.ARENA


class PeerError(KvxferError):
    """Something about the other side, or the way to it.

    Attributes:
        peer: The peer as logs name it (engine, rank, endpoint), or an empty string before it is known.
    """

    code: ClassVar[Code] = Code.PEER

    def __init__(self, message: str, *, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class UnreachableError(PeerError, ConnectionError):
    """No connection to the peer, or no handshake in time.

    Cause: nobody listens at the ticket's endpoint, `allow_peers` excludes it, secrets or settings of TLS do not go
    together, or the handshake took too long.
    Remedy: check that the prefill worker runs and that its endpoint can be reached from here; where it is about TLS,
    the message and the log of the prefill worker say which setting.
    """

    code: ClassVar[Code] = Code.UNREACHABLE


class IdentityError(PeerError):
    """A peer does not prove to be the process whose incarnation it names. Nothing of that one is disturbed.

    Cause: it has not the key that the incarnation stands for, and says to be somebody else. Raised at the side that
    finds out, and at the one that is refused. Or a worker that is reached at two endpoints: it is asked at the one
    where something with it is open, or in doubt, and this is raised if it does not answer there.
    Remedy: restart the worker that is refused: it draws another incarnation. If it was refused for its proof, find out
    who else passes the handshake, and change the `secret` or the certificates. Where `engaged_at` names an endpoint
    of the same worker, have all tickets name one that stays; if it is gone for good, one of the two workers has to
    be started again, unless the doubt ends without.

    Attributes:
        engaged_at: Where something with the worker is open, or in doubt, if it is refused because it is somewhere else;
            else an empty string.
        incarnation: The worker's, in hex digits, where `engaged_at` is there.
    """

    code: ClassVar[Code] = Code.IDENTITY

    def __init__(self, message: str, *, peer: str = "", engaged_at: str = "", incarnation: str = "") -> None:
        super().__init__(message, peer=peer)
        self.engaged_at: Final = engaged_at
        self.incarnation: Final = incarnation


class MismatchError(PeerError):
    """The two engines cannot exchange this cache.

    Cause: another model, dtype, scale, shape or protocol version on the other side; settings that leave no common
    route, or no chunk that is large enough; or a ticket of an engine that has restarted since (`epoch`).
    Remedy: `fields` names each one with both values; `convert=True` at the decode rank converts dtypes and scales; a
    `model` that is left empty is not compared; prefill again what an engine has forgotten.

    Attributes:
        fields: Name of each differing field, with (this side's value, the peer's value).
    """

    code: ClassVar[Code] = Code.MISMATCH

    def __init__(self, message: str, *, peer: str = "", fields: Mapping[str, tuple[str, str]] | None = None) -> None:
        super().__init__(message, peer=peer)
        self.fields: Final = dict(fields or {})


class RefusedError(PeerError):
    """The peer refused one request; the session and every other transfer go on.

    Cause: `reason` says it: the ticket is unknown, forged or expired, the range is outside the offer, ...
    Remedy: depends on `reason`. `TOO_MANY`: try again after `retry_after` seconds. `DRAINING`: the peer is about to
    close, so have the request prefilled by another one. Otherwise it may be prefilled again.

    Attributes:
        reason: The peer's code.
        retry_after: Seconds after which the peer may have room, as it says itself; None if it does not.
    """

    code: ClassVar[Code] = Code.REFUSED

    def __init__(
        self, message: str, *, peer: str = "", reason: Code = Code.UNKNOWN, retry_after: float | None = None
    ) -> None:
        super().__init__(message, peer=peer)
        self.reason: Final = reason
        self.retry_after = retry_after


class PeerLostError(PeerError, ConnectionError):
    """The peer died, closed the session, or was silent for `peer_timeout`.

    Cause: a crashed or restarted process, a cut network, a host that stands still.
    Remedy: fetch again with the same ticket, or prefill again elsewhere.
    """

    code: ClassVar[Code] = Code.PEER_LOST


class ProtocolError(PeerError):
    """The peer sent what the protocol forbids; its session was closed.

    Cause: a foreign program at that endpoint, a damaged stream, or a defect.
    Remedy: check the endpoint and both versions; `kvxfer inspect` reads the frame that the message quotes.
    """

    code: ClassVar[Code] = Code.PROTOCOL


class TransferError(KvxferError):
    """A transfer that had begun did not succeed. The blocks in `blocks` hold no usable data.

    Attributes:
        peer: The peer whose part failed.
        transfer: The transfer's id, as in the logs of both sides.
        blocks: Destination blocks by group that must not be read: some of their bytes may be new, some old.
        memory_safe: True when no peer can write those blocks any more.
    """

    code: ClassVar[Code] = Code.TRANSFER
    memory_safe: ClassVar[bool] = True

    def __init__(
        self,
        message: str,
        *,
        peer: str = "",
        transfer: str = "",
        blocks: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(message)
        self.peer: Final = peer
        self.transfer: Final = transfer
        self.blocks: Final = {group: tuple(ids) for group, ids in (blocks or {}).items()}


class TransferTimeoutError(TransferError, TimeoutError):
    """The caller's `timeout` passed before every byte had landed.

    Cause: a slow or wedged link, a prefill that is later than expected, or a full arena.
    Remedy: fetch again with the same ticket; the stats in the log say which step took the time.
    """

    code: ClassVar[Code] = Code.TIMEOUT


class TransferFailedError(TransferError):
    """A copy or a write failed on one of the two sides.

    Cause: a transport error, a lease that ran out, a failing device, or a plan on which the two sides differ.
    Remedy: the message names the step; fetch again with the same ticket.

    Attributes:
        reason: The code of the step that failed.
    """

    code: ClassVar[Code] = Code.FAILED

    def __init__(
        self,
        message: str,
        *,
        reason: Code = Code.FAILED,
        peer: str = "",
        transfer: str = "",
        blocks: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(message, peer=peer, transfer=transfer, blocks=blocks)
        self.reason: Final = reason


class IntegrityError(TransferError):
    """A chunk arrived, and does not hold what the prefill rank has in its blocks.

    Cause: faulty memory or a faulty link, blocks that were written meanwhile on either side by somebody else, or a
    defect; found because `integrity` is set.
    Remedy: fetch again with the same ticket; if it comes again, look for who writes the blocks that it names.

    Attributes:
        chunk: Number of the chunk.
        layers: Layers in which it differs.
        damaged: Destination blocks in which it differs, by group; those in `blocks` must not be read, all of them.
    """

    code: ClassVar[Code] = Code.INTEGRITY

    def __init__(
        self,
        message: str,
        *,
        chunk: int,
        layers: Sequence[int],
        damaged: Mapping[str, Sequence[int]],
        peer: str = "",
        transfer: str = "",
        blocks: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(message, peer=peer, transfer=transfer, blocks=blocks)
        self.chunk: Final = chunk
        self.layers: Final = tuple(layers)
        self.damaged: Final = {group: tuple(ids) for group, ids in damaged.items()}


class MemoryInDoubtError(TransferError):
    """A silent peer may still touch the blocks in `blocks`; they stay in kvxfer's custody.

    Cause: the peer stopped answering while a write (or, for `released()`, a read) of these blocks was posted.
    Remedy: do not reuse the blocks before `await error.settled()` returns; kvxfer refuses them until then.
    """

    code: ClassVar[Code] = Code.IN_DOUBT
    memory_safe: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        settled: Callable[[], Awaitable[None]],
        peer: str = "",
        transfer: str = "",
        blocks: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(message, peer=peer, transfer=transfer, blocks=blocks)
        self._settled = settled

    def __reduce__(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        again, arguments, state = super().__reduce__()
        return again, arguments, state | {"_settled": _settled_elsewhere}

    def __copy__(self, memo: object = None) -> "MemoryInDoubtError":
        again, arguments, state = super().__reduce__()  # a copy is in this process
        made: MemoryInDoubtError = again(*arguments)
        made.__setstate__(state)
        return made

    __deepcopy__ = __copy__

    async def settled(self) -> None:
        """Return once there is evidence that no peer can touch the blocks any more; they are the caller's again.

        It may be awaited on any loop of the process.

        Raises:
            UsageError: If this error came from another process; only there is it known.
        """
        await self._settled()


async def _settled_elsewhere() -> None:
    raise UsageError("this error was raised in another process: await settled() there, where the blocks are")


MemoryInDoubt = MemoryInDoubtError
"""The same, for short."""


class FabricError(KvxferError):
    """The transport below (NIXL) refused or failed.

    Cause: a backend that is missing, memory that cannot be registered, a disconnected or stuck link; a NIXL library
    that lacks a function, or does not do what it is told.
    Remedy: the message carries the transport's own words and the settings in effect.

    Attributes:
        disconnected: True when the transport itself reports that the peer is gone.
        in_doubt: True when some of the failed post's bytes may still land.
    """

    code: ClassVar[Code] = Code.FABRIC

    def __init__(self, message: str, *, disconnected: bool = False, in_doubt: bool = False) -> None:
        super().__init__(message)
        self.disconnected: Final = disconnected
        self.in_doubt: Final = in_doubt
