"""How a peer is known again: nobody else is believed under an incarnation that was met (PROTOCOL.md section 4.8).

Each worker has a **mark** for each peer, made of a key that it never shows: it needs no memory of those. At a first
meeting both show theirs, and each remembers the other's. Later neither shows it: it is sealed with that of the other,
which only the two know, and proved. So who has forgotten (or never heard) the mark of a peer learns it again, and from
nobody else; and who claims to be somebody whom this side has met learns nothing.
"""

import hmac
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from kvxfer.errors import IdentityError, ProtocolError
from kvxfer.limits import MAX_ACQUAINTANCES

__all__ = ["MARK_BYTES", "Acquaintances", "Recognition"]

MARK_BYTES: Final = 32
_MARK: Final = b"kvxfer mark v1"
_SEAL: Final = b"kvxfer seal v1"
_SAME: Final = b"kvxfer same v1"
_UNMARKED: Final = b""
"""What is remembered of a peer that showed no mark: it speaks an older version of this protocol."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is remembered of a peer: its mark, and where this side went to meet it."""

    mark: bytes = field(repr=False)
    endpoint: str


class Acquaintances:
    """The marks of all who were met.

    Beyond `most` the longest unseen are forgotten, but never one of whom something is under way, or in doubt.

    Args:
        own: This worker's incarnation.
        key: 32 random bytes that nobody else learns.
        most: Peers to remember.
    """

    def __init__(self, own: bytes, key: bytes, *, most: int = MAX_ACQUAINTANCES) -> None:
        self._own: Final = own
        self._key: Final = key
        self._most: Final = most
        self._limit = most
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # who was seen last comes last
        self._needed: list[Callable[[], Iterable[bytes]]] = []

    def __len__(self) -> int:
        return len(self._known)

    def keep(self, needed: Callable[[], Iterable[bytes]]) -> None:
        """Forget none of the incarnations that `needed` returns when it is called: something of them is not over."""
        self._needed.append(needed)

    def mark(self, peer: bytes) -> bytes:
        """By what this worker is known again to a peer."""
        return hmac.digest(self._key, _MARK + peer, "sha256")

    def find(self, peer: bytes) -> bytes | None:
        """By what a peer is known again; None if it was not met, or was forgotten."""
        if peer == self._own:
            return self.mark(peer)
        known = self._known.get(peer)
        return None if known is None else known.mark

    def elsewhere(self, peer: bytes, endpoint: str) -> str:
        """Where else a peer is that is said to be at this endpoint; empty if it may be there."""
        known = self._known.get(peer)
        return "" if known is None or known.endpoint == endpoint else known.endpoint

    def may_move(self, peer: bytes) -> bool:
        """A peer does not answer where it was met. Whether it may be elsewhere now: nothing of it is under way."""
        known = self._known.get(peer)
        if peer in self._kept():
            return False
        if known is not None:
            self._known[peer] = _Known(known.mark, "")
        return True

    def remember(self, peer: bytes, mark: bytes, endpoint: str) -> None:
        """A peer was met, at an endpoint if it was this side that went there. Somebody else may be forgotten for it."""
        before = self._known.pop(peer, None)
        self._known[peer] = _Known(mark, endpoint or ("" if before is None else before.endpoint))
        if len(self._known) > self._limit:
            kept = self._kept() | {peer}
            spare = [who for who in self._known if who not in kept]
            for who in spare[: len(self._known) - self._most]:
                del self._known[who]
            # where nearly all are kept, look again only when an eighth more has come
            self._limit = max(self._most, len(self._known) + len(self._known) // 8)

    def _kept(self) -> set[bytes]:
        return set[bytes]().union(*(needed() for needed in self._needed))


class Recognition:
    """One handshake's part of it: what this side shows, and what it makes of what the other one shows.

    The client shows first, as it was met; the server checks that, and answers in kind.

    Args:
        met: Whom this worker has met.
        peer: The incarnation that the other side claims.
        transcript: Of both greetings, with both nonces.
        endpoint: Where the stream leads, if it was opened here; None at the server.

    Raises:
        IdentityError: If the peer is at another endpoint.
    """

    def __init__(self, met: Acquaintances, peer: bytes, transcript: bytes, endpoint: str | None) -> None:
        role, other = (b"client", b"server") if endpoint is not None else (b"server", b"client")
        self._met: Final = met
        self._peer: Final = peer
        self._said: Final = role + transcript
        self._heard: Final = other + transcript
        self._own: Final = met.mark(peer)
        self._answers: Final = endpoint is None
        self._theirs = met.find(peer)
        self._sealed = bool(self._theirs)
        self._endpoint: Final = endpoint or ""
        if endpoint and (where := met.elsewhere(peer, endpoint)):  # whoever is here may pass on what both show
            raise IdentityError(
                f"whoever answers at {endpoint} says to be {peer.hex()[:8]}, which was met at {where}: refused",
                peer=endpoint,
                met_at=where,
                incarnation=peer.hex(),
            )

    def show(self) -> tuple[bytes, bytes]:
        """The mark, and the proof of it, that go into this side's `Agent`.

        Whoever is answered has the place of whom it claims to be, whatever becomes of this handshake: who hears this
        side's mark and leaves no trace could come back with it once the other one was met.
        """
        if self._answers:
            self.remember()
        if self._theirs is None or (self._theirs and not self._sealed):
            return self._own, b""
        if not self._theirs:
            return b"", b""
        return _xor(self._own, _sealing(self._theirs, self._said)), _proof(self._own, self._said)

    def check(self, mark: bytes, same: bytes) -> None:
        """Check what the other side's `Agent` says.

        Raises:
            IdentityError: If the incarnation was met before, and this is not shown to be the same process.
            ProtocolError: If it is neither a mark, nor a sealed one with its proof, nor nothing.
        """
        if (len(mark), len(same)) not in {(0, 0), (MARK_BYTES, 0), (MARK_BYTES, MARK_BYTES)}:
            raise ProtocolError(f"a mark of {len(mark)} bytes with a proof of {len(same)} is neither shown nor sealed")
        self._sealed = bool(same)
        if self._sealed:
            mark = _xor(mark, _sealing(self._own, self._heard))
        proved = not same or hmac.compare_digest(_proof(mark, self._heard), same)
        expected = self._met.find(self._peer)  # it may have been met on another stream meanwhile
        expected = self._theirs if expected is None else expected
        if not proved or not hmac.compare_digest(mark if expected is None else expected, mark):
            raise IdentityError(
                f"{self._peer.hex()[:8]} was met before, and nothing proves that this is the same process; if it is no "
                "impostor, start it again"
            )
        self._theirs = mark

    def remember(self) -> None:
        """Whom the handshake is with is known from now on."""
        self._met.remember(self._peer, self._theirs or _UNMARKED, self._endpoint)


def _sealing(mark: bytes, said: bytes) -> bytes:
    """With what the mark of one side is hidden from all but the other one, whose mark this is."""
    return hmac.digest(mark, _SEAL + said, "sha256")


def _proof(mark: bytes, said: bytes) -> bytes:
    return hmac.digest(mark, _SAME + said, "sha256")


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
