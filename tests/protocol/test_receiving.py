"""The decode side of a transfer: every entry of its table, what it believes, and what it refuses."""
# failures that are there
# pyright: reportOptionalMemberAccess=false

import pytest

from kvxfer.errors import Code, ProtocolError
from kvxfer.protocol import messages as wire
from kvxfer.protocol.transfer import RECEIVE_TRANSITIONS, Failure, ReceiveState, Receiving, build_result

WHY = Failure(wire.Status.CANCELLED, Code.CANCELLED, "the caller cancelled")
GONE = Failure(wire.Status.FAILED, Code.PEER_LOST, "the stream was closed")
THERE = Failure(wire.Status.EXPIRED, Code.TICKET_EXPIRED, "the lease ran out")
TERMINAL = build_result(5, wire.Status.EXPIRED, last=True, failure=THERE)
OK = build_result(5, wire.Status.OK, last=True)


def make(chunks=3, *, wanted=0, granted=0, landed=0, done=0):
    """So many are done, so many more have arrived, and so on."""
    receiving = Receiving(5)
    receiving.on_accept(wire.Accept(5, wire.Route.STAGED, 1, [], 1, 1, chunks, b""))
    receiving.on_ready(wire.Ready(5, done + landed + granted + wanted))
    if done + landed + granted:
        receiving.grant(done + landed + granted, 1000, ring=[wire.Place(0, 64)] * chunks)
    if done + landed:
        assert receiving.on_arrived(wire.Arrived(5, done + landed)) == range(done + landed)
    if done:
        receiving.chunks_landed(done)
    return receiving


def known(receiving):
    """What it knows, for comparison."""
    counts = receiving.ready, receiving.reading, receiving.granted, receiving.arrived, receiving.chunks_done
    said = receiving.heard_last, receiving.failure, receiving.payload
    return receiving.state, receiving.ended, receiving.ahead, receiving.exposed, counts, said


def stopping():
    receiving = make(granted=1)
    receiving.cancel(WHY)
    return receiving


def done():
    receiving = make(1, landed=1)
    receiving.on_result(OK)
    receiving.chunks_landed(1)
    return receiving


def stopped():
    receiving = make()
    receiving.on_result(TERMINAL)
    return receiving


def lost():
    receiving = make(granted=1)
    receiving.on_link_lost(GONE)
    return receiving


STATES = {
    ReceiveState.ASKED: lambda: Receiving(5),
    ReceiveState.MOVING: lambda: make(1, granted=1),
    ReceiveState.STOPPING: stopping,
    ReceiveState.DONE: done,
    ReceiveState.STOPPED: stopped,
    ReceiveState.LOST: lost,
}
FINAL = (ReceiveState.DONE, ReceiveState.STOPPED)


def complete(receiving):
    if receiving.state is ReceiveState.MOVING:
        receiving.on_result(OK)
        receiving.chunks_landed(1)
    else:
        receiving._event("complete")


EVENTS = {
    "accept": lambda receiving: receiving.on_accept(wire.Accept(5, wire.Route.STAGED, 1, [], 1, 1, 1, b"")),
    "complete": complete,
    "terminal": lambda receiving: receiving.on_result(TERMINAL),
    "cancel": lambda receiving: receiving.cancel(WHY),
    "lost": lambda receiving: receiving.on_link_lost(GONE),
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


@pytest.mark.parametrize(
    ("granted", "route", "chunks"),
    [
        ({}, wire.Route.DIRECT, 1),
        ({"ahead": True}, wire.Route.STAGED, 1),
        ({"ahead": True}, wire.Route.PULL, 1),
        ({"ahead": True, "staged_ahead": 1}, wire.Route.DIRECT, 1),
        ({"ahead": True, "staged_ahead": 1}, wire.Route.STAGED, 0),
    ],
)
def test_a_grant_ahead_covers_no_more_than_it_says(granted, route, chunks):
    receiving = Receiving(5, **granted)
    before = known(receiving)
    with pytest.raises(ProtocolError, match="under a grant that there is not"):
        receiving.on_accept(wire.Accept(5, route, 1, [], 1, 1, chunks, b"", ahead=True))
    assert known(receiving) == before


@pytest.mark.parametrize("chunks", [0, 1, 3, 9])
def test_only_what_is_wanted_is_granted_or_read_and_only_what_has_arrived_is_done(chunks):
    reading = make(4, wanted=2)
    reading.begin_reads(1)
    moves: list = [(reading, reading.begin_reads), ((done := make(3, granted=1, landed=1, done=1)), done.chunks_landed)]
    if chunks != 1:  # as many as before are granted again
        moves.append(((granted := make(4, wanted=1, granted=1)), lambda count: granted.grant(count, 1000)))
    for receiving, move in moves:
        before = known(receiving)
        with pytest.raises(ProtocolError, match=f"from 1 to {chunks} chunks of 2"):
            move(chunks)
        assert known(receiving) == before


@pytest.mark.parametrize("state", [state for state in ReceiveState if state is not ReceiveState.MOVING])
def test_nothing_is_granted_unless_it_moves(state):
    receiving = STATES[state]()
    before = known(receiving)
    with pytest.raises(ProtocolError, match=f"grant is illegal for a transfer that is {state.value}"):
        receiving.grant(2, 1000)
    with pytest.raises(ProtocolError, match=f"read is illegal for a transfer that is {state.value}"):
        receiving.begin_reads(2)
    assert known(receiving) == before


def test_cancel_is_said_once():
    receiving = make(granted=1)
    assert receiving.cancel(WHY) == [wire.Cancel(5, Code.CANCELLED)]
    assert receiving.cancel(GONE) == []
    assert receiving.failure == WHY
