# ruff: noqa: INP001 - docs is no package; hooks.py and generate_drawings.py find this beside themselves
"""Draws diagrams as SVG text: sequences, states, stacks of layers, charts.

Nothing is fetched and nothing runs in a browser: a page shows its pictures offline, and a picture that is kept in the
repository is text that a diff shows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

_INK, _FAINT, _FILL, _PAPER = "#24292f", "#8c959f", "#ddebf7", "#ffffff"
_SERIES = ("#9dc3e6", "#c55a11", "#548235", "#7030a0")
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

    def box(self, x: float, y: float, width: float, height: float, fill: str = _FILL, dash: str = "") -> None:
        """A rectangle; with `dash` one that is only an outline."""
        stroke = f'stroke="{_FAINT}"' + (f' stroke-dasharray="{dash}"' if dash else "")
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" {stroke}/>'
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
    """An arrow of a sequence, to itself if both ends are the same."""

    source: str
    target: str
    text: str
    dashed: bool = False


@dataclass(frozen=True)
class Note:
    """What somebody does meanwhile."""

    over: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Loop:
    """Steps that are repeated."""

    text: str
    steps: "Sequence[Step]"


Step = Message | Note | Loop


def sequence(title: str, people: Mapping[str, str], steps: Sequence[Step], groups: Mapping[str, str]) -> str:
    """Who says what to whom, downwards.

    Args:
        title: For readers who do not see it.
        people: Name and what is shown, from left to right.
        steps: In their order.
        groups: What stands above some of the people, by name.
    """
    flat = list(_flat(steps))
    at = _places(people, flat)
    canvas = Canvas()
    top = 12.0 + (_LINE + 6) * bool(groups)
    for group in dict.fromkeys(groups.values()):
        inside = [at[name] for name in people if groups.get(name) == group]
        canvas.text((min(inside) + max(inside)) / 2, 24, group, strong=True)
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


def _flat(steps: Iterable[Step]) -> Iterable[Message | Note]:
    for step in steps:
        if isinstance(step, Loop):
            yield from _flat(step.steps)
        else:
            yield step


def _places(people: Mapping[str, str], steps: Sequence[Message | Note]) -> dict[str, float]:
    """Where each line stands, so that what lies between two has room."""
    names = list(people)
    pairs = list(pairwise(names))
    room = {pair: (breadth(people[pair[0]]) + breadth(people[pair[1]])) / 2 + 40 for pair in pairs}
    left = breadth(people[names[0]]) / 2 + 10
    for step in steps:
        ends = list(map(names.index, step.over if isinstance(step, Note) else (step.source, step.target)))
        first, last = min(ends), max(ends)
        width = max(breadth(line) for line in _lines(step.text)) + 28
        if first < last:
            needs = dict.fromkeys(pairs[first:last], width / (last - first))
        elif isinstance(step, Message):
            needs = dict.fromkeys(pairs[first : first + 1], width + 30)
        else:
            needs = dict.fromkeys(pairs[max(0, first - 1) : first + 1], width / 2 + 12)
            left = max(left, width / 2) if first == 0 else left
        for pair, need in needs.items():
            room[pair] = max(room[pair], need)
    at = {names[0]: 14 + left}
    for one, two in pairs:
        at[two] = at[one] + room[one, two]
    return at


def _lines(text: str) -> list[str]:
    return text.replace("<br>", "<br/>").split("<br/>")


def _steps(canvas: Canvas, steps: Iterable[Step], at: Mapping[str, float], y: float) -> float:
    for step in steps:
        match step:
            case Message(source, target, text) if source == target:
                x = at[source]
                canvas.line((x, y - 6), (x + 22, y - 6), (x + 22, y + 8), (x, y + 8), arrow=True)
                canvas.text(x + 28, y + 5, text, "start")
                y += 34
            case Message(source, target, text, dashed):
                lines = _lines(text)
                for line in lines:
                    canvas.text((at[source] + at[target]) / 2, y, line)
                    y += _LINE
                canvas.line((at[source], y - 9), (at[target], y - 9), dash="5 4" if dashed else "", arrow=True)
                y += 16
            case Note(over, text):
                lines = _lines(text)
                ends = [at[name] for name in over]
                middle, width = (min(ends) + max(ends)) / 2, max(map(breadth, lines)) + 16
                width = max(width, max(ends) - min(ends) + 40)
                canvas.box(middle - width / 2, y - 14, width, _LINE * len(lines) + 6, "#fff8dc")
                for line in lines:
                    canvas.text(middle, y, line)
                    y += _LINE
                y += 14
            case Loop(text, inner):
                begin = y - 14
                canvas.text(22, y, text, "start", strong=True)
                mark = len(canvas.parts)
                y = _steps(canvas, inner, at, y + _LINE + 10)
                frame = Canvas()
                frame.box(14, begin, max(at.values()) + 60, y - begin - 8, "none", "3 3")
                canvas.parts[mark:mark] = frame.parts
                canvas.reach(frame.width, frame.height)
                y += 12
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


def chart(
    title: str, categories: Sequence[str], top: float, unit: str, series: Sequence[tuple[str, list[float]]]
) -> str:
    """Bars and lines over categories.

    Args:
        title: Shown above.
        categories: Names along the bottom.
        top: The largest value that is shown.
        unit: Of the values.
        series: `bar` or `line`, with a value for each category.
    """
    canvas, left, low, step = Canvas(), 60.0, 260.0, 110.0

    def scaled(value: float) -> float:
        return low - 200 * value / top

    canvas.text(14, 26, title, "start", strong=True)
    canvas.text(14, 48, unit, "start")
    for part in range(5):
        value = top * part / 4
        canvas.line((left, scaled(value)), (left + step * len(categories), scaled(value)), color="#d0d7de")
        canvas.text(left - 8, scaled(value) + 4, f"{value:g}", "end")
    middles = [left + step * (place + 0.5) for place in range(len(categories))]
    for number, (kind, values) in enumerate(series):
        color = _SERIES[number % len(_SERIES)]
        _SHAPES[kind](canvas, [(x, scaled(value)) for x, value in zip(middles, values, strict=True)], color, low)
    for x, name in zip(middles, categories, strict=True):
        canvas.text(x, low + 20, name)
    return canvas.svg(title)


def _bars(canvas: Canvas, tips: Sequence[tuple[float, float]], color: str, low: float) -> None:
    for x, y in tips:
        canvas.box(x - 24, y, 48, low - y, color)


def _curve(canvas: Canvas, tips: Sequence[tuple[float, float]], color: str, _low: float) -> None:
    canvas.line(*tips, color=color)
    canvas.parts += [f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="{color}"/>' for x, y in tips]


_SHAPES: dict[str, Callable[[Canvas, Sequence[tuple[float, float]], str, float], None]] = {"bar": _bars, "line": _curve}
