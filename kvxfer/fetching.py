"""One fetch over all prefill ranks: resolve, ask each, gather their outcomes, and end once.

The task that runs it belongs to the worker. Whatever happens to the caller, it goes on until no peer writes the blocks
any more, or until it can say which blocks are in doubt.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from kvxfer.copy.port import Event
from kvxfer.errors import (
    ClosedError,
    Code,
    GeometryError,
    KvxferError,
    MemoryInDoubtError,
    PeerLostError,
    RefusedError,
    TransferFailedError,
    TransferTimeoutError,
)
from kvxfer.geometry import BlockLists, CacheGeometry, Selection, resolve
from kvxfer.incoming import Incoming
from kvxfer.link import Link
from kvxfer.need import Need
from kvxfer.peers import Peers
from kvxfer.protocol.messages import Release, Route, Status
from kvxfer.protocol.receiving import ReceiveState
from kvxfer.protocol.sending import Failure
from kvxfer.site import Site
from kvxfer.telemetry import Intervals, TransferStats, logger
from kvxfer.tickets import Ticket
from kvxfer.transfers import FetchResult, Transfer, TransferState

__all__ = ["Demand", "Fetching"]

_log: Final = logger("kvxfer.receive")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Demand:
    """What the caller asked for, checked.

    Attributes:
        ticket: The right to it.
        spans: Destination blocks of every group.
        tokens: Token range.
        after: The blocks may be written when this has fired.
        timeout: Seconds, or None.
        written: Blocks that the fetch will write, by group.
    """

    ticket: Ticket
    spans: BlockLists
    tokens: range
    after: Event
    timeout: float | None
    written: Mapping[str, Sequence[int]]


class Fetching:
    """Runs one fetch.

    Args:
        site: The worker.
        peers: Links to prefill ranks.
        ident: Name of the transfer, also the holder in the custody books.
        demand: What to fetch.
        number: Draws a fresh transfer id.
        known: Makes an `Incoming` known, so that it gets its messages.
        ended: Called when it is over, and again when nothing of it is in doubt any more.
    """

    def __init__(
        self,
        site: Site,
        peers: Peers,
        ident: str,
        demand: Demand,
        number: Callable[[], int],
        known: Callable[[Incoming], None],
        ended: Callable[["Fetching"], None],
    ) -> None:
        self.transfer: Final = Transfer(ident, demand.ticket.request, site.loop, self.cancel)
        self.incoming: Final[list[Incoming]] = []
        self._site = site
        self._peers = peers
        self._demand = demand
        self._number = number
        self._known = known
        self._ended = ended
        self._error: KvxferError | asyncio.CancelledError | None = None
        self._in_doubt = False
        self._by_rank: list[Link | None] = []
        self._stopped: asyncio.Future[None] = site.loop.create_future()
        self._settled: asyncio.Future[None] = site.loop.create_future()
        self._began = site.now()
        self._timer: asyncio.TimerHandle | None = None
        if demand.timeout is not None:
            self._timer = site.at(self._began + demand.timeout, self._timed_out)

    @property
    def ticket(self) -> Ticket:
        """The right to what is fetched."""
        return self._demand.ticket

    @property
    def doubtful(self) -> bool:
        """Whether something of it is under way or in doubt: the caller's blocks, or staging memory."""
        return not all(incoming.finished for incoming in self.incoming)

    def cancel(self) -> None:
        """The caller gave up."""
        self._stop(asyncio.CancelledError())

    def close(self) -> None:
        """The worker is closing."""
        self._stop(ClosedError(f"the worker was closed before the fetch of {self.transfer.request!r} had ended"))

    def broken(self, error: BaseException) -> None:
        """The task that ran it ended too soon: by a defect, or because the worker could not wait for it any longer."""
        if self.transfer.done:
            return
        text = f"the fetch of {self.transfer.request!r} was abandoned: {error!r}"
        self._error = self._error or TransferFailedError(text, transfer=self.transfer.id, blocks=self._demand.written)
        self._end()

    async def run(self) -> None:
        """From the first connection to the last byte, or to safety."""
        demand = self._demand
        links: list[Link] = []
        try:
            shares = await self._until_stopped(self._resolve(links))
            if shares is not None:
                self._ask(shares)
                await self._until_stopped(self._all_over())
        except KvxferError as error:
            self._stop(error)
        await self._wind_down()
        self._collect_failures()
        if self._error is None:
            for link in links:
                link.send(Release(demand.ticket.ref()))
        self._end()

    # --- steps

    async def _resolve(self, links: list[Link]) -> list[tuple[Selection, ...]]:
        """Reach every prefill rank and divide what is needed among them."""
        ticket = self._demand.ticket
        epoch = bytes.fromhex(ticket.epoch)
        found = await asyncio.gather(
            *(self._peers.link(endpoint, epoch) for endpoint in ticket.rank_endpoints), return_exceptions=True
        )
        lost: KvxferError | None = None
        have: list[CacheGeometry | None] = []
        by_rank: list[Link | None] = []
        for rank, outcome in enumerate(found):
            if isinstance(outcome, Link):
                have.append(self._site.plans.geometry(outcome.peer))
                by_rank.append(outcome)
                links.append(outcome)
            elif isinstance(outcome, KvxferError):
                lost = lost or outcome
                have.append(None)
                by_rank.append(None)
                _log.warning("rank_not_reached", rank=rank, endpoint=ticket.rank_endpoints[rank], error=str(outcome))
            else:
                raise outcome
        present = [rank for rank, geometry in enumerate(have) if geometry is not None]
        try:
            parts = resolve(self._site.geometry, [g for g in have if g is not None], rank=self._site.config.rank)
        except GeometryError as error:
            raise lost or error from error  # a rank that was not reached may be the one that is missing
        self._by_rank = by_rank
        shares: list[tuple[Selection, ...]] = [()] * len(have)
        for rank, part in zip(present, parts, strict=True):
            shares[rank] = part
        return shares

    def _ask(self, shares: Sequence[tuple[Selection, ...]]) -> None:
        """Tell every prefill rank by `Fetch`, or by `Release` that nothing of it is needed."""
        demand, site = self._demand, self._site
        deadline = None if demand.timeout is None else self._began + demand.timeout
        for selections, link in zip(shares, self._by_rank, strict=True):
            if link is None:
                continue
            if not selections:
                link.send(Release(demand.ticket.ref()))
                continue
            need = Need(demand.ticket.ref(), selections, demand.spans, demand.tokens, demand.after, deadline)
            incoming = Incoming(site, link, self._number(), need, self)
            self.transfer.expect({layer: 1 for selection in selections for layer in selection.layers})
            self.incoming.append(incoming)
            self._known(incoming)
        self.transfer.state = TransferState.WAITING
        for incoming in self.incoming:
            incoming.start()

    async def _all_over(self) -> None:
        """Until every rank's part has succeeded, or one has failed, which stops the others."""
        waiting = {incoming.over for incoming in self.incoming}
        while waiting:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(i.over.done() and i.machine.state is not ReceiveState.DONE for i in self.incoming):
                return

    async def _wind_down(self) -> None:
        """Stop what still runs and wait until nothing writes the blocks, bounded by `revoke_timeout`."""
        self._collect_failures()
        if self._error is not None:
            code = Code.CANCELLED if isinstance(self._error, asyncio.CancelledError) else self._error.code
            failure = Failure(Status.CANCELLED, code, str(self._error) or "the caller cancelled")
            for incoming in self.incoming:
                if not incoming.quiet.done():
                    incoming.stop(failure)
        open_ends = [incoming.quiet for incoming in self.incoming if not incoming.quiet.done()]
        if open_ends:
            await asyncio.wait(open_ends, timeout=self._site.config.revoke_timeout)
        silent = Failure(Status.FAILED, Code.PEER_LOST, f"no answer within {self._site.config.revoke_timeout:g} s")
        for incoming in self.incoming:
            if not incoming.quiet.done():
                incoming.lost(silent)

    def _end(self) -> None:
        """Tell the caller, and keep in custody what may still be written."""
        if self._timer is not None:
            self._timer.cancel()
        self._in_doubt = any(incoming.in_doubt for incoming in self.incoming)
        if self._in_doubt:
            self._site.custody.doubt(self.transfer.id)
        else:
            self._site.custody.release(self.transfer.id)
        self._finish()
        self._ended(self)

    def _collect_failures(self) -> None:
        """The first failure of any rank becomes the fetch's error."""
        for incoming in self.incoming:
            failure = incoming.machine.failure
            if failure is not None and self._error is None:
                self._error = self._translated(incoming, failure)

    def _translated(self, incoming: Incoming, failure: Failure) -> KvxferError:
        peer, blocks = incoming.peer.name, self._demand.written
        what = f"fetch of {self.transfer.request!r} from {peer} failed"
        reason = f"{failure.reason or failure.code.name.lower()} (code {failure.code.name})"
        if failure.code is Code.PEER_LOST:
            return PeerLostError(f"{what}: {reason}; blocks {_short(blocks)} hold no usable data", peer=peer)
        if incoming.route is Route.UNKNOWN:
            return RefusedError(f"{what}: {reason}", peer=peer, reason=failure.code)
        return TransferFailedError(
            f"{what} on route {incoming.route.name.lower()} after {incoming.bytes} bytes: {reason}",
            reason=failure.code,
            peer=peer,
            transfer=self.transfer.id,
            blocks=blocks,
        )

    # --- ending

    def _finish(self) -> None:
        stats = self._stats()
        error = self._error
        if error is not None:
            self.transfer.failed_blocks = self._demand.written
        if self._in_doubt:
            error = MemoryInDoubtError(
                f"fetch of {self.transfer.request!r}: a silent peer may still write the blocks "
                f"{_short(self._demand.written)}; await settled() before reusing them ({error})",
                settled=lambda: asyncio.shield(self._settled),
                peer=",".join(i.peer.name for i in self.incoming if i.in_doubt),
                transfer=self.transfer.id,
                blocks=self._demand.written,
            )
            error.__cause__ = self._error
        code = None if error is None else Code.CANCELLED if isinstance(error, asyncio.CancelledError) else error.code
        self._site.metrics.transfer_ended(code, route=stats.route, nbytes=stats.bytes)
        say = _log.info if error is None else _log.warning
        say(
            "fetch_ended",
            request=self.transfer.request,
            transfer=self.transfer.id,
            outcome="ok" if code is None else code.name.lower(),
            reason=str(error or ""),
            **stats.log_fields(),
        )
        if error is None:
            payload = next((i.machine.payload for i in self.incoming if i.machine.payload), b"")
            self.transfer.succeed(FetchResult(self.transfer.request, payload, stats))
        else:
            self.transfer.fail(error)

    def settle(self) -> None:
        """Evidence came in: no peer can write the blocks any more."""
        if not self._settled.done():
            if self._in_doubt:
                self._site.custody.settle(self.transfer.id)
            self.transfer.memory_safe = True
            self._settled.set_result(None)

    def forsake(self) -> None:
        """The worker is closed: there will be no evidence any more. The memory is left to the process's end."""
        if not self._settled.done():
            self._settled.set_exception(
                ClosedError(f"the worker was closed while blocks of {self.transfer.id} were in doubt: never reuse them")
            )
            self._settled.exception()

    def _stats(self) -> TransferStats:
        spent = {name: Intervals() for name in ("queued", "gathering", "posting", "wire", "scattering")}
        for incoming in self.incoming:
            for name, intervals in incoming.intervals.items():
                spent[name].merge(intervals)
        firsts = [incoming.first_byte for incoming in self.incoming if incoming.first_byte is not None]
        return TransferStats(
            route="+".join(sorted({incoming.route.name.lower() for incoming in self.incoming})),
            why="chosen by the sender",
            bytes=sum(incoming.bytes for incoming in self.incoming),
            pieces=sum(incoming.pieces for incoming in self.incoming),
            chunks=sum(incoming.chunks for incoming in self.incoming),
            descriptors=sum(incoming.descriptors for incoming in self.incoming),
            peers=tuple(incoming.peer.name for incoming in self.incoming),
            queued=spent["queued"].length,
            gathering=spent["gathering"].length,
            posting=spent["posting"].length,
            wire=spent["wire"].length,
            scattering=spent["scattering"].length,
            started=self._began,
            first_byte=min(firsts) if firsts else None,
            finished=self._site.now(),
        )

    def planned(self, needed: Sequence[int], parts: Mapping[int, int]) -> None:
        """One rank's plan is made: of each of the layers that it sends, so many parts will land."""
        self.transfer.expect(parts)
        self.transfer.landed(needed)  # each counted as one part until now

    def landed(self, layers: Sequence[int]) -> None:
        """One chunk of these layers is in place."""
        if not self.transfer.done:
            self.transfer.state = max(self.transfer.state, TransferState.MOVING)
            self.transfer.landed(layers)

    def settled(self) -> None:
        """One rank's part has finished."""
        if self.transfer.done:
            self._ended(self)

    def _timed_out(self) -> None:
        waited = self._site.now() - self._began
        moved = sum(incoming.bytes for incoming in self.incoming)
        self._stop(
            TransferTimeoutError(
                f"fetch of {self.transfer.request!r} did not end within {self._demand.timeout:g} s "
                f"({waited:.3f} s passed, {moved} bytes landed, state {self.transfer.state.name})",
                transfer=self.transfer.id,
                blocks=self._demand.written,
            )
        )

    def _stop(self, error: KvxferError | asyncio.CancelledError) -> None:
        if self._error is None and not self.transfer.done:
            self._error = error
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def _until_stopped(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Run `work` until it ends or the fetch is stopped; what it had begun is cancelled then."""
        task = asyncio.create_task(work)
        either: set[asyncio.Future[Any]] = {task, self._stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # it failed in the very moment in which it was stopped
        return None


def _short(blocks: Mapping[str, Sequence[int]]) -> str:
    """Block lists as messages show them."""
    parts = [f"{group}: {list(ids[:8])}{'...' if len(ids) > 8 else ''}" for group, ids in blocks.items()]
    return "{" + ", ".join(parts) + "}"


def written_blocks(spans: BlockLists, geometry: CacheGeometry, tokens: range) -> dict[str, list[int]]:
    """Destination blocks that a fetch of these tokens writes, by group."""
    written: dict[str, list[int]] = {}
    for group, span in spans.items():
        ids, spec = np.asarray(span.ids, np.int64), geometry.groups[group][0]
        if not spec.is_state and spec.tokens.of == 1:
            first = max(0, tokens.start - span.first_token) // spec.id_tokens
            last = -(-max(0, tokens.stop - span.first_token) // spec.id_tokens)
            ids = ids[first:last]
        written[group] = ids.tolist()
    return written
