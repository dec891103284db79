"""Layouts and plans: any strided cache to any other, as the intersection of two arrays in global coordinates.

    describe    CacheTensor, Group, Interleave -> CacheGeometry         (axes.py, cache.py, overlap.py)
    resolve     who sends what                                          (resolve.py)
    pair        what two ranks have in common                           (intersect.py, factor.py)
    plan        two block lists and a token range, cut into chunks      (plan.py, rows.py, chunks.py)
    tables      what a copy kernel needs                                (copyplan.py)

Caches need not be described one by one:

    group       a list of tensors, one a layer -> list of CacheTensor   (group.py)
    engine      the config of a model -> geometries of all ranks        (models.py, engine.py, layouts.py)

Pure numpy; torch enters only as the tensor inside a `CacheTensor`.
"""

from kvxfer.geometry.cache import CacheGeometry, CacheTensor, Group, Interleave, TensorSpec
from kvxfer.geometry.chunks import STAGING_ALIGNMENT, ChunkGrid, ChunkPlan
from kvxfer.geometry.copyplan import MAX_OUTER_AXES, Box, CopyPlan, Pieces, Segment
from kvxfer.geometry.engine import Engine, EngineLayout, from_hf_config, scattered
from kvxfer.geometry.factor import BoxAxis
from kvxfer.geometry.group import group
from kvxfer.geometry.layouts import LAYOUTS, expand_layout
from kvxfer.geometry.models import ModelCache, Part, read_model
from kvxfer.geometry.plan import PairPlan, TransferPlan, check_state
from kvxfer.geometry.resolve import Selection, resolve
from kvxfer.geometry.rows import BlockLists, Blocks, Span, check_spans, check_tokens, normalise_blocks, token_count

__all__ = [
    "LAYOUTS",
    "MAX_OUTER_AXES",
    "STAGING_ALIGNMENT",
    "BlockLists",
    "Blocks",
    "Box",
    "BoxAxis",
    "CacheGeometry",
    "CacheTensor",
    "ChunkGrid",
    "ChunkPlan",
    "CopyPlan",
    "Engine",
    "EngineLayout",
    "Group",
    "Interleave",
    "ModelCache",
    "PairPlan",
    "Part",
    "Pieces",
    "Segment",
    "Selection",
    "Span",
    "TensorSpec",
    "TransferPlan",
    "check_spans",
    "check_state",
    "check_tokens",
    "expand_layout",
    "from_hf_config",
    "group",
    "normalise_blocks",
    "read_model",
    "resolve",
    "scattered",
    "token_count",
]
