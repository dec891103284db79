"""One control stream, sans-I/O: handshake, identity, liveness, and frames as messages (PROTOCOL.md section 4).

    bytes in -> receive() -> events        send() -> bytes out (take_output())
    now is an argument, the next deadline is a return value

The side that opened the stream is the CLIENT (the decode rank). States and legal events stand in `TRANSITIONS`;
anything else is a `ProtocolError`, after which the session is closed.
"""

import hashlib
import hmac
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from kvxfer.errors import (
    Code,
    IdentityError,
    KvxferError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    UnreachableError,
)
from kvxfer.names import MAX_WORLD, convertible, lazy
from kvxfer.protocol.framing import (
    LENGTH,
    SESSION_FRAME_LIMIT,
    FrameReader,
    decode_body,
    encode,
    encode_in_parts,
    encoder,
)
from kvxfer.protocol.messages import (
    WIRE_MIN,
    WIRE_VERSION,
    Abandon,
    Accept,
    Agent,
    AgentBody,
    Arrived,
    Cancel,
    Capability,
    Check,
    Claim,
    Fetch,
    Goodbye,
    Hello,
    KvAgentResult,
    Message,
    Ping,
    Read,
    Ready,
    Refuse,
    Release,
    Renewed,
    Reserve,
    Sums,
    Welcome,
)

__all__ = [
    "PRIVATE_BYTES",
    "RECEIVED_WHEN_OPEN",
    "TRANSITIONS",
    "Identity",
    "IdentityKey",
    "Liveness",
    "Opened",
    "PeerInfo",
    "Role",
    "Session",
    "SessionEvent",
    "State",
    "Terms",
]

# --- who a worker is
#
# An incarnation is an X25519 public key. Two workers, and nobody else, can compute what their keys make together, so
# each proves to the other who it is from the first session on, and neither has to remember anything of the other.

PRIVATE_BYTES: Final = 32
_SAME: Final = b"kvxfer same v1"


class IdentityKey:
    """What makes this process the one that it says to be.

    Args:
        private: 32 unpredictable bytes that nobody else learns.
    """

    def __init__(self, private: bytes) -> None:
        # not at the top: it takes 50 ms to import, and cards and tickets need none of it
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private: Final = X25519PrivateKey.from_private_bytes(private)
        # the public half, by which everybody may know this worker
        self.incarnation: Final[bytes] = self._private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"<IdentityKey of {self.incarnation.hex()[:8]}>"

    def shared(self, peer: bytes) -> bytes:
        """What this key and that of a peer make together: a secret of the two.

        Raises:
            ProtocolError: If the peer's incarnation is no key, or one with which everybody would make the same.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(peer))
        except ValueError as error:
            raise ProtocolError(f"the incarnation {peer.hex()[:8]} is no key that a rank could have") from error


# --- when to speak, and when a peer is silent

_SHORTEST_SECONDS: Final = 0.1
"""No peer can ask for more: each of many that only listen would cost a side that much work."""


@dataclass(slots=True)
class Liveness:
    """Of one session. Times are monotonic seconds."""

    heartbeat: float  # seconds after which this side must speak: its own, or the peer's once that is known and shorter
    peer_timeout: float  # seconds of silence after which the peer is in doubt
    heard: float  # when the peer last said something, or later if this side stood still since
    spoke: float  # when this side last said something
    looked: float  # when this side last did anything

    def agree(self, heartbeat: float) -> None:
        """Speak as often as the peer does: what it waits for, and its leases, are longer than twice that."""
        self.heartbeat = min(self.heartbeat, max(heartbeat, _SHORTEST_SECONDS))

    def look(self, now: float) -> None:
        """If this side stood still, only a part of that counts as silence of the peer, which may have too."""
        counted = max(self.heartbeat, self.peer_timeout / 4)  # so that it is noticed however often that happens
        self.heard += max(0.0, now - self.looked - counted)
        self.looked = now

    def silent(self, now: float) -> bool:
        """Whether nothing was heard for too long."""
        return now >= self.heard + self.peer_timeout

    def due(self, now: float) -> bool:
        """Whether this side must speak."""
        return now >= self.spoke + self.heartbeat

    def next_deadline(self) -> float:
        """When the earlier of the two comes true."""
        return min(self.spoke + self.heartbeat, self.heard + self.peer_timeout)


# --- the session

_DTYPE: Final = ".dtype"
"""How the name of a fact ends that conversion may forgive."""


class Role(StrEnum):
    """Which side of the stream this is."""

    CLIENT = "client"
    SERVER = "server"


class State(StrEnum):
    """Where the handshake stands."""

    NEW = "new"
    GREETED = "greeted"  # the client has sent Hello, the server has received it and answered
    OPEN = "open"
    CLOSED = "closed"


_OVER: State = State.CLOSED
"""To compare with what may change while an event is handled: of a literal, type checkers take it that nothing does."""


TRANSITIONS: Final[Mapping[tuple[Role, State, type[Message]], State]] = {
    (Role.SERVER, State.NEW, Hello): State.GREETED,
    (Role.SERVER, State.GREETED, Agent): State.OPEN,
    (Role.CLIENT, State.NEW, Welcome): State.GREETED,
    (Role.CLIENT, State.GREETED, Agent): State.OPEN,
}
"""Legal messages of the handshake, received by this role in this state; see also `RECEIVED_WHEN_OPEN`."""

RECEIVED_WHEN_OPEN: Final[Mapping[Role, frozenset[type[Message]]]] = {
    Role.SERVER: frozenset({Ping, Goodbye, Claim, Fetch, Reserve, Read, Cancel, Release, Check, Abandon, Renewed}),
    Role.CLIENT: frozenset({Ping, Goodbye, Accept, Refuse, Ready, Arrived, KvAgentResult, Sums, Renewed}),
}
"""Legal messages of an open session, by the role that receives them, in any order. `Goodbye` also ends a handshake."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What this side says of itself in `Hello` or `Welcome`."""

    engine: str
    epoch: bytes
    incarnation: bytes
    rank: int
    world: int
    capabilities: int
    package: str


