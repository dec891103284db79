"""Plans with peers: how many pieces there are about, and what kernels are compiled for."""

import tracemalloc

import pytest
import torch
from staged import gather, nbytes_of, scatter

from kvxfer.errors import ProtocolError, RefusedError
from kvxfer.geometry import CacheGeometry, CacheTensor, Group, PairPlan, Span, common, resolve
from kvxfer.plans import pairs
from kvxfer.plans.pairs import PairPlans, fit, geometry_to_wire, in_place_bytes, selection_to_wire, staging_pieces
from kvxfer.protocol.framing import encode_body
from kvxfer.protocol.messages import AgentBody, MemorySpan, Route
from kvxfer.protocol.session import Identity, PeerInfo
from kvxfer.tools.engine import EngineLayout, from_hf_config
from tests.geometry.published import CONFIGS

LLAMA = CONFIGS["Llama-3.1-8B"]
MAMBA = {
    "model_type": "mamba2",
    "num_hidden_layers": 12,
    "hidden_size": 1024,
    "num_heads": 32,
    "head_dim": 64,
    "state_size": 64,
    "n_groups": 4,
    "conv_kernel": 4,
    "torch_dtype": "bfloat16",
}
NHD = {"layout": "NHD"}
ACROSS = {"tp": 4, "cross_layer": True}
TURNS = {"cp": 2, "cross_layer": True, "block": 64, "layout": "HND"}


def paired(src, dst, rank=0):
    """What the first rank of a decode engine needs of one of a prefill engine's."""
    return PairPlan(src.ranks[rank], dst.ranks[0], resolve(dst.ranks[0], src.ranks)[rank])


def pool(blocks=4, tokens=2, dim=8, dtype=torch.float32):
    """A cache of one layer."""
    shape = (blocks, tokens, dim)
    return CacheGeometry.of([CacheTensor(torch.zeros(shape, dtype=dtype), "block token dim", layers=[0])])


def alike(cache):
    """A rank that needs all of one that holds the same."""
    return PairPlan(cache, cache, common(cache, cache))


def peer_of(cache, incarnation=b"incarnation", *, with_addresses=False):
    """A peer that holds it."""
    body = AgentBody("loopback", b"", geometry_to_wire(cache, with_addresses=with_addresses))
    return PeerInfo(Identity("peer", b"e", incarnation, 0, 1, 0, ""), encode_body(body))


@pytest.mark.parametrize(("prefill", "decode", "tokens"), [
    (NHD, NHD, range(1000)), (NHD, {"layout": "HND", "block": 32}, range(7, 500)), (ACROSS, ACROSS, range(15, 8015)),
    (ACROSS, ACROSS, range(8000)),
    ({"cp": 2, "cross_layer": True, "block": 4}, {"cp": 2, "cross_layer": True, "block": 4}, range(8000)),
    ({"tp": 2}, {"tp": 8}, range(1, 4000)), (TURNS, TURNS, range(8000)), (TURNS, TURNS, range(3, 8001)),
    ({"cp": 2}, {"cp": 2, "block": 48}, range(16000)),
    ({"cp": 2, "layout": "HND"}, {"cp": 2, "layout": "HND"}, range(6000)),
    ({"block": 32, "layout": "HND"}, {"block": 48, "layout": "HND"}, range(9, 9000)),
    ({"block": 64, "kernel_block": 16}, {"block": 64}, range(9000)), ({"block": 1}, {}, range(9000)),
])  # fmt: skip
def test_the_number_of_merged_pieces_is_about_right(prefill, decode, tokens):
    """The choice of a route rests on it."""
    src, dst = from_hf_config(LLAMA, **prefill), from_hf_config(LLAMA, **decode)
    layouts = [EngineLayout(**options) for options in (prefill, decode)]
    spans = src.spans(tokens.stop, aligned=layouts[1].block), dst.spans(tokens.stop, aligned=layouts[0].block, draw=1)
    plan = paired(src, dst).bind(*spans, tokens)
    real = len(plan.whole.copy().enumerate().merged())
    assert plan.merged_pieces == pytest.approx(real, rel=0.15)


