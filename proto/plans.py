"""Plans that both sides must make alike (section 6): what two ranks hold, a request, and what follows from them.

The numbers of a name never change, as those of frames do not.
"""

import math
from typing import Any

from kvxfer.geometry import ChunkGrid, PairPlan, Span, TransferPlan, common
from kvxfer.plans.pairs import encode_spans, geometry_from_wire, selection_to_wire
from kvxfer.protocol.messages import TensorFrame, pack_u32
from proto.frames import plain

__all__ = ["plans"]


def _tensor(axes: str, shape: list[int], layers: list[int], item: int = 2, heads: int = 0, **more: Any) -> TensorFrame:
    """A contiguous tensor whose address is not told; its heads begin with that one of the model's."""
    strides = [item * math.prod(shape[number + 1 :]) for number in range(len(shape))]
    held = shape[axes.split().index("head")] if "head" in axes.split() else 1
    given = {"group": "g", "part": "", "kv": "", "dtype": "bfloat16", "base": 0, **more}
    return TensorFrame(
        axes=axes,
        shape=shape,
        strides=strides,
        layers=pack_u32(layers),
        head_start=heads,
        head_stop=heads + held,
        item_bytes=item,
        **given,
    )


_CASES: list[tuple[str, str, list[TensorFrame], list[TensorFrame], dict[str, tuple[Span, Span]], range, int, int]] = [
    (
        "heads_and_blocks",
        "one decode rank of two, blocks of other sizes, K and V in one tensor and in two",
        [_tensor("layer kv block token head dim", [2, 2, 9, 16, 4, 8], [3, 4], kv="kv")],
        [_tensor("layer block head token dim", [2, 5, 2, 32, 8], [3, 4], heads=2, kv=half) for half in "kv"],
        {"g": (Span([7, 2, 5]), Span([1, 4]))},
        range(5, 41),
        1,
        32,
    ),
    (
        "split_dims",
        "an axis that falls into three factors; the destination begins in its second block",
        [_tensor("block token head dim/4 dim%4", [6, 8, 2, 4, 4], [0])],
        [_tensor("block head dim/8 token dim%8", [6, 2, 2, 8, 8], [0])],
        {"g": (Span([0, 3, 5]), Span([2, 4], 8))},
        range(8, 24),
        1,
        16,
    ),
    (
        "interleaved_tokens",
        "the prefill rank holds every second turn of four tokens, the decode rank all; its second block is padding",
        [_tensor("block token dim", [5, 8, 4], [0], null_block=0, interleave_of=2, interleave_chunk=4)],
        [_tensor("block token dim", [9, 8, 4], [0])],
        {"g": (Span([3, 0, 1]), Span([6, 1, 2, 8, 7]))},
        range(38),
        1,
        8,
    ),
    (
        "rows_of_four_tokens",
        "an index of which a row stands for four tokens, in kernel blocks that are half an id",
        [_tensor("block layer token dim", [12, 2, 4, 2], [1, 5], part="index", tokens_per_row=4, block_ratio=2)],
        [_tensor("layer block token dim", [2, 4, 16, 2], [1, 5], part="index", tokens_per_row=4)],
        {"g": (Span([4, 1]), Span([3, 0]))},
        range(8, 62),
        2,
        64,
    ),
    (
        "state_and_conversion",
        "a slot of state beside tokens that are converted, with scales",
        [
            _tensor("block head dim", [3, 2, 6], [0], item=4, group="s", dtype="float32"),
            _tensor("block token head dim", [4, 8, 2, 4], [1], item=4, dtype="float32"),
        ],
        [
            _tensor("block head dim", [5, 2, 6], [0], item=4, group="s", dtype="float32"),
            _tensor("block token head dim", [7, 4, 2, 4], [1], item=1, dtype="float8_e4m3fn",
                    scale=bytes.fromhex("0000003f00008040")),
        ],
        {"s": (Span([2]), Span([1])), "g": (Span([1, 3]), Span([6, 0, 2, 5]))},
        range(14),
        2,
        16,
    ),
]  # fmt: skip


def plans() -> dict[str, Any]:
    """Every plan, with what both sides hash of it."""
    return {"plans": [_plan(*case) for case in _CASES]}


def _plan(
    name: str,
    note: str,
    prefill: list[TensorFrame],
    decode: list[TensorFrame],
    spans: dict[str, tuple[Span, Span]],
    tokens: range,
    layers_per_chunk: int,
    tokens_per_chunk: int,
) -> dict[str, Any]:
    source, target = geometry_from_wire(prefill), geometry_from_wire(decode)
    selections = common(source, target)
    pair = PairPlan(source, target, selections, convert=True)
    theirs, ours = ({group: both[side] for group, both in spans.items()} for side in (0, 1))
    plan = pair.bind(theirs, ours, tokens)
    grid = ChunkGrid(pair.layers, layers_per_chunk, tokens_per_chunk, tokens.start, tokens.stop)
    return {
        "name": name,
        "note": note,
        "prefill": plain(prefill),
        "decode": plain(decode),
        "selections": plain([selection_to_wire(selection) for selection in selections]),
        "prefill_spans": plain(encode_spans(theirs, pair.groups)),
        "decode_spans": plain(encode_spans(ours, pair.groups)),
        "token_start": tokens.start,
        "token_stop": tokens.stop,
        "layers_per_chunk": layers_per_chunk,
        "tokens_per_chunk": tokens_per_chunk,
        "agreement": pair.agreement(ours, tokens).hex(),
        "digest": plan.digest(grid).hex(),
        "bytes": plan.nbytes,
        "chunks": [_chunk(plan, grid, number) for number in range(grid.chunks)],
    }


def _chunk(plan: TransferPlan, grid: ChunkGrid, number: int) -> dict[str, Any]:
    """What lies in a chunk, and how much that is: the bytes that it carries, and those that it takes in staging."""
    layers, start, stop = grid.of(number)
    cut = plan.chunk(grid, number)
    return {
        "layers": layers,
        "token_start": start,
        "token_stop": stop,
        "bytes": cut.bytes,
        "staged_bytes": cut.staged_bytes,
    }
