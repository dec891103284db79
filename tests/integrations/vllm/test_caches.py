"""What vLLM calls a cache, in kvxfer's words."""

import enum
import math
from functools import partial

import pytest
import torch
from vllm_stand_in import by_columns, layer, make

from kvxfer.errors import GeometryError
from kvxfer.geometry import CacheGeometry
from kvxfer.integrations.heads import Place
from kvxfer.integrations.vllm.caches import BlockGroup, Model, block_groups, describe

BLOCKS = 6


def spec(kind="FullAttentionSpec", **fields):
    usual = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "head_size_v": 8}
    return make(kind, **(usual | fields))


def config(specs):
    """Layers in one group, each with a spec of its own if they differ."""
    names = [f"model.layers.{layer}.attn" for layer in range(len(specs))]
    kind = specs[0] if len(set(map(id, specs))) == 1 else None
    kind = kind or make("UniformTypeKVCacheSpecs", block_size=16, kv_cache_specs=dict(zip(names, specs, strict=True)))
    group = make("KVCacheGroupSpec", layer_names=names, kv_cache_spec=kind, enable_kv_transfer=True)
    return make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=[group])


def caches(shape, count=1, dtype=torch.float32):
    return {f"model.layers.{layer}.attn": torch.zeros(shape, dtype=dtype) for layer in range(count)}


def described_all(views, config):
    """With a layer of its own for each view."""
    layers = {name: layer(cache=view) for name, view in views.items()}
    return describe(views, config, Place(0, 1), Model(4, 2), layers)


def described(one, shape, *, rank=0, ranks=1, heads=2, of=None, stores=None, seen=None, dtype=torch.float32, **how):
    """The cache of one layer.

    Args:
        stores: What its backend has where, if not as the view says.
        seen: The view that is registered, of the one that is bound.
    """
    ((name, view),) = caches(shape, dtype=dtype).items()
    of = of or layer("FlashAttentionBackend" if one.head_size_v else "FlashMLABackend", stores=stores, cache=view)
    views = {name: seen(view) if seen else view}
    (tensors,) = describe(views, config([one]), Place(rank, ranks), Model(4, heads), {name: of}, **how).values()
    assert not view.any(), "it is not as it was"
    return CacheGeometry.of(tensors).tensors


@pytest.mark.parametrize(
    ("rank", "ranks", "total", "held", "expected"),
    [(0, 2, 8, 4, range(4)), (1, 2, 8, 4, range(4, 8)), (1, 4, 2, 1, range(1)), (2, 4, 2, 1, range(1, 2))],
)
def test_heads_of_a_rank(rank, ranks, total, held, expected):
    assert Place(rank, ranks).heads(total, held) == expected


