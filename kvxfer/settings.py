"""Where settings come from, and what is said when one is wrong.

Three readings (arguments, environment, file) are made into pydantic-settings sources, best first. Each reading also
remembers the origin of every value, so that `kvxfer config` and error messages can name the variable or the file. Names
are checked here, in all three: pydantic-settings ignores a mistyped environment variable, and this library must not.

This module knows no setting by name; `kvxfer.config` declares them.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Final, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from kvxfer.errors import ConfigError

__all__ = [
    "PREFIX",
    "Reading",
    "SettingsGroup",
    "Source",
    "cpu_numbers",
    "leaves",
    "parse_affinity",
    "parse_duration",
    "parse_mapping",
    "parse_names",
    "parse_optional",
    "parse_size",
    "read_arguments",
    "read_environment",
    "read_file",
    "shown_path",
    "translate",
]

PREFIX: Final = "KVXFER_"
"""Every environment variable that begins with this (in any case) must be a setting."""

_NESTED: Final = "__"
# numbers are exact, so the digits of an exponent are limited: 1e999999999 would be written out
_NUMBER: Final = re.compile(r"\s*([+-]?\d+(?:\.\d+)?(?:e[+-]?\d{1,3})?)\s*([a-z]*)\s*", re.IGNORECASE)
_SIZES: Final = {"": 1, "b": 1} | {
    f"{letter}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kmgt", start=1)
}
_DURATIONS: Final = {
    "": Fraction(1),
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
_CPUS: Final = 100_000  # more than a kernel can be built for
_CPU_LIST: Final = re.compile(r"\d{1,5}(-\d{1,5})?(\s*,\s*\d{1,5}(-\d{1,5})?)*")
_SHOWN_CHARACTERS: Final = 80
_PATH_CHARACTERS: Final = 4096
_NOT_CALLED: Final = "default_factory_not_called"
"""What pydantic says of a default that is made of other settings when one of them is wrong: that one is named."""
_ADVICE: Final = {  # by pydantic's type of error, whose bounds fill the braces
    "greater_than_equal": "set it to at least {ge}",
    "greater_than": "set it to more than {gt}",
    "less_than_equal": "set it to at most {le}",
    "less_than": "set it to less than {lt}",
    "literal_error": "set it to {expected}",
    "string_too_short": "give at least {min_length} characters",
    "string_too_long": "give at most {max_length} characters",
    "string_type": "set it to text",
    "int_parsing": "set it to a whole number",
    "int_type": "set it to a whole number",
    "int_from_float": "set it to a whole number",
    "float_parsing": "set it to a number",
    "float_type": "set it to a number",
    "extra_forbidden": "there is no such setting; `kvxfer config` prints all of them",
}


@dataclass(frozen=True)
class Reading:
    """What one source says.

    Attributes:
        values: Nested by setting, not yet validated.
        origins: Dotted name of each setting that is given, with where it is given.
    """

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[str, str] = field(default_factory=dict[str, str])


class Source(PydanticBaseSettingsSource):
    """A reading as a source of pydantic-settings, which merges the sources field by field."""

    def __init__(self, settings_cls: type[BaseSettings], reading: Reading) -> None:
        super().__init__(settings_cls)
        self._reading = reading

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """One top-level value, its name, and that it needs no further decoding."""
        return self._reading.values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """All values of the reading."""
        return self._reading.values


class SettingsGroup(BaseModel):
    """Settings below one name, such as `fabric`; also made by itself and given as one value.

    Attributes:
        prefix: What stands before the names of its settings, with the dot.
        hidden: Settings whose values never appear in a message.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)

    prefix: ClassVar[str]
    hidden: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, **arguments: Any) -> None:
        read_arguments(type(self), arguments)
        try:
            super().__init__(**arguments)
        except ValidationError as error:
            raise translate(error, hidden=self.hidden, prefix=self.prefix) from error


def parse_size(value: object) -> object:
    """Bytes from an int or from text such as `256MiB`, `1GiB`, `64KiB`, `100MB`; a plain number is bytes.

    Raises:
        ValueError: If the text is not a size or not a whole number of bytes.
    """
    if isinstance(value, bool | float) or not isinstance(value, int | str):
        raise ValueError("a size is a whole number of bytes, or text such as '256MiB' or '100MB'")  # noqa: TRY004 - pydantic collects ValueError
    if isinstance(value, int):
        return value
    number, unit = _number(value, _SIZES, "a size is a number of bytes, or with a unit (B, KB, KiB ... TiB): '256MiB'")
    size = number * _SIZES[unit]
    if size.denominator != 1:
        raise ValueError("this is not a whole number of bytes")
    return int(size)


