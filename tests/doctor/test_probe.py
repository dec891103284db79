"""What a few transfers say, and what is said when they are damaged."""

import asyncio

import pytest

from kvxfer.mapped.host import here
from kvxfer.tools.doctor import probe
from kvxfer.tools.doctor.lanes import LaneLog
from kvxfer.tools.doctor.probe import Probe, ProbeCache, judge

MIB = 1 << 20
BOOT, NAMESPACE = here().split(" ")
FAR = f"00000000-another-boot {NAMESPACE}"
OTHER_CONTAINER = f"{BOOT} pid:[1]"


def came(route, seconds=0.01, **changes):
    return {"error": "", "difference": "", "route": route, "why": "", "seconds": seconds, "bytes": 16 * MIB} | changes


def facts(**changes):
    return {"lane": "cma/memory", "reasons": [], "trusted": True, "gpu": False, "tls": ""} | changes


@pytest.mark.parametrize(
    ("route", "last", "known", "host", "status", "seen", "remedy"),
    [
        ("staged", came("staged"), {}, here(), "ok", "16 MiB at 1.68 GB/s over cma/memory, all bytes right", ""),
        ("mapped", came("mapped"), {"lane": "tcp/lo"}, here(), "ok", "1.68 GB/s, all bytes right", ""),
        ("staged", came("staged"), {"lane": "tcp/lo"}, here(), "warn", "the slowest lane", "cross-memory attach"),
        ("staged", came("staged"), {"lane": "tcp/lo", "gpu": True}, here(), "warn", "the slowest lane", "cuda_ipc"),
        ("staged", came("staged"), {"lane": "tcp/eth0", "gpu": True}, FAR, "warn", "slowest lane", "rdma"),
        ("direct", came("staged"), {"trusted": False}, here(), "skipped", "do not trust each other", "KVXFER_SECRET"),
        ("mapped", came("staged"), {}, FAR, "skipped", "memory of another host cannot be mapped", ""),
        ("mapped", came("staged"), {}, OTHER_CONTAINER, "warn", "in another PID namespace", "mend what it names"),
        ("mapped", came("direct"), {"reasons": ["no handle"]}, here(), "warn", "direct was taken instead", "mend"),
        ("pull", came("pull", difference="3 bytes are wrong"), {}, here(), "fail", "3 bytes are wrong", "do not use"),
        ("pull", came("", error="PeerLostError: gone"), {"reasons": ["x"]}, here(), "fail", "gone (x)", "mend"),
    ],
)  # fmt: skip
def test_a_direction_is_judged(route, last, known, host, status, seen, remedy):
    found = judge("a -> b", route, [came("staged", 9.0), last], facts(**known), host)
    assert found.status == status
    assert seen in found.seen
    assert remedy in found.remedy
    assert bool(found.remedy) is bool(remedy)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(probe, "_probe_bytes", lambda device: MIB)


class Both:
    """Two sides in this process, on real workers over NIXL."""

    def __init__(self, channels, folder):
        listen = f"unix:{folder}/{{route}}-"
        self.sides = [
            Probe(channel, first, "cpu", names, f"{listen}{first}", LaneLog(folder))
            for channel, first, names in ((channels[0], True, ("a", "b")), (channels[1], False, ("b", "a")))
        ]

    async def run(self):
        async def one(side):
            return [finding async for finding in side.run()]

        first, second = await asyncio.gather(*map(one, self.sides))
        assert [one.status for one in first] == [one.status for one in second]
        return {finding.name: finding for finding in first}


async def test_damage_is_seen(channels, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "ROUTES", ("staged",))
    found = ProbeCache.source

    def damaged(self, number):
        ids = found(self, number)
        if number == 1:
            self.cache.corrupt(ids[0])
        return ids

    monkeypatch.setattr(ProbeCache, "source", damaged)
    findings = await Both(channels, tmp_path).run()
    assert {name: one.status for name, one in findings.items()} == {"staged a -> b": "fail", "staged b -> a": "fail"}
    assert "what arrived is wrong: layer 1, block " in findings["staged a -> b"].seen


@pytest.mark.parametrize(("route", "folder", "settings", "status", "seen"), [
    ("direct", "", {"KVXFER_TRUST": "none"}, "skipped", "the settings of a forbid it: trust is 'none'"),
    ("staged", "folder" * 20, {}, "fail", "the path of a unix socket may have 107 bytes"),  # nobody has chosen that
    ("staged", "", {"KVXFER_FABRIC__BACKENDS": "NOWHERE"}, "fail", "NIXL has no backend 'NOWHERE'"),
])  # fmt: skip
async def test_what_keeps_a_route_from_being_tried_is_named(
    channels, tmp_path, monkeypatch, route, folder, settings, status, seen
):
    monkeypatch.setattr(probe, "ROUTES", (route,))
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    (found,) = (await Both(channels, tmp_path / folder).run()).values()
    assert (found.name, found.status) == (f"{route} a <-> b", status)
    assert seen in found.seen


async def test_peers_that_a_service_may_have_do_not_rule_out_the_one_that_is_probed(channels, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "ROUTES", ("staged",))
    monkeypatch.setenv("KVXFER_ALLOW_PEERS", "tcp:*.kvxfer-prefill:7400")
    findings = await Both(channels, tmp_path).run()
    assert [one.status for one in findings.values()] == ["ok", "ok"]
