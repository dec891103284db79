"""A tiny Llama with random weights and a tokenizer of numbered words, in a folder."""

# what comes with vLLM is not installed where types are checked
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1000


def make(folder: Path, *, head_dim: int) -> None:
    """Weights are wide: with the usual range of 0.02 tokens hardly depend on the cache."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder, safe_serialization=True)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
