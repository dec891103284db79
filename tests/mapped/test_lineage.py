"""The end of a process that has forked: its child has the same GPUs open, so nothing may have ended with it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

import pytest

from kvxfer.mapped.host import here
from kvxfer.protocol.framing import encode_body
from kvxfer.protocol.messages import AgentBody, Capability, MemorySpan
from kvxfer.protocol.session import Identity, PeerInfo
from kvxfer.safety.fence import Lineage
from kvxfer.safety.processes import Processes

OWNER = """
import os, sys
from kvxfer.safety.fence import LockFile
before, forks = LockFile(4), sys.argv[1] == "forks"
if sys.argv[1] == "its child shares" and os.fork():
    sys.exit(os.wait()[1])
child = os.fork() if forks else 1
if child == 0:
    sys.stdin.read()  # until the test is over
    os._exit(0)
after = LockFile(4)
print(before.handle.hex(), after.handle.hex(), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def owner(kind):
    """A process with gates, and their handles."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", OWNER, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, [bytes.fromhex(one) for one in process.stdout.readline().split()]
        finally:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()


def peer(process, handle, *, staging="DRAM"):
    body = AgentBody("x", b"", [], [MemorySpan(staging, 0, 0, 4096)], host=here(), locks=handle)
    who = Identity("e", b"e" * 16, os.urandom(16), 0, 1, int(Capability.GATES), "")
    return PeerInfo(who, encode_body(body), process.pid)


@pytest.mark.parametrize("forks", [True, False])
def test_files_say_that_their_owner_has_forked_whenever_they_were_made(forks):
    with owner("forks" if forks else "alone") as (_, handles):
        assert len(handles) == 2
        for handle in handles:
            lineage = Lineage(handle)
            assert lineage.forked is forks
            lineage.close()


def test_a_child_has_not_forked_because_its_parent_has():
    with owner("its child shares") as (_, (before, after)):
        told = [Lineage(before), Lineage(after)]
        assert [lineage.forked for lineage in told] == [True, False]
        for lineage in told:
            lineage.close()


@pytest.mark.parametrize(
    ("kind", "gpu", "staging", "evidence"),
    [
        ("alone", True, "VRAM", True),
        ("forks", False, "DRAM", True),
        ("forks", True, "DRAM", False),
        ("forks", False, "VRAM", False),
    ],
)
async def test_what_gpus_move_does_not_end_with_a_process_that_has_forked(kind, gpu, staging, evidence):
    processes = Processes(asyncio.get_running_loop(), gpu=gpu)
    with owner(kind) as (process, (handle, _)):
        other = peer(process, handle, staging=staging)
        processes.on_session(other, lambda: -1)
        leave = processes.hold(other)
        assert not processes.has_ended(other)
        os.kill(process.pid, signal.SIGKILL)
        ended = processes.end_of(other)
        assert ended is not None
        await asyncio.wait_for(ended, 20)  # that much is known in any case
        assert processes.has_ended(other) is evidence
        leave()
    processes.close()
