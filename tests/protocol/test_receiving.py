"""The decode side of a transfer: every entry of its table, what it believes, and what it refuses."""
# failures that are there
# pyright: reportOptionalMemberAccess=false

import pytest

from kvxfer.errors import Code, ProtocolError
from kvxfer.protocol.messages import (
    WHOLE,
    Accept,
    Cancel,
    Grant,
    KvAgentResult,
    Landed,
    Refuse,
    Reserve,
    Route,
    Status,
    Want,
)
from kvxfer.protocol.packing import pack_u32
from kvxfer.protocol.receiving import RECEIVE_TRANSITIONS, ReceiveState, Receiving
from kvxfer.protocol.sending import Failure, build_result

WHY = Failure(Status.CANCELLED, Code.CANCELLED, "the caller cancelled")
GONE = Failure(Status.FAILED, Code.PEER_LOST, "the stream was closed")
THERE = Failure(Status.EXPIRED, Code.TICKET_EXPIRED, "the lease ran out")
TERMINAL = build_result(5, Status.EXPIRED, last=True, failure=THERE)
DOUBT = build_result(5, Status.IN_DOUBT, last=True, failure=THERE)


def ok(chunk=WHOLE, *, last=False, payload=b""):
    return build_result(5, Status.OK, chunk=chunk, last=last, payload=payload)


def want(*chunks):
    return Want(5, pack_u32(chunks))


def make(chunks=3, *, wanted=(), granted=(), landed=(), done=()):
    receiving = Receiving(5)
    receiving.accept(Accept(5, Route.STAGED, 1, [], 1, 1, chunks, b""))
    receiving.wanted(want(*wanted, *granted, *landed, *done))
    receiving.grant([Grant(chunk, 0, 64) for chunk in (*granted, *landed, *done)], 1000)
    for chunk in (*landed, *done):
        assert receiving.result(ok(chunk)) == chunk
    for chunk in done:
        receiving.chunk_done(chunk)
    return receiving


def stopping():
    receiving = make(granted=[0])
    receiving.cancel(WHY)
    return receiving


def done():
    receiving = make(1, landed=[0])
    receiving.result(ok(last=True))
    receiving.chunk_done(0)
    return receiving


def stopped():
    receiving = make()
    receiving.result(TERMINAL)
    return receiving


def lost():
    receiving = make(granted=[0])
    receiving.lost(GONE)
    return receiving


STATES = {
    ReceiveState.ASKED: lambda: Receiving(5),
    ReceiveState.MOVING: lambda: make(granted=[0]),
    ReceiveState.STOPPING: stopping,
    ReceiveState.DONE: done,
    ReceiveState.STOPPED: stopped,
    ReceiveState.LOST: lost,
}
FINAL = (ReceiveState.DONE, ReceiveState.STOPPED)


def complete(receiving):
    if receiving.state is ReceiveState.MOVING:
        receiving.result(ok(0))
        receiving._chunks = receiving._chunks[:1]
        receiving.result(ok(last=True))
        receiving.chunk_done(0)
    else:
        receiving._event("complete")


EVENTS = {
    "accept": lambda receiving: receiving.accept(Accept(5, Route.STAGED, 1, [], 1, 1, 1, b"")),
    "complete": complete,
    "terminal": lambda receiving: receiving.result(TERMINAL),
    "cancel": lambda receiving: receiving.cancel(WHY),
    "lost": lambda receiving: receiving.lost(GONE),
    "resume": lambda receiving: receiving.resume(),
}
IGNORED = {  # no entry in the table, and no error: it merely crossed something, or says nothing new
    *((state, "accept") for state in ReceiveState if state is not ReceiveState.ASKED),
    *((state, event) for state in FINAL for event in ("terminal", "cancel", "lost")),
    (ReceiveState.LOST, "cancel"),
}


# --- the table


