"""No byte of another request leaves: of what staging memory held before, chunks and measurements bring nothing.

What was moved before is played by a mark that fills all staging memory of the prefill rank.
"""

import ctypes

import pytest
import torch
from inside import staging
from stage import Cache, Copied, quiet

from kvxfer.geometry.copyplan import STAGING_ALIGNMENT

MARK = bytes.fromhex("badc0ffee0ddf00d")


def fill(worker):
    """Put the mark into all memory that this worker sends from."""
    arena = staging(worker, "send")
    ctypes.memmove(arena.address, MARK * (arena.length // len(MARK)), arena.length)


def received(worker):
    """All memory that this worker receives into."""
    arena = staging(worker, "receive")
    return ctypes.string_at(arena.address, arena.length)


@pytest.mark.parametrize("tokens", [range(8), range(2, 8), range(6), range(3, 6), range(1, 2)], ids=str)
@pytest.mark.parametrize("chunk_bytes", ["1KiB", "2KiB"])
async def test_gaps_of_chunks_bring_nothing(stage, tokens, chunk_bytes):
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), route="staged", chunk_bytes=chunk_bytes)
    fill(prefill)
    await stage.bring(prefill, decode, tokens=tokens, offered={"tokens": 8})
    assert MARK not in received(decode)
    await quiet(prefill, decode)


async def test_the_room_between_segments_brings_nothing(stage):
    """Three heads of three bytes: segments end anywhere, and the next one begins at a multiple of 16."""
    caches = [
        [
            Cache(heads=range(3), dim=3, dtype=torch.uint8),
            Cache(layout="MLA", heads=range(1), dim=5, dtype=torch.int8, layers=[7]),
        ]
        for _ in range(2)
    ]
    prefill, decode = await stage.pair(*caches, route="staged")
    fill(prefill)
    prefill.offer("r", [1], tokens=4)
    copied = [Copied(target).bring(source, [1], [3], range(4)) for source, target in zip(*caches, strict=True)]
    await decode.fetch(prefill.engine.ticket("r"), [3], tokens=range(4), timeout=20)
    for one in copied:
        one.check()
    assert 4 * 5 % STAGING_ALIGNMENT
    assert MARK[:4] not in received(decode)
