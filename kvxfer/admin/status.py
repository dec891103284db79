"""What `/status.json` says: the state of workers, each thing that is shown by name, so that nothing else gets out."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvxfer import __version__
from kvxfer.admin.health import Limits, reasons
from kvxfer.admin.look import Look
from kvxfer.memory.snapshot import ShareSnapshot
from kvxfer.metrics import SECONDS

__all__ = ["status"]

_LISTED: Final = 256
"""Transfers, sessions and extents that are listed; there may be thousands, and what is left out is counted."""
_WAYS: Final = {
    "process": "memory of this process",
    "shm": "shared memory",
    "cuda_ipc": "CUDA IPC",
    "cuda_vmm": "CUDA virtual memory",
}


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
    why = reasons(look, limits)
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
            "peers": [_peer(peer, state["fabric"]["transport"]) for peer in state["peers"][:_LISTED]],
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
                "why": share.reasons.get(extent.offset, ""),
            }
            for extent in share.extents[:_LISTED]
        ],
        "extents_left_out": max(0, len(share.extents) - _LISTED),
    }


def _peer(peer: Mapping[str, Any], transport: str) -> dict[str, Any]:
    shown = ["peer", "role", "endpoint", "trusted", "encrypted", "draining", "connected_seconds", "silent_seconds"]
    shown += ["host", "told", "moved", "not_mapped"]
    return {**{key: peer[key] for key in shown}, "lanes": _lanes(peer, transport)}


def _lanes(peer: Mapping[str, Any], transport: str) -> list[str]:
    """What is known of how bytes go between both, and how: nothing of it is guessed."""
    known: list[str] = []
    mapped: list[str] = peer["mapped"]
    if mapped:
        known.append("mapped: " + " and ".join(_WAYS.get(kind, kind) for kind in mapped))
    known += [f"{transport}: {_told(one, peer['told'])}" for one in peer["told"]]
    pulled, pushed = "pull" in peer["moved"], not {"staged", "direct"}.isdisjoint(peer["moved"])
    here, there = (pulled, pushed) if peer["role"] == "client" else (pushed, pulled)
    if there:
        known.append(f"{transport}: what the peer posts goes over a lane that its own page names")
    if here and not peer["told"]:
        over = "over a network; " if peer["host"] == "another" else ""
        why = peer["untold"] or "nothing was posted to its present agent yet"
        known.append(f"{transport}: {over}which lane it took is not known: {why}")
    return known or ["nothing was moved yet"]


def _told(one: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> str:
    """What the transport says of its lane; where that differs by kinds of memory, for which it is."""
    alike = {other["over"] for other in others if other["operation"] == one["operation"]}
    of = f" between {one['near']} memory here and {one['far']} there" if len(alike) > 1 else ""
    if not one["lanes"]:
        return f"{one['operation']}s{of} go over a lane of which UCX wrote nothing"
    return f"{one['operation']}s{of} go over {one['over']}{'' if one['sure'] else ': which of them, UCX did not write'}"
