"""What would be released: a source archive, a wheel made of it, and that wheel in an environment with nothing more.

The environment has what the wheel requires without extras, found by walking the metadata of what is installed here, and
linked there one by one; so no package index is asked, and a package that kvxfer needs but does not name is missing.
"""

import email
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvxfer

ROOT = Path(__file__).parents[1]
NOT_RELEASED = {".gitignore", ".ci/run"}
PROGRAM = """
import sys
from pathlib import Path
import kvxfer

assert Path(kvxfer.__file__).is_relative_to(sys.prefix), kvxfer.__file__
for name in kvxfer.__all__:
    getattr(kvxfer, name)
try:
    import kvxfer.admin
except kvxfer.MissingExtraError as error:
    print(error)
"""


def run(*command, **options):
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 100} | options
    done = subprocess.run([str(part) for part in command], check=False, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source archive, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder)
    with tarfile.open(folder / f"kvxfer-{kvxfer.__version__}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"kvxfer-{kvxfer.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel that is made of the source archive, as pip makes it."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=sdist)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The folder of programs of an environment in which the wheel is installed, with what it requires."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in required(wheel):
        for part in {Path(file).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(found.locate_file(part))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    assert "No broken requirements" in run(*pip, "check")
    return folder / "bin"


def required(wheel):
    """What a wheel requires without extras, all the way down, as it is installed here."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        needs = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist") or []
    found, waiting = {}, [(line, frozenset()) for line in needs]
    while waiting:
        line, extras = waiting.pop()
        need = Requirement(line)
        key = canonicalize_name(need.name), frozenset(need.extras)
        wanted = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or {""})
        if key in found or not wanted:
            continue
        found[key] = importlib.metadata.distribution(need.name)
        waiting.extend((line, key[1]) for line in found[key].requires or ())
    return found.values()


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


def test_the_wheel_needs_what_it_names_and_nothing_more(environment, tmp_path):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = run(environment / "python", "-c", PROGRAM, cwd=tmp_path, env=variables)
    assert said.strip().endswith("pip install 'kvxfer[admin]'")
    versions = run(environment / "kvxfer", "--version", cwd=tmp_path, env=variables).splitlines()
    assert versions[0] == f"kvxfer {kvxfer.__version__}"
    assert [line.split()[0] for line in versions] == ["kvxfer", "wire", "nixl", "ucx", "torch", "cuda"]
    settings = json.loads(run(environment / "kvxfer", "config", "--json", cwd=tmp_path, env=variables))
    assert settings["settings"]["route"] == {"value": "auto", "source": "default"}


def test_two_processes_of_the_wheel_exchange_a_cache(environment, sdist, tmp_path):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python, examples = environment / "python", sdist / "examples"
    line = f"set -o pipefail; {python} {examples}/prefill.py | {python} {examples}/decode.py"
    said = run("bash", "-c", line, cwd=tmp_path, env=variables)
    assert "bytes by" in said
