"""What an operator is told of workers: metrics that mean what they say, health with reasons, and nothing secret."""

import asyncio
import errno
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from inside import counters, mover, take, transport
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from stage import Cache, eventually, quiet
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount

import kvxfer.tools.admin
from kvxfer import BlockingWorker, Config, ConfigError, KvxferError, RequestError
from kvxfer.errors import FabricError
from kvxfer.fabric.loopback import LoopbackTransport
from kvxfer.telemetry import SECONDS
from kvxfer.tools.admin.look import look
from kvxfer.tools.admin.server import AdminServer
from kvxfer.tools.admin.status import status

DASHBOARD = json.loads((Path(kvxfer.tools.admin.__file__).parent / "grafana.json").read_text())
LIMITS = kvxfer.tools.admin.Limits()
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(server, path):
    """Status, content type and body; runs in a thread, since it waits for the worker's loop."""
    try:
        with DIRECT.open(f"{server.url}{path}", timeout=30) as answer:
            return answer.status, answer.headers["content-type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["content-type"], error.read().decode()


async def asked(server, path):
    return await asyncio.to_thread(ask, server, path)


async def why(server):
    """What /readyz complains of, of all workers; it agrees with its own status."""
    code, _, body = await asked(server, "readyz")
    told = json.loads(body)
    found = [reason for reasons in told["reasons"].values() for reason in reasons]
    assert (code, told["ready"]) == ((503, False) if found else (200, True))
    return found


def samples(text):
    """Every sample as {(name, labels but who): value}."""
    return {
        (sample.name, *sorted((k, v) for k, v in sample.labels.items() if k not in {"engine", "rank"})): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(*workers):
    registry = CollectorRegistry()
    registry.register(kvxfer.tools.admin.Collector(workers))
    return generate_latest(registry).decode()


async def played(stage, **config):
    """A pair after fetches of which one succeeded and one was refused; what was moved."""
    prefill, decode = await stage.pair(Cache(), Cache(), **config)
    prefill.offer("r", [1, 2], tokens=8)
    result = await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=range(8), timeout=10)
    prefill.offer("s", [1], tokens=4)
    with pytest.raises(KvxferError):
        await decode.fetch(prefill.engine.ticket("s"), [3, 4], tokens=range(8), timeout=10)
    decode.claim(prefill.engine.ticket("s"))
    await quiet(prefill, decode)
    await eventually(lambda: prefill.describe()["metrics"]["offers_ended"])
    return prefill, decode, result.stats


# --- metrics


async def test_metrics_say_what_was_moved(stage):
    prefill, decode, stats = await played(stage, route="staged")
    here, there = samples(await scrape(decode)), samples(await scrape(prefill))
    received, sent = ("side", "receive"), ("side", "send")
    assert here["kvxfer_transferred_bytes_total", ("route", "staged"), received] == stats.bytes
    assert there["kvxfer_transferred_bytes_total", ("route", "staged"), sent] == stats.bytes
    assert here["kvxfer_pieces_total", received] == stats.pieces
    assert here["kvxfer_chunks_total", received] == there["kvxfer_chunks_total", sent] == stats.chunks
    assert here["kvxfer_transfers_total", ("outcome", "ok"), received] == 1
    assert sum(value for name, value in here.items() if name[0] == "kvxfer_transfers_total") == 2
    assert here["kvxfer_transfer_duration_seconds_count", ("route", "staged"), received] == 1
    assert here["kvxfer_transfer_duration_seconds_sum", ("route", "staged"), received] == stats.duration
    assert here["kvxfer_stage_duration_seconds_sum", received, ("stage", "wire")] == stats.wire
    assert there["kvxfer_sessions", sent] == here["kvxfer_sessions", received] == 1
    assert (here["kvxfer_claims",], there["kvxfer_offers",]) == (1, 1)
    assert there["kvxfer_refusals_total", ("code", "tokens_outside_offer"), ("direction", "sent")] == 1
    assert there["kvxfer_offers_ended_total", ("ending", "released")] == 1
    assert here["kvxfer_ready",] == here["kvxfer_answering",] == 1
    share = decode.describe()["arena"]["receive"]
    assert here["kvxfer_arena_capacity_bytes", ("share", "receive")] == share.capacity_bytes
    assert here["kvxfer_arena_bytes", ("share", "receive"), ("state", "free")] == share.capacity_bytes
    name = "kvxfer_transfer_duration_seconds_bucket"
    buckets = {dict(key[1:])["le"]: value for key, value in here.items() if key[0] == name}
    assert list(buckets) == [*map(repr, SECONDS), "+Inf"]
    assert buckets == {le: float(stats.duration <= float(le)) for le in buckets}, "they are cumulative"


async def test_names_and_labels_keep_to_the_conventions_and_every_metric_is_explained(stage):
    prefill, decode, _ = await played(stage)
    text = await scrape(prefill, decode)
    labels = {"engine", "rank", "side", "route", "outcome", "stage", "share", "state", "direction", "code", "kind"}
    labels |= {"reason", "ending", "version", "le"}
    families = list(text_string_to_metric_families(text))
    for family in families:
        assert family.name.startswith("kvxfer_")
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|us|seconds|bytes)_\w*(ms|us|seconds|bytes)$", family.name)
        if family.type == "counter":
            assert all(sample.name == f"{family.name}_total" for sample in family.samples)
        assert {label for sample in family.samples for label in sample.labels} <= labels
        who = {(sample.labels["engine"], sample.labels["rank"]) for sample in family.samples}
        assert who <= {("prefill", "0"), ("decode", "0")}
        if family.type == "gauge":
            assert len(who) == 2, family.name
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    named = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    assert set(re.findall(r"`(kvxfer_\w+)`", page)) == named


