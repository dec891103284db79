"""Who is believed under an incarnation: the process that has its key, in the session that it proves it in."""

import dataclasses
import hmac

import msgspec
import pytest
from test_session import BODY, FACTS, KEYS, OTHER, WHO, pump

from kvxfer.errors import Code, IdentityError, ProtocolError
from kvxfer.protocol.framing import FrameReader, encode, encode_body
from kvxfer.protocol.messages import Agent, Goodbye, Hello, Welcome
from kvxfer.protocol.session import IdentityKey, Role, Session, Terms

CLIENT, SERVER = Role.CLIENT, Role.SERVER
AT = "tcp:10.0.0.1:9"
STRANGER = IdentityKey(b"x" * 32)
LOW_ORDER = [
    bytes(32),
    (1).to_bytes(32, "little"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
    (2**255 - 18).to_bytes(32, "little"),
    (2**256 - 19).to_bytes(32, "little"),
]
"""Points of which every private key makes nothing but zeros, so that everybody could prove to have theirs."""


class Meeting:
    """One handshake, and what was said in it."""

    def __init__(self, keys=KEYS, *, who=WHO, nonce=b"n", change=None, unchecked=(), facts=FACTS, **terms):
        self.sessions = {
            role: Session(role, who[role], Terms(facts, encode_body(BODY), keys[role], **terms),
                          nonce=role.value.encode().ljust(16, b".") + nonce.ljust(16), now=0.0)
            for role in Role
        }  # fmt: skip
        self.wrote = {CLIENT: b"", SERVER: b""}
        for role, one in self.sessions.items():
            one.take_output = self.tapped(role, one.take_output, change)
            if role in unchecked:  # whoever has no key does not mind what the other one proves
                one._check_same = lambda theirs, heard, now: None
        seen, self.errors = pump(self.sessions[CLIENT], self.sessions[SERVER])
        self.opened = {role for role in Role if seen[role]}

    def tapped(self, role, take, change):
        def tap(most=1 << 20):
            frames = list(FrameReader(1 << 20).feed(take(most)))
            data = b"".join(encode(change(frame) if change else frame) for frame in frames)
            self.wrote[role] += data
            return data

        return tap

    def said(self, role, kind=Agent):
        return [one for one in FrameReader(1 << 20).feed(self.wrote[role]) if isinstance(one, kind)]

    @property
    def fine(self):
        return self.opened == {CLIENT, SERVER} and not self.errors


def impostor(role, key=STRANGER):
    return {**KEYS, role: key}


def replaced(role, **fields):
    """Changes the `Agent` of this side."""
    heard = []

    def change(message):
        if isinstance(message, Agent):
            heard.append(message)
            if len(heard) == (1 if role is CLIENT else 2):
                return msgspec.structs.replace(message, **fields)
        return message

    return change


def test_two_believe_each_other_from_the_first_session_on():
    first, again = Meeting(), Meeting(nonce=b"again")
    assert first.fine
    assert again.fine
    proofs = {one.same for meeting in (first, again) for role in Role for one in meeting.said(role)}
    assert len(proofs) == 4  # one for each side and session
    assert [meeting.sessions[CLIENT].proved_to for meeting in (first, again)] == [WHO[SERVER].incarnation] * 2


@pytest.mark.parametrize("role", list(Role))
def test_another_process_is_not_believed(role):
    """At the first session as at any other; it hears at once what it is about."""
    meeting = Meeting(impostor(role), unchecked=[role])
    honest = OTHER[role]
    assert honest not in meeting.opened
    assert isinstance(meeting.errors[honest], IdentityError)
    assert "nothing proves" in str(meeting.errors[honest])
    last = list(FrameReader(1 << 20).feed(meeting.wrote[honest]))[-1]
    assert isinstance(last, Goodbye)
    assert last.code is Code.IDENTITY
    if role is CLIENT:
        assert isinstance(meeting.errors[CLIENT], IdentityError)
        assert meeting.said(SERVER) == []
    assert Meeting(nonce=b"then").fine


def test_it_is_refused_before_anything_of_it_is_read():
    """Not for its facts, which differ, nor for its body, which cannot be decoded."""
    meeting = Meeting(impostor(CLIENT), change=replaced(CLIENT, facts=[("model", "other")], body=b"\xc1"))
    assert isinstance(meeting.errors[SERVER], IdentityError)
    meeting = Meeting(
        impostor(SERVER), unchecked=[SERVER], change=replaced(SERVER, facts=[("model", "x")], body=b"\xc1")
    )
    assert isinstance(meeting.errors[CLIENT], IdentityError)


@pytest.mark.parametrize("role", list(Role))
def test_nothing_that_was_ever_heard_opens_a_door(role):
    """What a side has proved to one that said to be another, or to the other itself, is of no use to whoever heard it.

    The handshakes that he began before the two have met, and broke off, included.
    """
    honest = OTHER[role]
    before = Meeting(impostor(role), unchecked=[role], nonce=b"before the two met")
    between = Meeting(nonce=b"the two")
    differing = Meeting(nonce=b"broken off", change=replaced(role, facts=[("model", "other")]))
    assert between.fine
    assert not differing.fine
    heard = {one.same for meeting in (before, between, differing) for side in Role for one in meeting.said(side)}
    assert len(heard) >= 5
    for same in heard:
        meeting = Meeting(impostor(role), unchecked=[role], nonce=b"x", change=replaced(role, same=same))
        assert honest not in meeting.opened
        assert isinstance(meeting.errors[honest], IdentityError)


def test_a_proof_is_not_sent_back_as_ones_own():
    """By whoever says to be the very process that he speaks with."""
    who = {role: dataclasses.replace(WHO[role], incarnation=WHO[CLIENT].incarnation) for role in Role}
    heard = []

    def reflect(message):
        if isinstance(message, Agent):
            heard.append(message.same)
            return msgspec.structs.replace(message, same=heard[0])
        return message

    keys = {CLIENT: KEYS[CLIENT], SERVER: STRANGER}
    meeting = Meeting(keys, who=who, unchecked=[SERVER], change=reflect)
    assert len(heard) == 2
    assert isinstance(meeting.errors[CLIENT], IdentityError)
    assert Meeting(dict.fromkeys(Role, KEYS[CLIENT]), who=who).fine  # a worker that fetches from itself


@pytest.mark.parametrize("at", [0, 31])
@pytest.mark.parametrize("side", list(Role))
def test_every_byte_of_a_proof_counts(at, side):
    (agent,) = Meeting().said(side)
    damaged = agent.same[:at] + bytes([agent.same[at] ^ 1]) + agent.same[at + 1 :]
    meeting = Meeting(change=replaced(side, same=damaged))
    assert OTHER[side] not in meeting.opened
    assert isinstance(meeting.errors[OTHER[side]], IdentityError)


def changed(kind, change):
    return lambda one: msgspec.structs.replace(one, **change(one)) if isinstance(one, kind) else one


@pytest.mark.parametrize("kind", [Hello, Welcome])
def test_a_proof_is_of_the_greetings_of_both(kind):
    """Whoever stands between them changes nothing in those."""
    meeting = Meeting(change=changed(kind, lambda one: {"epoch": b"other"}))
    assert isinstance(meeting.errors[SERVER], IdentityError)


@pytest.mark.parametrize("kind", [Hello, Welcome])
def test_nobody_passes_on_a_proof_under_the_same_key_written_in_another_way(kind):
    """Both make the same of it, but it would not be taken for the incarnation with which something is under way."""
    alias = {one.incarnation: one.incarnation[:-1] + bytes([one.incarnation[-1] | 0x80]) for one in WHO.values()}
    for role, who in WHO.items():
        assert KEYS[OTHER[role]].shared(alias[who.incarnation]) == KEYS[role].shared(WHO[OTHER[role]].incarnation)
    meeting = Meeting(change=changed(kind, lambda one: {"incarnation": alias[one.incarnation]}))
    assert isinstance(meeting.errors[SERVER], IdentityError)
    assert meeting.opened == set()


@pytest.mark.parametrize("point", LOW_ORDER, ids=bytes.hex)
def test_an_incarnation_with_which_all_make_the_same_is_refused(point):
    class Nobody(IdentityKey):
        """Proves what everybody could."""

        def shared(self, peer):
            del peer
            return bytes(32)

    for role in Role:
        who = {**WHO, role: dataclasses.replace(WHO[role], incarnation=point)}
        meeting = Meeting(impostor(role, Nobody(bytes(32))), who=who)
        assert isinstance(meeting.errors[OTHER[role]], ProtocolError)
        assert OTHER[role] not in meeting.opened


def test_a_private_key_shows_nowhere():
    key = IdentityKey(b"p" * 32)
    terms = Terms(FACTS, b"", key)
    session = Meeting().sessions[CLIENT]
    shown = f"{key!r} {terms!r} {session!r}"
    assert key.incarnation.hex()[:8] in repr(key)
    assert all(secret.hex() not in shown and repr(secret)[2:-1] not in shown for secret in (b"p" * 32, session._shared))
    assert IdentityKey(b"p" * 32).incarnation == key.incarnation  # the same from the same bytes, for simulations
    assert hmac.compare_digest(key.shared(STRANGER.incarnation), STRANGER.shared(key.incarnation))


# --- where it is


def test_nothing_is_proved_elsewhere_while_something_is_open_or_in_doubt():
    """Whoever is there could pass it on, and then speak in the name of either."""
    engaged = {WHO[SERVER].incarnation: AT}
    relayed = Meeting(engaged_at=lambda who: engaged.get(who, ""), endpoint="tcp:10.6.6.6:6")
    assert relayed.said(CLIENT) == []
    assert relayed.opened == set()
    error = relayed.errors[CLIENT]
    assert isinstance(error, IdentityError)
    assert (error.engaged_at, error.incarnation) == (AT, WHO[SERVER].incarnation.hex())
    assert Meeting(engaged_at=lambda who: engaged.get(who, ""), endpoint=AT).fine
    engaged.clear()
    assert Meeting(engaged_at=lambda who: engaged.get(who, ""), endpoint="tcp:10.6.6.6:6").fine
