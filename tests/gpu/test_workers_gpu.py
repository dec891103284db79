"""Whole workers on GPU memory, the prefill engine in another process, over NIXL: every byte, and events that fire late.

The same tests run on CPU memory wherever NIXL is installed, so that what they expect is proved there.
"""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.append(str(Path(__file__).parent.parent / "integration"))

import scene  # noqa: E402  # pyright: ignore[reportMissingImports]
from far import now_on  # noqa: E402  # pyright: ignore[reportMissingImports]
from inside import begin_copies_by  # noqa: E402  # pyright: ignore[reportMissingImports]

from kvxfer import IntegrityError  # noqa: E402
from kvxfer.testing import LoopbackNetwork  # noqa: E402

pytestmark = pytest.mark.timeout(300)
needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
ONE_TO_ONE = ([range(8)], [range(8)])
ROUTES = ["mapped", "staged", "direct", "pull"]


def gpus(count):
    """Marks of a test that needs so many GPUs."""
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices"),
        pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed"),
        pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    ]


SAME_KIND = [
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("cuda:0", "cuda:0", id="one gpu", marks=gpus(1)),
    pytest.param("cuda:0", "cuda:1", id="two gpus", marks=gpus(2)),
]
PLACES = [
    *SAME_KIND,
    pytest.param("cuda:0", "cpu", id="gpu to cpu", marks=gpus(1)),
    pytest.param("cpu", "cuda:0", id="cpu to gpu", marks=gpus(1)),
]


def taken(route, there, here):
    """The routes that may be taken: copies of one kind of memory do not reach the other."""
    return {"staged", "direct"} if route == "mapped" and there[:3] != here[:3] else {route}


async def bring(far, issuer, move, request, routes, ranks=1):
    """Offer, fetch and compare every byte."""
    for rank in range(ranks):
        await far.offer(rank, request, scene.IDS, tokens=len(scene.IDS) * 16, payload=b"token")
    results = await asyncio.gather(*move.fetch(issuer.ticket(request), timeout=60))
    move.bring().check()
    assert {result.payload for result in results} == {b"token"}
    assert {route for result in results for route in result.stats.route.split("+")} <= routes
    for rank in range(ranks):
        assert (await far.released(rank, request))[0] == "Released"


@needs_nixl
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("split", [scene.TWO_TO_ONE, scene.ONE_TO_TWO], ids=["2:1", "1:2"])
@pytest.mark.parametrize(("there", "here"), PLACES)
async def test_every_byte(far, near, there, here, split, route):
    issuer, move = await scene.begin(far, near, split, there=there, here=here, route=route)
    await bring(far, issuer, move, "r", taken(route, there, here), ranks=len(split[0]))
    assert await far.intact()


@needs_nixl
@pytest.mark.parametrize("dtypes", scene.CONVERSIONS, ids=" to ".join)
@pytest.mark.parametrize(("there", "here"), PLACES)
async def test_every_element_of_another_dtype(far, near, there, here, dtypes):
    await scene.bring_converted(far, near, dtypes, there=there, here=here)


@needs_nixl
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("there", "here"), PLACES)
async def test_nothing_is_read_or_written_before_its_event(far, near, there, here, route):
    more = {"route": route, "grant_lease": 60}  # where many share a GPU, work on blocks has taken longer than 30 s
    issuer, move = await scene.begin(far, near, ONE_TO_ONE, there=there, here=here, **more)
    await bring(far, issuer, move, "warm", taken(route, there, here))  # connections and kernels are made by now
    move.late()
    (transfer,) = move.fetch(issuer.ticket("r"), late=True, timeout=60)
    await far.offer(0, "r", scene.IDS, tokens=len(scene.IDS) * 16, late=True)
    await transfer
    move.bring().check()


@needs_nixl
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("there", "here"), SAME_KIND)
async def test_one_side_is_late(far, near, there, here, route, side):
    """Each side's event alone must hold back the bytes: with both late, one could stand in for the other."""
    issuer, move = await scene.begin(far, near, ONE_TO_ONE, there=there, here=here, route=route)
    await bring(far, issuer, move, "warm", taken(route, there, here))
    move.late(prefill=side == "prefill", decode=side == "decode")
    (transfer,) = move.fetch(issuer.ticket("r"), late=side == "decode", timeout=60)
    await far.offer(0, "r", scene.IDS, tokens=len(scene.IDS) * 16, late=side == "prefill")
    await transfer
    move.bring().check()


