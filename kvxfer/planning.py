"""Plans between this rank and its peers: geometry to and from the wire, and pair plans made once and kept."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from kvxfer.errors import Code, ProtocolError, RefusedError
from kvxfer.fabric.port import Descriptors
from kvxfer.geometry import (
    BlockLists,
    CacheGeometry,
    ChunkGrid,
    ChunkPlan,
    CopyPlan,
    Interleave,
    PairPlan,
    Selection,
    Span,
    TensorSpec,
    TransferPlan,
    resolve,
)
from kvxfer.protocol import messages as wire
from kvxfer.protocol.messages import pack_u32, unpack_u32
from kvxfer.protocol.session import PeerInfo

__all__ = [
    "Bound",
    "PairPlans",
    "decode_spans",
    "encode_spans",
    "geometry_from_wire",
    "geometry_to_wire",
    "joined_spans",
    "selection_to_wire",
]

_KEPT_PAIRS: Final = 512
_MAX_STRIDE: Final = 1 << 47
_MAX_IDS: Final = 1 << 24


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
    for frame in frames:
        if any(not 0 <= stride < _MAX_STRIDE for stride in frame.strides) or not 0 < frame.item_bytes <= 64:
            raise ProtocolError(f"a peer's tensor has strides {frame.strides} and items of {frame.item_bytes} bytes")
        specs.append(
            TensorSpec(
                group=frame.group,
                part=frame.part,
                kv=tuple(frame.kv) or ("",),
                layers=tuple(_ids(frame.layers)),
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
                tokens=Interleave(frame.interleave_rank, frame.interleave_of, max(frame.interleave_chunk, 1)),
                null_block=None if frame.null_block < 0 else frame.null_block,
            )
        )
    return CacheGeometry(tuple(specs))


@lru_cache(maxsize=4096)
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


def encode_spans(spans: BlockLists, groups: Iterable[str], *, said: BlockLists | None = None) -> list[wire.Span]:
    """Block lists of these groups as they travel; of those in `said` only what follows them, if anything does."""
    found: list[wire.Span] = []
    for group in groups:
        first = len(said[group].ids) if said is not None else 0
        ids = np.asarray(spans[group].ids)[first:]
        if said is None or len(ids):
            found.append(wire.Span(group, spans[group].first_token, ids.astype("<u4").tobytes()))
    return found


def joined_spans(before: BlockLists, more: Sequence[wire.Span]) -> dict[str, Span]:
    """Block lists of a peer, with the ids that it says follow them.

    Raises:
        ProtocolError: If packed ids are cut, a group is there twice, or a list grows beyond what a request can have.
    """
    added = decode_spans(more)
    for group, span in added.items():
        if len(span.ids) + (len(before[group].ids) if group in before else 0) > _MAX_IDS:
            raise ProtocolError(f"the block list of group {group!r} has grown beyond {_MAX_IDS} ids")
    joined = {
        group: Span(np.concatenate([np.asarray(before[group].ids), np.asarray(span.ids)]), before[group].first_token)
        for group, span in added.items()
        if group in before
    }
    return {**before, **added, **joined}


def decode_spans(spans: Sequence[wire.Span]) -> dict[str, Span]:
    """Inverse of `encode_spans`; ids are checked when the plan is bound.

    Raises:
        ProtocolError: If packed ids are cut, or a group is there twice.
    """
    decoded = {span.group: Span(np.asarray(_ids(span.ids), np.int64), span.first_token) for span in spans}
    if len(decoded) != len(spans):
        raise ProtocolError("a group has two block lists in one frame")
    return decoded


def _ids(packed: bytes) -> Sequence[int]:
    try:
        return unpack_u32(packed)
    except ValueError as error:
        raise ProtocolError(f"packed ids of {len(packed)} bytes are cut") from error


class PairPlans:
    """Geometries of peers and plans with them, made once a pair.

    Args:
        geometry: What this rank holds.
    """

    def __init__(self, geometry: CacheGeometry) -> None:
        self._own: Final = geometry
        self._geometries: dict[bytes, CacheGeometry] = {}
        self._shares: OrderedDict[tuple[bytes | None, ...], list[tuple[Selection, ...]]] = OrderedDict()
        self._pairs: OrderedDict[tuple[bytes, bool, tuple[Selection, ...]], PairPlan] = OrderedDict()

    def meet(self, peer: PeerInfo) -> None:
        """Read a new peer's geometry.

        Raises:
            GeometryError: If it contradicts itself.
        """
        self._geometries[peer.identity.incarnation] = geometry_from_wire(peer.body.tensors)

    def forget(self, peer: PeerInfo) -> None:
        """The peer is gone."""
        key = peer.identity.incarnation
        self._geometries.pop(key, None)
        for pair in [pair for pair in list(self._pairs) if pair[0] == key]:  # a copy: threads plan meanwhile
            self._pairs.pop(pair, None)
        for ranks in [ranks for ranks in self._shares if key in ranks]:
            del self._shares[ranks]

    def geometry(self, peer: PeerInfo) -> CacheGeometry:
        """What a peer holds."""
        found = self._geometries.get(peer.identity.incarnation)
        if found is None:
            self.meet(peer)
            found = self._geometries[peer.identity.incarnation]
        return found

    def outgoing(self, peer: PeerInfo, selections: Sequence[wire.Selection]) -> PairPlan:
        """The plan from this rank to a peer."""
        chosen = tuple(
            Selection(s.group, s.part, s.kv, tuple(_ids(s.layers)), s.head_start, s.head_stop) for s in selections
        )
        return self._pair(peer, tuple(sorted(chosen)), sending=True)

    def incoming(self, peer: PeerInfo, selections: Sequence[Selection]) -> PairPlan:
        """The plan from a peer to this rank."""
        return self._pair(peer, tuple(sorted(selections)), sending=False)

    def shares(self, peers: Sequence[PeerInfo | None], *, rank: int) -> list[tuple[Selection, ...]]:
        """What this decode rank needs of each of these prefill ranks; None stands for one that was not reached.

        Raises:
            GeometryError: If something that it needs is on none of them.
        """
        key = tuple(None if peer is None else peer.identity.incarnation for peer in peers)
        found = self._shares.get(key)
        if found is None:
            present = [number for number, peer in enumerate(peers) if peer is not None]
            parts = resolve(self._own, [self.geometry(peer) for peer in peers if peer is not None], rank=rank)
            of_rank = dict(zip(present, parts, strict=True))
            found = [of_rank.get(number, ()) for number in range(len(peers))]
            self._shares[key] = found
            if len(self._shares) > _KEPT_PAIRS:
                self._shares.popitem(last=False)
        return found

    def samples(self, peer: PeerInfo, *, sending: bool) -> list[CopyPlan]:
        """Copies of the shapes that transfers with a peer will have: what a kernel must be compiled for."""
        theirs = self.geometry(peer)
        src, dst = (self._own, theirs) if sending else (theirs, self._own)
        selections = common_selections(src, dst)
        if not selections:
            return []
        pair = PairPlan(src, dst, selections)
        tokens = max(spec.id_tokens for spec in (*src.tensors, *dst.tensors)) or 1
        plan = pair.bind(_first_blocks(src, tokens), _first_blocks(dst, tokens), range(tokens))
        chunk = plan.whole
        return [chunk.gather(0)] if sending else [chunk.scatter(0)]

    def _pair(self, peer: PeerInfo, selections: tuple[Selection, ...], *, sending: bool) -> PairPlan:
        key = (peer.identity.incarnation, sending, selections)
        pair = self._pairs.get(key)
        if pair is None:
            theirs = self.geometry(peer)
            pair = PairPlan(self._own, theirs, selections) if sending else PairPlan(theirs, self._own, selections)
            self._pairs[key] = pair
            if len(self._pairs) > _KEPT_PAIRS:
                self._pairs.popitem(last=False)
        return pair


def common_selections(src: CacheGeometry, dst: CacheGeometry) -> list[Selection]:
    """Everything that both sides hold."""
    return [
        Selection(a.group, a.part, kv, layers, max(a.heads.start, b.heads.start), min(a.heads.stop, b.heads.stop))
        for a in src.tensors
        for b in dst.groups.get(a.group, ())
        if a.part == b.part and max(a.heads.start, b.heads.start) < min(a.heads.stop, b.heads.stop)
        for kv in a.kv
        if kv in b.kv and (layers := tuple(sorted(set(a.layers) & set(b.layers))))
    ]


def _first_blocks(geometry: CacheGeometry, tokens: int) -> dict[str, Span]:
    """The first blocks of every group, enough for so many tokens (as far as the pool goes)."""
    return {
        group: Span(np.arange(min(specs[0].ids, -(-tokens // specs[0].id_tokens) if specs[0].id_tokens else 1)))
        for group, specs in geometry.groups.items()
    }


@dataclass(frozen=True, slots=True)
class Bound:
    """The plan of an accepted transfer, which both sides make.

    Attributes:
        plan: What goes where.
        grid: How it is cut.
        rows: Table rows that a chunk's plan walks over, at most.
        pieces: Contiguous runs in all, if no source block is padding.
    """

    plan: TransferPlan
    grid: ChunkGrid
    rows: int
    pieces: int

    @classmethod
    def of(cls, plan: TransferPlan, grid: ChunkGrid) -> "Bound":
        """Count once what every chunk asks for."""
        return cls(plan, grid, max(map(len, plan.rows.values()), default=0), plan.outline.copy().pieces)

    def grown(self, src_spans: BlockLists, covered: int) -> "Bound":
        """The same, now that the source's lists reach further.

        Raises:
            BlocksError: If the ids are outside their pools, or do not reach up to `covered`.
        """
        plan = self.plan
        further = plan.pair.bind(src_spans, plan.dst_spans, plan.tokens, covered=covered)
        return replace(self, plan=further)

    def chunk(self, number: int) -> ChunkPlan:
        """One chunk of it."""
        return self.plan.chunk(self.grid, number)


def fit_grid(
    plan: TransferPlan,
    *,
    target_bytes: int,
    limit_bytes: int,
    layers_per_chunk: int | None,
    tokens_per_chunk: int | None,
) -> ChunkGrid:
    """A grid whose chunks aim at `target_bytes` and never need more than `limit_bytes` of staging.

    Staging holds full sub-blocks, so a chunk may need more room than it carries bytes.

    Raises:
        RefusedError: If not even one layer of one aligned token window fits.
    """
    target = min(target_bytes, limit_bytes)
    while True:
        grid = plan.pair.grid(
            plan.tokens,
            target_bytes=target,
            layers_per_chunk=layers_per_chunk,
            tokens_per_chunk=tokens_per_chunk,
        )
        last = len(grid) - 1
        probes = sorted({0, min(1, last), min(grid.layer_runs, last), max(0, last - grid.layer_runs), last})
        need = max(plan.chunk(grid, chunk, outline=True).staged_bytes for chunk in probes)
        if need <= limit_bytes:
            return grid
        if target < 2:
            raise RefusedError(
                f"the smallest possible chunk needs {need} bytes, but {limit_bytes} are the limit: raise chunk_bytes "
                "(and, for the route staged, arena_bytes) on the side that is short of it",
                reason=Code.CHUNK_TOO_LARGE,
            )
        target = min(target // 2, target * limit_bytes // need)


def merged_pieces(plan: TransferPlan) -> int:
    """About how many pieces a transfer has once neighbours are merged: counted on its first blocks, and scaled.

    Counting all of them costs tens of nanoseconds a piece, and there may be millions.
    """
    pair, tokens = plan.pair, plan.tokens
    sample = max((spec.id_tokens for spec in (*pair.src.tensors, *pair.dst.tensors)), default=1) or 1
    first = plan.window(pair.layers, tokens.start, min(plan.covered, tokens.start + sample))
    if first.bytes == 0:
        return plan.outline.copy().pieces
    return max(1, len(first.copy().enumerate().merged()) * plan.outline.bytes // first.bytes)


def staging_pieces(span: wire.MemorySpan, address: int, nbytes: int) -> Descriptors:
    """A stretch of staging memory as a post's descriptors.

    Raises:
        ProtocolError: If it lies outside the span.
    """
    if not (span.address <= address and address + nbytes <= span.address + span.length):
        raise ProtocolError(f"{nbytes} bytes at {address:#x} are outside the staging memory that was announced")
    return Descriptors(span.kind, span.device, np.asarray([[address, nbytes]], np.int64))


def block_pieces(
    geometry: CacheGeometry,
    addresses: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
    nbytes: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]",
) -> Descriptors:
    """Pieces of cache blocks as a post's descriptors."""
    kind = "VRAM" if geometry.kind == "cuda" else "DRAM"
    return Descriptors(kind, geometry.device if kind == "VRAM" else 0, np.stack([addresses, nbytes], axis=1))
