"""A wire between two workers on which one side's frames are changed once the handshake is through.

So the other side meets a rank that does almost all of the protocol right, with real tickets, agreements, addresses and
transfer numbers, and lies somewhere.
"""

import asyncio
import contextlib
import struct
from pathlib import Path
from random import Random

import msgpack
from mutation import SPOKEN, VALID, Mutator, frame, pack
from wire import Wire

from kvxfer.errors import ProtocolError
from kvxfer.protocol.framing import decode
from kvxfer.protocol.messages import Fetch, Place, Reserve, Route, unpack_u32
from kvxfer.protocol.session import RECEIVED_WHEN_OPEN, Role

HANDSHAKE = 2
"""Frames of each side that pass as they are: a greeting and `Agent`."""
KEPT = 200
"""Frames that are remembered, to be said again."""
KNOWN = 300
"""Numbers of frames that went by: transfers, chunks, addresses, lengths."""


class Liar(Mutator):
    """Changes frames that went by, with numbers that went by."""

    def __init__(self, role: Role):
        super().__init__([*VALID, *SPOKEN])
        self.legal = RECEIVED_WHEN_OPEN[role]
        legal = {kind.__struct_config__.tag for kind in self.legal}
        self.anything = self.trees[:]
        self.golden = [tree for tree in self.trees if isinstance(tree, list) and tree and tree[0] in legal]
        self.trees = self.golden
        self.known = [0]

    def listen(self, payload: bytes, *, own: bool):
        """Learn from a frame."""
        with contextlib.suppress(ValueError, msgpack.UnpackException):
            tree = msgpack.unpackb(payload, strict_map_key=False)
            if own:
                self.trees = [*self.trees[-KEPT:], tree]
            self.known = (self.known + numbers(tree))[-KNOWN:]

    def number(self, draw, value):
        if type(value) is int and draw.random() < 0.4:
            return max(0, value + draw.choice((-512, -8, -1, 1, 8, 512)))
        if draw.random() < 0.5:
            return draw.choice(self.known) + draw.choice((0, 0, 0, -1, 1, 8, 1 << 20))
        return super().number(draw, value)

    def lie(self, draw: Random, payload: bytes | None = None) -> bytes:
        """A frame made of this one or of an earlier one; mostly one that can be decoded."""
        tree = draw.choice(draw.choice((self.golden, *[self.trees] * 9)))
        if draw.random() < 0.02:  # it ends the session: that is soon said
            tree = draw.choice(self.anything)
        elif payload is not None:
            tree = msgpack.unpackb(payload, strict_map_key=False)
        for _ in range(8):
            changed = pack(self.changed(draw, tree), draw)
            try:
                message = decode(changed)
            except ProtocolError:
                message = None
            if (type(message) in self.legal) or draw.random() < 0.01:
                return changed
        return pack(tree, draw)


def numbers(tree) -> list[int]:
    """Every number in a tree."""
    if isinstance(tree, list):
        return [number for entry in tree for number in numbers(entry)]
    return [tree] if type(tree) is int else []


class CrookedWire(Wire):
    """One that lies in one direction."""

    def __init__(self, path: Path, target: str, draw: Random, *, from_far: bool):
        super().__init__(path, target, lambda: 0.0)
        self.lies = 0  # frames of the liar's that were passed on or made up
        self.honest = False  # it does not lie any more
        # staging memory that they allowed to write: by its address, its length once for each chunk
        self.grants: dict[int, list[int]] = {}
        self.blocks: set[int] = set()  # destination blocks that they named
        self._rings: dict[int, tuple[list[Place], int, int]] = {}  # of each transfer: ring, its first chunk, granted
        self.in_place = False  # whether they allowed to write those
        self._draw, self._from_far = draw, from_far
        self._liar = Liar(Role.CLIENT if from_far else Role.SERVER)
        self._lines: list[asyncio.StreamWriter] = []  # on which lies can be told: the handshake is through

    def interrupt(self):
        """Say something unasked, on every line."""
        for writer in self._lines:
            for _ in range(self._draw.randrange(1, 4)):
                self._send(writer, self._liar.lie(self._draw))

    async def _pump(self, reader, writer, target, *, from_far):
        passed, lies = 0, from_far is self._from_far
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                (length,) = struct.unpack("<I", await reader.readexactly(4))
                payload = await reader.readexactly(length)
                passed += 1
                if passed > HANDSHAKE:
                    self._liar.listen(payload, own=lies)
                if passed == HANDSHAKE and lies:
                    self._lines.append(writer)
                if lies and passed > HANDSHAKE and not self.honest:
                    self._tell(writer, payload)
                else:
                    self._heed(payload)
                    writer.write(frame(payload))
                await writer.drain()
        if writer in self._lines:
            self._lines.remove(writer)
        writer.close()

    def _tell(self, writer, payload: bytes):
        draw = self._draw
        while draw.random() < 0.3:
            self._send(writer, self._liar.lie(draw))
        match draw.randrange(20):
            case 0:
                self._send(writer, payload, payload)
            case 1:
                pass
            case 2 | 3:
                self._send(writer, self._liar.lie(draw, payload))
            case 4:
                self._send(writer, payload, self._liar.lie(draw, payload))
            case _:
                self._send(writer, payload)

    def _send(self, writer, *payloads: bytes):
        for payload in payloads:
            self.lies += 1
            self._heed(payload)
            writer.write(frame(payload))

    def _heed(self, payload: bytes):
        """Note what a frame allows to be written."""
        try:
            message = decode(payload)
        except ProtocolError:
            return
        match message:
            case Reserve():
                self._turns(message)
            case Fetch():
                self._turns(Reserve(message.transfer, message.ring_chunks, message.lease_ms, ring=message.ring))
                self._rings[message.transfer] = message.ring, 0, 0  # it may be void: then the same chunks come again
                self.blocks |= {int(block) for span in message.spans for block in unpack_u32(span.ids)}
                self.in_place |= bool({Route.DIRECT, Route.MAPPED} & set(message.routes))
            case _:
                pass

    def _turns(self, message: Reserve):
        """Each chunk that is new may be written to its place in the ring, once; no transfer here has more of them."""
        ring, first, granted = self._rings.get(message.transfer, ([], 0, 0))
        if message.ring:
            ring, first = message.ring, granted
        for chunk in range(granted, min(message.chunks, granted + 1000) if ring else granted):
            place = ring[(chunk - first) % len(ring)]
            self.grants.setdefault(place.address, []).append(place.length)
        self._rings[message.transfer] = ring, first, max(granted, message.chunks)
