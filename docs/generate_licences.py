# ruff: noqa: INP001 - docs is no package; this runs as `python docs/generate_licences.py` from the top of the tree
"""Writes docs/licences.md: what kvxfer and its extras require, and the licences that the packages themselves name."""

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

PAGE = Path(__file__).with_name("licences.md")
ROOT = PAGE.parents[1]
NOT_INSTALLED = {"cuda-bindings": "Apache-2.0"}
"""What the development environment leaves out, and what the metadata of its version 13.5.0 says."""
_WORDS = {"Apache 2.0 License": "Apache-2.0", "Apache 2.0": "Apache-2.0", "MIT License": "MIT"}
_SHORT = 60


def page() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def required() -> dict[str, list[str]]:
    """Names of what is required, always and by each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {title: sorted({_name(need) for need in needs}, key=str.lower) for title, needs in groups.items()}


def _lines() -> Iterator[str]:
    yield from ("# Licences", "", "<!-- Made by `make licences` from the packages' own metadata. -->", "")
    yield from _HEAD.splitlines()
    by: dict[str, list[str]] = {}
    for extra, names in required().items():
        for name in names if extra not in _DEVELOPMENT else ():
            by.setdefault(name, []).append(extra)
    saying: dict[str, list[str]] = {}
    for name, extras in by.items():
        of = f" ({', '.join(extras)})" if all(extras) else ""
        saying.setdefault(NOT_INSTALLED.get(name) or licence_of(name), []).append(name + of)
    yield from ("", "| licence | packages (extra) |", "|---|---|")
    for licence, packages in sorted(saying.items()):
        yield f"| {licence} | {', '.join(packages)} |"


_DEVELOPMENT = {"test", "docs"}
_HEAD = """\
kvxfer is under [Apache 2.0](../LICENSE). What it requires, always or with an extra, says this of itself; what that
requires in turn, and libraries inside of wheels, are not listed. Versions are those of `constraints.txt`."""


def _name(need: str) -> str:
    found = re.match(r"[\w.-]+", need)
    if found is None:
        raise ValueError(f"{need!r} names no package")
    return found[0]


def licence_of(name: str) -> str:
    """What an installed package says: its expression, else its short text, else its classifiers.

    Raises:
        PackageNotFoundError: If it is not installed.
        ValueError: If it says nothing.
    """
    said = metadata(name)
    (expression, *_), (text, *_) = (said.get_all(field) or [""] for field in ("License-Expression", "License"))
    text = expression or (text if len(text) <= _SHORT else "")
    if not text:
        classifiers = [line for line in said.get_all("Classifier") or [] if line.startswith("License :: OSI")]
        text = ", ".join(line.rpartition(" :: ")[2] for line in classifiers)
    if not text:
        raise ValueError(f"the metadata of {name} names no licence")
    return _WORDS.get(text, text)


def main() -> int:
    """Write the page."""
    try:
        PAGE.write_text(page(), encoding="utf-8")
    except PackageNotFoundError as error:
        sys.stderr.write(f"{error} is not installed, so its licence cannot be read\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
