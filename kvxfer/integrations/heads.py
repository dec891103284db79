"""Which heads of a layer a rank of an engine holds."""

from dataclasses import dataclass

__all__ = ["Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands among those that share the heads of the same layers."""

    rank: int
    ranks: int

    def heads(self, total: int, held: int) -> range:
        """The heads that it holds. Where there are fewer heads than ranks, neighbours hold the same one."""
        first = self.rank * total // self.ranks
        return range(first, first + held)
