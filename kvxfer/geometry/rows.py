"""Block lists, and the rows in which two of them meet.

A row is a run of tokens that lies in one block on either side: source block and first token in it, destination block
and first token in it, number of tokens. Rows are cut on the grid of common sub-blocks (the greatest common divisor of
the two block sizes, and of the interleaving chunks) and clipped to the token range, so a row never carries a token that
was not asked for.
"""

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import BlocksError, TokensError
from kvxfer.geometry.axes import RowSide
from kvxfer.names import MAX_ROWS, MAX_TOKENS, lazy

if TYPE_CHECKING:
    from kvxfer.geometry.cache import CacheGeometry

__all__ = ["BlockLists", "Blocks", "Meeting", "Rows", "Span", "check_spans", "check_tokens", "meet", "normalise_blocks"]

_MAX_ID: Final = (1 << 63) - 1
_MAX_IDS: Final = 1 << 28
_PADDING: Final = -1  # a source block that is none: nothing comes of its rows
_FEW: Final = 1 << 12  # cells that are looked at together for the first or the last that both sides hold
_UNKNOWN: Final = -2  # a source block that is not known yet: its rows cannot be copied
_NO_NUMBER: Final[Any] = None  # what a bool is taken for
_SPARSE: Final = 64
"""A pool of so many ids for each one named is too large to mark them in a table of it; a peer says how large its is."""


class Array(Protocol):
    """Numbers as numpy takes them: an array, or a tensor in CPU memory."""

    def __array__(self) -> NDArray[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, at: Any, /) -> Any: ...


Ids: TypeAlias = Sequence[int] | Array
I64: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Span:
    """A block list that does not start at token 0 (a sliding window), or the normal form of any block list.

    Attributes:
        ids: Block ids in token order.
        first_token: The first token that the list is about; the first block is the one that holds it, or begins after
            it where tokens are interleaved. What that block holds of earlier tokens is neither read nor written, so
            a window may begin anywhere, whatever the block sizes of both sides.
    """

    ids: Ids
    first_token: int = 0

    @lazy
    def packed(self) -> bytes:
        """The ids as they travel and are hashed: 4 bytes each, little-endian."""
        return np.asarray(self.ids).astype("<u4").tobytes()


Blocks: TypeAlias = Ids | Span | Mapping[str, Ids | Span]
"""What a caller may pass for `blocks`: ids for a cache of one group, or ids (or a `Span`) by group."""
BlockLists: TypeAlias = Mapping[str, Span]
"""The normal form: an int64 `Span` for every group."""


Meeting: TypeAlias = tuple[str, RowSide, RowSide]
"""A group and its addressing at the source and destination: what a pair of block lists has one table of rows for."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Where two block lists meet, one row a run of tokens."""

    # int64 (N, 5): source block, first token row there, destination block, first token row there, number of token rows
    # (1 for state); kernel block numbers. A negative source block is padding, or not known yet
    table: I64
    begin: I64  # int64 (N,): global number of the first token row of each row, ascending; for state its last token
    grid: int  # largest number of token rows that a row can have
    unit: int = 1  # tokens that a token row stands for

    def __len__(self) -> int:
        return len(self.table)

    @lazy
    def total_tokens(self) -> int:
        """Token rows in all."""
        return int(self.table[:, 4].sum())

    def within(self, start: int, stop: int) -> "Rows":
        """What lies in the tokens [start, stop): a token row belongs to its last token, and state to the request's."""
        first, last = start // self.unit, stop // self.unit
        if not len(self) or (self.begin[0] >= first and self._end(len(self) - 1) <= last):
            return self
        # not numpy's search: for its sake of a few microseconds it would let go of the GIL, and wait to get it back
        low = bisect_right(range(len(self)), first, key=self._end)
        high = max(low, bisect_left(self.begin, last)) if last > first else low
        table, begin = self.table[low:high], self.begin[low:high]
        if len(table) and (begin[0] < first or self._end(high - 1) > last):
            table, begin = table.copy(), begin.copy()
            cut = max(0, self._end(high - 1) - last)
            lead = max(0, first - int(begin[0]))
            table[0, [1, 3]] += lead
            table[0, 4] -= lead
            begin[0] += lead
            table[-1, 4] -= cut
        return Rows(table, begin, self.grid, self.unit)

    def counts(self, edges: I64) -> I64:
        """How many rows, whole or in part, lie in the tokens from each of these edges to the next one."""
        first, last = edges[:-1] // self.unit, edges[1:] // self.unit
        low = np.searchsorted(self.begin + self.table[:, 4], first, side="right")
        high = np.searchsorted(self.begin, last)
        return np.where(last > first, np.maximum(high - low, 0), 0)

    @lazy
    def joined(self) -> I64:
        """The table with one row for those that follow each other in one block of either side.

        Rows end where the tokens take turns, and on the grid of both block sizes, because staging and chunks need it;
        in the blocks themselves a copy may go on.
        """
        table = self.table
        source, first, target, into, count = table.T
        ends = np.ones(len(table), np.bool_)  # which rows the one after them does not continue
        ends[:-1] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
        if ends.all():  # blocks are no larger than rows
            return table
        ends[:-1] |= (np.diff(first) != count[:-1]) | (np.diff(into) != count[:-1])
        begins = np.flatnonzero(np.concatenate([[True], ends[:-1]]))
        found = table[begins]
        found[:, 4] = np.add.reduceat(count, begins)
        return found

    @lazy
    def ascending(self) -> I64:
        """The joined table in the order of its places at the destination."""
        table = self.joined
        place = table[:, 2] * (int(table[:, 3].max(initial=0)) + 1) + table[:, 3]
        return table if (place[1:] >= place[:-1]).all() else table[np.argsort(place)]

    def present(self) -> "Rows":
        """Those that can be copied: all but the ones of padding.

        Raises:
            BlocksError: If the source block of a row is not known yet.
        """
        source = self.table[:, 0]
        if not len(self) or int(source.min()) >= 0:
            return self
        unknown = source == _UNKNOWN
        if unknown.any():
            token = int(self.begin[np.argmax(unknown)]) * self.unit
            raise BlocksError(f"the source block that holds token {token} is not known yet")
        keep = source >= 0
        return Rows(self.table[keep], self.begin[keep], self.grid, self.unit)

    def _end(self, row: int) -> int:
        """One past the last token row of a row."""
        return int(self.begin[row]) + int(self.table[row, 4])


