"""Virtual time: the same seed gives the same run, an hour costs nothing, and two whole workers live in it."""
# the private state of workers that are open
# pyright: reportOptionalMemberAccess=false

import asyncio
import random

import pytest
import torch
from inside import stop_reading

from kvxfer.config import Config
from kvxfer.errors import PeerLostError, UnreachableError
from kvxfer.geometry import CacheTensor
from kvxfer.offers import Expired, Released
from kvxfer.testing import LoopbackNetwork, LoopbackTransport, simulate
from kvxfer.worker import Worker

HOUR = 3600.0
BLOCK_TOKENS = 4
SETTINGS = {"arena_bytes": "64KiB", "chunk_bytes": "4KiB"}
ROUTES = ["staged", "direct", "pull"]


# --- the simulation itself


def trace(seed):
    """What a few tasks and services do, and when."""
    seen = []

    async def scenario(runtime):
        def note(what):
            seen.append((what, runtime.now()))

        def step(name, left):
            note(name)
            left[0] -= 1
            return runtime.jitter() if left[0] else None

        for name in "abc":
            runtime.start(name, lambda name=name, left=[6]: step(name, left))
        note(runtime.token(8))
        await asyncio.sleep(1.0)

    simulate(scenario, seed=seed)
    return seen


def test_the_same_seed_gives_the_same_run():
    assert trace(3) == trace(3)
    orders = {tuple(what for what, _ in trace(seed)[1:]) for seed in range(8)}
    assert len(orders) > 4
    assert all(sorted(order) == sorted("abc" * 6) for order in orders)


def test_time_jumps_and_stands_still_in_a_thread():
    async def scenario(runtime):
        begin = runtime.now()
        await asyncio.sleep(1e6)
        assert runtime.now() - begin == pytest.approx(1e6, abs=1e-3)
        began = runtime.now()
        assert await runtime.in_thread(lambda: 7) == 7
        assert runtime.now() == began
        async with asyncio.timeout(30.0) as bound:
            await asyncio.sleep(29.999)
        assert not bound.expired()
        return "done"

    assert simulate(scenario, limit=1e7) == "done"


def test_a_timer_comes_neither_early_nor_much_later():
    async def scenario(runtime):
        for delay in (1e-6, 0.5, 120.0, 100_000.0):
            begin = runtime.now()
            await asyncio.sleep(delay)
            assert delay <= runtime.now() - begin < delay + 1e-4

    simulate(scenario)


def test_a_simulation_in_which_nothing_can_happen_any_more():
    async def scenario(runtime):
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="the simulation is stuck"):
        simulate(scenario)


