"""What one rank holds, checked as a whole: several cache tensors, and the groups whose block ids they share."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import combinations, product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError
from kvxfer.geometry.axes import (
    EVERY_TOKEN,
    Interleave,
    Place,
    RowSide,
    TensorSpec,
    bind_layout,
    check_whole,
    parse_axes,
    read_scale,
    unlike,
)
from kvxfer.names import MAX_FACTS, MAX_NAME, MAX_PLACES, MAX_TENSORS, lazy

if TYPE_CHECKING:
    import torch

__all__ = ["Bytes", "CacheGeometry", "CacheTensor", "Group", "group", "shared"]

# --- whether views share a byte
#
# Ranges of addresses do not tell: K and V packed in one tensor, slices by head, and layers inside of a block lie
# between each other without a common byte. So the question is decided in two steps. Views whose largest strides are
# equal are folded by that stride, and what then lies apart, or was in other turns of it, cannot meet; this leaves few
# pairs, however many layers there are, and those of equal strides do meet. For each of the others numpy decides it
# exactly. With strides that have nothing to do with each other that is a subset-sum problem, so work is counted, and
# what is undecided when it is used up counts as apart.

_STEPS: Final = 50_000
"""Steps for a whole list of views, beyond those that each view may take by itself: about 0.1 s."""
_STEPS_A_VIEW: Final = 64
_STEPS_A_PAIR: Final = 16
_TRIED: Final[Any] = 1_000  # numpy's stubs know two numbers alone
"""Indices that numpy tries for a pair."""

_Axes: TypeAlias = tuple[tuple[int, int], ...]
"""(stride, count), the largest stride first."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Where the bytes of a view lie: runs of equal length at regular places."""

    start: int  # address of the first
    # (bytes, count) of every axis that is longer than 1, the largest stride first; none steps inside of those after it
    axes: _Axes
    run: int  # bytes that lie together at each index
    turns: tuple[range, ...] = ()  # of each stride that it was folded by, in which multiples it was

    @classmethod
    def of(cls, start: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> "Bytes":
        """The bytes of a tensor whose axes do not overlap; axes without a gap between them become one."""
        axes: list[tuple[int, int]] = []
        run = item_bytes
        for stride, count in sorted(zip(strides, shape, strict=True)):
            if count == 1:
                continue
            if not axes and stride == run:
                run *= count
            elif axes and stride == axes[-1][0] * axes[-1][1]:
                axes[-1] = (axes[-1][0], axes[-1][1] * count)
            else:
                axes.append((stride, count))
        return cls(start, tuple(reversed(axes)), run)

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.start + self.run + sum((count - 1) * stride for stride, count in self.axes)

    def folded(self, stride: int) -> "Iterator[Bytes]":
        """The view without its largest axis, on a circle of that stride: twice where it lies across the cut."""
        turn, start = divmod(self.start, stride)
        count = self.axes[0][1]
        one = Bytes(start, self.axes[1:], self.run, (*self.turns, range(turn, turn + count)))
        yield one
        if one.stop > stride:
            yield Bytes(start - stride, one.axes, one.run, (*self.turns, range(turn + 1, turn + 1 + count)))

    def may_meet(self, other: "Bytes") -> bool:
        """Whether views that were folded alike lie in the same place, in the same turns; they meet if both are runs."""
        places = (range(view.start, view.stop) for view in (self, other))
        both = [places, *zip(self.turns, other.turns, strict=True)]
        return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in both)

    def as_array(self, first: int) -> NDArray[np.uint8]:
        """An array that lies so, counted from the address `first` on; its memory is never read."""
        shape, strides = [count for _, count in self.axes], [stride for stride, _ in self.axes]
        where = {"data": (self.start - first + 1, True), "shape": (*shape, self.run), "strides": (*strides, 1)}
        return np.asarray(SimpleNamespace(__array_interface__={**where, "typestr": "|u1", "version": 3}))


