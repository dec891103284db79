"""What two processes of this machine do together: reach for each other's memory, make agents, probe every route."""

import asyncio
import secrets
import time
from collections.abc import Iterator

from kvxfer.config import Config
from kvxfer.errors import KvxferError
from kvxfer.tools.bench.children import Side
from kvxfer.tools.bench.device import index_of
from kvxfer.tools.doctor.findings import Finding, Status, fail, ok, skipped, words
from kvxfer.tools.doctor.lanes import LaneLog, complaints
from kvxfer.tools.doctor.machine import Machine, let_ucx_tell
from kvxfer.tools.doctor.probe import Probe
from kvxfer.tools.doctor.trial import trial
from kvxfer.worker import nixl_transport

__all__ = ["agent_remedy", "check_agent", "examine"]


async def examine(side: Side, names: tuple[str, str], *, first: bool) -> None:
    """Both processes do the same and find the same: the first one reports it."""
    machine = Machine()
    let_ucx_tell(side.folder)
    lanes = LaneLog(side.folder)
    async for finding in trial(side, side.device, owner=first):
        if first:
            side.report(finding)
    agents = await asyncio.to_thread(lambda: list(check_agent(side.device, lanes, machine)))
    failed = [finding for finding in agents if finding.status is Status.FAIL]
    side.send(failed)
    theirs: list[Finding] = await side.hear()
    if first:
        for finding in [*agents, *([] if failed else theirs)]:
            side.report(finding)
    if failed or theirs:
        if first:
            side.report(skipped("routes", "without a NIXL agent there are no transfers to probe"))
        return
    listen = f"unix:{side.folder / side.name}-{{route}}.sock"
    async for finding in Probe(side, first, side.device, names, listen, lanes).run():
        if first:
            side.report(finding)


def check_agent(device: str, lanes: LaneLog, machine: Machine) -> Iterator[Finding]:
    """Make a NIXL agent for real, with the settings in effect, and destroy it again. In one thread of its own."""
    fabric = Config.load().fabric
    began = time.perf_counter()
    try:
        transport = nixl_transport(f"kvxfer-doctor-{secrets.token_hex(8)}", fabric, index_of(device))
        transport.setup()
    except KvxferError as error:
        said = complaints(lanes.text)
        seen = words(error)
        remedy = agent_remedy(machine.environment.get("UCX_TLS", ""), gpu=machine.has_gpu_driver)
        yield fail("nixl agent", f"{seen}{'; UCX: ' + said if said else ''}", remedy)
        return
    try:
        plugins = transport.plugins()
    finally:
        transport.close()
    seconds = time.perf_counter() - began
    yield ok(
        "nixl agent",
        f"made with {', '.join(fabric.backends)} in {seconds:.2f} s; plugins: {', '.join(plugins)}",
        backends=list(fabric.backends),
        plugins=plugins,
        seconds=seconds,
    )


def agent_remedy(tls: str, *, gpu: bool) -> str:
    """What to do about an agent that cannot be made."""
    if gpu and tls and not tls.startswith("^") and "all" not in tls.split(",") and "cuda" not in tls:
        return (
            f"UCX_TLS={tls} names no CUDA lane, and on a machine with a GPU NIXL's UCX backend refuses that: set "
            f"UCX_TLS={tls},cuda_copy (and cuda_ipc, for NVLink), or unset it"
        )
    if tls:
        return f"unset UCX_TLS (it is {tls}) and try again; UCX_LOG_LEVEL=info says which lanes there are"
    return (
        "look at the versions above: NIXL's wheel must fit torch's CUDA (nixl-cu12 or nixl-cu13); check fabric.backends"
    )
