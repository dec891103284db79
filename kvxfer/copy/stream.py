"""One CUDA stream as the executor uses it: copies of tables, zeroing, marks, and how long it took between two of them.

Calls go through cuda-bindings: a copy of tables by way of torch costs several times the rest of a small launch.
"""

from typing import Any, Final

import torch

from kvxfer.geometry.copyplan import Blank
from kvxfer.memory.driver import call, load

__all__ = ["Stream"]

_PURPOSE: Final = "copying on a GPU"
_cuda: Final[Any] = torch.cuda  # some versions of torch leave its streams untyped


class Stream:
    """A stream of one device. Belongs to one thread, in which `enter` was called.

    Args:
        device: The GPU.
        urgent: Whether it comes before other work on the GPU, as far as its priorities go.

    Attributes:
        of_torch: The stream as torch knows it, which owns it.
        handle: The stream as the driver knows it.
    """

    def __init__(self, device: torch.device, *, urgent: bool) -> None:
        self._driver: Final = load("driver", _PURPOSE)
        last, first = _cuda.Stream.priority_range()  # the greatest priority is the least number
        self.of_torch: Final[Any] = _cuda.Stream(device, priority=first if urgent else last)
        self.handle: Final = int(self.of_torch.cuda_stream)
        self._not_ready: Final = self._driver.CUresult.CUDA_ERROR_NOT_READY
        self._spare: Final[list[Any]] = []

    @staticmethod
    def enter(device: torch.device) -> None:
        """Make the device the calling thread's."""
        torch.cuda.set_device(device)
        call(load("runtime", _PURPOSE), "cudaSetDevice", device.index)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy from pinned memory to the device; the source must not change before it has run."""
        call(self._driver, "cuMemcpyHtoDAsync", target, source, nbytes, self.handle)

    def download(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy from the device to pinned memory, where it is once a mark behind it has passed."""
        call(self._driver, "cuMemcpyDtoHAsync", target, source, nbytes, self.handle)

    def clear(self, blank: Blank) -> None:
        """Queue the zeroing of memory, on the device or pinned."""
        if blank.lines == 1:
            call(self._driver, "cuMemsetD8Async", blank.address, 0, blank.width, self.handle)
        else:
            size = blank.width, blank.lines
            call(self._driver, "cuMemsetD2D8Async", blank.address, blank.pitch, 0, *size, self.handle)

    def mark(self) -> Any:
        """An event behind everything that was queued so far."""
        event = self._spare.pop() if self._spare else call(self._driver, "cuEventCreate", 0)
        call(self._driver, "cuEventRecord", event, self.handle)
        return event

    def passed(self, mark: Any) -> bool:
        """Whether the device has come to a mark.

        Raises:
            FabricError: The device is broken.
        """
        (code,) = self._driver.cuEventQuery(mark)
        if code == self._not_ready:
            return False
        if int(code):
            call(self._driver, "cuEventQuery", mark)  # says it again, by name
        return True

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks that the device has passed."""
        return float(call(self._driver, "cuEventElapsedTime", first, last)) / 1e3

    def recycle(self, *marks: Any) -> None:
        """Marks that nobody asks for any more."""
        self._spare.extend(marks)