def named(query):
    """Metrics that a query names, with the labels that it asks of them or groups by."""
    bare = re.sub(r'"[^"]*"', '""', query)
    asked_for = set(re.findall(r"by \(([\w, ]*)\)", bare))
    grouped = {label for group in asked_for for label in re.split(r", *", group)}
    for name, selector in re.findall(r"(\bkvxfer_\w+)(\{[^}]*\})?", bare):
        yield name, grouped | set(re.findall(r"(\w+) *=~?", selector))


def queries():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"], set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"], set(re.findall(r", (\w+)\)$", variable["definition"]))


async def test_every_query_of_the_dashboard_finds_what_metrics_serve(stage):
    prefill, decode, _ = await played(stage, route="staged", integrity="full")
    metrics = counters(prefill)  # what only misfortune counts, so that every series is there
    metrics.fell_back("x")
    metrics.memory_refused["x"] += 1
    metrics.results_dropped["x"] += 1
    served: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(await scrape(prefill, decode)):
        for sample in family.samples:
            served.setdefault(sample.name, set()).update(sample.labels)
    asked_for = list(queries())
    assert len(asked_for) > 20
    used = set()
    for query, shown in asked_for:
        found = list(named(query))
        assert found, query
        for name, labels in found:
            assert name in served, query
            assert labels | shown <= served[name], query
            used.add(name)
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in served}
    assert families - {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} == set(), "shown nowhere"


# --- health


async def test_a_worker_is_ready_until_it_drains_and_of_several_each_must_be(stage):
    workers = [await stage.worker(name, Cache()) for name in ("one", "two")]
    async with kvxfer.tools.admin.serve(workers, address="127.0.0.1:0") as server:
        assert await asked(server, "healthz") == (200, "text/plain; charset=utf-8", "ok\n")
        assert await why(server) == []
        workers[1].begin_drain()
        assert await why(server) == ["it is draining"]
        told = json.loads((await asked(server, "readyz"))[2])
        assert told == {"ready": False, "reasons": {"one[0]": [], "two[0]": ["it is draining"]}}
        await workers[1].aclose()
        assert await why(server) == ["it is closed"]
        assert (await asked(server, "healthz"))[0] == 200


async def test_several_with_one_name_are_told_apart_and_each_must_be_ready(stage):
    workers = [await stage.worker(f"same{number}", Cache()) for number in range(3)]
    names = ["same", "same#2", "same#3"]
    async with kvxfer.tools.admin.serve(workers, address="127.0.0.1:0") as server:
        workers[1].begin_drain()
        told = json.loads((await asked(server, "readyz"))[2])
        assert told["reasons"] == {"same[0]": [], "same#2[0]": ["it is draining"], "same#3[0]": []}
        assert [one["engine"] for one in json.loads((await asked(server, "status.json"))[2])["workers"]] == names
        found = [
            (sample.name, *sorted(sample.labels.items()))
            for family in text_string_to_metric_families((await asked(server, "metrics"))[2])
            for sample in family.samples
        ]
        assert len(found) == len(set(found)) > 0


