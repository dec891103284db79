"""Sums of a chunk in CPU memory: its bytes are brought into their common order, a cacheful at a time, and added up."""

from typing import Final

import numpy as np

from kvxfer.copy.tables import pack
from kvxfer.copy.walk import copy
from kvxfer.geometry.copyplan import CopyPlan
from kvxfer.geometry.sums import ItemSums, SumPart, SumPlan, keys

__all__ = ["total"]

_AT_ONCE_WORDS: Final = 1 << 17
"""Words of 64 bits, so that they, as many copies of them and their keys stay in the cache."""


def total(plan: SumPlan) -> bytes:
    """Read all that a plan names, now, in the calling thread, and give its sums as they travel.

    Args:
        plan: Its addresses must be valid CPU memory of this process.
    """
    found = ItemSums(plan)
    for part in plan.parts:
        _add(part, found)
    return found.packed()


def _add(part: SumPart, found: ItemSums) -> None:
    at_once = max(1, _AT_ONCE_WORDS // part.words)  # items
    few_rows = min(part.rows, at_once)
    few_regions = max(1, min(part.regions, at_once // part.rows))
    memory, folded = np.zeros((2, few_regions * few_rows * part.words), np.uint64)
    for region in range(0, part.regions, few_regions):
        regions = slice(region, min(region + few_regions, part.regions))
        for row in range(0, part.rows, few_rows):
            rows = slice(row, min(row + few_rows, part.rows))
            shape = (regions.stop - regions.start, rows.stop - rows.start, part.words)
            words, other = (some[: np.prod(shape)].reshape(shape) for some in (memory, folded))
            if not part.whole:
                words[:] = 0
            copy(pack(CopyPlan((part.cut(regions, rows, memory.ctypes.data),))))
            np.right_shift(words, 32, out=other)
            np.bitwise_xor(words, other, out=words)
            found.add(part, regions, rows, np.einsum("rni,i->rn", words, keys(part.words)))
