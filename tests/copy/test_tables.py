"""Packed tables: widths, divisions and bounds. What they mean to the kernel is tested with the kernel."""

import numpy as np
import pytest
from copy_plans import contiguous_rows, head_split, random_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import pack, variants

from kvxfer.copy import tables
from kvxfer.copy.tables import HEADER_WORDS, WIDTHS, Variant
from kvxfer.errors import GeometryError
from kvxfer.geometry.copyplan import Box, CopyPlan, Segment


@given(
    divisor=st.one_of(st.integers(1, 2**31 - 1), st.sampled_from([1, 2, 3, 7, 2**16, 2**30, 2**30 + 1, 2**31 - 1])),
    number=st.integers(0, 2**31 - 1),
    near=st.integers(-1, 1),
)
def test_division_by_multiplication_is_exact(divisor, number, near):
    multiplier, shift = tables.divisor(divisor)
    assert multiplier < 2**32
    assert shift < 32
    for x in (number, min(max(number // divisor * divisor + near, 0), 2**31 - 1)):
        high = x * multiplier >> 32
        assert high + x < 2**32
        assert (high + x) >> shift == x // divisor


@pytest.mark.parametrize("converting", [False, True])
@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_plan_is_at_most_one_launch_of_each_variant_that_is_known_beforehand_and_carries_all_its_bytes(
    converting, seed
):
    if converting:
        plan = random_plan(seed, 1 << 20, 1 << 30, 1 << 20, converts=True, most=8192)[0]
    else:
        plan, _, _ = random_plan(seed, 0, 0, 1 << 20)
    packed = pack(plan)
    used = {launch.variant for launch in packed.launches}
    assert len(used) == len(packed.launches)
    assert used <= variants([plan])
    assert converting or variants([plan]) <= {Variant(width) for width in WIDTHS}
    most = 0
    for launch in packed.launches:
        heads = packed.words[launch.first : launch.first + launch.headers * HEADER_WORDS].reshape(-1, HEADER_WORDS)
        assert heads[:, 0].sum() == launch.tiles
        np.testing.assert_array_equal(heads[:, 1], np.cumsum(heads[:, 0]) - heads[:, 0])
        most += int((heads[:, 2] * heads[:, 5]).sum()) * launch.variant.width * launch.variant.elements.dst_bytes
    assert most >= plan.bytes


@pytest.mark.parametrize("width", WIDTHS)
def test_the_width_is_the_widest_that_everything_allows(width):
    row = 48 * width
    for src, dst in ((width, 0), (0, width)):
        plan = contiguous_rows(src + 64, dst + 64, rows=4, regions=1, row_bytes=row, pool=8)
        assert [launch.variant.width for launch in pack(plan).launches] == [width]


def test_tables_are_small():
    plan = head_split(0, 0, rows=512, regions=64, pool=512)
    assert plan.bytes == 256 << 20
    assert pack(plan).words.nbytes < 20 << 10


def test_rows_too_long_for_31_bits_are_refused_by_name():
    box = Box((), 1, 1, 2**31, token_in_run=False)
    plan = CopyPlan((Segment(np.asarray([[1, 0]], np.int64), np.asarray([[0, 0, 0, 0, 1]], np.int64), 0, 0, box),))
    with pytest.raises(GeometryError, match="1-byte accesses has 2147483648 words in a row"):
        pack(plan)