@pytest.mark.parametrize("state", list(ReceiveState), ids=lambda state: state.value)
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_in_every_state(state, event):
    receiving = STATES[state]()
    assert receiving.state is state
    following = RECEIVE_TRANSITIONS.get((state, event))
    if following is None and (state, event) not in IGNORED:
        with pytest.raises(ProtocolError, match=f"{event} is illegal for a transfer that is {state.value}"):
            EVENTS[event](receiving)
        following = state
    else:
        EVENTS[event](receiving)
    assert receiving.state is (following or state)


def test_the_table_has_no_other_events():
    assert {event for _, event in RECEIVE_TRANSITIONS} == set(EVENTS)
    assert not IGNORED & set(RECEIVE_TRANSITIONS)
    assert {state for state, _ in RECEIVE_TRANSITIONS}.isdisjoint(FINAL)


# --- chunks


def test_wanted_granted_landed_done():
    receiving = make(2)
    assert receiving.wanted(want(1)) == [1]
    grants = [Grant(1, 4096, 64)]
    assert receiving.grant(grants, 1000, 7) == [Reserve(5, grants, 1000, 7)]
    assert receiving.granted == [1]
    assert receiving.result(ok(1)) == 1
    assert (receiving.granted, receiving.outstanding) == ([], 1)
    receiving.chunk_done(1)
    assert receiving.outstanding == 0
    assert receiving.state is ReceiveState.MOVING


@pytest.mark.parametrize("chunks", [[0, 0], [0, 3], [0, 1]], ids=["twice", "unknown", "announced before"])
def test_a_wrong_want_is_a_protocol_error_and_changes_nothing(chunks):
    receiving = make(3, wanted=[1])
    with pytest.raises(ProtocolError):
        receiving.wanted(want(*chunks))
    assert receiving.wanted(want(0)) == [0]


def test_a_wrong_want_voids_nothing_that_was_granted_ahead():
    receiving = Receiving(5, ahead=True)
    with pytest.raises(ProtocolError, match="chunk 0 of transfer 5 is unknown, not open"):
        receiving.wanted(want(0))
    assert receiving.exposed
    receiving.lost(GONE)
    assert receiving.exposed


def test_want_before_accept_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="unknown"):
        Receiving(5).wanted(want(0))


@pytest.mark.parametrize("state", [ReceiveState.STOPPING, ReceiveState.LOST, *FINAL])
def test_want_that_crosses_a_cancel_is_ignored(state):
    assert STATES[state]().wanted(want(1, 99)) == []


def test_only_wanted_chunks_are_granted():
    receiving = make(3, wanted=[0], granted=[1])
    for chunks in ([0, 1], [0, 2], [0, 9], [0, 0]):
        with pytest.raises(ProtocolError):
            receiving.grant([Grant(chunk, 0, 0) for chunk in chunks], 1000)
        with pytest.raises(ProtocolError):
            receiving.reading(chunks)
    assert receiving.granted == [1]


@pytest.mark.parametrize("state", [state for state in ReceiveState if state is not ReceiveState.MOVING])
def test_nothing_is_granted_unless_it_moves(state):
    receiving = STATES[state]()
    with pytest.raises(ProtocolError, match=f"grant is illegal for a transfer that is {state.value}"):
        receiving.grant([], 1000)
    with pytest.raises(ProtocolError, match=f"read is illegal for a transfer that is {state.value}"):
        receiving.reading([])


def test_a_read_is_confirmed_only_after_it_was_reported():
    receiving = make(2, wanted=[0, 1])
    receiving.reading([0])
    assert receiving.outstanding == 1
    assert receiving.granted == []
    with pytest.raises(ProtocolError, match="reading, not granted"):
        receiving.result(ok(0))  # our read is still under way: success now would be a lie
    with pytest.raises(ProtocolError):
        receiving.landed([1])
    assert receiving.landed([0]) == [Landed(5, pack_u32([0]))]
    assert receiving.result(ok(0)) == 0


@pytest.mark.parametrize(("chunk", "found"), [(0, "open"), (1, "wanted"), (9, "unknown")])
def test_a_chunk_that_was_never_granted_cannot_have_landed(chunk, found):
    receiving = make(3, wanted=[1])
    with pytest.raises(ProtocolError, match=f"is {found}, not granted"):
        receiving.result(ok(chunk))


