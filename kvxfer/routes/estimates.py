"""What transfers with each peer are expected to take: a profile's costs, corrected by what is known of the peer.

Costs of a route come from a profile of the kind of machine. Where the lane to a peer was measured (`kvxfer.gauging`),
bandwidth and the cost of a piece are the lane's. What each transfer took, over what was predicted, corrects
the route for that peer: the factor moves a quarter of the way, in logarithms, so that one slow transfer is no verdict.
A route that was never tried with a peer has the factor of its other routes: a machine that is slow is slow on all of
them, and a route is not taken only because nothing is known of it.
"""

from math import exp, log
from typing import Final

from kvxfer.protocol.messages import Route
from kvxfer.routes.cost import Costs, Profile
from kvxfer.routes.lane import LaneCosts

__all__ = ["Estimates"]

_OVER_A_LANE: Final = (Route.STAGED, Route.DIRECT, Route.PULL)
_LEARNED: Final = 0.25
_MOST: Final = log(16.0)
"""One transfer, and all of them together, are believed to be off by no more than this factor."""


class Estimates:
    """Predictions for the transfers of one worker.

    Args:
        profile: Costs of the kind of machine that it runs on.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile: Final = profile
        self._factors: dict[bytes, dict[Route, float]] = {}  # logarithms
        self._lanes: dict[bytes, LaneCosts] = {}
        self._costs: dict[tuple[bytes, Route], Costs] = {}  # of routes over a lane that was measured

    def factor(self, peer: bytes, route: Route) -> float:
        """What the profile's seconds are multiplied by, for a peer."""
        known = self._factors.get(peer, {})
        if route in known:
            return exp(known[route])
        return exp(sum(known.values()) / len(known)) if known else 1.0

    def seconds(self, peer: bytes, route: Route, *, nbytes: int, chunks: int, pieces: int) -> float:
        """Predicted seconds from `fetch` to its return.

        Args:
            peer: Incarnation of the other side.
            route: How the bytes travel.
            nbytes: Size of the transfer.
            chunks: Chunks that it is cut into.
            pieces: Contiguous pieces, neighbours merged.
        """
        costs = self._costs.get((peer, route)) or self._profile.routes[route]
        return costs.seconds(nbytes=nbytes, chunks=chunks, pieces=pieces) * self.factor(peer, route)

    def lane(self, peer: bytes) -> LaneCosts | None:
        """What the lane to a peer costs, if it was measured."""
        return self._lanes.get(peer)

    def measured(self, peer: bytes, lane: LaneCosts, *, listed: bool) -> None:
        """The lane to a peer was measured; corrections that came of the profile alone are void.

        Args:
            peer: Incarnation of the other side.
            lane: What writes to it take.
            listed: Whether blocks lie in memory of the kind that was written.
        """
        self._lanes[peer] = lane
        for route in _OVER_A_LANE:
            self._costs[peer, route] = lane.refine(self._profile, route, listed=listed)
            self._factors.get(peer, {}).pop(route, None)

    def took(self, peer: bytes, route: Route, *, predicted: float, seconds: float) -> None:
        """A transfer that waited for nothing took so long, where `seconds` had predicted something else."""
        if predicted > 0 and seconds > 0:
            known = self._factors.setdefault(peer, {})
            before = log(self.factor(peer, route))
            off = max(-_MOST, min(_MOST, log(seconds / predicted)))
            known[route] = max(-_MOST, min(_MOST, before + _LEARNED * off))

    def forget(self, peer: bytes) -> None:
        """The peer is gone."""
        self._factors.pop(peer, None)
        self._lanes.pop(peer, None)
        for route in _OVER_A_LANE:
            self._costs.pop((peer, route), None)
