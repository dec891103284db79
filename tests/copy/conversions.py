"""What plans that convert mean, element by element: torch's own arithmetic at every address."""

import numpy as np
import torch
from copy_plans import converting

from kvxfer.geometry.copyplan import Box, CopyPlan, Segment
from kvxfer.names import CONVERTIBLE

NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


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
    e = converting(src, dst)
    step = np.arange(regions)[:, None] * np.asarray([count * e.src_bytes, count * e.dst_bytes])
    bases = np.asarray([[at, to]], np.int64) + step
    box = Box((), 0, 0, count, token_in_run=False, elements=e)
    return CopyPlan(
        (Segment(bases, np.asarray([[0, 0, 0, 0, 1]], np.int64), 0, 0, box, np.asarray(factors, np.float32)),)
    )


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
