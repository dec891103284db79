"""The NIXL transport over CPU memory: two agents in one process, and two processes of which one dies."""

import asyncio
import importlib.util
import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ends import SIZE, TCP, Agent, descriptors, finish, memory_of, met, two_processes, write
from rigs import Outcome, ending

from kvxfer import fabric as envelope
from kvxfer.copy.port import Operation
from kvxfer.errors import ConfigError, FabricError, MissingExtraError
from kvxfer.fabric import nixl
from kvxfer.fabric.nixl import CallError, NixlTransport, device_params
from kvxfer.protocol.messages import MemorySpan

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture
def pair() -> Iterator[tuple[Agent, Agent]]:
    a, b = Agent("a"), Agent("b", buffers=2)
    yield a, b
    a.close()
    b.close()


# ---- one process -----------------------------------------------------------------------------------------------------


@needs_nixl
def test_write_and_read_move_exactly_the_pieces(pair):
    a, b = pair
    rng = np.random.default_rng(1)
    a.buffers[0][:] = rng.integers(1, 256, SIZE)
    peer = a.transport.connect(b.transport.metadata([b.tokens[0]]))
    assert peer == "b"
    starts = rng.permutation(SIZE // 512)[:700] * 512
    here = descriptors(a.buffers[0], *[(int(start), 100) for start in starts])
    there = descriptors(b.buffers[0], *[(int(start) + 7, 100) for start in starts[::-1]])
    finish(a.post(peer, Operation.WRITE, here, there), a, b)
    expected = np.zeros(SIZE, dtype=np.uint8)
    for source, target in zip(starts, starts[::-1], strict=True):
        expected[target + 7 : target + 107] = a.buffers[0][source : source + 100]
    assert np.array_equal(b.buffers[0], expected)
    back = descriptors(a.buffers[0], (0, SIZE))
    finish(a.post(peer, Operation.READ, back, descriptors(b.buffers[0])), a, b)
    assert np.array_equal(a.buffers[0], expected)


@needs_nixl
def test_metadata_covers_only_the_registrations_asked_for(pair):
    a, b = pair
    a.buffers[0][:] = 5
    peer = a.transport.connect(b.transport.metadata([b.tokens[0]]))
    here, arena, other = (descriptors(buffer, (0, 64)) for buffer in (*a.buffers, *b.buffers))
    finish(a.post(peer, Operation.WRITE, here, arena), a, b)
    for operation in Operation:
        with pytest.raises(CallError, match="ERROR_BACKEND"):
            a.post(peer, operation, here, other)
    assert b.buffers[0][:64].tolist() == [5] * 64
    assert not b.buffers[1].any()
    # and when the peer is told of it, it works: the refusal came from the metadata
    assert a.transport.connect(b.transport.metadata([b.tokens[1]])) == peer
    finish(a.post(peer, Operation.WRITE, here, other), a, b)
    assert b.buffers[1][:64].tolist() == [5] * 64
    finish(a.post(peer, Operation.WRITE, here, arena), a, b)


@needs_nixl
@pytest.mark.parametrize(("said", "lists"), [(None, None), ("y", True), ("n", False), ("0", False)])
@pytest.mark.parametrize("asked", [True, False])
def test_pieces_between_gpus_are_taken_as_lists_where_asked_and_the_environment_wins(monkeypatch, said, lists, asked):
    monkeypatch.delenv("NIXL_UCX_SGL_ENABLE", raising=False)
    if said is not None:
        monkeypatch.setenv("NIXL_UCX_SGL_ENABLE", said)
    assert NixlTransport("a", device=0, scatter_lists=asked).takes_lists is (asked if lists is None else lists)
    assert not NixlTransport("a", scatter_lists=asked).takes_lists


@needs_nixl
def test_memory_that_cannot_be_registered_is_named(pair):
    here = pair[0].buffers[0].ctypes.data
    for words, wrong in (
        ("ERROR_BACKEND", MemorySpan("VRAM", 0, here, 64)),
        ("not 'FILE'", MemorySpan("FILE", 0, here, 64)),
        ("needs an address", MemorySpan("DRAM", 0, 0, 64)),
    ):
        with pytest.raises(FabricError, match=words) as caught:
            pair[0].transport.register([wrong])
        assert isinstance(caught.value.__cause__, CallError) is words.isupper()


@needs_nixl
def test_metadata_that_was_cut_or_edited_is_refused(pair):
    a, b = pair
    good = b.transport.metadata(b.tokens)
    for bad in (b"", good[:10], good[:-1], good + b"x", b"zzzz" + good[4:], good[:20] + b"\xff\xff" + good[22:]):
        with pytest.raises(FabricError, match="metadata"):
            a.transport.connect(bad)
    with pytest.raises(FabricError, match="ERROR_BACKEND"):
        a.transport.connect(envelope.pack(bytes(16), "b", [b"not what NIXL makes"]))
    blob = envelope.unpack(good)[2]
    with pytest.raises(FabricError, match="carries that of"):
        a.transport.connect(envelope.pack(bytes(16), "somebody else", blob))
    with pytest.raises(CallError, match="ERROR_BACKEND"):
        a.post("b", Operation.WRITE, descriptors(a.buffers[0]), descriptors(b.buffers[0]))
    assert a.transport.connect(good) == "b"


@needs_nixl
def test_a_restarted_peer_must_be_disconnected_before_it_is_met_again():
    a, old = Agent("a"), Agent("b")
    a.transport.connect(old.transport.metadata(old.tokens))
    old.close()
    new = Agent("b")
    with pytest.raises(FabricError, match="restarted"):
        a.transport.connect(new.transport.metadata(new.tokens))
    a.transport.disconnect("b")
    a.transport.connect(new.transport.metadata(new.tokens))
    a.buffers[0][:] = 3
    finish(a.post("b", Operation.WRITE, descriptors(a.buffers[0]), descriptors(new.buffers[0])), a, new)
    assert (new.buffers[0] == 3).all()
    assert not old.buffers[0].any()
    a.close()
    new.close()


@needs_nixl
def test_an_agent_writes_into_its_own_memory_if_nobody_else_can_go_by_its_name():
    """What says to be it would be written into its memory."""
    worker, free = Agent(envelope.agent_name(bytes(32))), Agent("free")
    for number in range(2):  # and once it is disconnected
        name = worker.transport.connect(worker.transport.metadata(worker.tokens))
        worker.buffers[0][:] = 7 + number
        source, target = worker.buffers[0][: SIZE // 2], worker.buffers[0][SIZE // 2 :]
        target[:] = 0
        finish(worker.post(name, Operation.WRITE, descriptors(source), descriptors(target)), worker)
        assert (target == 7 + number).all()
        worker.transport.disconnect(name)
    _, name, blobs = envelope.unpack(worker.transport.metadata(worker.tokens))
    with pytest.raises(FabricError):
        worker.transport.connect(envelope.pack(bytes(16), name, blobs))
    with pytest.raises(FabricError):  # any name may be anybody's that is no worker's
        free.transport.connect(free.transport.metadata(free.tokens))
    worker.close()
    free.close()


@needs_nixl
def test_everything_is_given_back_once(pair):
    a, b = pair
    peer = a.transport.connect(b.transport.metadata(b.tokens))
    spare = np.zeros(64, dtype=np.uint8)
    token = a.transport.register([memory_of(spare)])
    a.transport.deregister(token)
    a.transport.deregister(token)
    with pytest.raises(FabricError, match="not registered"):
        a.transport.metadata([token])
    a.transport.disconnect(peer)
    a.transport.disconnect(peer)


@needs_nixl
def test_calls_outside_of_setup_and_close_are_refused():
    transport = NixlTransport("a")
    with pytest.raises(FabricError, match="is not open"):
        transport.metadata(())
    transport.setup()
    native, _ = transport.native(), transport.metadata(())
    assert (native.orderly, native.listed, native.for_good) == (True, False, True)
    transport.close()
    transport.close()
    with pytest.raises(FabricError, match="is not open"):
        transport.metadata(())


# ---- settings --------------------------------------------------------------------------------------------------------


@needs_nixl
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend_params": {"UCX": {"num_wrokers": "1"}}}, "num_wrokers"),
        ({"backend_params": {"UCX": {"num_workers": "1"}}, "num_workers": 1}, "given twice"),
        ({"backends": ("POSIX",), "num_workers": 1}, "settings of UCX"),
        ({"devices": ("eth0", "eth1")}, "UCX_NET_DEVICES=eth0,eth1"),
        ({"devices": ("eth0,eth1",)}, "without commas"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(ConfigError, match=words):
        NixlTransport("a", **settings)


@needs_nixl
def test_devices_reach_the_backend(monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert device_params(["mlx5_0:1", "mlx5_1:1"], None) == {"device_list": "mlx5_0,mlx5_1"}
    assert device_params(["mlx5_0:2"], None) == {"engine_config": "NET_DEVICES=mlx5_0:2"}
    transport = NixlTransport("a", devices=["lo"])
    transport.setup()
    transport.close()
    for absent in ("nonsense0", "nonsense0:1"):
        with pytest.raises(FabricError, match="ERROR_BACKEND"):
            NixlTransport("a", devices=[absent]).setup()
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    with pytest.raises(ConfigError, match="eth7 would win"):
        NixlTransport("a", devices=["lo"])


@needs_nixl
def test_a_backend_that_nixl_does_not_have_is_named():
    with pytest.raises(FabricError, match=r"no backend 'NOPE'; it has .*UCX"):
        NixlTransport("a", backends=["NOPE"]).setup()


def test_without_nixl_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(nixl, "_installed", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install 'nixl"):
        NixlTransport("a")


@needs_nixl
def test_an_agent_that_does_not_do_what_it_is_told_is_not_used(monkeypatch):
    def fail(*_: object) -> None:
        raise FabricError("it wrote other bytes")

    transport = NixlTransport("a")
    destroyed: list[int] = []
    library = nixl.opened(nixl.find())
    destroy = library.destroy_agent
    with monkeypatch.context() as patch:
        patch.setattr(library, "prove", fail)
        patch.setattr(library, "destroy_agent", lambda agent: (destroyed.append(agent), destroy(agent)))
        with pytest.raises(FabricError, match="other bytes"):
            transport.setup()
    assert len(destroyed) == 1
    with pytest.raises(FabricError, match="is not open"):
        transport.metadata(())
    transport.close()


@needs_nixl
def test_nothing_of_nixls_python_package_is_imported():
    code = """
        import sys
        from kvxfer.fabric.nixl import NixlTransport
        assert not {"numba", "torch"} & set(sys.modules), "both take seconds"
        transport = NixlTransport("a")
        assert "numba" not in sys.modules
        transport.setup()
        transport.close()
        assert not [name for name in sys.modules if name.startswith("nixl")]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


# ---- two processes ---------------------------------------------------------------------------------------------------


@needs_nixl
@pytest.mark.parametrize("settings", [{}, {"backend_params": TCP}], ids=["any lane", "tcp"])
async def test_a_write_to_another_process_and_a_read_from_it(settings):
    async with two_processes(8 * SIZE, **settings) as (side, remote):
        side.buffer[:] = np.random.default_rng(1).integers(0, 256, side.buffer.nbytes)
        remote.hold()
        assert await side.now(side.fabric.connect(remote.metadata)) == "target"
        result = await write(side, remote, side.buffer.nbytes)
        assert ending(result) is Outcome.DONE, result.error
        written, side.buffer[:] = side.buffer.copy(), 0
        async with asyncio.timeout(20):
            read = await side.post("target", remote.address, side.buffer.nbytes, Operation.READ)
        assert ending(read) is Outcome.DONE
        assert np.array_equal(side.buffer, written)
        remote.let_go()
        assert remote.sum() == int(written.view(np.uint64).sum())
        assert remote.close() is True
        assert remote.hang_up() == 0


@needs_nixl
@pytest.mark.parametrize(
    ("settings", "orderly"),
    [
        ({}, True),
        ({"num_workers": 3}, True),
        ({"backend_params": {"UCX": {"num_threads": "0"}}}, True),
        ({"backend_params": {"UCX": {"num_threads": "2"}}}, False),
        ({"backends": ("UCX", "POSIX")}, False),
    ],
)
def test_a_post_that_is_done_says_that_all_before_it_are_where_one_endpoint_carries_them(settings, orderly):
    assert NixlTransport("a", **settings).orderly is orderly


@needs_nixl
async def test_a_peer_that_dies_is_disconnected():
    """Before a write, and in the middle of one: over TCP, 64 MiB stay in flight while the target does not poll."""
    async with two_processes(64 * SIZE, backend_params=TCP) as (side, remote):
        during = await met(side, remote, stuck_bytes=side.buffer.nbytes)
        remote.kill()
        async with asyncio.timeout(20):
            result = await during
        assert ending(result) is Outcome.IN_DOUBT
        assert isinstance(result.error, FabricError)
        assert result.error.disconnected
        assert result.error.in_doubt
        assert not result.may_move
        after = await write(side, remote, 64)
        assert ending(after) is not Outcome.DONE
        assert isinstance(after.error, FabricError)
        assert after.error.disconnected
        assert not after.may_move
        after = await write(side, remote, 64)  # nothing is posted to who is known to be gone, and nothing in doubt
        assert (ending(after), str(after.error)) == (Outcome.FAILED, "target is disconnected")
        assert await side.close() is True


@needs_nixl
async def test_a_peer_that_is_left_under_a_post_leaves_it_in_doubt():
    async with two_processes(64 * SIZE, backend_params=TCP) as (side, remote):
        during = await met(side, remote, stuck_bytes=side.buffer.nbytes)
        side.fabric.disconnect("target")
        async with asyncio.timeout(20):
            result = await during
        assert ending(result) is Outcome.IN_DOUBT
        assert result.may_move
        after = await write(side, remote, 64)
        assert (ending(after), after.posted) == (Outcome.FAILED, 0.0)
        assert await side.close() is False


@needs_nixl
async def test_what_the_library_refuses_fails_and_lets_others_be():
    async with two_processes(SIZE, backend_params=TCP) as (side, remote):
        remote.hold()
        await side.now(side.fabric.connect(remote.metadata))
        outside = side.post("target", remote.address + SIZE, 64)
        inside = side.post("target", remote.address, 64)
        async with asyncio.timeout(20):
            assert (ending(await outside), ending(await inside)) == (Outcome.FAILED, Outcome.DONE)
        assert "ERROR" in str((await outside).error)
        assert await side.close() is True


@needs_nixl
@pytest.mark.parametrize("refused", [False, True])
def test_what_is_logged_and_raised_of_an_agent_has_no_keys(caplog, refused):
    caplog.set_level(logging.DEBUG, "kvxfer")
    params = {"OBJ": {"secret_key": "wJalrXUtnFEMI"}}
    transport = NixlTransport("shy", backends=["UCX", "OBJ"], backend_params=params)
    destroyed: list[int] = []

    def backend(agent, name, params):
        if refused and name == "OBJ":
            raise CallError("create_backend", -2)
        return name

    library: Any = SimpleNamespace(
        agent=lambda name: 7,
        plugins=lambda agent: ["UCX", "OBJ"],
        backend=backend,
        backend_params=lambda agent, name: params.get(name, {}),
        destroy_agent=destroyed.append,
    )
    transport._c = library
    if refused:
        with pytest.raises(FabricError, match="secret_key") as caught:
            transport._created("shy")
        assert "wJal" not in str(caught.value)
        assert destroyed == [7]
    else:
        transport._created("shy")
        assert "secret_key" in caplog.text
        assert not destroyed
    assert "wJal" not in caplog.text
