"""Where threads run: the GPU's NUMA node as a made-up sysfs tells it, and threads that really are bound."""

import os
import threading
from typing import Any

import pytest

from kvxfer import runtime as module
from kvxfer.errors import ConfigError, FabricError
from kvxfer.runtime import Placement, place

BUS = "0000:1b:00.0"
REFUSED = "threads cannot be bound here: [Errno 1]"


class Machine:
    """A made-up kernel's view of a machine, and which CPUs this process may use there."""

    def __init__(self, root, monkeypatch):
        self.root, self._monkeypatch = root, monkeypatch
        monkeypatch.setattr(module, "_SYSFS", root)
        self.refuses = False
        monkeypatch.setattr(module, "bind", self._bind)
        self.allow(range(8))

    def allow(self, cpus):
        self._monkeypatch.setattr(module, "allowed_cpus", lambda: frozenset(cpus))

    def gpu(self, node, name=BUS):
        device = self.root / "bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        return self

    def node(self, number, cpus):
        node = self.root / f"devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
        return self

    def place(self, affinity: Any = "auto", device: int | None = 1):
        return place(affinity, device, bus_id=self._bus_id)

    def _bus_id(self, device):
        if device != 1:
            raise FabricError("cudaErrorInvalidDevice")
        return BUS

    def _bind(self, cpus):
        if self.refuses:
            raise PermissionError(1, "Operation not permitted")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_threads_go_to_the_node_of_the_gpu(machine):
    machine.gpu(1).node(0, "0-1,4-5").node(1, "2-3,6-7")
    found = machine.place()
    assert (found.cpus, found.listed) == (frozenset({2, 3, 6, 7}), "2-3,6-7")
    assert found.why == "they are on NUMA node 1, where GPU 1 is"
    assert found.describe() == {"cpus": [2, 3, 6, 7], "why": found.why}


@pytest.mark.parametrize(
    ("gpu", "nodes", "allowed", "words"),
    [
        (0, {0: "0-7"}, range(8), "every CPU that this process may use is on NUMA node 0"),
        (1, {1: "4-7"}, {4, 5}, "every CPU that this process may use is on NUMA node 1"),
        (1, {1: "4-7"}, {0, 1}, "this process may use no CPU of NUMA node 1"),
        (-1, {0: "0-7"}, range(8), f"is not known: the system gives none for {BUS}"),
        (None, {0: "0-7"}, range(8), "is not known: [Errno 2]"),
        (1, {1: ""}, range(8), "is not known: a list of CPUs is"),
        (1, {}, range(8), "is not known: [Errno 2]"),
        ("?", {}, range(8), "is not known: invalid literal"),
        (1, {1: "4-7"}, range(8), REFUSED),
    ],
)
def test_nothing_is_done_without_a_choice(machine, gpu, nodes, allowed, words):
    if gpu is not None:
        machine.gpu(gpu)
    for number, cpus in nodes.items():
        machine.node(number, cpus)
    machine.allow(allowed)
    machine.refuses = words is REFUSED
    found = machine.place()
    assert found.cpus == frozenset()
    assert words in found.why
    assert found.describe()["cpus"] is None
    assert found.listed == "any"


def test_nothing_is_done_without_a_gpu_or_when_it_is_off(machine):
    machine.gpu(1).node(1, "4-7")
    assert machine.place(device=None) == Placement(frozenset(), "the cache is not on a GPU")
    assert machine.place("off") == Placement(frozenset(), "affinity is off")
    assert machine.place(device=0).why == "the NUMA node of GPU 0 is not known: cudaErrorInvalidDevice"


def test_a_list_is_taken_as_it_is_on_any_device(machine):
    assert machine.place((1, 3), device=None) == Placement(frozenset({1, 3}), "affinity names them")
    assert machine.place((1, 3)).cpus == {1, 3}


def test_cpus_that_the_process_may_not_use_are_named(machine):
    with pytest.raises(ConfigError, match=r"may not use: 8-9,12; it may use 0-7$"):
        machine.place((7, 8, 9, 12))


def test_a_list_on_a_system_that_refuses_is_an_error(machine):
    machine.refuses = True
    with pytest.raises(ConfigError, match=r"affinity is 1,3, but threads cannot be bound here: \[Errno 1\]"):
        machine.place((1, 3))


def test_work_is_done_there_and_the_caller_stays_where_it_is():
    before = os.sched_getaffinity(0)
    one = Placement(frozenset({min(before)}), "a test")

    def work():
        inner = []
        thread = threading.Thread(target=lambda: inner.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        return os.sched_getaffinity(0), inner[0], threading.get_ident()

    here, inherited, thread = one.run(work)
    assert here == inherited == {min(before)}
    assert thread != threading.get_ident()
    assert os.sched_getaffinity(0) == before
    assert Placement().run(threading.get_ident) == threading.get_ident()


def test_what_the_work_raises_comes_back():
    with pytest.raises(ValueError, match="broken"):
        Placement(frozenset({min(os.sched_getaffinity(0))}), "a test").run(lambda: int("broken"))
