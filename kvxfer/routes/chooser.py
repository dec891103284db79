"""Which route a transfer takes, and why: by trust, by what both ends can do, by what each is predicted to take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from kvxfer.errors import Code, RefusedError
from kvxfer.protocol.messages import Route

__all__ = ["Choice", "Means", "acceptable", "choose", "never", "predicted_faster"]

_NEARLY: Final = 1.05
"""A post per piece is preferred if it takes no longer than this times a gather and a scatter: it needs no memory."""
_PIECEWISE: Final = frozenset({Route.DIRECT, Route.PULL})
_IMPOSSIBLE: Final = "is not possible for this pair"
_FIELDS: Final = {Route.STAGED: "staged", Route.DIRECT: "direct", Route.PULL: "pull", Route.MAPPED: "mapped"}
_NAMED: Final = {name: route for route, name in _FIELDS.items()}
_ORDERS: Final = {
    "auto": (Route.MAPPED, Route.STAGED, Route.DIRECT),
    "mapped": (Route.MAPPED, Route.STAGED, Route.DIRECT),
    "staged": (Route.STAGED,),
    "direct": (Route.DIRECT, Route.MAPPED, Route.STAGED),
    "pull": (Route.PULL, Route.STAGED, Route.DIRECT),
}


@dataclass(frozen=True, slots=True)
class Means:
    """What one pair of ranks can do.

    Attributes:
        staged: Both sides have staging memory.
        direct: The sender knows the receiver's addresses, and both have registered their blocks.
        pull: The receiver knows the sender's addresses, and both have registered their blocks.
        mapped: The sender's copies can address the receiver's blocks.
        converts: Dtypes or scales differ, which a copy can do and a descriptor, which only says which bytes go where,
            cannot.
    """

    staged: bool
    direct: bool
    pull: bool
    mapped: bool = False
    converts: bool = False

    def can(self, route: Route) -> bool:
        """Whether a route is possible."""
        name = _FIELDS.get(route)
        return name is not None and bool(getattr(self, name))

    def __str__(self) -> str:
        return "+".join(route.name.lower() for route in Route if self.can(route)) or "none"


@dataclass(frozen=True, slots=True)
class Choice:
    """A route and the reason for it.

    Attributes:
        route: Chosen.
        why: For stats and log.
        fallback: Why it is not the route that the settings prefer, or an empty string.
    """

    route: Route
    why: str
    fallback: str = ""


def acceptable(preference: str, means: Means) -> list[Route]:
    """Routes that a decode rank accepts, best first: the one that its settings prefer, then what it falls back to.

    `auto` leaves the choice between writing routes to the sender; `pull` is used only where the settings ask for it.
    """
    return [route for route in _ORDERS[preference] if getattr(means, _FIELDS[route])]


Overdue: TypeAlias = Callable[[Route, float, Route, float], bool]
"""Whether a slower route, of predicted seconds, should be tried again in place of a faster one and its seconds."""


def never(_: Route, __: float, ___: Route, ____: float) -> bool:
    """Nothing is tried again."""
    return False


def choose(
    preference: str,
    means: Means,
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
        means: What the pair can do, as the sender sees it.
        wanted: Routes that the decode rank accepts, best first.
        nbytes: Size of the transfer.
        pieces: Counts contiguous pieces after merging neighbours; called only where the choice depends on it.
        seconds: What a route is predicted to take, with so many pieces.
        overdue: Whether a slower route should be tried again all the same.

    Raises:
        RefusedError: If no route is left.
    """
    possible = list(filter(means.can, wanted))
    if not possible:
        asked = "+".join(route.name.lower() for route in wanted) or "none"
        raise RefusedError(
            f"no common route: the decode rank accepts {asked}, this pair can do {means}", reason=Code.NO_COMMON_ROUTE
        )
    own = _NAMED.get(preference)  # none of "auto"
    if own is not None and own in possible:
        return Choice(own, f"route={preference} is set at the sender")
    first = own or wanted[0]
    if set(possible) == {Route.STAGED, Route.DIRECT} and wanted[0] is not Route.DIRECT:
        choice = _by_time(nbytes, pieces(), seconds, overdue)
        hoped = first not in possible
    else:
        alone = "the only route that converts" if means.converts else "the only common route"
        choice = Choice(possible[0], alone if len(possible) == 1 else "preferred by the decode rank")
        hoped = first is not choice.route
    if not hoped:
        return choice
    reason = "is not accepted by the decode rank" if means.can(first) else _IMPOSSIBLE
    if means.converts and first in _PIECEWISE:
        reason = "cannot convert dtypes or scales"
    return replace(choice, fallback=f"{first.name.lower()} {reason}")


def predicted_faster(*, direct: float, staged: float) -> Route:
    """Which of the two a pair that can do both takes: the faster one, `direct` if they are about equal.

    Args:
        direct: Seconds that `direct` is predicted to take.
        staged: Likewise `staged`.
    """
    return Route.DIRECT if direct <= staged * _NEARLY else Route.STAGED


def _by_time(
    nbytes: int,
    pieces: int,
    seconds: Callable[[Route, int], float],
    overdue: Overdue,
) -> Choice:
    direct, staged = seconds(Route.DIRECT, pieces), seconds(Route.STAGED, pieces)
    what = f"{pieces} pieces of {nbytes // max(pieces, 1)} bytes on average"
    why = f"{what}: {direct * 1e3:.1f} ms predicted for direct, {staged * 1e3:.1f} ms for staged"
    found = [(Route.DIRECT, direct), (Route.STAGED, staged)]
    if predicted_faster(direct=direct, staged=staged) is Route.STAGED:
        found.reverse()
    (best, best_s), (other, other_s) = found
    if overdue(other, other_s, best, best_s):
        return Choice(other, f"{why}; {other.name.lower()} was not tried for long")
    return Choice(best, why)
