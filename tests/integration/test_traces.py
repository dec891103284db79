"""One trace over both sides of a transfer, by OpenTelemetry's SDK: spans, parents, status, peers that lie about it."""
# what failed has a report, and what is fetched was offered
# pyright: reportOptionalMemberAccess=false

import asyncio
import subprocess
import sys
from pathlib import Path

import inside
import pytest
from inside import being_stopped, trace_by
from msgspec.structs import replace
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from stage import Cache, eventually, quiet
from traced import Spans

from kvxfer.integrations.opentelemetry import parsed
from kvxfer.protocol.messages import Fetch

ROOT = Path(__file__).parents[2]
TOKENS = range(8)
CALLER = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
STAGES = {
    "staged": ({"reserve", "arrive", "scatter"}, {"reserve", "gather", "post", "write"}),
    "direct": ({"arrive"}, {"reserve", "post", "write"}),
    "mapped": ({"arrive"}, {"reserve", "write"}),
    "pull": ({"read"}, set()),
}
"""What each side sees by itself, by route: at the decode rank and at the prefill rank."""


@pytest.fixture
def spans():
    return Spans()


@pytest.fixture
def source():
    return Cache(shared=True)


@pytest.fixture
def target():
    return Cache(shared=True)


@pytest.fixture
async def pair(stage, source, target, spans):
    return await stage.pair(source, target, route="staged", traces="otel")


async def moved(stage, prefill, decode):
    """A request, offered, fetched and released."""
    await stage.bring(prefill, decode)
    await quiet(prefill, decode)


@pytest.mark.parametrize("route", STAGES)
async def test_one_trace_over_both_sides(stage, spans, source, target, route):
    prefill, decode = await stage.pair(source, target, route=route, traces="otel")
    await moved(stage, prefill, decode)
    fetch, send, offer = spans.one("fetch"), spans.one("send"), spans.one("offer")
    assert fetch.parent is None
    assert send.parent.span_id == offer.parent.span_id == fetch.context.span_id
    assert [link.context for link in offer.links] == [send.context]
    assert {span.context.trace_id for span in spans.all} == {fetch.context.trace_id}
    assert (fetch.kind, send.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
    seen = tuple(set(spans.below(side)) - {"offer"} for side in (fetch, send))
    # a chunk for which no memory is waited for has nothing to reserve
    assert (seen[0] | {"reserve"}, seen[1]) == (STAGES[route][0] | {"reserve"}, STAGES[route][1])
    for side in (fetch, send):
        assert side.status.status_code is StatusCode.OK
        assert side.attributes["kvxfer.route"] == route
        assert side.attributes["kvxfer.peers"]
        assert side.attributes["kvxfer.bytes"] == 2 * 2 * 8 * 4 * 8 * 4
        assert side.attributes["kvxfer.request"] == "r"
        assert (side.attributes["kvxfer.engine"], side.attributes["kvxfer.rank"]) == (
            ("decode", 0) if side is fetch else ("prefill", 0)
        )
        for stage_span in spans.below(side).values():
            assert stage_span.start_time <= stage_span.end_time
            if stage_span.name != "kvxfer.offer":  # which began before it was fetched
                assert side.start_time <= stage_span.start_time
                assert stage_span.attributes["kvxfer.busy_seconds"] >= 0
                assert stage_span.attributes["kvxfer.intervals"] >= 1
    assert [inside.traced(worker) for worker in (prefill, decode)] == [0, 0]


@pytest.mark.parametrize("loop", ["caller", "own"])
async def test_a_fetch_and_an_offer_belong_to_the_spans_that_ask_for_them(stage, spans, source, target, loop):
    prefill, decode = await stage.pair(source, target, traces="otel", prefill={"loop": loop}, decode={"loop": loop})
    tracer = trace.get_tracer("test")
    with tracer.start_as_current_span("prefill") as there:
        offer = prefill.offer("r", [1, 2], tokens=8)
    with tracer.start_as_current_span("decode") as here:
        await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS)
    await offer.released()
    assert spans.one("fetch").parent.span_id == here.get_span_context().span_id
    assert spans.one("send").parent.span_id == spans.one("fetch").context.span_id
    assert spans.one("offer").parent.span_id == there.get_span_context().span_id
    assert [link.context for link in spans.one("offer").links] == [spans.one("send").context]


async def test_an_engine_of_two_ranks_sends_in_the_same_trace(stage, spans):
    sources = [Cache(heads=range(2)), Cache(heads=range(2, 4))]
    ranks, _ = await stage.engine("prefill", sources, traces="otel")
    decode = await stage.worker("decode", Cache(), traces="otel")
    for rank in ranks:
        rank.offer("r", [1, 2], tokens=8)
    await decode.fetch(ranks[0].engine.ticket("r"), [3, 4], tokens=TOKENS)
    await quiet(*ranks, decode)
    fetch = spans.one("fetch")
    sends = [span for span in spans.all if span.name == "kvxfer.send"]
    assert [send.parent.span_id for send in sends] == [fetch.context.span_id] * 2
    assert {send.attributes["kvxfer.rank"] for send in sends} == {0, 1}
    assert fetch.attributes["kvxfer.bytes"] == sum(send.attributes["kvxfer.bytes"] for send in sends)


async def a_post_that_is_refused(stage, prefill, decode):
    stage.network.refuse_next("decode")
    return stage.begin(prefill, decode)[1]


