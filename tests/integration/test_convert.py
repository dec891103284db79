"""Caches of unequal dtypes and scales: every element as torch converts it, no other written, and refusals by name."""

import asyncio

import msgspec
import pytest
import torch
from inside import geometry
from stage import Copied, bits, eventually, quiet
from stored import Converted, Stored

from kvxfer import ConfigError, GeometryError, MismatchError, PeerLostError, Released
from kvxfer.plans.pairs import geometry_from_wire, geometry_to_wire
from kvxfer.protocol.messages import pack_f32

BF16, F16, F32, E4M3, E5M2 = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
IDS, INTO = [9, 3, 1, 7, 5, 4, 8, 2, 6, 0, 11, 10, 13], [2, 0, 3, 1]
"""Source blocks of 16 tokens, destination blocks of 64."""
TOKENS = range(5, 200)
CONVERT = {"convert": True}


def source(dtype, scale="", **options):
    return Stored(dtype, scale, **{"blocks": 14, "block_tokens": 16, **options})


def target(dtype, scale="", **options):
    return Stored(dtype, scale, seed=2, **{"blocks": 6, "block_tokens": 64, "layout": "HND", **options})


async def move(theirs, ours, sources, targets, tokens=TOKENS):
    """Every decode rank fetches, every element is compared."""
    copied = [Converted(one) for one in targets]
    for one in copied:
        for given in sources:
            one.bring(given, IDS, INTO, tokens)
    offers = [rank.offer("r", IDS, tokens=208) for rank in theirs]
    ticket = theirs[0].engine.ticket("r")
    results = await asyncio.gather(*(rank.fetch(ticket, INTO, tokens=tokens, timeout=10) for rank in ours))
    for one in copied:
        one.check()
    assert all([isinstance(await offer.released(), Released) for offer in offers])
    await quiet(*theirs, *ours)
    return results


@pytest.mark.parametrize(
    "scales", [("", ""), ("tensor", ""), ("", "head"), ("head", "tensor"), ("head", "head")], ids=str
)
@pytest.mark.parametrize(
    "dtypes",
    [(BF16, E4M3), (E4M3, BF16), (F16, BF16), (BF16, E5M2), (E4M3, E4M3), (F32, F16), (E5M2, F32)],
    ids=lambda dtypes: " to ".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
)
async def test_every_element_of_a_request(stage, dtypes, scales):
    given, ours = source(dtypes[0], scales[0]), target(dtypes[1], scales[1])
    prefill, decode = await stage.pair(given, ours, decode=CONVERT)
    (result,) = await move([prefill], [decode], [given], [ours])
    narrower = min(dtype.itemsize for dtype in dtypes)
    assert result.stats.bytes == len(TOKENS) * 2 * 2 * 4 * 8 * narrower
    assert result.stats.chunks > 1
    if dtypes[0] != dtypes[1]:
        assert (result.stats.route, result.stats.why) == ("staged", "the only route that converts")


async def test_layers_that_stream_in_are_converted_as_they_come(stage):
    given, ours = source(BF16, "head", layers=range(3)), target(E4M3, "tensor", layers=range(3))
    prefill, decode = await stage.pair(given, ours, decode=CONVERT)
    offer = prefill.offer("r", IDS, tokens=208, streaming=True)
    transfer = decode.start_fetch(prefill.engine.ticket("r"), INTO, tokens=TOKENS, timeout=10)
    before = Converted(ours)
    for layer in range(3):
        given.memory[layer] += 1  # computed now
        offer.ready(layers=[layer])
        await transfer.layers(0, layer + 1)
        before.bring(given, IDS, INTO, TOKENS, layers=[layer])
        before.check()
    offer.finish()
    await transfer
    assert isinstance(await offer.released(), Released)


@pytest.mark.parametrize("route", ["direct", "pull"])
async def test_a_route_that_cannot_convert_falls_back_and_says_so(stage, route):
    given, ours = source(F16), target(BF16)
    prefill, decode = await stage.pair(given, ours, route=route, decode=CONVERT)
    (result,) = await move([prefill], [decode], [given], [ours])
    assert (result.stats.route, result.stats.why) == ("staged", "the only route that converts")
    assert prefill.describe()["metrics"]["fallbacks"] == {f"{route} cannot convert dtypes or scales": 1}


