"""Who sends what: divides what one decode rank needs among the prefill ranks that hold it.

Heads by overlap, layers by stage, tokens by the turns that meet, replicated data from one owner each. Where several
ranks hold the same coordinates the owner is rotated by the decode rank, so that the load spreads. The result is a pure
function of the geometries: every decode rank computes its own part, and nobody has to agree.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from kvxfer.errors import MismatchError
from kvxfer.geometry.cache import CacheGeometry
from kvxfer.geometry.spec import Interleave, TensorSpec

__all__ = ["Selection", "common", "resolve"]


class Selection(NamedTuple):
    """Part of a tensor class that goes from one prefill rank to one decode rank.

    A tuple, since plans are looked up by it for every transfer.

    Attributes:
        group: As in `CacheTensor`.
        part: As in `CacheTensor`.
        kv: `"k"`, `"v"` or `""`.
        layers: Global layer numbers, ascending.
        head_start: First head.
        head_stop: One past the last head.
    """

    group: str
    part: str
    kv: str
    layers: tuple[int, ...]
    head_start: int
    head_stop: int


@dataclass(frozen=True, slots=True)
class _Holding:
    rank: int
    start: int
    stop: int
    tokens: Interleave


_Class = tuple[str, str, str, int]  # group, part, kv, layer
_Held = dict[_Class, tuple[_Holding, ...]]


def resolve(need: CacheGeometry, have: Sequence[CacheGeometry], *, rank: int = 0) -> list[tuple[Selection, ...]]:
    """Divide what `need` holds among the ranks of `have`.

    Args:
        need: Geometry of one decode rank.
        have: Geometries of all ranks of the prefill engine, by rank.
        rank: The decode rank, which rotates the owners of replicated data.

    Returns:
        For each rank of `have` its selections; empty for ranks from which nothing is needed.

    Raises:
        MismatchError: If coordinates that `need` holds are on no rank. It names every class of which that is so, with
            what is held here and there.
    """
    held, missing = _index(have), dict[str, tuple[str, str]]()
    share: dict[tuple[tuple[_Holding, ...], int, int, Interleave], list[tuple[int, int, int]]] = {}
    found: dict[tuple[int, str, str, str, int, int], list[int]] = {}
    for spec in need.tensors:
        for layer in spec.layers:
            for kv in spec.kv:
                holdings = held.get((spec.group, spec.part, kv, layer), ())
                key = (holdings, spec.heads.start, spec.heads.stop, spec.tokens)
                if key not in share:
                    share[key] = _share(holdings, spec, rank)
                for owner, start, stop in share[key]:
                    if owner < 0:
                        missing |= _missing(need, spec, kv, layer, held)
                    found.setdefault((owner, spec.group, spec.part, kv, start, stop), []).append(layer)
    if missing:
        shown = "; ".join(f"{name}: {here} here, {there} there" for name, (here, there) in missing.items())
        raise MismatchError(f"no prefill rank holds all that this one needs: {shown}", fields=missing)
    result: list[list[Selection]] = [[] for _ in have]
    for (owner, group, part, kv, start, stop), layers in found.items():
        result[owner].append(Selection(group, part, kv, tuple(sorted(layers)), start, stop))
    return [tuple(sorted(selections)) for selections in result]


def common(src: CacheGeometry, dst: CacheGeometry) -> tuple[Selection, ...]:
    """Everything that both hold: what a transfer between the two can be about."""
    held = _index([src])
    found: dict[tuple[str, str, str, int, int], list[int]] = {}
    for spec in dst.tensors:
        for layer in spec.layers:
            for kv in spec.kv:
                for holding in held.get((spec.group, spec.part, kv, layer), ()):
                    start, stop = max(holding.start, spec.heads.start), min(holding.stop, spec.heads.stop)
                    if start < stop and holding.tokens.meets(spec.tokens):
                        found.setdefault((spec.group, spec.part, kv, start, stop), []).append(layer)
    return tuple(
        sorted(
            Selection(group, part, kv, tuple(sorted(layers)), start, stop)
            for (group, part, kv, start, stop), layers in found.items()
        )
    )


def _missing(need: CacheGeometry, spec: TensorSpec, kv: str, layer: int, held: _Held) -> dict[str, tuple[str, str]]:
    """What of a tensor of this rank is on no prefill rank: its name, what of its class is held here, and what there."""
    label, kind = spec.label(kv), (spec.group, spec.part, kv)
    there = {place: holdings for place, holdings in held.items() if place[:3] == kind}
    if not there:
        names = sorted({"/".join(filter(None, place[:3])) for place in held})
        return {label: ("held", f"only {', '.join(names)}" if names else "nothing")}
    here = [own for own in need.tensors if (own.group, own.part) == kind[:2] and kv in own.kv]
    if (*kind, layer) not in held:
        return {f"{label}.layers": (_runs(n for own in here for n in own.layers), _runs(place[3] for place in there))}
    holdings = held[*kind, layer]
    heads = {head for holding in holdings for head in range(holding.start, holding.stop)}
    if not heads.issuperset(spec.heads):
        return {f"{label}.heads": (_runs(n for own in here for n in own.heads), _runs(heads))}
    turns = sorted({(h.tokens.of, h.tokens.chunk, h.tokens.rank) for h in holdings})
    mine = (spec.tokens.of, spec.tokens.chunk, spec.tokens.rank)
    told = [f"part {rank} of {of} in turns of {chunk}" for of, chunk, rank in (mine, *turns)]
    return {f"{label}.tokens": ("all" if spec.tokens.of == 1 else told[0], ", ".join(told[1:]))}


def _runs(numbers: Iterable[int]) -> str:
    """Numbers as `0..3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}..{last}" if last > first else f"{first}" for first, last in runs)


def _index(have: Sequence[CacheGeometry]) -> _Held:
    held: dict[_Class, list[_Holding]] = {}
    for rank, geometry in enumerate(have):
        for spec in geometry.tensors:
            holding = _Holding(rank, spec.heads.start, spec.heads.stop, spec.tokens)
            for layer in spec.layers:
                for kv in spec.kv:
                    held.setdefault((spec.group, spec.part, kv, layer), []).append(holding)
    return {key: tuple(holdings) for key, holdings in held.items()}


def _share(holdings: tuple[_Holding, ...], need: TensorSpec, turn: int) -> list[tuple[int, int, int]]:
    """(owner, first head, one past the last) covering the heads of `need`; owner -1 where nobody holds them."""
    heads = need.heads
    cuts = {heads.start, heads.stop}
    cuts |= {edge for h in holdings for edge in (h.start, h.stop) if heads.start < edge < heads.stop}
    edges = sorted(cuts)
    shares: dict[int, list[tuple[int, int, int]]] = {}
    for start, stop in pairwise(edges):
        holders = [h for h in holdings if h.start <= start and stop <= h.stop]
        for owner in _owners(holders, need.tokens, turn):
            mine = shares.setdefault(owner, [])
            first = mine.pop()[1] if mine and mine[-1][2] == start else start
            mine.append((owner, first, stop))
    return list(chain.from_iterable(shares.values()))


def _owners(holders: list[_Holding], tokens: Interleave, turn: int) -> list[int]:
    """One owner for every residue of the token interleaving that meets these tokens; [-1] if such a one has none."""
    by_residue: dict[Interleave, list[int]] = {}
    for holder in holders:
        by_residue.setdefault(holder.tokens, []).append(holder.rank)
    for of, chunk in sorted({(residue.of, residue.chunk) for residue in by_residue}):
        owners: list[int] = []
        for residue in (Interleave(rank, of, chunk) for rank in range(of)):
            if not residue.meets(tokens):
                continue
            if residue not in by_residue:
                break
            owners.append(by_residue[residue][turn % len(by_residue[residue])])
        else:
            return owners
    return [-1]
