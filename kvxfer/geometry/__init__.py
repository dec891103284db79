"""Layouts and plans: any strided cache to any other, as the intersection of two arrays in global coordinates.

    describe    CacheTensor, Group, Interleave -> CacheGeometry         (axes.py, cache.py)
    group       a list of tensors, one a layer -> list of CacheTensor   (cache.py)
    resolve     who sends what, and what two ranks have in common       (intersect.py)
    plan        two block lists and a token range, cut into chunks      (plan.py, rows.py)
    tables      what a copy kernel needs                                (copyplan.py)
    check       whether what arrived is what was sent                   (plan.py)

Pure numpy; torch enters only as the tensor inside a `CacheTensor`.
"""

from kvxfer.geometry.axes import LAYOUTS, Interleave, TensorSpec
from kvxfer.geometry.cache import CacheGeometry, CacheTensor, Group, group
from kvxfer.geometry.copyplan import CopyPlan, Pieces, sample
from kvxfer.geometry.intersect import Holders, Selection, common, differences, resolve
from kvxfer.geometry.plan import (
    ChunkGrid,
    ChunkPlan,
    Damage,
    PairPlan,
    SumPlan,
    TransferPlan,
    check_state,
    cut_digest,
    damage,
    selected,
)
from kvxfer.geometry.rows import BlockLists, Blocks, Span, check_spans, check_tokens, normalise_blocks, token_count

__all__ = [
    "LAYOUTS",
    "BlockLists",
    "Blocks",
    "CacheGeometry",
    "CacheTensor",
    "ChunkGrid",
    "ChunkPlan",
    "CopyPlan",
    "Damage",
    "Group",
    "Holders",
    "Interleave",
    "PairPlan",
    "Pieces",
    "Selection",
    "Span",
    "SumPlan",
    "TensorSpec",
    "TransferPlan",
    "check_spans",
    "check_state",
    "check_tokens",
    "common",
    "cut_digest",
    "damage",
    "differences",
    "group",
    "normalise_blocks",
    "resolve",
    "sample",
    "selected",
    "token_count",
]
