"""Where a worker's threads run, and where its pinned memory lies: on the NUMA node of the GPU that they serve.

A thread on another node writes tables, launches kernels and polls over the link between the sockets, and so do the GPU
and the NIC that use memory there. Threads are bound to CPUs. Memory follows them: pinned memory gets its pages while
the call that allocates it runs, from the node of the thread that makes the call, so it is allocated by a bound thread.
A memory policy (`set_mempolicy`) would say the same more strongly, but the usual sandboxes of containers forbid it, and
it would override one that the whole process was started under.

The caller's own threads, and its event loop, are never bound.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

from kvxfer.errors import ConfigError, KvxferError
from kvxfer.memory.driver import in_thread, pci_bus_id
from kvxfer.runtime import allowed_cpus, bind
from kvxfer.settings import cpu_numbers

__all__ = ["Placement", "place"]

_T = TypeVar("_T")
_SYSFS: Final = Path("/sys")


@dataclass(frozen=True, slots=True)
class Placement:
    """What was chosen.

    Attributes:
        cpus: Where threads are kept; empty if they may run anywhere.
        why: Where that comes from.
    """

    cpus: frozenset[int] = frozenset()
    why: str = "not chosen yet"

    @property
    def listed(self) -> str:
        """The CPUs as text such as `0-7,16`; `any` if threads may run anywhere."""
        return _listed(sorted(self.cpus)) or "any"

    def run(self, work: Callable[[], _T]) -> _T:
        """Do work that allocates pinned memory: in a thread there, which is waited for, or here if there is no wish."""
        if not self.cpus:
            return work()

        def bound() -> _T:
            bind(self.cpus)
            return work()

        return in_thread(bound)

    def bind(self) -> None:
        """Keep the calling thread there."""
        if self.cpus:
            with suppress(OSError):  # what was possible when it was chosen is not any more: the thread runs on
                bind(self.cpus)

    def refusal(self) -> OSError | None:
        """Why no thread can be kept there, if that is so."""
        try:
            self.run(lambda: None)
        except OSError as error:
            return error
        return None

    def describe(self) -> dict[str, object]:
        """As plain data: the CPUs, None for any, and why."""
        return {"cpus": sorted(self.cpus) or None, "why": self.why}


def place(
    affinity: Literal["auto", "off"] | tuple[int, ...],
    device: int | None,
    *,
    sysfs: Path = _SYSFS,
    bus_id: Callable[[int], str] = pci_bus_id,
) -> Placement:
    """Choose CPUs, among those that this process may use.

    Args:
        affinity: The setting.
        device: Index of the GPU that holds the cache; None for a CPU.
        sysfs: Root of the kernel's view of the hardware.
        bus_id: Says where a GPU sits.

    Raises:
        ConfigError: If the setting names CPUs that the process may not use, or the system does not let it choose.
    """
    if affinity == "off":
        return _anywhere("affinity is off")
    if affinity != "auto":
        return _given(affinity, allowed_cpus())
    if device is None:
        return _anywhere("the cache is not on a GPU")
    return _next_to(device, allowed_cpus(), sysfs, bus_id)


def _given(cpus: tuple[int, ...], allowed: frozenset[int]) -> Placement:
    if outside := sorted(frozenset(cpus) - allowed):
        raise ConfigError(
            f"affinity names CPUs that this process may not use: {_listed(outside)}; it may use "
            f"{_listed(sorted(allowed)) or 'none that it could choose'}"
        )
    placement = Placement(frozenset(cpus), "affinity names them")
    if refusal := placement.refusal():
        raise ConfigError(f"affinity is {placement.listed}, but threads cannot be bound here: {refusal}")
    return placement


def _next_to(device: int, allowed: frozenset[int], sysfs: Path, bus_id: Callable[[int], str]) -> Placement:
    """CPUs of the GPU's node, if that leaves a choice. Nothing fails here: threads may run anywhere, only slower."""
    try:
        node, near = _node(sysfs, bus_id(device))
    except (KvxferError, OSError, ValueError) as error:
        return _anywhere(f"the NUMA node of GPU {device} is not known: {error}")
    chosen = near & allowed
    placement = Placement(chosen, f"they are on NUMA node {node}, where GPU {device} is")
    if not chosen:
        return _anywhere(f"this process may use no CPU of NUMA node {node}, where GPU {device} is")
    if chosen == allowed:
        return _anywhere(f"every CPU that this process may use is on NUMA node {node}, where GPU {device} is")
    if refusal := placement.refusal():
        return _anywhere(f"threads cannot be bound here: {refusal}")
    return placement


def _node(sysfs: Path, bus_id: str) -> tuple[int, frozenset[int]]:
    """The NUMA node of a PCI device, and its CPUs.

    Raises:
        OSError: If the kernel does not show them.
        ValueError: If it knows of no node.
    """
    node = int((sysfs / "bus/pci/devices" / bus_id / "numa_node").read_text())
    if node < 0:
        raise ValueError(f"the system gives none for {bus_id}")
    return node, frozenset(cpu_numbers((sysfs / f"devices/system/node/node{node}/cpulist").read_text()))


def _anywhere(why: str) -> Placement:
    return Placement(frozenset(), why)


def _listed(cpus: "list[int] | tuple[int, ...]") -> str:
    """Numbers as text such as `0-7,16`."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
