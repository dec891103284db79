"""The pairs of engines that kvxfer promises to connect, by name: any layout to any layout, row by row.

A case is a model, how a prefill engine holds it, how a decode engine does, and a request. Planner tests, transfers and
byte counts all take their cases from here.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from layouts import HND, NHD, PLAIN, Layout, Tensors, behind_each_other, by_group, by_part, hybrid, row_by_row, strided


@dataclass(frozen=True)
class Engine:
    """How one side holds a model. Ranks are numbered stage by stage, then by tensor, then by context parallelism."""

    layout: Layout = NHD  # of every rank's memory
    tp: int = 1  # ranks that share the heads; more ranks than heads replicate them
    stages: Sequence[range] = (range(2),)  # layers of each pipeline stage
    cp: int = 1  # ranks that share the tokens
    chunk: int = 1  # tokens of a turn, under context parallelism
    block: int | Mapping[str, int] = 4  # tokens that one block id covers on a rank; by group where they differ
    kernel_blocks: int = 1  # kernel blocks of one block id
    # what the block list of a class with a window has for blocks before it: nothing (`span`), the null block (`null`),
    # or nothing and also not the tokens of the first block that lie before it (`exact`)
    window: str = "span"
    first: int = 0  # first token of the block lists that have no window

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.stages) * self.tp * self.cp

    def block_of(self, group: str) -> int:
        """Tokens that one block id of a group covers on a rank."""
        return self.block if isinstance(self.block, int) else self.block[group]


@dataclass(frozen=True)
class Case:
    """Two engines and a request."""

    row: str  # what is promised
    name: str  # which case of it
    model: tuple[Tensors, ...]  # all classes of the model's cache
    prefill: Engine  # who holds the request
    decode: Engine  # who needs it
    tokens: range  # what is fetched
    senders: tuple[tuple[int, ...], ...] = ((0,),)  # for each decode rank, the prefill ranks that it asks
    offered: int | None = None  # tokens on offer; None for as many as are fetched

    def __str__(self) -> str:
        return f"{self.row}: {self.name}"


def attention(heads: int, *, dim: int = 8, layers: Sequence[int] = range(2), **rest: object) -> Tensors:
    """K and V."""
    return replace(Tensors({"k": dim, "v": dim}, layers, heads), **rest)


def latent(dim: int, *, layers: Sequence[int] = range(2), **rest: object) -> Tensors:
    """A cache without heads and without halves, as MLA has."""
    return replace(Tensors({"": dim}, layers), **rest)


def state(part: str, heads: int, dim: int, *, layers: Sequence[int], **rest: object) -> Tensors:
    """State of heads (or channels), one slot a request."""
    return replace(Tensors({"": dim}, layers, heads, group="state", part=part, state=True), **rest)


def even(layers: int, stages: int) -> tuple[range, ...]:
    """Stages of equally many layers."""
    return tuple(range(a, b) for a, b in pairwise(range(0, layers + 1, layers // stages)))


# --- tensor parallelism


def _ratios(kind, tokens, *rows):
    return [
        Case(
            kind,
            f"{heads} heads, {prefill}:{decode}",
            (attention(heads),),
            Engine(NHD, tp=prefill, block=4),
            Engine(HND, tp=decode, block=8),
            tokens,
            senders,
        )
        for heads, prefill, decode, senders in rows
    ]


TP = _ratios(
    "TP ratios",
    range(3, 22),
    (8, 1, 1, ((0,),)),
    (8, 2, 1, ((0, 1),)),
    (8, 1, 2, ((0,), (0,))),
    (8, 4, 2, ((0, 1), (2, 3))),
    (8, 2, 4, ((0,), (0,), (1,), (1,))),
    (8, 4, 4, ((0,), (1,), (2,), (3,))),
    (8, 8, 1, ((0, 1, 2, 3, 4, 5, 6, 7),)),
    (12, 3, 1, ((0, 1, 2),)),
    (8, 3, 2, ((0, 1), (1, 2))),
)

GQA = _ratios(
    "GQA replication",
    range(1, 19),
    (2, 4, 2, ((0,), (3,))),
    (2, 4, 1, ((0, 2),)),
    (2, 2, 4, ((0,), (0,), (1,), (1,))),
    (2, 4, 4, ((0,), (1,), (2,), (3,))),
    (1, 2, 4, ((0,), (1,), (0,), (1,))),
    (2, 6, 4, ((0,), (1,), (5,), (3,))),
)

_DEEPSEEK = (
    latent(36, group="full"),
    latent(128, dtype=torch.uint8, group="full", part="indexer"),
    latent(1, dtype=torch.float32, group="full", part="indexer.scale"),
)
_INDEXER = ("indexer", "indexer.scale")
_LATENT_NHD = strided("layer | block token dim")
_LATENT_CROSS = strided("| block layer token dim")

MLA = [
    Case(
        "MLA",
        f"{prefill}:{decode}",
        (latent(36),),
        Engine(_LATENT_NHD, tp=prefill, block=4),
        Engine(_LATENT_CROSS, tp=decode, block=8),
        range(5, 23),
        senders,
    )
    for prefill, decode, senders in (
        (1, 2, ((0,), (0,))),
        (2, 1, ((0,),)),
        (4, 2, ((0,), (1,))),
        (2, 4, ((0,), (1,), (0,), (1,))),
    )
]

# --- several groups

_SLIDING = (attention(8, group="full", layers=(0, 2)), attention(4, group="window", layers=(1, 3), dim=16, window=12))
_FOUR = (range(4),)
_SCALED = (attention(4, dtype=torch.float8_e4m3fn, dim=16), attention(4, dtype=torch.float32, dim=1, part="scale"))

GROUPS = [
    Case(
        "layer groups",
        "MLA and indexer rows of 132 bytes, row by row into values behind each other",
        _DEEPSEEK,
        Engine(by_part((("",), _LATENT_NHD), (_INDEXER, row_by_row)), block=4),
        Engine(by_part((("",), _LATENT_CROSS), (_INDEXER, behind_each_other("token dim", "token dim"))), block=16),
        range(3, 37),
    ),
    Case(
        "layer groups",
        "MLA and indexer values behind each other, into rows of 132 bytes",
        _DEEPSEEK,
        Engine(by_part((("",), _LATENT_NHD), (_INDEXER, behind_each_other("token dim", "token dim"))), tp=2, block=16),
        Engine(by_part((("",), _LATENT_NHD), (_INDEXER, row_by_row)), tp=2, block=4),
        range(3, 37),
        ((0,), (1,)),
    ),
    Case(
        "layer groups",
        "a replicated MLA indexer of rows of 132 bytes in blocks of its own",
        (attention(4, group="full"), latent(132, dtype=torch.int8, group="indexer", part="indexer")),
        Engine(by_group(full=NHD, indexer=_LATENT_NHD), tp=2, block={"full": 4, "indexer": 16}),
        Engine(by_group(full=HND, indexer=_LATENT_CROSS), tp=2, block={"full": 16, "indexer": 4}),
        range(2, 31),
        ((0,), (1,)),
    ),
    Case(
        "layer groups",
        "replicated MLA and attention that is divided, in one request",
        (attention(8, group="full"), latent(36, group="latent", layers=(2, 3))),
        Engine(by_group(full=NHD, latent=_LATENT_NHD), tp=4, stages=_FOUR),
        Engine(by_group(full=HND, latent=_LATENT_CROSS), tp=2, stages=_FOUR, block=8),
        range(2, 21),
        ((0, 1), (1, 2, 3)),
    ),
    *(
        Case(
            "layer groups",
            f"full attention and a sliding window, blocks of {theirs} ({how}) into {ours} ({there})",
            _SLIDING,
            Engine(by_group(full=NHD, window=NHD), tp=tp, stages=_FOUR, block=theirs, window=how),
            Engine(by_group(full=HND, window=NHD), stages=_FOUR, block=ours, window=there),
            range(start, stop),
            (tuple(range(tp)),),
        )
        for theirs, how, ours, there, tp, start, stop in (
            (4, "span", 4, "span", 1, 0, 41),
            (8, "span", 4, "span", 2, 5, 41),
            (4, "span", 8, "exact", 1, 0, 41),
            (8, "exact", 16, "exact", 2, 3, 41),
            (16, "exact", 4, "exact", 1, 0, 39),
            (4, "null", 16, "span", 1, 0, 41),
            (4, "null", 4, "span", 2, 0, 38),
            (8, "null", 8, "span", 1, 3, 37),
        )
    ),
    Case(
        "layer groups",
        "a window at the destination alone",
        _SLIDING,
        Engine(stages=_FOUR, block=8, window="all"),
        Engine(HND, stages=_FOUR, block=4),
        range(41),
    ),
    Case(
        "layer groups",
        "a window that is interleaved over ranks",
        _SLIDING,
        Engine(stages=_FOUR, cp=2, chunk=2, window="exact"),
        Engine(HND, stages=_FOUR, cp=3, chunk=1, block=8, window="exact"),
        range(41),
        ((0, 1),) * 3,
    ),
    Case(
        "layer groups",
        "quantisation scales as a part",
        _SCALED,
        Engine(by_part((("",), NHD), (("scale",), strided("layer kv | block head token dim"))), tp=2),
        Engine(by_part((("",), HND), (("scale",), strided("layer | block token kv head dim"))), block=8),
        range(3, 22),
        ((0, 1),),
    ),
]

# --- layouts

BLOCKS = [
    Case(
        "block size",
        f"{theirs} into {ours}, tokens {start} to {stop}",
        (attention(2),),
        Engine(NHD, block=theirs),
        Engine(HND, block=ours),
        range(start, stop),
    )
    for theirs, ours in ((16, 64), (64, 16), (16, 48), (32, 16))
    for start, stop in ((7, 121), (0, 64))
]

_EVERY = tuple(attention(2, dim=16, group=name) for name in PLAIN)

LAYOUTS = [
    Case(
        "layout", f"{name}, into all", _EVERY, Engine(layout, block=4), Engine(by_group(**PLAIN), block=8), range(3, 13)
    )
    for name, layout in PLAIN.items()
]

# --- pipeline stages

_UNEVEN = (range(3), range(3, 4))

STAGES = [
    Case(
        "pipeline stages",
        name,
        (attention(4, layers=range(4)),),
        Engine(NHD, tp=theirs, stages=stages),
        Engine(strided("| block layer kv head token dim"), tp=ours, stages=into, block=8),
        range(2, 21),
        senders,
    )
    for name, theirs, stages, ours, into, senders in (
        ("2:1", 1, even(4, 2), 1, _FOUR, ((0, 1),)),
        ("1:2", 1, _FOUR, 1, even(4, 2), ((0,), (0,))),
        ("4:2", 1, even(4, 4), 1, even(4, 2), ((0, 1), (2, 3))),
        ("uneven, 3+1 into 2+2", 1, _UNEVEN, 1, even(4, 2), ((0,), (0, 1))),
        ("uneven, 2+2 into 3+1", 1, even(4, 2), 1, _UNEVEN, ((0, 1), (1,))),
        ("2 of TP 1 into 1 of TP 2", 1, even(4, 2), 2, _FOUR, ((0, 1), (0, 1))),
        ("1 of TP 4 into 2 of TP 2", 4, _FOUR, 2, even(4, 2), ((0, 1), (2, 3), (0, 1), (2, 3))),
        ("3+1 of TP 2 into 2+2 of TP 1", 2, _UNEVEN, 1, even(4, 2), ((0, 1), (0, 1, 2, 3))),
    )
]

# --- hybrid state


def _mamba(*, groups: int = 4) -> tuple[Tensors, ...]:
    """Two layers of attention and two of Mamba: convolution over x, B and C, and the state of 4 heads."""
    layers = (0, 2)
    return (
        attention(4, layers=(1, 3), group="full"),
        state("conv.x", 16, 3, layers=layers),
        state("conv.B", groups, 3, layers=layers),
        state("conv.C", groups, 3, layers=layers),
        state("ssm", 4, 16, layers=layers, dtype=torch.float32),
    )


_TIME, _CHANNEL = (
    hybrid("kv token head dim", channels_first=False),
    hybrid("kv head token dim", channels_first=True, pad=16),
)

STATE = [
    Case(
        "hybrid state",
        name,
        model,
        Engine(layout, tp=theirs, stages=_FOUR),
        Engine(into, tp=ours, stages=_FOUR, block=8),
        range(2, 21),
        senders,
    )
    for name, model, layout, theirs, into, ours, senders in (
        ("channel by channel into time by time", _mamba(), _CHANNEL, 1, _TIME, 1, ((0,),)),
        ("time by time into channel by channel", _mamba(), _TIME, 1, _CHANNEL, 1, ((0,),)),
        ("channel by channel", _mamba(), _CHANNEL, 2, _CHANNEL, 2, ((0,), (1,))),
        ("TP 2:1", _mamba(), _TIME, 2, _CHANNEL, 1, ((0, 1),)),
        ("TP 1:2", _mamba(), _CHANNEL, 1, _TIME, 2, ((0,), (0,))),
        ("TP 4:2, time by time", _mamba(), _TIME, 4, _TIME, 2, ((0, 1), (2, 3))),
        ("TP 2:4, B and C replicated", _mamba(groups=1), _CHANNEL, 2, _TIME, 4, ((0,), (0, 1), (0, 1), (1,))),
    )
]

STATE += [
    replace(case, name=f"{name}, {case.name}", tokens=tokens)
    for name, tokens, case in (
        ("a prefix held", range(11, 21), STATE[3]),
        ("every token held", range(21, 21), STATE[0]),
        ("every token held", range(21, 21), STATE[4]),
    )
]

# --- context parallelism


def _context(prefill: tuple[int, int, int], decode: tuple[int, int, int]) -> tuple[Engine, Engine]:
    (cp, chunk, tp), (into, turn, ours) = prefill, decode
    return (Engine(NHD, tp=tp, cp=cp, chunk=chunk, block=4), Engine(HND, tp=ours, cp=into, chunk=turn, block=8))


CONTEXT = [
    Case("context parallel", name, (attention(4),), *_context(theirs, ours), tokens, senders)
    for name, theirs, ours, tokens, senders in (
        ("2 at the source, chunks of 1", (2, 1, 1), (1, 1, 1), range(3, 42), ((0, 1),)),
        ("2 at the source, chunks of a block", (2, 4, 1), (1, 1, 1), range(3, 42), ((0, 1),)),
        ("2 at the destination, chunks of 1", (1, 1, 1), (2, 1, 1), range(3, 42), ((0,), (0,))),
        ("2 at the destination, chunks of a block", (1, 1, 1), (2, 8, 1), range(3, 42), ((0,), (0,))),
        ("2 against 3, chunks of 1", (2, 1, 1), (3, 1, 1), range(5, 62), ((0, 1),) * 3),
        ("3 against 2, a block against 1", (3, 4, 1), (2, 1, 1), range(5, 62), ((0, 1, 2),) * 2),
        ("2 against 2, a block of each", (2, 4, 1), (2, 8, 1), range(5, 62), ((0, 1),) * 2),
        ("2 at the source, in halves", (2, 32, 1), (1, 1, 1), range(3, 62), ((0, 1),)),
        ("2 against 2, equal turns", (2, 4, 1), (2, 4, 1), range(3, 42), ((0,), (1,))),
        ("2 against 4, equal turns", (2, 8, 1), (4, 8, 1), range(3, 70), ((0,), (1,), (0,), (1,))),
        ("a prompt shorter than a turn", (3, 4, 1), (2, 8, 1), range(1, 6), ((0, 1, 2),) * 2),
        ("with TP, 2 x 2 against 1", (2, 4, 2), (1, 1, 1), range(3, 42), ((0, 1, 2, 3),)),
        ("with TP, 2 against 2 x 2", (2, 1, 1), (2, 8, 2), range(3, 42), ((0, 1),) * 4),
    )
]

# --- what is fetched of what is offered

PREFIX = [
    Case(
        "prefix",
        name,
        (attention(4),),
        Engine(NHD, block=4),
        Engine(HND, block=8, first=first),
        tokens,
        offered=offered,
    )
    for name, first, tokens, offered in (
        ("held up to the end of a block", 0, range(16, 43), 43),
        ("held up to the inside of a block", 0, range(19, 43), 43),
        ("held up to the inside of a block, with a list that begins there", 16, range(19, 43), 43),
        ("all but the last token held", 40, range(42, 43), 43),
        ("prefill holds more than is asked", 0, range(21), 43),
        ("both", 8, range(11, 21), 43),
        ("everything held", 0, range(43, 43), 43),
        ("everything held, up to the end of a block", 0, range(48, 48), 48),
    )
]

KERNEL = [
    Case(
        "logical and kernel blocks",
        name,
        (attention(2),),
        Engine(NHD, block=theirs, kernel_blocks=ratio),
        Engine(HND, block=ours, kernel_blocks=own),
        range(7, 189),
    )
    for name, theirs, ratio, ours, own in (
        ("64 over 16, into 16", 64, 4, 16, 1),
        ("16, into 64 over 16", 16, 1, 64, 4),
        ("64 over 16, into 32 over 8", 64, 4, 32, 4),
        ("64 over 32, into 64 over 16", 64, 2, 64, 4),
    )
]

CASES: Mapping[str, Case] = {
    str(case): case
    for row in (TP, GQA, MLA, GROUPS, BLOCKS, LAYOUTS, STAGES, STATE, CONTEXT, PREFIX, KERNEL)
    for case in row
}


def a_third(first: int) -> list[str]:
    """Names of cases for slow tests: all of them with ROWS=all, and else a third of each row, from this one on."""
    if os.environ.get("ROWS") == "all":
        return list(CASES)
    rows = [list(names) for _, names in groupby(CASES, lambda name: CASES[name].row)]
    return [name for names in rows for name in names[min(first, len(names) - 1) :: 3]]
