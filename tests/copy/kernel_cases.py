"""The Triton kernel in Triton's interpreter. Collected by `test_kernel.py` in a process of its own, see there."""

import os
from typing import Any

import conversions
import numpy as np
import packing
import pytest
import torch
from copy_plans import CANARY, PAIRS, expected, head_split, random_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.copy import kernel, tables
from kvxfer.errors import MissingExtraError
from kvxfer.geometry.copyplan import Box, BoxAxis, CopyPlan, Segment

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_kernel.py"

MORE = os.environ.get("KERNEL") == "all"
EXAMPLES = 25 if MORE else 8
"""Of each kind of random plan: `make simulate` draws more."""
NBYTES = 1 << 18
copy_boxes: Any = kernel.copy_boxes
SRC = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)


NO_GATE = (0, 0, 0)


def interpret(plan: CopyPlan, *, ctas: int, tile: int, at: int = 0, gate=NO_GATE) -> list[int]:
    """Run a plan in the interpreter, its tables `at` words behind the start of their memory. Returns the widths."""
    before = tables.TILE_WORDS, tables.CONVERTED_TILE_WORDS
    tables.TILE_WORDS = tables.CONVERTED_TILE_WORDS = tile
    try:
        packed = packing.pack(plan)
    finally:
        tables.TILE_WORDS, tables.CONVERTED_TILE_WORDS = before
    words = torch.from_numpy(np.concatenate([np.full(at, -1, np.int64), packed.words]))
    for launch in packed.launches:
        fixed = {**kernel.constants(launch.variant), "TILE": tile}
        copy_boxes[(min(ctas, launch.tiles),)](words, at + launch.first, launch.headers, *gate, **fixed)
    return [launch.variant.width for launch in packed.launches]


def check(make, *, ctas=3, tile=64) -> list[int]:
    """A plan must give what its pieces say and what the host copies, and leave every other byte alone."""
    dst = np.full(NBYTES, CANARY, np.uint8)
    plan = make(SRC.ctypes.data, dst.ctypes.data)
    want = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    used = interpret(plan, ctas=ctas, tile=tile, at=6)
    np.testing.assert_array_equal(dst, want)
    dst[:] = CANARY
    packing.copy(packing.pack(plan))
    np.testing.assert_array_equal(dst, want)
    return used


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ctas=st.integers(1, 7), tile=st.sampled_from([32, 256, 4096]))
def test_random_plans(seed, ctas, tile):
    most = 24 * tile  # the interpreter takes milliseconds for a tile
    check(
        lambda src, dst: random_plan(seed, src, dst, NBYTES, most_segments=3, most=min(most, 16384))[0],
        ctas=ctas,
        tile=tile,
    )


@pytest.mark.parametrize("ctas", [1, 5])
@pytest.mark.parametrize(("now", "copied"), [(7, True), (6, False), (8, False)])
def test_a_gate_lets_in_those_who_know_its_generation_and_counts_everybody_out(now, copied, ctas):
    dst = np.full(NBYTES, CANARY, np.uint8)
    plan = head_split(SRC.ctypes.data, dst.ctypes.data, rows=3, regions=2, pool=3, row_bytes=64)
    want = expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    words = np.asarray([now << 32, 0], np.int64)  # the gate, and where to say that it is closed
    interpret(plan, ctas=ctas, tile=512, gate=(words.ctypes.data, 7, words.ctypes.data + 8))
    np.testing.assert_array_equal(dst, want if copied else np.full(NBYTES, CANARY, np.uint8))
    assert words.tolist() == [now << 32, int(not copied)]


def aligned(width):
    """Offset that makes an address of the arena a multiple of `width` and of nothing wider."""
    return lambda address: -address % 32 + (width if width < 16 else 0)


@pytest.mark.parametrize("width", tables.WIDTHS)
def test_every_width_is_used_where_it_fits(width):
    shift = aligned(width)

    def make(src, dst):
        run, room = 3 * width, 16 * width
        box = Box((BoxAxis(2, 4 * width, 8 * width),), room, room, run, token_in_run=False)
        rows = np.asarray([[0, 1, 2, 0, 3], [2, 0, 0, 2, 2], [1, 2, 1, 1, 2]], np.int64)
        bases = np.asarray([[src + shift(src), dst + shift(dst)]], np.int64)
        return CopyPlan((Segment(bases, rows, 4 * room, 4 * room, box),))

    assert check(make) == [width]


def test_more_axes_than_a_box_has_today():
    axes = tuple(BoxAxis(2, 4 * 3**k, 4 * 4**k) for k in range(5))

    def make(src, dst):
        box = Box(axes, 4 * 3**5, 4 * 4**5, 4, token_in_run=False)
        rows = np.asarray([[0, 0, 0, 0, 2]], np.int64)
        return CopyPlan((Segment(np.asarray([[src, dst]], np.int64), rows, 0, 0, box),))

    check(make)


# numpy, which interprets, warns where a number becomes infinite
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ctas=st.integers(1, 7), tile=st.sampled_from([32, 256]))
def test_random_plans_that_convert(seed, ctas, tile):
    dst = np.full(NBYTES, CANARY, np.uint8)
    plan = random_plan(seed, SRC.ctypes.data, dst.ctypes.data, NBYTES, converts=True, most=16 * tile)[0]
    want = conversions.expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    interpret(plan, ctas=ctas, tile=tile, at=6)
    np.testing.assert_array_equal(dst, want)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_element_is_converted_as_torch_does(src, dst):
    given = conversions.patterns(src)
    if given.itemsize == 4 and not MORE:  # there are a million, and the host's code is put to all of them
        given = given[::7].contiguous()
    for multiply, divide in ((1.0, 1.0), (0.0123, 1.7)):
        made = torch.zeros(len(given), dtype=getattr(torch, dst))
        at, to = given.data_ptr(), made.data_ptr()
        plan = conversions.line(src, dst, at, to, len(given), [(multiply, divide)])
        interpret(plan, ctas=2, tile=4096)
        want = conversions.reference(given, dst, multiply, divide)
        kind = conversions.INTEGERS[made.itemsize]
        wrong = (made.view(kind) != want.view(kind)).nonzero().ravel()
        assert not len(wrong), (given[wrong[:5]], made[wrong[:5]], want[wrong[:5]])


def test_a_compiler_that_takes_subnormal_numbers_for_zero_is_refused():
    kernel.check_exact("mul.rn.f32 %f1, %f2, %f3;")
    with pytest.raises(MissingExtraError, match=r"torch>=2\.10"):
        kernel.check_exact("mul.rn.ftz.f32 %f1, %f2, %f3;")
