"""Which route a transfer takes, and why: by what both ends can do, and by what each is predicted to take.

Costs of a route come from a profile of the kind of machine. What each transfer took, over what was predicted, corrects
the route for that peer: the factor moves a quarter of the way, in logarithms, so that one slow transfer is no verdict.
A route that was never tried with a peer has the factor of its other routes: a machine that is slow is slow on all of
them, and a route is not taken only because nothing is known of it.

What is known of a route is as old as the last transfer that took it. So one that has not been taken for long is, now
and then, though another one is predicted to be faster: what made it slow may be over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from types import MappingProxyType
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kvxfer.errors import Code, RefusedError
from kvxfer.protocol.messages import Route

__all__ = [
    "PROFILES",
    "Choice",
    "Costs",
    "Estimates",
    "Profile",
    "RouteSupport",
    "acceptable",
    "choose",
    "never",
    "profile_of",
]

# --- what a transfer is likely to take
#
# `seconds = fixed + chunks * chunk + pieces * piece + bytes / bandwidth`
#
# A piece costs a descriptor on the routes that post each of them, and a copy on `staged`, which is nothing worth
# naming on a GPU. The formula knows one pair of ranks that is alone: no contention, no waiting for blocks.


@dataclass(frozen=True, slots=True)
class Costs:
    """What a route costs on one kind of machine."""

    fixed_s: float  # seconds for every transfer: the exchange of frames, planning, the first post
    chunk_s: float  # seconds for every chunk, with the default window of chunks under way
    piece_s: float  # seconds for every contiguous piece
    bytes_per_s: float  # bandwidth once all that is under way

    def seconds(self, *, nbytes: int, chunks: int, pieces: int) -> float:
        """Predicted from `fetch` to its return, for so many contiguous pieces, neighbours merged."""
        return self.fixed_s + chunks * self.chunk_s + pieces * self.piece_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs of one kind of machine."""

    name: str  # for `kvxfer plan --profile`
    hardware: str  # what was measured, in words
    routes: Mapping[Route, Costs]  # costs of each route


_H200: Final = Profile(
    "h200-nvlink",
    "two NVLinked H200 of one host, caches and arena in GPU memory (torch 2.11, NIXL 1.5.1, UCX 1.23)",
    MappingProxyType(
        {
            # whole fetches with 24 CTAs, NHD to HND: 2 MiB in 1.1 ms, in chunks of 256 MiB 512 MiB in 3.6 ms and 2 GiB
            # in 10.2 ms; the bandwidth is that of the kernel. The formula gives 1.2, 3.2 and 9.9 ms.
            Route.MAPPED: Costs(fixed_s=0.9e-3, chunk_s=0.25e-3, piece_s=0.0, bytes_per_s=305e9),
            # whole fetches in chunks of 64 MiB, 3 under way: 2 MiB in 2.8 ms, 512 MiB in 10.8 ms, 2 GiB in 31.4 to 33.2
            # ms; the bandwidth is that of one contiguous NIXL write. The formula gives 2.8, 9.8 and 33.1 ms.
            Route.STAGED: Costs(fixed_s=2.0e-3, chunk_s=0.8e-3, piece_s=0.0, bytes_per_s=390e9),
            # 512 MiB in pieces of 8 KiB in 281 ms, of 32 KiB in 67 ms, of 2 MiB in 5.4 ms; the formula gives 273, 72
            # and 5.7 ms. As scatter lists it took 53, 17 and 4.9 ms.
            Route.DIRECT: Costs(fixed_s=2.0e-3, chunk_s=0.6e-3, piece_s=4.1e-6, bytes_per_s=390e9),
            # likewise in 240 to 258, 63 to 80 and 6.9 to 7.2 ms; the formula gives 254, 67 and 6.6 ms
            Route.PULL: Costs(fixed_s=3.0e-3, chunk_s=0.6e-3, piece_s=3.8e-6, bytes_per_s=390e9),
        }
    ),
)
_CPU: Final = Profile(
    "cpu",
    "two processes on two shared cores (x86-64), caches and arena in CPU memory (torch 2.13, NIXL over shared memory)",
    MappingProxyType(
        {
            # medians of four runs of whole fetches, which lay up to 40 % apart. 2 MiB in 2.5 to 3.2 ms; 64 MiB in 12.7
            # and 13.8 ms in pieces of 32 and 256 KiB, in 22 to 23 ms in pieces of 8 KiB, 512 B and 256 B (NHD to HND).
            Route.MAPPED: Costs(fixed_s=2.2e-3, chunk_s=0.0, piece_s=60e-9, bytes_per_s=6.0e9),
            # 2 MiB in 3.8 to 6.2 ms, 16 MiB in 15 to 20 ms, 64 MiB in 45 to 56 ms, whatever the pieces
            Route.STAGED: Costs(fixed_s=3.5e-3, chunk_s=0.5e-3, piece_s=40e-9, bytes_per_s=1.5e9),
            # 64 MiB in pieces of 256 KiB in 21 ms, of 32 KiB in 33 ms, of 8 KiB in 51 ms, of 512 B in 406 ms
            Route.DIRECT: Costs(fixed_s=2.2e-3, chunk_s=0.5e-3, piece_s=2.95e-6, bytes_per_s=3.4e9),
            # likewise in 20, 33, 49 and 402 ms
            Route.PULL: Costs(fixed_s=3.1e-3, chunk_s=0.5e-3, piece_s=2.95e-6, bytes_per_s=3.6e9),
        }
    ),
)
PROFILES: Final[Mapping[str, Profile]] = MappingProxyType({profile.name: profile for profile in (_H200, _CPU)})
"""Profiles by name; the first is the default of `kvxfer plan`."""


