# ruff: noqa: INP001 - docs is no package; hooks.py and generate_drawings.py find this beside themselves
"""Draws diagrams as SVG text: sequences, states, stacks of layers.

Nothing is fetched and nothing runs in a browser: a page shows its pictures offline, and a picture that is kept in the
repository is text that a diff shows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

_INK, _FAINT, _FILL, _PAPER = "#24292f", "#8c959f", "#ddebf7", "#ffffff"
_HEAD = f"""\
<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0 0 8 4 0 8z" fill="{_INK}"/></marker></defs>"""
_LETTER, _CAPITAL = 7.0, 9.5
_LINE = 17


@dataclass
class Canvas:
    """SVG elements, and how far they reach."""

    parts: list[str] = field(default_factory=list)
    width: float = 0
    height: float = 0

    def reach(self, x: float, y: float) -> None:
        """Make room for a point."""
        self.width, self.height = max(self.width, x), max(self.height, y)

    def box(self, x: float, y: float, width: float, height: float, fill: str = _FILL) -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{_FAINT}"/>'
        )
        self.reach(x + width, y + height)

    def line(self, *points: tuple[float, float], dash: str = "", arrow: bool = False, color: str = _INK) -> None:
        """A line over some points; an arrow if it has a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        marks = (f' stroke-dasharray="{dash}"' if dash else "") + (' marker-end="url(#head)"' if arrow else "")
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}"{marks}/>')
        for point in points:
            self.reach(*point)

    def text(self, x: float, y: float, text: str, anchor: str = "middle", *, strong: bool = False) -> None:
        """One line of text; `y` is its baseline."""
        weight = ' font-weight="600"' if strong else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')
        width = breadth(text)
        self.reach(x + width * {"start": 1, "middle": 0.5, "end": 0}[anchor], y + 4)

    def svg(self, title: str) -> str:
        """The whole picture."""
        width, height = round(self.width + 12), round(self.height + 12)
        size = f'viewBox="0 0 {width} {height}" width="{width}"'
        look = f'font-family="sans-serif" font-size="13" fill="{_INK}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {look}>',
                f"<title>{escape(title)}</title>",
                _HEAD,
                f'<rect width="{width}" height="{height}" rx="6" fill="{_PAPER}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def breadth(text: str) -> float:
    """About how wide a text is."""
    return sum(_CAPITAL if letter.isupper() else _LETTER for letter in text)


@dataclass(frozen=True)
class Message:
    """An arrow of a sequence, from one to another."""

    source: str
    target: str
    text: str
    dashed: bool = False


@dataclass(frozen=True)
class Note:
    """What some do together."""

    over: tuple[str, ...]
    text: str


def sequence(title: str, people: Mapping[str, str], steps: Sequence[Message | Note]) -> str:
    """Who says what to whom, downwards.

    Args:
        title: For readers who do not see it.
        people: Name and what is shown, from left to right.
        steps: In their order.
    """
    at = _places(people, steps)
    canvas = Canvas()
    top = 12.0
    for name, shown in people.items():
        width = breadth(shown) + 20
        canvas.box(at[name] - width / 2, top, width, 26)
        canvas.text(at[name], top + 18, shown)
    lines, canvas.parts = canvas.parts, []
    bottom = _steps(canvas, steps, at, top + 26 + 22)
    body, canvas.parts = canvas.parts, lines
    for name in people:
        canvas.line((at[name], top + 26), (at[name], bottom), color=_FAINT)
    canvas.parts += body
    return canvas.svg(title)


def _places(people: Mapping[str, str], steps: Sequence[Message | Note]) -> dict[str, float]:
    """Where each line stands, so that what lies between two has room."""
    names = list(people)
    pairs = list(pairwise(names))
    room = {pair: (breadth(people[pair[0]]) + breadth(people[pair[1]])) / 2 + 40 for pair in pairs}
    for step in steps:
        ends = list(map(names.index, step.over if isinstance(step, Note) else (step.source, step.target)))
        first, last = min(ends), max(ends)
        for pair in pairs[first:last]:
            room[pair] = max(room[pair], (breadth(step.text) + 28) / (last - first))
    at = {names[0]: 14 + breadth(people[names[0]]) / 2 + 10}
    for one, two in pairs:
        at[two] = at[one] + room[one, two]
    return at


def _steps(canvas: Canvas, steps: Iterable[Message | Note], at: Mapping[str, float], y: float) -> float:
    for step in steps:
        match step:
            case Message(source, target, text, dashed):
                canvas.text((at[source] + at[target]) / 2, y, text)
                y += _LINE
                canvas.line((at[source], y - 9), (at[target], y - 9), dash="5 4" if dashed else "", arrow=True)
                y += 16
            case Note(over, text):
                ends = [at[name] for name in over]
                middle = (min(ends) + max(ends)) / 2
                width = max(breadth(text) + 16, max(ends) - min(ends) + 40)
                canvas.box(middle - width / 2, y - 14, width, _LINE + 6, "#fff8dc")
                canvas.text(middle, y, text)
                y += _LINE + 14
    return y


def states(title: str, names: Sequence[str], moves: Sequence[tuple[str, str, str]]) -> str:
    """States below each other, and moves between them: down at the right, up at the left.

    Args:
        title: For readers who do not see it.
        names: From the top down.
        moves: Source, target, and what causes it.
    """
    order = {name: place for place, name in enumerate(names)}
    sides = {down: [move for move in moves if (order[move[1]] > order[move[0]]) is down] for down in (True, False)}
    ports = {name: {down: _ports(name, sides[down], order) for down in (True, False)} for name in names}
    width = max(map(breadth, names)) + 28
    label = {down: max((breadth(text) for *_, text in sides[down]), default=0) + 30 for down in (True, False)}
    lanes = {down: _lanes(sides[down], order) for down in (True, False)}
    left = label[False] + 14 * (1 + max(lanes[False].values(), default=-1)) + 14
    canvas, tops, y = Canvas(), dict[str, float](), 14.0
    heights = {name: 20 + 18 * max(1, *(len(ports[name][down]) for down in (True, False))) for name in names}
    for name in names:
        tops[name] = y
        canvas.box(left, y, width, heights[name])
        canvas.text(left + width / 2, y + heights[name] / 2 + 4, name, strong=True)
        y += heights[name] + 26
    for down, sign, edge in ((True, 1, left + width), (False, -1, left)):
        for move in sides[down]:
            source, target, text = move
            begin = tops[source] + 19 + 18 * ports[source][down].index((move, "out"))
            end = tops[target] + 19 + 18 * ports[target][down].index((move, "in"))
            lane = edge + sign * (label[down] + 14 * lanes[down][move])
            canvas.line((edge, begin), (lane, begin), (lane, end), (edge, end), arrow=True)
            canvas.text(edge + sign * 10, begin - 4, text, "start" if down else "end")
    return canvas.svg(title)


_Move = tuple[str, str, str]


def _ports(name: str, moves: Sequence[_Move], order: Mapping[str, int]) -> list[tuple[_Move, str]]:
    """Ends of moves at one side of a state, from the top down, so that lines seldom cross."""
    ends = [(move, "in") for move in moves if move[1] == name] + [(move, "out") for move in moves if move[0] == name]
    return sorted(ends, key=lambda end: (order[end[0][0 if end[1] == "in" else 1]], end[1], end[0]))


def _lanes(moves: Sequence[_Move], order: Mapping[str, int]) -> dict[_Move, int]:
    """Which vertical line each move takes: short ones near the states."""
    near = sorted(moves, key=lambda move: abs(order[move[0]] - order[move[1]]))
    return {move: lane for lane, move in enumerate(near)}


def stack(title: str, rows: Sequence[Sequence[tuple[str, Sequence[str]]]]) -> str:
    """Layers above each other; what is in one row knows nothing of each other.

    Args:
        title: For readers who do not see it.
        rows: From the top down, each of boxes with a name and lines below it.
    """
    total = 760.0
    canvas, y = Canvas(), 14.0
    for row in rows:
        width = (total - 10 * (len(row) - 1)) / len(row)
        texts = [[part for line in lines for part in _wrapped(line, width - 16)] for _, lines in row]
        height = 28 + _LINE * max(map(len, texts))
        for place, ((name, _), lines) in enumerate(zip(row, texts, strict=True)):
            x = 14 + place * (width + 10)
            canvas.box(x, y, width, height)
            canvas.text(x + width / 2, y + 19, name, strong=True)
            for number, line in enumerate(lines, start=1):
                canvas.text(x + width / 2, y + 19 + _LINE * number, line)
        y += height + 10
    return canvas.svg(title)


def _wrapped(text: str, width: float) -> list[str]:
    lines = [""]
    for word in text.split():
        if breadth(f"{lines[-1]} {word}") > width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
