"""Runs the demo: starts both processes, shows what they report, and judges the result."""

import asyncio
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from rich.console import Console

from kvxfer.errors import KvxferError
from kvxfer.tools.bench.children import first_cause, interrupts_ignored, reap
from kvxfer.tools.demo.display import Display
from kvxfer.tools.demo.script import (
    Broken,
    Decoded,
    Fetched,
    News,
    Offered,
    Parent,
    Prefilled,
    Reference,
    Sabotage,
    Script,
)

__all__ = ["Verdict", "run"]

_TIMEOUT_SECONDS: Final = 300.0
_JOIN_SECONDS: Final = 30.0
Side = Literal["prefill", "decode"]


def run(script: Script, console: Console) -> bool:
    """Run the demo once; True if every check passed. The last line printed says what was seen.

    Nothing is left behind, whatever happens: neither a process nor a file.
    """
    devices = _devices(script.device)
    verdict = Verdict(script)
    with (
        tempfile.TemporaryDirectory(prefix="kvxfer-demo-") as folder,
        _running(script, devices, Path(folder)) as sides,
        Display(script, console) as display,
    ):
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not verdict.complete:
            if time.monotonic() >= deadline:
                verdict.timed_out = _TIMEOUT_SECONDS
                break
            for item in sides.news(timeout=1.0):
                if isinstance(item, Offered | Prefilled):
                    sides.tell("decode", item)
                verdict.take(item)
                display.show(item)
        if verdict.complete and not verdict.broken:
            for broken in sides.dismiss():
                verdict.take(broken)
    passed, line = verdict.judge()
    console.print(line, soft_wrap=True, highlight=False, markup=False)
    return passed


class Verdict:
    """What was seen of one run."""

    def __init__(self, script: Script) -> None:
        self.broken: list[Broken] = []
        self.timed_out = 0.0
        self._script = script
        self._fetched: dict[int, Fetched] = {}
        self._decoded: dict[int, Decoded] = {}
        self._references: dict[int, Reference] = {}

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come."""
        count = len(self._script.prompts)
        return bool(self.broken) or len(self._decoded) == len(self._references) == count

    def take(self, item: News) -> None:
        """One event of either side."""
        match item:
            case Fetched():
                self._fetched[item.prompt] = item
            case Decoded():
                self._decoded[item.prompt] = item
            case Reference():
                self._references[item.prompt] = item
            case Broken():
                self.broken.append(item)
            case _:
                pass

    def judge(self) -> tuple[bool, str]:
        """Whether everything is right, and the last line."""
        problems = [f"{broken.side}: {broken.error}" for broken in self.broken]
        if self.timed_out:
            problems.append(f"not complete after {self.timed_out:g} s")
        for prompt, decoded in sorted(self._decoded.items()):
            problems += self._differences(prompt, decoded)
        if not problems:
            problems += self._doubts()
        return (False, "FAILED: " + "; ".join(problems)) if problems else (True, self._summary())

    def _differences(self, prompt: int, decoded: Decoded) -> list[str]:
        """How one prompt differs from what one process alone makes of it."""
        problems: list[str] = []
        if decoded.difference:
            problems.append(f"prompt {prompt}: caches differ at {decoded.difference}")
        reference = self._references.get(prompt)
        if reference is not None and reference.tokens != decoded.tokens:
            alone, ours = reference.tokens, decoded.tokens
            at = next(i for i, (a, b) in enumerate(zip(alone, ours, strict=True)) if a != b)
            problems.append(f"prompt {prompt}: token {at} is {ours[at]}, alone it is {alone[at]}")
        return problems

    def _doubts(self) -> list[str]:
        """Why a run without a difference shows nothing all the same."""
        script, problems = self._script, list[str]()
        if script.sabotage is not Sabotage.NONE:
            touched = any(decoded.damaged for decoded in self._decoded.values())
            problems.append(f"sabotage {script.sabotage.value} {'was not noticed' if touched else 'touched nothing'}")
        nbytes = sum(fetched.stats.bytes for fetched in self._fetched.values())
        if nbytes != script.total_bytes:
            problems.append(f"{nbytes} bytes were fetched, but the caches have {script.total_bytes}")
        routes = {fetched.stats.route for fetched in self._fetched.values()}
        if script.route != "auto" and routes != {script.route}:
            problems.append(f"the route was {'+'.join(sorted(routes))}, not {script.route}")
        return problems

    def _summary(self) -> str:
        stats = [fetched.stats for fetched in self._fetched.values()]
        sent = [reference.stats for reference in self._references.values()]
        nbytes, wire = sum(s.bytes for s in stats), sum(s.wire for s in sent) or sum(s.wire for s in stats)
        tokens = sum(len(decoded.tokens) for decoded in self._decoded.values())
        routes = "+".join(sorted({s.route for s in stats}))
        digests = 2 * self._script.layers * len(stats)
        return (
            f"OK: {len(stats)} prompts, {tokens} tokens generated, identical to single-process generation; "
            f"{digests} digests of K and V equal; {nbytes / (1 << 20):.1f} MiB "
            f"in {sum(s.pieces for s in stats)} pieces by route {routes}, "
            f"{nbytes / max(wire, 1e-9) / 1e9:.2f} GB/s on the wire"
        )


class _Sides:
    """Both processes and the pipes to them."""

    def __init__(self) -> None:
        self._processes: dict[Side, SpawnProcess] = {}
        self._pipes: dict[Side, Connection] = {}

    def start(self, side: Side, script: Script, device: str, folder: Path) -> None:
        """Start one side."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = Pipe()
        self._pipes[side] = cast("Connection[Any, Any]", ours)  # type: ignore[redundant-cast]  # not on Windows
        process = context.Process(
            target=_side, args=(side, script, theirs, device, folder), name=f"kvxfer-demo-{side}", daemon=True
        )
        with theirs, interrupts_ignored():
            process.start()
        self._processes[side] = process

    def news(self, timeout: float) -> Iterator[News]:
        """What the sides have to say; waits for it at most `timeout` seconds."""
        ready = wait(list(self._pipes.values()), timeout)
        for side, pipe in self._pipes.items():
            if pipe not in ready:
                continue
            try:
                item: News = pipe.recv()
            except (EOFError, OSError):
                process = self._processes[side]
                process.join(_JOIN_SECONDS)
                item = Broken(side, f"the process ended early, with exit code {process.exitcode}")
            yield item

    def tell(self, side: Side, item: News | None) -> None:
        """Pass something on; if the side is gone, its pipe says so by itself."""
        with suppress(OSError):
            self._pipes[side].send(item)

    def dismiss(self) -> list[Broken]:
        """Let both sides close and end; those that could not."""
        for side in self._pipes:
            self.tell(side, None)
        for process in self._processes.values():
            process.join(_JOIN_SECONDS)
        codes = {side: process.exitcode for side, process in self._processes.items()}
        return [Broken(side, f"it did not close well, exit code {code}") for side, code in codes.items() if code != 0]

    def end(self) -> None:
        """End and reap what still runs: first asked, then killed."""
        reap(self._processes.values(), self._pipes.values(), _JOIN_SECONDS)


