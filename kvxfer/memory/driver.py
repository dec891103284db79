"""The few calls into CUDA that memory needs, through cuda-bindings: its results as values, its codes as errors."""

import ctypes
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from kvxfer.errors import ArenaError, FabricError, MissingExtraError

__all__ = ["call", "download", "in_thread", "load", "pci_bus_id", "upload"]

T = TypeVar("T")

_BUS_ID_BYTES: Final = 32
"""Room for a PCI bus id such as `0000:1b:00.0` and the zero behind it."""


def load(module: str, purpose: str) -> Any:
    """An untyped module of cuda-bindings.

    Args:
        module: `runtime` or `driver`.
        purpose: What needs it, to begin a sentence with.

    Raises:
        MissingExtraError: cuda-bindings is not installed.
    """
    try:
        return importlib.import_module(f"cuda.bindings.{module}")
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs cuda-bindings, which is not installed: pip install cuda-bindings"
        ) from error


def call(cuda: Any, function: str, *arguments: Any) -> Any:
    """Call one function of CUDA's runtime or driver.

    Returns:
        Its value; a list of them where it has several, None where it has none.

    Raises:
        ArenaError: there is not enough memory.
        FabricError: it returned another code than success, or could not be called at all for want of a driver.
    """
    try:
        code, *values = getattr(cuda, function)(*arguments)
    except RuntimeError as error:
        raise FabricError(f"{_shown(function, arguments)} could not be called: {error}") from error
    name: str = getattr(code, "name", str(code))
    match name:
        case "cudaSuccess" | "CUDA_SUCCESS":
            return values[0] if len(values) == 1 else values or None
        case "cudaErrorMemoryAllocation" | "CUDA_ERROR_OUT_OF_MEMORY":
            advice = "lower arena_bytes, or leave more of the memory to it"
            raise ArenaError(f"{_shown(function, arguments)} failed: {name}; {advice}")
        case _:
            raise FabricError(f"{_shown(function, arguments)} failed: {name}")


def _shown(function: str, arguments: Sequence[Any]) -> str:
    return f"{function}({', '.join(str(argument) for argument in arguments if isinstance(argument, int))})"


def upload(device: int, address: int, data: bytes) -> None:
    """Copy bytes to a GPU, and wait for it.

    Raises:
        FabricError: CUDA failed.
    """
    cuda = load("runtime", "writing to a GPU")
    source = ctypes.create_string_buffer(data, len(data))

    def copy() -> None:
        call(cuda, "cudaSetDevice", device)
        kind = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        call(cuda, "cudaMemcpy", address, ctypes.addressof(source), len(data), kind)

    in_thread(copy)


def download(device: int, target: int, source: int, nbytes: int) -> None:
    """Copy from a GPU to host memory, and wait for it, but for nothing else that runs there.

    Args:
        device: Index of the GPU.
        target: Address of the first byte to write.
        source: Address of the first byte to read.
        nbytes: Length.

    Raises:
        FabricError: CUDA failed.
    """
    cuda = load("runtime", "copying from a GPU")
    kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost

    def copy() -> None:
        call(cuda, "cudaSetDevice", device)
        stream = call(cuda, "cudaStreamCreateWithFlags", cuda.cudaStreamNonBlocking)
        try:
            call(cuda, "cudaMemcpyAsync", target, source, nbytes, kind, stream)
            call(cuda, "cudaStreamSynchronize", stream)
        finally:
            call(cuda, "cudaStreamDestroy", stream)

    in_thread(copy)


def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own, and return or raise what it does.

    CUDA's current device belongs to a thread. Setting it back afterwards would not do: that can make a context on a
    device which the caller never used.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvxfer-arena") as executor:
        return executor.submit(work).result()


def pci_bus_id(device: int) -> str:
    """Where a GPU sits, as sysfs writes it: `0000:1b:00.0`. Makes no context.

    Args:
        device: Its index, among those that this process sees.

    Raises:
        MissingExtraError: cuda-bindings is not installed.
        FabricError: CUDA does not know it.
    """
    cuda = load("runtime", "finding out where a GPU sits")
    name: bytes = call(cuda, "cudaDeviceGetPCIBusId", _BUS_ID_BYTES, device)
    return name.split(b"\0")[0].decode("ascii", "replace").strip().lower()
