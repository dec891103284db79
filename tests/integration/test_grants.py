"""What a peer names is held against what was announced and granted; one that lies moves nothing and is let go."""

import pytest
from inside import hear, session, staging
from msgspec.structs import replace
from stage import Copied, Gate, eventually, frames, quiet

from kvxfer import KvxferError
from kvxfer.protocol.messages import WHOLE, Fetch, KvAgentResult, Reserve, Status

PLENTY = {"arena_bytes": "64KiB", "chunk_bytes": "16KiB", "route": "staged"}  # for all of a fetch in one chunk


@pytest.fixture
async def pair(stage, source, target, tap):
    tap.change[Fetch] = lambda fetch: replace(fetch, ring=[])  # what is granted is granted by `Reserve`
    return await stage.pair(source, target, route="staged")  # in several chunks, each granted by itself


def start(stage, pair, tokens=32):
    blocks = range(tokens // 4)
    _, transfer = stage.begin(*pair, "r", blocks, blocks, range(tokens), timeout=3)
    return transfer


async def ends_badly(transfer, target):
    untouched = Copied(target)
    with pytest.raises(KvxferError) as caught:
        await transfer
    untouched.check()
    return str(caught.value)


@pytest.mark.parametrize("rides", [False, True], ids=["", "with a fetch"])
@pytest.mark.parametrize("place", ["before", "behind", "across the end", "far"])
async def test_a_grant_outside_of_staging_memory_is_not_written(stage, source, target, tap, place, rides, caplog):
    prefill, decode = await stage.pair(source, target, **(PLENTY if rides else {"route": "staged"}))
    first = staging(decode, "receive").address
    last = first + staging(decode, "receive").length
    address = {"before": first - 16, "behind": last, "across the end": last - 16, "far": (1 << 63) - 4096}[place]

    def moved(message):
        return replace(message, ring=[replace(place, address=address) for place in message.ring])

    tap.change |= {Fetch: moved} if rides else {Fetch: lambda fetch: replace(fetch, ring=[]), Reserve: moved}
    await ends_badly(start(stage, (prefill, decode)), target)
    assert "outside the staging memory" in caplog.text
    assert prefill.describe()["metrics"]["send"]["bytes"] == {}
    await quiet(prefill)


@pytest.mark.parametrize("first", [0, 1], ids=["", "behind the first"])
async def test_a_place_that_is_too_short_is_not_written(stage, pair, target, tap, first, caplog):
    """Nor is one behind others, though the first chunk is the mover's by then."""
    tap.change[Reserve] = lambda message: replace(
        message, ring=[replace(place, length=place.length - 16 * (n >= first)) for n, place in enumerate(message.ring)]
    )
    untouched = Copied(target)
    with pytest.raises(KvxferError):
        await start(stage, pair)
    if first == 0:
        untouched.check()
    assert "bytes were granted for a chunk of" in caplog.text
    assert "nobody took" not in caplog.text
    await quiet(pair[0])


@pytest.mark.parametrize("sizes", ["of many chunks", "of one"])
async def test_a_result_with_another_number_of_bytes_fails_the_fetch(stage, source, target, tap, sizes):
    """Whatever it has brought: the two sides have meant something else by it."""
    prefill, decode = await stage.pair(source, target, **(PLENTY if sizes == "of one" else {"route": "staged"}))
    tap.change[KvAgentResult] = lambda result: (
        replace(result, bytes=result.bytes + 16) if result.status is Status.OK and result.chunk == WHOLE else result
    )
    with pytest.raises(KvxferError, match=r"(\d+) bytes were to come by this side's plan, and (?!\1)\d+ by"):
        await start(stage, (prefill, decode))
    await quiet(prefill, decode)


async def test_another_last_result_counts_for_nothing(stage, source, target, tap):
    prefill, decode = await stage.pair(source, target, **PLENTY)
    gate = Gate()
    copied = Copied(target).bring(source, [1, 2], [3, 4], range(8))
    _, transfer = stage.begin(prefill, decode, after=gate)
    await eventually(lambda: frames(decode, "KvAgentResult"))
    (last,) = tap.of(KvAgentResult)
    hear(decode, session(decode), replace(last, bytes=last.bytes + 16))
    gate.fired = True
    await transfer
    copied.check()
    await quiet(prefill, decode)
