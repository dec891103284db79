"""Block lists and the rows in which they meet."""

import contextlib
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.errors import BlocksError, TokensError
from kvxfer.geometry import CacheGeometry, CacheTensor, Group, Span, check_spans, check_tokens, normalise_blocks
from kvxfer.geometry.axes import RowSide
from kvxfer.geometry.rows import Blocks, Rows, meet

PLAIN = RowSide(4, 1, 1, 0, 1, 1, None)
STATE = replace(PLAIN, block_tokens=0)
MANY = replace(PLAIN, block_ratio=1 << 24)


def geometry(*groups: str, null: int | None = None, **rest: Any) -> CacheGeometry:
    made = [CacheTensor(torch.zeros(10, 4, 8), "block token dim", layers=[0], group=group, **rest) for group in groups]
    return CacheGeometry.of(made, [Group(group, null) for group in groups])


def span(*ids: int, first: int = 0) -> Span:
    return Span(np.asarray(ids, np.int64), first)


def table(rows: Rows) -> list[tuple[int, ...]]:
    return [tuple(row) for row in rows.table.tolist()]


# what a caller may pass


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1],
        (3, 1),
        np.asarray([3, 1], np.uint8),
        np.asarray([3, 1], np.uint64),
        torch.tensor([3, 1]),
        torch.tensor([3, 1], dtype=torch.uint64),
        Span([3, 1], np.int64(0)),  # type: ignore[arg-type]
    ],
)
def test_ids_of_any_kind_become_one_form(ids: Sequence[int]) -> None:
    found = normalise_blocks(ids, geometry("a"))
    assert list(found) == ["a"]
    assert found["a"].ids.dtype == np.int64  # pyright: ignore[reportAttributeAccessIssue]
    assert list(found["a"].ids) == [3, 1]
    assert found["a"].first_token == 0


def test_a_tensor_is_a_block_list_for_who_checks_types_too() -> None:
    ids: Blocks = torch.tensor([3, 1])
    for given in (ids, Span(torch.tensor([3, 1])), {"a": torch.tensor([3, 1])}):
        assert list(normalise_blocks(given, geometry("a"))["a"].ids) == [3, 1]


def test_several_groups_need_a_mapping() -> None:
    both = geometry("a", "b")
    found = normalise_blocks({"b": [1], "a": Span([2], 8)}, both)
    assert [(name, list(s.ids), s.first_token) for name, s in found.items()] == [("a", [2], 8), ("b", [1], 0)]
    with pytest.raises(BlocksError, match=r"groups \['a', 'b'\]: give blocks= as a mapping"):
        normalise_blocks([1], both)
    with pytest.raises(BlocksError, match=r"names the groups \['a'\], but this cache has \['a', 'b'\]"):
        normalise_blocks({"a": [1]}, both)
    with pytest.raises(BlocksError, match=r"names the groups \['a', 'b', 'c'\]"):
        normalise_blocks({"a": [1], "b": [1], "c": [1]}, both)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1.5], "not float64 of shape \\(1,\\)"),
        ([True], "not bool of shape \\(1,\\); of a mask over the pool give the positions that are true"),
        (np.zeros(10, np.bool_), "not bool of shape \\(10,\\); of a mask"),
        (torch.zeros(10, dtype=torch.bool), "not bool of shape \\(10,\\); of a mask"),
        ([[1], [2]], "of shape \\(2, 1\\)"),
        (np.asarray([1, 2**64 - 1], np.uint64), "block id 18446744073709551615 at position 1 is outside of every pool"),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), "block id 18446744073709551615 at position 0"),
        ([2**64 - 1], "block id 18446744073709551615 at position 0 is outside of every pool"),
        ([1, 2**63], "block id 9223372036854775808 at position 1"),
        ([1, -(2**70)], "block id -1180591620717411303424 at position 1"),
        (Span([1], -4), "first_token must not be negative, not -4"),
        (Span([1], 2**32), "first_token must be at most 4294967295, not 4294967296"),
        (Span([1], 2**70), "first_token must be at most 4294967295, not 1180591620717411303424"),
        (Span([1], 0.5), "first_token must be a whole number, not 0.5"),  # type: ignore[arg-type]
        (Span([1], True), "first_token must be a whole number, not True"),
        (Span([1], np.array([4, 8])), "first_token must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_other_values_are_refused(ids: Sequence[int], words: str) -> None:
    with pytest.raises(BlocksError, match=f"group 'a': .*{words}"):
        normalise_blocks(ids, geometry("a"))


def test_a_slot_for_state_is_needed_where_it_arrives() -> None:
    cache = CacheGeometry.of([CacheTensor(torch.zeros(10, 8), "block dim", layers=[0], group="a")])
    nothing = normalise_blocks([], cache)
    check_spans(nothing, cache, receiving=False)  # it may be added later
    with pytest.raises(BlocksError, match="group 'a' is state and needs a slot: its block list is empty"):
        check_spans(nothing, cache, receiving=True)
    tokens = geometry("a")
    check_spans(normalise_blocks([], tokens), tokens, receiving=True)  # enough if no token is missing


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (span(1, 10, 2), "block id 10 at position 1 is outside 0..9"),
        (span(1, 2, -1), "block id -1 at position 2 is outside 0..9"),
    ],
)
def test_ids_outside_the_pool_are_refused_on_both_sides(given: Span, words: str) -> None:
    for receiving in (False, True):
        with pytest.raises(BlocksError, match=f"group 'a': {words}"):
            check_spans({"a": given}, geometry("a"), receiving=receiving)


