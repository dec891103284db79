"""One cache tensor without its memory: its axes, names, numbers and what they mean. It can cross the wire.

Nothing here assumes K and V, heads, or a single group.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, inf, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import GeometryError
from kvxfer.names import CONVERTIBLE, MAX_LAYERS, MAX_SCALES, MAX_STRIDE, MAX_WIDTH, MAX_WORLD

if TYPE_CHECKING:
    import torch

__all__ = [
    "AXIS_NAMES",
    "EVERY_TOKEN",
    "KV_ORDER",
    "LAYOUTS",
    "Axis",
    "Factor",
    "Interleave",
    "Place",
    "RowSide",
    "TensorSpec",
    "axis_offsets",
    "bind_axes",
    "bind_layout",
    "check_scale",
    "check_whole",
    "expand_layout",
    "parse_axes",
    "read_scale",
    "unlike",
]

I64: TypeAlias = NDArray[np.int64]

# --- axes
#
# `"kv block head token dim"` names five axes. An axis may be split once: `dim/8` is its outer part and `dim%8` the
# inner 8 (the vectorised K cache of several engines). `block` and `token` are never split, because block ids and token
# ranges address them.

AXIS_NAMES: Final = ("block", "layer", "kv", "head", "token", "dim")
"""Every axis that a cache tensor may have. `block` is always there."""
KV_ORDER: Final = ("", "k", "v")
"""Halves in the order in which a chunk has them: neither, K, V."""

_TERM: Final = re.compile(r"([a-z]+)(?:([/%])([1-9][0-9]*))?")
_NEVER_SPLIT: Final = frozenset({"block", "token", "layer", "kv"})


@dataclass(frozen=True, slots=True)
class Axis:
    """One term of an axis string."""

    name: str  # one of `AXIS_NAMES`
    split: int = 0  # 0 for a whole axis, else the size of the inner part
    inner: bool = False  # true for the inner part (`dim%8`), False for the outer (`dim/8`) or a whole axis

    def __str__(self) -> str:
        return f"{self.name}{'%' if self.inner else '/'}{self.split}" if self.split else self.name


@dataclass(frozen=True, slots=True)
class Factor:
    """One axis, or part of a split axis, bound to memory: index i is coordinate `i * unit`, `i * stride` bytes away."""

    count: int
    unit: int
    stride: int


def parse_axes(text: str) -> tuple[Axis, ...]:
    """Read an axis string.

    Raises:
        GeometryError: If a term is unknown, an axis is named twice, a split is incomplete, or `block` is missing.
    """
    axes: list[Axis] = []
    for term in text.split():
        match = _TERM.fullmatch(term)
        if match is None or match[1] not in AXIS_NAMES:
            raise GeometryError(
                f"axes {text!r}: {term!r} is not one of {', '.join(AXIS_NAMES)} (or a split, like dim/8)"
            )
        axis = Axis(match[1], int(match[3] or 0), match[2] == "%")
        if axis.split and axis.name in _NEVER_SPLIT:
            raise GeometryError(f"axes {text!r}: {axis.name} cannot be split; only head and dim can")
        if axis in axes or any(a.name == axis.name and not (a.split and axis.split) for a in axes):
            raise GeometryError(f"axes {text!r}: {axis.name} is named twice")
        axes.append(axis)
    for name in AXIS_NAMES:
        parts = [a for a in axes if a.name == name and a.split]
        if parts and (len(parts) != 2 or parts[0].split != parts[1].split or parts[0].inner == parts[1].inner):
            shown = " ".join(str(part) for part in parts)
            raise GeometryError(
                f"axes {text!r}: a split needs its two parts once each ({name}/n and {name}%n), not {shown}"
            )
    if not any(a.name == "block" for a in axes):
        raise GeometryError(f"axes {text!r}: the axis 'block' is missing")
    return tuple(axes)


def bind_axes(
    axes: tuple[Axis, ...], shape: tuple[int, ...], strides: tuple[int, ...]
) -> dict[str, tuple[Factor, ...]]:
    """Bind parsed axes to a shape and byte strides.

    Returns:
        For each axis that is present its factors, outermost (largest unit) first.

    Raises:
        GeometryError: If the numbers of axes differ, or an inner part is not as long as its split says.
    """
    text = " ".join(map(str, axes))
    if len(axes) != len(shape):
        raise GeometryError(f"axes {text!r} name {len(axes)} axes, but the tensor has {len(shape)}: shape {shape}")
    if len(strides) != len(shape):  # only a peer can say that of a tensor
        raise GeometryError(f"a tensor of {len(shape)} axes ({text!r}) has {len(strides)} strides: {strides}")
    bound: dict[str, list[Factor]] = {}
    for axis, count, stride in zip(axes, shape, strides, strict=True):
        if axis.inner and count != axis.split:
            raise GeometryError(f"axes {text!r}: {axis} must be {axis.split} long, but the tensor has {count} there")
        unit = axis.split if axis.split and not axis.inner else 1
        bound.setdefault(axis.name, []).append(Factor(count, unit, stride))
    return {name: tuple(sorted(factors, key=lambda f: -f.unit)) for name, factors in bound.items()}


def axis_offsets(factors: tuple[Factor, ...], start: int, stop: int) -> I64:
    """Byte offsets of the coordinates [start, stop) of an axis; a missing axis has the one coordinate 0."""
    coordinates = np.arange(start, stop, dtype=np.int64)
    offsets = np.zeros_like(coordinates)
    for factor in factors:
        offsets += coordinates // factor.unit % factor.count * factor.stride
    return offsets


# --- layouts by name
#
# vLLM names a layout by one letter an axis, in the order of memory: L layer, B block, N token in the block, H head, C
# the content of one token of one head. For attention, C is K and V side by side, so it becomes `kv dim` here. `NHD`
# and `HND` say only what a block of K, or one of V, looks like inside.
#
# A name stands for an axis string wherever one is taken. Only the axis string is kept, so names never travel.

LAYOUTS: Final = MappingProxyType(
    {
        "NHD": "block token head dim",
        "HND": "block head token dim",
        "LBNHC": "layer block token head kv dim",
        "LBHNC": "layer block head token kv dim",
        "LHBNC": "layer head block token kv dim",
        "BLNHC": "block layer token head kv dim",
        "BLHNC": "block layer head token kv dim",
        "BHLNC": "block head layer token kv dim",
    }
)
"""The axis string of each name. The last six are the members of vLLM's `KVCacheLayout`."""

