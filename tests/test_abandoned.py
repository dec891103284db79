"""A worker that opens removes what killed workers left in the folder for temporary files, and nothing else."""

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
import torch

import kvxfer
from kvxfer.testing import LoopbackNetwork, LoopbackTransport

LONG_AGO = 10_000.0


@pytest.fixture
def temporary(monkeypatch):
    """A folder whose name is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="t"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def left(folder, *, age, is_socket=True):
    """A worker's folder, with its socket (or a file in its place), last changed so many seconds ago."""
    folder.mkdir(mode=0o700)
    sock = socket.socket(socket.AF_UNIX)
    if is_socket:
        sock.bind(str(folder / "sock"))
    else:
        (folder / "sock").write_text("no socket")
    changed = folder.stat().st_mtime - age
    os.utime(folder, (changed, changed))
    return sock


async def open_and_close():
    tensor = kvxfer.CacheTensor(torch.zeros(8, 16, 2, 4), "block token head dim", kv="k", layers=[0], heads=range(2))
    config = kvxfer.Config(arena_bytes="1MiB", chunk_bytes="64KiB")
    async with kvxfer.Worker([tensor], config, transport=LoopbackTransport("e", LoopbackNetwork())) as worker:
        return worker.card.endpoint


async def test_a_socket_that_nobody_listens_at_for_long_goes_with_its_folder(temporary):
    ours = Path((await open_and_close()).removeprefix("unix:")).parent.name[:-8]  # and eight letters of its own
    left(temporary / f"{ours}dead", age=LONG_AGO).close()
    left(temporary / f"{ours}young", age=10).close()  # as between making the socket and listening
    left(temporary / "kvxfer-named", age=LONG_AGO).close()  # by the user, or on another host
    left(temporary / f"{ours}file", age=LONG_AGO, is_socket=False).close()
    with left(temporary / f"{ours}live", age=LONG_AGO) as listening:
        listening.listen()
        (temporary / f"{ours}empty").mkdir()
        await open_and_close()
        remain = {path.name.removeprefix(ours) for path in temporary.iterdir()}
    assert remain == {"young", "kvxfer-named", "file", "live", "empty"}
    assert (temporary / f"{ours}live" / "sock").is_socket()
