"""A control stream on the event loop: the thin asyncio shell around a sans-I/O `Session`.

`asyncio.Protocol` rather than streams: a frame is handled in the callback that received it, which halves latency
of a small transfer. A reader never waits for a writer: replies wait in the session, a slice of them is written a turn,
and a peer that lets them grow beyond their bound is dropped.
"""

import asyncio
import math
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, cast

from kvxfer.errors import Code, KvxferError, PeerError, PeerLostError, ProtocolError, UnreachableError
from kvxfer.mapped.host import process_of_stream
from kvxfer.names import lazy
from kvxfer.protocol import messages as wire
from kvxfer.protocol.framing import encode
from kvxfer.protocol.messages import Route
from kvxfer.protocol.session import Opened, PeerInfo, Role, Session, State
from kvxfer.runtime import TURN_SECONDS, Runtime, resolve
from kvxfer.telemetry import logger

if TYPE_CHECKING:
    from kvxfer.worker import Service

__all__ = ["Link", "admitted", "superseded"]

# --- the link

_UNSENT_BYTES: Final = 64 * 1024 * 1024
_SLICE_BYTES: Final = 128 * 1024
"""That are written in a turn: to encrypt them, or to copy them to the system, takes about two tenths of a millisecond,
and a fetch of 16,384 blocks is no longer.
"""
_HEARD_BYTES: Final = 1024 * 1024
"""That are read while a peer is looked at; more of them wait in the stream."""
_LEAVE_SECONDS: Final = 20.0
"""In which a link that is gone may say what it had left to say. Then it is cut: who reads nothing would keep it."""
_CREDENTIALS: Final = struct.Struct("3i")
_log: Final = logger("kvxfer.link")


