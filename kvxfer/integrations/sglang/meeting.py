"""Where the engines of sglang meet: its bootstrap server, which knows the card and the key of each prefill engine.

An engine here is one data-parallel rank of a prefill server, with all of its tensor-parallel ranks. It says of itself
what a decode engine needs to make tickets. Whoever reaches the server is told that: see SECURITY.md.
"""

import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvxfer.errors import TicketError, UnreachableError
from kvxfer.telemetry import logger
from kvxfer.tickets import EngineCard, Issuer
from kvxfer.tools.jsonhttp import NoAnswerError, json_from

__all__ = ["Directory", "Engine", "Meeting", "ask", "keep_registering", "register", "register_room"]

_MOST_BYTES: Final = 16 << 20
_MOST_ROOMS: Final = 65_536
_PATIENCE_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 0.2
_log: Final = logger("kvxfer.sglang")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Engine:
    """One data-parallel rank of a prefill server."""

    dp_rank: int
    dp_size: int
    card: dict[str, Any]  # of its tensor-parallel ranks
    key: str  # in hexadecimal digits
    page_tokens: int
    dtype: str  # of its pages, by sglang's name
    by_room: bool  # requests go to the rank that their room names

    def __post_init__(self) -> None:
        """Refuse what no ticket can be made with, as another server may say it.

        Raises:
            ValueError: Naming it.
        """
        bytes.fromhex(self.key)
        if not 0 <= self.dp_rank < self.dp_size:  # sglang divides by the latter
            raise ValueError(f"data-parallel rank {self.dp_rank} of {self.dp_size}")
        EngineCard.from_dict(self.card)


@dataclass(frozen=True, slots=True)
class Directory:
    """A prefill server, as a decode engine knows it."""

    dp_size: int
    follow_bootstrap_room: bool  # as `by_room`; sglang's name
    engines: Mapping[int, Engine]  # by data-parallel rank

    def ticket(self, dp_rank: int, request: str) -> dict[str, Any]:
        """The right to a request of one of them.

        Raises:
            TicketError: If there is no such rank.
        """
        engine = self.engines.get(dp_rank)
        if engine is None:
            raise TicketError(f"the prefill server has no data-parallel rank {dp_rank}")
        return Issuer(engine.card, bytes.fromhex(engine.key)).ticket(request)


class Meeting:
    """The server. Answers from threads of its own."""

    def __init__(self, host: str, port: int) -> None:
        self._engines: dict[int, Engine] = {}
        self._rooms: dict[str, int] = {}
        self._lock: Final = threading.Lock()
        handler = type("_Handler", (_Handler,), {"meeting": self})
        self._server: Final = _Server(host, port, handler)
        self._thread: Final = threading.Thread(target=self._server.serve_forever, name="kvxfer-sglang", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_port

    def close(self) -> None:
        """Stop. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def get(self, path: str) -> tuple[HTTPStatus, Any]:
        """Answer a question."""
        with self._lock:
            known = dict(self._engines)
        if path == "/health":
            return HTTPStatus.OK, {}
        if path != "/kvxfer/engines":
            return HTTPStatus.NOT_FOUND, {}
        if not known or len(known) < next(iter(known.values())).dp_size:
            return HTTPStatus.SERVICE_UNAVAILABLE, {}
        return HTTPStatus.OK, [asdict(engine) for engine in known.values()]

    def put(self, path: str, told: Any) -> tuple[HTTPStatus, Any]:
        """Take note of something."""
        if path == "/kvxfer/engines":
            engine = msgspec.convert(told, Engine)
            with self._lock:
                self._engines[engine.dp_rank] = engine
            return HTTPStatus.OK, {}
        if path == "/register_dp_rank":
            with self._lock:
                if len(self._rooms) >= _MOST_ROOMS:
                    self._rooms.pop(next(iter(self._rooms)))
                self._rooms[str(told["bootstrap_room"])] = msgspec.convert(told["dp_rank"], int)
            return HTTPStatus.OK, {}
        if path == "/query_dp_ranks":
            with self._lock:
                rooms = [str(room) for room in told["bootstrap_rooms"]]
                return HTTPStatus.OK, {room: self._rooms[room] for room in rooms if room in self._rooms}
        return HTTPStatus.NOT_FOUND, {}


class _Server(ThreadingHTTPServer):
    """It is there for all ranks of all engines at once."""

    daemon_threads = True
    request_queue_size = 1024  # whoever finds no place is turned away after a second, or waits for several

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)


class _Handler(BaseHTTPRequestHandler):
    """JSON in, JSON out."""

    meeting: Meeting
    timeout = _PATIENCE_SECONDS

    def do_GET(self) -> None:
        """Answer."""
        self._answer(*self.meeting.get(urlsplit(self.path).path))

    def do_POST(self) -> None:
        """Take note."""
        try:
            length = int(self.headers.get("Content-Length", "0"))
            told = json.loads(self.rfile.read(length)) if 0 < length <= _MOST_BYTES else None
            found: tuple[HTTPStatus, Any] = self.meeting.put(urlsplit(self.path).path, told)
        except (ValueError, TypeError, KeyError, RecursionError, msgspec.ValidationError):
            found = HTTPStatus.BAD_REQUEST, {}
        self._answer(*found)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Nothing: the engines log what matters."""

    def _answer(self, status: HTTPStatus, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def register(address: str, engine: Engine) -> None:
    """Tell the server of a prefill engine. Blocks, for a few seconds at most.

    Raises:
        UnreachableError: If it does not answer, or not well.
    """
    _call(address, "/kvxfer/engines", asdict(engine), dict[str, Any])


def keep_registering(address: str, engine: Engine, patience: float) -> threading.Thread:
    """The same from a thread of its own, until the server has heard it, or so many seconds have passed."""

    def run() -> None:
        until = time.monotonic() + patience
        while True:
            try:
                register(address, engine)
            except UnreachableError as error:
                if time.monotonic() >= until:
                    _log.error("engine_not_registered", address=address, error=str(error))
                    return
                time.sleep(_RETRY_SECONDS)
            else:
                return

    thread = threading.Thread(target=run, name="kvxfer-sglang-register", daemon=True)
    thread.start()
    return thread


def register_room(address: str, room: int, dp_rank: int) -> None:
    """Tell it which data-parallel rank a request went to. Blocks and raises as `register` does."""
    _call(address, "/register_dp_rank", {"bootstrap_room": room, "dp_rank": dp_rank}, dict[str, Any])


def ask(address: str) -> Directory:
    """Ask it for its prefill engines. Blocks and raises as `register` does, also while some of them are missing."""
    engines = _call(address, "/kvxfer/engines", None, list[Engine])
    if not engines:
        raise UnreachableError(f"the bootstrap server at {address} knows no engine", peer=address)
    one = engines[0]
    return Directory(one.dp_size, one.by_room, {engine.dp_rank: engine for engine in engines})


def _call(address: str, path: str, told: Any, kind: type[_T]) -> _T:
    """Ask, and believe in no more of the answer than that it is of this kind: a request names the address."""
    data = None if told is None else json.dumps(told).encode()
    try:
        answer = json_from(f"http://{address}{path}", data, patience=_PATIENCE_SECONDS, most_bytes=_MOST_BYTES)
        return msgspec.convert(answer, kind)
    except (NoAnswerError, msgspec.ValidationError) as error:
        raise UnreachableError(f"the bootstrap server at {address} does not answer: {error}", peer=address) from error
