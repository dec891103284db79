"""One fetch over all prefill ranks: connect, divide what is needed among them, ask each, wait for all, and end once.

It is the worker's. Whatever happens to the caller, it goes on until no peer writes the blocks any more, or until it can
say which blocks are in doubt.
"""

import asyncio
import copy
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct, field

from kvxfer.copy.port import Event
from kvxfer.decode.receiver import Grants, PrefillEngine, Receiver
from kvxfer.errors import (
    ClosedError,
    Code,
    FailureReport,
    GeometryError,
    IntegrityError,
    KvxferError,
    MemoryInDoubtError,
    MismatchError,
    PeerLostError,
    RefusedError,
    Step,
    TransferFailedError,
    TransferTimeoutError,
)
from kvxfer.geometry import BlockLists, PairPlan
from kvxfer.names import lazy
from kvxfer.peers.link import Link
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import ROUTE_NAMES, Route, Status
from kvxfer.protocol.transfer import Failure, ReceiveState, Receiving
from kvxfer.safety.doubt import Exposure
from kvxfer.site import Site, Tally
from kvxfer.telemetry import Ended, TransferStats, hears_info, logger
from kvxfer.tickets import Ticket
from kvxfer.transfers import FetchResult, Progress, Settling, TransferState, short

if TYPE_CHECKING:
    from kvxfer.decode.role import Decode

__all__ = ["Cause", "Fetch", "Standing", "doubt_error", "fetch_error", "report_on"]

# --- what a fetch that failed says
#
# Where it stood is noted when it fails, before winding down changes that; the report is made when it has ended, since
# only then it is known whether memory is safe.

Cause: TypeAlias = KvxferError | asyncio.CancelledError
"""Why a fetch fails; the second: its caller gave up."""


class Standing(Struct, frozen=True):
    """Where a fetch stood when it failed."""

    step: Step  # what was waited for
    peer: str = ""  # by whom it was held up; all of them, joined by a comma, if nobody stands out
    bytes: int = 0
    chunks_done: int = 0
    chunks: int = 0


def fetch_error(fetch: "Fetch", part: Receiver, failure: Failure) -> KvxferError:
    """The error that says of a whole fetch how one rank's part failed."""
    peer, blocks = part.peer.name, fetch.listed
    what = f"fetch of {fetch.request!r} from {peer} failed"
    reason = f"{failure.reason or failure.code.name.lower()} (code {failure.code.name})"
    if failure.code is Code.PEER_LOST:
        return PeerLostError(
            f"{what} while {part.step.value}: {reason}; blocks {short(blocks)} hold no usable data", peer=peer
        )
    if part.route is Route.UNKNOWN:
        retry_after = failure.retry_after_ms / 1000 or None
        return RefusedError(f"{what}: {reason}", peer=peer, reason=failure.code, retry_after=retry_after)
    what = f"{what} while {part.step.value} on route {part.route.name.lower()} after {part.tally.bytes} bytes: {reason}"
    if part.checking is not None and part.checking.found is not None:
        chunk, bad = part.checking.found
        return IntegrityError(
            what, chunk=chunk, layers=bad.layers, damaged=bad.blocks, peer=peer, transfer=fetch.id, blocks=blocks
        )
    return TransferFailedError(what, reason=failure.code, peer=peer, transfer=fetch.id, blocks=blocks)


def doubt_error(
    fetch: "Fetch", cause: Cause | None, settled: Callable[[], Awaitable[None]], peer: str, who: str
) -> MemoryInDoubtError:
    """What is raised instead where somebody may still write the blocks."""
    error = MemoryInDoubtError(
        f"fetch of {fetch.request!r}: {who} may still write the blocks {short(fetch.listed)}; await "
        f"settled() before reusing them ({cause})",
        settled=settled,
        peer=peer,
        transfer=fetch.id,
        blocks=fetch.listed,
    )
    error.__cause__ = cause
    return error


