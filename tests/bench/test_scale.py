"""`kvxfer bench scale` at its smallest; the relay counts every byte; no run begins whose results cannot be written."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.usefixtures("quick_processes")


@pytest.mark.parametrize("route", ["staged", "direct"])
def test_peers_by_number(bench, route):
    code, output, found = bench("scale", "--peers", "1,3,3", "--transfers", "5", "--route", route)
    assert code == 0
    assert [(one["peers"], one["added"]) for one in found["cells"]] == [(1, 1), (3, 2)]
    for one in found["cells"]:
        assert one["verified"] is True
        assert one["first_fetch"]["repetitions"] == one["added"]
        assert one["fetch"]["repetitions"] == 5
        assert min(one["loop_cpu_s"].values()) > 0
        assert set(one["memory_bytes"]) == {"an_open_worker", "a_connection"}
        assert one["open_files"]["an_open_worker"] >= 1, "where it listens"
        assert one["open_files"]["a_connection"] == 6, "at both ends a stream, the other process, and its file of gates"
        assert min(one["first_fetch_loop_cpu_s"].values()) > 0
        assert set(one["idle"]) == {"hub_cpu", "peers_cpu", "hub_cpu_a_peer", "seconds"}
    control = found["control"]
    frames = control["frames_a_transfer"]
    assert [frames[name] for name in ("received Fetch", "sent Accept", "sent KvAgentResult")] == [1.0, 1.0, 1.0]
    for way in ("to_hub", "from_hub"):
        assert control["first_fetch_bytes"][way] > control["bytes_a_transfer"][way] > 0
    assert output.count("yes") == 2


@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
def test_peers_over_nixl(bench):
    code, output, found = bench("scale", "--nixl", "--peers", "2", "--transfers", "2", "--layers", "3")
    (one,) = found["cells"]
    assert (code, one["verified"], output.count("yes")) == (0, True, 1)
    assert found["control"]["request_bytes"] == 3 * 16 * 1024
    assert one["open_files"]["a_connection"] > 2, "NIXL's connections are files as well"


@pytest.mark.parametrize("place", ["file/results.json", "folder"])
def test_what_cannot_be_written_is_known_before_anything_is_measured(monkeypatch, command, tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("kvxfer.tools.bench.scale.Scale.run", lambda *_: pytest.fail("it ran"))
    code, out, err = command("bench", "scale", "--quick", "--json", str(tmp_path / place))
    assert (code, out) == (2, "")
    assert str(tmp_path / place.partition("/")[0]) in "".join(err.replace("│", "").split()), (
        "in a box, which breaks lines"
    )