def normalise_blocks(blocks: Blocks, geometry: "CacheGeometry") -> dict[str, Span]:
    """Bring `blocks` as the caller gave it into normal form: an int64 `Span` for every group.

    Raises:
        BlocksError: If a group is missing or unknown, or ids are not whole numbers in one dimension.
    """
    groups, spans = geometry.groups, dict[str, Span]()
    if len(groups) != 1 and not isinstance(blocks, Mapping):
        raise BlocksError(f"this cache has the groups {list(groups)}: give blocks= as a mapping from group to ids")
    of_group = blocks if isinstance(blocks, Mapping) else dict.fromkeys(groups, blocks)
    if of_group.keys() != groups.keys():
        raise BlocksError(f"blocks= names the groups {sorted(of_group, key=str)}, but this cache has {sorted(groups)}")
    for group in groups:
        value = of_group[group]
        given, first = (value.ids, value.first_token) if isinstance(value, Span) else (value, 0)
        try:
            if hasattr(given, "__len__") and len(given) > _MAX_IDS:
                raise ValueError(f"{len(given)} of them are more than any pool has")
            ids = np.asarray(given)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # ragged lists, tensors of a GPU
            raise BlocksError(f"group {group!r}: block ids must be whole numbers in one dimension: {error}") from error
        if ids.ndim != 1 or ids.dtype.kind != "i":
            ids = _whole(group, given, ids)
        try:
            first = first if type(first) is int else operator.index(_NO_NUMBER if isinstance(first, bool) else first)
        except TypeError as error:
            raise BlocksError(f"group {group!r}: first_token must be a whole number, not {first!r}") from error
        if not 0 <= first <= MAX_TOKENS:
            rule = "must not be negative" if first < 0 else f"must be at most {MAX_TOKENS}"
            raise BlocksError(f"group {group!r}: first_token {rule}, not {first}")
        made = spans[group] = Span(ids.astype(np.int64), first)
        vars(made)["packed"] = ids.astype("<u4").tobytes()  # nearly every list is hashed, or sent
    return spans


def _whole(group: str, given: Ids, ids: NDArray[Any]) -> NDArray[Any]:
    """Ids that are not plainly whole numbers in one dimension, if they are that all the same; raises if not."""
    if ids.size == 0:
        return ids.astype(np.int64).reshape(-1)
    if ids.dtype.kind == "b":
        raise BlocksError(
            f"group {group!r}: block ids must be whole numbers, not bool of shape {ids.shape}; "
            "of a mask over the pool give the positions that are true"
        )
    if ids.ndim == 1 and (ids.dtype.kind in "fO" or ids.dtype == np.uint64):
        _check_fit(group, given if isinstance(given, list | tuple) else ids.tolist())
    if ids.ndim != 1 or ids.dtype.kind != "u":
        what = f"{ids.dtype} of shape {ids.shape}"
        raise BlocksError(f"group {group!r}: block ids must be whole numbers in one dimension, not {what}")
    return ids


