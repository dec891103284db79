"""What would be released: a source archive, a wheel made of it, and that wheel in an environment with nothing more."""

import importlib.metadata
import json
import subprocess
import sys
import zipfile

import pytest

import kvxfer
from tests.release.release_env import ROOT, run

NOT_RELEASED = {".gitignore", ".ci/run"}
PROGRAM = """
import sys
from pathlib import Path
import kvxfer

assert Path(kvxfer.__file__).is_relative_to(sys.prefix), kvxfer.__file__
for name in kvxfer.__all__:
    getattr(kvxfer, name)
try:
    import kvxfer.tools.admin
except kvxfer.MissingExtraError as error:
    print(error)
"""


def tracked():
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout, so nothing says what belongs to it")
    return {name for name in listing.stdout.split("\0") if name and (ROOT / name).exists()}


def test_the_source_archive_has_all_that_the_repository_has(sdist):
    there = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert tracked() - there <= NOT_RELEASED


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {path for path in tracked() if path.startswith("kvxfer/")}


def test_what_is_pinned_goes_together():
    """`pip check`, where constraints.txt made the environment; another one may be broken for reasons of its own."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    if importlib.metadata.version("torch").partition("+")[0] != pins["torch"]:
        pytest.skip("these are not the versions of constraints.txt")
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    if "No module named pip" in done.stderr:
        pytest.skip("this environment has no pip")
    assert done.returncode == 0, done.stdout


def test_the_wheel_needs_what_it_names_and_nothing_more(environment, outside, tmp_path):
    said = run(environment / "python", "-c", PROGRAM, cwd=tmp_path, env=outside)
    assert said.strip().endswith("pip install prometheus_client")
    versions = run(environment / "kvxfer", "--version", cwd=tmp_path, env=outside).splitlines()
    assert versions[0] == f"kvxfer {kvxfer.__version__}"
    assert [line.split()[0] for line in versions] == ["kvxfer", "wire", "nixl", "ucx", "torch", "cuda"]
    settings = json.loads(run(environment / "kvxfer", "config", "--json", cwd=tmp_path, env=outside))
    assert settings["settings"]["route"] == {"value": "auto", "source": "default"}


@pytest.mark.timeout(300)  # nothing is compiled yet where they run: a minute on two idle cores
def test_two_processes_of_the_wheel_exchange_a_cache(environment, sdist, outside, tmp_path):
    python, examples = environment / "python", sdist / "examples"
    line = f"set -o pipefail; {python} {examples}/prefill.py | {python} {examples}/decode.py"
    said = run("bash", "-c", line, cwd=tmp_path, env=outside, timeout=250)
    assert "bytes by" in said
