"""What the prefill rank answers a fetch: plan, route and grid, and the `Accept` that says so."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvxfer.encoding import decode_spans, encode_spans
from kvxfer.errors import Code, GeometryError, RefusedError
from kvxfer.geometry import BlockLists, ChunkGrid, TransferPlan, check_state
from kvxfer.offers import Entry
from kvxfer.planning import IN_PLACE, LISTED, Bound, bind, choose_and_cut, fit_grid, in_place_bytes, usual_chunks
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import FOREVER_MS, MAX_CHUNKS, Route
from kvxfer.protocol.session import PeerInfo
from kvxfer.routes.chooser import Choice, Means, choose, never
from kvxfer.site import Site

__all__ = ["Answer", "Draft", "answer"]

_UNBOUNDED: Final = 1 << 62
"""More bytes than any cache has."""
_SMALLEST_STREAMED_CHUNK: Final = 1 << 20
"""Bytes below which streaming cuts no smaller chunks: their control frames would cost more than the overlap gains."""
_MOST_STREAMED_CHUNKS: Final = 256
"""About as many chunks a small streamed transfer is cut into at most, however small its steps are."""


@dataclass(frozen=True, slots=True)
class Draft:
    """An offer as it is when a transfer of it is planned.

    Attributes:
        spans: Source blocks by group.
        tokens: Tokens that they hold.
        step: Tokens that came last: more will come in steps like it.
        finished: Whether nothing will be added.
        by_layer: Whether layers become ready one after the other.
        prompt: Whether nothing of it is waited for, so that what its transfer takes tells how fast the pair is.
    """

    spans: BlockLists
    tokens: int
    step: int
    finished: bool
    by_layer: bool
    prompt: bool

    @classmethod
    def of(cls, offer: Entry) -> "Draft":
        """Take it down."""
        by_layer = not offer.finished and offer.readiness.by_layer
        prompt = offer.finished and offer.readiness.fired
        return cls(offer.spans, offer.tokens, offer.step, offer.finished, by_layer, prompt)


@dataclass(frozen=True, slots=True)
class Answer:
    """What becomes of it.

    Attributes:
        bound: Its plan, and how it is cut.
        choice: Its route.
        message: What the decode rank is told.
        plain_s: Seconds that it would be predicted to take, had transfers with the peer taught nothing.
    """

    bound: Bound
    choice: Choice
    message: wire.Accept
    plain_s: float


def answer(
    site: Site, peer: PeerInfo, fetch: wire.Fetch, offer: Draft, means: Means, ahead: bool, checked: bool = False
) -> Answer:
    """Plan a transfer.

    Args:
        site: The worker.
        peer: Whose fetch it is.
        fetch: What it asks for.
        offer: What there is.
        means: What the pair can do.
        ahead: Whether what the fetch grants ahead still holds.
        checked: Whether sums are wanted of its chunks, or of some: who compares must know which rows are padding, and
            so the blocks of this side also where they need not be named.

    Raises:
        RefusedError: If the two sides do not mean the same by it, no route is left, or no chunk is small enough.
        GeometryError: If it cannot be planned: blocks or tokens that the offer does not hold.
    """
    tokens = range(fetch.token_start, fetch.token_stop)
    try:
        pair = site.plans.outgoing(peer, fetch.selections)
    except GeometryError as error:
        raise RefusedError(str(error), reason=Code.WANTS_NOT_HELD) from error
    check_state(pair, tokens, offer.tokens)
    plan = bind(pair, offer.spans, decode_spans(fetch.spans), tokens, covered=offer.tokens)
    _check_agreement(fetch, plan)
    nbytes, incarnation = plan.nbytes, peer.identity.incarnation

    def seconds(route: Route, pieces: int) -> float:
        chunks = usual_chunks(site.config, route, nbytes)
        return site.estimates.seconds(incarnation, route, nbytes=nbytes, chunks=chunks, pieces=pieces)

    overdue = partial(site.estimates.overdue, incarnation) if offer.prompt else never
    choice, grid = choose_and_cut(
        fetch.routes,
        means,
        partial(
            choose,
            site.config.route,
            means,
            nbytes=nbytes,
            pieces=lambda: plan.merged_pieces,
            seconds=seconds,
            overdue=overdue,
        ),
        partial(_grid, site, fetch, offer, plan),
    )
    route, chunks, bound = choice.route, grid.chunks, Bound.of(plan, grid)
    fenced = site.keys.has(peer)
    ahead = ahead and offer.finished and _covers(peer, fetch, route, plan, chunks, fenced=fenced)
    unnamed = ahead and not checked and route in IN_PLACE  # the decode rank need not know this side's blocks
    pieces = plan.merged_pieces if route in LISTED else bound.pieces
    plain = site.estimates.plain(route, nbytes=nbytes, chunks=chunks, pieces=pieces)
    predicted = plain * site.estimates.factor(incarnation, route)
    message = wire.Accept(
        transfer=fetch.transfer,
        route=route,
        bytes=nbytes,
        spans=[] if unnamed else encode_spans(offer.spans, pair.groups),
        layers_per_chunk=grid.layers_per_chunk,
        tokens_per_chunk=grid.tokens_per_chunk,
        chunks=chunks,
        digest=plan.digest(grid),
        why=choice.why,
        ahead=ahead,
        pieces=bound.pieces,
        predicted_us=min(FOREVER_MS, int(predicted * 1e6)),
        fenced=fenced,
        windows_per_band=grid.band,
    )
    return Answer(bound, choice, message, plain)


def _check_agreement(fetch: wire.Fetch, plan: TransferPlan) -> None:
    """What was granted ahead is for the plan that the decode rank has made."""
    if (fetch.lease_ms or fetch.staging_lease_ms or fetch.agreement) and fetch.agreement != plan.agreement:
        reason = "the two sides do not mean the same by this transfer: their plans differ"
        raise RefusedError(reason, reason=Code.PLAN_DIFFERS)


def _covers(peer: PeerInfo, fetch: wire.Fetch, route: Route, plan: TransferPlan, chunks: int, *, fenced: bool) -> bool:
    """Whether what `Fetch` grants ahead is what the transfer needs, through a gate that this rank can pass."""
    passes_word = route is Route.MAPPED and peer.body.gates > 0
    if fetch.generation and not passes_word and not fenced:
        return False
    if not fetch.staging_lease_ms:
        return route in IN_PLACE
    return route is Route.STAGED and chunks == 1 and plan.staged_bytes <= fetch.staging_bytes


def _grid(site: Site, fetch: wire.Fetch, offer: Draft, plan: TransferPlan, route: Route) -> ChunkGrid:
    """How it is cut."""
    nbytes = plan.nbytes
    target, limit = _chunk_sizes(site, fetch, route, plan)
    if not offer.finished:
        target = min(target, max(_SMALLEST_STREAMED_CHUNK, nbytes // 8))
    step = _streamed_tokens(offer, plan, nbytes)
    grid = fit_grid(
        plan,
        target_bytes=target,
        limit_bytes=limit,
        layers_per_chunk=1 if offer.by_layer else None,
        tokens_per_chunk=step,
        listed=route in LISTED,
    )
    if offer.prompt or grid.layer_runs == 1:
        return grid
    # chunks go in their order: all windows of a layer before the next one, of the tokens that are computed together
    together = -(-(plan.tokens.stop if step is None else step) // grid.tokens_per_chunk)
    return replace(grid, band=min(MAX_CHUNKS, together))


def _chunk_sizes(site: Site, fetch: wire.Fetch, route: Route, plan: TransferPlan) -> tuple[int, int]:
    """Bytes of a chunk: about, and at most."""
    config = site.config
    if route is not Route.STAGED:  # it takes no memory, so one that is larger than was wished for does no harm
        limit = fetch.in_place_bytes or _UNBOUNDED
        return in_place_bytes(route, plan, min(config.in_place_chunk_bytes, limit)), limit
    limit = min(config.chunk_bytes, site.send_desk.share.capacity, fetch.max_extent_bytes)
    return limit, limit


def _streamed_tokens(offer: Draft, plan: TransferPlan, nbytes: int) -> int | None:
    """Tokens of a chunk while blocks are still added: a step's, or more where those are too few to be worth a chunk."""
    if offer.tokens >= plan.tokens.stop or not nbytes:
        return None
    least = min(_SMALLEST_STREAMED_CHUNK, nbytes // _MOST_STREAMED_CHUNKS)
    runs = len(plan.pair.layers) if offer.by_layer else 1
    return max(offer.step, -(-least * len(plan.tokens) * runs // nbytes))