@pytest.mark.parametrize("ratio", [1, 4])
def test_attention_is_one_tensor_a_layer_and_kernel_blocks_are_counted(ratio):
    (found,) = described(spec(), (ratio * BLOCKS, 2, 16 // ratio, 16), rank=1, ranks=2, heads=4)
    assert (found.axes, found.kv, found.layers, found.heads) == (
        "block head token kv dim",
        ("k", "v"),
        (0,),
        range(2, 4),
    )
    assert (found.block_ratio, found.id_tokens) == (ratio, 16)
    assert found.shape == (ratio * BLOCKS, 2, 16 // ratio, 2, 8)


def test_memory_may_have_any_order():
    views = {"model.layers.0.attn": torch.zeros(BLOCKS, 16, 2, 16).transpose(1, 2)}
    (tensors,) = described_all(views, config([spec()])).values()
    assert CacheGeometry.of(tensors).tensors[0].strides == (16 * 2 * 16 * 4, 16 * 4, 2 * 16 * 4, 8 * 4, 4)


def test_keys_and_values_of_different_size_are_two_tensors():
    keys, values = described(spec(head_size=8, head_size_v=4), (BLOCKS, 2, 16, 12))
    assert (keys.kv, keys.shape[-1], values.kv, values.shape[-1]) == (("k",), 8, ("v",), 4)
    assert values.base - keys.base == 8 * 4


def test_latent_attention_has_neither_heads_nor_halves():
    one = spec("MLAAttentionSpec", num_kv_heads=1, head_size=24, head_size_v=0)
    (found,) = described(one, (BLOCKS, 1, 16, 24))
    assert (found.axes, found.kv, found.shape) == ("block token dim", ("",), (BLOCKS, 16, 24))


def test_layers_of_one_group_may_differ_and_one_that_uses_anothers_cache_is_passed_over():
    two = config([spec(), spec(head_size=4, head_size_v=4)])
    views = caches((BLOCKS, 2, 16, 16)) | {"model.layers.1.attn": torch.zeros(BLOCKS, 2, 16, 8)}
    views["model.layers.9.attn"] = views["model.layers.0.attn"]
    assert {name: tensors[0].layers for name, tensors in described_all(views, two).items()} == {
        "model.layers.0.attn": [0],
        "model.layers.1.attn": [1],
    }


class CircularBufferSpec:
    """A kind of cache that nobody here knows."""

    block_size, head_size_v = 16, 0


@pytest.mark.parametrize(
    ("one", "reason", "how"),
    [
        (spec(num_head_slots=3), "num_head_slots", {}),
        (spec(state_content_bytes=36), "state_content_bytes", {}),
        (spec(tokens_per_state=4), "tokens_per_state", {}),
        (CircularBufferSpec(), "CircularBufferSpec", {}),
        (spec(), r"quantised \(torch.uint8\).*--kv-cache-dtype auto", {"dtype": torch.uint8}),
        (spec(), r"quantised \(torch.float8_e4m3fn\).*--kv-cache-dtype auto", {"dtype": torch.float8_e4m3fn}),
    ],
)
def test_what_cannot_be_handed_over_is_refused_by_name(one, reason, how):
    with pytest.raises(GeometryError, match=reason):
        described(one, (BLOCKS, 2, 16, 16), **how)


def windowed(tokens=48, **fields):
    return spec("SlidingWindowSpec", sliding_window=tokens, **({"extra_retained_tokens": 0} | fields))


def grouped(*specs):
    """A layer of each, in a group of its own."""
    groups = [
        make("KVCacheGroupSpec", layer_names=[f"model.layers.{at}.attn"], kv_cache_spec=one, enable_kv_transfer=at != 9)
        for at, one in enumerate(specs)
    ]
    return make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=groups)


def test_groups_have_names_of_what_they_keep():
    several = make("UniformTypeKVCacheSpecs", block_size=16, kv_cache_specs={"a": windowed(), "b": windowed()})
    own = [spec()] * 10  # the last of which is not handed over
    groups = block_groups(grouped(several, windowed(32, extra_retained_tokens=3, block_size=64), windowed(), *own[3:]))
    assert groups[:4] == [
        BlockGroup("window-48.1", 0, 16, 48),
        BlockGroup("window-35.1", 1, 64, 35),
        BlockGroup("window-48.2", 2, 16, 48),
        BlockGroup("full.1", 3, 16, None),
    ]
    assert [group.index for group in groups] == list(range(9))
    assert block_groups(config([windowed()])) == [BlockGroup("default", 0, 16, 48)]
    assert [groups[0].live(tokens, whole=False) for tokens in (1, 47, 48, 100)] == [0, 0, 1, 53]
    assert [groups[0].live(tokens, whole=True) for tokens in (62, 63, 100)] == [0, 16, 48]
    with pytest.raises(GeometryError, match="windows of"):
        block_groups(config([windowed(), spec()]))


def test_groups_may_share_memory_and_each_is_shown():
    view = torch.zeros(BLOCKS, 2, 16, 16)
    views = dict.fromkeys(["model.layers.0.attn", "model.layers.1.attn"], view)
    found = CacheGeometry.of(
        [one for those in described_all(views, grouped(spec(), windowed())).values() for one in those]
    )
    assert {name: [one.layers for one in those] for name, those in found.groups.items()} == {
        "full.1": [(0,)],
        "window-48.1": [(1,)],
    }
    layers = {"model.layers.0.attn": layer(cache=view), "model.layers.1.attn": layer(stores=raises, cache=view)}
    with pytest.raises(GeometryError, match=r"cannot write into the cache of model\.layers\.1"):
        describe(views, grouped(spec(), windowed()), Place(0, 1), Model(4, 2), layers)


# --- an indexer


def index(**fields):
    role = enum.Enum("SparseCacheRole", [("INDEXER", "indexer")], type=str).INDEXER
    usual = {"num_kv_heads": 1, "head_size": 12, "head_size_v": 0, "cache_role": role, "dtype": torch.uint8}
    return spec("MLAAttentionSpec", **(usual | fields))


NAMES = ["model.layers.3.self_attn.attn", "model.layers.3.self_attn.indexer.k_cache"]


def beside(*specs, blocks=BLOCKS, tokens=16):
    """A layer with an indexer, in the order of their specs; and views, the indexer's between pages of others."""
    kind = make("UniformTypeKVCacheSpecs", block_size=16, kv_cache_specs=dict(zip(NAMES, specs, strict=True)))
    group = make("KVCacheGroupSpec", layer_names=NAMES, kv_cache_spec=kind, enable_kv_transfer=True)
    attention = torch.zeros(blocks, 2, tokens, 16)
    pages = torch.zeros(blocks, 3, tokens * 12, dtype=torch.uint8)[:, 1].view(blocks, 1, tokens, 12)
    views = dict(zip(NAMES, (attention, pages), strict=True))
    layers = {NAMES[0]: layer(cache=attention), NAMES[1]: layer("FlashMLABackend", cache=pages)}
    return make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=[group]), views, layers


def described_beside(config, views, layers, release="1.2", **how):
    found = describe(views, config, Place(1, 2), Model(4, 4), layers, release=release, **how)
    return CacheGeometry.of([one for tensors in found.values() for one in tensors]).tensors


@pytest.mark.parametrize("trusted", [False, True])
def test_an_indexer_beside_a_cache_goes_by_whole_pages(trusted, caplog):
    caplog.set_level("INFO", "kvxfer")
    config, views, layers = beside(spec(), index(), blocks=2 * BLOCKS, tokens=8)
    attention, pages = described_beside(config, views, layers, trusted=trusted)
    assert (attention.layers, attention.part, attention.id_tokens) == ((3,), "", 16)
    assert pages.layers == (3,)
    assert pages.part.startswith("indexer FlashMLABackend ")
    assert (pages.axes, pages.shape, pages.strides) == ("block token dim", (2 * BLOCKS, 1, 96), (3 * 96, 96, 1))
    assert (pages.tokens_per_row, pages.id_tokens, pages.heads) == (8, 16, range(1)), "all ranks have the same"
    assert "layout_skipped backend='FlashMLABackend" in caplog.text
    assert "value='vllm 1.2 on cpu: torch.uint8 [8, 12], 1 tokens a state" in caplog.text
    assert [one.indexed for one in block_groups(config)] == [True]


def test_pages_are_alike_where_all_that_decides_what_is_in_them_is():
    def part(one=None, release="1.2", bound=lambda view: view):
        config, views, layers = beside(spec(), one or index())
        layers[NAMES[1]].kv_cache = bound(layers[NAMES[1]].kv_cache)
        return described_beside(config, views, layers, release)[1].part

    others = [part(release="1.3"), part(index(dtype=torch.int8)), part(index(tokens_per_state=4))]
    others.append(part(bound=lambda view: view.unflatten(1, (2, 8))))
    assert part() == part()
    assert len({part(), *others}) == 5


def test_an_indexer_whose_pages_are_not_whole_or_nobodys_is_refused():
    config, views, layers = beside(spec(), index())
    for view in (torch.zeros(BLOCKS, 1, 16, 24)[..., ::2], torch.zeros(BLOCKS, 1, 16, 12)):
        with pytest.raises(
            GeometryError, match=r"k_cache is an indexer's, and no layer is bound to its pages, or they"
        ):
            described_beside(config, views | {NAMES[1]: view}, layers)
    with pytest.raises(GeometryError, match=r"k_cache is an indexer's, and no layer is bound"):
        described_beside(config, views, {NAMES[0]: layers[NAMES[0]]})


def test_a_layer_has_one_indexer_in_a_group():
    with pytest.raises(GeometryError, match=r"layers \[3\] have several caches"):
        described_beside(*beside(index(), index()))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: BlockGroup("full.2", 1, 8, None), r"pages of 16 tokens, .* blocks of all groups \(16, 8\)"),
        (lambda: BlockGroup("state.1", 1, 16, 2, state=True), r"\(16, state\)"),
    ],
)
def test_pages_that_cannot_be_asked_for_as_if_they_were_full_are_refused(other, reason, monkeypatch):
    config, views, layers = beside(spec(), index())
    groups = [*block_groups(config), other()]
    monkeypatch.setattr("kvxfer.integrations.vllm.caches.block_groups", lambda _: groups)
    config.kv_cache_groups.append(make("KVCacheGroupSpec", layer_names=[], kv_cache_spec=spec()))
    with pytest.raises(GeometryError, match=reason):
        described_beside(config, views, layers)


