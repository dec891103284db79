"""Engine cards and tickets: who an engine is, and the right to fetch one request's cache from it.

Usable in a router or scheduler without torch, numpy or NIXL. Cards are public. Tickets are secrets: whoever holds one
may fetch the cache of its request.

    card = EngineCard.of([worker.card for worker in ranks])    # every rank draws an incarnation; they fix the epoch
    ticket = Issuer(card, key).ticket("req-1")                 # plain JSON, the same from every issuer with this key
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from string import digits
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from kvxfer.errors import TicketError
from kvxfer.names import MAX_PORT, MAX_REQUEST, MAX_WORLD, SOCKET_PATH_BYTES, Endpoint
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import WIRE_VERSION

__all__ = ["KEY_BYTES", "EngineCard", "Issuer", "RankCard", "Ticket", "mask"]

KEY_BYTES: Final = 32
"""Length of an engine's key."""
_MAC_LABEL: Final = b"kvxfer ticket v1"
_EPOCH_LABEL: Final = b"kvxfer epoch v1"

_T = TypeVar("_T")
_Hex = Annotated[str, msgspec.Meta(pattern=r"^(?:[0-9a-f]{2}){8,64}\Z")]
_Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_ENDPOINT_CHARACTERS: Final = 512
_KNOWN_MACS: Final = 4096
_KNOWN_ENDPOINTS: Final = 4096
"""Endpoints of which it is remembered whether they can be connected to."""
_KNOWN_ENGINES: Final = 16
"""Engines of which the endpoints of all ranks are remembered."""
_SHOWN_CHARACTERS: Final = 64
_EndpointPart = Annotated[str, msgspec.Meta(max_length=_ENDPOINT_CHARACTERS)]
_World = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD)]
_Attempt = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
# JSON can hold halves of characters, and UTF-8 cannot
_Request = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST, pattern=r"^[^\ud800-\udfff]*$")]
_Name = Annotated[str, msgspec.Meta(max_length=128)]


class RankCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank says of itself before the engine is joined.

    Attributes:
        engine: The engine's name.
        rank: This rank.
        world: Ranks of the engine.
        endpoint: Where it listens: `unix:/path` or `tcp:host:port`.
        incarnation: A public key, drawn at start, as hex.
        wire: Newest protocol version that it speaks.
    """

    engine: _Name
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORLD)]
    world: _World
    endpoint: _EndpointPart
    incarnation: _Hex32
    wire: int = WIRE_VERSION

    def __post_init__(self) -> None:
        _check_endpoint(self.endpoint)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return _plain(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RankCard":
        """Read what `to_dict` made.

        Raises:
            TicketError: If it is not a card.
        """
        return _convert(data, cls, "rank card")


class _Endpoints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Endpoints of all ranks, written as a template: `prefix + part(rank) + suffix`.

    `first` stands for the parts first, first + 1, ...; `parts` lists them where they are no such sequence.
    """

    prefix: _EndpointPart
    suffix: _EndpointPart = ""
    first: Annotated[int, msgspec.Meta(ge=0, le=999_999_999)] | None = None
    parts: Annotated[tuple[_EndpointPart, ...], msgspec.Meta(max_length=MAX_WORLD)] | None = None

    @classmethod
    def of(cls, endpoints: Sequence[str]) -> "_Endpoints":
        prefix, suffix = _common(endpoints)
        parts = tuple(endpoint[len(prefix) : len(endpoint) - len(suffix)] for endpoint in endpoints)
        if not any(parts):  # one rank
            return cls(prefix=prefix, suffix=suffix)
        if re.fullmatch("[0-9]{1,9}", parts[0]):
            first = int(parts[0])
            if parts == tuple(str(first + rank) for rank in range(len(parts))):
                return cls(prefix=prefix, suffix=suffix, first=first)
        return cls(prefix=prefix, suffix=suffix, parts=parts)


@lru_cache(maxsize=_KNOWN_ENGINES)
def _expanded(endpoints: _Endpoints, world: int) -> tuple[str, ...]:
    parts = endpoints.parts
    if parts is None:
        first = endpoints.first
        parts = ("",) * world if first is None else tuple(str(first + rank) for rank in range(world))
    if len(parts) != world:
        raise TicketError(f"endpoints for {len(parts)} ranks, but the engine has {world}")
    found = tuple(endpoints.prefix + part + endpoints.suffix for part in parts)
    for endpoint in found:
        _check_endpoint(endpoint)
    return found