def report_on(fetch: "Fetch", at: Standing, error: Cause, *, elapsed: float, route: str) -> tuple[Cause, FailureReport]:
    """The report of a fetch that has ended, and the error that carries it.

    An error that many fetches share (they waited for the same stream) is copied, so that each has its own report.
    """
    code = Code.CANCELLED if isinstance(error, asyncio.CancelledError) else getattr(error, "reason", error.code)
    report = FailureReport(
        request=fetch.request,
        transfer=fetch.id,
        peer=getattr(error, "peer", "") or at.peer,
        step=at.step,
        elapsed=elapsed,
        code=code,
        reason=str(error),
        route=route,
        bytes=at.bytes,
        chunks_done=at.chunks_done,
        chunks=at.chunks,
        blocks={group: tuple(ids) for group, ids in fetch.listed.items()},
        memory_safe=not isinstance(error, MemoryInDoubtError),
    )
    if isinstance(error, KvxferError):
        if error.report is not None:
            again = copy.copy(error)
            again.__cause__ = error
            error = again
        error.report = report
    return error, report


# --- the fetch

_RANKS_A_TURN: Final = 256
"""To how many ranks streams are opened in one turn of the loop."""
_NAME: Final = "kvxfer.receive"
_log: Final = logger(_NAME)
_hears_info: Final = hears_info(_NAME)


