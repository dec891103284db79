"""The state of a worker as plain data: what `Worker.describe` gives."""

from collections.abc import Iterable
from typing import Any

from kvxfer.assembly import Assembly
from kvxfer.link import Link
from kvxfer.receiver import Receiver
from kvxfer.sender import Sender
from kvxfer.site import Site
from kvxfer.tickets import RankCard

__all__ = ["overview"]


def overview(
    card: RankCard, site: Site, parts: Assembly, sender: Sender, receiver: Receiver, links: Iterable[Link]
) -> dict[str, Any]:
    """Identity, peers, arena, threads, offers, transfers and counters."""
    staging = parts.staging
    return {
        "card": card.to_dict(),
        "epoch": site.issuer.card.epoch if site.issuer else None,
        "draining": site.draining,
        "peers": [
            {
                "peer": link.peer.name,
                "role": link.role.value,
                "trusted": link.trusted,
                "encrypted": link.encrypted,
                "endpoint": link.endpoint,
                "draining": link.draining,
                "lane": site.estimates.lane(link.peer.identity.incarnation),
                "proved": sorted(route.name.lower() for route in link.proved),
            }
            for link in links
        ],
        "arena": {
            "kind": staging.kind,
            "refused": dict(staging.refused),
            "send": site.send_desk.share.snapshot(),
            "receive": site.receive_desk.share.snapshot(),
        },
        "in_place": site.in_place,
        "agent": {"rebuilt": site.rebuilds.count, "wanted": len(site.rebuilds.wants), "paused": site.rebuilds.paused},
        "affinity": parts.placement.describe(),
        "offers": len(sender.book),
        "sending": len(sender),
        "receiving": len(receiver),
        "in_doubt": receiver.doubtful,
        "custody": site.custody.snapshot(),
        "metrics": site.metrics.snapshot(),
    }
