# ruff: noqa: INP001 - docs is no package; docs/hooks.py imports this
"""What the site says of settings, commands and codes of errors, made of the code."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo

from kvxfer import errors
from kvxfer.config import PREFIX, Config, leaves, parse_duration, parse_size
from kvxfer.tools.cli import app

_UNITS = {parse_size: "bytes", parse_duration: "seconds"}
_TYPES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true, false",
    Path: "path",
    tuple: "list",
    list: "list",
}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def settings() -> str:
    """Every setting, and how long failures take to be heard of."""
    return _page(_settings())


def codes() -> str:
    """Every code with the errors that carry it."""
    carry: dict[errors.Code, list[str]] = {}
    for name in errors.__all__:
        error = getattr(errors, name)
        if isinstance(error, type) and issubclass(error, errors.KvxferError) and error is not errors.KvxferError:
            carry.setdefault(error.code, []).append(f"`{name}`")
    rows = (f"| {code.value} | `{code.name}` | {', '.join(carry.get(code, ()))} |" for code in errors.Code)
    return _page(("| code | name | error |", "|---|---|---|", *rows))


def commands() -> str:
    """Every command with its options."""
    return _page(_group("kvxfer", app, set()))


def _page(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


# --- settings


def _settings() -> Iterator[str]:
    yield from ("| setting | variable | takes | default | what |", "|---|---|---|---|---|")
    for name, declared in leaves(Config):
        variable = PREFIX + name.upper().replace(".", "__")
        takes = "; ".join(filter(None, (_type(declared), _bounds(declared))))
        what = " ".join((declared.description or "").split()).replace("|", r"\|")
        yield f"| `{name}` | `{variable}` | {takes} | {_default(name, declared)} | {what} |"
    yield from ("", "## How long failures take to be heard of", "")
    yield "`Config.bounds()` computes them from the settings. The last column is what the defaults give."
    yield from ("", "| failure | counted from | formula | seconds |", "|---|---|---|---|")
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", inspect.getdoc(Config.bounds) or "", re.MULTILINE)
    for (kind, said), (computed, seconds) in zip(rows, _plain().bounds().items(), strict=True):
        if kind != computed:
            raise ValueError(f"the docstring of bounds() has {kind} where {computed} is computed")
        yield f"| `{kind}` |{said}| {seconds:g} |"


def _plain() -> Config:
    """Defaults alone, whatever the environment says."""
    for variable in [variable for variable in os.environ if variable.upper().startswith(PREFIX)]:
        del os.environ[variable]
    return Config()


def _metadata(annotation: Any, declared: Iterable[Any] = ()) -> Iterator[Any]:
    """What is said of a type, in it and around it."""
    for said in declared:
        yield from said.metadata if isinstance(said, FieldInfo) else (said,)
    for inner in getattr(annotation, "__args__", ()):
        yield from _metadata(inner, getattr(inner, "__metadata__", ()))


def _type(declared: FieldInfo) -> str:
    units = [_UNITS[said.func] for said in _metadata(declared.annotation, declared.metadata) if _parser(said) in _UNITS]
    return units[0] if units else _named(declared.annotation)


def _parser(said: Any) -> Any:
    return getattr(said, "func", None)


def _named(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if annotation is type(None):
        return "`none`"
    kind = get_origin(annotation) or annotation
    if kind in _TYPES:
        return _TYPES[kind]
    if kind is Mapping or (isinstance(kind, type) and issubclass(kind, Mapping)):
        return "JSON"
    if isinstance(kind, type) and kind.__name__ == "SecretStr":
        return "text"
    inner = [part for part in (_named(part) for part in get_args(annotation)) if part]
    return ", ".join(dict.fromkeys(inner))


def _bounds(declared: FieldInfo) -> str:
    size = _type(declared) == "bytes"
    found: dict[str, Any] = {}
    for said in _metadata(declared.annotation, declared.metadata):
        for kind in _BOUNDS:
            bound = getattr(said, kind, None)
            if bound is not None:
                tighter = min if kind in {"le", "lt"} else max
                found[kind] = tighter(bound, found.get(kind, bound))
    return ", ".join(f"{_BOUNDS[kind]} {_amount(bound, size=size)}" for kind, bound in found.items())


def _amount(value: Any, *, size: bool) -> str:
    if size and value:
        for unit, name in _SIZES:
            if value % unit == 0:
                return f"{value // unit}{name}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _default(name: str, declared: FieldInfo) -> str:
    value: Any = _plain()
    for part in name.split("."):
        value = getattr(value, part)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{','.join(map(str, value))}`" if value else "empty"
    if value in ("", {}):
        return "empty"
    kind = _type(declared)
    return f"`{_amount(value, size=kind == 'bytes')}`" if isinstance(value, int | float) else f"`{value}`"


# --- commands


def _group(path: str, group: typer.Typer, told: set[str]) -> Iterator[str]:
    registered = group.registered_callback
    if registered is not None and registered.callback is not None:
        yield from _command(path, registered.callback, told)
    for command in group.registered_commands:
        if command.callback is not None:
            yield from _command(f"{path} {command.name or command.callback.__name__}", command.callback, told)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            yield from _group(f"{path} {inner.name}", inner.typer_instance, told)


def _command(path: str, function: Callable[..., Any], told: set[str]) -> Iterator[str]:
    yield from ("", f"## `{path}`", "", inspect.cleandoc(function.__doc__ or ""))
    hints = get_type_hints(function, include_extras=True)
    rows = [_parameter(name, hints[name], one.default) for name, one in inspect.signature(function).parameters.items()]
    if new := [row for row in rows if row not in told]:
        yield from ("", "| | |", "|---|---|", *new)
    if old := [row for row in rows if row in told]:
        yield from ("", f"And, as above: {', '.join(row.split(' ')[1] for row in old)}.")
    told |= set(new)


def _parameter(name: str, annotation: Any, default: Any) -> str:
    kind, said = get_args(annotation)
    if isinstance(said, typer.models.OptionInfo):
        given = [one for one in (said.default, *(said.param_decls or ())) if isinstance(one, str)]
        names = given or [f"--{name.replace('_', '-')}"]
    else:
        names = [(said.metavar or name.upper()).replace("|", r"\|")]
    takes = "" if kind is bool else f" {_named(kind).replace(', `none`', '') or str(said.metavar).lower()}"
    shown = "" if default in (None, False, "") else f" Default `{default}`."
    if default is inspect.Parameter.empty:
        shown = " Required."
    return f"| {', '.join(f'`{one}`' for one in names)}{takes} | {said.help or ''}{shown} |"
