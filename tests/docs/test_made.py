"""Pages and pictures that are made of the code are current, and pages name all that they should."""

import importlib.metadata
import inspect
import re
import typing
from pathlib import Path

import generate_drawings
import generate_licences
import generate_reference
import pytest

import kvxfer
from kvxfer import errors, tickets
from kvxfer.config import Config, leaves
from kvxfer.protocol import transfer as receiving
from kvxfer.protocol import transfer as sending

DOCS = Path(__file__).parents[2] / "docs"
PINS = dict(line.split("==") for line in (DOCS.parent / "constraints.txt").read_text().split())


def as_pinned():
    names = {name for group in generate_licences.required().values() for name in group}
    names -= set(generate_licences.NOT_INSTALLED)
    return all(importlib.metadata.version(name).partition("+")[0] == PINS[name] for name in names)


def test_drawings_are_current():
    there = {path.name: path.read_text() for path in (DOCS / "drawings").iterdir()}
    assert there == dict(generate_drawings.drawings()), "run `make drawings`"


def test_every_drawing_is_on_a_page():
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert [name for name in generate_drawings.drawings() if f"(drawings/{name})" not in pages] == []


@pytest.mark.parametrize(
    ("table", "drawing"),
    [(sending.SEND_TRANSITIONS, "states-sending.svg"), (receiving.RECEIVE_TRANSITIONS, "states-receiving.svg")],
)
def test_every_state_and_event_of_a_table_is_drawn(table, drawing):
    made = generate_drawings.drawings()[drawing]
    shown = re.findall(r"<text [^>]*>([^<]*)</text>", made)
    assert sorted(event for _, event in table) == sorted(text for text in shown if text.islower())
    assert {state.name for (source, _), target in table.items() for state in (source, target)} <= set(shown)
    assert made.count("marker-end") == len(table)


def test_a_picture_of_another_table_is_another_picture(monkeypatch):
    before = generate_drawings.drawings()["states-sending.svg"]
    fewer = dict(list(sending.SEND_TRANSITIONS.items())[1:])
    monkeypatch.setattr(sending, "SEND_TRANSITIONS", fewer)
    assert generate_drawings.drawings()["states-sending.svg"] != before


def test_every_setting_is_in_the_reference():
    page = generate_reference.settings()
    rows = re.findall(r"^\| `([\w.]+)` \| `(KVXFER_\w+)` \| (.+?) \| (.+?) \| (.+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == [name for name, _ in leaves(Config)]
    assert {row[0]: row[2:4] for row in rows}["arena_bytes"] == ("bytes; at most 128TiB, at least 0", "`512MiB`")
    assert {row[0]: row[2:4] for row in rows}["peer_timeout"][1] == "`20`"


@pytest.mark.usefixtures("no_settings")
def test_none_as_text_means_nothing_where_the_reference_says_so(monkeypatch):
    page = (DOCS / "reference/settings.md").read_text()
    (excepted,) = re.findall(r"`none`, that as text, .*?; a `(\w+)` can only be\s+left out", page, re.DOTALL)
    rows = re.findall(
        r"^\| `([\w.]+)` \| `(KVXFER_\w+)` \| .* \| none \| ", generate_reference.settings(), re.MULTILINE
    )
    assert excepted in dict(rows)
    for name, variable in rows:
        with monkeypatch.context() as patched:
            patched.setenv(variable, "none")
            if name == excepted:
                with pytest.raises(errors.ConfigError, match="at least 16"):
                    Config()
            else:
                assert {setting.name: setting.value for setting in Config().effective()}[name] is None


def test_every_public_name_is_in_the_reference():
    shown = set(re.findall(r"^::: kvxfer\.(\w+)$", (DOCS / "reference/api.md").read_text(), re.MULTILINE))
    page = (DOCS / "errors.md").read_text() + generate_reference.codes()
    explained = {name for name in errors.__all__ if f"`{name}`" in page} | {"Code"}
    assert explained == set(errors.__all__)
    assert set(kvxfer.__all__) - {"__version__"} <= shown | explained
    assert not (set(kvxfer.__all__) & shown & explained), "each has one place"


def returned(kind):
    """Classes of kvxfer that a class's public methods and attributes give."""
    for name, member in inspect.getmembers(kind):
        method = member.fget if isinstance(member, property) else member
        if inspect.isfunction(method) and method.__module__.startswith("kvxfer.") and not name.startswith("_"):
            waiting = [typing.get_type_hints(method).get("return")]
            while waiting:
                found = waiting.pop()
                waiting += typing.get_args(found)
                if inspect.isclass(found) and found.__module__.startswith("kvxfer."):
                    yield found


def test_what_is_made_for_a_user_is_in_the_reference():
    shown = set(re.findall(r"^::: kvxfer\.([\w.]+)$", (DOCS / "reference/api.md").read_text(), re.MULTILINE))
    there = {name.rpartition(".")[2] for name in shown} | set(errors.__all__) | set(tickets.__all__)
    for kind in (kvxfer.Worker, kvxfer.BlockingWorker, kvxfer.Offer, kvxfer.Transfer, kvxfer.Config):
        assert [made for made in returned(kind) if made.__name__ not in there] == [], kind


def test_licences_are_current():
    try:
        made = generate_licences.page()
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"{error} is not installed here")
    if not as_pinned():
        pytest.skip("these are not the versions of constraints.txt")
    assert generate_licences.PAGE.read_text() == made, "run `make licences`"


def test_the_tested_versions_are_those_that_are_pinned():
    page = (DOCS / "compatibility.md").read_text()
    rows = {row[0]: row[1] for row in re.findall(r"^\| ([^|]*?) \| ([^|]*?) \| ", page, re.MULTILINE)}
    for row, pins in {
        "torch": ["torch"],
        "NIXL": ["nixl"],
        "Triton": ["triton"],
        "numpy": ["numpy"],
        "uvloop": ["uvloop"],
        "transformers, for the demo and the serving example": ["transformers"],
        "starlette, prometheus_client, for `kvxfer.tools.admin`": ["starlette", "prometheus_client"],
    }.items():
        assert re.findall(r"\d+\.\d+\.\d+", rows[row]) == [PINS[pin] for pin in pins], row
