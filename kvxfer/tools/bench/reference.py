"""The yardstick of a cell: one contiguous copy of the same bytes, measured between its repetitions.

| route | on GPUs | on a CPU |
|---|---|---|
| `mapped` | `peer_copy`: one cudaMemcpyAsync into the other process's memory (CUDA IPC), synchronised | `memcpy`: one memmove into shared pages |
| every other | `nixl_write`: one NIXL WRITE of registered memory, from the call that makes and posts it to DONE | the same |
"""  # noqa: E501 - a row of a table is one line

import asyncio
import ctypes
import mmap
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from kvxfer.errors import FabricError
from kvxfer.fabric.nixl import IN_PROGRESS, WRITE, CallError, Capi, NixlTransport, find, opened
from kvxfer.memory.device import call, load
from kvxfer.protocol.messages import MemorySpan
from kvxfer.tools.bench.device import Buffer, index_of, make_current, synchronize
from kvxfer.tools.bench.samples import measured

__all__ = ["Card", "ReferenceKind", "Source", "Target", "kind_for"]

_T = TypeVar("_T")
_MARK: Final = 0xA7
ReferenceKind = Literal["nixl_write", "memcpy", "peer_copy"]


def kind_for(route: str, device: str) -> ReferenceKind:
    """What a transfer by this route is compared with."""
    if route != "mapped":
        return "nixl_write"
    return "memcpy" if device == "cpu" else "peer_copy"


@dataclass(frozen=True, slots=True)
class Card:
    """What the source needs to know of the target."""

    metadata: bytes
    address: int
    index: int  # of its GPU
    nbytes: int
    handle: bytes  # of CUDA IPC; empty on a CPU


class _Agent:
    """A buffer registered with a NIXL agent; every call to the agent comes from one thread, as NIXL wants it."""

    def __init__(self, name: str, device: str, nbytes: int) -> None:
        self.device: Final = device
        self.buffer: Final = Buffer(device, nbytes)
        self.transport: Final = NixlTransport(name, device=index_of(device))
        self._thread: Final = ThreadPoolExecutor(1, f"kvxfer-bench-{name}", make_current, (device,))
        self.token: object = None
        self.library: Capi

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the agent's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def open(self) -> None:
        """Create the agent and register the buffer."""

        def register() -> None:
            self.transport.setup()
            self.library = opened(find())
            buffer = self.buffer
            self.token = self.transport.register([MemorySpan(buffer.kind, buffer.index, buffer.address, buffer.nbytes)])

        await self.run(register)

    async def close(self) -> None:
        """Destroy the agent and free the buffer."""

        def undo() -> None:
            if self.token is not None:
                self.transport.deregister(self.token)
            self.transport.close()
            self.buffer.close()

        await self.run(undo)
        self._thread.shutdown()


class Target(_Agent):
    """The side that is written to."""

    async def card(self) -> Card:
        """For the source."""
        metadata = await self.run(lambda: self.transport.metadata([self.token]))
        handle = b""
        if self.device != "cpu":
            exported = await self.run(lambda: call(_runtime(), "cudaIpcGetMemHandle", self.buffer.address))
            handle = bytes(exported.reserved)
        return Card(metadata, self.buffer.address, self.buffer.index, self.buffer.nbytes, handle)

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None, None]:
        """Poll without a pause inside: over TCP the target moves the data, and every lane wires up with its help."""
        stop = threading.Event()

        def poll() -> None:
            native = self.transport.native()
            while not stop.is_set():
                self.library.get_notifs(native.agent, native.notices, None)

        polling = asyncio.ensure_future(self.run(poll))
        try:
            yield
        finally:
            stop.set()
            await polling

    async def landed(self, nbytes: int) -> bool:
        """Whether so many bytes hold the source's mark; they hold something else afterwards."""

        def look() -> bool:
            part = self.buffer.bytes[:nbytes]
            right = bool((part == _MARK).all())
            part.zero_()
            synchronize(self.device)
            return right

        return await self.run(look)


class Source(_Agent):
    """The side that writes, and measures."""

    def __init__(self, name: str, device: str, card: Card) -> None:
        super().__init__(name, device, card.nbytes)
        self._card: Final = card
        self._peer = ""
        self._copies: dict[ReferenceKind, Callable[[int], None]] = {"nixl_write": self._write}
        self._closers: list[Callable[[], object]] = []

    async def open(self) -> None:
        """Create the agent, learn of the target, and mark all bytes."""
        await super().open()

        def connect() -> None:
            self.buffer.bytes.fill_(_MARK)
            synchronize(self.device)
            self._peer = self.transport.connect(self._card.metadata)

        await self.run(connect)

    async def close(self) -> None:
        """Undo everything."""
        for close in self._closers:
            await self.run(close)
        await super().close()

    async def measure(self, kind: ReferenceKind, nbytes: int) -> float:
        """Seconds that one copy of so many bytes takes, from call to end.

        Raises:
            FabricError: If it fails, or the buffers are too small.
        """
        if nbytes > self._card.nbytes:
            raise FabricError(f"the reference has {self._card.nbytes} bytes, and {nbytes} were to be copied")
        if kind not in self._copies:
            self._copies[kind] = await self.run(self._open_peer if kind == "peer_copy" else self._open_pages)
        copy = self._copies[kind]
        return await self.run(lambda: measured(lambda: copy(nbytes)))

    def _write(self, nbytes: int) -> None:
        library, agent, buffer, card = self.library, self.transport.native().agent, self.buffer, self._card
        try:
            local = library.pieces(buffer.kind, [[buffer.address, nbytes]], buffer.index)
            remote = library.pieces(buffer.kind, [[card.address, nbytes]], card.index)
            request = library.request(agent, WRITE, local, remote, self._peer)
            try:
                library.post_xfer_req(agent, request, None)
                while library.get_xfer_status(agent, request) == IN_PROGRESS:
                    pass
            finally:
                library.give_back(agent, request)
        except CallError as error:
            raise FabricError(f"NIXL could not write to {self._peer}: {error}") from error

    def _open_peer(self) -> Callable[[int], None]:
        cuda = _runtime()
        named = cuda.cudaIpcMemHandle_t()
        named.reserved = self._card.handle
        # the GPU that copies is current in this thread: opened under the other one, copies run at a tenth of the speed
        target = int(call(cuda, "cudaIpcOpenMemHandle", named, cuda.cudaIpcMemLazyEnablePeerAccess))
        self._closers.append(lambda: call(cuda, "cudaIpcCloseMemHandle", target))
        kind = cuda.cudaMemcpyKind.cudaMemcpyDefault

        def copy(nbytes: int) -> None:
            call(cuda, "cudaMemcpyAsync", target, self.buffer.address, nbytes, kind, 0)
            call(cuda, "cudaStreamSynchronize", 0)

        return copy

    def _open_pages(self) -> Callable[[int], None]:
        pages = mmap.mmap(-1, self._card.nbytes)  # shared and anonymous
        first = ctypes.c_ubyte.from_buffer(pages)  # keeps the pages mapped
        address = ctypes.addressof(first)
        ctypes.memset(address, 0, self._card.nbytes)  # no page is to be made while a copy is timed

        def copy(nbytes: int, _keep: object = first) -> None:
            ctypes.memmove(address, self.buffer.address, nbytes)

        return copy


def _runtime() -> Any:
    return load("runtime", "a benchmark on GPUs")
