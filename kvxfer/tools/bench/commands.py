"""The sub-commands of `kvxfer bench`. What is heavy is imported inside the one that needs it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer

__all__ = ["app"]

app: Final = typer.Typer(
    help="Measure transfers, each beside a reference of the same run. Every byte is verified outside the timed span.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_IN_PROCESS: Final = ("staged", "direct")

Device: TypeAlias = Annotated[str, typer.Option(help="cuda (GPUs 0 and 1, or 0 twice), cpu, or auto.")]
Json: TypeAlias = Annotated[Path | None, typer.Option("--json", help="File to write the results to.")]
Routes: TypeAlias = Annotated[str | None, typer.Option(help="Some of them: staged,direct.")]
Uvloop: TypeAlias = Annotated[bool, typer.Option("--uvloop", help="Run both event loops on uvloop.")]
Beside: TypeAlias = Annotated[
    str, typer.Option(help="In a thread of each process meanwhile: python (spins) or engine (as decode steps do).")
]
Quick: TypeAlias = Annotated[bool, typer.Option("--quick", help="Small sizes: less than a minute on a CPU.")]


def _perform(
    name: str, make: Callable[..., Any], device: str, json_file: Path | None, small: dict[str, Any], **asked: Any
) -> None:
    """Make a benchmark of what was asked for, None left out, or of what makes it small, and run it to its end."""
    from kvxfer.tools.bench.children import BenchFailedError
    from kvxfer.tools.bench.device import choose
    from kvxfer.tools.bench.machine import describe
    from kvxfer.tools.bench.report import check, finish, progress

    check(json_file)
    spec = make(choose(device), **small | {key: value for key, value in asked.items() if value is not None})
    head = describe(spec)
    try:
        with progress(name) as step:
            report = spec.run(step)
    except BenchFailedError as error:
        sys.stderr.write(f"kvxfer bench {name}: {error}\n")
        raise typer.Exit(1) from None
    if code := finish(name, head, report, json_file):
        raise typer.Exit(code)


def _size(option: str, text: str) -> int:
    from kvxfer.config import parse_size
    from kvxfer.errors import UsageError

    try:
        return int(str(parse_size(text)))
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from error


def _sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    return tuple(_size(option, one) for one in text.split(",")) if text else None


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    from kvxfer.errors import UsageError

    if not text:
        return None
    try:
        numbers = tuple(int(one) for one in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text}: whole numbers separated by commas") from error
    if min(numbers) < 1:
        raise UsageError(f"{option} {text}: numbers from 1 on")
    return numbers


@app.command()
def matrix(
    device: Device = "auto",
    routes: Routes = None,
    sizes: Annotated[str | None, typer.Option(help="Of requests: 2MiB,512MiB.")] = None,
    pieces: Annotated[
        str | None, typer.Option(help="512,8KiB,...: layouts with pieces of this size; head-split; nhd-hnd.")
    ] = None,
    ctas: Annotated[str | None, typer.Option(help="Thread blocks of a copy on a GPU: 24,132.")] = None,
    repetitions: Annotated[int | None, typer.Option(help="Of each cell, after two to warm up. Default 5.")] = None,
    cell_seconds: Annotated[
        float | None, typer.Option(help="No further repetition of a cell once it has taken so long.")
    ] = None,
    uvloop: Uvloop = False,
    beside: Beside = "",
    sabotage: Annotated[str, typer.Option(help="Damage what was received to see the check fail: byte, outside.")] = "",
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """Routes x pieces x request sizes between two processes: the whole `await fetch` beside one contiguous copy."""
    from kvxfer.tools.bench.layouts import parse_layout
    from kvxfer.tools.bench.matrix import Matrix, known_routes
    from kvxfer.tools.bench.victims import known_victim

    small = {
        "layouts": tuple(map(parse_layout, ("8KiB", "nhd-hnd"))),
        "sizes": (2 << 20, 16 << 20),
        "repetitions": 3,
        "cell_seconds": 1.0,
    }
    _perform(
        "matrix",
        Matrix,
        device,
        json_file,
        small if quick else {},
        routes=known_routes(routes),
        sizes=_sizes("--sizes", sizes),
        layouts=tuple(map(parse_layout, pieces.split(","))) if pieces else None,
        ctas=_numbers("--ctas", ctas),
        repetitions=repetitions,
        cell_seconds=cell_seconds,
        uvloop=uvloop,
        beside=known_victim(beside),
        sabotage=sabotage,
    )


@app.command()
def latency(
    device: Device = "auto",
    routes: Routes = None,
    fetches: Annotated[int | None, typer.Option(min=1, max=4000, help="Of each kind. Default 1000.")] = None,
    uvloop: Uvloop = False,
    beside: Beside = "",
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """One block of 64 KiB or 2 MiB at a time, warm: percentiles of the fetch, and CPU time of both event loops."""
    from kvxfer.tools.bench.latency import Latency
    from kvxfer.tools.bench.matrix import known_routes
    from kvxfer.tools.bench.victims import known_victim

    _perform(
        "latency",
        Latency,
        device,
        json_file,
        {"fetches": 30} if quick else {},
        routes=known_routes(routes),
        fetches=fetches,
        uvloop=uvloop,
        beside=known_victim(beside),
    )


@app.command()
def load(
    device: Device = "auto",
    routes: Routes = None,
    concurrency: Annotated[str | None, typer.Option(help="Fetches at once: 64,128,256,512.")] = None,
    sizes: Annotated[str | None, typer.Option(help="Of fetches: 64KiB,1MiB,16MiB,64MiB.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Of each run. Default 10.")] = None,
    uvloop: Uvloop = False,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """Many fetches at once, of very different sizes: fetches a second, percentiles, and how late the loops run."""
    from kvxfer.tools.bench.load import Load
    from kvxfer.tools.bench.matrix import known_routes

    _perform(
        "load",
        Load,
        device,
        json_file,
        {"concurrency": (64,), "sizes": (64 << 10, 1 << 20), "seconds": 1.0} if quick else {},
        routes=known_routes(routes),
        concurrency=_numbers("--concurrency", concurrency),
        sizes=_sizes("--sizes", sizes),
        seconds=seconds,
        uvloop=uvloop,
    )


@app.command()
def rivals(
    device: Device = "auto",
    pieces: Annotated[str | None, typer.Option(help="Sizes of pieces: 8KiB,32KiB,2MiB.")] = None,
    size: Annotated[str | None, typer.Option(help="Of the whole. Default 512MiB.")] = None,
    routes: Routes = None,
    only: Annotated[list[str] | None, typer.Option(help="A rival, by its name; may be given several times.")] = None,
    rivals_dir: Annotated[Path | None, typer.Option(help="Folder with the rivals' code.")] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="Of each, after one to warm up. Default 5.")] = None,
    sabotage: Annotated[str, typer.Option(help="Damage what was received to see the check fail: byte, outside.")] = "",
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """The same scattered work through NIXL piece by piece, Mooncake, NCCL and plain torch, beside kvxfer's routes."""
    from kvxfer.tools.bench.matrix import known_routes
    from kvxfer.tools.bench.rivals import Rivals, find

    _perform(
        "rivals",
        Rivals,
        device,
        json_file,
        {"pieces": (8 << 10,), "size": 16 << 20, "repetitions": 3} if quick else {},
        folder=find(rivals_dir),
        pieces=_sizes("--pieces", pieces),
        size=_size("--size", size) if size else None,
        routes=known_routes(routes),
        only=tuple(only or ()),
        repetitions=repetitions,
        sabotage=sabotage,
    )


