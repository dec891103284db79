"""What all requests of a pair have in common, and what a request adds: as arrays, which compiled code reads.

    Template     boxes, regions, axes and row addressing of a pair; made once a pair and kept with it
      .bind(...) with block lists and a token range: `Fitted`, a plan whose numbers are known, and whose rows are made
                 only if somebody asks for them
        Cut      the same with a grid: sizes and tables of its chunks
        Batch    tables of chunks that follow one another, of which the mover's records are made

Where a list is not as it should be the planner is asked, which says what is wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvxfer.copy import binding, records
from kvxfer.copy.tables import (
    AXIS_WORDS,
    HEADER_WORDS,
    KINDS,
    LIMIT,
    PART_BYTES,
    PART_WORDS,
    Kind,
    Variant,
    usable,
)
from kvxfer.errors import GeometryError
from kvxfer.geometry.axes import RowSide
from kvxfer.geometry.cache import CacheGeometry
from kvxfer.geometry.copyplan import BYTES, MAX_OUTER_AXES, Elements
from kvxfer.geometry.intersect import Folded, SegmentClass
from kvxfer.geometry.plan import ChunkGrid, PairPlan, TransferPlan
from kvxfer.geometry.rows import BlockLists, check_tokens
from kvxfer.names import lazy

if TYPE_CHECKING:
    from kvxfer.copy.cuda import Gpu
    from kvxfer.copy.kernel import Kernel

__all__ = ["Batch", "Cut", "Fitted", "Template", "Variants"]

I64: TypeAlias = NDArray[np.int64]

_BEYOND: Final = "addresses and strides reach beyond all memory"
_LARGEST: Final = 1 << 60
"""Numbers of a pair that are no larger can be added and compared without a thought."""
_SPARE: Final = 8
"""Regions more than an even share that a class of a chunk may have before its tables are written again."""
_first_byte: Final = cast("Callable[[Any], c_char]", c_char.from_buffer)  # as in the mover
_NOWHERE: Final = (0, 0)


class Variants:
    """What the kernel has to be compiled for, as compiled code numbers it.

    Args:
        elements: What is done to elements, by number.
    """

    def __init__(self, elements: Sequence[Elements]) -> None:
        self.elements: Final = elements
        # numbers that are said of a copy, which has at most one launch of each
        self.told: Final = binding.told_words(sum([len(usable(one)) for one in elements]))
        kinds = [(KINDS[one.src], KINDS[one.dst], one.dst_bytes) for one in elements]
        self.kinds: Final = np.asarray(kinds, np.int64).ravel()  # as `binding.write_records` takes them on a CPU
        self._functions: I64 | None = None  # of the one kernel that a worker has

    def of(self, kernel: "Kernel", *, anew: bool) -> I64:
        """As `binding.write_records` takes them on a GPU; `anew` if more may have been compiled since."""
        if anew or self._functions is None:
            found = np.zeros((len(self.elements), binding.WIDTHS_OF_ONE, binding.VARIANT_WORDS), np.int64)
            for number, elements in enumerate(self.elements):
                for width in usable(elements):
                    found[number, width.bit_length() - 1] = kernel.launchable(Variant(width, elements))
            self._functions = found.ravel()
        return self._functions


class Batch(Struct, eq=False):
    """Tables of copies that follow one another, and what compiled code says of each."""

    variants: Variants  # what the kernel has to be compiled for
    out: I64  # int64: what is said of each, then their words; as `binding.write_tables` writes them
    said: I64  # the first of these, int64 (copies, numbers)
    nbytes: I64  # of that, int64 (copies,): bytes that each carries
    # likewise int64 (copies,): room that each takes in staging, if it goes there or comes from there
    staged_bytes: I64
    helpers: int = 0  # on a CPU how many threads any of them wakes, if there are so many

    @classmethod
    def nothing(cls) -> "Batch":
        """A copy of nothing: who asks for it waits for events, posts, or has something added up."""
        variants = Variants([BYTES])
        said = np.zeros((1, variants.told), np.int64)
        return cls(variants, said.ravel(), said, said[:, binding.T_BYTES], said[:, binding.T_STAGED])

    @property
    def words(self) -> list[int]:
        """Of each, words of its tables."""
        found: list[int] = (self.said[:, binding.T_STOP] - self.said[:, binding.T_BEGIN]).tolist()
        return found

    def needed(self) -> set[Variant]:
        """What the kernel has to be compiled for; nothing may have been laid yet."""
        rows: list[list[int]] = self.said.tolist()
        each, found = binding.LAUNCH_WORDS, set[Variant]()
        for row in rows:
            for at in range(binding.TOLD, binding.TOLD + each * row[binding.T_LAUNCHES], each):
                found.add(Variant(row[at + binding.L_WIDTH], self.variants.elements[row[at + binding.L_ELEMENTS]]))
        return found

    def write_records(self, common: Sequence[int], gpu: "Gpu | None", kept: list[Any], room: Any) -> "I64 | None":
        """Records of all of them, int64 (copies, RECORD_WORDS); None if `Gpu.prepare` has to see to something before.

        Args:
            common: What they have in common.
            gpu: What copies; None for CPU memory.
            kept: Gets what they point to.
            room: What that made, if it was asked.
        """
        where, told = addressof(_first_byte(self.out)), self.variants.told
        made = np.empty((len(self.said), records.RECORD_WORDS), np.int64)
        if gpu is None:
            parts = np.empty(self.out.size // HEADER_WORDS * PART_WORDS, np.int64)
            kept += [self, parts]
            listed = addressof(_first_byte(parts)) if len(parts) else 0
            how = np.array((*common, where, 0, listed, PART_BYTES, *(0,) * 5), np.int64)
            self.helpers = binding.write_records(self.out, told, how, self.variants.kinds, parts, made.ravel())
            return made
        kept += [self, room]
        at = _NOWHERE if room is None else (room[0].data_ptr(), room[1].data_ptr())
        how = np.array((*common, where, 1, 0, 0, *gpu.limits, *at), np.int64)
        for anew in (False, True):  # what was compiled since it was looked at last
            functions = self.variants.of(gpu.kernel, anew=anew)
            if not binding.write_records(self.out, told, how, functions, self.out, made.ravel()):
                return made
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Shapes:
    """A pair, as copies of one kind see it."""

    words: I64  # as `binding` reads them
    regions: I64  # int64 (R, 2): bases, or on the side of staging what is added to a place there
    variants: Variants
    slack: int  # words of a chunk at most that are neither of regions nor of rows, where no class is split
    needed: frozenset[Variant]  # that a request may need, whatever its blocks and tokens are

    @classmethod
    def of(cls, kind: Kind, common: Sequence[I64], of_pair: Sequence[SegmentClass]) -> "_Shapes":
        """Look at each class."""
        meetings, groups, classes, edges = common
        groups_at = binding.HEAD + meetings.size
        classes_at = groups_at + groups.size
        axes_at = classes_at + len(classes) * (binding.EDGES + edges.shape[1])
        known: list[Elements] = [BYTES]
        boxes: list[list[int]] = []
        axes: list[int] = []
        regions: list[I64] = []
        factors: list[I64] = []
        needed: set[Variant] = set()
        for of in of_pair:
            folded = (of.in_place, of.gathered, of.scattered)[kind]
            if folded.box.elements not in known:
                known.append(folded.box.elements)
            outer = sorted((axis.dst, axis.src, axis.count) for axis in folded.box.outer if axis.count > 1)
            first = axes_at + len(axes)
            where = (sum(map(len, regions)), first, first + binding.OUTER_WORDS * len(outer))
            boxes.append(_box_words(kind, of, outer, known.index(folded.box.elements), where))
            axes += [number for dst, src, count in outer for number in (count, src, dst)]
            regions.append(folded.regions)
            needed.update(_variants(folded, boxes[-1]))
            both = np.zeros(len(folded.regions), np.int64)
            if folded.factors is not None:
                both[:] = np.ascontiguousarray(folded.factors, "<f4").view("<i8")[:, 0]
            factors.append(both)
        counts = [len(meetings), len(groups), len(classes), edges.shape[1] - 1]
        head = [*counts, groups_at, classes_at, axes_at, axes_at + len(axes)]
        tables = [head, meetings, groups, np.hstack([np.asarray(boxes, np.int64), classes, edges]), axes, *factors]
        return cls(
            np.concatenate([np.asarray(table, np.int64).ravel() for table in tables]),
            np.concatenate(regions),
            Variants(known),
            len(classes) * (HEADER_WORDS + 3 * _SPARE + AXIS_WORDS * (MAX_OUTER_AXES + 2)),
            frozenset(needed),
        )


def _variants(of: Folded, words: Sequence[int]) -> Iterator[Variant]:
    """From the widest access that a region allows to the widest that every row of each does, cut at any token."""
    box, elements = of.box, of.box.elements
    places = of.regions[:, 0] // elements.src_bytes | of.regions[:, 1] // elements.dst_bytes
    common = words[binding.COMMON] | words[binding.MOST]
    every = common | box.run | int(np.bitwise_or.reduce(places))
    for at in (binding.SRC_ROW, binding.SRC_BLOCK, binding.SRC_FIRST):
        every |= words[at] // elements.src_bytes | words[at + 3] // elements.dst_bytes
    every |= box.src_token // elements.src_bytes | box.dst_token // elements.dst_bytes
    widest = int(np.max((places | common) & -(places | common)))
    yield from (Variant(width, elements) for width in usable(elements) if every & -every <= width <= widest)


def _box_words(
    kind: Kind, of: SegmentClass, outer: Sequence[tuple[int, int, int]], number: int, where: tuple[int, int, int]
) -> list[int]:
    """What a class is in copies of one kind.

    Args:
        kind: Which.
        of: All of the class.
        outer: Its axes: destination stride, source stride, count.
        number: Of its elements.
        where: Its first region, its first axis, and one past its last.
    """
    folded = (of.in_place, of.gathered, of.scattered)[kind]
    box, elements, key = folded.box, folded.box.elements, of.key
    most = usable(elements)[0]
    source = (of.row_bytes, 0, 0) if kind is Kind.SCATTER else (0, key.src_block, box.src_token)
    target = (of.row_bytes, 0, 0) if kind is Kind.GATHER else (0, key.dst_block, box.dst_token)
    common = 0 if box.token_in_run else box.run
    for dst, src, _ in outer:
        common |= src // elements.src_bytes | dst // elements.dst_bytes
    steps = [step // elements.src_bytes for step in source] + [step // elements.dst_bytes for step in target]
    steady = not any(step % most for step in (*steps, box.run))
    shifts = [(size - 1).bit_length() for size in (elements.src_bytes, elements.dst_bytes)]
    return [
        *source,
        *target,
        box.src_token,
        box.dst_token,
        box.run,
        int(box.token_in_run),
        *shifts,
        most,
        number,
        Variant(most, elements).tile,
        elements.src_bytes,
        elements.dst_bytes,
        box.token_bytes,
        common,
        int(steady),
        len(folded.regions) // len(of.bases),
        *where,
        prod(axis.count for axis in box.outer),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """What all requests of a pair have in common."""

    pair: PairPlan
    row_tokens: tuple[int, ...]  # of each meeting, tokens of a row; 0 of state
    padded: bool  # whether a group has a null block at the source
    scratch: int  # numbers that `binding.write_tables` needs for itself, but those of rows
    shapes: Mapping[Kind, _Shapes]

    @classmethod
    def of(cls, pair: PairPlan) -> "Template":
        """Make a pair's.

        Raises:
            GeometryError: If nothing is selected, or numbers are beyond all memory, as a peer may declare.
        """
        names, meetings = pair.groups, pair.meetings
        if not pair.classes:
            raise GeometryError("nothing is selected")
        layers = np.asarray(pair.layers, np.int64)
        try:
            common = (
                np.asarray([_meeting_words(names.index(group), src, dst) for group, src, dst in meetings], np.int64),
                np.asarray([_limits(pair.src, name) + _limits(pair.dst, name) for name in names], np.int64),
                np.asarray(
                    [[at, of.token_bytes, of.row_bytes] for at, of in zip(pair.meeting_of, pair.classes, strict=True)],
                    np.int64,
                ),
                np.stack([np.append(np.searchsorted(c.layers, layers), len(c.layers)) for c in pair.classes]),
            )
            shapes = {kind: _Shapes.of(kind, common, pair.classes) for kind in Kind}
        except OverflowError as error:
            raise GeometryError(_BEYOND) from error
        if any(np.abs(found).max() > _LARGEST for one in shapes.values() for found in (one.regions, *common)):
            raise GeometryError(_BEYOND)
        tokens = tuple(src.grid and src.tokens_per_row * src.common(dst) for _, src, dst in meetings)
        padded = any(src.null_block is not None for _, src, _ in meetings)
        scratch = binding.scratch_words(len(meetings), len(pair.classes))
        return cls(pair, tokens, padded, scratch, shapes)

    def bind(
        self, src_spans: BlockLists, dst_spans: BlockLists, tokens: range, *, covered: int | None = None
    ) -> "Fitted":
        """As `PairPlan.bind`, which is asked what is wrong where lists are not as they should be."""
        check_tokens(tokens, may_be_empty=True)
        covered = tokens.stop if covered is None else min(covered, tokens.stop)
        plan = partial(self.pair.bind, src_spans, dst_spans, tokens, covered=covered)
        src_ids: list[I64] = []
        dst_ids: list[I64] = []
        request = [tokens.start, tokens.stop, covered, *(0,) * binding.TOTALS]
        from_src = from_dst = marks = 0
        for name in self.pair.groups:
            if name not in src_spans or name not in dst_spans:
                plan()
            source, target = src_spans[name], dst_spans[name]
            # copies: compiled code takes no array that has gaps or cannot be written to
            theirs, ours = np.array(source.ids, np.int64), np.array(target.ids, np.int64)
            request += (from_src, len(theirs), source.first_token, from_dst, len(ours), target.first_token)
            src_ids.append(theirs)
            dst_ids.append(ours)
            from_src, from_dst = from_src + len(theirs), from_dst + len(ours)
            # in which an id is seen that is there twice: a table of them, or a bit for each of the pool
            marks += min(1 << max(0, 2 * len(ours) - 1).bit_length(), -(-self.pair.dst.pool_ids[name] // 64))
        request += (0,) * (binding.MET_WORDS * len(self.row_tokens))
        both = (src_ids[0], dst_ids[0]) if len(src_ids) == 1 else (np.concatenate(src_ids), np.concatenate(dst_ids))
        lists = np.array(request, np.int64), *both
        common = self.shapes[Kind.COPY].words, *lists
        if binding.bind(*common, np.zeros(marks, np.int64)) != binding.FITS:
            plan()
            binding.bind(*common, np.zeros(0, np.int64))  # ids are distinct, and were made to collide
        counted: list[int] = lists[0].tolist()
        at, met = binding.TOTAL, binding.LISTS + binding.LIST_WORDS * len(self.pair.groups)
        rows = counted[met + binding.M_CELLS :: binding.MET_WORDS]
        found = Fitted(self.pair, src_spans, dst_spans, tokens, covered, self, lists, rows)
        vars(found).update(  # what the planner finds out when it is asked is known
            nbytes=counted[at], staged_bytes=counted[at + 1], pieces=counted[at + 2], most_rows=counted[at + 3]
        )
        return found


def _meeting_words(group: int, src: RowSide, dst: RowSide) -> list[int]:
    null = binding.PADDING if src.null_block is None else src.null_block
    sides = ([at.block_tokens, at.block_ratio, at.tokens_per_row, at.rank, at.of, at.chunk] for at in (src, dst))
    return [group, src.common(dst), null, *chain.from_iterable(sides)]


def _limits(geometry: CacheGeometry, group: str) -> list[int]:
    side = geometry.sides[group]
    null = binding.PADDING if side.null_block is None else side.null_block
    return [geometry.pool_ids[group], null, int(side.is_state)]


@dataclass(frozen=True, eq=False)
class Fitted(TransferPlan):
    """A plan of a request whose numbers and tables compiled code makes; its rows only if somebody asks for them."""

    template: Template
    # its block lists, int64: as `binding` reads them, with what it has counted; ids of all groups at the source;
    # likewise at the destination
    lists: tuple[I64, I64, I64]
    meeting_rows: Sequence[int]  # of each meeting

    def largest_chunk_bytes(self, grid: ChunkGrid) -> int:
        """Staging that the largest chunk of a grid takes, if no source block is padding."""
        return int(self.cut(grid).measured(outline=True)[:, 1].max())

    def cut(self, grid: ChunkGrid) -> "Cut":
        """The same, cut by a grid."""
        template, most = self.template, self.meeting_rows
        if grid.windows > 1:
            step, of = grid.tokens_per_chunk, zip(most, template.row_tokens, strict=True)
            most = [min(rows, step // tokens + 2) if tokens else rows for rows, tokens in of]
        scratch = np.empty(template.scratch + binding.ROW_WORDS * sum(most), np.int64)
        scratch[0] = 0
        return Cut(self, grid, sum(map(most.__getitem__, self.pair.meeting_of)), scratch)


class Cut(Struct, frozen=True, eq=False, dict=True):
    """A request as it is cut: how large its chunks are, and their tables."""

    plan: Fitted
    grid: ChunkGrid  # of its tokens and of all layers of its pair
    rows: int  # of all classes in a window, at most
    scratch: I64  # where `binding.write_tables` finds the rows of a window again

    @lazy
    def sizes(self) -> I64:
        """Of each chunk, bytes that it carries and staging that it takes; -1 where a source block is not known yet."""
        plan = self.plan
        if self.grid.chunks == 1 and not plan.template.padded and plan.covered >= plan.tokens.stop:
            return np.array([[plan.nbytes, plan.staged_bytes]], np.int64)
        return self.measured(outline=False)

    def measured(self, *, outline: bool) -> I64:
        """The same, int64 (chunks, 2); of an outline, if no source block is padding and all are known."""
        shapes, grid = self.plan.template.shapes[Kind.COPY], self.grid
        out = np.empty(binding.SIZES * grid.chunks, np.int64)
        common = shapes.words, shapes.regions, *self.plan.lists, grid.layers_per_chunk, grid.tokens_per_chunk
        what = binding.OUTLINE if outline else binding.SIZE
        binding.write_tables(what, *common, np.arange(grid.chunks), self.scratch, binding.SIZES, out)
        return out.reshape(grid.chunks, binding.SIZES)

    def tables(
        self,
        kind: Kind,
        chunks: range,
        addresses: Sequence[int],
        *,
        reached: Callable[[I64], I64] | None = None,
    ) -> Batch:
        """The tables of chunks that follow each other.

        Args:
            kind: What they do.
            chunks: Which.
            addresses: For each of them its place in staging; of copies in place any number.
            reached: Makes regions of copies in place, int64 (R, 2), where this process addresses destinations
                differently; it is given the same array for all requests of the pair.

        Raises:
            BlocksError: If a source block is not known yet.
            GeometryError: If a table is too large to be numbered.
        """
        template, grid, count = self.plan.template, self.grid, len(chunks)
        shapes, cells = template.shapes[kind], np.arange(chunks.start, chunks.stop)
        if grid.band > 1:  # else they have the order of chunks
            cells = grid.cell(cells)
        told = shapes.variants.told
        room = 3 * len(shapes.regions) * grid.layers_per_chunk // len(grid.layers) + shapes.slack
        room += 3 * self.rows
        regions = shapes.regions if reached is None else reached(shapes.regions)
        common = shapes.words, regions, *self.plan.lists, grid.layers_per_chunk, grid.tokens_per_chunk, cells
        while True:
            out = np.empty(count * (told + room), np.int64)
            said = out[: count * told].reshape(count, told)
            said[:, binding.T_BYTES] = addresses  # where `write_tables` reads them
            code = binding.write_tables(int(kind), *common, self.scratch, told, out)
            if code != binding.FULL:
                break
            room *= 2
        if code == binding.UNKNOWN:
            for chunk in chunks:
                self.plan.chunk(grid, chunk)  # says which
        if code != binding.FITS:
            raise GeometryError(
                "a copy has more words in a row, rows times regions or tiles in a launch than the "
                f"{LIMIT - 1} that can be numbered: cut it into smaller ones"
            )
        return Batch(shapes.variants, out, said, said[:, binding.T_BYTES], said[:, binding.T_STAGED])
