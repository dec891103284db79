"""What a NIC writes into a GPU is flushed before it is scattered or said to have landed: as if this CPU were one."""

from types import SimpleNamespace
from typing import Any

import pytest
from inside import begin_copies_by, watch_chunks
from stage import Cache, quiet

from kvxfer.copy.port import Direction
from kvxfer.decode import receiver
from kvxfer.decode.receiver import _by_nic
from kvxfer.mapped import host as home_module
from kvxfer.mapped.host import here


@pytest.mark.parametrize("by_nic", [True, False])
@pytest.mark.parametrize("route", ["staged", "direct", "pull"])
async def test_each_chunk_is_flushed_between_its_arrival_and_its_landing(stage, monkeypatch, route, by_nic):
    """On `staged` its own copy does that; what arrives in the caller's blocks is flushed together, and once."""
    monkeypatch.setattr(receiver, "_by_nic", lambda host, *, staged: by_nic)
    prefill, decode = await stage.pair(Cache(), Cache(layout="HND"), route=route)
    flushed, there, visible = [], 0, 0

    def watched(submit, job, direction):
        nonlocal visible
        if job.from_nic:
            flushed.append((direction, job.tables is not None))
            assert visible < there, "there is nothing to flush"
            visible = visible + 1 if route == "staged" else there
        return submit(job, direction)

    def chunks(what, count):
        nonlocal there
        if what == "arrived":
            there = count
        else:
            assert not by_nic or count <= visible

    begin_copies_by(decode, watched)
    watch_chunks(chunks, monkeypatch)
    result, _ = await stage.bring(prefill, decode)
    assert result.stats.chunks > 1
    assert set(flushed) == ({(Direction.SCATTER, route == "staged")} if by_nic else set())
    assert there == result.stats.chunks
    assert visible == (there if by_nic else 0)
    await quiet(prefill, decode)


@pytest.mark.parametrize(("staging", "staged"), [("VRAM", True), ("DRAM", False), (None, False)])
@pytest.mark.parametrize(("cache", "in_place"), [("cuda", True), ("cpu", False)])
@pytest.mark.parametrize(("host", "away"), [("this", False), ("another pid:[1]", True), ("", True)])
def test_where_it_is_needed(monkeypatch, staging, staged, cache, in_place, host, away):
    monkeypatch.setattr(home_module, "here", lambda: "boot pid:[1]")
    site = SimpleNamespace(
        staging=SimpleNamespace(kind=staging) if staging else None, geometry=SimpleNamespace(kind=cache)
    )
    told = "boot pid:[2]" if host == "this" else host  # of another container
    one: Any = SimpleNamespace(site=site, peer=SimpleNamespace(body=SimpleNamespace(host=told)))
    assert _by_nic(one, staged=True) is (staged and in_place and away)  # memory of a GPU is staged for caches of GPUs
    assert _by_nic(one, staged=False) is (in_place and away)
    assert here()
