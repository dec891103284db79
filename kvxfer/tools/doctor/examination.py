"""All checks in their order, and what comes of them."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from kvxfer.errors import KvxferError, UsageError
from kvxfer.names import Endpoint
from kvxfer.tools.bench.children import BenchFailedError, Side, conduct
from kvxfer.tools.doctor import gpus, limits, software
from kvxfer.tools.doctor.findings import Check, Finding, Status, fail, said, words
from kvxfer.tools.doctor.machine import Machine, let_ucx_tell

__all__ = ["Examination", "check_pair", "listening", "pasted"]

_SILENCE: Final = 90.0
"""Seconds without any finding after which the two are given up. The first kernels may have to be compiled meanwhile."""


@dataclass
class Examination:
    """One run of the doctor."""

    report: Callable[[Finding], None]  # hears each finding as it comes
    machine: Machine = field(default_factory=Machine)
    device: str = "auto"  # where caches of probes lie
    found: list[Finding] = field(default_factory=list[Finding])

    @property
    def exit_code(self) -> int:
        """1 if something fails, else 0."""
        return int(any(finding.status is Status.FAIL for finding in self.found))

    def to_json(self) -> dict[str, Any]:
        """What was found, as plain data."""
        count = {status.value: sum(one.status is status for one in self.found) for status in Status}
        return {"ok": not self.exit_code, "count": count, "findings": [asdict(one) for one in self.found]}

    def local(self) -> None:
        """Everything that this machine tells by itself."""
        devices = self._devices(self._look())
        if self._usable:
            check_pair(devices, self._add)

    def peer(self, address: str) -> None:
        """What can be seen from here, and a probe with a side that listens."""
        code, endpoint = pasted(address)
        self._with_peer(lambda remote, device, folder: remote.check_peer(code, endpoint, device, folder))

    def listen(self, address: str, say: Callable[[str], None], timeout: float) -> None:
        """What can be seen from here, and a probe with the first that connects."""
        endpoint = listening(address)
        self._with_peer(lambda remote, device, folder: remote.serve_peer(endpoint, device, folder, say, timeout))

    def _add(self, finding: Finding) -> None:
        self.found.append(finding)
        self.report(finding)

    def _check(self, name: str, check: Check) -> None:
        for finding in said(name, check):
            self._add(finding)

    def _look(self) -> list[gpus.Gpu]:
        """The checks that need one process, and no NIXL."""
        machine = self.machine
        for name, check in (
            ("python", software.check_python),
            ("torch", lambda: software.check_torch(machine)),
            ("nixl", lambda: software.check_transport(machine)),
            ("gpu extras", lambda: software.check_extras(machine)),
            ("compiled code", software.check_compiled),
            ("settings", lambda: software.check_settings(machine)),
            ("locked memory", lambda: limits.check_locked(machine)),
            ("open files", lambda: limits.check_files(machine)),
            ("shared files", lambda: limits.check_shared(machine)),
            ("ptrace scope", lambda: limits.check_tracing(machine)),
            ("rdma", lambda: limits.check_network(machine)),
            ("wall clock", limits.check_clock),
        ):
            self._check(name, check)
        expected = machine.has_gpu_driver
        there: list[gpus.Gpu] = []

        def looked() -> list[Finding]:
            there.extend(gpus.look() if expected else [])
            return list(gpus.check_gpus(there, expected=expected))

        self._check("gpus", looked)
        self._check("peer access", lambda: gpus.check_peers(there))
        self._check("nvlink", lambda: gpus.check_links(there))
        if there:
            self._check("allocator", lambda: gpus.check_allocator(machine.environment))
        return there

    def _devices(self, there: list[gpus.Gpu]) -> tuple[str, str]:
        """Of the two sides of a probe: two GPUs where there are two."""
        if self.device == "cuda" and not there:
            raise UsageError("--device cuda: CUDA shows no GPU here")
        if self.device == "cpu" or not there:
            return "cpu", "cpu"
        return "cuda:0", f"cuda:{min(1, len(there) - 1)}"

    @property
    def _usable(self) -> bool:
        """Whether it is worth starting anything: what could not even be imported was named."""
        needed = {"torch", "nixl", "settings"}
        return not any(one.name in needed and one.status is Status.FAIL for one in self.found)

    def _with_peer(self, begin: Callable[[Any, str, Path], AsyncGenerator[Finding, None]]) -> None:
        with tempfile.TemporaryDirectory(prefix="kvxfer-doctor-") as folder:
            let_ucx_tell(Path(folder))  # UCX reads it when it is loaded, which the look at its version does
            device = self._devices(self._look())[0]
            if self._usable:
                from kvxfer.tools.doctor import remote  # which loads torch

                self._run(begin(remote, device, Path(folder)))

    def _run(self, findings: AsyncGenerator[Finding, None]) -> None:
        async def run() -> None:
            async with aclosing(findings):
                async for finding in findings:
                    self._add(finding)

        try:
            asyncio.run(run())
        except UsageError:
            raise
        except KvxferError as error:
            self._add(fail("peer", words(error), "look at what the other side says, and try again"))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            seen = f"the other side says what this one does not understand: {type(error).__name__}: {error}"
            self._add(fail("peer", seen, "install the same version of kvxfer on both sides"))


# --- two processes here


def check_pair(devices: tuple[str, str], report: Callable[[Finding], None]) -> None:
    """Try everything between two processes."""

    def show(item: object) -> None:
        if isinstance(item, Finding):
            report(item)

    one, other = devices
    names = (f"{one} (a)", f"{other} (b)") if one == other else devices
    bodies, where = {"first": _examine, "second": _examine}, {"first": one, "second": other}
    try:
        conduct(bodies, names, show, devices=where, silence=_SILENCE)
    except (BenchFailedError, OSError) as error:  # the latter: no process could be started, or no folder made
        report(
            fail(
                "two processes",
                f"the checks between two processes did not come to their end: {error}",
                "what would follow was not looked at; NIXL_LOG_LEVEL=INFO lets the layers below say more",
            )
        )


async def _examine(side: Side, names: tuple[str, str]) -> None:
    from kvxfer.tools.doctor.pair import examine  # this process would load torch only to start others that do so

    first = side.name == "first"
    await examine(side, names if first else (names[1], names[0]), first=first)


# --- two hosts


def listening(text: str) -> Endpoint:
    """What `--listen` names.

    Raises:
        UsageError: If it is no address, or none at which the other side reaches this one.
    """
    endpoint = _parsed(text, "--listen")
    if endpoint.anywhere:
        raise UsageError(
            f"--listen {text}: name the address at which the other side reaches this host, not all of them"
        )
    return endpoint


def pasted(text: str) -> tuple[str, Endpoint]:
    """What `--peer` names, `CODE@tcp:HOST:PORT`: the code, and where to connect.

    Raises:
        UsageError: If it is something else.
    """
    code, _, address = text.rpartition("@")
    if not code:
        raise UsageError(f"--peer {text}: paste what the listening side has printed, CODE@tcp:HOST:PORT")
    return code, _parsed(address, "--peer")


def _parsed(text: str, option: str) -> Endpoint:
    try:
        endpoint = Endpoint.parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from error
    if endpoint.scheme == "unix" and not endpoint.path:
        raise UsageError(f"{option} {text}: give a path that both sides see, as in unix:/run/kvxfer-doctor.sock")
    return endpoint
