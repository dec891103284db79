"""The prefill side of a transfer: every entry of its table, what it promises, and what it refuses."""
# fields of messages whose type the test has fixed
# pyright: reportAttributeAccessIssue=false

import pytest

from kvxfer.errors import Code, ProtocolError
from kvxfer.protocol.messages import (
    WHOLE,
    Accept,
    Fetch,
    Grant,
    KvAgentResult,
    Landed,
    Refuse,
    Reserve,
    Route,
    Span,
    Status,
    Sums,
    TicketRef,
    Timings,
    Want,
)
from kvxfer.protocol.packing import pack_u32
from kvxfer.protocol.sending import SEND_TRANSITIONS, Failure, Sending, SendState, build_result

STOP = Failure(Status.EXPIRED, Code.TICKET_EXPIRED, "the lease ran out")
SECOND = Failure(Status.CANCELLED, Code.CANCELLED, "cancelled")
OK = KvAgentResult(9, WHOLE, Status.OK, 0, True, payload=b"token")


def make(chunks=3, route=Route.STAGED, *, wanted=(), moving=(), payload=None):
    """A transfer that was accepted, with chunks announced and granted."""
    sending = Sending(Fetch(9, TicketRef("r", 0, b"m"), [], [], 0, 1, [route], 1, 1))
    sending.accept(accept(chunks, route))
    sending.ready([*wanted, *moving])
    if route is Route.PULL:
        sending.landed(Landed(9, pack_u32(moving)))
    elif moving:
        sending.reserve(reserve(*moving))
    if payload is not None:
        sending.finish_offer(payload)
    return sending


def parked():
    return Sending(Fetch(9, TicketRef("r", 0, b"m"), [], [], 0, 1, [Route.STAGED], 1, 1))


def accept(chunks=3, route=Route.STAGED):
    return Accept(9, route, 1, [], 1, 1, chunks, b"")


def reserve(*chunks):
    return Reserve(9, [Grant(chunk, 4096 * chunk, 64) for chunk in chunks], 1000)


def stopping():
    sending = make(moving=[0])
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
    sending = make(moving=[0])
    assert sending.stop(STOP) == []
    assert sending.state is SEND_TRANSITIONS[SendState.MOVING, "stop"]
    assert sending.stop(SECOND) == []
    assert sending.state is SEND_TRANSITIONS[SendState.STOPPING, "stop"]
    (result,) = sending.dropped(0)
    assert (result.status, result.code, result.reason) == (STOP.status, STOP.code, STOP.reason)  # the first reason
    assert sending.state is SEND_TRANSITIONS[SendState.STOPPING, "finish"]


def test_success_is_finish():
    sending = make(1, moving=[0], payload=b"token")
    sending.moved(0, 64, Timings())
    assert sending.state is SEND_TRANSITIONS[SendState.MOVING, "finish"]


def test_the_table_has_no_entry_that_is_not_tried():
    tried = {(state, event) for state in SendState for event in EVENTS}
    tried |= {(SendState.STOPPING, "finish"), (SendState.MOVING, "finish")}
    assert set(SEND_TRANSITIONS) <= tried


def test_a_machine_only_moves_by_its_table(monkeypatch):
    monkeypatch.setattr("kvxfer.protocol.sending.SEND_TRANSITIONS", {})
    for event in EVENTS.values():
        with pytest.raises(ProtocolError, match="is illegal for a transfer that is parked"):
            event(parked())


# --- before it moves


def test_accept_and_refuse():
    sending = parked()
    assert sending.accept(accept(2)) == [accept(2)]
    assert sending.route is Route.STAGED
    refused = parked()
    assert refused.refuse(Code.TOO_MANY, "x" * 2000, retry_after_ms=5) == [Refuse(9, Code.TOO_MANY, "x" * 1024, 5)]


def test_what_does_not_end_is_said_of_a_chunk_which_promises_nothing():
    sending = make(moving=[1])
    assert sending.overdue() == []
    assert sending.stop(STOP) == []
    (said,) = sending.overdue()
    assert (said.chunk, said.status, said.code, said.last) == (1, Status.EXPIRED, Code.TICKET_EXPIRED, False)
    (last,) = sending.dropped(1)
    assert (last.chunk, last.status, last.last) == (WHOLE, Status.EXPIRED, True)
    assert sending.overdue() == []


def test_what_a_puller_does_not_end_is_not_ours():
    sending = parked()
    sending.accept(accept(2, route=Route.PULL))
    sending.ready([0])
    assert len(sending.stop(STOP)) == 1
    assert sending.state is SendState.STOPPING
    assert sending.overdue() == []


