"""What the start and how-to pages show runs as it stands, and says what they say; named commands and settings exist."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import generate_reference
import pytest
from blocks import blocks, compare, play

import kvxfer
from kvxfer.config import Config, leaves

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PROGRAMS = Path(sys.executable).parent
HERE = {"PYTHONPATH": str(ROOT), "PATH": f"{PROGRAMS}:/usr/bin:/bin"}
HOW_TO = [DOCS / "index.md", *sorted((DOCS / "how-to").glob("*.md"))]
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]
SETTINGS = {"KVXFER_" + name.upper().replace(".", "__") for name, _ in leaves(Config)}


def name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [page for page in HOW_TO if ' title="' in page.read_text()], ids=name)
def test_what_is_shown_runs(path, tmp_path):
    if "openssl " in path.read_text() and shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    assert play(path.read_text(), tmp_path, HERE)
    for file in tmp_path.glob("*.toml"):
        check = [str(PROGRAMS / "kvxfer"), "config", "--file", file.name]
        done = subprocess.run(check, cwd=tmp_path, env=HERE, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", HOW_TO, ids=name)
def test_settings_and_json_that_are_shown_can_be_read(path, tmp_path):
    for block in blocks(path.read_text()):
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "toml" and not block.title:
            (tmp_path / "settings.toml").write_text(block.text)
            Config.load(tmp_path / "settings.toml")


def options():
    """The options of each command, as the site lists them."""
    for section in re.split(r"^## ", generate_reference.commands(), flags=re.MULTILINE)[1:]:
        path, _, rest = section.partition("\n")
        yield path.strip("`"), set(re.findall(r"`(--[\w-]+)`", rest))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_that_are_shown_exist(path):
    known = dict(options())
    for block in blocks(path.read_text()):
        lines = block.text.replace("\\\n", " ").splitlines() if block.language == "sh" else []
        for line in lines:
            if line.startswith("kvxfer "):
                words = shlex.split(line, comments=True)
                command = next(" ".join(words[:n]) for n in (3, 2, 1) if " ".join(words[:n]) in known)
                used = {word.partition("=")[0] for word in words if word.startswith("--")}
                assert used <= known[command] | known["kvxfer"], line


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_python_that_is_shown_can_be_read_and_names_what_there_is(path):
    for block in blocks(path.read_text()):
        if block.language == "python":
            compile(block.text, name(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            for public in re.findall(r"\bkvxfer\.([A-Z]\w+)", block.text):
                assert public in kvxfer.__all__, public


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_variables_that_are_named_are_settings(path):
    named = set(re.findall(r"\bKVXFER_[A-Z][A-Z_]*[A-Z]\b", path.read_text()))
    assert named <= SETTINGS | {"KVXFER_TLS", "KVXFER_FABRIC", "KVXFER_CONFIG_FILE"}, "settings, groups, or their file"


def test_a_page_that_shows_something_else_is_noticed():
    compare(("took 3.5 ms\n", "a warning\n"), "took 12 ms\n")
    with pytest.raises(AssertionError, match="what is not said"):
        compare(("took 3.5 ms\n", ""), "took 12 ms\ndone\n")
    with pytest.raises(AssertionError, match="not show all"):
        compare(("took 3.5 ms\ndone\n", ""), "took 12 ms\n")
