"""Why the pieces of a plan are no longer than they are, as values: what a run is made of, where it ends, on which side.

`str()` of each is for people; `dataclasses.asdict` of an `Explanation` is plain data. They are derived in `growth`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["Breaks", "Cause", "Explanation", "Limit", "Run", "Side", "Step", "Stretch"]

_MANY: Final = {"head": "heads", "token": "tokens", "kv": "halves", "layer": "layers"}
_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


class Side(StrEnum):
    """Which side ends a run."""

    SOURCE = "source"
    DESTINATION = "destination"
    BOTH = "both sides"


class Cause(StrEnum):
    """Why the next index of an axis does not continue a run."""

    STRIDE = "stride"  # it lies elsewhere in the same layout
    APART = "apart"  # it lies in other memory: there is no one stride
    BLOCK_IDS = "block ids"  # it continues the run in the same block and where block ids follow each other
    KIND = "kind"  # what continues it on the other side is of another kind, and lies elsewhere on this one
    TURNS = "turns"  # the tokens take turns over ranks, so the next ones are not between these two


@dataclass(frozen=True, slots=True)
class Step:
    """What a run has taken in: an axis, or a stretch of another kind that begins where the run ended on both sides.

    Attributes:
        axis: Name of the axis; of a stretch, in what it differs: group, part, kv, layer, head or dim.
        count: How many of it.
        nbytes: Bytes of the run with it.
        then: The stretch that the run goes on with; None for an axis.
    """

    axis: str
    count: int
    nbytes: int
    then: "Stretch | None" = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one part of a cache puts into a piece, or all of it.

    Attributes:
        group: As in `CacheTensor`.
        part: As in `CacheTensor`.
        halves: Which of k and v, or `("",)`.
        layers: First and last layer.
        heads: First head and one past the last of what is copied.
        dtype: As in `TensorSpec`; of both sides where they differ.
        item_bytes: Bytes of one element, in which both sides are counted; of the narrower dtype where they differ.
        steps: What it is made of, the innermost axis first; of the first stretch of a piece, how the piece went on.
    """

    group: str
    part: str
    halves: tuple[str, ...]
    layers: tuple[int, int]
    heads: tuple[int, int]
    dtype: str
    item_bytes: int
    steps: tuple[Step, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes with all steps."""
        return self.steps[-1].nbytes if self.steps else self.item_bytes

    def __iter__(self) -> "Iterator[Stretch]":
        """This one, and those that it goes on with, in order of memory."""
        yield self
        for step in self.steps:
            yield from step.then or ()


@dataclass(frozen=True, slots=True)
class Breaks:
    """Where the full rows of one transfer follow each other in memory, and where they do not.

    Attributes:
        places: Pairs of neighbouring rows, in the order of destination addresses.
        source: Pairs that only the source breaks.
        destination: Pairs that only the destination breaks.
        both: Pairs that both break.
    """

    places: int
    source: int
    destination: int
    both: int

    @property
    def joined(self) -> int:
        """Pairs that are one piece."""
        return self.places - self.source - self.destination - self.both


@dataclass(frozen=True, slots=True)
class Limit:
    """One axis that would continue a run if it lay elsewhere.

    Attributes:
        axis: Its name: dim, head, token, kv, layer or block; group or part for what is of another kind.
        side: On which side it would have to lie elsewhere.
        cause: Why it does not continue the run.
        expected: The stride that would continue it, in bytes: the length of the run.
        src_stride: Bytes from one index to the next at the source; None where there is no one number.
        dst_stride: The same at the destination.
        count: Indices of the axis; 0 for blocks, whose number a request decides.
        between: Axes whose other indices lie in between, on that side.
        held: On that side, the heads that lie there (first, one past the last), where more do than are copied.
        breaks: For block ids and one transfer: how often that is so.
        then: What continues it on the other side, where that is of another kind.
    """

    axis: str
    side: Side
    cause: Cause
    expected: int
    src_stride: int | None
    dst_stride: int | None
    count: int = 0
    between: tuple[str, ...] = ()
    held: tuple[int, int] | None = None
    breaks: Breaks | None = None
    then: Stretch | None = None

    @property
    def name(self) -> str:
        """In two or three words, for logs."""
        named = {Cause.STRIDE: f"{self.axis} stride", Cause.APART: self.axis, Cause.KIND: self.axis}
        what = named.get(self.cause, str(self.cause))
        return f"{what} of both sides" if self.side is Side.BOTH else f"{self.side} {what}"

    def __str__(self) -> str:
        if self.cause is Cause.TURNS:
            return "the row ends: the tokens that follow take their turn on another rank"
        if self.cause is Cause.BLOCK_IDS:
            rule = f"the block ends ({self.side}); within it and where block ids follow each other, the run goes on"
            if self.breaks is None:
                return rule
            told = self.breaks
            return (
                f"{rule}: in {told.joined} of {told.places} places; broken by the source {told.source}, by the "
                f"destination {told.destination}, by both {told.both}"
            )
        other = Side.SOURCE if self.side is Side.DESTINATION else Side.DESTINATION
        if self.then is not None:
            what = ", ".join(_named(tuple(self.then)).values())
            return f"the {other} goes on with {what}, but the {self.side} does not{self._split()}"
        strides = {Side.SOURCE: self.src_stride, Side.DESTINATION: self.dst_stride}
        sides = (Side.SOURCE, Side.DESTINATION) if self.side is Side.BOTH else (self.side,)
        found = [
            f"at the {side} the next {self.axis} "
            + ("lies in other memory" if strides[side] is None else f"lies {strides[side]} B on")
            for side in sides
        ]
        goes_on = "" if self.side is Side.BOTH else f"the {other} goes on with the next {self.axis}, but "
        text = f"{goes_on}{' and '.join(found)}, not {self.expected} B"
        between = [axis for axis in self.between if axis != "head" or self.held is None]
        if between:
            text += f" (between: {', '.join(between)})"
        text += self._split()
        if self.count:
            text += f"; {self.expected} B would make pieces of at least {_size(self.expected * self.count)}"
        return text

    def _split(self) -> str:
        if self.held is None:
            return ""
        return f"; heads are split: {self.held[0]}..{self.held[1] - 1} lie there, and only some are copied"


@dataclass(frozen=True, slots=True)
class Run:
    """The pieces of regions that are alike.

    Attributes:
        first: What a piece begins with, and by its steps all that the piece is made of.
        piece_bytes: Bytes of one piece in a full row.
        pieces: Pieces of all these regions in a full row.
        row_tokens: Token rows in a full row; 1 for state.
        limits: Why it ends there: any one of them mended would make pieces longer.
    """

    first: Stretch
    piece_bytes: int
    pieces: int
    row_tokens: int
    limits: tuple[Limit, ...]

    def __str__(self) -> str:
        row = f"row of {self.row_tokens} tokens" if self.row_tokens > 1 else "row"
        pieces = f"{self.pieces} pieces of" if self.pieces > 1 else "one piece of"
        first = self.first
        lines = [
            f"{', '.join(_named(tuple(first)).values())}: {pieces} {_size(self.piece_bytes)} a {row}",
            f"  one piece: {first.item_bytes} B ({first.dtype})" + "".join(_taken(first, step) for step in first.steps),
            *(f"  {limit}" for limit in self.limits),
        ]
        return "\n".join(lines)


def _taken(first: Stretch, step: Step) -> str:
    """What a run takes in; of another stretch, in what it is unlike the first."""
    if step.then is None:
        return f", x {step.count} {_MANY.get(step.axis, step.axis)} = {_size(step.nbytes)}"
    before = _named((first,))
    unlike = [text for what, text in _named(tuple(step.then)).items() if text != before.get(what)]
    return f", goes on with {', '.join(unlike)} ({_size(step.then.nbytes)}) = {_size(step.nbytes)}"


def _named(stretches: Sequence[Stretch]) -> dict[str, str]:
    """What stretches are of, in words: all groups, parts, halves and layers, and the heads where they are the same."""
    groups, parts = (tuple(dict.fromkeys(names)) for names in zip(*((s.group, s.part) for s in stretches), strict=True))
    halves = [half for half in dict.fromkeys(half for s in stretches for half in s.halves) if half]
    first, last = min(s.layers[0] for s in stretches), max(s.layers[1] for s in stretches)
    heads = {s.heads for s in stretches}
    found = {"group": _counted("group", groups)}
    if any(parts):
        found["part"] = _counted("part", parts)
    if halves:
        found["kv"] = "+".join(halves)
    found["layer"] = f"layers {first}..{last}" if last > first else f"layer {first}"
    (start, stop), *more = heads
    if stop > 1 and not more:
        found["head"] = f"heads {start}..{stop - 1}"
    return found


def _counted(what: str, names: Sequence[str]) -> str:
    return f"{what}{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the pieces of a pair, or of one transfer, are as long as they are; `str()` of it is for people.

    Attributes:
        runs: Every kind of run.
    """

    runs: tuple[Run, ...]

    @property
    def limited_by(self) -> str:
        """What ends the runs that make the most pieces, in a few words; empty if there are none."""
        if not self.runs:
            return ""
        most = max(self.runs, key=lambda run: run.pieces)
        return ", ".join(limit.name for limit in most.limits)

    def __str__(self) -> str:
        return "\n".join(map(str, self.runs))


def _size(nbytes: int) -> str:
    for unit, size in _UNITS:
        if nbytes >= size and nbytes % (size // 16) == 0:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"
