"""Copies between CPU memory: plans as numpy views of raw addresses.

Rows of equal token count form a class, which is copied in one of two ways, whichever is estimated to be faster:

- *row by row*: source and destination are strided arrays whose first axis is the row, `target[i] = source[j]`; rows
  that follow each other in equal steps on both sides are one assignment. Best where a row is large, whatever its inside
  looks like, or where rows are in order. Rows that are one run of bytes are slices of one array of all memory, which
  needs no array for each region, unless there are gaps between many that are in order.
- *item by item*: both sides are flat arrays of equal items, which numpy moves by index, many in a call. Best for small
  rows. Where one side is contiguous, bytes are touched once, else they pass through a buffer that stays in the cache.

A team shares either out, as far as that pays (`team.py`).

Elements that are converted are gathered a few rows at a time, computed, and put in their places (`convert.py`).

A view must not outlive the memory that it shows: views live inside one call of `run`, while the job's memory is valid.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import gcd, inf, prod
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy.jobs import Backlog, as_kvxfer_error
from kvxfer.copy.port import CopyJob, Direction
from kvxfer.copy.sums import total
from kvxfer.copy.team import ALONE, Team
from kvxfer.errors import KvxferError
from kvxfer.geometry.copyplan import CopyPlan, Segment
from kvxfer.geometry.sums import SumPlan
from kvxfer.runtime import Runtime

__all__ = ["HostExecutor", "run"]

I64: TypeAlias = NDArray[np.int64]
_Key: TypeAlias = int | slice
_Index: TypeAlias = I64 | slice

_POLL_S: Final = 0.0005
"""How often unfired events are queried."""
_BUFFER_BYTES: Final = 1024 * 1024
_FEW_ITEMS: Final = 500
"""For no more numpy keeps the interpreter while it puts or assigns them, however large they are."""
_FEW_BYTES: Final = 128 * 1024
"""Nobody waits long while so few are put, and an assignment takes longer."""
_WORD_BYTES: Final = 8
"""Of the largest word that rows are copied by."""
_ITEMS_PER_BATCH: Final = 1 << 16
_CONVERTED_AT_ONCE: Final = 1 << 14
"""Elements: they stay in the cache, and torch computes so few without threads of its own."""

# estimates of one step in nanoseconds, measured on x86-64; they only choose between two right ways
_VIEWS_NS: Final = 1000.0
_ROW_NS: Final = 450.0
_RUN_NS: Final = 12.0
_WORD_NS: Final = 1.0
_BATCH_NS: Final = 3000.0
_ITEM_NS: Final = 40.0
_INDEX_NS: Final = 9.0
_BYTE_NS: Final = 0.1
_BUFFERED_BYTE_NS: Final = 0.03


class HostExecutor:
    """Runs copy jobs whose addresses are CPU memory of this process, in one service per direction.

    Args:
        runtime: Clock and services.
        threads: How many may work on one copy.
        cpus: Where they are kept; anywhere if there are none.
    """

    def __init__(self, runtime: Runtime, *, threads: int = 1, cpus: frozenset[int] = frozenset()) -> None:
        self._runtime = runtime
        self._teams = {direction: Team(threads, cpus) for direction in Direction}
        self._backlog = Backlog(runtime)
        self._services = {
            direction: runtime.start(f"kvxfer-{direction.value}", self._stepper(direction)) for direction in Direction
        }

    def submit(self, job: CopyJob, direction: Direction) -> None:
        """Queue a job. Safe from any thread.

        Raises:
            ClosedError: If the executor is closed.
        """
        self._backlog.submit(job, direction)
        self._services[direction].wake()

    def warm(self, plans: Iterable[CopyPlan]) -> None:
        """Nothing to compile."""

    def warm_sums(self, plans: Iterable[SumPlan]) -> None:
        """Nothing to compile."""

    def occupy(self, ctas: int) -> None:
        """A CPU has no thread blocks: nothing changes."""

    def inside(self, gate: int, *, raised: bool) -> int:
        """Nobody: memory of a CPU has no such gates."""
        return 0

    def standing(self, since: float) -> bool:
        """None: nobody else waits for a copy between CPU memory."""
        return False

    def close(self, timeout: float) -> bool:
        """Refuse new jobs, finish the rest, stop. Blocks; may be repeated.

        Jobs that still wait for their events after `timeout` seconds are reported as failed.

        Returns:
            False if a job had not been reported by then; the services end what they are doing.
        """
        deadline = self._runtime.now() + timeout
        self._backlog.refuse()
        if not self._backlog.wait_idle(timeout):
            self._backlog.cancel_waiting()
            for service in self._services.values():
                service.wake()
            return False
        stopped = [s.stop(max(0.0, deadline - self._runtime.now())) for s in self._services.values()]
        if all(stopped):
            for team in self._teams.values():
                team.close()
        return all(stopped)

    def _stepper(self, direction: Direction) -> "_Step":
        return _Step(self._runtime, self._backlog, direction, self._teams[direction])


class _Step:
    """One step of a direction's service: run the first job whose event has fired."""

    def __init__(self, runtime: Runtime, backlog: Backlog, direction: Direction, team: Team) -> None:
        self._runtime = runtime
        self._backlog = backlog
        self._direction = direction
        self._team = team

    def __call__(self) -> float | None:
        job = self._backlog.pop_ready(self._direction)
        if job is None:
            return _POLL_S if self._backlog.is_waiting(self._direction) else None
        started = self._runtime.now()
        error: KvxferError | None = None
        allowed, sums = True, b""
        try:
            allowed = job.permit.post(self._runtime.now, lambda: run(job.plan, self._team))
            if job.sums is not None and allowed:
                sums = total(job.sums, partial(run, team=self._team))
        except Exception as caught:  # noqa: BLE001 - the job fails with it; the service goes on
            error = as_kvxfer_error("a copy on CPU memory failed", caught)
        self._backlog.report(job, started, error, stopped=not allowed, sums=sums)
        return 0.0


