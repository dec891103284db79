"""Geometry, selections and block lists to and from the wire."""

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Final

import numpy as np

from kvxfer.errors import ProtocolError
from kvxfer.geometry import BlockLists, CacheGeometry, Interleave, Selection, Span, TensorSpec
from kvxfer.limits import MAX_STRIDE
from kvxfer.protocol import messages as wire
from kvxfer.protocol.packing import pack_f32, pack_u32, unpack_f32, unpack_u32

__all__ = [
    "decode_spans",
    "encode_spans",
    "geometry_from_wire",
    "geometry_to_wire",
    "joined_spans",
    "selection_from_wire",
    "selection_to_wire",
]

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
                tokens=interleave(frame.interleave_rank, frame.interleave_of, max(frame.interleave_chunk, 1)),
                null_block=None if frame.null_block < 0 else frame.null_block,
                scale=tuple(unpack_f32(frame.scale)) if frame.scale else (),
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


def selection_from_wire(selection: wire.Selection) -> Selection:
    """Inverse of `selection_to_wire`; whether both sides hold it is checked when the pair is planned."""
    layers = tuple(_ids(selection.layers))
    return Selection(selection.group, selection.part, selection.kv, layers, selection.head_start, selection.head_stop)


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
    decoded: dict[str, Span] = {}
    for span in spans:
        if len(span.ids) % 4:
            raise ProtocolError(f"packed ids of {len(span.ids)} bytes are cut")
        decoded[span.group] = Span(np.frombuffer(span.ids, "<u4").astype(np.int64), span.first_token)
    if len(decoded) != len(spans):
        raise ProtocolError("a group has two block lists in one frame")
    return decoded


def _ids(packed: bytes) -> Sequence[int]:
    try:
        return unpack_u32(packed)
    except ValueError as error:
        raise ProtocolError(f"packed ids of {len(packed)} bytes are cut") from error
