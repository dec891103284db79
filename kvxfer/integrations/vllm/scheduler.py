"""The connector in the scheduler's process: tickets and cards only, neither torch nor NIXL.

It keeps one entry for each request that comes from a prefill engine (`_Wanted`) and one for each that goes to a decode
engine (`_Produced`), and collects orders until vLLM asks for those of the next step. With async scheduling vLLM asks
for step n + 1 before the workers have answered step n; nothing here counts on an answer but `update_connector_output`.
"""

import math
import secrets
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from time import monotonic
from typing import Any, Final

from kvxfer.errors import RequestError, TicketError
from kvxfer.integrations.vllm.caches import BlockGroup
from kvxfer.integrations.vllm.orders import Blocks, Load, Membership, OfferStep, Orders
from kvxfer.names import MAX_REQUEST
from kvxfer.telemetry import logger
from kvxfer.tickets import KEY_BYTES, EngineCard, Issuer, Ticket

__all__ = ["TICKET", "SchedulerSide"]

TICKET: Final = "ticket"
"""Where `kv_transfer_params` hold the ticket."""
_TOKENS: Final = "remote_num_tokens"
_NAME: Final = "transfer_id"
_DIGEST: Final = "remote_tokens_digest"
"""Of what tokens the prompt must begin with: routers mistake tickets, and a client's text may have become others."""
_ROWS_AT_ONCE: Final = 1024
"""Embeddings that are copied at a time to tell them from others."""
_COMPLETE: Final = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"})
"""Names of vLLM's statuses of a request whose cache is worth handing over."""

_log: Final = logger("kvxfer.vllm")


class _Stage(Enum):
    """How far a request that comes from elsewhere has got."""

    WAITING = auto()  # it has no blocks yet
    LOADING = auto()  # workers fetch it
    OVER = auto()  # fetched, failed or declined: its ticket is spent


@dataclass(slots=True)
class _Wanted:
    """A request of which another engine has computed something."""

    ticket: dict[str, Any]
    tokens: int
    in_step: bool  # the forward pass that needs it loads it
    until: float  # when it has waited for blocks for too long, by this process's clock
    stage: _Stage = _Stage.WAITING


@dataclass(slots=True)
class _Produced:
    """A request whose prompt is computed here for a decode engine."""

    name: str
    prompt_tokens: int
    attempt: int = 0
    offered: int = 0
    blocks: Counter[str] = field(default_factory=Counter[str])  # that it has got so far, by group
    # those of state, which is the prompt's only once all of it is computed: before that nobody may read them
    states: dict[str, list[int]] = field(default_factory=dict[str, list[int]])


