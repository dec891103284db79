"""The settings of a worker: arguments, then `KVXFER_*` variables, then a file, then defaults. TLS is among them.

A `Config` is frozen and complete: whatever reads it never asks the environment again. Names are the same everywhere:
`Config(fabric={"num_workers": 2})`, `KVXFER_FABRIC__NUM_WORKERS=2`, and in a file `fabric.num_workers = 2`. A name that
is not known is an error that gives the nearest one, in all three places.

Sizes are bytes as int, or text such as `256MiB`; durations are seconds as number, or text such as `200ms`.
"""

import difflib
import json
import math
import os
import re
import ssl
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, NoReturn, Self, TypeAlias, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvxfer.errors import ConfigError
from kvxfer.names import (
    MAX_CTAS,
    MAX_WORLD,
    Endpoint,
    check_advertise,
    check_listen,
    check_patterns,
    cpu_numbers,
    is_admitted,
)

__all__ = [
    "PREFIX",
    "Config",
    "Contexts",
    "Credentials",
    "FabricConfig",
    "Setting",
    "SettingsGroup",
    "TlsConfig",
    "leaves",
    "parse_affinity",
    "parse_duration",
    "parse_mapping",
    "parse_names",
    "parse_optional",
    "parse_size",
    "shown_path",
    "translate",
]

# --- where settings come from
#
# What each source gives is laid over what worse ones gave, one setting by one. Every name is checked, and where each
# value comes from is remembered, so that `kvxfer config` and error messages can name the variable or the file.

PREFIX: Final = "KVXFER_"
"""Every environment variable that begins with this (in any case) must be a setting, or name the file of them."""

_FILE_VARIABLE: Final = PREFIX + "CONFIG_FILE"  # says where settings are, and is none
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
_SHOWN_CHARACTERS: Final = 80
_PATH_CHARACTERS: Final = 4096
_HIDDEN: Final = frozenset({"secret", "fabric.backend_params"})
"""Settings whose values never appear in a message."""
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
    "string_unicode": "set it to text in UTF-8",
    "int_parsing": "set it to a whole number",
    "int_type": "set it to a whole number",
    "int_from_float": "set it to a whole number",
    "float_parsing": "set it to a number",
    "float_type": "set it to a number",
    "extra_forbidden": "there is no such setting; `kvxfer config` prints all of them",
}


class SettingsGroup(BaseModel):
    """Settings below one name, such as `fabric`; also made by itself and given as one value."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)

    prefix: ClassVar[str]  # what stands before the names of its settings, with the dot

    def __init__(self, **arguments: Any) -> None:
        _lay_over({}, {}, type(self), arguments, "argument")
        try:
            super().__init__(**arguments)
        except ValidationError as error:
            raise translate(error, prefix=self.prefix) from error


def parse_size(value: object) -> int:
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


def _given(
    model: type[BaseModel], file: object, arguments: Mapping[str, Any]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """What file, environment and arguments give, nested by setting and not yet validated, and where; the best last."""
    if file is None:
        named = (value for name, value in os.environ.items() if name.upper() == _FILE_VARIABLE)
        file = parse_optional(next(named, None))
    if file is not None:
        if not isinstance(file, str | os.PathLike):
            raise ConfigError(f"config_file is {file!r}: give the path of a TOML or JSON file")
        path = Path(cast("str | os.PathLike[str]", file))
        yield _in_file(path), str(path)
    yield from _in_environment(model)
    yield arguments, "argument"


def _in_environment(model: type[BaseModel]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Every `KVXFER_*` variable. Names are compared without regard to case."""
    known = {PREFIX + name.upper().replace(".", _NESTED): name for name, _ in leaves(model)}
    groups = {PREFIX + name.upper(): name for name, declared in model.model_fields.items() if _nested(declared)}
    seen: dict[str, str] = {}
    given = sorted(
        (name.upper() not in groups, name)
        for name in os.environ
        if name.upper().startswith(PREFIX) and name.upper() != _FILE_VARIABLE
    )
    for _, variable in given:  # a whole group first, so that its single settings win over it
        upper, value = variable.upper(), os.environ[variable]
        if upper in seen and value != os.environ[seen[upper]]:
            raise ConfigError(f"{variable} and {seen[upper]} are both set, to different values; unset one of them")
        seen[upper] = variable
        if upper in groups:
            yield {groups[upper]: _group(variable, value)}, variable
        elif upper in known:
            *path, name = known[upper].split(".")
            values: dict[str, Any] = {name: value}
            for outer in reversed(path):
                values = {outer: values}
            yield values, variable
        else:
            raise ConfigError(
                f"environment variable {variable} is not a setting; {_nearest(upper, [*known, *groups], PREFIX)}"
            )