async def test_a_worker_that_closed_with_its_own_loop_is_said_to_be_closed(stage):
    decode = await stage.worker("decode", Cache(), loop="own")
    await decode.aclose()
    async with kvxfer.tools.admin.serve(decode, address="127.0.0.1:0", patience=0.5) as server:
        assert await why(server) == ["its event loop is closed, and the worker with it"]


async def test_a_loop_that_stands_still_is_said_to(stage):
    """The server answers while the worker's loop is held, as by a model step, and after."""
    decode = await stage.worker("decode", Cache())
    async with kvxfer.tools.admin.serve(decode, address="127.0.0.1:0", patience=0.2) as server:
        told, done = [], threading.Event()

        def visit():
            told.extend(ask(server, path) for path in ("readyz", "metrics", "status.json", "healthz"))
            done.set()

        thread = threading.Thread(target=visit)
        thread.start()
        assert done.wait(60)  # holds this loop, which is the worker's
        thread.join()
        assert [code for code, _, _ in told] == [503, 200, 200, 200]
        reason = "its event loop has not answered for 0.2 s"
        assert json.loads(told[0][2])["reasons"] == {"decode[0]": [reason]}
        assert samples(told[1][2])["kvxfer_answering",] == samples(told[1][2])["kvxfer_ready",] == 0
        (worker,) = json.loads(told[2][2])["workers"]
        assert (worker["state"], worker["reasons"]) == (None, [reason])
        assert await why(server) == []


class Silent:
    """A worker whose loop says nothing until it is told to."""

    def __init__(self):
        self.config, self.asked, self._over = Config(engine="silent"), [], False

    def describe_soon(self):
        if self._over:
            raise RequestError("it is over")
        self.asked.append(Future())
        return self.asked[-1]

    def end(self):
        self._over = True
        for future in self.asked:
            future.set_exception(RequestError("it is over"))


async def test_it_says_that_it_is_alive_though_all_its_threads_wait():
    """Else many who look at a worker that stands still would have its process restarted."""
    silent = Silent()
    async with kvxfer.tools.admin.serve(silent, address="127.0.0.1:0", patience=100) as server:
        with ThreadPoolExecutor(60) as visitors:
            visits = [visitors.submit(ask, server, "readyz") for _ in range(60)]
            try:
                await eventually(lambda: len(silent.asked) == 40)  # starlette's threads
                for path in ("healthz", ""):
                    assert (await asked(server, path))[0] == 200
            finally:
                silent.end()
            assert {visit.result()[0] for visit in visits} == {503}


async def test_a_fabric_that_stands_still_is_said_to(stage, monkeypatch):
    decode = await stage.worker("decode", Cache())
    go = threading.Event()
    monkeypatch.setattr(transport(decode), "progress", go.wait)
    async with kvxfer.tools.admin.serve(
        decode, address="127.0.0.1:0", limits=kvxfer.tools.admin.Limits(stuck_after=0.05)
    ) as server:
        release = mover(decode).hold_awake()
        try:
            await eventually(lambda: decode.describe()["fabric"]["late"] > 0.05)
            (reason,) = await why(server)
            assert re.fullmatch(r"its fabric has stood still for \d+ s", reason)
        finally:
            release()
            go.set()
        await eventually(lambda: decode.describe()["fabric"]["late"] == 0.0)
        assert await why(server) == []


async def test_a_fabric_that_broke_is_named(stage, monkeypatch):
    decode = await stage.worker("decode", Cache())

    def broken():
        raise FabricError("no such device")

    monkeypatch.setattr(transport(decode), "progress", broken)
    mover(decode).hold_awake()()
    release = mover(decode).hold_awake()
    await eventually(lambda: decode.describe()["fabric"]["broken"])
    release()
    async with kvxfer.tools.admin.serve(decode, address="127.0.0.1:0") as server:
        (reason,) = await why(server)
    assert reason.startswith("its fabric is broken: ")
    assert "no such device" in reason


