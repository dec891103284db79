"""The scripts are legal streams: they decode in order, and both sides of a real session write the same bytes."""

import json

import pytest

from kvxfer.errors import IdentityError, MismatchError
from kvxfer.protocol import messages as wire
from kvxfer.protocol.framing import SESSION_FRAME_LIMIT, FrameReader, decode
from kvxfer.protocol.session import Identity, IdentityKey, Opened, Role, Session, State, Terms
from kvxfer.protocol.transfer import Failure, Receiving, Sending, SendState
from kvxfer.tools.inspect import registry_name
from proto.generate import HERE

DOCUMENT = json.loads((HERE / "vectors/conversations.json").read_text())
SETTING, CONVERSATIONS = DOCUMENT["setting"], DOCUMENT["conversations"]
REQUIRED = {
    "staged_two_chunks", "forged_ticket", "cancel_between_chunks", "pull", "fetch_before_offer",
    "staged_in_turns", "staged_in_another_ring", "write_that_does_not_end",
    "version_mismatch_seen_by_decode", "version_mismatch_seen_by_prefill", "not_the_same_process",
}  # fmt: skip
SAME = json.loads((HERE / "vectors/handshake.json").read_text())["same"]
OPENED = [c for c in CONVERSATIONS if c["outcome"] not in ("mismatch", "identity")]


def name(conversation):
    return conversation["name"]


def messages(conversation, side=None):
    frames = [bytes.fromhex(f["frame"]) for f in conversation["frames"] if side in (None, f["from"])]
    return [decode(frame[4:]) for frame in frames]


def sent(conversation, side):
    return b"".join(bytes.fromhex(f["frame"]) for f in conversation["frames"] if f["from"] == side)


def session(role, greeting, secret):
    identity = Identity(
        greeting.engine, greeting.epoch, greeting.incarnation, greeting.rank, greeting.world,
        greeting.capabilities, greeting.package,
    )  # fmt: skip
    own = messages(CONVERSATIONS[0], "decode" if role is Role.CLIENT else "prefill")
    agent = next(message for message in own if isinstance(message, wire.Agent))
    key = IdentityKey(bytes.fromhex(SAME[f"{role.value}_private"]))
    terms = Terms([tuple(pair) for pair in SETTING["facts"]], bytes(agent.body), key, secret=secret)
    return Session(role, identity, terms, nonce=greeting.nonce, now=0.0)


def test_the_scripts_that_must_be_there():
    names = [conversation["name"] for conversation in CONVERSATIONS]
    assert set(names) >= REQUIRED
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=name)
def test_frames_decode_in_order(conversation):
    for side in ("decode", "prefill"):
        found = list(FrameReader(SESSION_FRAME_LIMIT).feed(sent(conversation, side)))
        assert found == messages(conversation, side)
    for line in conversation["frames"]:
        assert set(line) == {"from", "frame", "message"}
        assert line["from"] in {"decode", "prefill"}
        assert registry_name(type(decode(bytes.fromhex(line["frame"])[4:]))) == line["message"]


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=name)
def test_the_outcome_is_what_the_frames_say(conversation):
    results = [m for m in messages(conversation) if isinstance(m, wire.KvAgentResult)]
    whole = [m for m in results if m.chunk == wire.WHOLE]
    outcome = conversation["outcome"]
    assert (outcome == "refused") == any(isinstance(m, wire.Refuse) for m in messages(conversation))
    assert (outcome == "done") == any(m.last and m.status is wire.Status.OK for m in results)
    assert (outcome == "stopped") == any(m.status not in (wire.Status.OK, wire.Status.IN_DOUBT) for m in whole)
    final = [m for m in results if m.status is not wire.Status.IN_DOUBT]  # which a later one may settle
    assert sum(m.last for m in final) == (outcome in {"done", "stopped"})
    assert len({m.transfer for m in messages(conversation) if isinstance(m, wire.Fetch)}) <= 1


@pytest.mark.parametrize("conversation", OPENED, ids=name)
def test_two_sessions_write_the_same_handshake(conversation):
    secret = bytes.fromhex(SETTING["secret"])
    hello, welcome = messages(conversation)[:2]
    assert isinstance(hello, wire.Hello)
    assert isinstance(welcome, wire.Welcome)
    client = session(Role.CLIENT, hello, secret)
    server = session(Role.SERVER, welcome, secret)
    ends = {"decode": client, "prefill": server}
    events = []
    for line in conversation["frames"][:4]:
        sender, receiver = ends[line["from"]], ends["prefill" if line["from"] == "decode" else "decode"]
        out = sender.take_output()
        assert out.hex() == line["frame"]
        events += receiver.receive(out, 1.0)
    assert [type(event) for event in events] == [Opened, Opened]
    assert client.state is server.state is State.OPEN
    for side, receiver in (("decode", server), ("prefill", client)):
        after = [line for line in conversation["frames"][4:] if line["from"] == side]
        received = [event for line in after for event in receiver.receive(bytes.fromhex(line["frame"]), 2.0)]
        assert received == [m for m in messages({"frames": after}) if m is not None]


FETCHED = [c for c in CONVERSATIONS if any(isinstance(m, wire.Fetch) for m in messages(c))]


