"""Tiny models with random weights and a tokenizer of numbered words, each in a folder.

Weights are wide: with the usual range of 0.02 tokens hardly depend on the cache.
"""

# what comes with vLLM is not installed where types are checked
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 1000
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
FULL, SLIDING = "full_attention", "sliding_attention"
STILL = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 1e9,
    "original_max_position_embeddings": 1,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""By no angle that matters. Of models that have heads as an axis vLLM 0.32.0 rotates on CPUs as many heads as there are
tokens in a step, so that their answers would depend on how a prompt is cut."""
MODELS = {
    "llama": ("Llama", {"num_key_value_heads": 4, "head_dim": 32}),
    # K is not stored as K of the others is: its heads are no multiple of 32
    "llama-48": ("Llama", {"num_key_value_heads": 4, "head_dim": 48}),
    # with a cache beside each layer's, of a class of our own
    "indexed": ("Llama", {"num_key_value_heads": 4, "head_dim": 32, "architectures": ["IndexedLlamaForCausalLM"]}),
    # a window sees where a block stands, which full attention does not; of 300 tokens it begins with a block
    "sliding": (
        "Gemma3",
        {"num_key_value_heads": 4, "head_dim": 32, "sliding_window": 45, "layer_types": [SLIDING, FULL] * 2},
    ),
    "latent": (
        "DeepseekV2",
        {
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "first_k_dense_replace": 4,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "short-conv": (
        "Lfm2",
        {
            "num_key_value_heads": 4,
            "layer_types": ["conv", FULL] * 2,
            "conv_dim": 256,
            "block_dim": 256,
            "rope_parameters": STILL,
        },
    ),
    "mamba2": (
        "FalconH1",
        {
            "num_key_value_heads": 4,
            "mamba_d_ssm": 512,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 32,
            "mamba_chunk_size": 64,
        },
    ),
    "delta-rule": (
        "Qwen3Next",
        {
            "num_key_value_heads": 4,
            "head_dim": 32,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", FULL] * 2,
            "rope_parameters": STILL,
        },
    ),
}
"""By name: transformers' class, and what it has besides `COMMON`."""


def make(name: str, folder: Path) -> Path:
    """Write a model; returns its folder."""
    kind, own = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**COMMON | own)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder / name, safe_serialization=True)
    if "architectures" in own:  # of which transformers has written its own
        config.architectures = own["architectures"]
        config.save_pretrained(folder / name)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w0"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder / name)
    return folder / name
