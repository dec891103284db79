"""The arena: one contiguous allocation, divided once into a share for sending and one for receiving.

The shares are disjoint for ever, so that two workers that fetch from each other cannot wait for each other's bytes.
"""

from dataclasses import dataclass

from kvxfer.errors import ConfigError
from kvxfer.memory.share import MIN_ALIGNMENT, Share, check_alignment
from kvxfer.memory.snapshot import ArenaSnapshot

__all__ = ["Arena"]


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """The books of the whole arena. It neither allocates nor frees memory: `kvxfer.memory.allocate` does.

    Attributes:
        sending: Where gathers put what is written to peers.
        receiving: Where peers write.
    """

    sending: Share
    receiving: Share

    @classmethod
    def split(cls, base: int, capacity: int, send_share: float = 0.5, alignment: int = MIN_ALIGNMENT) -> "Arena":
        """Divide an allocation: the share for sending first, the share for receiving behind it.

        Args:
            base: Address of the first byte. If it is not aligned, the bytes up to the next aligned one stay unused.
            capacity: Bytes of the allocation. 0 switches the staged route off: every request is refused.
            send_share: Fraction for sending, from 0 to 1, rounded down to the alignment; the rest is for receiving.
            alignment: Bytes; a power of two, at least 512.

        Raises:
            ConfigError: `send_share` is outside 0 to 1, the alignment is no power of two or below 512, or the capacity
                is negative, or positive and too small for a single aligned extent.
        """
        if not 0.0 <= send_share <= 1.0:
            raise ConfigError(f"send_share={send_share} must lie between 0 and 1")
        check_alignment(alignment)
        first = base + -base % alignment
        usable = (capacity - (first - base)) // alignment * alignment if capacity else 0
        if capacity and usable <= 0:
            raise ConfigError(
                f"arena_bytes={capacity} holds no extent of {alignment} bytes; 0 switches the staged route off"
            )
        sending = min(int(usable * send_share), usable) // alignment * alignment
        return cls(
            sending=Share("send", base=first, capacity=sending, alignment=alignment),
            receiving=Share("receive", base=first + sending, capacity=usable - sending, alignment=alignment),
        )

    @property
    def enabled(self) -> bool:
        """False if there is no arena (`arena_bytes=0`): the staged route is off and every request is refused."""
        return self.sending.capacity + self.receiving.capacity > 0

    @property
    def capacity(self) -> int:
        """Usable bytes of both shares together."""
        return self.sending.capacity + self.receiving.capacity

    def snapshot(self) -> ArenaSnapshot:
        """What is where now, in both shares."""
        return ArenaSnapshot(self.enabled, self.sending.snapshot(), self.receiving.snapshot())
