# ruff: noqa: INP001 - docs is no package; hooks.py finds this beside itself
"""Draws what pages say in Mermaid, as a forge shows it, without Mermaid: the site has no script and fetches nothing.

Two kinds of diagram are understood, as far as the pages use them. Anything else is an error that names the line.
"""

import re

from drawing import Message, Note, sequence, states

_ARROW = re.compile(r"(\w+)\s*(--?)>>\s*(\w+)\s*:\s*(.*)")
_PARTICIPANT = re.compile(r"participant (\w+) as (.*)")
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
        case other:
            raise DrawingError(f"{other!r}: only sequenceDiagram and stateDiagram-v2 are drawn")


def _sequence(lines: list[str]) -> str:
    people: dict[str, str] = {}
    steps: list[Message | Note] = []
    for line in lines:
        if found := _PARTICIPANT.fullmatch(line):
            people[found[1]] = found[2]
        elif found := _ARROW.fullmatch(line):
            steps.append(Message(found[1], found[3], found[4], dashed=found[2] == "--"))
        else:
            raise DrawingError(f"{line!r} is not understood in a sequenceDiagram")
    return sequence("sequence", people, steps)


def _states(lines: list[str]) -> str:
    moves: list[tuple[str, str, str]] = []
    for line in lines:
        found = _MOVE.fullmatch(line)
        if found is None:
            raise DrawingError(f"{line!r} is not understood in a stateDiagram-v2")
        if found[1] != "[*]":
            moves.append((found[1], found[2], found[3] or ""))
    return states("states", list(dict.fromkeys(name for move in moves for name in move[:2])), moves)
