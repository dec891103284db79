"""`kvxfer top`: what `/status.json` of one or several addresses says, as a table that is renewed.

It needs none of what serves it: standard HTTP, and rich, which comes with the command. What it is told comes from
elsewhere, so it is believed in no more than that it is JSON.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from rich.console import Group
from rich.text import Text

from kvxfer.telemetry import printable
from kvxfer.tools.jsonhttp import NoAnswerError, json_from
from kvxfer.tools.shown import size, table

__all__ = ["Sight", "Top", "url_of"]

_TIMEOUT_SECONDS: Final = 5.0
_MAX_BYTES: Final = 64 << 20
_MAX_SHOWN: Final = 256
"""Characters of one cell: a longer one would take seconds to lay out."""
_TRANSFERS: Final = 20
"""Transfers that are listed, longest first."""
_WORKERS: Final = 64
"""Workers of one address that are listed."""
_Status: TypeAlias = Mapping[str, Any]


def url_of(address: str) -> str:
    """Where the state of an address is: `host:port`, or a URL under which the page is."""
    base = address if address.startswith(("http://", "https://")) else f"http://{address}"
    return f"{base.rstrip('/')}/status.json"


@dataclass(frozen=True, slots=True)
class Sight:
    """What one address said, or why it said nothing."""

    address: str
    status: _Status | None
    why: str = ""

    @property
    def ready(self) -> bool:
        """Whether it answered, and each of its workers should be given work."""
        workers: Any = (self.status or {}).get("workers")
        try:
            return self.status is not None and all(one["ready"] is True for one in workers)
        except (KeyError, TypeError):
            return False


class Top:
    """Looks at addresses again and again; rates are those between two looks."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses: Final = addresses
        self._now: dict[tuple[str, str], tuple[float, int, int]] = {}  # by address and incarnation
        self._before = self._now

    def look(self) -> list[Sight]:
        """Ask all of them at once."""
        with ThreadPoolExecutor(max(1, len(self._addresses))) as pool:
            return list(pool.map(_ask, self._addresses))

    def draw(self, sights: Iterable[Sight]) -> Group:
        """The tables of one look."""
        workers = table("worker", "state", "in/s", "out/s", "in", "out", "ok", "failed", "moving", "arena", "lag 60 s")
        moving: list[tuple[float, list[str]]] = []
        under_way, self._before, self._now = 0, self._now, {}
        for sight in sights:
            if sight.status is None:
                workers.add_row(_text(sight.address), _text(sight.why, "red"), *[""] * 9)
                continue
            try:
                here: list[dict[str, Any]] = sight.status["workers"]
                for worker in here[:_WORKERS]:
                    workers.add_row(*self._row(sight, worker))
                    if (state := worker["state"]) is not None:
                        moving += _longest(_name(worker), state["transfers"])
                        under_way += int(state["receiving"]) + int(state["sending"])  # of which its page lists some
                if (left := len(here) - _WORKERS) > 0:
                    workers.add_row(_text(sight.address), Text(f"and {left} more", "dim"), *[""] * 9)
            except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
                workers.add_row(_text(sight.address), _text(f"is no admin page of kvxfer: {error!r}", "red"), *[""] * 9)
        if not moving:
            return Group(workers, Text("\nno transfer is in flight", "dim"))
        transfers = table("for", "worker", "", "request", "peers", "route", "step", "chunks", "bytes")
        moving.sort(key=lambda row: -row[0])
        for _, cells in moving[:_TRANSFERS]:
            transfers.add_row(*map(_text, cells))
        left = under_way - _TRANSFERS
        return Group(workers, Text(), transfers, Text(f"and {left} more" if left > 0 else "", "dim"))

    def _row(self, sight: Sight, worker: Mapping[str, Any]) -> list[Text]:
        name, state = _text(_name(worker)), worker["state"]
        how = Text("ready", "green") if worker["ready"] else _text("; ".join(map(str, worker["reasons"])), "red")
        if state is None:
            return [name, how, *[Text()] * 9]
        received, sent = (state["metrics"][side] for side in ("receive", "send"))
        totals = (sum(received["bytes"].values()), sum(sent["bytes"].values()))
        done = [sum(side["transfers"].values()) for side in (received, sent)]
        succeeded = [side["transfers"].get("ok", 0) for side in (received, sent)]
        failed = sum(done) - sum(succeeded)
        rates = self._rates(
            (sight.address, str(state["incarnation"])), float((sight.status or {})["monotonic"]), totals
        )
        return [
            name,
            how,
            *(Text("-" if rate is None else size(rate)) for rate in rates),
            *(Text(size(total)) for total in totals),
            _text(f"{succeeded[0]}+{succeeded[1]}"),
            _text(str(failed), "red" if failed else ""),
            _text(f"{state['receiving']}+{state['sending']}"),
            _arena(state["arena"]),
            _text(f"{state['metrics']['loop_lag_recent_seconds'] * 1e3:.0f} ms"),
        ]

    def _rates(self, key: tuple[str, str], now: float, totals: tuple[int, int]) -> tuple[float | None, float | None]:
        before, self._now[key] = self._before.get(key), (now, *totals)
        if before is None or now <= before[0]:
            return None, None
        return (totals[0] - before[1]) / (now - before[0]), (totals[1] - before[2]) / (now - before[0])


def _ask(address: str) -> Sight:
    try:
        status = json_from(url_of(address), patience=_TIMEOUT_SECONDS, most_bytes=_MAX_BYTES)
    except NoAnswerError as error:
        return Sight(address, None, f"no answer: {error}" if error.status is None else f"answers {error.status}")
    if not isinstance(status, dict):
        return Sight(address, None, "is no admin page of kvxfer")
    return Sight(address, cast("_Status", status))


def _longest(worker: str, transfers: Iterable[Mapping[str, Any]]) -> list[tuple[float, list[str]]]:
    """Those of a worker's transfers that may be listed."""
    return [
        (
            float(one["seconds"]),
            [
                f"{one['seconds']:.2f} s",
                worker,
                "in" if one["side"] == "receive" else "out",
                str(one["request"]),
                ", ".join(map(str, one["peers"])),
                str(one["route"]) or "-",
                f"{one['step']}{', in doubt' if one['in_doubt'] else ''}",
                f"{one['chunks_done']}/{one['chunks'] or '?'}",
                size(one["bytes"]),
            ],
        )
        for one in heapq.nlargest(_TRANSFERS, transfers, key=lambda one: float(one["seconds"]))
    ]


def _arena(arena: Mapping[str, Any]) -> Text:
    """How full both shares are, and in red what is in quarantine."""
    text = Text()
    for side in ("receive", "send"):
        share = arena[side]
        capacity = share["capacity_bytes"] or 1
        text.append(f"{'+' if text else ''}{1 - share['free_bytes'] / capacity:.0%}")
        if share["quarantined_bytes"]:
            text.append(f" ({share['quarantined_bytes'] / capacity:.0%} in quarantine)", "red")
    return text


def _text(value: str, style: str = "") -> Text:
    """Text that others chose, as much as a cell can hold."""
    shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
    return Text(printable(shown), style)


def _name(worker: Mapping[str, Any]) -> str:
    return f"{worker['engine']}[{worker['rank']}]"