def test_what_is_in_the_hosts_memory_is_refused():
    config, *_ = beside(spec(), index())
    config.kv_cache_groups[0].host_resident = True
    with pytest.raises(GeometryError, match="HiSparse"):
        block_groups(config)


# --- state

SHAPES, DTYPES = ((3, 20), (2, 5, 4)), (torch.bfloat16, torch.float32)
"""Of what a recurrent layer remembers, in 120 and 160 bytes."""
KIND = enum.Enum("MambaAttentionBackendEnum", ["MAMBA2"]).MAMBA2


def stateful(**fields):
    usual = {"block_size": 16, "shapes": SHAPES, "dtypes": DTYPES, "mamba_type": KIND}
    return make("MambaSpec", **(usual | {"num_speculative_blocks": 0, "tp_replicated": False} | fields))


def bound(pages, starts=(0, 120)):
    """The layer, and its parts where they begin in each page."""
    flat = pages.flatten(1)
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(SHAPES, DTYPES, strict=True)]
    parts = [flat[:, at : at + size] for at, size in zip(starts, sizes, strict=True)]
    views = [part.view(of).view(-1, *shape) for part, of, shape in zip(parts, DTYPES, SHAPES, strict=True)]
    return make("MambaBase", kv_cache=tuple(views), get_attn_backend=layer().get_attn_backend)


