# ruff: noqa: INP001 - docs is no package; hooks.py finds this beside itself
"""Draws what pages say in Mermaid, as a forge shows it, without Mermaid: the site has no script and fetches nothing.

Three kinds of diagram are understood, as far as the pages use them. Anything else is an error that names the line.
"""

import json
import re
from collections.abc import Iterator

from drawing import Loop, Message, Note, Step, chart, sequence, states

_ARROW = re.compile(r"(\w+)\s*(--?)>>\s*(\w+)\s*:\s*(.*)")
_NOTE = re.compile(r"Note over ([\w, ]+):\s*(.*)")
_PARTICIPANT = re.compile(r"(?:participant|actor) (\w+)(?: as (.*))?")
_MOVE = re.compile(r"(\[\*\]|\w+)\s*-->\s*(\[\*\]|\w+)(?:\s*:\s*(.*))?")


class DrawingError(ValueError):
    """A diagram says something that is not understood here."""


def draw(source: str) -> str:
    """The diagram as SVG.

    Raises:
        DrawingError: If it is of another kind, or has a line that is not understood.
    """
    lines = [line.strip() for line in source.strip().splitlines() if line.strip()]
    match lines[0]:
        case "sequenceDiagram":
            return _sequence(lines[1:])
        case "stateDiagram-v2":
            return _states(lines[1:])
        case "xychart-beta":
            return _chart(lines[1:])
        case other:
            raise DrawingError(f"{other!r}: only sequenceDiagram, stateDiagram-v2 and xychart-beta are drawn")


def _sequence(lines: list[str]) -> str:
    people: dict[str, str] = {}
    groups: dict[str, str] = {}
    steps: list[list[Step]] = [[]]
    open_: list[str] = []
    for line in lines:
        if found := _PARTICIPANT.fullmatch(line):
            people[found[1]] = found[2] or found[1]
            groups |= {found[1]: open_[-1].removeprefix("box ")} if open_ else {}
        elif line.startswith(("box ", "loop ")):
            open_.append(line)
            steps += [[]] if line.startswith("loop ") else []
        elif line == "end" and open_:
            ended = open_.pop()
            if ended.startswith("loop "):
                inner = steps.pop()
                steps[-1].append(Loop(ended, inner))
        elif found := _NOTE.fullmatch(line):
            steps[-1].append(Note(tuple(name.strip() for name in found[1].split(",")), found[2]))
        elif found := _ARROW.fullmatch(line):
            steps[-1].append(Message(found[1], found[3], found[4], dashed=found[2] == "--"))
        else:
            raise DrawingError(f"{line!r} is not understood in a sequenceDiagram")
    return sequence("sequence", people, steps[0], groups)


def _states(lines: list[str]) -> str:
    moves: list[tuple[str, str, str]] = []
    for line in lines:
        found = _MOVE.fullmatch(line)
        if found is None:
            raise DrawingError(f"{line!r} is not understood in a stateDiagram-v2")
        if found[1] != "[*]":
            moves.append((found[1], found[2], found[3] or ""))
    return states("states", list(dict.fromkeys(name for move in moves for name in move[:2])), moves)


def _chart(lines: list[str]) -> str:
    said = dict(_said(lines))
    series = [(kind, json.loads(rest)) for kind, rest in _said(lines) if kind in {"bar", "line"}]
    axis = re.fullmatch(r'"(.*)" [\d.]+ --> ([\d.]+)', said["y-axis"])
    if axis is None:
        raise DrawingError(f"{said['y-axis']!r} is not understood as a y-axis")
    return chart(json.loads(said["title"]), json.loads(said["x-axis"]), float(axis[2]), axis[1], series)


def _said(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        word, _, rest = line.partition(" ")
        if word not in {"title", "x-axis", "y-axis", "bar", "line"}:
            raise DrawingError(f"{line!r} is not understood in an xychart-beta")
        yield word, rest
