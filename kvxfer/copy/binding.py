"""Requests of a known pair, bound and packed by compiled code: a call checks the block lists, a call writes the tables.

The planner (`kvxfer.geometry`) is the definition: tests make the tables of its plans, and compare every word and count.
Nothing here raises or allocates: where a list is not as it should be, or a number does not fit, a code says so, and the
planner is asked, which names what is wrong. What a pair and a request are told here as is made in
`kvxfer.copy.template`.

This code keeps the interpreter's lock: it runs for microseconds, and whoever lets go of that lock beside a busy thread
waits milliseconds to get it back.

What belongs together lies in one array of numbers, and is told as a place in it and not as a slice of it. The compiler
takes ten times as long over a slice as over a number, and a call unpacks every array that it is given, which takes as
long as to pack a small request.
"""

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy import records
from kvxfer.copy.compiler import compiled, inlined, load
from kvxfer.copy.tables import AXIS_WORDS, HEADER_WORDS, LIMIT, SPARE_WORDS, WIDTHS, Kind
from kvxfer.copy.tables import PART_WORDS as WALKED_WORDS
from kvxfer.geometry.copyplan import STAGING_ALIGNMENT
from kvxfer.names import MAX_ROWS

__all__ = ["bind", "scratch_words", "told_words", "write_records", "write_tables"]

I64: TypeAlias = NDArray[np.int64]

# --- how numbers are laid out

# a pair: how many there are of each, and where; then meetings, groups, classes, axes, and the factors of regions
HEAD = 8
MEETINGS, GROUPS, CLASSES, LAYERS, GROUPS_AT, CLASSES_AT, AXES_AT, FACTORS_AT = range(HEAD)
# a meeting: a group, and how both sides address it
MEETING_WORDS = 15
GROUP, GRID, NULL, SOURCE, TARGET = 0, 1, 2, 3, 9
BLOCK, RATIO, UNIT, RANK, OF, TURN = range(6)
# a group: what its ids may be, at the source, and then at the destination
GROUP_WORDS = 6
LIMIT_OF, NULL_OF, STATE_OF, LIMITS_TO = range(4)
# a class: what it is in copies of one kind, what it is in all of them; then for each layer, and for the end, how many
# of its layers come before
(
    SRC_ROW, SRC_BLOCK, SRC_FIRST, DST_ROW, DST_BLOCK, DST_FIRST, SRC_TOKEN, DST_TOKEN, RUN, CUT, SRC_SHIFT, DST_SHIFT,
    MOST, ELEMENTS, TILE, SRC_ITEM, DST_ITEM, BOX_BYTES, COMMON, STEADY, UNROLLED, REGIONS, AXES, AXES_STOP, ROW_PIECES,
    MEETING, TOKEN_BYTES, ROW_BYTES, EDGES,
) = range(29)  # fmt: skip
# an axis
OUTER_WORDS = 3
# a request: its tokens, up to where they are known; then what `bind` counts; then its lists; then what it meets
START, STOP, COVERED, TOTAL = range(4)
TOTALS = 4
LISTS = TOTAL + TOTALS
# the lists of a group: where the ids begin, how many there are, and their first token; at both sides
LIST_WORDS = 6
AT, COUNT, FIRST, TO = range(4)
# what meets: rows, rows if none were joined, token rows, the most in a row, and where the rows are
MET_WORDS = 5
M_ROWS, M_CELLS, M_TOKENS, M_MOST, M_AT = range(MET_WORDS)
# a row, as of `Rows`
ROW_WORDS = 5
# a part of a launch: of which class, how wide an access, and which regions and rows, if not all
PART_WORDS = 8
P_CLASS, P_WIDTH, P_REGIONS, P_ROWS, P_LAUNCH, P_STAGING, P_LOW, P_HIGH = range(PART_WORDS)
# what is said of a chunk, before its launches and its blanks; at first its place in staging
TOLD = 7
T_BYTES, T_STAGED, T_WRITTEN, T_BEGIN, T_STOP, T_LAUNCHES, T_BLANKS = range(TOLD)
SIZES = 2
# a launch as the machine reads it, once `write_records` has put a function of the kernel in place of its variant
LAUNCH_WORDS = records.LAUNCH_WORDS
L_ELEMENTS, L_WIDTH, L_SHARED, L_FIRST, L_HEADERS, L_TILES = range(LAUNCH_WORDS)
BLANK_WORDS = 4
SPLITS: Final = len(WIDTHS) ** 2
"""Parts of a class at most, if it is split by every width of its regions and of its rows."""

# what `write_tables` does: a `Kind`, or it only looks how large chunks are; of an outline with padding and unknown
# blocks
COPY, GATHER, SCATTER = (kind.value for kind in Kind)
SIZE, OUTLINE = 3, 4

