"""Benchmarks leave no process and no folder behind, and see no settings of the environment."""

import json
import multiprocessing
import os
import tempfile

import pytest
from typer.testing import CliRunner

from kvxfer.tools import cli


@pytest.fixture(autouse=True)
def a_place_of_its_own(monkeypatch, tmp_path_factory):
    for name in [name for name in os.environ if name.upper().startswith("KVXFER_")]:
        monkeypatch.delenv(name)
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    assert multiprocessing.active_children() == []
    assert list(folder.glob("kvxfer*")) == []


@pytest.fixture
def bench(tmp_path):
    """Run a sub-command with `--json`: its exit code, its output, and what it wrote."""

    def run(*arguments):
        file = tmp_path / "results.json"
        done = CliRunner().invoke(cli.app, ["bench", *arguments, "--json", str(file)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output, json.loads(file.read_text()) if file.exists() else None

    return run
