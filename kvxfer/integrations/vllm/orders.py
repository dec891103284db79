"""What the scheduler's side tells every worker with each step. Plain data: vLLM pickles it.

Orders stay inside of one engine. They hold tickets and the engine's key, which are secrets, so nothing shows them.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = ["Blocks", "Load", "Membership", "OfferStep", "Orders"]

Blocks: TypeAlias = dict[str, tuple[list[int], int]]
"""By group: block ids, and the first token that they are about."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The engine that the workers are to join."""

    card: dict[str, Any]
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch a request's cache."""

    request: str
    ticket: dict[str, Any] = field(repr=False)
    blocks: Blocks
    start: int
    stop: int  # one past the last token to fetch
    in_step: bool  # this step's forward pass reads it, layer by layer; else the request waits until it is there


@dataclass(frozen=True, slots=True)
class OfferStep:
    """More is there of a request that another engine will fetch."""

    request: str
    name: str  # the ticket's
    attempt: int  # how often it was preempted while on offer
    blocks: Blocks  # that it got since the last step, of those that it holds until its end
    start: int  # tokens that were on offer before; 0 begins the offer
    stop: int  # tokens that are computed after this step
    last: bool  # that is all
    computed: bool = False  # earlier steps have computed it, and not this one


@dataclass(slots=True)
class Orders:
    """Everything for one step, in the order in which a worker does it."""

    # whose blocks are about to be used for others: nobody may read them any more; aborted ones are in `withdraws` too
    preempted: list[str] = field(default_factory=list[str])
    join: Membership | None = None
    # requests that wait for a place here, and their tickets
    claims: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]], repr=False)
    # requests that will not be fetched, likewise; two of them may have had the same name
    declines: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]], repr=False)
    withdraws: list[str] = field(default_factory=list[str])  # offers of requests that were aborted
    # names of requests that were aborted before anything of them was on offer; tickets may exist
    refusals: list[str] = field(default_factory=list[str])
    steps: list[OfferStep] = field(default_factory=list[OfferStep])
    loads: list[Load] = field(default_factory=list[Load])
    cancels: list[str] = field(default_factory=list[str])  # fetches of requests that were aborted
