"""What one rank holds: cache tensors in global coordinates, checked as a whole.

`CacheTensor` is where a torch tensor enters; from there on only `TensorSpec` is used, which holds numbers and names and
can cross the wire. Nothing here assumes K and V, heads, or a single group.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final

from kvxfer.dtypes import CONVERTIBLE
from kvxfer.errors import GeometryError
from kvxfer.geometry.axes import Factor, bind_axes, parse_axes
from kvxfer.geometry.layouts import bind_layout
from kvxfer.geometry.overlap import Bytes, shared
from kvxfer.geometry.scales import check_scale, read_scale
from kvxfer.limits import MAX_FACTS, MAX_NAME, MAX_TENSORS

if TYPE_CHECKING:
    import torch

__all__ = ["CacheGeometry", "CacheTensor", "Group", "Interleave", "TensorSpec"]

_DEVICES: Final = ("cpu", "cuda")
_MAX_DIMENSION: Final = 0xFFFF_FFFF


def _check_whole(what: str, number: object) -> None:
    """Callers may be untyped: a float or a flag would be rounded, or taken for an id, far from here."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise GeometryError(f"{what} must be a whole number, not {number!r}")


@dataclass(frozen=True, slots=True)
class Interleave:
    """Context parallelism: token t is held by rank `(t // chunk) % of`.

    Attributes:
        rank: Which residue this tensor holds.
        of: Number of ranks that share the tokens.
        chunk: Consecutive tokens per turn.
    """

    rank: int = 0
    of: int = 1
    chunk: int = 1

    def __post_init__(self) -> None:
        for what, number in (("rank", self.rank), ("of", self.of), ("chunk", self.chunk)):
            _check_whole(f"{what} of an Interleave", number)
        if not (self.of >= 1 and 0 <= self.rank < self.of and self.chunk >= 1):
            raise GeometryError(f"{self}: needs 0 <= rank < of and chunk >= 1")


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
        _check_whole(f"null_block of group {self.name!r}", self.null_block)
        if self.null_block < 0:
            raise GeometryError(
                f"null_block of group {self.name!r} is {self.null_block}: give a block id of the pool, from 0 on, or "
                "None if every id is a block"
            )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One cache tensor without its memory: names, coordinates, shape and byte strides.

    Attributes:
        group: Block-address space; tensors of a group share block ids.
        part: Tells tensors of one layer with different meaning apart (`""` for plain K and V).
        kv: Which halves it holds, in the order of its kv axis: `("k", "v")`, `("k",)`, `("v",)` or `("",)`.
        layers: Global layer numbers, in the order of its layer axis.
        heads: Global range of heads (channels, for convolution state); `range(0, 1)` without a head axis.
        axes: The axis string, in the tensor's order.
        shape: Elements per axis.
        strides: Bytes per axis.
        dtype: torch's name without the prefix, `"bfloat16"`.
        item_bytes: Size of one element.
        base: Address of the first element, or 0 where a peer did not share it.
        kind: `"cpu"` or `"cuda"`.
        device: Index of the device.
        block_ratio: Kernel blocks per block id (an engine that counts in 64 over a kernel that stores 16 has 4).
        tokens_per_row: Tokens that one index of the token axis stands for (compressed caches).
        tokens: Which tokens it holds, under context parallelism.
        null_block: See `Group`.
        scale: value = stored * scale: one number, one for each of its heads, or none for 1.
    """

    group: str
    part: str
    kv: tuple[str, ...]
    layers: tuple[int, ...]
    heads: range
    axes: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    item_bytes: int
    base: int = 0
    kind: str = "cpu"
    device: int = 0
    block_ratio: int = 1
    tokens_per_row: int = 1
    tokens: Interleave = Interleave()
    null_block: int | None = None
    scale: tuple[float, ...] = ()
    factors: Mapping[str, tuple[Factor, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", bind_axes(parse_axes(self.axes), self.shape, self.strides))
        self._check()

    @property
    def name(self) -> str:
        """How errors and logs speak of it."""
        part = f", part {self.part!r}" if self.part else ""
        first, last = min(self.layers), max(self.layers)
        layers = f"layers {first}..{last}" if last > first else f"layer {first}"
        return f"cache tensor (group {self.group!r}{part}, kv {'+'.join(self.kv) or '-'}, {layers})"

    def label(self, kv: str) -> str:
        """How facts and mismatches name a half of its class."""
        return "/".join(filter(None, (self.group, self.part, kv)))

    def stride(self, axis: str) -> int:
        """Bytes between neighbours on an unsplit axis; 0 if the tensor does not have it."""
        factors = self.factors.get(axis, ())
        return factors[0].stride if factors else 0

    def count(self, axis: str) -> int:
        """Coordinates on an axis; 1 if the tensor does not have it."""
        return prod(factor.count for factor in self.factors.get(axis, ()))

    def scales(self, heads: range) -> tuple[float, ...]:
        """One number for all these heads (global numbers, which it holds), or one for each of them."""
        first = self.heads.start
        return self.scale[heads.start - first : heads.stop - first] if len(self.scale) > 1 else self.scale or (1.0,)

    @property
    def is_state(self) -> bool:
        """True without a token axis: one slot a request, which travels whole and belongs to the last token."""
        return "token" not in self.factors

    @property
    def ids(self) -> int:
        """Number of block ids that address this tensor."""
        return self.count("block") // self.block_ratio

    @property
    def id_tokens(self) -> int:
        """Tokens that one block id covers on this rank; 0 for state."""
        return 0 if self.is_state else self.count("token") * self.tokens_per_row * self.block_ratio

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return self.item_bytes + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def _check(self) -> None:
        if not self.layers or not self.kv or not self.heads or min(self.shape) < 1:
            raise GeometryError(
                f"a cache tensor of group {self.group!r} is empty: shape {self.shape}, layers {self.layers}"
            )
        if self.kind not in _DEVICES:
            raise GeometryError(
                f"{self.name}: memory of kind {self.kind!r} is not supported, only {' and '.join(_DEVICES)}"
            )
        if self.heads.step != 1 or self.heads.start < 0:
            raise GeometryError(f"{self.name}: heads must be a range of step 1, not {self.heads}")
        if len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise GeometryError(f"{self.name}: layers must be distinct and not negative, not {list(self.layers)}")
        if sorted(self.kv) not in (["k", "v"], ["k"], ["v"], [""]):
            raise GeometryError(f"{self.name}: kv must be 'k', 'v', both, or none, not {self.kv}")
        for axis, given in (("layer", len(self.layers)), ("kv", len(self.kv)), ("head", len(self.heads))):
            if axis in self.factors and self.count(axis) != given:
                raise GeometryError(f"{self.name}: axis {axis!r} is {self.count(axis)} long, but {given} were named")
            if axis not in self.factors and given != 1:
                raise GeometryError(f"{self.name}: {given} {axis}s were named, but axes {self.axes!r} have no {axis!r}")
        self._check_units()
        check_scale(self.name, self.scale, len(self.heads))
        if self.item_bytes != CONVERTIBLE.get(self.dtype, self.item_bytes):
            size = CONVERTIBLE[self.dtype]
            raise GeometryError(f"{self.name}: elements of {self.dtype} have {size} bytes, not {self.item_bytes}")
        for what, number in (
            ("the longest axis", max(self.shape)),
            ("the last layer", max(self.layers)),
            ("the end of heads", self.heads.stop),
            ("tokens_per_row", self.tokens_per_row),
            ("of in tokens", self.tokens.of),
            ("chunk in tokens", self.tokens.chunk),
        ):
            if number > _MAX_DIMENSION:
                raise GeometryError(f"{self.name}: {what} is {number}, but no coordinate may be over {_MAX_DIMENSION}")
        self._check_strides()

    def _check_units(self) -> None:
        if self.block_ratio < 1:
            raise GeometryError(f"{self.name}: kernel_blocks_per_id must be at least 1, not {self.block_ratio}")
        if self.tokens_per_row < 1:
            raise GeometryError(f"{self.name}: tokens_per_row must be at least 1, not {self.tokens_per_row}")
        if self.count("block") % self.block_ratio:
            raise GeometryError(
                f"{self.name}: {self.count('block')} blocks are no multiple of kernel_blocks_per_id={self.block_ratio}"
            )
        if self.is_state and (self.tokens_per_row > 1 or self.tokens.of > 1):
            raise GeometryError(f"{self.name}: tokens_per_row and tokens describe a token axis, which it does not have")
        if self.tokens.of > 1 and self.tokens_per_row > 1:
            raise GeometryError(f"{self.name}: compressed rows cannot be interleaved over ranks")

    def _check_strides(self) -> None:
        reach = self.item_bytes  # bytes that the axes seen so far span; the next one must step over them
        for stride, count in sorted(zip(self.strides, self.shape, strict=True)):
            if count == 1:
                continue
            if stride < reach:
                raise GeometryError(
                    f"{self.name}: byte strides {self.strides} of shape {self.shape} overlap: a stride of {stride} "
                    f"steps inside {reach} bytes that smaller axes span"
                )
            reach += (count - 1) * stride


@dataclass(frozen=True, slots=True, eq=False)
class CacheTensor:
    """A torch tensor with the names of its axes and the global coordinates that it holds.

    The tensor may be any strided view. It must stay allocated while a worker has it registered; kvxfer keeps a
    reference.

    Tensors of one group must not share a byte, since a block id means a block of each of them. Tensors of different
    groups may lie in the same memory (a hybrid pool). Nothing compares their ids, so the caller's allocator must not
    use the same bytes for two groups at a time, nor bytes that `MemoryInDoubt` names in one group for another.

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
    tokens: Interleave = Interleave()
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
        )
        for rule, value, mark in wanted:
            if not hasattr(value, mark):
                raise GeometryError(f"{rule}, not {type(value).__name__}")
        _check_whole("kernel_blocks_per_id", self.kernel_blocks_per_id)
        _check_whole("tokens_per_row", self.tokens_per_row)
        try:
            for layer in self.layers:
                operator.index(layer)
        except TypeError as error:
            raise GeometryError(f"layers must be a list of whole numbers, not {self.layers!r}") from error

    def spec(self, null_block: int | None = None) -> TensorSpec:
        """The description without the memory.

        Raises:
            GeometryError: If names, coordinates, shape, strides or device do not fit together.
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
        return TensorSpec(
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
            scale=read_scale(self.scale, len(heads)),
        )


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

    @property
    def kind(self) -> str:
        """`"cpu"` or `"cuda"`."""
        return self.tensors[0].kind

    @property
    def device(self) -> int:
        """Index of the device that holds every tensor."""
        return self.tensors[0].device

    @cached_property
    def groups(self) -> Mapping[str, tuple[TensorSpec, ...]]:
        """Tensors by group, in order of first mention."""
        found: dict[str, list[TensorSpec]] = {}
        for spec in self.tensors:
            found.setdefault(spec.group, []).append(spec)
        return {name: tuple(specs) for name, specs in found.items()}

    @cached_property
    def pool_ids(self) -> Mapping[str, int]:
        """By group, how many block ids address every tensor of it."""
        return {name: min(spec.ids for spec in specs) for name, specs in self.groups.items()}

    @cached_property
    def addressed(self) -> bool:
        """Whether every base address is known; a peer that does not trust this side hides its own."""
        return all(spec.base for spec in self.tensors)

    def facts(self) -> Iterator[tuple[str, str]]:
        """(name, value) of everything about a tensor class that two engines must agree on, in a fixed order."""
        seen: dict[str, str] = {}
        for spec in self.tensors:
            for kv in spec.kv:
                label = spec.label(kv)
                for name, value in (
                    (f"{label}.dtype", spec.dtype),
                    (f"{label}.dim", str(spec.count("dim"))),
                    (f"{label}.has_tokens", str(not spec.is_state)),
                    (f"{label}.tokens_per_row", str(spec.tokens_per_row)),
                ):
                    if seen.setdefault(name, value) != value:
                        raise GeometryError(f"{spec.name}: {name} is {value}, but another tensor has {seen[name]}")
        yield from sorted(seen.items())

    def _check_groups(self) -> None:
        for name, specs in self.groups.items():
            first = specs[0]
            for spec in specs[1:]:
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
            ids = min(spec.ids for spec in specs)
            if first.null_block is not None and not 0 <= first.null_block < ids:
                raise GeometryError(
                    f"group {name!r}: the null block {first.null_block} is outside of its pool; give an id from 0 to "
                    f"{ids - 1}, or none if every id is a block"
                )

    def _check_unique(self) -> None:
        held: dict[tuple[str, str, int, str], list[tuple[range, TensorSpec]]] = {}
        for spec in self.tensors:
            for layer in spec.layers:
                for kv in spec.kv:
                    rivals = held.setdefault((spec.group, spec.part, layer, kv), [])
                    for heads, other in rivals:
                        if heads.start < spec.heads.stop and spec.heads.start < heads.stop:
                            raise GeometryError(
                                f"the same coordinates are given twice: layer {layer}, kv {kv or '-'}, "
                                f"heads {spec.heads} in {spec.name} and heads {heads} in {other.name}"
                            )
                    rivals.append((spec.heads, spec))
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
