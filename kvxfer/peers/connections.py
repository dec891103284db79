"""Control streams, opened: listening, connecting, TLS; one to each prefill rank, shared by all requests."""

import asyncio
import contextlib
import copy
import fcntl
import hashlib
import ipaddress
import os
import socket
import ssl
import stat
import tempfile
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvxfer.config import Contexts, Credentials
from kvxfer.errors import (
    ClosedError,
    ConfigError,
    IdentityError,
    KvxferError,
    MismatchError,
    PeerLostError,
    UnreachableError,
)
from kvxfer.mapped.host import here
from kvxfer.names import SOCKET_PATH_BYTES, Endpoint
from kvxfer.peers.link import Link
from kvxfer.protocol.session import Role
from kvxfer.site import Site
from kvxfer.telemetry import logger

__all__ = ["Backoff", "Listener", "Peers", "Streams"]

# --- when to try again

_DRAWN_BYTES: Final = 4


class Backoff:
    """Waits that double from `least` to `most` seconds, each drawn at random from the upper half of what it may be.

    The draw is what keeps many that failed at the same moment, as all do when a peer dies, from coming back at the same
    moment too.
    """

    def __init__(self, token: Callable[[int], bytes], *, least: float, most: float) -> None:
        self._token: Final = token
        self._most: Final = most
        self._next = least

    def wait(self) -> float:
        """Seconds to wait after one more failure."""
        longest, self._next = self._next, min(2 * self._next, self._most)
        drawn = int.from_bytes(self._token(_DRAWN_BYTES), "little") / (1 << 8 * _DRAWN_BYTES)
        return longest * (1 + drawn) / 2


# --- listening and connecting
#
# TCP streams are TLS if the settings `tls` say so, and there is no falling back to plain ones. Unix sockets stay
# plain: file permissions guard them, and the kernel says who is at the other end.

_ACCEPT_PAUSE: Final = 1.0
"""Seconds until accepting is tried again when the process has no descriptor left."""
_WAITING: Final = 65_535
"""Streams that may wait to be accepted, as far as the system lets: peers come back all at once, and are told if there
are too many of them."""
_LOOKUPS: Final = 32
"""Names that are looked up at a time: each may hang, and takes one of the threads that the worker has (40)."""
_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"})
"""What OpenSSL calls bytes that are no TLS."""
_OUT_OF_DATE: Final = frozenset({9, 10})  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_SOCKET: Final = "sock"  # short: the system takes 107 bytes of a path
_log: Final = logger("kvxfer.link")

_Address: TypeAlias = tuple[socket.AddressFamily, tuple[Any, ...]]


class Listener:
    """A listening endpoint, where peers can connect: `unix:/path` or `tcp:host:port`.

    What was opened and made for it goes with it.
    """

    def __init__(self, endpoint: str, opened: contextlib.ExitStack) -> None:
        self.endpoint: Final = endpoint
        self._opened: Final = opened.pop_all()

    def reached_at(self, advertised: str | None) -> str:
        """Where peers connect: the advertised endpoint, whose port 0 stands for the port that this one got."""
        if advertised is None or not advertised.startswith("tcp:") or not advertised.endswith(":0"):
            return advertised or self.endpoint
        return advertised.removesuffix("0") + self.endpoint.rpartition(":")[2]

    def close(self) -> None:
        """Stop listening and remove the socket's file. Links stay open. Idempotent."""
        self._opened.close()