@dataclass(frozen=True)
class PeerInfo:
    """Who the other side is, once the handshake is complete."""

    identity: Identity  # as the peer said it
    told: bytes | memoryview = field(repr=False)  # its agent body, as it came
    process: int = 0  # its process, as the kernel says it; 0 where that is not known

    @lazy
    def body(self) -> AgentBody:
        """Its transport and geometry. The first who asks has it decoded, which takes a while for a large cache.

        Raises:
            ProtocolError: If it is no agent body.
        """
        return decode_body(self.told)

    @lazy
    def name(self) -> str:
        """How logs and errors name the peer."""
        who = self.identity
        return f"{who.engine}[{who.rank}/{who.world}]@{who.incarnation.hex()[:8]}"

    @lazy
    def account(self) -> str:
        """How books name the peer: in full, since two keys that begin alike are soon found."""
        return f"{self.name}{self.identity.incarnation.hex()[8:]}"


@dataclass(frozen=True, slots=True)
class Opened:
    """The handshake is complete, but for a look at the peer's body: nobody has decoded it yet."""

    peer: PeerInfo


SessionEvent: TypeAlias = Opened | Message
"""That, or a message for the layers above."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session is opened with, besides who this side is."""

    facts: Sequence[tuple[str, str]]  # (name, value) pairs that must agree where both sides name them
    body: bytes  # encoded `AgentBody` of this side
    key: IdentityKey  # by what this side proves its incarnation
    secret: bytes | None = field(default=None, repr=False)  # shared secret; None if no proof is asked for
    endpoint: str = ""  # where the stream leads, as far as that is known
    # at which endpoint this side has something open, or in doubt, with an incarnation; empty if nowhere
    engaged_at: Callable[[bytes], str] = lambda _: ""
    heartbeat: float = 2.0  # seconds between frames at most; fewer if the peer's are
    peer_timeout: float = 20.0  # seconds of silence after which the peer is in doubt
    handshake_timeout: float = 30.0  # seconds until the session must be open


