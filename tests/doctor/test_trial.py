"""What one process cannot do with another's memory is a finding with its remedy."""

import asyncio
from contextlib import contextmanager

import pytest

from kvxfer.tools.doctor import trial

TAKES = {"shared memory": "_take_pages", "pidfd_getfd": "_take_file", "cross-memory attach": "_take_memory"}
NAMES = list(TAKES)


async def both(channels):
    """What the owner and the other one find; here both are this process."""

    async def run(channel, owner):
        return [finding async for finding in trial.trial(channel, "cpu", owner=owner)]

    owner, taker = await asyncio.gather(run(channels[0], True), run(channels[1], False))
    assert owner == taker, "both find the same"
    return {finding.name: finding for finding in owner}


async def test_memory_of_this_process_is_not_taken_for_anothers(channels):
    found = await both(channels)
    assert list(found) == [*NAMES, "cuda ipc"]
    assert found["shared memory"].status == "warn", "it is the same process, which the library refuses"
    assert [found[name].status for name in NAMES[1:]] == ["ok", "ok"]
    assert found["cuda ipc"].status == "skipped"


@pytest.mark.parametrize("name", NAMES)
async def test_what_cannot_be_taken(channels, monkeypatch, name):
    def refuse(_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(trial, TAKES[name], refuse)
    found = (await both(channels))[name]
    assert found.status == "warn"
    assert "Operation not permitted" in found.seen
    assert "kernel.yama.ptrace_scope=0" in found.remedy


@pytest.mark.parametrize("name", NAMES[1:])
async def test_what_is_said_to_be_written_must_have_arrived(channels, monkeypatch, name):
    monkeypatch.setattr(trial, TAKES[name], lambda _: trial.ok(name, "written"))
    found = (await both(channels))[name]
    assert found.status == "fail"
    assert "nothing arrived" in found.seen


async def test_the_kernels_refusal_is_named(channels, monkeypatch):
    @contextmanager
    def offer():
        yield (1, 4096), lambda: True  # nobody may write to the first process, and there is nothing at this address

    monkeypatch.setattr(trial, "_offer_memory", offer)
    found = (await both(channels))["cross-memory attach"]
    assert found.status == "warn"
    assert "process_vm_writev: " in found.seen