class Streams:
    """Opens streams for the links of one worker."""

    def __init__(self, site: Site, link: Callable[[Role, str], Link]) -> None:
        self._config: Final = site.config
        self._runtime: Final = site.runtime
        self._tasks: Final = site.tasks
        self._link: Final = link
        self._credentials: Final = Credentials(site.config.tls)
        self._loop: Final = site.loop
        self._greeting: Final[set[asyncio.Task[None]]] = set()
        self._lookups: Final = asyncio.Semaphore(_LOOKUPS)

    async def listen(self) -> Listener:
        """Listen where the settings say, and say in the log what guards a stream from other hosts.

        Raises:
            ConfigError: If the endpoint, or a file that TLS needs, cannot be used.
        """
        where = self._config.listen
        if self._config.tls.enabled:
            await self._contexts()  # files that cannot be used are known before anybody connects
        try:
            return await (self._listen_unix(where) if where.startswith("unix") else self._listen_tcp(where))
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            advice = (
                "a path that can be made" if where.startswith("unix") else "an address of this host and a free port"
            )
            raise ConfigError(f"cannot listen at {where!r}: {error}; set listen to {advice}") from error

    async def connect(self, endpoint: str) -> Link:
        """Open a link and complete its handshake.

        A peer that answers, and then closes the stream without a word, is met again: the handshake of a stream before
        this one was complete, so it keeps that, and has yet to hear of its end.

        Raises:
            UnreachableError: If nobody answers in time, or there is no agreement on TLS.
            MismatchError: If the peer cannot work with this side.
        """
        again = True
        while True:
            link = await (self._over_unix(endpoint) if endpoint.startswith("unix:") else self._over_tcp(endpoint))
            try:
                await asyncio.shield(link.ready)
            except UnreachableError:
                if not (again and link.claimed and isinstance(link.failure, PeerLostError)):
                    raise
                again = False
            else:
                return link

    # --- listening

    async def _listen_unix(self, where: str) -> Listener:
        path = Path(where.removeprefix("unix:"))
        with contextlib.ExitStack() as opened:
            if where == "unix":
                await self._runtime.in_thread(_clear_abandoned)
                folder, descriptor = _make_folder()
                opened.callback(os.close, descriptor)  # whose lock says to others that the folder is in use
                opened.callback(_remove, folder)
                path = folder / _SOCKET
                if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
                    raise ConfigError(
                        f"cannot listen at {where!r}: the path of a unix socket may have {SOCKET_PATH_BYTES} bytes, "
                        f"and {path} has more; set TMPDIR to another folder, or listen to 'unix:/path'"
                    )
            _clear_stale(path)
            sock = opened.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            sock.bind(str(path))
            opened.callback(path.unlink, missing_ok=True)
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)
            sock.listen(_WAITING)
            return self._serve([sock], f"unix:{path}", opened)

    async def _listen_tcp(self, where: str) -> Listener:
        # only that asks others: what a thread made for a wait that was cancelled would be nobody's
        addresses = await self._runtime.in_thread(partial(_addresses, Endpoint.parse(where), socket.AI_PASSIVE))
        sockets = _bind(addresses)
        endpoint = f"{where.rpartition(':')[0]}:{sockets[0].getsockname()[1]}"
        self._say_what_guards(endpoint, [str(sock.getsockname()[0]) for sock in sockets])
        with contextlib.ExitStack() as opened:
            return self._serve(sockets, endpoint, opened)

    def _serve(self, sockets: list[socket.socket], endpoint: str, opened: contextlib.ExitStack) -> Listener:
        for sock in sockets:
            opened.enter_context(sock)
            opened.callback(self._loop.remove_reader, sock)
            self._accept_later(sock, endpoint)
        opened.callback(self._stop_greeting)
        return Listener(endpoint, opened)

    def _accept_later(self, sock: socket.socket, endpoint: str) -> None:
        if sock.fileno() >= 0:  # else it was closed meanwhile
            self._loop.add_reader(sock, self._accept, sock, endpoint)

    def _accept(self, sock: socket.socket, endpoint: str) -> None:
        """Accept the next stream, which agrees on TLS, if there is any, in a task of its own.

        `asyncio.Server` would do, but that it never tells of a handshake that failed, keeps those under way when it is
        closed, loses those that it has just accepted, as a task that is cancelled would, and takes one context for all.
        """
        try:
            if len(self._greeting) >= self._config.max_offers:  # each of them takes 256 KiB, whoever it is
                raise OSError("as many streams have yet to agree on TLS as may be open")
            stream, address = sock.accept()
        except BlockingIOError:  # whoever it was has left again
            return
        except OSError as error:
            _log.warning("stream_not_accepted", endpoint=endpoint, error=str(error))
            self._loop.remove_reader(sock)
            self._loop.call_later(_ACCEPT_PAUSE, self._accept_later, sock, endpoint)
            return
        stream.setblocking(False)
        unless_opened = contextlib.ExitStack()
        unless_opened.enter_context(stream)
        peer = endpoint if sock.family == socket.AF_UNIX else str(Endpoint("tcp", host=address[0], port=address[1]))
        task = self._tasks.spawn(self._greet(stream, peer, unless_opened), f"kvxfer greet {peer}")
        self._greeting.add(task)

        def greeted(task: asyncio.Task[None]) -> None:
            self._greeting.discard(task)
            unless_opened.close()  # also if it was cancelled before its first step

        task.add_done_callback(greeted)

    async def _greet(self, sock: socket.socket, peer: str, unless_opened: contextlib.ExitStack) -> None:
        """Open a link to who has connected."""
        tls = {} if sock.family == socket.AF_UNIX else await self._tls(Role.SERVER)
        unless_opened.pop_all()
        link = self._link(Role.SERVER, peer)
        connecting = asyncio.get_running_loop().connect_accepted_socket(lambda: link, sock, **tls)
        try:
            await _agreed(link, connecting, _refusal)
        except UnreachableError as error:
            if isinstance(error.__cause__, ssl.SSLError | ConnectionAbortedError):  # the latter after a time-out
                _log.warning("handshake_failed", peer=peer, role=Role.SERVER.value, error=str(error))
            else:  # it went away, as whoever only tries whether a port is open does
                _log.debug("handshake_failed", peer=peer, role=Role.SERVER.value, error=str(error))

    def _stop_greeting(self) -> None:
        for task in self._greeting:
            task.cancel()

    def _say_what_guards(self, endpoint: str, addresses: list[str]) -> None:
        config = self._config
        if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
            return
        if config.secret is None and not (config.tls.enabled and config.tls.mutual):
            lacks = "tls.mutual is off" if config.tls.enabled else "neither TLS nor a secret is set"
            _log.warning(
                "endpoint_not_guarded",
                endpoint=endpoint,
                reason=f"{lacks}, so whoever reaches it can open a session; set tls.authorities or secret",
            )
        elif not config.tls.enabled:
            _log.info(
                "endpoint_not_encrypted",
                endpoint=endpoint,
                reason="the secret is proved when a stream begins; what follows can be read and changed on the way",
            )

    # --- connecting

    async def _over_unix(self, endpoint: str) -> Link:
        path, loop = endpoint.removeprefix("unix:"), asyncio.get_running_loop()
        async with _in_time(endpoint, self._config.connect_timeout):
            _, link = await loop.create_unix_connection(lambda: self._link(Role.CLIENT, endpoint), path)
        return link

    async def _over_tcp(self, endpoint: str) -> Link:
        config, loop = self._config, asyncio.get_running_loop()
        tls = await self._tls(Role.CLIENT)
        async with _in_time(endpoint, config.connect_timeout):
            where = Endpoint.parse(endpoint)
            until = loop.time() + config.connect_timeout
            sock = await _dial(await self._look_up(where), until)
        link = self._link(Role.CLIENT, endpoint)
        if tls:
            tls["server_hostname"] = config.tls.server_name or where.host
        said = partial(_refusal, endpoint=endpoint) if tls else str
        await _agreed(link, loop.create_connection(lambda: link, sock=sock, **tls), said)
        return link

    async def _look_up(self, where: Endpoint) -> list[_Address]:
        with contextlib.suppress(socket.gaierror):
            return _addresses(where, socket.AI_NUMERICHOST)  # asks nobody
        async with self._lookups:
            return await self._runtime.in_thread(partial(_addresses, where))

    # --- TLS

    async def _tls(self, role: Role) -> dict[str, Any]:
        """How a stream is opened for TLS, as asyncio takes it; empty without."""
        if not self._config.tls.enabled:
            return {}
        contexts = await self._contexts()
        return {
            "ssl": contexts.client if role is Role.CLIENT else contexts.server,
            # the kernel connects, but only the process does TLS
            "ssl_handshake_timeout": self._config.handshake_timeout,
            "ssl_shutdown_timeout": self._config.close_timeout,
        }

    async def _contexts(self) -> Contexts:
        """The contexts for the next handshake, of the files as they are now.

        Raises:
            ConfigError: If they cannot be used, and never could.
        """
        before = self._credentials.contexts
        try:
            contexts = await self._runtime.in_thread(self._credentials.renew)
        except ConfigError as error:
            if before is None:
                raise
            _log.warning("certificates_not_renewed", error=str(error))
            return before
        if before is not None and contexts is not before:
            _log.info("certificates_renewed")
        return contexts


