"""A worker that says to be another one, whose incarnation is no secret: it is refused, and the other one goes on."""
# the private state of workers that are open
# pyright: reportOptionalMemberAccess=false

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from stage import DEFAULTS, SOON, Cache, Copied, eventually, quiet

from kvxfer import Code, Config, IdentityError, KvxferError, MemoryInDoubt, RefusedError, Released, Withdrawn, Worker
from kvxfer.bench.relay import Relay
from kvxfer.greeting import greeting
from kvxfer.protocol.messages import Cancel
from kvxfer.protocol.session import Role
from kvxfer.runtime import ThreadRuntime
from kvxfer.testing import LoopbackTransport

TOKENS = range(8)
ROUTES = pytest.mark.parametrize("route", ["pull", "direct", "staged"])


class Drawn(ThreadRuntime):
    """Draws this incarnation, and all else at random."""

    def __init__(self, incarnation, cpus=frozenset()):
        super().__init__(cpus)
        self.incarnation = incarnation

    def placed(self, cpus):
        return Drawn(self.incarnation, cpus)

    def token(self, nbytes):
        return self.incarnation if nbytes == len(self.incarnation) else super().token(nbytes)


async def claims_to_be(worker, stage, **config):
    """Another worker, which says of itself all that this one says."""
    twin = Worker(
        Cache().tensors,
        Config(**{**DEFAULTS, "engine": worker.config.engine, **config}),
        transport=LoopbackTransport("twin", stage.network),
        runtime=Drawn(bytes.fromhex(worker.card.incarnation)),
    )
    await twin.__aenter__()
    stage.stack.push_async_callback(twin.aclose, drain=False)
    assert twin.card.incarnation == worker.card.incarnation
    twin._site.body.update(worker._site.body)
    return twin


async def connect(worker, endpoint):
    """Over a new stream, rather than the error of the one before."""
    worker._peers._away.clear()
    return await worker._peers.link(endpoint, None)


class Moving:
    """A fetch whose bytes are under way until they are let go."""

    def __init__(self, stage, prefill, decode, source, target):
        self.stage, self.decode = stage, decode
        stage.network.hold("*")
        self.offer = prefill.offer("moving", [1, 2], tokens=8)
        self.copied = Copied(target).bring(source, [1, 2], [3, 4], TOKENS)
        self.ticket = prefill.engine.ticket("moving")
        self.transfer = decode.start_fetch(self.ticket, [3, 4], tokens=TOKENS)

    async def begun(self):
        await eventually(lambda: self.stage.network.held("*"))

    async def ends_well(self, *workers):
        assert not self.transfer.done
        self.stage.network.release("*")
        await self.transfer
        self.copied.check()
        assert isinstance(await self.offer.released(), Released)
        await quiet(*workers)


@pytest.fixture
async def scene(stage, request):
    """Two workers and a fetch between them that has begun."""
    source, target = Cache(), Cache(layout="HND")
    prefill, decode = await stage.pair(source, target, route=request.node.callspec.params.get("route", "pull"))
    moving = Moving(stage, prefill, decode, source, target)
    await moving.begun()
    return prefill, decode, moving


@ROUTES
async def test_nobody_takes_the_place_of_a_decode_rank(stage, scene, route):
    del route
    prefill, decode, moving = scene
    twin = await claims_to_be(decode, stage)
    (link,) = prefill._links
    for _ in range(3):
        async with asyncio.timeout(10):
            with pytest.raises(IdentityError, match=r"said goodbye: .* was met before") as refused:
                await connect(twin, prefill.card.endpoint)
        assert refused.value.code is Code.IDENTITY
        assert prefill._links == {link}
    await moving.ends_well(prefill, decode)
    assert link.is_open


async def test_nobody_says_for_a_reader_that_it_reads_nothing(stage):
    """Before, an offer ended, and its blocks were given back, while they were read."""
    source, target = Cache(), Cache(layout="HND")
    prefill, decode = await stage.pair(source, target, route="pull")
    moving = Moving(stage, prefill, decode, source, target)
    await moving.begun()
    twin = await claims_to_be(decode, stage)
    (number,) = decode._receiver._incoming
    twin._receiver.opened = lambda link: link.send(Cancel(number))
    with pytest.raises(IdentityError):
        await connect(twin, prefill.card.endpoint)
    ending = asyncio.create_task(moving.offer.withdraw())
    await eventually(lambda: decode.describe()["metrics"]["frames_received"].get("KvAgentResult"))
    assert not ending.done()
    assert stage.network.held("*")
    stage.network.release("*")
    assert isinstance(await ending, Withdrawn)
    with pytest.raises(KvxferError):
        await moving.transfer
    await quiet(prefill, decode)


