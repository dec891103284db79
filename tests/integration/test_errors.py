"""Bad input of every kind: a clear error of the right type, and a good fetch with the same blocks works afterwards."""

import asyncio
import os
import socket
import struct

import numpy as np
import pytest
from inside import sessions
from msgspec.structs import replace
from stage import Copied, eventually, handshakes, quiet, raised

import kvxfer
from kvxfer.plans.routes import Estimates
from kvxfer.protocol import messages as wire
from kvxfer.protocol.framing import encode


async def works(stage, prefill, decode):
    """A good fetch: what went wrong before has left nothing behind."""
    await stage.bring(prefill, decode, f"good-{os.urandom(4).hex()}", into=(1, 2))


@pytest.mark.parametrize(
    ("blocks", "tokens", "error", "words"),
    [
        ([1, 16], range(8), kvxfer.BlocksError, "block id 16 at position 1 is outside 0..15"),
        ([-1, 2], range(8), kvxfer.BlocksError, "block id -1 at position 0"),
        ([1, 1], range(8), kvxfer.BlocksError, "named twice, at positions 0 and 1"),
        ([1], range(8), kvxfer.BlocksError, "1 blocks of 4 tokens reach up to token 4, but 8 are needed"),
        ([], range(8), kvxfer.BlocksError, "0 blocks of 4 tokens reach up to token 0, but 8 are needed"),
        ([1.5, 2], range(8), kvxfer.BlocksError, "whole numbers"),
        ([[1, 2]], range(8), kvxfer.BlocksError, "one dimension"),
        ({"other": [1, 2]}, range(8), kvxfer.BlocksError, r"names the groups \['other'\]"),
        ({}, range(8), kvxfer.BlocksError, "names the groups"),
        ([1, 2], range(0), kvxfer.TokensError, "that ends after token 0"),
        ([1, 2], range(5, 3), kvxfer.TokensError, "that ends after token 0"),
        ([1, 2], range(8, 0, -1), kvxfer.TokensError, "step 1"),
        ([1, 2], range(0, 8, 2), kvxfer.TokensError, "step 1"),
        ([1, 2], range(-1, 4), kvxfer.TokensError, "step 1"),
        ([1, 2], range(1 << 33), kvxfer.TokensError, "4294967295"),
    ],
    ids=str,
)
async def test_what_is_wrong_here_is_said_here(stage, pair, target, blocks, tokens, error, words):
    prefill, decode = pair
    untouched = Copied(target)
    with pytest.raises(error, match=words) as caught:
        await decode.fetch(prefill.engine.ticket("r"), blocks, tokens=tokens, timeout=5)
    assert isinstance(caught.value, kvxfer.UsageError)
    assert not sessions(decode)  # nothing was sent
    untouched.check()
    await works(stage, prefill, decode)


@pytest.mark.parametrize(("listen", "advice"), [("tcp:192.0.2.1:0", "an address"), ("unix:/nowhere/sock", "a path")])
async def test_who_cannot_listen_is_told_what_to_set(stage, target, listen, advice):
    with pytest.raises(kvxfer.ConfigError, match=f"cannot listen at '{listen}'.*set listen to {advice}"):
        await stage.worker("w", target, listen=listen)


@pytest.mark.parametrize(
    ("blocks", "tokens", "error", "words"),
    [
        ([1, 16], 8, kvxfer.BlocksError, "block id 16 at position 1"),
        ([-1, 2], 8, kvxfer.BlocksError, "block id -1"),
        ([1], 8, kvxfer.BlocksError, "reach up to token 4, but 8 are needed"),
        ([1, 2], 0, kvxfer.TokensError, "at least one token"),
        ([1, 2], -3, kvxfer.TokensError, "at least one token"),
        ({"other": [1]}, 4, kvxfer.BlocksError, "names the groups"),
        ([1, 2], "8", kvxfer.TokensError, "whole number"),
    ],
    ids=str,
)
async def test_a_wrong_offer_leaves_its_id_free(pair, blocks, tokens, error, words):
    prefill, _ = pair
    with pytest.raises(error, match=words):
        prefill.offer("r", blocks, tokens=tokens)
    offer = prefill.offer("r", np.asarray([2, 1]), tokens=8)
    assert prefill.describe()["offers"] == 1
    await offer.withdraw()