def profile_of(kind: str) -> Profile:
    """The profile that predictions of a worker begin with.

    Args:
        kind: "cpu" or "cuda": where its cache is.
    """
    return _H200 if kind == "cuda" else _CPU


# --- the choice

_NEARLY: Final = 1.05
"""A post per piece is preferred if it takes no longer than this times a gather and a scatter: it needs no memory."""
_PIECEWISE: Final = frozenset({Route.DIRECT, Route.PULL})
_IMPOSSIBLE: Final = "is not possible for this pair"
_ORDERS: Final = {
    "auto": (Route.MAPPED, Route.STAGED, Route.DIRECT),
    "mapped": (Route.MAPPED, Route.STAGED, Route.DIRECT),
    "staged": (Route.STAGED,),
    "direct": (Route.DIRECT, Route.MAPPED, Route.STAGED),
    "pull": (Route.PULL, Route.STAGED, Route.DIRECT),
}


class RouteSupport(Struct, frozen=True):
    """What one pair of ranks can do."""

    routes: frozenset[Route]  # that are possible
    # dtypes or scales differ, which a copy can do and a descriptor, which only says which bytes go where, cannot
    converts: bool = False

    def __str__(self) -> str:
        return "+".join(route.name.lower() for route in Route if route in self.routes) or "none"


class Choice(Struct, frozen=True):
    """A route and the reason for it."""

    route: Route  # chosen
    why: str  # for stats and log
    fallback: str = ""  # why it is not the route that the settings prefer, or an empty string


def acceptable(preference: str, support: RouteSupport) -> list[Route]:
    """Routes that a decode rank accepts, best first: the one that its settings prefer, then what it falls back to.

    `auto` leaves the choice between writing routes to the sender; `pull` is used only where the settings ask for it.
    """
    return [route for route in _ORDERS[preference] if route in support.routes]


Overdue: TypeAlias = Callable[[Route, float, Route, float], bool]
"""Whether a slower route, of predicted seconds, should be tried again in place of a faster one and its seconds."""


def never(_: Route, __: float, ___: Route, ____: float) -> bool:
    """Nothing is tried again."""
    return False


