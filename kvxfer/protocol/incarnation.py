"""Who a worker is, from start to end: whoever speaks under an incarnation has its key (PROTOCOL.md section 4.8).

An incarnation is an X25519 public key. Two workers, and nobody else, can compute what their keys make together, so each
proves to the other who it is from the first session on, and neither has to remember anything of the other.
"""

import hmac
from typing import Final

from kvxfer.errors import IdentityError, ProtocolError

__all__ = ["PRIVATE_BYTES", "IdentityKey", "check_place", "check_same", "same"]

PRIVATE_BYTES: Final = 32
_SAME: Final = b"kvxfer same v1"


class IdentityKey:
    """What makes this process the one that it says to be.

    Args:
        private: 32 unpredictable bytes that nobody else learns.

    Attributes:
        incarnation: The public half, by which everybody may know this worker.
    """

    def __init__(self, private: bytes) -> None:
        # not at the top: it takes 50 ms to import, and cards and tickets need none of it
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private: Final = X25519PrivateKey.from_private_bytes(private)
        self.incarnation: Final[bytes] = self._private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"<IdentityKey of {self.incarnation.hex()[:8]}>"

    def shared(self, peer: bytes) -> bytes:
        """What this key and that of a peer make together: a secret of the two.

        Raises:
            ProtocolError: If the peer's incarnation is no key, or one with which everybody would make the same.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(peer))
        except ValueError as error:
            raise ProtocolError(f"the incarnation {peer.hex()[:8]} is no key that a rank could have") from error


def same(shared: bytes, role: str, transcript: bytes) -> bytes:
    """The proof that its sender has one of the two keys, good for one role in one session."""
    return hmac.digest(shared, _SAME + role.encode() + transcript, "sha256")


def check_same(claimed: bytes, expected: bytes, heard: bytes) -> None:
    """See that a peer has proved its incarnation.

    Raises:
        IdentityError: If not.
    """
    if not hmac.compare_digest(expected, heard):
        raise IdentityError(
            f"nothing proves that this is the process of incarnation {claimed.hex()[:8]}; if it is no impostor, start "
            "it again"
        )


def check_place(claimed: bytes, here: str, engaged_at: str) -> None:
    """See that nothing with a peer that answers here is open, or in doubt, at another endpoint.

    Raises:
        IdentityError: If there is: whoever is here may pass on what both prove, and then speak in the peer's name.
    """
    if engaged_at not in ("", here):
        raise IdentityError(
            f"whoever answers at {here} says to be {claimed.hex()[:8]}, with which something is open or in doubt at "
            f"{engaged_at}: refused",
            peer=here,
            engaged_at=engaged_at,
            incarnation=claimed.hex(),
        )
