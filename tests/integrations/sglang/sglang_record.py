"""Records what the integration relies on of a released sglang: names, signatures and numbers, and nothing else.

    pip download sglang --no-deps -d /tmp/sglang
    python tests/integrations/sglang/sglang_record.py /tmp/sglang/sglang-*.whl

sglang is under the Apache License 2.0; no code or text of it is copied. Signatures are written as those of vLLM are.
`read` lists what sglang's schedulers read of the objects that they are given, and in which functions: an excuse for one
function that reads a name is none for the next. What a function asks for first (`hasattr`, `getattr`) is left out.
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
        "_ensure_prefill_recompute_executor",
        "clear_deferred_abort_state",
        "is_abort_release_safe",
        "submit_prefill_recompute",
        "try_ensure_parallel_info",
    },
    "CommonKVReceiver": {"ensure_abort_notified"},
    "CommonKVSender": {"poll_pp_consensus"},
    "HookRegistry": {"register"},
    "ModelConfig": {"from_server_args", "get_total_num_kv_heads"},
}
"""Of classes that have many, those that are called."""
SCHEDULERS = ("sglang/srt/disaggregation/", "sglang/srt/managers/")
BACKENDS = {"ascend", "base", "common", "encoder", "mooncake", "mori", "nixl"}
"""Folders of other backends, which read only of what is their own; `fake` is given a manager of any backend."""
OBJECTS = {
    "manager": {"_current_kv_manager", "kv_manager", "kv_mgr"},
    "sender": {"disagg_kv_sender", "poller"},
    "receiver": {"kv_receiver", "poller"},
    "directory": {"prefill_info"},
}
"""What they are called wherever they are read; a variable that is given one of them is found."""
ENVIRONMENT = (
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE",
    "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    "SGLANG_DISAGG_STAGING_BUFFER",
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


def called(node):
    """The last name of an expression: the same of `self.queue.kv_manager` and `getattr(queue, "kv_manager")`."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.Call(ast.Name("getattr"), [_, ast.Constant(name), *_]):
            return name
        case ast.Call(function):
            return called(function)
        case ast.IfExp(body=body):
            return called(body)
    return None


def reads(function, names):
    """What one function reads of objects of these names, and does not ask for first."""
    known, asked, found = set(names), set(), set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and called(node.value) in names:
            known |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(function):
        match node:
            case ast.Call(ast.Name("hasattr" | "getattr" as how), [of, ast.Constant(name), *rest]) if (
                called(of) in known
            ):
                (asked if rest or how == "hasattr" else found).add(name)
            case ast.Attribute(of, name, ast.Load()) if called(of) in known:
                found.add(name)
    return found - asked


def read_in(source):
    """What the functions of a module read: kind, name, function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for kind, names in OBJECTS.items():
                yield from ((kind, name, node.name) for name in reads(node, names))


def record(wheel):
    """Everything of one release."""
    found, given, read = {}, {}, {kind: {} for kind in OBJECTS}
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
            given |= {name: known[name] for name in names}
        for path in files.namelist():
            if path.startswith(SCHEDULERS) and path.endswith(".py") and path.split("/")[3] not in BACKENDS:
                text = source(path)
                for kind, name, function in read_in(text) if "disagg" in text else ():
                    read[kind].setdefault(name, set()).add(f"{path.removeprefix('sglang/srt/')}:{function}")
        environment = source("sglang/srt/environ.py")
    return {
        "release": Path(wheel).name.split("-")[1],
        "classes": found,
        "functions": given,
        "read": {kind: {name: sorted(where) for name, where in names.items()} for kind, names in read.items()},
        "environment": [name for name in ENVIRONMENT if re.search(rf"^    {name} = ", environment, re.MULTILINE)],
    }


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(sys.argv[1]), indent=1, sort_keys=True) + "\n")
