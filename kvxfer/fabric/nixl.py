"""The transport over NIXL. The only module that imports nixl, and it does so when an agent is set up, not before.

What NIXL does and does not promise shapes this file:

- Its progress thread stays off (it spins a core); everything happens inside calls from the fabric's thread.
- Its twelve exception types share no base. All become `FabricError`; `in_doubt` once bytes may have moved.
- `release` and `disconnect` recall nothing that was posted.
- A peer gets the metadata of the registrations that it needs and no other (partial metadata). That keeps a correct peer
  in its place; against a hostile one only RDMA keys do.
- Its UCX backend ignores parameters that it does not know, so they are checked here.
"""

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import ConfigError, FabricError, MissingExtraError
from kvxfer.fabric.backends import checked_params, shown_params, spares_nics
from kvxfer.fabric.envelope import is_of_worker, pack, unpack
from kvxfer.fabric.port import Descriptors, Handle, Memory, Operation, Told
from kvxfer.fabric.told import LaneBook, ucx_log
from kvxfer.telemetry import logger

__all__ = ["NixlTransport"]

_log: Final = logger("kvxfer.fabric")

_QUIET: Final = ("NIXL_LOG_LEVEL", "FATAL")
_CALLS: Final = ("UCX_TCP_SYN_CNT", "2")
"""How often a host that does not answer over TCP is called again, unless the environment says otherwise.

`connect` waits for that inside of NIXL, and with it the fabric's thread, whoever else it works for: by default more
than two minutes, so about ten seconds.
"""
_SCATTER_LISTS: Final = "NIXL_UCX_SGL_ENABLE"
"""Lets UCX take the pieces of a post as one list. NIXL reads it once a process, when the first agent is made."""
_YES: Final = frozenset({"y", "yes", "1", "on", "true"})
_KINDS: Final = ("DRAM", "VRAM")
_NICS: Final = Path("/dev/infiniband")
_IMPORTING: Final = threading.Lock()


@dataclass(slots=True, eq=False)
class _Registration:
    """Registered memories: NIXL's descriptor lists, one a kind."""

    lists: dict[str, Any] = field(default_factory=dict[str, Any])
    rows: dict[str, NDArray[np.uint64]] = field(default_factory=dict[str, NDArray[np.uint64]])