class SchedulerSide:
    """What vLLM's scheduler asks of the connector. Requests and outputs are vLLM's; see there for when it does."""

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        *,
        cached: bool,  # vLLM takes blocks that were loaded for a cache of prefixes
        layerwise: bool,  # loads run inside of the forward pass that needs them, layer by layer
        key: bytes | None = None,  # the engine's, if somebody else makes tickets too
        answers: bool = False,  # a decode engine offers what it holds of a request that ends, for the next turn
        named: bool = True,  # names tell what images show; where no cache wants a hash of that, they are numbered
        # seconds that a request waits for blocks to load into. Then it is computed here: its prefill engine may itself
        # wait for blocks that are on offer here
        patience: float = math.inf,
    ) -> None:
        self._groups: Final = groups
        self._windowed: Final = any(group.window is not None for group in groups)
        self._stateful: Final = any(group.state for group in groups)
        self._cached: Final = cached
        self._layerwise, self._page = layerwise, 1
        self._answers, self._patience = answers, patience
        self._named: Final = named
        self._key: Final = secrets.token_bytes(KEY_BYTES) if key is None else key
        self._foretold: Final = key is not None  # a ticket may be there before its request
        self._issuer: Issuer | None = None
        self._wanted: Final[dict[str, _Wanted]] = {}
        self._produced: Final[dict[str, _Produced]] = {}
        self._names: Final[dict[str, str]] = {}  # of what is on offer, or will be; the request of each
        self._placed: Final[
            list[tuple[Any, _Wanted, Sequence[list[int]], int]]
        ] = []  # requests that got blocks to load into
        self._orders = Orders()

    def collect(self, cards: Iterable[Mapping[str, Any]], *, page: int = 0) -> None:
        """The workers' cards, again after they have slept: from now on tickets are of this engine.

        `page` is the tokens of a page of an indexer, if layers of any worker have one. It goes whole, so all workers
        offer and load the last one whole; and an indexer chooses before vLLM waits for its layer, so no load may run
        inside of a forward pass.

        Raises:
            TicketError: If a rank is missing.
        """
        self._page = page or 1
        if page and self._layerwise:
            self._layerwise = False
            _log.warning("layerwise_refused", reason="layers have an indexer: loads are whole, offers are by layer")
        card = EngineCard.of(cards)
        self._issuer = Issuer(card, self._key)
        self._orders.join = Membership(card.to_dict(), self._key)

    # --- a request comes

    def on_new_request(self, request: Any) -> None:
        """Keep in mind what is to be fetched, and what is to be offered."""
        params: Mapping[str, Any] = request.kv_transfer_params or {}
        ticket, tokens, produces = params.get(TICKET), params.get(_TOKENS), params.get("do_remote_decode")
        loads = params.get("do_remote_prefill") or (produces and ticket)  # the latter: what a decode engine holds
        if produces:
            self._produce(request, params.get(_NAME))
        if not loads:
            return
        try:
            Ticket.parse(ticket or {})
            if not isinstance(tokens, int) or tokens < 1:
                raise TicketError(f"{_TOKENS} must say how many tokens were prefilled, not {tokens!r:.64}")
        except TicketError as error:  # computed here, as if nobody had prefilled it
            _log.warning("ticket_refused", request=request.request_id, error=str(error))
            return
        data: dict[str, Any] = dict(ticket or {})
        digest = params.get(_DIGEST)
        if (produces or digest is not None) and digest not in self._digests(request, tokens, whole=bool(produces)):
            why = "other tokens or embeddings were computed, or with other images or another adapter"
            _log.warning("ticket_refused", request=request.request_id, error=why)
            self._orders.declines.append((request.request_id, data))
            return
        in_step = self._layerwise and not produces  # nothing is on offer that a load may still spoil
        # a forward pass computes at least one token, and a load by layers is part of one; after a load of the whole
        # prompt vLLM computes the last token again, for which windows have let go of the first that it sees
        most: int = request.num_prompt_tokens - int(in_step or self._windowed)
        # state is that of all tokens; and what can be loaded of a window begins before what is on offer of it
        if (self._stateful and tokens > most) or (produces and self._windowed):
            self._orders.declines.append((request.request_id, data))
            return
        until = monotonic() + self._patience
        self._wanted[request.request_id] = _Wanted(data, min(tokens, most), in_step, until)
        self._orders.claims[request.request_id] = data

    def _produce(self, request: Any, name: Any) -> None:
        """Offer what will be computed; not under the name of another request, as its ticket would be that one's."""
        if self._windowed and _is_embedded(request):
            _log.warning("offer_refused", request=request.request_id, error="of a prompt of embeddings no token can go")
            return
        named = name if isinstance(name, str) and name else request.request_id
        long = named is name and len(named) > MAX_REQUEST
        if long or self._names.setdefault(named, request.request_id) != request.request_id:
            why = f"has more than {MAX_REQUEST} characters" if long else "is in use"
            _log.warning("transfer_id_refused", request=request.request_id, error=f"{_NAME} {named!r:.256} {why}")
            return
        if self._windowed:
            _shorten(request)
        self._produced[request.request_id] = _Produced(named, request.num_prompt_tokens)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that a fetch would add to those held here, and whether the request waits for it. Changes nothing."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.stage is not _Stage.WAITING or wanted.tokens <= num_computed_tokens:
            return 0, False
        return wanted.tokens - num_computed_tokens, not wanted.in_step

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks. Comes again when it runs after a load, which changes nothing any more."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.stage is not _Stage.WAITING:
            return
        if num_external_tokens:
            wanted.stage = _Stage.LOADING
            self._placed.append((request, wanted, blocks.get_block_ids(), num_external_tokens))
        else:
            wanted.stage = _Stage.OVER
            self._orders.declines.append((request.request_id, wanted.ticket))

    # --- a step

    @property
    def pending(self) -> bool:
        """Whether the workers must hear something though no request is there; never while they sleep."""
        return self._orders.join is not None

    def build_connector_meta(self, output: Any) -> Orders:
        """The orders of this step; those of the next begin."""
        orders = self._orders
        for placed in self._placed:
            orders.loads.append(self._load(*placed))
        self._placed.clear()
        self._decline_overdue(orders)
        for request in output.preempted_req_ids or ():
            self._preempt(request, orders)
        scheduled: Mapping[str, int] = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._advance(new.req_id, new.block_ids, new.num_computed_tokens + scheduled[new.req_id], orders)
        cached = output.scheduled_cached_reqs
        for request, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._advance(request, ids, computed + scheduled[request], orders)
        self._orders = Orders()
        return orders

    def _decline_overdue(self, orders: Orders) -> None:
        """Load no longer what has waited for blocks for too long: requests come in the order of that."""
        now = monotonic()
        for request, wanted in self._wanted.items():
            if wanted.until > now:
                return
            if wanted.stage is _Stage.WAITING:
                wanted.stage = _Stage.OVER
                orders.declines.append((request, wanted.ticket))
                _log.warning("load_declined", request=request, duration=self._patience)

    def _load(self, request: Any, wanted: _Wanted, block_ids: Sequence[list[int]], external: int) -> Load:
        # vLLM counts what is loaded as computed once it has placed the request, in both kinds of loads
        stop: int = request.num_computed_tokens
        start = stop - external
        if start < 0:
            raise RequestError(
                f"request {request.request_id!r} is to load {external} tokens, but only {stop} count as computed: this "
                "release of vLLM calls its connectors in another order; see docs/vllm.md for those that are known"
            )
        blocks: Blocks = {}
        for group in self._groups:
            # of a block that is cached others may read what this request does not
            first, size = max(start, group.live(stop, whole=self._cached)), group.block_tokens
            blocks[group.name] = (block_ids[group.index][first // size : -(-stop // size)], first)
        if wanted.in_step:
            wanted.stage = _Stage.OVER  # nothing is reported of it but failed blocks
        return Load(request.request_id, wanted.ticket, blocks, start, self._filled(stop), wanted.in_step)

    def _filled(self, tokens: int) -> int:
        """Where the last page of so many tokens ends: its blocks are the request's own until then."""
        return -(-tokens // self._page) * self._page

    def _preempt(self, request: str, orders: Orders) -> None:
        produced = self._produced.get(request)
        if request in orders.withdraws:  # it ended since: a reset of the cache preempts between two steps
            orders.preempted.append(request)
        elif produced is not None and produced.offered:
            orders.preempted.append(request)
            produced.attempt, produced.offered = produced.attempt + 1, 0
            produced.blocks.clear()
            produced.states.clear()

    def _advance(self, request: str, ids: Any, computed: int, orders: Orders) -> None:
        """Offer what this step computes of a prompt."""
        produced = self._produced.get(request)
        if produced is None or produced.offered == produced.prompt_tokens:
            return
        stop = min(computed, produced.prompt_tokens)
        last = stop == produced.prompt_tokens
        blocks: Blocks = {}
        for group in self._groups:
            fresh: list[int] = list(ids[group.index]) if ids else []
            # what is before it goes while the prompt is computed
            kept = group.live(produced.prompt_tokens, whole=True)
            gone = max(0, kept // group.block_tokens - produced.blocks[group.name])
            produced.blocks[group.name] += len(fresh)
            given = fresh[gone:]
            if group.state:
                states = produced.states.setdefault(group.name, [])
                states += given
                given = states if last else []
            blocks[group.name] = (given, 0 if produced.offered else kept)
        offered = self._filled(stop) if last else stop
        orders.steps.append(
            OfferStep(request, produced.name, produced.attempt, blocks, produced.offered, offered, last)
        )
        produced.offered = stop

    # --- what became of it

    def update_connector_output(self, output: Any) -> None:
        """All workers are done with these loads, well or not, and with these offers."""
        for request in output.finished_recving or ():
            wanted = self._wanted.get(request)
            if wanted is not None:
                wanted.stage = _Stage.OVER
        over: set[str] = set(output.finished_sending or ())
        if over:
            for name in [name for name, request in self._names.items() if request in over]:
                del self._names[name]

    def request_finished(self, request: Any, ids: Sequence[list[int]] = ()) -> tuple[bool, dict[str, Any] | None]:
        """A request ends that has these blocks: hand out its ticket, or take back what was begun.

        Returns:
            Whether the workers will say when its blocks may be used again, and what its client gets for the decode
            engine, or for the next turn.
        """
        wanted = self._wanted.pop(request.request_id, None)
        if wanted is not None and wanted.stage is _Stage.WAITING:
            self._orders.declines.append((request.request_id, wanted.ticket))
        elif wanted is not None and wanted.stage is _Stage.LOADING:
            self._orders.cancels.append(request.request_id)
        produced = self._produced.pop(request.request_id, None)
        if produced is None:
            answers = self._answers and wanted is not None and wanted.stage is _Stage.OVER
            return self._answer(request, ids) if answers else (False, None)
        if not produced.offered:
            del self._names[produced.name]
            if self._foretold and not produced.attempt:
                self._orders.refusals.append(produced.name)
            return False, None
        params = self._params(request, produced)
        if params is None:
            self._orders.withdraws.append(request.request_id)
        return True, params

    def _answer(self, request: Any, ids: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Offer what a decode engine has of a request: all but the last token that it sampled."""
        name, tokens = request.request_id, min(request.num_computed_tokens, len(request.all_token_ids) - 1)
        # of embeddings the next turn has more, which are then others
        if name in self._names or _is_embedded(request) or not self._tells(request, tokens):
            return False, None
        params = self._params(request, _Produced(name, tokens, offered=tokens), back=True)
        if params is None:
            return False, None
        self._names[name] = name
        blocks: Blocks = {
            group.name: (list(ids[group.index][: -(-tokens // group.block_tokens)]), 0) for group in self._groups
        }
        self._orders.steps.append(OfferStep(name, name, 0, blocks, 0, self._filled(tokens), last=True, computed=True))
        return True, params

    def _params(self, request: Any, produced: _Produced, *, back: bool = False) -> dict[str, Any] | None:
        """What the decode engine needs, or a prefill engine later on (`back`), if there is something to fetch."""
        if self._issuer is None or produced.offered < produced.prompt_tokens or request.status.name not in _COMPLETE:
            return None
        try:
            ticket = self._issuer.ticket(produced.name, attempt=produced.attempt)
        except TicketError as error:
            _log.warning("ticket_refused", request=request.request_id, error=str(error))
            return None
        tokens = produced.prompt_tokens
        digest = _digest(request, tokens, named=self._named)
        params = {"do_remote_prefill": not back, "do_remote_decode": back, TICKET: ticket}
        return params | {_TOKENS: tokens, _DIGEST: digest}

    def _digests(self, request: Any, tokens: int, *, whole: bool) -> list[str]:
        """What an engine may have said that has computed them; `whole`: only if that tells what images show."""
        kinds = [True] * self._tells(request, tokens) + [False] * bool(_inputs(request, tokens) and not whole)
        return [_digest(request, tokens, named=named) for named in kinds]

    def _tells(self, request: Any, tokens: int) -> bool:
        """Whether a digest made here is of everything that these tokens stand for."""
        return self._named or not _inputs(request, tokens)


def _digest(request: Any, tokens: int, *, named: bool) -> str:
    """What tells the first tokens of a request, and what they stand for, from others.

    If it is not `named` what images show, it is only told where they are.
    """
    told = blake2b(array("q", request.all_token_ids[:tokens]).tobytes(), digest_size=16)
    if request.prompt_embeds is not None:
        told.update(repr(_rows(request, tokens)).encode())
    if inputs := _inputs(request, tokens):
        told.update(repr([(one.mm_position.offset, one.identifier if named else "") for one in inputs]).encode())
    adapter = request.lora_request
    if adapter is not None:  # another one may come under the name of one that has gone: vLLM tells both by their paths
        told.update(repr((adapter.lora_name, adapter.lora_path)).encode())
    return told.hexdigest()


def _inputs(request: Any, tokens: int) -> list[Any]:
    """Images and the like that these tokens show something of."""
    return [one for one in request.mm_features if one.mm_position.offset < tokens]


def _rows(request: Any, tokens: int) -> tuple[bytes, list[bool] | None]:
    """What tells embeddings from others, and which tokens have them instead of an id; None: all."""
    told, has_id = blake2b(), request.prompt_is_token_ids
    for rows in request.prompt_embeds[:tokens].detach().split(_ROWS_AT_ONCE):  # of a layer's they may want gradients
        told.update(rows.float().contiguous().numpy())  # exact; of what models compute in numpy does not know all
    return told.digest(), None if has_id is None else has_id[:tokens]


def _is_embedded(request: Any) -> bool:
    """Whether a prompt, or a part of one whose tokens are then made up, is given as embeddings."""
    return request.prompt_token_ids is None or request.prompt_embeds is not None


def _shorten(request: Any) -> None:
    """Take the last token off a prompt, as the decode engine computes that one itself.

    vLLM lets go of what the next token does not see: with all tokens computed, of what the last one sees. State is then
    that of all tokens, too, and a token more would make it another one.
    """
    if request.num_prompt_tokens > 1:
        del request.prompt_token_ids[-1:], request._all_token_ids[-1:]  # noqa: SLF001 - as vLLM's own connectors do
        request.num_prompt_tokens -= 1
    request.max_tokens = 1  # what follows is nobody's answer
