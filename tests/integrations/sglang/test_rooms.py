"""What needs no engine: rows of metadata, pools as sglang tells of them, and the place where engines meet."""

import contextlib
import ctypes
import importlib.util
import json
import socket
import threading
import urllib.error
import urllib.request
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvxfer import errors
from kvxfer.blocking import Fetched, FetchFailed, OfferInDoubt, OfferReleased, OfferSettled
from kvxfer.integrations import sglang
from kvxfer.integrations.heads import Place
from kvxfer.integrations.sglang import meeting as module
from kvxfer.integrations.sglang.caches import MAX_ROW_BYTES, Rows, describe
from kvxfer.integrations.sglang.meeting import Engine, Meeting, ask, register
from kvxfer.integrations.sglang.rooms import Poll, Receiving, RoomFailedError, Rooms, Sending
from kvxfer.tickets import EngineCard, Issuer, RankCard, Ticket

CPU = torch.device("cpu")
CARD = EngineCard.of([RankCard(engine="prefill", rank=0, world=1, endpoint="unix:/run/a.sock", incarnation="00" * 32)])
ENGINE = Engine(0, 1, CARD.to_dict(), "11" * 32, 16, "bfloat16", by_room=True)


def test_a_row_travels_from_all_buffers_into_all_buffers():
    here, there = (
        [torch.zeros((4, 16), dtype=torch.int32), torch.zeros((4, 8), dtype=torch.float16)] for _ in range(2)
    )
    here[0][2], here[1][2] = torch.arange(16), torch.arange(8)

    def rows(buffers):
        return Rows([buffer.data_ptr() for buffer in buffers], [buffer[0].nbytes for buffer in buffers])

    row = rows(here).read(2)
    assert rows(there).write(3, row)
    assert torch.equal(there[0][3], here[0][2])
    assert torch.equal(there[1][3], here[1][2])
    assert not there[0][:3].any()
    before = [buffer.clone() for buffer in there]
    assert not rows(there).write(1, row[:-1])
    assert all(torch.equal(buffer, kept) for buffer, kept in zip(there, before, strict=True))


def test_a_row_that_is_too_long_is_refused():
    memory = (ctypes.c_uint8 * (MAX_ROW_BYTES + 1))()
    with pytest.raises(errors.ConfigError, match="or sampling masks"):
        Rows([ctypes.addressof(memory)], [MAX_ROW_BYTES + 1])
    Rows([ctypes.addressof(memory)], [MAX_ROW_BYTES])


def pools(count, **more):
    memory = [torch.zeros((8, 4, 2, 16), dtype=torch.float16) for _ in range(count)]
    known = {
        "kv_data_ptrs": [pool.data_ptr() for pool in memory],
        "kv_data_lens": [pool.nbytes for pool in memory],
        "kv_item_lens": [pool[0].nbytes for pool in memory],
        "kv_layer_ids": [],
        "page_size": 4,
    }
    return SimpleNamespace(**(known | more), memory=memory)


def test_pools_of_keys_and_values():
    args = pools(4, prefill_start_layer=6)
    found = describe(args, CPU, Place(1, 2), 4, latent=False)
    assert [list(tensor.layers) for tensor in found] == [[6], [7], [6], [7]]
    assert [tensor.kv for tensor in found] == ["k", "k", "v", "v"]
    assert {tensor.heads for tensor in found} == {range(2, 4)}
    assert [tensor.tensor.data_ptr() for tensor in found] == args.kv_data_ptrs
    assert found[0].tensor.shape == (8, 4, 2, 32)


def test_pools_of_latents_and_layers_that_are_named():
    found = describe(pools(2, kv_layer_ids=[3, 9]), CPU, Place(0, 2), 0, latent=True)
    assert [list(tensor.layers) for tensor in found] == [[3], [9]]
    assert found[0].tensor.shape == (8, 4, 64)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"num_draft_entries": 2}, "draft"),
        ({"kv_layout": "vectorized"}, "layout"),
        ({"mla_compression_ratios": [4]}, "compressed"),
        ({"kv_data_mem_kinds": ["VRAM", "DRAM"]}, "host memory"),
    ],
    ids=str,
)
def test_what_cannot_be_described_is_refused_by_name(odd, said):
    with pytest.raises(errors.GeometryError, match=said):
        describe(pools(4, **odd), CPU, Place(0, 1), 2, latent=False)


def test_buffers_that_are_no_pairs():
    with pytest.raises(errors.GeometryError, match="3 buffers"):
        describe(pools(3), CPU, Place(0, 1), 2, latent=False)
    with pytest.raises(errors.GeometryError, match="no whole number"):
        describe(pools(2), CPU, Place(0, 1), 3, latent=False)


class Handle:
    """A fetch or an offer with which nothing happens."""

    def __getattr__(self, _):
        return lambda *_, **__: None