@ROUTES
async def test_nobody_takes_the_place_of_a_prefill_rank(stage, scene, route):
    """At an endpoint of its own, to which its ticket leads: the other one is asked, which knows no such ticket."""
    del route
    prefill, decode, moving = scene
    twin = await claims_to_be(prefill, stage)
    (link,) = decode._links
    twin.offer("theirs", [1], tokens=4)
    async with asyncio.timeout(10):
        with pytest.raises(RefusedError) as refused:
            await decode.fetch(twin.engine.ticket("theirs"), [7], tokens=range(4))
    assert refused.value.reason is Code.TICKET_FORGED
    assert decode._links == {link}
    assert not twin._links
    await moving.ends_well(prefill, decode)


@pytest.mark.usefixtures("no_locks")
async def test_who_answers_in_place_of_a_silent_prefill_rank_ends_no_doubt(stage, tmp_path):
    """It has taken the endpoint as well; the doubt goes on until the real one answers there again."""
    place, aside = tmp_path / "here", tmp_path / "aside"
    source, target = Cache(), Cache(layout="HND")
    prefill, decode = await stage.pair(source, target, route="direct", prefill={"listen": f"unix:{place}"}, **SOON)
    moving = Moving(stage, prefill, decode, source, target)
    await moving.begun()
    place.rename(aside)
    twin = await claims_to_be(prefill, stage, listen=f"unix:{place}")
    for link in list(decode._links):
        link._transport.abort()
    with pytest.raises(MemoryInDoubt) as doubt:
        await moving.transfer
    settled = asyncio.create_task(doubt.value.settled())
    asked = twin.describe()["metrics"]["frames_received"]
    assert not asked
    refused = decode._peers._away
    await eventually(lambda: [type(away.error) for away in refused.values()] == [IdentityError])
    assert not twin.describe()["metrics"]["frames_received"].get("Cancel")
    assert decode.describe()["custody"].doubtful_blocks
    assert not settled.done()
    place.unlink()
    aside.rename(place)
    stage.network.release("*")
    await settled
    await quiet(decode)


@ROUTES
async def test_nobody_passes_on_what_two_workers_prove_to_each_other(stage, scene, tmp_path, route):
    """A peer whose ticket leads to itself would have the decode rank speak with its prefill rank through it."""
    del route
    prefill, decode, moving = scene
    (link,) = prefill._links
    between = tmp_path / "between"
    target = Path(prefill.card.endpoint.removeprefix("unix:"))
    relay, hello = Relay(), greeting(decode._site, Role.CLIENT, process=None, endpoint="", since=0.0)[0].take_output()
    async with relay.serving(between, target), asyncio.timeout(10):
        assert await connect(decode, f"unix:{between}") is next(iter(decode._links))
    assert relay.sent == len(hello)  # and no proof
    assert prefill._links == {link}
    await moving.ends_well(prefill, decode)


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
async def test_a_worker_that_has_two_names(stage, scheme, tmp_path):
    """The second one leads to the session that there is, or nobody could fetch by it while that is open."""
    source, target = Cache(), Cache(layout="HND")
    listen = {"unix": f"unix:{tmp_path}/here", "tcp": "tcp:127.0.0.1:0"}[scheme]
    prefill, decode = await stage.pair(source, target, prefill={"listen": listen})
    (tmp_path / "there").symlink_to(tmp_path / "here")
    names = prefill.card.endpoint, prefill.card.endpoint.replace("here", "there").replace("127.0.0.1", "localhost")
    links = set()
    for number in range(4):
        prefill.offer(f"r{number}", [1, 2], tokens=8)
        copied = Copied(target).bring(source, [1, 2], [3, 4], TOKENS)
        ticket = prefill.engine.ticket(f"r{number}") | {"endpoints": {"prefix": names[number % 2]}}
        await decode.fetch(ticket, [3, 4], tokens=TOKENS)
        copied.check()
        links |= decode._links
    assert [link.endpoint for link in links] == [names[0]]


async def test_a_worker_that_has_moved(stage, tmp_path):
    """Nobody answers where it was met, or somebody else does, and nothing of it is under way."""
    places = [tmp_path / name for name in ("here", "there", "yonder")]
    prefill, decode = await stage.pair(Cache(), Cache(), prefill={"listen": f"unix:{places[0]}"})
    first = await connect(decode, f"unix:{places[0]}")
    for number, (old, new) in enumerate(pairwise(places)):
        for link in [*decode._links]:
            link._transport.abort()
        await eventually(lambda: not prefill._links and not decode._links)
        old.rename(new)
        if number:
            await stage.worker("other", Cache(), listen=f"unix:{old}")
        prefill.offer(f"r{number}", [1], tokens=4)
        ticket = prefill.engine.ticket(f"r{number}") | {"endpoints": {"prefix": f"unix:{new}"}}
        await decode.fetch(ticket, [3], tokens=range(4))
        (link,) = (link for link in decode._links if link.peer.identity == first.peer.identity)
        assert link.endpoint == f"unix:{new}"


