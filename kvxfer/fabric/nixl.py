"""The transport over NIXL, by the C library of its wheel: found, opened, checked, each function declared once.

`Capi` has those functions under their names without `nixl_capi_`, and what takes several of them to say. Handles are
plain integers, and `table` has the addresses of what compiled code calls. It is opened when an agent is set up, not
before.

What NIXL does and does not promise shapes this file:

- Its library ships without a header, and between versions functions keep their names and take other things: only the
  versions that are known here are opened, and each agent proves at its start that it writes what it was told.
- A call that may wait, or takes the agent's lock, lets go of the interpreter's; the others keep it, since to get it
  back from a busy thread takes milliseconds.
- Whatever is created is destroyed once, by `Owned`, or as its function says.
- An error is a number, and most are one and the same; NIXL's own log says more. Why a request failed is asked for at
  C++'s function, which C's calls with what its handles begin with.

- An agent has no progress thread (that would spin a core); everything happens inside calls from the fabric's thread.
- NIXL's errors become `FabricError`. What is posted is the mover's, which calls the agent by its C functions.
- `disconnect` recalls nothing that was posted.
- A peer gets the metadata of the registrations that it needs and no other (partial metadata). That keeps a correct peer
  in its place; against a hostile one only RDMA keys do.
- Its UCX backend ignores parameters that it does not know, so they are checked here.
"""

import contextlib
import ctypes
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.copy.port import MEMORIES, Native
from kvxfer.errors import ConfigError, FabricError, MissingExtraError
from kvxfer.fabric import is_of_worker, pack, unpack
from kvxfer.protocol.messages import MemorySpan
from kvxfer.telemetry import logger

__all__ = [
    "IN_PROGRESS",
    "KNOWN",
    "READ",
    "TABLE",
    "WRITE",
    "CallError",
    "Capi",
    "NixlTransport",
    "Owned",
    "Wheel",
    "checked_params",
    "device_params",
    "find",
    "opened",
    "shown_params",
]

KNOWN: Final = (1, 5)
"""The version of NIXL that is known here; its last number may be any."""
READ, WRITE = 0, 1
IN_PROGRESS: Final = 1
_NOT_FOUND: Final = -6
_STATUS: Final = {
    -1: "INVALID_PARAM",
    -2: "BACKEND",
    -3: "INVALID_STATE",
    -4: "EXCEPTION",
    -5: "NO_TELEMETRY",
    _NOT_FOUND: "NOT_FOUND",
}
_NOT_POSTED: Final = -1
"""What C++ says of a request that was not posted."""
_STRICT: Final = 1
"""NIXL takes a lock of the agent's in each call, so that another thread may call beside the fabric's."""
_WHEELS: Final = ("nixl-cu13", "nixl-cu12")
_INSTALL: Final = "pip install 'nixl>=1.5,<1.6'"

_PROOF: Final = bytes(range(64))
_PROOF_S: Final = 10.0
"""Until an agent must have written to itself. Over shared memory that takes a millisecond, over TCP some more."""

# --- its functions


class _AgentConfig(ctypes.Structure):
    _fields_ = (
        ("progress_thread", c_bool),
        ("listen_thread", c_bool),
        ("listen_port", c_int),
        ("sync_mode", c_int),
        ("num_workers", c_uint),
        ("progress_delay_us", c_uint64),
        ("listen_delay_us", c_uint64),
        ("telemetry", c_bool),
    )


_HANDLE: Final = c_void_p
_OUT: Final = POINTER(c_void_p)
_TEXT_OUT: Final = POINTER(c_char_p)
_SIZE_OUT: Final = POINTER(c_size_t)