def _common(endpoints: Sequence[str]) -> tuple[str, str]:
    """Longest common prefix and suffix that end before a digit run, so that numbered endpoints stay whole numbers."""
    if len(endpoints) == 1:
        return endpoints[0], ""
    prefix = _beginning(endpoints)
    return prefix, _beginning([endpoint[len(prefix) :][::-1] for endpoint in endpoints])[::-1]


def _beginning(texts: Sequence[str]) -> str:
    """What all of these begin with, but for digits at its end."""
    low, high = min(texts), max(texts)
    at = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:at].rstrip(digits)


class EngineCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Public identity of one engine: all its ranks, and the epoch that their incarnations fix.

    When any rank restarts, the epoch changes, and tickets of the old one fail at once with that reason.
    """

    engine: _Name
    world: _World
    epoch: _Hex
    endpoints: _Endpoints
    wire: int = WIRE_VERSION

    @classmethod
    def of(cls, cards: Iterable[RankCard | Mapping[str, Any]]) -> "EngineCard":
        """Join the cards of all ranks, in any order.

        Raises:
            TicketError: If a rank is missing or there twice, two are at one endpoint, or they are of different engines.
        """
        if not isinstance(cards, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise TicketError(f"an engine card is made of a list of rank cards, not of {type(cards).__name__}")
        ranks = sorted((c if isinstance(c, RankCard) else RankCard.from_dict(c) for c in cards), key=lambda c: c.rank)
        if len({(c.engine, c.world) for c in ranks}) > 1:
            raise TicketError(f"cards of different engines: {sorted({(c.engine, c.world) for c in ranks})}")
        if not ranks or [c.rank for c in ranks] != list(range(ranks[0].world)):
            world = ranks[0].world if ranks else "?"
            raise TicketError(f"an engine card needs every rank of {world} once, not {[c.rank for c in ranks]}")
        places = sorted(card.endpoint for card in ranks)
        if twice := [place for place, following in pairwise(places) if place == following]:
            raise TicketError(f"two ranks are said to be at {twice[0]}: give each a listen, or advertise, of its own")
        epoch = hashlib.sha256(_EPOCH_LABEL)
        for card in ranks:
            epoch.update(bytes.fromhex(card.incarnation))
        return cls(
            engine=ranks[0].engine,
            world=ranks[0].world,
            epoch=epoch.hexdigest()[:32],
            endpoints=_Endpoints.of([card.endpoint for card in ranks]),
            wire=min(card.wire for card in ranks),
        )

    @property
    def rank_endpoints(self) -> tuple[str, ...]:
        """Endpoint of every rank."""
        return _expanded(self.endpoints, self.world)

    def check_member(self, mine: RankCard) -> None:
        """See that a rank is one of this engine's.

        Raises:
            TicketError: If it is not.
        """
        if (mine.engine, mine.world) != (self.engine, self.world):
            raise TicketError(
                f"this is a rank of {mine.engine!r} with {mine.world} ranks, but the card is of {self.engine!r} with "
                f"{self.world}"
            )
        if self.rank_endpoints[mine.rank] != mine.endpoint:
            raise TicketError(f"rank {mine.rank} at {mine.endpoint} is not part of this engine card")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return _plain(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "EngineCard":
        """Read what `to_dict` made.

        Raises:
            TicketError: If it is not a card.
        """
        card = _convert(data, cls, "engine card")
        _expanded(card.endpoints, card.world)
        return card


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The right to fetch one request. Treat it as a secret; `repr` hides the MAC."""

    v: Literal[1] = 1
    engine: _Name
    world: _World
    epoch: _Hex
    endpoints: _Endpoints
    request: _Request
    attempt: _Attempt = 0
    mac: _Hex

    @classmethod
    def parse(cls, data: "Mapping[str, Any] | Ticket") -> "Ticket":
        """Read a ticket as it came out of JSON.

        Raises:
            TicketError: If it was cut or edited so that it is no ticket. A forged MAC is found by the prefill rank.
        """
        if isinstance(data, Ticket):
            return data
        ticket = _convert(data, cls, "ticket")
        _expanded(ticket.endpoints, ticket.world)
        return ticket

    @property
    def rank_endpoints(self) -> tuple[str, ...]:
        """Endpoint of every rank of the prefill engine."""
        return _expanded(self.endpoints, self.world)

    @property
    def card(self) -> EngineCard:
        """The engine that it is a ticket of."""
        return EngineCard(engine=self.engine, world=self.world, epoch=self.epoch, endpoints=self.endpoints)

    @property
    def key(self) -> tuple[str, wire.TicketRef]:
        """Epoch, request, attempt and MAC: what makes a ticket another one, also a forged one."""
        return self.epoch, self.ref()

    def ref(self) -> wire.TicketRef:
        """What of it travels on the control stream."""
        text = str.__str__(self.request)  # it may be one of numpy's, which nobody encodes
        return wire.TicketRef(text, self.attempt, bytes.fromhex(self.mac))

    def __repr__(self) -> str:
        return f"Ticket(engine={self.engine!r}, request={self.request!r}, attempt={self.attempt}, mac={mask(self.mac)})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:  # else rich would print every field
        shown = {"engine": self.engine, "request": self.request, "attempt": self.attempt, "mac": mask(self.mac)}
        return list(shown.items())


