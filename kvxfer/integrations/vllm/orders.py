"""What the scheduler's side tells every worker with each step. Plain data: vLLM pickles it.

Orders stay inside of one engine. They hold tickets and the engine's key, which are secrets, so nothing shows them.
"""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Load", "Membership", "OfferStep", "Orders"]


@dataclass(frozen=True, slots=True)
class Membership:
    """The engine that the workers are to join.

    Attributes:
        card: Its card, as plain data.
        key: Its key.
    """

    card: dict[str, Any]
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch a request's cache.

    Attributes:
        request: vLLM's id.
        ticket: What the prefill engine gave for it.
        block_ids: The blocks that the tokens lie in.
        first_token: Position of the first token in the first of them.
        start: First token to fetch.
        stop: One past the last.
        in_step: Whether this step's forward pass reads it, layer by layer; else the request waits until it is there.
    """

    request: str
    ticket: dict[str, Any] = field(repr=False)
    block_ids: list[int]
    first_token: int
    start: int
    stop: int
    in_step: bool


@dataclass(frozen=True, slots=True)
class OfferStep:
    """This step's forward pass computes more of a request that a decode engine will fetch.

    Attributes:
        request: vLLM's id.
        name: The ticket's.
        attempt: How often it was preempted while on offer.
        block_ids: Blocks that it got since the last step.
        start: Tokens that were on offer before; 0 begins the offer.
        stop: Tokens that are computed after this step.
        last: Whether that is the whole prompt.
    """

    request: str
    name: str
    attempt: int
    block_ids: list[int]
    start: int
    stop: int
    last: bool


@dataclass(slots=True)
class Orders:
    """Everything for one step, in the order in which a worker does it.

    Attributes:
        preempted: Requests whose blocks are about to be used for others: nobody may read them any more. Those that were
            aborted as well are among `withdraws` too.
        join: The engine, after its cards were collected.
        claims: Requests that wait for a place here, and their tickets.
        declines: Requests that will not be fetched.
        withdraws: Offers of requests that were aborted.
        refusals: Names of requests that were aborted before anything of them was on offer, and whose tickets may exist.
        steps: Offers that begin or grow.
        loads: Fetches that begin.
        cancels: Fetches of requests that were aborted.
    """

    preempted: list[str] = field(default_factory=list[str])
    join: Membership | None = None
    claims: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]], repr=False)
    declines: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]], repr=False)
    withdraws: list[str] = field(default_factory=list[str])
    refusals: list[str] = field(default_factory=list[str])
    steps: list[OfferStep] = field(default_factory=list[OfferStep])
    loads: list[Load] = field(default_factory=list[Load])
    cancels: list[str] = field(default_factory=list[str])
