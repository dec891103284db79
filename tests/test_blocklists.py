"""Block lists as callers give them, checked without a peer."""

import pytest
import torch

from kvxfer import BlocksError, CacheTensor, Interleave, Span
from kvxfer.blocklists import check_cover, wanted_blocks, written_blocks
from kvxfer.geometry import CacheGeometry

CACHE = CacheGeometry.of([CacheTensor(torch.zeros(10, 4, 2), "block token dim", layers=[0])])


@pytest.mark.parametrize(
    ("first", "tokens", "written"),
    [
        (0, range(12), [5, 2, 8]),
        (0, range(4, 9), [2, 8]),
        (0, range(7, 8), [2]),
        (4, range(12), [5, 2]),
        (6, range(12), [5, 2]),  # token 6 lies in the block of the tokens 4 to 7
        (6, range(8, 12), [2]),
        (6, range(6, 8), [5]),
        (0, range(6, 6), []),
    ],
)
def test_blocks_that_a_fetch_writes(first: int, tokens: range, written: list[int]) -> None:
    spans = wanted_blocks(Span([5, 2, 8], first), CACHE, tokens)
    assert written_blocks(spans, CACHE, tokens) == {"default": written}


@pytest.mark.parametrize(
    ("tokens", "written"),
    [(range(8, 8), []), (range(8), [5]), (range(3, 9), [5, 2]), (range(12, 14), [2]), (range(14, 16), [])],
)
def test_of_interleaved_blocks_those_are_written_that_hold_the_tokens(tokens: range, written: list[int]) -> None:
    """Of two ranks that take turns of two tokens, a block of four covers eight."""
    cache = CacheGeometry.of(
        [CacheTensor(torch.zeros(10, 4, 2), "block token dim", layers=[0], tokens=Interleave(0, 2, 2))]
    )
    assert written_blocks(wanted_blocks([5, 2], cache, tokens), cache, tokens) == {"default": written}


@pytest.mark.parametrize("first", [4, 5, 7])
def test_a_list_reaches_to_the_end_of_its_last_block(first: int) -> None:
    check_cover({"default": Span([5, 2], first)}, CACHE, range(12))
    with pytest.raises(BlocksError, match="2 blocks of 4 tokens reach up to token 12, but 13 are needed"):
        check_cover({"default": Span([5, 2], first)}, CACHE, range(13))
    check_cover({"default": Span([5, 2], first)}, CACHE, range(4))  # of a window that begins later nothing is needed
    check_cover({"default": Span([], first)}, CACHE, range(4))
