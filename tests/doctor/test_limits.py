"""Limits, namespaces and clocks, each provoked."""

import resource
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.tools.doctor import limits

MIB = 1 << 20
RDMA = {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE"}
FREE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "devices", "status"),
    [(FREE, RDMA, "ok"), (8 * MIB, {}, "ok"), (8 * MIB, RDMA, "warn"), (2048 * MIB, RDMA, "ok")],
)
def test_locked_memory_matters_to_rdma(make_machine, soft, devices, status):
    (found,) = limits.check_locked(make_machine(devices, limits={"MEMLOCK": (soft, soft)}))
    assert found.status == status
    assert ("memlock" in found.remedy) is (status == "warn")


@pytest.mark.parametrize(("soft", "hard", "status"), [(1024, 524288, "warn"), (64, 64, "warn"), (FREE, FREE, "ok")])
def test_open_files(make_machine, soft, hard, status):
    (found,) = limits.check_files(make_machine(limits={"NOFILE": (soft, hard)}))
    assert found.status == status
    assert status == "ok" or found.remedy.startswith("ulimit -n 4096")


@pytest.mark.parametrize(("free", "status"), [(63, "warn"), (64, "ok")])
def test_shared_files(make_machine, free, status):
    def room(path) -> Any:
        assert path.endswith("/dev/shm")
        return SimpleNamespace(f_bavail=free * 256, f_frsize=4096)

    (found,) = limits.check_shared(make_machine(), room)
    assert found.status == status
    assert f"{free} MiB" in found.seen


@pytest.mark.parametrize(("scope", "status"), [("", "ok"), ("0", "ok"), ("1", "warn"), ("2", "warn"), ("3", "warn")])
def test_who_may_reach_into_a_process(make_machine, scope, status):
    files = {"/proc/sys/kernel/yama/ptrace_scope": f"{scope}\n", "/proc/self/status": "Name:\tx\nSeccomp:\t2\n"}
    traced, _ = limits.check_tracing(make_machine(files))
    assert traced.status == status
    assert "a seccomp filter is in force (mode 2)" in traced.seen
    assert ("CAP_SYS_PTRACE" in traced.remedy) is (status == "warn")


@pytest.mark.parametrize(
    ("leads", "said"),
    [("pid:[4026531836]", "the machine's own"), ("pid:[4026532201]", "a container's"), (None, "not known")],
)
def test_the_namespace_of_processes(make_machine, tmp_path, leads, said):
    machine = make_machine()
    if leads:
        (tmp_path / "proc/self/ns").mkdir(parents=True)
        (tmp_path / "proc/self/ns/pid").symlink_to(leads)
    _, namespace = limits.check_tracing(machine)
    assert namespace.status == "ok"
    assert said in namespace.seen


@pytest.mark.parametrize(
    ("files", "status"),
    [({}, "skipped"), (RDMA, "ok"), ({"/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN"}, "warn")],
)
def test_rdma(make_machine, files, status):
    (found,) = limits.check_network(make_machine(files))
    assert found.status == status
    assert not files or "mlx5_0:1" in found.seen


def test_the_clock():
    (right,) = limits.check_clock()
    assert right.status == "ok"
    (wrong,) = limits.check_clock(lambda: 0.0)
    assert wrong.status == "warn"
    assert "1970-01-01" in wrong.seen