@pytest.mark.parametrize(
    ("decode", "expected"), [(NHD, 256 << 20), ({"layout": "NHD", "tp": 8}, 16 << 20), ({"layout": "HND"}, 16 << 20)]
)
def test_chunks_whose_pieces_are_listed_have_so_many_of_them(decode, expected):
    src, dst = from_hf_config(LLAMA, layout="NHD"), from_hf_config(LLAMA, **decode)
    plan = paired(src, dst).bind(src.spans(100_000), dst.spans(100_000, draw=1), range(100_000))
    assert in_place_bytes(Route.MAPPED, plan, 256 << 20) == 256 << 20
    for route in (Route.DIRECT, Route.PULL):
        found = in_place_bytes(route, plan, 256 << 20)
        assert found == pytest.approx(expected, rel=0.01)
        grid = fit(plan, target_bytes=found, limit_bytes=256 << 20).grid
        listed = [plan.chunk(grid, chunk).listed() for chunk in (0, 1)]
        assert 65_536 // 2 < max(map(len, listed)) <= 65_536 or found == 256 << 20


@pytest.mark.parametrize(("engine", "joined"), [({"cross_layer": True}, True), ({}, False)])
def test_pieces_that_reach_over_layers_are_not_cut_where_they_are_listed(engine, joined):
    model = from_hf_config(LLAMA, **engine)
    pair = paired(model, model)
    plan = pair.bind(model.spans(8192), model.spans(8192, draw=1), range(8192))
    whole = len(plan.whole.listed())
    assert pair.joins_layers == joined
    for target in (1 << 28, 1 << 24):
        grid = fit(plan, target_bytes=target, limit_bytes=1 << 40, listed=True).grid
        chunks = [plan.chunk(grid, number) for number in range(grid.chunks)]
        assert max(chunk.staged_bytes for chunk in chunks) <= target
        assert sum(len(chunk.listed()) for chunk in chunks) == whole
        assert sum(chunk.bytes for chunk in chunks) == plan.whole.bytes
        cut = fit(plan, target_bytes=target, limit_bytes=1 << 40).grid
        assert (len(cut.of(0)[0]) < len(pair.layers)) == (not joined or cut != grid)


def test_where_not_even_a_window_of_all_layers_fits_layers_are_cut_all_the_same():
    model = from_hf_config(LLAMA, cross_layer=True)
    plan = paired(model, model).bind(model.spans(64), model.spans(64), range(64))
    grid = fit(plan, target_bytes=1 << 20, limit_bytes=1 << 20, listed=True).grid
    assert max(plan.chunk(grid, number).staged_bytes for number in range(grid.chunks)) <= 1 << 20


def test_blocks_that_are_not_known_yet_are_taken_to_be_like_the_others():
    engine = from_hf_config(LLAMA)
    spans = engine.spans(8000), engine.spans(8000, draw=1)
    pair = paired(engine, engine)
    whole = pair.bind(*spans, range(8000)).merged_pieces
    for known in (0, 1, 100):
        begun = {"default": Span(spans[0]["default"].ids[:known])}
        assert pair.bind(begun, spans[1], range(8000), covered=16 * known).merged_pieces == whole


@pytest.mark.parametrize(
    ("prefill", "decode"), [({}, {}), ({"cross_layer": True}, {"cross_layer": True}), ({"tp": 2}, {})]
)
def test_pieces_of_several_parts_are_counted_once(prefill, decode):
    """As they are listed: the parts of a page of state are one piece."""
    src, dst = from_hf_config(MAMBA, **prefill), from_hf_config(MAMBA, **decode)
    plan = paired(src, dst).bind(src.spans(8, aligned=16), dst.spans(8, aligned=16, draw=1), range(8))
    assert plan.merged_pieces == len(plan.whole.copy().enumerate().merged())


@pytest.mark.parametrize("blocks", [16, 2000])
def test_making_a_plan_takes_no_memory_for_pieces(blocks):
    src, dst = (from_hf_config(LLAMA, blocks=blocks, layout=layout).ranks[0] for layout in ("NHD", "HND"))
    pair = PairPlan(src, dst, common(src, dst))
    spans = {"default": Span(range(blocks))}
    gather(pair.bind(spans, spans, range(16 * blocks)).whole, 0)
    tracemalloc.start()
    try:
        bound = pair.bind(spans, spans, range(16 * blocks))
        tables = gather(bound.whole, 0)
        bound.digest(pair.grid(bound.tokens, target_bytes=1 << 25))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tables.pieces == 64 * blocks * 128
    assert peak < 64 * 1024 + 400 * blocks  # a list of the pieces takes 196,608 bytes a block


