"""Two sessions joined by bytes: every message in every state, every way in which a handshake fails, and the clock."""
# fields of messages whose type the test has fixed
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import dataclasses
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import (
    Code,
    IdentityError,
    KvxferError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    UnreachableError,
)
from kvxfer.names import CONVERTIBLE, MAX_WORLD
from kvxfer.protocol import messages as wire
from kvxfer.protocol import session as module
from kvxfer.protocol.framing import decode, encode, encode_body
from kvxfer.protocol.session import (
    RECEIVED_WHEN_OPEN,
    TRANSITIONS,
    Identity,
    IdentityKey,
    Opened,
    Role,
    Session,
    State,
    Terms,
)

BODY = wire.AgentBody("loopback", b"meta", [])
FACTS = [("default.dtype", "float16"), ("model", "llama")]
KEYS = {Role.CLIENT: IdentityKey(b"d" * 32), Role.SERVER: IdentityKey(b"p" * 32)}
WHO = {
    Role.CLIENT: Identity("decode", b"D" * 16, KEYS[Role.CLIENT].incarnation, 1, 4, 3, "kvxfer 1.0"),
    Role.SERVER: Identity("prefill", b"P" * 16, KEYS[Role.SERVER].incarnation, 0, 2, 7, "kvxfer 1.1"),
}
TICKET = wire.TicketRef("r", 0, b"m" * 16)
SAMPLES = {
    type(message): message
    for message in (
        wire.Hello(2, 2, "", "e", b"E" * 16, b"i" * 32, 0, 1, 0, b"n" * 32, 2000),
        wire.Welcome(2, 2, "", "e", b"E" * 16, b"i" * 32, 0, 1, 0, b"n" * 32, 2000),
        wire.Agent([], memoryview(encode_body(BODY)), b"s" * 32),
        wire.Ping(),
        wire.Claim([TICKET]),
        wire.Fetch(1, TICKET, [], [], 0, 1, [wire.Route.STAGED], 1, 1),
        wire.Accept(1, wire.Route.STAGED, 1, [], 1, 1, 1, b""),
        wire.Refuse(1, Code.TOO_MANY, "no"),
        wire.Ready(1, 1),
        wire.Reserve(1, 1, 1),
        wire.Read(1, 1),
        wire.Arrived(1, 1),
        wire.KvAgentResult(1, wire.WHOLE, wire.Status.OK, 1, True),
        wire.Cancel(1),
        wire.Release(TICKET),
        wire.Goodbye(),
        wire.Check(16),
        wire.Sums(1, 0, bytes(16)),
        wire.Abandon(1),
        wire.Renewed(1, b"metadata"),
    )
}
LONG = wire.Ready(4, 50, 0, [wire.Span("g", 0, wire.pack_u32(range(50)))])
OTHER = {Role.CLIENT: Role.SERVER, Role.SERVER: Role.CLIENT}


def make(role, *, secret=None, facts=FACTS, now=0.0, who=None, nonce=None, body=None, key=None, **terms):
    terms = Terms(facts, body or encode_body(BODY), key or KEYS[role], secret=secret, **terms)
    return Session(role, who or WHO[role], terms, nonce=nonce or role.value.encode().ljust(32, b"."), now=now)


def pair(client=None, server=None, **both):
    return make(Role.CLIENT, **{**both, **(client or {})}), make(Role.SERVER, **{**both, **(server or {})})


def pump(client, server, now=0.0):
    """Carry bytes both ways until there are none; what each side saw, and the error that each raised."""
    seen = {Role.CLIENT: [], Role.SERVER: []}
    errors = {}
    while moved := [(side, data) for side in (client, server) if (data := side.take_output())]:
        for side, data in moved:
            receiver = server if side is client else client
            try:
                for event in receiver.receive(data, now):
                    seen[receiver.role].append(event)
            except KvxferError as error:
                errors[receiver.role] = error
    return seen, errors


def opened(**both):
    client, server = pair(**both)
    seen, errors = pump(client, server)
    assert not errors
    assert [type(event) for events in seen.values() for event in events] == [Opened, Opened]
    return client, server


def in_state(role, state):
    """A session of this role in this state."""
    client, server = pair()
    sessions = {Role.CLIENT: client, Role.SERVER: server}
    if state is State.OPEN:
        pump(client, server)
    elif state is State.GREETED:
        list(server.receive(client.take_output(), 0.0))
        if role is Role.CLIENT:
            list(client.receive(server.take_output(), 0.0))
    elif state is State.CLOSED:
        sessions[role].close()
    chosen = sessions[role]
    assert chosen.state is state
    chosen.take_output()
    return chosen


