"""What is read from published configs, and what is refused by name."""

import json

import pytest

from kvxfer.errors import GeometryError
from kvxfer.tools.engine import Part, dtype_name, read_model
from tests.geometry.published import CONFIGS

PLAIN = CONFIGS["Llama-3.1-8B"]


def attention(heads, dim, window=None):
    return Part("window" if window else "default", "", ("k", "v"), heads, dim, window=window)


def layers(name, **changes):
    return read_model(CONFIGS[name] | changes).layers


@pytest.mark.parametrize(
    ("name", "count", "heads", "dim"),
    [
        ("Llama-3.1-8B", 32, 8, 128),
        ("Llama-3.2-1B", 16, 8, 64),
        ("Llama-3.1-70B", 80, 8, 128),
        ("Mistral-7B-v0.2", 32, 8, 128),
        ("Qwen3-0.6B", 28, 8, 128),
    ],
)
def test_plain_attention(name, count, heads, dim):
    model = read_model(CONFIGS[name])
    assert model.layers == ((attention(heads, dim),),) * count
    assert (model.dtype, model.notes) == ("bfloat16", ())


def test_without_grouped_heads_every_head_has_its_own_k_and_v():
    assert layers("Llama-3.1-8B", num_key_value_heads=None) == ((attention(32, 128),),) * 32


@pytest.mark.parametrize(
    ("name", "windowed"),
    [
        ("gemma-2-9b", lambda layer: layer % 2 == 0),
        ("gemma-3-4b-it", lambda layer: layer % 6 != 5),
        ("gpt-oss-20b", lambda layer: layer % 2 == 0),
    ],
)
def test_some_layers_have_a_window(name, windowed):
    window = {"gemma-2-9b": 4096, "gemma-3-4b-it": 1024, "gpt-oss-20b": 128}[name]
    shape = {"gemma-2-9b": (8, 256), "gemma-3-4b-it": (4, 256), "gpt-oss-20b": (8, 64)}[name]
    found = layers(name)
    assert found == tuple((attention(*shape, window if windowed(layer) else None),) for layer in range(len(found)))


def test_a_window_of_every_layer():
    assert layers("Mistral-7B-v0.2", sliding_window=4096) == ((attention(8, 128, 4096),),) * 32


def test_windows_of_the_later_layers():
    found = layers("Qwen3-0.6B", use_sliding_window=True, sliding_window=512, max_window_layers=20)
    assert found == ((attention(8, 128),),) * 20 + ((attention(8, 128, 512),),) * 8


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


def test_mamba_of_the_first_kind():
    mamba = (state("conv", 8192, 1, 3, rows=True), state("ssm", 8192, 1, 16))
    found = layers("Jamba-v0.1")
    assert found == tuple((attention(8, 128),) if layer % 8 == 4 else mamba for layer in range(32))


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


def test_layers_by_their_numbers():
    found = layers("Bamba-9B")
    assert [layer for layer in range(32) if not found[layer][0].state] == [9, 18, 27]
    assert [part.units * part.unit for part in found[0]] == [8192, 128, 128, 128]


def test_an_unknown_type_that_looks_plain_is_noted():
    model = read_model(PLAIN | {"model_type": "brandnew"})
    assert model.layers == read_model(PLAIN).layers
    assert len(model.notes) == 1
    assert "'brandnew'" in model.notes[0]


@pytest.mark.parametrize(
    "sign",
    [
        {"kv_lora_rank": 512},
        {"mamba_d_state": 16},
        {"ssm_state_size": 16},
        {"linear_num_value_heads": 32},
        {"num_kv_shared_layers": 10},
        {"attention_chunk_size": 8192},
        {"index_head_dim": 128},
        {"v_head_dim": 128},
        {"is_encoder_decoder": True},
        {"multi_query": True},
        {"hybrid_override_pattern": "M*"},
        {"kv_channels": 128},
        {"global_head_dim": 512},
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
        ({"num_attention_heads": 0}, "num_attention_heads is 0, but must be a whole number from 1 on"),
        ({"num_attention_heads": "32"}, "num_attention_heads is '32'"),
        ({"head_dim": True}, "head_dim is True"),
        ({"hidden_size": 4095}, "hidden_size 4095 is no multiple of 32 heads"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types lists 31 layers, but num_hidden_layers is 32"),
        ({"layer_types": ["chunked_attention"] * 32}, "layers of type 'chunked_attention' are not known"),
        ({"layer_types": ["sliding_attention"] * 32}, "but sliding_window is missing"),
        ({"model_type": "brandnew", "sliding_window": 512}, "does not say which layers have the window"),
        ({"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 9}, "does not say which layers"),
        ({"per_layer_config": {"05": {"head_dim": 512}}}, "per_layer_config lets layers differ"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank is missing"),
        ({"model_type": "nemotron_h"}, "layer_types is missing, so it is not known which layers keep what"),
        ({"torch_dtype": "int4"}, "dtype 'int4' is unknown; use one of float32, bfloat16"),
        ({"model_type": ["llama"]}, "not the config of a model: its model_type is ['llama']"),
        ({"text_config": "llama"}, "text_config is 'llama', but must be an object"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', but must be a list"),
        ({"layer_types": 5}, "layer_types is 5, but must be a list"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, but 16384 is the most that can be planned"),
        ({"num_hidden_layers": 10**30}, "but 16384 is the most that can be planned"),
        ({"num_key_value_heads": 10**9}, "num_key_value_heads is 1000000000, but 16777216 is the most"),
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
        ("Nemotron-H-8B", {"num_hidden_layers": 2, "hybrid_override_pattern": "MX"}, "layers of type 'X'"),
        ("Nemotron-H-8B", {"hybrid_override_pattern": ["M"]}, "hybrid_override_pattern is ['M'], but must be text"),
        *(
            (
                "Nemotron-H-8B",
                BAMBA | {"attn_layer_indices": wrong},
                f"attn_layer_indices is {wrong!r}, but must be a list",
            )
            for wrong in (5, "1", [99], [-1], [1.0, {}], [True])
        ),
        ("DeepSeek-V3.2", {"index_head_dim": 96}, "index_head_dim is 96"),
        ("DeepSeek-V3.2", {"index_topk_freq": 4}, "layers share indexers"),
        ("DeepSeek-V3.2", {"indexer_types": ["full"]}, "indexer_types must say"),
        ("DeepSeek-V3.2", {"layer_types": ["sliding_attention"] * 61}, "layers of type 'sliding_attention'"),
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


def test_short_names_of_dtypes():
    assert [dtype_name(text) for text in ("bf16", "torch.float16", "fp8", "float32")] == [
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float32",
    ]