def _in_file(path: Path) -> dict[str, Any]:
    """A TOML or JSON file (by its suffix)."""
    try:
        text = _of_home(path).read_text(encoding="utf-8-sig")
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
    return cast("dict[str, Any]", values)


def translate(error: ValidationError, *, origins: Mapping[str, str] | None = None, prefix: str = "") -> ConfigError:
    """Say every problem of a pydantic error as field, value, origin and what to do.

    Values of secret settings never appear. `prefix` stands before each name, for a nested model made by itself.
    """
    sentences = [
        _sentence(details, origins or {}, prefix)
        for details in error.errors(include_url=False)
        if details["type"] != _NOT_CALLED
    ]
    return ConfigError("; ".join(dict.fromkeys(sentences)))


def _sentence(details: ErrorDetails, origins: Mapping[str, str], prefix: str) -> str:
    context = details.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    name = prefix + ".".join(str(part) for part in details["loc"])
    origin = next((origins[known] for known in origins if name == known or name.startswith(f"{known}.")), None)
    secret = any(name == known or name.startswith(f"{known}.") for known in _HIDDEN)
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


def _lay_over(
    values: dict[str, Any],
    origins: dict[str, str],
    model: type[BaseModel],
    given: Mapping[str, Any],
    origin: str,
    prefix: str = "",
) -> None:
    """Let what a better source gives win, one by one also within a group, and note where each setting was given.

    A nested model counts with the fields that were set on it.
    """
    for name, value in _by_field(model, given):
        declared = model.model_fields.get(name)
        if declared is None:
            nearest = _nearest(f"{prefix}{name}", [known for known, _ in leaves(model, prefix)])
            raise ConfigError(f"{_place(origin)}{f'{prefix}{name}'!r} is not a setting; {nearest}")
        plain = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        inner = _nested(declared)
        if inner is None:
            values[name], origins[prefix + name] = plain, origin
        elif isinstance(plain, Mapping):
            group, names = values.setdefault(name, {}), cast("Mapping[str, Any]", plain)
            _lay_over(group, origins, inner, names, origin, f"{prefix}{name}.")
        else:
            kind = type(plain).__name__  # there may be secrets in it
            raise ConfigError(f"{_place(origin)}{name} is a group of settings: give names and values, not {kind}")


def _by_field(model: type[BaseModel], given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of a group may be given by their whole names, as they are printed."""
    for name, value in given.items():
        group, _, single = str(name).partition(".")
        yield (group, {single: value}) if single and group in model.model_fields else (name, value)


def _place(origin: str) -> str:
    return "" if origin == "argument" else f"{origin}: "


def _nearest(name: str, known: list[str], shared: str = "") -> str:
    """The known name that is most like this one, not counting what all of them begin with."""
    bare = [other.removeprefix(shared) for other in known]
    near = difflib.get_close_matches(name.removeprefix(shared), bare, n=1, cutoff=0.6)
    return f"did you mean {shared}{near[0]}?" if near else "`kvxfer config` prints all settings"


# --- TLS
#
# Only TLS 1.3 is spoken. Both ends are ranks of kvxfer, so nothing older needs to be understood; what 1.3 leaves out
# (renegotiation, certificates in the clear, ciphers to choose from) cannot be configured wrongly.
#
# Contexts never change. Files that were renewed make new ones, which the next handshake takes; streams that are open
# go on.

_PEM: Final = "-----BEGIN"
_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_KEY: Final = b"PRIVATE KEY-----"


def _parse_path(value: object) -> object:
    value = parse_optional(value)
    if _PEM in repr(value):  # its value must not get into a message: it may be a key
        raise ConfigError("a setting of tls holds PEM text itself; put it into a file and give the file's path")
    return _of_home(value) if isinstance(value, str) else value


def _of_home(path: str | Path) -> Path:
    """A path below `~` or `~user` in full; as it is where there is no such user, which reading it says."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - that of `Path` raises then


def _check_name(name: str | None) -> str | None:
    if name is not None:
        try:  # asked for as a handshake does
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=name)
        except (ValueError, TypeError) as error:
            raise ValueError(f"no certificate can carry this name: {error}; give one that they do") from error
    return name


