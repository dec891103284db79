"""`kvxfer bench load` at its smallest."""

import pytest

pytestmark = pytest.mark.usefixtures("quick_processes")


def test_many_at_once(bench):
    arguments = ["--routes", "staged", "--concurrency", "3,5", "--sizes", "64KiB,1MiB", "--seconds", "0.1"]
    code, output, found = bench("load", "--device", "cpu", *arguments)
    assert code == 0
    assert found["skipped"] == []
    assert [cell["concurrency"] for cell in found["cells"]] == [3, 5]
    for cell in found["cells"]:
        assert cell["verified"] is True
        assert cell["routes_taken"] == ["staged"]
        assert [size["request_bytes"] for size in cell["sizes"]] == [64 << 10, 1 << 20]
        assert sum(size["repetitions"] for size in cell["sizes"]) == cell["fetches"] >= cell["concurrency"]
        assert cell["fetches_per_s"] == cell["fetches"] / cell["seconds"]
        assert set(cell["lag"]) == {"decode", "prefill", "decode_idle", "prefill_idle"}
        assert all(set(lag) == {"p50_s", "p99_s", "max_s"} for lag in cell["lag"].values())
    assert output.count("yes") == 2


def test_what_does_not_fit_is_skipped_with_the_reason(bench):
    arguments = ["--routes", "staged", "--concurrency", "4", "--sizes", "1TiB", "--seconds", "0.1"]
    code, output, found = bench("load", "--device", "cpu", *arguments)
    assert code == 0
    assert found["cells"] == []
    assert "are free" in found["skipped"][0]["skipped"]
    assert "skipped: staged, 4 at once" in output