async def _agreed(link: Link, connecting: Coroutine[Any, Any, object], said: Callable[[OSError], str]) -> None:
    """Wait until a stream is open for its link.

    Raises:
        UnreachableError: If it did not come to that; the link is closed.
    """
    try:
        await connecting
    except BaseException as error:
        link.close("the stream was not opened")
        if isinstance(error, OSError):
            raise UnreachableError(said(error), peer=link.endpoint) from error
        raise


def _refusal(error: OSError, endpoint: str = "") -> str:
    """Why there was no agreement on TLS, and what to set; without an endpoint, for the side that was connected to."""
    who = endpoint or "the peer"
    reason = error.reason if isinstance(error, ssl.SSLError) else ""
    if isinstance(error, ssl.SSLCertVerificationError):
        named = ", and tls.server_name if names differ" if endpoint else ""
        why = error.verify_message.removesuffix(".")
        way = f"check tls.authorities here{named}"
        if error.verify_code in _OUT_OF_DATE:
            way = "renew it there, or what vouches for it, or set the clock right that is wrong"
        return f"the certificate of {who} was refused: {why}; {way}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return f"{who} shows no certificate; set tls.certificate there, or tls.mutual = false here"
    if reason in _NOT_TLS:
        return f"{who} does not speak TLS; set tls.authorities there, or on no side"
    why = str(error) or "it closed the stream"
    if endpoint:
        return f"no TLS with {who}: {why}; if it listens without, set tls.authorities there too, or see its log"
    return f"no TLS with {who}: {why}"


