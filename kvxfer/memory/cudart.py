"""Calls of the CUDA runtime and driver through cuda-bindings: one way to load them, to call them, and to fail."""

import ctypes
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvxfer.errors import ArenaError, FabricError, MissingExtraError

__all__ = ["call", "in_thread", "load", "upload"]

T = TypeVar("T")


def load(module: str) -> Any:
    """An untyped module of cuda-bindings.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is needed, and cuda-bindings is not installed: pip install 'kvxfer[gpu]'"
        ) from error


def call(module: Any, function: str, *arguments: Any) -> Any:
    """Call one function of CUDA.

    Returns:
        Its value; a list of them where it has several, None where it has none.

    Raises:
        ArenaError: It says that memory is short.
        FabricError: It failed otherwise, or could not be called at all for want of a driver.
    """
    what = f"{function}({', '.join(map(str, arguments))})"
    try:
        code, *values = getattr(module, function)(*arguments)
    except RuntimeError as error:
        raise FabricError(f"{what} could not be called: {error}") from error
    if int(code) == 0:
        return values[0] if len(values) == 1 else values or None
    message = f"{what} failed: {getattr(code, 'name', code)}"
    if "MemoryAllocation" in message or "OUT_OF_MEMORY" in message:
        raise ArenaError(f"{message}; lower arena_bytes, or leave more of the memory to it")
    raise FabricError(message)


def upload(device: int, address: int, data: bytes) -> None:
    """Copy bytes to a GPU, and wait for it."""
    runtime = load("cuda.bindings.runtime")
    source = ctypes.create_string_buffer(data, len(data))

    def copy() -> None:
        call(runtime, "cudaSetDevice", device)
        kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        call(runtime, "cudaMemcpy", address, ctypes.addressof(source), len(data), kind)

    in_thread(copy)


def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own, and return or raise what it does.

    CUDA's current device belongs to a thread. Setting it back afterwards would not do: that can make a context on a
    device which the caller never used.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvxfer-cuda") as executor:
        return executor.submit(work).result()