Text: TypeAlias = Annotated[str, Field(min_length=1)]  # pydantic sees only with a bound whether it is UTF-8
PemFile: TypeAlias = Annotated[Path | None, BeforeValidator(_parse_path)]


class TlsConfig(SettingsGroup):
    """TLS on control streams over TCP; Unix sockets stay plain. On once `authorities` is set.

    Raises:
        ConfigError: If a setting lacks another one, or a file is missing or unusable.
    """

    prefix = "tls."

    def __init__(self, **arguments: Any) -> None:  # type checkers would refuse text where a field is a path
        super().__init__(**arguments)

    authorities: PemFile = None
    """PEM file of certificates that vouch for peers; switches TLS on. Set it where others share the network."""
    certificate: PemFile = None
    """PEM file of this worker's certificate, then intermediate ones. Set it at listeners; with `mutual`, everywhere."""
    key: PemFile = None
    """PEM file of its private key, not encrypted. Set it where the file of the certificate does not hold it."""
    mutual: bool = True
    """Whether who connects here must show a certificate too; without, where decode ranks have none, only the listener
    does."""
    server_name: Annotated[Text | None, BeforeValidator(parse_optional), AfterValidator(_check_name)] = None
    """Name that the certificates of listeners must carry, where they share one; none: the host of the endpoint that is
    connected to."""

    @property
    def enabled(self) -> bool:
        """Whether streams over TCP use TLS."""
        return self.authorities is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = next((name for name in ("certificate", "key", "server_name") if getattr(self, name) is not None), None)
        if given and self.authorities is None:
            raise ConfigError(
                f"tls.{given} is set and tls.authorities is not: nobody would know whom to believe; set it to the "
                "certificate of the authority that signed those of all workers"
            )
        if self.key is not None and self.certificate is None:
            raise ConfigError("tls.key is set and tls.certificate is not; set both, or none of them")
        if self.authorities is not None:
            _load(self)
        return self


@dataclass(frozen=True, slots=True)
class Contexts:
    """What handshakes are made with, as a client and as a server, which takes a certificate."""

    client: ssl.SSLContext
    server: ssl.SSLContext | None
    stamps: list[object]  # of the files that they were made of


class Credentials:
    """The contexts of one worker, made anew when their files have changed."""

    def __init__(self, config: TlsConfig) -> None:
        self._config: Final = config
        self.contexts: Contexts | None = None  # those of the last `renew`

    def renew(self) -> Contexts:
        """The contexts of the files as they are now. Reads the disk; safe from several threads at once.

        Raises:
            ConfigError: If they have changed and cannot be used. `contexts` are those of before.
        """
        contexts = self.contexts
        if contexts is None or contexts.stamps != _stamps(self._config):
            contexts = self.contexts = _load(self._config)
        return contexts


def _load(config: TlsConfig) -> Contexts:
    if config.authorities is None:
        raise ConfigError("tls.authorities is not set")
    stamps = _stamps(config)  # as they are before they are read: what is written meanwhile is seen next time
    _read_pem("authorities", config.authorities, _CERTIFICATE)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks names and demands a certificate
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED if config.mutual else ssl.CERT_NONE
    server.num_tickets = 0  # a stream is opened once a pair: nobody resumes one
    for context in (client, server):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        _translated(f"tls.authorities {config.authorities}", context.load_verify_locations, config.authorities)
        if config.certificate is not None:
            _load_chain(context, config.certificate, config.key)
    return Contexts(client, server if config.certificate is not None else None, stamps)


def _load_chain(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    _read_pem("certificate", certificate, _CERTIFICATE)
    _read_pem("key" if key else "certificate", key or certificate, _KEY)

    def no_passphrase() -> NoReturn:  # without this, OpenSSL would ask on the terminal
        raise ConfigError(
            f"tls.key {key or certificate} is encrypted, and nobody is there to type a passphrase; store it without "
            "one (`openssl pkey -in FILE -out NEW`), readable by this user alone"
        )

    where = f"tls.certificate {certificate} with " + (f"tls.key {key}" if key else "the key in it")
    _translated(where, context.load_cert_chain, certificate, key, no_passphrase)


def _read_pem(name: str, path: Path, marker: bytes) -> None:
    """See whether a file can be read, and is PEM of the right kind."""
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"tls.{name} is {shown_path(path)!r}, which cannot be read: {reason}; correct the path, or let this user "
            "read it"
        ) from error
    if marker not in content:
        kind = "certificate" if marker is _CERTIFICATE else "private key"
        advice = "; name the file of the key with tls.key" if name == "certificate" and marker is _KEY else ""
        raise ConfigError(f"tls.{name} is {str(path)!r}, which holds no {kind} in PEM form{advice}")