# codes
FITS, ODD, UNKNOWN, FULL = 0, -1, -2, -3
# what `write_records` is told: the record that all have in common, and behind it where the tables are; whether a GPU
# copies; where the list of parts is, and how large a part may be; how many words a ring holds, and tables that are read
# where they are, for how many tiles; where there is room for those that are larger than a ring
LAY_WORDS = records.RECORD_WORDS + 9
TABLES, BY_GPU, LIST, PART, RING, NEAR, NEAR_TILES, ROOM, ROOM_THERE = range(records.RECORD_WORDS, LAY_WORDS)
# of elements: what they are at the source and at the destination, and bytes of one there; or of a variant: a function
VARIANT_WORDS = 3
WIDTHS_OF_ONE: Final = len(WIDTHS)

PADDING, NOT_KNOWN = -1, -2
MOST_ROWS, ALIGNMENT = MAX_ROWS, STAGING_ALIGNMENT
BLANKS: Final = 8
"""Where more places would have to be zeroed, all of a chunk is: each costs a call."""
GOLDEN = -7046029254386353131
"""2^64 over the golden ratio, by which ids are spread over a table."""
PROBES = 16


# --- rows


@inlined
def _local(pair: Any, side: Any, token: Any) -> Any:
    """How many tokens before this one a side holds."""
    own = pair[side + TURN]
    turn = own * pair[side + OF]
    return token // turn * own + min(max(token % turn - pair[side + RANK] * own, 0), own)


@inlined
def _holds(pair: Any, side: Any, token: Any) -> Any:
    return token // pair[side + TURN] % pair[side + OF] == pair[side + RANK]