async def test_asking_for_conversion_changes_nothing_where_none_is_needed(stage):
    given, ours = source(BF16, "head"), target(BF16, layers=range(2))
    ours.scales = given.scales
    prefill, decode = await stage.pair(given, ours, route="direct", decode=CONVERT)
    for memory in given.memory.values():
        bits(memory).random_(-32768, 32768)  # NaN and infinity included, bit for bit
    copied = Copied(ours).bring(given, IDS, INTO, TOKENS)
    prefill.offer("r", IDS, tokens=208)
    result = await decode.fetch(prefill.engine.ticket("r"), INTO, tokens=TOKENS, timeout=10)
    assert result.stats.route == "direct"
    copied.check()


async def test_the_other_direction_is_agreed_upon_by_itself(stage):
    """Two workers that fetch from each other, of which one asks for conversion."""
    one, other = source(BF16), source(E4M3, seed=5)
    asking = await stage.worker("asking", one, **CONVERT)
    strict = await stage.worker("strict", other)
    strict.offer("r", IDS, tokens=208)
    copied = Converted(one).bring(other, IDS, IDS, range(208))
    await asking.fetch(strict.engine.ticket("r"), IDS, tokens=range(208), timeout=10)
    copied.check()
    asking.offer("back", IDS, tokens=208)
    with pytest.raises(MismatchError, match="convert=True at the decode rank would convert it"):
        await strict.fetch(asking.engine.ticket("back"), IDS, tokens=range(208), timeout=10)


# --- refusals


async def refused(stage, theirs, ours, **config):
    prefill, decode = await stage.pair(theirs, ours, **config)
    before = Copied(ours)
    prefill.offer("r", IDS, tokens=208)
    with pytest.raises(MismatchError) as caught:
        await decode.fetch(prefill.engine.ticket("r"), INTO, tokens=TOKENS, timeout=5)
    before.check()
    await quiet(prefill, decode)
    return caught.value


async def test_scales_differ_and_the_decode_rank_did_not_ask(stage, caplog):
    given, ours = source(E4M3), target(E4M3, "head")
    ours.scales[0][:] = 1
    ours.scales[1][:] = torch.tensor([1, 1, 0.5, 1])
    error = await refused(stage, given, ours)
    words = "scale of head 2 is 1 at the source, but 0.5 at the destination; convert=True at the decode rank would"
    assert words in str(error)
    assert list(error.fields.values()) == [("0.5", "1")]
    await eventually(lambda: caplog.text.count(words) >= 2)  # both sides log it


@pytest.mark.parametrize("without", ["prefill", "decode"])
async def test_conversion_needs_an_arena_on_both_sides(stage, without):
    if without == "decode":
        with pytest.raises(ConfigError, match="convert is set and arena_bytes is 0"):
            await stage.worker("decode", target(E4M3), arena_bytes=0, **CONVERT)
        return
    error = await refused(stage, source(BF16), target(E4M3), decode=CONVERT, prefill={"arena_bytes": 0})
    assert "only mapped and staged convert them" in str(error)
    assert "staged needs an arena on both sides" in str(error)
    assert error.fields == {"arena": ("an arena", "none")}


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (pack_f32([1.0] * 3), "scale has 3 numbers for 4 heads"),
        (pack_f32([1.0, float("nan"), 1.0, 1.0]), r"scale\[1\] is nan"),
        (pack_f32([0.0]), r"scale\[0\] is 0"),
        (pack_f32([-1.0]), r"scale\[0\] is -1"),
        (pack_f32([float("inf")]), r"scale\[0\] is inf"),
        (pack_f32([1.0]) * 65_537, "scale has 65537 numbers"),
    ],
)
async def test_the_scale_of_a_hostile_peer(stage, monkeypatch, packed, words):
    """Read like everything that a peer says: refused, and the session with it."""
    good = target(E4M3)
    prefill = await stage.worker("prefill", source(BF16))

    def hostile(geometry, *, with_addresses):
        return [
            msgspec.structs.replace(f, scale=packed) for f in geometry_to_wire(geometry, with_addresses=with_addresses)
        ]

    with monkeypatch.context() as patch:
        patch.setattr("kvxfer.worker.geometry_to_wire", hostile)
        decode = await stage.worker("decode", good, **CONVERT)
    with pytest.raises(GeometryError, match=words):
        geometry_from_wire(hostile(geometry(decode), with_addresses=False))
    offer = prefill.offer("r", IDS, tokens=208)
    with pytest.raises(PeerLostError):
        await decode.fetch(prefill.engine.ticket("r"), INTO, tokens=TOKENS, timeout=5)
    assert not prefill.describe()["peers"]
    honest = await stage.worker("honest", good, **CONVERT)
    await honest.fetch(prefill.engine.ticket("r"), INTO, tokens=TOKENS, timeout=5)
    await offer.released()
