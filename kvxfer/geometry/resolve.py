"""Who sends what: divides what one decode rank needs among the prefill ranks that hold it.

Heads by overlap, layers by stage, replicated data from one owner each. Where several ranks hold the same coordinates
the owner is rotated by the decode rank, so that the load spreads. The result is a pure function of the geometries:
every decode rank computes its own part, and nobody has to agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from kvxfer.errors import GeometryError
from kvxfer.geometry.cache import CacheGeometry, Interleave

__all__ = ["Selection", "resolve"]


@dataclass(frozen=True, slots=True, order=True)
class Selection:
    """Part of a tensor class that goes from one prefill rank to one decode rank.

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


def resolve(need: CacheGeometry, have: Sequence[CacheGeometry], *, rank: int = 0) -> list[tuple[Selection, ...]]:
    """Divide what `need` holds among the ranks of `have`.

    Args:
        need: Geometry of one decode rank.
        have: Geometries of all ranks of the prefill engine, by rank.
        rank: The decode rank, which rotates the owners of replicated data.

    Returns:
        For each rank of `have` its selections; empty for ranks from which nothing is needed.

    Raises:
        GeometryError: If coordinates that `need` holds are on no rank, naming them.
    """
    held = _index(have)
    share: dict[tuple[tuple[_Holding, ...], int, int], list[tuple[int, int, int]]] = {}
    found: dict[tuple[int, str, str, str, int, int], list[int]] = {}
    for spec in need.tensors:
        for layer in spec.layers:
            for kv in spec.kv:
                holdings = held.get((spec.group, spec.part, kv, layer), ())
                key = (holdings, spec.heads.start, spec.heads.stop)
                if key not in share:
                    share[key] = _share(holdings, spec.heads, rank)
                for owner, start, stop in share[key]:
                    if owner < 0:
                        raise GeometryError(
                            f"no prefill rank holds all tokens of layer {layer}, kv {kv or '-'}, "
                            f"heads {start}..{stop - 1} of group {spec.group!r}, part {spec.part!r}"
                        )
                    found.setdefault((owner, spec.group, spec.part, kv, start, stop), []).append(layer)
    result: list[list[Selection]] = [[] for _ in have]
    for (owner, group, part, kv, start, stop), layers in found.items():
        result[owner].append(Selection(group, part, kv, tuple(sorted(layers)), start, stop))
    return [tuple(sorted(selections)) for selections in result]


def _index(have: Sequence[CacheGeometry]) -> dict[_Class, tuple[_Holding, ...]]:
    held: dict[_Class, list[_Holding]] = {}
    for rank, geometry in enumerate(have):
        for spec in geometry.tensors:
            holding = _Holding(rank, spec.heads.start, spec.heads.stop, spec.tokens)
            for layer in spec.layers:
                for kv in spec.kv:
                    held.setdefault((spec.group, spec.part, kv, layer), []).append(holding)
    return {key: tuple(holdings) for key, holdings in held.items()}


def _share(holdings: tuple[_Holding, ...], heads: range, turn: int) -> list[tuple[int, int, int]]:
    """(owner, first head, one past the last) covering `heads`; owner -1 where nobody holds them."""
    cuts = {heads.start, heads.stop}
    cuts |= {edge for h in holdings for edge in (h.start, h.stop) if heads.start < edge < heads.stop}
    edges = sorted(cuts)
    shares: dict[int, list[tuple[int, int, int]]] = {}
    for start, stop in pairwise(edges):
        holders = [h for h in holdings if h.start <= start and stop <= h.stop]
        for owner in _owners(holders, turn):
            mine = shares.setdefault(owner, [])
            first = mine.pop()[1] if mine and mine[-1][2] == start else start
            mine.append((owner, first, stop))
    return list(chain.from_iterable(shares.values()))


def _owners(holders: list[_Holding], turn: int) -> list[int]:
    """One owner for every residue of the token interleaving; [-1] if a residue has none."""
    by_residue: dict[tuple[int, int, int], list[int]] = {}
    for holder in holders:
        by_residue.setdefault((holder.tokens.of, holder.tokens.chunk, holder.tokens.rank), []).append(holder.rank)
    families = sorted({(of, chunk) for of, chunk, _ in by_residue})
    for of, chunk in families:
        if all((of, chunk, residue) in by_residue for residue in range(of)):
            return [ranks[turn % len(ranks)] for ranks in (by_residue[of, chunk, residue] for residue in range(of))]
    return [-1]
