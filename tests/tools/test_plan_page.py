"""docs/plan.md says what holds: its tables name what the code knows."""

import json
import re
import shlex
from pathlib import Path

import pytest

from kvxfer.config import Config
from kvxfer.geometry import LAYOUTS
from kvxfer.plans.routes import PROFILES
from kvxfer.tools.engine import KNOWN_TYPES, EngineLayout, read_model
from kvxfer.tools.plan import forecast, parse_engine
from tests.geometry.published import CONFIGS

PAGE = (Path(__file__).parents[2] / "docs/plan.md").read_text()


def section(title):
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def keys_of(value, path=""):
    """Every key of a JSON document, as the page writes them: `pairs[].bytes`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}{key}"
            yield from keys_of(inner, f"{path}{key}.")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from keys_of(value[0], f"{path.removesuffix('.')}[].")


@pytest.mark.usefixtures("no_settings")
def test_the_table_on_the_page_is_what_the_command_prints(command, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Llama-3.1-8B"]))
    monkeypatch.chdir(tmp_path)
    (line,), (shown,) = (
        re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL),
        re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL),
    )
    program, *arguments = shlex.split(line.replace("\\\n", " "))
    code, out, err = command(*arguments)
    assert (program, code, err) == ("kvxfer", 0, "")
    for row, printed in zip(shown.splitlines(), out.splitlines(), strict=False):
        begin, cut, _ = row.partition(" ...")
        assert printed.startswith(begin) if cut else printed.rstrip() == row or row == "..."


def test_every_key_of_the_json_is_documented_and_no_other():
    model = read_model(CONFIGS["Llama-3.2-1B"])
    layout = EngineLayout()
    found = forecast(model, layout, layout, range(16), config=Config(), profile=PROFILES["cpu"])
    documented = set()
    for first, rest in re.findall(r"^\| (`.*?) \| (.*) \|$", section("JSON"), re.MULTILINE):
        outer = re.findall(r"`([^`]+)`", first)
        documented |= set(outer)
        if "[]" not in first:
            documented |= {f"{name}.{inner}" for name in outer for inner in re.findall(r"`(\w+)`", rest)}
        elif outer == ["pairs[].piece_bytes"]:
            documented |= {f"pairs[].piece_bytes.{inner}" for inner in re.findall(r"`(\w+)`", rest)}
    assert documented == set(keys_of(json.loads(json.dumps(found.to_json()))))


def test_the_table_of_layouts_is_that_of_the_code():
    rows = re.findall(r"^\| `([A-Z]+)` \| `([^`]+)`", section("Layout names"), re.MULTILINE)
    assert dict(rows) == dict(LAYOUTS)


def test_every_model_type_that_is_known_is_named_and_no_other():
    rows = re.findall(r"^\|.*\|(.*)\|$", section("Models"), re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", "".join(rows)))
    assert named == {name.removesuffix("_text") for name in KNOWN_TYPES}


def test_the_defaults_of_an_engine():
    rows = re.findall(r"^\| `([\w-]+)` \| (`?\w+`?) \|", section("The command"), re.MULTILINE)
    said = ",".join(f"{key}={value.strip('`')}" for key, value in rows)
    assert len(rows) == 6
    assert parse_engine(said, "page") == parse_engine("", "page")


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_are_named(profile):
    assert f"`{profile}`" in section("The command")
