"""The connector in a worker's process: a `BlockingWorker` that does what the scheduler's side orders.

What ends is told once, by `poll`: an offer when its request has finished as well, since vLLM asks for the one after the
other; a load when nobody writes its blocks any more, well or not. Failed blocks are told in the same step, or before.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, TypeAlias

import torch

from kvxfer.blocking import (
    BlockingOffer,
    BlockingTransfer,
    BlockingWorker,
    Fetched,
    FetchEvent,
    FetchFailed,
    OfferEvent,
    OfferInDoubt,
    OfferReleased,
    OfferWithdrawn,
    PollEvent,
)
from kvxfer.config import Config
from kvxfer.errors import BlocksError, BusyError, ClosedError, FabricError, KvxferError, MemoryInDoubtError
from kvxfer.geometry import CacheTensor, Group, Span
from kvxfer.integrations.vllm.caches import INDEXER
from kvxfer.integrations.vllm.orders import Blocks, Load, OfferStep, Orders
from kvxfer.integrations.vllm.seen import Counts, Ledger
from kvxfer.telemetry import logger
from kvxfer.transfers import Claim

__all__ = ["WorkerSide"]

_Key: TypeAlias = tuple[Any, ...]
"""What makes a ticket another one."""
_NULL_BLOCK: Final = 0
"""vLLM's block that is none."""
_ASKED_SECONDS: Final = 0.1
"""That a step has beyond its patience to ask whether layers have landed: those that have are not given up."""
_LEAST_SECONDS: Final = 0.01
"""Within which that is nearly always known of one."""

_log: Final = logger("kvxfer.vllm")


@dataclass(slots=True)
class _Sending:
    """A request on offer."""

    offer: BlockingOffer | None  # none if it could not be made
    safe: bool = False
    finished: bool = False
    held: bool = False  # whether nothing follows, which is to be said when the request has finished
    doubt: MemoryInDoubtError | None = None

    def withdraw(self) -> None:
        """Take it back; it has not ended by that."""
        self.held = False
        if self.offer is not None:
            self.offer.withdraw()


@dataclass(slots=True)
class _Loading:
    """A request that is fetched."""

    load: Load
    cancelled: bool = False  # nobody waits for it any more
    given_up: bool = False  # it held up the forward pass, and its end is still to come


