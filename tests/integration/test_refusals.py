"""What cannot be copied is refused by name, with both values, when a worker opens or when two workers meet.

One entry a case: at which of the two stages, and in which words. Nothing of it comes as far as a `Fetch`.
"""

import pytest
import torch
from inside import geometry
from stage import Cache, eventually, quiet

from kvxfer import GeometryError, MismatchError
from kvxfer.geometry import CacheTensor, Interleave

HALF = torch.bfloat16


def kv(heads=range(4), layers=(0,), tokens=4, dim=8, dtype=torch.float32, **named):
    shape = (2, 8, tokens, len(heads), dim)
    return [
        CacheTensor(torch.zeros(shape, dtype=dtype), "kv block token head dim", layers=[layer], heads=heads, **named)
        for layer in layers
    ]


def latent(rows=4, dim=8, layers=(0,), dtype=torch.float32, **named):
    return [
        CacheTensor(torch.zeros(8, rows, dim, dtype=dtype), "block token dim", layers=[layer], **named)
        for layer in layers
    ]


def half(name, dim=8, rows=4):
    return CacheTensor(torch.zeros(8, rows, 4, dim), "block token head dim", kv=name, layers=[0], heads=range(4))


def state(dim=8, group="state", **named):
    return [CacheTensor(torch.zeros(8, 4, dim), "block head dim", layers=[0], heads=range(4), group=group, **named)]


REGISTRATION = {
    "the same twice": ([*kv(), *kv(range(3, 5))], ["given twice", "range(0, 4)", "range(3, 5)"]),
    "a name that no frame holds": (kv(group="g" * 120), ["ggg", "has 137 characters", "at most 128"]),
    "more classes than can be compared": (
        [t for n in range(256) for t in latent(part=f"p{n}")],
        ["1024 facts", "over the 1023"],
    ),
}


@pytest.mark.parametrize("case", REGISTRATION)
async def test_refused_when_a_worker_opens(stage, case):
    tensors, words = REGISTRATION[case]
    with pytest.raises(GeometryError) as caught:
        await stage.worker("alone", None, tensors=tensors)
    for word in words:
        assert word in str(caught.value)


DIFFERENT = {
    "dtype": (kv(), kv(dtype=torch.int32), {"default/k.dtype": ("int32", "float32")}),
    "dtype of another size": (kv(), kv(dtype=HALF), {"default/v.dtype": ("bfloat16", "float32")}),
    "dim": (kv(), kv(dim=16), {"default/k.dim": ("16", "8")}),
    "dim of V alone": ([half("k"), half("v")], [half("k"), half("v", dim=4)], {"default/v.dim": ("4", "8")}),
    "slots of state": (state(kernel_blocks_per_id=2), state(), {"state.kernel_blocks_per_id": ("1", "2")}),
    "dim of state": (state(), state(dim=4), {"state.dim": ("4", "8")}),
    "state against tokens": (latent(group="state"), state(), {"state.has_tokens": ("False", "True")}),
    "tokens of a row": (latent(), latent(rows=2, tokens_per_row=2), {"default.tokens_per_row": ("2", "1")}),
    "one of two groups": (
        [*kv(), *latent(group="draft")],
        [*kv(), *latent(group="draft", dtype=HALF)],
        {"draft.dtype": ("bfloat16", "float32")},
    ),
}
"""Facts on which both must agree: either refuses the other."""
MISSING = {
    "latents against K and V": (latent(), kv(), {"default/k": ("held", "only default")}),
    "a group": (kv(), [*kv(), *state()], {"state": ("held", "only default/k, default/v")}),
    "a group of another name": (kv(group="a"), kv(group="b"), {"b/v": ("held", "only a/k, a/v")}),
    "a part": (kv(), [*kv(), *latent(part="idx")], {"default/idx": ("held", "only default/k, default/v")}),
    "V": ([half("k")], [half("k"), half("v")], {"default/v": ("held", "only default/k")}),
    "layers": (kv(layers=[0]), kv(layers=[0, 1, 2]), {"default/k.layers": ("0..2", "0")}),
    "heads": (kv(range(2)), kv(range(4)), {"default/v.heads": ("0..3", "0..1")}),
    "tokens": (latent(tokens=Interleave(0, 2, 4)), latent(), {"default.tokens": ("all", "part 0 of 2 in turns of 4")}),
}
"""What the decode rank needs, and nobody has."""


async def workers(stage, theirs, ours):
    return [await stage.worker(name, None, tensors=given) for name, given in (("prefill", theirs), ("decode", ours))]


async def refused(prefill, decode) -> MismatchError:
    """A fetch that is to be refused before anything of it is sent."""
    offer = prefill.offer("r", ids(prefill), tokens=4)
    with pytest.raises(MismatchError) as caught:
        await decode.fetch(prefill.engine.ticket("r"), ids(decode), tokens=range(4), timeout=5)
    assert "Fetch" not in decode.describe()["metrics"]["frames_sent"]
    await offer.withdraw()
    await quiet(prefill, decode)
    return caught.value