def pages(size=288):
    """Pages of a layer that others lie between."""
    return torch.zeros(BLOCKS, 3, size, dtype=torch.int8)[:, 1].view(BLOCKS, 1, 1, size)


def described_state(one, memory, of, place=None):
    names = ["model.layers.0.mamba"]
    group = make("KVCacheGroupSpec", layer_names=names, kv_cache_spec=one, enable_kv_transfer=True)
    groups = make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=[group])
    (tensors,) = describe({names[0]: memory}, groups, place or Place(0, 1), Model(4, 2), {names[0]: of}).values()
    return CacheGeometry.of(tensors).tensors


def test_state_is_described_part_by_part_where_its_layer_has_it(caplog):
    caplog.set_level("INFO", "kvxfer")
    memory = pages()
    found = described_state(stateful(), memory, bound(memory), Place(1, 2))
    assert [(one.part, one.dtype, one.shape, one.heads, one.is_state) for one in found] == [
        ("mamba2.0 3x20", "bfloat16", (BLOCKS, 60), range(1, 2), True),
        ("mamba2.1 2x5x4", "float32", (BLOCKS, 40), range(1, 2), True),
    ]
    assert [one.base - memory.data_ptr() for one in found] == [0, 120]
    assert {one.stride("block") for one in found} == {3 * 288}
    assert "layout_proved" in caplog.text
    (replicated, _) = described_state(stateful(tp_replicated=True), memory, bound(memory), Place(1, 2))
    assert replicated.heads == range(1)