def agent_for(role):
    """What a session that is GREETED, of this role, hears next."""
    client, server = pair()
    list(server.receive(client.take_output(), 0.0))
    list(client.receive(server.take_output(), 0.0))
    said = client.take_output()
    if role is Role.CLIENT:
        list(server.receive(said, 0.0))
        said = server.take_output()
    return said


# --- the handshake


def test_a_handshake_completes_on_both_sides():
    client, server = pair()
    seen, errors = pump(client, server)
    assert not errors
    assert client.state is server.state is State.OPEN
    for side, theirs in ((client, WHO[Role.SERVER]), (server, WHO[Role.CLIENT])):
        (event,) = seen[side.role]
        assert event == Opened(side.peer)
        assert side.peer.identity == theirs
        assert (side.peer.identity.epoch, side.peer.identity.incarnation) == (theirs.epoch, theirs.incarnation)
        assert side.peer.body == BODY
    assert client.peer.name == f"prefill[0/2]@{KEYS[Role.SERVER].incarnation.hex()[:8]}"


def test_the_tables_name_every_message():
    every = set(wire.Message.__args__)
    assert set(SAMPLES) == every
    handshake = {kind for _, _, kind in TRANSITIONS}
    assert handshake | RECEIVED_WHEN_OPEN[Role.CLIENT] | RECEIVED_WHEN_OPEN[Role.SERVER] == every
    assert RECEIVED_WHEN_OPEN[Role.CLIENT] & RECEIVED_WHEN_OPEN[Role.SERVER] == {wire.Ping, wire.Goodbye, wire.Renewed}
    assert set(TRANSITIONS.values()) == {State.GREETED, State.OPEN}


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.value)
def test_every_message_in_every_state(role, state, kind):
    side = in_state(role, state)
    frame = agent_for(role) if kind is wire.Agent else encode(SAMPLES[kind])
    if state is State.CLOSED:
        assert list(side.receive(frame, 1.0)) == []
    elif state is State.OPEN and kind in RECEIVED_WHEN_OPEN[role]:
        assert list(side.receive(frame, 1.0)) == ([] if kind is wire.Ping else [SAMPLES[kind]])
        assert side.state is State.OPEN
    elif kind is wire.Goodbye:
        with pytest.raises(UnreachableError, match="goodbye: DRAINING"):
            list(side.receive(frame, 1.0))
        assert side.state is State.CLOSED
    elif (role, state, kind) in TRANSITIONS:
        list(side.receive(frame, 1.0))
        assert side.state is TRANSITIONS[role, state, kind]
    else:
        with pytest.raises(ProtocolError, match=f"{kind.__name__} is illegal for a {role.value} .* {state.value}"):
            list(side.receive(frame, 1.0))
        assert side.state is State.CLOSED
        assert side.take_output() == b""


def test_an_illegal_message_does_not_undo_what_came_before_it():
    _, server = opened()
    events = iter(server.receive(encode(wire.Cancel(1)) + encode(SAMPLES[wire.Accept]) + encode(wire.Cancel(2)), 1.0))
    assert next(events) == wire.Cancel(1)
    with pytest.raises(ProtocolError):
        next(events)
    assert next(events, None) is None


IMPOSSIBLE = [{"world": 0}, {"world": MAX_WORLD + 1}, {"rank": 4}, {"rank": 7}, {"incarnation": bytes(31)}]


@pytest.mark.parametrize("wrong", IMPOSSIBLE, ids=str)
@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.value)
def test_impossible_greetings_are_refused(role, wrong):
    liar = dataclasses.replace(WHO[role], **wrong)
    client, server = pair(**{role.value: {"who": liar}})
    _, errors = pump(client, server)
    assert isinstance(errors[OTHER[role]], ProtocolError)
    assert {client.state, server.state} != {State.OPEN}


def test_the_smaller_version_is_spoken():
    client, server = pair()
    client._hello = msgspec.structs.replace(decode(client.take_output()[4:]), wire=9)
    list(server.receive(encode(client._hello), 0.0))
    pump(client, server)
    assert server.state is State.OPEN