def test_kernel_blocks_count_as_one_id() -> None:
    cache = geometry("a", kernel_blocks_per_id=2)
    check_spans({"a": span(4)}, cache, receiving=True)
    with pytest.raises(BlocksError, match=r"block id 5 at position 0 is outside 0\.\.4"):
        check_spans({"a": span(5)}, cache, receiving=True)


@pytest.mark.parametrize("pool", [5000, 1 << 31], ids=["marked in a table", "in too large a pool for one"])
def test_a_repeated_block_is_found_in_a_long_list(pool: int) -> None:
    few = geometry("a").tensors[0]
    cache = CacheGeometry((replace(few, shape=(pool, *few.shape[1:]), base=0),))
    ids = np.random.default_rng(0).permutation(5000)
    check_spans({"a": Span(ids)}, cache, receiving=True)
    again = np.concatenate([ids[:4000], ids[17:18]])
    check_spans({"a": Span(again)}, cache, receiving=False)
    with pytest.raises(BlocksError, match=f"block id {ids[17]} is named twice, at positions 17 and 4000"):
        check_spans({"a": Span(again)}, cache, receiving=True)


@pytest.mark.parametrize("null", [0, 7])
def test_repeated_and_null_blocks_are_refused_at_the_receiver_only(null: int) -> None:
    cache = geometry("a", null=null)
    for given, words in (
        (span(3, 5, 9, 5), "block id 5 is named twice, at positions 1 and 3"),
        (span(3, null, 5), rf"the null block {null} cannot receive \(position 1\)"),
    ):
        check_spans({"a": given}, cache, receiving=False)
        with pytest.raises(BlocksError, match=f"group 'a': {words}"):
            check_spans({"a": given}, cache, receiving=True)
    check_spans({"a": span(*({*range(10)} - {null}))}, cache, receiving=True)


@pytest.mark.parametrize("tokens", [range(0), range(4, 4), range(5, 3), range(0, 8, 2), range(-1, 3), range(8, 0, -1)])
def test_token_ranges_that_cannot_be_asked_for(tokens: range) -> None:
    with pytest.raises(TokensError, match="must be a range of step 1 with at least one token, not range"):
        check_tokens(tokens)


def test_token_ranges_have_a_limit() -> None:
    check_tokens(range(3, (1 << 32) - 1))
    with pytest.raises(TokensError, match="tokens end at 4294967296, but 4294967295 tokens are the most"):
        check_tokens(range(3, 1 << 32))


