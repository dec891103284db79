"""Checks of what the system allows a process, and of its clocks."""

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvxfer import __file__ as _here
from kvxfer.tools.doctor.findings import Finding, ok, skipped, warn
from kvxfer.tools.doctor.machine import Machine
from kvxfer.tools.versions import first_match

__all__ = ["check_clock", "check_files", "check_locked", "check_network", "check_shared", "check_tracing"]

_MIB: Final = 1 << 20
_FILES: Final = 4096
"""Descriptors: a stream a peer, two a shared tensor, one a piece of memory of `expandable_segments`, UCX's own."""
_LOCKED: Final = 1024 * _MIB
_SHARED: Final = 64 * _MIB
_FIRST_NAMESPACE: Final = "pid:[4026531836]"
"""The PID namespace that a machine starts with."""
_SHM: Final = "/dev/shm"  # noqa: S108 - looked at, not written to
_SCOPES: Final = {"0": "any process of one user", "1": "only children of the process", "2": "only root", "3": "nobody"}


def check_locked(machine: Machine) -> Iterator[Finding]:
    """Memory that may be locked: RDMA registers by locking."""
    soft, _ = machine.limit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    rdma = machine.names("/sys/class/infiniband")
    if soft == resource.RLIM_INFINITY or soft >= _LOCKED:
        yield ok("locked memory", f"{shown} (ulimit -l)", bytes=soft)
    elif rdma:
        yield warn(
            "locked memory",
            f"{shown} may be locked (ulimit -l), and {', '.join(rdma)} can register no more than that",
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1)",
            bytes=soft,
        )
    else:
        yield ok("locked memory", f"{shown} (ulimit -l); only RDMA needs more, and there is none", bytes=soft)


def check_files(machine: Machine) -> Iterator[Finding]:
    """Open files."""
    soft, _ = machine.limit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FILES:
        yield ok("open files", f"{soft} (ulimit -n)", files=soft)
    else:
        yield warn(
            "open files",
            f"{soft} may be open (ulimit -n); peers, tensors and UCX need descriptors",
            f"ulimit -n {_FILES} or more (systemd: LimitNOFILE; docker: --ulimit nofile)",
            files=soft,
        )


def check_shared(machine: Machine, room: Callable[[str], os.statvfs_result] = os.statvfs) -> Iterator[Finding]:
    """`/dev/shm`: UCX's shared memory lies there; kvxfer's own does not."""
    try:
        found = room(str(machine.root / _SHM.lstrip("/")))
    except OSError:
        yield warn(
            "shared files", "it is not there; UCX cannot use its shared memory lanes", f"mount a tmpfs on {_SHM}"
        )
        return
    free = found.f_bavail * found.f_frsize
    if free < _SHARED:
        yield warn(
            "shared files",
            f"{free // _MIB} MiB are free in {_SHM}; UCX's shared memory lanes need more",
            f"docker: --shm-size=1g; Kubernetes: an emptyDir with medium Memory at {_SHM}",
            bytes=free,
        )
    else:
        yield ok("shared files", f"{free // _MIB} MiB are free in {_SHM}", bytes=free)


def check_tracing(machine: Machine) -> Iterator[Finding]:
    """Whether a process may reach into another one, as far as files say it; `trial` tries it."""
    scope = machine.read("/proc/sys/kernel/yama/ptrace_scope")
    mode = first_match(r"^Seccomp:(.*)$", machine.root / "proc/self/status")
    filtered = f"; a seccomp filter is in force (mode {mode})" if mode not in {"", "0"} else ""
    if scope in {"", "0"}:
        yield ok("ptrace scope", f"{_SCOPES['0']} may reach into each other{filtered}", scope=scope, seccomp=mode)
    else:
        yield warn(
            "ptrace scope",
            f"kernel.yama.ptrace_scope={scope}: {_SCOPES.get(scope, 'who knows')} may reach into a process{filtered}",
            "sysctl kernel.yama.ptrace_scope=0 on the host, or give the processes CAP_SYS_PTRACE",
            scope=scope,
            seccomp=mode,
        )
    namespace = machine.link("/proc/self/ns/pid")
    if namespace in {"", _FIRST_NAMESPACE}:
        yield ok("pid namespace", "the machine's own" if namespace else "not known", namespace=namespace)
    else:
        yield ok(
            "pid namespace",
            f"{namespace}, a container's: only processes within it can map each other's memory (containers of one pod: "
            "shareProcessNamespace, others: hostPID or --pid=host)",
            namespace=namespace,
        )


def check_network(machine: Machine) -> Iterator[Finding]:
    """RDMA devices, and whether their ports are up."""
    devices = machine.names("/sys/class/infiniband")
    if not devices:
        yield skipped("rdma", "there are no RDMA devices: between hosts NIXL takes TCP")
        return
    states = {
        f"{device}:{port}": machine.read(f"/sys/class/infiniband/{device}/ports/{port}/state")
        for device in devices
        for port in machine.names(f"/sys/class/infiniband/{device}/ports")
    }
    shown = ", ".join(f"{port} {state or 'unknown'}" for port, state in states.items())
    if any("ACTIVE" in state for state in states.values()):
        yield ok("rdma", shown, **states)
    else:
        yield warn(
            "rdma", f"no port is active: {shown}", "bring a port up (ibstat, rdma link), or expect TCP", **states
        )


def check_clock(wall: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Whether the wall clock can be right."""
    installed, today = Path(_here).stat().st_mtime, wall()
    if today < installed - 86_400:
        yield warn(
            "wall clock",
            f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(today))} UTC is before kvxfer was installed",
            "set the clock (chrony, timesyncd): TLS certificates and log lines need it; time-outs do not",
        )
    else:
        yield ok("wall clock", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(today))} UTC")