def test_a_simulation_in_which_timers_go_on_for_ever_ends(tmp_path, monkeypatch):
    """An open worker watches its loop, so there is always a timer."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def forever(runtime):
        cache = torch.zeros(2, BLOCK_TOKENS, 1, 8, dtype=torch.uint8)
        tensor = CacheTensor(cache, "block token head dim", layers=[0], heads=range(1))
        transport = LoopbackTransport("w", LoopbackNetwork())
        async with Worker([tensor], Config(**SETTINGS), transport=transport, runtime=runtime):
            await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="not ended after 100 virtual seconds"):
        simulate(forever, limit=100)


def test_what_a_scenario_raises_comes_out():
    async def scenario(runtime):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        simulate(scenario)


def test_services_wake_sleep_and_stop():
    async def scenario(runtime):
        ran, delays = [], [5.0, None]

        def step():
            ran.append(runtime.now())
            return delays.pop(0) if delays else None

        service = runtime.start("probe", step, setup=lambda: ran.append("setup"))
        assert ran == []
        await asyncio.sleep(1.0)
        assert ran[0] == "setup"
        await asyncio.sleep(10.0)
        assert ran[2] - ran[1] == pytest.approx(5.0, abs=1e-3)
        for _ in range(3):
            service.wake()
        await asyncio.sleep(1.0)
        assert len(ran) == 4  # wake-ups before the next step are merged
        service.wake()
        assert service.stop(0.0)
        service.wake()
        await asyncio.sleep(1.0)
        assert len(ran) == 4

    simulate(scenario)


@pytest.mark.parametrize("where", ["setup", "step"])
def test_a_service_that_raises_is_reported_and_over(where):
    async def scenario(runtime):
        problems, steps = [], []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["exception"]))

        def step():
            steps.append(None)
            raise ValueError("broken")

        def setup():
            if where == "setup":
                raise ValueError("broken")

        service = runtime.start("probe", step, setup=setup)
        await asyncio.sleep(1.0)
        service.wake()
        await asyncio.sleep(1.0)
        (problem,) = problems
        assert isinstance(problem, ValueError)
        assert len(steps) == (where == "step")
        assert service.stop(0.0)

    simulate(scenario)


# --- two workers in virtual time


def cache(blocks=16, layers=3, heads=2, dim=8):
    """Layers of a cache whose elements are all different, and how to describe them."""
    shape = (2, blocks, BLOCK_TOKENS, heads, dim)
    count = torch.Size(shape).numel()
    memory = [torch.arange(count).reshape(shape) + (layer + 1) * 1_000_003 for layer in range(layers)]
    tensors = [
        CacheTensor(tensor, "kv block token head dim", layers=[layer], heads=range(heads))
        for layer, tensor in enumerate(memory)
    ]
    return memory, tensors


class Pair:
    """A prefill and a decode worker on one simulated network."""

    def __init__(self, runtime, **config):
        self.runtime, self.network = runtime, LoopbackNetwork()
        self.source, source = cache()
        self.target, target = cache()
        for tensor in self.target:
            tensor.neg_()
        self.config = Config(**SETTINGS | config)
        self.prefill, self.decode = (
            Worker(tensors, self.config, transport=LoopbackTransport(name, self.network), runtime=runtime)
            for name, tensors in (("prefill", source), ("decode", target))
        )

    async def __aenter__(self):
        await self.prefill.__aenter__()
        await self.decode.__aenter__()
        return self

    async def __aexit__(self, *error):
        await self.decode.aclose(drain=False)
        await self.prefill.aclose(drain=False)

    def ticket(self, request):
        return self.prefill.engine.ticket(request)

    def expected(self, ids, into, tokens, then):
        """The target as it must be after a fetch on top of `then`."""
        after = [tensor.clone() for tensor in then]
        for token in tokens:
            block, slot = divmod(token, BLOCK_TOKENS)
            for tensor, source in zip(after, self.source, strict=True):
                tensor[:, into[block], slot] = source[:, ids[block], slot]
        return after

    def idle(self):
        """Nothing is held, under way or in doubt on either side."""
        for worker in (self.prefill, self.decode):
            seen = worker.describe()
            for share in (seen["arena"]["send"], seen["arena"]["receive"]):
                assert share.free_bytes == share.capacity_bytes
                assert share.waiting_requests == 0
            assert not seen["custody"].holders
            assert seen["sending"] == seen["receiving"] == seen["in_doubt"] == 0


@pytest.mark.parametrize("route", ROUTES)
def test_a_fetch_waits_for_its_offer_and_brings_every_byte(route):
    async def scenario(runtime):
        async with Pair(runtime, route=route) as pair:
            untouched = [tensor.clone() for tensor in pair.target]
            transfer = pair.decode.start_fetch(pair.ticket("r"), [1, 2, 3], tokens=range(10))
            await asyncio.sleep(30.0)
            assert not transfer.done
            offer = pair.prefill.offer("r", [4, 5, 6], tokens=10, payload=b"token")
            result = await transfer
            assert (result.payload, result.stats.route) == (b"token", route)
            expected = pair.expected([4, 5, 6], [1, 2, 3], range(10), untouched)
            assert all(torch.equal(a, b) for a, b in zip(pair.target, expected, strict=True))
            assert isinstance(await offer.released(), Released)
            await asyncio.sleep(1.0)
            pair.idle()

    simulate(scenario, seed=1)


def run_of(seed):
    seen = []

    async def scenario(runtime):
        async with Pair(runtime, route=ROUTES[seed % 3]) as pair:
            ids = iter(range(16))

            async def one(number):
                where = [next(ids), next(ids)]
                offer = pair.prefill.offer(f"r{number}", where, tokens=7)
                await pair.decode.fetch(pair.ticket(f"r{number}"), where, tokens=range(7))
                seen.append((number, runtime.now()))
                await offer.released()

            await asyncio.gather(*(one(number) for number in range(5)))
            seen.append([(entry.operation, entry.src, entry.length) for entry in pair.network.log])

    simulate(scenario, seed=seed)
    return seen


@pytest.mark.parametrize("seed", range(3))
def test_two_runs_of_two_workers_are_the_same(seed):
    assert run_of(seed) == run_of(seed)


@pytest.mark.parametrize("seed", range(3))
def test_an_unclaimed_offer_expires_after_exactly_its_time(seed):
    async def scenario(runtime):
        async with Pair(runtime) as pair:
            begin = runtime.now()
            offer = pair.prefill.offer("r", [1], tokens=3)
            ending = await offer.released()
            assert ending == Expired("nobody claimed it for 120 s")
            assert runtime.now() - begin == pytest.approx(120.0, abs=1e-3)
            assert runtime.now() - begin >= 120.0
            pair.idle()

    simulate(scenario, seed=seed)


def test_a_claim_keeps_an_offer_for_an_hour_and_then_its_lease_ends():
    async def scenario(runtime):
        async with Pair(runtime) as pair:
            offer = pair.prefill.offer("r", [1], tokens=3)
            claim = pair.decode.claim(pair.ticket("r"))
            released = asyncio.ensure_future(offer.released())
            await asyncio.sleep(HOUR)
            assert not released.done()
            claim.close()
            closed = runtime.now()
            assert await released == Expired("its decode engine stopped renewing it for 60 s")
            assert 0 < runtime.now() - closed <= pair.config.bounds()["released_by_lease"]
            pair.idle()

    simulate(scenario)


def test_idle_sessions_live_on_heartbeats():
    async def scenario(runtime):
        async with Pair(runtime) as pair:
            claim = pair.decode.claim(pair.ticket("r"))
            await asyncio.sleep(1.0)
            claim.close()
            await asyncio.sleep(HOUR)
            (peer,) = pair.decode.describe()["peers"]
            assert peer["connected_seconds"] > HOUR
            assert peer["silent_seconds"] <= pair.config.heartbeat + 0.01

    simulate(scenario)


def test_a_silent_peer_is_noticed_after_exactly_peer_timeout():
    async def scenario(runtime):
        async with Pair(runtime) as pair:
            transfer = pair.decode.start_fetch(pair.ticket("never"), [1], tokens=range(3))
            await asyncio.sleep(1.0)
            (peer,) = pair.decode.describe()["peers"]
            last = runtime.now() - peer["silent_seconds"]
            stop_reading(pair.decode)  # the peer lives, but nothing of it arrives
            with pytest.raises(PeerLostError, match="silent for 20 s"):
                await transfer
            waited = runtime.now() - last
            assert pair.config.peer_timeout <= waited <= pair.config.bounds()["silent_peer"]
            assert transfer.memory_safe

    simulate(scenario)


def test_a_stranger_who_only_listens_costs_the_handshake_bound():
    async def scenario(runtime, path):
        connected = []

        async def silent(reader, writer):
            connected.append(writer)
            await reader.read()  # until the other side gives up
            writer.close()

        server = await asyncio.start_unix_server(silent, path)
        async with server, Pair(runtime) as pair:
            ticket = pair.ticket("r") | {"endpoints": {"prefix": f"unix:{path}"}}
            begin = runtime.now()
            with pytest.raises(UnreachableError, match="no handshake within 30 s"):
                await pair.decode.fetch(ticket, [1], tokens=range(3))
            waited = runtime.now() - begin
            assert pair.config.handshake_timeout <= waited <= pair.config.bounds()["handshake"]
            assert connected

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        simulate(lambda runtime: scenario(runtime, f"{folder}/silent"))


# --- a sweep over seeds


async def storm(runtime, seed):
    """Five fetches at once, some cancelled at any moment, over a network with moods."""
    chance = random.Random(seed)
    config = {"route": chance.choice([*ROUTES, "auto"]), "window": chance.choice([1, 2, 4])}
    async with Pair(runtime, **config) as pair:
        before = [tensor.clone() for tensor in pair.target]
        pair.network.delay("*", chance.randrange(6))
        blocks = chance.sample(range(16), 15)
        wanted = {}
        places = [blocks[3 * number : 3 * number + 3] for number in range(5)]

        async def one(number):
            into, ids = places[number], chance.sample(range(16), 3)
            tokens = range(chance.randrange(4), chance.randrange(5, 13))
            wanted[number] = pair.expected(ids, into, tokens, before)
            request = f"r{number}"
            offering = asyncio.ensure_future(offer_later(request, ids, chance.random() * 2e-3))
            transfer = pair.decode.start_fetch(pair.ticket(request), into, tokens=tokens)
            if chance.random() < 0.6:
                await cancel_later(transfer, chance.choice([0.0, 1e-4, 1e-3, 3e-3, 6e-3]) * 2 * chance.random())
            else:
                await transfer
                mine = [
                    (tensor[:, into], new[:, into]) for tensor, new in zip(pair.target, wanted[number], strict=True)
                ]
                assert all(torch.equal(a, b) for a, b in mine), f"wrong bytes of {request}"
            left = [tensor[:, into].clone() for tensor in pair.target]
            return (await offering), left

        async def offer_later(request, ids, delay):
            await asyncio.sleep(delay)
            return pair.prefill.offer(request, ids, tokens=12)

        async def cancel_later(transfer, delay):
            waiting = asyncio.ensure_future(transfer)
            await asyncio.sleep(delay)
            began = runtime.now()
            waiting.cancel()
            await asyncio.wait([waiting])
            assert runtime.now() - began <= pair.config.bounds()["revoke"]
            assert transfer.memory_safe
            assert waiting.cancelled() or waiting.exception() is None

        async def moods():
            while True:
                await asyncio.sleep(chance.random() * 2e-3)
                pair.network.hold(peer := chance.choice(["prefill", "decode", "*"]))
                await asyncio.sleep(chance.random() * 5e-3)
                pair.network.release(peer)

        weather = asyncio.ensure_future(moods())
        ends = await asyncio.gather(*(one(number) for number in range(5)))
        weather.cancel()
        for peer in ("prefill", "decode", "*"):  # it may be that one is held still
            pair.network.release(peer)
        began = runtime.now()
        for offer, _ in ends:
            assert isinstance(await offer.released(), Released | Expired)
        assert runtime.now() - began <= pair.config.bounds()["released_by_lease"] + pair.config.offer_lease
        untouched = torch.tensor([block for block in range(16) if block not in blocks])
        for layer, tensor in enumerate(pair.target):
            assert torch.equal(tensor[:, untouched], before[layer][:, untouched])
            for number, (_, left) in enumerate(ends):
                now = tensor[:, places[number]]
                assert torch.equal(now, left[layer]), f"r{number} was written after it had ended"
                old, new = before[layer][:, places[number]], wanted[number][layer][:, places[number]]
                assert ((now == old) | (now == new)).all(), f"r{number} holds bytes that nobody sent"
        await asyncio.sleep(1.0)
        pair.idle()


@pytest.mark.parametrize("seed", range(40))
def test_a_storm(seed):
    simulate(lambda runtime: storm(runtime, seed), seed=seed)
