"""What is described of a cache is where vLLM's own attention for CPUs has K and V. Needs vLLM, but no engine.

A prompt is written by the attention, taken from there as it is described, put into a cache of another block size as
that is described, and read by the attention again: what it makes of both is equal, or the description is wrong.
"""

# vLLM is not installed where types are checked
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from transformers import LlamaConfig
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvxfer.errors import GeometryError
from kvxfer.geometry import CacheTensor
from kvxfer.integrations.heads import Place
from kvxfer.integrations.vllm.caches import Model, describe
from kvxfer.integrations.vllm.layout import Probe

BLOCKS, HEADS, TOKENS = 9, 2, 200
NAME = "model.layers.0.self_attn.attn"
wide = pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="this build has tiles for processors with AVX-512"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a model, of which nothing is loaded."""
    made = tmp_path_factory.mktemp("model")
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(made)
    return str(made)


class Cache:
    """A layer of vLLM's with a cache, and the attention that reads it."""

    def __init__(self, folder: str, dtype: str, block_tokens: int, dim: int, isa: str) -> None:
        arguments = EngineArgs(folder, dtype=dtype, block_size=block_tokens, skip_tokenizer_init=True)
        self.config = arguments.create_engine_config()
        with set_current_vllm_config(self.config):
            self.layer = Attention(4, dim, dim**-0.5, HEADS, cache_config=self.config.cache_config, prefix=NAME)
            spec: Any = self.layer.get_kv_cache_spec(self.config)
            self.builder = CPUAttentionMetadataBuilder(spec, [NAME], self.config, torch.device("cpu"))
        self.layer.isa = self.builder.isa = isa  # of this processor's, or as if it were another
        self.view = torch.zeros(BLOCKS, HEADS, block_tokens, 2 * dim, dtype=spec.dtype)
        self.layer.bind_kv_cache(self.view)
        group = KVCacheGroupSpec([NAME], spec)
        self.caches = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group])
        self.blocks = torch.randperm(BLOCKS, generator=torch.manual_seed(1))[: -(-TOKENS // block_tokens)]
        self.slots = (self.blocks[:, None] * block_tokens + torch.arange(block_tokens)).flatten()[:TOKENS]

    def described(self, *, trusted: bool = False) -> dict[str, torch.Tensor]:
        """K and V by slot, head and dim, as they are described."""
        layers = self.config.compilation_config.static_forward_context
        (tensors,) = describe(
            {NAME: self.view}, self.caches, Place(0, 1), Model(1, HEADS), layers, trusted=trusted
        ).values()
        found = {}
        for tensor in tensors:
            names = {"LBHNC": "block head token dim"}.get(tensor.axes, tensor.axes).split()
            parts = tensor.tensor.permute([names.index(name) for name in ("block", "token", "head", "dim")])
            halves = zip("kv", parts.chunk(2, dim=-1), strict=True) if tensor.kv is None else [(tensor.kv, parts)]
            found |= dict(halves)
        return found

    def attended(self, query: torch.Tensor) -> torch.Tensor:
        """What the attention makes of the prompt, seen from its last token."""
        ends = torch.tensor([0, 1], dtype=torch.int32)
        metadata = self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=ends,
                query_start_loc_cpu=ends,
                seq_lens=torch.tensor([TOKENS], dtype=torch.int32),
                num_reqs=1,
                num_actual_tokens=1,
                max_query_len=1,
                max_seq_len=TOKENS,
                block_table_tensor=self.blocks[None].int(),
                slot_mapping=self.slots[-1:],
            ),
        )
        output = torch.zeros_like(query)
        self.layer.impl.forward(self.layer, query, query[:, :HEADS], query[:, :HEADS], self.view, metadata, output)
        return output


def handed_over(
    folder: str, dtype: str, dim: int, isa: str, *, trusted: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the attention makes of a prompt where it was written, and where it was moved to."""
    source, target = (Cache(folder, dtype, block_tokens, dim, isa) for block_tokens in (32, 64))
    there, here = target.described(trusted=trusted), source.described(trusted=trusted)
    torch.manual_seed(0)
    query, key, value = (torch.randn(rows, heads, dim) for rows, heads in ((1, 4), (TOKENS, HEADS), (TOKENS, HEADS)))
    query, key, value = (part.to(source.view.dtype) for part in (query, key, value))
    source.layer.impl.do_kv_cache_update(source.layer, key, value, source.view, source.slots)
    for half, rows in here.items():
        for old, new in zip(source.slots.tolist(), target.slots.tolist(), strict=True):
            there[half][divmod(new, 64)] = rows[divmod(old, 32)]
    return source.attended(query), target.attended(query)


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [32, 128])
def test_a_prompt_that_is_moved_as_described_is_read_as_it_was(folder, dtype, dim, isa):
    before, after = handed_over(folder, dtype, dim, isa)
    assert before.any()
    assert after.equal(before)


def test_without_the_proof_another_prompt_is_read(folder):
    before, after = handed_over(folder, "float32", 32, "vec", trusted=True)
    assert not after.allclose(before, rtol=0.1)


@wide
@pytest.mark.parametrize("dim", [32, 128])
def test_tiles_are_refused_with_what_was_seen(folder, dim):
    with pytest.raises(GeometryError, match=r"CPU_ATTN.*no axes say where K lies: .* token 16, dim 0 is .*--dtype"):
        Cache(folder, "bfloat16", 32, dim, "amx").described()


def test_an_instruction_set_that_this_processor_lacks_is_refused(folder):
    with pytest.raises(GeometryError, match=r"CPU_ATTN.*cannot write.*Unsupported CPU attention"):
        Cache(folder, "float32", 32, 32, "neon").described()


@pytest.mark.parametrize(
    ("backend", "kind"), [(CPUMLABackend, CPUMLAImpl), pytest.param(AMXMLABackend, AMXMLAImpl, marks=wide)]
)
def test_latent_attention_is_as_its_view_says(backend, kind):
    view = torch.zeros(BLOCKS, 1, 32, 96, dtype=torch.bfloat16)
    layer = SimpleNamespace(
        impl=object.__new__(kind),  # what makes one wants a model
        get_attn_backend=lambda: backend,
        kv_cache=view[:, 0],
        kv_cache_dtype="auto",
        kv_lora_rank=64,
        _k_scale=torch.ones(()),
    )
    assert Probe(NAME, layer, view, {"": 96}).shows([CacheTensor(view[:, 0], "block token dim", layers=[0])])