@contextlib.asynccontextmanager
async def _in_time(endpoint: str, seconds: float) -> AsyncGenerator[None, None]:
    """Say what it means if a connection is not made."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise UnreachableError(f"{endpoint} did not answer within {seconds:g} s", peer=endpoint) from error
    except (OSError, ValueError) as error:
        raise UnreachableError(f"cannot connect to {endpoint}: {error}", peer=endpoint) from error


def _addresses(where: Endpoint, flags: int = 0) -> list[_Address]:
    """Where a host is; may ask a name server."""
    found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


async def _dial(addresses: list[_Address], until: float) -> socket.socket:
    """A socket that is connected to the first of some addresses that answers; none may use up the time of the others.

    Raises:
        OSError: If none did until then, by the loop's clock.
    """
    loop = asyncio.get_running_loop()
    refused = OSError("the host has no address")
    for tried, (family, address) in enumerate(addresses):
        with contextlib.ExitStack() as unless_connected:
            try:
                sock = unless_connected.enter_context(socket.socket(family, socket.SOCK_STREAM))
                _prepare(sock)
                async with asyncio.timeout((until - loop.time()) / (len(addresses) - tried)):
                    await loop.sock_connect(sock, address)
            except OSError as error:
                refused = error
            else:
                unless_connected.pop_all()
                return sock
    raise refused


def _bind(addresses: list[_Address]) -> list[socket.socket]:
    """Listening sockets at every address of a host; they share a port, also where the system chose it."""
    port, sockets = 0, list[socket.socket]()
    with contextlib.ExitStack() as unless_bound:
        for family, address in dict.fromkeys(addresses):
            at = (address[0], address[1] or port)
            sock = unless_bound.enter_context(socket.create_server(at, family=family, backlog=_WAITING))
            _prepare(sock)
            port = sock.getsockname()[1]
            sockets.append(sock)
        unless_bound.pop_all()
    return sockets


def _prepare(sock: socket.socket) -> None:
    """Make a TCP socket, and those that it accepts, send at once; asyncio sees to that only if it opened it itself."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _prefix() -> str:
    """Of folders for sockets of workers on this host: others may share the folder for temporary files."""
    return f"kvxfer-{hashlib.sha256(here().partition(' ')[0].encode()).hexdigest()[:6]}-"