_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "create_configured_agent": (c_char_p, POINTER(_AgentConfig), _OUT),
    "destroy_agent": (_HANDLE,),
    "get_available_plugins": (_HANDLE, _OUT),
    "create_backend": (_HANDLE, c_char_p, _HANDLE, _OUT),
    "get_backend_params": (_HANDLE, _HANDLE, _OUT, _OUT),
    "register_mem": (_HANDLE, _HANDLE, _HANDLE),
    "deregister_mem": (_HANDLE, _HANDLE, _HANDLE),
    "get_local_partial_md": (_HANDLE, _HANDLE, _OUT, _SIZE_OUT, _HANDLE),
    "load_remote_md": (_HANDLE, c_char_p, c_size_t, _OUT),
    "invalidate_remote_md": (_HANDLE, c_char_p),
    "create_xfer_req": (_HANDLE, c_int, _HANDLE, _HANDLE, c_char_p, _OUT, _HANDLE),
    "post_xfer_req": (_HANDLE, _HANDLE, _HANDLE),
    "get_xfer_status": (_HANDLE, _HANDLE),
    "release_xfer_req": (_HANDLE, _HANDLE),
    "get_notifs": (_HANDLE, _HANDLE, _HANDLE),
    "gen_notif": (_HANDLE, c_char_p, c_char_p, c_size_t, _HANDLE),
}
"""May wait, or take the agent's lock."""

_BRIEF: Final[dict[str, tuple[Any, ...]]] = {
    "string_list_size": (_HANDLE, _SIZE_OUT),
    "string_list_get": (_HANDLE, c_size_t, _TEXT_OUT),
    "destroy_string_list": (_HANDLE,),
    "create_params": (_OUT,),
    "params_add": (_HANDLE, c_char_p, c_char_p),
    "destroy_params": (_HANDLE,),
    "params_create_iterator": (_HANDLE, _OUT),
    "params_iterator_next": (_HANDLE, _TEXT_OUT, _TEXT_OUT, POINTER(c_bool)),
    "params_destroy_iterator": (_HANDLE,),
    "destroy_mem_list": (_HANDLE,),
    "destroy_backend": (_HANDLE,),
    "create_reg_dlist": (c_int, _OUT),
    "reg_dlist_add_desc": (_HANDLE, c_size_t, c_size_t, c_uint64, c_char_p, c_size_t),
    "destroy_reg_dlist": (_HANDLE,),
    "create_xfer_dlist": (c_int, _OUT),
    "xfer_dlist_add_desc": (_HANDLE, c_size_t, c_size_t, c_uint64),
    "destroy_xfer_dlist": (_HANDLE,),
    "destroy_xfer_req": (_HANDLE,),
    "create_opt_args": (_OUT,),
    "opt_args_add_backend": (_HANDLE, _HANDLE),
    "opt_args_set_notif_msg": (_HANDLE, c_char_p, c_size_t),
    "opt_args_set_has_notif": (_HANDLE, c_bool),
    "destroy_opt_args": (_HANDLE,),
    "create_notif_map": (_OUT,),
    "notif_map_size": (_HANDLE, _SIZE_OUT),
    "notif_map_get_agent_at": (_HANDLE, c_size_t, _TEXT_OUT),
    "notif_map_get_notifs_size": (_HANDLE, c_char_p, _SIZE_OUT),
    "notif_map_get_notif": (_HANDLE, c_char_p, c_size_t, _OUT, _SIZE_OUT),
    "notif_map_clear": (_HANDLE,),
    "destroy_notif_map": (_HANDLE,),
}
"""Neither waits nor takes a lock."""

_XFER_STATUS: Final = "_ZNK9nixlAgent13getXferStatusEP12nixlXferReqH"
"""`nixlAgent::getXferStatus(nixlXferReqH*) const`, in a library that the C library loads."""

TABLE: Final = (
    "create_xfer_dlist",
    "xfer_dlist_add_desc",
    "destroy_xfer_dlist",
    "create_xfer_req",
    "post_xfer_req",
    "get_xfer_status",
    "release_xfer_req",
    "destroy_xfer_req",
    "get_notifs",
    "notif_map_clear",
    "gen_notif",
    "notif_map_size",
    "notif_map_get_agent_at",
    "notif_map_get_notifs_size",
    "notif_map_get_notif",
)
"""What `Capi.table` has the addresses of, and behind them that of C++'s function. Every argument is 64 bits wide."""


