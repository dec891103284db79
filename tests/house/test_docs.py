"""What the Markdown files say holds: links lead somewhere, the map names every module, code stands in the examples."""

import re
from pathlib import Path

from test_layers import name  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvxfer"
SKIPPED = {"build", "dist", "node_modules"}
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in SKIPPED for part in path.relative_to(ROOT).parts)
)
WRAPPED = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "proto/PROTOCOL.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
COLUMNS = 120

FENCE = re.compile(r"^(```|~~~)(\w*)[^\n]*\n(.*?)^\1\s*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(text):
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(text):
    """The anchors that a forge makes of headings, and those that the site makes of names whose docstrings it shows."""
    plain = FENCE.sub("", text)
    headings = re.findall(r"^#+ +(.*?)\s*$", plain, re.MULTILINE)
    shown = re.findall(r"^::: (\S+)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(shown)


def broken_links(path, text):
    for target in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue  # another site's
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        if not found.exists() or not found.is_relative_to(ROOT):
            yield f"{target}: no such file"
        elif anchor and found.suffix == ".md":
            there = text if found == path else found.read_text()
            if anchor not in anchors(there):
                yield f"{target}: no such heading"


def test_local_links_resolve():
    assert [(name(path), broken) for path in PAGES for broken in broken_links(path, path.read_text())] == []


def test_the_rule_sees_a_broken_link():
    text = "# One thing, well\n[a](LICENSE) [b](nowhere.md) [c](#one-thing-well) [d](#another)\n"
    text += "`[e](f)`\n```\n[g](h)\n```\n"
    assert list(broken_links(ROOT / "README.md", text)) == ["nowhere.md: no such file", "#another: no such heading"]


def test_lines_are_wrapped():
    lines = [(name(path), n, line) for path in WRAPPED for n, line in enumerate(path.read_text().splitlines(), 1)]
    assert [one for one in lines if len(one[2]) > COLUMNS and one[2][:1] != "|"] == []


def test_fences_are_closed():
    fences = {name(path): re.findall(r"^(?:```|~~~)", path.read_text(), re.MULTILINE) for path in PAGES}
    assert [page for page, marks in fences.items() if len(marks) % 2] == []


def test_the_module_map_names_every_room_and_every_module_of_the_root():
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`(\w+\.py|\w+/)`", text[text.index("## Module map") :]))
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert named == rooms | {path.name for path in PACKAGE.glob("*.py")}


def test_code_in_readme_is_that_of_the_examples():
    examples = [path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))]
    snippets = [code for _, language, code in FENCE.findall((ROOT / "README.md").read_text()) if language == "python"]
    assert len(snippets) >= 2, "one of each side"
    for code in snippets:
        assert any(code in example for example in examples), f"not in examples/:\n{code}"


def test_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for path in PAGES:
        for target in re.findall(r"(?:^|`)make (?:[A-Z]+=\S+ )?([a-z]\w*)", path.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name(path)}: make {target}"


def test_examples_that_are_named_exist():
    text = "".join(path.read_text() for path in PAGES)
    assert [found for found in re.findall(r"examples/\w+\.py", text) if not (ROOT / found).exists()] == []


def test_the_changelog_has_its_sections():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[:2] == ["Compatibility policy", "Unreleased"]
    unreleased = re.split(r"^## ", text, flags=re.MULTILINE)[2]
    assert re.findall(r"^### (\w+)$", unreleased, re.MULTILINE)[-1] == "Wire"
    assert re.search(r"^### Wire\n\n- \S", unreleased, re.MULTILINE)