def _make_folder() -> tuple[Path, int]:
    """A private folder for a socket, and a descriptor whose lock says that it is in use, until it is closed.

    Between the two another worker may sweep it: then it holds the lock, or the folder is gone.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix()))
        with contextlib.ExitStack() as unless_ours, contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            unless_ours.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:  # a file system without locks: nobody sweeps there
                pass
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                unless_ours.pop_all()
                return folder, descriptor


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):  # gone already, or somebody else put something into it
        folder.rmdir()


def _clear_abandoned() -> None:
    """Remove this user's folders of workers that were killed: those that nobody has locked."""
    folders: list[Path] = []
    with contextlib.suppress(OSError):
        folders += Path(tempfile.gettempdir()).glob(f"{_prefix()}*") if here() else ()
    for folder in folders:
        with contextlib.suppress(OSError), contextlib.ExitStack() as lock:  # locked, or another worker was faster
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            lock.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear_stale(folder / _SOCKET)
                folder.rmdir()


def _clear_stale(path: Path) -> None:
    """Remove a socket file that nobody listens at (its worker was killed)."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        else:
            raise OSError(f"somebody listens at {path} already")


# --- connections to prefill ranks

_RETRY_SECONDS: Final = 0.1
_RETRY_SECONDS_MAX: Final = 2.0
_HEARTBEATS: Final = 2
"""After so many without a word, a peer is met again if a ticket says that another engine is where it was."""
_REMEMBERED: Final = 1024
"""Endpoints of which it is known that they could not be reached."""


@dataclass(slots=True)
class _Away:
    """An endpoint that could not be reached."""

    backoff: Backoff  # how long it is left in peace
    # of the ticket that led there; one of a later engine is tried at once, since that has restarted
    epoch: bytes | None
    until: float  # when it is tried again
    # what happened: a copy, which keeps alive no frame that it was raised through, nor what that refers to
    error: KvxferError


class Peers:
    """Opens links when they are first needed and keeps them.

    An endpoint that could not be reached, or whose handshake failed, is left in peace for a while (0.1 s, doubling to 2
    s): who wants to go there meanwhile gets the same error at once, and with it the time after which to try again.
    """

    def __init__(self, site: Site, connect: Callable[[str], Awaitable[Link]]) -> None:
        self._site: Final = site
        self._connect_to: Final = connect
        self._admits: Final = lru_cache(_REMEMBERED)(site.config.admits)
        self._links: dict[str, Link] = {}
        self._opening: dict[str, asyncio.Task[Link]] = {}
        self._away: OrderedDict[str, _Away] = OrderedDict()

    def known(self, endpoint: str, epoch: bytes) -> Link | None:
        """The link to an endpoint if it is open and the engine there is of this epoch; else ask `link`."""
        link = self._links.get(endpoint)
        usable = link is not None and link.is_open and link.peer.identity.epoch == epoch
        return link if usable and self._admits(endpoint) else None

    @property
    def connecting(self) -> list[str]:
        """Endpoints that are being connected, or where a rank has yet to join its engine."""
        opening = (endpoint for endpoint, task in self._opening.items() if not task.done())
        unjoined = (endpoint for endpoint, link in self._links.items() if not _has_joined(link))
        return [*opening, *unjoined]

    @property
    def unreachable(self) -> dict[str, float]:
        """Endpoints that could not be reached when they were last tried: seconds for which they are left in peace."""
        now = self._site.now()
        return {endpoint: max(0.0, away.until - now) for endpoint, away in self._away.items()}

    async def link(self, endpoint: str, epoch: bytes | None) -> Link:
        """The open link to an endpoint; many callers at once make one handshake.

        A rank that has yet to join its engine is waited for, as long as a handshake may take.

        Raises:
            UnreachableError: If `allow_peers` excludes the endpoint, or nobody answers there.
            IdentityError: If who answers there does not prove its incarnation, or that one is engaged elsewhere.
            MismatchError: If the engine there cannot work with this one, or has restarted since the ticket was made.
            ClosedError: If this worker was closed before.
        """
        if not self._admits(endpoint):
            raise UnreachableError(
                f"{endpoint} is not admitted by allow_peers={list(self._site.config.allow_peers)}", peer=endpoint
            )
        link = self._links.get(endpoint)
        if link is None or not link.is_open:
            link = await self._meet(endpoint, epoch)
        if epoch is not None and not _has_joined(link):  # as it does, it closes the stream
            await asyncio.wait({link.gone}, timeout=self._site.config.handshake_timeout)
        silent = self._site.now() > link.heard + _HEARTBEATS * link.heartbeat
        if epoch not in (None, link.peer.identity.epoch) and (silent or link.gone.done()):
            link = await self._meet(link.endpoint, epoch)  # it may be gone without a word, and another one be there
        theirs = link.peer.identity.epoch
        if epoch is not None and theirs != epoch:
            raise MismatchError(
                f"the ticket is of epoch {epoch.hex()}, but the engine at {endpoint} is of epoch {theirs.hex()}: "
                "it has restarted (have the request prefilled again), or was joined differently, or not in time",
                peer=link.peer.name,
                fields={"epoch": (epoch.hex(), theirs.hex())},
            )
        return link

    async def _meet(self, endpoint: str, epoch: bytes | None) -> Link:
        """A new link to an endpoint, or one that leads to the same worker."""
        try:
            return await self._open(endpoint, epoch)
        except IdentityError as error:
            return await self._where_engaged(error, endpoint, epoch)

    async def _where_engaged(self, refused: IdentityError, endpoint: str, epoch: bytes | None) -> Link:
        """The link to where something with a worker is open, or in doubt, that is said to be elsewhere as well.

        Nothing is proved to whoever is there, and nothing is asked of him: if he speaks the truth, such as for a host
        that has two names, the worker itself does what is wanted. If it does not answer, and nothing is in doubt any
        more, it may have moved.
        """
        if not refused.engaged_at:
            raise refused
        link = self._links.get(refused.engaged_at)
        if link is None or not link.is_open:
            with contextlib.suppress(KvxferError):
                link = await self._open(refused.engaged_at, epoch)
        if link is not None and link.is_open and link.proved_to.hex() == refused.incarnation:
            return link
        self._away.pop(endpoint, None)
        return await self._open(endpoint, epoch)

    async def _open(self, endpoint: str, epoch: bytes | None) -> Link:
        task = self._opening.get(endpoint)
        if task is None:
            away = self._away.get(endpoint)
            if away is not None and away.epoch == epoch and (left := away.until - self._site.now()) > 0:
                error = copy.copy(away.error)
                error.retry_after, error.report = left, None
                raise error
            connecting = self._connect(endpoint, epoch)
            task = self._site.tasks.spawn(connecting, f"kvxfer connect {endpoint}", spare=True)
            self._opening[endpoint] = task
            task.add_done_callback(lambda _: self._opening.pop(endpoint, None))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled() or ((current := asyncio.current_task()) and current.cancelling()):
                raise
            raise ClosedError(f"the worker was closed before {endpoint} was reached") from None

    async def _connect(self, endpoint: str, epoch: bytes | None) -> Link:
        try:
            link = await self._connect_to(endpoint)
        except KvxferError as error:
            self._note_unreachable(endpoint, epoch, error)
            raise
        self._away.pop(endpoint, None)
        if link.is_open:  # else it was lost meanwhile, and its end heard
            self._links[endpoint] = link
        return link

    def _note_unreachable(self, endpoint: str, epoch: bytes | None, error: KvxferError) -> None:
        before = self._away.pop(endpoint, None)
        if before is not None and before.epoch == epoch:
            backoff = before.backoff
        else:
            backoff = Backoff(self._site.runtime.token, least=_RETRY_SECONDS, most=_RETRY_SECONDS_MAX)
        wait = backoff.wait()
        error.retry_after = max(wait, error.retry_after or 0)
        self._away[endpoint] = _Away(backoff, epoch, self._site.now() + wait, copy.copy(error))
        if len(self._away) > _REMEMBERED:
            self._away.popitem(last=False)

    def on_link_lost(self, link: Link) -> None:
        """A link is gone; the next caller opens a new one."""
        if self._links.get(link.endpoint) is link:
            del self._links[link.endpoint]


def _has_joined(link: Link) -> bool:
    """Whether a rank had joined its engine when it was met: until it has, it refuses everything."""
    identity = link.peer.identity
    return identity.epoch != identity.incarnation
