"""The sub-commands of `kvxfer bench`. What is heavy is imported inside the one that needs it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeAlias

import typer

if TYPE_CHECKING:
    from kvxfer.tools.bench.device import Kind
    from kvxfer.tools.bench.report import Report

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


class _Benchmark(Protocol):
    """What every benchmark offers."""

    def run(self, head: dict[str, Any], on_step: Callable[[str, int, int], None]) -> "Report":
        """Measure; tells what it does, how many steps are done, and of how many.

        Raises:
            BenchFailedError: If a process failed.
        """
        ...


def _perform(
    name: str, device: str, json_file: Path | None, arguments: dict[str, Any], make: "Callable[[Kind], _Benchmark]"
) -> None:
    """Run a benchmark to its end, whatever that is."""
    from kvxfer.tools.bench.children import BenchFailedError
    from kvxfer.tools.bench.device import choose
    from kvxfer.tools.bench.machine import describe
    from kvxfer.tools.bench.report import check, finish, progress

    check(json_file)
    kind = choose(device)
    try:
        with progress(name) as step:
            report = make(kind).run(describe(kind, arguments), step)
    except BenchFailedError as error:
        sys.stderr.write(f"kvxfer bench {name}: {error}\n")
        raise typer.Exit(1) from None
    if code := finish(report, json_file):
        raise typer.Exit(code)


def _sizes(option: str, text: str) -> tuple[int, ...]:
    from kvxfer.config import parse_size
    from kvxfer.errors import UsageError

    try:
        return tuple(int(str(parse_size(one))) for one in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from error


def _numbers(option: str, text: str) -> tuple[int, ...]:
    from kvxfer.errors import UsageError

    try:
        numbers = tuple(int(one) for one in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text}: whole numbers separated by commas") from error
    if min(numbers) < 1:
        raise UsageError(f"{option} {text}: numbers from 1 on")
    return numbers


def _given(**arguments: Any) -> dict[str, Any]:
    """Only what was asked for."""
    return {name: value for name, value in arguments.items() if value is not None}


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
    from kvxfer.tools.bench.matrix import quick as quick_matrix
    from kvxfer.tools.bench.victims import known_victim

    asked = _given(
        routes=known_routes(routes),
        sizes=_sizes("--sizes", sizes) if sizes else None,
        layouts=tuple(parse_layout(one) for one in pieces.split(",")) if pieces else None,
        ctas=_numbers("--ctas", ctas) if ctas else None,
        repetitions=repetitions,
        cell_seconds=cell_seconds,
        uvloop=uvloop,
        beside=known_victim(beside) or None,
        sabotage=sabotage or None,
    )
    arguments = _given(routes=routes, sizes=sizes, pieces=pieces, ctas=ctas, repetitions=repetitions, quick=quick)
    arguments |= _given(uvloop=uvloop, beside=beside or None)
    make = quick_matrix if quick else Matrix
    _perform("matrix", device, json_file, arguments, lambda kind: make(kind, **asked))


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

    count = fetches or (30 if quick else 1000)
    victim = known_victim(beside)
    arguments = _given(routes=routes, fetches=count, uvloop=uvloop, beside=victim or None, quick=quick)
    _perform(
        "latency", device, json_file, arguments, lambda kind: Latency(kind, known_routes(routes), count, uvloop, victim)
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

    small: dict[str, Any] = {"concurrency": (64,), "sizes": (64 << 10, 1 << 20), "seconds": 1.0} if quick else {}
    asked = _given(
        concurrency=_numbers("--concurrency", concurrency) if concurrency else None,
        sizes=_sizes("--sizes", sizes) if sizes else None,
        seconds=seconds,
    )
    arguments = {**small, **asked, **_given(routes=routes, uvloop=uvloop, quick=quick)}
    _perform(
        "load",
        device,
        json_file,
        arguments,
        lambda kind: Load(kind, known_routes(routes), uvloop=uvloop, **(small | asked)),
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

    small: dict[str, Any] = {"pieces": (8 << 10,), "size": 16 << 20, "repetitions": 3} if quick else {}
    asked = _given(
        pieces=_sizes("--pieces", pieces) if pieces else None,
        size=_sizes("--size", size)[0] if size else None,
        only=tuple(only) if only else None,
        repetitions=repetitions,
        sabotage=sabotage or None,
    )
    folder, chosen = find(rivals_dir), known_routes(routes)
    _perform(
        "rivals",
        device,
        json_file,
        {**small, **asked, **_given(routes=routes, quick=quick)},
        lambda kind: Rivals(kind, folder, routes=chosen, **(small | asked)),
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

    small: dict[str, Any] = {"seconds": 0.2, "turns": 2} if quick else {}
    asked = _given(
        ctas=_numbers("--ctas", ctas) if ctas else None,
        request_bytes=_sizes("--size", size)[0] if size else None,
        seconds=seconds,
        turns=turns,
    )
    chosen = known_routes(routes or ("mapped,staged" if quick else None))

    def make(kind: "Kind") -> Interference:
        default: dict[str, Any] = {"request_bytes": 32 << 20} if kind == "cpu" else {}
        return Interference(kind, chosen, **(default | small | asked))

    arguments = {**small, **asked, **_given(routes=routes, quick=quick)}
    _perform("interference", device, json_file, arguments, make)


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

    small: dict[str, Any] = {"peers": (1, 10), "transfers": 100, "idle_seconds": 0.5} if quick else {}
    asked = _given(peers=_numbers("--peers", peers) if peers else None, transfers=transfers, layers=layers)
    if route not in _IN_PROCESS:
        raise UsageError(f"--route {route}: the in-process transport can do {' and '.join(_IN_PROCESS)}")
    arguments = {**small, **asked, "route": route, "quick": quick, "nixl": nixl}
    given: dict[str, Any] = small | asked | {"nixl": nixl}
    _perform("scale", "cpu", json_file, arguments, lambda _: Scale(route=route, **given))
