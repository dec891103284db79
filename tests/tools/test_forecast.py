"""Forecasts: the published sizes of pieces, and that a worker would decide likewise."""

import dataclasses

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.errors import GeometryError, RefusedError, TokensError
from kvxfer.geometry import Holders, PairPlan, Pieces, resolve
from kvxfer.plans.routes import PROFILES
from kvxfer.protocol.messages import Route
from kvxfer.tools.engine import EngineLayout, from_hf_config, read_model
from kvxfer.tools.plan import PieceSizes, forecast, with_bandwidths
from tests.geometry.published import CONFIGS

KIB, MIB = 1 << 10, 1 << 20
H200 = PROFILES["h200-nvlink"]


def plan(
    name, prefill=None, decode=None, tokens: range | int = 1024, *, dtype=None, profile=H200, one_host=False, **settings
):
    prefill = prefill or EngineLayout()
    span = tokens if isinstance(tokens, range) else range(tokens)
    return forecast(
        read_model(CONFIGS[name]),
        prefill,
        decode or prefill,
        span,
        config=Config(**settings),
        profile=profile,
        dtype=dtype,
        one_host=one_host,
    )


@pytest.mark.parametrize(
    ("name", "layout", "per_layer", "across"),
    [
        ("Llama-3.1-8B", EngineLayout(), 32 * KIB, 2 * MIB),
        ("Llama-3.2-1B", EngineLayout(), 16 * KIB, MIB // 2),
        ("Llama-3.1-70B", EngineLayout(tp=4), 8 * KIB, 1.25 * MIB),
        ("DeepSeek-V2-Lite", EngineLayout(block=64), 72 * KIB, 1.9 * MIB),
        ("Mistral-7B-v0.2", EngineLayout(), 32 * KIB, 2 * MIB),
        ("Qwen3-0.6B", EngineLayout(), 32 * KIB, 1.75 * MIB),
    ],
)
def test_the_published_sizes_of_one_contiguous_piece(name, layout, per_layer, across):
    """vLLM, bf16, blocks of 16 tokens (MLA: 64): with a cache for each layer, and with blocks across layers."""
    for way, published in ((layout, per_layer), (dataclasses.replace(layout, cross_layer=True), across)):
        for pair in plan(name, way).pairs:
            sizes = pair.pieces
            assert sizes.smallest == sizes.median == sizes.largest
            assert sizes.largest == pytest.approx(published, rel=0.002)  # one figure of the table is rounded
            assert sizes.count * sizes.largest == pair.bytes


def test_what_the_prefill_ranks_hold_is_looked_up_once_for_all_that_fetch(monkeypatch):
    made, begin = list[int](), Holders.__init__
    monkeypatch.setattr(Holders, "__init__", lambda self, have: made.append(len(have)) or begin(self, have))
    assert len(plan("Llama-3.1-8B", EngineLayout(tp=8)).pairs) == 8
    assert made == [8]


def test_where_every_token_is_held_only_state_is_left():
    held, one = plan("Nemotron-H-8B", tokens=range(100, 100)), plan("Nemotron-H-8B", tokens=range(99, 100))
    assert one.bytes - held.bytes == 4 * 2 * 8 * 128 * 2
    assert "no tokens of 100, all are held already" in held.summary()[0]
    nothing = plan("Llama-3.1-8B", tokens=range(100, 100))
    assert (nothing.pairs, nothing.bytes, nothing.to_json()["slowest_pair_s"]) == ((), 0, 0.0)


def test_a_window_is_fetched_and_not_what_lies_before_it():
    found = plan("gpt-oss-20b", tokens=1000)
    token = 12 * 2 * 8 * 64 * 2  # of the layers of one kind
    first = (1000 - 128 + 1) // 16 * 16
    assert found.bytes == token * (1000 + 1000 - first)


def test_few_large_pieces_go_by_themselves_and_settings_count():
    large = EngineLayout(cross_layer=True)
    (pair,) = plan("Llama-3.1-8B", large).pairs
    assert pair.choice.route is Route.DIRECT
    assert pair.choice.why.startswith("64 pieces of 2097152 bytes on average: ")
    (pair,) = plan("Llama-3.1-8B", large, trust="none").pairs
    assert (pair.choice.route, pair.choice.why) == (Route.STAGED, "the only common route")
    (pair,) = plan("Llama-3.1-8B", large, route="pull").pairs
    assert pair.choice.route is Route.PULL
    (pair,) = plan("Llama-3.1-8B", arena_bytes=0).pairs
    assert pair.choice.route is Route.DIRECT


def test_on_one_host_memory_is_mapped_unless_the_settings_forbid_it():
    def taken(**settings):
        (pair,) = plan("Llama-3.1-8B", one_host=True, tokens=4096, **settings).pairs
        return pair.choice.route, pair.chunks

    assert taken() == (Route.MAPPED, 2)
    assert taken(chunk_bytes="1GiB", route="mapped") == (Route.MAPPED, 1)
    assert taken(route="staged") == (Route.STAGED, 16)
    assert taken(trust="none")[0] is Route.STAGED


def test_chunks_follow_the_setting():
    counts = [
        plan("Llama-3.1-8B", chunk_bytes=size, route="staged").pairs[0].chunks for size in ("33MiB", "9MiB", "3MiB")
    ]
    assert counts == [4, 16, 64]  # of 128 MiB: eight layers of 4 MiB a chunk, two, half of one
    with pytest.raises(RefusedError, match="the smallest possible chunk needs"):
        plan("Llama-3.1-8B", chunk_bytes=512, route="staged")
    sides = EngineLayout(block=256), EngineLayout(block=256, layout="HND")  # whose smallest chunk has a MiB
    (usual,), (other,) = (plan("Llama-3.1-8B", *sides, chunk_bytes=size).pairs for size in ("1MiB", "512KiB"))
    assert (usual.choice.route, other.choice.route) == (Route.STAGED, Route.DIRECT)
    assert other.choice.fallback.startswith("staged: the smallest possible chunk needs")


def test_bandwidths_of_ones_own_take_the_place_of_measured_ones():
    mine = with_bandwidths(H200, "1GB, mapped = 300GB")
    found = {route: cost.bytes_per_s for route, cost in mine.routes.items()}
    assert found == {Route.STAGED: 1e9, Route.DIRECT: 1e9, Route.PULL: 1e9, Route.MAPPED: 3e11}
    assert mine.hardware.endswith("staged at 1 GB/s, direct at 1 GB/s, pull at 1 GB/s, mapped at 300 GB/s")


def test_the_time_is_that_of_the_profile():
    for profile in PROFILES.values():
        (pair,) = plan("Llama-3.1-8B", profile=profile, route="staged").pairs
        expected = profile.routes[Route.STAGED].seconds(nbytes=pair.bytes, chunks=pair.chunks, pieces=4096)
        assert pair.predicted_s == expected


@pytest.mark.parametrize("tokens", [4096, 5001])
def test_of_very_many_pieces_some_are_measured(monkeypatch, tokens):
    layouts = EngineLayout(tp=2), EngineLayout(tp=2, layout="HND", block=64)
    exact = plan("Llama-3.2-1B", EngineLayout(), EngineLayout(block=64), tokens=tokens)
    assert not exact.pairs[0].pieces.sampled
    sampled = plan("Llama-3.2-1B", *layouts, tokens=tokens).pairs[0].pieces
    monkeypatch.setattr("kvxfer.tools.plan._LISTED", 1 << 30)
    counted = plan("Llama-3.2-1B", *layouts, tokens=tokens).pairs[0].pieces
    assert sampled == dataclasses.replace(counted, sampled=True)
    monkeypatch.setattr("kvxfer.tools.plan._LISTED", 1 << 10)
    fewer = plan("Llama-3.2-1B", EngineLayout(), EngineLayout(block=64), tokens=tokens).pairs[0].pieces
    assert fewer.sampled
    assert fewer.count == pytest.approx(exact.pairs[0].pieces.count, rel=0.02)
    assert (fewer.smallest, fewer.largest) == (exact.pairs[0].pieces.smallest, exact.pairs[0].pieces.largest)


def test_block_lists_of_the_two_sides_do_not_run_in_step():
    """At this length equal lists on both sides would have neighbours at the same places, and pieces would merge."""
    model = read_model(CONFIGS["Llama-3.2-1B"] | {"num_hidden_layers": 2})
    layout = EngineLayout()
    (pair,) = forecast(model, layout, layout, range(16388 * 16), config=Config(), profile=H200).pairs
    assert (pair.pieces.smallest, pair.pieces.largest, pair.pieces.sampled) == (16 * KIB, 16 * KIB, False)


def test_copies_are_fetched_from_different_ranks():
    found = plan("DeepSeek-V2-Lite", EngineLayout(tp=4), EngineLayout(tp=2))
    assert [(pair.prefill_rank, pair.decode_rank) for pair in found.pairs] == [(0, 0), (1, 1)]


def test_sizes_are_those_of_the_pieces():
    engine = from_hf_config(CONFIGS["Jamba-v0.1"])
    (selections,) = resolve(engine.ranks[0], engine.ranks)
    bound = PairPlan(engine.ranks[0], engine.ranks[0], selections).bind(
        engine.spans(100), engine.spans(100, draw=1), range(100)
    )
    copy = bound.whole.copy()
    sizes = PieceSizes.of(copy)
    merged: Pieces = copy.enumerate().merged()
    assert (sizes.count, sizes.smallest, sizes.largest) == (len(merged), merged.nbytes.min(), merged.nbytes.max())
    assert sizes.median == np.median(merged.nbytes)


def test_a_rank_that_holds_none_of_the_tokens_is_in_no_pair():
    found = plan("Llama-3.1-8B", EngineLayout(cp=2), EngineLayout(), tokens=1)
    assert [(pair.prefill_rank, pair.decode_rank) for pair in found.pairs] == [(0, 0)]


def test_what_is_wrong_names_its_side():
    with pytest.raises(GeometryError, match="decode: tp=3 is not possible"):
        plan("Llama-3.1-8B", EngineLayout(), EngineLayout(tp=3))
    with pytest.raises(TokensError):
        plan("Llama-3.1-8B", tokens=0)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ((1 << 32) - 1, "prefill: 4294967295 tokens are 268435456 blocks on a rank, and 16777216 are the most"),
        (1 << 32, "tokens end at 4294967296, but 4294967295 tokens are the most"),
    ],
)
def test_what_is_too_long_to_be_planned_is_refused_at_once(tokens, words):
    with pytest.raises(TokensError, match=words):
        plan("Llama-3.1-8B", tokens=tokens)
