"""`kvxfer bench rivals` at its smallest: every rival's bytes are checked too, and who is left out has a reason."""

import pytest

from kvxfer.errors import UsageError
from kvxfer.tools.bench import rivals

pytestmark = pytest.mark.usefixtures("quick_processes")
SMALL = ["rivals", "--device", "cpu", "--pieces", "32KiB", "--size", "2MiB", "--routes", "staged", "--repetitions", "1"]
HERE = ["nixl, as engines run it", "nixl, no progress thread", "nixl, no progress thread, SGL"]


def test_everybody_does_the_same_work(bench):
    code, output, found = bench(*SMALL)
    assert code == 0
    cells = {cell["rival"]: cell for cell in found["cells"]}
    absent = {one["rival"]: one["reason"] for one in found["skipped"]}
    assert "gloo" in absent["nccl, packed"]
    assert set(cells) | set(absent) == {"kvxfer staged", *HERE, "mooncake", "nccl, packed"}
    assert not set(cells) & set(absent)
    assert {"kvxfer staged", *HERE} <= set(cells)
    assert all(absent.values())
    for cell in cells.values():
        assert cell["verified"] is True
        assert (cell["piece_bytes"], cell["request_bytes"]) == (32 << 10, 2 << 20)
        assert cell["repetitions"] == 1
        assert cell["gbps"] == pytest.approx((2 << 20) / cell["median_s"] / 1e9)
    fastest = max(cell["gbps"] for name, cell in cells.items() if not name.startswith("kvxfer"))
    assert cells["kvxfer staged"]["times_best_rival"] == cells["kvxfer staged"]["gbps"] / fastest
    assert output.count("skipped: ") == len(absent)


IDLE = """
VARIANTS = ("idle",)

def missing(variant, device):
    return ""

class Rival:
    TIMED = "source"

    def __init__(self, *_):
        self.move = self.serve = lambda sources, sinks: None

    def close(self):
        pass
"""


def test_one_that_moves_nothing_is_wrong(bench, tmp_path):
    folder = tmp_path / "idlers"
    folder.mkdir()
    (folder / "__init__.py").write_text('MODULES = ("idle",)')
    (folder / "idle.py").write_text(IDLE)
    code, output, found = bench(*SMALL, "--rivals-dir", str(folder))
    assert code == 1
    assert [(cell["rival"], cell["verified"]) for cell in found["cells"]] == [("kvxfer staged", True), ("idle", False)]
    assert "FAILED: idle, 32768 bytes: layer 0, block " in output


def test_a_rival_that_does_not_exist_is_refused(bench):
    with pytest.raises(UsageError, match="--only carrier pigeon: the rivals are nixl"):
        bench(*SMALL, "--only", "carrier pigeon")


def test_without_the_repository_it_says_where_the_code_is(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(rivals.kvxfer, "__file__", str(tmp_path / "site-packages/kvxfer/__init__.py"))
    with pytest.raises(UsageError, match=r"benchmarks/rivals of the repository or of the source archive.*--rivals-dir"):
        bench("rivals", "--device", "cpu")
