"""The transport over NIXL, by its C library (`capi.py`), which is opened when an agent is set up, not before.

What NIXL does and does not promise shapes this file:

- It has no progress thread (that would spin a core); everything happens inside calls from the fabric's thread.
- Its errors become `FabricError`. What is posted is the mover's, which calls the agent by the C functions themselves.
- `disconnect` recalls nothing that was posted.
- A peer gets the metadata of the registrations that it needs and no other (partial metadata). That keeps a correct peer
  in its place; against a hostile one only RDMA keys do.
- Its UCX backend ignores parameters that it does not know, so they are checked here.
"""

import contextlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvxfer.copy.port import Native
from kvxfer.errors import ConfigError, FabricError
from kvxfer.fabric import Memory, capi, is_of_worker, pack, unpack
from kvxfer.fabric.capi import CallError, Capi, Owned
from kvxfer.telemetry import logger

__all__ = [
    "NixlTransport",
    "checked_params",
    "device_params",
    "shown_params",
]

# --- settings of backends

_UCX_PARAMS: Final = frozenset({
    "device_list", "engine_config", "num_threads", "num_workers", "split_batch_size", "ucx_devices",
    "ucx_error_handling_mode", "ucx_num_device_channels",
})  # fmt: skip
"""What NIXL 1.5's UCX backend reads. It advertises only three of them."""


def checked_params(
    backends: Sequence[str],
    given: Mapping[str, Mapping[str, object]],
    num_workers: int | None,
    devices: Sequence[str],
    named: str | None,
) -> dict[str, dict[str, str]]:
    """Settings of NIXL's backends, checked, as it takes them: parameters by backend.

    Network devices that the environment names (`named`, from `UCX_NET_DEVICES`) win.

    Raises:
        ConfigError: A setting is malformed, or contradicts another.
    """
    if not backends or len(set(backends)) != len(backends):
        raise ConfigError(f"backends must name at least one NIXL plugin, each once: {list(backends)}")
    if unknown := set(given) - set(backends):
        raise ConfigError(f"backend_params names {sorted(unknown)}, which backends={list(backends)} does not load")
    params: dict[str, dict[str, str]] = {backend: {} for backend in backends}
    for backend, values in given.items():
        for key, value in values.items():
            if not isinstance(value, str):
                raise ConfigError(f"backend_params[{backend!r}][{key!r}] must be a string, not {type(value).__name__}")
            params[backend][key] = value
    if unknown := set(params.get("UCX", {})) - _UCX_PARAMS:
        raise ConfigError(f"NIXL's UCX backend has no {sorted(unknown)}; it has {sorted(_UCX_PARAMS)}")
    derived = device_params(devices, named)
    if num_workers is not None:
        if num_workers < 1:
            raise ConfigError(f"num_workers must be at least 1, got {num_workers}")
        derived["num_workers"] = str(num_workers)
    if derived and "UCX" not in params:
        raise ConfigError(f"num_workers and devices are settings of UCX, which backends={list(backends)} does not load")
    if twice := set(derived) & set(params.get("UCX", {})):
        raise ConfigError(f"{sorted(twice)} is given twice, in backend_params and as a setting of its own")
    if derived:
        params["UCX"] |= derived
    return params


def device_params(devices: Sequence[str], named: str | None) -> dict[str, str]:
    """How to say `devices` to NIXL's UCX backend.

    `device_list` appends ":1" to each name, so it can say first ports of RDMA devices and nothing else. `engine_config`
    is cut at commas, so it can say one device, and yields to a `UCX_NET_DEVICES` in the environment.
    """
    if not devices:
        return {}
    if any(not name or "," in name or " " in name for name in devices):
        raise ConfigError(f"devices takes UCX device names without commas or spaces, got {list(devices)}")
    if all(name.endswith(":1") for name in devices):
        return {"device_list": ",".join(name.removesuffix(":1") for name in devices)}
    if len(devices) > 1:
        raise ConfigError(
            f"devices={list(devices)}: NIXL takes first ports of RDMA devices ('mlx5_0:1') or one other device; "
            f"for more, set UCX_NET_DEVICES={','.join(devices)} and leave devices empty"
        )
    if named not in (None, devices[0]):
        raise ConfigError(f"devices={list(devices)}, but UCX_NET_DEVICES={named} would win")
    return {"engine_config": f"NET_DEVICES={devices[0]}"}