# --- versions


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.value)
def test_the_version_before_is_not_spoken(role):
    """It numbers chunks, where this one counts them: no frame of a transfer means the same."""
    client, server = pair()
    data = client.take_output()
    if role is Role.CLIENT:
        list(server.receive(data, 0.0))
        data = server.take_output()
    old = encode(msgspec.structs.replace(decode(data[4:]), wire=1, wire_min=1))
    with pytest.raises(MismatchError, match=r"no common protocol version: 2\.\.2 here, 1\.\.1 there"):
        list((client if role is Role.CLIENT else server).receive(old, 0.0))


# --- secrets


@pytest.mark.parametrize(
    ("client", "server", "finder", "about"),
    [
        (b"one", b"two", Role.CLIENT, "server"),
        (b"one", None, Role.CLIENT, "server"),
        (None, b"two", Role.SERVER, "client"),
    ],
)
def test_a_wrong_or_missing_secret(client, server, finder, about):
    left, right = pair({"secret": client}, {"secret": server})
    seen, errors = pump(left, right)
    said = f"the {about} does not know the shared secret; check `secret` on both sides"
    assert str(errors.pop(finder)) == said
    (other,) = errors.values()
    with pytest.raises(UnreachableError, match=f"the peer said goodbye: {said}"):
        raise other
    assert seen == {Role.CLIENT: [], Role.SERVER: []}
    side = left if finder is Role.CLIENT else right
    assert side.state is State.CLOSED
    assert side.take_output() == b""  # neither facts nor body are told to a stranger


def test_a_proof_cannot_be_sent_back():
    """The roles are part of it: a client that knows no secret cannot use the server's own proof."""
    client, server = pair({"secret": None}, {"secret": b"s"})
    list(server.receive(client.take_output(), 0.0))
    stolen = decode(server.take_output()[4:]).proof
    with pytest.raises(UnreachableError):
        list(server.receive(encode(wire.Agent(FACTS, memoryview(encode_body(BODY)), stolen)), 0.0))


@pytest.mark.parametrize(
    "field", ["wire", "package", "engine", "epoch", "incarnation", "rank", "capabilities", "nonce", "heartbeat_ms"]
)
def test_every_field_of_a_greeting_is_proved(field):
    client, server = pair(secret=b"s")
    hello = decode(client.take_output()[4:])
    value = getattr(hello, field)
    other = value + 1 if isinstance(value, int) else value[:-1] + (b"?" if isinstance(value, bytes) else "?")
    list(server.receive(encode(msgspec.structs.replace(hello, **{field: other})), 0.0))
    with pytest.raises(UnreachableError):
        list(client.receive(server.take_output(), 0.0))


def test_proofs_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(a, b):
        compared.append((len(a), len(b)))
        return True

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    opened(secret=b"s")
    assert compared == [(32, 32)] * 4  # of the secret, and of the incarnation, by each side


# --- facts

NAMES = st.sampled_from(["model", "a.dtype", "b.dtype", "a.dim", "engine"])


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(NAMES, st.sampled_from(["x", "y"])), st.dictionaries(NAMES, st.sampled_from(["x", "y"])))
def test_facts_are_compared_field_by_field_on_both_sides(ours, theirs):
    client, server = pair({"facts": list(ours.items())}, {"facts": list(theirs.items())})
    _, errors = pump(client, server)
    different = {n: (v, theirs[n]) for n, v in ours.items() if theirs.get(n, v) != v}
    if not different:
        assert not errors
        return
    assert {role: error.fields for role, error in errors.items()} == {
        Role.CLIENT: different,
        Role.SERVER: {name: (b, a) for name, (a, b) in different.items()},
    }
    for name, (a, b) in different.items():
        assert f"{name}: {a!r} here, {b!r} there" in str(errors[Role.CLIENT])
    assert client.state is server.state is State.CLOSED


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([*CONVERTIBLE, "int8", "float64"]),
    st.sampled_from([*CONVERTIBLE, "int8", "float64"]),
    st.sampled_from(["8", "16"]),
    st.booleans(),
    st.booleans(),
)
def test_dtypes_may_differ_if_the_opener_asked_for_conversion(theirs, ours, dim, asked, other_way):
    """Both sides decide alike, and what the server would ask for as a client does not count."""
    client, server = (
        dataclasses.replace(WHO[role], capabilities=int(wire.Capability.CONVERT if asks else wire.Capability.STAGED))
        for role, asks in ((Role.CLIENT, asked), (Role.SERVER, other_way))
    )
    facts = [[("k.dtype", dtype), ("k.dim", number)] for dtype, number in ((ours, "8"), (theirs, dim))]
    _, errors = pump(*pair({"facts": facts[0], "who": client}, {"facts": facts[1], "who": server}))
    able = ours in CONVERTIBLE and theirs in CONVERTIBLE
    wrong = {"k.dtype": ours != theirs and not (asked and able), "k.dim": dim != "8"}
    different = {name for name, differs in wrong.items() if differs}
    found = {role: set(error.fields) for role, error in errors.items()}
    assert found == dict.fromkeys(Role if different else (), different)
    for error in errors.values():
        helps = different == {"k.dtype"} and able
        assert ("convert=True at the decode rank would convert it" in str(error)) == helps