class _Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What a ticket is for."""

    request: _Request
    attempt: _Attempt = 0


class Issuer:
    """Makes and checks tickets of one engine: every rank has one, and so may the scheduler.

    Args:
        card: The engine's card, or what `EngineCard.to_dict` made of it.
        key: The engine's key, `KEY_BYTES` random bytes known to its ranks and its scheduler only.

    Raises:
        TicketError: If it is no card, or the key has another length.
    """

    def __init__(self, card: EngineCard | Mapping[str, Any], key: bytes) -> None:
        if not isinstance(key, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TicketError(f"an engine's key is bytes, not {type(key).__name__}")
        if len(key) != KEY_BYTES:
            raise TicketError(f"an engine's key has {KEY_BYTES} bytes, not {len(key)}")
        self.card: Final = card if isinstance(card, EngineCard) else EngineCard.from_dict(card)
        self._mac = lru_cache(maxsize=_KNOWN_MACS)(self._made)  # a ticket is shown at least twice: to fetch, to release
        self._key: Final = key
        self._endpoints: Final = msgspec.json.encode(self.card.endpoints)

    def ticket(self, request: str, *, attempt: int = 0) -> dict[str, Any]:
        """The ticket of a request, as plain JSON data: before, after, or without the offer.

        Raises:
            TicketError: If the request id is empty, longer than 256 characters or no UTF-8, or the attempt does not fit
                into 32 bits.
        """
        _convert({"request": request, "attempt": attempt}, _Subject, "request")
        card = self.card
        return {
            "v": 1,
            "engine": card.engine,
            "world": card.world,
            "epoch": card.epoch,
            "endpoints": msgspec.json.decode(self._endpoints),
            "request": request,
            "attempt": attempt,
            "mac": self._mac(request, attempt).hex(),
        }

    def verify(self, ref: wire.TicketRef) -> bool:
        """Whether this engine issued it, in this epoch. Takes the same time for every wrong MAC."""
        return hmac.compare_digest(self._mac(ref.request, ref.attempt), ref.mac)

    def _made(self, request: str, attempt: int) -> bytes:
        name = request.encode()
        fields = (_MAC_LABEL, bytes.fromhex(self.card.epoch), len(name).to_bytes(4, "little"), name)
        message = b"".join(fields) + attempt.to_bytes(8, "little", signed=True)
        return hmac.digest(self._key, message, "sha256")[:16]


def mask(secret: str) -> str:
    """A secret as logs may show it."""
    return f"{secret[:4]}..." if len(secret) > 8 else "..."


@lru_cache(maxsize=_KNOWN_ENDPOINTS)
def _sound(text: str) -> bool:
    """Whether somebody could connect to this endpoint. Every ticket of an engine names the same ones."""
    try:
        return Endpoint.parse(text).reachable
    except ValueError:
        return False


def _check_endpoint(text: str) -> None:
    """Refuse here what nobody could connect to; msgspec makes it an error of its own while converting."""
    if len(text) > _ENDPOINT_CHARACTERS or not _sound(text):
        raise TicketError(
            f"{text[:_SHOWN_CHARACTERS]!r} is no endpoint of a rank: give unix:/path (at most {SOCKET_PATH_BYTES} "
            f"bytes) or tcp:host:port with a port from 1 to {MAX_PORT}"
        )


def _plain(data: msgspec.Struct) -> dict[str, Any]:
    """JSON data, with lists where JSON has lists."""
    return dict(msgspec.json.decode(msgspec.json.encode(data)))


def _convert(data: Any, kind: type[_T], name: str) -> _T:
    try:
        return msgspec.convert(data, kind)
    except (
        msgspec.ValidationError,
        UnicodeEncodeError,
    ) as error:  # the latter of text that JSON can hold, UTF-8 cannot
        raise TicketError(f"this is no {name}: {error!s:.512}") from error  # it quotes what was given
