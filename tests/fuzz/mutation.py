"""Frames that are wrong in the ways that matter: mutations of the golden vectors, by byte and by structure."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgpack

from kvxfer.errors import ProtocolError
from kvxfer.protocol.framing import decode

VECTORS = Path(__file__).parents[2] / "proto" / "vectors"
LARGEST_SEED = 4096
"""Bytes of the largest golden payload that is taken apart; the few larger ones are mutated by byte alone."""
NUMBERS = [
    *(0, 1, 2, 3, 4, 7, 8, 16, 63, 64, 127, 128, 255, 256, 0xFFFF, 0x10000),
    *((1 << bits) + off for bits in (20, 24, 31, 32, 47, 62, 63) for off in (-1, 0, 1)),
    *((1 << 64) - 1, -1, -2, -128, -(1 << 31), -(1 << 63)),
]
"""Integers at the edges of what fields hold, and of what is counted, multiplied or added with them."""
OTHERS: list[Any] = [
    *(None, True, False, 0.5, float("nan"), float("inf"), -0.0),
    *("", "x", "x" * 129, "x" * 1025, "\ud800", "\x00", b"", b"\x00" * 3, b"\xff" * 4, b"\x00" * 65, b"x" * 65537),
    *([], [[]], [None] * 17, {}, {0: 1}, {"a": {}}),
]
"""Values of other types, and of sizes just over bounds."""


def decoded(payload: bytes) -> Any:
    try:
        return decode(payload)
    except ProtocolError:
        return None


def frames_of(name: str) -> list[bytes]:
    """Payloads of the golden frames of one file."""
    return [bytes.fromhex(entry["hex"])[4:] for entry in json.loads((VECTORS / name).read_text())["frames"]]


def conversations() -> list[list[tuple[str, bytes]]]:
    """The golden conversations: who says which payload."""
    told = json.loads((VECTORS / "conversations.json").read_text())["conversations"]
    return [[(line["from"], bytes.fromhex(line["frame"])[4:]) for line in one["frames"]] for one in told]


VALID = frames_of("valid.json")
INVALID = frames_of("invalid.json")
SPOKEN = sorted({payload for one in conversations() for _, payload in one})


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


class Raw(bytes):
    """MessagePack that is written as it stands."""


def pack(value: Any, draw: Random, odd: float = 0.0) -> bytes:
    """MessagePack of a value; a part `odd` of its numbers and sizes is written wider than need be."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return _integer(value, draw.randrange(4) if odd and draw.random() < odd else 0)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case Raw():
            return value
        case str():
            return _sized(value.encode("utf-8", "surrogatepass"), 0xA0, 31, (0xD9, 0xDA, 0xDB), draw, odd)
        case bytes():
            return _sized(value, 0xC4, -1, (0xC4, 0xC5, 0xC6), draw, odd)
        case dict():
            parts = b"".join(pack(item, draw, odd) for pair in value.items() for item in pair)
            return _counted(len(value), 0x80, (0xDE, 0xDF), draw, odd) + parts
        case _:
            return _counted(len(value), 0x90, (0xDC, 0xDD), draw, odd) + b"".join(
                [pack(item, draw, odd) for item in value]
            )


def _integer(value: int, wider: int) -> bytes:
    if -32 <= value < 128 and not wider:
        return struct.pack("b", value)
    signs = ("b", "h", "i", "q") if value < 0 else ("B", "H", "I", "Q")
    first = 0xD0 if value < 0 else 0xCC
    for step, form in enumerate(signs):
        try:
            found = bytes([first + step]) + struct.pack(">" + form, value)
        except struct.error:
            continue
        if wider <= step + 1 or step == 3:
            return found
    return b"\xcf" + (value & ((1 << 64) - 1)).to_bytes(8, "big")


def _sized(data: bytes, short: int, most: int, heads: Sequence[int], draw: Random, odd: float) -> bytes:
    if len(data) <= most and not (odd and draw.random() < odd):
        return bytes([short + len(data)]) + data
    least = 0 if len(data) < 256 else 1 if len(data) < 65536 else 2
    width = draw.randint(least, 2) if odd and draw.random() < odd else least
    return bytes([heads[width]]) + len(data).to_bytes(1 << width, "big") + data


def _counted(count: int, short: int, heads: Sequence[int], draw: Random, odd: float) -> bytes:
    if count < 16 and not (odd and draw.random() < odd):
        return bytes([short + count])
    width = 1 if count >= 65536 or (odd and draw.random() < odd) else 0
    return bytes([heads[width]]) + count.to_bytes(2 << width, "big")


