"""What the load generator measures, and what it lets nobody pass with."""

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.serving import load

ROOT = Path(__file__).parents[3]
ASKED = argparse.Namespace(clients=[1, 3], requests=4, prompt=100, tokens=6, checks=2)


class Standing:
    """Servers that are there already, in place of processes."""

    def __init__(self, urls):
        self.urls = urls

    def start(self):
        pass

    async def ready(self, client):
        return True

    def ended(self):
        return {}

    def end(self):
        pass


@pytest.fixture
async def standing(service, monkeypatch):
    urls = await service.all()
    named = {"prefill 0": urls.prefill, "decode 0": urls.decode, "router": urls.router}
    monkeypatch.setattr(load, "Service", lambda _: Standing(named))
    return named


def nothing_yet():
    return {"tokens": {}, "texts": {}}


async def test_answers_are_timed_and_the_overlap_is_that_of_the_prefill_server(standing, service):
    one, three = await load._case("layers", ASKED, [], nothing_yet())
    for row, clients in ((one, 1), (three, 3)):
        assert (row.case, row.clients, row.same, row.route) == ("layers", clients, "4 of 4", "staged")
        assert 0 < row.ttft_p50_ms <= row.ttft_p99_ms
        assert row.inter_token_p50_ms > 0
        assert row.tokens_per_s > 0
        assert row.mib == pytest.approx(100 * 2 * 2 * 2 * 16 * 4 / 2**20), (
            "tokens, layers, K and V, heads, dim, float32"
        )
    recent = (await service.stats(standing["prefill 0"]))["recent"]
    assert len(recent) == 2 + 4 + 4
    moved, beside = (sum(each[f"transfer_{name}"] for each in recent[-4:]) for name in ("ms", "beside_compute_ms"))
    assert three.hidden == pytest.approx(beside / moved)
    assert min(each["compute_ms"] for each in recent[-4:]) <= three.compute_ms
    assert load._line(one).startswith("layers | 1 | ")


async def test_other_tokens_than_those_of_the_single_server_fail_a_case(standing):
    expected = nothing_yet()
    await load._case("single", ASKED, [], expected)
    expected["tokens"][1][-1] += 1
    with pytest.raises(load.FailedCaseError, match="prompt 1 has other tokens"):
        await load._case("layers", ASKED, [], expected)


async def test_a_cache_that_did_not_come_fails_a_case(standing, service):
    service.network.refuse_next("decode")
    with pytest.raises(load.FailedCaseError, match=r"computed again.*'recomputed': 1"):
        await load._case("layers", ASKED, [], nothing_yet())


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
@pytest.mark.timeout(300)
def test_the_command_compares_cases(tmp_path):
    report = tmp_path / "report.json"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "examples.serving.load", "--json", str(report)]
    options = "--cross-layer --clients 2 --requests 2 --prompt 40 --tokens 4 --checks 1 --verify --dtype bfloat16"
    options += " --layers 2 --kv-heads 2 --head-dim 16 --hidden 32"
    command += ["--case", "layers, TP 2:1", *options.split()]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(report.read_text())
    assert said["failed"] == {}
    assert [row["case"] for row in said["rows"]] == ["single", "layers, TP 2:1"]
    single, layers = said["rows"]
    assert single["hidden"] is None
    assert 0 <= layers["hidden"] <= 1
    assert layers["mib"] == pytest.approx(40 * 2 * 2 * 2 * 16 * 2 / 2**20), "two bytes an element"
    assert done.stdout.count("\n| ") == 3, "a table: its head, and a row each"
