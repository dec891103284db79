"""A probe between two hosts: one listens and says a line to paste on the other one, which connects.

Over that connection both sides agree, one JSON object a line, on what is probed next; it carries tickets of the probes
and no bytes of theirs. What moves is between real workers, with the settings in effect (`KVXFER_SECRET`,
`KVXFER_TLS__*`, `KVXFER_FABRIC__*`), on ports that are free. Who connects must know
the code of the line, drawn at random; whoever learns it can do no more than take part in the probe.
"""

import asyncio
import json
import os
import secrets
import stat
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from kvxfer.errors import KvxferError, ProtocolError, UnreachableError, UsageError
from kvxfer.mapped.host import elsewhere, here, unlike
from kvxfer.names import Endpoint
from kvxfer.protocol.messages import WIRE_MIN, WIRE_VERSION
from kvxfer.tools import versions
from kvxfer.tools.doctor.findings import Finding, fail, ok, warn
from kvxfer.tools.doctor.lanes import LaneLog
from kvxfer.tools.doctor.probe import Probe

__all__ = ["Wire", "check_peer", "compare", "serve_peer"]

_CODE_BYTES: Final = 12
_LINE_BYTES: Final = 1 << 20
_SILENCE: Final = 90.0
_CONNECT_SECONDS: Final = 10.0
_CLOCKS_APART_S: Final = 1.0


class Wire:
    """Plain data, one JSON object a line. A `Channel`. Who made the stream closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float = _SILENCE) -> None:
        self._reader: Final = reader
        self._writer: Final = writer
        self._silence: Final = silence

    def send(self, item: Any) -> None:
        """Say something."""
        self._writer.write(json.dumps(item).encode() + b"\n")

    async def hear(self) -> Any:
        """Wait for what the other side says next: an object.

        Raises:
            UnreachableError: If it has gone, or says nothing.
            ProtocolError: If it says something else.
        """
        try:
            async with asyncio.timeout(self._silence):
                line = await self._reader.readline()
        except TimeoutError as error:
            raise UnreachableError(
                f"the other side has said nothing for {self._silence:g} s; is it still there?"
            ) from error
        except OSError as error:
            raise UnreachableError(f"the connection broke: {error}") from error
        except ValueError as error:
            raise ProtocolError(f"the other side said more than {_LINE_BYTES} bytes in one line") from error
        if not line:
            raise UnreachableError("the other side has closed the connection; its own output says why")
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProtocolError("the other side is no kvxfer doctor: what it says is not JSON") from error
        if not isinstance(item, dict):
            raise ProtocolError("the other side is no kvxfer doctor: what it says is not an object")
        return item  # pyright: ignore[reportUnknownVariableType]


# --- the side that listens


async def serve_peer(
    endpoint: Endpoint, device: str, folder: Path, say: Callable[[str], None], timeout: float
) -> AsyncGenerator[Finding, None]:
    """Listen, say the line to paste, and probe with the first that connects and knows its code.

    Raises:
        UsageError: If one cannot listen there.
        UnreachableError: If nobody came.
    """
    code, came = secrets.token_urlsafe(_CODE_BYTES), asyncio.Queue[tuple[Wire, asyncio.StreamWriter]]()

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, _CONNECT_SECONDS)
        try:
            known = secrets.compare_digest(str((await wire.hear()).get("code", "")).encode(), code.encode())
        except KvxferError:
            known = False
        if known:
            came.put_nowait((Wire(reader, writer), writer))
        else:
            writer.close()

    server = await _listening(endpoint, met)
    async with server, _removed(endpoint.path):
        port = server.sockets[0].getsockname()[1] if endpoint.scheme == "tcp" else 0
        at = Endpoint(endpoint.scheme, endpoint.path, endpoint.host, port)
        say(f"kvxfer doctor --peer {code}@{at}")
        try:
            async with asyncio.timeout(timeout):
                wire, writer = await came.get()
        except TimeoutError as error:
            raise UnreachableError(
                f"nobody connected to {at} within {timeout:g} s with the code of the line"
            ) from error
        try:
            server.close()  # one is enough
            async for finding in _probe(wire, writer, at, device, folder, first=False):
                yield finding
        finally:
            await _closed(writer)
            while not came.empty():
                came.get_nowait()[1].close()


@asynccontextmanager
async def _removed(path: str) -> AsyncGenerator[None, None]:
    """Remove a socket's file at the end; `asyncio` does so itself from Python 3.13 on."""
    try:
        yield
    finally:
        if path:
            await asyncio.to_thread(Path(path).unlink, missing_ok=True)


