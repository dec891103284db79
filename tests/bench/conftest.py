"""Benchmarks leave no process and no folder behind, and see no settings of the environment."""

import json

import pytest
from typer.testing import CliRunner

from kvxfer.tools import cli


@pytest.fixture(autouse=True)
def each(a_place_of_its_own):
    """Whatever it does."""


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
