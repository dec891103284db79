"""Serves the application from a thread of its own, so that it answers though the worker's loop stands still.

Where only this host is listened on, it refuses requests that name another one. A page from anywhere may have the name
it came from point to 127.0.0.1 afterwards, and read as its own what is served there to browsers of this host. The name
it uses stands in `Host`.
"""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvxfer.errors import ConfigError, RequestError
from kvxfer.names import Endpoint
from kvxfer.telemetry import logger, quieten
from kvxfer.tools.admin.app import app
from kvxfer.tools.admin.look import PATIENCE_SECONDS, Limits, Watched

__all__ = ["AdminServer", "serve"]

_log: Final = logger("kvxfer.admin")
_STOP_SECONDS: Final = 5
_BACKLOG: Final = 64
_THREAD: Final = "kvxfer-admin"
quieten(_THREAD, "uvicorn.error", "uvicorn.access")  # of which an application's own server may make use
_REFUSED: Final = PlainTextResponse("this is served to this host alone, and under its own names\n", 421)


class AdminServer:
    """Serves an application until it is stopped. Made by `serve`; enter it with `with` or `async with`.

    Attributes:
        address: Host and port, as asked for; the port is that which was taken once it is entered.
    """

    def __init__(self, application: Starlette, address: str) -> None:
        try:
            self._endpoint: Final = Endpoint.parse(f"tcp:{address}")
        except ValueError as error:
            raise ConfigError(f"the admin address {address!r} is not host:port: {error}") from error
        self.address = address
        self._application: Final = application
        self._server: Final = uvicorn.Server(
            uvicorn.Config(
                application,
                log_config=None,
                server_header=False,
                lifespan="off",
                ws="none",
                loop="asyncio",
                http="h11",
                timeout_graceful_shutdown=_STOP_SECONDS,
            )
        )
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{self.address}/"

    def start(self) -> None:
        """Take the address and begin to answer. Returns at once.

        Raises:
            ConfigError: If the address cannot be taken.
            RequestError: If it was started before.
        """
        if self._thread is not None:
            raise RequestError("an admin server is started once: make another one")
        listening = self._listen()
        host, port = listening.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            self._server.config.app = _NamesThisHost(self._application)
        else:
            _log.warning("admin_exposed", address=self.address, reason="whoever reaches it reads it; see SECURITY.md")
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name=_THREAD, daemon=True
        )
        self._thread.start()
        _log.info("admin_started", address=self.address)

    def stop(self) -> None:
        """Answer what was asked, and stop. Blocks for seconds at most. Idempotent."""
        if self._thread is not None:
            self._server.should_exit = True
            self._thread.join(2 * _STOP_SECONDS)

    def _listen(self) -> socket.socket:
        host, port = self._endpoint.host, self._endpoint.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, *_, where = found[0]
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            return socket.create_server(where, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            raise ConfigError(f"the admin address {self.address} cannot be taken: {error}") from error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        await asyncio.to_thread(self.stop)  # it may be waiting for a worker on this loop


class _NamesThisHost:
    """An application that answers only who calls it `localhost` or by a loopback address."""

    def __init__(self, application: ASGIApp) -> None:
        self._application: Final = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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


def serve(
    workers: Watched | Iterable[Watched],
    *,
    address: str = "127.0.0.1:9471",
    limits: Limits | None = None,
    patience: float = PATIENCE_SECONDS,
) -> AdminServer:
    """Serve what `app` has, from a thread of its own: `async with kvxfer.tools.admin.serve(worker):`, or `with`.

    Args:
        workers: One or several, of any kind.
        address: `host:port`; port 0 takes any that is free. Nothing guards it: whoever reaches it reads everything.
        limits: From when on a worker counts as not ready.
        patience: Seconds that a worker's loop may take to answer.

    Raises:
        ConfigError: If the address is malformed.
    """
    return AdminServer(app(workers, limits=limits, patience=patience), address)
