"""What more than one layer knows: bounds, element types, endpoints, and attributes that are computed once."""

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, Self, TypeVar, overload

__all__ = [
    "CONVERTIBLE",
    "MAX_FACTS",
    "MAX_HANDLE",
    "MAX_LAYERS",
    "MAX_NAME",
    "MAX_PLACES",
    "MAX_PORT",
    "MAX_REQUEST",
    "MAX_ROWS",
    "MAX_SCALES",
    "MAX_STRIDE",
    "MAX_SUMS",
    "MAX_TENSORS",
    "MAX_TOKENS",
    "MAX_TRACE",
    "MAX_WIDTH",
    "MAX_WORLD",
    "SOCKET_PATH_BYTES",
    "Endpoint",
    "check_advertise",
    "check_listen",
    "check_patterns",
    "convertible",
    "cpu_numbers",
    "is_admitted",
    "lazy",
    "runs",
]

# --- element types

CONVERTIBLE: Final[Mapping[str, int]] = MappingProxyType(
    {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
)
"""Bytes of an element by dtype. Integers are not among them: what their bits mean is the engine's secret."""


def convertible(src: str, dst: str) -> bool:
    """Whether a copy can convert one dtype into the other."""
    return src in CONVERTIBLE and dst in CONVERTIBLE


# --- bounds

MAX_SCALES: Final = 65_536
"""Numbers in the scale of one cache tensor at most."""
MAX_WORLD: Final = 16_384
"""Ranks of an engine at most: what a card and a ticket may name."""

MAX_NAME: Final = 128
"""Characters of a name, such as that of a group or of a fact, at most."""

MAX_REQUEST: Final = 256
"""Characters of a request id at most."""

MAX_TENSORS: Final = 16_384
"""Cache tensors of a rank at most."""

MAX_HANDLE: Final = 256
"""Bytes of a handle at most, by which a peer opens memory or a file."""

MAX_LAYERS: Final = 16_384
"""Layers of a model at most."""

MAX_PLACES: Final = 32_768
"""Layers that a rank holds at most, counted once for each part, K, V and tensor: whoever meets it looks at each."""

MAX_TRACE: Final = 64
"""Characters at most by which a fetch names the trace that it belongs to: a `traceparent` of version 00 has 55."""

MAX_TOKENS: Final = 0xFFFF_FFFF
"""Token numbers travel in 32 bits."""

MAX_ROWS: Final = 1 << 24
"""Rows that a plan cuts a range of tokens into at most, those of other ranks' turns included: each takes memory."""

MAX_WIDTH: Final = 1 << 24
"""Coordinates on a head or dim axis at most: plans look at each."""

MAX_CTAS: Final = 4096
"""Thread blocks of a copy at most: more than any GPU runs at once."""

MAX_STRIDE: Final = 1 << 47
"""Bytes from one index of an axis to the next are fewer: no address space is larger."""

MAX_SUMS: Final = 8192
"""Sums over the regions of a chunk at most, and as many over its rows: where there are more, neighbours share one."""

MAX_FACTS: Final = 1024
"""Facts that two ranks compare when they meet, at most: the model, and four of each tensor class."""


# --- computed once
#
# As `functools.cached_property`, which in Python 3.11 holds one lock for all objects of a class while it computes for
# one of them: a plan on the event loop would wait for a large one in a worker thread. Here two threads may compute the
# same value; the last one is kept.

_T = TypeVar("_T")


class _Lazy(Generic[_T]):
    """A descriptor that its value takes the place of, in the object's own attributes."""

    def __init__(self, make: Callable[[Any], _T]) -> None:
        self.__doc__ = make.__doc__
        self._make = make
        self._name = make.__name__

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> _T: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> Self | _T:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._make(instance)
        return value


def lazy(make: Callable[[Any], _T]) -> _Lazy[_T]:
    """Decorate a method of no arguments; its objects need a `__dict__`, and their class may be a frozen dataclass."""
    return _Lazy(make)


# --- endpoints

SOCKET_PATH_BYTES: Final = 107  # sockaddr_un.sun_path on Linux, less the final zero
MAX_PORT: Final = 65_535
_PORT_DIGITS: Final = 5
_SHOWN_CHARACTERS: Final = 80


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker listens, or is reached."""

    scheme: Literal["unix", "tcp"]  # `"unix"` or `"tcp"`
    path: str = ""  # path of the socket; empty for `tcp`, and for a private socket that the worker makes
    host: str = ""  # name or address without brackets; empty for `unix`
    port: int = 0  # 0 means any free port; 0 for `unix`

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
        named = (
            host and host.isprintable() and " " not in host and (":" not in host or (bracketed and _is_address(host)))
        )
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
        if self.scheme == "tcp" and _is_address(self.host):
            return ipaddress.ip_address(self.host).is_unspecified
        try:
            return not any(socket.inet_aton(self.host))  # as the system reads it: `0`, too
        except OSError:
            return False

    def __str__(self) -> str:
        """The form that `parse` reads."""
        if self.scheme == "unix":
            return f"unix:{self.path}" if self.path else "unix"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


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


# --- runs of numbers, and CPUs


def runs(numbers: Iterable[int]) -> list[str]:
    """Numbers as text such as `0-7` and `16`. The order is kept, and only ascending neighbours are joined."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]


_CPU_LIST: Final = re.compile(r"\d{1,5}(-\d{1,5})?(\s*,\s*\d{1,5}(-\d{1,5})?)*")


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
