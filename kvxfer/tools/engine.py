"""The caches of all ranks of an engine, from a model's config and how the engine lays its cache out.

Nothing is allocated: tensors get made-up addresses, far enough apart that no two look like neighbours. That is enough
to plan transfers without torch, a GPU or the model.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, islice, product
from math import gcd, lcm, prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError
from kvxfer.geometry.axes import Axis, parse_axes
from kvxfer.geometry.cache import CacheGeometry
from kvxfer.geometry.layouts import across_layers, expand_layout
from kvxfer.geometry.rows import Span
from kvxfer.geometry.spec import Interleave, TensorSpec
from kvxfer.lazy import lazy
from kvxfer.limits import MAX_WORLD
from kvxfer.tools.models import ITEM_BYTES, ModelCache, Part, dtype_name, read_model

__all__ = ["Engine", "EngineLayout", "from_hf_config", "scattered"]

_GAP: Final = 1 << 21
"""Between tensors there are at least so many bytes that belong to none."""
_POOL: Final = 1 << 16
_GOLDEN: Final = 0.6180339887


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayout:
    """How an engine divides a model's cache among its ranks and lays it out.

    Rank numbers count tensor parallelism first, then context parallelism, then stages:
    `(stage * cp + context) * tp + tensor`.

    Attributes:
        tp: Ranks that share the heads. Where there are more ranks than heads, or none to share (MLA), they hold copies.
        pp: Number of stages, or the number of layers of each. An even division gives what is left over to the stages
            before the last, from the back, as vLLM does.
        cp: Ranks that share the tokens.
        cp_chunk: Consecutive tokens per turn among them.
        block: Tokens that one block id covers on a rank.
        kernel_block: Tokens in a block of the kernel, if the engine counts in larger ones; None if not.
        layout: An axis string, or a name of `LAYOUTS`. Without a kv axis K and V are tensors of their own, without a
            layer axis each layer is.
        cross_layer: Whether all layers of a block lie next to each other, K and V of a layer together.
    """

    tp: int = 1
    pp: int | Sequence[int] = 1
    cp: int = 1
    cp_chunk: int = 1
    block: int = 16
    kernel_block: int | None = None
    layout: str = "NHD"
    cross_layer: bool = False

    def __post_init__(self) -> None:
        kernel = self.block if self.kernel_block is None else self.kernel_block
        stages = [self.pp] if isinstance(self.pp, int) else list(self.pp)
        if not stages:
            raise GeometryError("pp names no stages: give their number, or the number of layers of each")
        for name, number in (
            ("tp", self.tp),
            ("cp", self.cp),
            ("cp_chunk", self.cp_chunk),
            ("block", self.block),
            ("kernel_block", kernel),
            *(("pp", stage) for stage in stages),
        ):
            _check_positive(name, number)
        ranks = self.tp * self.cp * (self.pp if isinstance(self.pp, int) else len(stages))
        if ranks > MAX_WORLD:
            raise GeometryError(f"tp, pp and cp make an engine of {ranks} ranks, but {MAX_WORLD} are the most")
        if self.block % kernel:
            raise GeometryError(f"block={self.block} is no multiple of kernel_block={self.kernel_block}")
        names = {axis.name for axis in self.axes}
        missing = [name for name in ("token", "head", "dim") if name not in names]
        if missing:
            raise GeometryError(
                f"layout={self.layout!r}: the axis {missing[0]!r} is missing; name it even if the model has none"
            )

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes of an attention cache, outermost first."""
        given = parse_axes(expand_layout(self.layout))
        return across_layers(given) if self.cross_layer else given

    @property
    def axis_string(self) -> str:
        """The same as text."""
        return " ".join(map(str, self.axes))

    def stages(self, layers: int) -> list[range]:
        """Layers of each stage.

        Raises:
            GeometryError: If there are more stages than layers, or the layers given for each do not add up.
        """
        if isinstance(self.pp, int):
            if self.pp > layers:
                raise GeometryError(f"pp={self.pp} is not possible: the model has {layers} layers")
            each, left = divmod(layers, self.pp)
            counts = [each] * self.pp
            for stage in range(left):
                counts[-2 - stage] += 1
        else:
            counts = list(self.pp)
            if sum(counts) != layers:
                given = "+".join(map(str, counts))
                raise GeometryError(f"pp={given} is not possible: that is {sum(counts)} layers, the model has {layers}")
        return [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]