def test_only_a_landed_chunk_is_done():
    receiving = make(3, granted=[0], landed=[1], done=[2])
    for chunk in (0, 2, 9):
        with pytest.raises(ProtocolError):
            receiving.chunk_done(chunk)


def test_duplicates_and_late_results_are_counted_and_change_nothing():
    receiving = make(2, landed=[0], done=[1])
    assert receiving.result(ok(0)) is None
    assert receiving.result(ok(1)) is None
    assert receiving.result(build_result(5, Status.FAILED, chunk=1, failure=THERE)) is None
    assert (receiving.stale, receiving.failure, receiving.state) == (3, None, ReceiveState.MOVING)
    ended = done()
    for late in (ok(0), ok(last=True, payload=b"other"), TERMINAL, DOUBT, ok(99)):
        assert ended.result(late) is None
    assert (ended.stale, ended.state, ended.payload) == (5, ReceiveState.DONE, b"")


def test_a_failed_chunk_stays_granted():
    receiving = make(2, granted=[0])
    assert receiving.result(build_result(5, Status.FAILED, chunk=0, failure=THERE)) is None
    assert receiving.granted == [0]
    assert (receiving.failure.code, receiving.failure.reason) == (THERE.code, THERE.reason)


def test_a_transfer_with_a_failed_chunk_is_never_done():
    receiving = make(1, granted=[0])
    receiving.result(build_result(5, Status.FAILED, chunk=0, failure=THERE))
    receiving.result(ok(0, last=True))
    receiving.chunk_done(0)
    assert receiving.state is ReceiveState.MOVING


# --- the end


@pytest.mark.parametrize("order", ["result first", "copy first"])
def test_done_needs_every_chunk_in_place_and_the_last_result(order):
    receiving = make(2, landed=[0], done=[1])
    steps = [lambda: receiving.result(ok(last=True, payload=b"token")), lambda: receiving.chunk_done(0)]
    for step in steps if order == "result first" else reversed(steps):
        assert receiving.state is ReceiveState.MOVING
        step()
    assert receiving.state is ReceiveState.DONE
    assert receiving.payload == b"token"
    assert receiving.failure is None


def test_the_last_chunk_may_carry_the_last_result():
    receiving = make(2, granted=[0], done=[1])
    assert receiving.result(ok(0, last=True, payload=b"token")) == 0
    assert receiving.state is ReceiveState.MOVING
    receiving.chunk_done(0)
    assert (receiving.state, receiving.payload) == (ReceiveState.DONE, b"token")


def test_no_chunks_at_all():
    receiving = make(0)
    receiving.result(ok(last=True))
    assert receiving.state is ReceiveState.DONE


@pytest.mark.parametrize("also", [{"wanted": [0]}, {"granted": [0]}, {}], ids=["wanted", "granted", "open"])
@pytest.mark.parametrize("on", ["whole", "chunk"])
def test_complete_too_early_is_a_protocol_error(also, on):
    receiving = make(2, **also)
    if on == "chunk":
        receiving.wanted(want(1))
        receiving.grant([Grant(1, 0, 64)], 1000)
    with pytest.raises(ProtocolError, match="complete before every chunk had landed"):
        receiving.result(ok(1 if on == "chunk" else WHOLE, last=True, payload=b"token"))
    assert (receiving.state, receiving.payload) == (ReceiveState.MOVING, b"")
    assert receiving.result(build_result(5, Status.FAILED, last=True, failure=THERE)) is None
    assert receiving.state is ReceiveState.STOPPED


def test_complete_before_accept_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="complete before"):
        Receiving(5).result(ok(last=True))


def test_the_first_last_result_stands():
    receiving = make(1, granted=[0])
    receiving.result(ok(0, last=True, payload=b"token"))
    for late in (ok(last=True, payload=b""), TERMINAL, DOUBT):
        receiving.result(late)
    receiving.chunk_done(0)
    assert (receiving.state, receiving.payload, receiving.stale) == (ReceiveState.DONE, b"token", 3)