def _check_fit(group: str, ids: Sequence[Any]) -> None:
    """Name an id that 64 bits do not hold: numpy makes floats or objects of the list, and casts wrap around."""
    for at, number in enumerate(ids):
        if isinstance(number, int) and not -_MAX_ID <= number <= _MAX_ID:
            raise BlocksError(f"group {group!r}: block id {number} at position {at} is outside of every pool")


def check_spans(spans: BlockLists, geometry: "CacheGeometry", *, receiving: bool) -> None:
    """Check ids against the pools: in range, not negative; at a receiver also distinct and never the null block.

    Raises:
        BlocksError: Naming the group, the position and the id.
    """
    sides, pools = geometry.sides, geometry.pool_ids
    for group, span in spans.items():
        side, ids, limit = sides[group], np.asarray(span.ids, np.int64), pools[group]
        count, null = len(ids), side.null_block
        if not count:  # whether a list is long enough is for those to say who know the tokens
            if receiving and side.is_state:
                raise BlocksError(f"group {group!r} is state and needs a slot: its block list is empty")
            continue
        unsigned = ids.view(np.uint64)  # then negative ones are beyond every limit
        if unsigned[unsigned.argmax()] >= limit:
            at = int(np.flatnonzero((ids < 0) | (ids >= limit))[0])
            raise BlocksError(f"group {group!r}: block id {ids[at]} at position {at} is outside 0..{limit - 1}")
        if null is not None and side.is_state and (ids == null).any():
            raise BlocksError(f"group {group!r} is state, which cannot be padding: its slot is the null block {null}")
        if not receiving:
            continue
        if limit > _SPARSE * count:
            distinct = len(set(ids.tolist()))
        else:
            seen = np.zeros(limit, np.bool_)
            seen[ids] = True
            distinct = int(np.count_nonzero(seen))
        if distinct < count:
            ordered = np.sort(ids)
            repeated = ordered[1:][ordered[1:] == ordered[:-1]]
            first, second = np.flatnonzero(ids == repeated[0])[:2]
            raise BlocksError(
                f"group {group!r}: block id {repeated[0]} is named twice, at positions {first} and {second}"
            )
        if null is not None and (ids == null).any():
            raise BlocksError(
                f"group {group!r}: the null block {null} cannot receive (position {int(np.argmax(ids == null))})"
            )


