"""The books of the caller's own blocks: which of them a fetch writes, and which a silent peer may still touch.

A block is *held* while a fetch writes it, by that fetch alone. It is *in doubt* while a silent peer may still write it
(after a fetch) or read it (after an offer); blocks in doubt leave the books only by `settle`, on evidence. Offers hold
nothing, since requests that share a prefix offer the same blocks at once; they only `check`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvxfer.errors import BlocksError
from kvxfer.memory.arena import InvariantError

__all__ = ["Custody", "CustodySnapshot", "HolderSnapshot"]

I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]

Blocks: TypeAlias = Mapping[str, Sequence[int] | I64]
"""Block ids by group, not negative."""


@dataclass(frozen=True, slots=True)
class HolderSnapshot:
    """One holder: the number of its blocks, and whether they are in doubt."""

    blocks: int
    in_doubt: bool


@dataclass(frozen=True, slots=True)
class CustodySnapshot:
    """All blocks in the books at one moment."""

    held_blocks: int
    doubtful_blocks: int  # blocks in doubt; one that two offers left in doubt counts twice
    holders: Mapping[str, HolderSnapshot]


class _Entry(Struct):
    """What one holder has in the books."""

    blocks: dict[str, I64]
    in_doubt: bool = False
    reads: bool = False


@dataclass(slots=True)
class _GroupBooks:
    """One group's blocks."""

    # int32, by id, for as many as were asked about: not 0 while a fetch writes the block
    marks: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    # the offers after which an id may still be read
    readers: dict[int, list[str]] = field(default_factory=dict[int, list[str]])