async def test_a_full_quarantine_is_a_reason_and_shown(stage):
    decode = await stage.worker("decode", Cache())
    capacity = decode.describe()["arena"]["receive"].capacity_bytes
    held = [take(decode, "receive", capacity // 4, f"peer {n}") for n in range(2)]
    async with kvxfer.tools.admin.serve(decode, address="127.0.0.1:0") as server:
        held[0].quarantine("peer 0 is silent")
        assert await why(server) == []
        held[1].quarantine("peer 1 is silent")
        assert await why(server) == [f"50% of the receive share of its arena ({capacity // 2} bytes) is in quarantine"]
        (worker,) = json.loads((await asked(server, "status.json"))[2])["workers"]
        assert worker["state"]["arena"]["receive"]["extents"][0] == {
            "offset": 0,
            "length": capacity // 4,
            "state": "quarantined",
            "peer": "peer 0",
            "why": "peer 0 is silent",
        }
        assert worker["state"]["arena"]["receive"]["quarantined_bytes"] == capacity // 2
        assert worker["state"]["metrics"]["quarantined_bytes_ever"] == capacity // 2
        for one in held:
            one.settle()
        assert await why(server) == []


@pytest.mark.parametrize("bad", [{"quarantine": 0}, {"quarantine": 1.5}, {"stuck_after": 0}])
def test_limits_make_sense(bad):
    with pytest.raises(ConfigError):
        kvxfer.tools.admin.Limits(**bad)


# --- status


async def test_lists_have_a_bound(stage, monkeypatch):
    monkeypatch.setattr("kvxfer.tools.admin.status._LISTED", 2)
    decode = await stage.worker("decode", Cache())
    prefill = await stage.worker("prefill", Cache())
    transfers = [decode.start_fetch(prefill.engine.ticket(f"r{n}"), [n], tokens=range(4), timeout=30) for n in range(3)]
    held = [take(decode, "receive", 512) for _ in range(3)]
    (worker,) = status(look([decode], 2.0), LIMITS)["workers"]
    assert len(worker["state"]["transfers"]) == len(worker["state"]["arena"]["receive"]["extents"]) == 2
    assert worker["state"]["arena"]["receive"]["extents_left_out"] == 1
    assert worker["state"]["receiving"] == 3
    for one in held:
        one.release()
    for transfer in transfers:
        transfer.cancel()
    await asyncio.gather(*transfers, return_exceptions=True)


# --- serving


async def test_it_can_be_mounted_into_an_application(stage):
    decode = await stage.worker("decode", Cache())
    application = Starlette(routes=[Mount("/kvxfer", kvxfer.tools.admin.app(decode))])
    async with AdminServer(application, "127.0.0.1:0") as server:
        assert (await asked(server, "kvxfer/readyz"))[0] == 200
        assert "<title>kvxfer</title>" in (await asked(server, "kvxfer/"))[2]
        assert (await asked(server, "readyz"))[0] == 404


async def test_the_mounted_application_answers_on_the_worker_s_own_loop(stage):
    import httpx

    decode = await stage.worker("decode", Cache())
    transport = httpx.ASGITransport(kvxfer.tools.admin.app(decode, patience=30))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        for path in ("/", "/metrics", "/healthz", "/readyz", "/status.json", "/grafana.json"):
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert answer.headers["cache-control"] == "no-store"
        assert (await client.post("/status.json")).status_code == 405
        assert (await client.get("/grafana.json")).json() == DASHBOARD
        page = await client.get("/")
        policy = page.headers["content-security-policy"]
    assert '<body data-seconds="38">' in page.text, "longer than the worker may take to answer"
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


async def test_what_an_application_changes_of_one_answer_is_no_part_of_the_next(stage):
    import httpx

    decode = await stage.worker("decode", Cache())
    transport = httpx.ASGITransport(GZipMiddleware(kvxfer.tools.admin.app(decode)))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        for path in ("/", "/grafana.json", "/status.json"):
            for asked_for in ("gzip", "identity"):
                answer = await client.get(path, headers={"accept-encoding": asked_for})
                assert answer.headers.get("content-encoding", "identity") == asked_for, path
                assert answer.text[0] in "<{"


def test_a_blocking_worker_is_served_too(network):
    config = Config(engine="stepping", arena_bytes="64KiB", chunk_bytes="2KiB")
    with (
        BlockingWorker(config, (), lambda: LoopbackTransport("a", network)) as worker,
        kvxfer.tools.admin.serve(worker, address="127.0.0.1:0") as server,
    ):
        (reason,) = json.loads(ask(server, "readyz")[2])["reasons"]["stepping[0]"]
        assert "call register() first" in reason
        assert [one["state"] for one in json.loads(ask(server, "status.json")[2])["workers"]] == [None]
        worker.register(Cache().tensors)
        assert ask(server, "readyz")[0] == 200
        assert samples(ask(server, "metrics")[2])["kvxfer_arena_capacity_bytes", ("share", "send")] > 0


async def test_it_stops_and_gives_its_port_back(stage):
    decode = await stage.worker("decode", Cache())
    async with kvxfer.tools.admin.serve(decode, address="127.0.0.1:0") as server:
        host, _, port = server.address.rpartition(":")
        assert (host, port) != ("127.0.0.1", "0")
        with pytest.raises(ConfigError, match=r"cannot be taken: .*in use"):
            kvxfer.tools.admin.serve(decode, address=server.address).start()
        with pytest.raises(RequestError):
            server.start()
    assert all(thread.name != "kvxfer-admin" for thread in threading.enumerate())
    server.stop()
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) == errno.ECONNREFUSED


def test_by_default_it_is_reached_from_this_host_alone():
    assert kvxfer.tools.admin.serve([]).address.startswith("127.0.0.1:")


OURS = [b"localhost", b"LOCALHOST:9471", b"127.0.0.1:1", b"127.7.7.7", b"[::1]:9471", b"worker.localhost"]
OTHERS = [b"evil.example:9471", b"10.0.0.1", b"localhost.evil.example", b"", b"[::1", b"\xff"]
OTHERS += [b"127.0.0.1.evil.example"]


def test_on_this_host_alone_it_refuses_a_page_from_elsewhere_that_points_here():
    with kvxfer.tools.admin.serve([], address="127.0.0.1:0") as server:
        assert {name: code_for(server, name) for name in OURS} == dict.fromkeys(OURS, 200)
        assert {name: code_for(server, name) for name in OTHERS} == dict.fromkeys(OTHERS, 421)


def test_where_others_reach_it_it_answers_to_any_name_and_that_is_warned_of(caplog):
    with kvxfer.tools.admin.serve([], address="0.0.0.0:0") as server:
        assert code_for(server, b"kvxfer.example:9471") == 200
    assert [record.kvxfer["event"] for record in caplog.records if record.levelname == "WARNING"] == ["admin_exposed"]


def test_what_serves_it_says_nothing_and_leaves_the_application_s_own_server_its_lines(caplog):
    logging.getLogger("uvicorn.access").addHandler(handler := logging.NullHandler())
    try:
        with caplog.at_level(logging.INFO), kvxfer.tools.admin.serve([], address="127.0.0.1:0") as server:
            assert code_for(server, b"localhost") == 200
            assert code_for(server, b"localhost\r\nno header") == 400
            assert logging.getLogger("uvicorn.access").handlers == [handler]
            for name in ("uvicorn.access", "uvicorn.error"):
                logging.getLogger(name).info("of the application's")
    finally:
        logging.getLogger("uvicorn.access").removeHandler(handler)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("uvicorn")]
    assert said == ["of the application's"] * 2


