# ruff: noqa: INP001 - docs is no package; mkdocs.yml names this file
"""What mkdocs does not do by itself for a site that is made of the repository's own pages.

- Pages that live elsewhere (the protocol, the changelog, ...) become part of the site. They are read where they are.
- Links are written as a forge reads them. Those that leave `docs/` lead to such a page, or to a copy of the file that
  they name, so that the site is whole without the repository and offline.
- Headings have the anchors that a forge gives them.
- Settings, commands and codes of errors are read from the code.
- Diagrams in Mermaid are drawn here (`mermaid.py`); a browser has nothing to load.
"""

import os.path
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from generate_reference import codes, commands, settings
from mermaid import draw
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ELSEWHERE = {  # file in the repository -> page of the site
    "proto/PROTOCOL.md": "protocol.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
PAGES = ELSEWHERE | {"README.md": "index.md"}  # the README is not shown, but something takes its place
MADE = {
    "<!-- codes: docs/hooks.py puts them here -->": codes,
    "<!-- commands: docs/hooks.py puts them here -->": commands,
    "<!-- settings: docs/hooks.py puts them here -->": settings,
}
_COPIES = "source"
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as a forge has them, and our own drawings."""
    config.mdx_configs["toc"]["slugify"] = anchor
    config.mdx_configs["pymdownx.superfences"] = {
        "custom_fences": [{"name": "mermaid", "class": "drawing", "format": _drawing}]
    }
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that live elsewhere, and copies of the files that any page links to."""
    for path, name in ELSEWHERE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    for file in [file for file in files if file.is_documentation_page()]:
        for target in _targets(file):
            copy = f"{_COPIES}/{target}"
            if files.get_file_from_path(copy) is None and (ROOT / target).is_file():
                files.append(File.generated(config, copy, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them, and what is made of the code where a page marks its place."""
    del config, files
    for mark, made in MADE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())

    def relinked(found: re.Match[str]) -> str:
        target = _resolved(page.file, found[1])
        place = None if target is None else _place(target, page.file)
        if place is None:
            return found[0]
        return os.path.relpath(place, Path(page.file.src_uri).parent) + (found[2] or "")

    return _outside_code(markdown, lambda text: _LINK.sub(relinked, text))


def anchor(heading: str, separator: str) -> str:
    """The anchor that a forge makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def _drawing(source: str, _language: str, _class: str, _options: Mapping[str, Any], _markdown: Any, **_: Any) -> str:
    svg = draw(source).replace("<svg ", '<svg style="max-width: 100%; height: auto" ', 1)  # whole, if it is wide
    return f'<div class="drawing">{svg}</div>'


def _targets(file: File) -> Iterator[str]:
    """Files of the repository, outside of docs, that a page links to and that are no page of the site."""
    text = Path(_source(file)).read_text(encoding="utf-8")
    for found in _LINK.finditer(_FENCE.sub("", text)):
        target = _resolved(file, found[1])
        place = None if target is None else _place(target, file)
        if place is not None and place.startswith(f"{_COPIES}/"):
            yield place.removeprefix(f"{_COPIES}/")


def _resolved(file: File, link: str) -> str | None:
    """The path in the repository that a link means; None for a link to somewhere else."""
    if re.match(r"[a-z]+:|/", link):
        return None
    target = Path(os.path.normpath(Path(_source(file)).parent / link))
    if not target.is_relative_to(ROOT):
        raise PluginError(f"{file.src_uri} links to {link}, which is outside of the repository")
    return target.relative_to(ROOT).as_posix()


def _place(target: str, file: File) -> str | None:
    """Where in the site a file of the repository is; None if mkdocs finds it by itself."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/") if file.src_uri in ELSEWHERE.values() else None
    if (ROOT / target).is_dir():
        target += "/__init__.py"  # whose docstring says what the folder is for
    return PAGES.get(target) or f"{_COPIES}/{target}"


def _source(file: File) -> str:
    if file.abs_src_path is None:
        raise PluginError(f"{file.src_uri} has no file")
    return file.abs_src_path


def _outside_code(text: str, change: Any) -> str:
    parts, begin = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[begin : fence.start()]), fence[0]]
        begin = fence.end()
    return "".join([*parts, change(text[begin:])])