def shown_params(params: Mapping[str, Mapping[str, str]]) -> dict[str, object]:
    """Parameters by backend as logs and errors may show them: of UCX with their values, of others only the names.

    UCX has no parameter that is a secret; other backends do, such as the keys of an object store.
    """
    return {backend: dict(given) if backend == "UCX" else sorted(given) for backend, given in params.items()}


# --- the transport

_log: Final = logger("kvxfer.fabric")

_QUIET: Final = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
"""UCX's and NIXL's own messages, unless the environment says otherwise, from the first agent of a process on."""
_CALLS: Final = ("UCX_TCP_SYN_CNT", "2")
"""How often a host that does not answer over TCP is called again, unless the environment says otherwise.

`connect` waits for that inside of NIXL, and with it the fabric's thread, whoever else it works for: by default more
than two minutes, so about ten seconds.
"""
_SCATTER_LISTS: Final = "NIXL_UCX_SGL_ENABLE"
"""Lets UCX take the pieces of a post as one list. NIXL reads it once a process, when the first agent is made."""
_YES: Final = frozenset({"y", "yes", "1", "on", "true"})


@dataclass(slots=True, eq=False)
class _Agent:
    """One of NIXL's agents: its handle, and what names its backends."""

    handle: int
    backends: dict[str, Owned] = field(default_factory=dict[str, Owned])


@dataclass(slots=True, eq=False)
class _Registration:
    """Registered memories: NIXL's list and its rows, one a kind."""

    lists: dict[str, Owned] = field(default_factory=dict[str, Owned])
    rows: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict[str, list[tuple[int, int, int]]])


