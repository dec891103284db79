"""What was computed with an adapter is loaded with that adapter, and computed with any other and with none."""

# what comes with vLLM is not installed where types are checked
# pyright: reportMissingImports=false

import itertools
import json
from dataclasses import replace

import pytest
import torch
from make_model import COMMON, MODELS
from pd import connected, gathered, prompts, routed
from safetensors.torch import save_file

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

RANK = 8


def adapter(folder, seed):
    """A folder with random changes to Q and V of the model "llama"."""
    folder.mkdir()
    drawn, hidden = torch.Generator().manual_seed(seed), COMMON["hidden_size"]
    heads = {"q_proj": COMMON["num_attention_heads"], "v_proj": MODELS["llama"][1]["num_key_value_heads"]}
    weights = {}
    for layer, (name, count) in itertools.product(range(COMMON["num_hidden_layers"]), heads.items()):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
        weights[f"{prefix}_A.weight"] = torch.randn(RANK, hidden, generator=drawn) * 0.3
        weights[f"{prefix}_B.weight"] = torch.randn(count * MODELS["llama"][1]["head_dim"], RANK, generator=drawn) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config |= {"target_modules": [*heads], "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


async def test_an_adapters_cache_is_for_that_adapter(start, model, table, tmp_path):
    names = ("tiny", "first", "second")  # the first is the model without any
    modules = [f"{name}={adapter(tmp_path / name, seed)}" for seed, name in enumerate(names[1:])]
    args = ("--dtype", "float32", "--no-enable-prefix-caching", "--enable-lora", "--max-loras", "2")
    args += ("--max-lora-rank", str(RANK), "--lora-modules", *modules)
    prefill, decode = start(*(connected(side, model("llama"), tmp_path, *args) for side in ("prefill", "decode")))
    async with routed(prefill, decode) as router:
        asked, routers = prompts(0), {name: replace(router, model=name) for name in names}
        wanted = {name: await gathered(map(routers[name].decode, asked), 1) for name in names}
        assert all(one != other for one, other in itertools.combinations(wanted.values(), 2))
        for computed, answered in itertools.product(names, names):
            before = decode.metrics().get("external_prefix_cache_hits_total", 0)
            tickets = await gathered(map(routers[computed].ticket, asked), 1)
            pairs = zip(asked, tickets, strict=True)
            got = await gathered((routers[answered].decode(prompt, **ticket) for prompt, ticket in pairs), 1)
            loaded = decode.metrics().get("external_prefix_cache_hits_total", 0) - before
            table.append(f"computed with {computed}, asked of {answered}: {loaded:g} tokens loaded")
            assert got == wanted[answered]
            assert loaded == (sum(map(len, asked)) if computed == answered else 0)
