"""A prefill and a decode engine in two processes over NIXL, driven as sglang's event loops drive them."""

import importlib.util
import re
import socket
import time

import pytest
from sglang_processes import Process

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"),
    pytest.mark.timeout(120),
]

USUAL = {
    "tp": 1,
    "chunk": 64,
    "latent": False,
    "dtype": "float32",
    "dp_rank": 0,
    "dp_size": 1,
    "pp_size": 1,
    "load_balance": "follow_bootstrap_room",
    "policy": "early",
    "bootstrap_timeout": 60,
    "waiting_timeout": 60,
    "deferred": True,
    "force_query": False,
    "staging": False,
    "mem_pool": None,
    "sharded": False,
    "state_types": [],
    "port": 0,
}


@pytest.fixture(scope="module")
def processes():
    pair = Process(), Process()
    yield pair
    for process in pair:
        process.end()


class Pair:
    """Both engines, of one test."""

    def __init__(self, prefill, decode):
        self.prefill, self.decode = prefill, decode

    def open(self, *, prefill=None, decode=None, **both):
        self.prefill.open(USUAL | both | (prefill or {}) | {"role": "PREFILL"})
        self.decode.open(USUAL | both | (decode or {}) | {"role": "DECODE", "port": self.prefill.port()})
        return self

    def add(self, room, length, prefix=0, prefill=None, decode=None):
        """A router gives a request to both."""
        self.prefill.add(room, length, **(prefill or {}))
        self.decode.add(room, length, prefix=prefix, **(decode or {}))

    def run(self, until, engines=None, patience=60):
        """Step both until a condition of their states holds."""
        engines = engines or (self.prefill, self.decode)
        deadline = time.monotonic() + patience
        while True:
            states = [engine.step() for engine in engines]
            if until(*states):
                return
            assert time.monotonic() < deadline, states
            time.sleep(0.002)

    def finish(self, *rooms):
        ended = {"done", "failed"}
        self.run(lambda p, d: all(p.get(room) in ended and d.get(room) in ended for room in rooms))

    def serves(self, *rooms):
        """These end well, and the decode engine has what was computed."""
        self.finish(*rooms)
        ends = {engine.state(room) for engine in (self.prefill, self.decode) for room in rooms}
        assert (ends, [self.decode.exact(room) for room in rooms]) == ({("done", "")}, [True] * len(rooms))

    def idle(self, patience=30):
        """Until nothing is left at either."""
        deadline = time.monotonic() + patience
        for engine in (self.prefill, self.decode):
            while not engine.idle():
                engine.step()
                assert time.monotonic() < deadline, "something is left"

    def close(self):
        for engine in (self.prefill, self.decode):
            engine.close()


@pytest.fixture
def pair(processes):
    made = Pair(*processes)
    yield made
    made.close()


