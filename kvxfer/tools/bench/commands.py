"""The sub-commands of `kvxfer bench`. What is heavy is imported inside the one that needs it."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import typer

from kvxfer.errors import UsageError

__all__ = ["app"]

app: Final = typer.Typer(
    help="Measure transfers, each beside a reference of the same run. Every byte is verified outside the timed span.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


Device: TypeAlias = Annotated[
    Literal["auto", "cuda", "cpu"], typer.Option(help="cuda (GPUs 0 and 1, or 0 twice), cpu, or auto.")
]
Json: TypeAlias = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="File to write the results to.")]
Uvloop: TypeAlias = Annotated[bool, typer.Option("--uvloop", help="Run both event loops on uvloop.")]
Beside: TypeAlias = Annotated[
    Literal["python", "engine"] | None,
    typer.Option(help="In a thread of each process meanwhile: python (spins) or engine (as decode steps do)."),
]
Quick: TypeAlias = Annotated[bool, typer.Option("--quick", help="Small sizes: less than a minute on a CPU.")]


def _read(read: Callable[[str], Any], said: str, *, several: bool = True) -> Any:
    """An option that is read so, or several between commas; what cannot be read is an error of the option."""

    def parse(text: str) -> Any:
        try:
            return tuple(map(read, text.split(","))) if several else read(text)
        except (ValueError, UsageError) as error:
            raise typer.BadParameter(str(error)) from error

    return typer.Option(parser=parse, metavar=read.__name__.strip("_").upper(), help=said)


def _size(text: str) -> int:
    from kvxfer.config import parse_size

    return parse_size(text)


def _number(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError("numbers from 1 on")
    return number


def _route(text: str) -> str:
    from kvxfer.tools.bench.matrix import routes

    if text not in routes():
        raise ValueError(f"{text!r} is none of {', '.join(routes())}")
    return text


def _layout(text: str) -> Any:
    from kvxfer.tools.bench.layouts import parse_layout

    return parse_layout(text)


Routes: TypeAlias = Annotated[Any, _read(_route, "Some of them: staged,direct.")]


def _perform(
    name: str, make: Callable[..., Any], device: str, json_file: Path | None, small: dict[str, Any], **asked: Any
) -> None:
    """Make a benchmark of what was asked for, None left out, or of what makes it small, and run it to its end."""
    from kvxfer.tools.bench.children import BenchFailedError
    from kvxfer.tools.bench.device import choose
    from kvxfer.tools.bench.machine import describe
    from kvxfer.tools.bench.report import finish, progress

    if json_file is not None:  # a run may take hours: can its results be written?
        json_file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=json_file.parent).close()
    spec = make(choose(device), **small | {key: value for key, value in asked.items() if value is not None})
    head = describe(spec)
    try:
        with progress(name) as step:
            report = spec.run(step)
    except BenchFailedError as error:
        sys.stderr.write(f"kvxfer bench {name}: {error}\n")
        raise typer.Exit(1) from None
    finish(name, head, report, json_file)
    if report.failures:
        raise typer.Exit(1)


@app.command()
def matrix(
    device: Device = "auto",
    routes: Routes = None,
    sizes: Annotated[Any, _read(_size, "Of requests: 2MiB,512MiB.")] = None,
    pieces: Annotated[Any, _read(_layout, "512,8KiB,...: layouts with such pieces; head-split; nhd-hnd.")] = None,
    ctas: Annotated[Any, _read(_number, "Thread blocks of a copy on a GPU: 24,132.")] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="Of each cell, after two warm-ups. Default 5.")] = None,
    uvloop: Uvloop = False,
    beside: Beside = None,
    sabotage: Annotated[
        Literal["byte", "outside"] | None, typer.Option(help="Damage what was received to see the check fail.")
    ] = None,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """Routes x pieces x request sizes between two processes: the whole `await fetch` beside one contiguous copy."""
    from kvxfer.tools.bench.matrix import Matrix

    small: dict[str, Any] = {"layouts": tuple(map(_layout, ("8KiB", "nhd-hnd"))), "sizes": (2 << 20, 16 << 20)}
    small |= {"repetitions": 3, "cell_seconds": 1.0}
    asked = {"routes": routes, "sizes": sizes, "layouts": pieces, "ctas": ctas, "repetitions": repetitions}
    asked |= {"uvloop": uvloop, "beside": beside, "sabotage": sabotage}
    _perform("matrix", Matrix, device, json_file, small if quick else {}, **asked)


@app.command()
def latency(
    device: Device = "auto",
    routes: Routes = None,
    fetches: Annotated[int | None, typer.Option(min=1, max=4000, help="Of each kind. Default 1000.")] = None,
    uvloop: Uvloop = False,
    beside: Beside = None,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """One block of 64 KiB or 2 MiB at a time, warm: percentiles of the fetch, and CPU time of both event loops."""
    from kvxfer.tools.bench.latency import Latency

    small = {"fetches": 30} if quick else {}
    asked = {"routes": routes, "fetches": fetches, "uvloop": uvloop, "beside": beside}
    _perform("latency", Latency, device, json_file, small, **asked)


@app.command()
def load(
    device: Device = "auto",
    routes: Routes = None,
    concurrency: Annotated[Any, _read(_number, "Fetches at once: 64,128,256,512.")] = None,
    sizes: Annotated[Any, _read(_size, "Of fetches: 64KiB,1MiB,16MiB,64MiB.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Of each run. Default 10.")] = None,
    uvloop: Uvloop = False,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """Many fetches at once, of very different sizes: fetches a second, percentiles, and how late the loops run."""
    from kvxfer.tools.bench.load import Load

    small = {"concurrency": (64,), "sizes": (64 << 10, 1 << 20), "seconds": 1.0} if quick else {}
    asked = {"routes": routes, "concurrency": concurrency, "sizes": sizes, "seconds": seconds, "uvloop": uvloop}
    _perform("load", Load, device, json_file, small, **asked)


@app.command()
def rivals(
    device: Device = "auto",
    pieces: Annotated[Any, _read(_size, "Of pieces: 8KiB,32KiB,2MiB.")] = None,
    size: Annotated[Any, _read(_size, "Of the whole. Default 512MiB.", several=False)] = None,
    routes: Routes = None,
    only: Annotated[list[str] | None, typer.Option(help="A rival, by its name; may be given several times.")] = None,
    rivals_dir: Annotated[Path | None, typer.Option(help="Folder with the rivals' code.")] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="Of each, after one to warm up. Default 5.")] = None,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """The same scattered work through NIXL piece by piece, Mooncake and NCCL, beside kvxfer's routes."""
    from kvxfer.tools.bench.rivals import Rivals, find

    small = {"pieces": (8 << 10,), "size": 16 << 20, "repetitions": 3} if quick else {}
    asked = {"pieces": pieces, "size": size, "routes": routes, "only": tuple(only or ()), "repetitions": repetitions}
    _perform("rivals", Rivals, device, json_file, small, folder=find(rivals_dir), **asked)


