"""The free gaps of a share: best fit, neighbours joined at once, so that a hole freed out of order is usable."""

from bisect import bisect_left, bisect_right, insort

from kvxfer.memory.extent import InvariantError

__all__ = ["Gaps"]


class Gaps:
    """Disjoint free runs within `[0, capacity)`, none of which touches another.

    Two sorted lists, one by offset (to join neighbours) and one by length (to find the best fit): each operation is a
    few bisections, and a list insertion that moves at most a few thousand pointers.

    Attributes:
        free: Bytes in all gaps together.
        largest: Bytes of the largest gap; 0 if nothing is free.
    """

    __slots__ = ("_by_length", "_capacity", "_lengths", "_offsets", "free", "largest")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._offsets: list[int] = []
        self._lengths: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self.free = self.largest = capacity
        if capacity:
            self._offsets, self._lengths, self._by_length = [0], {0: capacity}, [(capacity, 0)]

    def __len__(self) -> int:
        return len(self._offsets)

    def runs(self) -> list[tuple[int, int]]:
        """Every gap as (offset, length), by offset."""
        return [(offset, self._lengths[offset]) for offset in self._offsets]

    def take(self, length: int) -> int | None:
        """Take `length` bytes from the smallest gap that holds them, the lowest one of equals.

        Returns:
            The offset of the first byte, or None if no gap is large enough.
        """
        index = bisect_left(self._by_length, (length, 0))
        if index == len(self._by_length):
            return None
        gap, offset = self._by_length.pop(index)
        place = bisect_left(self._offsets, offset)
        del self._lengths[offset]
        if gap > length:  # what is left of it stands where it stood
            rest, left = offset + length, gap - length
            self._offsets[place] = rest
            self._lengths[rest] = left
            insort(self._by_length, (left, rest))
        else:
            del self._offsets[place]
        self.free -= length
        self.largest = self._by_length[-1][0] if self._by_length else 0
        return offset

    def give(self, offset: int, length: int) -> None:
        """Make `[offset, offset + length)` free, joined with the gaps on either side.

        Raises:
            InvariantError: part of it is free already, or outside the share.
        """
        end = offset + length
        offsets, lengths, by_length = self._offsets, self._lengths, self._by_length
        index = bisect_right(offsets, offset)
        before = offsets[index - 1] if index else None
        after = offsets[index] if index < len(offsets) else None
        before_end = before + lengths[before] if before is not None else 0
        limit = after if after is not None else self._capacity
        if length <= 0 or offset < before_end or end > limit:
            raise InvariantError(f"bytes {offset} to {end} of {self._capacity} are free already or out of range")
        start, first, last = offset, index, index  # of the gaps from `first` to `last` one is made
        if before is not None and before_end == offset:
            start, first = before, index - 1
        if after is not None and after == end:
            end, last = end + lengths[after], index + 1
        for joined in offsets[first:last]:
            del by_length[bisect_left(by_length, (lengths.pop(joined), joined))]
        offsets[first:last] = [start]
        lengths[start] = end - start
        insort(by_length, (end - start, start))
        self.free += length
        self.largest = by_length[-1][0]
