"""Plans between this rank and its peers: made once a pair and kept, bound to requests, cut into chunks."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import add
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvxfer.config import Config
from kvxfer.copy.port import MEMORIES, Descriptors
from kvxfer.copy.tables import Kind, SumVariant, Variant, sum_variants
from kvxfer.errors import BlocksError, Code, GeometryError, MismatchError, ProtocolError, RefusedError
from kvxfer.geometry import (
    BlockLists,
    Blocks,
    CacheGeometry,
    ChunkGrid,
    ChunkPlan,
    Interleave,
    PairPlan,
    Pieces,
    Selection,
    Span,
    SumPlan,
    TensorSpec,
    TransferPlan,
    check_spans,
    check_tokens,
    common,
    differences,
    normalise_blocks,
    resolve,
)
from kvxfer.names import MAX_STRIDE, lazy
from kvxfer.plans.routes import Choice, RouteSupport
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import MAX_CHUNKS, Route, pack_f32, pack_u32, unpack_f32, unpack_u32
from kvxfer.protocol.session import PeerInfo

if TYPE_CHECKING:
    from kvxfer.copy.template import Batch, Cut

__all__ = [
    "LISTED",
    "SMALL_PLAN",
    "Agreed",
    "BoundPlan",
    "PairPlans",
    "block_pieces",
    "check_cover",
    "choose_and_cut",
    "decode_spans",
    "encode_spans",
    "fit",
    "geometry_from_wire",
    "geometry_to_wire",
    "in_place_bytes",
    "offered_blocks",
    "selection_from_wire",
    "selection_to_wire",
    "staging_pieces",
    "usual_chunks",
    "wanted_blocks",
]

_MOST_BATCH: Final = 256  # chunks: the mover looks no further ahead
SMALL_PLAN: Final = 32_768
"""Table rows up to which a plan is made on the loop, where so many take 0.5 ms; larger ones go to a worker thread."""

# --- block lists as callers give them

I64: TypeAlias = NDArray[np.int64]

_MAX_IDS: Final = 4_000_000
"""Block ids of a request, of all groups together: one frame names them, 4 bytes each, beside all else that it says."""


def offered_blocks(blocks: Blocks, geometry: CacheGeometry) -> BlockLists:
    """Block lists of an offer in normal form, copied and checked.

    Raises:
        BlocksError: If ids are malformed or out of range.
    """
    spans = normalise_blocks(blocks, geometry)
    check_spans(spans, geometry, receiving=False)
    return spans


def wanted_blocks(blocks: Blocks, geometry: CacheGeometry, tokens: range) -> tuple[BlockLists, dict[str, I64]]:
    """Destination blocks of a fetch, checked as far as that needs no peer.

    Returns:
        All in normal form, and those that the fetch writes, by group.

    Raises:
        BlocksError: If ids are malformed, out of range or repeated, or do not cover the tokens.
        TokensError: If the tokens are no range that a fetch can have.
    """
    check_tokens(tokens, may_be_empty=True)
    spans = normalise_blocks(blocks, geometry)
    check_spans(spans, geometry, receiving=True)
    return spans, check_cover(spans, geometry, tokens)


def check_cover(spans: BlockLists, geometry: CacheGeometry, tokens: range, *, complete: bool = True) -> dict[str, I64]:
    """Check that block lists reach up to a range's end, as the planner will, with one slot for state.

    Args:
        spans: In normal form.
        geometry: What this rank holds.
        tokens: The range.
        complete: Whether nothing will be added. A slot of state may come last.

    Returns:
        The blocks that hold the range, by group.

    Raises:
        BlocksError: Naming the group and both numbers; also if there are more ids than peers can be told of.
    """
    sides, asked, total = geometry.sides, len(tokens) > 0, 0
    found: dict[str, I64] = {}
    for group, span in spans.items():
        side, ids, first = sides[group], np.asarray(span.ids, np.int64), span.first_token
        count, size, start, stop = len(ids), side.id_tokens, tokens.start, tokens.stop
        total += count
        if total > _MAX_IDS:
            raise BlocksError(
                f"with group {group!r} {total} block ids are listed, and {_MAX_IDS} are the most of a request: give "
                "those that hold its tokens, or make blocks larger"
            )
        if side.is_state:
            if count > 1 or (complete and not count):
                raise BlocksError(f"group {group!r} is state, which has one slot for a request: {count} were given")
            found[group] = ids
            continue
        if side.of > 1:  # from here on those of this rank's turns are counted
            first, start, stop = map(side.before, (first, start, stop))
        origin, needed = first // size, stop - stop % side.tokens_per_row
        cover = (origin + count) * size
        if cover < needed and max(first, start) < needed:
            whose = " of this rank's turns" if side.of > 1 else ""
            raise BlocksError(
                f"group {group!r}: {count} blocks of {size} tokens reach up to token {cover}{whose}, "
                f"but {needed} are needed; the list begins at token {span.first_token}, which a kvxfer.Span can say"
            )
        begin = max(0, start // size - origin)
        end = max(0, -(-stop // size) - origin) if asked else begin
        found[group] = ids[begin:end]
    return found


# --- to and from the wire

_NO_SPANS: Final[BlockLists] = {}


def geometry_to_wire(geometry: CacheGeometry, *, with_addresses: bool) -> list[wire.TensorFrame]:
    """Describe this rank to a peer; base addresses only if it is trusted with them."""
    kind = "VRAM" if geometry.kind == "cuda" else "DRAM"
    return [
        wire.TensorFrame(
            group=spec.group,
            part=spec.part,
            kv="".join(spec.kv),
            axes=spec.axes,
            shape=list(spec.shape),
            strides=list(spec.strides),
            layers=pack_u32(spec.layers),
            head_start=spec.heads.start,
            head_stop=spec.heads.stop,
            dtype=spec.dtype,
            item_bytes=spec.item_bytes,
            base=spec.base if with_addresses else 0,
            block_ratio=spec.block_ratio,
            tokens_per_row=spec.tokens_per_row,
            interleave_rank=spec.tokens.rank,
            interleave_of=spec.tokens.of,
            interleave_chunk=spec.tokens.chunk,
            null_block=-1 if spec.null_block is None else spec.null_block,
            kind=kind,
            device=spec.device,
            scale=pack_f32(spec.scale),
        )
        for spec in geometry.tensors
    ]


def geometry_from_wire(frames: Sequence[wire.TensorFrame]) -> CacheGeometry:
    """Read a peer's description; the same checks apply as to one's own tensors.

    Raises:
        GeometryError: If it contradicts itself.
        ProtocolError: If numbers are out of every sensible range.
    """
    specs: list[TensorSpec] = []
    interleave = cache(Interleave)
    for frame in frames:
        strides = frame.strides
        if (strides and not 0 <= min(strides) <= max(strides) < MAX_STRIDE) or not 0 < frame.item_bytes <= 64:
            raise ProtocolError(f"a peer's tensor has strides {frame.strides} and items of {frame.item_bytes} bytes")
        specs.append(
            TensorSpec(
                group=frame.group,
                part=frame.part,
                kv=tuple(frame.kv) or ("",),
                layers=tuple(unpack_u32(frame.layers)),
                heads=range(frame.head_start, frame.head_stop),
                axes=frame.axes,
                shape=tuple(frame.shape),
                strides=tuple(frame.strides),
                dtype=frame.dtype,
                item_bytes=frame.item_bytes,
                base=frame.base,
                kind="cuda" if frame.kind == "VRAM" else "cpu",
                device=frame.device,
                block_ratio=frame.block_ratio,
                tokens_per_row=frame.tokens_per_row,
                tokens=interleave(frame.interleave_rank, frame.interleave_of, max(frame.interleave_chunk, 1)),
                null_block=None if frame.null_block < 0 else frame.null_block,
                scale=tuple(unpack_f32(frame.scale)) if frame.scale else (),
            )
        )
    return CacheGeometry(tuple(specs))


def selection_to_wire(selection: Selection) -> wire.Selection:
    """A selection as `Fetch` carries it."""
    return wire.Selection(
        selection.group,
        selection.part,
        selection.kv,
        pack_u32(selection.layers),
        selection.head_start,
        selection.head_stop,
    )


def selection_from_wire(selection: wire.Selection) -> Selection:
    """Inverse of `selection_to_wire`; whether both sides hold it is checked when the pair is planned."""
    layers = tuple(unpack_u32(selection.layers))
    return Selection(selection.group, selection.part, selection.kv, layers, selection.head_start, selection.head_stop)


def encode_spans(spans: BlockLists, groups: Iterable[str], *, said: BlockLists | None = None) -> list[wire.Span]:
    """Block lists of these groups as they travel; of those in `said` only what follows them, if anything does."""
    if said is None:
        return [wire.Span(group, spans[group].first_token, spans[group].packed) for group in groups]
    more = {group: Span(spans[group].ids[len(said[group].ids) :]).packed for group in groups}
    return [wire.Span(group, spans[group].first_token, packed) for group, packed in more.items() if packed]


def decode_spans(spans: Sequence[wire.Span], *, follow: BlockLists = _NO_SPANS) -> dict[str, Span]:
    """Inverse of `encode_spans`; ids are checked when the plan is bound. Those of a group in `follow` come behind them.

    Raises:
        ProtocolError: If a group is there twice, or a list grows beyond what a request can have.
    """
    decoded: dict[str, Span] = {}
    for span in spans:
        made = decoded[span.group] = Span(np.frombuffer(span.ids, "<u4").astype(np.int64), span.first_token)
        vars(made)["packed"] = span.ids  # as they came
        if (known := follow.get(span.group)) is not None:
            if len(made.ids) + len(known.ids) > _MAX_IDS:
                raise ProtocolError(f"the block list of group {span.group!r} has grown beyond {_MAX_IDS} ids")
            joined = np.concatenate([np.asarray(known.ids), np.asarray(made.ids)])
            decoded[span.group] = Span(joined, known.first_token)
    if len(decoded) != len(spans):
        raise ProtocolError("a group has two block lists in one frame")
    return {**follow, **decoded}


# --- plans

LISTED: Final = frozenset({Route.DIRECT, Route.PULL})
"""Routes whose pieces are listed for the transport."""
_LISTED_PIECES: Final = 1 << 16
"""Pieces of a chunk where they are listed: lists of more need fresh memory each time, and of fewer a chunk by itself
costs more than they do."""
_ROWS_A_TENSOR: Final = 1024
"""To share and plan a tensor, or a layer of one, takes about as long as to make so many rows of a table."""
_ROWS_A_KNOWN_LAYER: Final = 32
"""To answer a request of a known pair takes so long for each layer that was asked for."""
_KEPT_PAIRS: Final = 512
_KEPT_A_PEER: Final = 4
"""Plans that are kept for each peer that is here, if that is more: so many are in use, one or two in each direction."""


class PairPlans:
    """Geometries of peers and plans with them, made once a pair."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self._own: Final = geometry
        self._geometries: dict[bytes, CacheGeometry] = {}
        self._shares: OrderedDict[tuple[bytes | None, ...], list[PairPlan | None]] = OrderedDict()
        self._pairs: OrderedDict[tuple[bytes, bool, tuple[Selection, ...]], PairPlan] = OrderedDict()
        self._agreed: dict[tuple[bytes, bool], Agreed] = {}  # by peer, and whether this rank sends
        # what a peer that is known asked for last, in how many layers
        self._asked: dict[bytes, tuple[Sequence[wire.Selection], PairPlan, int]] = {}

    @property
    def _kept(self) -> int:
        """How many plans are kept; with fewer than there are peers, each would be made anew for every transfer."""
        return max(_KEPT_PAIRS, _KEPT_A_PEER * len(self._geometries))

    def examine(self, peer: PeerInfo, *, sending: bool, convert: bool) -> "Agreed":
        """Read a new peer's geometry, and plan the copy of all that both sides hold in one direction.

        So what cannot be copied is refused here, by the same code that would plan the transfers, and on both sides.
        Nothing is noted yet: for caches of many tensors this belongs into a thread.

        Args:
            peer: The other side.
            sending: Whether it opened the stream, to fetch from this rank.
            convert: Whether the decode rank asked for conversion.

        Raises:
            MismatchError: If the peer's description contradicts itself, or something cannot be copied. It names each
                difference with both values.
            ProtocolError: If it cannot be decoded, or numbers are out of every sensible range.
        """
        try:
            geometry, known = geometry_from_wire(peer.body.tensors), self._geometries.get(peer.identity.incarnation)
            if known is not None and known.tensors == geometry.tensors:
                geometry = known
            src, dst = (self._own, geometry) if sending else (geometry, self._own)
            self._agree(peer, src, dst, sending=sending, convert=convert)
            before = self._agreed.get((peer.identity.incarnation, sending))
            if before is not None and before.geometry is geometry:
                return before
            selections = common(src, dst)
            pair = _planned(src, dst, selections, convert=convert) if selections else None
        except GeometryError as error:
            raise MismatchError(
                f"the caches of {peer.name} and of this rank cannot be copied: {error}", peer=peer.name
            ) from error
        _ = geometry.addressed  # found out once
        return Agreed(sending, geometry, pair)

    def add_peer(self, peer: PeerInfo, agreed: "Agreed") -> None:
        """Take note of what was found; plans of the same incarnation that were made of something else are no good."""
        incarnation, other = peer.identity.incarnation, (peer.identity.incarnation, not agreed.sending)
        if self._geometries.get(incarnation) is not agreed.geometry:
            self._drop(incarnation)
            # of streams in both directions that were opened at once, each was looked at before the other was noted
            if other in self._agreed and self._agreed[other].geometry.tensors != agreed.geometry.tensors:
                del self._agreed[other]
        self._geometries[incarnation] = agreed.geometry
        self._agreed[incarnation, agreed.sending] = agreed
        if agreed.pair is not None:
            self._keep((incarnation, agreed.sending, agreed.pair.selections), agreed.pair)

    def converts(self, peer: PeerInfo, *, sending: bool) -> bool:
        """Whether copies in this direction convert: agreed upon, and needed."""
        whole = self._whole(peer, sending=sending)
        return whole is not None and whole.converts

    def chunk_fits(self, peer: PeerInfo, room_bytes: int, *, sending: bool) -> bool:
        """Whether the smallest chunk between this rank and a peer has room in staging at both, with so much here."""
        least = self.least_chunk_bytes(peer, sending=sending)
        return least <= min(room_bytes, peer.body.max_chunk_bytes or room_bytes)

    @staticmethod
    def _agree(peer: PeerInfo, src: CacheGeometry, dst: CacheGeometry, *, sending: bool, convert: bool) -> None:
        """Name everything in which what both sides hold differs so that it cannot be copied."""
        found = [(spec.name, unlike) for spec, unlike in differences(src, dst, convert=convert)]
        if found:
            fields = {
                f"{name}: {unlike.what}": (unlike.src, unlike.dst) if sending else (unlike.dst, unlike.src)
                for name, unlike in found
            }
            name, unlike = found[0]
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise MismatchError(
                f"the caches of {peer.name} and of this rank cannot be copied: {name}: {unlike}{more}",
                peer=peer.name,
                fields=fields,
            )

    def forget(self, peer: PeerInfo) -> None:
        """The peer is gone."""
        key = peer.identity.incarnation
        self._geometries.pop(key, None)
        for sending in (True, False):
            self._agreed.pop((key, sending), None)
        self._drop(key)

    def _drop(self, incarnation: bytes) -> None:
        """Forget plans with a peer."""
        self._asked.pop(incarnation, None)
        for pair in [pair for pair in list(self._pairs) if pair[0] == incarnation]:  # a copy: threads plan meanwhile
            self._pairs.pop(pair, None)
        for ranks in [ranks for ranks in list(self._shares) if incarnation in ranks]:
            self._shares.pop(ranks, None)

    def knows(self, peer: PeerInfo) -> bool:
        """Whether it was met, and is not forgotten."""
        return peer.identity.incarnation in self._geometries

    def geometry(self, peer: PeerInfo) -> CacheGeometry:
        """What a peer holds. Of one that is gone it is read again, and not kept: nobody would forget it."""
        found = self._geometries.get(peer.identity.incarnation)
        return geometry_from_wire(peer.body.tensors) if found is None else found

    def outgoing(self, peer: PeerInfo, selections: Sequence[wire.Selection]) -> PairPlan:
        """Look up or make the plan from this rank to a peer, and note it for `asked`."""
        pair = self.pair(peer, map(selection_from_wire, selections), sending=True)
        if self._geometries.get(peer.identity.incarnation) is pair.dst:
            self._asked[peer.identity.incarnation] = selections, pair, _layers(selections)
        return pair

    def pair(self, peer: PeerInfo, selections: Iterable[Selection], *, sending: bool) -> PairPlan:
        """The plan between this rank and a peer: of what this one sends, or of what it fetches."""
        key = (peer.identity.incarnation, sending, tuple(sorted(selections)))
        pair = self._pairs.get(key)
        if pair is None:
            theirs, convert = self.geometry(peer), self.converts(peer, sending=sending)
            src, dst = (self._own, theirs) if sending else (theirs, self._own)
            pair = _planned(src, dst, key[-1], convert=convert)
            if self._geometries.get(peer.identity.incarnation) is theirs:
                self._keep(key, pair)  # else the peer has gone meanwhile, or holds something else since
        return pair

    def shares(self, peers: Sequence[PeerInfo | None], *, rank: int) -> list[PairPlan | None]:
        """The plans of what this decode rank needs of each of these prefill ranks; None of one that has nothing of it.

        None among the ranks stands for one that was not reached. From any thread.

        Raises:
            MismatchError: If something that it needs is on none of them.
        """
        key = tuple([None if peer is None else peer.identity.incarnation for peer in peers])
        found = self._shares.get(key)
        if found is None:
            held = [(number, peer, self.geometry(peer)) for number, peer in enumerate(peers) if peer is not None]
            parts = resolve(self._own, [geometry for *_, geometry in held], rank=rank)
            whole = zip(held, parts, strict=True)
            of_rank = {number: self.pair(peer, part, sending=False) for (number, peer, _), part in whole if part}
            found = list(map(of_rank.get, range(len(peers))))
            if all(self._geometries.get(peer.identity.incarnation) is geometry for _, peer, geometry in held):
                self._shares[key] = found  # else one of them has gone, or holds something else since
                if len(self._shares) > self._kept:
                    self._shares.popitem(last=False)
        return found

    def shares_rows(self, peers: Sequence[PeerInfo | None]) -> int:
        """What `shares` costs, in rows of a table: 0 if they are known."""
        if tuple([None if peer is None else peer.identity.incarnation for peer in peers]) in self._shares:
            return 0
        held = sum(len(peer.body.tensors) for peer in peers if peer is not None)
        return _ROWS_A_TENSOR * (len(self._own.tensors) + held)

    def asked(self, peer: PeerInfo, selections: Sequence[wire.Selection]) -> tuple[PairPlan | None, int]:
        """What a peer asks for: the plan from this rank if that is what it asked for last, None if it takes `outgoing`.

        And as many rows of a table as take the time of that, and of what is made of the plan for each layer.
        """
        last = self._asked.get(peer.identity.incarnation)
        if last is not None and last[0] == selections:  # nearly always: reading them takes longer than to compare
            return last[1], _ROWS_A_KNOWN_LAYER * last[2]
        return None, _ROWS_A_TENSOR * _layers(selections)

    def least_chunk_bytes(self, peer: PeerInfo, *, sending: bool) -> int:
        """Staging that the smallest chunk between this rank and a peer needs, at the least."""
        pair = self._whole(peer, sending=sending)
        return pair.least_chunk_bytes if pair is not None else 0

    def variants(self, peer: PeerInfo, *, sending: bool, mapped: bool) -> list[Variant]:
        """What a kernel must be compiled for, for copies with a peer, what is most wanted first.

        Args:
            peer: The other side.
            sending: Whether this rank is the prefill rank.
            mapped: Whether it may also copy straight into the peer's blocks.
        """
        pair = self._whole(peer, sending=sending)
        if pair is None:
            return []
        kinds = [Kind.SCATTER] if not sending else [Kind.GATHER, Kind.COPY] if mapped else [Kind.GATHER]
        return [one for kind in kinds for one in sorted(pair.template.shapes[kind].needed, reverse=True)]

    def sum_variants(self, peer: PeerInfo, *, sending: bool) -> list[SumVariant]:
        """The same for sums."""
        pair = self._whole(peer, sending=sending)
        if pair is None:
            return []
        plan = SumPlan.at_source(pair.sample) if sending else SumPlan.at_destination(pair.sample)
        return sorted(sum_variants([plan]), reverse=True)

    def _whole(self, peer: PeerInfo, *, sending: bool) -> PairPlan | None:
        """The plan of all that both sides hold; None if that is nothing, or the peer is gone."""
        agreed = self._agreed.get((peer.identity.incarnation, sending))
        return None if agreed is None else agreed.pair

    def _keep(self, key: tuple[bytes, bool, tuple[Selection, ...]], pair: PairPlan) -> None:
        self._pairs[key] = pair
        if len(self._pairs) > self._kept:
            self._pairs.popitem(last=False)


