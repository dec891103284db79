"""The command: what it prints, and that an error is one line and never a traceback."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvxfer
from kvxfer.protocol.framing import encode
from kvxfer.protocol.messages import Ping
from kvxfer.tools import cli
from tests.geometry.published import CONFIGS

pytestmark = pytest.mark.usefixtures("no_settings")


def spawned(*arguments, stdin="", **environment):
    """The command in a process of its own, where `command` runs it in this one."""
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.tools.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def refused(said, code, out, err):
    assert (code, out) == (2, "")
    assert err.startswith("kvxfer: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_the_entry_point_is_main():
    (script,) = [entry for entry in importlib.metadata.entry_points(group="console_scripts") if entry.name == "kvxfer"]
    assert script.load() is cli.main


def test_version():
    code, out, err = spawned("--version")
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert (code, err) == (0, "")
    assert lines["kvxfer"] == kvxfer.__version__
    assert lines["wire"].startswith("2 ")
    assert lines["torch"] == importlib.metadata.version("torch")
    assert lines["nixl"] == importlib.metadata.version("nixl")
    assert re.fullmatch(r"\d+\.\d+\.\d+", lines["ucx"]), "NIXL's wheel brings UCX"
    assert list(lines) == ["kvxfer", "wire", "nixl", "ucx", "torch", "cuda"]


def test_config_prints_values_sources_and_bounds(command, tmp_path):
    deep = tmp_path / ("a-long-name-" * 8)
    deep.mkdir()
    file = deep / "kvxfer.toml"
    file.write_text("window = 7")
    code, out, _ = command("config", "--file", str(file), KVXFER_SECRET="correct-horse-battery", KVXFER_COPY_CTAS="8")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["copy_ctas", "8", "KVXFER_COPY_CTAS"] in rows
    assert ["secret", "**********", "KVXFER_SECRET"] in rows
    assert ["arena_bytes", "512", "MiB", "default"] in rows
    assert ["drain_timeout", "10", "s", "default"] in rows
    assert ["advertise", "none", "default"] in rows
    assert ["unreachable_peer", "5", "s"] in rows
    assert str(file) in "".join(out.split()), "a long path may fold, but nothing of it is lost"
    assert "battery" not in out


def test_config_as_json(command):
    code, out, _ = command("config", "--json", KVXFER_WINDOW="3", KVXFER_SECRET="correct-horse-battery")
    printed = json.loads(out)
    assert code == 0
    assert printed["settings"]["window"] == {"value": 3, "source": "KVXFER_WINDOW"}
    assert printed["settings"]["secret"]["value"] == "**********"
    assert printed["bounds"]["revoke"] == 15.0
    assert "battery" not in out


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["config"], {"KVXFER_RNAK": "1"}, "did you mean KVXFER_RANK?"),
        (["config"], {"KVXFER_WINDOW": "0"}, "window is '0' (from KVXFER_WINDOW): set it to at least 1"),
        (["config", "--file", "/nowhere/kvxfer.toml"], {}, "cannot be read"),
        (["inspect"], {}, "give either frames in hexadecimal"),
        (["inspect", "--file", "/nowhere/frames"], {}, "cannot be read"),
        (["inspect", "0g"], {}, "this is not hexadecimal"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(command, arguments, environment, said):
    refused(said, *command(*arguments, **environment))


@pytest.mark.parametrize("arguments", [
    ["top", "--every", "inf"], ["top", "--every", "nan"], ["doctor", "--listen", "tcp:127.0.0.1:0", "--wait", "nan"],
    ["doctor", "--device", "tpu"], ["demo", "--device", "tpu"], ["demo", "--route", "fast"],
])  # fmt: skip
def test_what_an_option_cannot_be_is_refused(command, arguments):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert arguments[-2] in err


@pytest.mark.parametrize(
    ("arguments", "stdin", "environment"),
    [
        (["config", "--json"], "", {"KVXFER_WINDOW": "3"}),
        (["config"], "", {"KVXFER_RNAK": "1"}),
        (["inspect", "-"], encode(Ping()).hex() + "0200000091c1", {}),
    ],
    ids=["well", "an error", "exit code 1"],
)
def test_a_process_of_its_own_says_the_same(command, arguments, stdin, environment):
    assert spawned(*arguments, stdin=stdin, **environment) == command(*arguments, stdin=stdin, **environment)


def test_a_full_disk_is_an_error_like_others():
    command = [sys.executable, "-m", "kvxfer.tools.cli", "config"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (2, b"kvxfer: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    "arguments",
    [["config"], ["config", "--json"], ["--version"], ["--help"], ["top", "127.0.0.1:9"]],
    ids=" ".join,
)
def test_a_reader_that_is_gone_ends_it_without_a_word(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as nowhere:
        command = [sys.executable, "-m", "kvxfer.tools.cli", *arguments]
        done = subprocess.run(command, stdout=nowhere, stderr=subprocess.PIPE, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_where_no_output_is_open_nothing_is_printed():
    command = ["sh", "-c", 'exec "$0" -m kvxfer.tools.cli config >&-', sys.executable]
    done = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_module_that_is_imported_when_the_command_is_told_to_end_is_imported_to_its_end(tmp_path):
    (tmp_path / "slow.py").write_text("import os, time\nos.kill(os.getpid(), 15)\ntime.sleep(0.01)\nprint('whole')\n")
    code = (
        "import sys, time\n"
        "from kvxfer.tools import cli\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "cli.app = lambda: (__import__('slow'), sys.stdout.flush(), time.sleep(30))\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "whole\n", "")


ENGINES = ["--prefill", "tp=4,pp=1,block=16,layout=NHD", "--decode", "tp=2,block=64,layout=HND,cross-layer"]


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["Llama-3.1-8B"]))
    return ["--config", str(file)]


def test_plan_prints_a_table(command, model):
    code, out, err = command("plan", *model, *ENGINES, "--tokens", "1000")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][:5] == ["llama:", "32", "layers,", "bfloat16,", "tokens"]
    assert "decode: 2 ranks, blocks of 64 tokens: block layer kv head token dim" in out
    assert "predictions" in out
    assert "H200" in out
    (pair,) = [row for row in rows if row[:3] == ["2", "->", "1"]]
    assert pair[3:8] == ["31.25", "MiB", "128000", "256", "B"]
    assert "128000 pieces of 256 bytes on average" in out


def test_plan_decides_by_the_settings(command, model):
    def route(*arguments, **environment):
        code, out, err = command(
            "plan", *model, "--prefill", "", "--decode", "", "--tokens", "512", "--json", *arguments, **environment
        )
        assert (code, err) == (0, "")
        (pair,) = json.loads(out)["pairs"]
        return pair["route"], pair["chunks"]

    assert route("--chunk", "33MiB") == ("staged", 2)
    assert route("--chunk", "17MiB") == ("staged", 4)
    assert route("--chunk", "33MiB", "--route", "direct") == ("direct", 2)
    assert route(KVXFER_CHUNK_BYTES="17MiB", KVXFER_ROUTE="pull") == ("pull", 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--prefill": "tp=3"}, "prefill: tp=3 is not possible: 8 heads"),
        ({"--decode": "layuot=NHD"}, "--decode layuot=NHD: 'layuot' is unknown: did you mean layout?"),
        ({"--tokens": "9:3"}, "--tokens 9:3 is not possible"),
        ({"--profile": "h200"}, "--profile h200 is unknown: did you mean h200-nvlink?"),
        ({"--bandwidth": "tcp=1GB"}, "--bandwidth tcp=1GB: 'tcp=1GB' is not understood: routes are mapped, staged"),
        ({"--bandwidth": "1e400"}, "and a bandwidth 1B to 1000TB a second"),
        ({"--route": "pul"}, "route is 'pul'"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line_and_exit_code_2(command, model, changes, said):
    given = {model[0]: model[1], "--prefill": "tp=1", "--decode": "tp=1", "--tokens": "100"} | changes
    refused(said, *command("plan", *(word for pair in given.items() for word in pair)))


@pytest.mark.parametrize(
    ("arguments", "missing", "said"),
    [
        (["--version"], ["torch", "nixl", "numpy", "pydantic"], "torch"),
        (["plan", *ENGINES, "--tokens", "100"], ["torch", "nixl", "triton", "numba"], "3 -> 1"),
    ],
    ids=["version", "plan"],
)
def test_nothing_heavy_is_imported(model, arguments, missing, said):
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({missing!r}))\n"
        f"sys.argv = ['kvxfer', *{[*arguments, *(model if 'plan' in arguments else [])]!r}]\n"
        "from kvxfer.tools.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_inspect_reads_hex_stdin_and_files(command, tmp_path):
    frame = encode(Ping())
    file = tmp_path / "frames"
    file.write_bytes(frame)
    printed = [
        command("inspect", frame.hex()),
        command("inspect", "-", stdin=frame.hex()),
        command("inspect", "--file", str(file)),
    ]
    assert printed[0] == printed[1] == printed[2]
    code, out, err = printed[0]
    assert (code, err) == (0, "")
    assert "PING" in out.upper()


def test_inspect_fails_if_a_frame_cannot_be_decoded(command):
    good, bad = encode(Ping()).hex(), "0200000091c1"
    code, out, err = command("inspect", good + bad + good)
    assert (code, err) == (1, "kvxfer: frame 1 cannot be decoded; the output says why\n")
    assert out.count("frame ") == 3
    assert "  ! " in out
    code, _, err = command("inspect", good + bad * 10)
    assert (code, err) == (1, "kvxfer: frames 1, 2, 3, 4, 5, 6, 7, 8, ... cannot be decoded; the output says why\n")
