"""One cache tensor without its memory: names, numbers and what they mean. It can cross the wire.

Nothing here assumes K and V, heads, or a single group.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Final

from kvxfer.dtypes import CONVERTIBLE
from kvxfer.errors import GeometryError
from kvxfer.geometry.axes import Factor, bind_axes, parse_axes
from kvxfer.geometry.scales import check_scale
from kvxfer.limits import MAX_LAYERS, MAX_STRIDE, MAX_WIDTH, MAX_WORLD

__all__ = ["EVERY_TOKEN", "Interleave", "TensorSpec", "check_whole", "unlike"]

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

    Attributes:
        factors: Axes that it has, each with its parts in memory, outermost first.
        counts: Coordinates on each of them.
        extent_bytes: Bytes from the first element to the end of the last.
    """

    factors: Mapping[str, tuple[Factor, ...]]
    counts: Mapping[str, int]
    extent_bytes: int


_forms: Final[dict[tuple[object, ...], Form]] = {}
"""Forms that were checked: the tensors of a cache have few, and each peer has the same again."""


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
        form: What it has in common with tensors that differ from it in layers, base and scale alone; of most such it is
            the same object, so that what follows from it need be found out only once.
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
    tokens: Interleave = EVERY_TOKEN
    null_block: int | None = None
    scale: tuple[float, ...] = ()
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