@needs_nixl
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("there", "here"), PLACES)
async def test_layers_arrive_as_they_become_ready(far, near, there, here, route):
    issuer, move = await scene.begin(far, near, ONE_TO_ONE, there=there, here=here, route=route)
    await far.offer(0, "r", scene.IDS, tokens=len(scene.IDS) * 16, streaming=True)
    (transfer,) = move.fetch(issuer.ticket("r"), timeout=60)
    for layer in scene.LAYERS:
        await far.ready(0, "r", layers=[layer])
        await transfer.layers(layer, layer + 1)
        move.bring([layer]).check()  # this layer is there, and nothing of the next
    await far.finish(0, "r", b"end")
    assert (await transfer).payload == b"end"


@needs_nixl
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("there", "here"), SAME_KIND)
async def test_what_arrived_is_compared_with_its_source(far, near, there, here, route):
    issuer, move = await scene.begin(far, near, ONE_TO_ONE, there=there, here=here, route=route, integrity="full")
    await bring(far, issuer, move, "r", {route})
    decode, cache = near.workers[0], near.caches[0]
    checked = decode.describe()["metrics"]["chunks_checked"]
    assert checked["ok"] > 1
    assert len(checked) == 1

    def spoil_and_submit(submit, job, direction):
        if job.sums is not None:  # everything of this chunk has been written, and is about to be read back
            cache.view(1)[1, scene.INTO[0], 11, 2, 0] += 1
            if here != "cpu":
                torch.cuda.synchronize(here)
        return submit(job, direction)

    begin_copies_by(decode, spoil_and_submit)
    await far.offer(0, "s", scene.IDS, tokens=len(scene.IDS) * 16)
    (transfer,) = move.fetch(issuer.ticket("s"), timeout=60)
    with pytest.raises(IntegrityError) as caught:
        await transfer
    await decode.decline(issuer.ticket("s"))  # else the offer waits for another fetch, and closing for the offer
    assert (caught.value.layers, caught.value.damaged) == ((1,), {"default": (scene.INTO[0],)})


@needs_nixl
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        pytest.param("auto", "cuda", marks=gpus(1)),
        pytest.param("cuda", "cuda", marks=gpus(1)),
        pytest.param("pinned", "pinned", marks=gpus(1)),
    ],
)
@pytest.mark.parametrize(("there", "here"), SAME_KIND[1:])
async def test_kinds_of_arenas(far, near, there, here, kind, found):
    config = {"route": "staged", "arena_kind": kind}
    issuer, move = await scene.begin(far, near, ONE_TO_ONE, there=there, here=here, **config)
    assert near.arenas() == await far.arenas() == [found]
    await bring(far, issuer, move, "warm", {"staged"})
    move.late()
    (transfer,) = move.fetch(issuer.ticket("r"), late=True, timeout=60)
    await far.offer(0, "r", scene.IDS, tokens=len(scene.IDS) * 16, late=True)
    await transfer
    move.bring().check()


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        pytest.param("cpu", "cpu", id="cpu"),
        pytest.param("cuda:0", "pinned", id="one gpu", marks=gpus(1)),
        pytest.param("cuda:0", "auto", id="one gpu, whose memory the loopback refuses", marks=gpus(1)),
    ],
)
async def test_without_nixl_through_an_arena_in_host_memory(near, device, kind):
    """The loopback moves host memory only: with a pinned arena that is enough for caches on a GPU."""
    network, theirs, ours = LoopbackNetwork(), scene.sources([range(8)]), scene.targets([range(8)])
    config = {"device": device, "network": network, "route": "staged", "arena_kind": kind, **scene.SIZES}
    issuer = scene.tickets(await near.open("prefill", theirs, **config))
    await near.open("decode", ours, **config)
    assert near.arenas() == ["cpu" if device == "cpu" else "pinned"] * 2
    move = scene.Move(theirs, near, ours)
    near.offer(0, "warm", scene.IDS, tokens=len(scene.IDS) * 16)
    await asyncio.gather(*move.fetch(issuer.ticket("warm"), timeout=60))
    move.bring().check()
    move.late()
    (transfer,) = move.fetch(issuer.ticket("r"), late=True, timeout=60)
    near.offer(0, "r", scene.IDS, tokens=len(scene.IDS) * 16, late=True)
    await transfer
    move.bring().check()
    near.workers[0].offer("again", scene.IDS, tokens=len(scene.IDS) * 16, after=now_on(near.caches[0]))
    await asyncio.gather(*move.fetch(issuer.ticket("again"), timeout=60))
    move.check()