async def a_cancellation(stage, prefill, decode):
    _, transfer = await stage.in_flight(prefill, decode)
    transfer.cancel()
    await eventually(lambda: being_stopped(prefill))  # else what is held would have landed before it hears of that
    stage.network.release("*")
    return transfer


async def a_worker_that_closes(stage, prefill, decode):
    transfer = decode.start_fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS)
    await decode.aclose(drain=False)
    return transfer


async def a_refusal(stage, prefill, decode):
    await prefill.offer("r", [1, 2], tokens=8).withdraw()
    return decode.start_fetch(prefill.engine.ticket("r"), [3, 4], tokens=TOKENS)


@pytest.mark.parametrize(
    ("fails", "code", "sides"),
    [
        (a_post_that_is_refused, "fabric", ["fetch", "send"]),
        (a_cancellation, "cancelled", ["fetch", "send"]),
        (a_worker_that_closes, "closed", ["fetch"]),
        (a_refusal, "offer_withdrawn", ["fetch"]),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
async def test_a_fetch_that_fails_says_so_on_every_side_that_took_part(stage, spans, pair, fails, code, sides):
    transfer = await fails(stage, *pair)
    await asyncio.wait({transfer.outcome})
    await quiet(*(worker for worker in pair if not worker.describe()["closed"]))
    for side in map(spans.one, sides):
        assert side.status.status_code is StatusCode.ERROR
        assert side.attributes["error.type"] == code
        assert side.attributes["kvxfer.memory_safe"] is True
        assert side.status.description.startswith(f"{code.upper()}: ")
    assert ("send" in spans.names) == ("send" in sides)


RUBBISH = [
    "",
    "rubbish",
    "00-" + "0" * 32 + "-" + "cd" * 8 + "-01",
    "00-" + "ab" * 16 + "-" + "0" * 16 + "-01",
    CALLER.upper(),
    CALLER.replace("00-", "01-", 1),
    CALLER + "\n",
    CALLER[:-1],
    "00-" + "٣" * 32 + "-" + "cd" * 8 + "-01",
    "\0" * 64,
]


@pytest.mark.parametrize("said", RUBBISH)
async def test_what_is_no_trace_is_ignored(stage, spans, pair, tap, said):
    tap.change[Fetch] = lambda fetch: replace(fetch, trace=said)
    await moved(stage, *pair)
    send = spans.one("send")
    assert send.parent is None
    assert send.status.status_code is StatusCode.OK
    assert parsed(said) is None


@pytest.mark.parametrize("flags", ["ff", "00"])
async def test_a_peer_is_believed_no_more_than_a_parent_and_what_it_samples(stage, spans, pair, tap, flags):
    tap.change[Fetch] = lambda fetch: replace(fetch, trace=CALLER[:-2] + flags)
    await moved(stage, *pair)
    if flags == "00":
        assert not {"send", "gather"} & set(spans.names)
        return
    send = spans.one("send")
    assert (send.parent.trace_id, send.parent.span_id) == (int("ab" * 16, 16), int("cd" * 8, 16))
    assert send.parent.trace_flags == 1, "no flag but `sampled` is passed on"


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_one_side_alone_may_trace(stage, spans, source, target, side):
    prefill, decode = await stage.pair(source, target, **{side: {"traces": "otel"}})
    await moved(stage, prefill, decode)
    assert ("send" in spans.names, "fetch" in spans.names) == (side == "prefill", side == "decode")


@pytest.mark.parametrize("spared", [[], ["fetch", "offer", "send"]])
async def test_code_of_the_application_that_raises_harms_no_transfer_and_no_span_but_its_own(
    stage, spans, pair, caplog, spared
):
    class Raising:
        def start_span(self, name, *arguments, **options):
            if name.removeprefix("kvxfer.") not in spared:
                raise RuntimeError("a sampler")
            return trace.get_tracer("t").start_span(name, *arguments, **options)

    for worker in pair:
        trace_by(worker, Raising())
    await moved(stage, *pair)
    assert spans.names == spared
    assert {record.kvxfer["event"] for record in caplog.records if record.levelname == "ERROR"} == {"trace_failed"}


OFF = """
import asyncio, sys
sys.modules["opentelemetry"] = None  # whoever imports it fails
sys.path[:0] = {path!r}
from contextlib import AsyncExitStack
from stage import Cache, Stage, quiet
from kvxfer import ConfigError
from kvxfer.fabric.loopback import LoopbackNetwork

async def main():
    async with AsyncExitStack() as stack:
        stage = Stage(LoopbackNetwork(), stack)
        prefill, decode = await stage.pair(Cache(), Cache())
        offer = prefill.offer("r", [1], tokens=4)
        await decode.fetch(prefill.engine.ticket("r"), [1], tokens=range(4))
        await offer.released()
        assert not any(name.startswith(("opentelemetry.", "kvxfer.integrations.opentelemetry")) for name in sys.modules)
        try:
            await stage.worker("traced", Cache(), traces="otel")
        except ConfigError as error:
            print(error)

asyncio.run(main())
"""


def test_nothing_of_it_is_imported_unless_it_is_asked_for():
    done = subprocess.run(
        [sys.executable, "-c", OFF.format(path=sys.path)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pip install opentelemetry-api" in done.stdout