def _translated(where: str, load: Callable[..., None], *arguments: Any) -> None:
    try:
        load(*arguments)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{where}: the key does not belong to the certificate; take both of one issue") from error
        raise ConfigError(f"{where} cannot be used: {error.reason or error}; replace the file") from error
    except OSError as error:  # it went away since it was looked at
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}; correct the path") from error


def _stamps(config: TlsConfig) -> list[object]:
    return [_stamp(path) for path in (config.authorities, config.certificate, config.key)]


def _stamp(path: Path | None) -> object:
    """What changes when a file is replaced or rewritten; None where there is no file."""
    try:
        seen = path.stat() if path is not None else None
    except OSError:
        return None
    return None if seen is None else (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns)


# --- the settings

KIB: Final = 1024
MIB: Final = 1024 * KIB
_SHARE_ALIGNMENT: Final = 512  # as `kvxfer.memory` has it, which a test compares
_CHUNK_BYTES: Final = 32 * MIB
_IN_PLACE_CHUNK_BYTES: Final = 256 * MIB
_CLOSE_SECONDS: Final = 5.0
_HEARTBEAT_SECONDS: Final = 2.0
_MANY: Final = 4096
_SAMPLED_EVERY: Final = 16
_SECRET_CHARACTERS: Final = 16
_MASK: Final = "**********"
_SENSITIVE: Final = ("secret", "password", "token", "key", "credential")


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective setting.

    Attributes:
        name: Dotted name.
        value: Plain value as JSON would hold it; secrets are masked.
        source: `argument`, the name of an environment variable, the path of a file, or `default`.
        description: What it means.
    """

    name: str
    value: object
    source: str
    description: str


def _check_backends(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names or len(set(names)) != len(names):
        raise ValueError("name at least one NIXL backend, each once, as in 'UCX'")
    return names


def _check_secret(secret: SecretStr | None) -> SecretStr | None:
    if secret is not None and len(secret.get_secret_value()) < _SECRET_CHARACTERS:
        length = len(secret.get_secret_value())
        raise ValueError(f"it has {length} characters; use at least {_SECRET_CHARACTERS}, drawn at random")
    if secret is not None and not _is_text(secret.get_secret_value()):
        raise ValueError("it is no UTF-8, as bytes drawn at random seldom are; write them as text, in base64 say")
    return secret


def _is_text(value: str) -> bool:
    """Whether it can be encoded: a variable of the environment that is no UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# no address space is larger; a number without a bound could not even be multiplied with a share
Size: TypeAlias = Annotated[int, Field(le=1 << 47), BeforeValidator(parse_size)]
# durations travel as milliseconds in 32 bits, so a thousandth is the least and 10^6 seconds (11 days) are ample
Duration: TypeAlias = Annotated[float, Field(ge=0.001, le=1_000_000), BeforeValidator(parse_duration)]
# a tenth of it is a heartbeat, which is no less than a millisecond either
Patience: TypeAlias = Annotated[float, Field(ge=0.01, le=1_000_000), BeforeValidator(parse_duration)]
Names: TypeAlias = Annotated[tuple[Text, ...], BeforeValidator(parse_names)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=1 << 20)]