@app.command()
def interference(
    device: Device = "auto",
    routes: Routes = None,
    ctas: Annotated[str | None, typer.Option(help="Thread blocks of a copy on a GPU. Default 8 to 132.")] = None,
    size: Annotated[str | None, typer.Option(help="Of each transfer. Default 512MiB, on a CPU 32MiB.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.01, help="For each speed that is taken. Default 2.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Without and with transfers. Default 3.")] = None,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """How much slower matrix multiplications, or a busy Python thread, get while transfers run beside them."""
    from kvxfer.tools.bench.interference import Interference
    from kvxfer.tools.bench.matrix import known_routes

    _perform(
        "interference",
        Interference,
        device,
        json_file,
        {"seconds": 0.2, "turns": 2} if quick else {},
        routes=known_routes(routes or ("mapped,staged" if quick else None)),
        ctas=_numbers("--ctas", ctas),
        request_bytes=_size("--size", size) if size else None,
        seconds=seconds,
        turns=turns,
    )


@app.command()
def scale(
    peers: Annotated[str | None, typer.Option(help="How many. Default 1,10,100,1000.")] = None,
    route: Annotated[str, typer.Option(help="staged or direct.")] = "staged",
    transfers: Annotated[int | None, typer.Option(min=1, help="Warm ones at each number. Default 1000.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of the cache, a tensor each. Default 4.")] = None,
    nixl: Annotated[bool, typer.Option("--nixl", help="NIXL in place of the in-process transport: few peers.")] = False,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """What peers cost, from 1 to 1,000: memory, handshake, CPU of the loops, control frames and bytes of a transfer."""
    from kvxfer.errors import UsageError
    from kvxfer.tools.bench.scale import Scale

    if route not in _IN_PROCESS:
        raise UsageError(f"--route {route}: the in-process transport can do {' and '.join(_IN_PROCESS)}")
    _perform(
        "scale",
        Scale,
        "cpu",
        json_file,
        {"peers": (1, 10), "transfers": 100, "idle_seconds": 0.5} if quick else {},
        peers=_numbers("--peers", peers),
        route=route,
        transfers=transfers,
        layers=layers,
        nixl=nixl,
    )
