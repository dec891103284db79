"""Who sends what."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from worlds import cache_tensor, contiguous

from kvxfer.errors import MismatchError
from kvxfer.geometry import CacheGeometry, Selection, common, resolve


def rank(
    heads: tuple[int, int] | None = (0, 8),
    *,
    layers: tuple[int, ...] = (0,),
    interleave: tuple[int, int, int] = (0, 1, 1),
    group: str = "default",
) -> CacheGeometry:
    """A rank with K of some heads and layers, or with an MLA cache where `heads` is None."""
    sizes = {"block": 2, "layer": len(layers), "token": 4, "dim": 2}
    axes, kv = "layer block token dim", ("",)
    if heads is not None:
        axes, kv, sizes["head"] = "layer block token head dim", ("k",), heads[1] - heads[0]
    tensor = contiguous(axes, sizes, layers=layers, heads=heads, kv=kv, interleave=interleave, group=group)
    return CacheGeometry.of([cache_tensor(np.zeros(tensor["extent"] + 8, np.uint8), tensor)])


def even(heads: int, ways: int) -> list[CacheGeometry]:
    return [rank((r * heads // ways, (r + 1) * heads // ways)) for r in range(ways)]


def shares(need: CacheGeometry, have: list[CacheGeometry], turn: int = 0) -> list[list[tuple[int, int]]]:
    """Head ranges by prefill rank."""
    return [[(s.head_start, s.head_stop) for s in found] for found in resolve(need, have, rank=turn)]


@pytest.mark.parametrize(("prefill", "decode", "expected"), [
    (1, 1, [[[(0, 8)]]]), (2, 1, [[[(0, 4)], [(4, 8)]]]), (1, 2, [[[(0, 4)]], [[(4, 8)]]]),
    (4, 2, [[[(0, 2)], [(2, 4)], [], []], [[], [], [(4, 6)], [(6, 8)]]]),
    (3, 2, [[[(0, 2)], [(2, 4)], []], [[], [(4, 5)], [(5, 8)]]]),
    (2, 3, [[[(0, 2)], []], [[(2, 4)], [(4, 5)]], [[], [(5, 8)]]]),
])  # fmt: skip
def test_heads_go_by_overlap(prefill: int, decode: int, expected: list[list[list[tuple[int, int]]]]) -> None:
    have = even(8, prefill)
    assert [shares(need, have, turn) for turn, need in enumerate(even(8, decode))] == expected


@pytest.mark.parametrize("heads", [None, (0, 1)])
def test_replicated_data_has_one_owner_which_rotates(heads: tuple[int, int] | None) -> None:
    have = [rank(heads) for _ in range(4)]
    owners: Counter[int] = Counter()
    for turn in range(8):
        given = [number for number, found in enumerate(resolve(rank(heads), have, rank=turn)) if found]
        assert len(given) == 1
        owners[given[0]] += 1
    assert owners == {0: 2, 1: 2, 2: 2, 3: 2}


def test_every_residue_of_an_interleaving_has_an_owner() -> None:
    have = [rank((lo, lo + 4), interleave=(r, 2, 4)) for lo in (0, 4) for r in (0, 1)]
    assert shares(rank(), have) == [[(0, 4)], [(0, 4)], [(4, 8)], [(4, 8)]]
    whole = [rank((0, 8), interleave=(r, 2, 4)) for r in (0, 1)]
    edge = rank((2, 4))  # its edges cut the heads of the others into three runs, which are joined again
    assert shares(rank(), [*whole, edge]) == [[(0, 2), (4, 8)], [(0, 2), (4, 8)], [(2, 4)]]
    assert shares(rank(), [*whole, rank((2, 4), interleave=(0, 3, 4))]) == [[(0, 8)], [(0, 8)], []]


@pytest.mark.parametrize(
    ("need", "have", "owners"),
    [
        ((1, 2, 4), [(0, 2, 4), (1, 2, 4)], [1]),
        ((1, 2, 4), [(1, 2, 4)], [0]),  # the other one is not missed
        ((1, 4, 4), [(0, 2, 4), (1, 2, 4)], [1]),
        ((0, 2, 4), [(0, 4, 4), (1, 4, 4), (2, 4, 4), (3, 4, 4)], [0, 2]),
        ((0, 2, 8), [(0, 2, 4), (1, 2, 4)], [0, 1]),
        ((1, 2, 2), [(0, 3, 2), (1, 3, 2), (2, 3, 2)], [0, 1, 2]),
        ((0, 3, 4), [(0, 1, 1)], [0]),
    ],
)
def test_tokens_come_from_the_ranks_whose_turns_meet(
    need: tuple[int, int, int], have: list[tuple[int, int, int]], owners: list[int]
) -> None:
    target, sources = rank(interleave=need), [rank(interleave=turns) for turns in have]
    assert [number for number, found in enumerate(resolve(target, sources)) if found] == owners
    assert [number for number, source in enumerate(sources) if common(source, target)] == owners


@pytest.mark.parametrize(
    ("have", "fields"),
    [
        ([rank((0, 5))], {"default/k.heads": ("0..7", "0..4")}),
        ([rank((0, 3)), rank((4, 8))], {"default/k.heads": ("0..7", "0..2, 4..7")}),
        ([rank(layers=(1,))], {"default/k.layers": ("0", "1")}),
        ([rank(None)], {"default/k": ("held", "only default")}),
        ([rank(group="g")], {"default/k": ("held", "only g/k")}),
        ([], {"default/k": ("held", "nothing")}),
        ([rank(interleave=(0, 2, 4))], {"default/k.tokens": ("all", "part 0 of 2 in turns of 4")}),
        (
            [rank(interleave=(0, 2, 4)), rank(interleave=(1, 2, 8))],
            {"default/k.tokens": ("all", "part 0 of 2 in turns of 4, part 1 of 2 in turns of 8")},
        ),
    ],
)
def test_what_nobody_holds_is_named(have: list[CacheGeometry], fields: dict[str, tuple[str, str]]) -> None:
    with pytest.raises(MismatchError, match="no prefill rank holds all that this one needs") as caught:
        resolve(rank(), have)
    assert caught.value.fields == fields
    for name, (here, there) in fields.items():
        assert f"{name}: {here} here, {there} there" in str(caught.value)


def test_tokens_that_a_rank_needs_and_nobody_holds_are_named() -> None:
    with pytest.raises(MismatchError) as caught:
        resolve(rank(interleave=(0, 2, 4)), [rank(interleave=(1, 2, 4))])
    turns = "part 0 of 2 in turns of 4", "part 1 of 2 in turns of 4"
    assert caught.value.fields == {"default/k.tokens": turns}


def test_all_that_nobody_holds_is_named_at_once() -> None:
    need = CacheGeometry((*rank(layers=(0, 1, 2)).tensors, *rank(None, group="latent").tensors))
    with pytest.raises(MismatchError) as caught:
        resolve(need, [rank(layers=(1,))])
    assert caught.value.fields == {"default/k.layers": ("0..2", "1"), "latent": ("held", "only default/k")}


def test_what_two_ranks_have_in_common() -> None:
    one, other = rank((0, 6), layers=(0, 1, 2)), rank((4, 8), layers=(3, 2, 1))
    assert common(one, other) == (Selection("default", "", "k", (1, 2), 4, 6),)
    assert common(other, one) == common(one, other)
    assert common(one, rank((6, 8))) == common(one, rank(layers=(3,))) == common(one, rank(None)) == ()
    parts = (*rank((0, 4)).tensors, *rank((4, 8)).tensors)
    halves = CacheGeometry(tuple(replace(spec, base=0) for spec in parts))
    assert common(halves, one) == tuple(Selection("default", "", "k", (0,), a, b) for a, b in ((0, 4), (4, 6)))
    assert common(one, one) == tuple(resolve(one, [one])[0])
