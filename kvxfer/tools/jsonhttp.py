"""JSON over HTTP, from whoever answers: who is asked is believed in no more than that it is JSON.

Answers end in time, also one that comes drop by drop, headers too. Nobody is led elsewhere, and no proxy is asked.
"""

import contextlib
import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from functools import partial
from typing import Any, Final, Self

__all__ = ["NoAnswerError", "json_from"]


class NoAnswerError(Exception):
    """Nothing was said, or nothing that is JSON.

    Attributes:
        status: Of HTTP, if it is that which was answered.
    """

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status


def json_from(url: str, data: bytes | None = None, *, patience: float, most_bytes: int) -> Any:
    """Ask, and wait for the answer.

    Args:
        url: HTTP or HTTPS.
        data: What to post; None to get.
        patience: Seconds until somebody must have taken the connection, and again until all is said.
        most_bytes: Of an answer.

    Raises:
        NoAnswerError: If none comes in time, or something else.
    """
    with _Cut(patience) as cut:
        try:
            request = urllib.request.Request(url, data, headers={"Accept": "application/json"})  # noqa: S310 - http only
            with cut.opener.open(request, timeout=patience) as answer:
                return json.loads(answer.read(most_bytes))
        except urllib.error.HTTPError as error:
            error.close()
            raise NoAnswerError(f"it answers {error.code}", error.code) from error
        except (OSError, ValueError, http.client.HTTPException, RecursionError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            late = f"it was not complete after {patience:g} s" if cut.done else ""
            raise NoAnswerError(late or str(reason) or repr(reason)) from error


class _Cut:
    """Connections that end in time.

    Attributes:
        opener: Makes them.
        done: Whether one was cut off.
    """

    def __init__(self, patience: float) -> None:
        self._patience: Final = patience
        nothing = urllib.request.ProxyHandler({})  # who is asked is not behind a proxy
        self.opener: Final = urllib.request.build_opener(nothing, _Timed(self), _Unled())
        self.done = False
        self._timers: Final[list[threading.Timer]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()

    def begin(self, stream: socket.socket) -> None:
        """It is connected now."""
        timer = threading.Timer(self._patience, self._end, (stream,))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _end(self, stream: socket.socket) -> None:
        self.done = True
        with contextlib.suppress(OSError):  # it is closed
            stream.shutdown(socket.SHUT_RDWR)


class _Unled(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else: who is asked would choose where, by which protocol, and how often."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Refused, so it is an answer like another."""


class _PlainConnection(http.client.HTTPConnection):
    def __init__(self, *given: Any, cut: _Cut, **named: Any) -> None:
        super().__init__(*given, **named)
        self._cut: Final = cut

    def connect(self) -> None:
        super().connect()
        self._cut.begin(self.sock)


class _SecureConnection(_PlainConnection, http.client.HTTPSConnection):
    """The same; its `connect` is that of both, in this order."""


class _Timed(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def __init__(self, cut: _Cut) -> None:
        super().__init__()
        self._cut: Final = cut

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_PlainConnection, cut=self._cut), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_SecureConnection, cut=self._cut), req)