def _layers(selections: Sequence[wire.Selection]) -> int:
    return sum(len(selection.layers) // 4 for selection in selections)  # packed: 4 bytes each


def _planned(src: CacheGeometry, dst: CacheGeometry, selections: tuple[Selection, ...], *, convert: bool) -> PairPlan:
    """A plan, with all that requests will ask of it."""
    pair = PairPlan(src, dst, selections, convert=convert)
    pair.prepare()
    pair.template = import_module("kvxfer.copy.template").Template.of(pair)  # compiled: numba is imported with it
    return pair


@dataclass(frozen=True, slots=True)
class Agreed:
    """What was found of a new peer, in one direction."""

    sending: bool  # whether this rank is the prefill rank
    geometry: CacheGeometry  # what the peer holds
    pair: PairPlan | None  # the plan of all that both sides hold; None if that is nothing


class BoundPlan:
    """The plan of an accepted transfer, which both sides make.

    Args:
        plan: What goes where.
        grid: How it is cut.
        before: The same, when less of the source was known.
    """

    def __init__(self, plan: TransferPlan, grid: ChunkGrid, before: "BoundPlan | None" = None) -> None:
        self.plan: Final = plan
        self.grid: Final = grid
        # table rows of the class that has the most
        self.rows: Final[int] = plan.most_rows if before is None else before.rows
        # contiguous runs in all, if no source block is padding
        self.pieces: Final[int] = plan.pieces if before is None else before.pieces
        # the chunks as compiled code makes them; none of a plan of which only the numbers are asked for
        fitted: Any = plan
        self.cut: Final[Cut] = plan.pair.template and fitted.cut(grid)
        self.chunk_rows: Final = -(-self.rows // grid.windows)  # about how many of the rows a chunk's plan walks over
        most = max(1, SMALL_PLAN // max(1, self.chunk_rows))
        self.at_once: Final = min(_MOST_BATCH, most)  # chunks whose tables keep nobody waiting
        self.quick: Final = max(1, min(self.at_once, most // 16))  # those that take no time
        self._carried: Final[dict[int, int]] = {}  # bytes of chunks of which tables were made
        if grid.chunks == 1:
            vars(self)["most_bytes"] = plan.staged_bytes

    @lazy
    def most_bytes(self) -> int:
        """Staging that its largest chunk takes at most, and so at least as many bytes as any carries."""
        return self.plan.largest_chunk_bytes(self.grid)

    @property
    def chunk_pieces(self) -> int:
        """About how many of the pieces are in a chunk."""
        return -(-self.pieces // self.grid.chunks)

    def grown(self, src_spans: BlockLists, covered: int) -> "BoundPlan":
        """The same, now that the source's lists reach further.

        Raises:
            BlocksError: If the ids are outside their pools, or do not reach up to `covered`.
        """
        plan = self.plan
        further = plan.pair.template.bind(src_spans, plan.dst_spans, plan.tokens, covered=covered)
        return BoundPlan(further, self.grid, self)

    def carried(self, first: int, stop: int) -> int:
        """Bytes that chunks carry which follow each other.

        Raises:
            BlocksError: If a source block is not known yet.
        """
        known, total, cut = self._carried, 0, self.cut
        if stop - first > _MOST_BATCH:  # a peer says how many there are, and have come at once
            sizes = cut.sizes[self.grid.cell(np.arange(first, stop)), 0]
            if sizes.min() >= 0:
                return int(sizes.sum())
        for number in range(first, stop):
            nbytes = known.get(number, -1)
            if nbytes < 0:
                nbytes = int(cut.sizes[self.grid.cell(number), 0])
            total += nbytes if nbytes >= 0 else self.chunk(number).bytes
        return total

    def tables(
        self,
        kind: Kind,
        chunks: range,
        addresses: Sequence[int] | None = None,
        *,
        reached: Callable[[I64], I64] | None = None,
    ) -> "Batch":
        """What copies each of these chunks: to its place, out of it, or in place.

        Args:
            kind: GATHER: source blocks into staging memory, every byte of which is written. SCATTER: staging memory
                into destination blocks. COPY: source blocks straight into destination blocks.
            chunks: Which, one behind the other.
            addresses: Where in staging memory each of them is; None in place.
            reached: Makes the regions of copies in place where this process addresses the destination differently.

        Raises:
            BlocksError: If a source block is not known yet.
            GeometryError: If a table is too large to be numbered.
        """
        addresses = [0] * len(chunks) if addresses is None else addresses
        found = self.cut.tables(kind, chunks, addresses, reached=reached)
        self._carried.update(zip(chunks, found.nbytes.tolist(), strict=True))
        return found

    def listed(self, number: int) -> Pieces:
        """Pieces of a chunk, as of `ChunkPlan`."""
        chunk = self.chunk(number)
        self._carried[number] = chunk.bytes
        return chunk.listed()

    def chunk(self, number: int) -> ChunkPlan:
        """The planner's part of it, for what needs more than tables."""
        return self.plan.chunk(self.grid, number)


def fit(
    plan: TransferPlan,
    *,
    target_bytes: int,
    limit_bytes: int | None,
    layers_per_chunk: int | None = None,
    tokens_per_chunk: int | None = None,
    listed: bool = False,
) -> BoundPlan:
    """Cut into chunks that aim at `target_bytes` and never need more than `limit_bytes` of staging, if they take any.

    Staging holds full sub-blocks, so a chunk may need more room than it carries bytes. Where pieces are `listed` for
    the transport, those that reach over layers are not cut.

    Raises:
        RefusedError: If not even one layer of one aligned token window fits.
    """
    grid = plan.pair.grid(
        plan.tokens,
        target_bytes=target_bytes if limit_bytes is None else min(target_bytes, limit_bytes),
        layers_per_chunk=layers_per_chunk,
        tokens_per_chunk=tokens_per_chunk,
        by_tokens=listed and plan.pair.joins_layers,
    )
    remedy = "raise chunk_bytes, and arena_bytes for the route staged"
    if grid.chunks > MAX_CHUNKS:
        raise RefusedError(
            f"the transfer would be cut into {grid.chunks} chunks, and {MAX_CHUNKS} are the limit: {remedy}",
            reason=Code.CHUNK_TOO_LARGE,
        )
    bound = BoundPlan(plan, grid)
    if limit_bytes is not None and bound.most_bytes > limit_bytes:
        raise RefusedError(
            f"the smallest possible chunk needs {bound.most_bytes} bytes, but {limit_bytes} are the limit: {remedy} on "
            "the side that is short of it",
            reason=Code.CHUNK_TOO_LARGE,
        )
    return bound


def choose_and_cut(
    wanted: Sequence[Route],
    support: RouteSupport,
    choose: Callable[[Sequence[Route]], Choice],
    cut: Callable[[Route], BoundPlan],
) -> tuple[Choice, BoundPlan]:
    """A route that can serve a transfer, and how the transfer is cut for it.

    Raises:
        RefusedError: If no route is left, or no chunk is small enough for any.
    """
    left_out = ""
    while True:
        choice = choose(wanted)
        try:
            bound = cut(choice.route)
        except RefusedError as error:
            wanted = [route for route in wanted if route is not choice.route]
            if error.reason is not Code.CHUNK_TOO_LARGE or support.routes.isdisjoint(wanted):
                raise
            left_out = f"{choice.route.name.lower()}: {error}"
        else:
            return (replace(choice, fallback=left_out) if left_out else choice), bound


def in_place_bytes(route: Route, plan: TransferPlan, most: int) -> int:
    """Bytes at which chunks of a route that needs no staging memory aim; `most` where nothing lists their pieces."""
    if route not in LISTED:
        return most
    return min(most, max(1, plan.nbytes * _LISTED_PIECES // max(1, plan.pieces)))


def usual_chunks(config: Config, route: Route, nbytes: int) -> int:
    """Chunks that so many bytes are about cut into, before there is a grid."""
    return max(1, -(-nbytes // (config.chunk_bytes if route is Route.STAGED else config.in_place_chunk_bytes)))


def staging_pieces(sides: Iterable[tuple[wire.MemorySpan, Sequence[int]]], sizes: Sequence[int]) -> list[Descriptors]:
    """Stretches of staging memory as a post's descriptors, of each side; they are as long at one as at the other.

    Raises:
        ProtocolError: If one lies outside the span of its side, or that is of a kind that is not known.
    """
    found: list[Descriptors] = []
    for span, addresses in sides:
        first, last = min(addresses), max(map(add, addresses, sizes))
        if first < span.address or last > span.address + span.length:
            raise ProtocolError(f"{first:#x} .. {last:#x} is outside the staging memory that was announced")
        if span.kind not in MEMORIES:
            raise ProtocolError(f"staging memory is of kind {' or '.join(MEMORIES)}, not {span.kind!r}")
        found.append(Descriptors(span.kind, span.device, np.array([*zip(addresses, sizes, strict=True)], np.int64)))
    return found


def block_pieces(geometry: CacheGeometry, addresses: I64, nbytes: I64) -> Descriptors:
    """Pieces of cache blocks as a post's descriptors."""
    kind = "VRAM" if geometry.kind == "cuda" else "DRAM"
    return Descriptors(kind, geometry.device if kind == "VRAM" else 0, np.stack([addresses, nbytes], axis=1))
