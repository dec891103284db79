# ruff: noqa: INP001 - docs is no package; this runs as `python -m docs.generate_errors` from the top of the tree
"""Writes docs/errors.md from the docstrings of `kvxfer.errors` and `kvxfer.errors`.

With `--check` it only says whether the page is current.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from kvxfer import errors
from kvxfer import errors as reports

PAGE = Path(__file__).with_name("errors.md")
_SECTION = re.compile(r"^(Cause|Remedy|Attributes):\s*", re.MULTILINE)


def page() -> str:
    """The whole page."""
    return "\n".join([*_head(), *_classes(errors.KvxferError), *_report(), *_codes()]) + "\n"


def _head() -> Iterator[str]:
    tree = inspect.cleandoc(errors.__doc__ or "").split("\n\n")[1]
    yield "# Errors"
    yield ""
    yield "<!-- Made by `python -m docs.generate_errors` from `kvxfer/errors.py`; changes belong there. -->"
    yield ""
    yield "```text"
    yield inspect.cleandoc(tree)
    yield "```"
    yield ""
    yield "Messages say what happened, the value, the bound or the peer's value, and what to do. Codes are stable: they"
    yield "travel on the wire and are what logs and metrics count."


def _classes(error: type[errors.KvxferError]) -> Iterator[str]:
    yield from _entry(error)
    for derived in _derived(error):
        yield from _classes(derived)


def _entry(error: type[errors.KvxferError]) -> Iterator[str]:
    text, sections = _split(inspect.getdoc(error) or "")
    builtin = [base.__name__ for base in error.__bases__ if base.__module__ == "builtins" and base is not Exception]
    also = f", also a `{'` and a `'.join(builtin)}`" if builtin else ""
    yield ""
    yield f"## `{error.__name__}`"
    yield ""
    yield text
    yield ""
    for alias in (name for name in errors.__all__ if getattr(errors, name) is error and name != error.__name__):
        yield f"- **Also named** `{alias}`"
    if error is not errors.KvxferError:
        yield f"- **Code:** {error.code.value} (`{error.code.name}`){also}"
    for name in ("Cause", "Remedy"):
        if name in sections:
            yield f"- **{name}:** {_joined(sections[name])}"
    for attribute in re.split(r"\n(?=\S)", inspect.cleandoc(sections.get("Attributes", ""))):
        if attribute:
            name, _, meaning = attribute.partition(":")
            yield f"- **Attribute** `{name}`: {_joined(meaning)}"


def _report() -> Iterator[str]:
    _, sections = _split(inspect.getdoc(reports.FailureReport) or "")
    yield ""
    yield "## What is known of a transfer that failed"
    yield ""
    yield "`error.report`, and `transfer.report` also of one that was cancelled, is a `FailureReport`. The log says the"
    yield "same in one line on each side that took part: `fetch_failed` at the decode rank, `transfer_failed` at each"
    yield "prefill rank that had been asked (block ids are counted there)."
    yield ""
    yield "| field | meaning |"
    yield "|---|---|"
    for attribute in re.split(r"\n(?=\S)", inspect.cleandoc(sections["Attributes"])):
        name, _, meaning = attribute.partition(":")
        yield f"| `{name}` | {_joined(meaning)} |"
    yield ""
    yield f"Each `Step`, in the order in which they are reached: {', '.join(f'`{step}`' for step in reports.Step)}."


def _codes() -> Iterator[str]:
    own = {error.code for error in _all(errors.KvxferError)}
    yield ""
    yield "## Reasons that a peer gives"
    yield ""
    yield "`RefusedError.reason` and `TransferFailedError.reason` hold one of the codes above or of these. A code of"
    yield "a newer version reads as `UNKNOWN`."
    yield ""
    yield "| code | name |"
    yield "|---|---|"
    for code in errors.Code:
        if code not in own:
            yield f"| {code.value} | `{code.name}` |"


def _all(error: type[errors.KvxferError]) -> Iterator[type[errors.KvxferError]]:
    yield error
    for derived in _derived(error):
        yield from _all(derived)


def _derived(error: type[errors.KvxferError]) -> list[type[errors.KvxferError]]:
    return [derived for derived in error.__subclasses__() if derived.__module__ == errors.__name__]


def _split(text: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and the sections by name."""
    before, *parts = _SECTION.split(text)
    return before.strip(), dict(zip(parts[::2], parts[1::2], strict=True))


def _joined(text: str) -> str:
    return " ".join(text.split())


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
