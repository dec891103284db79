"""CPU memory that processes share: what an owner exports, and what another process makes of it."""

import ctypes
import gc
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from preloaded import Away

from kvxfer import ArenaError, FabricError, GeometryError, shared_empty
from kvxfer.mapped import host as home_module
from kvxfer.mapped.host import OpenFiles, Window, Windows, _files, export, open_window, unlike
from kvxfer.protocol.messages import MappedMemory


def exported(*tensors):
    """What is told of the memory in which these lie."""
    spans = [range(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
    return export("cpu", 0, spans, OpenFiles())


class Opening:
    """What another process makes of what it was told."""

    def add_one(self, given, elements):
        """To each of these; whether the memory lies elsewhere there."""
        window = open_window(given, "cpu", 0)
        np.ctypeslib.as_array((ctypes.c_int32 * elements).from_address(window.local))[:] += 1
        window.close()
        return window.local != window.address

    def said_of(self, given):
        try:
            open_window(given, "cpu", 0).close()
        except FabricError as error:
            return str(error)
        return "mapped"


def test_another_process_writes_into_it():
    tensor = shared_empty((3, 5), dtype=torch.int32)
    assert torch.equal(tensor, torch.zeros(3, 5, dtype=torch.int32))
    tensor[:] = torch.arange(15).reshape(3, 5)
    (given,) = exported(tensor, tensor[1])
    assert (given.address, given.length) == (tensor.data_ptr(), 60)
    with Away(Opening) as other:
        assert other.add_one(given, 15), "it lies elsewhere in the other process"
    assert torch.equal(tensor, torch.arange(1, 16, dtype=torch.int32).reshape(3, 5))


def test_within_one_process_it_is_itself_and_nobody_else_can_name_it():
    tensor = shared_empty((4,), dtype=torch.int32)
    (given,) = exported(tensor)
    window = open_window(given, "cpu", 0, own=True)
    assert window.local == tensor.data_ptr()
    window.close()
    tensor.fill_(1)  # still there
    with pytest.raises(FabricError, match="memory of this process, which is not its own"):
        open_window(given, "cpu", 0)
    for wrong in (replace(given, length=1 << 40), replace(given, handle=bytes(24)), replace(given, address=1 << 40)):
        with pytest.raises(FabricError, match="shares no memory at"):
            open_window(wrong, "cpu", 0, own=True)


class Collecting(dict):
    """The files of this process, with a collection of garbage in every look at them."""

    def values(self):
        gc.collect()
        return super().values()

    def copy(self):
        gc.collect()
        return dict(self)


@pytest.mark.timeout(30)
def test_memory_that_is_collected_in_the_midst_of_an_export_is_given_back(monkeypatch):
    gc.collect()
    monkeypatch.setattr("kvxfer.mapped.host._files", files := Collecting(_files))
    kept = shared_empty((4,))
    before = set(files)
    cycle: list[object] = [shared_empty((4,))]
    cycle.append(cycle)
    del cycle
    exported(kept)
    assert set(files) == before


def test_a_file_never_becomes_shorter():
    tensor = shared_empty((4,), dtype=torch.int32)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(_files[tensor.data_ptr()].descriptor, 0)


def test_views_keep_it_and_the_last_one_gives_it_back():
    tensor = shared_empty((4, 4))
    address = tensor.data_ptr()
    number = _files[address].descriptor
    view = tensor[2:]
    del tensor
    gc.collect()
    assert address in _files
    view.fill_(1)
    del view
    gc.collect()
    assert address not in _files
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


@pytest.mark.parametrize(("shape", "dtype"), [((0,), torch.float32), ((), torch.int8), ((2, 0, 3), None)])
def test_odd_shapes(shape, dtype):
    tensor = shared_empty(shape, dtype=dtype)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == (dtype or torch.float32)


@pytest.mark.parametrize("shape", [None, 4, 4.0, [4.0], [-1], [True], "4", (n for n in (4, 3))])
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(GeometryError, match="shape must be a list of whole numbers"):
        shared_empty(shape)


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), "float32", 4, False])
def test_what_is_no_dtype_is_refused(dtype):
    with pytest.raises(GeometryError, match=r"dtype must be a torch\.dtype"):
        shared_empty((4,), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.quint8, torch.quint4x2, torch.bits8, torch.float4_e2m1fn_x2, torch.complex64])
def test_any_dtype_of_torch_has_memory(dtype):
    tensor = shared_empty((2, 3), dtype=dtype)
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, (2, 3))
    assert not tensor.view(torch.uint8).any()


def test_more_than_there_is_is_refused():
    with pytest.raises(ArenaError, match="bytes of shared memory"):
        shared_empty((1 << 62,), dtype=torch.int8)


