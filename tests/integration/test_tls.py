"""Control streams over TCP with TLS: between two workers, with strangers, and while certificates are renewed."""

import asyncio
import contextlib
import logging
import shutil
import socket
import time

import pytest
from certificates import Authority
from inside import cut, pause_behind_every_frame, sessions, tasks
from stage import DEFAULTS, Cache, Copied, eventually, handshakes, quiet

from kvxfer import ProtocolError, UnreachableError

HERE = "tcp:127.0.0.1:0"


@pytest.fixture
def said(caplog):
    """Every event of kvxfer's, as (name, data)."""
    caplog.set_level(logging.DEBUG, "kvxfer")
    return lambda name: [r.kvxfer for r in caplog.records if getattr(r, "kvxfer", {}).get("event") == name]


async def pair(stage, prefill, decode, **config):
    """Two workers over TCP with these settings `tls`, and what brings a request from one to the other."""
    first = await stage.worker("prefill", Cache(), listen=HERE, tls=prefill, **config)
    second = await stage.worker("decode", Cache(), tls=decode, **config)
    return first, second, lambda request: stage.bring(first, second, request)


@contextlib.asynccontextmanager
async def stranger(worker):
    """A plain TCP stream to a worker."""
    _, host, port = worker.card.endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def refused(awaitable, error: type[Exception] = UnreachableError):
    """What the error said, which must come at once, and not when a handshake has taken too long."""
    began = time.monotonic()
    with pytest.raises(error) as caught:
        await awaitable
    assert time.monotonic() - began < DEFAULTS["connect_timeout"]
    return str(caught.value)


async def test_many_requests_over_one_stream(stage, authority, monkeypatch):
    paused = pause_behind_every_frame(monkeypatch)
    first, second, _ = await pair(stage, authority.issue(), authority.issue(), route="staged")
    copied = Copied(stage.caches[second]).bring(stage.caches[first], range(16), range(16), range(64))
    begun = [stage.begin(first, second, f"r{n}", [n], [n], range(4), timeout=10) for n in range(16)]
    await asyncio.gather(*(transfer for _, transfer in begun))
    copied.check()
    await quiet(first, second)
    assert len(second.describe()["peers"]) == 1
    (peer,) = first.describe()["peers"]
    assert peer["endpoint"].startswith("tcp:127.0.0.1:")
    assert peer["endpoint"] not in (HERE, first.card.endpoint), "that is where the peer is"
    assert any(link.encrypted for link in paused)


# --- what is refused, on both sides with what to set


async def test_a_plain_peer_is_told_what_to_set(stage, authority, said):
    first, _, bring = await pair(stage, authority.issue(), {})
    assert "set tls.authorities" in await refused(bring("r"))
    await eventually(lambda: said("handshake_failed") and not handshakes(first))
    (event,) = said("handshake_failed")
    assert "does not speak TLS; set tls.authorities there" in event["error"]
    assert event["peer"].startswith("tcp:127.0.0.1:")


async def test_who_meets_a_plain_listener_is_told_what_to_set(stage, authority):
    _, _, bring = await pair(stage, {}, authority.issue())
    text = await refused(bring("r"))
    assert ": ;" not in text
    assert text.endswith("; if it listens without, set tls.authorities there too, or see its log")


async def test_a_peer_that_answers_with_an_alert_speaks_tls(stage):
    async def alert(_, writer):
        writer.write(bytes.fromhex("15030300020246"))
        await writer.drain()
        writer.close()

    decode = await stage.worker("decode", Cache())
    server = await asyncio.start_server(alert, "127.0.0.1", 0)
    stage.stack.callback(server.close)
    host, port = server.sockets[0].getsockname()
    ticket = decode.engine.ticket("r") | {"endpoints": {"prefix": f"tcp:{host}:{port}"}}
    assert "TLS" in await refused(decode.fetch(ticket, [3], tokens=range(4)), ProtocolError)


@pytest.mark.parametrize("expired", ["prefill", "decode"])
async def test_an_expired_certificate_is_refused(stage, authority, said, expired):
    sides = {"prefill": authority.issue(), "decode": authority.issue(file="other")}
    sides[expired] = authority.issue(file="old", expired=True)
    _, _, bring = await pair(stage, **sides)
    text = await refused(bring("r"))
    if expired == "decode":  # who is refused may only know that it was
        await eventually(lambda: said("handshake_failed"))
        text = said("handshake_failed")[0]["error"]
    assert "certificate has expired; renew it there" in text


# --- time-outs and strangers


async def test_a_listener_that_says_nothing_is_left_in_time(stage, authority):
    """The kernel connects at once, so the bound is that of the handshake and not that of connecting."""
    decode = await stage.worker("decode", Cache(), tls=authority.issue(), connect_timeout=0.1)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        host, port = deaf.getsockname()
        ticket = decode.engine.ticket("r") | {"endpoints": {"prefix": f"tcp:{host}:{port}"}}
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="handshake"):
            await decode.fetch(ticket, [3], tokens=range(4))
        assert 0.5 < time.monotonic() - began < 10
    await eventually(lambda: not handshakes(decode))


