"""Text in and out without a vocabulary: a token is a byte of UTF-8, and a few more mean what no byte can."""

import codecs
from collections.abc import Iterable
from enum import IntEnum


class Special(IntEnum):
    """Tokens that are no text."""

    BEGIN = 256
    END = 257
    SYSTEM = 258
    USER = 259
    ASSISTANT = 260
    CLOSE = 261


VOCABULARY = 256 + len(Special)
STOPS = frozenset({Special.END, Special.CLOSE})
"""Tokens after which the model has nothing to add."""

_ROLES = {"system": Special.SYSTEM, "developer": Special.SYSTEM, "user": Special.USER, "assistant": Special.ASSISTANT}
ROLES = frozenset(_ROLES)


def encode(text: str) -> list[int]:
    """The tokens of a prompt."""
    return [int(Special.BEGIN), *text.encode("utf-8", "surrogatepass")]


def encode_chat(messages: Iterable[tuple[str, str]]) -> list[int]:
    """The tokens of a conversation of (role, text), up to where the assistant answers."""
    tokens = [int(Special.BEGIN)]
    for role, text in messages:
        tokens += [int(_ROLES[role]), *text.encode("utf-8", "surrogatepass"), int(Special.CLOSE)]
    return [*tokens, int(Special.ASSISTANT)]


class TextStream:
    """Text of tokens as they come. A character is said once its last byte is there; what is none becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Text that this token completes, which may be none."""
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def end(self) -> str:
        """What remains when no token follows."""
        return self._decoder.decode(b"", final=True)
