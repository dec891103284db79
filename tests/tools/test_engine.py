"""Engines from configs: what each rank holds, where it lies, and that together they hold the whole model."""

import warnings
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.errors import GeometryError
from kvxfer.geometry import CacheGeometry, CacheTensor, Interleave, PairPlan, group, resolve
from kvxfer.tools.engine import from_hf_config, scattered
from tests.geometry.published import CONFIGS

LLAMA = CONFIGS["Llama-3.2-1B"]
NEMOTRON = CONFIGS["Nemotron-H-8B"]
SMALL = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "dtype": "float32"}
SMALL_MAMBA = {
    "model_type": "mamba2",
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 3,
    "n_groups": 2,
    "state_size": 5,
    "conv_kernel": 4,
    "dtype": "bfloat16",
}


def bare(geometry):
    """Specs without their addresses."""
    return [replace(spec, base=0) for spec in geometry.tensors]


@pytest.mark.parametrize(
    ("options", "shape", "axes"),
    [
        ({"layout": "NHD"}, (6, 16, 4, 8), "block token head dim"),
        ({"layout": "HND"}, (6, 4, 16, 8), "block head token dim"),
        ({"layout": "block head dim/4 token dim%4"}, (6, 4, 2, 16, 4), "block head dim/4 token dim%4"),
    ],
)
def test_k_and_v_of_each_layer_as_one_would_describe_tensors(options, shape, axes):
    pairs = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)]
    described = CacheGeometry.of(group(pairs, axes, heads=range(4)))
    (rank,) = from_hf_config(SMALL, blocks=6, **options).ranks
    assert bare(rank) == bare(described)


@pytest.mark.parametrize(
    ("options", "shape", "axes"),
    [
        ({"cross_layer": True}, (6, 2, 2, 16, 4, 8), "block layer kv token head dim"),
        ({"layout": "HND", "cross_layer": True}, (6, 2, 2, 4, 16, 8), "block layer kv head token dim"),
        ({"layout": "BLHNC"}, (6, 2, 4, 16, 2, 8), "block layer head token kv dim"),
        ({"layout": "LBNHC"}, (2, 6, 16, 4, 2, 8), "layer block token head kv dim"),
    ],
)
def test_all_layers_in_one_tensor(options, shape, axes):
    described = CacheGeometry.of([CacheTensor(torch.zeros(shape), axes, layers=range(2), heads=range(4))])
    (rank,) = from_hf_config(SMALL, blocks=6, **options).ranks
    assert bare(rank) == bare(described)


def test_large_blocks_over_a_kernel_with_small_ones():
    (rank,) = from_hf_config(SMALL, blocks=6, block=64, kernel_block=16).ranks
    spec = rank.tensors[0]
    assert (spec.shape, spec.block_ratio, spec.ids, spec.id_tokens) == ((24, 16, 4, 8), 4, 6, 64)