class CallError(Exception):
    """A call was refused, or failed, with this status."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function}: NIXL_CAPI_ERROR_{_STATUS.get(status, status)}")
        self.status: Final = status


def _checked(result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    del arguments
    if result < 0:
        raise CallError(function.__name__, result)
    return result


class Owned:
    """Something of the library's that is ours. It is given back once, when nobody refers to it any more."""

    __slots__ = ("_give_back", "handle")

    def __init__(self, handle: int, give_back: Callable[[int], object]) -> None:
        self.handle: Final = handle
        self._give_back: Final = give_back

    def __del__(self) -> None:
        self._give_back(self.handle)


# --- where it is


@dataclass(frozen=True, slots=True)
class Wheel:
    """An installed wheel of NIXL's: the package, its version, and the C library in it."""

    name: str
    version: str
    library: Path


def find() -> Wheel:
    """The wheel to use: that of torch's CUDA, or with a torch without CUDA any. Nothing of it is imported or opened.

    Raises:
        MissingExtraError: There is none, or none that fits.
    """
    wheels = {name: wheel for name in _WHEELS if (wheel := _installed(name)) is not None}
    if not wheels:
        raise MissingExtraError(f"transfers between processes need NIXL: {_INSTALL}")
    major = _cuda_major()
    wheel = wheels.get(f"nixl-cu{major}") if major else next(iter(wheels.values()))
    if wheel is None:
        raise MissingExtraError(
            f"torch is built for CUDA {major}, and of NIXL only {' and '.join(wheels)} is installed: "
            f"pip install 'nixl-cu{major}>=1.5,<1.6'"
        )
    if wheel.version.split(".")[:2] != [str(number) for number in KNOWN]:
        raise MissingExtraError(
            f"kvxfer knows the C library of NIXL {'.'.join(map(str, KNOWN))}, and {wheel.name} {wheel.version} is "
            f"installed ({wheel.library}), which may take other arguments: {_INSTALL}"
        )
    if not wheel.library.is_file():
        raise MissingExtraError(
            f"{wheel.name} {wheel.version} is installed without its C library, which should be {wheel.library}: "
            f"pip install --force-reinstall {wheel.name}=={wheel.version}"
        )
    return wheel


def _installed(name: str) -> Wheel | None:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    folder = f".{name.replace('-', '_')}.mesonpy.libs"
    return Wheel(name, found.version, Path(str(found.locate_file(f"{folder}/libnixl_capi.so"))))


def _cuda_major() -> str:
    """The CUDA that torch is built for; empty if it is built for none."""
    import torch

    return (torch.version.cuda or "").split(".")[0]


# --- what it does


