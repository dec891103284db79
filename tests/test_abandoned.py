"""A worker that opens removes what killed workers left in the folder for temporary files, and nothing else."""

import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
import torch

import kvxfer
from kvxfer.peers import connections as streams
from kvxfer.testing import LoopbackNetwork, LoopbackTransport


@pytest.fixture
def temporary(monkeypatch):
    """A folder whose name is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="t"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


def left(folder, *, is_socket=True):
    """A worker's folder, with its socket (or a file in its place)."""
    folder.mkdir(mode=0o700)
    sock = socket.socket(socket.AF_UNIX)
    if is_socket:
        sock.bind(str(folder / "sock"))
    else:
        (folder / "sock").write_text("no socket")
    return sock


async def open_and_close():
    tensor = kvxfer.CacheTensor(torch.zeros(8, 16, 2, 4), "block token head dim", kv="k", layers=[0], heads=range(2))
    config = kvxfer.Config(arena_bytes="1MiB", chunk_bytes="64KiB")
    async with kvxfer.Worker([tensor], config, transport=LoopbackTransport("e", LoopbackNetwork())) as worker:
        return worker.card.endpoint


async def test_folders_of_nobody_who_lives_go_with_their_sockets(temporary):
    ours = Path((await open_and_close()).removeprefix("unix:")).parent.name[:-8]  # and eight letters of its own
    left(temporary / f"{ours}dead").close()
    (temporary / f"{ours}empty").mkdir()  # died before it had a socket
    left(temporary / "kvxfer-named").close()  # by the user, or on another host
    left(temporary / f"{ours}file", is_socket=False).close()
    (temporary / f"{ours}link").symlink_to("kvxfer-named")
    with left(temporary / f"{ours}live") as listening:
        listening.listen()
        await open_and_close()
        remain = {path.name.removeprefix(ours) for path in temporary.iterdir()}
    assert remain == {"kvxfer-named", "file", "link", "live"}
    assert (temporary / f"{ours}live" / "sock").is_socket()
    assert (temporary / "kvxfer-named" / "sock").is_socket()


async def test_the_folder_of_a_worker_that_is_about_to_listen_stays(temporary):
    folder, lock = streams._make_folder()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "sock"))
        await open_and_close()
        assert (folder / "sock").is_socket()
    os.close(lock)  # as if it had been killed
    await open_and_close()
    assert not folder.exists()


async def test_where_no_socket_can_be_it_says_where_that_is_and_leaves_nothing(temporary, monkeypatch):
    deep = temporary / ("folder" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(kvxfer.ConfigError, match=f"107 bytes, and {deep}/kvxfer-.* has more; set TMPDIR to another"):
        await open_and_close()
    assert list(deep.iterdir()) == []


async def test_a_folder_that_is_swept_as_it_is_made_is_not_used(temporary, monkeypatch):
    """Another worker opens just between the making of a folder and its lock, or holds it as it looks."""
    real, made, held = tempfile.mkdtemp, [], []

    def mkdtemp(**given):
        made.append(Path(real(**given)))
        if len(made) == 1:
            streams._clear_abandoned()
        elif len(made) == 2:
            held.append(os.open(made[-1], os.O_RDONLY))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    folder, lock = streams._make_folder()
    for descriptor in (lock, *held):
        os.close(descriptor)
    assert len(made) == 3
    assert folder == made[2]
    assert folder.is_dir()
