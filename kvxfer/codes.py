"""Stable codes of errors and reasons: what travels, what logs say, and what metrics count."""

from enum import IntEnum, unique

__all__ = ["Code"]


@unique
class Code(IntEnum):
    """Stable error codes: what travels in `Refuse`, `KvAgentResult` and `Goodbye`, and what logs and metrics count.

    A code that this version does not know decodes as `UNKNOWN`, so that a newer peer's refusal is still a refusal.
    """

    UNKNOWN = 0
    # the caller's mistakes
    USAGE = 1
    CONFIG = 2
    GEOMETRY = 3
    BLOCKS = 4
    TOKENS = 5
    EVENT = 6
    REQUEST = 7
    TICKET = 8
    CLOSED = 9
    MISSING_EXTRA = 10
    ARENA = 11
    FORKED = 12
    # the peer
    PEER = 20
    UNREACHABLE = 21
    MISMATCH = 22
    REFUSED = 23
    PEER_LOST = 24
    PROTOCOL = 25
    IDENTITY = 26
    # a transfer
    TRANSFER = 30
    TIMEOUT = 31
    FAILED = 32
    IN_DOUBT = 33
    INTEGRITY = 34
    FABRIC = 40
    # reasons that a peer gives in `Refuse`
    TICKET_UNKNOWN = 50
    TICKET_FORGED = 51
    TICKET_EXPIRED = 52
    TICKET_RELEASED = 53
    EPOCH_CHANGED = 54
    OFFER_WITHDRAWN = 55
    OFFER_FAILED = 56
    NEVER_OFFERED = 57
    TOKENS_OUTSIDE_OFFER = 58
    BLOCKS_TOO_FEW = 59
    WANTS_NOT_HELD = 60
    NO_COMMON_ROUTE = 61
    CHUNK_TOO_LARGE = 62
    TOO_MANY = 63
    DRAINING = 64
    SUPERSEDED = 65
    NOT_TRUSTED = 66
    PLAN_DIFFERS = 67
    CANCELLED = 68

    @classmethod
    def _missing_(cls, value: object) -> "Code | None":
        return cls.UNKNOWN if isinstance(value, int) else None