def choose(
    preference: str,
    support: RouteSupport,
    wanted: Sequence[Route],
    *,
    nbytes: int,
    pieces: Callable[[], int],
    seconds: Callable[[Route, int], float],
    overdue: Overdue = never,
) -> Choice:
    """The sender's choice among the routes that the decode rank accepts.

    Args:
        preference: The sender's own `route` setting.
        support: What the pair can do, as the sender sees it.
        wanted: Routes that the decode rank accepts, best first.
        nbytes: Size of the transfer.
        pieces: Counts contiguous pieces after merging neighbours; called only where the choice depends on it.
        seconds: What a route is predicted to take, with so many pieces.
        overdue: Whether a slower route should be tried again all the same.

    Raises:
        RefusedError: If no route is left.
    """
    possible = [route for route in wanted if route in support.routes]
    if not possible:
        asked = "+".join(route.name.lower() for route in wanted) or "none"
        raise RefusedError(
            f"no common route: the decode rank accepts {asked}, this pair can do {support}", reason=Code.NO_COMMON_ROUTE
        )
    own = None if preference == "auto" else _ORDERS[preference][0]
    if own is not None and own in possible:
        return Choice(own, f"route={preference} is set at the sender")
    first = own or wanted[0]
    if set(possible) == {Route.STAGED, Route.DIRECT} and wanted[0] is not Route.DIRECT:
        choice = _by_time(nbytes, pieces(), seconds, overdue)
        hoped = first not in possible
    else:
        alone = "the only route that converts" if support.converts else "the only common route"
        choice = Choice(possible[0], alone if len(possible) == 1 else "preferred by the decode rank")
        hoped = first is not choice.route
    if not hoped:
        return choice
    reason = "is not accepted by the decode rank" if first in support.routes else _IMPOSSIBLE
    if support.converts and first in _PIECEWISE:
        reason = "cannot convert dtypes or scales"
    return replace(choice, fallback=f"{first.name.lower()} {reason}")


def _by_time(nbytes: int, pieces: int, seconds: Callable[[Route, int], float], overdue: Overdue) -> Choice:
    direct, staged = seconds(Route.DIRECT, pieces), seconds(Route.STAGED, pieces)
    what = f"{pieces} pieces of {nbytes // max(pieces, 1)} bytes on average"
    why = f"{what}: {direct * 1e3:.1f} ms predicted for direct, {staged * 1e3:.1f} ms for staged"
    found = [(Route.DIRECT, direct), (Route.STAGED, staged)]
    if direct > staged * _NEARLY:
        found.reverse()
    (best, best_s), (other, other_s) = found
    if overdue(other, other_s, best, best_s):
        return Choice(other, f"{why}; {other.name.lower()} was not tried for long")
    return Choice(best, why)


# --- what transfers have taken

_LEARNED: Final = 0.25
_MOST: Final = log(16.0)
"""One transfer, and all of them together, are believed to be off by no more than this factor."""
_TRIES: Final = 1 / 32
"""Part of the time of all transfers for which routes may be taken that are predicted to be slower."""
_HOPELESS: Final = 4.0
"""A route that is slower by more than this before all corrections is not tried for them: that is no passing trouble."""


class Estimates:
    """Predictions for the transfers of one worker: what a route costs, times a factor for the peer."""

    def __init__(self, profile: Profile) -> None:
        self.paces: Final[dict[bytes, float]] = {}  # bytes a second that went through a ring of staging memory last
        self.costs: Final = profile.routes  # by route, as if transfers had taught nothing
        self._factors: dict[bytes, dict[Route, float]] = {}  # logarithms
        self._spent: dict[bytes, float] = {}  # seconds of all transfers that taught something
        self._chosen: dict[bytes, dict[Route, float]] = {}  # how many those were when a route was last taken

    def factor(self, peer: bytes, route: Route) -> float:
        """What the profile's seconds are multiplied by, for a peer."""
        known = self._factors.get(peer, {})
        if route in known:
            return exp(known[route])
        return exp(sum(known.values()) / len(known)) if known else 1.0

    def note_choice(self, peer: bytes, route: Route) -> None:
        """A transfer takes this route, and will tell what it is like."""
        self._chosen.setdefault(peer, {})[route] = self._spent.get(peer, 0.0)

    def overdue(self, peer: bytes, route: Route, seconds: float, best: Route, best_s: float) -> bool:
        """Whether a slower route should be taken once more, to see whether it still is slower."""
        since = self._spent.get(peer, 0.0) - self._chosen.get(peer, {}).get(route, 0.0)
        plain, best_plain = seconds / self.factor(peer, route), best_s / self.factor(peer, best)
        return since * _TRIES >= seconds and plain <= best_plain * _HOPELESS

    def learn(self, peer: bytes, route: Route, *, plain: float, seconds: float) -> None:
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
        self.paces.pop(peer, None)
        self._factors.pop(peer, None)
        self._spent.pop(peer, None)
        self._chosen.pop(peer, None)
