"""What two ranks have in common, and what cannot be paired."""

import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from worlds import cache_tensor, contiguous

from kvxfer.errors import GeometryError
from kvxfer.geometry import CacheGeometry, PairPlan, Selection, TensorSpec

SIZES = {"block": 4, "token": 4, "head": 4, "dim": 8}


def spec(axes: str = "block token head dim", sizes: dict[str, int] = SIZES, **rest: object) -> TensorSpec:
    tensor = contiguous(axes, {name: sizes[name] for name in sizes}, **({"kv": ("k",)} | rest))  # pyright: ignore
    return cache_tensor(np.zeros(tensor["extent"] + 8, np.uint8), tensor).spec()


def pair(src: TensorSpec, dst: TensorSpec, *selections: Selection) -> PairPlan:
    chosen = selections or (Selection("default", "", "k", (0,), 0, 4),)
    return PairPlan(CacheGeometry((src,)), CacheGeometry((dst,)), chosen)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float16"}, "dtype is bfloat16 at the source, but float16 at the destination"),
        ({"scale": (0.5,)}, "scale of head 0 is 1 at the source, but 0.5 at the destination"),
        ({"scale": (1.0, 1.0, 2.0, 1.0)}, "scale of head 2 is 1 at the source, but 2 at the destination"),
        ({"shape": (4, 4, 4, 7)}, "dim is 8 at the source, but 7 at the destination"),
        ({"tokens_per_row": 2}, "tokens_per_row is 1 at the source, but 2 at the destination"),
        ({}, "has_tokens is True at the source, but False at the destination"),  # which is state
    ],
)
def test_elements_that_differ_are_refused_with_both_values(change: dict[str, object], words: str) -> None:
    one = spec()
    with pytest.raises(GeometryError) as caught:
        pair(one, replace(one, **change) if change else spec("block head dim"))  # pyright: ignore[reportArgumentType]
    assert words in str(caught.value)
    assert "group 'default', kv k, layer 0" in str(caught.value)


def test_a_peer_that_lies_about_the_size_of_its_elements_is_refused() -> None:
    """It must not make us write beyond ours."""
    longer: dict[str, Any] = {"item_bytes": 4, "strides": (512, 128, 32, 4)}
    with pytest.raises(GeometryError, match="elements of bfloat16 have 2 bytes, not 4"):
        replace(spec(), **longer)
    unknown = replace(spec(), dtype="int16")
    with pytest.raises(GeometryError, match="item_bytes is 2 at the source, but 4 at the destination"):
        pair(unknown, replace(unknown, **longer))


@pytest.mark.parametrize("wrong", [
    Selection("default", "", "k", (0,), 0, 5), Selection("default", "", "k", (0,), 4, 4),
    Selection("default", "", "k", (0,), 3, 1), Selection("default", "", "v", (0,), 0, 4),
    Selection("default", "", "x", (0,), 0, 4), Selection("default", "p", "k", (0,), 0, 4),
    Selection("g", "", "k", (0,), 0, 4), Selection("default", "", "k", (0, 1), 0, 4),
])  # fmt: skip
def test_a_selection_that_one_side_does_not_hold_is_refused(wrong: Selection) -> None:
    with pytest.raises(GeometryError, match=r"were selected, but are not held by both sides"):
        pair(spec(), spec(), wrong)


@pytest.mark.parametrize(
    "chosen",
    [
        [Selection("default", "", "k", (0,), 0, 4)] * 2,
        [Selection("default", "", "k", (0,), 0, 3), Selection("default", "", "k", (0,), 2, 4)],
        [Selection("default", "", "k", (0, 0), 0, 4)],
    ],
)
def test_selections_that_overlap_are_refused(chosen: list[Selection]) -> None:
    """They come from a peer; the same byte would be written twice."""
    with pytest.raises(GeometryError, match=r"layer 0, kv k of group 'default', part '' was selected twice: heads"):
        pair(spec(), spec(), *chosen)


