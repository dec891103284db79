"""Sessions under an incarnation that was met before: who is believed, who is not, and what each side gets to see."""

import dataclasses

import msgspec
import pytest
from test_session import BODY, FACTS, OTHER, WHO, pump

from kvxfer.errors import Code, IdentityError, ProtocolError
from kvxfer.protocol.acquaintance import MARK_BYTES, Acquaintances, Recognition
from kvxfer.protocol.framing import FrameReader, decode, encode, encode_body
from kvxfer.protocol.messages import Agent, Goodbye
from kvxfer.protocol.session import Opened, Role, Session, State, Terms

CLIENT, SERVER = Role.CLIENT, Role.SERVER
AT = "tcp:10.0.0.1:7"


def process(role, key, **options):
    """Whom a process of this role's incarnation has met; another key is another process."""
    return Acquaintances(WHO[role].incarnation, key * 32, **options)


class Meeting:
    """One stream between two processes; what each side wrote, and what came of it."""

    def __init__(self, client, server, *, endpoint=AT, nonce=b"n", who=WHO, change=None):
        self.sides = {
            role: Session(role, who[role], Terms(FACTS, encode_body(BODY), met=met, endpoint=endpoint),
                          nonce=(nonce + role.value.encode()).ljust(32, b"."), now=0.0)
            for role, met in ((CLIENT, client), (SERVER, server))
        }  # fmt: skip
        self.wrote = dict.fromkeys(Role, b"")
        self.change = change or (lambda message: message)
        for role, side in self.sides.items():
            side.take_output = self._tap(role, side.take_output)
        seen, self.errors = pump(self.sides[CLIENT], self.sides[SERVER])
        self.opened = {role for role, events in seen.items() if any(isinstance(one, Opened) for one in events)}

    def _tap(self, role, take):
        def tapped():
            frames = list(FrameReader(1 << 20).feed(take()))
            data = b"".join(encode(self.change(frame)) for frame in frames)
            self.wrote[role] += data
            return data

        return tapped

    def said(self, role):
        """By its `Agent`: the mark and the proof of it."""
        agents = [one for one in FrameReader(1 << 20).feed(self.wrote[role]) if isinstance(one, Agent)]
        return [(one.mark, one.same) for one in agents]

    @property
    def fine(self):
        return self.opened == {CLIENT, SERVER} and not self.errors


@pytest.fixture
def met():
    """Two processes that have met once."""
    client, server = process(CLIENT, b"c"), process(SERVER, b"s")
    assert Meeting(client, server, nonce=b"first").fine
    return client, server


def marks(client, server):
    return client.mark(WHO[SERVER].incarnation), server.mark(WHO[CLIENT].incarnation)


def test_a_mark_is_shown_at_the_first_meeting_alone(met):
    client, server = met
    fresh = Meeting(process(CLIENT, b"c"), process(SERVER, b"s"))
    ours, theirs = marks(client, server)
    assert (fresh.said(CLIENT), fresh.said(SERVER)) == ([(ours, b"")], [(theirs, b"")])
    for nonce in (b"again", b"and again"):
        again = Meeting(client, server, nonce=nonce)
        assert again.fine
        assert ours not in again.wrote[CLIENT]
        assert theirs not in again.wrote[SERVER]
        assert all(len(part) == MARK_BYTES for role in Role for part in again.said(role)[0])


def test_a_mark_is_for_one_peer_and_follows_from_the_key():
    one = process(CLIENT, b"c")
    assert one.mark(b"x" * 16) == process(CLIENT, b"c").mark(b"x" * 16)
    assert len({one.mark(b"x" * 16), one.mark(b"y" * 16), process(CLIENT, b"d").mark(b"x" * 16)}) == 3


@pytest.mark.parametrize("impostor", list(Role))
def test_another_process_is_not_believed(met, impostor):
    """It shows a mark of its own, since it has met nobody: as client, and as server."""
    processes = dict(zip((CLIENT, SERVER), met, strict=True))
    processes[impostor] = process(impostor, b"x")
    honest = OTHER[impostor]
    meeting = Meeting(processes[CLIENT], processes[SERVER], nonce=b"x")
    assert honest not in meeting.opened
    assert isinstance(meeting.errors[honest], IdentityError)
    assert meeting.errors[honest].code is Code.IDENTITY
    own = processes[honest].mark(WHO[impostor].incarnation)
    assert own not in meeting.wrote[honest]  # it learns nothing that it could use elsewhere
    if impostor is CLIENT:
        assert isinstance(meeting.errors[CLIENT], IdentityError)  # and hears at once what it is about
        assert meeting.said(SERVER) == []
    assert Meeting(*met, nonce=b"back").fine


