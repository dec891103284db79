"""What the mover needs of one GPU: the driver's functions by address, streams, kernels, and rings for tables.

A copy's tables are written into a slot of a ring of pinned memory, copied from there into the same slot of a ring of
device memory, and read there by the kernel, all in the order of the stream; small ones are read where they are. A slot
is used again only after the event behind the kernel has happened, so neither copy of the tables can change under its
reader. Gathers and scatters have a stream each, so that neither waits for the other. What is urgent has the highest
priority that there is: its thread blocks come before those of any other stream that wait for room on the GPU, as every
kernel of a model does that keeps it busy.

Addresses may be memory of this GPU, pinned host memory, or a peer's memory that this process has mapped and this GPU
can reach.
"""

import ctypes
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvxfer.copy import records
from kvxfer.copy.port import CopyJob
from kvxfer.copy.tables import SPARE_WORDS, SumTables, pack_sums
from kvxfer.errors import FabricError, KvxferError, MissingExtraError, TransferFailedError
from kvxfer.memory.device import Arrival, arrival, call, load
from kvxfer.telemetry import logger

if TYPE_CHECKING:  # importing the kernel imports triton
    from kvxfer.copy.kernel import Kernel
    from kvxfer.copy.template import Batch

__all__ = ["FUNCTIONS", "Gpu"]

I64: TypeAlias = NDArray[np.int64]

_log: Final = logger("kvxfer.receive")
_cuda: Final[Any] = torch.cuda  # some versions of torch leave its streams untyped
_PURPOSE: Final = "copying on a GPU"
_NEAR_WORDS: Final = 512
_NEAR_TILES: Final = 64
"""Tables of so few words for so few tiles are read from pinned memory: copying them to the device takes longer."""

FUNCTIONS: Final = {
    records.SET_CONTEXT: "cuCtxSetCurrent",
    records.CAPTURE_MODE: "cuThreadExchangeStreamCaptureMode",
    records.LAUNCH: "cuLaunchKernel",
    records.RECORD: "cuEventRecord",
    records.QUERY: "cuEventQuery",
    records.UPLOAD: "cuMemcpyHtoDAsync_v2",
    records.DOWNLOAD: "cuMemcpyDtoHAsync_v2",
    records.CLEAR: "cuMemsetD8Async",
    records.CLEAR_LINES: "cuMemsetD2D8Async",
    records.FLUSH: "cuFlushGPUDirectRDMAWrites",
}
"""The driver's functions, by their port."""


