"""One request between two engines of unequal layouts, and what it must make of every byte; see `far`."""

from collections.abc import Sequence

import torch
from far import GROWTH, JUNK, event_after, now_on, spoiler
from stage import KEY, Cache, Copied
from stored import Converted, Stored

from kvxfer.tickets import EngineCard, Issuer

TWO_TO_ONE = ([range(3), range(3, 8)], [range(8)])
ONE_TO_TWO = ([range(8)], [range(5), range(5, 8)])
SIZES = {"arena_bytes": "2MiB", "chunk_bytes": "128KiB", "window": 3}
LAYERS = range(3)
IDS = [19, 3, 1, 17, 5, 4, 8, 2, 6, 7, 0, 9]
"""Source blocks of 16 tokens."""
INTO = [9, 0, 4, 2, 1, 7]
"""Destination blocks of 32 tokens; 3, 5, 6 and 8 are nobody's business."""
TOKENS = range(5, 12 * 16 - 3)
CONVERSIONS = [("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16"), ("float16", "bfloat16")]


def sources(heads):
    return [Cache(blocks=20, block_tokens=16, layers=LAYERS, heads=part, dim=64) for part in heads]


def targets(heads):
    return [Cache(blocks=10, block_tokens=32, layers=LAYERS, heads=part, dim=64, layout="HND") for part in heads]


def tickets(card):
    return Issuer(EngineCard.from_dict(card), KEY)


class Move:
    """One request from the engine over there to the engine here."""

    def __init__(self, source_caches, near, mirrors, into=INTO, tokens=TOKENS):
        self.sources, self.near, self.into, self.tokens = source_caches, near, into, tokens
        self.expected = [
            Copied(mirror, placed) for mirror, placed in zip(mirrors, near.caches[-len(mirrors) :], strict=True)
        ]

    def bring(self, layers: Sequence[int] = LAYERS):
        """What must have landed once these layers have."""
        for one in self.expected:
            for source in self.sources:
                one.bring(source, IDS, self.into, self.tokens, layers=layers)
        return self

    def check(self):
        for one in self.expected:
            one.check()

    def fetch(self, ticket, *, late=False, **options):
        """Start to fetch it on every rank; `late`: into blocks whose last use ends a while after this returns."""
        transfers = []
        for worker, one in zip(self.near.workers[-len(self.expected) :], self.expected, strict=True):
            after = event_after(one.placed, spoiler(one.placed, self.into)) if late else now_on(one.placed)
            transfers.append(worker.start_fetch(ticket, self.into, tokens=self.tokens, after=after, **options))
        return transfers

    def late(self, *, prefill=True, decode=True):
        """What becomes of the source before a late offer is ready, and of the destination before a late fetch is."""
        for source in self.sources if prefill else []:
            for memory in source.memory.values():
                memory.add_(GROWTH)
        for one in self.expected if decode else []:
            for memory in one.expected.values():
                memory.permute(one.cache._order)[:, self.into] = JUNK
        return self


async def begin(far, near, split, *, there="cpu", here="cpu", **config):
    """Both engines, open, on these devices."""
    theirs, ours = sources(split[0]), targets(split[1])
    card = await far.open("prefill", theirs, device=there, **{**SIZES, **config})
    await near.open("decode", ours, device=here, **{**SIZES, **config})
    return tickets(card), Move(theirs, near, ours)


async def bring_converted(far, near, dtypes, there="cpu", here="cpu"):
    """Heads from two ranks, with scales of their own on both sides, from NHD and 16 tokens to HND and 32."""
    theirs, ours = (getattr(torch, dtype) for dtype in dtypes)
    given = [
        Stored(theirs, "head", blocks=20, block_tokens=16, layers=LAYERS, heads=heads, dim=64, seed=3 + heads.start)
        for heads in TWO_TO_ONE[0]
    ]
    mirror = Stored(ours, "head", blocks=10, block_tokens=32, layers=LAYERS, heads=range(8), dim=64, layout="HND")
    issuer = tickets(await far.open("prefill", given, device=there, **SIZES))
    await near.open("decode", [mirror], device=here, convert=True, **SIZES)
    expected = Converted(mirror, near.caches[0])
    for rank, one in enumerate(given):
        expected.bring(one, IDS, INTO, TOKENS)
        await far.offer(rank, "r", IDS, tokens=len(IDS) * 16)
    after = now_on(near.caches[0])
    result = await near.workers[0].fetch(issuer.ticket("r"), INTO, tokens=TOKENS, after=after, timeout=60)
    expected.check()
    assert result.stats.route == ("mapped" if here[:3] == there[:3] else "staged")
    for rank in range(len(given)):
        assert (await far.released(rank, "r"))[0] == "Released"