@pytest.mark.parametrize("blocks", [8, 3000])
@pytest.mark.parametrize("route", [Route.STAGED, Route.DIRECT])
def test_a_group_of_which_nothing_moves_changes_nothing_of_the_others(blocks, route):
    """However many blocks there are, and wherever the group stands in the list."""

    def plan(*others):
        full = CacheTensor(torch.empty(4096, 2, 2, 4, 8, dtype=torch.uint8), "block layer kv token dim", layers=[3, 4])
        late = [
            CacheTensor(torch.empty(16, 4, 8, dtype=torch.uint8), "block token dim", group=name, layers=[9])
            for name in others
        ]
        spans = {"default": Span(range(7, 7 + blocks))} | {name: Span([], 4 * blocks) for name in others}
        return alike(CacheGeometry.of([full, *late], [])).bind(spans, spans, range(4 * blocks))

    plain, mixed = plan(), plan("a window", "z window")
    assert plain.merged_pieces == mixed.merged_pieces == 1
    assert plain.whole.bytes == mixed.whole.bytes == blocks * 128
    grids = [fit(one, target_bytes=1 << 20, limit_bytes=1 << 20).grid for one in (plain, mixed)]
    assert grids[0].chunks == grids[1].chunks
    listed = [one.chunk(grid, 0).listed() for one, grid in zip((plain, mixed), grids, strict=True)]
    assert len(listed[0]) == len(listed[1]) == 1
    found = [in_place_bytes(route, one, 256 << 20) for one in (plain, mixed)]
    assert found[0] == found[1]


def test_a_sample_needs_no_block_that_could_be_bound():
    """Kernels are compiled for a pair though block 0 is padding, and though one pool is smaller than a block."""
    wide = CacheTensor(torch.zeros(4, 64, 8), "block token dim", layers=[0])
    narrow = CacheTensor(torch.zeros(2, 16, 8), "block token dim", layers=[0])
    src = CacheGeometry.of([wide], [Group("default", 0)])
    dst = CacheGeometry.of([narrow], [Group("default", 0)])
    pair = PairPlan(src, dst, common(src, dst))
    assert pair.sample.bytes == 2 * 16 * 8 * 4
    assert nbytes_of(gather(pair.sample, 0)) == nbytes_of(scatter(pair.sample, 0)) == pair.sample.bytes


def test_stretches_of_staging_memory_lie_inside_of_it():
    span, at = MemorySpan("VRAM", 2, 1 << 20, 1 << 16), 1 << 20
    one, other = staging_pieces([(span, [at, at + 4096]), (span, [at + 61440, at])], [4096, 4096])
    assert (one.kind, one.device, one.pieces.tolist()) == ("VRAM", 2, [[at, 4096], [at + 4096, 4096]])
    assert other.pieces.tolist() == [[at + 61440, 4096], [at, 4096]]
    for address, nbytes in ((at - 1, 4096), (at, (1 << 16) + 1), (1 << 64, 1)):
        with pytest.raises(ProtocolError, match="outside the staging memory"):
            staging_pieces([(span, [at, at]), (span, [at, address])], [1, nbytes])
    with pytest.raises(ProtocolError, match="of kind DRAM or VRAM, not 'FILE'"):
        staging_pieces([(MemorySpan("FILE", 0, at, 1 << 16), [at])], [1])


@pytest.mark.parametrize("chunk", [16, 1024])
def test_turns_over_ranks_need_no_larger_chunks(chunk):
    """A chunk of 64 KiB has room for 64 KiB of rows, however many tokens a rank holds in a row."""
    model = LLAMA | {"num_hidden_layers": 1}
    src, dst = from_hf_config(model, cp=2, cp_chunk=chunk), from_hf_config(model)
    plan = paired(src, dst).bind(src.spans(2048), dst.spans(2048, draw=1), range(2048))
    grid = fit(plan, target_bytes=1 << 16, limit_bytes=1 << 16).grid
    sizes = [plan.chunk(grid, number).staged_bytes for number in range(grid.chunks)]
    assert max(sizes) == plan.largest_chunk_bytes(grid) == 1 << 16
    assert sum(sizes) == plan.whole.bytes == 1024 * 4096


def test_the_largest_chunk_counts_wherever_it_is():
    """Of 2048 tokens in turns of 1024, this rank holds the second half: the first chunks are empty."""
    model = LLAMA | {"num_hidden_layers": 1}
    src, dst = from_hf_config(model, cp=2, cp_chunk=1024), from_hf_config(model)
    plan = paired(src, dst, rank=1).bind(src.spans(2048), dst.spans(2048, draw=1), range(2048))
    least = 16 * 4096
    assert fit(plan, target_bytes=1, limit_bytes=least).grid.chunks == 128
    with pytest.raises(RefusedError, match=f"the smallest possible chunk needs {least} bytes, but {least - 1} are"):
        fit(plan, target_bytes=1, limit_bytes=least - 1)


