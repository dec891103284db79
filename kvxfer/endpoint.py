"""Where a worker listens and is reached: `unix:/path` or `tcp:host:port`."""

import ipaddress
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, Literal, Self

__all__ = [
    "MAX_PORT",
    "SOCKET_PATH_BYTES",
    "Endpoint",
    "check_advertise",
    "check_listen",
    "check_patterns",
    "is_admitted",
]

SOCKET_PATH_BYTES: Final = 107  # sockaddr_un.sun_path on Linux, less the final zero
MAX_PORT: Final = 65_535
_PORT_DIGITS: Final = 5
_SHOWN_CHARACTERS: Final = 80
_JUDGED: Final = 1024
"""Endpoints and patterns of which it is remembered whether they fit: every fetch asks for those of its ticket."""
_ANYWHERE: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker listens, or is reached.

    Attributes:
        scheme: `"unix"` or `"tcp"`.
        path: Path of the socket; empty for `tcp`, and for a private socket that the worker makes.
        host: Name or address without brackets; empty for `unix`.
        port: 0 means any free port; 0 for `unix`.
    """

    scheme: Literal["unix", "tcp"]
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `unix`, `unix:/path`, `tcp:host:port` or `tcp:[v6]:port`.

        Raises:
            ValueError: If the text is none of these.
        """
        scheme, _, rest = text.partition(":")
        if text == "unix":
            return cls("unix")
        if scheme == "unix":
            if not rest.startswith("/"):
                raise ValueError("a unix endpoint needs an absolute path: 'unix:/run/kvxfer/0.sock'")
            if not rest.isprintable() and any(ord(character) < ord(" ") for character in rest):
                raise ValueError("the path of a unix endpoint has no control characters")
            if len(os.fsencode(rest)) > SOCKET_PATH_BYTES:
                raise ValueError(f"the path of a unix socket may have {SOCKET_PATH_BYTES} bytes; use a shorter one")
            return cls("unix", path=rest)
        host, colon, port = rest.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        named = host and host.isprintable() and " " not in host and (bracketed or ":" not in host)
        numbered = colon and len(port) <= _PORT_DIGITS and port.isascii() and port.isdigit()
        if scheme != "tcp" or not named or not numbered or int(port) > MAX_PORT:
            raise ValueError(
                f"an endpoint is 'unix', 'unix:/path' or 'tcp:host:port', with a port from 0 to {MAX_PORT}"
            )
        return cls("tcp", host=host, port=int(port))

    @property
    def reachable(self) -> bool:
        """Whether somebody else can connect to it as it stands: it names the socket, or a port that is not 0."""
        return bool(self.path or self.port)

    @property
    def anywhere(self) -> bool:
        """Whether this names every interface, so that one can listen there but nobody can connect to it."""
        return self.scheme == "tcp" and self.host in _ANYWHERE

    def __str__(self) -> str:
        """The form that `parse` reads."""
        if self.scheme == "unix":
            return f"unix:{self.path}" if self.path else "unix"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


@lru_cache(maxsize=_JUDGED)
def is_admitted(text: str, pattern: str) -> bool:
    """Whether an endpoint, as a ticket has it, is one of those that a pattern stands for.

    Host and port are compared each for itself, so that neither reaches into the other, and brackets around an IPv6
    address are no wildcard. Two things that look alike lead elsewhere and are not meant: a *name* that begins like the
    addresses of a pattern (`tcp:10.0.*:*` and `10.0.example.org`), and a path that climbs out of a pattern's folder.
    """
    try:
        endpoint = Endpoint.parse(text)
    except ValueError:
        return False
    scheme, _, rest = pattern.partition(":")
    if scheme != endpoint.scheme:
        return False
    if scheme == "unix":
        return fnmatchcase(endpoint.path, rest) and (text == pattern or ".." not in endpoint.path.split("/"))
    host, colon, port = (rest, "", "") if rest.endswith("]") else rest.rpartition(":")
    host, port = (host, port) if colon else (rest, "*")
    if host.startswith("[") and host.endswith("]") and ":" in host:
        host = host[1:-1]
    addresses = any(map(str.isdigit, host)) and not any(map(str.isalpha, host))
    if addresses and not _is_address(endpoint.host):
        return False
    return fnmatchcase(endpoint.host, host) and fnmatchcase(str(endpoint.port), port)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_listen(text: str) -> str:
    """Where a worker is to listen, as it is written.

    Raises:
        ValueError: If it is no endpoint.
    """
    return str(Endpoint.parse(text))


def check_advertise(text: str | None) -> str | None:
    """Where peers are to reach a worker, as it is written.

    Raises:
        ValueError: If it is no endpoint, or none that they can connect to.
    """
    if text is None:
        return None
    endpoint = Endpoint.parse(text)
    if text == "unix" or endpoint.anywhere:
        raise ValueError("peers cannot connect to this; give the path or the address at which they reach this worker")
    return str(endpoint)


def check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Patterns of endpoints.

    Raises:
        ValueError: If one of them can match none.
    """
    if wrong := [pattern for pattern in patterns if not pattern.startswith(("unix:", "tcp:"))]:
        raise ValueError(
            f"the pattern {wrong[0][:_SHOWN_CHARACTERS]!r} must begin with 'unix:' or 'tcp:', as in 'tcp:10.0.*:*'"
        )
    return patterns
