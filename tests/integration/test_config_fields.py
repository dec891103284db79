"""Everything configured takes effect: each field of `Config` and `FabricConfig` is changed and seen through a Worker.

A case changes a field to what its default is not, and asserts what would not hold with the default. Time is virtual but
where a thread, NIXL or a GPU is what the field is about.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import Authority
from far import Far, Ranks
from stage import KEY, Cache, Copied, Gate, raised
from wire import SIZES, TIMES, play

from kvxfer import (
    Code,
    Config,
    ConfigError,
    FabricError,
    KvxferError,
    MismatchError,
    RequestError,
    TransferFailedError,
    UnreachableError,
    Worker,
)
from kvxfer.testing import LoopbackNetwork, LoopbackTransport
from kvxfer.tickets import EngineCard, Issuer

NBYTES = 2 * 2 * 8 * 4 * 8 * 4
"""Of 8 tokens of a `Cache`: layers, K and V, tokens, heads, dim, bytes of an element."""
needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


CASES: dict[bool, list[Any]] = {True: [], False: []}
"""Scenarios, by whether their time is virtual."""
FIELDS: set[str] = set()
"""Those that they show."""
ELSEWHERE = {
    "convert": "test_convert",
    "integrity": "test_checking",
    "rank": "test_ranks",
    "route": "test_routes",
    "traces": "test_traces",
    "world": "test_ranks",
}
"""Fields that a file of tests is about, and fails without."""


def field(name, *values, virtual=True, marks=()):
    """This scenario shows that the field takes effect; with values, once for each of them."""

    def note(scenario):
        FIELDS.add(name)
        for given in [(value,) for value in values] or [()]:
            case = "-".join(map(str, [name, scenario.__name__, *given]))
            CASES[virtual].append(pytest.param(partial(scenario, *given), id=case, marks=marks))
        return scenario

    return note


async def refused(play, error):
    """What a fetch raises of a request that is on offer."""
    play.prefill.offer("r", [1, 2], tokens=8)
    return await raised(play.start("r"), error)


# --- who a worker is


@field("engine")
async def peers_and_tickets_name_the_engine(play):
    await play.pair(prefill={"engine": "alpha"}, decode={"engine": "beta"})
    result, _ = await play.bring("r")
    assert play.ticket("r")["engine"] == "alpha"
    assert result.stats.peers[0].startswith("alpha[0/1]@")
    assert play.prefill.describe()["peers"][0]["peer"].startswith("beta[0/1]@")


@field("model")
async def different_models_do_not_meet(play):
    await play.pair(prefill={"model": "llama"}, decode={"model": "mamba"})
    assert (await refused(play, MismatchError)).fields == {"model": ("mamba", "llama")}
    nameless = await play.worker("nameless", Cache())
    await nameless.fetch(play.ticket("r"), [3, 4], tokens=range(8))


# --- where it listens, and whom it trusts


@field("listen")
async def a_socket_at_a_path(play):
    await play.pair(prefill={"listen": f"unix:{play.folder}/here"})
    assert play.prefill.card.endpoint == f"unix:{play.folder}/here"
    await play.bring("r")


@field("advertise")
async def peers_go_where_the_card_says(play):
    listen, advertise = f"unix:{play.folder}/inside", f"unix:{play.folder}/outside"
    await play.pair(prefill={"listen": listen, "advertise": advertise})
    outside = await play.wire_to_endpoint(listen, "outside")
    assert play.prefill.card.endpoint == advertise
    play.prefill.offer("r", [1, 2], tokens=8)
    await play.decode.fetch(play.prefill.engine.ticket("r"), [3, 4], tokens=range(8))
    assert outside.said > 0


@field("secret")
async def who_does_not_know_the_secret_gets_nothing(play):
    secret = "correct horse battery"
    await play.pair(prefill={"secret": secret}, decode={"secret": "wrong horse battery."})
    await refused(play, UnreachableError)
    knowing = await play.worker("knowing", Cache(), secret=secret)
    await knowing.fetch(play.ticket("r"), [3, 4], tokens=range(8))


@field("trust", "none", "full")
async def whom_addresses_are_told(trust, play):
    prefill = await play.worker("prefill", play.source, listen="tcp:127.0.0.1:0", trust=trust)
    decode = await play.worker("decode", Cache(), trust="full")
    prefill.offer("r", [1, 2], tokens=8)
    result = await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=range(8))
    assert prefill.describe()["peers"][0]["trusted"] is (trust == "full")
    assert result.stats.route == {"none": "staged", "full": "direct"}[trust]  # of so few pieces


@field("allow_peers")
async def nobody_else_is_connected_to(play):
    await play.pair(decode={"allow_peers": [f"unix:{play.folder}/allow*"]})
    assert "allow_peers" in str(await refused(play, UnreachableError))
    assert play.wire.said == 0
    allowed = await play.wire_to(play.prefill, "allowed")
    await play.decode.fetch(play.ticket("r", allowed), [3, 4], tokens=range(8))


# --- how bytes travel


@field("arena_bytes")
async def the_arena_is_as_large_as_that(play):
    worker = await play.worker("w", Cache(), arena_bytes="96KiB")
    arena = worker.describe()["arena"]
    assert arena["send"].capacity_bytes + arena["receive"].capacity_bytes == 96 << 10


@field("arena_kind")
async def the_arena_is_of_that_kind(play):
    worker = await play.worker("w", Cache(), arena_kind="cpu")
    assert worker.describe()["arena"]["kind"] == "cpu"
    assert (await play.worker("none", Cache(), arena_bytes=0)).describe()["arena"]["kind"] is None
    if not torch.cuda.is_available():
        await raised(play.worker("pinned", Cache(), arena_kind="pinned"), KvxferError)
    for kind in ("cuda", "fabric"):
        error = await raised(play.worker(kind, Cache(), arena_kind=kind), ConfigError)
        assert f"arena_kind is '{kind}' and the cache is on a CPU" in str(error)


@field("chunk_bytes", "prefill", "decode")
async def chunks_are_no_larger_than_either_side_says(side, play):
    other = {"prefill": "decode", "decode": "prefill"}[side]
    await play.pair(route="staged", **{side: {"chunk_bytes": 1024}, other: {"chunk_bytes": "32KiB"}})
    result, _ = await play.bring("r")
    assert result.stats.chunks >= NBYTES // 1024
    assert max(entry.length for entry in play.network.log) <= 1024


@field("chunk_bytes", "mapped", "direct", "pull")
async def chunks_in_place_are_no_larger(route, play):
    source, target = Cache(shared=True), Cache(shared=True)
    await play.pair(source=source, target=target, route=route, chunk_bytes=1024)
    result, _ = await play.bring("r")
    assert (result.stats.route, result.stats.chunks) == (route, NBYTES // 1024)


@field("window", 1, 3)
async def so_many_chunks_are_in_flight(window, play):
    await play.pair(route="staged", window=window, chunk_bytes=1024)
    play.network.hold("decode")
    play.prefill.offer("r", [1, 2], tokens=8)
    transfer = play.start("r")
    await asyncio.sleep(1)
    assert play.network.held("decode") == window
    play.network.release("decode")
    await transfer


# --- times


@field("peer_timeout")
async def frames_come_as_often(play):
    await play.pair(peer_timeout=5)
    claim = play.decode.claim(play.ticket("r"))
    await asyncio.sleep(1)
    claim.close()
    before = play.wire.heard, play.wire.said
    await asyncio.sleep(60)
    for frames in (play.wire.heard - before[0], play.wire.said - before[1]):
        assert 110 <= frames <= 121


@field("grant_lease", ("direct", 4.9), ("direct", 5.1), ("pull", 4.9), ("pull", 5.1))
async def what_was_granted_or_announced_may_be_used_so_long(case, play):
    (route, fires), gate = case, Gate()
    granted = route == "direct"
    await play.pair(route=route, **{"decode" if granted else "prefill": {"grant_lease": 5}})
    play.prefill.offer("r", [1, 2], tokens=8, **({"after": gate} if granted else {}))
    transfer = play.start("r", **({} if granted else {"after": gate}))
    await asyncio.sleep(fires)
    gate.fired = True
    if fires < 5:
        await transfer
    else:
        assert (await raised(transfer, TransferFailedError)).reason is Code.TIMEOUT


# --- how many


@field("max_transfers")
async def no_more_fetches_here(play):
    await play.pair(decode={"max_transfers": 1})
    play.start("r")
    with pytest.raises(RequestError, match="max_transfers is 1"):
        play.start("s", [5, 6])


class Counting(LoopbackTransport):
    """Notes the pieces and the bytes of every post."""

    def __init__(self, name, network):
        super().__init__(name, network)
        self.posts: list[tuple[int, int]] = []

    def post(self, peer, operation, local, remote):
        self.posts.append((len(local.pieces), int(local.pieces[:, 1].sum())))
        return super().post(peer, operation, local, remote)


async def posts_of(play, **fabric):
    """What a whole request in one chunk is cut into."""
    config = {"route": "direct", "chunk_bytes": "32KiB"}
    transport = Counting("prefill", play.network)
    play.prefill = await play.worker("prefill", play.source, transport=transport, fabric=fabric, **config)
    play.decode = await play.worker("decode", play.target, **config)
    play.prefill.offer("r", list(range(16)), tokens=64)
    copied = Copied(play.target).bring(play.source, list(range(16)), list(range(16)), range(64))
    await play.decode.fetch(play.prefill.engine.ticket("r"), list(range(16)), tokens=range(64))
    copied.check()
    return transport.posts


@field("fabric.max_descriptors")
async def no_more_pieces_in_a_post(play):
    posts = await posts_of(play, max_descriptors=10)
    assert max(pieces for pieces, _ in posts) == 10


@field("fabric.max_post_bytes")
async def no_more_bytes_in_a_post(play):
    posts = await posts_of(play, max_post_bytes=4096)
    assert max(nbytes for _, nbytes in posts) == 4096


# --- TLS


async def over_tcp(play, prefill, decode):
    """A fetch between two workers over TCP with these settings `tls`: whether their streams were TLS."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await play.worker("prefill", play.source, listen="tcp:127.0.0.1:0", tls=prefill),
            await play.worker("decode", play.target, tls=decode),
        ]
        for worker in workers:
            stack.push_async_callback(worker.aclose, drain=False)
        workers[0].offer("r", [1, 2], tokens=8)
        copied = Copied(play.target).bring(play.source, [1, 2], [3, 4], range(8))
        await workers[1].fetch(workers[0].engine.ticket("r"), [3, 4], tokens=range(8), timeout=20)
        copied.check()
        return {peer["encrypted"] for worker in workers for peer in worker.describe()["peers"]}


