"""The site: it can be built, holds every page, and a browser that shows it asks nobody else."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site is built with the extra `docs`")
pytest.importorskip("material", reason="the site is built with the extra `docs`")
pytest.importorskip("mkdocstrings", reason="the site is built with the extra `docs`")

import hooks
from mermaid import DrawingError, draw

ROOT = Path(__file__).parents[2]
REMOTE = re.compile(r"(?:https?:)?//[\w.-]+\.\w+/")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


def build(folder, config="mkdocs.yml"):
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)


class Loaded(HTMLParser):
    """What a browser loads by itself when it shows a page, and the classes of its elements."""

    def __init__(self, page):
        super().__init__()
        self.addresses, self.classes = [], set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        said = dict(attrs)
        self.classes |= set((said.get("class") or "").split())
        if tag in {"script", "img", "iframe", "source", "video", "audio", "object", "embed", "use"}:
            self.addresses += [said[name] for name in ("src", "href", "data", "srcset") if said.get(name)]
        elif tag == "link" and said.get("rel") not in {"canonical", "prev", "next"}:
            self.addresses.append(said.get("href") or "")


def test_a_browser_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len([*(ROOT / "docs").rglob("*.md"), *hooks.ELSEWHERE]), "each, and that of no page"
    for page in pages:
        loaded = Loaded(page.read_text())
        assert [address for address in loaded.addresses if REMOTE.match(address)] == [], page.name
        assert "mermaid" not in loaded.classes, "the theme would fetch Mermaid for it"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(?:https?:)?//", sheet.read_text()), sheet.name


def test_the_rule_sees_what_is_loaded():
    page = '<link rel="stylesheet" href="https://fonts.example.com/css"><a href="https://example.com/">a</a>'
    assert [found for found in Loaded(page).addresses if REMOTE.match(found)] == ["https://fonts.example.com/css"]


def test_pages_that_live_elsewhere_are_read_where_they_are(site):
    for path, name in hooks.ELSEWHERE.items():
        heading = re.search(r"^# (.*)$", (ROOT / path).read_text(), re.MULTILINE)
        assert heading is not None
        assert heading[1] in (site / name).with_suffix(".html").read_text()
        assert not (ROOT / "docs" / name).exists(), "it is not copied"


def test_links_to_files_of_the_repository_lead_to_copies(site):
    page = (site / "tutorial.html").read_text()
    assert 'href="source/examples/fan_in.py"' in page
    assert (site / "source/examples/fan_in.py").read_text() == (ROOT / "examples/fan_in.py").read_text()
    assert 'href="protocol.html"' in (site / "design.html").read_text()
    assert 'href="../security.html#' in (site / "how-to/two-hosts.html").read_text()


def test_settings_and_commands_are_listed(site):
    assert "<code>KVXFER_PEER_TIMEOUT</code>" in (site / "reference/settings.html").read_text()
    page = (site / "reference/command-line.html").read_text()
    assert "<code>kvxfer bench matrix</code>" in page
    assert "<code>--bandwidth</code> text" in page


def test_diagrams_in_mermaid_are_drawn(site):
    for name in ("architecture", "serving"):
        source = (ROOT / f"docs/{name}.md").read_text()
        drawn = (site / f"{name}.html").read_text()
        assert len(re.findall(r'<div class="drawing"[^>]*><svg', drawn)) == source.count("```mermaid") > 0
    assert ">QUARANTINED</text>" in (site / "architecture.html").read_text()


@pytest.mark.parametrize("source", ["flowchart LR\n a --> b", "sequenceDiagram\n par a", "stateDiagram-v2\n note"])
def test_a_diagram_that_is_not_understood_is_an_error(source):
    with pytest.raises(DrawingError, match=re.escape(source.splitlines()[-1].strip().split()[0])):
        draw(source)


def test_a_page_that_no_menu_has_fails_the_build(tmp_path):
    config = tmp_path / "mkdocs.yml"
    nav = "nav: [index.md, timeline.md]"
    config.write_text(f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: {ROOT}/docs\nhooks: [{ROOT}/docs/hooks.py]\n{nav}\n")
    done = build(tmp_path / "site", config)
    assert done.returncode != 0
    assert "how-to/routes.md" in done.stderr
    assert "strict mode" in done.stdout + done.stderr


def test_make_check_builds_the_site_with_warnings_as_errors():
    """With `--quiet` mkdocs would not count them."""
    makefile = (ROOT / "Makefile").read_text()
    check = makefile.partition("\ncheck:")[2].partition("\n\n")[0]
    assert "$(SITE) build --strict\n" in check + "\n"
    assert "--quiet" not in check