class Worker:
    """Fetches and offers that are begun, and end when the test says so."""

    def __init__(self):
        self.begun, self.declined, self.events = [], [], []
        self.config = SimpleNamespace(bounds=lambda: {"fetch": 15.0, "revoke": 0.01})

    def start_fetch(self, *_, **__):
        self.begun.append(Handle())
        return self.begun[-1]

    def offer(self, *_, **__):
        self.begun.append(Handle())
        return self.begun[-1]

    def awaited(self, _):
        return SimpleNamespace(declined=False, first_token=0)

    def decline(self, ticket):
        self.declined.append(ticket)

    def poll(self, _):
        found, self.events = self.events, []
        return found


@pytest.fixture
def rooms():
    worker: Any = Worker()
    return Rooms(worker=worker, page_tokens=16, rows=Rows([], []), device=CPU, patience=10.0)


def receiving(rooms):
    return Receiving(rooms, 7, lambda: None)


def test_two_requests_of_one_room_get_nothing_of_each_other_at_a_decode_engine(rooms):
    first, worker = receiving(rooms), rooms.worker
    for twice in (receiving(rooms), receiving(rooms)):
        twice.begin({"of": "both"})
        twice.fetch([3], None, 0)
        twice.abort()
        assert (twice.poll(), twice.over) == (Poll.FAILED, True)
        with pytest.raises(RoomFailedError, match="another request with bootstrap_room 7"):
            raise twice.failed()
    first.begin({"of": "both"})
    assert (worker.begun, worker.declined) == ([], [])
    first.fetch([1], None, 0)
    assert first.poll() is Poll.TRANSFERRING
    assert receiving(rooms).poll() is Poll.FAILED
    worker.events = [FetchFailed("r", worker.begun[0], errors.TransferFailedError("gone"))]
    assert first.poll() is Poll.FAILED
    assert receiving(rooms).poll() is Poll.BOOTSTRAPPING, "the first one is over"


@pytest.mark.parametrize(("error", "lost"), [(errors.RefusedError, 0), (errors.PeerLostError, 1)])
def test_a_prefill_server_is_asked_for_anew_where_it_is_gone(rooms, error, lost):
    """Not where it lives and has refused one prompt: to ask holds up the scheduler."""
    asked = []
    room = Receiving(rooms, 7, lambda: asked.append(1))
    room.begin({"of": "it"})
    room.fetch([1], None, 0)
    rooms.worker.events = [FetchFailed("r", rooms.worker.begun[0], error("it is so"))]
    assert (room.poll(), len(asked)) == (Poll.FAILED, lost)


def test_what_is_aborted_when_it_has_arrived_is_not_decoded(rooms):
    """sglang may look at it later: behind retracted requests, or when its own caches have given what they have."""
    room, worker = receiving(rooms), rooms.worker
    room.begin({"of": "it"})
    room.fetch([1], None, 0)
    worker.events = [Fetched("r", worker.begun[0], cast("Any", SimpleNamespace(payload=b"")))]
    assert room.poll() is Poll.SUCCESS
    room.abort()
    assert (room.poll(), room.over, worker.declined) == (Poll.FAILED, True, [])
    with pytest.raises(RoomFailedError, match="it was aborted"):
        raise room.failed()


def test_two_requests_of_one_room_get_nothing_of_each_other_at_a_prefill_engine(rooms):
    first, twice = Sending(rooms, 7), Sending(rooms, 7)
    assert (first.poll(), twice.poll()) == (Poll.WAITING, Poll.FAILED)
    twice.begin(1, None)
    twice.send([3])
    assert rooms.worker.begun == []
    with pytest.raises(RoomFailedError, match="another request with bootstrap_room 7"):
        raise twice.failed()
    first.begin(2, None)
    first.send([1])
    assert first.poll() is Poll.TRANSFERRING
    rooms.worker.events = [OfferInDoubt("r", rooms.worker.begun[0], cast("Any", errors.TransferFailedError("silent")))]
    assert first.poll() is Poll.FAILED
    assert Sending(rooms, 7).poll() is Poll.FAILED, "a peer may still read the pages of the first one"
    rooms.worker.events = [OfferSettled("r", rooms.worker.begun[0])]
    rooms.pump()
    assert Sending(rooms, 7).poll() is Poll.WAITING


def test_who_takes_pages_that_are_in_doubt_is_stopped_at_the_next_look(rooms):
    room = Sending(rooms, 7)
    room.begin(2, None)
    room.send([1])
    rooms.worker.events = [OfferInDoubt("r", rooms.worker.begun[0], cast("Any", errors.TransferFailedError("silent")))]
    assert room.poll() is Poll.FAILED
    for look in (room.failed, room.poll, Sending(rooms, 8).poll):
        with pytest.raises(errors.FabricError, match="room 7: a silent peer may still touch its pages"):
            look()


def test_pages_in_doubt_may_be_known_to_be_safe_before_long(rooms):
    room = Sending(rooms, 7)
    room.send([1])
    (offer,) = rooms.worker.begun
    silent = OfferInDoubt("r", offer, cast("Any", errors.TransferFailedError("silent")))
    looks = iter([[silent], [], [OfferSettled("r", offer)]])
    rooms.worker.poll = lambda _: next(looks)
    rooms.worker.config.bounds = lambda: {"revoke": 15.0}
    assert room.poll() is Poll.FAILED
    with pytest.raises(RoomFailedError, match="silent"):
        raise room.failed()


