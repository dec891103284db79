"""Which host this is, and which namespace of processes: only within one of each can memory be mapped."""

from functools import cache
from pathlib import Path

__all__ = ["elsewhere", "here", "may_be_elsewhere", "unlike"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


@cache
def here() -> str:
    """This host and namespace as peers are told of it; empty where the system does not say."""
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return ""


def elsewhere(theirs: str) -> bool:
    """Whether a process that said so is on another host: what it writes here comes over a network."""
    ours = here()
    return bool(ours and theirs) and theirs.partition(" ")[0] != ours.partition(" ")[0]


def unlike(theirs: str) -> str:
    """Why memory of a process that said so cannot be mapped here; empty if nothing speaks against it."""
    ours = here()
    if not ours or not theirs:
        return "it is not known whether both are on the same host"
    boot, _, namespace = theirs.partition(" ")
    own_boot, _, own_namespace = ours.partition(" ")
    if boot != own_boot:
        return "it is on another host"
    if namespace != own_namespace:
        return "it is in another PID namespace; containers need a common one (hostPID, or one pod with a shared one)"
    return ""


def may_be_elsewhere(theirs: str) -> bool:
    """Whether a process that said so is on another host, or that is not known: then a NIC may write what it sends."""
    ours = here()
    return not ours or not theirs or elsewhere(theirs)
