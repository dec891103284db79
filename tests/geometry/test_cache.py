"""Cache geometries: what is described, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvxfer.errors import GeometryError
from kvxfer.geometry import CacheGeometry, CacheTensor, Group, Interleave, TensorSpec
from kvxfer.names import MAX_LAYERS

NHD = "block token head dim"


def cache(shape: tuple[int, ...] = (6, 4, 2, 8), axes: str = NHD, **rest: Any) -> CacheTensor:
    given: dict[str, Any] = {"layers": [0], "heads": range(2), "kv": "k"} | rest
    return CacheTensor(torch.zeros(shape, dtype=torch.bfloat16), axes, **given)


def refused(tensors: list[CacheTensor], groups: tuple[Group, ...] = ()) -> str:
    with pytest.raises(GeometryError) as caught:
        CacheGeometry.of(tensors, groups)
    return str(caught.value)


def test_a_tensor_is_described_in_bytes() -> None:
    whole = torch.zeros(6, 4, 2, 2, 8, dtype=torch.bfloat16)
    value = whole[:, :, 1]  # K and V in one block: a view with an offset
    spec = CacheTensor(value, NHD, layers=[7], heads=range(4, 6), kv="v", group="g", part="p").spec(3)
    assert (spec.group, spec.part, spec.kv, spec.layers, spec.heads) == ("g", "p", ("v",), (7,), range(4, 6))
    assert spec.shape == (6, 4, 2, 8)
    assert spec.strides == (256, 64, 16, 2)
    assert (spec.dtype, spec.item_bytes, spec.null_block) == ("bfloat16", 2, 3)
    assert spec.base == whole.data_ptr() + 32
    assert (spec.kind, spec.device) == ("cpu", 0)
    assert (spec.ids, spec.id_tokens, spec.is_state) == (6, 4, False)
    assert spec.extent_bytes == 6 * 256 - 32


def test_a_view_may_end_where_its_storage_does() -> None:
    assert resized(1024).spec().extent_bytes == 512


def far(stride: int) -> CacheTensor:
    """An axis of length 1, whose stride no access needs."""
    tensor = torch.zeros(6, 1, 2, 8).as_strided((6, 1, 2, 8), (16, stride, 8, 1))
    return CacheTensor(tensor, NHD, layers=[0], heads=range(2))


def wide(heads: int, dim: int) -> CacheTensor:
    """More than a plan can look at."""
    memory = torch.zeros(1, dtype=torch.uint8).expand(1, 1, heads, dim)
    return CacheTensor(memory, NHD, layers=[0], heads=range(heads))


def resized(nbytes: int) -> CacheTensor:
    """A view of memory that was given back in part."""
    tensor = torch.zeros(8, 4, 2, 8)
    view = tensor[2:4]  # bytes 512 to 1023
    tensor.untyped_storage().resize_(nbytes)
    return CacheTensor(view, NHD, layers=[0], heads=range(2))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (cache(axes="block token head"), "name 3 axes, but the tensor has 4: shape (6, 4, 2, 8)"),
        (cache(axes="block token head slot"), "'slot' is not one of"),
        (cache((6, 4, 2, 2, 6), "block token head dim/8 dim%8"), "dim%8 must be 8 long, but the tensor has 6"),
        (cache((6, 4, 0, 8)), "is empty: shape (6, 4, 0, 8)"),
        (cache((0, 4, 2, 8)), "is empty"),
        (cache(layers=[]), "is empty"),
        (cache(heads=range(2, 2)), "is empty"),
        (cache(heads=range(0, 4, 2)), "heads must be a range of step 1, not range(0, 4, 2)"),
        (cache(heads=range(-1, 1)), "heads must be a range of step 1, not range(-1, 1)"),
        (cache(heads=range(4)), "axis 'head' is 2 long, but 4 were named"),
        (cache(heads=None), "so heads= must name its range"),
        (cache((6, 4, 8), "block token dim"), "2 heads were named, but axes 'block token dim' have no 'head'"),
        (cache(layers=[1, 2]), "2 layers were named, but axes 'block token head dim' have no 'layer'"),
        (cache((2, 6, 4, 2, 8), f"layer {NHD}", layers=[1, 2, 3]), "axis 'layer' is 2 long, but 3 were named"),
        (cache((2, 6, 4, 2, 8), f"layer {NHD}", layers=[1, 1]), "layers must be distinct and not negative, not [1, 1]"),
        (cache(layers=[-1]), "layers must be distinct and not negative, not [-1]"),
        (cache(kv="kv"), "2 kvs were named, but axes 'block token head dim' have no 'kv'"),
        (cache((2, 6, 4, 2, 8), f"kv {NHD}", kv="k"), "axis 'kv' is 2 long, but 1 were named"),
        (cache((2, 6, 4, 2, 8), f"kv {NHD}", kv="kk"), "kv must be 'k', 'v', both, or none, not ('k', 'k')"),
        (cache(kv="q"), "kv must be 'k', 'v', both, or none, not ('q',)"),
        (cache(kernel_blocks_per_id=4), "6 blocks are no multiple of kernel_blocks_per_id=4"),
        (cache(kernel_blocks_per_id=0), "kernel_blocks_per_id must be at least 1, not 0"),
        (cache(kernel_blocks_per_id=2.0), "kernel_blocks_per_id must be a whole number, not 2.0"),
        (cache(tokens_per_row=0), "tokens_per_row must be at least 1, not 0"),
        (cache(tokens_per_row="1"), "tokens_per_row must be a whole number, not '1'"),
        (cache((6, 2, 8), "block head dim", tokens_per_row=2), "describe a token axis, which it does not have"),
        (cache((6, 2, 8), "block head dim", tokens=Interleave(0, 2)), "describe a token axis, which it does not have"),
        (cache(tokens_per_row=2, tokens=Interleave(0, 2)), "compressed rows cannot be interleaved"),
        (cache(layers=[1 << 32]), "the last layer is 4294967296, but may not be over 4294967295"),
        (cache(heads=range(1 << 64)), "the end of heads is 18446744073709551616, but may not be over 4294967295"),
        (cache(heads=range(-(1 << 64), 2)), "heads must be a range of step 1"),
        (cache(kv=5), "kv must be text, not int"),
        (cache(group="\ud800"), r"'\ud800' is no text"),
        (cache(part="\udcff"), r"'\udcff' is no text"),
        (far(1 << 45), "the largest byte stride is 140737488355328, but may not be over 140737488355327"),
        (far(1 << 62), "the largest byte stride is 18446744073709551616, but may not be over"),
        (wide((1 << 24) + 1, 1), "the length of axis 'head' is 16777217, but may not be over 16777216"),
        (wide(1, (1 << 24) + 1), "the length of axis 'dim' is 16777217, but may not be over 16777216"),
        (resized(100), "its last element ends at byte 1024 of its storage, which has 100"),
        (resized(1023), "its last element ends at byte 1024 of its storage, which has 1023"),
        (resized(0), "its last element ends at byte 1024 of its storage, which has 0"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(tensor: CacheTensor, words: str) -> None:
    assert words in refused([tensor])


def test_expanded_and_overlapping_strides_are_refused() -> None:
    expanded = CacheTensor(torch.zeros(6, 1, 2, 8).expand(6, 4, 2, 8), NHD, layers=[0], heads=range(2), kv="k")
    assert "byte strides (64, 0, 32, 4) of shape (6, 4, 2, 8) overlap" in refused([expanded])
    sliding = CacheTensor(torch.zeros(64).as_strided((4, 8), (7, 1)), "block dim", layers=[0])
    assert "a stride of 28 steps inside 32 bytes" in refused([sliding])
    touching = CacheTensor(torch.zeros(64).as_strided((4, 8), (8, 1)), "block dim", layers=[0])
    assert CacheGeometry.of([touching]).tensors[0].extent_bytes == 128


def test_memory_of_another_kind_is_refused() -> None:
    meta = CacheTensor(torch.zeros(4, 8, device="meta"), "block dim", layers=[0])
    assert "memory of kind 'meta' is not supported, only cpu and cuda" in refused([meta])
    sparse = CacheTensor(torch.zeros(4, 8).to_sparse(), "block dim", layers=[0])
    assert "torch.sparse_coo; only strided tensors are supported" in refused([sparse])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(4, 8, dtype=torch.complex64).conj(), "group 'default' is lazily conjugated"),
        (lambda: torch.zeros(4, 8, dtype=torch.complex64).conj().imag, "group 'default' is lazily negated"),
        (lambda: torch.zeros(4, 8)._neg_view(), "group 'default' is lazily negated"),
        (
            lambda: torch.quantize_per_tensor(torch.zeros(4, 8), 0.1, 0, torch.quint8),
            "is quantized (torch.quint8); pass its",
        ),
        (lambda: torch.nested.nested_tensor([torch.zeros(8), torch.zeros(8)]), "is nested; only strided tensors"),
        (lambda: torch.zeros(4, 8).to_sparse_csr(), "is torch.sparse_csr; only strided tensors are supported"),
        (lambda: FakeTensorMode().from_tensor(torch.zeros(4, 8)), "which has 128 at address 0x0: the storage was"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch warns of prototypes
def test_memory_that_does_not_hold_the_values_is_refused(make: Callable[[], torch.Tensor], words: str) -> None:
    assert words in refused([CacheTensor(make(), "block dim", layers=[0])])


def test_two_devices_are_refused() -> None:
    spec = cache().spec()
    with pytest.raises(GeometryError, match=r"must be on one device, not on \[\('cpu', 0\), \('cuda', 1\)\]"):
        CacheGeometry((spec, replace(spec, layers=(1,), kind="cuda", device=1)))


def test_the_same_coordinates_twice_are_refused() -> None:
    words = refused([cache(), cache(heads=range(1, 3))])
    assert "the same coordinates are given twice: layer 0, kv k, heads range(1, 3)" in words
    assert "and heads range(0, 2)" in words
    many = cache((3, 6, 4, 2, 8), f"layer {NHD}", layers=[5, 0, 2])
    assert "twice: layer 0" in refused([many, cache()])
    for other in (cache(kv="v"), cache(heads=range(2, 4)), cache(layers=[1]), cache(part="p"), cache(group="g")):
        assert len(CacheGeometry.of([cache(), other]).tensors) == 2


def views(**tensors: tuple[torch.Tensor, str]) -> list[CacheTensor]:
    """Parts of layer 0, each a view of some memory."""
    return [CacheTensor(tensor, axes, layers=[0], part=part) for part, (tensor, axes) in tensors.items()]


def test_tensors_of_a_group_that_share_memory_are_refused() -> None:
    pool = torch.zeros(6, 4, 32, dtype=torch.bfloat16)
    words = refused(views(a=(pool, "block token dim"), b=(pool, "block token dim")))
    assert (
        "(group 'default', part 'b', kv -, layer 0) shares memory with cache tensor (group 'default', part 'a'" in words
    )
    one_element = (pool[:, :, :17], "block token dim"), (pool[:, :, 16:], "block token dim")
    assert "shares memory" in refused(views(a=one_element[0], b=one_element[1]))
    other_type = pool.view(torch.uint8)[:, :, 62:]
    assert "shares memory" in refused(views(a=(pool, "block token dim"), b=(other_type, "block token dim")))
    other_order = pool.view(6, 32, 4)
    assert "shares memory" in refused(views(a=(pool, "block token dim"), b=(other_order, "block dim token")))
    flat = pool.view(-1)
    apart = flat[: 2 * 128].view(2, 4, 32), flat[2 * 128 : 5 * 128 + 1][1:].view(3, 4, 32)
    assert len(CacheGeometry.of(views(a=(apart[0], "block token dim"), b=(apart[1], "block token dim"))).tensors) == 2
    layers = [CacheTensor(pool, "block token dim", layers=[layer]) for layer in (0, 1)]
    assert "layer 1) shares memory with cache tensor (group 'default', kv -, layer 0)" in refused(layers)


def test_tensors_that_lie_between_each_other_do_not_share_memory() -> None:
    pool = torch.zeros(6, 3, 2, 4, 8, 16)  # block, layer, kv, token, head, dim
    packed = [
        CacheTensor(pool[:, layer, half, :, heads], NHD, layers=[layer], kv="kv"[half], heads=range(8)[heads])
        for layer in range(3)
        for half in range(2)
        for heads in (slice(0, 3), slice(3, 8))
    ]
    assert len(CacheGeometry.of(packed).tensors) == 12
    extra = CacheTensor(pool[:, 2, 1, :, 4:5], NHD, layers=[2], kv="v", part="p", heads=range(4, 5))
    assert "part 'p', kv v, layer 2) shares memory with" in refused([*packed, extra])
    state = torch.zeros(6, 24, 3)  # sub-projections of a convolution, cut by channel
    cut = {"conv.x": state[:, :16], "conv.B": state[:, 16:20], "conv.C": state[:, 20:]}
    parts = [
        CacheTensor(t, "block head dim", layers=[0], part=part, heads=range(t.shape[1])) for part, t in cut.items()
    ]
    assert len(CacheGeometry.of(parts).tensors) == 3


def test_without_addresses_nothing_is_known_of_shared_memory() -> None:
    spec = replace(cache().spec(), base=0)
    assert len(CacheGeometry((spec, replace(spec, kv=("v",)))).tensors) == 2
    seen = replace(spec, base=4096)
    with pytest.raises(GeometryError, match="shares memory"):
        CacheGeometry((seen, replace(seen, kv=("v",))))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (cache((6, 8, 2, 8), kv="v"), "group 'default': one block id covers 4 tokens"),
        (cache((6, 2, 8), "block head dim", kv="v"), "has none. What belongs"),
        (cache(kv="v", tokens=Interleave(1, 2, 4)), "but 4 (Interleave(rank=1, of=2, chunk=4))"),
        (cache((6, 4, 2, 8), layers=[1], part="p", kernel_blocks_per_id=2), "but 8 ("),
        (CacheTensor(torch.zeros(6, 4, 2, 8), NHD, layers=[1], heads=range(2), kv="k"), "default/k.dtype is float32"),
        (cache((6, 4, 2, 16), layers=[1]), "default/k.dim is 16, but another tensor has 8"),
        (cache((6, 2, 2, 8), layers=[1], tokens_per_row=2), "default/k.tokens_per_row is 2, but another tensor has 1"),
    ],
)
def test_a_group_agrees_on_what_an_id_covers_and_a_class_on_its_elements(other: CacheTensor, words: str) -> None:
    assert words in refused([cache(), other])


def test_parts_of_a_group_may_differ_in_rows_and_kernel_blocks() -> None:
    rows = cache((6, 2, 2, 8), part="pooled", tokens_per_row=2)
    kernel = cache((12, 2, 2, 8), part="index", kernel_blocks_per_id=2)
    assert {spec.id_tokens for spec in CacheGeometry.of([cache(), rows, kernel]).tensors} == {4}


def test_k_and_v_may_differ() -> None:
    geometry = CacheGeometry.of([cache(), cache((6, 4, 2, 16), kv="v")])
    assert dict(geometry.facts()) == {
        "default/k.dim": "8",
        "default/k.dtype": "bfloat16",
        "default/k.has_tokens": "True",
        "default/k.tokens_per_row": "1",
        "default/v.dim": "16",
        "default/v.dtype": "bfloat16",
        "default/v.has_tokens": "True",
        "default/v.tokens_per_row": "1",
    }


def test_groups_carry_their_null_block() -> None:
    geometry = CacheGeometry.of([cache(group="a"), cache(group="b")], [Group("b", null_block=5)])
    assert {name: specs[0].null_block for name, specs in geometry.groups.items()} == {"a": None, "b": 5}
    assert "group 'c' is described twice, or no tensor" in refused([cache()], (Group("c"),))
    assert "group 'default' is described twice" in refused([cache()], (Group("default"), Group("default")))
    spec = cache().spec(1)
    with pytest.raises(GeometryError, match=r"the null block is 1 in .* but 2 in"):
        CacheGeometry((spec, replace(spec, kv=("v",), null_block=2)))


@pytest.mark.parametrize(
    ("null", "words"),
    [
        (-1, "null_block of group 'g' is -1: give a block id of the pool, from 0 on, or None"),
        (0.5, "null_block of group 'g' must be a whole number, not 0.5"),
        (True, "null_block of group 'g' must be a whole number, not True"),
        ("0", "null_block of group 'g' must be a whole number, not '0'"),
    ],
)
def test_a_null_block_is_an_id(null: Any, words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        Group("g", null_block=null)


def test_a_null_block_is_one_of_the_smallest_pool() -> None:
    pools = [cache((9, 4, 2, 8)), cache((8, 4, 2, 8), part="p", kernel_blocks_per_id=1)]
    assert CacheGeometry.of(pools, [Group("default", 7)]).tensors[0].null_block == 7
    words = "group 'default': the null block 8 is outside of its pool; give an id from 0 to 7, or none"
    assert words in refused(pools, (Group("default", 8),))
    kernel = cache(kernel_blocks_per_id=2)
    assert "give an id from 0 to 2" in refused([kernel], (Group("default", 3),))


def test_a_group_has_a_name() -> None:
    nameless: Any = 3
    with pytest.raises(GeometryError, match=r"the name of a group must be text, as in CacheTensor\.group, not 3"):
        Group(nameless)


@pytest.mark.parametrize(("rank", "of", "chunk"), [
    (2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0), (0, 16_385, 1), (0, 2, 1 << 32), (0, 4294967291, 4294967279),
    *((number, 2, 1) for number in (0.5, True, "1", None)),
])  # fmt: skip
def test_an_impossible_interleaving_is_refused(rank: Any, of: int, chunk: int) -> None:
    words = "needs 0 <= rank < of and chunk >= 1" if type(rank) is int else "rank of an Interleave must be a whole"
    with pytest.raises(GeometryError, match=words):
        Interleave(rank, of, chunk)


def test_interleavings_meet_where_some_token_is_in_both() -> None:
    every = [Interleave(rank, of, chunk) for of in range(1, 5) for chunk in range(1, 6) for rank in range(of)]
    held = [{token for token in range(400) if token // one.chunk % one.of == one.rank} for one in every]
    for one, mine in zip(every, held, strict=True):
        assert [one.meets(other) for other in every] == [not mine.isdisjoint(theirs) for theirs in held]


def test_a_peers_description_is_checked_like_ours() -> None:
    spec = cache().spec()
    for strides in ((128, 32, -16, 2), (128, 32, 16, 1), (100, 32, 16, 2)):
        with pytest.raises(GeometryError, match="overlap"):
            TensorSpec("g", "", ("k",), (0,), range(2), NHD, spec.shape, strides, "bfloat16", 2)


def told(layers: range, tensors: int = 1, **rest: Any) -> CacheGeometry:
    """Tensors with a layer axis, as only a peer could describe so many."""
    spec = CacheTensor(torch.zeros(2, 1, 4, 2, 8), "layer block token head dim", layers=[0, 1], heads=range(2)).spec()
    count = len(layers)
    specs = [
        replace(spec, shape=(count, 1, 4, 2, 8), layers=tuple(layers), base=1 << 40, part=f"p{number}", **rest)
        for number in range(tensors)
    ]
    return CacheGeometry(tuple(specs))


def test_memory_ends_where_addresses_do() -> None:
    spec = cache().spec()
    most = (1 << 63) - 1 - spec.extent_bytes
    CacheGeometry((replace(spec, base=most),))
    with pytest.raises(GeometryError, match="the end of its memory is 9223372036854775808, but may not be over"):
        replace(spec, base=most + 1)


def test_layers_are_bounded_since_every_one_is_looked_at() -> None:
    with pytest.raises(GeometryError, match="the number of layers is 16385, but may not be over 16384"):
        told(range(MAX_LAYERS + 1))
    with pytest.raises(GeometryError, match=r"name 49152 layers in all.*at most 32768"):
        told(range(MAX_LAYERS), tensors=3)
