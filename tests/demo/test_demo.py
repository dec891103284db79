"""The demo with a small model: every route passes, every kind of damage is found, and nothing is left behind."""
# dicts of keyword arguments
# pyright: reportArgumentType=false

import io
import re
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from kvxfer.errors import KvxferError
from kvxfer.telemetry import TransferStats
from kvxfer.tools.demo import run as module
from kvxfer.tools.demo.script import (
    Decoded,
    Fetched,
    Layer,
    Offered,
    Prefilled,
    Reference,
    Script,
)

pytestmark = pytest.mark.usefixtures("a_place_of_its_own")
SMALL = {"prompts": (1, 17, 40), "steps": 3, "layers": 4, "kv_heads": 4, "head_dim": 32, "hidden": 64}
LAST = re.compile(
    r"OK: (?P<prompts>\d+) prompts, (?P<tokens>\d+) tokens generated, identical to single-process generation; "
    r"(?P<digests>\d+) digests of K and V equal; (?P<mib>[\d.]+) MiB in (?P<pieces>\d+) pieces "
    r"by route (?P<route>[a-z+]+), (?P<gbps>[\d.]+) GB/s on the wire"
)


def perform(**changes):
    """Run a small demo; whether it passed, and the lines that it printed."""
    text = io.StringIO()
    passed = module.run(Script(**SMALL | changes), Console(file=text, width=200))
    return passed, text.getvalue().splitlines()


# --- whole runs


def test_what_is_missing_is_said_before_anything_is_loaded():
    code = (
        "import sys; sys.modules['transformers'] = None; sys.argv = ['kvxfer', 'demo']\n"
        "from kvxfer.tools.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr == "kvxfer: the demo runs a model of transformers: pip install 'transformers>=5.17'\n"


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize("route", ["staged", "direct", "pull", "auto"])  # which takes `mapped`
def test_every_route_ends_well(route):
    passed, lines = perform(route=route)
    script = Script(**SMALL)
    seen = LAST.fullmatch(lines[-1])
    assert passed, lines
    assert seen, lines[-1]
    assert int(seen["prompts"]) == 3
    assert int(seen["tokens"]) == 3 * (1 + script.steps)
    assert int(seen["digests"]) == 3 * 2 * script.layers
    assert seen["mib"] == f"{script.total_bytes / (1 << 20):.1f}"
    assert script.total_bytes == 2 * 4 * 4 * 32 * 4 * (1 + 17 + 40)
    assert int(seen["pieces"]) > 0
    assert seen["route"] == ("mapped" if route == "auto" else route)
    assert float(seen["gbps"]) >= 0
    for prompt, tokens in enumerate(script.prompts):
        about = [line for line in lines if line.startswith(f"prompt {prompt} ({tokens} tokens): ")]
        assert len(about) == 2
        assert about[1].endswith(": 4 tokens, digests equal")


@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize(
    ("sabotage", "places"),
    [
        ("zero-block", {0: "layer 0, k, token 0", 1: "layer 0, k, token 0", 2: "layer 0, k, token 32"}),
        ("swap-blocks", {2: "layer 0, k, token 0"}),
        ("swap-heads", dict.fromkeys(range(3), "layer 0, k, token 0")),
        ("cut-tail", {0: "layer 0, k, token 0", 1: "layer 0, k, token 0", 2: "layer 0, k, token 32"}),
    ],
)
def test_damage_is_found_and_its_place_is_named(sabotage, places):
    passed, lines = perform(sabotage=sabotage)
    assert not passed
    assert lines[-1].startswith("FAILED: ")
    named = dict(re.findall(r"prompt (\d): caches differ at (layer \d+, [kv], token \d+)", lines[-1]))
    assert {int(prompt): place for prompt, place in named.items()} == places


@pytest.mark.usefixtures("quick_processes")
def test_a_side_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setenv("KVXFER_NO_SUCH_SETTING", "1")
    passed, lines = perform()
    assert not passed
    assert re.fullmatch(r"FAILED: (prefill|decode) failed: ConfigError: .*no_such_setting.*", lines[-1], re.IGNORECASE)


def test_a_run_of_which_nothing_is_heard_is_ended(monkeypatch):
    monkeypatch.setattr(module, "_SILENCE_SECONDS", 0.5)
    passed, lines = perform()
    assert (passed, lines[-1]) == (False, "FAILED: nothing was heard of prefill, decode for 0.5 s")


def test_no_gpu_no_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KvxferError, match="no CUDA device"):
        perform(device="cuda")


# --- the verdict


def stats(nbytes, route="staged"):
    return TransferStats(
        route=route, why="", bytes=nbytes, pieces=2, chunks=1, descriptors=1, peers=("p",), queued=0.0, gathering=0.0,
        posting=0.0, wire=0.5, scattering=0.0, started=0.0, first_byte=0.0, finished=1.0,
    )  # fmt: skip


def judged(script, broken="", *, difference="", tokens=(5, 6), alone=(5, 6), nbytes=None, route="staged"):
    verdict = module.Verdict(script)
    seen = stats(script.total_bytes if nbytes is None else nbytes, route)
    for item in (
        Offered(0, {}),
        Layer(0, 0, landed=False),
        Prefilled(0, []),
        Layer(0, 0, landed=True),
        Fetched(0, seen),
        Decoded(0, list(tokens), difference),
        Reference(0, list(alone), seen),
    ):
        verdict.take(item)
    verdict.broken = broken
    return verdict.judge()


ONE = {"prompts": (40,)}


@pytest.mark.parametrize(
    ("script", "seen", "line"),
    [
        ({}, {"difference": "layer 1, v, token 2"}, "prompt 0: caches differ at layer 1, v, token 2"),
        ({}, {"tokens": (5, 7)}, "prompt 0: token 1 is 7, alone it is 6"),
        ({}, {"nbytes": 12}, "12 bytes were fetched, but the caches have 2621440"),
        ({"route": "pull"}, {}, "the route was staged, not pull"),
        ({"sabotage": "cut-tail"}, {}, "sabotage cut-tail was not noticed"),
    ],
)
def test_a_verdict_on_bad_news(script, seen, line):
    passed, last = judged(Script(**ONE | script), **seen)
    assert not passed
    assert last == f"FAILED: {line}"


# --- the command


@pytest.mark.parametrize("passed", [True, False])
def test_the_exit_code_is_the_verdict(monkeypatch, command, passed):
    ran = []
    monkeypatch.setattr(module, "run", lambda script, console: ran.append(script) or passed)
    assert command("demo", "--route", "pull", "--sabotage", "cut-tail")[0] == (0 if passed else 1)
    assert ran == [Script(route="pull", sabotage="cut-tail")]
