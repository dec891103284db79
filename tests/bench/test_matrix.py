"""`kvxfer bench matrix` at its smallest: every cell is verified, and damage is seen."""

import re

import pytest

from kvxfer.plans.routes import PROFILES
from kvxfer.protocol.messages import Route
from kvxfer.tools.bench.matrix import routes

pytestmark = pytest.mark.usefixtures("quick_processes")
MIB = 1 << 20
SMALL = ["matrix", "--device", "cpu", "--sizes", "2MiB", "--repetitions", "1"]


def test_every_route_and_layout_is_verified_beside_its_reference(bench):
    code, output, found = bench(*SMALL, "--pieces", "32KiB,head-split,nhd-hnd")
    assert code == 0
    assert found["failures"] == found["skipped"] == []
    cells = found["cells"]
    assert [(cell["layout"], cell["route"]) for cell in cells] == [
        (layout, route) for layout in ("32KiB", "head-split", "nhd-hnd") for route in routes()
    ]
    for cell in cells:
        assert cell["verified"] is True
        assert cell["device"] == "cpu"
        assert cell["request_bytes"] == 2 * MIB
        assert cell["piece_bytes"] == {"32KiB": 32768, "head-split": 1024, "nhd-hnd": 256}[cell["layout"]]
        assert cell["pieces"] * cell["piece_bytes"] == cell["request_bytes"]
        assert cell["ratio"] == pytest.approx(cell["gbps"] / cell["reference_gbps"])
        assert cell["gbps"] == pytest.approx(2 * MIB / cell["median_s"] / 1e9)
        assert (cell["repetitions"], cell["warmups"], cell["reference"]["repetitions"]) == (1, 2, 1)
        assert cell["reference"]["kind"] == ("memcpy" if cell["route_taken"] == "mapped" else "nixl_write")
        assert cell["route_taken"] == cell["route"] or cell["route"] == "auto"
        assert cell["why"]
        assert cell["chunks"] >= 1
        assert cell["stages"]["decode"]["duration"] <= cell["max_s"]
        assert cell["stages"]["prefill"] is not None
    assert {"kvxfer", "python", "torch", "nixl"} <= set(found["versions"])
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["cpu"]
    assert found["noise"]["reference_spread_within_cells"] == 0.0
    assert found["noise"]["reference_spread_between_cells"] >= 0
    assert output.count("yes") == len(cells)
    for cell in cells:  # of a new pair: nothing has corrected it
        costs = PROFILES["cpu"].routes[Route[cell["route_taken"].upper()]]
        plain_seconds = costs.seconds(nbytes=2 * MIB, chunks=cell["chunks"], pieces=cell["pieces"])
        assert cell["first_predicted_s"] == pytest.approx(plain_seconds, rel=0.02)


@pytest.mark.parametrize("sabotage", ["byte", "outside"])
def test_damage_is_seen(bench, sabotage):
    code, output, found = bench(*SMALL, "--pieces", "32KiB", "--routes", "staged", "--sabotage", sabotage)
    assert code == 1
    (cell,) = found["cells"]
    assert cell["verified"] is False
    assert ("that must stay untouched" if sabotage == "outside" else "of the request") in cell["difference"]
    assert found["failures"] == [f"staged, 32KiB pieces, 2 MiB: {cell['difference']}"]
    assert "FAILED: staged" in output


@pytest.mark.parametrize("arguments", [
    ["matrix", "--device", "tpu"], ["matrix", "--routes", "staged,fast"], ["matrix", "--sizes", "2Mb,x"],
    ["matrix", "--ctas", "0"], ["matrix", "--pieces", "3"], ["matrix", "--repetitions", "0"],
    ["matrix", "--sabotage", "all"], ["latency", "--beside", "nobody"], ["rivals", "--size", "2MiB,4MiB"],
    ["scale", "--route", "mapped"],
])  # fmt: skip
def test_values_that_do_not_exist_are_refused(bench, arguments):
    code, output, found = bench(*arguments)
    assert (code, found) == (2, None)
    assert f"Invalid value for '{arguments[1]}'" in output


def test_a_child_that_fails_is_named_and_the_exit_code_is_1(bench, monkeypatch):
    monkeypatch.setenv("KVXFER_ARENA_BYTES", "0")
    code, output, found = bench(*SMALL, "--pieces", "32KiB", "--routes", "staged")
    assert (code, found) == (1, None)
    assert re.search(r"kvxfer bench matrix: (prefill|decode) failed: ConfigError: .*arena_bytes is 0", output)