@pytest.mark.parametrize("impostor", list(Role))
def test_who_repeats_what_it_has_heard_is_not_believed(met, impostor):
    """What was said on another stream proves nothing on this one, nor does what this side says itself."""
    before = Meeting(*met, nonce=b"before")
    own = {role: before.said(role)[0] for role in Role}
    for mark, same in (own[impostor], own[OTHER[impostor]]):

        def say(message, mark=mark, same=same):
            return msgspec.structs.replace(message, mark=mark, same=same) if isinstance(message, Agent) else message

        processes = dict(zip((CLIENT, SERVER), met, strict=True))
        meeting = Meeting(processes[CLIENT], processes[SERVER], nonce=b"x", change=say)
        assert any(isinstance(error, IdentityError) for error in meeting.errors.values())
        assert meeting.opened < {CLIENT, SERVER}


@pytest.mark.parametrize("field", ["mark", "same"])
@pytest.mark.parametrize("at", [0, 31])
@pytest.mark.parametrize("side", list(Role))
def test_every_byte_of_a_sealed_mark_and_of_its_proof_counts(met, field, at, side):
    def damage(message):
        whole = getattr(message, field, b"") if isinstance(message, Agent) else b""
        if not whole or not damaging.pop():
            return message
        return msgspec.structs.replace(message, **{field: whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]})

    damaging = [True] if side is CLIENT else [True, False]
    meeting = Meeting(*met, nonce=b"x", change=damage)
    assert OTHER[side] not in meeting.opened
    assert isinstance(meeting.errors[OTHER[side]], IdentityError)


def test_who_was_met_with_a_mark_does_not_come_without(met):
    """Nor does somebody who was met without, as peers of older versions are, come with one."""
    client, server = met
    for ours, theirs, honest in ((None, server, SERVER), (client, None, CLIENT)):
        meeting = Meeting(ours, theirs, nonce=b"x")
        assert isinstance(meeting.errors[honest], IdentityError)
        assert honest not in meeting.opened


@pytest.mark.parametrize("old", list(Role))
def test_a_peer_of_an_older_version_is_met_again_as_it_was(old):
    sides: dict[Role, Acquaintances | None] = {CLIENT: process(CLIENT, b"c"), SERVER: process(SERVER, b"s")}
    sides[old] = None
    for nonce in (b"1", b"2"):
        meeting = Meeting(sides[CLIENT], sides[SERVER], nonce=nonce)
        assert meeting.fine
        assert meeting.said(old) == [(b"", b"")]
        shown = (
            [(b"", b"")] if old is CLIENT or nonce != b"1" else [(marks(sides[CLIENT], process(SERVER, b"s"))[0], b"")]
        )
        assert meeting.said(OTHER[old]) == shown  # nothing to who is known to show nothing
    if old is CLIENT:  # who answers one that shows no mark shows none either
        sides[old] = process(old, b"x")
        assert isinstance(Meeting(sides[CLIENT], sides[SERVER], nonce=b"3").errors[SERVER], IdentityError)


@pytest.mark.parametrize("who", list(Role))
def test_who_has_forgotten_learns_the_mark_again(met, who):
    """The other one has not: it is believed, since nobody else could have sealed its mark for this process."""
    processes = dict(zip((CLIENT, SERVER), met, strict=True))
    key = {CLIENT: b"c", SERVER: b"s"}[who]
    processes[who] = process(who, key)
    assert Meeting(processes[CLIENT], processes[SERVER], nonce=b"x").fine
    again = Meeting(processes[CLIENT], processes[SERVER], nonce=b"y")
    assert again.fine
    assert all(same for role in Role for _, same in again.said(role))
    stranger = Meeting(process(CLIENT, b"x"), processes[SERVER], nonce=b"z")
    assert isinstance(stranger.errors[SERVER], IdentityError)


def test_both_have_forgotten():
    assert Meeting(process(CLIENT, b"c"), process(SERVER, b"s"), nonce=b"x").fine


def test_nobody_seals_for_a_process_that_has_forgotten(met):
    """Whoever does not know the mark that it once showed cannot bring it to learn another one."""
    client, _ = met
    stranger = process(CLIENT, b"x")
    stranger.remember(WHO[SERVER].incarnation, b"guess".ljust(32), AT)
    meeting = Meeting(stranger, process(SERVER, b"s"), nonce=b"x")
    assert isinstance(meeting.errors[SERVER], IdentityError)
    assert Meeting(client, process(SERVER, b"s"), nonce=b"y").fine


