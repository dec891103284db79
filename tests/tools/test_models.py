"""What is read from published configs, and what is refused by name."""

import json

import pytest

from kvxfer.errors import GeometryError
from kvxfer.tools.engine import Part, read_model
from tests.geometry.published import CONFIGS

PLAIN = CONFIGS["Llama-3.1-8B"]


def attention(heads, dim, window=None):
    return Part("window" if window else "default", "", ("k", "v"), heads, dim, window=window)


def layers(name, **changes):
    return read_model(CONFIGS[name] | changes).layers


def test_without_grouped_heads_every_head_has_its_own_k_and_v():
    assert layers("Llama-3.1-8B", num_key_value_heads=None) == ((attention(32, 128),),) * 32


def test_the_text_part_of_a_multimodal_model_counts():
    config = {"model_type": "mistral3", "torch_dtype": "float16", "text_config": {**PLAIN, "torch_dtype": None}}
    model = read_model(config)
    assert (model.model_type, model.dtype, len(model.layers)) == ("llama", "float16", 32)


def test_latent_rows_and_those_of_the_indexer():
    latent = Part("default", "", ("",), 0, 576)
    assert layers("DeepSeek-V2-Lite") == ((latent,),) * 27
    indexer = Part("default", "indexer", ("",), 0, 132, dtype="uint8")
    assert layers("DeepSeek-V3.2") == ((latent, indexer),) * 61
    shared = layers("DeepSeek-V3.2", num_hidden_layers=3, indexer_types=["full", "shared", "full"])
    assert shared == ((latent, indexer), (latent,), (latent, indexer))


def state(name, units, unit, dim, *, rows=False, dtype="bfloat16"):
    return Part("state", name, ("",), units, dim, unit, dtype, state=True, dim_first=rows)


def test_mamba_of_the_second_kind():
    mamba = (
        state("conv.x", 128, 64, 3, rows=True),
        state("conv.B", 8, 128, 3, rows=True),
        state("conv.C", 8, 128, 3, rows=True),
        state("ssm", 128, 1, 64 * 128),
    )
    found = layers("Nemotron-H-8B")
    assert [found.count(kind) for kind in (mamba, (attention(8, 128),), ())] == [24, 4, 24]
    assert [layer for layer in range(52) if found[layer] == (attention(8, 128),)] == [7, 18, 29, 40]
    wide = layers("Nemotron-H-8B", mamba_ssm_cache_dtype="float32")[0]
    assert wide[-1] == state("ssm", 128, 1, 64 * 128, dtype="float32")
    assert wide[:-1] == mamba[:-1]


def test_an_unknown_type_that_looks_plain_is_taken_for_it():
    assert read_model(PLAIN | {"model_type": "brandnew"}).layers == read_model(PLAIN).layers


@pytest.mark.parametrize(
    "sign",
    [
        {"kv_lora_rank": 512},
        {"mamba_d_state": 16},
        {"num_kv_shared_layers": 10},
        {"multi_query": True},
        {"attention_k_eq_v": False},
    ],
)
def test_an_unknown_type_that_does_not_is_refused(sign):
    (key,) = sign
    with pytest.raises(GeometryError, match=f"'brandnew'.* {key} = .*CacheTensor"):
        read_model(PLAIN | {"model_type": "brandnew"} | sign)


def test_what_is_switched_off_is_no_sign():
    assert read_model(PLAIN | {"model_type": "brandnew", "kv_lora_rank": None, "multi_query": False}).notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "it has no model_type"),
        ({"num_hidden_layers": None}, "'llama': num_hidden_layers is missing"),
        ({"hidden_size": 4095}, "hidden_size 4095 is no multiple of 32 heads"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types lists 31 layers, but num_hidden_layers is 32"),
        ({"layer_types": ["sliding_attention"] * 32}, "but sliding_window is missing"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank is missing"),
        ({"model_type": "nemotron_h"}, "layer_types is missing, so it is not known which layers keep what"),
        ({"torch_dtype": "int4"}, "dtype 'int4' is unknown; use one of float32, float16"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', but must be a list"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, but 16384 is the most that can be planned"),
        ({"head_dim": 1 << 31}, "head_dim is 2147483648, but 16777216 is the most"),
    ],
)
def test_what_is_wrong_is_named(changes, words):
    with pytest.raises(GeometryError) as caught:
        read_model(PLAIN | changes)
    assert words in str(caught.value)


BAMBA = {"model_type": "bamba", "hybrid_override_pattern": None}


@pytest.mark.parametrize(("listed", "attends"), [([1, 3], {1, 3}), ([], set()), (None, set())])
def test_layers_may_be_listed_by_their_numbers(listed, attends):
    changes = BAMBA | {"num_hidden_layers": 4, "attn_layer_indices": listed}
    found = layers("Nemotron-H-8B", **changes)
    assert {number for number, parts in enumerate(found) if not parts[0].state} == attends


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Nemotron-H-8B", {"num_hidden_layers": 50}, "has 52 letters, but num_hidden_layers is 50"),
        *(
            (
                "Nemotron-H-8B",
                BAMBA | {"attn_layer_indices": wrong},
                f"attn_layer_indices is {wrong!r}, but must be a list",
            )
            for wrong in (5, "1", [99], [-1], [1.0, {}], [True])
        ),
        ("DeepSeek-V3.2", {"index_head_dim": 96}, "index_head_dim is 96"),
    ],
)
def test_what_is_wrong_with_other_models_is_named(name, changes, words):
    with pytest.raises(GeometryError) as caught:
        layers(name, **changes)
    assert words in str(caught.value)


def test_a_file_or_its_folder(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PLAIN))
    assert read_model(file) == read_model(str(tmp_path)) == read_model(PLAIN)
    file.write_text(json.dumps(PLAIN), encoding="utf-8-sig")  # some editors begin a file with a mark
    assert read_model(file) == read_model(PLAIN)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not the config of a model: it holds a list"),
        ("[" * 100_000 + "]" * 100_000, "is not the config of a model: it is nested too deeply to be read"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content, words):
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(GeometryError, match=words):
        read_model(file)
    with pytest.raises(GeometryError, match="cannot be read: No such file"):
        read_model(tmp_path / "nothing.json")
