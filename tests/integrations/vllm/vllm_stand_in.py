"""Classes with vLLM's names and signatures, made from the record: enough for the connector to be loaded and driven.

    vllm_stand_in.install()                      # in a process of its own: `import vllm` finds these from now on
    request = vllm_stand_in.make("Request", request_id="r", ...)

An object has the fields that it was made with, which must be recorded ones; whatever else is read of it is an error.
What methods do is written here, and only as far as it is needed.
"""

import enum
import inspect
import json
import sys
import types
from abc import ABCMeta, abstractmethod
from typing import Any

from vllm_record import RECORD

RECORDED: dict[str, Any] = json.loads(RECORD.read_text())["classes"]
_made: dict[str, Any] = {}


def install() -> None:
    """Put modules into `sys.modules`."""
    for name, known in RECORDED.items():
        parts = known["module"].split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            module = sys.modules.setdefault(path, types.ModuleType(path))
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        setattr(sys.modules[known["module"]], name, stock(name))
    vars(sys.modules["vllm"])["__version__"] = json.loads(RECORD.read_text())["release"]


def make(name: str, **fields: Any) -> Any:
    """An object of one of these classes."""
    return stock(name)(**fields)


def layer(backend: str = "FlashAttentionBackend", *, stores: Any = None, cache: Any = None) -> Any:
    """An attention layer once its backend has been set up.

    Args:
        backend: Class of that.
        stores: K and V where it has them in a cache, views by block, head, token and content; as the view says without.
        cache: The view that is bound to the layer.
    """
    latent = "MLA" in backend
    body = {"get_name": lambda: backend, "forward_includes_kv_cache_update": False}
    own = type(backend, (stock(backend),), {"__module__": stock(backend).__module__, **body})
    found = make("MLAAttention" if latent else "Attention", get_attn_backend=lambda: own, kv_cache_dtype="auto")
    if latent:
        found.kv_lora_rank, found._k_scale = 16, 1.0
    kind = "MLAAttentionImpl" if latent else "FlashAttentionImpl"
    given = parameters(RECORDED[kind]["methods"]["do_kv_cache_update"])

    def update(_, *those):
        views = those[2].unsqueeze(1) if latent else those[3]
        rows = [row.unflatten(0, (-1, 1)) if row.dim() < 3 else row for row in those[:2]] if latent else those[1:3]
        parts = stores(views) if stores else views.split([row.shape[-1] for row in rows], dim=-1)
        for part, new in zip(parts, rows, strict=True):
            for at, slot in enumerate(those[3 if latent else 4].tolist()):
                part[slot // views.shape[2], :, slot % views.shape[2]] = new[at]

    found.impl = type(kind, (), {"do_kv_cache_update": _with_parameters("do_kv_cache_update", given, update)})()
    found.kv_cache = cache if cache is None or not latent else cache.squeeze(1)
    return found


def by_columns(cache: Any) -> tuple[Any, Any]:
    """K and V of a cache where vLLM's CPU attention has them: views by block, head, token and content."""
    blocks, heads, tokens, content = cache.shape
    key, value = cache.view(blocks, heads, 2 * tokens, content // 2).chunk(2, dim=2)
    return key.view(blocks, heads, content // 2, tokens).transpose(2, 3), value


def stock(name: str) -> Any:
    """One of these classes."""
    if name not in _made:
        _made[name] = _class(name, RECORDED[name])
    return _made[name]


def names(name: str) -> set[str]:
    """Everything recorded that an object of a class has."""
    known = RECORDED[name]
    inherited = [names(base) for base in known["bases"] if base in RECORDED]
    return set(known["fields"].split()).union(known.get("methods", ()), *inherited)


def parameters(signature: str) -> list[str]:
    """Those of a recorded method."""
    return [part for part in signature.partition("(")[2].rstrip(")").split(", ") if part]


def _class(name: str, known: dict[str, Any]) -> Any:
    if any("Enum" in base for base in known["bases"]):
        made: Any = enum.Enum(name, known["fields"].split())
    elif name == "KVConnectorBase_V1":
        made = _connector(known["methods"])
    else:
        bases = tuple(stock(base) for base in known["bases"] if base in RECORDED)
        made = type(name, bases or (_Fields,), {"recorded": frozenset(names(name))})
    made.__module__ = known["module"]
    return made


class _Fields:
    """An object of the fields that it is given."""

    recorded: frozenset[str] = frozenset()

    def __init__(self, **fields: Any) -> None:
        unknown = set(fields) - self.recorded
        assert not unknown, f"{type(self).__name__} of vLLM has no {unknown}"
        self.__dict__.update(fields)


class _Behaviour:
    """What the methods of vLLM's base class do that somebody counts on."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
        self._connector_metadata = None

    def role(self):
        return self._role

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata


def _connector(methods: dict[str, str]) -> type:
    """The base class: each method has the recorded parameters, or the call fails."""
    body: dict[str, Any] = {}
    for name, signature in methods.items():
        does = vars(_Behaviour).get(name, _nothing)
        method = _with_parameters(name, parameters(signature), does)
        kind = signature.partition("(")[0].split()[-1]
        body[name] = {"property": property, "classmethod": classmethod}.get(kind, lambda plain: plain)(method)
        if signature.startswith("abstract"):
            body[name] = abstractmethod(body[name])
    return ABCMeta("KVConnectorBase_V1", (), body)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _with_parameters(name: str, given: list[str], does: Any) -> Any:
    kinds = {True: inspect.Parameter.VAR_KEYWORD, False: inspect.Parameter.POSITIONAL_OR_KEYWORD}
    expected = inspect.Signature(
        [
            inspect.Parameter(
                part.strip("*="),
                kinds[part.startswith("**")],
                default=None if part.endswith("=") else inspect.Parameter.empty,
            )
            for part in given
        ]
    )

    def method(*args: Any, **kwargs: Any) -> Any:
        expected.bind(*args, **kwargs)
        return does(*args, **kwargs)

    method.__name__ = name
    return method
