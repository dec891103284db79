"""The state of a worker as plain data: what `Worker.describe` gives."""

from typing import Any

from kvxfer.assembly import Assembly
from kvxfer.decode.failures import standing
from kvxfer.decode.fetch import Fetch
from kvxfer.link import Link, admitted
from kvxfer.mapped import elsewhere, may_be_elsewhere
from kvxfer.prefill.sender import Sender
from kvxfer.protocol.messages import ROUTE_NAMES, Route
from kvxfer.protocol.session import Role
from kvxfer.service import Service
from kvxfer.site import Site
from kvxfer.tickets import RankCard

__all__ = ["overview"]


def overview(card: RankCard, service: Service, parts: Assembly) -> dict[str, Any]:
    """Identity, peers, arena, threads, offers, transfers and counters.

    Args:
        card: What the rank says of itself.
        service: The worker.
        parts: What it was made of.
    """
    site, sender, receiver, peers = service.site, service.prefill, service.decode, service.peers
    links, greeting = service.links, service.greeting
    staging, now = parts.staging, site.now()
    fabric_late, fabric_broken = site.fabric.health()
    return {
        "card": card.to_dict(),
        "epoch": site.issuer.card.epoch if site.issuer else None,
        "draining": site.draining,
        "closed": site.closing.done(),
        "peers": [_peer(site, parts, link, now) for link in links],
        "handshakes": len(greeting),
        "streams": admitted((*links, *greeting)),
        "connecting": peers.connecting,
        "unreachable": peers.unreachable,
        "arena": {
            "kind": staging.kind,
            "refused": dict(staging.refused),
            "send": site.send_desk.share.snapshot(),
            "receive": site.receive_desk.share.snapshot(),
        },
        "in_place": site.in_place,
        "in_place_shares": {key.hex(): desk.share.snapshot() for key, desk in site.in_place_desks.items()},
        "agent": {"rebuilt": site.rebuilds.count, "wanted": len(site.rebuilds.wants), "paused": site.rebuilds.paused},
        "fabric": {
            "transport": "NIXL" if parts.transport is None else type(parts.transport).__name__,
            "late": fabric_late,
            "broken": fabric_broken,
            "awake": site.mover.held_awake,
            "lingering": site.mover.lingering,
            "strange": site.mover.strange,
            "agents": site.fabric.agents,
            "lanes": len(site.lanes),
        },
        "affinity": parts.placement.describe(),
        "offers": len(sender.book),
        "parked": sender.book.parked,
        "claims": receiver.claimed,
        "sending": len(sender),
        "receiving": len(receiver),
        "in_doubt": receiver.doubtful,
        "sent_in_doubt": sender.doubtful,
        "places": sender.placed,
        "transfers": [
            *(_fetch(fetch, now) for fetch in receiver.fetches),
            *(_sending(one, now) for one in sender.transfers),
        ],
        "custody": site.custody.snapshot(),
        "metrics": site.metrics.snapshot(),
    }


def _peer(site: Site, parts: Assembly, link: Link, now: float) -> dict[str, Any]:
    """One session. What is said of the way to it was seen: what is mapped, and what moved by which route."""
    peer, moved = link.peer, {ROUTE_NAMES[route]: nbytes for route, nbytes in link.moved.items() if nbytes}
    if link.role is Role.SERVER:
        mapped = site.mappings.kinds(peer)  # by this side, which copies
    elif ROUTE_NAMES[Route.MAPPED] not in moved:
        mapped = []
    else:  # by the peer, which has copied through what it was told of
        mapped = ["process"] if site.mappings.own(peer) else sorted({one.kind for one in parts.exports.frames})
    host = peer.body.host
    return {
        "peer": peer.name,
        "role": link.role.value,
        "trusted": link.trusted,
        "encrypted": link.encrypted,
        "endpoint": link.endpoint,
        "draining": link.draining,
        "connected_seconds": now - link.since,
        "silent_seconds": now - link.heard,
        "host": "this" if not may_be_elsewhere(host) else "another" if elsewhere(host) else "unknown",
        "mapped": mapped,
        "not_mapped": site.mappings.why_not(peer),
        "moved": moved,
    }


def _fetch(fetch: Fetch, now: float) -> dict[str, Any]:
    at = standing(fetch.receivers)
    return {
        "side": "receive",
        "id": fetch.transfer.id,
        "request": fetch.transfer.request,
        "peers": [receiver.peer.name for receiver in fetch.receivers],
        "route": "+".join(sorted({ROUTE_NAMES[r.route] for r in fetch.receivers if r.route is not Route.UNKNOWN})),
        "step": at.step.value,
        "in_doubt": fetch.transfer.done,
        "bytes": at.bytes,
        "chunks_done": at.chunks_done,
        "chunks": at.chunks,
        "seconds": now - fetch.began,
    }


def _sending(sender: Sender, now: float) -> dict[str, Any]:
    machine = sender.machine
    return {
        "side": "send",
        "id": sender.name,
        "request": machine.fetch.ticket.request,
        "peers": [sender.peer.name],
        "route": ROUTE_NAMES[machine.route],
        "step": sender.step.value,
        "in_doubt": sender.in_doubt,
        "bytes": sender.tally.bytes,
        "chunks_done": machine.arrived,
        "chunks": machine.chunks,
        "seconds": now - sender.began,
    }
