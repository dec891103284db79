"""Where the two sides of a probe between hosts meet: an endpoint to listen at, and the line that leads there."""

from kvxfer.errors import UsageError
from kvxfer.names import Endpoint

__all__ = ["listening", "pasted"]


def listening(text: str) -> Endpoint:
    """What `--listen` names.

    Raises:
        UsageError: If it is no address, or none at which the other side reaches this one.
    """
    endpoint = _parsed(text, "--listen")
    if endpoint.anywhere:
        raise UsageError(
            f"--listen {text}: name the address at which the other side reaches this host, not all of them"
        )
    return endpoint


def pasted(text: str) -> tuple[str, Endpoint]:
    """What `--peer` names, `CODE@tcp:HOST:PORT`: the code, and where to connect.

    Raises:
        UsageError: If it is something else.
    """
    code, _, address = text.rpartition("@")
    if not code:
        raise UsageError(f"--peer {text}: paste what the listening side has printed, CODE@tcp:HOST:PORT")
    return code, _parsed(address, "--peer")


def _parsed(text: str, option: str) -> Endpoint:
    try:
        endpoint = Endpoint.parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from error
    if endpoint.scheme == "unix" and not endpoint.path:
        raise UsageError(f"{option} {text}: give a path that both sides see, as in unix:/run/kvxfer-doctor.sock")
    return endpoint
