"""JSON over HTTP, from whoever answers: who is asked is believed in no more than that it is JSON.

Answers end in time, also one that comes drop by drop, headers too. Nobody is led elsewhere, and no proxy is asked.
"""

import contextlib
import http.client
import json
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

__all__ = ["NoAnswerError", "json_from"]


class NoAnswerError(Exception):
    """Nothing was said, or nothing that is JSON."""

    def __init__(self, why: str, status: int | None = None) -> None:
        super().__init__(why)
        self.status = status  # of HTTP, if it is that which was answered


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
    late = threading.Event()

    def cut(stream: socket.socket) -> None:
        late.set()
        with contextlib.suppress(OSError):  # it is closed
            stream.shutdown(socket.SHUT_RDWR)

    try:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        with contextlib.closing(kind(parts.netloc, timeout=patience)) as connection:
            connection.connect()
            timer = threading.Timer(patience, cut, (connection.sock,))
            timer.daemon = True
            timer.start()
            try:
                target = parts._replace(scheme="", netloc="", fragment="").geturl()
                method = "GET" if data is None else "POST"
                connection.request(method, target, data, {"Accept": "application/json"})
                answer = connection.getresponse()
                if not 200 <= answer.status < 300:
                    raise NoAnswerError(f"it answers {answer.status}", answer.status)
                return json.loads(answer.read(most_bytes))
            finally:
                timer.cancel()
    except (OSError, ValueError, http.client.HTTPException, RecursionError) as error:
        why = f"it was not complete after {patience:g} s" if late.is_set() else str(error) or repr(error)
        raise NoAnswerError(why) from error
