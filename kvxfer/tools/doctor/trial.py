"""What two processes of this machine can do with each other's memory, tried for real.

Both run `trial` at the same time and talk over a channel. One owns memory, the other reaches for it; what could not be
done is a finding with its remedy, and nothing here needs NIXL.
"""

import ctypes
import os
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import torch
from msgspec.structs import astuple

from kvxfer.errors import KvxferError
from kvxfer.mapped.host import OpenFiles, export, files_of, open_window, shared_empty
from kvxfer.memory.device import allocate, call, in_thread, load
from kvxfer.protocol.messages import MappedMemory
from kvxfer.tools.bench.device import index_of
from kvxfer.tools.doctor.findings import Finding, Status, fail, ok, skipped, warn, words

__all__ = ["Channel", "trial"]

_PAGE: Final = 4096
_GPU_BYTES: Final = 64 << 20
_MARK: Final = 0x5A
_TRACE: Final = (
    "run both as one user, and set kernel.yama.ptrace_scope=0 or give the processes CAP_SYS_PTRACE (containers: "
    "--cap-add=SYS_PTRACE, a common PID namespace, and a seccomp profile that allows it)"
)

_Offered: TypeAlias = tuple[Any, Callable[[], bool]]
"""What the other process is told, and what says whether it has written."""


class Channel(Protocol):
    """The way to the other side."""

    def send(self, item: Any) -> None:
        """Say something."""
        ...

    async def hear(self) -> Any:
        """Wait for what it says next."""
        ...


async def trial(channel: Channel, device: str, *, owner: bool) -> AsyncGenerator[Finding, None]:
    """Try everything; both sides find the same. The one that does not own the memory reaches for it."""
    tries: list[tuple[str, Callable[[], AbstractContextManager[_Offered]], Callable[[Any], Finding]]] = [
        ("shared memory", _offer_pages, _take_pages),
        ("pidfd_getfd", _offer_file, _take_file),
        ("cross-memory attach", _offer_memory, _take_memory),
    ]
    index = index_of(device)
    if index is not None:
        tries += [
            ("cuda ipc", lambda: _offer_gpu(index, plain=True), partial(_take_gpu, "cuda ipc", index)),
            ("torch memory", lambda: _offer_gpu(index, plain=False), partial(_take_gpu, "torch memory", index)),
        ]
    for name, offer, take in tries:
        yield await (_owns(channel, name, offer) if owner else _reaches(channel, name, take))
    if index is None:
        yield skipped("cuda ipc", "there are no GPUs")


async def _owns(channel: Channel, name: str, offer: Callable[[], "AbstractContextManager[_Offered]"]) -> Finding:
    with ExitStack() as stack:
        try:
            told, landed = stack.enter_context(offer())
        except (KvxferError, OSError, RuntimeError) as error:
            broken = warn(name, f"this process has no such memory to share: {words(error)}", _REMEDIES[name])
            channel.send((None, broken))
            finding: Finding = await channel.hear()
        else:
            channel.send((told, None))
            finding = await channel.hear()
            if finding.status is Status.OK and not landed():
                finding = fail(name, "it was written to without an error, but nothing arrived", _REMEDIES[name])
    channel.send(finding)
    return finding


async def _reaches(channel: Channel, name: str, take: Callable[[Any], Finding]) -> Finding:
    told, broken = await channel.hear()
    if broken is not None:
        channel.send(broken)
    else:
        try:
            finding = take(told)
        except (KvxferError, OSError, RuntimeError) as error:
            finding = warn(name, words(error), _REMEDIES[name])
        channel.send(finding)
    final: Finding = await channel.hear()
    return final


_REMEDIES: Final = {
    "shared memory": f"without it there is no route mapped between CPU caches: {_TRACE}",
    "pidfd_getfd": f"needed to map GPU memory of expandable_segments, and for nothing else: {_TRACE}",
    "cross-memory attach": f"without it UCX moves CPU memory through sockets, at a fraction of the speed: {_TRACE}",
    "cuda ipc": "containers need a common PID namespace and IPC namespace (--pid=host --ipc=host); virtual machines "
    "and MIG slices have no CUDA IPC: expect the route staged",
    "torch memory": "allocate the cache with expandable_segments:False, or kvxfer cannot write it in place: expect the "
    "route staged",
}


# --- CPU memory


@contextmanager
def _offer_pages() -> Generator[_Offered, None, None]:
    tensor: Any = shared_empty([_PAGE], dtype=torch.uint8)
    with ExitStack() as stack:
        files = OpenFiles()
        stack.callback(files.close)
        (found,) = export("cpu", 0, [range(tensor.data_ptr(), tensor.data_ptr() + _PAGE)], files)
        yield astuple(found), lambda: bool((tensor == _MARK).all())