def test_rows_that_no_memory_holds_are_refused() -> None:
    """A peer may ask for many tokens with one block of its own that is large enough; rows are as small as ours."""
    large = replace(PLAIN, block_tokens=(1 << 32) - 1)
    with pytest.raises(TokensError, match=r"tokens 0\.\.4294967294 in rows of 1 are more than the 16777216 rows"):
        meet("a", PLAIN, large, span(5), span(1), range((1 << 32) - 1), covered=4)


# rows


@pytest.mark.parametrize("first", [4, 5, 6, 7, 8, 9, 10])
def test_an_interleaved_list_may_begin_with_a_token_that_another_rank_holds(first: int) -> None:
    side = replace(PLAIN, rank=1, of=2, chunk=2)  # holds 2 3 6 7 | 10 11 14 15 | 18 ...
    rows = meet("a", side, side, span(5, 8, first=first), span(1, 9, first=first), range(16))
    left = sum(first <= token for token in (6, 7))
    if left == 0:  # then the lists begin with the second block
        assert table(rows) == [(5, 0, 1, 0, 2), (5, 2, 1, 2, 2)]
    else:
        assert table(rows) == [(5, 4 - left, 1, 4 - left, left), (8, 0, 9, 0, 2), (8, 2, 9, 2, 2)]


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        (span(5, 2), span(1, 9, 0), r"source \(2 blocks of 4 from token 0\) does not cover tokens 0\.\.9"),
        (span(5, 2, 3), span(1, 9), r"destination \(2 blocks of 4 from token 0\) does not cover tokens 0\.\.9"),
        (span(5, 2, 3, first=4), span(1, 9, 0), r"source \(3 blocks of 4 from token 4\) does not cover tokens 0\.\.9"),
    ],
)
def test_lists_that_are_too_short(src: Span, dst: Span, words: str) -> None:
    with pytest.raises(BlocksError, match=f"group 'a': the block list of the {words}"):
        meet("a", PLAIN, PLAIN, src, dst, range(10))


def test_a_source_list_may_still_grow() -> None:
    whole = meet("a", PLAIN, PLAIN, span(5, 2, 8), span(1, 9, 0), range(2, 12))
    assert whole.present() is whole
    short = meet("a", PLAIN, PLAIN, span(5, 2), span(1, 9, 0), range(2, 12), covered=7)
    assert table(short.within(2, 8).present()) == table(whole.within(2, 8))
    assert (short.begin == whole.begin).all()
    assert (short.table[:, 1:] == whole.table[:, 1:]).all()
    for rows in (short, short.within(7, 9)):
        with pytest.raises(BlocksError, match="the source block that holds token 8 is not known yet"):
            rows.present()
    with pytest.raises(BlocksError, match=r"source \(2 blocks of 4 from token 0\) does not cover tokens 2\.\.11"):
        meet("a", PLAIN, PLAIN, span(5, 2), span(1, 9, 0), range(2, 12), covered=9)
    with pytest.raises(BlocksError, match=r"source \(1 blocks of 4 from token 4\) does not cover tokens 2"):
        meet("a", PLAIN, PLAIN, span(2, first=4), span(1, 9, 0), range(2, 12), covered=0)
    with pytest.raises(BlocksError, match="destination"):
        meet("a", PLAIN, PLAIN, span(5, 2), span(1, 9), range(2, 12), covered=7)


def test_the_slot_of_state_may_come_last() -> None:
    rows = meet("a", STATE, STATE, span(), span(1), range(3, 12), covered=8)
    assert len(rows.within(3, 11).present()) == 0
    with pytest.raises(BlocksError, match="token 11 is not known yet"):
        rows.within(3, 12).present()
    with pytest.raises(BlocksError, match="0 slots at the source, 1 at the destination"):
        meet("a", STATE, STATE, span(), span(1), range(3, 12))
    with pytest.raises(BlocksError, match="2 slots at the source, 1 at the destination"):
        meet("a", STATE, STATE, span(5, 2), span(1), range(3, 12), covered=8)


