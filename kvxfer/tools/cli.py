"""The command `kvxfer`: settings, plans of transfers, benchmarks, frames, running workers, versions.

Everything heavy is imported inside the command that needs it. An error of the library or of the system is one line on
stderr and the exit code 2, never a traceback; what was looked at and found wrong (frames, the demo's cache) is the exit
code 1. Whose reader is gone (`| head`) ends without a word, as if by SIGPIPE.
"""

import io
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import typer

from kvxfer.errors import KvxferError, MissingExtraError, UsageError
from kvxfer.tools.bench.commands import app as bench

if TYPE_CHECKING:
    from kvxfer.config import Config
    from kvxfer.tools.plan import Forecast

__all__ = ["app", "main"]

_FAILED: Final = 2
_LISTED: Final = 8

app: Final = typer.Typer(
    name="kvxfer",
    help="Moves the KV cache of an LLM request between GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command; the entry point of the package."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # peers choose their names, and a terminal may not have the letters
        sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportUnknownMemberType]
    before = signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except (KvxferError, OSError) as error:  # the latter where there is no room for what is written
        sys.stderr.write(f"kvxfer: {' '.join(str(error).split())}\n")
        raise SystemExit(_FAILED) from None
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # what writes has silenced the output, and calls it a failure
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> None:
    """End as an exception does, so that terminals, folders and processes are tidied up on the way.

    Not while a module is imported: of compiled ones some swallow an exception, and others abort.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
            return
        frame = frame.f_back
    raise SystemExit(128 + number)


def _print_versions(wanted: bool) -> None:
    if not wanted:
        return
    from kvxfer.tools.versions import versions

    for name, version in versions().items():
        typer.echo(f"{name} {version}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Moves the KV cache of an LLM request between GPUs."""