def parse_duration(value: object) -> object:
    """Seconds from a number or from text such as `5s`, `200ms`, `2m`; a plain number is seconds.

    A number too large for a float is infinite, and its bound is for the field to check.

    Raises:
        ValueError: If the text is not a duration, or the number is not finite.
    """
    hint = "a duration is a number of seconds, or with a unit (us, ms, s, m, h): '200ms'"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(hint)  # noqa: TRY004 - as above
    if isinstance(value, str):
        number, unit = _number(value, _DURATIONS, hint)
        return _seconds(number * _DURATIONS[unit])
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(hint)
    return _seconds(value)


def cpu_numbers(text: str) -> tuple[int, ...]:
    """CPU numbers from text such as `0-7,16`, as the Linux kernel writes lists of them; in order, each once.

    Raises:
        ValueError: If the text is something else.
    """
    if not _CPU_LIST.fullmatch(text.strip()):
        raise ValueError("a list of CPUs is numbers and ranges of them: '0-7,16'")
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"the range {part.strip()} of CPUs runs backwards")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def parse_affinity(value: object) -> object:
    """`auto`, `off`, or CPU numbers from a list, from one number, or from text: `0-7,16` or a JSON list.

    Raises:
        ValueError: If it is none of these.
    """
    hint = "affinity is 'auto', 'off', or CPU numbers: '0-7,16' or [0, 1]"
    if isinstance(value, str):
        text = value.strip().lower()
        if text in {"auto", "off"}:
            return text
        if not text.startswith("["):
            try:
                return cpu_numbers(text)
            except ValueError as error:
                raise ValueError(f"{hint} ({error})") from error
        value = _json(text)
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | tuple | set | frozenset | range):
        raise ValueError(hint)  # noqa: TRY004 - pydantic collects ValueError
    numbers = list(cast("Iterable[object]", value))
    if not numbers or not all(type(number) is int and 0 <= number < _CPUS for number in numbers):
        raise ValueError(hint)
    return tuple(sorted(set(cast("list[int]", numbers))))


def parse_names(value: object) -> object:
    """A tuple from text: a JSON list, or names separated by commas (how environment variables give lists)."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return _json(value)
    return tuple(name.strip() for name in value.split(",") if name.strip())


def parse_mapping(value: object) -> object:
    """A mapping from text in JSON (how environment variables give one)."""
    return _json(value) if isinstance(value, str) else value


def parse_optional(value: object) -> object:
    """None from empty text and from `none`, which is how the environment and TOML can say that nothing is set."""
    return None if isinstance(value, str) and value.strip().lower() in {"", "none"} else value


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and declaration of every setting of a model, nested ones included."""
    for name, declared in model.model_fields.items():
        inner = _nested(declared)
        if inner is None:
            yield prefix + name, declared
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def read_arguments(model: type[BaseModel], arguments: Mapping[str, Any]) -> Reading:
    """The arguments as a reading; a nested model counts with the fields that were set on it.

    Raises:
        ConfigError: If a name is unknown.
    """
    values = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in arguments.items()
    }
    return Reading(values, dict(_origins(model, values, "argument")))


def read_environment(model: type[BaseModel], environ: Mapping[str, str]) -> Reading:
    """Every `KVXFER_*` variable as a reading. Names are compared without regard to case.

    Raises:
        ConfigError: If a variable is not the name of a setting, or is given twice in different case.
    """
    reading = Reading()
    known = {PREFIX + name.upper().replace(".", _NESTED): name for name, _ in leaves(model)}
    groups = {PREFIX + name.upper(): name for name, declared in model.model_fields.items() if _nested(declared)}
    seen: dict[str, str] = {}
    given = sorted((name.upper() not in groups, name) for name in environ if name.upper().startswith(PREFIX))
    for _, variable in given:  # a whole group first, so that its single settings win over it
        upper = variable.upper()
        if upper in seen and environ[variable] != environ[seen[upper]]:
            raise ConfigError(f"{variable} and {seen[upper]} are both set, to different values; unset one of them")
        seen[upper] = variable
        if upper in groups:
            group = groups[upper]
            values = {group: _group(variable, environ[variable])}
            reading.origins.update(_origins(model, values, variable))
            reading.values.update(values)
        elif upper in known:
            _insert(reading.values, known[upper], environ[variable])
            reading.origins[known[upper]] = variable
        else:
            raise ConfigError(
                f"environment variable {variable} is not a setting; {_nearest(upper, [*known, *groups], PREFIX)}"
            )
    return reading


