"""Where a worker listens and is reached: `unix:/path` or `tcp:host:port`."""

import os
from dataclasses import dataclass
from typing import Final, Literal, Self

__all__ = ["Endpoint"]

_SOCKET_PATH_BYTES: Final = 107  # sockaddr_un.sun_path on Linux, less the final zero
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
            if len(os.fsencode(rest)) > _SOCKET_PATH_BYTES:
                raise ValueError(f"the path of a unix socket may have {_SOCKET_PATH_BYTES} bytes; use a shorter one")
            return cls("unix", path=rest)
        host, colon, port = rest.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        sound = colon and host and (bracketed or ":" not in host) and port.isascii() and port.isdigit()
        if scheme != "tcp" or not sound or int(port) > 65535:
            raise ValueError("an endpoint is 'unix', 'unix:/path' or 'tcp:host:port', with a port from 0 to 65535")
        return cls("tcp", host=host, port=int(port))

    @property
    def anywhere(self) -> bool:
        """Whether this names every interface, so that one can listen there but nobody can connect to it."""
        return self.scheme == "tcp" and self.host in _ANYWHERE

    def __str__(self) -> str:
        """The form that `parse` reads."""
        if self.scheme == "unix":
            return f"unix:{self.path}" if self.path else "unix"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"