@app.command()
def config(
    file: Annotated[Path | None, typer.Option("--file", help="TOML or JSON file with settings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print every effective setting with its source, and after how long each kind of failure is heard of."""
    from kvxfer.config import Config

    effective = Config.load(file)
    if as_json:
        settings = {
            setting.name: {"value": setting.value, "source": setting.source} for setting in effective.effective()
        }
        typer.echo(json.dumps({"settings": settings, "bounds": dict(effective.bounds())}, indent=2))
    else:
        _print_tables(effective)


def _print_tables(effective: "Config") -> None:
    from rich.text import Text

    from kvxfer.config import leaves
    from kvxfer.tools.shown import console, table

    settings = table("setting", "value", "source")
    declared = dict(leaves(type(effective)))
    for setting in effective.effective():
        shown = "none" if setting.value is None else _with_unit(setting.value, declared[setting.name])
        style = "" if setting.source == "default" else "bold"
        settings.add_row(Text(setting.name, style), Text(shown, style), Text(setting.source, style))
    bounds = table("failure", "heard of within")
    for kind, seconds in effective.bounds().items():
        bounds.add_row(kind, f"{seconds:g} s")
    out = console()
    out.print(settings)
    out.print()
    out.print(bounds)


def _with_unit(value: object, declared: Any) -> str:
    """A value as it may be set, with the unit in which settings of its kind are read."""
    from kvxfer.config import parse_duration, parse_size
    from kvxfer.tools.shown import size

    said = [*declared.metadata, *(one for kind in get_args(declared.annotation) for one in get_args(kind))]
    readers = {getattr(one, "func", None) for one in said}
    if parse_duration in readers:
        return f"{value:g} s" if isinstance(value, int | float) else str(value)
    if parse_size not in readers or not isinstance(value, int):
        return str(value)
    shown = size(value)
    return shown if parse_size(shown) == value else f"{value} B"


@app.command()
def plan(
    model: Annotated[Path, typer.Option("--config", help="config.json of a Hugging Face model, or its folder.")],
    prefill: Annotated[str, typer.Option(help="Engine that holds the request: tp=4,pp=1,block=16,layout=NHD.")],
    decode: Annotated[str, typer.Option(help="Engine that fetches it: tp=2,block=64,layout=HND,cross-layer.")],
    tokens: Annotated[str, typer.Option(help="Tokens to fetch: N, or A:B if the first A are held already (N:N: all).")],
    dtype: Annotated[str | None, typer.Option(help="Of K and V: bf16, fp16, fp8, ...; by default the model's.")] = None,
    route: Annotated[str | None, typer.Option(help="As the setting: auto, mapped, staged, direct, pull.")] = None,
    chunk: Annotated[str | None, typer.Option(help="As the setting chunk_bytes: 32MiB.")] = None,
    profile: Annotated[str, typer.Option(help="Machine that predicted times are for: h200-nvlink or cpu.")] = "",
    bandwidth: Annotated[
        str | None, typer.Option(help="A second, in place of the profile's: 25GB by NIXL, or staged=25GB,mapped=300GB.")
    ] = None,
    one_host: Annotated[
        bool, typer.Option("--one-host", help="Both engines are on one host: memory can be mapped.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what a transfer between two engines would be: bytes, pieces, chunks, route and time of each pair of ranks.

    Nothing is allocated or sent. Other settings are those of `kvxfer config`.
    """
    from kvxfer.config import Config
    from kvxfer.plans.routes import PROFILES
    from kvxfer.tools.engine import dtype_name, read_model
    from kvxfer.tools.plan import forecast, nearest, parse_engine, parse_tokens, with_bandwidths

    if profile and profile not in PROFILES:
        raise UsageError(f"--profile {profile} is unknown: {nearest(profile, list(PROFILES))}")
    machine = PROFILES[profile or next(iter(PROFILES))]
    options = {"route": route, "chunk_bytes": chunk}
    settings = {name: value for name, value in options.items() if value is not None}
    found = forecast(
        read_model(model),
        parse_engine(prefill, "--prefill"),
        parse_engine(decode, "--decode"),
        parse_tokens(tokens),
        config=Config.load(**settings),
        profile=machine if bandwidth is None else with_bandwidths(machine, bandwidth),
        dtype=None if dtype is None else dtype_name(dtype),
        one_host=one_host,
    )
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        _print_forecast(found)


def _print_forecast(found: "Forecast") -> None:
    from kvxfer.tools.shown import console, duration, size, table

    rows = table()
    for heading in ("pair", "bytes", "pieces", "smallest", "median", "largest", "chunks", "route", "time"):
        rows.add_column(heading, justify="left" if heading in {"pair", "route"} else "right", no_wrap=True)
    rows.add_column("why", overflow="fold")
    for pair in found.pairs:
        pieces, about = pair.pieces, "~" if pair.pieces.sampled else ""
        rows.add_row(
            f"{pair.prefill_rank} -> {pair.decode_rank}",
            size(pair.bytes),
            f"{about}{pieces.count}",
            *map(size, (pieces.smallest, pieces.median, pieces.largest)),
            str(pair.chunks),
            pair.choice.route.name.lower(),
            duration(pair.predicted_s),
            "; ".join(filter(None, (pair.choice.why, pair.choice.fallback))),
        )
    out = console()
    for line in found.summary():
        out.print(line, markup=False)
    out.print()
    out.print(rows)


@app.command()
def inspect(
    frames: Annotated[
        str | None, typer.Argument(metavar="[HEX|-]", help="Frames in hexadecimal; - reads them from stdin.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="File that holds frames as they travel.")] = None,
) -> None:
    """Say what control frames mean. The exit code is 1 if some of them cannot be decoded."""
    if (frames is None) == (file is None):
        raise UsageError("give either frames in hexadecimal (or - for stdin) or --file, not both and not neither")
    from kvxfer.tools.inspect import frames as read_frames
    from kvxfer.tools.inspect import from_hex

    try:
        data = file.read_bytes() if file is not None else from_hex(sys.stdin.read() if frames == "-" else frames or "")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UsageError(f"this is not hexadecimal: {error}") from error
    damaged: list[int] = []
    for number, (lines, whole) in enumerate(read_frames(data)):
        typer.echo("\n".join(lines))
        damaged += [] if whole else [number]
    if damaged:
        listed = ", ".join(map(str, damaged[:_LISTED])) + (", ..." if len(damaged) > _LISTED else "")
        many = f"frames {listed}" if len(damaged) > 1 else f"frame {listed}"
        sys.stderr.write(f"kvxfer: {many} cannot be decoded; the output says why\n")
        raise typer.Exit(1)


@app.command()
def top(
    addresses: Annotated[
        list[str] | None, typer.Argument(metavar="[HOST:PORT]...", help="Where `kvxfer.tools.admin` serves workers.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and exit; 1 if a worker is not ready.")] = False,
) -> None:
    """Show workers live: what they move, what is in flight, who is not ready and why. Ctrl-C ends it."""
    import time

    from rich.live import Live

    from kvxfer.tools.shown import console
    from kvxfer.tools.top import Top

    out, view = console(), Top(addresses or ["127.0.0.1:9471"])
    if once:
        sights = view.look()
        out.print(view.draw(sights))
        if not all(sight.ready for sight in sights):
            raise typer.Exit(1)
        return
    if not out.is_terminal:  # there one look stands below the other
        while True:
            out.print(view.draw(view.look()))
            out.file.flush()
            time.sleep(every)
    with Live(view.draw(view.look()), console=out, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every)
            live.update(view.draw(view.look()), refresh=True)


@app.command()
def demo(
    route: Annotated[
        Literal["auto", "mapped", "staged", "direct", "pull"], typer.Option(help="As the setting.")
    ] = "auto",
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="cuda: prefill on GPU 0, decode on GPU 1 or the same.")
    ] = "cpu",
    sabotage: Annotated[
        Literal["zero-block", "swap-blocks", "swap-heads", "cut-tail"] | None,
        typer.Option(help="Damage the received cache to see the checks fail."),
    ] = None,
) -> None:
    """Prefill a real model in one process, decode it in another, and check every byte of its cache."""
    from importlib.util import find_spec

    if find_spec("transformers") is None:  # before torch is loaded, which takes long
        raise MissingExtraError("the demo runs a model of transformers: pip install 'transformers>=5.17'")
    from rich.console import Console

    from kvxfer.tools.demo.run import run
    from kvxfer.tools.demo.script import Script

    if not run(Script(route=route, device=device, sabotage=sabotage or ""), Console()):
        raise typer.Exit(1)


@app.command()
def doctor(
    device: Annotated[Literal["auto", "cuda", "cpu"], typer.Option(help="Where caches of probes lie.")] = "auto",
    listen: Annotated[
        str | None,
        typer.Option(help="Wait for another host's doctor at tcp:HOST:PORT or unix:/path, and probe with it."),
    ] = None,
    peer: Annotated[str | None, typer.Option(help="Probe with a listening doctor: what it has printed.")] = None,
    wait: Annotated[
        float, typer.Option(min=0.1, help="With --listen, how many seconds to wait for the other side.")
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check this machine, or the way to another one: every route is probed. The exit code is 1 if something fails."""
    if listen is not None and peer is not None:
        raise UsageError("give --listen on one host and --peer on the other one, not both")
    from kvxfer.tools.doctor.examination import Examination
    from kvxfer.tools.doctor.findings import progress, shown, verdict
    from kvxfer.tools.shown import console

    examination = Examination(progress, device=device)
    if listen is not None:
        examination.listen(listen, lambda line: typer.echo(line, err=as_json), wait)
    elif peer is not None:
        examination.peer(peer)
    else:
        examination.local()
    if as_json:
        typer.echo(json.dumps(examination.to_json(), indent=2))
    else:
        out = console()
        out.print(shown(examination.found))
        out.print(f"\n{verdict(examination.found)}", markup=False)
    if examination.exit_code:
        raise typer.Exit(examination.exit_code)


if __name__ == "__main__":
    main()
