"""What transfers with each peer are expected to take: a profile's costs, corrected by what they really took.

Costs of a route come from a profile of the kind of machine. What each transfer took, over what was predicted, corrects
the route for that peer: the factor moves a quarter of the way, in logarithms, so that one slow transfer is no verdict.
A route that was never tried with a peer has the factor of its other routes: a machine that is slow is slow on all of
them, and a route is not taken only because nothing is known of it.
"""

from math import exp, log
from typing import Final

from kvxfer.protocol.messages import Route
from kvxfer.routes.cost import Profile

__all__ = ["Estimates"]

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
        plain = self._profile.seconds(route, nbytes=nbytes, chunks=chunks, pieces=pieces)
        return plain * self.factor(peer, route)

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