async def test_a_window_that_does_not_hold_the_tokens(pair, source, target):
    from kvxfer import Span

    prefill, decode = pair
    prefill.offer("r", Span([1], 4), tokens=8)
    with pytest.raises(kvxfer.RefusedError, match=r"source .* does not cover tokens 0\.\.7") as caught:
        await decode.fetch(prefill.engine.ticket("r"), [1, 2], tokens=range(8), timeout=5)
    assert caught.value.reason is kvxfer.Code.BLOCKS
    copied = Copied(target).bring(source, [1], [2], range(4, 8), source_first=4, first=4)
    await decode.fetch(prefill.engine.ticket("r"), Span([2], 4), tokens=range(4, 8), timeout=5)
    copied.check()


async def test_blocks_that_another_fetch_writes(stage, source, target):
    prefill, decode = await stage.pair(source, target)
    running = decode.start_fetch(prefill.engine.ticket("r"), [1, 2], tokens=range(8))
    with pytest.raises(kvxfer.BlocksError, match=f"block 2 .*{running.id} is fetching into it"):
        decode.start_fetch(prefill.engine.ticket("s"), [2, 3], tokens=range(8))
    with pytest.raises(kvxfer.BlocksError, match="is fetching into it"):
        decode.offer("mine", [4, 1], tokens=8)
    decode.offer("mine", [3, 4], tokens=8)
    only_the_first = decode.start_fetch(prefill.engine.ticket("t"), [5, 1], tokens=range(4))  # writes block 5 alone
    running.cancel()
    only_the_first.cancel()
    await quiet(decode)
    await works(stage, prefill, decode)


@pytest.mark.parametrize("timeout", [0, -1, 1e-9])
async def test_no_time_at_all(stage, pair, timeout):
    prefill, decode = pair
    prefill.offer("r", [1], tokens=4)
    with pytest.raises(TimeoutError):
        await decode.fetch(prefill.engine.ticket("r"), [1], tokens=range(4), timeout=timeout)
    await works(stage, prefill, decode)


async def test_nobody_at_the_endpoint(stage, pair):
    prefill, decode = pair
    nobody = dict.fromkeys(["unix:/nowhere/worker.sock", "tcp:127.0.0.1:1"], (kvxfer.UnreachableError, None))
    nowhere = ["tcp:127.0.0.1:99999", "tcp:nohost", "tcp::", "unix:/\0"]
    impossible = dict.fromkeys(nowhere, (kvxfer.TicketError, "is no endpoint of a rank"))
    for endpoint, (error, words) in (nobody | impossible).items():
        ticket = {**prefill.engine.ticket("r"), "endpoints": {"prefix": endpoint}}
        with pytest.raises(error, match=words):
            await decode.fetch(ticket, [1, 2], tokens=range(8), timeout=5)
        await works(stage, prefill, decode)


ANSWERS = {
    "nothing": b"",
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "an empty frame": bytes(4),
    "too busy": encode(wire.Goodbye(kvxfer.Code.TOO_MANY, "full")),
}


@pytest.mark.parametrize("said", ANSWERS.values(), ids=ANSWERS.keys())
async def test_who_answers_wrongly_is_named(stage, target, tmp_path, said):
    """By where it was looked for: of many ranks, nobody else knows which one is meant."""

    async def answer(reader, writer):
        writer.write(said)
        await reader.read()
        writer.close()

    decode = await stage.worker("decode", target, connect_timeout=0.05)
    server = await asyncio.start_unix_server(answer, tmp_path / "odd")
    stage.stack.callback(server.close)
    where = f"unix:{tmp_path}/odd"
    error = await raised(
        decode.fetch(decode.engine.ticket("r") | {"endpoints": {"prefix": where}}, [1], tokens=range(4)),
        kvxfer.PeerError,
    )
    assert where in str(error)
    assert error.peer == error.report.peer == where


async def test_who_has_not_answered_in_time_is_named(pair, tmp_path):
    """One of two ranks."""
    prefill, decode = pair
    where = f"unix:{tmp_path}/deaf"
    parts = {"prefix": "", "parts": [prefill.card.endpoint, where]}
    ticket = prefill.engine.ticket("r") | {"world": 2, "endpoints": parts}
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        deaf.listen()
        error = await raised(decode.fetch(ticket, [1], tokens=range(4), timeout=0.2), TimeoutError)
    assert f", held up by {where};" in str(error)
    assert error.peer == error.report.peer == where


# --- what strangers send to the listening socket


def frame(payload):
    return struct.pack("<I", len(payload)) + payload