def shared(views: Sequence[Bytes]) -> tuple[int, int] | None:
    """Positions of two views that have a byte in common; None if there are none, or it could not be decided."""
    left = _STEPS + _STEPS_A_VIEW * len(views)
    waiting = [list(enumerate(views))]  # lists of views, or of what folding has left of them, with their positions
    while waiting:
        some = waiting.pop()
        left -= len(some)
        for close in _clusters(some):
            stride, *others = {view.axes[0][0] if view.axes else 0 for _, view in close}
            if stride and not others:
                waiting.append([(at, part) for at, view in close for part in view.folded(stride)])
                continue
            for (one, part), (other, rest) in combinations(close, 2):
                left -= _STEPS_A_PAIR
                if left < 0:
                    return None
                met = one != other and part.may_meet(rest)
                if met and (not (part.axes or rest.axes) or _meet(views[one], views[other])):
                    return min(one, other), max(one, other)
        if left < 0:
            return None
    return None


def _meet(one: Bytes, other: Bytes) -> bool:
    """Whether two views have a byte in common."""
    first = min(one.start, other.start)
    try:
        return np.shares_memory(one.as_array(first), other.as_array(first), max_work=_TRIED)
    except (np.exceptions.TooHardError, OverflowError):
        return False


def _clusters(views: Iterable[tuple[int, Bytes]]) -> Iterator[list[tuple[int, Bytes]]]:
    """Views whose ranges hang together, where there is more than one."""
    close: list[tuple[int, Bytes]] = []
    stop = 0
    for at, view in sorted(views, key=lambda item: item[1].start):
        if close and view.start >= stop:
            if len(close) > 1:
                yield close
            close = []
        stop = max(stop, view.stop) if close else view.stop
        close.append((at, view))
    if len(close) > 1:
        yield close


# --- tensors


