"""Two hosts, which here are two tasks: who may connect, what both say of themselves, and a probe over a real socket."""

import asyncio
import json
import re
from contextlib import aclosing

import pytest

from kvxfer.errors import ProtocolError, UnreachableError
from kvxfer.mapped.host import here
from kvxfer.names import Endpoint
from kvxfer.tools.doctor import probe, remote
from kvxfer.tools.doctor.examination import listening, pasted
from kvxfer.tools.doctor.findings import ok
from kvxfer.tools.doctor.remote import check_peer, compare, serve_peer


async def collect(findings):
    async with aclosing(findings):
        return [finding async for finding in findings]


@pytest.fixture
def quick(monkeypatch):
    """No probes: one finding instead."""

    async def run(self):
        yield ok(f"probe of {self.listen}", "")

    monkeypatch.setattr(probe.Probe, "run", run)


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("k")


class Listening:
    """The side that listens, as a task."""

    def __init__(self, address, folder, timeout=60.0):
        self.said = asyncio.Queue()
        serving = serve_peer(listening(address), "cpu", folder, self.said.put_nowait, timeout)
        self.task = asyncio.ensure_future(collect(serving))

    async def address(self):
        line = await self.said.get()
        match = re.fullmatch(r"kvxfer doctor --peer (\S+)", line)
        assert match
        return pasted(match[1])


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_the_line_leads_there(quick, folder, kind):
    address = "tcp:127.0.0.1:0" if kind == "tcp" else f"unix:{folder}/d.sock"
    there = Listening(address, folder)
    mine = await collect(check_peer(*await there.address(), "cpu", folder))
    theirs = await there.task
    assert [one.name for one in mine[:2]] == [one.name for one in theirs[:2]] == ["peer", "host"]
    assert mine[0].status == theirs[0].status == "ok"
    expected = "probe of tcp:127.0.0.1:0" if kind == "tcp" else f"probe of unix:{folder}/d.sock.a-{{route}}"
    assert mine[2].name == expected
    assert not any(folder.iterdir()), "the socket is gone"


async def test_strangers_are_turned_away_and_disturb_nothing(quick, folder):
    there = Listening("tcp:127.0.0.1:0", folder)
    code, endpoint = await there.address()
    with pytest.raises(UnreachableError, match="closed the connection"):
        await collect(check_peer(f"wrong{code}", endpoint, "cpu", folder))
    for line in (b"no JSON\n", b"[1]\n", b"{}\n", b"x" * 10):
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(line)
        writer.write_eof()
        assert await reader.read() == b"", "nothing is said to them"
        writer.close()
    assert await collect(check_peer(code, endpoint, "cpu", folder))
    assert await there.task


async def test_nobody_comes(folder):
    there = Listening("tcp:127.0.0.1:0", folder, timeout=0.01)
    with pytest.raises(UnreachableError, match=r"nobody connected to tcp:127\.0\.0\.1:"):
        await there.task


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\n", b"[]\n", b"{" * 3_000_000])
async def test_what_answers_is_no_doctor(folder, said):
    async def answer(reader, writer):
        await reader.readline()
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ProtocolError):
            await collect(check_peer("code", Endpoint.parse(f"tcp:127.0.0.1:{port}"), "cpu", folder))


async def test_a_side_that_falls_silent_is_given_up():
    async def ignore(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        with pytest.raises(UnreachableError, match=r"nothing for 0\.01 s"):
            await remote.Wire(reader, writer, 0.01).hear()
        writer.close()
        await writer.wait_closed()


def said(**changes):
    versions = {"kvxfer": "0.1.0", "wire": "1 (speaks 1 to 1)", "torch": "2.13.0"} | changes.pop("versions", {})
    return {"versions": versions, "speaks": [1, 2], "host": here(), "device": "cpu", "wall": 1000.0} | changes


FAR = f"another-boot {here().split(' ')[1]}"


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (said(), {"peer": "ok", "host": "ok"}),
        (said(versions={"torch": "2.12.0"}), {"peer": "warn", "host": "ok"}),
        (said(versions={"wire": "3 (speaks 2 to 3)"}, speaks=[2, 3]), {"peer": "warn", "host": "ok"}),
        (said(versions={"wire": "3 (speaks 3 to 3)"}, speaks=[3, 3]), {"peer": "fail", "host": "ok"}),
        (said(versions={"wire": "0 (speaks 0 to 0)"}, speaks=[0, 0]), {"peer": "fail", "host": "ok"}),
        (said(device="cuda:0"), {"peer": "fail", "host": "ok"}),
        (said(host=FAR, wall=1000.9), {"peer": "ok", "host": "ok", "clocks": "ok"}),
        (said(host=FAR, wall=1003.0), {"peer": "ok", "host": "ok", "clocks": "warn"}),
        ({}, {"peer": "fail", "host": "ok"}),
    ],
)
def test_two_sides_are_compared(theirs, expected):
    found = compare(said(), json.loads(json.dumps(theirs)), slack=0.5)
    assert {one.name: one.status.value for one in found} == expected


async def test_a_real_probe_between_two_sides(folder, monkeypatch):
    monkeypatch.setattr(probe, "ROUTES", ("staged", "pull"))
    monkeypatch.setattr(probe, "_probe_bytes", lambda _: 1 << 20)
    there = Listening(f"unix:{folder}/d.sock", folder)
    mine = await collect(check_peer(*await there.address(), "cpu", folder))
    theirs = await there.task
    names = ["staged here -> peer", "staged peer -> here", "pull here -> peer", "pull peer -> here"]
    assert [(one.name, one.status.value) for one in mine[2:]] == [(name, "ok") for name in names]
    assert [one.status.value for one in theirs[2:]] == ["ok"] * 4
    assert all(one.facts["bytes"] == 1 << 20 and one.facts["gbps"] > 0 for one in mine[2:])