class Capi:
    """The functions of an opened library, under their names without `nixl_capi_`. They raise `CallError`.

    Raises:
        FabricError: It cannot be opened, or lacks functions.
    """

    def __init__(self, wheel: Wheel) -> None:
        try:
            waiting, brief = ctypes.CDLL(str(wheel.library)), ctypes.PyDLL(str(wheel.library))
        except OSError as error:
            raise FabricError(f"{_place(wheel)} cannot be opened: {error}; {_again(wheel)}") from error
        names = [*(f"nixl_capi_{name}" for name in (*_CALLS, *_BRIEF)), _XFER_STATUS]
        if absent := [name for name in names if not hasattr(waiting, name)]:
            raise FabricError(f"{_place(wheel)} lacks {', '.join(absent)}; {_again(wheel)}")
        checked: Any = _checked  # as it is called; ctypes' own types say less
        for library, functions in ((waiting, _CALLS), (brief, _BRIEF)):
            for name, arguments in functions.items():
                function = library[f"nixl_capi_{name}"]
                function.argtypes, function.restype, function.errcheck = arguments, c_int, checked
                setattr(self, name, function)
        self.wheel: Final = wheel
        self._status: Final = waiting[_XFER_STATUS]
        found = [*(getattr(self, name) for name in TABLE), self._status]
        # int64: addresses of the functions in `TABLE`, for compiled code
        self.table: Final[NDArray[np.int64]] = np.array([_address(one) for one in found], np.int64)
        self._status.argtypes, self._status.restype = (c_void_p, c_void_p), c_int
        self._free: Final = ctypes.PyDLL(None).free
        self._free.argtypes, self._free.restype = (c_void_p,), None

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(f"{name} is not declared")

    def made(self, what: str, *arguments: object) -> Owned:
        """Create something that needs no agent to be destroyed."""
        return Owned(_filled(getattr(self, f"create_{what}"), *arguments), getattr(self, f"destroy_{what}"))

    def agent(self, name: str) -> int:
        """Create an agent, for `destroy_agent`. Everything happens inside of calls: it has no thread."""
        config = _AgentConfig(sync_mode=_STRICT, num_workers=1, listen_delay_us=100_000)
        return _filled(self.create_configured_agent, name.encode(), byref(config))

    def plugins(self, agent: int) -> list[str]:
        """Backends that could be created, by name."""
        names = Owned(_filled(self.get_available_plugins, agent), self.destroy_string_list)
        found, size = c_char_p(), c_size_t()
        self.string_list_size(names.handle, byref(size))
        listed: list[str] = []
        for number in range(size.value):
            self.string_list_get(names.handle, number, byref(found))
            listed.append(_text(found))
        return listed

    def backend(self, agent: int, name: str, params: Mapping[str, str]) -> Owned:
        """Create a backend, which lives as long as the agent; only what names it is given back."""
        given = self.made("params")
        for key, value in params.items():
            self.params_add(given.handle, key.encode(), value.encode())
        return Owned(_filled(self.create_backend, agent, name.encode(), given.handle), self.destroy_backend)

    def backend_params(self, agent: int, backend: Owned) -> dict[str, str]:
        """Parameters of a backend, those that nobody gave too."""
        kinds, params = c_void_p(), c_void_p()
        self.get_backend_params(agent, backend.handle, byref(kinds), byref(params))
        self.destroy_mem_list(kinds)
        owned = Owned(params.value or 0, self.destroy_params)
        place = Owned(_filled(self.params_create_iterator, owned.handle), self.params_destroy_iterator)
        key, value, more = c_char_p(), c_char_p(), c_bool(True)
        found: dict[str, str] = {}
        while more.value:
            self.params_iterator_next(place.handle, byref(key), byref(value), byref(more))
            if key.value is not None:
                found[_text(key)] = _text(value)
        return found

    def memories(self, kind: str, rows: list[tuple[int, int, int]]) -> Owned:
        """A list of memories, to register or to describe: address, bytes, device."""
        made = self.made("reg_dlist", MEMORIES[kind])
        for address, nbytes, device in rows:
            self.reg_dlist_add_desc(made.handle, address, nbytes, device, None, 0)
        return made

    def pieces(self, kind: str, rows: list[list[int]], device: int) -> Owned:
        """A list of pieces of one side of a transfer: address and bytes of each."""
        made = self.made("xfer_dlist", MEMORIES[kind])
        for address, nbytes in rows:
            self.xfer_dlist_add_desc(made.handle, address, nbytes, device)
        return made

    def metadata(self, agent: int, memories: Owned) -> bytes:
        """Keys of these memories; of an empty list, how the agent is reached."""
        data, size = c_void_p(), c_size_t()
        self.get_local_partial_md(agent, memories.handle, byref(data), byref(size), None)
        owned = Owned(data.value or 0, self._free)
        return ctypes.string_at(owned.handle, size.value)

    def load(self, agent: int, metadata: bytes) -> bytes:
        """Learn what another agent's metadata says; returns its name."""
        owned = Owned(_filled(self.load_remote_md, agent, metadata, len(metadata)), self._free)
        return ctypes.string_at(owned.handle)

    def forget(self, agent: int, peer: str) -> None:
        """Forget what was loaded of a peer; nothing if nothing is known of it."""
        try:
            self.invalidate_remote_md(agent, peer.encode())
        except CallError as error:
            if error.status != _NOT_FOUND:
                raise

    def request(
        self, agent: int, operation: int, here: Owned, there: Owned, peer: str, options: Owned | None = None
    ) -> int:
        """Make a request that can be posted, and has to be given back."""
        out = c_void_p()
        given = options.handle if options else None
        self.create_xfer_req(agent, operation, here.handle, there.handle, peer.encode(), byref(out), given)
        return out.value or 0

    def _cause(self, agent: int, request: int) -> int:
        return int(self._status(*(c_void_p.from_address(handle) for handle in (agent, request))))

    def give_back(self, agent: int, request: int) -> None:
        """Give back a request; if that fails it stays, and this may be tried again."""
        self.release_xfer_req(agent, request)
        self.destroy_xfer_req(request)

    def prove(self, agent: int, name: str, backend: Owned) -> None:
        """See that an agent does what it is told, by a write to itself through this backend that notifies it.

        Raises:
            FabricError: It does not.
        """
        memory = np.zeros(2 * len(_PROOF), np.uint8)
        memory[: len(_PROOF)] = np.frombuffer(_PROOF, np.uint8)
        address, half = memory.ctypes.data, len(_PROOF)
        registered = self.memories("DRAM", [(address, 2 * half, 0)])
        try:
            self.register_mem(agent, registered.handle, None)
            try:
                told = self._written(agent, name, backend, address, half)
            finally:
                self.deregister_mem(agent, registered.handle, None)
        except CallError as error:
            raise FabricError(self._unproven(f"failed ({error})")) from error
        if memory[half:].tobytes() != _PROOF:
            raise FabricError(self._unproven("wrote other bytes"))
        if told != (name.encode(), _PROOF):
            raise FabricError(self._unproven(f"was announced as {told}" if told else f"took over {_PROOF_S:g} s"))

    def _written(self, agent: int, name: str, backend: Owned, address: int, half: int) -> tuple[bytes, bytes] | None:
        """Write one half into the other; returns who says so and what, None if nobody does in time."""
        here, there = (self.pieces("DRAM", [[at, half]], 0) for at in (address, address + half))
        options, heard = self.made("opt_args"), self.made("notif_map")
        # For itself an agent would take any backend that takes the memory, and not all of them reach memory.
        self.opt_args_add_backend(options.handle, backend.handle)
        request = self.request(agent, WRITE, here, there, name, options)
        self.opt_args_set_notif_msg(options.handle, _PROOF, len(_PROOF))
        self.opt_args_set_has_notif(options.handle, True)
        size, until, done = c_size_t(), time.monotonic() + _PROOF_S, False
        try:
            if (cause := self._cause(agent, request)) != _NOT_POSTED:
                raise FabricError(self._unproven(f"was at {cause} before it was posted"))
            self.post_xfer_req(agent, request, options.handle)
            while not (done and size.value) and time.monotonic() < until:
                done = done or self.get_xfer_status(agent, request) != IN_PROGRESS
                self.get_notifs(agent, heard.handle, None)
                self.notif_map_size(heard.handle, byref(size))
        finally:
            self.give_back(agent, request)
        if not (done and size.value):
            return None
        sender, said = c_char_p(), c_void_p()
        self.notif_map_get_agent_at(heard.handle, 0, byref(sender))
        self.notif_map_get_notif(heard.handle, sender, 0, byref(said), byref(size))
        return sender.value or b"", ctypes.string_at(said, size.value)

    def _unproven(self, what: str) -> str:
        return f"with {_place(self.wheel)} a write of {len(_PROOF)} bytes to itself {what}; {_again(self.wheel)}"