@dataclass(frozen=True, slots=True, eq=False)
class CacheTensor:
    """A torch tensor with the names of its axes and the global coordinates that it holds.

    The tensor may be any strided view. It must stay allocated while a worker has it registered; kvxfer keeps a
    reference.

    Tensors of one group must not share a byte, since a block id means a block of each of them. Tensors of different
    groups may lie in the same memory (a hybrid pool). Nothing compares their ids, so the caller's allocator must not
    use the same bytes for two groups at a time, nor bytes that `MemoryInDoubtError` names in one group for another.

    Args:
        tensor: CPU or CUDA tensor, one dimension per name in `axes`.
        axes: Names of its axes in its own order: block, layer, kv, head, token, dim; head and dim may be split once.
            Or one of vLLM's names for such an order, as in `LAYOUTS`: `"NHD"`, `"LBNHC"`.
        layers: Global numbers of the layers that it holds, in the order of its layer axis.
        heads: Global range of the heads that it holds; may be left out without a head axis.
        kv: For a tensor without a kv axis `"k"` or `"v"`, or None if it holds neither (MLA); with one, `"kv"` (the
            default) or `"vk"` say its order.
        group: Block-address space.
        part: Tells tensors of one layer with different meaning apart.
        tokens: Which tokens it holds, under context parallelism.
        kernel_blocks_per_id: Blocks of this tensor that one block id stands for.
        tokens_per_row: Tokens that one index of the token axis stands for.
        scale: What a stored number must be multiplied by to give its value: float32 of shape () or (heads,), one number
            for each head that this tensor holds; 1 without it. It is read here, once, which waits for the device that
            holds it; kvxfer keeps no reference, and later changes of the tensor are not seen. Both sides may have one.
            Where they differ, as where dtypes do, a decode rank with `convert=True` gets
            `stored * scale of the source / scale of the destination`, and any other is refused.
    """

    tensor: "torch.Tensor"
    axes: str
    _: KW_ONLY
    layers: Sequence[int]
    heads: range | None = None
    kv: str | None = None
    group: str = "default"
    part: str = ""
    tokens: Interleave = EVERY_TOKEN
    kernel_blocks_per_id: int = 1
    tokens_per_row: int = 1
    scale: "torch.Tensor | None" = None

    def _check_types(self) -> None:
        """Callers may be untyped: say what was passed instead of failing somewhere inside."""
        wanted = (
            ("tensor must be a torch.Tensor", self.tensor, "data_ptr"),
            ("axes must be text", self.axes, "split"),
            ("heads must be a range", self.heads or range(1), "step"),
            ("tokens must be an Interleave", self.tokens, "chunk"),
            ("group must be text", self.group, "encode"),
            ("part must be text", self.part, "encode"),
            ("kv must be text", self.kv or "", "encode"),
        )
        for rule, value, mark in wanted:
            if not hasattr(value, mark):
                raise GeometryError(f"{rule}, not {type(value).__name__}")
        check_whole("kernel_blocks_per_id", self.kernel_blocks_per_id)
        check_whole("tokens_per_row", self.tokens_per_row)
        try:
            for layer in self.layers:
                operator.index(layer)
        except TypeError as error:
            raise GeometryError(f"layers must be a list of whole numbers, not {self.layers!r}") from error

    def spec(self, null_block: int | None = None) -> TensorSpec:
        """The description without the memory.

        Raises:
            GeometryError: If names, coordinates, shape, strides or device do not fit together, or if the tensor reaches
                beyond its storage, or has none.
        """
        self._check_types()
        tensor = self.tensor
        if kind := _not_plain(tensor):
            raise GeometryError(f"a cache tensor of group {self.group!r} is {kind}")
        axes, shape, strides = bind_layout(self.axes, tensor.shape, tensor.stride())
        names = {axis.name for axis in parse_axes(axes)}
        if self.heads is None and "head" in names:
            raise GeometryError(
                f"a cache tensor of group {self.group!r} has a head axis, so heads= must name its range"
            )
        item_bytes = tensor.element_size()
        heads = self.heads if self.heads is not None else range(1)
        found = TensorSpec(
            group=self.group,
            part=self.part,
            kv=tuple(self.kv or ("kv" if "kv" in names else "")) or ("",),
            layers=tuple(int(layer) for layer in self.layers),
            heads=heads,
            axes=axes,
            shape=shape,
            strides=tuple(stride * item_bytes for stride in strides),
            dtype=str(tensor.dtype).removeprefix("torch."),
            item_bytes=item_bytes,
            base=tensor.data_ptr(),
            kind=tensor.device.type,
            device=tensor.device.index or 0,
            block_ratio=int(self.kernel_blocks_per_id),
            tokens_per_row=int(self.tokens_per_row),
            tokens=self.tokens,
            null_block=null_block,
            scale=read_scale(self.scale, heads.stop - heads.start),
        )
        held = tensor.untyped_storage().nbytes()
        reach = tensor.storage_offset() * item_bytes + found.extent_bytes
        if reach > held or not found.base:
            raise GeometryError(
                f"{found.name}: its last element ends at byte {reach} of its storage, which has {held} at address "
                f"{found.base:#x}: the storage was resized or freed, or is a fake; register what is allocated"
            )
        return found


def _not_plain(tensor: "torch.Tensor") -> str:
    """Why the bytes of a tensor are not its values, and what to pass instead; empty for one that is plain memory."""
    if tensor.is_nested or str(tensor.layout) != "torch.strided":
        kind = "nested" if tensor.is_nested else tensor.layout
        return f"{kind}; only strided tensors are supported"
    if tensor.is_conj() or tensor.is_neg():
        lazy = "conjugated" if tensor.is_conj() else "negated"
        return f"lazily {lazy}: its memory holds other values; pass the tensor that it was made of"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype}); pass its int_repr() and its scales as tensors of their own"
    return ""


# --- a rank's cache


@dataclass(frozen=True, slots=True)
class Group:
    """Properties of a block-address space that its tensors do not show.

    Attributes:
        name: As in `CacheTensor.group`.
        null_block: An id of the pool that means "no block": skipped at the source, refused at the destination.
    """

    name: str
    null_block: int | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.name, "encode"):
            raise GeometryError(f"the name of a group must be text, as in CacheTensor.group, not {self.name!r}")
        if self.null_block is None:
            return
        check_whole(f"null_block of group {self.name!r}", self.null_block)
        if self.null_block < 0:
            raise GeometryError(
                f"null_block of group {self.name!r} is {self.null_block}: give a block id of the pool, from 0 on, or "
                "None if every id is a block"
            )


