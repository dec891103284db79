"""TLS of control streams over TCP: its settings, and the contexts that are made of the files they name.

Only TLS 1.3 is spoken. Both ends are ranks of kvxfer, so nothing older needs to be understood; what 1.3 leaves out
(renegotiation, certificates in the clear, ciphers to choose from) cannot be configured wrongly.

Contexts never change. Files that were renewed make new ones, which the next handshake takes; streams that are open go
on.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, Self, TypeAlias

from pydantic import BeforeValidator, model_validator

from kvxfer.errors import ConfigError
from kvxfer.settings import SettingsGroup, parse_optional, shown_path

__all__ = ["Contexts", "Credentials", "TlsConfig"]

_PEM: Final = "-----BEGIN"
_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_KEY: Final = b"PRIVATE KEY-----"
_ENCRYPTED: Final = b"ENCRYPTED"


def _parse_path(value: object) -> object:
    value = parse_optional(value)
    if isinstance(value, str) and _PEM in value:  # its value must not get into a message: it may be a key
        raise ConfigError("a setting of tls holds PEM text itself; put it into a file and give the file's path")
    return Path(value).expanduser() if isinstance(value, str) else value


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
    """PEM file of certificates, one of which must vouch for each peer; switches TLS on."""
    certificate: PemFile = None
    """PEM file of this worker's certificate, with intermediate ones after it; a listener needs one."""
    key: PemFile = None
    """PEM file of its private key, not encrypted; none: it is in the file of the certificate."""
    mutual: bool = True
    """Whether who connects here must show a certificate too; without, only the listener does."""
    server_name: Annotated[str | None, BeforeValidator(parse_optional)] = None
    """Name that the certificates of listeners must carry; none: the host of the endpoint that is connected to."""

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
    """What handshakes are made with.

    Attributes:
        client: For streams that this side opens.
        server: For streams that it accepts; None without a certificate.
    """

    client: ssl.SSLContext
    server: ssl.SSLContext | None


class Credentials:
    """The contexts of one worker, made anew when their files have changed.

    Attributes:
        contexts: Those of the last `renew`; None before the first.
    """

    def __init__(self, config: TlsConfig) -> None:
        self._config: Final = config
        self._stamps: list[object] = []
        self.contexts: Contexts | None = None

    def renew(self) -> Contexts:
        """The contexts of the files as they are now. Reads the disk; safe from several threads at once.

        Raises:
            ConfigError: If they have changed and cannot be used. `contexts` are those of before.
        """
        stamps = [_stamp(path) for path in (self._config.authorities, self._config.certificate, self._config.key)]
        if self.contexts is None or stamps != self._stamps:
            self.contexts = _load(self._config)
            self._stamps = stamps
        return self.contexts


def _load(config: TlsConfig) -> Contexts:
    if config.authorities is None:
        raise ConfigError("tls.authorities is not set")
    _read("authorities", config.authorities, _CERTIFICATE)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks names and demands a certificate
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED if config.mutual else ssl.CERT_NONE
    server.num_tickets = 0  # a stream is opened once a pair: nobody resumes one
    for context in (client, server):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        _translated(f"tls.authorities {config.authorities}", context.load_verify_locations, config.authorities)
        if config.certificate is not None:
            _load_chain(context, config.certificate, config.key)
    return Contexts(client, server if config.certificate is not None else None)


def _load_chain(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    _read("certificate", certificate, _CERTIFICATE)
    held = _read("key" if key else "certificate", key or certificate, _KEY)
    if _ENCRYPTED in held:
        raise ConfigError(
            f"tls.key {key or certificate} is encrypted, and nobody is there to type a passphrase; store it without "
            "one (`openssl pkey -in FILE -out NEW`), readable by this user alone"
        )
    where = f"tls.certificate {certificate} with " + (f"tls.key {key}" if key else "the key in it")
    _translated(where, context.load_cert_chain, certificate, key, _no_passphrase)


def _read(name: str, path: Path, marker: bytes) -> bytes:
    """What a file holds, which must be PEM of the right kind."""
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
    return content


def _translated(where: str, load: Callable[..., None], *arguments: Any) -> None:
    try:
        load(*arguments)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{where}: the key does not belong to the certificate; take both of one issue") from error
        raise ConfigError(f"{where} cannot be used: {error.reason or error}; replace the file") from error
    except OSError as error:  # it went away since it was looked at
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}; correct the path") from error


def _no_passphrase() -> NoReturn:
    """Asked for a passphrase; without this, OpenSSL would ask on the terminal."""
    raise ConfigError("the private key for TLS is encrypted; store it without a passphrase")


def _stamp(path: Path | None) -> object:
    """What changes when a file is replaced or rewritten; None where there is no file."""
    try:
        seen = path.stat() if path is not None else None
    except OSError:
        return None
    return None if seen is None else (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns)