def test_state_is_never_padding() -> None:
    """A window may have padding, of which nothing moves; state of which nothing moves would be read as good."""
    held = [CacheTensor(torch.zeros(10, 8), "block dim", layers=[0], group="a")]
    cache = CacheGeometry.of(held, [Group("a", 3)])
    check_spans({"a": span(2)}, cache, receiving=False)
    for receiving in (False, True):
        with pytest.raises(
            BlocksError, match="group 'a' is state, which cannot be padding: its slot is the null block 3"
        ):
            check_spans({"a": span(3)}, cache, receiving=receiving)


@pytest.mark.parametrize("covered", [0, 4, 7])
def test_the_block_of_a_compressed_row_is_due_with_its_last_token(covered: int) -> None:
    """A window may begin inside of a token row, and prefill may stop inside of it."""
    pooled = replace(PLAIN, block_tokens=2, tokens_per_row=4)
    lists = (span(first=7), span(1, first=7))
    rows = meet("a", pooled, pooled, *lists, range(8), covered=covered)
    assert table(rows) == [(-2, 1, 1, 1, 1)]
    with pytest.raises(BlocksError, match=r"source \(0 blocks of 2 from token 7\) does not cover tokens 4\.\.7"):
        meet("a", pooled, pooled, *lists, range(8), covered=8)


def test_state_belongs_to_the_last_token() -> None:
    rows = meet("a", STATE, STATE, span(5, 2), span(1, 9), range(3, 12))
    assert table(rows) == [(5, 0, 1, 0, 1), (2, 0, 9, 0, 1)]
    assert len(rows.within(3, 11)) == 0
    assert table(rows.within(11, 12)) == table(rows.within(3, 12)) == table(rows)
    with pytest.raises(BlocksError, match="group 'a' is state: 2 slots at the source, 1 at the destination"):
        meet("a", STATE, STATE, span(5, 2), span(1), range(12))


@pytest.mark.parametrize("dst", [PLAIN, replace(PLAIN, rank=1, of=2), replace(PLAIN, rank=1, of=2, chunk=1 << 31)])
def test_who_names_few_blocks_for_a_long_range_costs_little(dst: RowSide) -> None:
    """A peer may do that while the request grows: nothing is made for tokens that its blocks do not hold."""
    tracemalloc.start()
    try:
        with contextlib.suppress(BlocksError):
            assert not len(meet("g", PLAIN, dst, span(5), span(), range(1 << 24), covered=8))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sides", [(PLAIN, MANY), (MANY, PLAIN)])
def test_an_id_of_many_kernel_blocks_costs_no_more_than_its_rows(sides: tuple[RowSide, RowSide]) -> None:
    """A peer says how many they are, and its word alone stands for the memory that they take there."""
    one, two = ([3], [5, 2]) if sides[0] is not PLAIN else ([5, 2], [3])
    tracemalloc.start()
    try:
        rows = meet("g", *sides, span(*one), span(*two), range(2, 8))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    many, few = (2, 0) if sides[0] is PLAIN else (0, 2)
    assert rows.table[:, many].tolist() == [3 << 24, (3 << 24) + 1]
    assert rows.table[:, few].tolist() == [5, 2]


def test_a_rank_without_any_of_the_tokens_needs_no_block_for_them() -> None:
    """A window may begin in the midst of a block, and the rank's turn be over before it."""
    turns = replace(PLAIN, block_tokens=16, of=2, chunk=4)
    assert not len(meet("g", PLAIN, turns, span(5, 2), span(first=4), range(4, 8)))


@pytest.mark.parametrize("of", [1, 2])
def test_what_an_offer_does_not_hold_is_refused_before_there_are_rows(of: int) -> None:
    """A peer says how large its blocks are: few of them are many rows."""
    dst = replace(PLAIN, block_tokens=8191, of=of, chunk=8191)
    tracemalloc.start()
    try:
        with pytest.raises(BlocksError, match=r"list of the source .* does not cover tokens 0"):
            meet("g", PLAIN, dst, Span([5], 40), Span(range(2000)), range(2000 * 8191), covered=44)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