@dataclass(frozen=True, eq=False)
class Engine:
    """The caches of all ranks of one engine.

    Attributes:
        model: What the model keeps.
        layout: How the engine divides it and lays it out.
        dtype: Of K and V (and of latent rows), by torch's name.
        pool: Block ids in every group.
        ranks: What each rank holds; planning input for `resolve` and `PairPlan`. Addresses are made up.
    """

    model: ModelCache
    layout: EngineLayout
    dtype: str
    pool: int = _POOL
    ranks: tuple[CacheGeometry, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_positive("blocks", self.pool)
        if self.layout.cp > 1 and any(part.window is not None for part in self.parts):
            raise GeometryError(f"cp={self.layout.cp} is not possible: the model has sliding windows")
        stages = self.layout.stages(len(self.model.layers))
        places = product(stages, range(self.layout.cp), range(self.layout.tp))
        object.__setattr__(self, "ranks", tuple(self._rank(*place) for place in places))

    @lazy
    def parts(self) -> tuple[Part, ...]:
        """Every kind of part that some layer has, in order of first mention."""
        return tuple(dict.fromkeys(part for parts in self.model.layers for part in parts))

    def spans(self, stop: int, *, aligned: int = 1, draw: int = 0) -> dict[str, Span]:
        """Block lists of a request of `stop` tokens, one for every group of the model.

        Ids are scattered over the pool, see `scattered`. The list of a group with a sliding window begins with the
        block of the first token that the next token still sees.

        Args:
            stop: Tokens of the request.
            aligned: A window's list begins at a multiple of so many tokens, besides that of a block: the other side's
                blocks, so that both lists begin at one token.
            draw: As in `scattered`; give the two sides of a transfer different ones.

        Raises:
            GeometryError: If the pool is too small.
        """
        found: dict[str, Span] = {}
        for part in self.parts:
            first, grain = 0, lcm(self.layout.block, aligned)
            if part.window is not None:
                first = max(0, stop - part.window + 1) // grain * grain
            turn, rest = divmod(stop - first, self.layout.cp * self.layout.cp_chunk)
            most = turn * self.layout.cp_chunk + min(rest, self.layout.cp_chunk)  # on the rank that has the first turn
            count = 1 if part.state else -(-most // self.layout.block)
            found[part.group] = Span(scattered(count, self.pool, draw=draw), first)
        return found

    def _rank(self, stage: range, context: int, tensor: int) -> CacheGeometry:
        memory = _Memory(self, context, tensor)
        rows: dict[Part, list[int]] = {}
        slots: dict[tuple[Part, ...], list[int]] = {}
        for layer in stage:
            for part in self.model.layers[layer]:
                if not part.state:
                    rows.setdefault(part, []).append(layer)
            if state := tuple(part for part in self.model.layers[layer] if part.state):
                slots.setdefault(state, []).append(layer)
        specs = [spec for part, layers in rows.items() for spec in memory.rows(part, layers)]
        specs += [spec for parts, layers in slots.items() for spec in memory.slots(parts, layers)]
        if not specs:
            raise GeometryError(
                f"pp={self.layout.pp}: the stage of layers {stage.start}..{stage.stop - 1} keeps no cache; divide the "
                "layers otherwise"
            )
        return CacheGeometry(tuple(specs))


class _Memory:
    """Lays out the tensors of one rank one after the other, with gaps."""

    def __init__(self, engine: Engine, context: int, tensor: int) -> None:
        self._engine: Final = engine
        self._layout: Final = engine.layout
        self._tokens: Final = Interleave(context, engine.layout.cp, engine.layout.cp_chunk)
        self._tensor: Final = tensor
        self._next = _GAP

    def rows(self, part: Part, layers: Sequence[int]) -> Iterator[TensorSpec]:
        """What is kept for each token: tensors as the layout says, without the axes that the part does not have."""
        layout, dtype = self._layout, part.dtype or self._engine.dtype
        absent = {"head"} if part.units == 0 else set[str]()
        absent |= {"kv"} if part.kv == ("",) else set()
        axes = [axis for axis in layout.axes if axis.name not in absent]
        names = {axis.name for axis in axes}
        heads = self._heads(part)
        kernel = layout.kernel_block or layout.block
        ratio = layout.block // kernel
        for held in [tuple(layers)] if "layer" in names else [(layer,) for layer in layers]:
            for kv in [part.kv] if "kv" in names else [(half,) for half in part.kv]:
                counts = {"block": self._engine.pool * ratio, "layer": len(held), "kv": len(kv), "head": len(heads)}
                counts |= {"token": kernel, "dim": part.dim}
                shape = tuple(_extent(axis, counts[axis.name]) for axis in axes)
                strides = _contiguous(shape, ITEM_BYTES[dtype])
                yield TensorSpec(
                    group=part.group,
                    part=part.name,
                    kv=kv,
                    layers=held,
                    heads=heads,
                    axes=" ".join(map(str, axes)),
                    shape=shape,
                    strides=strides,
                    dtype=dtype,
                    item_bytes=ITEM_BYTES[dtype],
                    base=self._place(shape[0] * strides[0]),
                    block_ratio=ratio,
                    tokens=self._tokens,
                )

    def slots(self, parts: Sequence[Part], layers: Sequence[int]) -> Iterator[TensorSpec]:
        """State: of each layer one page a slot, in which the parts lie behind each other; or all layers' pages."""
        places, page = self._page(parts)
        across = self._layout.cross_layer
        slot = page * (len(layers) if across else 1)
        for held in [tuple(layers)] if across else [(layer,) for layer in layers]:
            base = self._place(self._engine.pool * slot)
            for part, (offset, head, dim) in zip(parts, places, strict=True):
                heads = self._heads(part)
                inner = {"dim": (part.dim, dim), "head": (len(heads), head)}
                order = ("dim", "head") if part.dim_first else ("head", "dim")
                outer = {"block": (self._engine.pool, slot), "layer": (len(held), page)}
                axes = outer | {name: inner[name] for name in order}
                yield TensorSpec(
                    group=part.group,
                    part=part.name,
                    kv=part.kv,
                    layers=held,
                    heads=heads,
                    axes=" ".join(axes),
                    shape=tuple(count for count, _ in axes.values()),
                    strides=tuple(stride for _, stride in axes.values()),
                    dtype=part.dtype,
                    item_bytes=ITEM_BYTES[part.dtype],
                    base=base + offset,
                )

    def _page(self, parts: Sequence[Part]) -> tuple[list[tuple[int, int, int]], int]:
        """(offset, head stride, dim stride) in bytes of each part of one layer's page, and the size of the page."""
        places: list[tuple[int, int, int]] = []
        size = 0
        for _, tensor in groupby(parts, key=lambda part: part.name.split(".")[0]):
            held = [(part, len(self._heads(part)), ITEM_BYTES[part.dtype]) for part in tensor]
            row = sum(heads * item for _, heads, item in held)  # where dim is outside, all parts share its rows
            at = size
            for part, heads, item in held:
                places.append((at, item, row) if part.dim_first else (at, part.dim * item, item))
                at += heads * item
            size += sum(heads * item * part.dim for part, heads, item in held)
        return places, size

    def _heads(self, part: Part) -> range:
        """Coordinates of the head axis that this rank holds: its share of the units, or a copy of one of them."""
        tp, units = self._layout.tp, part.units
        if units == 0:
            return range(1)
        if units % tp and tp % units:
            what = "heads" if part.unit == 1 else f"groups of {part.unit} channels"
            raise GeometryError(
                f"tp={tp} is not possible: {units} {what}{f' of part {part.name!r}' if part.name else ''} can neither "
                "be divided evenly among the ranks nor copied evenly"
            )
        each, first = (units // tp, self._tensor * (units // tp)) if units >= tp else (1, self._tensor * units // tp)
        return range(first * part.unit, (first + each) * part.unit)

    def _place(self, nbytes: int) -> int:
        base = self._next
        self._next += -(-nbytes // _GAP) * _GAP + _GAP
        return base


def _check_positive(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise GeometryError(f"{name}={number} is not possible: give a whole number from 1 on")


def _extent(axis: Axis, count: int) -> int:
    """Elements along an axis, or along its part."""
    if not axis.split:
        return count
    if count % axis.split:
        raise GeometryError(f"layout: {axis} needs {axis.name} to be a multiple of {axis.split}, but it is {count}")
    return axis.split if axis.inner else count // axis.split


def _contiguous(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Byte strides of a tensor in C order."""
    return tuple(item_bytes * prod(shape[axis + 1 :]) for axis in range(len(shape)))


def scattered(count: int, pool: int, *, draw: int = 0) -> NDArray[np.int64]:
    """Distinct block ids of which no two that follow each other are neighbours: multiples of a step, modulo the pool.

    Block lists of a busy engine rarely have runs, so a plan over one that has would promise pieces that are too large.
    Lists with different draws never have neighbours at the same places, so pieces do not merge over blocks by chance.
    (In a pool of a few blocks there is too little choice for that.)

    Args:
        count: How many.
        pool: Ids run from 0 to `pool - 1`.
        draw: Chooses the step.

    Raises:
        GeometryError: If the pool has fewer ids.
    """
    if count > pool:
        raise GeometryError(f"a pool of {pool} blocks cannot hold {count} blocks: give more blocks, or fewer tokens")
    begin = int(pool * _GOLDEN)
    steps = (step for step in chain(range(begin, pool - 1), range(2, begin)) if step > 1 and gcd(step, pool) == 1)
    fit = list(islice(steps, draw + 1)) or [1]  # a pool of a few blocks has nothing but neighbours
    step = fit[draw % len(fit)]
    return np.arange(count, dtype=np.int64) * step % pool


def from_hf_config(
    config: Mapping[str, Any] | str | Path,
    *,
    tp: int = 1,
    pp: int | Sequence[int] = 1,
    cp: int = 1,
    cp_chunk: int = 1,
    block: int = 16,
    kernel_block: int | None = None,
    layout: str = "NHD",
    cross_layer: bool = False,
    dtype: str | None = None,
    blocks: int = _POOL,
) -> Engine:
    """The caches of all ranks of an engine that runs a model.

    Args:
        config: A Hugging Face config as a mapping, or the path of a `config.json` or its folder.
        tp: As in `EngineLayout`.
        pp: As in `EngineLayout`.
        cp: As in `EngineLayout`.
        cp_chunk: As in `EngineLayout`.
        block: As in `EngineLayout`.
        kernel_block: As in `EngineLayout`.
        layout: As in `EngineLayout`.
        cross_layer: As in `EngineLayout`.
        dtype: Of K, V and latent rows: torch's name, or `bf16`, `fp16`, `fp8`. By default the model's. State keeps the
            dtype of the model.
        blocks: Block ids in every group.

    Returns:
        The engine; `.ranks` are the geometries by rank.

    Raises:
        GeometryError: If the config is not understood, or the model cannot be divided so.

    Warns:
        UserWarning: If the model type is not known and plain attention is assumed.
    """
    layouts = EngineLayout(
        tp=tp,
        pp=pp,
        cp=cp,
        cp_chunk=cp_chunk,
        block=block,
        kernel_block=kernel_block,
        layout=layout,
        cross_layer=cross_layer,
    )
    model = read_model(config)
    for note in model.notes:
        warnings.warn(note, stacklevel=2)
    return Engine(model, layouts, model.dtype if dtype is None else dtype_name(dtype), blocks)
