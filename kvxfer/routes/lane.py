"""What the lane to a peer costs: a few writes of known shape, timed, and a profile that is corrected by them.

A profile was measured on some machine, over some wire. A lane tells of this pair: how long a post takes, what each
further piece of it costs, and how fast bytes go once they move. What a chunk and a transfer cost besides is work on the
two hosts, of which a write says nothing; there the profile stands, and so it does where bytes seem to go faster than in
the whole transfers that it comes from: what was measured moved the same memory again and again, out of caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvxfer.protocol.messages import Route
from kvxfer.routes.cost import Costs, Profile

__all__ = ["LaneCosts", "Sample"]

_MOST_BETTER: Final = 4.0
"""What a larger write gains on a smaller one is not believed beyond this: two short times differ by noise too."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One write.

    Attributes:
        pieces: Descriptors.
        nbytes: Bytes of all of them.
        seconds: From the post to its end, above 0.
    """

    pieces: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LaneCosts:
    """What writes to one peer take: `post_s + (pieces - 1) * piece_s + bytes / bytes_per_s` seconds.

    Attributes:
        post_s: Seconds for a post, however small.
        piece_s: Seconds for each piece beyond the first.
        bytes_per_s: Bandwidth.
    """

    post_s: float
    piece_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "LaneCosts":
        """From writes, of which some have one piece, and the others as many as one another.

        The fastest of equal ones counts: what slows a write down is something else that runs. Bandwidth comes from the
        two largest sizes of one piece, so that what a post takes by itself is not taken for slowness.
        """
        best: dict[tuple[int, int], Sample] = {}
        for sample in samples:
            shape = sample.pieces, sample.nbytes
            if shape not in best or sample.seconds < best[shape].seconds:
                best[shape] = sample
        whole = sorted((sample for sample in best.values() if sample.pieces == 1), key=lambda sample: sample.nbytes)
        largest = whole[-1]
        plain = largest.nbytes / largest.seconds
        bytes_per_s = plain
        if len(whole) > 1 and largest.seconds > whole[-2].seconds:
            slope = (largest.nbytes - whole[-2].nbytes) / (largest.seconds - whole[-2].seconds)
            bytes_per_s = min(max(plain, slope), plain * _MOST_BETTER)
        post_s = max(0.0, whole[0].seconds - whole[0].nbytes / bytes_per_s)
        piece_s = max(
            (
                max(0.0, sample.seconds - post_s - sample.nbytes / bytes_per_s) / (sample.pieces - 1)
                for sample in best.values()
                if sample.pieces > 1
            ),
            default=0.0,
        )
        return cls(post_s, piece_s, bytes_per_s)

    def refine(self, profile: Profile, route: Route, *, listed: bool) -> Costs:
        """A profile's costs of a route, with what this lane says of them.

        Args:
            profile: Of the kind of machine.
            route: How the bytes travel.
            listed: Whether blocks lie in memory of the kind that was written, so that their pieces cost as much.
        """
        costs = profile.routes[route]
        bytes_per_s = min(costs.bytes_per_s, self.bytes_per_s)
        if route is Route.STAGED:
            return replace(costs, bytes_per_s=bytes_per_s)
        if route in (Route.DIRECT, Route.PULL) and listed:
            # how much more or less a read of a piece costs than a write of it is the transport's, not the wire's
            piece_s = self.piece_s * costs.piece_s / profile.routes[Route.DIRECT].piece_s
            return replace(costs, piece_s=piece_s, bytes_per_s=bytes_per_s)
        return costs