HELLO = wire.Hello(1, 1, "x", "stranger", b"e" * 16, b"i" * 32, 0, 1, 0, b"n" * 32, 500)
STRANGE = {
    "half a frame": frame(b"\x91\x01" * 20)[:-3],
    "oversized before hello": struct.pack("<I", 65537) + b"x" * 100,
    "garbage": frame(os.urandom(200)),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a session frame after hello": encode(HELLO) + encode(wire.Cancel(1)),
    "other version": encode(replace(HELLO, wire=9, wire_min=9)),
}


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE.keys())
async def test_strangers_disturb_nobody(stage, source, target, data, network):
    prefill, decode = await stage.pair(source, target, prefill={"connect_timeout": 0.5})
    network.hold("decode")
    offer, transfer = stage.begin(prefill, decode)
    reader, writer = await asyncio.open_unix_connection(prefill.card.endpoint[5:])
    writer.write(data)
    if data != STRANGE["half a frame"]:
        async with asyncio.timeout(60):  # answered or not, it is closed: at once, or when the handshake took too long
            await reader.read()
    writer.close()
    network.release("decode")
    await transfer
    await offer.released()
    await works(stage, prefill, decode)
    await eventually(lambda: not handshakes(prefill))
    assert len(sessions(prefill)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"digest": b"x" * 32},
        {"bytes": 1},
        {"chunks": 7},
        {"tokens_per_chunk": 0},
        {"route": wire.Route(2)},
        {"route": wire.Route(77)},
        {"spans": []},
    ],
    ids=str,
)
async def test_an_answer_that_does_not_fit_is_refused(stage, source, target, tap, change):
    prefill, decode = await stage.pair(source, target, trust="none")
    tap.change[wire.Accept] = lambda accept: replace(accept, **change)
    untouched = Copied(target)
    offer = prefill.offer("r", [1, 2], tokens=8)
    with pytest.raises((kvxfer.TransferFailedError, kvxfer.RefusedError)) as caught:
        await decode.fetch(prefill.engine.ticket("r"), [1, 2], tokens=range(8), timeout=5)
    assert caught.value.reason is (kvxfer.Code.NO_COMMON_ROUTE if "route" in change else kvxfer.Code.PLAN_DIFFERS)
    untouched.check()
    tap.change.clear()
    await quiet(prefill, decode)
    await works(stage, prefill, decode)
    await offer.withdraw()


FOREIGN_FETCHES = {
    "layers that nobody has": (
        "staged",
        {"selections": [wire.Selection("default", "", "k", wire.pack_u32([9]), 0, 4)]},
        kvxfer.Code.WANTS_NOT_HELD,
    ),
    "heads that nobody has": (
        "staged",
        {"selections": [wire.Selection("default", "", "k", wire.pack_u32([0]), 2, 6)]},
        kvxfer.Code.WANTS_NOT_HELD,
    ),
    "the same heads twice": (
        "staged",
        {"selections": [wire.Selection("default", "", "k", wire.pack_u32([0]), 0, stop) for stop in (2, 4)]},
        kvxfer.Code.WANTS_NOT_HELD,
    ),
    "no room for any chunk": ("staged", {"max_extent_bytes": 0}, kvxfer.Code.CHUNK_TOO_LARGE),
    "too little room for any chunk": ("staged", {"max_extent_bytes": 512}, kvxfer.Code.CHUNK_TOO_LARGE),
    "no room for staged chunks": (
        "auto",
        {"max_extent_bytes": 0, "routes": [wire.Route.STAGED, wire.Route.DIRECT]},
        None,
    ),
}


@pytest.mark.parametrize("case", FOREIGN_FETCHES)
async def test_a_fetch_that_this_library_would_not_send(stage, source, target, tap, monkeypatch, case):
    """Refused by the code that PROTOCOL.md says, or answered with a route that can serve it."""
    route, change, code = FOREIGN_FETCHES[case]
    prefill, decode = await stage.pair(source, target, route=route)

    def factor(_, __, route):
        return 1e-9 if route is wire.Route.STAGED else 1.0

    monkeypatch.setattr(Estimates, "factor", factor)  # `staged` is the first choice
    tap.change[wire.Fetch] = lambda fetch: replace(fetch, lease_ms=0, ring=[], agreement=b"", **change)
    offer = prefill.offer("r", [1, 2], tokens=8)
    fetching = decode.fetch(prefill.engine.ticket("r"), [1, 2], tokens=range(8), timeout=5)
    if code is None:
        assert (await fetching).stats.route == "direct"
    else:
        with pytest.raises(kvxfer.RefusedError) as caught:
            await fetching
        assert caught.value.reason is code
    tap.change.clear()
    await works(stage, prefill, decode)
    await offer.withdraw()