@dataclass(slots=True)
class _Service:
    """What moves blocks, and what is counted of it."""

    worker: BlockingWorker
    groups: Sequence[str]  # of which this rank holds something
    ledger: Ledger
    device: torch.device

    def now(self) -> Any:
        """What `after=` takes for all work on the caches that was queued so far."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def spans(self, blocks: Blocks) -> dict[str, Span]:
        """Block lists of those groups of which something is held here.

        Raises:
            BlocksError: If one has a block that is none: a copy would pass it over.
        """
        for group, (ids, _) in blocks.items():
            if _NULL_BLOCK in ids:
                raise BlocksError(f"group {group!r}: vLLM has let go of a block that is to be handed over: {ids}")
        return {group: Span(*blocks[group]) for group in self.groups}


class _Offers:
    """Requests that decode engines fetch from here."""

    def __init__(self, service: _Service, *, layerwise: bool, late: bool) -> None:
        self._service: Final = service
        self._layerwise: Final = layerwise
        self._late: Final = late
        self._sending: Final[dict[str, _Sending]] = {}
        self._running: set[str] = set()  # of these, what this step computes: who has finished had their name before
        self._made: Final[dict[BlockingOffer, _Sending]] = {}  # those that have not ended, preempted ones too
        self._steps: Final[list[OfferStep]] = []  # to be offered at the end of this step
        self._growing: Final[list[tuple[BlockingOffer, OfferStep]]] = []  # in this step's forward pass

    def begin(self, steps: Sequence[OfferStep]) -> None:
        """Offer what a step computes."""
        self._running = {step.request for step in steps if not step.computed}
        for step in steps:
            if self._layerwise or step.computed:
                self._offer(step)
            else:  # nobody waits for it yet, but how long it waits for somebody would count from here
                self._steps.append(step)

    def ready(self, layer: int) -> None:
        """The forward pass has written its part of a layer, or queued that."""
        if self._layerwise and self._growing:
            after = self._service.now()
            for offer, step in self._growing:
                offer.ready(layers=[layer], tokens=step.stop, after=after)

    def end_step(self) -> None:
        """The forward pass is queued: what it computes may be read once it is done."""
        for step in self._steps:
            self._offer(step)
        self._steps.clear()
        after = self._service.now() if self._growing else None
        for offer, step in self._growing:
            offer.ready(tokens=step.stop, after=after)
            if step.last and self._late:
                self._sending[step.request].held = True
            elif step.last:
                offer.finish()
        self._growing.clear()

    def finish(self, request: str) -> None:
        """A request has: its blocks may go to others once nobody reads them."""
        if request in self._sending and request not in self._running:
            sending = self._sending[request]
            sending.finished = True
            if sending.held and sending.offer is not None:
                sending.offer.finish()

    def withdraw(self, request: str, *, goes_on: bool = False) -> _Sending:
        """Take one back; a request that goes on does so with another one."""
        sending = self._sending.pop(request) if goes_on else self._sending[request]
        sending.withdraw()
        return sending

    def refuse(self, name: str) -> None:
        """Let whoever has a ticket of this name hear that nothing will come; without it he would wait for long."""
        with suppress(KvxferError):
            offer = self._service.worker.offer(name, streaming=True)
            self._made[offer] = _Sending(offer)
            offer.withdraw()

    def note(self, event: OfferEvent) -> None:
        """One is over, or in doubt: its blocks stay taken until `OfferSettled`."""
        if isinstance(event, OfferInDoubt):
            self._made[event.offer].doubt = event.error
            return
        if not isinstance(event, OfferWithdrawn):
            fetched = isinstance(event, OfferReleased)
            self._service.ledger.count(Counts(offers=int(fetched), offers_lost=int(not fetched)))
        self._made.pop(event.offer).safe = True

    def take_ended(self) -> set[str]:
        """Requests that have finished and whose blocks nobody reads, each once."""
        ended = {request for request, sending in self._sending.items() if sending.safe and sending.finished}
        for request in ended:
            del self._sending[request]
        return ended

    def _offer(self, step: OfferStep) -> None:
        """Begin an offer, or go on with it."""
        service = self._service
        try:
            if step.start == 0:
                offer = service.worker.offer(step.name, streaming=True, attempt=step.attempt)
                self._sending[step.request] = self._made[offer] = _Sending(offer)
            sending = self._sending[step.request]
            if sending.offer is not None:
                sending.offer.extend(service.spans(step.blocks), tokens=range(step.start, step.stop))
                if step.computed:  # perhaps there is no forward pass in this step
                    sending.offer.ready(tokens=step.stop, after=service.now())
                    sending.offer.finish()
                else:
                    self._growing.append((sending.offer, step))
        except KvxferError as error:  # whoever has the ticket hears that there is no such request
            _log.warning("offer_refused", request=step.request, attempt=step.attempt, error=str(error))
            self._sending.setdefault(step.request, _Sending(None, safe=True)).withdraw()


class _Loads:
    """Requests that are fetched from prefill engines, from their claim on."""

    def __init__(self, service: _Service, *, by_block: bool, patience: float) -> None:
        self._service: Final = service
        self._by_block: Final = by_block
        self._patience: Final = patience
        self._left = patience  # of that, in this step
        # by what makes a ticket another one, and by request: until nothing of that needs the ticket any more
        self.claims: Final[dict[_Key, dict[str, Claim]]] = {}
        self._loading: Final[dict[BlockingTransfer, _Loading]] = {}
        self._in_step: Final[list[BlockingTransfer]] = []  # which this step's forward pass reads
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed: set[str] = set()

    def claim(self, request: str, ticket: dict[str, Any]) -> None:
        """Let its prefill engine wait for a request that has come."""
        with suppress(ClosedError):  # asleep: the prefill engine waits without it, for a while
            self.claims.setdefault(_key(ticket), {})[request] = self._service.worker.claim(ticket)

    def decline(self, request: str, ticket: dict[str, Any]) -> None:
        """Let the prefill engine have its blocks back, unless another request came with the same ticket."""
        if self.claims.get(_key(ticket), {}).keys() <= {request}:
            with suppress(ClosedError):  # asleep: the lease ends it
                self._service.worker.decline(ticket)
        self._unclaim(request, ticket)

    def begin(self, orders: Orders) -> None:
        """Give up fetches of aborted requests, and begin those of this step: others may have their names by now."""
        cancels = frozenset(orders.cancels)
        for transfer, loading in self._loading.items() if cancels else ():
            if loading.load.request in cancels:
                loading.cancelled = True
                transfer.cancel()
        after = self._service.now() if orders.loads else None
        self._left = self._patience
        silent = {one.load.ticket.get("epoch") for one in self._loading.values() if one.given_up}
        for load in orders.loads:
            self._load(load, after, silent=load.ticket.get("epoch") in silent)

    def wait(self, layer: int) -> None:
        """Block until a layer of this step's loads has landed; what takes too long is given up."""
        for transfer in list(self._in_step):
            before = monotonic()
            try:
                transfer.wait_layer(layer, timeout=max(_LEAST_SECONDS, self._left + _ASKED_SECONDS))
            except KvxferError:  # told by `take_received`
                if not transfer.done:
                    raise
            except TimeoutError:
                if transfer.give_up():
                    self._give_up(transfer)
                else:  # in doubt: `end_step` raises that
                    with suppress(KvxferError):
                        transfer.wait_layer(layer)
            self._left -= monotonic() - before  # not what the model computes meanwhile

    def end_step(self) -> None:
        """The forward pass has read what there is.

        Raises:
            MemoryInDoubtError: If a load of this step failed and a silent peer may still write its blocks.
        """
        for transfer in self._in_step:
            if isinstance(transfer.error, MemoryInDoubtError):
                raise transfer.error
            # what is there was read, and blocks that failed later would be those of whoever has them by then
            self._loading[transfer].cancelled |= transfer.error is None
        self._in_step.clear()

    def note(self, event: FetchEvent) -> None:
        """One is over, or nobody writes its blocks any more."""
        loading = self._loading[event.transfer]
        load = loading.load
        match event:
            case Fetched():
                stats = event.result.stats
                self._service.ledger.count(Counts([stats.duration], [stats.bytes]))
                self._unclaim(load.request, load.ticket)
            case FetchFailed():
                if loading.cancelled:
                    self.decline(load.request, load.ticket)
                else:
                    self._fail(load, event.error)
                if isinstance(event.error, MemoryInDoubtError):
                    return  # until `Settled`
            case _:
                pass
        del self._loading[event.transfer]
        if not load.in_step:
            self._received.add(load.request)

    def take_received(self) -> set[str]:
        """Requests whose load is over, each once."""
        received, self._received = self._received, set()
        return received

    def take_failed_blocks(self) -> set[int]:
        """Blocks whose load has failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed(self, received: Iterable[str]) -> set[str]:
        """Those of these requests whose load has failed as a whole, as their blocks are not told."""
        failed = self._failed.intersection(received)
        self._failed -= failed
        return failed

    def _load(self, load: Load, after: Any, *, silent: bool) -> None:
        try:
            if silent:
                raise BusyError("its engine has not answered since a load from there was given up")
            spans, tokens = self._service.spans(load.blocks), range(load.start, load.stop)
            transfer = self._service.worker.start_fetch(load.ticket, spans, tokens=tokens, after=after)
        except KvxferError as error:
            self._fail(load, error)
            if not load.in_step:
                self._received.add(load.request)
            return
        self._loading[transfer] = _Loading(load)
        if load.in_step:
            self._in_step.append(transfer)
        if claim := self.claims.get(_key(load.ticket), {}).get(load.request):
            claim.close()

    def _give_up(self, transfer: BlockingTransfer) -> None:
        """Let a load fail that held up the forward pass, and with it requests of others."""
        loading = self._loading[transfer]
        loading.cancelled = loading.given_up = True
        self._in_step.remove(transfer)
        self._spoil(loading.load, f"it did not come within {self._patience:g} s")

    def _fail(self, load: Load, error: KvxferError) -> None:
        """Nothing usable is in the blocks of a load, and nobody will try it again."""
        self._spoil(load, str(error))
        self.decline(load.request, load.ticket)

    def _spoil(self, load: Load, why: str) -> None:
        ids = [block for those, _ in load.blocks.values() for block in those]
        _log.warning("load_failed", request=load.request, blocks=len(ids), error=why)
        self._service.ledger.count(Counts(load_failures=1))
        if self._by_block:
            self._failed_blocks.update(ids)
        else:
            self._failed.add(load.request)

    def _unclaim(self, request: str, ticket: dict[str, Any]) -> None:
        those = self.claims.get(_key(ticket), {})
        if request in those:
            those.pop(request).close()
            if not those:
                del self.claims[_key(ticket)]


class WorkerSide:
    """What vLLM's worker asks of the connector. All from one thread, as vLLM does."""

    def __init__(
        self,
        config: Config,
        groups: Sequence[str],  # of which this rank holds something
        *,
        layerwise: bool,  # offers grow layer by layer
        by_block: bool = True,  # vLLM is told which blocks a load has failed for, and not only that it has
        patience: float = 2.0,  # seconds that a forward pass waits for its loads, all in all
        # blocks of a request that is preempted are overwritten before that is told: nobody shall have fetched all of it
        # by then, so its offer ends with it
        late: bool = False,
    ) -> None:
        self.ledger: Final = Ledger()
        self._worker: Final = BlockingWorker(config, groups=[Group(name, null_block=_NULL_BLOCK) for name in groups])
        self._service: Final = _Service(self._worker, groups, self.ledger, torch.device("cpu"))
        self.offers: Final = _Offers(self._service, layerwise=layerwise, late=late)
        self.loads: Final = _Loads(self._service, by_block=by_block, patience=patience)
        self._caches: Mapping[str, list[CacheTensor]] = {}
        self._numbers: dict[str, int] = {}
        self.page = 0  # tokens of a page of an indexer, if a layer has one
        self._registered = False

    # --- memory

    def register(self, caches: Mapping[str, list[CacheTensor]]) -> None:
        """Register the caches, by the names of vLLM's layers. Blocks."""
        tensors = [tensor for those in caches.values() for tensor in those]
        self._worker.register(tensors)
        self._caches, self._registered = caches, True
        self._numbers = {name: those[0].layers[0] for name, those in caches.items()}
        self._service.device = tensors[0].tensor.device
        self.page = max((one.tokens_per_row for one in tensors if one.part.startswith(INDEXER)), default=0)

    def unregister(self) -> None:
        """Let go of the memory before vLLM gives it up. Blocks. Idempotent.

        Raises:
            FabricError: If a silent peer may still touch it.
        """
        self._registered = False
        self.loads.claims.clear()  # they end with the service
        if not self._worker.unregister():
            raise FabricError("a silent peer may still touch blocks of this cache: its memory must not be given up")

    def restore(self) -> None:
        """Register the same caches again, now that their memory is back. Blocks. Idempotent."""
        if self._caches and not self._registered:
            self.register(self._caches)

    @property
    def card(self) -> dict[str, Any] | None:
        """What this rank says of itself; none while nothing is registered."""
        return self._worker.card.to_dict() if self._registered else None

    def close(self) -> None:
        """Stop. Blocks. Idempotent."""
        self._registered = False
        self._worker.close()
        self.ledger.close()

    # --- one step, in this order

    def preempt(self, orders: Orders) -> None:
        """Take offers back whose blocks are about to be overwritten. Blocks until nobody reads them.

        Raises:
            MemoryInDoubtError: If a silent peer may still read them: vLLM has no way to spare them.
            FabricError: If that cannot be found out in time.
        """
        # vLLM's runner V1 leaves that out where it speculates, in all stages but the last
        self.offers.end_step()
        for request in orders.preempted:
            # else the end of this offer is told
            sending = self.offers.withdraw(request, goes_on=request not in orders.withdraws)
            bounds = self._worker.config.bounds()
            while not sending.safe:  # what is in doubt, as after an error of a post, may soon be known to be safe
                events = self._worker.poll(bounds["revoke"] if sending.doubt else max(bounds.values()))
                self._note(events)
                if not events:
                    raise sending.doubt or FabricError(f"the offer of preempted request {request!r} has not ended")

    def begin_step(self, orders: Orders) -> None:
        """Do what must be done before the forward pass."""
        if orders.join is not None:
            self._worker.join(orders.join.card, key=orders.join.key)
        for request, ticket in orders.claims.items():
            self.loads.claim(request, ticket)
        for request, ticket in orders.declines:
            self.loads.decline(request, ticket)
        for request in orders.withdraws:
            self.offers.withdraw(request)
        for name in orders.refusals:
            self.offers.refuse(name)
        self.offers.begin(orders.steps)

    def wait_layer(self, name: str) -> None:
        """Block until a layer of this step's loads has landed; one that fails is told by `poll`."""
        number = self._numbers.get(name)
        if number is not None:
            self.loads.wait(number)

    def save_layer(self, name: str) -> None:
        """The forward pass has written its part of a layer, or queued that."""
        number = self._numbers.get(name)
        if number is not None:
            self.offers.ready(number)

    def poll(self, finished: Iterable[str]) -> tuple[set[str], set[str]]:
        """What is over, each request once, with those that have finished since the last call.

        Returns:
            Requests whose blocks nobody reads any more, of those that have finished; and requests whose load is over.

        Raises:
            MemoryInDoubtError: If a load of this step failed and a silent peer may still write its blocks: vLLM has no
                way to spare them.
        """
        for number in self._numbers.values():  # no hook is called for a layer that is not run, or by a CUDA graph
            self.loads.wait(number)
        self.loads.end_step()
        for request in finished:
            self.offers.finish(request)
        self._note(self._worker.poll())
        return self.offers.take_ended(), self.loads.take_received()

    def _note(self, events: Iterable[PollEvent]) -> None:
        for event in events:
            if isinstance(event, FetchEvent):
                self.loads.note(event)
            else:
                self.offers.note(event)


def _key(ticket: Mapping[str, Any]) -> _Key:
    return tuple(ticket.get(name, 0) for name in ("epoch", "request", "attempt", "mac"))