def test_a_first_session_that_broke_off_does_not_lock_anybody_out():
    """The server has the client's mark, and its own answer was lost."""
    client, server = process(CLIENT, b"c"), process(SERVER, b"s")
    one = Session(CLIENT, WHO[CLIENT], Terms(FACTS, encode_body(BODY), met=client), nonce=b"1" * 32, now=0.0)
    other = Session(SERVER, WHO[SERVER], Terms(FACTS, encode_body(BODY), met=server), nonce=b"2" * 32, now=0.0)
    list(other.receive(one.take_output(), 0.0))
    list(one.receive(other.take_output(), 0.0))
    (opened,) = other.receive(one.take_output(), 0.0)
    assert isinstance(opened, Opened)
    assert client.find(WHO[SERVER].incarnation) is None
    stranger = Meeting(process(CLIENT, b"x"), server, nonce=b"x")
    assert isinstance(stranger.errors[SERVER], IdentityError)
    assert Meeting(client, server, nonce=b"y").fine
    assert all(same for role in Role for _, same in Meeting(client, server, nonce=b"z").said(role))


def test_two_first_sessions_at_once_one_each_way():
    """Two workers that fetch from each other: what one stream taught holds for the other, which began before."""
    here, there = process(CLIENT, b"c"), process(SERVER, b"s")
    turned = {CLIENT: WHO[SERVER], SERVER: WHO[CLIENT]}
    sessions = [
        Session(role, who[role], Terms(FACTS, encode_body(BODY), met=met, endpoint=AT), nonce=nonce * 32, now=0.0)
        for who, role, met, nonce in (
            (WHO, CLIENT, here, b"1"), (WHO, SERVER, there, b"2"),
            (turned, CLIENT, there, b"3"), (turned, SERVER, here, b"4"),
        )
    ]  # fmt: skip
    for _ in range(3):  # both streams, frame by frame
        for one, other in (sessions[:2], sessions[2:]):
            list(other.receive(one.take_output(), 0.0))
            list(one.receive(other.take_output(), 0.0))
    assert [one.state for one in sessions] == [State.OPEN] * 4
    assert Meeting(here, there, nonce=b"x").fine
    assert Meeting(there, here, nonce=b"y", who=turned).fine


def test_nobody_is_this_process_but_itself():
    who = {CLIENT: WHO[CLIENT], SERVER: dataclasses.replace(WHO[SERVER], incarnation=WHO[CLIENT].incarnation)}
    itself, stranger = process(CLIENT, b"c"), process(CLIENT, b"x")
    assert isinstance(Meeting(stranger, itself, who=who).errors[SERVER], IdentityError)
    assert isinstance(Meeting(itself, stranger, who=who).errors[CLIENT], IdentityError)
    for nonce in (b"1", b"2"):
        assert Meeting(itself, itself, who=who, nonce=nonce).fine


@pytest.mark.parametrize(
    ("mark", "same"), [(31, 0), (33, 0), (1, 0), (0, 32), (32, 31), (32, 33), (32, 1), (31, 32), (64, 64)]
)
def test_what_is_neither_shown_nor_sealed_is_a_protocol_error(mark, same):
    side = Recognition(process(SERVER, b"s"), b"i" * 16, b"transcript", None)
    with pytest.raises(ProtocolError, match="neither shown nor sealed"):
        side.check(bytes(mark), bytes(same))


def differing(client, server):
    """A handshake that fails, since the facts differ; what the server wrote."""
    one = Session(CLIENT, WHO[CLIENT], Terms([("model", "a")], b"\x93", met=client), nonce=b"1" * 32, now=0.0)
    other = Session(SERVER, WHO[SERVER], Terms([("model", "b")], b"\x93", met=server), nonce=b"2" * 32, now=0.0)
    wrote, take = [], other.take_output
    other.take_output = lambda: (wrote.append(take()), wrote[-1])[1]
    _, errors = pump(one, other)
    assert set(errors) == {CLIENT, SERVER}
    return b"".join(wrote)


def test_a_handshake_that_fails_makes_nobody_known_to_the_client():
    client, server = process(CLIENT, b"c"), process(SERVER, b"s")
    differing(client, server)
    assert len(client) == 0
    assert Meeting(client, server).fine


def test_nobody_is_shown_a_mark_and_leaves_no_trace():
    """It could come back with it when the one whom it claimed to be was met: so that one is not met any more."""
    client, server = process(CLIENT, b"c"), process(SERVER, b"s")
    assert server.mark(WHO[CLIENT].incarnation) in differing(process(CLIENT, b"x"), server)
    meeting = Meeting(client, server)
    assert isinstance(meeting.errors[SERVER], IdentityError)
    assert not meeting.opened


def test_a_refusal_is_a_goodbye_with_its_code(met):
    _, server = met
    meeting = Meeting(process(CLIENT, b"x"), server)
    last = list(FrameReader(1 << 20).feed(meeting.wrote[SERVER]))[-1]
    assert isinstance(last, Goodbye)
    assert last.code is Code.IDENTITY
    assert decode(encode(last)[4:]) == last


