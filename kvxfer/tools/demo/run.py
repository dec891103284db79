"""Runs the demo: starts both processes, shows what they report, and judges the result."""

from dataclasses import dataclass
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvxfer.telemetry import rate
from kvxfer.tools.bench.children import BenchFailedError, Side, Step, conduct
from kvxfer.tools.bench.device import choose, sides
from kvxfer.tools.demo.script import (
    DECODE_BLOCK_TOKENS,
    PREFILL_BLOCK_TOKENS,
    Decoded,
    Fetched,
    Layer,
    News,
    Offered,
    Prefilled,
    Reference,
    Script,
)

__all__ = ["Display", "Verdict", "run"]

_SILENCE_SECONDS: Final = 300.0
_MIB: Final = 1 << 20


def run(script: Script, console: Console) -> bool:
    """Run the demo once; True if every check passed. The last line printed says what was seen.

    Nothing is left behind, whatever happens: neither a process nor a file.
    """
    devices, bodies = sides(choose(script.device)), {"prefill": _prefill, "decode": _decode}
    verdict = Verdict(script)
    with Display(script, console) as display:

        def show(item: News | Step) -> None:
            if not isinstance(item, Step):
                verdict.take(item)
                display.show(item)

        try:
            conduct(bodies, script, show, devices=devices, silence=_SILENCE_SECONDS)
        except BenchFailedError as error:
            verdict.broken = str(error)
    passed, line = verdict.judge()
    console.print(line, soft_wrap=True, highlight=False, markup=False)
    return passed


# what is heavy is imported in the two processes alone


async def _prefill(side: Side, script: Script) -> None:
    from kvxfer.tools.demo.sides import prefill

    await prefill(side, script)


async def _decode(side: Side, script: Script) -> None:
    from kvxfer.tools.demo.sides import decode

    await decode(side, script)


class Verdict:
    """What was seen of one run."""

    def __init__(self, script: Script) -> None:
        self.broken = ""  # how the run did, if it did not come to its end
        self._script = script
        self._fetched: dict[int, Fetched] = {}
        self._decoded: dict[int, Decoded] = {}
        self._references: dict[int, Reference] = {}

    def take(self, item: News) -> None:
        """One event of either side."""
        match item:
            case Fetched():
                self._fetched[item.prompt] = item
            case Decoded():
                self._decoded[item.prompt] = item
            case Reference():
                self._references[item.prompt] = item
            case _:
                pass

    def judge(self) -> tuple[bool, str]:
        """Whether everything is right, and the last line."""
        problems = [self.broken] if self.broken else []
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
        if script.sabotage:
            problems.append(f"sabotage {script.sabotage} was not noticed")
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
            f"{digests} digests of K and V equal; {nbytes / _MIB:.1f} MiB "
            f"in {sum(s.pieces for s in stats)} pieces by route {routes}, "
            f"{rate(nbytes, wire):.2f} GB/s on the wire"
        )


@dataclass(slots=True)
class _Row:
    state: str = "waiting"
    ready: int = 0
    landed: int = 0
    route: str = ""
    gbps: str = ""


class Display:
    """Shows news as they come: live on a terminal, one line an event elsewhere."""

    def __init__(self, script: Script, console: Console) -> None:
        self._script = script
        self._console = console
        self._rows = [_Row() for _ in script.prompts]
        self._live = Live(self._table(), console=console, refresh_per_second=12, transient=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.update(self._table())
            self._live.stop()

    def show(self, news: News) -> None:
        """Take in one event."""
        row, line = self._rows[news.prompt], ""
        match news:
            case Offered():
                row.state = "prefill"
            case Layer(landed=False):
                row.ready = max(row.ready, news.layer + 1)
            case Prefilled():
                row.state = "moving" if row.landed < self._script.layers else row.state
            case Layer():
                row.landed = max(row.landed, news.layer + 1)
            case Fetched():
                row.state, row.route = "fetched", news.stats.route
                row.gbps = f"{rate(news.stats.bytes, news.stats.wire):.2f}"
                line = f"{news.stats.bytes / _MIB:.1f} MiB by {row.route} in {news.stats.chunks} chunks"
            case Decoded():
                row.state = "differs" if news.difference else "decoded"
                line = f"{len(news.tokens)} tokens, " + (news.difference or "digests equal")
            case _:
                pass
        if self._console.is_terminal:
            self._live.update(self._table())
        elif line:
            self._console.print(
                f"prompt {news.prompt} ({self._script.prompts[news.prompt]} tokens): {line}",
                soft_wrap=True,
                highlight=False,
                markup=False,
            )

    def _table(self) -> Table:
        table = Table(
            title=f"kvxfer demo: prefill process (NHD, blocks of {PREFILL_BLOCK_TOKENS}) "
            f"to decode process (HND, blocks of {DECODE_BLOCK_TOKENS})"
        )
        for name, justify in (("prompt", "right"), ("tokens", "right"), ("MiB", "right"), ("layers ready", "left"),
                              ("layers landed", "left"), ("route", "left"), ("GB/s on the wire", "right"),
                              ("state", "left")):  # fmt: skip
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for number, row in enumerate(self._rows):
            tokens, layers = self._script.prompts[number], self._script.layers
            table.add_row(
                str(number),
                str(tokens),
                f"{tokens * self._script.token_bytes / _MIB:.1f}",
                ProgressBar(total=layers, completed=row.ready, width=16),
                ProgressBar(total=layers, completed=row.landed, width=16),
                row.route,
                row.gbps,
                row.state,
            )
        return table
