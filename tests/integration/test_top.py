"""`kvxfer top`: what it draws is what workers say, whoever answers at the address."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest
from rich.console import Console
from stage import Cache, eventually
from typer.testing import CliRunner

import kvxfer.tools.admin
from kvxfer.tools import top as module
from kvxfer.tools.cli import app
from kvxfer.tools.top import Sight, Top


def drawn(top, sights):
    console = Console(width=400, no_color=True)
    with console.capture() as capture:
        console.print(top.draw(sights))
    return capture.get()


def row(text, start):
    (found,) = [line for line in text.splitlines() if line.startswith(start)]
    return found


async def test_it_shows_workers_and_what_is_under_way(stage):
    prefill, decode = await stage.pair(Cache(), Cache(), route="staged")
    prefill.offer("r", [1, 2], tokens=8)
    moved = (await decode.fetch(prefill.engine.ticket("r"), [3, 4], tokens=range(8), timeout=10)).stats.bytes
    waiting = decode.start_fetch(prefill.engine.ticket("later"), [5], tokens=range(4), timeout=60)
    await eventually(lambda: prefill.describe()["transfers"])
    async with kvxfer.tools.admin.serve([prefill, decode], address="127.0.0.1:0") as server:
        top = Top([server.address])
        first = await asyncio.to_thread(top.look)
        assert first[0].ready
        text = drawn(top, first)
        assert row(text, "decode[0]").split()[:4] == ["decode[0]", "ready", "-", "-"]  # no rate before a second look
        assert f"{moved / 1024:.4g} KiB" in row(text, "decode[0]")
        listed = [line for line in text.splitlines() if " later " in line]
        assert len(listed) == 2
        assert all("asking" in line and "0/?" in line for line in listed)
        prefill.begin_drain()
        second = await asyncio.to_thread(top.look)
        assert not second[0].ready
        assert "it is draining" in row(drawn(top, second), "prefill[0]")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def state(**changes):
    share = {"capacity_bytes": 400, "free_bytes": 100, "quarantined_bytes": 0}
    side = {"bytes": {"staged": 0}, "transfers": {}}
    base = {
        "incarnation": "a",
        "metrics": {"receive": side, "send": side, "loop_lag_recent_seconds": 0.5},
        "receiving": 0,
        "sending": 0,
        "arena": {"receive": share, "send": share},
        "peers": [],
        "transfers": [],
    }
    return base | changes


def said(at, **changes):
    worker = {"engine": "e", "rank": 3, "ready": True, "reasons": [], "state": state(**changes)}
    return [Sight("x:1", {"monotonic": at, "workers": [worker]})]


def transfer(seconds, **changes):
    one = {"seconds": seconds, "side": "send", "request": "r", "peers": [], "route": "", "step": "asking"}
    return one | {"in_doubt": False, "chunks_done": 0, "chunks": 1, "bytes": 0} | changes


def moving(received, sent):
    return {
        "receive": {"bytes": {"staged": received}, "transfers": {"ok": 7, "timeout": 2}},
        "send": {"bytes": {"mapped": sent}, "transfers": {"ok": 1}},
        "loop_lag_recent_seconds": 0.5,
    }


def test_rates_are_those_between_two_looks():
    top = Top(["x:1"])
    drawn(top, said(10.0, metrics=moving(1024, 0)))
    cells = row(drawn(top, said(14.0, metrics=moving(5 * 1024, 4))), "e[3]").split()
    assert " ".join(cells) == "e[3] ready 1 KiB 1 B 5 KiB 4 B 7+1 2 0+0 75%+75% 500 ms"
    anew = row(drawn(top, said(15.0, metrics=moving(0, 0), incarnation="b")), "e[3]").split()
    assert anew[2:4] == ["-", "-"]  # it began anew: nothing was taken back


def test_quarantine_is_said():
    share = {"capacity_bytes": 400, "free_bytes": 300, "quarantined_bytes": 100}
    text = drawn(Top(["x:1"]), said(1.0, arena={"receive": share, "send": {**share, "quarantined_bytes": 0}}))
    assert "25% (25% in quarantine)+25%" in text


def test_a_terminal_obeys_nothing_that_a_peer_is_called():
    one = transfer(1.0, request="\x1b[2J[red]r", peers=["\x07p"], in_doubt=True)
    text = drawn(Top(["x:1"]), said(1.0, transfers=[one], receiving="\x1b]0;title"))
    assert "?[2J[red]r" in text
    assert "?]0;title+0" in text
    assert "asking, in doubt" in text
    assert not {"\x1b", "\x07"} & set(text)


def test_more_than_a_page_says_is_counted():
    (sight,) = said(1.0, transfers=[transfer(1.0)] * 256, receiving=900, sending=100)
    assert "and 980 more" in drawn(Top(["x:1"]), [sight])
    assert sight.status is not None
    workers = sight.status["workers"] * 100
    text = drawn(Top(["x:1"]), [Sight("x:1", {"monotonic": 1.0, "workers": workers})])
    assert text.count("e[3]  ") == 64 + 20
    assert "and 36 more" in row(text, "x:1")


@pytest.mark.parametrize("place", ["http://127.0.0.1:{}/status.json", "ftp://127.0.0.1:{}/status.json"])
def test_it_is_led_nowhere_else(speaking, place):
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        location = place.format(elsewhere.getsockname()[1]).encode()
        with speaking(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + location + b"\r\n\r\n") as address:
            (sight,) = Top([address]).look()
        assert sight.why == "answers 302"
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "no answer: "),
        (OK + b"A: x\r\n" * 200 + b"\r\n", "more than 100 headers"),
        (OK + b"\r\n" + b"[" * 100_000, "recursion"),
        (b"", "no answer: "),
        (OK + b"\r\nno JSON", "no answer: "),
    ],
)
def test_what_does_not_speak_http_or_json_is_named(speaking, answer, why):
    with speaking(answer) as address:
        (sight,) = Top([address]).look()
    assert sight.why.startswith("no answer: ")
    assert why in sight.why


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"workers": [{}]}', b'{"workers": 5}'])
def test_something_else_at_the_address_is_named(speaking, body):
    with speaking(OK + b"\r\n" + body) as address:
        sights = Top([address]).look()
    assert not sights[0].ready
    assert "is no admin page of kvxfer" in drawn(Top([]), sights)


@pytest.mark.parametrize(
    ("begins", "drop"),
    [(OK + b"Content-Length: 100000\r\n\r\n", b" "), (OK, b"A"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")],
    ids=["body", "headers", "before"],
)
def test_an_answer_that_comes_in_drops_is_not_waited_for(dripping, monkeypatch, begins, drop):
    monkeypatch.setattr(module, "_TIMEOUT_SECONDS", 0.2)
    with dripping(begins, drop) as address:
        (sight,) = Top([address]).look()
    assert "was not complete" in sight.why


@pytest.mark.parametrize("number", [10**400, float("inf"), float("nan"), -(10**400)])
@pytest.mark.parametrize("place", ["bytes", "seconds", "share", "monotonic"])
def test_numbers_that_no_worker_has_end_nothing(number, place):
    share = {"capacity_bytes": 1, "free_bytes": number, "quarantined_bytes": number}
    side = {"bytes": {"staged": number}, "transfers": {}}
    (sight,) = said(
        number if place == "monotonic" else 1.0,
        **{
            "bytes": {"metrics": {"receive": side, "send": side, "loop_lag_recent_seconds": 0.5}},
            "seconds": {"transfers": [{"seconds": number}]},
            "share": {"arena": {"receive": share, "send": share}},
            "monotonic": {},
        }[place],
    )
    assert "x:1" in (text := drawn(Top(["x:1"]), [sight])) or "e[3]" in text


@pytest.mark.parametrize("place", ["engine", "request"])
def test_what_is_nested_too_deeply_to_be_written_ends_nothing(place):
    deep: list[object] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    (sight,) = said(1.0, transfers=[transfer(1.0, request=deep if place == "request" else "r")])
    assert sight.status is not None
    (worker,) = sight.status["workers"]
    worker["engine"] = deep if place == "engine" else "e"
    assert "is no admin page of kvxfer: RecursionError" in drawn(Top(["x:1"]), [sight])


def test_what_is_too_long_is_cut():
    worker = {"engine": "e" * 10_000, "rank": 3, "ready": True, "reasons": [], "state": None}
    text = drawn(Top(["x:1"]), [Sight("x:1", {"monotonic": 1.0, "workers": [worker]})])
    assert 0 < text.count("e") < 300
    assert "..." in text


def test_the_command_looks_once_and_says_by_its_exit_code_whether_all_is_well():
    with kvxfer.tools.admin.serve([], address="127.0.0.1:0") as server:
        well = CliRunner().invoke(app, ["top", "--once", server.address])
        address = server.address
    gone = CliRunner().invoke(app, ["top", "--once", address])
    assert (well.exit_code, gone.exit_code) == (0, 1)
    assert "no transfer is in flight" in well.output
    assert "no answer: " in gone.output


def test_letters_that_a_terminal_does_not_have_end_nothing():
    command = [sys.executable, "-m", "kvxfer.tools.cli", "top", "--once", "h\u00f6me:1"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "h?me:1" in done.stdout


def test_in_a_pipe_one_look_stands_below_the_other_and_sigterm_ends_it():
    with kvxfer.tools.admin.serve([], address="127.0.0.1:0") as server:
        command = [sys.executable, "-m", "kvxfer.tools.cli", "top", "--every", "0.1", server.address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            looks = 0
            while looks < 2:
                line = process.stdout.readline()
                assert line, "it has ended"
                looks += line.startswith("worker ")
            process.terminate()
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait(30)
            process.stdout.close()