def _take_pages(told: Any) -> Finding:
    window = open_window(MappedMemory(*told), "cpu", 0)
    try:
        ctypes.memset(window.local, _MARK, _PAGE)
    finally:
        window.close()
    return ok("shared memory", "a page was mapped and written by another process")


@contextmanager
def _offer_file() -> Generator[_Offered, None, None]:
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        yield (os.getpid(), writing), lambda: _read(reading) == bytes([_MARK])
    finally:
        os.close(reading)
        os.close(writing)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1)
    except BlockingIOError:
        return b""


def _take_file(told: Any) -> Finding:
    process, number = told
    with files_of(process) as take:
        taken = take(number)
        try:
            os.write(taken, bytes([_MARK]))
        finally:
            os.close(taken)
    return ok("pidfd_getfd", "a file of another process was duplicated and written to")


@contextmanager
def _offer_memory() -> Generator[_Offered, None, None]:
    page = ctypes.create_string_buffer(_PAGE)
    yield (os.getpid(), ctypes.addressof(page)), lambda: page.raw == bytes([_MARK]) * _PAGE


class _Piece(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _take_memory(told: Any) -> Finding:
    process, address = told
    page = ctypes.create_string_buffer(bytes([_MARK]) * _PAGE, _PAGE)
    write: Any = ctypes.CDLL(None, use_errno=True).process_vm_writev
    write.restype = ctypes.c_ssize_t
    here, there = _Piece(ctypes.addressof(page), _PAGE), _Piece(address, _PAGE)
    arguments = (ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), ctypes.c_ulong(0))
    if write(ctypes.c_int(process), *arguments) != _PAGE:
        code = ctypes.get_errno()
        raise OSError(code, f"process_vm_writev: {os.strerror(code)}")
    return ok("cross-memory attach", "a page of another process was written (process_vm_writev, UCX's cma)")


# --- GPU memory


@contextmanager
def _offer_gpu(index: int, *, plain: bool) -> Generator[_Offered, None, None]:
    """Memory of cudaMalloc, or as torch allocates it under this process's settings."""
    with ExitStack() as stack:
        if plain:
            backing = allocate("cuda", _GPU_BYTES, index)
            stack.callback(backing.close)
            address = backing.address
        else:
            tensor: Any = torch.zeros(_GPU_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
            torch.cuda.synchronize(index)
            stack.callback(tensor.zero_)  # which keeps it to the end
            address = tensor.data_ptr()
        files = OpenFiles()
        stack.callback(files.close)
        found = export("cuda", index, [range(address, address + _GPU_BYTES)], files)
        told = ([astuple(one) for one in found], address)
        yield told, lambda: in_thread(lambda: _is_written(index, address))


def _is_written(index: int, address: int) -> bool:
    """Whether the other process has written to memory of a GPU."""
    runtime, found = load("runtime", "copying from a GPU"), ctypes.create_string_buffer(_GPU_BYTES)
    call(runtime, "cudaSetDevice", index)
    way = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
    call(runtime, "cudaMemcpy", ctypes.addressof(found), address, _GPU_BYTES, way)
    return found.raw == bytes([_MARK]) * _GPU_BYTES


def _take_gpu(name: str, index: int, told: Any) -> Finding:
    exports, address = told
    with ExitStack() as stack:
        windows = [open_window(MappedMemory(*one), "cuda", index) for one in exports]
        for window in windows:
            stack.callback(window.close)
        source: Any = torch.full((_GPU_BYTES,), _MARK, dtype=torch.uint8, device=f"cuda:{index}")
        torch.cuda.synchronize(index)
        copies = [
            (window.local + begin - window.address, source.data_ptr() + begin - address, end - begin)
            for window in windows
            for begin, end in [
                (max(address, window.address), min(address + _GPU_BYTES, window.address + window.length))
            ]
        ]
        seconds = min(in_thread(lambda: _copied(index, copies)) for _ in range(3))
    speed, kinds = _GPU_BYTES / seconds / 1e9, "+".join(sorted({one[0] for one in exports}))
    return ok(name, f"mapped by another process ({kinds}) and written at {speed:.0f} GB/s", gbps=speed, kind=kinds)


def _copied(index: int, copies: list[tuple[int, int, int]]) -> float:
    """Seconds that copies take, of which each is a target, a source and a length."""
    runtime: Any = load("runtime", "copying between GPUs")
    call(runtime, "cudaSetDevice", index)
    began = time.perf_counter()
    for target, source, nbytes in copies:
        call(runtime, "cudaMemcpyAsync", target, source, nbytes, runtime.cudaMemcpyKind.cudaMemcpyDefault, 0)
    call(runtime, "cudaStreamSynchronize", 0)
    return time.perf_counter() - began