@pytest.mark.parametrize("guarded", [True, False])
async def test_a_stranger_that_says_nothing_is_cut_off_in_time(stage, authority, caplog, guarded):
    tls = authority.issue() if guarded else {}
    first, _, bring = await pair(stage, tls, tls, connect_timeout=0.2)
    async with stranger(first) as (reader, _):
        await eventually(lambda: handshakes(first) == 1)
        await bring("r")  # others are served meanwhile
        with contextlib.suppress(ConnectionError):
            await reader.read()
    await eventually(lambda: not handshakes(first))
    (heard,) = [record for record in caplog.records if record.getMessage().startswith("handshake_failed")]
    assert heard.levelname == "WARNING"


async def test_closing_ends_handshakes_under_way(stage, authority):
    first, _, _ = await pair(stage, authority.issue(), authority.issue())
    async with stranger(first) as (reader, _):
        await eventually(lambda: handshakes(first) == 1)
        began = time.monotonic()
        await first.aclose(drain=False)
        assert time.monotonic() - began < 10
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    assert not tasks(first)
    with pytest.raises(ConnectionRefusedError):
        async with stranger(first):
            pass


async def test_accepting_goes_on_when_descriptors_are_free_again(stage, authority, said, monkeypatch):
    failures, accept = [OSError(24, "Too many open files")], socket.socket.accept

    def scarce(sock):
        if failures:
            raise failures.pop()
        return accept(sock)

    monkeypatch.setattr("kvxfer.peers.connections._ACCEPT_PAUSE", 0.01)
    monkeypatch.setattr(socket.socket, "accept", scarce)
    _, _, bring = await pair(stage, authority.issue(), authority.issue())
    await bring("r")
    assert [event["error"] for event in said("stream_not_accepted")] == ["[Errno 24] Too many open files"]


async def test_no_more_strangers_agree_on_tls_than_streams_may_be_open(stage, authority, said, monkeypatch):
    """Each takes a quarter of a MiB before it has shown who it is."""
    monkeypatch.setattr("kvxfer.config._MANY", 1)
    monkeypatch.setattr("kvxfer.peers.connections._ACCEPT_PAUSE", 0.01)
    first, _, bring = await pair(stage, authority.issue(), authority.issue(), max_transfers=1)
    async with contextlib.AsyncExitStack() as strangers:
        for _ in range(8):
            await strangers.enter_async_context(stranger(first))
        await eventually(lambda: said("stream_not_accepted") and handshakes(first) >= 4)
        assert handshakes(first) == 4
    await bring("r")


# --- renewal


def replace(settings, by):
    """Put other files where the settings point, each at once, as who renews certificates does."""
    for name, path in settings.items():
        shutil.copy(by[name], f"{path}.new")
        shutil.move(f"{path}.new", path)


async def test_renewed_files_count_from_the_next_handshake_on(stage, authority, tmp_path, said):
    ours, new = authority.issue(), Authority(tmp_path, "new").issue()
    first, second, bring = await pair(stage, ours, ours)
    await bring("r")
    replace(ours, new)
    await bring("s")
    assert not said("certificates_renewed"), "the stream that is open goes on"
    cut(second)
    await eventually(lambda: not sessions(first, second))
    await bring("t")
    assert len(said("certificates_renewed")) == 2
    old = await stage.worker("old", Cache(), tls=Authority(tmp_path, "old").issue())
    first.offer("u", [1], tokens=4)
    await refused(old.fetch(first.engine.ticket("u"), [3], tokens=range(4)))


async def test_files_that_cannot_be_used_change_nothing(stage, authority, tmp_path, said):
    ours = authority.issue()
    _, _, bring = await pair(stage, ours, ours)
    other = Authority(tmp_path, "other").issue()
    replace({"key": ours["key"]}, other)  # renewed in part: it does not belong to the certificate yet
    await bring("r")
    events = said("certificates_not_renewed")
    assert len(events) == 2
    assert "does not belong to the certificate" in events[0]["error"]


# --- what guards an endpoint

EVERYWHERE = {"listen": "tcp:0.0.0.0:0", "advertise": "tcp:127.0.0.1:0"}


@pytest.mark.parametrize(
    ("given", "event", "about"),
    [
        (EVERYWHERE, "endpoint_not_guarded", "neither TLS nor a secret"),
        (EVERYWHERE | {"tls": {"mutual": False}}, "endpoint_not_guarded", "tls.mutual is off"),
        (EVERYWHERE | {"secret": "drawn at random"}, "endpoint_not_encrypted", "when a stream begins"),
        (EVERYWHERE | {"secret": "drawn at random", "tls": {"mutual": False}}, None, ""),
        (EVERYWHERE | {"tls": {}}, None, ""),
        ({"listen": HERE}, None, ""),
        ({"listen": "tcp:[::1]:0"}, None, ""),
        ({"listen": "unix"}, None, ""),
    ],
)
async def test_what_guards_an_endpoint_is_said(stage, authority, said, given, event, about):
    if given["listen"] == "tcp:[::1]:0" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    given = dict(given)
    if "tls" in given:
        given["tls"] = authority.issue() | given["tls"]
    if "secret" in given:
        given["secret"] = "drawn at random, so it is long"
    worker = await stage.worker("worker", Cache(), **given)
    for name in ("endpoint_not_guarded", "endpoint_not_encrypted"):
        events = said(name)
        assert len(events) == (name == event)
        if events:
            assert about in events[0]["reason"]
            assert events[0]["endpoint"].rpartition(":")[2] == worker.card.endpoint.rpartition(":")[2]