def test_a_parked_fetch_is_stopped_at_once():
    sending = parked()
    (result,) = sending.stop(STOP)
    assert result == build_result(9, Status.EXPIRED, last=True, failure=STOP)
    assert sending.stop(SECOND) == []


def test_a_chunk_is_announced_once():
    sending = make(3)
    assert sending.ready([0, 2, 0]) == [Want(9, pack_u32([0, 2]), 0)]
    assert sending.ready([0, 1, 2], 50) == [Want(9, pack_u32([1]), 50)]
    assert sending.ready([0, 1, 2]) == []


def test_blocks_are_named_with_the_chunks_in_them():
    sending, more = make(3), [Span("attention", 0, pack_u32([7]))]
    assert sending.ready([1], spans=more) == [Want(9, pack_u32([1]), 0, more)]


@pytest.mark.parametrize("state", [SendState.PARKED, SendState.STOPPING, SendState.ENDED])
def test_nothing_is_announced_unless_it_moves(state):
    assert STATES[state]().ready([1]) == []


# --- grants


@pytest.mark.parametrize(
    ("grants", "found"),
    [([1], "waiting"), ([7], "unknown"), ([2], "moving"), ([WHOLE], "unknown")],
)
def test_a_wrong_grant_is_a_protocol_error_and_takes_nothing(grants, found):
    sending = make(3, wanted=[0], moving=[2])
    with pytest.raises(ProtocolError, match=rf"chunk {grants[0]} of transfer 9 is {found}, not wanted"):
        sending.reserve(reserve(0, *grants))
    assert sending.moving == 1
    sending.stop(STOP)
    (result,) = sending.moved(2, 64, Timings())[1:]  # it ends: chunk 0 never came into our hands
    assert result.status is Status.EXPIRED


def test_a_chunk_granted_twice_in_one_message():
    sending = make(3, wanted=[0])
    with pytest.raises(ProtocolError, match="twice"):
        sending.reserve(reserve(0, 0))
    assert sending.moving == 0


def test_a_grant_before_accept_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="unknown"):
        parked().reserve(reserve(0))
    with pytest.raises(ProtocolError, match="pull"):
        parked().landed(Landed(9, pack_u32([0])))


@pytest.mark.parametrize("state", [SendState.STOPPING, SendState.ENDED])
def test_grants_that_cross_our_stop_are_ignored(state):
    sending = STATES[state]()
    before = sending.moving
    assert sending.reserve(reserve(0, 99)) == []
    assert sending.landed(Landed(9, pack_u32([0, 99]))) == []
    assert sending.moving == before


def test_messages_of_another_route():
    with pytest.raises(ProtocolError, match="pull"):
        make(wanted=[0]).landed(Landed(9, pack_u32([0])))
    with pytest.raises(ProtocolError, match="pull"):
        make(route=Route.PULL, wanted=[0]).reserve(reserve(0))


# --- success


def test_the_last_chunk_carries_the_payload():
    sending = make(2, moving=[0, 1], payload=b"token")
    timings = Timings(wire_us=5)
    assert sending.moved(1, 64, timings) == [build_result(9, Status.OK, chunk=1, nbytes=64, timings=timings)]
    assert sending.moved(0, 32, Timings()) == [
        build_result(9, Status.OK, chunk=0, nbytes=32, last=True, payload=b"token")
    ]
    assert sending.state is SendState.ENDED
    assert sending.finish_offer(b"token") == []


def test_a_payload_that_comes_later_has_a_result_of_its_own():
    sending = make(1, moving=[0])
    assert [message.last for message in sending.moved(0, 64, Timings())] == [False]
    assert sending.finish_offer(b"token") == [OK]
    assert sending.finish_offer(b"token") == []
    assert sending.state is SendState.ENDED


@pytest.mark.parametrize("first", ["accept", "finish"])
def test_a_transfer_without_chunks_succeeds(first):
    sending = parked()
    messages = [] if first == "accept" else sending.finish_offer(b"token")
    messages += sending.accept(accept(0))
    messages += [] if first == "finish" else sending.finish_offer(b"token")
    assert messages == [accept(0), OK]


@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_only_a_chunk_in_our_hands_can_be_reported(chunk):
    sending = make(3, wanted=[0])
    with pytest.raises(ProtocolError):
        sending.moved(chunk, 64, Timings())
    with pytest.raises(ProtocolError):
        sending.dropped(chunk)
    moving = make(3, moving=[0])
    moving.moved(0, 64, Timings())
    with pytest.raises(ProtocolError, match="moved, not moving"):
        moving.moved(0, 64, Timings())