def ids(worker):
    return {group: [1] for group in geometry(worker).groups}


@pytest.mark.parametrize("case", [*DIFFERENT, *MISSING])
async def test_refused_when_two_workers_meet(stage, case, caplog):
    theirs, ours, fields = (DIFFERENT | MISSING)[case]
    prefill, decode = await workers(stage, theirs, ours)
    error = await refused(prefill, decode)
    for name, (here, there) in fields.items():
        assert error.fields[name] == (here, there)
        for word in (name, here, there):
            assert word in str(error)
        in_their_log = f"{name}: {there!r} here, {here!r} there"
        await eventually(lambda said=in_their_log: case in MISSING or said in caplog.text)


SETTINGS = {
    "no arena, and blocks are not registered": (
        {"arena_bytes": 0, "route": "direct"},
        {"route": "staged"},
        {"route": ("staged", "none")},
    ),
    "chunks of the decode rank too small, and no other route": (
        {},
        {"chunk_bytes": 512, "route": "staged"},
        {"chunk_bytes": ("512", "2048")},
    ),
    "chunks of the prefill rank too small, and no other route": (
        {"chunk_bytes": 512, "route": "staged"},
        {},
        {"chunk_bytes": ("2048", "512")},
    ),
}


@pytest.mark.parametrize("tokens", [(4, 4), (4, 12)])
async def test_a_chunk_that_no_side_has_room_for_is_refused_with_all_of_its_groups(stage, tokens):
    """The smallest chunk is a window of one layer, which holds a row of every group and of every block size."""

    def cache():
        return [*kv(tokens=tokens[0], dim=32), *latent(rows=tokens[1], dim=256, group="latent")]

    least = tokens[1] * (2 * 4 * 32 + 256) * 4
    sizes = {"route": "staged", "arena_bytes": "64KiB"}
    prefill = await stage.worker("prefill", None, tensors=cache(), **sizes, chunk_bytes=least)
    short = await stage.worker("short", None, tensors=cache(), **sizes, chunk_bytes=least - 16)
    enough = await stage.worker("enough", None, tensors=cache(), **sizes, chunk_bytes=least)
    error = await refused(prefill, short)
    assert error.fields == {"chunk_bytes": (str(least - 16), str(least))}
    blocks = {"default": [1, 2, 3], "latent": [1, 2, 3]}
    prefill.offer("r2", blocks, tokens=12)
    await enough.fetch(prefill.engine.ticket("r2"), blocks, tokens=range(12), timeout=5)


async def test_the_size_of_staged_chunks_is_nothing_to_a_pair_that_does_not_stage(stage):
    settings = {"arena_bytes": 0, "route": "direct", "chunk_bytes": 512}
    await stage.bring(*await stage.pair(Cache(), Cache(layout="HND"), **settings))


@pytest.mark.parametrize("case", SETTINGS)
async def test_refused_for_settings_when_two_workers_meet(stage, case):
    theirs, ours, fields = SETTINGS[case]
    error = await refused(*await stage.pair(Cache(), Cache(), prefill=theirs, decode=ours))
    assert error.fields == fields
    for pair in fields.values():
        for word in pair:
            assert word in str(error)


# engines of several ranks


async def test_what_is_missing_is_known_once_every_rank_was_met(stage):
    sources = [Cache(layers=[0, 1]), Cache(layers=[3, 4])]
    prefill, _ = await stage.engine("prefill", sources)
    decode = await stage.worker("decode", Cache(layers=range(6)))
    for rank in prefill:
        rank.offer("r", [1], tokens=4)
    for _ in range(2):  # and again, with the ranks already met
        with pytest.raises(MismatchError) as caught:
            await decode.fetch(prefill[0].engine.ticket("r"), [1], tokens=range(4), timeout=5)
        assert caught.value.fields["default/k.layers"] == ("0..5", "0..1, 3..4")
        assert "Fetch" not in decode.describe()["metrics"]["frames_sent"]
    await quiet(*prefill, decode)


async def test_a_rank_that_does_not_fit_fails_the_fetch_only_if_it_is_needed(stage):
    prefill, _ = await stage.engine("prefill", [Cache(layers=[0]), Cache(layers=[1], dim=16)])
    alone = await stage.worker("alone", Cache(layers=[0]))
    both = await stage.worker("both", Cache(layers=[0, 1]))
    offers = [rank.offer("r", [1], tokens=4) for rank in prefill]
    with pytest.raises(MismatchError) as caught:
        await both.fetch(prefill[0].engine.ticket("r"), [1], tokens=range(4), timeout=5)
    assert caught.value.fields["default/k.dim"] == ("8", "16")
    await alone.fetch(prefill[0].engine.ticket("r"), [1], tokens=range(4), timeout=5)
    for offer in offers:
        await offer.withdraw()
    await quiet(*prefill, alone, both)
