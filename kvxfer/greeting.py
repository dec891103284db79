"""With what this worker meets a peer: who it is, what must agree, and whether the peer is told addresses."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from kvxfer import __version__
from kvxfer.link import Link
from kvxfer.protocol.session import Identity, Role, Session, Terms
from kvxfer.site import Site

__all__ = ["greeting"]

_NONCE_BYTES: Final = 32


def greeting(
    site: Site,
    role: Role,
    links: Callable[[], Iterable[Link]],
    *,
    process: int | None,
    endpoint: str,
    since: float,
) -> tuple[Session, bool]:
    """A fresh session for a new stream, and whether its peer is trusted with addresses.

    Args:
        site: The worker.
        role: Which side of the stream this is.
        links: All that there are, and those on which something was left in doubt.
        process: Of the same user on this host, by the credentials of a Unix socket: its number, 0 if it is in another
            namespace of processes; None if the peer is not such a process.
        endpoint: Where the stream leads, if it was opened here.
        since: When the stream began, by the worker's clock: the handshake is bounded from then on.
    """
    config = site.config
    secret = config.secret.get_secret_value().encode() if config.secret is not None else None
    trusted = {"full": True, "none": False, "auto": process is not None or secret is not None}[config.trust]
    epoch = bytes.fromhex(site.issuer.card.epoch) if site.issuer is not None else site.incarnation
    identity = Identity(
        config.engine, epoch, site.incarnation, config.rank, config.world, int(site.capabilities), __version__
    )
    terms = Terms(
        facts=site.facts,
        body=site.body[trusted],
        key=site.key,
        forgiven=frozenset({"model"} if config.compat == "geometry" else ()),
        secret=secret,
        endpoint=endpoint,
        engaged_at=partial(_engaged_at, links),
        heartbeat=config.heartbeat,
        peer_timeout=config.peer_timeout,
        handshake_timeout=config.handshake_timeout,
    )
    nonce = site.runtime.token(_NONCE_BYTES)
    return Session(role, identity, terms, nonce=nonce, now=since, process=process or 0), trusted


def _engaged_at(links: Callable[[], Iterable[Link]], incarnation: bytes) -> str:
    """Where this rank has gone to an incarnation, and something is open or in doubt; empty if nowhere.

    A stream on which it has proved who it is counts from then on: whoever is there could do so elsewhere with that.
    """
    ours = (link for link in links() if link.role is Role.CLIENT)
    return next((link.endpoint for link in ours if link.proved_to == incarnation), "")