def _filled(function: Callable[..., int], *arguments: object) -> int:
    """What a function puts where its last argument says."""
    out = c_void_p()
    function(*arguments, byref(out))
    return out.value or 0


def _text(found: c_char_p) -> str:
    return (found.value or b"").decode(errors="replace")


def _address(function: Any) -> int:
    return ctypes.cast(function, c_void_p).value or 0


def _place(wheel: Wheel) -> str:
    return f"NIXL's C library {wheel.library} ({wheel.name} {wheel.version})"


def _again(wheel: Wheel) -> str:
    return f"if it is not what the package brought, pip install --force-reinstall {wheel.name}=={wheel.version}"


@cache
def opened(wheel: Wheel) -> Capi:
    """The library of a wheel, opened once a process."""
    return Capi(wheel)


# --- settings of backends

_UCX_PARAMS: Final = frozenset({
    "device_list", "engine_config", "num_threads", "num_workers", "split_batch_size", "ucx_devices",
    "ucx_error_handling_mode", "ucx_num_device_channels",
})  # fmt: skip
"""What NIXL 1.5's UCX backend reads. It advertises only three of them."""


def checked_params(
    backends: Sequence[str],
    given: Mapping[str, Mapping[str, str]],
    num_workers: int | None,
    devices: Sequence[str],
    named: str | None,
) -> dict[str, dict[str, str]]:
    """Settings of NIXL's backends as it takes them: parameters by backend. What `Config` knows is checked there.

    Network devices that the environment names (`named`, from `UCX_NET_DEVICES`) win.

    Raises:
        ConfigError: A setting is none of UCX's, or contradicts another.
    """
    params = {backend: dict(given.get(backend, {})) for backend in backends}
    if unknown := set(params.get("UCX", {})) - _UCX_PARAMS:
        raise ConfigError(f"NIXL's UCX backend has no {sorted(unknown)}; it has {sorted(_UCX_PARAMS)}")
    derived = device_params(devices, named)
    if num_workers is not None:
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
_TCP_CALLS: Final = ("UCX_TCP_SYN_CNT", "2")
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
        ConfigError: A setting is none of UCX's, or contradicts another.
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
        self._wheel: Final = find()
        self._name = name
        self._names: Final = (f"{name}.{number}" for number in count(1))  # of the agents that come after it
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
        os.environ.setdefault(*_TCP_CALLS)
        if self._scatter_lists:
            os.environ.setdefault(_SCATTER_LISTS, "y")
        for variable, level in _QUIET.items():
            os.environ.setdefault(variable, level)
        self._c = opened(self._wheel)
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
        where = self._c.table, self._open().handle, self._heard.handle
        return Native(*where, _said, for_good=True, orderly=self.orderly, listed=self.takes_lists)

    def plugins(self) -> list[str]:
        """Backends that NIXL could load, by name."""
        agent = self._open()
        try:
            return sorted(self._c.plugins(agent.handle))
        except CallError as error:
            raise _translated(error, "list its plugins") from error

    def register(self, memories: Sequence[MemorySpan]) -> object:
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
        old, name = self._open(), next(self._names)
        try:
            new = self._created(name)
        except FabricError as error:
            _log.warning("nixl_agent_not_created", name=name, error=str(error))
            return False
        if not self._destroy(old):
            self._destroy(new)
            return False
        self._agent, self._name = new, name
        self._known, self._incarnation = {}, secrets.token_bytes(16)
        return True

    def close(self) -> None:
        """Destroy the agent. Idempotent; over TCP this fences what peers still write, over CMA it does not."""
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
            raise FabricError(f"agent {self._name!r} is not open")
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


def _memory_rows(memories: Sequence[MemorySpan], kind: str) -> list[tuple[int, int, int]]:
    """NIXL's rows (address, bytes, device) of memories of one kind."""
    if kind not in MEMORIES:
        raise FabricError(f"memory is of kind {' or '.join(MEMORIES)}, not {kind!r}")
    if any(memory.address <= 0 or memory.length <= 0 or memory.device < 0 for memory in memories):
        raise FabricError(f"memory needs an address, a length and a device: {list(memories)}")
    return [(memory.address, memory.length, memory.device) for memory in memories]