@app.command()
def interference(
    device: Device = "auto",
    routes: Routes = None,
    ctas: Annotated[Any, _read(_number, "Thread blocks of a copy on a GPU. Default 8 to 132.")] = None,
    size: Annotated[Any, _read(_size, "Of each transfer. Default 512MiB, on a CPU 32MiB.", several=False)] = None,
    seconds: Annotated[float | None, typer.Option(min=0.01, help="For each speed that is taken. Default 2.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Without and with transfers. Default 3.")] = None,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """How much slower matrix multiplications, or a busy Python thread, get while transfers run beside them."""
    from kvxfer.tools.bench.interference import Interference

    small = {"routes": ("mapped", "staged"), "seconds": 0.2, "turns": 2} if quick else {}
    asked = {"routes": routes, "ctas": ctas, "request_bytes": size, "seconds": seconds, "turns": turns}
    _perform("interference", Interference, device, json_file, small, **asked)


@app.command()
def scale(
    peers: Annotated[Any, _read(_number, "How many. Default 1,10,100,1000.")] = None,
    route: Annotated[Literal["staged", "direct"], typer.Option(help="Of the in-process transport.")] = "staged",
    transfers: Annotated[int | None, typer.Option(min=1, help="Warm ones at each number. Default 1000.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of the cache, a tensor each. Default 4.")] = None,
    nixl: Annotated[bool, typer.Option("--nixl", help="NIXL in place of the in-process transport: few peers.")] = False,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """What peers cost, from 1 to 1,000: memory, handshake, CPU of the loops, control frames and bytes of a transfer."""
    from kvxfer.tools.bench.scale import Scale

    small = {"peers": (1, 10), "transfers": 100, "idle_seconds": 0.5} if quick else {}
    asked = {"peers": peers, "route": route, "transfers": transfers, "layers": layers, "nixl": nixl}
    _perform("scale", Scale, "cpu", json_file, small, **asked)