def test_private_memory_is_not_exported():
    with pytest.raises(FabricError, match=r"private to its process.*shared_empty"):
        exported(torch.zeros(4))


def test_what_is_not_what_it_was_is_not_mapped(tmp_path):
    tensor = shared_empty((4,))
    (given,) = exported(tensor)
    process, number, device, inode = struct.unpack("<IIQQ", given.handle)

    def named(number, device, inode, **changes):
        return replace(given, handle=struct.pack("<IIQQ", process, number, device, inode), **changes)

    unsealed = os.memfd_create("kvxfer")
    os.ftruncate(unsealed, 16)
    with (tmp_path / "file").open("w") as file:
        private, other = os.fstat(file.fileno()), os.fstat(unsealed)
        asked = (
            given,
            named(number, device, inode + 1),
            named(number, device, inode, length=1 << 30),
            named(file.fileno(), private.st_dev, private.st_ino),
            named(unsealed, other.st_dev, other.st_ino),
            named(99_999, device, inode),
        )
        with Away(Opening) as opening:
            said = [opening.said_of(one) for one in asked]
    os.close(unsealed)
    assert said[0] == "mapped"
    for told in (said[1], said[2], said[4]):
        assert "is not the shared memory that it named" in told
    assert "is not memory that kvxfer shares" in said[3]
    assert "cannot be opened" in said[5]
    with pytest.raises(FabricError, match="3 bytes names no shared memory"):
        open_window(replace(given, handle=b"abc"), "cpu", 0)
    for kind in ("cuda_ipc", "foo"):
        with pytest.raises(FabricError, match=f"{kind} memory, and this one copies with the cpu"):
            open_window(replace(given, kind=kind), "cpu", 0)


def test_what_only_bears_the_name_is_refused_and_not_left_open(monkeypatch):
    """A peer may call its files what it likes; most have no seals."""
    ends = os.pipe()
    monkeypatch.setattr(Path, "readlink", lambda _: "/memfd:kvxfer (deleted)")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FabricError, match="is not the shared memory that it named"):
        home_module.open_handle(home_module.handle_of(ends[0]), "kvxfer", 0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    for end in ends:
        os.close(end)


def windows(*triples):
    closed = []
    return Windows(Window(a, n, at, lambda a=a: closed.append(a)) for a, n, at in triples), closed


def test_addresses_of_a_peer_become_those_of_this_process():
    found, closed = windows((5000, 100, 90_000), (1000, 50, 7_000))
    np.testing.assert_array_equal(found.local(np.asarray([1000, 5099, 1049, 5000])), [7000, 90_099, 7049, 90_000])
    assert found.locate(5010, 90) == 90_010
    found.close()
    assert sorted(closed) == [1000, 5000]


@pytest.mark.parametrize("address", [0, 999, 1050, 4999, 5100, 1 << 60])
def test_an_address_outside_of_all_windows_is_refused(address):
    found, _ = windows((5000, 100, 90_000), (1000, 50, 7_000))
    with pytest.raises(FabricError, match=f"{address:#x} of the peer lies in none"):
        found.local(np.asarray([1000, address]))


def test_what_spans_two_windows_is_refused():
    found, _ = windows((1000, 50, 7_000), (1050, 50, 9_000))
    with pytest.raises(FabricError, match="100 bytes at address 0x3e8 of the peer do not lie in one allocation"):
        found.locate(1000, 100)


@pytest.mark.parametrize(("address", "length"), [((1 << 63) - 50, 100), (1 << 63, 1), (1000, 1 << 64), (-1, 4)])
def test_numbers_beyond_all_memory_are_refused(address, length):
    odd = MappedMemory("shm", "", address, length, bytes(24))
    found, _ = windows((1000, 50, 7_000))
    for use in (
        lambda: open_window(odd, "cpu", 0),
        lambda: open_window(odd, "cpu", 0, own=True),
        lambda: windows((address, length, 7_000)),
        lambda: found.locate(address, length),
    ):
        with pytest.raises(FabricError, match="are no memory of a process"):
            use()


def test_only_the_same_host_and_namespace_will_do(monkeypatch):
    monkeypatch.setattr(home_module, "here", lambda: "boot-a pid:[1]")
    assert unlike("boot-a pid:[1]") == ""
    assert unlike("boot-b pid:[1]") == "it is on another host"
    assert "another PID namespace" in unlike("boot-a pid:[2]")
    assert "not known" in unlike("")
    monkeypatch.setattr(home_module, "here", lambda: "")
    assert "not known" in unlike("boot-a pid:[1]")


def test_a_host_that_does_not_say_is_nowhere(monkeypatch, tmp_path):
    monkeypatch.setattr(home_module, "_BOOT", tmp_path / "missing")
    home_module.here.cache_clear()
    assert home_module.here() == ""
    home_module.here.cache_clear()
