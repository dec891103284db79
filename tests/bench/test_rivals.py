"""`kvxfer bench rivals` at its smallest: every rival's bytes are checked too, and who is left out has a reason."""

import pytest

from kvxfer.errors import UsageError
from kvxfer.tools.bench import rivals

pytestmark = pytest.mark.usefixtures("quick_processes")
SMALL = ["rivals", "--device", "cpu", "--pieces", "32KiB", "--size", "2MiB", "--routes", "staged", "--repetitions", "1"]
HERE = ["nixl, as engines run it", "nixl, no progress thread", "nixl, no progress thread, SGL"]
TORCH = "torch index_select + copy + index_copy_"


def test_everybody_does_the_same_work(bench):
    code, output, found = bench(*SMALL)
    assert code == 0
    cells = {cell["rival"]: cell for cell in found["cells"]}
    absent = {one["rival"]: one["reason"] for one in found["skipped"]}
    assert "gloo" in absent["nccl, packed"]
    assert set(cells) | set(absent) == {"kvxfer staged", *HERE, TORCH, "mooncake", "nccl, packed"}
    assert not set(cells) & set(absent)
    assert {"kvxfer staged", *HERE, TORCH} <= set(cells)
    assert all(absent.values())
    for cell in cells.values():
        assert cell["verified"] is True
        assert (cell["piece_bytes"], cell["request_bytes"]) == (32 << 10, 2 << 20)
        assert cell["repetitions"] == 1
        assert cell["gbps"] == pytest.approx((2 << 20) / cell["median_s"] / 1e9)
    fastest = max(cell["gbps"] for name, cell in cells.items() if not name.startswith("kvxfer"))
    assert cells["kvxfer staged"]["times_best_rival"] == cells["kvxfer staged"]["gbps"] / fastest
    assert output.count("skipped: ") == len(absent)


@pytest.mark.parametrize(("rival", "sabotage"), [(HERE[1], "byte"), (TORCH, "outside")])  # one comparison for all
def test_damage_is_seen(bench, rival, sabotage):
    code, _, found = bench(*SMALL, "--only", rival, "--sabotage", sabotage)
    assert code == 1
    assert [(cell["rival"], cell["verified"]) for cell in found["cells"]] == [("kvxfer staged", False), (rival, False)]
    assert len(found["failures"]) == 2


def test_a_rival_that_does_not_exist_is_refused(bench):
    with pytest.raises(UsageError, match="--only carrier pigeon: the rivals are nixl"):
        bench(*SMALL, "--only", "carrier pigeon")


def test_without_the_repository_it_says_where_the_code_is(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(rivals.kvxfer, "__file__", str(tmp_path / "site-packages/kvxfer/__init__.py"))
    with pytest.raises(UsageError, match=r"benchmarks/rivals of the repository or of the source archive.*--rivals-dir"):
        bench("rivals", "--device", "cpu")
