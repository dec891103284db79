"""Block lists as callers give them, checked without a peer."""

import contextlib

import numpy as np
import pytest
import torch

from kvxfer import BlocksError, CacheTensor, Interleave, Span
from kvxfer.geometry import CacheGeometry
from kvxfer.plans.pairs import check_cover, encode_spans, wanted_blocks
from kvxfer.protocol.framing import SESSION_FRAME_LIMIT, encode
from kvxfer.protocol.messages import Ready

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
    _, found = wanted_blocks(Span([5, 2, 8], first), CACHE, tokens)
    assert found["default"].tolist() == written


@pytest.mark.parametrize(
    ("tokens", "written"),
    [(range(8, 8), []), (range(8), [5]), (range(3, 9), [5, 2]), (range(12, 14), [2]), (range(14, 16), [])],
)
def test_of_interleaved_blocks_those_are_written_that_hold_the_tokens(tokens: range, written: list[int]) -> None:
    """Of two ranks that take turns of two tokens, a block of four covers eight."""
    cache = CacheGeometry.of(
        [CacheTensor(torch.zeros(10, 4, 2), "block token dim", layers=[0], tokens=Interleave(0, 2, 2))]
    )
    _, found = wanted_blocks([5, 2], cache, tokens)
    assert found["default"].tolist() == written


@pytest.mark.parametrize("first", [4, 5, 7])
def test_a_list_reaches_to_the_end_of_its_last_block(first: int) -> None:
    check_cover({"default": Span([5, 2], first)}, CACHE, range(12))
    said = f"2 blocks of 4 tokens reach up to token 12, but 13 are needed; the list begins at token {first}, .*Span"
    with pytest.raises(BlocksError, match=said):
        check_cover({"default": Span([5, 2], first)}, CACHE, range(13))
    check_cover({"default": Span([5, 2], first)}, CACHE, range(4))  # of a window that begins later nothing is needed
    check_cover({"default": Span([], first)}, CACHE, range(4))


@pytest.mark.parametrize(
    ("turns", "enough"),
    # of 16 tokens, rank 1 of 2 holds 8 with turns of one, 4 where it has the second half of each 24, 8 in turns of 8
    [(Interleave(1, 2, 1), 2), (Interleave(1, 2, 12), 1), (Interleave(1, 2, 8), 2), (Interleave(3, 4, 8), 0)],
)
def test_a_list_reaches_as_far_as_this_rank_holds_tokens(turns: Interleave, enough: int) -> None:
    tensor = CacheTensor(torch.zeros(10, 4, 2), "block token dim", layers=[0], tokens=turns)
    cache = CacheGeometry.of([tensor])
    check_cover({"default": Span([5, 2][:enough])}, cache, range(3, 16))
    if enough:
        with pytest.raises(
            BlocksError, match=f"{enough - 1} blocks of 4 tokens reach up to token .* of this rank's turns"
        ):
            check_cover({"default": Span([5, 2][: enough - 1])}, cache, range(3, 16))


def test_a_list_need_not_hold_a_compressed_row_that_is_not_complete() -> None:
    cache = CacheGeometry.of([CacheTensor(torch.zeros(10, 2, 2), "block token dim", layers=[0], tokens_per_row=4)])
    check_cover({"default": Span([5])}, cache, range(11))
    check_cover({"default": Span([], 7)}, cache, range(7))
    with pytest.raises(BlocksError, match="1 blocks of 8 tokens reach up to token 8, but 12 are needed"):
        check_cover({"default": Span([5])}, cache, range(12))
    with pytest.raises(BlocksError, match="0 blocks of 8 tokens reach up to token 0, but 8 are needed"):
        check_cover({"default": Span([], 7)}, cache, range(8))


@pytest.mark.parametrize(("turns", "row", "tokens"), [(2, 1, range(14, 16)), (1, 4, range(9, 11))])
def test_tokens_of_which_this_rank_holds_none_need_no_list(turns: int, row: int, tokens: range) -> None:
    memory, held = torch.zeros(10, 4, 2), Interleave(0, turns, 2)
    cache = CacheGeometry.of([CacheTensor(memory, "block token dim", layers=[0], tokens=held, tokens_per_row=row)])
    assert not wanted_blocks([], cache, tokens)[1]["default"].size


@pytest.mark.parametrize("order", [1, -1])
def test_a_list_holds_what_the_shortest_rows_of_its_group_need(order: int) -> None:
    """Else the offer, or the fetch, would be taken, and its peer refuse it."""
    latents = CacheTensor(torch.zeros(10, 8, 2), "block token dim", layers=[0])
    index = CacheTensor(torch.zeros(10, 2, 2), "block token dim", layers=[0], part="index", tokens_per_row=4)
    cache = CacheGeometry.of([index, latents][::order])
    with pytest.raises(BlocksError, match="1 blocks of 8 tokens reach up to token 8, but 11 are needed"):
        check_cover({"default": Span([5])}, cache, range(11))


@pytest.mark.parametrize(("slots", "early", "late"), [([], True, False), ([1], True, True), ([1, 2], False, False)])
def test_state_has_one_slot_in_the_end(slots: list[int], early: bool, late: bool) -> None:
    cache = CacheGeometry.of([CacheTensor(torch.zeros(10, 2), "block dim", layers=[0], group="s")])
    for fine, complete in ((early, False), (late, True)):
        with (
            contextlib.nullcontext()
            if fine
            else pytest.raises(BlocksError, match=f"one slot .*: {len(slots)} were given")
        ):
            check_cover({"s": Span(slots)}, cache, range(8), complete=complete)


def test_a_request_has_no_more_blocks_than_a_frame_can_name() -> None:
    """One that had cost the session, and with it whatever else the two ranks were about."""
    most = 4_000_000
    pool = torch.zeros(most + 1, 1, 1, dtype=torch.uint8)
    cache = CacheGeometry.of([CacheTensor(pool, "block token dim", layers=[0], group=group) for group in "ab"])
    whole = {"a": np.arange(most), "b": []}
    spans, _ = wanted_blocks(whole, cache, range(1, 1))
    assert len(encode(Ready(1, 1, spans=encode_spans(spans, "ab")))) < SESSION_FRAME_LIMIT - (1 << 19)
    with pytest.raises(BlocksError, match="group 'b' 4000001 block ids"):
        wanted_blocks(whole | {"b": [0]}, cache, range(1, 1))