@contextmanager
def _running(script: Script, devices: dict[Side, str], folder: Path) -> Generator[_Sides, None, None]:
    """Both sides as processes; ended and reaped whatever happens."""
    sides = _Sides()
    try:
        for side, device in devices.items():
            sides.start(side, script, device, folder)
        yield sides
    finally:
        sides.end()


def _devices(device: str) -> dict[Side, str]:
    if device == "cpu":
        return {"prefill": "cpu", "decode": "cpu"}
    if not torch.cuda.is_available():
        raise KvxferError("--device cuda: there is no CUDA device here")
    return {"prefill": "cuda:0", "decode": f"cuda:{min(1, torch.cuda.device_count() - 1)}"}


def _side(side: Side, script: Script, pipe: Connection, device: str, folder: Path) -> None:
    """Entry point of both processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    logging.basicConfig(level=logging.ERROR)
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    parent = Parent(pipe)
    try:
        asyncio.run(_body(side, script, parent, device, folder))
    except BaseException as error:
        cause = first_cause(error)
        parent.send(Broken(side, f"{type(cause).__name__}: {cause}"))
        if isinstance(cause, KvxferError):  # its message says enough
            raise SystemExit(1) from None
        raise


async def _body(side: Side, script: Script, parent: Parent, device: str, folder: Path) -> None:
    if side == "prefill":
        from kvxfer.tools.demo.prefill import run as body
    else:
        from kvxfer.tools.demo.decode import run as body
    work = asyncio.ensure_future(body(script, parent, device, folder))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    parent.listen(work.cancel)
    try:
        await work
    except asyncio.CancelledError:  # by the parent, or because it is gone; the worker is closed by now
        os._exit(1)  # an orderly end would wait for the model's thread, which nothing can stop
