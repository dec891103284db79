"""The prefill side of a transfer: every entry of its table, what it promises, and what it refuses."""
# fields of messages whose type the test has fixed
# pyright: reportAttributeAccessIssue=false

import pytest

from kvxfer.errors import Code, ProtocolError
from kvxfer.protocol import messages as wire
from kvxfer.protocol.transfer import SEND_TRANSITIONS, Failure, Sending, SendState

STOP = Failure(wire.Status.EXPIRED, Code.TICKET_EXPIRED, "the lease ran out")
SECOND = Failure(wire.Status.CANCELLED, Code.CANCELLED, "cancelled")


def parked():
    return Sending(wire.Fetch(9, wire.TicketRef("r", 0, b"m"), [], [], 0, 1, [wire.Route.STAGED], 1, 1))


def accept(chunks=3, route=wire.Route.STAGED):
    return wire.Accept(9, route, 1, [], 1, 1, chunks, b"")


def make(chunks=3, route=wire.Route.STAGED, *, announced=0):
    """A transfer that was accepted, of which so many chunks are announced."""
    sending = parked()
    sending.accept(accept(chunks, route))
    sending.announce(announced)
    return sending


def ring(places):
    return [wire.Place(4096 * place, 64) for place in range(places)]


def stopping():
    sending = make(announced=1)
    sending.on_reserve(wire.Reserve(9, 1, 1000, 0, ring(1)))
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
    sending = stopping()
    assert sending.state is SEND_TRANSITIONS[SendState.MOVING, "stop"]
    assert sending.stop(SECOND) == []
    assert sending.state is SEND_TRANSITIONS[SendState.STOPPING, "stop"]
    (result,) = sending.chunks_dropped(1)
    assert (result.status, result.code, result.reason) == (STOP.status, STOP.code, STOP.reason)  # the first reason
    assert sending.state is SEND_TRANSITIONS[SendState.STOPPING, "finish"]


def test_the_table_has_no_entry_that_is_not_tried():
    tried = {(state, event) for state in SendState for event in EVENTS}
    tried |= {(SendState.STOPPING, "finish"), (SendState.MOVING, "finish")}  # by the golden conversations
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
    sending, more = make(3, announced=2), [wire.Span("attention", 0, wire.pack_u32([7]))]
    assert sending.announce(1, spans=more) == [wire.Ready(9, 2, 0, more)]
    assert sending.ready == 2


# --- grants


def test_a_grant_says_how_many_chunks_have_left_their_places():
    sending = make(4, announced=4)
    sending.on_reserve(wire.Reserve(9, 2, 1000, 0, ring(2)))
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
    sending = make(3, wire.Route.DIRECT, announced=3)
    sending.on_reserve(wire.Reserve(9, 2, 1000))
    with pytest.raises(ProtocolError, match="is written in place"):
        sending.on_reserve(wire.Reserve(9, 3, 1000, 0, [], 1))


def test_a_token_comes_with_a_ring():
    sending, token = make(4, announced=4), bytes(range(1, 17))
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