def read_file(model: type[BaseModel], path: Path) -> Reading:
    """A TOML or JSON file (by its suffix) as a reading.

    Raises:
        ConfigError: If the file cannot be read or parsed, or a name in it is unknown.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        match path.suffix.lower():
            case ".toml":
                values: Any = tomllib.loads(text)
            case ".json":
                values = json.loads(text)
            case other:
                raise ConfigError(f"configuration file {path} has the suffix {other!r}; name it .toml or .json")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"configuration file {shown_path(path)} cannot be read: {reason}; check the path") from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # bad TOML, bad JSON, not UTF-8 (all say where), or nested too deeply
        raise ConfigError(f"configuration file {path} cannot be parsed: {error}; correct it there") from error
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {path} holds a {type(values).__name__}; it must hold names and values")
    values = cast("dict[str, Any]", values)
    return Reading(values, dict(_origins(model, values, str(path))))


def translate(
    error: ValidationError,
    *,
    origins: Mapping[str, str] | None = None,
    hidden: frozenset[str] = frozenset(),
    prefix: str = "",
) -> ConfigError:
    """Say every problem of a pydantic error as field, value, origin and what to do.

    Args:
        error: What pydantic raised.
        origins: Where each setting was given, by dotted name.
        hidden: Settings whose values never appear in a message.
        prefix: Put before each name, for a nested model that was made by itself.
    """
    sentences = [
        _sentence(details, origins or {}, hidden, prefix)
        for details in error.errors(include_url=False)
        if details["type"] != _NOT_CALLED
    ]
    return ConfigError("; ".join(dict.fromkeys(sentences)))


def _sentence(details: ErrorDetails, origins: Mapping[str, str], hidden: frozenset[str], prefix: str) -> str:
    context = details.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    name = prefix + ".".join(str(part) for part in details["loc"])
    origin = next((origins[known] for known in origins if name == known or name.startswith(f"{known}.")), None)
    secret = any(name == known or name.startswith(f"{known}.") for known in hidden)
    shown = "hidden" if secret else _shown(details["input"])
    given = f"{name} is {shown}" + (f" (from {origin})" if origin and origin != "argument" else "")
    return f"{given}: {cause if cause is not None else _advice(details['type'], context, details['msg'])}"


def _advice(kind: str, context: Mapping[str, Any], message: str) -> str:
    advice = _ADVICE.get(kind)
    return advice.format(**context) if advice else f"{message[:1].lower()}{message[1:]}; correct the value"


def shown_path(path: Path) -> str:
    """A path as a message quotes it: whole, if there can be such a file."""
    return _cut(str(path), _PATH_CHARACTERS)


def _shown(value: object) -> str:
    return _cut(repr(value), _SHOWN_CHARACTERS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."


def _number(text: str, units: Mapping[str, object], hint: str) -> tuple[Fraction, str]:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ValueError(hint)
    return Fraction(match[1]), match[2].lower()


def _seconds(number: Fraction | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not valid JSON ({error})") from error


def _group(variable: str, text: str) -> Any:
    try:
        return _json(text)
    except ValueError as error:
        raise ConfigError(f"{variable}: {error}; or set one value at a time, as {variable}__NAME") from error


def _nested(declared: FieldInfo) -> type[BaseModel] | None:
    kind = declared.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _origins(
    model: type[BaseModel], values: Mapping[str, Any], origin: str, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Check every name of one reading, and say where each setting was given."""
    for name, value in values.items():
        declared = model.model_fields.get(name)
        if declared is None:
            nearest = _nearest(f"{prefix}{name}", [known for known, _ in leaves(model, prefix)])
            raise ConfigError(f"{_place(origin)}{f'{prefix}{name}'!r} is not a setting; {nearest}")
        inner = _nested(declared)
        if inner is None:
            yield prefix + name, origin
        elif isinstance(value, Mapping):
            yield from _origins(inner, cast("Mapping[str, Any]", value), origin, f"{prefix}{name}.")
        else:
            raise ConfigError(
                f"{_place(origin)}{name} is {_shown(value)}; it is a group of settings: give names and values"
            )


def _place(origin: str) -> str:
    return "" if origin == "argument" else f"{origin}: "


def _nearest(name: str, known: list[str], shared: str = "") -> str:
    """The known name that is most like this one, not counting what all of them begin with."""
    bare = [other.removeprefix(shared) for other in known]
    near = difflib.get_close_matches(name.removeprefix(shared), bare, n=1, cutoff=0.6)
    return f"did you mean {shared}{near[0]}?" if near else "`kvxfer config` prints all settings"


def _insert(values: dict[str, Any], dotted: str, value: object) -> None:
    *path, last = dotted.split(".")
    for name in path:
        values = values.setdefault(name, {})
    values[last] = value