class Link(asyncio.Protocol):
    """One control stream."""

    def __init__(self, role: Role, endpoint: str, handler: "Service", runtime: Runtime) -> None:
        self.role: Final = role  # which side of it this is
        self.endpoint: Final = endpoint  # where the peer is, as far as it is known
        self.trusted = False  # whether this side shares addresses with the peer
        self.encrypted = False  # whether the stream is TLS
        self.failure: KvxferError | None = None  # why it is gone; None as long as it is not
        self.draining = False  # whether the peer has said goodbye
        self.renewals = 0  # how often the peer has made its agent anew, as far as it has said so here
        # bytes of cache that transfers of this session moved, in either direction, by route
        self.moved: Final[Counter[Route]] = Counter()
        # gets what is said of requests: the role's that has this link, once it has
        self.on_message: Callable[[Link, wire.Message], None] = handler.on_peer_news
        self._handler = handler
        self._runtime = runtime
        self.since: Final = runtime.now()  # when its stream was opened, or was about to be
        self._loop = asyncio.get_running_loop()
        # resolves when the handshake is complete, or with the error that prevented it
        self.ready: Final[asyncio.Future[PeerInfo]] = self._loop.create_future()
        self._session: Session | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._meeting: asyncio.Task[Any] | None = None  # looks at the peer
        self._heard = bytearray()  # meanwhile
        self._more = False  # something came in before, and waits for its turn
        self._known = False  # whether the handler was told that it is open
        self._handling = False
        self._later: tuple[wire.Message, ...] = ()  # goes at the end of this turn, or before what is sent until then
        self._writable = True  # the stream takes more
        self._slicing = False  # the loop has a turn before more is written
        self.gone: Final[asyncio.Future[PeerLostError]] = self._loop.create_future()  # resolves when the stream is

    @lazy
    def peer(self) -> PeerInfo:
        """Who the other side is.

        Raises:
            PeerLostError: If the handshake is not complete.
        """
        session = self._session
        if session is None or session.peer is None:
            raise PeerLostError("the handshake is not complete", peer=self.endpoint)
        return session.peer

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._session is not None and self._session.state is State.OPEN

    @property
    def claimed(self) -> bytes:
        """The incarnation that the other side says to be, proved or not; empty before it said one."""
        return b"" if self._session is None else self._session.claimed

    @property
    def proved_to(self) -> bytes:
        """The incarnation to which this side has shown who it is, also when the link is gone; empty before."""
        return b"" if self._session is None else self._session.proved_to

    @property
    def admitted(self) -> bool:
        """Whether its handshake was begun, rather than turned away or still to be agreed upon by TLS."""
        return self._session is not None

    @property
    def heard(self) -> float:
        """When the peer was last heard, or later if this side stood still since; its beginning before that."""
        return self.since if self._session is None else self._session.liveness.heard

    @property
    def heartbeat(self) -> float:
        """Seconds after which this side must speak; infinity before the handshake was begun."""
        return math.inf if self._session is None else self._session.liveness.heartbeat

    def outdated(self, body: bytes) -> bool:
        """Whether the handshake told the peer something else of this side than this agent body."""
        return self._session is None or self._session.told != body

    def process(self) -> int:
        """A descriptor of the process at the other end (pidfd), which the caller owns; -1 if there is none."""
        stream = self._transport
        return process_of_stream(None if stream is None else stream.get_extra_info("socket"))

    def send(self, *messages: wire.Message, soon: bool = False) -> bool:
        """Send messages; replies go out once all that came with the frame that they answer has been handled.

        `soon`: they may wait for the end of this turn of the loop, and go before what is sent until then, unless the
        link fails first.

        Returns:
            False if the link is gone; who must know hears it from `Service.on_lost`.
        """
        session, stream = self._session, self._transport
        if session is None or stream is None or session.state is not State.OPEN:
            return False
        if soon:
            self._later += messages
            self._loop.call_soon(self.send)
            return True
        if self._later:
            messages, self._later = self._later + messages, ()
        left = 0 if self._handling or stream.is_closing() else _SLICE_BYTES
        for message in messages:
            frame = session.send(message, self._runtime.now(), left if self._writable else 0)
            self._handler.frames_sent[type(message).__name__] += 1
            if frame:
                left -= len(frame)
                stream.write(frame)
        if session.unsent_bytes and not self._handling:
            self._flush()
        return True

    def close(self, reason: str = "") -> None:
        """Say goodbye and close the stream. Idempotent."""
        if self.is_open:
            self.send(wire.Goodbye(Code.DRAINING, reason))
        self._fail(PeerLostError(reason or "the session was closed here", peer=self.endpoint))

    def close_once_met(self, reason: str) -> None:
        """Close it when its handshake is complete: whoever connects takes one that is cut for a peer that is away."""
        if self.admitted:
            self.ready.add_done_callback(lambda _: self.close(reason))

    async def wait_gone(self, timeout: float) -> None:
        """Wait until the stream of a closed link is gone; cut it if the peer does not take what is left to send."""
        if self._transport is None:
            return
        await asyncio.wait({self.gone}, timeout=timeout)
        if not self.gone.done():
            self._transport.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream is connected; begin the handshake."""
        self._transport = stream = cast("asyncio.Transport", transport)  # uvloop's derive from nothing of asyncio's
        if self.failure is not None:  # it was closed while TLS was being agreed upon
            stream.abort()
            return
        self.encrypted = stream.get_extra_info("ssl_object") is not None
        process = _process(stream.get_extra_info("socket"))
        try:
            self._session, self.trusted = self._handler.new_session(self, process)
        except KvxferError as error:
            stream.write(encode(wire.Goodbye(error.code, str(error))))
            self._fail(error)
            return
        self._flush()
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        """Bytes came in: run the session and hand over its messages; those that come during a look wait for its end.

        They are read all the same: a stream that is aborted loses what nobody has read.
        """
        if self._meeting is not None:
            self._heard += data
            if len(self._heard) >= _HEARD_BYTES and self._transport is not None and not self._transport.is_closing():
                self._transport.pause_reading()
        elif self._session is not None:
            self._handle(self._session, data)

    def _handle(self, session: Session, data: bytes, met: "asyncio.Task[Any] | None" = None) -> None:
        """Handle what came in, one turn long; nothing more is read before the rest, if there is any, is done.

        Nor is anything handled before the peer was looked at, once it has said what it is: it was if it is `met`.
        """
        now = self._runtime.now()
        until = now + TURN_SECONDS
        self._handling = True
        try:
            if met is not None:
                self._on_opened(met.result())
            for event in session.receive(data, now):
                if isinstance(event, Opened):
                    self._set_timer()  # this side speaks while it looks at the peer, and does not listen
                    self._meeting = self._handler.examine(self)
                    self._meeting.add_done_callback(self._on_met)
                    break
                self._handler.frames_received[type(event).__name__] += 1
                own = isinstance(event, (wire.Goodbye, wire.Renewed))
                (self._handler.on_peer_news if own else self.on_message)(self, event)
                if self._runtime.now() >= until:
                    self._more = session.unread_bytes > 0
                    break
        except KvxferError as error:
            if isinstance(error, ProtocolError):
                _log.warning("protocol_violated", peer=self.endpoint, error=str(error))
            else:
                self._say_if_unmet(error)
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a defect ends the session that it is in, and no other
            _log.error("link_broken", peer=self.endpoint, error=repr(error), exc_info=error)
            self._fail(PeerLostError(f"a frame could not be handled: {error!r}", peer=self.endpoint))
        finally:
            self._handling = False
        if session.unsent_bytes:
            self._flush()
        if self._more and self._transport is not None:
            if not self._transport.is_closing():
                self._transport.pause_reading()
            self._loop.call_soon(self._resume)

    def _on_met(self, task: "asyncio.Task[Any]") -> None:
        self._meeting = None
        if task.cancelled():
            self._fail(PeerLostError("the worker was closed", peer=self.endpoint))
        elif self.failure is not None:
            task.exception()  # nobody wants to know any more
        self._resume(task if self.failure is None else None)

    def _resume(self, met: "asyncio.Task[Any] | None" = None) -> None:
        """Handle what has waited: what came before the peer was looked at first, and then what came meanwhile."""
        self._more = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        heard, self._heard = bytes(self._heard), bytearray()
        if self._session is not None:
            self._handle(self._session, heard, met)  # pauses it again if there is still more
        self._end_if_handled()

    def _end_if_handled(self) -> None:
        """The stream has ended; what came before its end counts, and is handled first."""
        if self.gone.done() and self._meeting is None and not self._more:
            self._fail(self.gone.result())

    def _on_opened(self, found: Any) -> None:
        self.renewals = self.peer.body.renewals
        if not self.trusted:
            _log.warning(
                "peer_not_trusted",
                peer=self.peer.name,
                endpoint=self.endpoint,
                # over TCP and CMA, UCX checks no address that a peer names
                reason="only an RDMA lane keeps it inside the arena; set a shared secret, or trust='full' to agree",
            )
        self._known = True
        self._handler.on_opened(self, found)
        resolve(self.ready, self.peer)

    def pause_writing(self) -> None:
        """The peer has yet to read what was written."""
        self._writable = False

    def resume_writing(self) -> None:
        """It has."""
        self._writable = True
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """The stream is gone."""
        why = f": {exc}" if exc else ""
        resolve(self.gone, PeerLostError(f"the peer closed the control stream{why}", peer=self.endpoint))
        if self.failure is not None and self._timer is not None:
            self._timer.cancel()
        self._end_if_handled()

    # --- inside

    def _flush(self) -> None:
        """Write a slice of what is left to send; behind the last one, close the stream of a link that is gone."""
        session, transport = self._session, self._transport
        if session is None or transport is None or transport.is_closing():
            return
        if session.unsent_bytes and self._writable and not self._slicing:
            data = session.take_output(_SLICE_BYTES)
            if session.unsent_bytes:
                self._slicing = True
                self._loop.call_soon(self._write_on)
            transport.write(data)
        if self.failure is not None and not session.unsent_bytes:
            transport.close()
        elif session.unsent_bytes > _UNSENT_BYTES:
            error = ProtocolError(f"the peer let {_UNSENT_BYTES} bytes of replies pile up", peer=self.endpoint)
            self._fail(error, cut=True)  # who reads nothing does not read what is left to send either

    def _write_on(self) -> None:
        self._slicing = False
        self._flush()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        session = self._session
        if session is not None and session.state is not State.CLOSED:
            delay = max(0.0, session.next_deadline() - self._runtime.now())
            self._timer = self._loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        session = self._session
        if session is None:
            return
        now = self._runtime.now()
        if self._meeting is not None:
            session.excuse(now)
        try:
            session.tick(now)
        except KvxferError as error:
            self._say_if_unmet(error)
            self._fail(error, cut=True)  # who is silent does not read what is left to send either
            return
        self._flush()
        self._set_timer()

    def _say_if_unmet(self, error: KvxferError) -> None:
        if not self.ready.done():
            _log.warning("handshake_failed", peer=self.endpoint, role=self.role.value, error=str(error))

    def _fail(self, error: KvxferError, *, cut: bool = False) -> None:
        """The link is gone; its stream is closed when what is left to send has been written, or cut at once."""
        if self.failure is not None:
            return
        self.failure, self._later = error, ()
        if self._timer is not None:
            self._timer.cancel()
        if self._session is not None:
            self._session.close()
        if self._transport is not None and cut:
            self._transport.abort()
        elif self._transport is not None and self._session is None:
            self._transport.close()
        self._flush()
        if self._transport is not None and not self.gone.done():
            self._timer = self._loop.call_later(_LEAVE_SECONDS, self._transport.abort)
        if not self.ready.done():
            self.ready.set_exception(_unreachable(error, self.endpoint, encrypted=self.encrypted))
            self.ready.exception()  # whoever waits sees it; if nobody does, that is no defect
        if self._known:
            self._handler.on_lost(self, error)


def admitted(links: Iterable[Link]) -> int:
    """How many of these count as streams that peers opened: `Config.max_offers` bounds them."""
    return sum(link.role is Role.SERVER and link.admitted for link in links)


def superseded(link: Link, links: Iterable[Link]) -> list[Link]:
    """Those that this one replaces: of the same process, in the same direction.

    Handshakes that are not complete are among them: what the process has proved there may have been kept back by
    somebody, who would go on with it once this one is gone.
    """
    others = (other for other in links if other is not link and other.role is link.role)
    return [other for other in others if other.claimed == link.claimed]


def _unreachable(error: KvxferError, endpoint: str, *, encrypted: bool) -> KvxferError:
    """What a failed handshake means to somebody who wanted to connect: it names where, if not who is there."""
    if not isinstance(error, PeerLostError):
        if isinstance(error, PeerError) and not error.peer:
            error.peer, error.args = endpoint, (f"no session with {endpoint}: {error}",)
        return error
    hint = ""
    if encrypted:  # with TLS 1.3 a listener refuses a certificate only after the stream is open for who connects
        hint = "; its log says whether it refused this side's tls.certificate"
    elif endpoint.startswith("tcp:"):
        hint = "; if it listens with TLS, set tls.authorities and tls.certificate here"
    return UnreachableError(f"{endpoint} closed the stream during the handshake: {error}{hint}", peer=endpoint)


def _process(sock: socket.socket | None) -> int | None:
    """The process of this user on this host at the other end of a Unix socket (`SO_PEERCRED`); None if it is none."""
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, uid, _ = _CREDENTIALS.unpack(raw)
    return int(process) if uid == os.geteuid() else None