def _usual_chunk(given: Mapping[str, Any]) -> int:
    """What `chunk_bytes` is if nobody says: control work is by chunk, and a few of them should fit at once."""
    arena: int = given.get("arena_bytes", 0)
    if not arena:
        return _CHUNK_BYTES
    share = _send_share(arena)
    return max(_SHARE_ALIGNMENT, min(_CHUNK_BYTES, max(share // 4, min(share, _CHUNK_BYTES // 2))))


def _send_share(arena: int) -> int:
    """Bytes for sending, of an arena of so many."""
    return arena // 2 // _SHARE_ALIGNMENT * _SHARE_ALIGNMENT


class FabricConfig(SettingsGroup):
    """Settings of the transport below (NIXL)."""

    prefix = "fabric."

    def __init__(self, **arguments: Any) -> None:  # type checkers would refuse `"8MiB"` where a field is an int
        super().__init__(**arguments)

    backends: Annotated[Names, AfterValidator(_check_backends)] = ("UCX",)
    """NIXL backends to create, best first, where it is not UCX that knows the network."""
    backend_params: Annotated[Mapping[str, Mapping[str, str]], BeforeValidator(parse_mapping)] = Field(
        default_factory=dict[str, Mapping[str, str]]
    )
    """Parameters by backend name, as a backend's manual asks for; passed on as they are, in the environment as JSON."""
    num_workers: Annotated[Annotated[int, Field(ge=1, le=1024)] | None, BeforeValidator(parse_optional)] = None
    """Worker threads of the backend, where one does not fill the lane; none leaves it to the backend."""
    devices: Names = ()
    """Network devices to use, such as `mlx5_0`, where some are others'; empty means all that the backend finds."""
    max_descriptors: Annotated[int, Field(ge=1, le=65536)] = 1024
    """Pieces in one post at most, fewer where a post takes long; 16 times as many where the transport takes those
    between GPUs as one list."""
    scatter_lists: bool = False
    """Pieces go to UCX as one list. Set it where all caches are on GPUs; between GPU and CPU UCX 1.23 fails."""
    max_post_bytes: Annotated[Size, Field(ge=4 * KIB)] = 4 * MIB
    """Bytes in one post at most, on lanes that copy inside the post; see `no_progress_timeout` for slow links."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        return ((name, _masked(value)) for name, value in super().__repr_args__())

    @field_serializer("backend_params", when_used="json")
    def _shown_params(self, params: Mapping[str, Any]) -> Any:
        return _masked(params)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if unknown := sorted(set(self.backend_params) - set(self.backends)):
            raise ConfigError(
                f"fabric.backend_params names {unknown[0]!r}, but fabric.backends is {', '.join(self.backends)}; "
                "name the backend there too, or drop its parameters"
            )
        return self


class Config(BaseModel):
    """The settings of a worker. Frozen; see the module for where values come from.

    Raises:
        ConfigError: If a name is unknown, or a value malformed, out of its bounds, or at odds with another.
    """

    model_config = SettingsGroup.model_config | ConfigDict(validate_default=True)

    engine: Annotated[str, Field(min_length=1, max_length=128)] = "kvxfer"
    """Name of this engine, as peers show it: one of its own for each of several."""
    model: Annotated[str, Field(max_length=1024)] = ""
    """Name of the model: set it where engines of several models could meet; empty at one of two: not compared."""
    rank: Annotated[int, Field(ge=0)] = 0
    """This worker's rank in its engine, where that has several."""
    world: Annotated[int, Field(ge=1, le=MAX_WORLD)] = 1
    """Ranks of this engine: several where a model is spread over GPUs."""

    listen: Annotated[Text, AfterValidator(check_listen)] = "unix"
    """`unix` (a private socket in a fresh 0700 directory), `unix:/path`, or for peers on other hosts `tcp:host:port`
    (port 0: any free one)."""
    advertise: Annotated[Text | None, BeforeValidator(parse_optional), AfterValidator(check_advertise)] = None
    """Endpoint in the card: set it where peers reach `listen` at another address; port 0: the one that `listen` got."""
    traces: Literal["off", "otel"] = "off"
    """`otel`, where spans are collected: those of fetches and offers go to OpenTelemetry, and peers are told to which
    trace a fetch belongs."""

    secret: Annotated[SecretStr | None, AfterValidator(_check_secret)] = None
    """Shared by both engines, wherever others reach their ports; peers prove that they know it, and it never
    travels."""
    trust: Literal["auto", "full", "none"] = "auto"
    """Whom to give access to whole allocations: `auto` the same host, and beyond it whoever proves the secret; `full`,
    in a closed network, everybody; `none`, where peers are not to know addresses, nobody."""
    allow_peers: Annotated[Names, AfterValidator(check_patterns)] = ("unix:*", "tcp:*")
    """Endpoints that this worker connects to, as patterns: `unix:/run/kvxfer/*`, `tcp:10.0.*:*`, `tcp:[fd00::7]:*`;
    fewer where others can hand it tickets. A host of digits and no letters stands for addresses alone, not for
    names."""
    convert: bool = False
    """As a decode rank, convert: set it where prefill engines have other dtypes or scales, else they are refused."""

    route: Literal["auto", "mapped", "staged", "direct", "pull"] = "auto"
    """How bytes travel; `auto` chooses for each transfer. Name one to measure it."""
    arena_bytes: Annotated[Size, Field(ge=0)] = 512 * MIB
    """Staging memory of this worker, half for sending and half for receiving: more where fetches wait for it; 0
    switches the staged route off."""
    arena_kind: Literal["auto", "cpu", "cuda", "fabric", "pinned"] = "auto"
    """Memory of the arena; `auto` follows the cache, and for a GPU falls back to pinned host memory. `pinned` where the
    GPU's is short, `fabric` (with a handle) where NVLink reaches the other host."""
    chunk_bytes: Annotated[Size, Field(ge=512, le=1 << 40)] = Field(default_factory=_usual_chunk)
    """Bytes of one chunk at most, or about that on routes in place. Left out, 32 MiB on the route `staged` (of a small
    arena a quarter of its share, but 16 MiB if it has them), and 256 MiB on the others, whose chunks need no staging
    memory. Smaller ones suit a slow lane."""
    window: Annotated[int, Field(ge=1, le=1024)] = 6
    """Chunks of one transfer in flight at most, where they are not granted all at once, in place: more where the lane
    is idle between them."""
    copy_ctas: Annotated[int, Field(ge=1, le=MAX_CTAS)] = 24
    """Thread blocks that a copy on a GPU may occupy: fewer leave more of it to the model. `Worker.occupy` changes it
    while the worker runs."""
    affinity: Annotated[Literal["auto", "off"] | tuple[int, ...], BeforeValidator(parse_affinity)] = "auto"
    """CPUs of this worker's threads and pinned memory: `auto` those next to the GPU, `off` any, or a list (`0-7,16`)
    where others share the host."""

    integrity: Literal["off", "sampled", "full"] = "off"
    """As a decode rank, compare what arrived with what the prefill rank holds: no chunk, one in 16, or, where hardware
    is suspected, all."""

    peer_timeout: Patience = 20.0
    """Silence after which a peer is in doubt: longer where processes stand still, shorter to notice a lost host sooner.
    A tenth of it, 2 s at most, is the heartbeat: a frame is sent that often, and more often to a peer whose own
    heartbeat is shorter, up to every 0.1 s."""
    revoke_timeout: Duration = 15.0
    """How long evidence that memory is safe is waited for before `MemoryInDoubtError`: shorter where blocks can
    be spared."""
    grant_lease: Duration = 30.0
    """How long a grant may wait for its post: longer where work on its blocks takes longer. Where more is under way
    than `window` chunks of `chunk_bytes`, in proportion longer, so that a slow wire gets to all of it. As long staging
    memory is waited for, where a fetch has no time-out."""
    offer_lease: Patience = 60.0
    """How long an offer lives after the last claim: shorter where blocks of lost requests are missed. The heartbeat is
    a tenth of it at most."""
    unclaimed_timeout: Duration = 120.0
    """How long an offer waits for its first claim, and a fetch or claim for its offer: longer than requests queue."""
    connect_timeout: Duration = 5.0
    """To open a stream, longer over a slow network; its handshake, TLS and wire-up included, may take six times as
    long."""
    no_progress_timeout: Duration = 30.0
    """How long a posted write or read may stand still: no part of it (4 at once, of `fabric.max_post_bytes`) ends. On a
    link so slow that it does not move within that time what is under way to a peer, raise it, or make parts smaller."""
    drain_timeout: Annotated[float, Field(ge=0, le=1_000_000), BeforeValidator(parse_duration)] = 10.0
    """How long transfers may go on after a drain began: less than whoever stops the process waits. 0 cancels them at
    once."""

    max_transfers: Count = 1024
    """Transfers alive on each side of this worker, and requests that somebody is early for: fewer bound its memory. One
    peer may have three quarters of either. Four times as many, and 4096 in any case, may be on offer, and as many
    streams be open."""

    fabric: FabricConfig = FabricConfig()
    """The transport below."""
    tls: TlsConfig = TlsConfig()
    """TLS on control streams over TCP."""

    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict[str, str])

    # of any type for those who check types: `Config(**settings)` may be given a mapping of numbers
    def __init__(self, config_file: Any = None, **arguments: Any) -> None:
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for given, origin in _given(type(self), config_file, arguments):
            _lay_over(values, origins, type(self), given, origin)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise translate(error, origins=origins) from error
        self._origins = origins

    @classmethod
    def load(cls, file: str | os.PathLike[str] | None = None, **arguments: Any) -> Self:
        """Settings with a file, which otherwise `KVXFER_CONFIG_FILE` names.

        Args:
            file: TOML or JSON, by its suffix.
            **arguments: Settings by name; these win over everything.

        Raises:
            ConfigError: As the constructor does, and if the file cannot be read.
        """
        return cls(file, **arguments)

    @property
    def send_bytes(self) -> int:
        """Bytes of the arena for sending."""
        return _send_share(self.arena_bytes)

    @property
    def receive_bytes(self) -> int:
        """Bytes of the arena for receiving, which lie behind those."""
        return self.arena_bytes // _SHARE_ALIGNMENT * _SHARE_ALIGNMENT - self.send_bytes

    @property
    def sums_every(self) -> int:
        """One chunk in so many is compared with its source; 0: none."""
        return {"off": 0, "sampled": _SAMPLED_EVERY, "full": 1}[self.integrity]

    @property
    def in_place_chunk_bytes(self) -> int:
        """About how many bytes a chunk has at most, on routes that need no staging memory."""
        return self.chunk_bytes if "chunk_bytes" in self.model_fields_set else _IN_PLACE_CHUNK_BYTES

    @property
    def heartbeat(self) -> float:
        """Seconds after which a frame is sent at the latest: a peer's patience, or a lease, outlasts several."""
        return min(_HEARTBEAT_SECONDS, self.peer_timeout / 10, self.offer_lease / 10)

    @property
    def handshake_timeout(self) -> float:
        """Seconds from the open stream to the end of the handshake, TLS and wire-up included."""
        return 6 * self.connect_timeout

    @property
    def close_timeout(self) -> float:
        """Seconds that threads and the transport may take to stop."""
        return min(_CLOSE_SECONDS, self.revoke_timeout)

    @property
    def max_offers(self) -> int:
        """Offers alive at most, and control streams that peers have opened; one more is turned away."""
        return max(_MANY, 4 * self.max_transfers)

    def admits(self, endpoint: str) -> bool:
        """Whether `allow_peers` lets this worker connect to an endpoint."""
        return any(is_admitted(endpoint, pattern) for pattern in self.allow_peers)

    def bounds(self) -> Mapping[str, float]:
        """Seconds after which, at the latest, the caller hears of each kind of failure.

        Scheduling delays of this process come on top, and a heartbeat where it stood still as a lease ran out. Every
        formula adds the settings that run one after another:

        | kind | counted from | formula |
        |---|---|---|
        | `unreachable_peer` | the attempt to connect; nobody answers | `connect_timeout` |
        | `handshake` | the attempt to connect; the peer answers and then stalls | `7 * connect_timeout` |
        | `silent_peer` | the peer's last frame: silence begins the doubt, then evidence is sought | `peer_timeout + revoke_timeout` |
        | `dead_peer` | its stream closed: evidence is sought at once | `revoke_timeout` |
        | `unclaimed_offer` | the offer that nobody claims; likewise a fetch or claim that no offer follows | `unclaimed_timeout` |
        | `released_by_lease` | the last renewal: the lease ends, or the doubt about the peer begins and a post of ours made until then stands still; then evidence is sought | `max(offer_lease, peer_timeout + no_progress_timeout) + revoke_timeout` |
        | `revoke` | a cancellation or time-out, or a withdrawal while our own copy reads, or a call of the transport does not return: the blocks are safe or `MemoryInDoubtError` is raised | `revoke_timeout` |
        | `fetch` | the time-out of a fetch (`timeout=`): it has raised | `revoke_timeout` |
        | `stuck_link` | the last progress of a post, the peer answering all the while; if it is a call of the transport that does not return, after 5 s at least | `no_progress_timeout + revoke_timeout` |
        | `rebuild` | a doubt that only a new agent ends (the peer's host is gone, or its process on this host; or our own post stands still): the memory is given back, if the system lets an agent be made and no copy of ours stands still on a GPU; one may be under way when it is noticed | `peer_timeout + 2 * revoke_timeout` |
        | `drain` | the begin of a drain: what is not done is cancelled | `drain_timeout + revoke_timeout` |
        | `close` | the begin of a close: drain, cancel, then stop the threads and the transport | `drain_timeout + revoke_timeout + min(5, revoke_timeout)` |
        """  # noqa: E501 - a row of a table is one line
        return MappingProxyType(
            {
                "unreachable_peer": self.connect_timeout,
                "handshake": self.connect_timeout + self.handshake_timeout,
                "silent_peer": self.peer_timeout + self.revoke_timeout,
                "dead_peer": self.revoke_timeout,
                "unclaimed_offer": self.unclaimed_timeout,
                "released_by_lease": max(self.offer_lease, self.peer_timeout + self.no_progress_timeout)
                + self.revoke_timeout,
                "revoke": self.revoke_timeout,
                "fetch": self.revoke_timeout,
                "stuck_link": self.no_progress_timeout + self.revoke_timeout,
                "rebuild": self.peer_timeout + 2 * self.revoke_timeout,
                "drain": self.drain_timeout + self.revoke_timeout,
                "close": self.drain_timeout + self.revoke_timeout + self.close_timeout,
            }
        )

    def sources(self) -> Mapping[str, str]:
        """Where each setting comes from: `argument`, a variable's name, a file's path, or `default`."""
        return MappingProxyType({name: self._origins.get(name, "default") for name, _ in leaves(type(self))})

    def effective(self) -> tuple[Setting, ...]:
        """Every setting with its value and source, in the order of declaration; secrets are masked."""
        dumped, sources = self.model_dump(mode="json"), self.sources()
        settings: list[Setting] = []
        for name, declared in leaves(type(self)):
            value: Any = dumped
            for part in name.split("."):
                value = value[part]
            settings.append(Setting(name, value, sources[name], declared.description or ""))
        return tuple(settings)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := "; ".join(self._problems()):
            raise ConfigError(problems)
        return self

    def _problems(self) -> Iterator[str]:
        """What is wrong between settings that are each right alone."""
        if self.rank >= self.world:
            yield f"rank is {self.rank} and world is {self.world}: ranks run from 0 to world - 1; mend one of them"
        if self.advertise is None and Endpoint.parse(self.listen).anywhere:
            yield (
                f"listen is {self.listen!r}, which peers cannot connect to; set advertise to the address at which they "
                "reach this worker, as in 'tcp:10.0.0.7:0'"
            )
        if self.advertise is not None and not (
            Endpoint.parse(self.advertise).reachable or self.listen.startswith("tcp:")
        ):
            yield (
                f"advertise is {self.advertise!r}, whose port 0 is the one that listen got, and listen is "
                f"{self.listen!r}; set listen too, as in 'tcp:0.0.0.0:0', or name the port"
            )
        if self.listen.startswith("tcp:") and self.tls.enabled and self.tls.certificate is None:
            yield (
                f"listen is {self.listen!r} and tls.authorities is set, but tls.certificate is not: a listener shows a "
                "certificate; set tls.certificate and tls.key"
            )
        yield from self._memory_problems()

    def _memory_problems(self) -> Iterator[str]:
        if self.arena_bytes == 0 and self.route == "staged":
            yield "route is 'staged' and arena_bytes is 0, which switches it off; give it an arena, or route = 'auto'"
        if self.arena_bytes == 0 and self.convert:
            yield (
                "convert is set and arena_bytes is 0, but of the routes only mapped, which not every peer allows, and "
                "staged convert; give it an arena"
            )
        if self.trust == "none" and self.route in {"mapped", "direct", "pull"}:
            yield (
                f"trust is 'none' and route is {self.route!r}, which needs peers that know each other's addresses; set "
                "trust to 'auto' or 'full', or route to 'staged' or 'auto'"
            )
        elif self.trust == "none" and self.arena_bytes == 0:
            yield (
                "trust is 'none' and arena_bytes is 0: without addresses only the staged route is left, and that needs "
                "an arena; give it one, or set trust to 'auto' or 'full'"
            )
        if self.arena_bytes > 0 and self.route in {"auto", "staged"} and self.chunk_bytes > self.receive_bytes:
            yield (
                f"chunk_bytes is {self.chunk_bytes} and the receive share of the arena {self.receive_bytes} bytes "
                f"(arena_bytes {self.arena_bytes}): a chunk must fit into it; lower chunk_bytes or raise arena_bytes"
            )
        elif self.arena_bytes > 0 and self.send_bytes == 0:
            yield (
                f"the send share of the arena is 0 bytes (arena_bytes {self.arena_bytes}; shares are multiples of "
                f"{_SHARE_ALIGNMENT} bytes): raise arena_bytes"
            )


def _masked(value: Any) -> Any:
    """Hide what looks like a secret in the parameters of a backend."""
    if not isinstance(value, dict):
        return value
    inner = cast("dict[str, Any]", value)
    return {
        name: _MASK if isinstance(item, str) and any(word in name.lower() for word in _SENSITIVE) else _masked(item)
        for name, item in inner.items()
    }
