"""One contiguous copy from this GPU into memory of another process, mapped by CUDA IPC: the reference for `mapped`.

The only other module beside `device` that talks to CUDA. Needs cuda-bindings.
"""

import importlib
from typing import Any, Final

from kvxfer.errors import FabricError, MissingExtraError

__all__ = ["PeerCopy", "export"]


def export(address: int) -> bytes:
    """Handle of an allocation of this process, for `PeerCopy` in another one. `address` is what cudaMalloc returned."""
    return bytes(_call("cudaIpcGetMemHandle", address).reserved)


class PeerCopy:
    """A mapping of another process's allocation, and copies into it.

    Args:
        handle: As `export` made it, in the other process. It is opened with the calling thread's current device, which
            must be the GPU that copies: opened under the other one, copies run at a tenth of the speed.
    """

    def __init__(self, handle: bytes) -> None:
        runtime = _runtime()
        named = runtime.cudaIpcMemHandle_t()
        named.reserved = handle
        self._target: Final = int(_call("cudaIpcOpenMemHandle", named, runtime.cudaIpcMemLazyEnablePeerAccess))
        self._kind: Final = runtime.cudaMemcpyKind.cudaMemcpyDefault

    def copy(self, source: int, nbytes: int) -> None:
        """Copy so many bytes from an address of this GPU to the begin of the mapping, and wait for the end."""
        _call("cudaMemcpyAsync", self._target, source, nbytes, self._kind, 0)
        _call("cudaStreamSynchronize", 0)

    def close(self) -> None:
        """Unmap it."""
        _call("cudaIpcCloseMemHandle", self._target)


def _runtime() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise MissingExtraError(
            "benchmarks on GPUs need cuda-bindings, which is not installed: pip install cuda-bindings"
        ) from error


def _call(function: str, *arguments: Any) -> Any:
    runtime = _runtime()
    code, *values = getattr(runtime, function)(*arguments)
    if code != runtime.cudaError_t.cudaSuccess:
        raise FabricError(f"{function} failed: {getattr(code, 'name', code)}")
    return values[0] if values else None
