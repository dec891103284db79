"""How an engine is written on a command line: `tp=4,pp=2,block=16,layout=HND,cross-layer`."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvxfer.errors import ConfigError, GeometryError, TokensError
from kvxfer.geometry import LAYOUTS
from kvxfer.tools.engine import EngineLayout

__all__ = ["nearest", "parse_engine", "parse_tokens"]


def nearest(name: str, known: Sequence[str]) -> str:
    """What to say of a name that is not one of the known ones."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def parse_engine(text: str, option: str) -> EngineLayout:
    """Read an engine: `key=value` and flags, separated by commas; what is not said has the default.

    `pp` is a number of stages or the layers of each (`pp=20+12`), `layout` a name or an axis string.

    Args:
        text: What was written.
        option: Where, for messages.

    Raises:
        ConfigError: Naming the option, the value and the nearest known name.
    """
    given: dict[str, Any] = {}
    for term in filter(None, (term.strip() for term in text.split(","))):
        name, separator, value = (part.strip() for part in term.partition("="))
        if name not in _KEYS:
            raise ConfigError(f"{option} {text}: {name!r} is unknown: {nearest(name, list(_KEYS))}")
        field, read = _KEYS[name]
        if field in given:
            raise ConfigError(f"{option} {text}: {name} is given twice")
        if (read is None) == bool(separator):
            form = f"{name} alone, without a value" if read is None else f"{name}=VALUE"
            raise ConfigError(f"{option} {text}: {term!r} is not understood: write {form}")
        try:
            given[field] = True if read is None else read(value)
        except ValueError as error:
            raise ConfigError(f"{option} {text}: {name}={value} is not possible: {error}") from error
    try:
        return EngineLayout(**given)
    except GeometryError as error:
        raise ConfigError(f"{option} {text}: {error}") from error


def parse_tokens(text: str) -> range:
    """Read a token range: `N` for the first N tokens, or `A:B` where the first A are held already, `N:N` where all are.

    Raises:
        TokensError: If it is none.
    """
    first, separator, last = text.partition(":")
    try:
        found = range(_whole(first), _whole(last)) if separator else range(_whole(first))
    except ValueError as error:
        raise TokensError(f"--tokens {text} is not possible: {error}, or A:B") from error
    if found.stop < max(found.start, 1):
        raise TokensError(f"--tokens {text} is not possible: that is no token; give N or A:B with A <= B")
    return found


def _whole(text: str) -> int:
    if not (text.strip().isdecimal() and text.isascii()):
        raise ValueError("give a whole number")
    return int(text)


def _stages(text: str) -> int | list[int]:
    counts = [_whole(term) for term in text.split("+")]
    return counts if len(counts) > 1 else counts[0]


def _layout(text: str) -> str:
    if " " not in text and text not in LAYOUTS:
        raise ValueError(f"it is no axis string and no layout: {nearest(text, list(LAYOUTS))}")
    return text


_KEYS: Final[Mapping[str, tuple[str, Callable[[str], Any] | None]]] = {
    "tp": ("tp", _whole),
    "pp": ("pp", _stages),
    "cp": ("cp", _whole),
    "cp-chunk": ("cp_chunk", _whole),
    "block": ("block", _whole),
    "kernel-block": ("kernel_block", _whole),
    "layout": ("layout", _layout),
    "cross-layer": ("cross_layer", None),
}
"""What may be said of an engine: the field of `EngineLayout`, and how its value is read; None for a flag."""