class Gpu:
    """One GPU, made in a thread that may allocate pinned memory there.

    Args:
        device: Which.
        ctas: Thread blocks that a copy occupies at most, so that other work keeps its share of the GPU.
        ring_bytes: Of each ring.

    Raises:
        MissingExtraError: If triton or cuda-bindings cannot be imported, or the driver lacks a function.
    """

    def __init__(self, device: torch.device | int, *, ctas: int = 24, ring_bytes: int = 4 << 20) -> None:
        self.ctas = ctas
        self.device: Final = torch.empty(0, device=device).device  # with its index, also if it is the current one
        driver = load("driver", _PURPOSE)
        self.functions: Final = _addresses()
        with torch.cuda.device(self.device):
            last, first = _cuda.Stream.priority_range()  # the greatest priority is the least number
            self.streams: Final = [_cuda.Stream(self.device, priority=urgency) for urgency in (first, last)]
            self._rings: Final = [(_pinned(ring_bytes // 8), self._on_device(ring_bytes // 8)) for _ in self.streams]
            self.context: Final = int(call(driver, "cuCtxGetCurrent"))
            self._marks: Final = [[_mark(stream) for _ in range(records.QUEUE)] for stream in self.streams]
            torch.cuda.synchronize(self.device)
        # words of tables that fit into a ring; of those that are read where they are, and tiles of these
        self.limits: Final = ring_bytes // 8 - SPARE_WORDS, _NEAR_WORDS, _NEAR_TILES
        self.kernel: Final = _load_kernel(self._rings[0][1])
        # how it is seen to that what NICs have written is there, once that had to be known
        self.arrival: Arrival | None = None

    def install(self, state: I64, ports: I64) -> None:
        """Tell the machine where everything is."""
        state[records.GPU], state[records.CONTEXT] = 1, self.context
        for port, address in self.functions.items():
            ports[port] = address
        for number, stream in enumerate(self.streams):
            lane = state[records.LANE_AT + number * records.LANE_WORDS :][: records.LANE_WORDS]
            host, device = self._rings[number]
            lane[records.STREAM], lane[records.RING_WORDS] = int(stream.cuda_stream), host.numel()
            lane[records.RING_HOST], lane[records.RING_DEVICE] = host.data_ptr(), device.data_ptr()
            lane[records.ORDER + records.QUEUE :] = [int(mark.cuda_event) for mark in self._marks[number]]

    def prepare(
        self, batch: "Batch", job: CopyJob, lane: int
    ) -> tuple[SumTables | None, tuple[torch.Tensor, torch.Tensor] | None]:
        """See to all that launching copies, or sums, needs and takes a while: in a worker thread.

        Returns:
            Tables of the sums; memory for tables, pinned and on the device, if they are larger than a ring.
        """
        for variant in batch.needed():
            self.kernel.compile(variant)
        sums = None if job.sums is None else pack_sums(job.sums)
        for one in () if sums is None else sums.launches:
            self.kernel.compile(one.variant)
        if job.from_nic and self.arrival is None:
            self.arrival = arrival(self.device.index)
            if self.arrival is Arrival.UNKNOWN:
                _log.warning("writes_not_flushed", device=str(self.device), reason="the device has no way to do it")
        sizes = batch.words if sums is None else [len(sums.words)]
        words = sum([size + SPARE_WORDS + 1 for size in sizes if size > self.limits[0]])
        return sums, self._room(words, lane) if words else None

    def add_sums(self, record: I64, sums: SumTables, kept: list[Any], room: Any) -> I64:
        """Have the record of a copy of nothing add up; returns where the results will be.

        `kept` gets what the record points to; `room` is what `prepare` made.
        """
        kernel, words, found = self.kernel, sums.words, np.zeros(len(sums.words) - sums.at, np.int64)
        each = [(*kernel.launchable(one.variant), one.first, one.headers, one.blocks) for one in sums.launches]
        launches = np.array(each, np.int64)
        kept += [words, launches]
        record[records.PARTS], record[records.PART_COUNT] = launches.ctypes.data, len(launches)
        record[records.TABLES], record[records.TABLE_WORDS], record[records.NEAR] = words.ctypes.data, len(words), 0
        record[records.SUMS_AT], record[records.SUMS] = sums.at, found.ctypes.data
        if room is not None:
            record[records.OWN_HOST], record[records.OWN_DEVICE] = room[0].data_ptr(), room[1].data_ptr()
        return found

    @property
    def flushes(self) -> bool:
        """Whether what NICs have written into its memory has to be flushed."""
        return self.arrival is Arrival.FLUSHED

    def _room(self, words: int, lane: int) -> tuple[torch.Tensor, torch.Tensor]:
        with _cuda.stream(self.streams[lane]):  # whose memory nothing else uses: its last user may not have run yet
            return _pinned(words), self._on_device(words)

    def _on_device(self, words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int64, device=self.device)

    @staticmethod
    def error(code: int) -> KvxferError:
        """What a code of the driver means."""
        known: Any = load("driver", _PURPOSE).CUresult
        try:
            name = str(known(code).name)
        except ValueError:
            name = f"code {code}"
        return TransferFailedError(f"a copy failed on the device: {name}")


def _mark(stream: Any) -> Any:
    """An event of CUDA, which is made as it is first recorded."""
    mark = _cuda.Event()
    mark.record(stream)
    return mark


def _pinned(words: int) -> torch.Tensor:
    return torch.empty(words, dtype=torch.int64, pin_memory=True)


def _addresses() -> dict[int, int]:
    """Where the driver has its functions."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return {port: ctypes.cast(driver[name], ctypes.c_void_p).value or 0 for port, name in FUNCTIONS.items()}
    except (OSError, AttributeError) as error:
        raise FabricError(f"CUDA's driver cannot be called: {error}; it must be of CUDA 11.3 or later") from error


def _load_kernel(table: torch.Tensor) -> "Kernel":
    try:
        from kvxfer.copy.kernel import Kernel
    except ImportError as error:
        raise MissingExtraError(
            "copies on a GPU need triton, which comes with torch for CUDA on Linux: pip install triton"
        ) from error
    return Kernel(table)