class NixlTransport:
    """A `Transport` over one NIXL agent.

    Args:
        name: Name of the agent. Unique among everybody it meets, and new for each incarnation of a process: NIXL keeps
            the old addresses of a name that it knows.
        backends: NIXL plugins to load.
        backend_params: Parameters by backend, as NIXL takes them (strings).
        num_workers: UCX workers; None leaves NIXL's default of one. Only calls from further threads would use more.
        device: CUDA device to make current on the fabric's thread; without it cuda_ipc is silently off for that thread.
        devices: Network devices that UCX may use, by its names: either RDMA ports (`"mlx5_0:1"`) or one other device
            (`"eth0"`). Empty: all.
        scatter_lists: Hand the pieces of a post to UCX as one list, unless `NIXL_UCX_SGL_ENABLE` says otherwise. Set
            once a process, before its first agent.

    Raises:
        ConfigError: A setting is malformed, or contradicts another.
        MissingExtraError: NIXL is not installed, or one that is not known here.
    """

    def __init__(
        self,
        name: str,
        *,
        backends: Sequence[str] = ("UCX",),
        backend_params: Mapping[str, Mapping[str, str]] | None = None,
        num_workers: int | None = None,
        device: int | None = None,
        devices: Sequence[str] = (),
        scatter_lists: bool = False,
    ) -> None:
        if not 0 < len(name.encode()) <= 255:
            raise ConfigError(f"a NIXL agent needs a name of 1 to 255 bytes, got {name!r}")
        self._wheel: Final = capi.find()
        self._name = self._first_name = name
        self._renewals = 0
        self._params = checked_params(
            backends, backend_params or {}, num_workers, devices, os.environ.get("UCX_NET_DEVICES")
        )
        self._device = device
        self._scatter_lists = scatter_lists
        self._incarnation = secrets.token_bytes(16)
        self._agent: _Agent | None = None
        self._c: Capi
        self._heard: Owned
        self._known: dict[str, bytes] = {}
        self._closed = False

    @property
    def name(self) -> str:
        """Unique name of this agent."""
        return self._name

    @property
    def takes_lists(self) -> bool:
        """Whether UCX takes the pieces of a post between GPUs as one list."""
        said = os.environ.get(_SCATTER_LISTS, "y" if self._scatter_lists else "n")
        return self._device is not None and said.lower() in _YES

    @property
    def orderly(self) -> bool:
        """UCX's backend flushes, at the end of a post (`sendXferRange`), the endpoint that it binds to our thread."""
        return list(self._params) == ["UCX"] and self._params["UCX"].get("num_threads", "0") == "0"

    def setup(self) -> None:
        """Make the CUDA device current, open NIXL's library and create the agent, on the fabric's thread.

        Raises:
            FabricError: The library or the agent does not what it should, or a backend cannot be created.
            MissingExtraError: numba is missing.
        """
        if self._device is not None:
            _make_current(self._device)
        os.environ.setdefault(*_CALLS)
        if self._scatter_lists:
            os.environ.setdefault(_SCATTER_LISTS, "y")
        for variable, level in _QUIET.items():
            os.environ.setdefault(variable, level)
        self._c = capi.opened(self._wheel)
        self._heard = self._c.made("notif_map")
        agent = self._created(self._name)
        if "UCX" in agent.backends:
            try:
                self._c.prove(agent.handle, self._name, agent.backends["UCX"])
            except FabricError:
                self._destroy(agent)
                raise
        self._agent = agent

    def _created(self, name: str) -> _Agent:
        try:
            agent = _Agent(self._c.agent(name))
            try:
                params = self._furnish(agent)
            except BaseException:
                self._destroy(agent)
                raise
        except CallError as error:
            raise _translated(error, f"create agent {name!r} with {shown_params(self._params)}") from error
        _log.info(
            "nixl_agent_created",
            name=name,
            backend=shown_params(params),
            device=self._device,
            fields={key: value for key, value in os.environ.items() if key.startswith(("UCX_", "NIXL_"))},
        )
        return agent

    def _furnish(self, agent: _Agent) -> dict[str, dict[str, str]]:
        """Create the backends of an agent; returns their parameters, as they have them."""
        available = self._c.plugins(agent.handle)
        for backend, params in self._params.items():
            if backend not in available:
                raise FabricError(f"NIXL has no backend {backend!r}; it has {', '.join(sorted(available))}")
            agent.backends[backend] = self._c.backend(agent.handle, backend, params)
        return {backend: self._c.backend_params(agent.handle, made) for backend, made in agent.backends.items()}

    def native(self) -> Native:
        """NIXL's functions, and the agent."""
        return Native(self._c.table, self._open().handle, self._heard.handle, _said, for_good=True)

    def plugins(self) -> list[str]:
        """Backends that NIXL could load, by name."""
        agent = self._open()
        try:
            return sorted(self._c.plugins(agent.handle))
        except CallError as error:
            raise _translated(error, "list its plugins") from error

    def register(self, memories: Sequence[Memory]) -> object:
        """Register memories with every backend that takes their kind.

        Raises:
            FabricError: A memory cannot be registered; then none of them is.
        """
        agent = self._open()
        token = _Registration()
        try:
            for kind in sorted({memory.kind for memory in memories}):
                rows = _memory_rows([memory for memory in memories if memory.kind == kind], kind)
                listed = self._c.memories(kind, rows)
                self._c.register_mem(agent.handle, listed.handle, None)
                token.lists[kind], token.rows[kind] = listed, rows
        except CallError as error:
            self.deregister(token)
            raise _translated(error, f"register {list(memories)}") from error
        return token

    def deregister(self, token: object) -> None:
        """Undo one `register`. Later calls with the same token do nothing."""
        agent = self._open()
        if not isinstance(token, _Registration):
            raise FabricError(f"{token!r} is no registration of this transport")
        failed: CallError | None = None
        while token.lists:
            kind, listed = token.lists.popitem()
            token.rows.pop(kind, None)
            try:
                self._c.deregister_mem(agent.handle, listed.handle, None)
            except CallError as error:
                failed = error
        if failed is not None:
            raise _translated(failed, "deregister memory") from failed

    def metadata(self, tokens: Sequence[object]) -> bytes:
        """Connection information and the keys of these registrations; with no tokens, how to reach this agent only."""
        agent = self._open()
        rows: dict[str, list[tuple[int, int, int]]] = {}
        for token in tokens:
            if not isinstance(token, _Registration) or not token.lists:
                raise FabricError("metadata was asked for memory that is not registered (any more)")
            for kind, part in token.rows.items():
                rows.setdefault(kind, []).extend(part)
        lists = [self._c.memories("DRAM", []), *(self._c.memories(kind, part) for kind, part in sorted(rows.items()))]
        try:
            blobs = [self._c.metadata(agent.handle, listed) for listed in lists]
        except CallError as error:
            raise _translated(error, "make metadata") from error
        return pack(self._incarnation, self._name, blobs)

    def connect(self, metadata: bytes) -> str:
        """Learn about a peer, or about more of its memory. NIXL parses the content: connect only where trust allows it.

        Raises:
            FabricError: The metadata is malformed, or comes from another incarnation of a peer that is still known.
        """
        agent = self._open()
        incarnation, peer, blobs = unpack(metadata)
        if self._known.get(peer, incarnation) != incarnation:
            raise FabricError(f"{peer} was restarted under its old name: disconnect it first")
        if (peer, incarnation) == (self._name, self._incarnation) and is_of_worker(peer):
            return peer  # NIXL knows itself, and refuses to be told; nobody else gets here under our name
        named: set[str] = set()
        try:
            for blob in blobs:
                named.add(self._c.load(agent.handle, blob).decode(errors="replace"))
        except CallError as error:
            self._forget(agent, named)
            raise _translated(error, "load a peer's metadata") from error
        if named != {peer}:
            self._forget(agent, named)
            raise FabricError(f"metadata of {peer!r} carries that of {sorted(named)}")
        self._known[peer] = incarnation
        return peer

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Not a fence: what was posted may still land."""
        agent = self._open()
        self._known.pop(peer, None)
        if peer == self._name:
            return
        try:
            self._c.forget(agent.handle, peer)
        except CallError as error:
            raise _translated(error, f"disconnect {peer}") from error

    def renew(self) -> bool:
        """Create another agent, whose name nobody has met, and destroy the old one; False if either cannot be.

        In this order, since there may be no network just now. Over TCP nothing lands after it, over CMA a peer goes on.
        """
        old, name = self._open(), f"{self._first_name}.{self._renewals + 1}"
        try:
            new = self._created(name)
        except FabricError as error:
            _log.warning("nixl_agent_not_created", name=name, error=str(error))
            return False
        if not self._destroy(old):
            self._destroy(new)
            return False
        self._agent, self._name, self._renewals = new, name, self._renewals + 1
        self._known, self._incarnation = {}, secrets.token_bytes(16)
        return True

    def close(self) -> None:
        """Destroy the agent. Idempotent; over TCP this fences what peers still write, over CMA it does not."""
        self._closed = True
        agent, self._agent = self._agent, None
        if agent is not None:
            self._destroy(agent)

    def _destroy(self, agent: _Agent) -> bool:
        """Destroy NIXL's agent; False if that fails."""
        agent.backends.clear()
        try:
            self._c.destroy_agent(agent.handle)
        except CallError as error:
            _log.warning("nixl_agent_not_destroyed", name=self._name, error=str(error))
            return False
        return True

    def _open(self) -> _Agent:
        if self._agent is None:
            raise FabricError(f"agent {self._name!r} is {'closed' if self._closed else 'not set up'}")
        return self._agent

    def _forget(self, agent: _Agent, named: set[str]) -> None:
        """Unload what a failed `connect` had loaded, but nobody who was known before."""
        for peer in named - set(self._known):
            with contextlib.suppress(CallError):
                self._c.forget(agent.handle, peer)


