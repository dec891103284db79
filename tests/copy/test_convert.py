"""Conversion on a CPU: the same bits as torch's own arithmetic, at every address of a plan."""

import asyncio

import conversions
import numpy as np
import pytest
import torch
from copy_plans import CANARY, PAIRS, random_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import copy, pack, packed, variants

from kvxfer.copy import tables
from kvxfer.copy.mover import Mover
from kvxfer.copy.port import CopyJob, Direction
from kvxfer.errors import GeometryError
from kvxfer.geometry.copyplan import Elements
from kvxfer.runtime import ThreadRuntime

NBYTES = 1 << 18
SRC = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)


def bits(tensor):
    return tensor.view(conversions.INTEGERS[tensor.itemsize])


def convert(source, dst, multiply=1.0, divide=1.0):
    """A tensor of elements, converted."""
    made = torch.zeros(len(source), dtype=getattr(torch, dst))
    src = str(source.dtype).removeprefix("torch.")
    copy(pack(conversions.line(src, dst, source.data_ptr(), made.data_ptr(), len(source), [(multiply, divide)])))
    return made


@pytest.mark.parametrize(("src", "dst"), PAIRS)
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.0123, 1.7), (3e38, 1e-3)])
def test_every_element_is_converted_as_torch_does(src, dst, factors):
    source = conversions.patterns(src)
    made = convert(source, dst, *factors)
    np.testing.assert_array_equal(bits(made).numpy(), bits(conversions.reference(source, dst, *factors)).numpy())


def test_what_is_too_large_for_8_bits_becomes_the_largest_and_for_16_infinite():
    given = torch.tensor([1e6, -1e6, torch.inf, -torch.inf, torch.nan, 464.0, 449.0])

    def made(dst):
        return convert(given, dst).float().tolist()

    assert made("float8_e4m3fn")[:4] == [448, -448, 448, -448]
    assert made("float8_e4m3fn")[5:] == [448, 448]
    assert made("float8_e5m2")[:4] == [57344, -57344, 57344, -57344]
    assert made("float16")[:4] == [torch.inf, -torch.inf, torch.inf, -torch.inf]
    assert all(np.isnan(made(dst)[4]) for dst in conversions.NAN)


async def test_a_mover_converts_alike_whatever_the_thread_does_that_opened_it():
    source = conversions.patterns("bfloat16")
    want, made = source.float(), torch.zeros(len(source))
    plan = conversions.line("bfloat16", "float32", source.data_ptr(), made.data_ptr(), len(source), [(1.0, 1.0)])
    assert torch.set_flush_denormal(True)
    try:
        mover, ended = Mover(ThreadRuntime()), asyncio.get_running_loop().create_future()
    finally:
        torch.set_flush_denormal(False)
    mover.submit(CopyJob(packed(plan), ended.set_result), Direction.SCATTER)
    assert (await ended).error is None
    finite = want.isfinite()
    assert torch.equal(bits(made)[finite], bits(want)[finite])
    assert await mover.close(10)


def test_identity_leaves_every_number_as_it_is():
    for dtype in conversions.NAN:
        source = conversions.patterns(dtype)
        made, finite = convert(source, dtype), source.float().isfinite()
        assert torch.equal(bits(made)[finite], bits(source)[finite])


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_plans(seed):
    dst = np.full(NBYTES, CANARY, np.uint8)
    plan = random_plan(seed, SRC.ctypes.data, dst.ctypes.data, NBYTES, converts=True, most=8192)[0]
    want = conversions.expected(plan, SRC, SRC.ctypes.data, dst, dst.ctypes.data)
    copy(pack(plan))
    np.testing.assert_array_equal(dst, want)


def test_regions_have_numbers_of_their_own():
    given = torch.ones(3 * 8, dtype=torch.bfloat16)
    made = torch.zeros(3 * 8)
    factors = [(1.0, 2.0), (3.0, 1.0), (5.0, 10.0)]
    copy(pack(conversions.line("bfloat16", "float32", given.data_ptr(), made.data_ptr(), 8, factors, regions=3)))
    assert made.view(3, 8).tolist() == [[0.5] * 8, [3.0] * 8, [0.5] * 8]


def test_a_usual_layout_needs_one_variant():
    plan = conversions.line("bfloat16", "float8_e4m3fn", 1 << 20, 1 << 30, 1024)
    expected = tables.Variant(8, Elements(2, 1, "bfloat16", "float8_e4m3fn"))
    assert variants([plan]) == {expected}


def test_no_access_counts_on_more_than_the_alignment_of_staging():
    plans = [conversions.line("float32", "float32", 1 << 20, to, 1024) for to in ((1 << 30) + 16, 1 << 30)]
    assert variants(plans) == {tables.Variant(4, Elements(4, 4, "float32", "float32"))}


def test_there_are_no_pieces_of_it():
    plan = conversions.line("float16", "bfloat16", 0, 1024, 8)
    with pytest.raises(GeometryError, match="float16 to bfloat16 cannot be copied piece by piece"):
        plan.enumerate()
