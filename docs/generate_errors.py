# ruff: noqa: INP001 - docs is no package; this runs as `python -m docs.generate_errors` from the top of the tree
"""Writes docs/errors.md: the codes of `kvxfer.errors`, behind which the site shows its docstrings.

With `--check` it only says whether the page is current.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from kvxfer import errors

PAGE = Path(__file__).with_name("errors.md")


def page() -> str:
    """The whole page."""
    return "\n".join([*_head(), *_explained(), *_codes()]) + "\n"


def _head() -> Iterator[str]:
    yield "# Errors"
    yield ""
    yield "<!-- Made by `make errors` from `kvxfer/errors.py`; changes belong there. -->"
    yield ""
    yield "`KvxferError` is the base of all. Messages say what happened, and what to do. `error.report`, and"
    yield "`transfer.report` also of one that was cancelled, is a `FailureReport`, which names the `Step` it was at;"
    yield "the log says the same (`fetch_failed`, `transfer_failed`). In the repository read"
    yield "[`kvxfer/errors.py`](../kvxfer/errors.py)."


def _codes() -> Iterator[str]:
    named: dict[errors.Code, list[str]] = {}
    for name in errors.__all__:
        error = getattr(errors, name)
        if isinstance(error, type) and issubclass(error, errors.KvxferError) and error is not errors.KvxferError:
            named.setdefault(error.code, []).append(name)
    yield ""
    yield "## Codes"
    yield ""
    yield "They are stable: they travel on the wire, and are what logs and metrics count. Those without an error are"
    yield "reasons that a peer gives (`RefusedError.reason`, `TransferFailedError.reason`). One of a newer version"
    yield "reads as `UNKNOWN`."
    yield ""
    yield "| code | name | error |"
    yield "|---|---|---|"
    for code in errors.Code:
        yield f"| {code.value} | `{code.name}` | {', '.join(f'`{name}`' for name in named.get(code, ()))} |"


def _explained() -> Iterator[str]:
    yield ""
    yield "## Tree, causes and remedies"
    yield ""
    yield "::: kvxfer.errors"
    yield "    options:"
    yield "      show_root_heading: false"
    yield "      show_root_toc_entry: false"
    yield "      show_bases: true"
    yield "      filters: ['!^_', '!^Code$', '!^code$']"


def main() -> int:
    """Write the page, or compare it."""
    current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if "--check" in sys.argv[1:]:
        if current != page():
            sys.stderr.write(f"{PAGE.name} is stale: run `make errors`\n")
        return int(current != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