class Played:
    """The machines of a transfer, to which a script is played: each must say what its side says there."""

    def __init__(self, fetch):
        self.receiving = Receiving(fetch.transfer, ahead=fetch.lease_ms > 0, staged_ahead=fetch.ring_chunks)
        self.sending = Sending(fetch)
        self.sent, self.total = [], 0

    def said(self, messages):
        self.sent += messages

    def moved(self, upto, timings):
        """So many chunks have arrived."""
        if fresh := upto - self.sending.arrived:
            self.said(self.sending.chunks_arrived(upto, fresh * self.total // self.sending.chunks, timings))

    def play(self, message):
        sending, receiving = self.sending, self.receiving
        match message:
            case wire.Accept():
                self.said(sending.accept(message))
                receiving.on_accept(message)
                self.total = message.bytes
            case wire.Refuse():
                self.said(sending.refuse(message.code, message.reason))
                receiving.on_refuse(message)
            case wire.Ready():
                if sending.state is SendState.PARKED:
                    self.said([message])  # the shell's own: the grant is void
                else:
                    self.said(sending.announce(message.chunks, message.lease_ms, message.spans, message.generation))
                receiving.on_ready(message)
            case wire.Reserve():
                sending.on_reserve(message)
                if receiving.arrived > receiving.chunks_done:
                    receiving.chunks_landed(receiving.arrived)
                given = message.generation, message.ring, message.copied, message.token
                granted = receiving.grant(message.chunks, message.lease_ms, *given)
                assert granted == [message]
            case wire.Read():
                sending.on_read(message)
                receiving.begin_reads(message.chunks)
                assert receiving.chunks_read(message.chunks) == [message]
            case wire.Arrived():
                self.moved(message.chunks, message.timings)
                self.said(sending.take_news())
                assert receiving.on_arrived(message)
            case wire.KvAgentResult(status=wire.Status.OK):
                self.moved(sending.granted, message.timings)
                self.said(sending.finish_offer(message.payload))
                assert receiving.on_result(message) is not None
            case wire.KvAgentResult():
                failure = Failure(wire.Status.CANCELLED, message.code, message.reason)
                if message.status is wire.Status.IN_DOUBT:
                    self.said(sending.on_unread(in_doubt=True))
                elif sending.state is SendState.ENDED:
                    self.said([message])  # the shell's own: it answers Cancel for what has ended
                else:
                    self.said(sending.stop(failure))
                    if message.chunk != wire.WHOLE:
                        self.said(sending.give_up_waiting())
                    elif sending.moving:
                        self.said(sending.chunks_dropped(sending.moving))
                assert receiving.on_result(message) is not None
            case wire.Abandon() | wire.Cancel():
                failure = Failure(wire.Status.CANCELLED, message.code, "")
                reads = isinstance(message, wire.Abandon)
                said = receiving.reads_ended() or receiving.cancel(failure, reading=reads)
                assert said == [message]
                if not reads:
                    self.said(sending.on_unread())
            case _:
                pass


@pytest.mark.parametrize("conversation", FETCHED, ids=name)
def test_the_machines_of_a_transfer_say_the_same(conversation):
    played = None
    told = []
    for line in conversation["frames"]:
        message = decode(bytes.fromhex(line["frame"])[4:])
        if isinstance(message, wire.Fetch):
            played = Played(message)
        elif played:
            told += (
                [message]
                if isinstance(message, wire.Accept | wire.Refuse | wire.Ready | wire.Arrived | wire.KvAgentResult)
                else []
            )
            played.play(message)
    assert played
    assert played.sent == told
    done = conversation["outcome"] == "done"
    if done and played.receiving.arrived > played.receiving.chunks_done:
        played.receiving.chunks_landed(played.receiving.arrived)
    assert played.receiving.ended
    assert (played.receiving.failure is None) == done


@pytest.mark.parametrize(("script", "role"), [("decode", Role.CLIENT), ("prefill", Role.SERVER)])
def test_a_session_notices_a_version_mismatch(script, role):
    conversation = next(c for c in CONVERSATIONS if c["name"] == f"version_mismatch_seen_by_{script}")
    own = messages(CONVERSATIONS[0])[0 if role is Role.CLIENT else 1]
    side = session(role, own, None)
    other = "prefill" if script == "decode" else "decode"
    with pytest.raises(MismatchError, match=r"no common protocol version: 2\.\.2 here, 3\.\.3 there"):
        list(side.receive(sent(conversation, other), 1.0))
    assert side.state is State.CLOSED


def test_a_session_refuses_somebody_else():
    conversation = next(c for c in CONVERSATIONS if c["name"] == "not_the_same_process")
    hello, welcome, _, goodbye = messages(conversation)
    assert isinstance(goodbye, wire.Goodbye)
    server = session(Role.SERVER, welcome, bytes.fromhex(SETTING["secret"]))
    with pytest.raises(IdentityError, match=goodbye.reason):
        list(server.receive(sent(conversation, "decode"), 1.0))
    answered = list(FrameReader(SESSION_FRAME_LIMIT).feed(server.take_output()))
    assert [type(message) for message in answered] == [wire.Welcome, wire.Goodbye]
    assert answered[1] == goodbye
    client = session(Role.CLIENT, hello, bytes.fromhex(SETTING["secret"]))
    with pytest.raises(IdentityError, match=goodbye.reason):
        list(client.receive(sent(conversation, "prefill"), 1.0))
