"""kvxfer moves the KV cache of a request between GPUs, from any layout to any layout, as one await.

    async with kvxfer.Worker(tensors) as worker:
        result = await worker.fetch(ticket, blocks, after=kvxfer.READY)

Names are imported when they are first used, so `import kvxfer` costs nothing and needs neither torch nor a GPU. What
only a router needs (tickets and engine cards) is in `kvxfer.tickets`, which needs msgspec alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer.blocking import BlockingWorker as BlockingWorker
    from kvxfer.blocking import Fetched as Fetched
    from kvxfer.blocking import FetchFailed as FetchFailed
    from kvxfer.blocking import OfferExpired as OfferExpired
    from kvxfer.blocking import OfferFailed as OfferFailed
    from kvxfer.blocking import OfferInDoubt as OfferInDoubt
    from kvxfer.blocking import OfferReleased as OfferReleased
    from kvxfer.blocking import OfferSettled as OfferSettled
    from kvxfer.blocking import OfferWithdrawn as OfferWithdrawn
    from kvxfer.blocking import Settled as Settled
    from kvxfer.config import Config as Config
    from kvxfer.config import FabricConfig as FabricConfig
    from kvxfer.config import TlsConfig as TlsConfig
    from kvxfer.copy.port import READY as READY
    from kvxfer.errors import ArenaError as ArenaError
    from kvxfer.errors import BlocksError as BlocksError
    from kvxfer.errors import BusyError as BusyError
    from kvxfer.errors import ClosedError as ClosedError
    from kvxfer.errors import Code as Code
    from kvxfer.errors import ConfigError as ConfigError
    from kvxfer.errors import EventError as EventError
    from kvxfer.errors import FabricError as FabricError
    from kvxfer.errors import FailureReport as FailureReport
    from kvxfer.errors import ForkedError as ForkedError
    from kvxfer.errors import GeometryError as GeometryError
    from kvxfer.errors import IdentityError as IdentityError
    from kvxfer.errors import IntegrityError as IntegrityError
    from kvxfer.errors import KvxferError as KvxferError
    from kvxfer.errors import MemoryInDoubt as MemoryInDoubt
    from kvxfer.errors import MemoryInDoubtError as MemoryInDoubtError
    from kvxfer.errors import MismatchError as MismatchError
    from kvxfer.errors import MissingExtraError as MissingExtraError
    from kvxfer.errors import PeerError as PeerError
    from kvxfer.errors import PeerLostError as PeerLostError
    from kvxfer.errors import ProtocolError as ProtocolError
    from kvxfer.errors import RefusedError as RefusedError
    from kvxfer.errors import RequestError as RequestError
    from kvxfer.errors import Step as Step
    from kvxfer.errors import TicketError as TicketError
    from kvxfer.errors import TokensError as TokensError
    from kvxfer.errors import TransferError as TransferError
    from kvxfer.errors import TransferFailedError as TransferFailedError
    from kvxfer.errors import TransferTimeoutError as TransferTimeoutError
    from kvxfer.errors import UnreachableError as UnreachableError
    from kvxfer.errors import UsageError as UsageError
    from kvxfer.geometry import CacheTensor as CacheTensor
    from kvxfer.geometry import Group as Group
    from kvxfer.geometry import Interleave as Interleave
    from kvxfer.geometry import Span as Span
    from kvxfer.mapped.host import shared_empty as shared_empty
    from kvxfer.prefill.offers import Expired as Expired
    from kvxfer.prefill.offers import Offer as Offer
    from kvxfer.prefill.offers import Released as Released
    from kvxfer.prefill.offers import Withdrawn as Withdrawn
    from kvxfer.transfers import Claim as Claim
    from kvxfer.transfers import FetchResult as FetchResult
    from kvxfer.transfers import Transfer as Transfer
    from kvxfer.transfers import TransferState as TransferState
    from kvxfer.worker import Worker as Worker

__version__ = "0.1.0"

__all__ = [
    "READY",
    "ArenaError",
    "BlockingWorker",
    "BlocksError",
    "BusyError",
    "CacheTensor",
    "Claim",
    "ClosedError",
    "Code",
    "Config",
    "ConfigError",
    "EventError",
    "Expired",
    "FabricConfig",
    "FabricError",
    "FailureReport",
    "FetchFailed",
    "FetchResult",
    "Fetched",
    "ForkedError",
    "GeometryError",
    "Group",
    "IdentityError",
    "IntegrityError",
    "Interleave",
    "KvxferError",
    "MemoryInDoubt",
    "MemoryInDoubtError",
    "MismatchError",
    "MissingExtraError",
    "Offer",
    "OfferExpired",
    "OfferFailed",
    "OfferInDoubt",
    "OfferReleased",
    "OfferSettled",
    "OfferWithdrawn",
    "PeerError",
    "PeerLostError",
    "ProtocolError",
    "RefusedError",
    "Released",
    "RequestError",
    "Settled",
    "Span",
    "Step",
    "TicketError",
    "TlsConfig",
    "TokensError",
    "Transfer",
    "TransferError",
    "TransferFailedError",
    "TransferState",
    "TransferTimeoutError",
    "UnreachableError",
    "UsageError",
    "Withdrawn",
    "Worker",
    "__version__",
    "shared_empty",
]

# every exported name that is not an error, and the module that it lives in; errors are the rest
_HOMES = {
    "BlockingWorker": "kvxfer.blocking",
    "CacheTensor": "kvxfer.geometry",
    "Claim": "kvxfer.transfers",
    "Config": "kvxfer.config",
    "Expired": "kvxfer.prefill.offers",
    "FabricConfig": "kvxfer.config",
    "Fetched": "kvxfer.blocking",
    "FetchFailed": "kvxfer.blocking",
    "FetchResult": "kvxfer.transfers",
    "Group": "kvxfer.geometry",
    "Interleave": "kvxfer.geometry",
    "Offer": "kvxfer.prefill.offers",
    "OfferExpired": "kvxfer.blocking",
    "OfferFailed": "kvxfer.blocking",
    "OfferInDoubt": "kvxfer.blocking",
    "OfferReleased": "kvxfer.blocking",
    "OfferSettled": "kvxfer.blocking",
    "OfferWithdrawn": "kvxfer.blocking",
    "READY": "kvxfer.copy.port",
    "Released": "kvxfer.prefill.offers",
    "Settled": "kvxfer.blocking",
    "Span": "kvxfer.geometry",
    "TlsConfig": "kvxfer.config",
    "Transfer": "kvxfer.transfers",
    "TransferState": "kvxfer.transfers",
    "Withdrawn": "kvxfer.prefill.offers",
    "Worker": "kvxfer.worker",
    "shared_empty": "kvxfer.mapped.host",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'kvxfer' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "kvxfer.errors")), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
