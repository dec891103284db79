"""The prefill side of a transfer: every entry of its table, what it promises, and what it refuses."""
# fields of messages whose type the test has fixed
# pyright: reportAttributeAccessIssue=false

import pytest

from kvxfer.errors import Code, ProtocolError
from kvxfer.protocol import messages as wire
from kvxfer.protocol.transfer import SEND_TRANSITIONS, Failure, Sending, SendState

STOP = Failure(wire.Status.EXPIRED, Code.TICKET_EXPIRED, "the lease ran out")
SECOND = Failure(wire.Status.CANCELLED, Code.CANCELLED, "cancelled")


def make(chunks=3, route=wire.Route.STAGED, *, wanted=0, moving=0, payload=None):
    """A transfer that was accepted, with so many chunks granted, and so many more announced."""
    sending = Sending(wire.Fetch(9, wire.TicketRef("r", 0, b"m"), [], [], 0, 1, [route], 1, 1))
    sending.accept(accept(chunks, route))
    sending.announce(moving + wanted)
    if route is wire.Route.PULL and moving:
        sending.on_read(wire.Read(9, moving))
    elif moving:
        sending.on_reserve(reserve(moving, places=chunks if route is wire.Route.STAGED else 0))
    if payload is not None:
        sending.finish_offer(payload)
    return sending


def parked(**granted):
    return Sending(wire.Fetch(9, wire.TicketRef("r", 0, b"m"), [], [], 0, 1, [wire.Route.STAGED], 1, 1, **granted))


def accept(chunks=3, route=wire.Route.STAGED, *, ahead=False):
    return wire.Accept(9, route, 1, [], 1, 1, chunks, b"", ahead=ahead)


def ring(places, start=0):
    return [wire.Place(4096 * (start + place), 64) for place in range(places)]


def reserve(chunks, *, places=0, start=0):
    return wire.Reserve(9, chunks, 1000, ring=ring(places, start))


def known(sending):
    """What it knows, for comparison."""
    counts = sending.state, sending.ready, sending.granted, sending.arrived, sending.moving, sending.nbytes
    return *counts, sending.being_read, sending.doubts, [*sending.ring], sending._ring_at


def stopping():
    sending = make(moving=1)
    sending.stop(STOP)
    return sending


def ended():
    sending = parked()
    sending.stop(STOP)
    return sending


STATES = {SendState.PARKED: parked, SendState.MOVING: make, SendState.STOPPING: stopping, SendState.ENDED: ended}
EVENTS = {
    "accept": lambda sending: sending.accept(accept()),
    "refuse": lambda sending: sending.refuse(Code.TOO_MANY, "no"),
    "stop": lambda sending: sending.stop(SECOND),
}


# --- the table


@pytest.mark.parametrize("state", list(SendState), ids=lambda state: state.value)
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_in_every_state(state, event):
    sending = STATES[state]()
    assert sending.state is state
    following = SEND_TRANSITIONS.get((state, event))
    if following is None and event != "stop":  # stop is idempotent
        with pytest.raises(ProtocolError, match=f"{event} is illegal for a transfer that is {state.value}"):
            EVENTS[event](sending)
        following = state
    else:
        EVENTS[event](sending)
    if (state, event) == (SendState.MOVING, "stop"):
        following = SendState.ENDED  # nothing was in flight, so it finished at once
    assert sending.state is (following or state)


def test_stopping_lasts_while_something_moves():
    sending = make(moving=1)
    assert sending.stop(STOP) == []
    assert sending.state is SEND_TRANSITIONS[SendState.MOVING, "stop"]
    assert sending.stop(SECOND) == []
    assert sending.state is SEND_TRANSITIONS[SendState.STOPPING, "stop"]
    (result,) = sending.chunks_dropped(1)
    assert (result.status, result.code, result.reason) == (STOP.status, STOP.code, STOP.reason)  # the first reason
    assert sending.state is SEND_TRANSITIONS[SendState.STOPPING, "finish"]


def test_success_is_finish():
    sending = make(1, moving=1, payload=b"token")
    sending.chunks_arrived(1, 64)
    assert sending.state is SEND_TRANSITIONS[SendState.MOVING, "finish"]