async def _listening(endpoint: Endpoint, met: Any) -> asyncio.Server:
    try:
        if endpoint.scheme == "tcp":
            return await asyncio.start_server(met, endpoint.host, endpoint.port, limit=_LINE_BYTES)
        before = os.umask(stat.S_IRWXG | stat.S_IRWXO)  # nobody else may connect
        try:
            return await asyncio.start_unix_server(met, endpoint.path, limit=_LINE_BYTES)
        finally:
            os.umask(before)
    except OSError as error:
        raise UsageError(f"--listen {endpoint}: one cannot listen there: {error}") from error


# --- the side that connects


async def check_peer(code: str, endpoint: Endpoint, device: str, folder: Path) -> AsyncGenerator[Finding, None]:
    """Connect to a listening side, and probe with it.

    Raises:
        UnreachableError: If nobody listens there, or the code is not that of its line.
    """
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            if endpoint.scheme == "tcp":
                reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=_LINE_BYTES)
            else:
                reader, writer = await asyncio.open_unix_connection(endpoint.path, limit=_LINE_BYTES)
    except (OSError, TimeoutError) as error:
        raise UnreachableError(
            f"nobody answers at {endpoint}: {str(error) or 'no answer'}; is `kvxfer doctor --listen` still running "
            "there, and does no firewall stand between?"
        ) from error
    try:
        wire = Wire(reader, writer)
        wire.send({"code": code})
        async for finding in _probe(wire, writer, endpoint, device, folder, first=True):
            yield finding
    finally:
        await _closed(writer)


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


# --- both


async def _probe(
    wire: Wire, writer: asyncio.StreamWriter, endpoint: Endpoint, device: str, folder: Path, *, first: bool
) -> AsyncGenerator[Finding, None]:
    mine: dict[str, Any] = {"versions": versions.versions(), "speaks": (WIRE_MIN, WIRE_VERSION), "device": device}
    mine |= {"host": here(), "wall": time.time()}
    asked = time.monotonic()
    wire.send(mine)
    theirs: dict[str, Any] = await wire.hear()
    for finding in compare(mine, theirs, slack=time.monotonic() - asked):
        yield finding
    if endpoint.scheme == "unix":
        listen = f"unix:{endpoint.path}.{'a' if first else 'b'}-{{route}}"
    else:
        host = str(writer.get_extra_info("sockname")[0])
        listen = f"{Endpoint('tcp', host=host)}"
    async for finding in Probe(wire, first, device, ("here", "peer"), listen, LaneLog(folder)).run():
        yield finding


def compare(mine: dict[str, Any], theirs: dict[str, Any], *, slack: float) -> list[Finding]:
    """What two sides say of themselves.

    Args:
        mine: Versions, those of the protocol, host, device, and wall clock of this one.
        theirs: Of the other one.
        slack: Seconds that its answer took, by which its clock is not known.
    """
    ours, others = dict(mine["versions"]), dict(theirs.get("versions", {}))
    differ = {name: (ours[name], others.get(name, "?")) for name in ours if ours[name] != others.get(name, "?")}
    shown = ", ".join(f"{name} {one} here and {other} there" for name, (one, other) in differ.items())
    advice = "install the same versions on both sides"
    (least, most), (other_least, other_most) = mine["speaks"], theirs.get("speaks", (0, -1))
    apart = least > other_most or other_least > most  # they know no version of the protocol in common
    if apart or theirs.get("device", "")[:3] != mine["device"][:3]:
        device = f"caches on {mine['device']} here and on {theirs.get('device')} there"
        found = [fail("peer", "; ".join(filter(None, [shown, device])), f"{advice}, and give both the same --device")]
    elif differ:
        found = [warn("peer", shown, advice)]
    else:
        found = [ok("peer", f"the same versions on both sides, caches on {mine['device']} and {theirs['device']}")]
    host = str(theirs.get("host", ""))
    reason = unlike(host)
    found.append(ok("host", f"memory cannot be mapped: {reason}" if reason else "the same host and PID namespace"))
    seconds = abs(mine["wall"] - float(theirs.get("wall", 0.0)))
    if elsewhere(host) and seconds - slack > _CLOCKS_APART_S:
        remedy = "run chrony or timesyncd on both; logs need it"
        found.append(warn("clocks", f"the wall clocks are {seconds:.1f} s apart", remedy))
    elif elsewhere(host):
        found.append(ok("clocks", f"the wall clocks agree within {seconds:.3f} s"))
    return found
