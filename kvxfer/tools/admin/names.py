"""Refuses requests that name another host, where only this one is listened on.

A page from anywhere may have the name it came from point to 127.0.0.1 afterwards, and read as its own what is served
there to browsers of this host. The name it uses stands in `Host`.
"""

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse

__all__ = ["NamesThisHost"]

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Application = Callable[[_Scope, _Receive, _Send], Awaitable[None]]
_REFUSED: Final = PlainTextResponse("this is served to this host alone, and under its own names\n", 421)


class NamesThisHost:
    """An application that answers only who calls it `localhost` or by a loopback address.

    Args:
        application: What answers.
    """

    def __init__(self, application: _Application) -> None:
        self._application: Final = application

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """One request, by ASGI."""
        named = Headers(scope=scope).get("host", "")
        answer = self._application if _is_this_host(named) else _REFUSED
        await answer(scope, receive, send)


def _is_this_host(name: str) -> bool:
    try:
        host = urlsplit(f"//{name}").hostname or ""
        return host == "localhost" or host.endswith(".localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:  # no name, or no address
        return False
