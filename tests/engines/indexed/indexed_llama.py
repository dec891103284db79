"""A Llama with an indexer beside each layer's cache, as sparse attention has one, that runs on CPUs.

vLLM finds it as a plugin. Like DeepSeek's, the cache of an indexer has blocks of bytes: the values of all tokens, and
then their scales. Each token looks for the one up to it that is most like its mirror image, and adds it to what the
layer computes: so answers depend on all of it.
"""

# vLLM is not installed where types are checked
# pyright: reportMissingImports=false

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

DIM, SCALE_BYTES = 32, 4


def register():
    ModelRegistry.register_model("IndexedLlamaForCausalLM", IndexedLlamaForCausalLM)


class Builder(AttentionMetadataBuilder):
    """Takes what a step is about as it is."""

    def __init__(self, *args):
        super().__init__(*args)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata


class IndexBackend(CPUAttentionBackend):
    """What vLLM asks of the layer below."""

    @staticmethod
    def get_name():
        return "INDEX"

    @staticmethod
    def get_builder_cls():
        return Builder


class IndexCache(nn.Module, AttentionLayerBase):
    """One block is a page: `DIM` bytes of each token, then a scale of each."""

    def __init__(self, prefix):
        super().__init__()
        config = get_current_vllm_config()
        self.prefix, self.block_tokens, self.kv_cache = prefix, config.cache_config.block_size, torch.tensor([])
        config.compilation_config.static_forward_context[prefix] = self

    def bind_kv_cache(self, kv_cache):
        self.kv_cache = kv_cache.squeeze(1)

    def get_attn_backend(self):
        return IndexBackend

    def get_kv_cache_spec(self, vllm_config):
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=DIM + SCALE_BYTES,
            dtype=torch.uint8,
            cache_role=SparseCacheRole.INDEXER,
        )

    def parts(self):
        """The values by block, token and dim, and the scales by block and token."""
        pages, tokens = self.kv_cache.flatten(1), self.kv_cache.shape[1]
        assert pages.data_ptr() == self.kv_cache.data_ptr()
        return (
            pages[:, : tokens * DIM].view(torch.int8).unflatten(1, (tokens, DIM)),
            pages[:, tokens * DIM :].view(torch.float32),
        )

    def forward(self, rows):
        """Keep the rows of this step's tokens; what each token finds among those up to it."""
        step = (get_forward_context().attn_metadata or {}).get(self.prefix)
        if step is None:
            return torch.zeros_like(rows)
        values, scales = self.parts()
        size = values.shape[1]
        block, token = step.slot_mapping // size, step.slot_mapping % size
        count = len(block)
        scale = rows[:count].abs().amax(1) / 127 + 1e-9
        scales[block, token] = scale
        values[block, token] = (rows[:count] / scale[:, None]).round().to(torch.int8)
        found = torch.zeros_like(rows)
        starts = step.query_start_loc.tolist()
        for number, end in enumerate(step.seq_lens.tolist()[: step.num_reqs]):
            first, last = starts[number : number + 2]
            held = step.block_table_tensor[number, : -(-end // size)].long()
            keys = (values[held].float() * scales[held][..., None]).flatten(0, 1)[:end]
            likeness = rows[first:last].flip(1) @ keys.T
            positions = torch.arange(end - (last - first), end)
            likeness[torch.arange(end)[None] > positions[:, None]] = -torch.inf
            found[first:last] = keys[likeness.argmax(1)]
        return found


class IndexedAttention(LlamaAttention):
    """Adds what the indexer finds."""

    def __init__(self, *args, prefix="", **named):
        super().__init__(*args, prefix=prefix, **named)
        self.index = IndexCache(f"{prefix}.indexer.k_cache")

    def forward(self, positions, hidden_states):
        found = self.index(hidden_states[:, :DIM])
        computed = super().forward(positions, hidden_states)
        return computed + found.repeat(1, computed.shape[1] // DIM)


class IndexedLayer(LlamaDecoderLayer):
    def __init__(self, *args, **named):
        super().__init__(*args, attn_layer_type=IndexedAttention, **named)


class IndexedLlamaForCausalLM(LlamaForCausalLM):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=IndexedLayer)