@field("tls.authorities")
async def with_an_authority_streams_are_tls(play):
    assert await over_tcp(play, {}, {}) == {False}
    ours, others = Authority(play.folder), Authority(play.folder, "others")
    assert await over_tcp(play, ours.issue(), ours.issue()) == {True}
    error = await raised(over_tcp(play, others.issue(), ours.issue()), UnreachableError)
    assert "tls.authorities" in str(error)


@field("tls.certificate")
async def the_certificate_is_shown(play):
    ours, others = Authority(play.folder), Authority(play.folder, "others")
    stranger = others.issue() | ours.trusted
    await raised(over_tcp(play, stranger, ours.issue()), UnreachableError)
    await raised(over_tcp(play, ours.issue(), stranger), UnreachableError)


def joined(path, *parts):
    path.write_text("".join(Path(part).read_text() for part in parts))
    return path


@field("tls.key")
async def the_key_may_be_in_a_file_of_its_own(play):
    ours = Authority(play.folder).issue()
    both = joined(play.folder / "both.pem", ours["key"], ours["certificate"])
    await over_tcp(play, ours, {"authorities": ours["authorities"], "certificate": both})
    with pytest.raises(ConfigError, match=r"name the file of the key with tls\.key"):
        Config(tls={**ours, "key": None})


