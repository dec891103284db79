"""What one rank holds, checked as a whole: several cache tensors, and the groups whose block ids they share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TypeAlias

from kvxfer.errors import GeometryError
from kvxfer.geometry.overlap import Bytes, shared
from kvxfer.geometry.side import RowSide
from kvxfer.geometry.spec import TensorSpec, check_whole, unlike
from kvxfer.geometry.tensor import CacheTensor
from kvxfer.lazy import lazy
from kvxfer.limits import MAX_FACTS, MAX_NAME, MAX_PLACES, MAX_TENSORS

__all__ = ["CacheGeometry", "Group", "Place"]

Place: TypeAlias = tuple[str, str, str, int]
"""What a tensor holds of a block: its group, part, half (K, V or neither) and layer."""


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
        """By group, how its first tensor addresses tokens; others may cut what an id covers otherwise."""
        return {name: RowSide.of_tensor(specs[0]) for name, specs in self.groups.items()}

    @lazy
    def addressed(self) -> bool:
        """Whether every base address is known; a peer that does not trust this side hides its own."""
        return all(spec.base for spec in self.tensors)

    def facts(self) -> Iterator[tuple[str, str]]:
        """(name, value) of everything about a tensor class that two engines must agree on, in a fixed order."""
        seen: dict[str, str] = {}
        for spec in unlike(self.tensors):
            for kv in spec.kv:
                label = spec.label(kv)
                for name, value in (
                    (f"{label}.dtype", spec.dtype),
                    (f"{label}.dim", str(spec.count("dim"))),
                    (f"{label}.has_tokens", str(not spec.is_state)),
                    (f"{label}.tokens_per_row", str(spec.tokens_per_row)),
                    *(((f"{label}.kernel_blocks_per_id", str(spec.block_ratio)),) if spec.is_state else ()),
                ):
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
