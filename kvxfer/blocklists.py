"""Block lists of offers and fetches, as callers give them: brought into normal form, and checked without a peer."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import BlocksError
from kvxfer.geometry import BlockLists, Blocks, CacheGeometry, check_spans, check_tokens, normalise_blocks

__all__ = ["check_cover", "offered_blocks", "wanted_blocks", "written_blocks"]

I64: TypeAlias = NDArray[np.int64]


def offered_blocks(blocks: Blocks, geometry: CacheGeometry) -> BlockLists:
    """Block lists of an offer in normal form, copied and checked.

    Raises:
        BlocksError: If ids are malformed or out of range.
    """
    spans = normalise_blocks(blocks, geometry)
    check_spans(spans, geometry, receiving=False)
    return spans


def wanted_blocks(blocks: Blocks, geometry: CacheGeometry, tokens: range) -> BlockLists:
    """Destination blocks of a fetch in normal form, checked as far as that needs no peer.

    Raises:
        BlocksError: If ids are malformed, out of range or repeated, or do not cover the tokens.
        TokensError: If the tokens are no range that a fetch can have.
    """
    check_tokens(tokens, may_be_empty=True)
    spans = normalise_blocks(blocks, geometry)
    check_spans(spans, geometry, receiving=True)
    check_cover(spans, geometry, tokens)
    return spans


def written_blocks(spans: BlockLists, geometry: CacheGeometry, tokens: range) -> dict[str, I64]:
    """Destination blocks that a fetch of these tokens writes, by group."""
    written: dict[str, I64] = {}
    for group, span in spans.items():
        ids, side = np.asarray(span.ids, np.int64), geometry.sides[group]
        if not side.is_state:
            edges = np.asarray([span.first_token, tokens.start, tokens.stop], np.int64)
            listed, start, stop = side.local(edges).tolist()
            size = side.id_tokens
            origin = listed // size
            first, last = max(0, start // size - origin), max(0, -(-stop // size) - origin)
            ids = ids[first : last if len(tokens) else first]
        written[group] = ids
    return written


def check_cover(spans: BlockLists, geometry: CacheGeometry, tokens: range, *, complete: bool = True) -> None:
    """Check that block lists reach up to a range's end, as the planner will, with one slot for state.

    Args:
        spans: In normal form.
        geometry: What this rank holds.
        tokens: The range.
        complete: Whether nothing will be added. A slot of state may come last.

    Raises:
        BlocksError: Naming the group and both numbers.
    """
    for group, span in spans.items():
        side, count = geometry.sides[group], len(span.ids)
        if side.is_state:
            if count > 1 or (complete and not count):
                raise BlocksError(f"group {group!r} is state, which has one slot for a request: {count} were given")
            continue
        unit = side.tokens_per_row
        id_rows = side.block_tokens * side.block_ratio
        first, stop = side.local(np.asarray([span.first_token, tokens.stop], np.int64) // unit).tolist()
        cover = (first // id_rows + count) * id_rows
        if len(tokens) and first < stop and cover < stop:
            whose = " of this rank's turns" if side.of > 1 else ""
            raise BlocksError(
                f"group {group!r}: {count} blocks of {side.id_tokens} tokens reach up to token {cover * unit}{whose}, "
                f"but {stop * unit} are needed"
            )