class Fetch(Progress, kw_only=True, eq=False, dict=True):
    """One fetch: what its caller asked for, checked, and what became of it."""

    site: Site
    role: "Decode"  # the worker's decode side
    number: int  # of the first rank's part: with one prefill rank both sides name the transfer alike
    ticket: Ticket  # the right to it
    spans: BlockLists  # destination blocks of every group
    tokens: range
    after: Event  # the blocks may be written when this has fired
    keep: bool  # whether the prefill ranks keep the request, for a retry, if its caller gives up
    began: float  # when it was asked for, by the runtime's clock
    deadline: float  # when its caller gives up; infinite if he does not
    key: tuple[str, wire.TicketRef]  # its ticket, as this side knows it, and among that as peers do
    trace: str = ""  # to which trace it belongs; empty if nobody traces it
    receivers: list[Receiver] = field(default_factory=list)  # what each prefill rank sends
    idle: Sequence[Link] = ()  # to ranks of which nothing is needed, and that were not told
    links: Sequence[Link] = ()  # to every prefill rank that was told what is needed of it
    _asked: bool = False
    _error: Cause | None = None
    _standing: Standing = Standing(Step.CONNECTING)  # when it failed, once it has
    unwanted: bool = False  # nobody tries again: what is in doubt of it is given back when that has ended
    superseded: bool = False  # the request is fetched anew: what becomes of it is that fetch's business
    _timer: asyncio.TimerHandle | None = None  # when its caller gives up; once it fails, when its peers are given up
    _task: asyncio.Task[None] | None = None

    # --- from the ticket to the end

    def begin(self) -> None:
        """Go. Ranks that are known are asked right now: they plan while the rest is made here."""
        if self.deadline < math.inf:
            self._timer = self.site.call_at(self.deadline, self._on_timeout)
        try:
            engine = self.role.engine(self.ticket)
            if engine is not None:
                self._ask(engine)
        except KvxferError as error:
            self._stop(error)
        except Exception as error:  # noqa: BLE001 - as in a task: a defect ends the fetch, which its caller has to await
            _log.error("task_failed", task=f"kvxfer fetch {self.id}", error=repr(error), exc_info=error)
            self.on_error(error)
        if not (self._asked or self.done):
            self._task = self.site.tasks.spawn(self._connect(), f"kvxfer fetch {self.id}", self.on_error, spare=True)

    async def _connect(self) -> None:
        """Ask when all ranks that can be reached are."""
        try:
            self._ask(await self._reach())
        except KvxferError as error:
            self._stop(error)

    async def _reach(self) -> PrefillEngine:
        """What is needed of each prefill rank that could be reached."""
        site, links = self.site, self.role.known_links(self.ticket)
        lost: KvxferError | None = None
        if None in links:
            links, lost = await self._open_links()
        peers = [None if link is None else link.peer for link in links]

        def shares() -> Sequence[PairPlan | None]:
            try:
                return site.plans.shares(peers, rank=site.config.rank)
            except (GeometryError, MismatchError) as error:  # a rank that is not there may be the one that is missing
                if lost is not None:
                    raise lost from error
                gone = next((link for link in links if link is not None and link.failure is not None), None)
                if gone is None:
                    raise
                what = f"fetch of {self.request!r} had not begun when {gone.peer.name} was lost"
                raise PeerLostError(f"{what}: {gone.failure}", peer=gone.peer.name) from error

        return self.role.make_engine(self.ticket, links, await site.offload(shares, rows=site.plans.shares_rows(peers)))

    async def _open_links(self) -> tuple[list[Link | None], KvxferError | None]:
        """Links to all ranks; None for one that could not be reached, and the first reason for that."""
        endpoints, peers = self.ticket.rank_endpoints, self.role.peers
        epoch = bytes.fromhex(self.ticket.epoch)

        async def reach(rank: int, endpoint: str) -> Link:
            for _ in range(rank // _RANKS_A_TURN):
                await asyncio.sleep(0)
            return await peers.link(endpoint, epoch)

        found = await asyncio.gather(*map(reach, range(len(endpoints)), endpoints), return_exceptions=True)
        lost: KvxferError | None = None
        links: list[Link | None] = []
        for rank, outcome in enumerate(found):
            if isinstance(outcome, Link):
                links.append(outcome)
            elif isinstance(outcome, KvxferError):
                lost = lost or outcome
                links.append(None)
                _log.warning("rank_not_reached", rank=rank, endpoint=endpoints[rank], error=str(outcome))
            else:
                raise outcome
        return links, lost

    def _ask(self, engine: PrefillEngine) -> None:
        """Tell every prefill rank by `Fetch`, or by `Release` that nothing of it is needed."""
        site, role, sent = self.site, self.role, True
        self.state, self.links = TransferState.WAITING, engine.links
        try:
            for part in engine.parts:
                link, number = part.link, next(role.numbers) if self.receivers else self.number
                grants = Grants(site, link.peer)
                exposure = Exposure(site, link, f"{role.prefix}{number}")
                receiver = Receiver(site, link, part, self, link.peer, grants, exposure, Receiving(number))
                sent = receiver.send_fetch() and sent
            if engine.idle:
                self.idle = engine.idle
                self.release_idle()
        finally:
            self._asked = True
        if not engine.parts:
            self.on_error(TransferFailedError("no rank that was reached has anything of it"))
        if not sent:
            self.end_if_over()

    def release_idle(self) -> None:
        """Tell ranks of which nothing is needed, unless the request is kept: one may be left when another is lost."""
        if self.going_on and not (self.keep or self.key in self.role.claims):
            for link in self.idle:
                link.send(wire.Release(self.key[1]))
            self.idle = ()

    def watch(self) -> None:
        """See `Progress`."""
        for receiver in self.receivers:
            receiver.watch()

    def have_landed(self, layers: range) -> bool:
        """See `Progress`."""
        for layer in layers:
            parts = [receiver for receiver in self.receivers if layer in receiver.part.pair.layers]
            if not parts or not all(receiver.has_landed(layer) for receiver in parts):
                return False
        return True

    def _succeed(self) -> None:
        """Every byte is where it belongs, and nobody touches any of it any more: tell the caller."""
        if self._timer is not None:
            self._timer.cancel()
        self.site.custody.release(self.id)
        payloads = [receiver.protocol.payload for receiver in self.receivers]
        tally, stats = self._merge_counts()
        self.succeed(FetchResult(self.request, next(filter(None, payloads), b""), stats))
        self.role.on_success(self, tally, stats)

    def finish_success(self, tally: Tally, stats: TransferStats, later: Collection[bytes]) -> None:
        """Tell every prefill rank that nothing more of the request is needed, and count a success.

        Ranks of these incarnations have more to do with the request, and are told when that has ended.
        """
        links = self.links
        if self.idle:  # one of these may have been lost, and met again
            links = list(dict.fromkeys((*links, *filter(None, self.role.known_links(self.ticket)))))
        for link in links:
            if not later or link.peer.identity.incarnation not in later:
                link.send(wire.Release(self.key[1]))
        key = self.request, self.ticket.attempt
        self.site.metrics.transfer_ended(Ended("receive", None, stats, None, self.id, key, tally.stages))
        if _hears_info():
            _log.info("fetch_ended", request=self.request, transfer=self.id, outcome="ok", **stats.log_fields())

    def _end_failed(self, error: Cause) -> None:
        """Tell the caller why it failed, and keep in custody what may still be written. Once."""
        site, role = self.site, self.role
        if self.done:
            return
        if self._timer is not None:
            self._timer.cancel()
        tally, stats = self._merge_counts()
        if any(receiver.in_doubt for receiver in self.receivers):
            site.custody.doubt(self.id)
            silent = ",".join(receiver.peer.name for receiver in self.receivers if receiver.in_doubt)
            copying = any(receiver.copying for receiver in self.receivers)
            who = "a copy of our own" if copying else f"{silent}, which is silent,"
            error = doubt_error(self, error, self._settled.wait, silent, who)
        elif not self.spared.done():
            site.custody.release(self.id)
        error, report = report_on(self, self._standing, error, elapsed=stats.duration, route=stats.route)
        key = self.request, self.ticket.attempt
        site.metrics.transfer_ended(Ended("receive", report.code, stats, report, self.id, key, tally.stages))
        say = _log.info if report.code is Code.CANCELLED else _log.warning
        say("fetch_failed", **stats.log_fields(), **report.log_fields())
        self.fail(error, report)
        if self.unwanted:
            site.loop.call_soon(self._release_request)  # a retry may begin in this turn
        elif not (self.keep or self.superseded):
            role.on_failure(self)
        role.on_end(self)

    def _merge_counts(self) -> tuple[Tally, TransferStats]:
        """What all ranks' parts counted, and that as the caller sees it. Once."""
        routes, whys, peers, receivers = set[str](), dict[str, None](), list[str](), self.receivers
        tally = receivers[0].tally if len(receivers) == 1 else Tally()
        for receiver in receivers:
            routes.add(ROUTE_NAMES[receiver.route])
            whys[receiver.why] = None
            peers.append(receiver.peer.name)
            receiver.link.moved[receiver.route] += receiver.tally.bytes
            if tally is not receiver.tally:
                tally.merge(receiver.tally)
        return tally, tally.stats(
            route="+".join(sorted(filter(None, routes))),
            why="; ".join(filter(None, whys)),
            peers=tuple(peers),
            started=self.began,
            finished=self.site.now(),
        )

    # --- what its receivers say

    def end_if_over(self) -> None:
        """A rank's part has failed, or ended: stop the others if it failed, and end when nobody writes any more."""
        if self.done:
            self.role.on_end(self)
            return
        if not self._asked:
            return
        if self._error is None:
            for receiver in self.receivers:
                if receiver.protocol.state is not ReceiveState.DONE or receiver.in_doubt:
                    break
            else:
                if self.receivers:
                    self._succeed()
                    return
            for receiver in self.receivers:
                if (failure := receiver.protocol.failure) is not None:
                    self._fail(fetch_error(self, receiver, failure), receiver)
                    break
        if self._error is not None:
            if not (self.spared.done() or any(receiver.in_doubt for receiver in self.receivers)):
                self.spared.set_result(None)  # for good: who gives up grants nothing more
                self.site.custody.release(self.id)
            if all(receiver.blocks_safe for receiver in self.receivers):
                self._end_failed(self._error)

    # --- what ends it early

    def cancel(self) -> None:
        """The caller gave up, also one whose fetch has failed already, and is winding down."""
        if not self.done:
            self.unwanted = not self.keep
            self._stop(asyncio.CancelledError("the caller cancelled"))

    def close(self) -> None:
        """The worker is closing."""
        self._stop(ClosedError(f"the worker was closed before the fetch of {self.request!r} had ended"))

    def on_error(self, error: BaseException) -> None:
        """A task of it was cancelled, or met a defect."""
        text = f"fetch of {self.request!r} could not go on: {error!r}"
        self._stop(TransferFailedError(text, transfer=self.id, blocks=self.listed))

    def _on_timeout(self) -> None:
        waited, at = self.site.now() - self.began, self.stands()
        hint = f", held up by {at.peer}" if at.peer else ""
        hint += "; it may not be on offer there" if at.step is Step.ASKING else ""
        self._stop(
            TransferTimeoutError(
                f"fetch of {self.request!r} did not end within {self.deadline - self.began:g} s ({waited:.3f} s "
                f"passed while {at.step.value}, {at.bytes} bytes landed, state {self.state.name}){hint}; "
                f"what was under way had {self.site.config.revoke_timeout:g} s more to end",
                peer=at.peer,
                transfer=self.id,
                blocks=self.listed,
            )
        )

    def _stop(self, error: Cause) -> None:
        if self._error is not None or self.done:
            return
        self._fail(error)
        if self._asked:
            self.end_if_over()
        else:  # nobody was asked for anything yet
            self._end_failed(error)
            if self._task is not None:  # else it is in its first step, and comes to its end by itself
                self._task.cancel()

    def _fail(self, error: Cause, failed: Receiver | None = None) -> None:
        """It has a reason to end: stop what still runs; what is not quiet within `revoke_timeout` is in doubt. Once."""
        self._error, self._standing = error, self.stands(failed)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.site.call_at(self.site.now() + self.site.config.revoke_timeout, self.abandon)
        # of damage only the rank that sent it is told, and by now has been
        code = Code.CANCELLED if isinstance(error, asyncio.CancelledError | IntegrityError) else error.code
        failure = Failure(Status.CANCELLED, code, str(error) or "the caller cancelled")
        for receiver in self.receivers:
            if not receiver.blocks_safe:
                receiver.stop(failure)

    def stands(self, failed: Receiver | None = None) -> Standing:
        """Where it stands, as one rank's part has failed if so told.

        Before any rank was asked, it waits for those that are being connected.
        """
        parts, order = self.receivers, list(Step)
        if not parts:
            connecting = set(self.role.peers.connecting)
            where = ",".join(where for where in self.ticket.rank_endpoints if where in connecting)
            return Standing(Step.CONNECTING, where)
        behind = [failed] if failed is not None else [part for part in parts if not part.protocol.ended] or parts
        return Standing(
            min((part.step for part in behind), key=order.index),
            ",".join(part.peer.name for part in behind),
            sum(part.tally.bytes for part in parts),
            sum(part.protocol.chunks_done for part in parts),
            sum(part.protocol.chunks for part in parts),
        )

    def abandon(self) -> None:
        """It has a reason to end, and nobody is waited for any longer."""
        silent = Failure(Status.FAILED, Code.PEER_LOST, f"no answer within {self.site.config.revoke_timeout:g} s")
        for receiver in self.receivers:
            if not receiver.blocks_safe:
                receiver.on_link_lost(silent)
        if self._error is not None:
            self._end_failed(self._error)

    # --- what becomes of its request, and of what it leaves in doubt

    @lazy
    def _settled(self) -> Settling:
        """Whether blocks that were in doubt are not."""
        return Settling()

    @property
    def going_on(self) -> bool:
        """Whether it has not ended, and has no reason to yet."""
        return not self.done and self._error is None

    @property
    def doubtful(self) -> bool:
        """Whether something of it is under way or in doubt: the caller's blocks, or staging memory."""
        return False in [receiver.finished for receiver in self.receivers]

    def _release_request(self) -> None:
        if self.unwanted:
            self.role.release_request(self.ticket, self.links)

    def on_doubt_ended(self) -> None:
        """Evidence came in, if they were in doubt: no peer can write the blocks any more."""
        if not (self.memory_safe or self._settled.done):
            self.site.custody.settle(self.id)
            self._release_request()
            self.memory_safe = True
            self._settled.end()

    def leave_in_doubt(self) -> None:
        """The worker is closed: there will be no evidence any more. The memory is left to the process's end."""
        self._settled.end(
            ClosedError(f"the worker was closed while blocks of {self.id} were in doubt: never reuse them")
        )