@pytest.mark.parametrize("listed", [False, True])
def test_where_every_token_is_held_up_to_the_end_of_a_block_a_chunk_is_cut(listed):
    """What moves then is state; here nothing does, and the filling of rows of 33 bytes is more than was aimed at."""
    spans = {"default": Span([1, 2])}
    plan = alike(pool(8, 4, 33, torch.int8)).bind(spans, spans, range(8, 8))
    bound = fit(plan, target_bytes=1, limit_bytes=None, listed=listed)
    assert (bound.grid.chunks, bound.plan.nbytes) == (1, 0)


def test_a_transfer_of_too_many_chunks_is_refused():
    spans = {"default": Span(torch.arange(1 << 21).numpy())}
    plan = alike(pool(1 << 21, 1, 1)).bind(spans, spans, range(1 << 21))
    with pytest.raises(RefusedError, match="cut into 2097152 chunks, and 1048576 are the limit: raise chunk_bytes"):
        fit(plan, target_bytes=16, limit_bytes=16, tokens_per_chunk=1)


def test_plans_with_as_many_peers_as_there_are_are_made_once():
    cache = pool()
    selections = [selection_to_wire(one) for one in common(cache, cache)]
    plans = PairPlans(cache)
    peers = [peer_of(cache, incarnation=b"%d" % number) for number in range(600)]
    for peer in peers:
        plans.add_peer(peer, plans.examine(peer, sending=True, convert=False))
    first = [plans.outgoing(peer, selections) for peer in peers]
    assert all(plans.asked(peer, selections)[0] is plan for peer, plan in zip(peers, first, strict=True))
    plans._asked.clear()
    assert all(plans.outgoing(peer, selections) is plan for peer, plan in zip(peers, first, strict=True))
    for peer in peers:
        plans.forget(peer)
    assert not plans._pairs
    assert not plans._asked


def test_streams_in_both_directions_that_are_opened_at_once_convert_both_ways():
    own, theirs = pool(), pool(dtype=torch.bfloat16)
    reader, writer = peer_of(theirs), peer_of(theirs)
    plans = PairPlans(own)
    found = plans.examine(reader, sending=True, convert=True), plans.examine(writer, sending=False, convert=True)
    plans.add_peer(reader, found[0])
    plans.add_peer(writer, found[1])
    assert plans.converts(reader, sending=True)
    assert plans.converts(writer, sending=False)
    selections = [selection_to_wire(one) for one in common(own, theirs)]
    sent = plans.outgoing(reader, selections)
    assert plans.asked(reader, selections)[0] is sent
    assert plans.pair(writer, common(theirs, own), sending=False).dst is own


def test_of_a_peer_that_is_gone_nothing_is_kept():
    cache = pool()
    peer, plans = peer_of(cache), PairPlans(cache)
    plans.add_peer(peer, plans.examine(peer, sending=False, convert=False))
    known = plans.geometry(peer)
    assert plans.geometry(peer) is known
    plans.forget(peer)  # between the handshake and the first fetch
    assert plans.shares([peer], rank=0)
    assert plans.geometry(peer).tensors == known.tensors
    assert not plans.variants(peer, sending=False, mapped=False), "nothing is compiled for it"
    assert not any((plans._geometries, plans._pairs, plans._agreed, plans._shares))


def test_a_plan_is_not_kept_for_a_peer_that_came_back_with_other_memory_meanwhile(monkeypatch):
    own, *caches = pool(), pool(), pool()
    before, after = [peer_of(cache, with_addresses=True) for cache in caches]
    plans, planned = PairPlans(own), pairs._planned
    plans.add_peer(before, plans.examine(before, sending=True, convert=False))
    plans._pairs.clear()  # as if there had been many others

    def meanwhile(*arguments, **options):
        monkeypatch.undo()
        made = planned(*arguments, **options)
        plans.forget(before)
        plans.add_peer(after, plans.examine(after, sending=True, convert=False))
        return made

    monkeypatch.setattr(pairs, "_planned", meanwhile)
    selections = [selection_to_wire(selection) for selection in common(own, caches[0])]
    plans.outgoing(before, selections)
    assert plans.outgoing(after, selections).dst is plans.geometry(after)
