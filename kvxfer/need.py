"""What a fetch asks of one prefill rank, and what it wants to hear of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvxfer.copy.port import Event
from kvxfer.geometry import BlockLists, Selection
from kvxfer.protocol.messages import TicketRef

__all__ = ["Need", "Owner"]


@dataclass(frozen=True, slots=True)
class Need:
    """What a fetch asks of one prefill rank.

    Attributes:
        ticket: The request.
        selections: Which part of the cache.
        spans: Destination blocks of every group.
        tokens: Token range.
        after: The blocks may be written when this has fired.
        deadline: When the caller gives up, by the runtime's clock; None if never.
        trace: To which trace the fetch belongs; empty if nobody traces it.
    """

    ticket: TicketRef
    selections: tuple[Selection, ...]
    spans: BlockLists
    tokens: range
    after: Event
    deadline: float | None
    trace: str = ""


class Owner(Protocol):
    """The fetch that a transfer with one rank is part of."""

    def planned(self, needed: Sequence[int], parts: Mapping[int, int]) -> None:
        """A rank's plan is made: of each of the layers that it sends, so many parts will land."""
        ...

    def landed(self, layers: Sequence[int]) -> None:
        """One chunk of these layers is in place."""
        ...

    def changed(self) -> None:
        """Whether a transfer is over, quiet or finished may have changed."""
        ...

    def doubted(self, incoming: Any) -> None:
        """A transfer's peer says nothing more of it: it may still write, or waits for an answer."""
        ...