def _translated(error: CallError, doing: str, *, gone: bool = False, in_doubt: bool = False) -> FabricError:
    hint = "the peer is gone" if gone else "NIXL_LOG_LEVEL=INFO UCX_LOG_LEVEL=info let it say more"
    return FabricError(f"NIXL could not {doing}: {error} ({hint})", disconnected=gone, in_doubt=in_doubt)


def _said(code: int, doing: str, gone: bool, in_doubt: bool) -> FabricError:
    return _translated(CallError("NIXL", code), doing, gone=gone, in_doubt=in_doubt)


def _make_current(device: int) -> None:
    """Give this thread a current CUDA context, without which cuda_ipc is silently off in it."""
    import torch

    try:
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # set_device alone leaves a new thread without a context on device 0
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built without CUDA
        raise FabricError(f"CUDA device {device} cannot be made current: {error}") from error


def _memory_rows(memories: Sequence[Memory], kind: str) -> list[tuple[int, int, int]]:
    """NIXL's rows (address, bytes, device) of memories of one kind."""
    if kind not in capi.KINDS:
        raise FabricError(f"memory is of kind {' or '.join(capi.KINDS)}, not {kind!r}")
    if any(memory.address <= 0 or memory.nbytes <= 0 or memory.device < 0 for memory in memories):
        raise FabricError(f"memory needs an address, a length and a device: {list(memories)}")
    return [(memory.address, memory.nbytes, memory.device) for memory in memories]