def test_facts_come_before_the_body():
    """What cannot even be decoded is a mismatch if the facts differ: those explain it."""
    client, server = pair({"facts": [("model", "other")], "body": b"\xc1"})
    _, errors = pump(client, server)
    assert isinstance(errors[Role.SERVER], MismatchError)
    assert "model" in str(errors[Role.SERVER])
    assert server.state is State.CLOSED
    client, server = pair({"facts": [("model", "llama")], "body": b"\xc1"})
    _, errors = pump(client, server)
    assert not errors
    with pytest.raises(ProtocolError, match="agent body"):
        _ = server.peer.body


# --- the clock


def test_what_is_received_is_no_substitute_for_sending():
    client, _ = opened(heartbeat=2.0)
    list(client.receive(encode(wire.Ping()), 1.9))
    client.tick(2.0)
    assert client.take_output() == encode(wire.Ping())


def test_two_idle_sessions_stay_open():
    client, server = opened(heartbeat=2.0, peer_timeout=5.0)
    now = 0.0
    while now < 100.0:
        now = min(client.next_deadline(), server.next_deadline())
        client.tick(now)
        server.tick(now)
        seen, errors = pump(client, server, now)
        assert not errors
        assert not any(seen.values())


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"), [(2.0, 60.0, 2.0), (60.0, 2.0, 2.0), (2.0, 0.0, 0.1), (0.02, 0.04, 0.02)]
)
def test_a_side_speaks_as_often_as_its_peer(ours, theirs, agreed):
    """Whose patience, and whose leases, are longer than twice its own heartbeat, whatever the other's is."""
    client, server = pair(client={"heartbeat": ours}, server={"heartbeat": theirs})
    assert client.liveness.heartbeat == ours
    assert not pump(client, server)[1]
    assert client.liveness.heartbeat == agreed
    client.tick(agreed * 0.999)
    assert client.take_output() == b""
    assert client.next_deadline() == agreed
    client.tick(agreed)
    assert client.take_output() == encode(wire.Ping())


def test_silence_is_a_lost_peer():
    client, _ = opened(heartbeat=2.0, peer_timeout=5.0)
    list(client.receive(encode(wire.Ping())[:3], 3.0))  # a part of a frame is a sign of life as well
    for now in (5.0, 7.0, 7.999):
        client.tick(now)
    assert client.next_deadline() == 8.0
    with pytest.raises(PeerLostError, match="silent for 5 s") as caught:
        client.tick(8.0)
    assert caught.value.peer == client.peer.name
    assert client.state is State.CLOSED
    with pytest.raises(PeerLostError):
        client.send(wire.Cancel(1), 8.0)
    client.tick(100.0)


def test_a_side_that_speaks_all_the_time_notices_silence():
    """Its timer goes off but once: it never has to say that it lives."""
    client, _ = opened(heartbeat=2.0, peer_timeout=20.0)
    for now in np.arange(0.5, 20.0, 0.5):
        client.send(wire.Cancel(1), float(now))
    assert client.next_deadline() == 20.0
    with pytest.raises(PeerLostError, match="silent for 20 s"):
        client.tick(20.0)


@pytest.mark.parametrize("late", [0.5, 1.9, 2.1, 30.0])
def test_a_side_that_is_always_late_notices_silence_all_the_same(late):
    client, _ = opened(heartbeat=2.0, peer_timeout=20.0)
    most = math.ceil(20 / min(2.0 + late, 5.0))
    for look in range(1, most):
        client.tick(look * (2.0 + late))
    with pytest.raises(PeerLostError, match="silent for 20 s"):
        client.tick(most * (2.0 + late))


