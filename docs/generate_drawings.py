# ruff: noqa: INP001 - docs is no package; this runs as `python docs/generate_drawings.py` from the top of the tree
"""Draws docs/drawings/*.svg from what the code says: tables of states, golden conversations, the layers of imports."""

import json
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from drawing import Message, Note, sequence, stack, states

from kvxfer.memory import books as extent
from kvxfer.protocol import session
from kvxfer.protocol import transfer as receiving
from kvxfer.protocol import transfer as sending

FOLDER = Path(__file__).with_name("drawings")
ROOT = FOLDER.parents[1]
_PEOPLE = {"decode": "decode rank", "prefill": "prefill rank"}
_DRAWN = {  # conversation -> what it shows
    "staged_two_chunks": "staged",
    "granted_ahead": "in place, granted ahead",
    "pull": "pull",
    "fetch_before_offer": "a fetch that comes before its offer",
    "cancel_between_chunks": "a time-out after the first chunk",
}


def drawings() -> Mapping[str, str]:
    """Every picture by the name of its file."""
    return dict(_states()) | dict(_conversations()) | {"layers.svg": _layers()}


def _states() -> Iterator[tuple[str, str]]:
    yield ("states-session-client.svg", _session("A session at the decode rank", session.Role.CLIENT))
    yield "states-session-server.svg", _session("A session at the prefill rank", session.Role.SERVER)
    for name, title, table, kind in (
        ("sending", "A transfer at the prefill rank", sending.SEND_TRANSITIONS, sending.SendState),
        ("receiving", "A transfer at the decode rank", receiving.RECEIVE_TRANSITIONS, receiving.ReceiveState),
    ):
        moves = [(source.name, target.name, event) for (source, event), target in table.items()]
        yield f"states-{name}.svg", states(title, [state.name for state in kind], moves)
    moves = [(source.name, target.name, "") for source in extent.ExtentState for target in extent.TRANSITIONS[source]]
    yield (
        "states-extent.svg",
        states("An extent of the arena", [state.name for state in extent.ExtentState], sorted(moves)),
    )


def _session(title: str, role: session.Role) -> str:
    moves = [
        (source.name, target.name, f"{message.__name__} received")
        for (one, source, message), target in session.TRANSITIONS.items()
        if one is role
    ]
    open_to = [(state.name, session.State.CLOSED.name, "") for state in session.State if state is not state.CLOSED]
    return states(title, [state.name for state in session.State], moves + open_to)


def _conversations() -> Iterator[tuple[str, str]]:
    vectors = json.loads((ROOT / "proto/vectors/conversations.json").read_text(encoding="utf-8"))
    by_name = {conversation["name"]: conversation for conversation in vectors["conversations"]}
    for name, title in _DRAWN.items():
        steps = list(_frames(by_name[name]["frames"]))
        yield f"frames-{name.replace('_', '-')}.svg", sequence(title, _PEOPLE, steps)


def _frames(frames: list[dict[str, Any]]) -> Iterator[Message | Note]:
    """The frames of a conversation as arrows; the handshake as one note."""
    after = [frame for frame in frames if frame["message"] not in {"HELLO", "WELCOME", "AGENT"}]
    greeted = [frame["message"] for frame in frames if frame not in after]
    yield Note(("decode", "prefill"), f"once a pair: {', '.join(dict.fromkeys(greeted))}")
    for (source, message), alike in groupby(after, key=lambda frame: (frame["from"], frame["message"])):
        times = len(list(alike))
        target = "prefill" if source == "decode" else "decode"
        yield Message(source, target, message if times == 1 else f"{message} x {times}")


def _layers() -> str:
    loader = SourceFileLoader("test_layers", str(ROOT / "tests/house/test_layers.py"))
    module = ModuleType(loader.name)
    module.__file__ = loader.path
    loader.exec_module(module)
    table: Mapping[str, tuple[set[str], set[str], set[str]]] = module.LAYERS
    shown = [name for name in table if name != "package"]
    height: dict[str, int] = {}
    while len(height) < len(shown):
        for name in shown:
            below = table[name][1] & set(shown)
            if name not in height and below <= set(height):
                height[name] = 1 + max((height[other] for other in below), default=-1)
    rows = [[name for name in shown if height[name] == level] for level in sorted(set(height.values()), reverse=True)]
    return stack(
        "Layers of imports, those that others import below", [[_layer(name, table) for name in row] for row in rows]
    )


def _layer(name: str, table: Mapping[str, tuple[set[str], set[str], set[str]]]) -> tuple[str, list[str]]:
    modules, _, packages = table[name]
    lines = [", ".join(sorted(modules)) if modules else "every other module"]
    return name, lines + ([f"({', '.join(sorted(packages))})"] if packages else [])


def main() -> None:
    """Write the pictures."""
    made = drawings()
    for path in FOLDER.glob("*.svg"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