_CONTENT: Final = "C"


def expand_layout(axes: str) -> str:
    """The axis string that a name stands for; any other text as it is, with single spaces."""
    return LAYOUTS.get(axes.strip(), " ".join(axes.split()))


def bind_layout(
    axes: str, shape: Sequence[int], strides: Sequence[int]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Fit an axis string, or the name of a layout, to a tensor.

    A tensor that a name with C describes has one axis a letter, its content whole; a tensor of one layer may do without
    the layer axis.

    Args:
        axes: An axis string, or a name of `LAYOUTS`; its axes in the tensor's order.
        shape: Elements per axis.
        strides: Distance per axis, in any unit.

    Returns:
        The axis string, and the shape and strides that go with it: the content is taken apart into K and V.

    Raises:
        GeometryError: If the tensor has another number of axes than the name, or the content no two equal halves.
    """
    name, text, sizes, steps = axes.strip(), expand_layout(axes), tuple(shape), tuple(strides)
    if name not in LAYOUTS or not name.endswith(_CONTENT):
        return text, sizes, steps
    if len(sizes) not in {len(name), len(name) - 1}:
        raise GeometryError(
            f"layout {name} names {len(name)} axes ({len(name) - 1} for one layer), but the tensor has {len(sizes)}: "
            f"shape {sizes}; where K and V are an axis of their own, write the axis string: {text!r}"
        )
    if sizes[-1] % 2:
        raise GeometryError(
            f"layout {name}: the last axis holds K and V side by side, but {sizes[-1]} is odd; describe a latent cache "
            "by an axis string such as 'block token dim'"
        )
    if len(sizes) < len(name):
        text = " ".join(term for term in text.split() if term != "layer")
    half = sizes[-1] // 2
    return text, (*sizes[:-1], 2, half), (*steps[:-1], half * steps[-1], steps[-1])


# --- scales
#
# A scale is read once, when its tensor is registered, and is from then on a plain number of 32 bits that crosses the
# wire with the rest of the description.


def read_scale(scale: "torch.Tensor | Any | None", heads: int) -> tuple[float, ...]:
    """The numbers of a scale tensor; empty without one. Waits for the device that holds it.

    Args:
        scale: float32, of shape () or (heads,).
        heads: Heads that the cache tensor holds.

    Raises:
        GeometryError: If it is no tensor, or of another dtype or shape.
    """
    if scale is None:
        return ()
    if not hasattr(scale, "data_ptr"):
        raise GeometryError(f"scale must be a torch.Tensor of dtype float32, not {type(scale).__name__}")
    dtype, shape = str(scale.dtype).removeprefix("torch."), tuple(scale.shape)
    if dtype != "float32":
        raise GeometryError(f"scale must be of dtype float32, not {dtype}; pass scale.float()")
    if shape not in ((), (heads,)):
        raise GeometryError(f"scale must have the shape () or ({heads},), one number a head, not {shape}")
    numbers = cast("Any", scale).detach().cpu().reshape(-1)  # torch leaves the type of its lists open
    return tuple(map(float, numbers.tolist()))


def check_scale(name: str, scale: Sequence[float], heads: int) -> None:
    """Check the numbers of a scale, one's own or a peer's.

    Raises:
        GeometryError: If there are neither none, one, nor one a head, or one is not finite and above 0.
    """
    if len(scale) > MAX_SCALES:
        raise GeometryError(f"{name}: scale has {len(scale)} numbers, but at most {MAX_SCALES} can be used")
    if len(scale) not in {0, 1, heads}:
        raise GeometryError(f"{name}: scale has {len(scale)} numbers for {heads} heads; give one, or one for each head")
    wrong = next((at for at, number in enumerate(scale) if not 0 < number < inf), None)
    if wrong is not None:
        raise GeometryError(f"{name}: scale[{wrong}] is {scale[wrong]:g}, but a scale must be finite and above 0")


# --- tensors

Place: TypeAlias = tuple[str, str, str, int]
"""What a tensor holds of a block: its group, part, half (K, V or neither) and layer."""

_DEVICES: Final = ("cpu", "cuda")
_MAX_DIMENSION: Final = 0xFFFF_FFFF
_MAX_ADDRESS: Final = 0x7FFF_FFFF_FFFF_FFFF  # plans count in signed 64 bits
_KEPT_FORMS: Final = 1024


def check_whole(what: str, number: object) -> None:
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
            check_whole(f"{what} of an Interleave", number)
        if not (1 <= self.of <= MAX_WORLD and 0 <= self.rank < self.of and 1 <= self.chunk <= _MAX_DIMENSION):
            raise GeometryError(
                f"{self}: needs 0 <= rank < of and chunk >= 1; of is at most {MAX_WORLD} and chunk {_MAX_DIMENSION}"
            )

    def meets(self, other: "Interleave") -> bool:
        """Whether some token, however far on, is held by both.

        The turns of both begin at distances that are equal modulo the greatest common divisor of the two periods, and
        every such distance occurs: it is enough to look at the two that are closest to 0.
        """
        common = gcd(self.chunk * self.of, other.chunk * other.of)
        behind = (other.rank * other.chunk - self.rank * self.chunk) % common
        return behind < self.chunk or common - behind < other.chunk


EVERY_TOKEN: Final = Interleave()
"""No context parallelism."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What follows from all of a cache tensor but its layers, its base and its scale.

    `factors` has each axis with its parts in memory, outermost first, and `counts` the coordinates on it.
    """

    factors: Mapping[str, tuple[Factor, ...]]
    counts: Mapping[str, int]
    extent_bytes: int


_forms: Final[dict[tuple[object, ...], Form]] = {}
"""Forms that were checked: the tensors of a cache have few, and each peer has the same again."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One cache tensor without its memory: names, coordinates, shape and byte strides."""

    group: str  # block-address space; tensors of a group share block ids
    part: str  # tells tensors of one layer with different meaning apart (`""` for plain K and V)
    # which halves it holds, in the order of its kv axis: `("k", "v")`, `("k",)`, `("v",)` or `("",)`
    kv: tuple[str, ...]
    layers: tuple[int, ...]  # global layer numbers, in the order of its layer axis
    heads: range  # global range of heads (channels, for convolution state); `range(0, 1)` without a head axis
    axes: str  # the axis string, in the tensor's order
    shape: tuple[int, ...]  # elements per axis
    strides: tuple[int, ...]  # bytes per axis
    dtype: str  # torch's name without the prefix, `"bfloat16"`
    item_bytes: int
    base: int = 0  # address of the first element, or 0 where a peer did not share it
    kind: str = "cpu"  # `"cpu"` or `"cuda"`
    device: int = 0  # index of the device
    block_ratio: int = 1  # kernel blocks per block id (an engine that counts in 64 over a kernel that stores 16 has 4)
    tokens_per_row: int = 1  # tokens that one index of the token axis stands for (compressed caches)
    tokens: Interleave = EVERY_TOKEN  # which tokens it holds, under context parallelism
    null_block: int | None = None  # see `Group`
    scale: tuple[float, ...] = ()  # value = stored * scale: one number, one for each of its heads, or none for 1
    # what it has in common with tensors that differ from it in layers, base and scale alone; of most such it is the
    # same object, so that what follows from it need be found out only once
    form: "Form" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        key = (
            self.group, self.part, self.kv, len(self.layers), self.heads.start, self.heads.stop, self.heads.step,
            self.axes, self.shape, self.strides, self.dtype, self.item_bytes, self.kind, self.device, self.block_ratio,
            self.tokens_per_row, self.tokens.rank, self.tokens.of, self.tokens.chunk, self.null_block,
        )  # fmt: skip
        form = _forms.get(key)
        if form is None:
            factors = bind_axes(parse_axes(self.axes), self.shape, self.strides)
            counts = {axis: prod(factor.count for factor in found) for axis, found in factors.items()}
            extent = self.item_bytes + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
            object.__setattr__(self, "form", Form(factors, counts, extent))
            self._check()
            if len(_forms) >= _KEPT_FORMS:
                _forms.clear()
            _forms[key] = self.form
        else:
            object.__setattr__(self, "form", form)
            self._check_bounds(self._place_bounds())
        self._check_layers()
        if self.scale:
            check_scale(self.name, self.scale, len(self.heads))

    @property
    def factors(self) -> Mapping[str, tuple[Factor, ...]]:
        """Axes that it has, each with its parts in memory, outermost first."""
        return self.form.factors

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

    def facts(self) -> Iterator[tuple[str, object]]:
        """(name, value) of what two tensors must agree on, whether or not their elements are converted."""
        yield "dim", self.count("dim")
        yield "has_tokens", not self.is_state
        yield "tokens_per_row", self.tokens_per_row
        if self.is_state:
            yield "kernel_blocks_per_id", self.block_ratio

    def stride(self, axis: str) -> int:
        """Bytes between neighbours on an unsplit axis; 0 if the tensor does not have it."""
        factors = self.form.factors.get(axis, ())
        return factors[0].stride if factors else 0

    def count(self, axis: str) -> int:
        """Coordinates on an axis; 1 if the tensor does not have it."""
        return self.form.counts.get(axis, 1)

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
        return self.form.extent_bytes

    def _check(self) -> None:
        self._check_text()
        self._check_bounds([*self._place_bounds(), *self._form_bounds()])
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
        if sorted(self.kv) not in (["k", "v"], ["k"], ["v"], [""]):
            raise GeometryError(f"{self.name}: kv must be 'k', 'v', both, or none, not {self.kv}")
        for axis, given in (("layer", len(self.layers)), ("kv", len(self.kv)), ("head", len(self.heads))):
            if axis in self.factors and self.count(axis) != given:
                raise GeometryError(f"{self.name}: axis {axis!r} is {self.count(axis)} long, but {given} were named")
            if axis not in self.factors and given != 1:
                raise GeometryError(f"{self.name}: {given} {axis}s were named, but axes {self.axes!r} have no {axis!r}")
        self._check_units()
        if self.item_bytes != CONVERTIBLE.get(self.dtype, self.item_bytes):
            size = CONVERTIBLE[self.dtype]
            raise GeometryError(f"{self.name}: elements of {self.dtype} have {size} bytes, not {self.item_bytes}")
        self._check_strides()

    def _check_layers(self) -> None:
        if len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise GeometryError(f"{self.name}: layers must be distinct and not negative, not {list(self.layers)}")

    def _check_text(self) -> None:
        """What no frame could hold: first of all, since errors name it."""
        for name in (self.group, self.part):
            try:
                name.encode()
            except UnicodeEncodeError as error:
                raise GeometryError(f"a cache tensor of group {self.group!r}: {name!r} is no text: {error}") from error

    def _check_bounds(self, bounds: Sequence[tuple[str, int, int]]) -> None:
        """What no frame could hold, or no plan: before the rest, since not even its length can be asked for."""
        for what, number, most in bounds:
            if number > most:
                raise GeometryError(
                    f"a cache tensor of group {self.group!r}: {what} is {number}, but may not be over {most}"
                )

    def _place_bounds(self) -> Sequence[tuple[str, int, int]]:
        return (
            ("the last layer", max(self.layers, default=0), _MAX_DIMENSION),
            ("the end of its memory", self.base + self.extent_bytes, _MAX_ADDRESS),
        )

    def _form_bounds(self) -> Sequence[tuple[str, int, int]]:
        return (
            ("the number of layers", len(self.layers), MAX_LAYERS),
            ("the longest axis", max(self.shape, default=0), _MAX_DIMENSION),
            ("the end of heads", self.heads.stop, _MAX_DIMENSION),
            ("tokens_per_row", self.tokens_per_row, _MAX_DIMENSION),
            ("the largest byte stride", max(self.strides, default=0), MAX_STRIDE - 1),
            *((f"the length of axis {axis!r}", self.count(axis), MAX_WIDTH) for axis in ("head", "dim")),
        )

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


def unlike(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The first tensor of each form, in their order; of a form that was not kept, more than one."""
    found: dict[int, TensorSpec] = {}
    for spec in specs:
        found.setdefault(id(spec.form), spec)
    return list(found.values())


# --- where a token is


@dataclass(frozen=True, slots=True)
class RowSide:
    """How one side addresses tokens of a group: tokens per kernel block, kernel blocks per id, interleaving.

    `block_tokens` counts token rows, and is 0 for state; so is `id_tokens`, the tokens of a block id on this rank.
    """

    block_tokens: int
    block_ratio: int
    tokens_per_row: int
    rank: int
    of: int
    chunk: int
    null_block: int | None
    is_state: bool = field(init=False, repr=False, compare=False)
    id_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_state", self.block_tokens == 0)
        object.__setattr__(self, "id_tokens", self.block_tokens * self.tokens_per_row * self.block_ratio)

    @classmethod
    def of_tensor(cls, spec: TensorSpec) -> "RowSide":
        """The row addressing of one cache tensor."""
        return cls(
            0 if spec.is_state else spec.count("token"),
            spec.block_ratio,
            spec.tokens_per_row,
            spec.tokens.rank,
            spec.tokens.of,
            spec.tokens.chunk,
            spec.null_block,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """All but the null block: numbers, which have an order."""
        return (self.block_tokens, self.block_ratio, self.tokens_per_row, self.rank, self.of, self.chunk)

    @property
    def grid(self) -> int:
        """Rows never cross a multiple of this many token rows."""
        return gcd(self.block_tokens, self.chunk) if self.of > 1 else self.block_tokens

    def common(self, other: "RowSide") -> int:
        """Token rows of a sub-block of both sides; 1 for state."""
        return gcd(self.grid, other.grid) or 1

    def holds(self, tokens: I64) -> NDArray[np.bool_]:
        """Which of these tokens are on this rank."""
        return np.asarray((tokens // self.chunk) % self.of == self.rank)

    def held(self, start: int, stop: int, step: int) -> I64:
        """Every so many of its token rows in [start, stop); its turns and `start` are multiples of the step."""
        if self.of == 1:
            return np.arange(start, stop, step, dtype=np.int64)
        turns, rest = np.divmod(np.arange(self.before(start), self.before(stop), step, dtype=np.int64), self.chunk)
        return (turns * self.of + self.rank) * self.chunk + rest

    def local(self, tokens: I64) -> I64:
        """How many tokens before these this rank holds: where in its blocks they are, if it holds them."""
        if self.of == 1:
            return tokens
        turn = self.chunk * self.of
        return tokens // turn * self.chunk + np.clip(tokens % turn - self.rank * self.chunk, 0, self.chunk)

    def before(self, token: int) -> int:
        """The same of one token: for numbers, of which there are few, arrays take longer."""
        turns, rest = divmod(token, self.chunk * self.of)
        return turns * self.chunk + min(max(0, rest - self.rank * self.chunk), self.chunk)

    def most(self, tokens: int) -> int:
        """How many token rows this rank holds of so many neighbouring tokens, at most."""
        turns, rest = divmod(tokens, self.chunk * self.of)
        return (turns * self.chunk + min(rest, self.chunk)) // self.tokens_per_row

    def kernel_blocks(self, ids: I64) -> I64:
        """Kernel block numbers of a list of block ids."""
        return (ids[:, None] * self.block_ratio + np.arange(self.block_ratio, dtype=np.int64)).ravel()
