"""Agents that cannot be made, and what to do about it."""

import pytest

from kvxfer.tools.doctor.lanes import LaneLog
from kvxfer.tools.doctor.pair import agent_remedy, check_agent


@pytest.mark.parametrize(("tls", "gpu", "said"), [
    ("tcp", True, "UCX_TLS=tcp,cuda_copy"), ("tcp,cma", True, "UCX_TLS=tcp,cma,cuda_copy"),
    ("tcp,cuda_copy", True, "unset UCX_TLS (it is tcp,cuda_copy)"), ("all", True, "unset UCX_TLS (it is all)"),
    ("^rc", True, "unset UCX_TLS (it is ^rc)"), ("bogus", False, "unset UCX_TLS (it is bogus)"),
    ("", True, "NIXL's wheel must fit torch's CUDA"),
])  # fmt: skip
def test_the_remedy_goes_by_what_is_set(tls, gpu, said):
    assert said in agent_remedy(tls, gpu=gpu)


def test_a_backend_that_is_not_there(monkeypatch, make_machine, tmp_path):
    monkeypatch.setenv("KVXFER_FABRIC__BACKENDS", "NOWHERE")
    (found,) = check_agent("cpu", LaneLog(tmp_path), make_machine(environment={"UCX_TLS": "tcp"}, gpu=True))
    assert (found.name, found.status) == ("nixl agent", "fail")
    assert "NIXL has no backend 'NOWHERE'" in found.seen
    assert "UCX_TLS=tcp,cuda_copy" in found.remedy