def meet(
    group: str, src: RowSide, dst: RowSide, src_span: Span, dst_span: Span, tokens: range, *, covered: int | None = None
) -> Rows:
    """Rows in which two block lists meet within a token range.

    Args:
        group: For messages.
        src: Addressing at the source.
        dst: Addressing at the destination.
        src_span: Source block list, ids in range. While the request is still computed it may end early.
        dst_span: Destination block list; where it starts later than the range, the rows do too.
        tokens: The transfer's tokens.
        covered: Up to this token the source list must reach, the end of the range if left out; the source blocks of
            later rows may be unknown.

    Raises:
        BlocksError: If a list does not cover the range, or the lists of a state group differ in length.
        TokensError: If the range is cut into too many rows.
    """
    unit, grid = src.tokens_per_row, src.common(dst)
    due = tokens.stop if covered is None else min(covered, tokens.stop)
    if src.is_state:
        s_ids, d_ids = (side.kernel_blocks(np.asarray(s.ids)) for side, s in ((src, src_span), (dst, dst_span)))
        if len(s_ids) > len(d_ids) or (len(s_ids) < len(d_ids) and due == tokens.stop):
            raise BlocksError(
                f"group {group!r} is state: {len(s_ids)} slots at the source, {len(d_ids)} at the destination"
            )
        begin = np.full(len(d_ids), tokens.stop - 1, np.int64)
        table = np.zeros((len(begin), 5), np.int64)
        table[:, 0], table[:, 2], table[:, 4] = _UNKNOWN, d_ids, 1
        table[: len(s_ids), 0] = s_ids
    else:
        first, last = max(tokens.start, dst_span.first_token) // unit, tokens.stop // unit
        if last - first > MAX_ROWS * grid:
            raise TokensError(
                f"group {group!r}: tokens {tokens.start}..{tokens.stop - 1} in rows of {grid * unit} are more than the "
                f"{MAX_ROWS} rows that a plan may have: begin fetches of parts together, or use larger blocks"
            )
        cells = range(first // grid * grid, last if last > first else 0, grid)
        # before there are rows: of so many that a peer asks for nothing may come
        _check_cover(group, "source", src, src_span, src, dst, cells, range(first, last), due)
        _check_cover(group, "destination", dst, dst_span, src, dst, cells, range(first, last), tokens.stop)
        begin = _held(src, dst, cells)
        table = np.empty((len(begin), 5), np.int64)  # filled in place: fresh memory costs more than the sums
        table[:, 4] = grid
        if len(begin):  # only the first and the last row may be cut
            cut = max(0, first - int(begin[0]))
            table[-1, 4] = min(grid, last - int(begin[-1]))
            begin[0] += cut
            table[0, 4] -= cut
            table[:, 0], table[:, 1] = _places(src, src_span, begin)
            table[:, 2], table[:, 3] = _places(dst, dst_span, begin)
    if src.null_block is not None:
        table[table[:, 0] // src.block_ratio == src.null_block, 0] = _PADDING
    return Rows(table, begin, grid, unit)


def _held(src: RowSide, dst: RowSide, cells: range) -> I64:
    """Those of these cells of the grid that both sides hold."""
    found = dst.held(cells.start, cells.stop, cells.step)
    return found[src.holds(found)] if src.of > 1 else found


def _check_cover(
    group: str, side: str, at: RowSide, span: Span, src: RowSide, dst: RowSide, cells: range, rows: range, covered: int
) -> None:
    """Check that a list holds the rows of these cells that end before `covered`, as compiled code does.

    A token row belongs to its last token, and rows ascend: if the first and the last of them are inside, all are. Both
    are looked for among a few cells at a time. The blocks of later ones may be unknown.
    """
    few = (_held(src, dst, cells[n : n + _FEW]) for n in range(0, len(cells), _FEW))
    low = next((int(found[0]) for found in few if len(found)), cells.stop)
    begin, due = max(low, rows.start), min(covered // at.tokens_per_row, rows.stop)
    if begin >= rows.stop:
        return
    last, end = begin, min(low + cells.step, rows.stop)
    if begin < due:
        owed = range(low, due, cells.step)
        few = (_held(src, dst, owed[max(0, n - _FEW) : n]) for n in range(len(owed), 0, -_FEW))
        high = next(int(found[-1]) for found in few if len(found))
        last, end = max(high, begin), min(high + cells.step, rows.stop)
    id_rows, first = at.block_ratio * at.block_tokens, at.before(span.first_token // at.tokens_per_row)
    origin = first // id_rows * id_rows
    short = begin < due and at.before(last) + end - last - origin > len(span.ids) * id_rows
    if at.before(begin) < first or short:
        raise _not_covered(group, side, at, span, range(begin, end))


def _places(at: RowSide, span: Span, begin: I64) -> tuple[I64, I64]:
    """Kernel block of each row and its first token there, for rows that ascend. The last blocks may be unknown."""
    ids, id_rows = np.asarray(span.ids), at.block_ratio * at.block_tokens
    position = at.local(begin)
    if origin := at.before(span.first_token // at.tokens_per_row) // id_rows * id_rows:
        position = position - origin
    which, inside = np.divmod(position, id_rows)
    known = int(which[-1]) < len(ids)
    block = ids[which] if known else np.append(ids, _UNKNOWN)[np.minimum(which, len(ids))]
    if at.block_ratio > 1:  # not all kernel blocks of an id: a peer says how many that are
        part, inside = np.divmod(inside, at.block_tokens)
        block = np.where(block < 0, block, block * at.block_ratio + part)
    return block, inside


def _not_covered(group: str, side: str, at: RowSide, span: Span, rows: range) -> BlocksError:
    have = f"{len(span.ids) * at.block_ratio} blocks of {at.block_tokens} from token {span.first_token}"
    need = f"tokens {rows.start * at.tokens_per_row}..{rows.stop * at.tokens_per_row - 1}"
    return BlocksError(f"group {group!r}: the block list of the {side} ({have}) does not cover {need}")


def token_count(tokens: int) -> range:
    """The range of a number of tokens.

    Raises:
        TokensError: If it is no whole number.
    """
    try:
        return range(operator.index(tokens))
    except TypeError as error:
        raise TokensError(
            f"tokens= of an offer is how many tokens the blocks hold, a whole number, not {tokens!r}"
        ) from error


def check_tokens(tokens: range, *, may_be_empty: bool = False) -> None:
    """Check a token range as a caller gave it.

    Args:
        tokens: The range.
        may_be_empty: Whether `range(n, n)` will do: the first n tokens, of which none is missing.

    Raises:
        TokensError: If it is empty, reversed, has a step, or ends beyond the last number that a token may have.
    """
    if not isinstance(tokens, range):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise TokensError(f"tokens must be a range, such as range(0, 4096), not {tokens!r}")
    least = max(tokens.start if may_be_empty else tokens.start + 1, 1)
    if tokens.step != 1 or tokens.start < 0 or tokens.stop < least:
        rule = "that ends after token 0" if may_be_empty else "with at least one token"
        raise TokensError(f"tokens must be a range of step 1 {rule}, not {tokens}")
    if tokens.stop > MAX_TOKENS:
        raise TokensError(f"tokens end at {tokens.stop}, but {MAX_TOKENS} tokens are the most that a request may have")
