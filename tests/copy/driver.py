"""A stub of CUDA's driver on CPU memory: what is asked of a stream happens when a test lets it go on.

Its functions are C functions by address, as the machine calls them, and a kernel is interpreted from the tables that it
was launched with, as they are when the stream comes to it: so bytes really move, and whoever changes tables under
their reader is found out.
"""

import ctypes
import itertools
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from packing import Launch, Tables, copy_parts, parts_of

from kvxfer.copy import cuda, records
from kvxfer.copy.tables import SPARE_WORDS, SumVariant, Variant
from kvxfer.errors import TransferFailedError

NOT_READY = 600
FAULT = 700  # CUDA_ERROR_ILLEGAL_ADDRESS
_HEADER_WORDS = 13
_ARGUMENTS = {
    "SET_CONTEXT": 1,
    "CAPTURE_MODE": 1,
    "LAUNCH": 11,
    "RECORD": 2,
    "QUERY": 1,
    "UPLOAD": 4,
    "DOWNLOAD": 4,
    "CLEAR": 4,
    "CLEAR_LINES": 6,
    "FLUSH": 2,
}


def word(address: int) -> ctypes.c_int64:
    """The word at an address."""
    return ctypes.c_int64.from_address(address)


class Event:
    """An event of the caller's, as torch has them: it is asked by its handle, and by nobody else."""

    def __init__(self, handle: int) -> None:
        self.cuda_event = handle

    def query(self) -> bool:
        raise AssertionError("the machine asks for it")


