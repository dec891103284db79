"""What `/status.json` says: the state of workers, each thing that is shown by name, so that nothing else gets out."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvxfer import __version__
from kvxfer.memory.books import ShareSnapshot
from kvxfer.telemetry import SECONDS
from kvxfer.tools.admin.look import Limits, Look

__all__ = ["status"]

_LISTED: Final = 256
"""Transfers, sessions and extents that are listed; there may be thousands, and what is left out is counted."""


def status(looks: Iterable[Look], limits: Limits) -> dict[str, Any]:
    """All workers as JSON data."""
    return {
        "version": __version__,
        "time": time.time(),
        "monotonic": time.monotonic(),  # what rates are computed from: the wall clock may jump
        "bucket_bounds_seconds": SECONDS,
        "workers": [_worker(look, limits) for look in looks],
    }


def _worker(look: Look, limits: Limits) -> dict[str, Any]:
    why = look.reasons(limits)
    shown: dict[str, Any] = {"engine": look.engine, "rank": look.rank, "ready": not why, "reasons": why, "state": None}
    if (state := look.state) is not None:
        arena, custody = state["arena"], state["custody"]
        shown["state"] = {
            **{key: state["card"][key] for key in ("world", "endpoint", "incarnation")},
            **{key: state[key] for key in ("epoch", "draining", "closed", "agent", "fabric", "affinity")},
            **{key: state[key] for key in ("offers", "parked", "claims", "sending", "receiving")},
            **{key: state[key] for key in ("in_doubt", "sent_in_doubt", "places", "handshakes", "streams")},
            **{key: state[key] for key in ("connecting", "unreachable")},
            "sessions": len(state["peers"]),
            "peers": [_peer(peer) for peer in state["peers"][:_LISTED]],
            "transfers": state["transfers"][:_LISTED],
            "arena": {
                "kind": arena["kind"],
                "refused": arena["refused"],
                **{side: _share(arena[side]) for side in ("send", "receive")},
            },
            "custody": {"held_blocks": custody.held_blocks, "doubtful_blocks": custody.doubtful_blocks},
            "metrics": state["metrics"],
        }
    return shown


def _share(share: ShareSnapshot) -> dict[str, Any]:
    numbers = ("capacity", "free", "reserved", "writing", "quarantined", "largest_gap", "waiting")
    return {
        **{f"{name}_bytes": getattr(share, f"{name}_bytes") for name in numbers},
        "waiting_requests": share.waiting_requests,
        "extents": [
            {
                "offset": extent.offset,
                "length": extent.length,
                "state": extent.state.value,
                "peer": extent.peer,
                "why": extent.reason,
            }
            for extent in share.extents[:_LISTED]
        ],
        "extents_left_out": max(0, len(share.extents) - _LISTED),
    }


def _peer(peer: Mapping[str, Any]) -> dict[str, Any]:
    shown = ["peer", "role", "endpoint", "trusted", "encrypted", "draining", "connected_seconds", "silent_seconds"]
    shown += ["host", "mapped", "moved", "not_mapped"]
    return {key: peer[key] for key in shown}