# --- where it was met


def relay(client, server, **terms):
    """Somebody between them who passes on what each says: the client went to another endpoint than the one it knows."""
    return Meeting(client, server, endpoint="tcp:10.6.6.6:6", nonce=b"relayed", **terms)


def test_who_answers_somewhere_else_is_not_believed_while_something_is_under_way(met):
    client, server = met
    client.keep(lambda: [WHO[SERVER].incarnation])
    meeting = relay(client, server)
    assert meeting.said(CLIENT) == []  # nothing that could be passed on
    assert isinstance(meeting.errors[CLIENT], IdentityError)
    assert meeting.opened == set()
    assert Meeting(client, server, nonce=b"x").fine


def test_a_peer_that_does_not_answer_may_have_moved_if_nothing_of_it_is_under_way(met):
    client, server = met
    under_way = [WHO[SERVER].incarnation]
    client.keep(lambda: under_way)
    assert not client.may_move(under_way[0])
    refused = relay(client, server).errors[CLIENT]
    assert isinstance(refused, IdentityError)
    assert (refused.met_at, refused.incarnation) == (AT, under_way[0].hex())
    peer = under_way.pop()
    assert isinstance(relay(client, server).errors[CLIENT], IdentityError)  # as long as nobody says that it is gone
    assert client.may_move(peer)
    assert isinstance(Meeting(process(CLIENT, b"x"), server).errors[SERVER], IdentityError)
    assert isinstance(Meeting(client, process(SERVER, b"x")).errors[CLIENT], IdentityError)  # it is known all the same
    assert relay(client, server).fine
    assert isinstance(Meeting(client, server, nonce=b"x").errors[CLIENT], IdentityError)  # it is there now
    assert relay(client, server).fine


def test_a_session_that_the_peer_opened_says_nothing_of_where_it_is():
    here, there = process(CLIENT, b"c"), process(SERVER, b"s")
    there.keep(lambda: [WHO[CLIENT].incarnation])
    here.keep(lambda: [WHO[SERVER].incarnation])
    turned = {CLIENT: WHO[SERVER], SERVER: WHO[CLIENT]}
    assert Meeting(here, there).fine
    assert Meeting(there, here, nonce=b"1", who=turned, endpoint="tcp:10.0.0.2:9").fine
    assert isinstance(relay(here, there).errors[CLIENT], IdentityError)  # nor is forgotten where this side went
    assert Meeting(here, there, nonce=b"2").fine


# --- forgetting


def test_the_longest_unseen_are_forgotten_and_none_that_is_needed():
    needed = {b"0"}
    known = Acquaintances(b"own", b"k" * 32, most=4)
    known.keep(lambda: needed)
    known.keep(lambda: [b"1"])
    for name in b"0", b"1", b"2", b"3", b"2":
        known.remember(name, b"m" * 32, "")
    known.remember(b"4", b"m" * 32, "")
    assert [known.find(name) is not None for name in (b"0", b"1", b"2", b"3", b"4")] == [True, True, True, False, True]
    for number in range(5, 50):
        known.remember(b"%d" % number, b"m" * 32, "")
        assert len(known) <= 5
    assert known.find(b"0") == known.find(b"1") == b"m" * 32
    needed.clear()
    for number in range(50, 60):
        known.remember(b"%d" % number, b"m" * 32, "")
    assert known.find(b"0") is None


def test_who_is_forgotten_in_the_midst_of_a_handshake_is_still_the_one_it_began_with():
    client, server = process(CLIENT, b"c"), process(SERVER, b"s")
    mark = server.mark(WHO[CLIENT].incarnation)
    client.remember(WHO[SERVER].incarnation, mark, AT)
    side = Recognition(client, WHO[SERVER].incarnation, b"transcript", AT)
    client._known.clear()
    with pytest.raises(IdentityError):
        side.check(b"another".ljust(MARK_BYTES), b"")
    side.check(mark, b"")


def test_nobody_is_forgotten_while_all_are_needed():
    known = Acquaintances(b"own", b"k" * 32, most=8)
    asked = []

    def needed():
        asked.append(len(known))
        return [b"%d" % number for number in range(1000)]

    known.keep(needed)
    for number in range(1000):
        known.remember(b"%d" % number, b"m" * 32, "")
    assert len(known) == 1000
    assert len(asked) < 60  # it is not looked for who could be forgotten each time


def test_marks_show_nowhere(met):
    client, server = met
    shown = f"{client!r} {server!r} {client._known!r} {server._known!r}"
    assert all(mark.hex() not in shown and repr(mark) not in shown for mark in marks(client, server))
