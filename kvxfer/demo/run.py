"""Runs the demo: starts both processes, shows what they report, and judges the result."""

import asyncio
import logging
import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Final, Literal

import torch
from rich.console import Console

from kvxfer.demo.display import Display
from kvxfer.demo.script import Broken, Decoded, Fetched, News, Offered, Parent, Prefilled, Reference, Script
from kvxfer.errors import KvxferError

__all__ = ["run"]

_TIMEOUT_SECONDS: Final = 300.0
_JOIN_SECONDS: Final = 30.0
Side = Literal["prefill", "decode"]


def run(script: Script, console: Console) -> bool:
    """Run the demo once; True if every check passed. The last line printed says what was seen."""
    news = _Verdict(script)
    with _processes(script) as pipes, Display(script, console) as display:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        talking = dict(pipes)
        while not news.complete and time.monotonic() < deadline:
            speaking = wait(list(talking.values()), timeout=1.0)
            for side in [side for side, pipe in talking.items() if pipe in speaking]:
                try:
                    item: News = talking[side].recv()
                except EOFError:
                    del talking[side]
                    if news.has_all_of(side):
                        continue
                    item = Broken(side, "the process ended early")
                if isinstance(item, Offered | Prefilled):
                    pipes["decode"].send(item)
                news.take(item)
                display.show(item)
        if news.complete and not news.broken:
            pipes["decode"].send(None)
    passed, line = news.judge()
    console.print(line, soft_wrap=True, highlight=False)
    return passed


class _Verdict:
    """Collects what both sides report, and judges it."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._fetched: dict[int, Fetched] = {}
        self._decoded: dict[int, Decoded] = {}
        self._references: dict[int, Reference] = {}
        self.broken: list[Broken] = []

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come."""
        count = len(self._script.prompts)
        return bool(self.broken) or (len(self._decoded) == count and len(self._references) == count)

    def has_all_of(self, side: Side) -> bool:
        """Whether a side has reported everything that is expected of it."""
        reported = self._references if side == "prefill" else self._decoded
        return len(reported) == len(self._script.prompts)

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
        if not self.complete:
            problems.append(f"not complete after {_TIMEOUT_SECONDS:g} s")
        for prompt, decoded in sorted(self._decoded.items()):
            if decoded.difference:
                problems.append(f"prompt {prompt}: caches differ at {decoded.difference}")
            reference = self._references.get(prompt)
            if reference is not None and reference.tokens != decoded.tokens:
                alone, ours = reference.tokens, decoded.tokens
                at = next(i for i, (a, b) in enumerate(zip(alone, ours, strict=True)) if a != b)
                problems.append(f"prompt {prompt}: token {at} is {ours[at]}, alone it is {alone[at]}")
        if problems:
            return False, "FAILED: " + "; ".join(problems)
        return True, self._summary()

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


@contextmanager
def _processes(script: Script) -> Iterator[dict[Side, Connection]]:
    """Both sides as processes; ended and reaped whatever happens."""
    devices = _devices(script.device)
    context = multiprocessing.get_context("spawn")
    pipes: dict[Side, Connection] = {}
    processes: list[SpawnProcess] = []
    sides: tuple[Side, ...] = ("prefill", "decode")
    try:
        for side in sides:
            ours, theirs = context.Pipe()
            process = context.Process(target=_side, args=(side, script, theirs, devices[side]), daemon=True)
            process.start()
            theirs.close()
            pipes[side] = ours
            processes.append(process)
        yield pipes
        for process in processes:
            process.join(_JOIN_SECONDS)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join(_JOIN_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in pipes.values():
            pipe.close()


def _devices(device: str) -> dict[Side, str]:
    if device == "cpu":
        return {"prefill": "cpu", "decode": "cpu"}
    if not torch.cuda.is_available():
        raise KvxferError("--device cuda: there is no CUDA device here")
    return {"prefill": "cuda:0", "decode": f"cuda:{min(1, torch.cuda.device_count() - 1)}"}


def _side(side: Side, script: Script, parent: Connection, device: str) -> None:
    """Entry point of both processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    logging.basicConfig(level=logging.ERROR)
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    try:
        if side == "prefill":
            from kvxfer.demo.prefill import run as body
        else:
            from kvxfer.demo.decode import run as body
        asyncio.run(body(script, Parent(parent), device))
    except BaseException as error:
        parent.send(Broken(side, f"{type(error).__name__}: {error}"))
        raise