class Session:
    """One side of one control stream.

    Args:
        role: Which side.
        identity: Who this side is.
        terms: Facts, secret and times.
        nonce: 32 unpredictable bytes, fresh for this session.
        now: Monotonic seconds.
        process: The peer's, as the kernel says it; 0 where that is not known.
    """

    def __init__(
        self, role: Role, identity: Identity, terms: Terms, *, nonce: bytes, now: float, process: int = 0
    ) -> None:
        self.role: Final = role
        self.state = State.NEW
        self.peer: PeerInfo | None = None
        self.proved_to = b""  # the incarnation to which this side has shown who it is
        self.unsent_bytes = 0  # for `take_output`
        self._other: Final = Role.SERVER if role is Role.CLIENT else Role.CLIENT
        self._identity = identity
        self._terms = terms
        self._nonce = nonce
        self._process = process
        self._reader = FrameReader()
        self._legal: Final = RECEIVED_WHEN_OPEN[role]
        self._began = now
        self.liveness: Final = Liveness(terms.heartbeat, terms.peer_timeout, now, now, now)
        self._unsent: deque[bytes | memoryview] = deque()
        self._transcript = b""
        self._theirs: Hello | Welcome | None = None
        self._hello: Hello | None = None
        self._shared = b""
        if role is Role.CLIENT:
            self._hello = Hello(*self._greeting())
            self._write(self._hello, now)

    def receive(self, data: bytes, now: float) -> Iterable[SessionEvent]:
        """Take in bytes from the stream.

        Yields:
            `Opened` once, then every message.

        Raises:
            ProtocolError: If the peer broke the protocol.
            MismatchError: If the two sides cannot work together; names each field.
            IdentityError: If the peer does not prove its incarnation, or is engaged at another endpoint.
            UnreachableError: If the peer does not know the secret, or says goodbye before the session is open.
        """
        if self.state is _OVER:
            return
        self.liveness.heard = self.liveness.looked = now
        try:
            for message in self._reader.feed(data):
                if self.state is _OVER:  # closed by whoever handled the last event
                    return
                if self.state is not State.OPEN:
                    if (opened := self._shake_hands(message, now)) is not None:
                        yield opened
                elif type(message) not in self._legal:
                    raise self._illegal(message)
                elif not isinstance(message, Ping):
                    yield message
        except KvxferError:
            self.state = State.CLOSED
            raise

    @property
    def claimed(self) -> bytes:
        """The incarnation that the peer says to be, and may still have to prove; empty before it said one."""
        return b"" if self._theirs is None else self._theirs.incarnation

    @property
    def told(self) -> bytes:
        """The agent body that the peer is told."""
        return self._terms.body

    @property
    def unread_bytes(self) -> int:
        """Bytes taken in that no event has come of yet."""
        return self._reader.buffered_bytes

    def send(self, message: Message, now: float, at_once: int = 0) -> bytes:
        """Send a message: queued, so that its bytes come out of `take_output`, or given back to be written at once.

        Args:
            message: Which.
            now: Monotonic seconds.
            at_once: How many bytes the stream takes at once.

        Returns:
            The frame if nothing is to be written before it, and it is no longer than `at_once`: the caller writes it.
            Nothing if it was queued.

        Raises:
            PeerLostError: If the session is not open.
        """
        if self.state is not State.OPEN:
            raise PeerLostError(f"the session is {self.state.value}", peer=self._name)
        payload, alive = encoder.encode(message), self.liveness
        frame = LENGTH.pack(len(payload)) + payload
        if now - alive.looked > alive.heartbeat:  # else this side has not stood still
            alive.look(now)
        alive.spoke = alive.looked = now
        if len(frame) <= at_once and not self.unsent_bytes:
            return frame
        self._unsent.append(frame)
        self.unsent_bytes += len(frame)
        return b""

    def take_output(self, most: int = sys.maxsize) -> bytes:
        """Bytes to write to the stream now, so many at most: there may be more (`unsent_bytes`)."""
        unsent = self._unsent
        if self.unsent_bytes <= most:  # as nearly always
            whole, self.unsent_bytes = b"".join(unsent), 0
            unsent.clear()
            return whole
        taken: list[bytes | memoryview] = []
        while most:
            part = unsent.popleft()
            if len(part) > most:
                unsent.appendleft(memoryview(part)[most:])
                part = memoryview(part)[:most]
            taken.append(part)
            most -= len(part)
            self.unsent_bytes -= len(part)
        return b"".join(taken)

    def next_deadline(self) -> float:
        """When `tick` wants to be called, at the latest; infinity once closed."""
        if self.state is State.CLOSED:
            return math.inf
        if self.state is not State.OPEN:
            return self._began + self._terms.handshake_timeout
        return self.liveness.next_deadline()

    def tick(self, now: float) -> None:
        """Let time pass: sends `Ping` when nothing else was.

        Raises:
            UnreachableError: If the handshake took too long.
            PeerLostError: If the peer was silent for `peer_timeout`.
        """
        terms = self._terms
        if self.state is State.CLOSED:
            return
        if self.state is not State.OPEN:
            if now >= self._began + terms.handshake_timeout:
                stopped, self.state = self.state, State.CLOSED
                raise UnreachableError(
                    f"no handshake within {terms.handshake_timeout:g} s (it stopped at {stopped.value!r})"
                )
            return
        self.liveness.look(now)
        if self.liveness.silent(now):
            self.state = State.CLOSED
            raise PeerLostError(f"the peer was silent for {terms.peer_timeout:g} s", peer=self._name)
        if self.liveness.due(now):
            self._write(Ping(), now)

    def excuse(self, now: float) -> None:
        """What the peer says is not read for now, as much of it is still being handled: its silence says nothing."""
        self.liveness.heard = self.liveness.looked = now

    def close(self) -> None:
        """The stream is gone, or is to go. Nothing is sent or received any more. Idempotent."""
        self.state = State.CLOSED

    @property
    def _name(self) -> str:
        return self.peer.name if self.peer else ""

    # --- handshake

    def _shake_hands(self, message: Message, now: float) -> Opened | None:
        if isinstance(message, Goodbye):
            refused = IdentityError if message.code is Code.IDENTITY else UnreachableError
            refusal = refused(f"the peer said goodbye: {message.reason or message.code.name}")
            refusal.retry_after = 1.0 if message.code is Code.TOO_MANY else None
            raise refusal
        following = TRANSITIONS.get((self.role, self.state, type(message)))
        if following is None:
            raise self._illegal(message)
        opened = self._advance(message, now)
        self.state = following
        return opened

    def _illegal(self, message: Message) -> ProtocolError:
        name, role, state = type(message).__name__, self.role.value, self.state.value
        return ProtocolError(f"{name} is illegal for a {role} whose session is {state}", peer=self._name)

    def _advance(self, message: Message, now: float) -> Opened | None:
        match message:
            case Hello():
                self._hello = message
                welcome = Welcome(*self._greeting())
                self._transcript = _transcript(message, welcome)
                self._write(_with_proof(welcome, self._proof(Role.SERVER)), now)
                self._greeted(message)  # last: a client of another version learns ours from Welcome
            case Welcome():
                if self._hello is None:  # only a client reaches this line, and it sent Hello when it was made
                    raise ProtocolError("Welcome before Hello")
                self._transcript = _transcript(self._hello, message)
                self._greeted(message)
                self._check_proof(message.proof, now)
                self._check_place(message.incarnation)
                self._write(self._agent(message), now)
            case Agent():
                if self.role is Role.SERVER:
                    self._check_proof(message.proof, now)
                return self._open(message, now)
            case _:
                raise ProtocolError(f"{type(message).__name__} is no part of the handshake")
        return None

    def _open(self, message: Agent, now: float) -> Opened:
        said = self._theirs
        if said is None:
            raise ProtocolError("Agent before Hello or Welcome")
        self._check_same(said, message.same, now)
        if self.role is Role.SERVER:
            # before the comparison, so that the other side can name the fields too
            self._write(self._agent(said), now)
        self._compare(message.facts)
        identity = Identity(
            said.engine, said.epoch, said.incarnation, said.rank, said.world, said.capabilities, said.package
        )
        self.peer = PeerInfo(identity, message.body, self._process)
        return Opened(self.peer)

    def _greeting(self) -> tuple[int, int, str, str, bytes, bytes, int, int, int, bytes, int]:
        """The fields that `Hello` and `Welcome` share, in their order."""
        who = self._identity
        return (
            WIRE_VERSION,
            WIRE_MIN,
            who.package,
            who.engine,
            who.epoch,
            who.incarnation,
            who.rank,
            who.world,
            who.capabilities,
            self._nonce,
            int(self._terms.heartbeat * 1000),
        )

    def _greeted(self, theirs: Hello | Welcome) -> None:
        if min(WIRE_VERSION, theirs.wire) < max(WIRE_MIN, theirs.wire_min):
            ours, other = f"{WIRE_MIN}..{WIRE_VERSION}", f"{theirs.wire_min}..{theirs.wire}"
            raise MismatchError(
                f"no common protocol version: {ours} here, {other} there", fields={"wire": (ours, other)}
            )
        if not (1 <= theirs.world <= MAX_WORLD and theirs.rank < theirs.world):
            raise ProtocolError(f"rank {theirs.rank} of {theirs.world} is impossible")
        self._theirs = theirs
        self.liveness.agree(theirs.heartbeat_ms / 1000)
        self._reader.limit = SESSION_FRAME_LIMIT  # Agent carries the geometry of a whole rank: larger than any greeting

    def _agent(self, theirs: Hello | Welcome) -> Agent:
        proof = self._proof(Role.CLIENT) if self.role is Role.CLIENT else b""
        self.proved_to = theirs.incarnation
        return Agent(list(self._terms.facts), memoryview(self._terms.body), self._same(theirs, self.role), proof)

    def _compare(self, facts: Sequence[tuple[str, str]]) -> None:
        ours = dict(self._terms.facts)
        different = {name: (ours[name], value) for name, value in facts if name in ours and ours[name] != value}
        able = {name for name, values in different.items() if name.endswith(_DTYPE) and convertible(*values)}
        if self._hello is not None and self._hello.capabilities & Capability.CONVERT:
            different = {name: values for name, values in different.items() if name not in able}
        if different:
            shown = "; ".join(f"{name}: {mine!r} here, {their!r} there" for name, (mine, their) in different.items())
            advice = "; convert=True at the decode rank would convert it" if different.keys() <= able else ""
            raise MismatchError(f"the two engines differ in {shown}{advice}", fields=different)

    # --- proofs

    def _proof(self, role: Role) -> bytes:
        secret = self._terms.secret
        return b"" if secret is None else hmac.digest(secret, role.value.encode() + self._transcript, "sha256")

    def _check_proof(self, proof: bytes, now: float) -> None:
        if self._terms.secret is not None and not hmac.compare_digest(self._proof(self._other), proof):
            error = UnreachableError(f"the {self._other} does not know the shared secret; check `secret` on both sides")
            self._write(Goodbye(error.code, str(error)), now)  # so that it need not guess
            raise error

    def _same(self, theirs: Hello | Welcome, role: Role) -> bytes:
        """The proof that its sender has one of the two keys, good for one role in this session."""
        self._shared = self._shared or self._terms.key.shared(theirs.incarnation)
        return hmac.digest(self._shared, _SAME + role.value.encode() + self._transcript, "sha256")

    def _check_same(self, theirs: Hello | Welcome, heard: bytes, now: float) -> None:
        if not hmac.compare_digest(self._same(theirs, self._other), heard):
            error = IdentityError(
                f"nothing proves that this is the process of incarnation {theirs.incarnation.hex()[:8]}; if it is no "
                "impostor, start it again"
            )
            self._write(Goodbye(error.code, str(error)), now)  # so that it need not guess
            raise error

    def _check_place(self, claimed: bytes) -> None:
        """See that nothing with a peer that answers here is open, or in doubt, at another endpoint.

        Whoever is here may pass on what both prove, and then speak in the peer's name.
        """
        here, engaged_at = self._terms.endpoint, self._terms.engaged_at(claimed)
        if engaged_at not in ("", here):
            raise IdentityError(
                f"whoever answers at {here} says to be {claimed.hex()[:8]}, with which something is open or in doubt "
                f"at {engaged_at}: refused",
                peer=here,
                engaged_at=engaged_at,
                incarnation=claimed.hex(),
            )

    def _write(self, message: Message, now: float) -> None:
        for part in encode_in_parts(message):
            self._unsent.append(part)
            self.unsent_bytes += len(part)
        self.liveness.spoke = now


def _transcript(hello: Hello, welcome: Welcome) -> bytes:
    """What a proof covers: both greetings in the fields of version 1, the proof itself left empty."""
    parts = (encode(hello), encode(_with_proof(welcome, b"")))
    return b"".join(hashlib.sha256(part[4:]).digest() for part in parts)


def _with_proof(welcome: Welcome, proof: bytes) -> Welcome:
    return msgspec.structs.replace(welcome, proof=proof)
