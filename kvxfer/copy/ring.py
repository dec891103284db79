"""A ring of memory whose slots are given back in the order in which they were taken.

That is the order in which a stream finishes, so a slot is reused only after the work that reads it has run.
"""

from collections import deque
from typing import Final

__all__ = ["Ring"]


class Ring:
    """The books of a ring of `capacity` units. Knows no memory; one thread at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity: Final = capacity
        self._taken: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, size: int) -> int | None:
        """Take a slot of `size` consecutive units.

        Returns:
            Where it starts, or None if it does not fit before older slots are given back.
        """
        if not self._taken:
            if size > self.capacity:
                return None
            self._taken.append((0, size))
            return 0
        first = self._taken[0][0]
        last, end = self._taken[-1]
        limit = first if last < first else self.capacity
        if end + size <= limit:
            start = end
        elif limit == self.capacity and size <= first:
            start = 0
        else:
            return None
        self._taken.append((start, start + size))
        return start

    def give_back(self) -> None:
        """Give the oldest slot back."""
        self._taken.popleft()
