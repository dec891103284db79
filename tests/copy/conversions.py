"""Random plans that convert, and what they mean, element by element: torch's own arithmetic at every address."""

import numpy as np
import torch
from copy_plans import nest, random_shape

from kvxfer.geometry.copyplan import Box, BoxAxis, CopyPlan, Elements, Segment
from kvxfer.names import CONVERTIBLE

PAIRS = [(src, dst) for src in CONVERTIBLE for dst in CONVERTIBLE]
NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def elements(src, dst):
    return Elements(CONVERTIBLE[src], CONVERTIBLE[dst], src, dst)


def reference(data: torch.Tensor, dst: str, multiply: float, divide: float) -> torch.Tensor:
    """A tensor of floats as torch converts it; `dst` saturates if it has 8 bits, and every NaN is `NAN`."""
    target = getattr(torch, dst)
    values = data.to(torch.float32) * torch.tensor([multiply], dtype=torch.float32)
    values = values / torch.tensor([divide], dtype=torch.float32)
    if target.itemsize == 1:
        values = torch.clamp(values, -torch.finfo(target).max, torch.finfo(target).max)
    bits = values.to(target).view(INTEGERS[target.itemsize])
    return torch.where(values.isnan(), NAN[dst], bits).to(bits.dtype).view(target)


def patterns(dtype: str, seed: int = 0) -> torch.Tensor:
    """Every element of 8 or 16 bits; of float32 all that other dtypes have, what lies around them, and random ones."""
    if CONVERTIBLE[dtype] == 1:
        return torch.arange(-128, 128).to(torch.int8).view(getattr(torch, dtype))
    if CONVERTIBLE[dtype] == 2:
        return torch.arange(-32768, 32768).to(torch.int16).view(getattr(torch, dtype))
    found = torch.cat([patterns(other).float() for other in CONVERTIBLE if other != dtype])
    halves = torch.cat([patterns(other).float() for other in CONVERTIBLE if CONVERTIBLE[other] == 1])
    between = ((halves[1:].double() + halves[:-1].double()) / 2).float()
    bits = torch.cat([found, between]).view(torch.int32)
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randint(-(2**31), 2**31, (1 << 14,), generator=rng).to(torch.int32)
    return torch.cat([bits, bits + 1, bits - 1, noise]).view(torch.float32)


def line(src, dst, at: int, to: int, count: int, factors=((1.0, 1.0),), regions=1) -> CopyPlan:
    """`regions` runs of `count` elements behind each other."""
    e = elements(src, dst)
    step = np.arange(regions)[:, None] * np.asarray([count * e.src_bytes, count * e.dst_bytes])
    bases = np.asarray([[at, to]], np.int64) + step
    box = Box((), 0, 0, count, token_in_run=False, elements=e)
    return CopyPlan(
        (Segment(bases, np.asarray([[0, 0, 0, 0, 1]], np.int64), 0, 0, box, np.asarray(factors, np.float32)),)
    )


def random_plan(seed: int, src_address: int, dst_address: int, nbytes: int, *, most: int = 8192) -> CopyPlan:
    """Segments of some dtypes, strides, cuts and factors, one behind the other in two arenas of `nbytes`."""
    rng = np.random.default_rng(seed)
    segments: list[Segment] = []
    src_at, dst_at = 0, 0
    for _ in range(int(rng.integers(1, 4))):
        e = elements(*PAIRS[int(rng.integers(len(PAIRS)))])
        shape = random_shape(rng, most_bytes=most)
        counts = {"region": shape.regions, "block": shape.rows, "token": shape.tokens + int(rng.integers(0, 3))}
        counts |= {str(n): count for n, count in enumerate(shape.outer)}
        innermost = "token" if shape.token_in_run else None  # strides and extents are in elements
        sides = [nest(rng, counts, shape.run, shape.unit, innermost=innermost) for _ in range(2)]
        strides, extents = [side.strides for side in sides], [side.extent for side in sides]
        lengths = rng.integers(1, shape.tokens + 1, size=shape.rows)
        starts = [rng.integers(0, counts["token"] - lengths + 1) for _side in range(2)]
        rows = np.stack(
            [rng.permutation(shape.rows), starts[0], rng.permutation(shape.rows), starts[1], lengths], axis=1
        ).astype(np.int64)
        s, d = e.src_bytes, e.dst_bytes
        align = int(rng.choice([1, 8]))
        src_at, dst_at = -(-src_at // (s * align)) * s * align, -(-dst_at // (d * align)) * d * align
        number = np.arange(shape.regions)
        bases = np.stack([src_address + src_at + number * strides[0]["region"] * s,
                          dst_address + dst_at + number * strides[1]["region"] * d], axis=1)  # fmt: skip
        if max(src_at + extents[0] * s, dst_at + extents[1] * d) > nbytes:
            break
        outer = tuple(BoxAxis(n, strides[0][str(k)] * s, strides[1][str(k)] * d) for k, n in enumerate(shape.outer))
        box = Box(outer, strides[0]["token"] * s, strides[1]["token"] * d, shape.run, shape.token_in_run, e)
        factors = np.exp2(rng.normal(0, 4, (shape.regions, 2))).astype(np.float32)
        segments.append(Segment(bases, rows, strides[0]["block"] * s, strides[1]["block"] * d, box, factors))
        src_at, dst_at = src_at + extents[0] * s, dst_at + extents[1] * d
    return CopyPlan(tuple(segments))


def expected(plan: CopyPlan, src, src_address: int, dst, dst_address: int):
    """What `dst` (bytes) must be afterwards, by the formula of `copyplan` and none of its code."""
    result = dst.copy()
    for segment in plan.segments:
        box, e = segment.box, segment.box.elements
        assert segment.factors is not None
        for (src_base, dst_base), (multiply, divide) in zip(segment.regions, segment.factors, strict=True):
            for src_block, src_first, dst_block, dst_first, tokens in segment.rows.tolist():
                shape = (tokens, *(axis.count for axis in box.outer), box.run)
                index = np.indices(shape).reshape(len(shape), -1)
                at = index.T @ np.asarray([box.src_token, *(axis.src for axis in box.outer), e.src_bytes])
                to = index.T @ np.asarray([box.dst_token, *(axis.dst for axis in box.outer), e.dst_bytes])
                at += src_base - src_address + src_block * segment.src_block + src_first * box.src_token
                to += dst_base - dst_address + dst_block * segment.dst_block + dst_first * box.dst_token
                given = torch.from_numpy(src[at[:, None] + np.arange(e.src_bytes)]).view(getattr(torch, e.src))[:, 0]
                made = reference(given, e.dst, float(multiply), float(divide))
                result[to[:, None] + np.arange(e.dst_bytes)] = made.view(torch.uint8).numpy().reshape(-1, e.dst_bytes)
    return result