@pytest.mark.parametrize("sends", [False, True], ids=["ticked", "sent first"])
@pytest.mark.parametrize(("heartbeat", "counted"), [(2.0, 5.0), (9.0, 9.0)])
def test_what_a_side_slept_through_is_little_silence_of_its_peer(sends, heartbeat, counted):
    """A machine that was paused goes on with all its timers over, and nothing from a peer that was paused with it."""
    client, _ = opened(heartbeat=heartbeat, peer_timeout=20.0)
    client.tick(heartbeat)
    if sends:
        client.send(wire.Cancel(1), 1000.0)
    client.tick(1000.0)
    assert client.state is State.OPEN
    silent_until = 1000.0 + 20.0 - heartbeat - counted
    for now in (*np.arange(1000.0, silent_until, 1.0), silent_until - 0.001):
        client.tick(float(now))
    with pytest.raises(PeerLostError, match="silent for 20 s"):
        client.tick(silent_until)


@pytest.mark.parametrize("state", [State.NEW, State.GREETED], ids=lambda state: state.value)
@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.value)
def test_a_handshake_has_a_bound_that_bytes_do_not_extend(role, state):
    side = in_state(role, state)
    assert side.next_deadline() == 30.0
    list(side.receive(b"\x05", 29.0))
    side.tick(29.9)
    assert side.take_output() == b""  # no heartbeat before it is open
    with pytest.raises(UnreachableError, match=f"no handshake within 30 s .*{state.value}"):
        side.tick(30.0)
    assert side.state is State.CLOSED


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["tick", "send", "hear"]), st.floats(0.001, 4.0)), max_size=25),
    st.sampled_from(list(Role)),
    st.sampled_from([State.NEW, State.GREETED, State.OPEN]),
)
def test_the_next_deadline_is_never_in_the_past(steps, role, state):
    side = in_state(role, state)
    now = 0.0
    for what, delay in steps:
        now += delay
        try:
            if what == "send" and side.state is State.OPEN:
                side.send(wire.Ping(), now)
            elif what == "hear" and side.state is State.OPEN:
                list(side.receive(encode(wire.Ping()), now))
            side.tick(now)
        except (PeerLostError, UnreachableError):
            assert side.next_deadline() == math.inf
            return
        assert side.next_deadline() > now


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.value)
def test_a_closed_session_does_nothing(role):
    side = in_state(role, State.OPEN)
    side.close()
    side.close()
    side.tick(1e9)
    assert list(side.receive(b"\xff" * 200_000, 1.0)) == []
    assert list(side.receive(b"\xff" * 200_000, 1.0)) == []
    assert side.take_output() == b""
    assert side.next_deadline() == math.inf
    with pytest.raises(PeerLostError, match="closed"):
        side.send(wire.Ping(), 1.0)


@pytest.mark.parametrize("state", [State.NEW, State.GREETED], ids=lambda state: state.value)
@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.value)
def test_nothing_can_be_sent_before_it_is_open(role, state):
    with pytest.raises(PeerLostError, match=state.value):
        in_state(role, state).send(wire.Ping(), 0.0)


# --- bytes


def test_a_large_frame_is_refused_before_the_greeting_and_taken_after_it():
    large = encode(wire.Agent([], memoryview(bytes(100_000)), b"s" * 32))
    for role in Role:
        with pytest.raises(ProtocolError, match="over the limit"):
            list(in_state(role, State.NEW).receive(large[:4], 0.0))
        with pytest.raises(IdentityError):
            list(in_state(role, State.GREETED).receive(large, 0.0))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 100)))
def test_output_may_be_taken_in_slices_of_any_size(sizes):
    frames = [LONG, wire.Ping(), wire.Cancel(3)]
    _, server = opened()
    for message in frames:
        assert server.send(message, 1.0, 100 * server.unsent_bytes) == b"", "it comes behind those that wait"
    whole, taken = b"".join(map(encode, frames)), []
    assert server.unsent_bytes == len(whole)
    for most in sizes:
        taken.append(server.take_output(most))
        assert len(taken[-1]) == min(most, len(whole) - sum(map(len, taken[:-1])))
        assert server.unsent_bytes == len(whole) - sum(map(len, taken))
    assert b"".join((*taken, server.take_output())) == whole
    assert server.send(wire.Ping(), 1.0, 100) == encode(wire.Ping()), "it need not wait"
    assert server.unsent_bytes == 0