class Mutator:
    """Draws payloads near those of a corpus."""

    def __init__(self, payloads: Sequence[bytes]):
        self.payloads = list(payloads)
        self.trees = []
        for payload in self.payloads:
            if len(payload) > LARGEST_SEED:
                continue
            try:
                self.trees.append(msgpack.unpackb(payload, strict_map_key=False))
            except (ValueError, msgpack.UnpackException):
                continue

    def payload(self, draw: Random) -> bytes:
        """One payload: seldom as it was, mostly changed in a place or three."""
        kind = draw.random()
        if kind < 0.04:
            return draw.choice(self.payloads)
        if kind < 0.08:
            return draw.randbytes(draw.randrange(80))
        if kind < 0.45:
            return self.bytewise(draw, draw.choice(self.payloads))
        tree = draw.choice(self.trees)
        return pack(self.changed(draw, tree), draw, draw.choice((0, 0, 0.2)))

    def changed(self, draw: Random, tree: Any, times: int = 0) -> Any:
        """A tree with a few of its values changed."""
        for _ in range(times or draw.choice((1, 1, 1, 2, 3))):
            tree = self._change(draw, tree)
        return tree

    def _change(self, draw: Random, tree: Any) -> Any:
        if isinstance(tree, list | tuple) and tree and draw.random() < 0.85:
            inner = [at for at, entry in enumerate(tree) if isinstance(entry, list) and entry]
            # what is deep would seldom be met: places, spans and selections are where the numbers are that matter
            at = draw.choice(inner) if inner and draw.random() < 0.5 else draw.randrange(len(tree))
            return [*tree[:at], self._change(draw, tree[at]), *tree[at + 1 :]]
        if isinstance(tree, dict) and tree and draw.random() < 0.9:
            name = draw.choice(list(tree))
            rest = {key: value for key, value in tree.items() if key != name}
            match draw.randrange(8):
                case 0:
                    return rest
                case 1:
                    return {**rest, f"{name}_": tree[name]}
                case _:
                    return {**tree, name: self._change(draw, tree[name])}
        return draw.choice(_CHANGES)(self, draw, tree)

    def other(self, draw: Random, value: Any) -> Any:
        return draw.choice(OTHERS)

    def number(self, draw: Random, value: Any) -> Any:
        if type(value) is int and draw.random() < 0.3:
            return value + draw.choice((-4, -1, 1, 4, 4096))
        return draw.choice(NUMBERS)

    def words(self, draw: Random, value: Any) -> Any:
        """Packed ids: one of them another, fewer, more, twice, backwards."""
        if not isinstance(value, bytes):
            return self.number(draw, value)
        words = [value[at : at + 4] for at in range(0, len(value), 4)]
        match draw.randrange(6):
            case 0 if words:
                words[draw.randrange(len(words))] = (draw.choice(NUMBERS) & 0xFFFF_FFFF).to_bytes(4, "little")
            case 1:
                words.append(struct.pack("<I", draw.randrange(20)))
            case 2:
                words = words[:-1]
            case 3:
                words = words * 2
            case 4:
                words = words[::-1]
            case _:
                words = words * min(draw.choice((50, 1000)), 10_000 // (len(words) + 1))
        return b"".join(words)

    def shape(self, draw: Random, value: Any) -> Any:
        """A list that is longer, shorter, in another order; any value nested deeper."""
        if not isinstance(value, list | tuple) or draw.random() < 0.2:
            heads = draw.choice((b"\x91", b"\x81\x00", b"\xdc\x00\x01")) * draw.choice((1, 3, 70, 1100))
            return Raw(heads + pack(value, draw))
        entries = list(value)
        match draw.randrange(5):
            case 0:
                return entries[: draw.randrange(len(entries) + 1)]
            case 1:
                return entries * draw.choice((2, 3, 40))
            case 2:
                return [*entries, *draw.choices(NUMBERS, k=draw.randrange(1, 4))]
            case 3:
                draw.shuffle(entries)
                return entries
            case _:
                return [*entries, *draw.choices(entries or [0], k=1)]

    def graft(self, draw: Random, value: Any) -> Any:
        """A part of another frame."""
        tree = draw.choice(self.trees)
        while isinstance(tree, list) and tree and draw.random() < 0.7:
            tree = draw.choice(tree)
        return tree

    def bytewise(self, draw: Random, payload: bytes) -> bytes:
        """A payload with some bytes changed, cut off, put in, or taken from another one."""
        data = bytearray(payload)
        for _ in range(draw.choice((1, 1, 2, 4))):
            at = draw.randrange(len(data) + 1)
            match draw.randrange(7):
                case 0 if data:
                    data[at % len(data)] ^= 1 << draw.randrange(8)
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = draw.randbytes(draw.randrange(1, 9))
                case 3:
                    other = draw.choice(self.payloads)
                    data[at:] = other[draw.randrange(len(other) + 1) :]
                case 4 if data:
                    data[at % len(data)] = draw.choice(b"\x00\x7f\x80\x90\xc0\xc1\xc4\xc6\xcf\xd9\xdb\xdd\xdf\xff")
                case 5:
                    data[at : at + 4] = draw.choice((b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\xdd\xff\xff\xff"))
                case _:
                    del data[at : at + draw.randrange(1, 9)]
        return bytes(data)

    def stream(self, draw: Random, payloads: Sequence[bytes]) -> bytes:
        """Frames in a row: some repeated, swapped, left out, of a wrong length, or cut."""
        parts = list(payloads)
        if parts and draw.random() < 0.3:
            parts.insert(draw.randrange(len(parts)), draw.choice(parts))
        if len(parts) > 1 and draw.random() < 0.3:
            at = draw.randrange(len(parts) - 1)
            parts[at], parts[at + 1] = parts[at + 1], parts[at]
        data = b"".join(map(frame, parts))
        if draw.random() < 0.15:
            at = draw.randrange(len(data) + 1)
            length = draw.choice((0, 1, len(data), 1 << 16, 1 << 24, (1 << 24) + 1, 0xFFFF_FFFF))
            data = data[:at] + struct.pack("<I", length) + data[at:]
        return data[: draw.randrange(len(data) + 1)] if draw.random() < 0.1 else data


_CHANGES: list[Callable[[Mutator, Random, Any], Any]] = [
    Mutator.number,
    Mutator.number,
    Mutator.words,
    Mutator.other,
    Mutator.shape,
    Mutator.graft,
]


def pieces(draw: Random, data: bytes) -> list[bytes]:
    """A stream as it may come in: whole, byte by byte, or in pieces."""
    match draw.randrange(4):
        case 0:
            return [data]
        case 1 if len(data) < 300:
            return [data[at : at + 1] for at in range(len(data))]
        case _:
            cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(1, 5)))
            return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]