@dataclass(slots=True, eq=False)
class _Handle:
    """A posted part. `transfer` is NIXL's handle, None once released."""

    peer: str
    transfer: Any
    done: bool = False


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
        quiet: Silence UCX's and NIXL's own messages, unless `UCX_LOG_LEVEL` or `NIXL_LOG_LEVEL` is set. Set once a
            process, before its first agent.

    Raises:
        ConfigError: A setting is malformed, or contradicts another.
        MissingExtraError: nixl is not installed.
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
        quiet: bool = True,
    ) -> None:
        if not 0 < len(name.encode()) <= 255:
            raise ConfigError(f"a NIXL agent needs a name of 1 to 255 bytes, got {name!r}")
        if importlib.util.find_spec("nixl") is None:
            raise _missing()
        self._name = self._first_name = name
        self._renewals = 0
        self._params = checked_params(
            backends, backend_params or {}, num_workers, devices, os.environ.get("UCX_NET_DEVICES")
        )
        self._device = device
        self._scatter_lists, self._quiet = scatter_lists, quiet
        self._incarnation = secrets.token_bytes(16)
        self._agent: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._disconnected: tuple[type[Exception], ...] = ()
        self._empty_list: Any = None
        self._known: dict[str, bytes] = {}
        self._lost: set[str] = set()
        self._stuck: list[Any] = []
        self._closed = False
        self._lanes = LaneBook(None, name)

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

    @property
    def attributable(self) -> bool:
        """Not with a NIC at hand that UCX may take: its queues end with their last descriptor, which a child may have.

        Without one of these files a process reaches no NIC by its queues, whatever the host has.
        """
        return spares_nics(self._params.get("UCX", {}), os.environ.get("UCX_TLS")) or not any(_NICS.glob("uverbs*"))

    def told(self, peer: str) -> tuple[Told, ...] | str:
        """Over which lanes UCX takes posts to a peer."""
        return self._lanes.told(peer)

    def setup(self) -> None:
        """Make the CUDA device current, import nixl and create the agent, on the fabric's thread.

        Raises:
            FabricError: The agent or a backend cannot be created.
            MissingExtraError: nixl cannot be imported.
        """
        if self._device is not None:
            _make_current(self._device)
        os.environ.setdefault(*_CALLS)
        if self._scatter_lists:
            os.environ.setdefault(_SCATTER_LISTS, "y")
        if self._quiet:
            os.environ.setdefault(*_QUIET)
        nixl = _import_nixl()
        bindings = importlib.import_module("nixl._bindings")
        self._errors, self._disconnected = _error_types(bindings), (bindings.nixlRemoteDisconnectError,)
        self._empty_list = bindings.nixlRegDList(bindings.DRAM_SEG)
        self._agent = self._created(nixl, self._name)
        self._lanes = LaneBook(ucx_log(), self._name)

    def _created(self, nixl: Any, name: str) -> Any:
        with ucx_log().telling(os.environ, quiet=self._quiet):
            return self._made(nixl, name)

    def _made(self, nixl: Any, name: str) -> Any:
        try:
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
            agent = nixl.nixl_agent(name, config)
            available: list[str] = agent.get_plugin_list()
            for backend, params in self._params.items():
                if backend not in available:
                    raise FabricError(f"NIXL has no backend {backend!r}; it has {', '.join(sorted(available))}")
                agent.create_backend(backend, params)
        except self._errors as error:
            raise self._translated(error, f"create agent {name!r} with {shown_params(self._params)}") from error
        _log.info(
            "nixl_agent_created",
            name=name,
            backend=shown_params({backend: agent.get_backend_params(backend) for backend in self._params}),
            device=self._device,
            fields={key: value for key, value in os.environ.items() if key.startswith(("UCX_", "NIXL_"))},
        )
        return agent

    def plugins(self) -> list[str]:
        """Backends that NIXL could load, by name."""
        try:
            return sorted(self._open().get_plugin_list())
        except self._errors as error:
            raise self._translated(error, "list its plugins") from error

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
                token.lists[kind] = agent.register_memory(rows, kind)
                token.rows[kind] = rows
        except self._errors as error:
            self.deregister(token)
            raise self._translated(error, f"register {list(memories)}") from error
        return token

    def deregister(self, token: object) -> None:
        """Undo one `register`. Later calls with the same token do nothing."""
        agent = self._open()
        if not isinstance(token, _Registration):
            raise FabricError(f"{token!r} is no registration of this transport")
        failed: Exception | None = None
        while token.lists:
            kind, descriptors = token.lists.popitem()
            token.rows.pop(kind, None)
            try:
                agent.deregister_memory(descriptors)
            except self._errors as error:
                failed = error
        if failed is not None:
            raise self._translated(failed, "deregister memory") from failed

    def metadata(self, tokens: Sequence[object]) -> bytes:
        """Connection information and the keys of these registrations; with no tokens, how to reach this agent only."""
        agent = self._open()
        rows: dict[str, list[NDArray[np.uint64]]] = {}
        for token in tokens:
            if not isinstance(token, _Registration) or not token.lists:
                raise FabricError("metadata was asked for memory that is not registered (any more)")
            for kind, part in token.rows.items():
                rows.setdefault(kind, []).append(part)
        backends = list(self._params)
        try:
            lists = [agent.get_reg_descs(np.concatenate(parts), kind) for kind, parts in sorted(rows.items())]
            blobs: list[bytes] = [
                agent.get_partial_agent_metadata(descriptors, True, backends)
                for descriptors in lists or [self._empty_list]
            ]
        except self._errors as error:
            raise self._translated(error, "make metadata") from error
        return pack(self._incarnation, self._name, blobs)

    def connect(self, metadata: bytes) -> str:
        """Learn about a peer, or about more of its memory. NIXL parses the content: connect only where trust allows it.

        Raises:
            FabricError: The metadata is malformed, or comes from another incarnation of a peer that is still known.
        """
        agent = self._open()
        incarnation, peer, blobs = unpack(metadata)
        self._lanes.strays()
        if self._known.get(peer, incarnation) != incarnation:
            raise FabricError(f"{peer} was restarted under its old name: disconnect it first")
        if (peer, incarnation) == (self._name, self._incarnation) and is_of_worker(peer):
            return peer  # NIXL knows itself, and refuses to be told; nobody else gets here under our name
        named: set[str] = set()
        try:
            for blob in blobs:
                named.add(agent.add_remote_agent(blob).decode(errors="replace"))
        except self._errors as error:
            self._forget(named)
            raise self._translated(error, "load a peer's metadata") from error
        if named != {peer}:
            self._forget(named)
            raise FabricError(f"metadata of {peer!r} carries that of {sorted(named)}")
        self._known[peer] = incarnation
        self._lanes.strays(ours=False)
        return peer

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Not a fence: what was posted may still land."""
        agent = self._open()
        self._known.pop(peer, None)
        self._lost.discard(peer)
        self._lanes.forget(peer)
        if peer == self._name:
            return
        try:
            agent.remove_remote_agent(peer)
        except self._errors as error:
            raise self._translated(error, f"disconnect {peer}") from error

    def post(self, peer: str, operation: Operation, local: Descriptors, remote: Descriptors) -> Handle:
        """Begin to move pieces. On a CPU lane the whole copy happens in here.

        Raises:
            FabricError: With `in_doubt`, if the failure came after the first bytes may have left.
        """
        agent = self._open()
        if peer in self._lost:
            raise FabricError(f"{peer} is disconnected", disconnected=True)
        try:
            here, there = _listed(agent, local), _listed(agent, remote)
            handle = _Handle(peer, agent.initialize_xfer(operation.upper(), here, there, peer, b""))
        except self._errors as error:
            raise self._translated(error, f"prepare a {operation.value} to {peer}", peer=peer) from error
        what = self._lanes.posting(peer, operation, local.kind, remote.kind)
        try:
            state: str = agent.transfer(handle.transfer)
        except self._errors as error:
            self._lanes.failed(peer, what)
            self._drop(handle)
            raise self._translated(error, f"post a {operation.value} to {peer}", peer=peer, in_doubt=True) from error
        if state == "ERR":
            self._lanes.failed(peer, what)
            self._drop(handle)
            raise FabricError(f"NIXL failed to post a {operation.value} to {peer}", in_doubt=True)
        self._lanes.posted(peer, what)
        handle.done = state == "DONE"
        return handle

    def poll(self, handle: Handle) -> bool:
        """True when the part is done; makes progress."""
        agent = self._open()
        part = _handle(handle)
        if not part.done:
            try:
                state: str = agent.check_xfer_state(part.transfer)
            except self._errors as error:
                raise self._translated(error, f"write to or read from {part.peer}", part.peer, in_doubt=True) from error
            if state == "ERR":
                raise FabricError(f"NIXL lost a write to or a read from {part.peer}", in_doubt=True)
            part.done = state == "DONE"
        if part.done:
            self._lanes.connected(part.peer)
        return part.done

    def release(self, handle: Handle) -> None:
        """Give back a handle, once. If it is still in flight NIXL tries to cancel it, which recalls nothing."""
        part = _handle(handle)
        transfer, part.transfer = part.transfer, None
        try:
            transfer.release()
        except self._errors as error:
            self._stuck.append(transfer)  # keeps NIXL's wrapper from trying again whenever it is collected
            raise self._translated(error, "release a transfer") from error

    def progress(self) -> None:
        """Let NIXL work: a peer's writes over TCP, connections being wired up. Notifications are not used."""
        try:
            self._open().get_new_notifs()
        except self._errors as error:
            raise self._translated(error, "make progress") from error

    def renew(self) -> bool:
        """Create another agent, whose name nobody has met, and destroy the old one; False if either cannot be.

        In this order, since there may be no network just now. Over TCP nothing lands after it, over CMA a peer goes on.
        """
        old, name = self._open(), f"{self._first_name}.{self._renewals + 1}"
        try:
            new = self._created(_import_nixl(), name)
        except FabricError as error:
            _log.warning("nixl_agent_not_created", name=name, error=str(error))
            self._lanes.strays(ours=False)
            return False
        if not self._destroyed(old):
            self._lanes.strays(ours=False)
            return False
        self._lanes.close()
        self._lanes = LaneBook(ucx_log(), name)
        self._agent, self._name, self._renewals = new, name, self._renewals + 1
        self._known, self._lost, self._incarnation = {}, set(), secrets.token_bytes(16)
        return True

    def close(self) -> None:
        """Destroy the agent. Idempotent; over TCP this fences what peers still write, over CMA it does not."""
        self._closed = True
        if self._agent is not None:
            self._destroyed(self._agent)
        self._lanes.close()
        self._agent = None

    def _destroyed(self, wrapper: Any) -> bool:
        """Destroy NIXL's agent, which lives as long as anything refers to it; False if something does."""
        self._agent, self._stuck = None, []
        agent = weakref.ref(wrapper.agent)
        del wrapper.agent  # frames of errors that somebody keeps refer to the wrapper, and to nothing below
        if agent() is not None:
            gc.collect()
        if (left := agent()) is None:
            return True
        wrapper.agent, self._agent = left, wrapper
        return False

    def _open(self) -> Any:
        if self._agent is None:
            raise FabricError(f"agent {self._name!r} is {'closed' if self._closed else 'not set up'}")
        return self._agent

    def _forget(self, named: set[str]) -> None:
        """Unload what a failed `connect` had loaded, but nobody who was known before."""
        for peer in named - set(self._known):
            with contextlib.suppress(*self._errors):
                self._agent.remove_remote_agent(peer)

    def _drop(self, handle: _Handle) -> None:
        try:
            self.release(handle)
        except FabricError as error:
            _log.warning("fabric_handle_not_released", name=self._name, error=str(error))

    def _translated(self, error: Exception, doing: str, peer: str = "", *, in_doubt: bool = False) -> FabricError:
        self._lanes.strays()
        error.__traceback__ = None  # its frames hold NIXL's handles, which hold the agent, and somebody may keep it
        disconnected = isinstance(error, self._disconnected)
        if disconnected and peer:
            self._lost.add(peer)
        words = f"{type(error).__name__}: {error}".rstrip(": ")
        hint = "" if disconnected else " (NIXL_LOG_LEVEL=INFO UCX_LOG_LEVEL=info let it say more)"
        return FabricError(f"NIXL could not {doing}: {words}{hint}", disconnected=disconnected, in_doubt=in_doubt)


