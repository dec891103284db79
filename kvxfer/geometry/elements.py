"""What a copy does to one element: move its bytes, or convert it."""

from dataclasses import dataclass
from typing import Final

__all__ = ["BYTES", "Elements"]


@dataclass(frozen=True, slots=True, order=True)
class Elements:
    """Elements of a copy on both sides.

    Attributes:
        src_bytes: Size of one at the source.
        dst_bytes: Size of one at the destination.
        src: Dtype at the source; empty where bytes are copied as they are.
        dst: Dtype at the destination; likewise.
    """

    src_bytes: int
    dst_bytes: int
    src: str = ""
    dst: str = ""

    @property
    def converts(self) -> bool:
        """Whether elements are computed anew, and not copied byte by byte."""
        return bool(self.src)

    @property
    def staged_bytes(self) -> int:
        """Size of one in staging and on the wire: the narrower of the two."""
        return min(self.src_bytes, self.dst_bytes)

    @property
    def gathered(self) -> "Elements":
        """The copy into staging. It converts if that makes elements smaller."""
        return self if self.dst_bytes < self.src_bytes else Elements(self.src_bytes, self.src_bytes)

    @property
    def scattered(self) -> "Elements":
        """The copy out of staging. It converts if the other one does not."""
        return Elements(self.dst_bytes, self.dst_bytes) if self.dst_bytes < self.src_bytes else self


BYTES: Final = Elements(1, 1)
"""Where nothing is converted, a run is counted in bytes."""