def code_for(server, name):
    """The status for who calls the host so."""
    with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), 30) as stream:
        stream.sendall(b"GET /healthz HTTP/1.1\r\nConnection: close\r\nHost: " + name + b"\r\n\r\n")
        with stream.makefile("rb") as answer:
            return int(answer.readline().split()[1])


@pytest.mark.parametrize("address", ["", "9471", "127.0.0.1", "127.0.0.1:x", "unix:/x"])
def test_a_malformed_address_is_refused(address):
    with pytest.raises(ConfigError):
        kvxfer.tools.admin.serve([], address=address)


@pytest.mark.parametrize("given", [None, ["w"]])
def test_what_nobody_could_look_at_is_refused(given):
    with pytest.raises(RequestError, match="workers must be"):
        kvxfer.tools.admin.serve(given)


@pytest.mark.parametrize("make", [kvxfer.tools.admin.serve, kvxfer.tools.admin.Collector])
@pytest.mark.parametrize("patience", ["2s", float("inf")])
def test_a_patience_that_nobody_has_is_refused_where_it_is_given(make, patience):
    with pytest.raises(RequestError, match="patience must be a number of seconds"):
        make([], patience=patience)


@pytest.mark.parametrize("package", ["prometheus_client", "starlette", "uvicorn"])
def test_what_is_missing_is_named_with_its_remedy(package):
    code = f"import sys; sys.modules[{package!r}] = None\nimport kvxfer.tools.admin"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"kvxfer.tools.admin needs {package}, which is not installed: pip install {package}" in done.stderr