def test_a_selection_of_more_than_is_held_takes_no_memory() -> None:
    """A peer can name millions of layers in a frame."""
    chosen = Selection("default", "", "k", tuple(range(1 << 18)), 0, 4)
    tracemalloc.start()
    try:
        with pytest.raises(GeometryError, match=r"layer 1, heads 0..3, .* were selected, but are not held"):
            pair(spec(), spec(), chosen)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_layers_of_equal_strides_are_one_class() -> None:
    sizes = SIZES | {"layer": 3}
    many = spec("layer block token head dim", sizes, layers=(7, 3, 5))
    single = CacheGeometry(tuple(replace(spec(), layers=(n,), base=1000 * n) for n in (3, 5, 7)))
    plan = PairPlan(CacheGeometry((many,)), single, [Selection("default", "", "k", (3, 5, 7), 1, 3)])
    (found,) = plan.classes
    assert found.layers.tolist() == [3, 5, 7]
    step = many.stride("layer")
    assert (found.bases[:, 0] - many.base).tolist() == [step + 16, 2 * step + 16, 16]
    assert found.bases[:, 1].tolist() == [3016, 5016, 7016]


def many(count: int, axes: str, **rest: Any) -> CacheGeometry:
    one = spec(axes, **rest)
    return CacheGeometry(tuple(replace(one, layers=(n,), base=one.base + (n << 20)) for n in range(count)))


def test_what_many_layers_have_in_common_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of thousands of tensors is read and planned while its peer waits."""
    from kvxfer.geometry import axes, differences, intersect

    monkeypatch.setattr(axes, "_forms", {})
    calls: list[str] = []
    for module, name in ((axes, "bind_axes"), (intersect, "difference")):
        told, do = f"{module.__name__}.{name}", getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _told=told, _do=do, **k: (calls.append(_told), _do(*a, **k))[1])
    src, dst = many(50, "block token head dim", group="many"), many(50, "block head token dim", group="many")
    assert not list(differences(src, dst, convert=False))
    (found,) = PairPlan(src, dst, [Selection("many", "", "k", tuple(range(50)), 0, 4)]).classes
    assert found.layers.tolist() == [*range(50)]
    assert found.bases.tolist() == [[a.base, b.base] for a, b in zip(src.tensors, dst.tensors, strict=True)]
    assert Counter(calls) == {"kvxfer.geometry.intersect.difference": 2, "kvxfer.geometry.axes.bind_axes": 2}


@pytest.mark.parametrize("scaled", [0, 1, 2])
def test_of_layers_that_are_alike_but_for_a_scale_each_is_looked_at(scaled: int) -> None:
    src, dst = many(3, "block token head dim"), many(3, "block head token dim")
    tensors = list(src.tensors)
    tensors[scaled] = replace(tensors[scaled], scale=(2.0,))
    src = CacheGeometry(tuple(tensors))
    chosen = [Selection("default", "", "k", (0, 1, 2), 0, 4)]
    with pytest.raises(GeometryError, match=f"layer {scaled}.*scale of head 0 is 2 at the source, but 1 at"):
        PairPlan(src, dst, chosen)
    found = PairPlan(src, dst, chosen, convert=True).classes
    assert {tuple(c.layers.tolist()): c.factors.tolist() for c in found} == {
        (scaled,): [[2, 1]],
        tuple({0, 1, 2} - {scaled}): [[1, 1]] * 2,
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layers": (-1,)}, "layers must be distinct and not negative"),
        ({"layers": (1 << 32,)}, "the last layer is"),
        ({"base": 1 << 63}, "the end of its memory is"),
        ({"scale": (1.0, 2.0)}, "scale has 2 numbers for 4 heads"),
        ({"heads": range(0, 8, 2)}, "heads must be a range of step 1"),
    ],
)
def test_a_tensor_like_one_that_was_looked_at_is_still_checked_for_itself(wrong: Any, words: str) -> None:
    one = spec()
    with pytest.raises(GeometryError, match=words):
        replace(one, **wrong)