# --- giving up


def test_the_terminal_result_waits_for_every_chunk_in_our_hands():
    sending = make(3, wanted=[2], moving=[0, 1])
    assert sending.stop(STOP) == []
    assert [m.chunk for m in sending.moved(1, 64, Timings())] == [1]
    (terminal,) = sending.dropped(0)
    assert terminal == build_result(9, Status.EXPIRED, last=True, failure=STOP)
    assert sending.state is SendState.ENDED


def test_success_in_the_last_moment_does_not_undo_a_stop():
    sending = make(1, moving=[0], payload=b"token")
    sending.stop(STOP)
    chunk, terminal = sending.moved(0, 64, Timings())
    assert (chunk.status, chunk.last, chunk.payload) == (Status.OK, False, b"")
    assert (terminal.status, terminal.last, terminal.payload) == (Status.EXPIRED, True, b"")


def test_doubt_is_said_whatever_the_reason():
    sending = make(2, moving=[0, 1])
    sending.stop(STOP)
    sending.dropped(0, in_doubt=True)
    assert sending.in_doubt
    (terminal,) = sending.dropped(1)
    assert (terminal.status, terminal.chunk, terminal.code) == (Status.IN_DOUBT, WHOLE, STOP.code)


def test_a_dropped_chunk_ends_the_transfer_by_itself():
    sending = make(3, wanted=[2], moving=[0, 1])
    assert sending.dropped(0) == []
    assert sending.state is SendState.STOPPING
    (terminal,) = sending.dropped(1)
    assert (terminal.status, terminal.code, terminal.reason) == (
        Status.FAILED, Code.FAILED, "chunk 0 could not be moved",
    )  # fmt: skip


def test_long_reasons_fit_into_the_message():
    (result,) = parked().stop(Failure(Status.FAILED, Code.FAILED, "y" * 5000))
    assert result.reason == "y" * 1024


# --- pull


def test_pull_from_want_to_last():
    sending = make(2, Route.PULL, wanted=[0, 1], payload=b"token")
    assert sending.being_read
    assert sending.landed(Landed(9, pack_u32([1]))) == [1]
    assert sending.moved(1, 64, Timings())[0].last is False
    assert sending.being_read
    assert sending.landed(Landed(9, pack_u32([0]))) == [0]
    assert not sending.being_read
    assert sending.moved(0, 64, Timings())[0].payload == b"token"


@pytest.mark.parametrize("chunks", [[0, 1], [0, 5], [0, 0]])
def test_a_wrong_landed_is_a_protocol_error_and_takes_nothing(chunks):
    sending = make(3, Route.PULL, wanted=[0])
    with pytest.raises(ProtocolError):
        sending.landed(Landed(9, pack_u32(chunks)))
    assert sending.moving == 0
    assert sending.being_read


def test_pull_asks_the_reader_to_stop_and_waits_for_its_word():
    sending = make(3, Route.PULL, wanted=[1, 2])
    (asked,) = sending.stop(STOP)
    assert (asked.chunk, asked.status, asked.last) == (1, Status.EXPIRED, False)
    assert sending.stop(SECOND) == []
    assert sending.state is SendState.STOPPING
    (terminal,) = sending.unread()
    assert (terminal.chunk, terminal.status) == (WHOLE, Status.EXPIRED)
    assert sending.unread() == []


def test_a_silent_reader_leaves_doubt():
    sending = make(3, Route.PULL, wanted=[1], moving=[2])
    sending.stop(STOP)
    assert sending.unread(in_doubt=True) == []  # chunk 2 is still ours to confirm
    (_, terminal) = sending.moved(2, 64, Timings())
    assert terminal.status is Status.IN_DOUBT
    assert sending.in_doubt


def test_a_cancel_says_that_nothing_is_read_any_more():
    sending = make(2, Route.PULL, wanted=[0, 1])
    assert sending.unread() == []
    (terminal,) = sending.stop(SECOND)
    assert (terminal.chunk, terminal.status) == (WHOLE, Status.CANCELLED)


def test_sums_come_before_the_result_of_their_chunk():
    sending = make(2, moving=[0, 1], payload=b"token")
    sums, result = sending.moved(1, 64, Timings(), b"12345678")
    assert sums == Sums(9, 1, b"12345678")
    assert (result.chunk, result.status, result.last) == (1, Status.OK, False)
    (last,) = sending.moved(0, 64, Timings())
    assert last.last
