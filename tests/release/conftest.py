"""What is built once for all tests of this folder."""

import os
import sys
import tarfile

import pytest

import kvxfer
from tests.release.release_env import linked, run


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """The source archive, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder)
    with tarfile.open(folder / f"kvxfer-{kvxfer.__version__}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"kvxfer-{kvxfer.__version__}"


@pytest.fixture(scope="session")
def wheel(sdist, tmp_path_factory):
    """The wheel that is made of the source archive, as pip makes it."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=sdist)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="session")
def environment(wheel, tmp_path_factory):
    """The folder of programs of an environment in which the wheel is installed, with what it requires."""
    folder = linked(wheel, tmp_path_factory.mktemp("clean"))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    assert "No broken requirements" in run(*pip, "check")
    return folder / "bin"


@pytest.fixture(scope="session")
def outside():
    """Variables for programs that must not find this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
