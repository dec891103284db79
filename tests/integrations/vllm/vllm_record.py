"""Records what the connector relies on of a released vLLM: names and signatures, and nothing else.

    pip download vllm --no-deps -d /tmp/vllm
    python tests/integrations/vllm/vllm_record.py /tmp/vllm/vllm-*.whl

vLLM is under the Apache License 2.0; no code or text of it is copied. A parameter is written `name`, with a default
`name=`, and `*name`, `**name`, `*` and `/` stand where they do in Python.
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

RECORD = Path(__file__).with_name("signatures.json")
CALLED = {
    "Attention",
    "AttentionBackend",
    "FlashAttentionImpl",
    "KVConnectorBase_V1",
    "KVConnectorPromMetrics",
    "KVConnectorStats",
    "KVCacheBlocks",
    "KVCacheConfig",
    "MLAAttention",
    "MLAAttentionImpl",
    "MambaBase",
    "ModelConfig",
    "SupportsHMA",
    "VllmConfig",
}
"""Classes of which methods are recorded as well: those that one side calls."""
CLASSES = {
    "vllm/distributed/kv_transfer/kv_connector/v1/base.py": (
        "KVConnectorBase_V1",
        "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata",
        "KVConnectorRole",
        "KVConnectorTransferResults",
        "SupportsHMA",
    ),
    "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py": ("KVConnectorPromMetrics", "KVConnectorStats"),
    "vllm/lora/request.py": ("LoRARequest",),
    "vllm/model_executor/layers/attention/attention.py": ("Attention",),
    "vllm/model_executor/layers/attention/mla_attention.py": ("MLAAttention",),
    "vllm/model_executor/layers/mamba/abstract.py": ("MambaBase",),
    "vllm/multimodal/inputs.py": ("MultiModalFeatureSpec", "PlaceholderRange"),
    "vllm/v1/attention/backend.py": ("AttentionBackend", "MLAAttentionImpl"),
    "vllm/v1/attention/backends/flash_attn.py": ("FlashAttentionBackend", "FlashAttentionImpl"),
    "vllm/v1/attention/backends/mla/flashmla.py": ("FlashMLABackend",),
    "vllm/v1/core/kv_cache_manager.py": ("KVCacheBlocks",),
    "vllm/v1/core/sched/output.py": ("CachedRequestData", "NewRequestData", "SchedulerOutput"),
    "vllm/v1/kv_cache_interface.py": (
        "AttentionSpec",
        "FullAttentionSpec",
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheSpec",
        "MLAAttentionSpec",
        "MambaSpec",
        "SlidingWindowSpec",
        "UniformTypeKVCacheSpecs",
    ),
    "vllm/v1/outputs.py": ("KVConnectorOutput",),
    "vllm/v1/request.py": ("Request", "RequestStatus"),
    "vllm/config/cache.py": ("CacheConfig",),
    "vllm/config/compilation.py": ("CompilationConfig",),
    "vllm/config/kv_transfer.py": ("KVTransferConfig",),
    "vllm/config/model.py": ("ModelConfig",),
    "vllm/config/multimodal.py": ("MultiModalConfig",),
    "vllm/config/parallel.py": ("ParallelConfig",),
    "vllm/config/speculative.py": ("SpeculativeConfig",),
    "vllm/config/vllm.py": ("VllmConfig",),
}


def parameters(function):
    """The parameters of a function, as the module's docstring writes them."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    bare = len(plain) - len(given.defaults)
    found = [arg.arg + ("=" if at >= bare else "") for at, arg in enumerate(plain)]
    if given.posonlyargs:
        found.insert(len(given.posonlyargs), "/")
    if given.vararg or given.kwonlyargs:
        found.append(f"*{given.vararg.arg if given.vararg else ''}")
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    found += [arg.arg + ("" if default is None else "=") for arg, default in pairs]
    return found + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def signature(function):
    """A method in one line, such as `abstract method(self, layer_name)`."""
    marks = {ast.unparse(mark).split(".")[-1].replace("cached_", "") for mark in function.decorator_list}
    kind = next((kind for kind in ("property", "classmethod", "staticmethod") if kind in marks), "method")
    return f"{'abstract ' * ('abstractmethod' in marks)}{kind}({', '.join(parameters(function))})"


def assigned(function):
    """Attributes that a constructor sets."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr


def described(node):
    """What is recorded of a class: its fields, in one line, and its methods."""
    fields, methods = set(), {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            fields.add(ast.unparse(item.target))
        elif isinstance(item, ast.Assign):
            fields |= {ast.unparse(target) for target in item.targets}
        elif isinstance(item, ast.FunctionDef):
            methods[item.name] = signature(item)
            fields |= set(assigned(item)) if item.name == "__init__" else set()
    return {"bases": [ast.unparse(base) for base in node.bases], "fields": " ".join(sorted(fields)), "methods": methods}


def classes(source):
    """Every class of a module, by name."""
    return {node.name: described(node) for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def record(wheel):
    """Everything of one release."""
    found = {}
    with zipfile.ZipFile(wheel) as files:
        for path, names in CLASSES.items():
            known = classes(files.read(path).decode())
            module = path.removesuffix(".py").replace("/", ".")
            for name in names:
                found[name] = {"module": module, **known[name]}
                if name not in CALLED:
                    del found[name]["methods"]
    return {"release": Path(wheel).name.split("-")[1], "classes": found}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(sys.argv[1]), indent=1, sort_keys=True) + "\n")