async def test_nobody_passes_on_anything_as_long_as_the_worker_answers(stage, tmp_path):
    """Nothing of it is under way; but what is fetched next would go by way of who stands between."""
    prefill, decode = await stage.pair(Cache(), Cache())
    await connect(decode, prefill.card.endpoint)
    for link in [*decode._links]:
        link._transport.abort()
    await eventually(lambda: not prefill._links and not decode._links)
    between, target = tmp_path / "between", Path(prefill.card.endpoint.removeprefix("unix:"))
    relay, hello = Relay(), greeting(decode._site, Role.CLIENT, process=None, endpoint="", since=0.0)[0].take_output()
    async with relay.serving(between, target), asyncio.timeout(10):
        link = await connect(decode, f"unix:{between}")
    assert link.endpoint == prefill.card.endpoint
    assert relay.sent == len(hello)


@pytest.mark.usefixtures("no_locks")
async def test_who_does_not_answer_where_it_was_met_is_not_believed_elsewhere(stage, tmp_path):
    """Something of it is in doubt, and whoever is there could pass on what both prove."""
    here, there = tmp_path / "here", tmp_path / "there"
    prefill, decode = await stage.pair(Cache(), Cache(), route="direct", prefill={"listen": f"unix:{here}"}, **SOON)
    moving = Moving(stage, prefill, decode, Cache(), Cache())
    await moving.begun()
    here.rename(there)
    for link in list(decode._links):
        link._transport.abort()
    with pytest.raises(MemoryInDoubt) as doubt:
        await moving.transfer
    prefill.offer("theirs", [1], tokens=4)
    ticket = prefill.engine.ticket("theirs") | {"endpoints": {"prefix": f"unix:{there}"}}
    async with asyncio.timeout(10):
        with pytest.raises(IdentityError, match="which was met at") as refused:
            await decode.fetch(ticket, [7], tokens=range(4))
    assert refused.value.met_at == f"unix:{here}"
    assert refused.value.report.code is Code.IDENTITY
    assert not prefill._links
    there.rename(here)
    stage.network.release("*")
    await doubt.value.settled()
    await decode.fetch(prefill.engine.ticket("theirs"), [7], tokens=range(4))
    await quiet(prefill, decode)


async def test_who_was_forestalled_hears_so_at_once(stage):
    """Somebody has met the prefill rank under its incarnation before: its fetch fails, and not by a time-out."""
    prefill, decode = await stage.pair(Cache(), Cache())
    twin = await claims_to_be(decode, stage)
    await connect(twin, prefill.card.endpoint)
    prefill.offer("r", [1, 2], tokens=8)
    async with asyncio.timeout(10):
        with pytest.raises(IdentityError) as refused:
            await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS, timeout=60)
    assert refused.value.report.memory_safe
    await twin.aclose(drain=False)
    await quiet(decode)


async def test_nobody_is_the_worker_that_it_speaks_with(stage):
    prefill, _ = await stage.pair(Cache(), Cache())
    twin = await claims_to_be(prefill, stage)
    with pytest.raises(IdentityError):
        await connect(twin, prefill.card.endpoint)


async def test_two_workers_that_fetch_from_each_other_meet_again(stage):
    """A stream each way, and each of them cut."""
    caches = Cache(), Cache(layout="HND")
    one, other = await stage.pair(*caches)
    pairs = [(one, caches[0], other, caches[1]), (other, caches[1], one, caches[0])]
    for turn in range(3):
        for giver, source, taker, target in pairs:
            giver.offer(f"r{turn}", [1, 2], tokens=8)
            copied = Copied(target).bring(source, [1, 2], [5, 6], TOKENS)
            await taker.fetch(giver.engine.ticket(f"r{turn}"), [5, 6], tokens=TOKENS)
            copied.check()
        for link in [*one._links, *other._links]:
            link._transport.abort()
        await eventually(lambda: not one._links and not other._links)


@pytest.mark.usefixtures("no_locks")
@ROUTES
async def test_nobody_is_forgotten_of_whom_something_is_under_way_or_in_doubt(stage, route):
    prefill, decode = await stage.pair(Cache(), Cache(), route=route, **SOON)
    ours, theirs = (bytes.fromhex(worker.card.incarnation) for worker in (decode, prefill))

    def kept(worker, peer):
        return peer in worker._site.acquaintances._kept()

    assert not kept(prefill, ours)
    moving = Moving(stage, prefill, decode, Cache(), Cache())
    await moving.begun()
    assert kept(prefill, ours)
    assert kept(decode, theirs)
    decode._receiver._recoveries.cancel()  # it does not come back to ask
    for link in list(decode._links):
        link._transport.abort()
    with pytest.raises(KvxferError):
        await moving.transfer
    await eventually(lambda: not prefill._links and not decode._links)
    assert kept(prefill, ours)
    assert kept(decode, theirs)
    stage.network.release("*")
    if route != "pull":  # there it owes the other one an answer
        await eventually(lambda: not kept(prefill, ours))