def test_a_page_of_state():
    """One slot of a layer is a page, as vLLM has it: rows of x, B and C side by side, then the recurrent state."""
    rows, recurrent = (3, 4 * 3 + 2 * 2 * 5), (4, 3 * 5)
    page = (rows[0] * rows[1] + recurrent[0] * recurrent[1]) * 2
    slots = torch.zeros(6 * page // 2, dtype=torch.bfloat16)
    conv = slots.as_strided((6, *rows), (page // 2, rows[1], 1))
    ssm = slots.as_strided((6, *recurrent), (page // 2, recurrent[1], 1), rows[0] * rows[1])
    views = {"conv.x": conv[..., :12], "conv.B": conv[..., 12:22], "conv.C": conv[..., 22:]}
    tensors = [
        CacheTensor(view, "block dim head", group="state", part=part, layers=[0], heads=range(view.shape[-1]))
        for part, view in views.items()
    ]
    tensors.append(CacheTensor(ssm, "block head dim", group="state", part="ssm", layers=[0], heads=range(4)))
    described = CacheGeometry.of(tensors)
    (rank,) = from_hf_config(SMALL_MAMBA, blocks=6).ranks
    first = rank.tensors[:4]  # those of layer 0
    for ours, theirs in zip(first, described.tensors, strict=True):
        assert (ours.part, ours.heads, ours.dtype) == (theirs.part, theirs.heads, theirs.dtype)
        assert ours.base - first[0].base == theirs.base - described.tensors[0].base
        for axis in ("block", "head", "dim"):
            assert (ours.count(axis), ours.stride(axis)) == (theirs.count(axis), theirs.stride(axis))


def test_heads_are_divided_and_copied_where_there_are_too_few():
    held = {tp: [rank.tensors[0].heads for rank in from_hf_config(LLAMA, tp=tp).ranks] for tp in (1, 4, 16)}
    assert held[1] == [range(8)]
    assert held[4] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert held[16] == [range(rank // 2, rank // 2 + 1) for rank in range(16)]


def test_groups_of_channels_follow_the_heads():
    ranks = from_hf_config(NEMOTRON, tp=16).ranks
    first = {spec.part: spec.heads for spec in ranks[3].tensors if spec.group == "state"}
    assert first == {
        "conv.x": range(3 * 512, 4 * 512),
        "conv.B": range(128, 256),
        "conv.C": range(128, 256),
        "ssm": range(24, 32),
    }


@pytest.mark.parametrize(
    ("pp", "stages"), [(1, [16]), (4, [4, 4, 4, 4]), (3, [5, 6, 5]), (7, [2, 2, 2, 2, 3, 3, 2]), ((10, 6), [10, 6])]
)
def test_stages(pp, stages):
    ranks = from_hf_config(LLAMA, pp=pp).ranks
    held = [sorted({layer for spec in rank.tensors for layer in spec.layers}) for rank in ranks]
    assert [len(layers) for layers in held] == stages
    assert list(chain.from_iterable(held)) == list(range(16))


def test_ranks_count_heads_first_then_tokens_then_stages():
    ranks = from_hf_config(LLAMA, tp=2, cp=2, pp=2, cp_chunk=4).ranks
    found = [(rank.tensors[0].heads.start, rank.tensors[0].tokens, rank.tensors[0].layers[0]) for rank in ranks]
    assert found == [
        (head, Interleave(context, 2, 4), layer) for layer in (0, 8) for context in (0, 1) for head in (0, 4)
    ]


def test_latent_rows_are_on_every_rank_and_rows_of_the_indexer_keep_their_size():
    engine = from_hf_config(CONFIGS["DeepSeek-V3.2"], tp=2, block=64, dtype="fp8")
    first, second = (bare(rank) for rank in engine.ranks)
    assert first == second
    assert {(spec.part, spec.axes, spec.shape[1:], spec.dtype) for spec in first} == {
        ("", "block token dim", (64, 576), "float8_e4m3fn"),
        ("indexer", "block token dim", (64, 132), "uint8"),
    }


def test_fp8_caches_keep_state_in_the_dtype_of_the_model():
    dtypes = {(spec.group, spec.dtype) for spec in from_hf_config(NEMOTRON, dtype="fp8").ranks[0].tensors}
    assert dtypes == {("default", "float8_e4m3fn"), ("state", "bfloat16")}


def test_block_lists_of_windows_are_short_and_begin_where_both_sides_can():
    engine = from_hf_config(CONFIGS["gemma-3-4b-it"], block=16)
    spans = engine.spans(5000)
    assert (len(spans["default"].ids), spans["default"].first_token) == (313, 0)
    assert (len(spans["window"].ids), spans["window"].first_token) == (65, 3968)  # token 3977 is the first still seen
    assert engine.spans(5000, aligned=48)["window"].first_token == 3936
    assert engine.spans(1038)["window"].first_token == 0
    assert engine.spans(1039)["window"].first_token == 16


@example(pool=7, part=1.0, draw=2)
@given(pool=st.integers(1, 3000), part=st.floats(0, 1), draw=st.integers(0, 5))
def test_scattered_ids_are_distinct_and_no_neighbours(pool, part, draw):
    ids = scattered(max(1, int(pool * part)), pool, draw=draw)
    assert len(set(ids.tolist())) == len(ids)
    assert ids.min() >= 0
    assert ids.max() < pool
    if pool > 6:
        assert (np.abs(np.diff(ids)) > 1).all()


def test_a_pool_that_is_too_small_is_refused():
    with pytest.raises(GeometryError, match="a pool of 6 blocks cannot hold 7 blocks"):
        from_hf_config(SMALL, blocks=6).spans(100)


WAYS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8, 16]),
        "pp": st.sampled_from([1, 2, 3]),
        "block": st.sampled_from([8, 16, 64]),
        "layout": st.sampled_from(["NHD", "HND", "LBNHC", "BLHNC", "BHLNC", "kv block token head dim"]),
        "cross_layer": st.booleans(),
    }
)


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(sorted(CONFIGS)), prefill=WAYS, decode=WAYS, tokens=st.integers(1, 300))
def test_any_engine_feeds_any_other_with_every_byte_that_it_holds(name, prefill, decode, tokens):
    src, dst = (from_hf_config(CONFIGS[name], **ways) for ways in (prefill, decode))
    lists = src.spans(tokens, aligned=dst.layout.block), dst.spans(tokens, aligned=src.layout.block, draw=1)
    for number in {0, len(dst.ranks) // 2, len(dst.ranks) - 1}:
        need, moved = dst.ranks[number], 0
        for owner, selections in enumerate(resolve(need, src.ranks, rank=number)):
            if selections:
                moved += PairPlan(src.ranks[owner], need, selections).bind(*lists, range(tokens)).whole.bytes
        assert moved == held_bytes(need, tokens, lists[1])


def held_bytes(geometry, tokens, spans):
    """Bytes of a request on a rank, counted tensor by tensor."""
    total = 0
    for spec in geometry.tensors:
        kept = 1 if spec.is_state else tokens - spans[spec.group].first_token
        total += kept * len(spec.layers) * len(spec.kv) * len(spec.heads) * spec.count("dim") * spec.item_bytes
    return total


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 0}, "tp=0 is not possible"),
        ({"tp": 3}, "tp=3 is not possible: 8 heads can neither be divided evenly"),
        ({"pp": 17}, "pp=17 is not possible: the model has 16 layers"),
        ({"pp": (8, 9)}, "pp=8+9 is not possible: that is 17 layers, the model has 16"),
        ({"block": 16, "kernel_block": 5}, "block=16 is no multiple of kernel_block=5"),
        ({"layout": "block token dim"}, "the axis 'head' is missing"),
        ({"layout": "block token head dim/7 dim%7"}, "dim/7 needs dim to be a multiple of 7, but it is 64"),
        ({"dtype": "fp3"}, "dtype 'fp3' is unknown"),
    ],
)
def test_what_cannot_be_is_named(options, words):
    with pytest.raises(GeometryError) as caught:
        from_hf_config(LLAMA, **options)
    assert words in str(caught.value)


def test_what_cannot_be_with_other_models_is_named():
    with pytest.raises(GeometryError, match=r"groups of 128 channels of part 'conv.B' can neither"):
        from_hf_config(NEMOTRON | {"num_key_value_heads": 32, "mamba_num_heads": 384, "n_groups": 6}, tp=4)
    with pytest.raises(GeometryError, match="cp=2 is not possible: the model has sliding windows"):
        from_hf_config(CONFIGS["gpt-oss-20b"], cp=2)
    with pytest.raises(GeometryError, match=r"the stage of layers 1..1 keeps no cache"):
        from_hf_config(NEMOTRON, pp=(1, 1, 50))


def test_an_unknown_model_type_warns_a_python_user():
    with pytest.warns(UserWarning, match="model type 'brandnew' is not known here"):
        from_hf_config(LLAMA | {"model_type": "brandnew"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_hf_config(LLAMA)
