"""Sums over what a chunk holds, made by each side from its own blocks: they are equal if, and only if, the bytes are.

A chunk is a matrix of items: its regions by its rows. The bytes of an item have one order on both sides (head, token,
dim, as in staging), so they are the same words of 64 bits there, whatever either layout looks like:

    item(region, row) = mix(sum over its words of (word ^ word >> 32) * key(place of the word in its item)
                            ^ mix(region << 32 | row))

modulo 2^64. What travels is one sum of items for each region and one for each row, not one for each item: a piece that
differs shows in one of each, which name its layer and its block. The order of a sum does not matter, so any number of
threads may make it; places without a byte (rows that a token range has clipped) count as 0.

`mix` and the sequence of keys are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). A key is odd, so one word that differs always shows in its item. Swapped words, tokens,
heads, blocks and layers show but for one case in about 2^32. This finds faults; it keeps out nobody who means harm.

Elements that are converted are summed in the form in which they arrive: the source converts what it reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry.chunks import ChunkPlan, SumPart, SumPlan
from kvxfer.geometry.intersect import KV_ORDER

__all__ = ["Damage", "ItemSums", "damage", "keys", "mix", "selected"]

U64: TypeAlias = NDArray[np.uint64]

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_FIRST: Final = 0xBF58_476D_1CE4_E5B9
_SECOND: Final = 0x94D0_49BB_1331_11EB
_CHUNK_BITS: Final = 20
_KEPT_KEYS: Final = 64


def mix(words: U64) -> U64:
    """SplitMix64's last step: every bit of a result depends on every bit of the word. One to one."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(_FIRST)
    words = (words ^ words >> np.uint64(27)) * np.uint64(_SECOND)
    return words ^ words >> np.uint64(31)


@lru_cache(maxsize=_KEPT_KEYS)
def keys(words: int) -> U64:
    """The key of each word of an item of so many. Not to be written to."""
    found = mix(np.arange(1, words + 1, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)
    found.setflags(write=False)
    return found


def selected(transfer: int, chunk: int, every: int) -> bool:
    """Whether a chunk is summed where one in `every` is; the same on both sides. None is where `every` is 0."""
    if every <= 1:
        return every == 1
    word = np.array([(transfer << _CHUNK_BITS | chunk) & _MASK], np.uint64)
    return int(mix(word)[0]) % every == 0


class ItemSums:
    """Adds items up, in any order."""

    def __init__(self, plan: SumPlan) -> None:
        self._plan: Final = plan
        self._sums: Final = np.zeros(plan.region_sums + plan.row_sums, np.uint64)

    def add(self, part: SumPart, regions: slice, rows: slice, items: U64) -> None:
        """Take the plain sums of some items, (regions, rows)."""
        plan = self._plan
        region = np.arange(regions.start, regions.stop, dtype=np.uint64) + np.uint64(part.first_region)
        row = np.arange(rows.start, rows.stop, dtype=np.uint64) + np.uint64(part.first_row)
        mixed = mix(items ^ mix(region[:, None] << np.uint64(32) | row))
        np.add.at(self._sums, (region // np.uint64(plan.region_step)).astype(np.int64), mixed.sum(axis=1))
        into = plan.region_sums + (row // np.uint64(plan.row_step)).astype(np.int64)
        np.add.at(self._sums, into, mixed.sum(axis=0))

    def packed(self) -> bytes:
        """All sums as they travel: 64 bits each, little-endian, those of regions first."""
        return self._sums.astype("<u8").tobytes()


@dataclass(frozen=True, slots=True)
class Damage:
    """Where what arrived differs: layers, tensors (group, part and half joined by `/`), target blocks by group."""

    layers: tuple[int, ...]
    tensors: tuple[str, ...]
    blocks: Mapping[str, tuple[int, ...]]


def damage(chunk: ChunkPlan, ours: bytes, theirs: bytes) -> Damage:
    """Name what differs, from the sums of both sides. Where neighbours share a sum, all of them are named."""
    plan = SumPlan.at_destination(chunk)
    differ = np.frombuffer(ours, "<u8") != np.frombuffer(theirs, "<u8")
    regions = np.repeat(differ[: plan.region_sums], plan.region_step)
    rows = np.repeat(differ[plan.region_sums :], plan.row_step)
    layers: set[int] = set()
    tensors: set[str] = set()
    blocks: dict[str, set[int]] = {}
    for part, summed in zip(chunk.parts, plan.parts, strict=True):
        key = part.slice.key
        for place in part.slice.places[regions[summed.first_region :][: summed.regions]]:
            layers.add(int(place[0]))
            tensors.add("/".join(filter(None, (key.group, key.part, KV_ORDER[int(place[1])]))))
        wrong = part.rows.table[rows[summed.first_row :][: summed.rows], 2] // key.dst_rows.block_ratio
        if len(wrong):
            blocks.setdefault(key.group, set()).update(cast("list[int]", wrong.tolist()))
    named = {group: tuple(sorted(ids)) for group, ids in blocks.items()}
    return Damage(tuple(sorted(layers)), tuple(sorted(tensors)), named)
