"""What a decode rank says when it asks one prefill rank for its part of a request."""

from collections.abc import Sequence

from kvxfer.ahead import Ahead
from kvxfer.encoding import encode_spans, selection_to_wire
from kvxfer.need import Need
from kvxfer.protocol.messages import FOREVER_MS, Fetch, Route
from kvxfer.protocol.session import PeerInfo
from kvxfer.site import Site

__all__ = ["fetch_message"]


def fetch_message(
    site: Site, peer: PeerInfo, transfer: int, need: Need, routes: Sequence[Route], ahead: Ahead | None
) -> Fetch:
    """The `Fetch` of one transfer.

    Args:
        site: The worker.
        peer: The prefill rank.
        transfer: Its number.
        need: What is asked for.
        routes: Acceptable ones, best first.
        ahead: What is granted ahead of any answer.
    """
    left = FOREVER_MS if need.deadline is None else max(1, int((need.deadline - site.now()) * 1000))
    address, length = ahead.staging if ahead is not None else (0, 0)
    return Fetch(
        transfer=transfer,
        ticket=need.ticket,
        selections=[selection_to_wire(selection) for selection in need.selections],
        spans=encode_spans(need.spans, sorted({s.group for s in need.selections})),
        token_start=need.tokens.start,
        token_stop=need.tokens.stop,
        routes=list(routes),
        max_extent_bytes=min(site.config.chunk_bytes, site.receive_desk.share.capacity),
        timeout_ms=min(left, FOREVER_MS),
        in_place_bytes=site.config.max_in_place_bytes,
        lease_ms=ahead.lease_ms if ahead is not None and not ahead.staged else 0,
        generation=ahead.generation if ahead is not None else 0,
        agreement=ahead.agreement if ahead is not None else b"",
        staging_address=address,
        staging_bytes=length,
        staging_lease_ms=ahead.lease_ms if ahead is not None and ahead.staged else 0,
        fenced=site.keys.has(peer),
        trace=need.trace,
    )