@inlined
def _origin(pair: Any, side: Any, first_token: Any) -> Any:
    """The position of a list's first block among the tokens that its side holds."""
    rows = pair[side + RATIO] * pair[side + BLOCK]
    return _local(pair, side, first_token // pair[side + UNIT]) // rows * rows


@inlined
def _meet(
    pair: Any, m: Any, request: Any, src_ids: Any, dst_ids: Any, low: Any, high: Any, join: Any, outline: Any, out: Any,
    met: Any, at: Any,
) -> Any:  # fmt: skip
    """The rows of a meeting in the tokens [low, high), as `kvxfer.geometry.rows.meet` cuts them.

    How many there are goes to `met`, and they themselves to `at` if that is not negative. Where they are only counted,
    and one need not look at each, the most in a row is not said.

    Returns:
        A code.
    """
    of, to, lists = m + SOURCE, m + TARGET, LISTS + LIST_WORDS * pair[m + GROUP]
    grid, null, unit = pair[m + GRID], pair[m + NULL], pair[of + UNIT]
    of_block, to_block = pair[of + BLOCK], pair[to + BLOCK]
    of_ratio, to_ratio = pair[of + RATIO], pair[to + RATIO]
    of_at, of_count = request[lists + AT], request[lists + COUNT]
    to_at, to_count = request[lists + TO + AT], request[lists + TO + COUNT]
    shared = (pair[of + OF] > 1) | (pair[to + OF] > 1)
    out[met + M_ROWS], out[met + M_CELLS] = 0, 0
    out[met + M_TOKENS], out[met + M_MOST], out[met + M_AT] = 0, 0, at
    if of_block == 0:  # state: slots are blocks of one token, and belong to the last one of the request
        of_block, to_block = 1, 1
        first, s_at, d_at = 0, 0, 0
        last = to_count * to_ratio if (low < request[STOP]) & (request[STOP] - 1 < high) else 0
    else:
        first = max(request[START], request[lists + TO + FIRST], low) // unit
        last = min(request[STOP], high) // unit
        s_at = _local(pair, of, first) - _origin(pair, of, request[lists + FIRST])
        d_at = _local(pair, to, first) - _origin(pair, to, request[lists + TO + FIRST])
        joins = (join != 0) & (grid != of_block) & (grid != to_block)
        if (last > first) & (at < 0) & ((outline != 0) | (null < 0)) & (not (shared | joins)):
            if (outline == 0) & (s_at + last - 1 - first >= of_count * of_block * of_ratio):
                return UNKNOWN
            found = (last - 1) // grid - first // grid + 1
            out[met + M_ROWS], out[met + M_CELLS], out[met + M_TOKENS] = found, found, last - first
            return FITS
    if last <= first:
        return FITS
    s_in, s_sub, s_id = s_at % of_block, s_at // of_block % of_ratio, s_at // (of_block * of_ratio)
    d_in, d_sub, d_id = d_at % to_block, d_at // to_block % to_ratio, d_at // (to_block * to_ratio)
    found, cells, tokens = 0, 0, 0
    most, length = 0, 0
    was_src, was_in, was_dst, was_into = 0, 0, 0, 0  # where the last cell ended
    token, edge = first, first // grid * grid + grid
    # nobody looks at each cell: all that are in the same blocks are one step, however small the grid of both sizes is
    strides = (not shared) & ((join != 0) | (at < 0))
    while token < last:
        ours, theirs = True, True
        count, within = min(edge, last) - token, 1
        if shared:
            theirs, ours = _holds(pair, of, edge - grid), _holds(pair, to, edge - grid)
        elif strides:
            count = min(of_block - s_in, to_block - d_in, last - token)
            within = (token + count - 1) // grid - token // grid + 1
        if ours & theirs:
            if (s_id < 0) | (d_id < 0) | (d_id >= to_count):
                return ODD
            src = NOT_KNOWN
            if s_id < of_count:
                src = src_ids[of_at + s_id]
                src = PADDING if src == null else src * of_ratio + s_sub
            elif outline == 0:
                return UNKNOWN
            if (outline != 0) | (src != PADDING):
                dst = dst_ids[to_at + d_id] * to_ratio + d_sub
                goes_on = (src == was_src) & (s_in == was_in) & (dst == was_dst) & (d_in == was_into)
                if (join == 0) | (found == 0) | (not goes_on):
                    length = 0
                    found += 1 if join != 0 else within
                    if at >= 0:
                        if at + ROW_WORDS > len(out):
                            return ODD
                        out[at], out[at + 1] = src, s_in
                        out[at + 2], out[at + 3] = dst, d_in
                        at += ROW_WORDS
                length += count
                if at >= 0:
                    out[at - 1] = length
                cells += within
                tokens += count
                most = max(most, length)
                was_src, was_in, was_dst, was_into = src, s_in + count, dst, d_in + count
        if theirs:
            s_in += count
            if s_in == of_block:
                s_in, s_sub = 0, s_sub + 1
                if s_sub == of_ratio:
                    s_sub, s_id = 0, s_id + 1
        if ours:
            d_in += count
            if d_in == to_block:
                d_in, d_sub = 0, d_sub + 1
                if d_sub == to_ratio:
                    d_sub, d_id = 0, d_id + 1
        token, edge = token + count, edge + grid
    out[met + M_ROWS], out[met + M_CELLS] = found, cells
    out[met + M_TOKENS], out[met + M_MOST] = tokens, most
    return FITS


# --- binding


@inlined
def _aligned(nbytes: Any) -> Any:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@inlined
def _within(ids: Any, limit: Any, null: Any) -> Any:
    """Whether all ids are of the pool, and none is the null block."""
    wrong = False
    for number in ids:
        wrong |= (number < 0) | (number >= limit) | (number == null)
    return not wrong


@inlined
def _distinct(ids: Any, limit: Any, marks: Any, first: Any) -> Any:
    """Where the marks of a list end, which begin at `first` and are all 0; -1 if an id is there twice."""
    size, shift, left = 1, 63, PROBES * (len(ids) + 4)
    while size < 2 * len(ids):
        size *= 2
        shift -= 1
    if limit <= 64 * size:  # a bit for each id that there is
        for number in ids:
            place, bit = first + (number >> 6), 1 << (number & 63)
            if marks[place] & bit:
                return -1
            marks[place] |= bit
        return first + (limit + 63) // 64
    for number in ids:
        place = (number * GOLDEN >> shift) & (size - 1)
        while marks[first + place] != 0:
            left -= 1
            if (marks[first + place] == number + 1) | (left < 0):
                return -1
            place = (place + 1) & (size - 1)
        marks[first + place] = number + 1
    return first + size


@inlined
def _reaches(pair: Any, m: Any, side: Any, request: Any, own: Any, first: Any, last: Any, covered: Any) -> Any:
    """Whether a list holds its tokens up to `covered` of those from the token row `first` to before `last`.

    As `kvxfer.geometry.rows` puts it: what the first row, and the last one that is due, ask for.
    """
    of, to, grid = m + SOURCE, m + TARGET, pair[m + GRID]
    id_rows = pair[side + RATIO] * pair[side + BLOCK]
    begins = _local(pair, side, request[own + FIRST] // pair[side + UNIT])
    origin = begins // id_rows * id_rows
    low = first // grid * grid
    while (low < last) & (not (_holds(pair, of, low) & _holds(pair, to, low))):
        low += grid
    if (max(low, first) < last) & (_local(pair, side, max(low, first)) - origin < begins % id_rows):
        return False
    due = min(covered // pair[side + UNIT], last)
    cell = (due - 1) // grid * grid
    while (low <= cell) & (not (_holds(pair, of, cell) & _holds(pair, to, cell))):
        cell -= grid
    begin = max(cell, first)
    if (cell < low) | (begin >= due):
        return True
    end = _local(pair, side, begin) + min(cell + grid, last) - begin
    return end - origin <= request[own + COUNT] * id_rows


@compiled("int64(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])", nogil=False)
def bind(pair: I64, request: I64, src_ids: I64, dst_ids: I64, marks: I64) -> int:
    """Check the lists of a request, and count its rows.

    Args:
        pair: Of copies in place.
        request: Its tokens and where its lists are; how many rows it has, and totals of an outline, are filled in.
        src_ids: Of all lists, those of one group behind those of another.
        dst_ids: Likewise.
        marks: Zeros; for each group in turn as many as `marks` says. None if ids are known to be distinct.

    Returns:
        `FITS`, or anything else where something is not as it should be.
    """
    start, stop, due = request[START], request[STOP], min(request[COVERED], request[STOP])
    marked, own, limits = 0, LISTS, pair[GROUPS_AT]
    for _ in range(pair[GROUPS]):
        state, to = pair[limits + STATE_OF], limits + LIMITS_TO
        theirs = src_ids[request[own + AT] : request[own + AT] + request[own + COUNT]]
        ours = dst_ids[request[own + TO + AT] : request[own + TO + AT] + request[own + TO + COUNT]]
        if not _within(theirs, pair[limits + LIMIT_OF], pair[limits + NULL_OF] if state else PADDING):
            return ODD
        if not _within(ours, pair[to + LIMIT_OF], pair[to + NULL_OF]):
            return ODD
        if len(marks):
            marked = _distinct(ours, pair[to + LIMIT_OF], marks, marked)
        if (marked < 0) | ((len(ours) == 0) & (state != 0)):
            return ODD
        limits += GROUP_WORDS
        own += LIST_WORDS
    met = own
    for number in range(pair[MEETINGS]):
        m = HEAD + MEETING_WORDS * number
        own = LISTS + LIST_WORDS * pair[m + GROUP]
        of, to, unit = m + SOURCE, m + TARGET, pair[m + SOURCE + UNIT]
        if pair[of + BLOCK] == 0:
            theirs, ours = request[own + COUNT] * pair[of + RATIO], request[own + TO + COUNT] * pair[to + RATIO]
            if (theirs > ours) | ((theirs < ours) & (due == stop)):
                return ODD
        else:
            first, last = max(start, request[own + TO + FIRST]) // unit, stop // unit
            if last - first > MOST_ROWS * pair[m + GRID]:
                return ODD
            if not _reaches(pair, m, of, request, own, first, last, due):
                return ODD
            if not _reaches(pair, m, to, request, own + TO, first, last, stop):
                return ODD
        low = min(start, stop - 1)
        if _meet(pair, m, request, src_ids, dst_ids, low, stop, 1, 1, request, met, -1) != FITS:
            return ODD
        met += MET_WORDS
    met -= MET_WORDS * pair[MEETINGS]
    carried, staged, pieces = 0, 0, 0
    most, layers, c = 0, pair[LAYERS], pair[CLASSES_AT]
    for _ in range(pair[CLASSES]):
        regions, own = pair[c + EDGES + layers], met + MET_WORDS * pair[c + MEETING]
        rows, tokens = request[own + M_CELLS], request[own + M_TOKENS]
        carried += regions * tokens * pair[c + TOKEN_BYTES]
        staged += _aligned(regions * rows * pair[c + ROW_BYTES])
        runs = request[own + M_ROWS] if pair[c + CUT] else tokens
        pieces += regions * pair[c + UNROLLED] * runs * pair[c + ROW_PIECES]
        most = max(most, rows)
        c += EDGES + layers + 1
    request[TOTAL], request[TOTAL + 1] = carried, staged
    request[TOTAL + 2], request[TOTAL + 3] = pieces, most
    return FITS


# --- tables


@inlined
def _lowest(bits: Any) -> Any:
    return bits & -bits


@inlined
def _width(src: Any, dst: Any, src_shift: Any, dst_shift: Any, bits: Any) -> Any:
    """The widest access that two places allow, counted in elements, and whatever else decides."""
    return _lowest(src >> src_shift | dst >> dst_shift | bits)


@inlined
def _divide(out: Any, at: Any, number: Any) -> None:
    """How to divide by a number, as `kvxfer.copy.tables.divisor` has it."""
    shift = 0
    while 1 << shift < number:
        shift += 1
    out[at] = ((1 << 32) * ((1 << shift) - number)) // number + 1
    out[at + 1] = shift


@inlined
def _axis(out: Any, at: Any, count: Any, src: Any, dst: Any, cut: Any) -> Any:
    """Write an axis; returns where it ends."""
    out[at] = count
    _divide(out, at + 1, count)
    out[at + 3], out[at + 4], out[at + 5] = src, dst, cut
    return at + AXIS_WORDS


@inlined
def _after(pair: Any, axis: Any, src_token: Any, dst_token: Any, tokens: Any) -> Any:
    """Whether an axis comes after the one of tokens: by destination, then source, then count."""
    if pair[axis + 2] != dst_token:
        return pair[axis + 2] > dst_token
    if pair[axis + 1] != src_token:
        return pair[axis + 1] > src_token
    return pair[axis] > tokens


@inlined
def _shape(pair: Any, c: Any, width: Any, tokens: Any, out: Any, head: Any, at: Any) -> Any:
    """Write the axes of a part, and into its header how many they are; returns where they end.

    And into the header goes how many words of the copy are in an item, or 0 if those are too many.
    """
    cut, stop, first = pair[c + CUT], pair[c + AXES_STOP], at
    src_token, dst_token = pair[c + SRC_TOKEN], pair[c + DST_TOKEN]
    size = (tokens if cut else 1) * pair[c + RUN] // width
    by_token = (tokens > 1) & (cut == 0)
    axis = pair[c + AXES]
    out[head + 2] = 0
    if size >= LIMIT:
        return at
    if (size != 1) | ((axis == stop) & (not by_token)):
        at = _axis(out, at, size, width * pair[c + SRC_ITEM], width * pair[c + DST_ITEM], cut)
    while (axis < stop) | by_token:
        if by_token & ((axis == stop) or _after(pair, axis, src_token, dst_token, tokens)):
            count, by_token = tokens, False
            at = _axis(out, at, count, src_token, dst_token, 1)
        else:
            count = pair[axis]
            at = _axis(out, at, count, pair[axis + 1], pair[axis + 2], 0)
            axis += OUTER_WORDS
        size *= count
        if (count >= LIMIT) | (size >= LIMIT):
            return at
    out[head + 2], out[head + 12] = size, (at - first) // AXIS_WORDS
    return at


@inlined
def _lay_out(
    kind: Any, pair: Any, regions: Any, c: Any, low: Any, high: Any, staging: Any, scratch: Any, met: Any, parts: Any,
    many: Any,
) -> Any:  # fmt: skip
    """Split a class by the access widths that its regions and rows allow; nearly always there is one part."""
    most, src_shift, dst_shift = pair[c + MOST], pair[c + SRC_SHIFT], pair[c + DST_SHIFT]
    unrolled, base = pair[c + UNROLLED], pair[c + REGIONS]
    cut, run = pair[c + CUT], pair[c + RUN]
    step = scratch[met + M_ROWS] * pair[c + ROW_BYTES]
    from_staging, to_staging = kind == SCATTER, kind == GATHER
    of_regions, of_rows, place = 0, most, staging
    for layer in range(low, high):
        for n in range(base + layer * unrolled, base + (layer + 1) * unrolled):
            src, dst = regions[n, 0] + from_staging * place, regions[n, 1] + to_staging * place
            of_regions |= _width(src, dst, src_shift, dst_shift, most)
        place += step
    if not pair[c + STEADY]:
        of_rows, row = 0, scratch[met + M_AT]
        src_row, src_block, src_first = pair[c + SRC_ROW], pair[c + SRC_BLOCK], pair[c + SRC_FIRST]
        dst_row, dst_block, dst_first = pair[c + DST_ROW], pair[c + DST_BLOCK], pair[c + DST_FIRST]
        for n in range(scratch[met + M_ROWS]):
            src = n * src_row + scratch[row] * src_block + scratch[row + 1] * src_first
            dst = n * dst_row + scratch[row + 2] * dst_block + scratch[row + 3] * dst_first
            of_rows |= _width(src, dst, src_shift, dst_shift, most | cut * run * scratch[row + 4])
            row += ROW_WORDS
    common = pair[c + COMMON] | most
    if (scratch[met + M_MOST] > 1) & (cut == 0):
        common |= pair[c + SRC_TOKEN] >> src_shift | pair[c + DST_TOKEN] >> dst_shift
    whole = ((of_regions | of_rows) == most) & (_lowest(common) == most)
    one = 1
    while one <= most:
        other = 1
        while other <= most:
            if (of_regions & one != 0) & (of_rows & other != 0):
                part = parts + PART_WORDS * many
                scratch[part + P_CLASS], scratch[part + P_WIDTH] = c, _lowest(common | one | other)
                scratch[part + P_REGIONS], scratch[part + P_ROWS] = one * (not whole), other * (not whole)
                scratch[part + P_STAGING], scratch[part + P_LOW], scratch[part + P_HIGH] = staging, low, high
                many += 1
            other *= 2
        one *= 2
    return many


@inlined
def _write(
    kind: Any, pair: Any, regions: Any, scratch: Any, parts: Any, many: Any, launch: Any, out: Any, say: Any,
    start: Any,
) -> Any:  # fmt: skip
    """Write one launch from a place on, and say how many tiles it has; returns where it ends, or a code."""
    at, head, before = start + out[say + L_HEADERS] * HEADER_WORDS, start, 0
    from_staging, to_staging = kind == SCATTER, kind == GATHER
    for part in range(parts, parts + PART_WORDS * many, PART_WORDS):
        if scratch[part + P_LAUNCH] != launch:
            continue
        c, width, place = scratch[part + P_CLASS], scratch[part + P_WIDTH], scratch[part + P_STAGING]
        only, only_rows = scratch[part + P_REGIONS], scratch[part + P_ROWS]
        met = 1 + MET_WORDS * pair[c + MEETING]
        found, row = scratch[met + M_ROWS], scratch[met + M_AT]
        most, src_shift, dst_shift = pair[c + MOST], pair[c + SRC_SHIFT], pair[c + DST_SHIFT]
        unrolled, base = pair[c + UNROLLED], pair[c + REGIONS]
        cut, run = pair[c + CUT], pair[c + RUN]
        low, high, step = scratch[part + P_LOW], scratch[part + P_HIGH], found * pair[c + ROW_BYTES]
        converts = 1 if pair[c + ELEMENTS] > 0 else 0
        axes = (pair[c + AXES_STOP] - pair[c + AXES]) // OUTER_WORDS + 2
        if at + (high - low) * unrolled * (2 + converts) + 3 * found + AXIS_WORDS * axes > len(out):
            return FULL
        to_regions, factors = at, pair[FACTORS_AT]
        for layer in range(low, high):
            for n in range(base + layer * unrolled, base + (layer + 1) * unrolled):
                src, dst = regions[n, 0] + from_staging * place, regions[n, 1] + to_staging * place
                if (only == 0) or _width(src, dst, src_shift, dst_shift, most) == only:
                    out[at], out[at + 1] = src, dst
                    if converts:
                        out[at + 2] = pair[factors + n]
                    at += 2 + converts
            place += step
        to_rows, tokens, shift = at, 0, 0
        per_token = run if cut else 1
        while cut & (1 << shift < width):
            shift += 1
        src_row, src_block, src_first = pair[c + SRC_ROW], pair[c + SRC_BLOCK], pair[c + SRC_FIRST]
        dst_row, dst_block, dst_first = pair[c + DST_ROW], pair[c + DST_BLOCK], pair[c + DST_FIRST]
        for n in range(found):
            count = scratch[row + 4]
            src = n * src_row + scratch[row] * src_block + scratch[row + 1] * src_first
            dst = n * dst_row + scratch[row + 2] * dst_block + scratch[row + 3] * dst_first
            if (only == 0) or _width(src, dst, src_shift, dst_shift, most | cut * run * count) == only_rows:
                out[at], out[at + 1], out[at + 2] = src, dst, count * per_token >> shift
                tokens = max(tokens, count)
                at += 3
            row += ROW_WORDS
        of_regions, of_rows, to_axes = (to_rows - to_regions) // (2 + converts), (at - to_rows) // 3, at
        at = _shape(pair, c, width, tokens, out, head, at)
        size, items = out[head + 2], of_regions * of_rows
        if (size == 0) | (items >= LIMIT):
            return ODD
        tiles = -(-items * size // pair[c + TILE])
        if before + tiles >= LIMIT:
            return ODD
        out[head], out[head + 1] = tiles, before
        _divide(out, head + 3, size)
        out[head + 5], out[head + 6] = items, of_rows
        _divide(out, head + 7, of_rows)
        out[head + 9], out[head + 10], out[head + 11] = to_regions - head, to_rows - head, to_axes - head
        head += HEADER_WORDS
        before += tiles
    out[say + L_TILES] = before
    return at


@inlined
def _blank(out: Any, blanks: Any, number: Any, address: Any, width: Any, lines: Any, pitch: Any) -> Any:
    """Write one of the blanks, if it is one of those that are named; returns how many there are."""
    if number < BLANKS:
        at = blanks + BLANK_WORDS * number
        out[at], out[at + 1] = address, width
        out[at + 2], out[at + 3] = lines, pitch
    return number + 1


@inlined
def _blanks(pair: Any, begin: Any, stop: Any, scratch: Any, staging: Any, staged: Any, out: Any, blanks: Any) -> Any:
    """What of a chunk's staging no row fills, to be zeroed: what was there before is another request's.

    Whole rows of which a part is. Returns how many places there are.
    """
    many, place, c = 0, staging, pair[CLASSES_AT]
    for _ in range(pair[CLASSES]):
        regions, nbytes, met = pair[c + EDGES + stop] - pair[c + EDGES + begin], pair[c + ROW_BYTES], pair[c + MEETING]
        found, row = scratch[1 + MET_WORDS * met + M_ROWS], scratch[1 + MET_WORDS * met + M_AT]
        used = regions * found * nbytes
        for n in range(found if regions else 0):
            if ((n == 0) | (n == found - 1)) & (scratch[row + 4] * pair[c + TOKEN_BYTES] != nbytes):
                many = _blank(out, blanks, many, place + n * nbytes, nbytes, regions, found * nbytes)
            row += ROW_WORDS
        if _aligned(used) != used:
            many = _blank(out, blanks, many, place + used, _aligned(used) - used, 1, 0)
        place += _aligned(used)
        c += EDGES + pair[LAYERS] + 1
    return many if many <= BLANKS else _blank(out, blanks, 0, staging, staged, 1, 0)


@compiled(
    "int64(int64, int64[::1], int64[:, ::1], int64[::1], int64[::1], int64[::1], int64, int64, int64[::1], "
    "int64[::1], int64, int64[::1])",
    nogil=False,
)
def write_tables(
    kind: int,
    pair: I64,
    regions: I64,
    request: I64,
    src_ids: I64,
    dst_ids: I64,
    each: int,
    step: int,
    cells: I64,
    scratch: I64,
    each_told: int,
    out: I64,
) -> int:
    """Write the tables of chunks, or only how large they are.

    Args:
        kind: What they do: a `Kind`, `SIZE` or `OUTLINE`.
        pair: Of this kind, or any.
        regions: Likewise; destinations as this process addresses them.
        request: What was bound.
        src_ids: Its ids.
        dst_ids: Likewise.
        each: Layers of a chunk.
        step: Tokens of a chunk.
        cells: Which, as of `ChunkGrid.cell`.
        scratch: With room for the rows of all meetings in a window, among others, which are found there again; at first
            its first number is 0.
        each_told: Numbers that are said of a chunk; of sizes `SIZES`, which are -1 where a block is not known yet.
        out: To be filled with what is said of each chunk, then with the tables of one behind those of another.

    Returns:
        `FITS`; `FULL` if `out` is too short, `UNKNOWN` if a source block is not known yet, `ODD` if a number is too
        large.
    """
    layers, meetings, sizes = pair[LAYERS], pair[MEETINGS], (kind == SIZE) | (kind == OUTLINE)
    runs, before = (layers + each - 1) // each, min(request[START], request[STOP] - 1)
    parts = 1 + MET_WORDS * meetings
    rows = parts + PART_WORDS * SPLITS * pair[CLASSES]
    end, code, say = len(cells) * each_told, FITS, 0
    for number in cells:
        window, begin = number // runs, number % runs * each
        stop = min(begin + each, layers)
        kept = 1 + 5 * window + kind
        if scratch[0] != kept:  # chunks of other layers have the same rows
            scratch[0], at, code = kept, -1 if sizes else rows, FITS
            low = (before // step + window) * step
            for n in range(meetings):
                met = 1 + MET_WORDS * n
                found = _meet(
                    pair, HEAD + MEETING_WORDS * n, request, src_ids, dst_ids, max(low, before),
                    min(low + step, request[STOP]), int(kind == COPY), int(kind == OUTLINE), scratch, met, at,
                )  # fmt: skip
                if found != FITS:
                    scratch[0], code = 0, found
                at += 0 if sizes else ROW_WORDS * scratch[met + M_ROWS]
        if code != FITS:
            if not sizes:
                return int(code)
            out[say + T_BYTES], out[say + T_STAGED] = -1, -1
            say += each_told
            continue
        staging, many, c = out[say + T_BYTES], 0, pair[CLASSES_AT]
        carried, staged, written = 0, 0, 0
        for _ in range(pair[CLASSES]):
            low, high, met = pair[c + EDGES + begin], pair[c + EDGES + stop], 1 + MET_WORDS * pair[c + MEETING]
            found, tokens = (high - low) * scratch[met + M_ROWS], (high - low) * scratch[met + M_TOKENS]
            if (found > 0) & (not sizes):
                many = _lay_out(kind, pair, regions, c, low, high, staging + staged, scratch, met, parts, many)
            carried += tokens * pair[c + TOKEN_BYTES]
            staged += _aligned(found * pair[c + ROW_BYTES])
            written += tokens * pair[c + UNROLLED] * pair[c + BOX_BYTES]
            c += EDGES + layers + 1
        out[say + T_BYTES], out[say + T_STAGED] = carried, staged
        if sizes:
            say += each_told
            continue
        # launches, in the order in which their variants come up
        launches, first = 0, say + TOLD
        for part in range(parts, parts + PART_WORDS * many, PART_WORDS):
            elements, width = pair[scratch[part + P_CLASS] + ELEMENTS], scratch[part + P_WIDTH]
            launch, at = 0, first
            while (launch < launches) & ((out[at + L_ELEMENTS] != elements) | (out[at + L_WIDTH] != width)):
                launch += 1
                at += LAUNCH_WORDS
            if launch == launches:
                out[at + L_ELEMENTS], out[at + L_WIDTH], out[at + L_HEADERS] = elements, width, 0
                launches += 1
            out[at + L_HEADERS] += 1
            scratch[part + P_LAUNCH] = launch
        out[say + T_WRITTEN], out[say + T_BEGIN], out[say + T_LAUNCHES] = written, end, launches
        for launch in range(launches):
            at = first + LAUNCH_WORDS * launch
            out[at + L_FIRST] = end - out[say + T_BEGIN]
            end = _write(kind, pair, regions, scratch, parts, many, launch, out, at, end)
            if end < 0:
                return int(end)
        out[say + T_STOP], out[say + T_BLANKS] = end, 0
        say += each_told
        if (kind == GATHER) & (staged > carried):
            blanks = say - BLANK_WORDS * BLANKS
            out[say - each_told + T_BLANKS] = _blanks(pair, begin, stop, scratch, staging, staged, out, blanks)
    return FITS


# --- records


@inlined
def _function(out: Any, launch: Any) -> Any:
    """Where the function for a launch is among those of all variants."""
    number = 0
    while 1 << number < out[launch + L_WIDTH]:
        number += 1
    return VARIANT_WORDS * (WIDTHS_OF_ONE * out[launch + L_ELEMENTS] + number)


@compiled("int64(int64[::1], int64, int64[::1], int64[::1], int64[::1], int64[::1])", nogil=False)
def write_records(out: I64, each: int, how: I64, variants: I64, parts: I64, made: I64) -> int:
    """Write the records of copies whose tables `write_tables` has written.

    Where a GPU copies, functions are put in place of variants, so that the machine launches what is said of a copy.

    Args:
        out: As `write_tables` has left it.
        each: Numbers that are said of a copy.
        how: What the records have in common, and the rest of what is as at `LAY_WORDS`.
        variants: On a GPU the function, threads and shared memory of each, zeros of what is not compiled; on a CPU of
            each kind of elements what they are, and bytes of one at the destination.
        parts: On a CPU room for the list of headers that is walked.
        made: To be filled.

    Returns:
        On a CPU how many helpers any of them wants. On a GPU 0; 1 if a function has to be compiled before, or room be
        made, and nothing was written.
    """
    copies, size = len(made) // records.RECORD_WORDS, records.RECORD_WORDS
    if how[BY_GPU]:
        for say in range(0, copies * each, each):
            for launch in range(say + TOLD, say + TOLD + LAUNCH_WORDS * out[say + T_LAUNCHES], LAUNCH_WORDS):
                if variants[_function(out, launch)] == 0:
                    return 1
            if (out[say + T_STOP] - out[say + T_BEGIN] > how[RING]) & (how[ROOM] == 0):
                return 1
    listed, room, say, helpers = 0, 0, 0, 0
    for record in range(0, copies * size, size):
        for word in range(size):
            made[record + word] = how[word]
        words, tiles, at = out[say + T_STOP] - out[say + T_BEGIN], 0, how[TABLES] + 8 * out[say + T_BEGIN]
        first, launches = say + TOLD, out[say + T_LAUNCHES]
        made[record + records.BYTES] = out[say + T_BYTES]
        made[record + records.TABLES], made[record + records.TABLE_WORDS] = at, words
        if out[say + T_BLANKS]:
            made[record + records.BLANKS] = how[TABLES] + 8 * (say + each - BLANK_WORDS * BLANKS)
            made[record + records.BLANK_COUNT] = out[say + T_BLANKS]
        if made[record + records.POST]:
            made[record + records.NEAR_PIECES] += record // size * 16 * made[record + records.PIECES]
            made[record + records.FAR_PIECES] += record // size * 16 * made[record + records.PIECES]
            if (made[record + records.PIECES] == 1) and load(made[record + records.NEAR_PIECES] + 8) == 0:
                made[record + records.POST] = 0
        if how[BY_GPU]:
            for launch in range(first, first + LAUNCH_WORDS * launches, LAUNCH_WORDS):
                found = _function(out, launch)
                for word in range(VARIANT_WORDS):
                    out[launch + word] = variants[found + word]
                tiles += out[launch + L_TILES]
            made[record + records.PARTS], made[record + records.PART_COUNT] = how[TABLES] + 8 * first, launches
            made[record + records.NEAR] = int((words <= how[NEAR]) & (tiles <= how[NEAR_TILES]))
            if words > how[RING]:
                made[record + records.OWN_HOST] = how[ROOM] + 8 * room
                made[record + records.OWN_DEVICE] = how[ROOM_THERE] + 8 * room
                room += (words + SPARE_WORDS + 1) // 2 * 2  # each begins at a multiple of 16 bytes
        else:
            made[record + records.PARTS], count = how[LIST] + 8 * listed, 0
            for launch in range(first, first + LAUNCH_WORDS * launches, LAUNCH_WORDS):
                width, kind = out[launch + L_WIDTH], VARIANT_WORDS * out[launch + L_ELEMENTS]
                for number in range(out[launch + L_HEADERS]):
                    head = out[say + T_BEGIN] + out[launch + L_FIRST] + HEADER_WORDS * number
                    most = max(1, how[PART] // (out[head + 2] * width * variants[kind + 2]))
                    count += (out[head + 5] + most - 1) // most
                    parts[listed], parts[listed + 1] = how[TABLES] + 8 * head, width
                    parts[listed + 2], parts[listed + 3] = variants[kind], variants[kind + 1]
                    parts[listed + 4], parts[listed + 5] = most, count
                    listed += WALKED_WORDS
            made[record + records.PART_COUNT] = count
            made[record + records.HELPERS] = max(0, min(count, out[say + T_WRITTEN] // how[PART]) - 1)
            helpers = max(helpers, made[record + records.HELPERS])
        say += each
    return int(helpers)


# --- how large the arrays are that are given to them


def told_words(variants: int) -> int:
    """Numbers that `write_tables` says of a chunk, if there are so many variants of the kernel."""
    return TOLD + LAUNCH_WORDS * variants + BLANK_WORDS * BLANKS


def scratch_words(meetings: int, classes: int) -> int:
    """Numbers that `write_tables` needs for itself but for those of rows, which are `ROW_WORDS` each."""
    return 1 + MET_WORDS * meetings + PART_WORDS * SPLITS * classes
