"""The kernel of sums in Triton's interpreter. Collected by `test_kernel.py` in a process of its own, see there."""

import os
from typing import Any

import numpy as np
import pytest
import sum_plans
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.copy import kernel
from kvxfer.copy.tables import pack_sums, sum_variants
from kvxfer.copy.walk import total
from kvxfer.geometry import SumPlan

assert os.environ.get("TRITON_INTERPRET") == "1", "run through test_kernel.py"

MORE = os.environ.get("KERNEL") == "all"
sum_items: Any = kernel.sum_items


def interpret(plan: SumPlan, *, ctas: int, at: int = 6) -> bytes:
    """Add up in the interpreter, with tables `at` words behind the start of their memory."""
    packed = pack_sums(plan)
    words = torch.from_numpy(np.concatenate([np.full(at, -1, np.int64), packed.words]))
    for launch in packed.launches:
        assert launch.variant in sum_variants([plan])
        fixed = kernel.constants(launch.variant)
        sum_items[(min(ctas, launch.blocks),)](words, at + launch.first, launch.headers, at + packed.at, **fixed)
    return words.numpy()[at + packed.at :].tobytes()


def check(chunk, ctas):
    """The kernel adds up on both sides what the host does."""
    for plan in (SumPlan.at_source(chunk), SumPlan.at_destination(chunk)):
        assert interpret(plan, ctas=ctas) == total(plan)


@settings(max_examples=12 if MORE else 4, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ctas=st.integers(1, 5))
def test_random_layouts(seed, ctas):
    source, target, chunk = sum_plans.moved(seed)
    check(chunk, ctas)
    del source, target


# numpy, which interprets, warns where a number becomes infinite
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
@settings(max_examples=8 if MORE else 3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ctas=st.integers(1, 5))
def test_random_layouts_that_convert(seed, ctas):
    source, target, chunk = sum_plans.moved(seed, converting=True)
    check(chunk, ctas)
    del source, target


@pytest.mark.parametrize(("seed", "scale"), [(2, 16), (1, 100), (3, 100)][: 3 if MORE else 2])
def test_items_larger_than_a_block_looks_at_together(seed, scale):
    source, target, chunk = sum_plans.pair_of(seed, scale=scale)
    assert {variant.words for variant in sum_variants([SumPlan.at_source(chunk)])} == {512}
    check(chunk, 2)
    del source, target


def test_several_regions_and_rows_share_a_sum(monkeypatch):
    monkeypatch.setattr("kvxfer.geometry.plan.MAX_SUMS", 2)
    source, target, chunk = sum_plans.moved(5)
    assert SumPlan.at_source(chunk).row_step > 1
    check(chunk, 2)
    del source, target
