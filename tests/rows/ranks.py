"""A case as ranks with real memory: what they hold, which blocks a request has on each, and what must become of it.

Every byte of a request's cache has a value that follows from its global coordinates, so replicas agree, and what a
destination must hold follows from its own description. Every other byte of a rank's memory is random: the rest of the
pool, blocks that other requests share, padding, guards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import oracle
from catalogue import Case, Engine
from layouts import GUARD, Room, Share, Tensors, room_bytes
from numpy.typing import NDArray

from kvxfer.geometry import CacheGeometry, CacheTensor, Group, Interleave, Span

I64 = NDArray[np.int64]
SPARE_IDS = 4
"""Block ids in a pool that the request does not have."""
_LONGEST = 1 << 10
"""Over every coordinate of a model: layers, heads, rows."""


@dataclass(frozen=True)
class Request:
    """One request, and what is fetched of it."""

    tokens: range  # what is fetched
    offered: int  # tokens on offer
    seed: int = 0  # of block lists and contents

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> "Request":
        """As the case has it."""
        return cls(case.tokens, case.offered or case.tokens.stop, seed)


class Rank:
    """One rank of an engine. `tensors` is the description that the oracle reads, `cache` what a worker is given."""

    def __init__(self, case: Case, engine: Engine, number: int, ids: int) -> None:
        self.number = number
        self.shares = list(_shares(case.model, engine, number, ids))
        room = Room(room_bytes(self.shares))
        self.cache = list(engine.layout(room, self.shares))
        used = room.used + GUARD
        self.memory: NDArray[np.uint8] = room.memory[:used].numpy()  # all of it; `base` is its address
        self.base = int(self.memory.ctypes.data)
        self.null: int | None = ids - 1 if engine.window == "null" else None
        self.groups = [Group(name, self.null) for name in dict.fromkeys(share.of.group for share in self.shares)]
        self.geometry = CacheGeometry.of(self.cache, self.groups)
        self.tensors = [self._plain(tensor) for tensor in self.cache]
        self.blocks: dict[str, oracle.BlockList] = {}  # the current request's block lists
        self.spans: dict[str, Span] = {}  # the same as a caller gives them
        self._pool = ids - (self.null is not None)

    def _plain(self, tensor: CacheTensor) -> dict[str, Any]:
        """What the oracle reads, taken from torch."""
        view, item = tensor.tensor, tensor.tensor.element_size()
        return {
            "group": tensor.group,
            "part": tensor.part,
            "kv": tuple(tensor.kv or ("",)),
            "layers": tuple(tensor.layers),
            "heads": (tensor.heads.start, tensor.heads.stop) if tensor.heads is not None else (0, 1),
            "axes": tensor.axes,
            "shape": tuple(view.shape),
            "strides": tuple(stride * item for stride in view.stride()),
            "base": view.data_ptr() - self.base,
            "item": item,
            "interleave": (tensor.tokens.rank, tensor.tokens.of, tensor.tokens.chunk),
            "ratio": tensor.kernel_blocks_per_id,
            "unit": 1,
            "null": self.null,
        }

    def give(self, lists: Mapping[str, tuple[int, int, int]], seed: int) -> None:
        """Draw the blocks of a request: by group how many ids, of which so many are null, and the first token.

        No id serves two groups, since groups may share memory.
        """
        ids = Random(f"{seed} {self.number}").sample(range(self._pool), self._pool)
        self.blocks = {}
        for group, (count, nulls, first) in lists.items():
            own = [self.null if at < nulls else ids.pop() for at in range(count)]
            self.blocks[group] = ([block for block in own if block is not None], first)
        self.spans = {group: Span(np.asarray(own, np.int64), first) for group, (own, first) in self.blocks.items()}

    @property
    def layers(self) -> list[int]:
        """Every layer of which it holds something."""
        return sorted({layer for share in self.shares for layer in share.layers})

    def added(self, tokens: range, *, last: bool) -> dict[str, Span]:
        """The blocks that come with these tokens while the request is computed; the slot of state with the last."""
        found: dict[str, Span] = {}
        for share in self.shares:
            ids, first = self.blocks[share.of.group]
            upto, before = (
                max(0, -(-_held(share.tokens, token) // share.block) - _held(share.tokens, first) // share.block)
                if share.block
                else len(ids) * last * (token == tokens.stop)
                for token in (tokens.stop, tokens.start)
            )
            found[share.of.group] = Span(ids[before:upto], 0 if tokens.start else first)
        return found

    def cells(self, coder: "Coder", tokens: range | None = None) -> I64:
        """int64 (n, 2): every byte of the current request's cache here, as (offset, code of its coordinates).

        Args:
            coder: Numbers the coordinates.
            tokens: Only what a fetch of these tokens is to bring; None for all that the block lists address.
        """
        found = [np.zeros((0, 2), np.int64)]
        for tensor in self.tensors:
            blocks = self.blocks[tensor["group"]]
            rows = oracle.held_rows(tensor, blocks)
            if tokens is not None:
                rows = oracle.wanted_rows(tensor, blocks, (tokens.start, tokens.stop))
            if rows:
                found += [_bytes(tensor, rows, layer, kv, coder) for layer in tensor["layers"] for kv in tensor["kv"]]
        return np.concatenate(found)

    def scramble(self, seed: int) -> None:
        """Fill all memory with random bytes."""
        self.memory[:] = np.random.default_rng([seed, self.number]).integers(0, 256, len(self.memory), np.uint8)


class Coder:
    """Numbers the bytes of a model's cache by their global coordinates, whoever holds them."""

    def __init__(self, model: Sequence[Tensors]) -> None:
        self._classes = {
            (one.group, one.part, half): at for at, (one, half) in enumerate((m, h) for m in model for h in m.dims)
        }
        self._states = [self._classes[one.group, one.part, ""] for one in model if one.state]

    def among(self, codes: I64, layers: Sequence[int]) -> NDArray[np.bool_]:
        """Which codes are of these layers."""
        return np.isin(codes // _LONGEST**3 % _LONGEST, list(layers))

    def before(self, codes: I64, stop: int, last: int) -> NDArray[np.bool_]:
        """Which codes are of tokens before `stop`; state is of the last one."""
        token = codes // _LONGEST % _LONGEST
        token[np.isin(codes // _LONGEST**4, self._states)] = last - 1
        return token < stop

    def first(self, group: str, part: str, kv: str, layer: int) -> int:
        """Code of the first byte of the first head of the first row."""
        return (self._classes[group, part, kv] * _LONGEST + layer) * _LONGEST**3


def _bytes(tensor: Mapping[str, Any], rows: Sequence[tuple[int, int, int]], layer: int, kv: str, coder: Coder) -> I64:
    """Offset and code of every byte of some rows of one layer and half."""
    number, block, inside = (column[:, None, None, None] for column in np.asarray(rows, np.int64).T)
    heads = np.arange(*tensor["heads"])[None, :, None, None]
    dim, item = np.arange(oracle.axis_length(tensor, "dim"))[None, None, :, None], np.arange(tensor["item"])
    at = oracle.address(
        tensor,
        block=block,
        layer=tensor["layers"].index(layer),
        kv=tensor["kv"].index(kv),
        head=heads - tensor["heads"][0],
        token=inside,
        dim=dim,
    )
    first = coder.first(tensor["group"], tensor["part"], kv, layer)
    number = 0 if oracle.is_state(tensor) else number
    code = first + (heads * _LONGEST + number) * _LONGEST + dim * tensor["item"] + item
    at, code = np.broadcast_arrays(at + item, code)
    return np.stack([at.ravel(), code.ravel()], axis=1)


def contents(codes: I64, seed: int) -> NDArray[np.uint8]:
    """The value of each byte of a request, from its coordinates."""
    mixed = codes.astype(np.uint64) + np.uint64(seed * 0x51_7C_C1_B7)
    for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(56)).astype(np.uint8)


@dataclass
class World:
    """Both engines of a case. `agree` holds it against the planner."""

    case: Case  # which
    prefill: list[Rank]  # its ranks
    decode: list[Rank]  # its ranks
    request: Request  # the current one
    coder: Coder

    @classmethod
    def of(cls, case: Case, request: Request | None = None) -> "World":
        """Both engines, with random memory and the case's request."""
        request = request or Request.of(case)

        def opened(side: int, engine: Engine) -> list[Rank]:
            need = [
                sum(count for count, _, _ in _lists(case.model, engine, number, request.offered).values())
                for number in range(engine.world)
            ]
            ranks = [Rank(case, engine, number, max(need) + SPARE_IDS) for number in range(engine.world)]
            for rank in ranks:
                rank.scramble(7 + side)
            return ranks

        world = cls(case, opened(0, case.prefill), opened(1, case.decode), request, Coder(case.model))
        world.begin(request)
        return world

    @property
    def tokens(self) -> tuple[int, int]:
        """What is fetched."""
        return self.request.tokens.start, self.request.tokens.stop

    def begin(self, request: Request) -> None:
        """Give a request its blocks on every rank, and write its cache into those of the prefill ranks."""
        self.request, case = request, self.case
        for ranks, engine, stop in (
            (self.prefill, case.prefill, request.offered),
            (self.decode, case.decode, request.tokens.stop),
        ):
            for rank in ranks:
                rank.give(_lists(case.model, engine, rank.number, stop), request.seed)
        for rank in self.prefill:
            at, codes = rank.cells(self.coder).T
            rank.memory[at] = contents(codes, request.seed)

    def needs(self, rank: Rank) -> I64:
        """int64 (n, 2): offset and code of every byte that a fetch must bring to a decode rank."""
        held = np.concatenate([source.cells(self.coder)[:, 1] for source in self.prefill])
        cells = rank.cells(self.coder, self.request.tokens)
        return cells[np.isin(cells[:, 1], held)]  # all but what is padding at the source

    def expected(self, rank: Rank, cells: I64 | None = None) -> NDArray[np.uint8]:
        """All memory of a decode rank, as it is now but for what a fetch brings to it."""
        at, codes = (self.needs(rank) if cells is None else cells).T
        found = rank.memory.copy()
        found[at] = contents(codes, self.request.seed)
        return found


# --- who holds what


def _shares(model: Sequence[Tensors], engine: Engine, number: int, ids: int) -> Iterator[Share]:
    stage, rest = divmod(number, engine.tp * engine.cp)
    tensor, context = divmod(rest, engine.cp)
    for one in model:
        layers = tuple(layer for layer in one.layers if layer in engine.stages[stage])
        if layers:
            tokens = Interleave() if one.state else Interleave(context, engine.cp, engine.chunk)
            block = 0 if one.state else engine.block_of(one.group)
            ratio = 1 if one.state else engine.kernel_blocks
            yield Share(one, layers, _heads(one.heads, engine.tp, tensor), tokens, ids, block, ratio)


def _heads(heads: int, ways: int, rank: int) -> range:
    """The heads of a rank: as even as they come, the first ranks having one more; replicated if there are too few."""
    if heads < ways:
        return range(rank * heads // ways, rank * heads // ways + 1) if heads else range(1)
    edges = [rank * (heads // ways) + min(rank, heads % ways) for rank in range(ways + 1)]
    return range(*list(pairwise(edges))[rank])


def _lists(model: Sequence[Tensors], engine: Engine, number: int, stop: int) -> dict[str, tuple[int, int, int]]:
    """By group: how many blocks a rank has for tokens up to `stop`, how many of them are null, and the first token."""
    lists: dict[str, tuple[int, int, int]] = {}
    for share in _shares(model, engine, number, 1):
        if share.of.state:
            lists[share.of.group] = (1, 0, 0)
            continue
        windowed = bool(share.of.window) and engine.window != "all"
        begin = max(0, stop - share.of.window) if windowed else engine.first
        before, upto = (_held(share.tokens, token) for token in (begin, stop))
        nulls, last = before // share.block, -(-upto // share.block)
        first = begin if windowed and engine.window == "exact" else _token(share.tokens, nulls * share.block)
        whole = windowed and engine.window == "null"
        lists[share.of.group] = (last, nulls, 0) if whole else (last - nulls, 0, first if nulls or begin else 0)
    return lists


def _held(tokens: Interleave, stop: int) -> int:
    """Tokens before `stop` that a rank holds."""
    return sum(1 for token in range(stop) if (token // tokens.chunk) % tokens.of == tokens.rank)


def _token(tokens: Interleave, position: int) -> int:
    """Global number of the token at a position among those that a rank holds."""
    turn, rest = divmod(position, tokens.chunk)
    return (turn * tokens.of + tokens.rank) * tokens.chunk + rest