SHAPES = {
    "heads on several ranks": {"decode": {"tp": 8}},
    "latent, 2 to 1": {"prefill": {"tp": 2}, "latent": True},
    "latent, 1 to 2": {"decode": {"tp": 2}, "latent": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_in_chunks_of_which_the_decode_engine_has_some(pair, shape):
    pair.open(**SHAPES[shape], chunk=10)
    pair.add(11, 27)
    pair.add(12, 8, prefix=4)
    pair.serves(11, 12)
    pair.idle()


def test_decode_ranks_may_ask_one_after_the_other(pair):
    """Of which tokens they want the rest is known when it is known of all that want something of a rank."""
    pair.open(prefill={"tp": 2}, decode={"tp": 2})
    pair.add(21, 16, prefix=4, decode={"late": True})
    pair.run(lambda p, d: pair.decode.fetches(21))
    for _ in range(100):
        pair.prefill.step()
        time.sleep(0.005)
    assert not pair.prefill.waits(21)
    pair.decode.ask_late(21)
    pair.serves(21)


def test_metadata_alone(pair):
    pair.open()
    pair.add(31, 16, prefix=16)
    pair.serves(31)


def test_a_prompt_waits_until_its_decode_engine_has_a_place(pair):
    pair.open()
    pair.add(41, 16, decode={"hold": True})
    pair.run(lambda p, d: d[41] == "live", patience=5)
    for _ in range(20):
        pair.prefill.step()
        pair.decode.step()
    assert pair.prefill.state(41) == ("live", "")
    pair.add(42, 16)
    pair.serves(42)
    assert pair.prefill.state(41) == ("live", "")


def test_as_many_prompts_may_wait_as_sglang_keeps_pages_for(pair):
    """A fetch waits for as long as its prompt; three quarters of these may be one decode engine's."""
    pair.open()
    assert all(engine.setting("max_transfers") * 3 // 4 > 4096 for engine in (pair.prefill, pair.decode))


def test_an_abort_before_there_is_a_place_fails_the_other_side(pair):
    pair.open()
    pair.add(51, 16, decode={"hold": True})
    pair.run(lambda p, d: True)
    pair.run(lambda p, d: True)
    pair.decode.abort(51)
    pair.finish(51)
    assert pair.decode.state(51) == ("failed", "room 51: it was aborted")
    assert pair.prefill.state(51) == ("failed", "room 51: the decode engine gave it up")
    pair.idle()


def test_an_abort_of_a_prompt_that_nobody_has_asked_for(pair):
    pair.open()
    pair.prefill.add(61, 16)
    pair.prefill.step()
    pair.prefill.abort(61)
    pair.prefill.step()
    assert pair.prefill.state(61) == ("failed", "room 61: it was aborted")


@pytest.mark.parametrize("deferred", [True, False])
def test_an_abort_while_the_prompt_is_computed(pair, deferred):
    pair.open(chunk=4, deferred=deferred, decode={"tp": 2})
    pair.add(71, 32, prefill={"hold": True})
    pair.run(lambda p, d: pair.prefill.waits(71))
    pair.decode.abort(71)
    pair.finish(71)
    assert pair.decode.state(71) == ("failed", "room 71: it was aborted")
    assert "the decode engine" in pair.prefill.state(71)[1]
    pair.idle()
    pair.add(72, 32)
    pair.serves(72)


@pytest.mark.parametrize("pages", [0, 2])
def test_a_prompt_that_is_aborted_between_chunks_fails_its_fetch(pair, pages):
    pair.open(chunk=4, decode={"tp": 2})
    pair.add(81, 32, prefill={"hold": not pages})
    pair.run(lambda p, d: pair.prefill.sent(81) >= 4 * pages and pair.decode.fetches(81))
    pair.prefill.abort(81)
    pair.finish(81)
    assert pair.prefill.state(81) == ("failed", "room 81: it was aborted")
    assert pair.decode.state(81)[0] == "failed"
    assert "OFFER_WITHDRAWN" in pair.decode.state(81)[1]
    pair.idle()


@pytest.mark.parametrize("deferred", [True, False])
def test_pages_are_kept_until_no_rank_writes_them(pair, deferred):
    """One rank fails; the other is in the midst of its transfer, and sglang is about to free its pages."""
    pair.open(chunk=4, deferred=deferred, decode={"tp": 2})
    pair.add(91, 32)
    pair.run(lambda p, d: pair.prefill.sent(91) >= 8 and pair.decode.fetches(91))
    pair.decode.fail_rank(91, 1)
    pair.run(lambda p, d: d[91] == "failed")  # `_check_safe` has looked into the books of both ranks
    pair.finish(91)
    assert pair.decode.state(91) == ("failed", "room 91: it broke")
    pair.idle()


def test_nobody_asks_for_a_prompt(pair):
    pair.open(prefill={"bootstrap_timeout": 0.2})
    pair.prefill.add(101, 16)
    pair.run(lambda p: p[101] == "failed", [pair.prefill])
    assert pair.prefill.state(101)[1] == "room 101: no decode engine asked for it within 0.2 s"


def test_a_prompt_is_never_computed(pair):
    pair.open(decode={"waiting_timeout": 0.3})
    pair.add(111, 16, prefill={"hold": True})
    pair.finish(111)
    assert "did not end within 0.3 s" in pair.decode.state(111)[1]
    assert "decode engine" in pair.prefill.state(111)[1]
    pair.idle()


def test_a_prefill_engine_that_slept_is_found_again(pair):
    pair.open(decode={"tp": 2})
    pair.add(121, 16)
    pair.finish(121)
    pair.prefill.sleep_and_wake()
    pair.add(122, 16)
    pair.run(lambda p, d: d[122] == "failed")  # its ticket was of the engine before
    pair.prefill.abort(122)
    pair.add(123, 16)
    pair.serves(123)


BALANCES = {
    "the room names it": {"load_balance": "follow_bootstrap_room"},
    "the server is asked though the room names one": {"load_balance": "follow_bootstrap_room", "force_query": True},
}


@pytest.mark.parametrize("balance", BALANCES)
def test_the_data_parallel_rank_that_has_the_prompt_is_found(pair, balance):
    """One of two; the other is known to the bootstrap server by its card alone."""
    pair.open(**BALANCES[balance], prefill={"dp_size": 2, "dp_rank": 1})
    pair.prefill.pretend_rank(0)
    room = 131 if balance == "the room names it" else 132
    pair.add(room, 16)
    pair.serves(room)


def test_a_prompt_that_another_rank_is_asked_for_fails_at_once(pair):
    """A client may name the data-parallel rank, and sglang then does not look at the room."""
    pair.open(prefill={"dp_size": 2, "dp_rank": 1})
    pair.prefill.add(136, 16)
    pair.prefill.step()
    state, why = pair.prefill.state(136)
    assert state == "failed"
    assert "asks data-parallel rank 0 for it" in why
    assert "FORCE_QUERY" in why


def test_a_request_that_names_another_server_ends_nothing(pair, speaking):
    """A client may name any address as its bootstrap server."""
    pair.open(prefill={"dp_size": 2, "load_balance": "round_robin"})
    pair.prefill.pretend_rank(1)
    with speaking(b"SSH-2.0-OpenSSH_9.2\r\n") as nonsense:
        pair.add(133, 16, prefill={"address": nonsense}, decode={"address": nonsense})
        pair.prefill.step()
        pair.decode.step()
    pair.prefill.abort(133)
    pair.decode.abort(133)
    pair.add(134, 16)
    pair.serves(134)


def test_a_server_that_never_answers_holds_up_nobody(pair):
    """A client has named it, or its host is gone: all requests stand still while a scheduler waits."""
    pair.open(prefill={"dp_size": 2, "load_balance": "round_robin"})
    pair.prefill.pretend_rank(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = {"address": f"127.0.0.1:{silent.getsockname()[1]}"}
        for work in (lambda: pair.add(138, 16, prefill=there, decode=there), *(pair.decode.step,) * 3):
            began = time.monotonic()
            work()
            assert time.monotonic() - began < 3
        pair.prefill.abort(138)
        pair.decode.abort(138)
    pair.add(139, 16)
    pair.serves(139)


def test_pages_of_another_kind_are_not_fetched_and_end_nothing(pair):
    """A client may name any address as its bootstrap server; sglang gives up a request whose server is not known."""
    pair.open(decode={"dtype": "bfloat16"})
    pair.decode.add(141, 16)
    for _ in range(2):
        pair.decode.step()
    assert pair.decode.state(141) == ("live", "")
    assert pair.decode.said("--kv-cache-dtype")
    pair.decode.abort(141)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"state_types": ["mamba"]}, "recurrent state"),
        ({"policy": "prefill_complete"}, "allocation-policy"),
        ({"staging": True}, "SGLANG_DISAGG_STAGING_BUFFER"),
        ({"mem_pool": "INTRA_NODE_NVLINK"}, "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"),
        ({"sharded": True, "latent": True}, "--enable-kv-cache-sharding"),
    ],
    ids=str,
)
def test_what_cannot_be_handed_over_is_refused_by_name(processes, odd, said):
    with pytest.raises(AssertionError, match=said):
        processes[0].open(USUAL | odd | {"role": "DECODE"})


def test_a_prefill_engine_that_dies_fails_what_it_had():
    prefill, decode = Process(), Process()
    pair = Pair(prefill, decode)
    try:
        pair.open(chunk=4, decode={"tp": 2}).add(151, 32, prefill={"hold": True})
        pair.run(lambda p, d: prefill.waits(151))
        prefill.kill()
        pair.run(lambda d: d[151] == "failed", [decode])
        # of two ranks one alone had to be there, so the other may have met it as it died, or after
        assert re.search(r"PEER_LOST|closed the stream|cannot connect to", decode.state(151)[1])
        Pair(decode, decode).idle()
        decode.close()
    finally:
        prefill.end()
        decode.end()
