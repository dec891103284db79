"""Records what the integration relies on of a released sglang: names, signatures and numbers, and nothing else.

    pip download sglang --no-deps -d /tmp/sglang
    python tests/integrations/sglang/sglang_record.py /tmp/sglang/sglang-*.whl

sglang is under the Apache License 2.0; no code or text of it is copied. Signatures are written as those of vLLM are.
`read` lists what sglang's schedulers read of managers, senders and receivers.
"""

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "vllm"))

from vllm_record import classes, parameters

RECORD = Path(__file__).with_name("signatures.json")
BASE = "sglang/srt/disaggregation/base/conn.py"
COMMON = "sglang/srt/disaggregation/common/conn.py"
CLASSES = {
    BASE: (
        "BaseKVBootstrapServer",
        "BaseKVManager",
        "BaseKVReceiver",
        "BaseKVSender",
        "KVArgs",
        "KVPoll",
        "KVTransferDestination",
        "KVTransferMetric",
    ),
    COMMON: ("CommonKVManager", "CommonKVReceiver", "CommonKVSender"),
    "sglang/srt/disaggregation/utils.py": ("DisaggregationMode", "KVClassType", "TransferBackend"),
    "sglang/srt/plugins/hook_registry.py": ("HookRegistry", "HookType"),
    "sglang/srt/configs/model_config.py": ("ModelConfig",),
}
FUNCTIONS = {
    "sglang/srt/disaggregation/utils.py": ("get_kv_class",),
    "sglang/srt/runtime_context.py": ("get_disagg", "get_parallel", "get_serving"),
}
METHODS = {
    "CommonKVManager": {
        "clear_deferred_abort_state",
        "is_abort_release_safe",
        "submit_prefill_recompute",
        "try_ensure_parallel_info",
    },
    "CommonKVReceiver": {"ensure_abort_notified", "query_prefill_dp_ranks"},
    "CommonKVSender": {"poll_pp_consensus"},
    "HookRegistry": {"register"},
    "ModelConfig": {"from_server_args", "get_total_num_kv_heads"},
}
"""Of classes that have many, those that are called."""
SCHEDULERS = (
    "sglang/srt/disaggregation/decode.py",
    "sglang/srt/disaggregation/decode_hicache_mixin.py",
    "sglang/srt/disaggregation/prefill.py",
    "sglang/srt/disaggregation/utils.py",
    "sglang/srt/managers/scheduler.py",
)
OBJECTS = {
    "manager": r"\b(?:kv_manager|kv_mgr)\.(\w+)",
    "sender": r"\b(?:disagg_kv_sender|sender)\.(\w+)",
    "receiver": r"\bkv_receiver\.(\w+)",
}
ENVIRONMENT = (
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    "SGLANG_PLUGINS",
)


def values(source, names):
    """Numbers and texts that classes assign."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            pairs = [
                item for item in node.body if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant)
            ]
            found[node.name] = {ast.unparse(item.targets[0]): ast.literal_eval(item.value) for item in pairs}
    return found


def functions(source):
    """Parameters of every function of a module; of overloads the last."""
    return {node.name: parameters(node) for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}


def record(wheel):
    """Everything of one release."""
    found, called, read = {}, {}, {kind: set() for kind in OBJECTS}
    with zipfile.ZipFile(wheel) as files:

        def source(path):
            return files.read(path).decode()

        for path, names in CLASSES.items():
            known, assigned = classes(source(path)), values(source(path), names)
            for name in names:
                entry = {"module": path.removesuffix(".py").replace("/", "."), **known[name]}
                if name in METHODS:
                    entry["methods"] = {key: entry["methods"][key] for key in METHODS[name]}
                    entry["fields"] = ""
                found[name] = entry | ({"values": assigned[name]} if assigned[name] else {})
        for path, names in FUNCTIONS.items():
            known = functions(source(path))
            called |= {name: known[name] for name in names}
        for path in SCHEDULERS:
            for kind, pattern in OBJECTS.items():
                read[kind] |= set(re.findall(pattern, source(path)))
        environment = source("sglang/srt/environ.py")
    return {
        "release": Path(wheel).name.split("-")[1],
        "classes": found,
        "functions": called,
        "read": {kind: sorted(names) for kind, names in read.items()},
        "environment": [name for name in ENVIRONMENT if re.search(rf"^    {name} = ", environment, re.MULTILINE)],
    }


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(sys.argv[1]), indent=1, sort_keys=True) + "\n")
