"""What must stay secret stays out of every log line, error, description and repr of a whole scene."""

import gc
import json
import logging
import traceback
from pathlib import Path

import pytest
from certificates import Authority
from inside import identity_key
from prometheus_client import CollectorRegistry, generate_latest
from stage import KEY, Cache, Tap
from typer.testing import CliRunner

from kvxfer import KvxferError
from kvxfer.protocol.framing import encode
from kvxfer.protocol.messages import Fetch
from kvxfer.tickets import EngineCard, Issuer, Ticket
from kvxfer.tools.admin import Collector, Limits
from kvxfer.tools.admin.look import look
from kvxfer.tools.admin.status import status
from kvxfer.tools.cli import app
from kvxfer.tools.inspect import frames

SECRET = "a secret that nobody may ever read"


class Ears(logging.Handler):
    """Everything that anybody logs, as it would be printed, and the data beside it."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.heard: list[str] = []

    def emit(self, record):
        self.heard += [self.format(record), repr(record.args), repr(getattr(record, "kvxfer", None))]


@pytest.fixture
def ears():
    handler, root = Ears(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def forms(material: bytes):
    """How bytes would show: as text, in hexadecimal, as Python writes them; the first half is too much already."""
    half = material[: max(8, len(material) // 2)]
    return {half.hex(), repr(half)[2:-1], half.decode("latin-1")}


def texts_of(error):
    """A chain of errors as text, with tracebacks."""
    return [*traceback.format_exception(error), repr(error), repr(error.__cause__), repr(error.__context__)]


def served_of(worker):
    """All that an operator is served of a worker."""
    registry = CollectorRegistry()
    registry.register(Collector(worker))
    return [json.dumps(status(look([worker], 5.0), Limits())), generate_latest(registry).decode()]


async def play(stage, tls):
    """Fetches that succeed, fail, and are refused; what anybody could read of it."""
    config = {"secret": SECRET, "tls": tls, "listen": "tcp:127.0.0.1:0", "world": 1}
    prefill = await stage.worker("prefill", Cache(), **config)
    decode = await stage.worker("decode", Cache(), **config)
    stranger = await stage.worker("stranger", Cache(), **{**config, "secret": "another secret, also long"})
    for worker in (prefill, decode):
        worker.join(EngineCard.of([worker.card]), key=KEY)
    read: list[str] = []
    prefill.offer("r", [1, 2], tokens=8)
    ticket = prefill.engine.ticket("r")
    result = await decode.fetch(ticket, [3, 4], tokens=range(8), timeout=5)
    read += [repr(result), str(result.stats)]
    prefill.offer("s", [1, 2], tokens=8)
    forged = prefill.engine.ticket("s") | {"mac": ticket["mac"]}
    attempts = [
        (decode, forged, [3, 4], range(8)),
        (decode, prefill.engine.ticket("s"), [3, 4, 5], range(12)),  # more than was offered
        (decode, prefill.engine.ticket("s") | {"mac": "zz"}, [3], range(4)),
        (stranger, prefill.engine.ticket("s"), [3, 4], range(8)),
        (decode, prefill.engine.ticket("never"), [3, 4], range(8)),
    ]
    for worker, given, blocks, tokens in attempts:
        with pytest.raises(KvxferError) as caught:
            await worker.fetch(given, blocks, tokens=tokens, timeout=0.5)
        read += texts_of(caught.value)
    claim = decode.claim(prefill.engine.ticket("s"))
    transfer = decode.start_fetch(prefill.engine.ticket("s"), [3, 4], tokens=range(8))
    read += [repr(thing) for thing in (claim, transfer, prefill.engine, Ticket.parse(ticket))]
    await transfer
    for worker in (prefill, decode):
        read += [repr(worker), repr(worker.config), repr(worker.describe()), repr(worker.config.effective())]
        read += served_of(worker)
        read += [repr(worker.card), repr(worker.config.model_dump())]
    read += [repr(thing) for thing in gc.get_objects() if type(thing).__module__.startswith("kvxfer.")]
    return prefill, decode, read


def lines_of(key):
    """The lines of a PEM file that are not its frame."""
    return Path(key).read_text().splitlines()[1:-1]


async def test_nothing_secret_is_said_anywhere(stage, tmp_path, ears, monkeypatch):
    tap = Tap(monkeypatch)
    tls = Authority(tmp_path).issue()
    prefill, decode, read = await play(stage, tls)
    read += [line for lines, _ in frames(b"".join(map(encode, tap.of(Fetch)))) for line in lines] + [repr(tap.sent)]
    monkeypatch.setenv("KVXFER_SECRET", SECRET)
    for name, path in tls.items():
        monkeypatch.setenv(f"KVXFER_TLS__{name.upper()}", path)
    printed = CliRunner().invoke(app, ["config"])
    assert printed.exit_code == 0, printed.output
    assert tls["key"].rsplit("/", 1)[1] in printed.output.replace("\n", "").replace(" ", ""), "paths are no secrets"
    read.append(printed.output)
    key_lines = lines_of(tls["key"])
    macs = [Ticket.parse(Issuer(prefill.engine.card, KEY).ticket(request)).ref().mac for request in ("r", "s", "never")]
    keys = [identity_key(worker) for worker in (prefill, decode)]
    private = [key._private.private_bytes_raw() for key in keys] + [keys[0].shared(keys[1].incarnation)]
    secrets = [SECRET.encode(), KEY, *private, *macs, *(line.encode() for line in key_lines)]
    said = "\n".join([*ears.heard, *read])
    assert "fetch_ended" in said
    assert "peer_connected" in said
    found = {form for material in secrets for form in forms(material) if form in said}
    assert not found
