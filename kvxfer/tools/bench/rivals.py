"""`kvxfer bench rivals`: the same scattered work through what one would take instead.

The rivals' code is not part of the package: it stands in `benchmarks/rivals/` of the repository and the source archive,
a module a rival, each with the interface that `benchmarks/rivals/__init__.py` describes. Here their memory is made,
their calls are timed, and what they moved is checked, in the same way for all.

A rival moves pieces of one size from places drawn at random in a pool of the one process to other such places in a pool
of the other. What an engine does once (registering, listing all blocks) is not timed; what it does for every request
is. kvxfer does the same work by each of its routes, in caches whose pieces have that size.
"""

import importlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

import kvxfer
from kvxfer.errors import UsageError
from kvxfer.tools.bench.caches import SOURCE_POISON, TARGET_POISON, Cache, draw
from kvxfer.tools.bench.children import BenchFailedError, Side, Step, collect
from kvxfer.tools.bench.device import Kind, available_bytes, empty, lacking, sides
from kvxfer.tools.bench.layouts import DIM, ITEM_BYTES, KIB, MIB, plain
from kvxfer.tools.bench.matrix import Matrix, routes
from kvxfer.tools.bench.report import Report
from kvxfer.tools.bench.samples import Samples, measured
from kvxfer.tools.shown import size

__all__ = ["Rivals", "find"]

PIECES: Final = (8 * KIB, 32 * KIB, 2 * MIB)
_ROW: Final = DIM * ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Rivals:
    """What to measure."""

    device: Kind
    folder: Path  # with the rivals' code
    pieces: tuple[int, ...] = PIECES
    size: int = 512 * MIB  # of the whole
    routes: tuple[str, ...] = field(default_factory=routes)  # of kvxfer, beside them
    only: tuple[str, ...] = ()  # names of rivals; empty for all
    repetitions: int = 5
    seconds: float = 30.0  # when one piece size of a rival has taken so long, it is not repeated further

    def run(self, on_step: Callable[[str, int, int], None]) -> Report:
        """Measure kvxfer, then one rival after the other, each in processes of its own.

        Raises:
            BenchFailedError: If a process failed.
            UsageError: If a rival is named that does not exist.
        """
        modules = _load(self.folder)
        names = [variant for module in modules.values() for variant in module.VARIANTS]
        if unknown := sorted(set(self.only) - set(names)):
            raise UsageError(f"--only {unknown[0]}: the rivals are {', '.join(names)}")
        done, total = 0, (len(self.routes) + len(self.only or names)) * len(self.pieces)
        on_step("kvxfer", 0, total)
        ours = Matrix(
            self.device,
            routes=self.routes,
            layouts=tuple(map(plain, self.pieces)),
            sizes=(self.size,),
            repetitions=self.repetitions,
            cell_seconds=self.seconds,
        ).run(lambda label, cells, _: on_step(label, cells, total))
        done = len(self.routes) * len(self.pieces)
        found: list[dict[str, Any]] = []
        skipped: list[dict[str, str]] = []
        for name, module in modules.items():
            for variant in module.VARIANTS:
                if self.only and variant not in self.only:
                    continue
                on_step(variant, done, total)
                if reason := module.missing(variant, self.device) or self._lacks_memory():
                    skipped.append({"rival": variant, "reason": reason})
                else:
                    found += self._measure(_Task(self, name, variant))
                done += len(self.pieces)
        return _report(ours.data, found, skipped)

    def _measure(self, task: "_Task") -> list[dict[str, Any]]:
        bodies = {"prefill": _source, "decode": _sink}
        try:
            return collect(bodies, task, len(self.pieces), lambda label, done, total: None, devices=sides(self.device))
        except BenchFailedError as error:
            raise BenchFailedError(f"{task.variant}: {error}") from error

    def _lacks_memory(self) -> str:
        return lacking(4 * self.size, available_bytes(sides(self.device)["prefill"]))


def find(given: Path | None) -> Path:
    """The folder with the rivals' code.

    Raises:
        UsageError: If it is not there, with how to get it.
    """
    folder = (given or Path(kvxfer.__file__).parents[1] / "benchmarks" / "rivals").resolve()
    if not (folder / "__init__.py").is_file():
        raise UsageError(
            f"{folder} does not hold the rivals' code, which is not part of the installed package: take the folder "
            f"benchmarks/rivals of the repository or of the source archive kvxfer-{kvxfer.__version__}.tar.gz, and "
            "name it by --rivals-dir"
        )
    return folder


@dataclass(frozen=True, slots=True)
class _Task:
    """One rival, for its processes."""

    spec: Rivals
    module: str
    variant: str

    def load(self) -> ModuleType:
        """Its module, in this process."""
        return _load(self.spec.folder)[self.module]


def _load(folder: Path) -> dict[str, ModuleType]:
    """The rivals' modules by name, in the order in which the package lists them."""
    if (place := str(folder.parent)) not in sys.path:
        sys.path.insert(0, place)
    names: Sequence[str] = importlib.import_module(folder.name).MODULES
    return {name: importlib.import_module(f"{folder.name}.{name}") for name in names}


# --- in a rival's processes


@dataclass(frozen=True, slots=True)
class _Work:
    """One repetition: what a request is, and where its pieces lie on both sides."""

    seed: int
    count: int
    pool: int

    @property
    def ids(self) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
        """Numbers of the pieces at the source and at the sink."""
        sources, sinks = (np.array(draw(self.seed, self.pool, self.count, source=at).ids) for at in (True, False))
        return sources, sinks