def without_parts(memory):
    return make("MambaBase", kv_cache=())


def of_other_pages(memory):
    return bound(torch.zeros_like(memory))


def by_columns_inside(memory):
    found = bound(memory)
    found.kv_cache = (found.kv_cache[0].view(BLOCKS, 20, 3).transpose(1, 2), found.kv_cache[1])
    return found


@pytest.mark.parametrize(
    "of",
    [
        without_parts,
        of_other_pages,
        by_columns_inside,
        lambda memory: bound(memory, (4, 120)),
        lambda memory: bound(pages()[:BLOCKS]),
        lambda memory: bound(memory[:-1]),
        lambda memory: None,
        bound,  # which ends beyond pages that are shorter
    ],
)
def test_state_that_is_not_in_its_pages_is_refused_with_what_was_seen(of):
    memory, size = pages(), 272 if of is bound else 288
    seen = rf"state of model\.layers\.0\.mamba \(mamba2\) is not part by part in its pages of {size} bytes"
    with pytest.raises(GeometryError, match=seen):
        described_state(stateful(), memory[..., :size], of(memory))


def test_states_of_guessed_tokens_are_refused_by_name():
    memory = pages()
    with pytest.raises(GeometryError, match="num_speculative_blocks=3"):
        described_state(stateful(num_speculative_blocks=3), memory, bound(memory))


def test_state_is_in_the_block_of_the_last_token():
    (only,) = block_groups(config([stateful()]))
    assert (only.name, only.state) == ("default", True)
    full, state = block_groups(grouped(spec(), stateful(block_size=64)))
    assert [(one.name, one.state) for one in (full, state)] == [("full.1", False), ("state.1", True)]
    assert [state.live(tokens, whole=False) for tokens in (1, 64, 65, 100)] == [0, 63, 64, 99]
    assert [state.live(tokens, whole=True) for tokens in (1, 64, 65, 130)] == [0, 0, 64, 128]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["model.attn"], "numbers"),
        (["model.layers.1.experts.2.attn"], "numbers"),
        (["model.layers.1.attn", "model.layers.1.indexer"], "several caches"),
    ],
)
def test_layers_of_which_names_do_not_tell_one_number_and_one_cache_are_refused(names, reason):
    group = make("KVCacheGroupSpec", layer_names=names, kv_cache_spec=spec(), enable_kv_transfer=True)
    found = make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=[group])
    with pytest.raises(GeometryError, match=reason):
        described_all({name: torch.zeros(BLOCKS, 2, 16, 16) for name in names}, found)


def test_what_speculates_comes_behind_the_model_with_heads_of_its_own():
    own, drafts = spec(), spec(num_kv_heads=1)
    specs = {"model.layers.0.attn": own, "model.layers.1.attn": own}
    # EAGLE's layers go on from the model's; a draft model's begin at 0 again
    specs |= {"model.layers.2.attn": drafts, "draft_model.model.layers.1.attn": drafts}
    kind = make("UniformTypeKVCacheSpecs", block_size=16, kv_cache_specs=specs)
    group = make("KVCacheGroupSpec", layer_names=list(specs), kv_cache_spec=kind, enable_kv_transfer=True)
    found = make("KVCacheConfig", num_blocks=BLOCKS, kv_cache_groups=[group])
    views = {name: torch.zeros(BLOCKS, one.num_kv_heads, 16, 16) for name, one in specs.items()}
    layers = {name: layer(cache=view) for name, view in views.items()}
    made = describe(views, found, Place(1, 2), Model(2, 4, 2), layers)
    assert [(list(one.layers), one.heads) for (one,) in made.values()] == [
        ([0], range(2, 4)),
        ([1], range(2, 4)),
        ([2], range(1, 2)),
        ([3], range(1, 2)),
    ]


