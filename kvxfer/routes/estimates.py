"""What transfers with each peer are expected to take: a profile's costs, corrected by what its transfers took.

Costs of a route come from a profile of the kind of machine. What each transfer took, over what was predicted, corrects
the route for that peer: the factor moves a quarter of the way, in logarithms, so that one slow transfer is no verdict.
A route that was never tried with a peer has the factor of its other routes: a machine that is slow is slow on all of
them, and a route is not taken only because nothing is known of it.

What is known of a route is as old as the last transfer that took it. So one that has not been taken for long is, now
and then, though another one is predicted to be faster: what made it slow may be over.
"""

from math import exp, log
from typing import Final

from kvxfer.protocol.messages import Route
from kvxfer.routes.cost import Profile

__all__ = ["Estimates"]

_LEARNED: Final = 0.25
_MOST: Final = log(16.0)
"""One transfer, and all of them together, are believed to be off by no more than this factor."""
_TRIES: Final = 1 / 32
"""Part of the time of all transfers for which routes may be taken that are predicted to be slower."""
_HOPELESS: Final = 4.0
"""A route that is slower by more than this before all corrections is not tried for them: that is no passing trouble."""


class Estimates:
    """Predictions for the transfers of one worker.

    Args:
        profile: Costs of the kind of machine that it runs on.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile: Final = profile
        self._factors: dict[bytes, dict[Route, float]] = {}  # logarithms
        self._spent: dict[bytes, float] = {}  # seconds of all transfers that taught something
        self._chosen: dict[bytes, dict[Route, float]] = {}  # how many those were when a route was last taken

    def factor(self, peer: bytes, route: Route) -> float:
        """What the profile's seconds are multiplied by, for a peer."""
        known = self._factors.get(peer, {})
        if route in known:
            return exp(known[route])
        return exp(sum(known.values()) / len(known)) if known else 1.0

    def plain(self, route: Route, *, nbytes: int, chunks: int, pieces: int) -> float:
        """What the profile says, as if transfers with the peer had taught nothing. Arguments are those of `seconds`."""
        return self._profile.routes[route].seconds(nbytes=nbytes, chunks=chunks, pieces=pieces)

    def seconds(self, peer: bytes, route: Route, *, nbytes: int, chunks: int, pieces: int) -> float:
        """Predicted seconds from `fetch` to its return.

        Args:
            peer: Incarnation of the other side.
            route: How the bytes travel.
            nbytes: Size of the transfer.
            chunks: Chunks that it is cut into.
            pieces: Contiguous pieces, neighbours merged.
        """
        return self.plain(route, nbytes=nbytes, chunks=chunks, pieces=pieces) * self.factor(peer, route)

    def chose(self, peer: bytes, route: Route) -> None:
        """A transfer takes this route, and will tell what it is like."""
        self._chosen.setdefault(peer, {})[route] = self._spent.get(peer, 0.0)

    def overdue(self, peer: bytes, route: Route, seconds: float, best: Route, best_s: float) -> bool:
        """Whether a slower route should be taken once more, to see whether it still is slower.

        Args:
            peer: Incarnation of the other side.
            route: The slower one.
            seconds: Predicted for it.
            best: The faster one.
            best_s: Predicted for that.
        """
        since = self._spent.get(peer, 0.0) - self._chosen.get(peer, {}).get(route, 0.0)
        plain, best_plain = seconds / self.factor(peer, route), best_s / self.factor(peer, best)
        return since * _TRIES >= seconds and plain <= best_plain * _HOPELESS

    def took(self, peer: bytes, route: Route, *, plain: float, seconds: float) -> None:
        """A transfer that waited for nothing took so long, where costs without any correction said `plain`.

        What is learned of transfers that were under way together does not depend on how many there were.
        """
        if plain > 0 and seconds > 0:
            known = self._factors.setdefault(peer, {})
            before = log(self.factor(peer, route))
            found = max(-_MOST, min(_MOST, log(seconds / plain)))
            known[route] = before + _LEARNED * (found - before)
            self._spent[peer] = self._spent.get(peer, 0.0) + seconds

    def forget(self, peer: bytes) -> None:
        """The peer is gone."""
        self._factors.pop(peer, None)
        self._spent.pop(peer, None)
        self._chosen.pop(peer, None)
