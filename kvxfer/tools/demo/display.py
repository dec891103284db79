"""The demo's live table: one row a prompt, from prefill to the last token."""

from dataclasses import dataclass
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvxfer.tools.demo.script import (
    DECODE_BLOCK_TOKENS,
    PREFILL_BLOCK_TOKENS,
    Broken,
    Decoded,
    Fetched,
    LayerLanded,
    LayerReady,
    News,
    Offered,
    Prefilled,
    Script,
)

__all__ = ["Display"]

_MIB: Final = 1 << 20


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
        if isinstance(news, Broken):
            return
        row, line = self._rows[news.prompt], ""
        match news:
            case Offered():
                row.state = "prefill"
            case LayerReady():
                row.ready = max(row.ready, news.layer + 1)
            case Prefilled():
                row.state = "moving" if row.landed < self._script.layers else row.state
            case LayerLanded():
                row.landed = max(row.landed, news.layer + 1)
            case Fetched():
                row.state, row.route = "fetched", news.stats.route
                row.gbps = f"{news.stats.bytes / max(news.stats.wire, 1e-9) / 1e9:.2f}"
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
