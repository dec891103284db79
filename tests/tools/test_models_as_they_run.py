"""What the reader says of a config, against the cache that transformers makes when a model of that config runs."""

import pytest
import torch

from kvxfer.tools.engine import read_model

transformers = pytest.importorskip("transformers", reason="transformers is an extra: the models are run with it")

TOKENS = 12
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
    "pad_token_id": 0,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
MODELS = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3": {"head_dim": 32},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "moe_intermediate_size": 16},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "mixtral": {},
    "gemma2": {"head_dim": 32, "sliding_window": 8},
    "gemma3_text": {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 7},
    "gpt_oss": {"head_dim": 32, "sliding_window": 8, "num_local_experts": 4},
    "phi": {},
    "phi3": {"sliding_window": 8},
    "phimoe": {},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "nemotron": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False},
    "bamba": {"attn_layer_indices": [1], **MAMBA2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"], **MAMBA2},
    "falcon_h1": {"mamba_d_ssm": 128, **MAMBA2},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "num_mem_blocks": 1,
    },
    "qwen3_next": {
        "head_dim": 32,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "num_experts": 10,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
}


def config_of(model_type):
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    return known[model_type](**TINY | MODELS[model_type])


def layers_of(config):
    """The cache layers of a model with random weights that has seen `TOKENS` tokens."""
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        out = model(torch.arange(1, TOKENS + 1)[None], use_cache=True)
    cache = out.past_key_values if getattr(out, "past_key_values", None) is not None else out.cache_params
    return cache.layers


def held(layer):
    """(K, V, convolution state, recurrent state) of a layer as shapes without the batch; None where there is none."""
    tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    tensors += [(getattr(layer, name, None) or {}).get(0) for name in ("conv_states", "recurrent_states")]
    return [None if tensor is None else tuple(tensor.shape[1:]) for tensor in tensors]


def read(parts):
    """The same as the reader has it."""
    found = {part.name: part for part in parts}
    kv = recurrent = conv = None
    if attention := found.get(""):
        tokens = TOKENS if attention.window is None else min(TOKENS, attention.window - 1)
        kv = (attention.units, tokens, attention.dim)
    convolutions = [part for name, part in found.items() if name.startswith("conv")]
    if convolutions:
        (rows,) = {part.dim for part in convolutions}
        # transformers keeps one column more than a step needs
        conv = (sum(part.units * part.unit for part in convolutions), rows + 1)
        recurrent = found["ssm"].units * found["ssm"].unit, found["ssm"].dim
    return [kv, kv, conv, recurrent]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_the_reader_knows_what_a_running_model_keeps(model_type):
    config = config_of(model_type)
    model = read_model(config.to_dict())
    assert model.notes == ()
    real = [held(layer) for layer in layers_of(config)]
    for shapes in real:
        if shapes[3] is not None:  # heads, head dim, state: everything but the heads is `dim` to us
            heads, *rest = shapes[3]
            shapes[3] = heads, int(torch.Size(rest).numel())
    assert [read(parts) for parts in model.layers] == real


LATENT = {"deepseek_v2": False, "deepseek_v3": False, "deepseek_v32": True, "glm4_moe_lite": False, "glm_moe_dsa": True}


@pytest.mark.parametrize(("model_type", "indexed"), LATENT.items())
def test_configs_of_latent_attention(model_type, indexed):
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    config = known[model_type](kv_lora_rank=32, qk_rope_head_dim=16, num_hidden_layers=3)
    parts = read_model(config.to_dict()).layers
    assert [[(part.name, part.units, part.dim) for part in layer] for layer in parts] == [
        [("", 0, 48), *([("indexer", 0, 132)] if indexed else [])]
    ] * 3
