"""Random pairs of caches of one layer group, one moved into the other, to be added up on both sides."""

import numpy as np
import torch
from packing import copy, pack

from kvxfer.geometry import CacheGeometry, CacheTensor, ChunkPlan, Interleave, PairPlan, Span, common

LAYOUTS = {
    "NHD": ("layer block token head dim", lambda block, heads, dim: (block, heads, dim)),
    "HND": ("layer block head token dim", lambda block, heads, dim: (heads, block, dim)),
    "DNH": ("layer block dim token head", lambda block, heads, dim: (dim, block, heads)),
    "split": ("layer block head dim/2 token dim%2", lambda block, heads, dim: (heads, dim // 2, block, 2)),
}
FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class Side:
    """A cache in memory of its own, on any device."""

    def __init__(self, rng, layout, block, heads, dim, dtype, *, device="cpu", scale=None):
        axes, shape = LAYOUTS[layout]
        shape = (2, 8, *shape(block, heads, dim))
        gap = int(rng.choice([0, 1, 8]))  # elements before it, so that it is not always aligned
        count = int(np.prod(shape))
        raw = torch.from_numpy(rng.integers(0, 256, (count + gap) * dtype.itemsize, dtype=np.uint8)).to(device)
        self.memory = raw.view(dtype)[gap:].reshape(shape)
        number = None if scale is None else torch.tensor(scale)
        tensor = CacheTensor(
            self.memory, axes, layers=range(2), heads=range(heads), scale=number, tokens=Interleave(0, 1, 1)
        )
        self.geometry = CacheGeometry.of([tensor])


def pair_of(
    seed: int, *, converting: bool = False, device: str = "cpu", scale: int = 1
) -> tuple[Side, Side, ChunkPlan]:
    """Two sides and all of a request between them as one chunk; not moved yet.

    Args:
        seed: Names it.
        converting: Whether the two store other dtypes.
        device: Where both are.
        scale: How many times larger than the smallest.
    """
    rng = np.random.default_rng(seed)
    heads, dim = int(rng.integers(1, 4)), 2 * int(rng.choice([1, 3, 4, 8, 33])) * scale
    plain = rng.choice(["int8", "bfloat16", "float32", "float64"])
    names = [str(rng.choice(FLOATS)) if converting else str(plain) for _ in range(2)]
    scales = [float(np.float32(rng.uniform(0.1, 3))) if converting else None for _ in range(2)]
    block = 4 * int(rng.choice([1, 2]))
    near, far = [
        Side(rng, str(rng.choice(list(LAYOUTS))), size, heads, dim, getattr(torch, name), device=device, scale=factor)
        for size, name, factor in zip((block, 4), names, scales, strict=True)
    ]
    stop = int(rng.integers(1, 4 * 8))
    start = int(rng.integers(0, stop))
    ids = [rng.permutation(8), rng.permutation(8)]
    ends = near.geometry, far.geometry
    pair = PairPlan(*ends, common(*ends), convert=converting)
    spans = [{"default": Span(some)} for some in ids]
    return near, far, pair.bind(spans[0], spans[1], range(start, stop)).whole


def moved(seed: int, *, converting: bool = False) -> tuple[Side, Side, ChunkPlan]:
    """The same on a CPU, moved."""
    found = pair_of(seed, converting=converting)
    copy(pack(found[2].copy()))
    return found
