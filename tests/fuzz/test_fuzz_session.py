"""A whole `Session`, as client and as server, with and without a secret, from each state on.

Whoever speaks with it begins as the golden conversations do, and at some point goes astray.
"""

import contextlib
from functools import cache
from random import Random

import campaign
import pytest
from mutation import INVALID, SPOKEN, VALID, Mutator, conversations, frame, pieces

from kvxfer.errors import IdentityError, MismatchError, PeerLostError, ProtocolError, UnreachableError
from kvxfer.protocol.framing import HANDSHAKE_FRAME_LIMIT, SESSION_FRAME_LIMIT, decode, encode_body
from kvxfer.protocol.messages import AgentBody, Ping
from kvxfer.protocol.session import RECEIVED_WHEN_OPEN, Identity, IdentityKey, Opened, Role, Session, State, Terms
from proto.conversations import FACTS, SECRET

MUTATOR = Mutator([*VALID, *INVALID, *SPOKEN])
OTHER = {Role.CLIENT: Role.SERVER, Role.SERVER: Role.CLIENT}
BODY = encode_body(AgentBody("loopback", b"metadata", []))


class Quick(IdentityKey):
    """Makes the same with the same peer, and does not begin anew each time."""

    shared = cache(IdentityKey.shared)


KEYS = [Quick(bytes([number]) * 32) for number in range(3)]
OURS = Identity("engine", b"e" * 16, KEYS[0].incarnation, 0, 1, 0b11111, "kvxfer")
THEIRS = Identity("other", b"f" * 16, KEYS[1].incarnation, 1, 2, 0b11111, "kvxfer")
TALK = {
    Role.SERVER: [payload for one in conversations() for who, payload in one if who == "decode"],
    Role.CLIENT: [payload for one in conversations() for who, payload in one if who == "prefill"],
}
"""What a session of this role hears in the golden conversations."""
REPLIES = 2
"""Frames with which a session answers at most in all, its own greeting included: only the handshake has answers."""


def session(role, identity, secret, nonce=b"n", key=None):
    key = key or next(one for one in KEYS if one.incarnation == identity.incarnation)
    return Session(role, identity, Terms(FACTS, BODY, key, secret=secret), nonce=nonce * 32, now=0.0)


class Hostile:
    """A session, and somebody who speaks with it."""

    def __init__(self, draw: Random, secret):
        self.draw, self.secret = draw, secret
        self.role = draw.choice((Role.CLIENT, Role.SERVER))
        self.tested = session(self.role, OURS, secret)
        self.opened = self.now = 0
        self.ended = False
        self.said = len(self.tested.take_output())

    def advance(self) -> bytes:
        """Make it NEW, GREETED or OPEN; returns the last thing an honest peer would have said, not yet delivered."""
        honest = session(OTHER[self.role], THEIRS, self.secret, nonce=b"m")
        fresh = session(self.role, OURS, self.secret)
        outs = {fresh: fresh.take_output(), honest: honest.take_output()}
        script = []
        for _ in range(4):
            list(honest.receive(outs[fresh], 0))
            outs[honest] += honest.take_output()
            if outs[honest]:
                script.append(outs[honest])
            list(fresh.receive(outs[honest], 0))
            outs[honest], outs[fresh] = b"", fresh.take_output()
        assert fresh.state is State.OPEN
        steps = self.draw.choice((0, 1, 2, 2, 2))
        for data in script[:steps]:
            self.hear(data)
        return script[steps] if steps < len(script) else b""

    def hear(self, data: bytes):
        """Some bytes: whatever is in them, what comes of it is an event that is legal now, or a documented error."""
        session = self.tested
        self.now += 1e-3
        try:
            for event in session.receive(data, self.now):
                match event:
                    case Opened(peer):
                        self.opened += 1
                        assert self.opened == 1
                        assert session.peer is peer
                    case message:
                        assert type(message) in RECEIVED_WHEN_OPEN[self.role] - {Ping}
        except (ProtocolError, MismatchError, IdentityError, UnreachableError) as error:
            campaign.is_short(error)
            self.ended = True
        self.said += len(session.take_output())
        assert self.said < REPLIES * (len(BODY) + 1024)
        if not self.ended:  # else what came with the frame that ended it stays unread: one read at most
            assert session.unread_bytes < (SESSION_FRAME_LIMIT if session._theirs else HANDSHAKE_FRAME_LIMIT) + 4
        assert self.ended == (session.state is State.CLOSED)
        if self.ended:
            assert list(session.receive(frame(b"\x91\x04"), self.now)) == []
            assert session.take_output() == b""
            with pytest.raises(PeerLostError):
                session.send(Ping(), self.now)

    def speak(self) -> int:
        draw = self.draw
        honest = self.advance()
        payloads = [MUTATOR.payload(draw) if draw.random() < 0.7 else draw.choice(TALK[self.role]) for _ in range(4)]
        count = draw.randrange(1, 5)
        data = MUTATOR.stream(draw, payloads[:count])
        if honest and draw.random() < 0.5:  # a frame of the handshake, nearly as it should be
            data = frame(MUTATOR.bytewise(draw, honest[4:])) if draw.random() < 0.7 else honest + data
        for piece in pieces(draw, data):
            self.hear(piece)
        self.wait()
        return count

    def wait(self):
        """Time passes: it sends a heartbeat, or ends."""
        session, before = self.tested, self.tested.state
        deadline = session.next_deadline()
        assert deadline > self.now
        try:
            session.tick(self.now)
            if self.draw.random() < 0.5:
                session.tick(min(deadline, 1e9))
        except (UnreachableError, PeerLostError):
            self.ended = True
        assert self.ended == (session.state is State.CLOSED)
        assert before is not State.CLOSED or session.take_output() == b""


def one_session(draw: Random) -> int:
    return Hostile(draw, draw.choice((None, SECRET))).speak()


def test_session():
    campaign.run("session", one_session)


@pytest.mark.parametrize("lacks", ["secret", "key"])
def test_no_session_opens_without_the_secret_and_the_key(lacks):
    """Neither recorded proofs, nor those of the other side or of another nonce, nor any of them mutated."""
    secret, key = (None, KEYS[1]) if lacks == "secret" else (SECRET, KEYS[2])
    draw = Random(campaign.SEED)
    golden = [payload for payload in [*SPOKEN, *VALID] if is_greeting(payload)]
    for number in range(1000):
        role = draw.choice((Role.CLIENT, Role.SERVER))
        tested = session(role, OURS, SECRET)
        without = session(OTHER[role], THEIRS, secret, nonce=b"m", key=key)
        without._check_same = lambda theirs, heard, now: None  # whoever lacks a key does not mind
        list(without.receive(tested.take_output(), 0))
        said = without.take_output() if number % 2 else frame(draw.choice(golden))
        more = draw.choice(golden) if draw.random() < 0.7 else MUTATOR.bytewise(draw, draw.choice(golden))
        try:
            assert not any(isinstance(event, Opened) for event in tested.receive(said, 0))
            with contextlib.suppress(ProtocolError, IdentityError, UnreachableError):
                list(without.receive(tested.take_output(), 0))
            for data in (without.take_output() if number % 3 else frame(more), frame(more)):
                assert not any(isinstance(event, Opened) for event in tested.receive(data, 0))
        except (ProtocolError, MismatchError, IdentityError, UnreachableError):
            pass
        assert tested.peer is None


def is_greeting(payload):
    try:
        return type(decode(payload)).__name__ in {"Hello", "Welcome", "Agent"}
    except ProtocolError:
        return False
