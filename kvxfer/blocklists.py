"""Block lists of offers and fetches, as callers give them: brought into normal form, and checked without a peer."""

import numpy as np

from kvxfer.errors import BlocksError
from kvxfer.geometry import BlockLists, Blocks, CacheGeometry, check_spans, check_tokens, normalise_blocks
from kvxfer.geometry.rows import RowSide

__all__ = ["check_cover", "offered_blocks", "wanted_blocks", "written_blocks"]


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


def written_blocks(spans: BlockLists, geometry: CacheGeometry, tokens: range) -> dict[str, list[int]]:
    """Destination blocks that a fetch of these tokens writes, by group."""
    written: dict[str, list[int]] = {}
    for group, span in spans.items():
        ids, spec = np.asarray(span.ids, np.int64), geometry.groups[group][0]
        if not spec.is_state:
            edges = np.asarray([span.first_token, tokens.start, tokens.stop], np.int64)
            listed, start, stop = RowSide.of_tensor(spec).local(edges).tolist()
            origin = listed // spec.id_tokens
            first, last = max(0, start // spec.id_tokens - origin), max(0, -(-stop // spec.id_tokens) - origin)
            ids = ids[first : last if len(tokens) else first]
        written[group] = ids.tolist()
    return written


def check_cover(spans: BlockLists, geometry: CacheGeometry, tokens: range) -> None:
    """Check that block lists reach up to a range's end; the planner does if they are interleaved.

    Raises:
        BlocksError: Naming the group and both numbers.
    """
    for group, span in spans.items():
        spec = geometry.groups[group][0]
        beyond = span.first_token >= tokens.stop  # a window of which nothing is in the range
        if spec.is_state or spec.tokens.of > 1 or not len(tokens) or beyond:
            continue
        cover = (span.first_token // spec.id_tokens + len(span.ids)) * spec.id_tokens
        if cover < tokens.stop:
            raise BlocksError(
                f"group {group!r}: {len(span.ids)} blocks of {spec.id_tokens} tokens reach up to token {cover}, "
                f"but {tokens.stop} are needed"
            )
