"""What is called from another thread, or on another loop, than the worker's is refused there and changes nothing."""

import asyncio
import inspect

import pytest
from stage import DEFAULTS, Cache, Copied

import kvxfer
from kvxfer.testing import LoopbackTransport
from kvxfer.tickets import EngineCard

PATIENCE = 20
TOKENS = range(4)
READ = {"card", "config", "describe_soon", "engine", "occupy"}
"""What may be called from any thread."""


async def waited(what):
    return await what


def bare(call):
    """In a thread without a loop; what is to be awaited is told by its first step."""
    made = call()
    if inspect.iscoroutine(made):
        made.send(None)


def looped(call):
    """In a thread with a loop of its own."""

    async def main():
        made = call()
        if inspect.iscoroutine(made):
            await made

    asyncio.run(main())


def of_worker(prefill, decode):
    """By method: a call with which nothing is wrong but where it is made."""
    ticket = prefill.engine.ticket("r")
    return {
        "offer": lambda: prefill.offer("other", [1], tokens=4),
        "claim": lambda: decode.claim(ticket),
        "fetch": lambda: decode.fetch(ticket, [1], tokens=TOKENS),
        "start_fetch": lambda: decode.start_fetch(ticket, [1], tokens=TOKENS),
        "decline": lambda: decode.decline(ticket),
        "describe": decode.describe,
        "begin_drain": decode.begin_drain,
        "drain": decode.drain,
        "aclose": decode.aclose,
        "join": lambda: decode.join(EngineCard.of([decode.card]), key=bytes(32)),
    }


def of_others(offer, transfer, claim):
    """Likewise, of what workers make."""
    return {
        "Offer.extend": lambda: offer.extend([3], tokens=range(4, 8)),
        "Offer.ready": offer.ready,
        "Offer.finish": offer.finish,
        "Offer.released": offer.released,
        "Offer.wait_end": offer.wait_end,
        "Offer.withdraw": offer.withdraw,
        "Transfer.cancel": transfer.cancel,
        "Transfer.layers": lambda: transfer.layers(0, 1),
        "Transfer.outcome": lambda: transfer.outcome,
        "Transfer.__await__": lambda: waited(transfer),
        "Claim.close": claim.close,
    }


def public(kind):
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


@pytest.mark.parametrize("way", [bare, looped])
async def test_calls_from_elsewhere_are_refused_and_change_nothing(stage, pair, source, target, way):
    prefill, decode = pair
    await stage.bring(prefill, decode, "first")
    ticket = prefill.engine.ticket("r")
    offer = prefill.offer("r", [2], tokens=4, streaming=True)
    early = decode.start_fetch(prefill.engine.ticket("later"), [3], tokens=TOKENS)
    claim = decode.claim(ticket)
    before, calls = decode.describe()["custody"], of_worker(prefill, decode)
    assert set(calls) == public(kvxfer.Worker) - READ
    for name, call in {**calls, **of_others(offer, early, claim)}.items():
        (raised,) = await asyncio.gather(asyncio.to_thread(way, call), return_exceptions=True)
        assert type(raised) is kvxfer.UsageError, f"{name}: {raised!r}"
        assert "belong to the loop that opened it" in str(raised)
    assert decode.describe()["custody"] == before
    copied = Copied(target).bring(source, [2], [1], TOKENS)
    offer.ready()
    offer.finish()
    assert (await decode.fetch(ticket, [1], tokens=TOKENS, timeout=PATIENCE)).request == "r"
    copied.check()
    assert not early.done
    early.cancel()
    await asyncio.wait({early.outcome})


async def test_what_only_reads_may_be_called_from_any_thread(pair):
    prefill, decode = pair

    def read():
        decode.occupy(8)
        return prefill.card, prefill.engine.ticket("r"), prefill.config.engine

    assert await asyncio.to_thread(read) == (prefill.card, prefill.engine.ticket("r"), "prefill")
    described = await asyncio.to_thread(decode.describe_soon)
    assert (await asyncio.wrap_future(described))["custody"] == decode.describe()["custody"]


def test_between_two_runs_of_its_loop_a_worker_may_be_called(network):
    cache = Cache()
    copied = Copied(cache).bring(cache, [0], [1], TOKENS)
    with asyncio.Runner() as runner:
        worker = kvxfer.Worker(cache.tensors, kvxfer.Config(**DEFAULTS), transport=LoopbackTransport("p", network))
        runner.run(worker.__aenter__())
        worker.offer("r", [0], tokens=4)
        transfer = worker.start_fetch(worker.engine.ticket("r"), [1], tokens=TOKENS)
        runner.run(waited(transfer))
        copied.check()
        assert not worker.describe()["custody"].held_blocks
        runner.run(worker.aclose())