def run(plan: CopyPlan, team: Team = ALONE) -> None:
    """Copy now, with a team if there is one. The plan's addresses must be valid CPU memory of this process."""
    for blank in plan.blanks:
        _view(blank.address, [blank.lines, blank.width], [blank.pitch, 1], "u1")[:] = 0
    for segment in plan.segments:
        if segment.stencil.box.token_bytes and len(segment.regions):
            offsets = segment.stencil.offsets
            for tokens in np.unique(offsets[:, 2]).tolist():
                rows = _RowClass(segment, offsets[offsets[:, 2] == tokens], tokens)
                if segment.factors is None:
                    rows.copy(team)
                else:
                    rows.convert(segment.factors)


class _RowClass:
    """Rows of one segment that have equal token counts: two arrays of one shape."""

    def __init__(self, segment: Segment, rows: I64, tokens: int) -> None:
        box = segment.stencil.box
        self.elements: Final = box.elements
        axes = [(axis.count, axis.src, axis.dst) for axis in box.outer if axis.count > 1]
        if tokens > 1 and not box.token_in_run:
            axes.append((tokens, box.src_token, box.dst_token))
        self.axes: Final = sorted(axes, key=lambda axis: -axis[2])
        self.run: Final = box.run * (tokens if box.token_in_run else 1)
        self.run_bytes: Final = self.run * box.elements.dst_bytes
        self.runs: Final = prod(count for count, _, _ in axes)
        src, dst = rows[:, 0], rows[:, 1]
        first = np.asarray([src.min(), dst.min()], np.int64)
        self.bases: Final = cast("list[tuple[int, int]]", (segment.regions + first).tolist())
        self.src: Final[I64] = src - first[0]
        self.dst: Final[I64] = dst - first[1]
        self.src_step: Final = int(np.gcd.reduce(self.src))
        self.dst_step: Final = int(np.gcd.reduce(self.dst))

    def copy(self, team: Team) -> None:
        """Copy all rows in all regions."""
        nbytes = len(self.src) * self.runs * self.run_bytes  # in each region, as are the times
        chunks = -(-nbytes // _BUFFER_BYTES)
        shares = team.shares(len(self.bases) * chunks, *self._work(nbytes, chunks))
        parts = -(-chunks // shares) * shares if min(chunks, shares) > 1 else 1  # for each thread as many
        bounds = self._bounds(self.src_step, self.dst_step, parts)
        slice_bounds = bounds if self.axes else self._bounds(self.run_bytes, self.run_bytes, 1)
        by_views_ns = _VIEWS_NS + self._by_row_ns(nbytes, bounds, team)
        by_slices_ns = inf if self.axes else self._by_row_ns(nbytes, slice_bounds, team)
        by_row_ns = min(by_views_ns, by_slices_ns)
        item = gcd(self.run_bytes, self.src_step, self.dst_step, *(n for axis in self.axes for n in axis[1:]))
        moving_ns = (nbytes // item * _ITEM_NS + nbytes * _BYTE_NS) / shares
        index_ns = _BATCH_NS + nbytes // item * _INDEX_NS / len(self.bases)  # made once, by one thread
        if item <= _BUFFER_BYTES and index_ns + moving_ns < by_row_ns:  # worth a closer look
            items = _Items(self.bases, item, self._lowest(item), self._batches(item))
            if items.buffered:
                moving_ns += (nbytes // item * _ITEM_NS + nbytes * _BUFFERED_BYTE_NS) / shares
            if index_ns + moving_ns < by_row_ns:
                team.share(items.copy, items.steps, *self._work(nbytes, chunks))
                return
        if by_views_ns < by_slices_ns:
            keys = self._keys(bounds)
            team.share(self._copy_rows, keys, *self._work(nbytes, len(keys)))
        else:
            slices = self._slices(slice_bounds)
            team.share(self._copy_runs, slices, *self._work(nbytes, len(slices)))

    def _by_row_ns(self, nbytes: int, bounds: I64, team: Team) -> float:
        """Estimate for rows merged within such bounds, without what views cost."""
        copies = len(bounds) - 1
        run_ns = _RUN_NS if self.run_bytes > _WORD_BYTES else _WORD_NS
        moving_ns = nbytes * _BYTE_NS / team.shares(copies, *self._work(nbytes, copies))
        return copies * _ROW_NS + len(self.src) * self.runs * run_ns + moving_ns

    def _work(self, nbytes: int, copies: int) -> tuple[int, int]:
        """What a team asks about work: bytes and copies, in all regions."""
        return len(self.bases) * nbytes, len(self.bases) * copies

    def _bounds(self, src_step: int, dst_step: int, parts: int) -> I64:
        """First rows of copies in which each row follows the one before by these steps, and how many rows there are.

        Args:
            src_step: Bytes at the source.
            dst_step: Bytes at the destination.
            parts: Into how many of equal length all rows are cut.
        """
        src, dst = self.src, self.dst
        bounds = np.ones(len(src) + 1, np.bool_)
        bounds[1:-1] = (src[1:] - src[:-1] != max(src_step, 1)) | (dst[1:] - dst[:-1] != max(dst_step, 1))
        bounds[:: -(-len(src) // parts)] = True
        return np.flatnonzero(bounds)

    def _slices(self, bounds: I64) -> list[tuple[int, int, int]]:
        """Where rows without axes begin at the source and at the destination, and their bytes, neighbours merged."""
        src, dst, nbytes = self.src[bounds[:-1]], self.dst[bounds[:-1]], np.diff(bounds) * self.run_bytes
        return list(zip(src.tolist(), dst.tolist(), nbytes.tolist(), strict=True))

    def _copy_runs(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Rows without axes: slices of memory."""
        for src, dst in self.bases:
            source, target = src - _FIRST_BYTE, dst - _FIRST_BYTE
            for i, j, nbytes in rows:
                _EVERY_BYTE[target + j : target + j + nbytes] = _EVERY_BYTE[source + i : source + i + nbytes]

    def _keys(self, bounds: I64) -> list[tuple[_Key, _Key]]:
        """Destination and source index of every row, neighbours merged."""
        src, dst = self.src[bounds[:-1]] // max(self.src_step, 1), self.dst[bounds[:-1]] // max(self.dst_step, 1)
        heads = zip(dst.tolist(), src.tolist(), np.diff(bounds).tolist(), strict=True)
        return [(d, s) if n == 1 else (slice(d, d + n), slice(s, s + n)) for d, s, n in heads]

    def _copy_rows(self, keys: Sequence[tuple[_Key, _Key]]) -> None:
        bits = self.run_bytes | self.src_step | self.dst_step
        for axis in self.axes:
            bits |= axis[1] | axis[2]
        for src, dst in self.bases:
            bits |= src | dst
        word = min(_WORD_BYTES, bits & -bits)
        sides = self._sides(self.run_bytes // word, word, word)
        for src, dst in self.bases:
            source = _view(src, *sides[0], f"u{word}")
            target = _view(dst, *sides[1], f"u{word}")
            for i, j in keys:
                target[i] = source[j]

    def _sides(self, run: int, src_word: int, dst_word: int) -> list[tuple[list[int], list[int]]]:
        """Shape and strides of both sides as arrays of words, whose first axis is the row."""
        shape = [*(count for count, _, _ in self.axes), run]
        sides: list[tuple[list[int], list[int]]] = []
        for number, offsets, step, word in (
            (1, self.src, self.src_step, src_word),
            (2, self.dst, self.dst_step, dst_word),
        ):
            rows = int(offsets.max()) // max(step, 1) + 1
            sides.append(([rows, *shape], [step, *(axis[number] for axis in self.axes), word]))
        return sides

    def convert(self, factors: NDArray[np.float32]) -> None:
        """Convert all rows in all regions, a few rows at a time."""
        from kvxfer.copy.convert import convert  # imports torch, which copies of bytes do without

        elements = self.elements
        sides = self._sides(self.run, elements.src_bytes, elements.dst_bytes)
        taken, put = self.src // max(self.src_step, 1), self.dst // max(self.dst_step, 1)
        batch = max(1, _CONVERTED_AT_ONCE // (self.runs * self.run))
        for (src, dst), (multiply, divide) in zip(self.bases, factors, strict=True):
            source = _view(src, *sides[0], f"i{elements.src_bytes}")
            target = _view(dst, *sides[1], f"i{elements.dst_bytes}")
            for start in range(0, len(taken), batch):
                rows = slice(start, start + batch)
                target[put[rows]] = convert(source[taken[rows]], elements, multiply, divide)

    def _lowest(self, item: int) -> tuple[int, int]:
        """Items by which a row reaches before its first one on either side: strides of split axes may be negative."""
        return (
            sum((count - 1) * min(0, src) for count, src, _ in self.axes) // item,
            sum((count - 1) * min(0, dst) for count, _, dst in self.axes) // item,
        )

    def _batches(self, item: int) -> Iterator[tuple[I64, I64]]:
        """Source and destination index of every item from the lowest one on, a batch of rows at a time."""
        inner = [*self.axes, (self.run_bytes // item, item, item)]
        offsets = np.zeros((2, 1), np.int64)
        for count, src, dst in inner:
            steps = np.arange(count, dtype=np.int64) * np.asarray([[src], [dst]], np.int64)
            offsets = (offsets[:, :, None] + steps[:, None, :]).reshape(2, -1)
        offsets //= item
        offsets -= np.asarray(self._lowest(item))[:, None]
        rows = np.stack([self.src, self.dst]) // item
        batch = max(1, _ITEMS_PER_BATCH // offsets.shape[1])
        for start in range(0, rows.shape[1], batch):
            index = (rows[:, start : start + batch, None] + offsets[:, None, :]).reshape(2, -1)
            yield index[0], index[1]


class _Items:
    """Rows of a class as items of one size, which numpy moves by index, as many in a call as a buffer holds.

    Args:
        bases: Where the regions begin at the source and at the destination.
        item: Bytes of one.
        lowest: Items by which the first one of either side lies before its base.
        batches: Source and destination index of every item, counted from the lowest.
    """

    def __init__(
        self, bases: list[tuple[int, int]], item: int, lowest: tuple[int, int], batches: Iterable[tuple[I64, I64]]
    ) -> None:
        self._item: Final = item
        self._at_once: Final = max(1, _BUFFER_BYTES // item)
        self.buffered = False
        """Whether some have no contiguous side."""
        chunks: list[tuple[_Index, _Index]] = []
        counts = [0, 0]
        for sides in batches:
            in_order = [_is_range(side) for side in sides]
            self.buffered |= not any(in_order)
            counts = [max(count, int(side.max()) + 1) for count, side in zip(counts, sides, strict=True)]
            for start in range(0, len(sides[0]), self._at_once):
                src, dst = (side[start : start + self._at_once] for side in sides)
                chunks.append((_as_slice(src) if in_order[0] else src, _as_slice(dst) if in_order[1] else dst))
        self._counts: Final = counts
        firsts = [(src + lowest[0] * item, dst + lowest[1] * item) for src, dst in bases]
        self.steps: Final = [(*first, *chunk) for first in firsts for chunk in chunks]
        """First item of either side in a region, and which items are copied there."""

    def copy(self, steps: Sequence[tuple[int, int, _Index, _Index]]) -> None:
        """Copy some of the steps."""
        item, (src_count, dst_count) = self._item, self._counts
        dtype = f"V{item}"
        buffer = np.empty(self._at_once if self.buffered else 0, dtype)
        for src_first, dst_first, src, dst in steps:
            source = _view(src_first, [src_count], [item], dtype)
            target = _view(dst_first, [dst_count], [item], dtype)
            if isinstance(src, slice):
                _put(target, dst, source[src])
            elif isinstance(dst, slice):
                np.take(source, src, out=target[dst], mode="clip")
            else:
                _put(target, dst, np.take(source, src, out=buffer[: len(src)], mode="clip"))


def _put(target: NDArray[Any], index: _Index, items: NDArray[Any]) -> None:
    """Put items into their places. Without the interpreter, unless they are few and small, or odd in size."""
    item = items.itemsize
    if isinstance(index, slice):
        target[index].view("u1")[:] = items.view("u1")  # many bytes, not few items
    elif len(items) > _FEW_ITEMS or items.nbytes <= _FEW_BYTES or item % 2:
        target.put(index, items, mode="clip")
    else:  # an assignment to two dimensions lets go of it always, and takes a little longer
        half = f"V{item // 2}"
        target.view(half).reshape(-1, 2)[index] = items.view(half).reshape(-1, 2)


def _is_range(index: I64) -> bool:
    """Whether an index counts up one by one."""
    return int(index[-1]) - int(index[0]) == len(index) - 1 and bool(np.all(np.diff(index) == 1))


def _as_slice(index: I64) -> slice:
    return slice(int(index[0]), int(index[-1]) + 1)


_FIRST_BYTE: Final = 4096


class _Memory:
    """All memory of this process in the form that numpy takes for an array: most of it must never be touched."""

    def __init__(self) -> None:
        place = (_FIRST_BYTE, False)
        self.__array_interface__ = {"version": 3, "data": place, "shape": (1 << 62,), "strides": (1,), "typestr": "|u1"}


_EVERY_BYTE: Final[Any] = np.asarray(cast("Any", _Memory()))
"""What copies are slices of: taking one costs a third of making an array of an address."""


def _view(address: int, shape: list[int], strides: list[int], dtype: str) -> NDArray[Any]:
    """Memory at `address` as an array. Nothing keeps that memory alive."""
    return np.ndarray(shape, dtype, _EVERY_BYTE, address - _FIRST_BYTE, strides)
