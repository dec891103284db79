"""`--plot`: a PNG a chart, and one page that needs nothing beside it; what stands in the way is said before a run."""

import sys

import pytest
from typer.testing import CliRunner

from kvxfer.errors import MissingExtraError, UsageError
from kvxfer.tools import cli
from kvxfer.tools.bench import plots
from kvxfer.tools.bench.machine import describe
from kvxfer.tools.bench.report import Chart, Report, Table

CHART = Chart("one", "a <chart>", "pieces", "GB/s", ["1", "2"], {"staged": [1.0, None], "direct": [0.5, 2.0]})


def report(failures=()):
    table = Table("a & table", ["route", "x"], [["<b>", "1"]], ["a note"])
    return Report("matrix", describe("cpu", {}), {}, [table], [CHART], failures)


def test_a_page_holds_its_charts_and_tables(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib (the extra `bench`) is not installed here")
    plots.draw(report(["a < b"]), tmp_path / "new")
    assert (tmp_path / "new/one.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "new/matrix.html").read_text()
    assert "data:image/png;base64," in page
    for text in ("a &lt;chart&gt;", "a &amp; table", "<td>&lt;b&gt;</td>", "a note", "FAILED: a &lt; b", "kvxfer: "):
        assert text in page
    assert "http" not in page.replace("http-equiv", "")


def test_a_folder_that_cannot_be_is_named(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib (the extra `bench`) is not installed here")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        plots.draw(report(), tmp_path / "file")


@pytest.mark.parametrize(
    ("option", "place"),
    [("--json", "file/results.json"), ("--json", "folder"), ("--plot", "file"), ("--plot", "file/a")],
)
def test_what_cannot_be_written_is_known_before_anything_is_measured(monkeypatch, tmp_path, option, place):
    if option == "--plot":
        pytest.importorskip("matplotlib", reason="matplotlib (the extra `bench`) is not installed here")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("kvxfer.tools.bench.scale.Scale.run", lambda *_: pytest.fail("it ran"))
    done = CliRunner().invoke(cli.app, ["bench", "scale", "--quick", option, str(tmp_path / place)])
    assert isinstance(done.exception, UsageError)
    assert f"{option} {tmp_path / place} cannot be written" in str(done.exception)


def test_without_matplotlib_nothing_is_measured(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("kvxfer.tools.bench.children.conduct", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(MissingExtraError, match="pip install matplotlib"):
        bench("matrix", "--plot", str(tmp_path))