class Custody:
    """The books of the caller's blocks. A holder is the name of a transfer or an offer, as messages give it."""

    def __init__(self) -> None:
        self._groups: defaultdict[str, _GroupBooks] = defaultdict(_GroupBooks)
        self._entries: dict[str, _Entry] = {}

    def check(self, blocks: Blocks) -> None:
        """Refuse blocks that a fetch writes or that are in doubt: an offer must not read them, nor a fetch write them.

        Raises:
            BlocksError: the first such block; the message names its group, position in the list, id and holder.
        """
        for group, listed in blocks.items():
            books, ids = self._groups[group], np.asarray(listed, np.int64)
            if not len(ids):
                continue
            if (most := int(ids[ids.argmax()])) >= len(books.marks):
                books.marks = np.concatenate([books.marks, np.zeros(most + 1 - len(books.marks), np.int32)])
            taken = books.marks[ids]
            if books.readers:
                taken |= np.fromiter((block in books.readers for block in ids.tolist()), np.bool_, len(ids))
            if taken[taken.argmax()]:
                first = int(np.flatnonzero(taken)[0])
                self._refuse(group, first, int(ids[first]), books)

    def hold(self, holder: str, blocks: Blocks) -> None:
        """Note that the fetch `holder` writes `blocks`, alone, until `release`, or `doubt` and `settle`.

        All or nothing: if it raises, nothing was noted.

        Raises:
            BlocksError: a block is held or in doubt, or named twice; the message names group, position, id and holder.
            InvariantError: `holder` has blocks in the books already.
        """
        if holder in self._entries:
            raise InvariantError(f"{holder} has blocks in the books already")
        self.check(blocks)
        held: dict[str, I64] = {}
        for group, listed in blocks.items():
            ids, marks = np.array(listed, np.int64), self._groups[group].marks
            numbers = np.arange(1, len(ids) + 1, dtype=np.int32)
            marks[ids] = numbers
            held[group] = ids
            if marks[ids].tobytes() != numbers.tobytes():  # of an id named twice only the last number is left
                for marked, those in held.items():
                    self._groups[marked].marks[those] = 0
                raise _repeated_error(group, ids.tolist())
        self._entries[holder] = _Entry(held)

    def release(self, holder: str) -> None:
        """The fetch `holder` is over and no peer will write its blocks any more. Exactly once.

        Raises:
            InvariantError: `holder` holds nothing (any more), or its blocks are in doubt.
        """
        entry = self._entry(holder)
        if entry.in_doubt:
            raise InvariantError(f"the blocks of {holder} are in doubt: only settle(), on evidence, frees them")
        del self._entries[holder]
        for group, ids in entry.blocks.items():
            self._groups[group].marks[ids] = 0

    def doubt(self, holder: str) -> None:
        """A silent peer may still write the blocks that the fetch `holder` holds: refuse them until `settle`.

        Raises:
            InvariantError: `holder` holds nothing, or its blocks are in doubt already.
        """
        entry = self._entry(holder)
        if entry.in_doubt:
            raise InvariantError(f"the blocks of {holder} are in doubt already")
        entry.in_doubt = True

    def doubt_reads(self, holder: str, blocks: Blocks) -> None:
        """Somebody silent may still read `blocks` that the offer `holder` offered: refuse them until `settle`.

        Unlike a fetch's, such blocks may be in doubt for several offers at once; the last one that settles frees them.

        Raises:
            InvariantError: `holder` has blocks in the books already.
        """
        if holder in self._entries:
            raise InvariantError(f"{holder} has blocks in the books already")
        taken = {group: np.unique(np.asarray(ids, np.int64)) for group, ids in blocks.items()}
        for group, ids in taken.items():
            readers = self._groups[group].readers
            for block in ids.tolist():
                readers.setdefault(block, []).append(holder)
        self._entries[holder] = _Entry(taken, in_doubt=True, reads=True)

    def settle(self, holder: str) -> None:
        """There is evidence that no peer can touch the blocks of `holder` any more. Exactly once.

        Raises:
            InvariantError: `holder` has no blocks in doubt (any more).
        """
        entry = self._entry(holder)
        if not entry.in_doubt:
            raise InvariantError(f"the blocks of {holder} are not in doubt, so there is nothing to settle")
        del self._entries[holder]
        for group, ids in entry.blocks.items():
            books = self._groups[group]
            if entry.reads:
                for block in ids.tolist():
                    books.readers[block].remove(holder)
                    if not books.readers[block]:
                        del books.readers[block]
            else:
                books.marks[ids] = 0

    def snapshot(self) -> CustodySnapshot:
        """Who holds how many blocks now."""
        holders = {
            name: HolderSnapshot(sum(map(len, entry.blocks.values())), entry.in_doubt)
            for name, entry in self._entries.items()
        }
        return CustodySnapshot(
            held_blocks=sum(row.blocks for row in holders.values() if not row.in_doubt),
            doubtful_blocks=sum(row.blocks for row in holders.values() if row.in_doubt),
            holders=holders,
        )

    def _entry(self, holder: str) -> _Entry:
        entry = self._entries.get(holder)
        if entry is None:
            raise InvariantError(f"{holder} has no blocks in the books (any more)")
        return entry

    def _refuse(self, group: str, position: int, block: int, books: _GroupBooks) -> NoReturn:
        written = block < len(books.marks) and bool(books.marks[block])
        holder = self._writer(group, block) if written else books.readers[block][0]
        if not self._entries[holder].in_doubt:
            why = f"{holder} is fetching into it; wait until that fetch has returned or raised"
        elif written:
            why = f"a silent peer of {holder} may still write it; await settled() of its MemoryInDoubt"
        else:
            why = f"a silent peer of {holder} may still read it; await settled() of its MemoryInDoubt"
        raise BlocksError(f"block {block} of group {group!r} (position {position}) is in use: {why}")

    def _writer(self, group: str, block: int) -> str:
        """Whose a marked block is."""
        return next(
            name
            for name, entry in self._entries.items()
            if not entry.reads and group in entry.blocks and (entry.blocks[group] == block).any()
        )


def _repeated_error(group: str, ids: Sequence[int]) -> BlocksError:
    last = {block: position for position, block in enumerate(ids)}
    first, block = next((position, block) for position, block in enumerate(ids) if last[block] != position)
    return BlocksError(
        f"block {block} of group {group!r} is named twice, at positions {first} and {last[block]}: "
        "a fetch must not write a block twice"
    )