@dataclass(frozen=True, eq=False)
class CacheGeometry:
    """Everything that one rank holds, checked as a whole.

    Raises:
        GeometryError: If there is nothing, or more than can be told to a peer, memory lies on several devices, the same
            coordinates are given twice, or tensors of one group disagree on what a block id covers, or share memory.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.tensors) <= MAX_TENSORS:
            raise GeometryError(f"a cache needs 1 to {MAX_TENSORS} tensors, not {len(self.tensors)}")
        places = sum(len(spec.layers) * len(spec.kv) for spec in self.tensors)
        if places > MAX_PLACES:
            raise GeometryError(
                f"the tensors of a cache name {places} layers in all, each counted for K and V: at most {MAX_PLACES}"
            )
        devices = sorted({(spec.kind, spec.device) for spec in self.tensors})
        if len(devices) > 1:
            raise GeometryError(f"all cache tensors of a worker must be on one device, not on {devices}")
        self._check_groups()
        self._check_unique()
        self._check_memory()

    @classmethod
    def of(cls, tensors: Iterable[CacheTensor], groups: Iterable[Group] = ()) -> "CacheGeometry":
        """Describe registered tensors.

        Raises:
            GeometryError: See the class; also if a group is described but holds no tensor, or is described twice.
        """
        given = list(tensors)
        nulls: dict[str, int | None] = {}
        for group in groups:
            if group.name in nulls or all(tensor.group != group.name for tensor in given):
                raise GeometryError(f"group {group.name!r} is described twice, or no tensor belongs to it")
            nulls[group.name] = None if group.null_block is None else int(group.null_block)
        return cls(tuple(tensor.spec(nulls.get(tensor.group)) for tensor in given))

    @lazy
    def kind(self) -> str:
        """`"cpu"` or `"cuda"`."""
        return self.tensors[0].kind

    @property
    def device(self) -> int:
        """Index of the device that holds every tensor."""
        return self.tensors[0].device

    @lazy
    def groups(self) -> Mapping[str, tuple[TensorSpec, ...]]:
        """Tensors by group, in order of first mention."""
        found: dict[str, list[TensorSpec]] = {}
        for spec in self.tensors:
            found.setdefault(spec.group, []).append(spec)
        return {name: tuple(specs) for name, specs in found.items()}

    @lazy
    def places(self) -> Mapping[Place, Sequence[TensorSpec]]:
        """Tensors by what they hold; several only where each has other heads of it."""
        found: dict[Place, list[TensorSpec]] = {}
        for spec in self.tensors:
            for kv, layer in product(spec.kv, spec.layers):
                found.setdefault((spec.group, spec.part, kv, layer), []).append(spec)
        return found

    @lazy
    def layers(self) -> frozenset[int]:
        """Global numbers of the layers of which it holds something."""
        return frozenset(layer for spec in self.tensors for layer in spec.layers)

    @lazy
    def pool_ids(self) -> Mapping[str, int]:
        """By group, how many block ids address every tensor of it."""
        return {name: min(spec.ids for spec in unlike(specs)) for name, specs in self.groups.items()}

    @lazy
    def sides(self) -> Mapping[str, RowSide]:
        """By group, how its tensor of the shortest rows addresses tokens; others may cut an id otherwise."""
        shortest = {name: min(specs, key=lambda spec: spec.tokens_per_row) for name, specs in self.groups.items()}
        return {name: RowSide.of_tensor(spec) for name, spec in shortest.items()}

    @lazy
    def addressed(self) -> bool:
        """Whether every base address is known; a peer that does not trust this side hides its own."""
        return all(spec.base for spec in self.tensors)

    def facts(self) -> Iterator[tuple[str, str]]:
        """(name, value) of everything about a tensor class that two engines must agree on, in a fixed order."""
        seen: dict[str, str] = {}
        for spec in unlike(self.tensors):
            for kv in spec.kv:
                for what, fact in (("dtype", spec.dtype), *spec.facts()):
                    name, value = f"{spec.label(kv)}.{what}", str(fact)
                    if seen.setdefault(name, value) != value:
                        raise GeometryError(f"{spec.name}: {name} is {value}, but another tensor has {seen[name]}")
        yield from sorted(seen.items())

    def _check_groups(self) -> None:
        for name, specs in self.groups.items():
            first, *others = kinds = unlike(specs)
            for spec in others:
                if spec.is_state != first.is_state:
                    with_tokens, without = (spec, first) if first.is_state else (first, spec)
                    raise GeometryError(
                        f"group {name!r}: {with_tokens.name} has a token axis, and {without.name} has none. What "
                        "belongs to a block as a whole (scales for each block) cannot be cut where blocks of other "
                        "sizes meet: store it by token, or put state into a group of its own"
                    )
                if (spec.id_tokens, spec.tokens) != (first.id_tokens, first.tokens):
                    raise GeometryError(
                        f"group {name!r}: one block id covers {first.id_tokens} tokens ({first.tokens}) in "
                        f"{first.name}, but {spec.id_tokens} ({spec.tokens}) in {spec.name}"
                    )
                if spec.null_block != first.null_block:
                    raise GeometryError(
                        f"group {name!r}: the null block is {first.null_block} in {first.name}, "
                        f"but {spec.null_block} in {spec.name}"
                    )
            ids = min(spec.ids for spec in kinds)
            if first.null_block is not None and not 0 <= first.null_block < ids:
                raise GeometryError(
                    f"group {name!r}: the null block {first.null_block} is outside of its pool; give an id from 0 to "
                    f"{ids - 1}, or none if every id is a block"
                )

    def _check_unique(self) -> None:
        for (_, _, kv, layer), specs in self.places.items():
            for first, second in combinations(specs, 2) if len(specs) > 1 else ():
                if first.heads.start < second.heads.stop and second.heads.start < first.heads.stop:
                    raise GeometryError(
                        f"the same coordinates are given twice: layer {layer}, kv {kv or '-'}, "
                        f"heads {second.heads} in {second.name} and heads {first.heads} in {first.name}"
                    )
        facts = list(self.facts())
        longest = max((name for name, _ in facts), key=len)
        if len(longest) > MAX_NAME:
            raise GeometryError(
                f"{longest!r} has {len(longest)} characters, and names that two sides compare have at most {MAX_NAME}: "
                "shorten the names of groups or parts"
            )
        if len(facts) >= MAX_FACTS:  # one more may be the model
            raise GeometryError(
                f"a cache with {len(facts)} facts about its tensor classes (four of each group, part and half) is over "
                f"the {MAX_FACTS - 1} that two sides can compare: use fewer groups or parts"
            )

    def _check_memory(self) -> None:
        for name, specs in self.groups.items():
            known = [spec for spec in specs if spec.base]  # a peer that does not trust us shows no addresses
            found = shared([Bytes.of(spec.base, spec.shape, spec.strides, spec.item_bytes) for spec in known])
            if found is not None:
                first, second = (known[at] for at in found)
                raise GeometryError(
                    f"group {name!r}: {second.name} shares memory with {first.name}, so that what is written to a "
                    "block of one would destroy a block of the other; pass each tensor once, or put tensors that share "
                    "memory on purpose into different groups"
                )


# --- a bare list of tensors, one a layer

_Layer: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]"
_Scale: TypeAlias = "_Layer | None"
_T = TypeVar("_T")


def group(
    tensors: "Iterable[_Layer]",
    axes: str,
    *,
    layers: Iterable[int] | None = None,
    heads: range | None = None,
    kv: str | None = None,
    group: str = "default",
    part: str = "",
    tokens: Interleave = EVERY_TOKEN,
    kernel_blocks_per_id: int = 1,
    tokens_per_row: int = 1,
    scale: "torch.Tensor | Sequence[_Layer] | None" = None,
) -> list[CacheTensor]:
    """Describe a list of tensors, one a layer, in order.

    Args:
        tensors: For each layer its tensor, or the pair of its K and its V.
        axes: Of every tensor, as in `CacheTensor`; a name such as `"NHD"` will do.
        layers: Their global numbers, in the same order; 0, 1, 2 and so on by default.
        heads: As in `CacheTensor`, as are all that follow.
        kv: Not for pairs, which say it themselves.
        group: Block-address space.
        part: Tells tensors of one layer with other meaning apart.
        tokens: Which tokens they hold, under context parallelism.
        kernel_blocks_per_id: Blocks of the tensors that one block id stands for.
        tokens_per_row: Tokens that one index of the token axis stands for.
        scale: Of every tensor, as in `CacheTensor`; or a list with one for each layer, where a pair of tensors may have
            a pair.

    Returns:
        One `CacheTensor` a tensor, for `Worker` or `CacheGeometry.of`. They keep references to the tensors.

    Raises:
        GeometryError: If the numbers of tensors, layers and scales differ, or a pair is not one.
    """
    given = _listed("tensors", tensors)
    numbers = _listed("layers", range(len(given)) if layers is None else layers)
    if len(numbers) != len(given):
        raise GeometryError(f"{len(given)} tensors were given, but layers= names {len(numbers)}: give one a layer")
    alike: Sequence[_Scale] = scale if isinstance(scale, tuple | list) else [cast("_Scale", scale)] * len(given)
    if len(alike) != len(given):
        raise GeometryError(f"{len(given)} tensors were given, but scale= has {len(alike)}: give one for all, or each")
    found: list[CacheTensor] = []
    for number, layer, own in zip(numbers, given, alike, strict=True):
        halves = _halves(number, layer, kv)
        for (half, tensor), factor in zip(halves, _scales(number, layer, own, len(halves)), strict=True):
            found.append(
                CacheTensor(
                    tensor,
                    axes,
                    layers=[number],
                    heads=heads,
                    kv=half,
                    group=group,
                    part=part,
                    tokens=tokens,
                    kernel_blocks_per_id=kernel_blocks_per_id,
                    tokens_per_row=tokens_per_row,
                    scale=factor,
                )
            )
    return found


def _listed(what: str, given: "Iterable[_T]") -> "list[_T]":
    """Callers may be untyped: a tensor can be iterated over, but is no list of what the layers have."""
    if hasattr(given, "data_ptr") or not hasattr(given, "__iter__"):
        raise GeometryError(f"{what}= must be a list, with one entry for each layer, not {type(given).__name__}")
    return list(given)


def _scales(number: int, layer: "_Layer", own: "_Scale", tensors: int) -> "Sequence[torch.Tensor | None]":
    """The scale of each tensor of one layer."""
    if not isinstance(own, tuple | list):
        return [own] * tensors
    if not isinstance(layer, tuple | list) or len(own) != tensors:
        held = f"a pair of {tensors} tensors" if isinstance(layer, tuple | list) else "one tensor"
        raise GeometryError(
            f"layer {number}: it is {held}, but scale= has a list of {len(own)} for it: give one scale, or to a pair "
            "of tensors a pair"
        )
    return cast("Sequence[torch.Tensor | None]", own)


def _halves(number: int, layer: "_Layer", kv: str | None) -> "list[tuple[str | None, torch.Tensor]]":
    """The tensors of one layer, and which half each of them holds."""
    if not isinstance(layer, tuple | list):
        return [(kv, layer)]
    pair = cast("Sequence[torch.Tensor]", layer)
    if len(pair) != 2 or kv is not None:
        problem = f"kv={kv!r} cannot be said of a pair" if len(pair) == 2 else f"it has {len(pair)} tensors"
        raise GeometryError(f"layer {number}: a layer is one tensor, or its K and its V as a pair; {problem}")
    return [("k", pair[0]), ("v", pair[1])]