def test_what_sglang_counts_its_pages_from_does_not_change(rooms):
    room = Sending(rooms, 7)
    for first in (16, 0):
        rooms.worker.awaited = lambda _, first=first: SimpleNamespace(declined=False, first_token=first)
        assert (room.poll(), room.first_token) == (Poll.WAITING, 16)


def test_a_prompt_that_was_aborted_stays_so_though_it_was_fetched_meanwhile(rooms):
    room = Sending(rooms, 7)
    room.begin(1, None)
    room.send([1])
    rooms.worker.events = [OfferReleased("r", rooms.worker.begun[0], ())]
    room.abort()
    assert room.poll() is Poll.FAILED


@pytest.fixture
def meeting():
    meeting = Meeting("127.0.0.1", 0)
    yield meeting
    meeting.close()


@pytest.fixture
def address(meeting):
    return f"127.0.0.1:{meeting.port}"


def test_all_ranks_may_come_at_once(meeting, monkeypatch):
    """They look at the same time after a start, and each says where each request went: a rank waits meanwhile."""
    full, take = threading.Event(), meeting._server.process_request
    monkeypatch.setattr(meeting._server, "process_request", lambda *one: full.wait(20) and take(*one))
    with contextlib.ExitStack() as ranks:
        ranks.callback(full.set)
        for _ in range(64):
            ranks.enter_context(socket.create_connection(("127.0.0.1", meeting.port), timeout=1))


@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_server_may_listen_on_version_6_alone(host):
    meeting = Meeting(host, 0)
    try:
        register(f"[::1]:{meeting.port}", ENGINE)
        assert ask(f"[::1]:{meeting.port}").engines == {0: ENGINE}
    finally:
        meeting.close()


def test_engines_are_told_of_when_all_of_them_are_there(address):
    with pytest.raises(errors.UnreachableError, match="503"):
        ask(address)
    register(address, replace(ENGINE, dp_size=2))
    with pytest.raises(errors.UnreachableError, match="503"):
        ask(address)
    register(address, replace(ENGINE, dp_rank=1, dp_size=2))
    found = ask(address)
    assert (found.dp_size, found.follow_bootstrap_room, set(found.engines)) == (2, True, {0, 1})
    ticket = found.ticket(1, "sglang-7")
    assert Ticket.parse(ticket).ref() == Ticket.parse(Issuer(CARD, bytes.fromhex("11" * 32)).ticket("sglang-7")).ref()
    with pytest.raises(errors.TicketError, match="rank 2"):
        found.ticket(2, "sglang-7")


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        *(
            b"HTTP/1.1 200 OK\r\n\r\n" + body
            for body in (
                b"7",
                b"null",
                b"[]",
                b"[7]",
                b'[{"dp_rank": 0}]',
                json.dumps([asdict(ENGINE) | {"key": "no hexadecimal"}]).encode(),
                json.dumps([asdict(ENGINE) | {"card": {}}]).encode(),
                json.dumps([asdict(ENGINE) | {"dp_size": 0}]).encode(),
                json.dumps([asdict(ENGINE) | {"dp_rank": 1}]).encode(),
                json.dumps([asdict(ENGINE) | {"dp_rank": -1}]).encode(),
                b"[" * 100_000,
            )
        ),
    ],
    ids=lambda answer: answer[-20:],
)
def test_something_else_at_the_address_is_an_error_of_the_library(speaking, answer):
    with speaking(answer) as address, pytest.raises(errors.UnreachableError, match="bootstrap server at 127"):
        ask(address)


@pytest.mark.parametrize("begins", [b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_who_answers_in_drops_does_not_hold_up_the_scheduler(dripping, monkeypatch, begins):
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.2)
    with dripping(begins, b" ") as address, pytest.raises(errors.UnreachableError, match="was not complete"):
        ask(address)


def test_who_answers_leads_nowhere_else(speaking):
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        location = f"ftp://127.0.0.1:{elsewhere.getsockname()[1]}/kvxfer/engines"
        answer = f"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: {location}\r\n\r\n".encode()
        with speaking(answer) as address, pytest.raises(errors.UnreachableError, match="it answers 302"):
            ask(address)


def test_rubbish_changes_nothing(address):
    register(address, ENGINE)
    rubbish = [b"", b"{", b"[]", b"7", b'{"dp_rank": 0}', b'{"bootstrap_room": 1, "dp_rank": 1e999}', b"[" * 100_000]
    for path in ("/kvxfer/engines", "/register_dp_rank", "/query_dp_ranks"):
        for body in rubbish:
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(f"http://{address}{path}", body), timeout=20)
            with refused.value as answer:
                assert answer.code == 400, (path, body[:20])
            assert ask(address).engines == {0: ENGINE}, (path, body[:20])


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="sglang is installed here")
def test_without_sglang_the_error_says_what_to_install():
    with pytest.raises(errors.MissingExtraError, match="pip install sglang"):
        sglang.plugin()
