"""The command: what it prints, and that an error is one line and never a traceback."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

import kvxfer
from kvxfer import cli
from kvxfer.protocol.framing import encode
from kvxfer.protocol.messages import Ping


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.upper().startswith("KVXFER_")]:
        monkeypatch.delenv(name)


def run(*arguments, stdin="", **environment):
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_entry_point_is_main():
    (script,) = [entry for entry in importlib.metadata.entry_points(group="console_scripts") if entry.name == "kvxfer"]
    assert script.load() is cli.main


def test_version():
    code, out, err = run("--version")
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    assert (code, err) == (0, "")
    assert lines["kvxfer"] == kvxfer.__version__
    assert lines["wire"].startswith("1 ")
    assert lines["torch"] == importlib.metadata.version("torch")
    assert "nixl" in lines


def test_version_imports_nothing_heavy():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'nixl', 'numpy', 'pydantic']))\n"
        "sys.argv = ['kvxfer', '--version']\n"
        "from kvxfer.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout


def test_config_prints_values_sources_and_bounds(tmp_path):
    deep = tmp_path / ("a-long-name-" * 8)
    deep.mkdir()
    file = deep / "kvxfer.toml"
    file.write_text("window = 7")
    code, out, _ = run("config", "--file", str(file), KVXFER_SECRET="correct-horse-battery", KVXFER_COPY_CTAS="8")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["copy_ctas", "8", "KVXFER_COPY_CTAS"] in rows
    assert ["secret", "**********", "KVXFER_SECRET"] in rows
    assert ["fetch_timeout", "none", "default"] in rows
    assert ["unreachable_peer", "5", "s"] in rows
    assert str(file) in "".join(out.split()), "a long path may fold, but nothing of it is lost"
    assert "battery" not in out


def test_config_as_json():
    code, out, _ = run("config", "--json", KVXFER_WINDOW="3", KVXFER_SECRET="correct-horse-battery")
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
        (["inspect", "00", "--file", "x"], {}, "give either frames in hexadecimal"),
        (["inspect", "--file", "/nowhere/frames"], {}, "cannot be read"),
        (["inspect", "0g"], {}, "this is not hexadecimal"),
        (["demo", "--route", "mapped"], {}, "--route mapped is not available: nothing moves bytes that way yet; take"),
        (["demo", "--route", "fast"], {}, "routes are staged, direct, pull, auto"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(arguments, environment, said):
    code, out, err = run(*arguments, **environment)
    assert code == 2
    assert out == ""
    assert err.startswith("kvxfer: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_inspect_reads_hex_stdin_and_files(tmp_path):
    frame = encode(Ping())
    file = tmp_path / "frames"
    file.write_bytes(frame)
    printed = [run("inspect", frame.hex()), run("inspect", "-", stdin=frame.hex()), run("inspect", "--file", str(file))]
    assert printed[0] == printed[1] == printed[2]
    code, out, err = printed[0]
    assert (code, err) == (0, "")
    assert "PING" in out.upper()


def test_inspect_fails_if_a_frame_cannot_be_decoded():
    good, bad = encode(Ping()).hex(), "0200000091c1"
    code, out, err = run("inspect", good + bad + good)
    assert (code, err) == (1, "kvxfer: frame 1 cannot be decoded; the output says why\n")
    assert out.count("frame ") == 3
    assert "  ! " in out
    code, _, err = run("inspect", good + bad * 10)
    assert (code, err) == (
        1,
        "kvxfer: frames 1, 2, 3, 4, 5, 6, 7, 8, ... cannot be decoded; the output says why\n",
    )


def test_a_wrong_command_is_explained():
    code, _, err = run("confgi")
    assert code == 2
    assert "confgi" in err
    assert "Traceback" not in err