class Driver:
    """Streams, events and kernels."""

    def __init__(self) -> None:
        self.streams: dict[int, deque[tuple[str, Any]]] = {}  # what is still to be done, by stream
        self.calls: list[tuple[Any, ...]] = []  # every call in order, with its arguments
        self.codes: dict[str, list[int]] = {}  # by function: what its next calls return. A call that fails does nothing
        self.kernels: dict[int, Any] = {}  # what the functions are that are launched
        self.sums: list[int] = []  # what a kernel of sums adds up
        self.broken: list[BaseException] = []  # what went wrong within a call
        self.watch: Any = None  # called before each call, with its name and arguments
        self.runs = False  # whether streams go on by themselves, whenever an event is asked for
        self._pending: dict[int, object] = {}  # events that have been recorded and have not happened
        self._numbers = itertools.count(1 << 20)
        self._kept = [
            ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * count)(partial(self._call, name))
            for name, count in _ARGUMENTS.items()
        ]
        self.functions = {
            getattr(records, name): ctypes.cast(function, ctypes.c_void_p).value or 0
            for name, function in zip(_ARGUMENTS, self._kept, strict=True)
        }

    def _call(self, name: str, *arguments: int) -> int:
        try:
            if self.watch is not None:
                self.watch(name, arguments)
            self.calls.append((name, *arguments))
            codes = self.codes.get(name)
            code = codes.pop(0) if codes else 0
            if code:
                return code
            return int(getattr(self, f"_{name.lower()}")(*arguments) or 0)
        except BaseException as error:  # noqa: BLE001 - nobody is above a C function
            self.broken.append(error)
            return FAULT

    def made(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of all calls of a function."""
        return [call[1:] for call in self.calls if call[0] == name]

    def names(self, *left_out: str) -> list[str]:
        """What was called, in order, but for some."""
        return [call[0] for call in self.calls if call[0] not in {"QUERY", "CAPTURE_MODE", "SET_CONTEXT", *left_out}]

    # --- events

    def event(self) -> Event:
        """An event that was recorded where this test does not look."""
        handle = next(self._numbers)
        self._pending[handle] = None
        return Event(handle)

    def fire(self, event: Event) -> None:
        """It happens."""
        self._pending.pop(event.cuda_event, None)

    def _record(self, event: int, stream: int) -> None:
        self._pending[event] = token = object()
        self._later(stream, "mark", partial(self._mark, event, token))

    def _mark(self, event: int, token: object) -> None:
        if self._pending.get(event) is token:
            del self._pending[event]

    def _query(self, event: int) -> int:
        if self.runs:
            self.go()
        return NOT_READY if event in self._pending else 0

    # --- streams

    def _later(self, stream: int, what: str, work: Any) -> None:
        self.streams.setdefault(stream, deque()).append((what, work))

    def go(self) -> None:
        """Let streams go on until they are through."""
        for queue in list(self.streams.values()):
            while queue:
                queue.popleft()[1]()

    def go_one(self, stream: int) -> None:
        """Let it do one thing."""
        if self.streams.get(stream):
            self.streams[stream].popleft()[1]()

    def _upload(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._later(stream, "upload", partial(ctypes.memmove, dst, src, nbytes))

    _download = _upload

    def _clear(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self._later(stream, "clear", partial(ctypes.memset, address, value, nbytes))

    def _clear_lines(self, address: int, pitch: int, value: int, width: int, lines: int, stream: int) -> None:
        def clear() -> None:
            for line in range(lines):
                ctypes.memset(address + line * pitch, value, width)

        self._later(stream, "clear", clear)

    def _launch(self, function, blocks, y, z, threads, ty, tz, shared, stream, parameters, extra) -> None:
        assert (y, z, ty, tz, extra) == (1, 1, 1, 1, 0)
        assert blocks > 0
        assert threads > 0
        assert shared >= 0
        given = [word(word(parameters + 8 * number).value).value for number in range(6)]  # read at once, as CUDA does
        assert [word(word(parameters + 8 * number).value).value for number in (6, 7)] == [0, 0]  # of Triton's own
        self._later(stream, "launch", partial(self._run, self.kernels[function], *given))

    def _run(self, kernel, table, first, headers, gate, generation, closed) -> None:
        if callable(kernel):
            kernel(table, first, headers, gate, generation, closed)
        elif isinstance(kernel, SumVariant):
            for number, one in enumerate(self.sums):  # `gate` is where sums are
                word(table + 8 * (gate + number)).value = one
        elif gate and word(gate).value >> 32 != generation:
            word(closed).value = 1
        else:
            copy_headers(kernel, table, first, headers)

    # --- what is done at once

    def _set_context(self, context: int) -> None:
        assert context

    def _capture_mode(self, mode: int) -> None:
        assert word(mode).value & 0xFFFF_FFFF == 2  # relaxed

    def _flush(self, target: int, scope: int) -> None:
        assert (target, scope) == (0, 100)


def copy_headers(variant: Variant, table: int, first: int, headers: int) -> None:
    """What the kernel copies."""
    count = first + headers * _HEADER_WORDS
    words = np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(table))
    parts, number = parts_of(Tables(words, (Launch(variant, first, headers, 0),), 0))
    copy_parts(parts.ctypes.data, 0, number)


class StubKernel:
    """Variants of a kernel that are compiled at once."""

    def __init__(self, driver: Driver) -> None:
        self.compiles = 0
        self.error: Exception | None = None
        self._driver = driver
        self._functions: dict[Any, int] = {}

    def compile(self, variant: Any) -> Any:
        if self.error is not None:
            raise self.error
        if variant not in self._functions:
            self.compiles += 1
            self._functions[variant] = function = 1000 + self.compiles
            self._driver.kernels[function] = variant
        return variant

    def launchable(self, variant: Any) -> tuple[int, int, int]:
        return (self._functions[variant], 32, 0) if variant in self._functions else (0, 0, 0)

    def touch_gate(self, gate: int, *, raised: bool) -> int:
        seen = word(gate).value
        word(gate).value += int(raised) << 32
        return seen & 0xFFFF_FFFF


class StubGpu(cuda.Gpu):
    """A GPU on a stub of the driver: all but its making is as of a real one."""

    def __init__(self, driver: Driver, *, ctas: int = 24, ring_bytes: int = 4096, warm: bool = True) -> None:
        self.ctas = ctas
        self.device = torch.device("cpu")  # pyright: ignore[reportGeneralTypeIssues]
        self.driver = driver
        self.functions = driver.functions  # pyright: ignore[reportGeneralTypeIssues]
        self.context = 1  # pyright: ignore[reportGeneralTypeIssues]
        self.handles = (11, 12)  # its streams, gathers first
        streams: Any = [SimpleNamespace(cuda_stream=handle, priority=-n) for n, handle in enumerate(self.handles)]
        self.streams = streams  # pyright: ignore[reportGeneralTypeIssues]
        words = ring_bytes // 8
        self._rings = [(self._on_device(words), self._on_device(words)) for _ in (0, 1)]  # pyright: ignore[reportGeneralTypeIssues]
        marks = [[SimpleNamespace(cuda_event=100 * lane + n + 1) for n in range(records.QUEUE)] for lane in (1, 2)]
        self._marks = marks  # pyright: ignore[reportGeneralTypeIssues]
        self.kernel: Any = StubKernel(driver)  # pyright: ignore[reportGeneralTypeIssues]
        self.arrival = None
        self.limits = words - SPARE_WORDS, 512, 64  # pyright: ignore[reportGeneralTypeIssues]
        if warm:
            for width in (16, 8, 4, 2, 1):
                self.kernel.compile(Variant(width))

    def _room(self, words, lane):
        del lane
        return self._on_device(words), self._on_device(words)

    @staticmethod
    def error(code: int):
        return TransferFailedError(f"a copy failed on the device: code {code}")
