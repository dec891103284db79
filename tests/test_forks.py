"""A worker that is used in a forked child says so at once, in the child, and goes on in its parent."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
import asyncio, os, sys, torch, kvxfer
from kvxfer.testing import LoopbackNetwork, LoopbackTransport

cache = torch.zeros(8, 16, 2, 4)
tensors = [kvxfer.CacheTensor(cache, axes="block token head dim", kv="k", layers=[0], heads=range(2))]
config = kvxfer.Config(engine="e", arena_bytes="1MiB", chunk_bytes="64KiB", loop=LOOP)

def refused(call):
    try:
        call()
    except kvxfer.ForkedError as error:
        assert f"forked off process {os.getppid()}" in str(error)
        return True

def in_child(*calls):
    process = os.fork()
    if process == 0:
        os._exit(0 if all([refused(call) for call in calls]) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
"""
AWAITED = """
async def main():
    async with kvxfer.Worker(tensors, config, transport=LoopbackTransport("e", LoopbackNetwork())) as worker:
        print(in_child(
            lambda: worker.offer("r", [0], tokens=16, after=kvxfer.READY),
            lambda: worker.claim({}),
            worker.describe,
            worker.begin_drain,
            lambda: asyncio.run(worker.aclose()),
        ))
        offer = worker.offer("r", [0], tokens=16, after=kvxfer.READY)
        await offer.withdraw()
        print("goes on")

asyncio.run(main())
"""
BLOCKING = """
worker = kvxfer.BlockingWorker(config, transport=lambda: LoopbackTransport("e", LoopbackNetwork()))
worker.register(tensors)
print(in_child(
    lambda: worker.offer("r", [0], tokens=16, after=kvxfer.READY),
    worker.begin_drain,
    worker.close,
))
worker.offer("r", [0], tokens=16, after=kvxfer.READY)
worker.close()
print("goes on")
"""


@pytest.mark.parametrize(
    ("body", "loop"), [(AWAITED, "caller"), (AWAITED, "own"), (BLOCKING, "own")], ids=["caller", "own", "blocking"]
)
def test_a_forked_child_is_refused_and_the_parent_goes_on(body, loop):
    code = textwrap.dedent(SCRIPT).replace("LOOP)", f"{loop!r})") + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["0", "goes on"]), done.stderr
