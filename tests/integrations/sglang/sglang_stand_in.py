"""As much of sglang as the integration needs to be loaded and driven; tests/engines compares it with a release.

    sglang_stand_in.install()              # in a process of its own: `import sglang` finds these from now on

What sglang keeps for a process (its parallel context) is kept here for a thread, so that one process can be several
ranks.
"""

import enum
import json
import sys
import threading
import types
import urllib.request
from functools import partial
from types import SimpleNamespace
from typing import Any

context = threading.local()
"""What `get_parallel`, `get_serving` and `get_disagg` give this thread, and what the environment says to it."""
hooks: dict[str, Any] = {}
"""What was registered, by target."""
settings: dict[str, Any] = {}
"""What was set of sglang's environment, by name."""


class _Environment:
    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            get=lambda: getattr(context, "environment", {}).get(name), set=partial(settings.__setitem__, name)
        )


class _ModelConfig:
    @staticmethod
    def from_server_args(server_args: Any) -> Any:
        return server_args.model_config


class _HookRegistry:
    @staticmethod
    def register(target: str, hook: Any, kind: Any) -> None:
        assert kind is HookType.AROUND
        hooks[target] = hook


HookType = enum.Enum("HookType", ["AROUND"])
DisaggregationMode = enum.Enum("DisaggregationMode", ["PREFILL", "DECODE"])
KVClassType = enum.Enum("KVClassType", ["MANAGER", "SENDER", "RECEIVER", "BOOTSTRAP_SERVER", "KVARGS"])
TransferBackend = enum.Enum("TransferBackend", ["NIXL", "MOONCAKE"])
_BASES = ("BaseKVManager", "BaseKVSender", "BaseKVReceiver", "BaseKVBootstrapServer")
_MODULES: dict[str, dict[str, Any]] = {
    "configs.model_config": {"ModelConfig": _ModelConfig},
    "disaggregation.base.conn": {
        **{name: type(name, (), {}) for name in _BASES},
        "KVTransferDestination": enum.Enum("KVTransferDestination", ["DEVICE", "HOST"]),
        "KVTransferMetric": SimpleNamespace,
    },
    "disaggregation.utils": {
        "DisaggregationMode": DisaggregationMode,
        "KVClassType": KVClassType,
        "TransferBackend": TransferBackend,
    },
    "environ": {"envs": _Environment()},
    "plugins.hook_registry": {"HookRegistry": _HookRegistry, "HookType": HookType},
    "runtime_context": {
        f"get_{name}": lambda name=name: getattr(context, name) for name in ("disagg", "parallel", "serving")
    },
}


def install() -> None:
    """Put modules into `sys.modules`."""
    for path, names in _MODULES.items():
        parts = ["sglang", "srt", *path.split(".")]
        for inner in (".".join(parts[:depth]) for depth in range(1, len(parts) + 1)):
            sys.modules.setdefault(inner, types.ModuleType(inner))
        vars(sys.modules[".".join(parts)]).update(names)


def query_prefill_dp_ranks(address: str, rooms: list[int]) -> dict[str, int]:
    """As sglang's own receiver does, whatever backend is used: its scheduler calls no other."""
    question = urllib.request.Request(
        f"http://{address}/query_dp_ranks",
        json.dumps({"bootstrap_rooms": rooms}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(question, timeout=5) as answer:
            return json.load(answer)
    except Exception:  # noqa: BLE001 - as sglang does
        return {}
