"""A worker, or what it made, that is used in a forked child says so there at once, and goes on in its parent."""

import subprocess
import sys

SCRIPT = """
import asyncio, contextlib, os, signal, sys, threading, torch, warnings, kvxfer
from kvxfer.testing import LoopbackNetwork, LoopbackTransport

cache = torch.zeros(8, 16, 2, 4)
tensors = [kvxfer.CacheTensor(cache, axes="block token head dim", kv="k", layers=[0], heads=range(2))]

def transport():
    return LoopbackTransport("e", LoopbackNetwork())

def config():
    return kvxfer.Config(engine="e", arena_bytes="1MiB", chunk_bytes="64KiB")

def refused(call):
    try:
        call()
    except kvxfer.ForkedError as error:
        assert f"forked off process {os.getppid()}" in str(error)
        return True

def in_child(*calls):
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        os._exit(0 if all([refused(call) for call in calls]) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def held_elsewhere(*locks):
    held, over = threading.Event(), threading.Event()
    def hold():
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            over.wait()
    threading.Thread(target=hold).start()
    held.wait()
    return over

def dropped(worker):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worker.__del__()  # it is the parent's to close
    worker.begin_drain()

async def waited(transfer):
    return await transfer

async def awaited(loop):
    async with kvxfer.Worker(tensors, config(), transport=transport(), loop=loop) as worker:
        held = worker.offer("held", [1], tokens=16, streaming=True)
        early = worker.start_fetch(worker.engine.ticket("early"), [2], tokens=range(16), after=kvxfer.READY)
        claim = worker.claim(worker.engine.ticket("claimed"))
        print(in_child(
            lambda: worker.offer("r", [0], tokens=16, after=kvxfer.READY),
            lambda: worker.claim({}),
            worker.describe,
            worker.begin_drain,
            lambda: asyncio.run(worker.aclose()),
            lambda: held.extend([3], tokens=range(16, 32)),
            lambda: held.ready(after=kvxfer.READY),
            held.finish,
            lambda: asyncio.run(held.released()),
            lambda: asyncio.run(held.withdraw()),
            early.cancel,
            lambda: early.outcome,
            lambda: asyncio.run(waited(early)),
            lambda: asyncio.run(early.layers(0, 1)),
            claim.close,
        ))
        await held.withdraw()
        early.cancel()
        claim.close()
        await asyncio.wait({early.outcome})
        offer = worker.offer("r", [0], tokens=16, after=kvxfer.READY)
        await offer.withdraw()
        print("goes on")

asyncio.run(awaited("caller"))
asyncio.run(awaited("own"))

worker = kvxfer.BlockingWorker(config(), transport=transport)
worker.register(tensors)
held = worker.offer("held", [1], tokens=16, streaming=True)
early = worker.start_fetch(worker.engine.ticket("early"), [2], tokens=range(16), after=kvxfer.READY)
over = held_elsewhere(worker._outbox._changed, worker._lifecycle)  # by a thread that the child has not
print(in_child(
    lambda: dropped(worker),
    worker.poll,
    worker.unregister,
    lambda: worker.offer("r", [0], tokens=16, after=kvxfer.READY),
    worker.begin_drain,
    worker.close,
    lambda: held.extend([3], tokens=range(16, 32)),
    held.withdraw,
    early.cancel,
    lambda: early.wait_layer(0),
))
over.set()
early.cancel()
held.withdraw()
worker.offer("r", [0], tokens=16, after=kvxfer.READY).withdraw()
worker.close()
print("goes on")
"""


def test_a_forked_child_is_refused_and_the_parent_goes_on():
    """With the caller's loop, with one of its own, and blocking."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout.split("\n")[:6]) == (0, ["0", "goes on"] * 3), done.stderr
