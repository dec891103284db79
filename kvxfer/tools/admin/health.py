"""Whether a worker should be given work, and if not, why."""

from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.errors import ConfigError
from kvxfer.tools.admin.look import Look

__all__ = ["Limits", "reasons"]


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Limits:
    """From when on a worker counts as not ready.

    Attributes:
        quarantine: The part of a share of the arena that is in quarantine. At more than one half the share refuses what
            the rest cannot hold.
        stuck_after: Seconds for which the mover, or a call of the transport, stands still. A host that cannot be
            reached holds one for about ten.
        stopping: Whether the application takes no more requests, while its workers still serve those that it has. Asked
            from the admin server's threads.

    Raises:
        ConfigError: If one of them is no such number.
    """

    quarantine: float = 0.5
    stuck_after: float = 15.0
    stopping: Callable[[], bool] = _never

    def __post_init__(self) -> None:
        if not 0 < self.quarantine <= 1 or not self.stuck_after > 0:
            raise ConfigError(
                f"quarantine={self.quarantine} must be above 0 and at most 1, stuck_after={self.stuck_after} above 0"
            )


def reasons(look: Look, limits: Limits) -> list[str]:
    """Why a worker is not ready; empty if it is."""
    state = look.state
    found = ["its application stops"] if limits.stopping() else []
    if state is None:
        return [*found, look.why]
    if state["closed"]:
        found.append("it is closed")
    elif state["draining"]:
        found.append("it is draining")
    fabric = state["fabric"]
    if fabric["broken"]:
        found.append(f"its fabric is broken: {fabric['broken']}")
    if fabric["late"] >= limits.stuck_after:
        found.append(f"its fabric has stood still for {fabric['late']:.0f} s")
    for share in (state["arena"]["send"], state["arena"]["receive"]):
        held = share.quarantined_bytes
        if share.capacity_bytes and held >= limits.quarantine * share.capacity_bytes:
            part = held / share.capacity_bytes
            found.append(f"{part:.0%} of the {share.name} share of its arena ({held} bytes) is in quarantine")
    return found