def test_the_table_has_no_entry_that_is_not_tried():
    tried = {(state, event) for state in SendState for event in EVENTS}
    tried |= {(SendState.STOPPING, "finish"), (SendState.MOVING, "finish")}
    assert set(SEND_TRANSITIONS) <= tried


def test_a_machine_only_moves_by_its_table(monkeypatch):
    monkeypatch.setattr("kvxfer.protocol.transfer.SEND_TRANSITIONS", {})
    for event in EVENTS.values():
        with pytest.raises(ProtocolError, match="is illegal for a transfer that is parked"):
            event(parked())


# --- before it moves


def test_accept_and_refuse():
    sending = parked()
    assert sending.accept(accept(2)) == [accept(2)]
    assert sending.route is wire.Route.STAGED
    refused = parked()
    assert refused.refuse(Code.TOO_MANY, "x" * 2000, retry_after_ms=5) == [wire.Refuse(9, Code.TOO_MANY, "x" * 1024, 5)]


def test_blocks_are_named_though_no_chunk_is_ready_for_them_and_the_count_does_not_fall():
    sending, more = make(3, wanted=2), [wire.Span("attention", 0, wire.pack_u32([7]))]
    assert sending.announce(1, spans=more) == [wire.Ready(9, 2, 0, more)]
    assert sending.ready == 2


# --- grants


def test_chunks_may_be_granted_for_which_there_is_no_place_yet_but_not_without_any():
    sending = make(4, wanted=4)
    before = known(sending)
    with pytest.raises(ProtocolError, match="no place to go to"):
        sending.on_reserve(reserve(1))
    assert known(sending) == before
    assert sending.on_reserve(reserve(4, places=2)) == range(4)
    assert sending.places(range(4)) == [*ring(2), *ring(2)]


def test_a_grant_says_how_many_chunks_have_left_their_places():
    sending = make(4, wanted=4)
    sending.on_reserve(reserve(2, places=2))
    with pytest.raises(ProtocolError, match="3 chunks of transfer 9 cannot have left"):
        sending.on_reserve(wire.Reserve(9, 3, 1000, 0, [], 3))
    assert (sending.granted, sending.copied) == (2, 0)
    assert sending.on_reserve(wire.Reserve(9, 2, 1000, 0, [], 1)) == range(
        0
    )  # our loop need not have heard that it arrived
    assert sending.on_reserve(wire.Reserve(9, 3, 1000)) == range(2, 3)  # which says nothing of it
    assert (sending.granted, sending.copied) == (3, 1)
    with pytest.raises(ProtocolError, match="another ring"):
        sending.on_reserve(wire.Reserve(9, 4, 1000, 0, ring(1), 2))
    assert sending.on_reserve(wire.Reserve(9, 4, 1000, 0, ring(1), 3)) == range(3, 4)


def test_in_place_no_chunk_leaves_a_place():
    sending = make(3, wire.Route.DIRECT, wanted=3)
    sending.on_reserve(reserve(2))
    with pytest.raises(ProtocolError, match="is written in place"):
        sending.on_reserve(wire.Reserve(9, 3, 1000, 0, [], 1))


def test_a_token_comes_with_a_ring():
    sending, token = make(4, wanted=4), bytes(range(1, 17))
    for places, wrong in ((2, token[:-1]), (2, bytes(16)), (0, token)):
        with pytest.raises(ProtocolError, match="token that names no turns"):
            sending.on_reserve(wire.Reserve(9, 1, 1000, 0, ring(places), 0, wrong))
    sending.on_reserve(wire.Reserve(9, 1, 1000, 0, ring(1), 0, token))
    sending.on_reserve(wire.Reserve(9, 2, 1000))
    assert sending.token == token
    sending.on_reserve(wire.Reserve(9, 3, 1000, 0, ring(1), 2))
    assert sending.token == b""


# --- giving up


def test_long_reasons_fit_into_the_message():
    (result,) = parked().stop(Failure(wire.Status.FAILED, Code.FAILED, "y" * 5000))
    assert result.reason == "y" * 1024