def _missing() -> MissingExtraError:
    return MissingExtraError("transfers between processes need NIXL: pip install nixl")


def _make_current(device: int) -> None:
    """Give this thread a current CUDA context, without which cuda_ipc is silently off in it."""
    import torch

    try:
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # set_device alone leaves a new thread without a context on device 0
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built without CUDA
        raise FabricError(f"CUDA device {device} cannot be made current: {error}") from error


def _import_nixl() -> Any:
    """Import nixl without what its import does to logging: it sets `logging.raiseExceptions` for the whole process."""
    with _IMPORTING:  # else the second of two would keep what the first one's import has set
        kept = logging.raiseExceptions
        try:
            return importlib.import_module("nixl")
        except ImportError as error:
            raise _missing() from error
        finally:
            logging.raiseExceptions = kept


def _error_types(bindings: Any) -> tuple[type[Exception], ...]:
    """NIXL's exception types, and those into which its bindings turn what C++ throws."""
    named = [getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return (*named, RuntimeError, ValueError)


def _memory_rows(memories: Sequence[Memory], kind: str) -> NDArray[np.uint64]:
    """NIXL's rows (address, bytes, device) of memories of one kind."""
    if kind not in _KINDS:
        raise FabricError(f"memory is of kind {' or '.join(_KINDS)}, not {kind!r}")
    if any(memory.address <= 0 or memory.nbytes <= 0 or memory.device < 0 for memory in memories):
        raise FabricError(f"memory needs an address, a length and a device: {list(memories)}")
    return np.array([(memory.address, memory.nbytes, memory.device) for memory in memories], dtype=np.uint64)


def _listed(agent: Any, descriptors: Descriptors) -> Any:
    """NIXL's list of the pieces of one side: addresses, bytes, device. It knows of no agent."""
    found = descriptors.kept.get(__name__)
    if found is None:
        if descriptors.kind not in _KINDS:
            raise FabricError(f"memory is of kind {' or '.join(_KINDS)}, not {descriptors.kind!r}")
        rows = np.empty((len(descriptors.pieces), 3), dtype=np.uint64)
        rows[:, :2] = descriptors.pieces
        rows[:, 2] = descriptors.device
        found = descriptors.kept[__name__] = agent.get_xfer_descs(rows, descriptors.kind)
    return found


def _handle(handle: Handle) -> _Handle:
    if not isinstance(handle, _Handle) or handle.transfer is None:
        raise FabricError(f"{handle!r} is no posted part, or was released")
    return handle