def _pool(piece: int, count: int, device: str, *, source: bool) -> Cache:
    """A pool of pieces as a cache of one layer, whose blocks are the pieces."""
    tensor = empty([count, 1, piece // _ROW, DIM], device)
    poison = SOURCE_POISON if source else TARGET_POISON
    return Cache([tensor], "block token head dim", range(piece // _ROW), poison)


async def _source(side: Side, task: _Task) -> None:
    """Lead: each piece size, and of each all repetitions."""
    spec, module = task.spec, task.load()
    for piece in spec.pieces:
        side.report(Step(f"{task.variant}, {piece} bytes"))
        count = max(1, spec.size // piece)
        pool = count + max(1, count // 2)
        source = _pool(piece, pool, side.device, source=True)
        side.send((piece, pool))
        rival = module.Rival(task.variant, side, _flat(source), None, piece)
        took: list[float] = []
        difference, until = "", time.monotonic() + spec.seconds
        for number in range(spec.repetitions + 1):
            work = _Work(random.SystemRandom().getrandbits(62), count, pool)
            source.write(draw(work.seed, pool, count, source=True))
            seconds, differs = _turn(side, rival, work)
            difference = difference or differs
            if number:
                took.append(seconds)
                if time.monotonic() >= until:
                    break
        side.send(None)
        rival.close()
        side.report(_row(task, piece, count, Samples(took, 1), difference))
        del rival, source
    side.send(None)


def _turn(side: Side, rival: Any, work: _Work) -> tuple[float, str]:
    """One repetition: seconds, and what is wrong with the sink."""
    side.send(work)
    side.receive()  # the sink has poisoned its pool
    sources, sinks = work.ids
    side.send("go")
    seconds = measured(lambda: rival.move(sources, sinks))
    side.send("done")
    theirs, difference = side.receive()
    return (seconds if theirs is None else theirs), difference


async def _sink(side: Side, task: _Task) -> None:
    """Follow: a pool for each piece size, and a check of each repetition."""
    module = task.load()
    while (sizes := side.receive()) is not None:
        piece, pool = sizes
        sink = _pool(piece, pool, side.device, source=False)
        rival = module.Rival(task.variant, side, None, _flat(sink), piece)
        while (work := side.receive()) is not None:
            sink.scrub()
            sources, sinks = work.ids
            side.send("ready")
            side.receive()  # "go"
            # which ends when the other side is done, or when everything has arrived
            seconds = measured(lambda: rival.serve(sources, sinks))  # noqa: B023 - called at once
            side.receive()  # "done"
            request = draw(work.seed, pool, work.count, source=False)
            side.send((seconds if rival.TIMED == "sink" else None, sink.difference(request)))
        rival.close()
        del rival, sink


def _flat(cache: Cache) -> Any:
    """A pool as rivals take it: int64 words, one row a piece."""
    import torch

    tensor = cache.tensors[0]
    return tensor.view(torch.int64).view(tensor.shape[0], -1)


# --- the end


def _row(task: _Task, piece: int, count: int, samples: Samples, difference: str) -> dict[str, Any]:
    return {
        "rival": task.variant,
        "device": task.spec.device,
        "piece_bytes": piece,
        "request_bytes": piece * count,
        "gbps": samples.gbps(piece * count),
        "verified": not difference,
        "difference": difference,
        **samples.to_json(),
    }


def _report(ours: dict[str, Any], found: list[dict[str, Any]], skipped: list[dict[str, str]]) -> Report:
    cells: list[dict[str, Any]] = [{"rival": f"kvxfer {cell['route']}", **cell} for cell in ours["cells"]] + found
    best = {
        piece: max((one["gbps"] for one in found if one["piece_bytes"] == piece), default=None)
        for piece in {one["piece_bytes"] for one in cells}
    }
    for one in cells:
        fastest = best[one["piece_bytes"]]
        one["times_best_rival"] = one["gbps"] / fastest if fastest else None
    pieces = sorted({one["piece_bytes"] for one in cells})
    names = list(dict.fromkeys(one["rival"] for one in cells))
    at = {(one["rival"], one["piece_bytes"]): one for one in cells}
    rows = [[name, *(_shown(at.get((name, piece))) for piece in pieces)] for name in names]
    nbytes = max((one["request_bytes"] for one in cells), default=0)
    notes = ["in brackets: times the fastest rival at this piece size; kvxfer is the whole `await fetch`"]
    notes += [f"skipped: {one['rival']}: {one['reason']}" for one in skipped]
    notes += [f"skipped: kvxfer {one['cell']}: {one['reason']}" for one in ours["skipped"]]
    title = f"{size(nbytes)} in scattered pieces, GB/s, median"
    headings = ["", *(plain(piece).name for piece in pieces)]
    wrong = [f"{one['rival']}, {one['piece_bytes']} bytes: {one['difference']}" for one in cells if one["difference"]]
    data = {"cells": cells, "skipped": skipped, "skipped_cells": ours["skipped"], "noise": ours["noise"]}
    return Report(data, title, headings, rows, notes, wrong)


def _shown(one: dict[str, Any] | None) -> str:
    if one is None:
        return "-"
    times = "" if one["times_best_rival"] is None else f" ({one['times_best_rival']:.2g})"
    return f"{one['gbps']:.2f}{times}" + ("" if one["verified"] else " WRONG")
