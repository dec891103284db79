"""Classes with sglang's names and signatures, made from the record: enough for the integration to be loaded and driven.

    sglang_stand_in.install()              # in a process of its own: `import sglang` finds these from now on
    args = sglang_stand_in.make("KVArgs", page_size=16, ...)

What sglang keeps for a process (its parallel context) is kept here for a thread, so that one process can be several
ranks.
"""

import enum
import inspect
import json
import sys
import threading
import types
import urllib.request
from abc import ABCMeta, abstractmethod
from types import SimpleNamespace
from typing import Any

from sglang_record import RECORD

RECORDED: dict[str, Any] = json.loads(RECORD.read_text())
CLASSES: dict[str, Any] = RECORDED["classes"]
context = threading.local()
"""What `get_parallel`, `get_serving` and `get_disagg` give this thread, and what the environment says to it."""
hooks: dict[str, Any] = {}
"""What was registered, by target."""
_made: dict[str, Any] = {}


def install() -> None:
    """Put modules into `sys.modules`."""
    for name, known in CLASSES.items():
        setattr(_module(known["module"]), name, stock(name))
    runtime, environ = _module("sglang.srt.runtime_context"), _module("sglang.srt.environ")
    for name in RECORDED["functions"]:
        if name != "get_kv_class":
            field = name.removeprefix("get_")
            setattr(runtime, name, lambda field=field: getattr(context, field))
    variables = {
        name: SimpleNamespace(get=lambda name=name: getattr(context, "environment", {}).get(name))
        for name in RECORDED["environment"]
    }
    setattr(environ, "envs", SimpleNamespace(**variables))  # noqa: B010 - a module made here


def make(name: str, **fields: Any) -> Any:
    """An object of one of these classes, with fields that are recorded."""
    unknown = set(fields) - set(CLASSES[name]["fields"].split())
    assert not unknown, f"{name} of sglang has no {unknown}"
    made = stock(name)()
    made.__dict__.update(fields)
    return made


def stock(name: str) -> Any:
    """One of these classes."""
    if name not in _made:
        _made[name] = _class(name, CLASSES[name])
        _made[name].__module__ = CLASSES[name]["module"]
    return _made[name]


def _module(path: str) -> types.ModuleType:
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        inner = ".".join(parts[:depth])
        module = sys.modules.setdefault(inner, types.ModuleType(inner))
        if depth > 1:
            setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
    return sys.modules[path]


def _class(name: str, known: dict[str, Any]) -> Any:
    if any("Enum" in base for base in known["bases"]):
        return enum.Enum(name, known["values"])
    if name == "KVTransferMetric":
        return type(name, (SimpleNamespace,), {})
    if name == "ModelConfig":
        return type(name, (), {"from_server_args": staticmethod(lambda server_args: server_args.model_config)})
    if name == "HookRegistry":
        return type(name, (), {"register": staticmethod(lambda target, hook, kind: hooks.update({target: hook}))})
    if not name.startswith("Base"):
        return type(name, (), dict(known.get("values", {})))
    body: dict[str, Any] = {}
    for method, signature in known["methods"].items():
        body[method] = _with_parameters(method, signature)
        if signature.startswith("abstract"):
            body[method] = abstractmethod(body[method])
    return ABCMeta(name, (), body)


def _with_parameters(name: str, signature: str) -> Any:
    kind = signature.partition("(")[0].split()[-1]
    if kind == "property":
        return property(lambda self: False)
    plain = {"pop_decode_prefix_len": 0, "should_verify_kv_checksum": True}

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        del self, args, kwargs
        return plain.get(name)

    method.__name__ = name
    return method


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


def bound(cls: Any, method: str, *args: Any, **kwargs: Any) -> None:
    """Check that a call fits what is recorded of the base class."""
    base = next(base for base in cls.__mro__ if base.__name__ in CLASSES)
    known = CLASSES[base.__name__]["methods"].get(method)
    if known is None:
        return
    given = [part for part in known.partition("(")[2].rstrip(")").split(", ") if part]
    inspect.Signature(
        [
            inspect.Parameter(
                part.strip("*="),
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None if part.endswith("=") else inspect.Parameter.empty,
            )
            for part in given
        ]
    ).bind(None, *args, **kwargs)