@pytest.mark.parametrize("status", [Status.FAILED, Status.CANCELLED, Status.EXPIRED, Status.UNKNOWN])
def test_a_terminal_result_ends_it(status):
    receiving = make(granted=[0])
    receiving.result(KvAgentResult(5, WHOLE, status, 0, True, Code.FAILED, "x"))
    assert receiving.ended
    assert receiving.failure == Failure(status, Code.FAILED, "x")


def test_doubt_is_lost_until_it_is_settled():
    receiving = make(granted=[0])
    receiving.result(DOUBT)
    assert receiving.state is ReceiveState.LOST
    assert receiving.failure == Failure(Status.IN_DOUBT, THERE.code, THERE.reason)
    assert receiving.granted == [0]
    assert receiving.resume() == [Cancel(5, Code.PEER_LOST)]
    receiving.result(DOUBT)
    assert receiving.state is ReceiveState.LOST
    receiving.result(TERMINAL)
    assert receiving.state is ReceiveState.STOPPED


@pytest.mark.parametrize("state", [ReceiveState.ASKED, ReceiveState.STOPPING, ReceiveState.LOST])
def test_refused(state):
    receiving = STATES[state]()
    before = receiving.failure
    receiving.refused(Refuse(5, Code.TOO_MANY, "busy"))
    assert receiving.state is ReceiveState.STOPPED
    assert receiving.failure == (before or Failure(Status.FAILED, Code.TOO_MANY, "busy"))
    receiving.refused(Refuse(5, Code.DRAINING, "again"))
    assert receiving.failure.code is not Code.DRAINING


# --- cancelling, and a lost session


def test_cancel_is_said_once():
    receiving = make(granted=[0])
    assert receiving.cancel(WHY) == [Cancel(5, Code.CANCELLED)]
    assert receiving.cancel(GONE) == []
    assert receiving.failure == WHY
    assert not receiving.accept(Accept(5, Route.STAGED, 1, [], 1, 1, 9, b""))


def test_chunks_that_land_while_it_is_stopped_leave_the_peers_hands():
    receiving = stopping()
    assert receiving.result(ok(0)) == 0
    assert receiving.granted == []
    receiving.chunk_done(0)
    assert receiving.state is ReceiveState.STOPPING


@pytest.mark.parametrize("state", [ReceiveState.STOPPING, ReceiveState.LOST])
@pytest.mark.parametrize("on", [0, WHOLE])
def test_success_that_crosses_a_cancel_answers_it(state, on):
    receiving = STATES[state]()
    if on == WHOLE:
        receiving.result(ok(0))
    receiving.result(ok(on, last=True, payload=b"token"))
    assert receiving.state is ReceiveState.STOPPED
    assert receiving.failure is not None


def test_after_the_last_result_nothing_is_asked_and_nothing_is_in_doubt():
    receiving = make(1, granted=[0])
    receiving.result(ok(0, last=True, payload=b"token"))
    assert receiving.cancel(WHY) == []
    assert receiving.state is ReceiveState.STOPPED
    receiving.chunk_done(0)
    assert (receiving.state, receiving.failure) == (ReceiveState.STOPPED, WHY)


def test_a_session_that_is_lost_after_the_last_result_takes_nothing_away():
    receiving = make(1, granted=[0])
    receiving.result(ok(0, last=True, payload=b"token"))
    receiving.lost(WHY)
    assert not receiving.exposed
    receiving.chunk_done(0)
    assert (receiving.state, receiving.failure) == (ReceiveState.DONE, None)


def test_a_lost_session_may_be_lost_again():
    receiving = lost()
    receiving.lost(WHY)
    assert receiving.failure == GONE
    assert receiving.resume() == [Cancel(5, Code.PEER_LOST)]
    receiving.lost(WHY)
    assert receiving.state is ReceiveState.LOST
    assert receiving.cancel(WHY) == []
    receiving.resume()
    receiving.result(TERMINAL)
    assert receiving.state is ReceiveState.STOPPED