def exchanged(cache):
    return cache.split(8, dim=-1)[::-1]


class Put:
    """A part of a cache that is no view: what to do with the row of a token, by head and dim."""

    def __init__(self, write):
        self._write = write

    def __setitem__(self, at, row):
        block, _, token = at
        self._write(block, token, row)


def halves(cache):
    return cache.view(BLOCKS, 2, 2, 16 * 8).unbind(2)


def in_fours(cache):
    """K as several kernels for GPUs have it: dims by four, and these by token."""
    key, value = halves(cache)
    fours = key.view(BLOCKS, 2, 2, 16, 4)
    return Put(lambda block, token, row: fours[block, :, :, token].copy_(row.view(2, 2, 4))), value.view(-1, 2, 16, 8)


def in_tiles(cache):
    """K as kernels for AMX have it: dims by two, and these in tiles of eight tokens."""
    key, value = halves(cache)
    tiles = key.view(BLOCKS, 2, 2, 4, 8, 2)

    def put(block, token, row):
        tiles[block, :, token // 8, :, token % 8] = row.view(2, 4, 2)

    return Put(put), value.view(-1, 2, 16, 8)


def packed(cache):
    """Rows by their largest element: that, and of the others how much they are of it."""

    def put(part, block, token, row):
        scale = row.amax(-1, keepdim=True)
        part[block, :, token] = torch.cat([scale, (row / scale * 127).round()[:, 1:]], dim=-1)

    return [Put(partial(put, part)) for part in cache.split(8, dim=-1)]


@pytest.mark.parametrize(
    ("stores", "key", "value"),
    [
        (exchanged, ("block head token dim", 8, (512, 256, 16, 1)), ("block head token dim", 0, (512, 256, 16, 1))),
        (by_columns, ("block head dim token", 0, (512, 256, 16, 1)), ("block head token dim", 128, (512, 256, 8, 1))),
        (
            in_fours,
            ("block head dim/4 token dim%4", 0, (512, 256, 64, 4, 1)),
            ("block head token dim", 128, (512, 256, 8, 1)),
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_a_backend_writes_elsewhere_is_described_from_where_it_was(stores, key, value, dtype):
    found = described(spec(), (BLOCKS, 2, 16, 16), stores=stores, dtype=dtype)
    size, start = found[0].item_bytes, min(one.base for one in found)
    assert [one.kv for one in found] == [("k",), ("v",)]
    for one, (axes, first, strides) in zip(found, (key, value), strict=True):
        assert (one.axes, (one.base - start) // size, one.heads) == (axes, first, range(2))
        assert tuple(stride // size for stride in one.strides) == strides


def test_a_view_whose_axes_are_not_those_that_the_backend_writes_is_described_from_where_it_was():
    (found,) = described(spec(num_kv_heads=16), (BLOCKS, 16, 16, 16), heads=16, seen=lambda view: view)
    keys, _ = described(spec(num_kv_heads=16), (BLOCKS, 16, 16, 16), heads=16, seen=lambda view: view.transpose(1, 2))
    assert found.axes == "block head token kv dim"
    assert (keys.axes, keys.strides) == ("block head token dim", (4 * 16**3, 4 * 16**2, 4 * 16, 4))


@pytest.mark.parametrize(
    ("stores", "seen"),
    [
        (
            in_tiles,
            "no axes say where K lies: block 0, head 0, token 8, dim 0 is 64 elements after the first, where 16 is due",
        ),
        (packed, r"\d+ of 768 elements of K are nowhere, as block 0"),
        (lambda cache: (cache.split(8, dim=-1)[0],) * 2, "768 of 768 elements of K are nowhere"),
        (lambda cache: [view.flip(0) for view in cache.split(8, dim=-1)], "elements of K are nowhere"),
        (lambda cache: cache.clone().split(8, dim=-1), "768 of 768 elements of K are nowhere"),
    ],
    ids=["tiles", "packed scales", "both in one place", "other blocks", "nothing"],
)
def test_what_no_axes_say_is_refused_with_what_was_seen(stores, seen):
    with pytest.raises(GeometryError, match=seen) as refused:
        described(spec(), (BLOCKS, 2, 16, 16), stores=stores)
    assert "FlashAttentionBackend (vllm.v1.attention.backends.flash_attn.FlashAttentionBackend)" in str(refused.value)


def test_a_backend_of_latent_attention_that_writes_elsewhere():
    one = spec("MLAAttentionSpec", num_kv_heads=1, head_size=24, head_size_v=0)

    def turned(cache):
        """What is rotated before what is not."""
        return cache[..., 8:], cache[..., :8]

    with pytest.raises(GeometryError, match="no axes say where what a token has lies"):
        described(one, (BLOCKS, 1, 16, 24), stores=turned)
    (found,) = described(one, (BLOCKS, 1, 16, 24), stores=lambda cache: columns(cache).split([16, 8], dim=-1))
    assert (found.axes, found.kv) == ("block dim token", ("",))


def test_latent_attention_that_vllm_itself_does_not_continue_is_refused():
    one = spec("MLAAttentionSpec", num_kv_heads=1, head_size=24, head_size_v=0)
    view = torch.zeros(BLOCKS, 1, 16, 24)
    of = layer("FlashMLABackend", cache=view)
    of.get_attn_backend().get_name = lambda: "CPU_MLA"
    with pytest.raises(GeometryError, match=r"CPU_MLA.*without prefix caching"):
        described(one, (BLOCKS, 1, 16, 24), of=of)


def columns(cache):
    return cache.view(BLOCKS, 1, 24, 16).transpose(2, 3)


def raises(*_):
    raise RuntimeError("no such kernel")


def without_a_way_to_write():
    found = layer()
    del type(found.impl).do_kv_cache_update
    return found


def that_writes_in_its_forward_pass():
    found = layer(cache=torch.zeros(BLOCKS, 2, 16, 16))
    found.get_attn_backend().forward_includes_kv_cache_update = True
    return found


@pytest.mark.parametrize(
    ("of", "seen"),
    [
        (lambda: layer(stores=raises, cache=torch.zeros(BLOCKS, 2, 16, 16)), r"RuntimeError\('no such kernel'\)"),
        (without_a_way_to_write, "gives no way to write"),
        (that_writes_in_its_forward_pass, "gives no way to write"),
        (lambda: make("Attention", get_attn_backend=lambda: None, impl=None), "that has no name gives no way to write"),
    ],
)
def test_a_backend_that_shows_nothing_is_refused_or_trusted(of, seen, caplog):
    with pytest.raises(GeometryError, match=f"{seen}.*trust_layout"):
        described(spec(), (BLOCKS, 2, 16, 16), of=of())
    (found,) = described(spec(), (BLOCKS, 2, 16, 16), of=of(), trusted=True)
    assert found.axes == "block head token kv dim"
    assert [line.levelname for line in caplog.records if line.message.startswith("layout_trusted")] == ["WARNING"]


def test_a_layer_that_vllm_does_not_have_is_refused():
    with pytest.raises(GeometryError, match=r"model\.layers\.0\.attn"):
        describe(caches((BLOCKS, 2, 16, 16)), config([spec()]), Place(0, 1), Model(4, 2), {})


def test_what_is_in_the_cache_stays_and_the_log_says_what_was_found(caplog):
    caplog.set_level("INFO", "kvxfer")
    view = torch.randn(BLOCKS, 2, 16, 16)
    before = view.clone()
    described_all({"model.layers.0.attn": view}, config([spec()]))
    assert view.equal(before)
    assert "layout_proved" in caplog.text
    assert "as its view says" in caplog.text


def test_a_view_of_another_size_than_its_heads_is_refused():
    with pytest.raises(GeometryError, match=r"shape \(6, 2, 16, 18\)"):
        described(spec(), (BLOCKS, 2, 16, 18))