@field("tls.mutual")
async def who_connects_shows_a_certificate_too(play):
    ours = Authority(play.folder)
    error = await raised(over_tcp(play, ours.issue(), ours.trusted), UnreachableError)
    assert "tls.certificate" in str(error)
    await over_tcp(play, {**ours.issue(), "mutual": False}, ours.trusted)


@field("tls.server_name")
async def certificates_may_carry_a_name_of_their_own(play):
    named = Authority(play.folder).issue("kv.example")
    error = await raised(over_tcp(play, named, named), UnreachableError)
    assert "tls.server_name" in str(error)
    await over_tcp(play, named, {**named, "server_name": "kv.example"})


# --- what needs threads, NIXL or a GPU


def own_threads():
    """Where each thread of kvxfer's may run."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kvxfer")]
    return {thread.name: os.sched_getaffinity(thread.native_id or 0) for thread in threads}


@field("affinity", "caller", "own", virtual=False)
async def threads_are_kept_on_these_cpus(loop, stack, caplog):
    before = os.sched_getaffinity(0)
    one = max(before)
    if len(before) < 2:
        pytest.skip("this process may use one CPU only")
    others = set(own_threads())
    network, source, target = LoopbackNetwork(), Cache(), Cache()
    prefill, decode = [
        await stack.enter_async_context(
            Worker(
                cache.tensors, Config(affinity=str(one), **SIZES), transport=LoopbackTransport(name, network), loop=loop
            )
        )
        for name, cache in (("prefill", source), ("decode", target))
    ]
    prefill.offer("r", [1, 2], tokens=8)
    await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=range(8))
    ours = {name: cpus for name, cpus in own_threads().items() if name not in others}
    assert all(cpus == {one} for cpus in ours.values()), ours
    assert {"kvxfer-fabric", "kvxfer-mover"} <= set(ours)
    assert ("kvxfer-loop" in ours) is (loop == "own")
    assert os.sched_getaffinity(0) == before, "the caller's loop runs where it did"
    assert prefill.describe()["affinity"] == {"cpus": [one], "why": "affinity names them"}
    await raised(Worker(source.tensors, Config(affinity=[one, 99_999], **SIZES), loop=loop).__aenter__(), ConfigError)


async def with_nixl(stack, caplog, **fabric):
    """Two workers over NIXL that exchange a request; what NIXL says of the backends of one of them."""
    caplog.set_level(logging.INFO, "kvxfer.fabric")
    caplog.clear()
    source, target = Cache(), Cache()
    prefill, decode = [
        await stack.enter_async_context(Worker(cache.tensors, Config(fabric=fabric, drain_timeout=0, **SIZES)))
        for cache in (source, target)
    ]
    made = [record for record in caplog.records if record.kvxfer["event"] == "nixl_agent_created"]
    prefill.offer("r", [1, 2], tokens=8)
    copied = Copied(target).bring(source, [1, 2], [3, 4], range(8))
    await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=range(8), timeout=20)
    copied.check()
    return made[0].kvxfer["backend"]


@field("fabric.backends", virtual=False, marks=[needs_nixl])
async def these_backends_are_created(stack, caplog):
    with pytest.raises(FabricError, match="no backend 'CARRIER_PIGEON'") as caught:
        await with_nixl(stack, caplog, backends=["CARRIER_PIGEON"])
    others = {"POSIX"} if "POSIX" in str(caught.value) else set()  # NIXL is also packed without it
    assert set(await with_nixl(stack, caplog, backends=["UCX", *others])) == {"UCX", *others}


@field("fabric.backend_params", virtual=False, marks=[needs_nixl])
async def parameters_reach_the_backend(stack, caplog):
    params = {"UCX": {"engine_config": "TLS=tcp"}}
    assert await with_nixl(stack, caplog, backend_params=params) == params
    with pytest.raises(FabricError, match="TLS=pigeon"):
        await with_nixl(stack, caplog, backend_params={"UCX": {"engine_config": "TLS=pigeon"}})
    with pytest.raises(ConfigError, match="pigeons"):
        await with_nixl(stack, caplog, backend_params={"UCX": {"pigeons": "2"}})


@field("fabric.num_workers", virtual=False, marks=[needs_nixl])
async def so_many_workers_are_created(stack, caplog):
    assert await with_nixl(stack, caplog, num_workers=3) == {"UCX": {"num_workers": "3"}}


@field("fabric.devices", virtual=False, marks=[needs_nixl])
async def these_devices_are_used(stack, caplog):
    assert await with_nixl(stack, caplog, devices=["lo"]) == {"UCX": {"engine_config": "NET_DEVICES=lo"}}
    with pytest.raises(FabricError, match="pigeon0"):
        await with_nixl(stack, caplog, devices=["pigeon0"])


@field("fabric.scatter_lists", virtual=False, marks=[needs_nixl])
async def nixl_is_told_to_make_lists(stack, caplog):
    name = "NIXL_UCX_SGL_ENABLE"
    assert name not in os.environ
    stack.callback(os.environ.pop, name, None)
    await with_nixl(stack, caplog)
    assert name not in os.environ
    await with_nixl(stack, caplog, scatter_lists=True)
    assert os.environ[name] == "y"


@field("copy_ctas", virtual=False, marks=[*needs_gpu, needs_nixl, pytest.mark.timeout(300)])
async def a_gather_takes_longer_with_one_thread_block(stack, caplog):
    far, near = Far(), Ranks()
    stack.callback(far.end)
    stack.push_async_callback(near.close)
    blocks, tokens = list(range(64)), 64 * 64
    caches = [Cache(blocks=64, block_tokens=64, layers=range(4), heads=range(8), dim=128) for _ in range(2)]
    sizes = {"arena_bytes": "1GiB", "chunk_bytes": "512MiB", "route": "staged", "device": "cuda:0"}
    await near.open("decode", [caches[1]], **sizes)
    spent = {}
    for rank, (setting, ctas) in enumerate(((1, 1), (64, 64), (1, 64))):
        card = await far.open("prefill", [caches[0]], copy_ctas=setting, **sizes)
        if ctas != setting:
            await far.occupy(rank, ctas)
        for number in range(3):  # the last one counts: kernels and connections are made by then
            request = f"r{rank}-{number}"
            await far.offer(rank, request, blocks, tokens=tokens)
            ticket = Issuer(EngineCard.from_dict(card), KEY).ticket(request)
            after = torch.cuda.current_stream()
            await near.workers[0].fetch(ticket, blocks, tokens=range(tokens), after=after, timeout=60)
            _, (stats,) = await far.released(rank, request)
            spent[rank] = stats.gathering
    assert spent[0] > 2.5 * spent[1], spent
    assert spent[0] > 2.5 * spent[2], "it is changed while the worker runs"


# ---


@pytest.mark.parametrize("scenario", CASES[True])
def test_it_takes_effect(scenario, tmp_path):
    play(scenario, tmp_path)


@pytest.mark.parametrize("scenario", CASES[False])
async def test_it_takes_effect_in_real_time(scenario, caplog):
    async with contextlib.AsyncExitStack() as stack:
        await scenario(stack, caplog)


def test_no_field_is_without_a_case():
    """Those of `TIMES` decide on when a caller of `test_bounds` hears."""
    fields = FIELDS | TIMES.keys() | ELSEWHERE.keys()
    assert fields == {setting.name for setting in Config().effective()}
    assert all(Path(__file__).with_name(f"{name}.py").exists() for name in ELSEWHERE.values())
