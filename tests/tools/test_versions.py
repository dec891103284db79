"""Versions are read off what is installed, and what is not there is said so."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from kvxfer.tools import versions


def test_the_cuda_of_torch_is_that_of_what_is_imported():
    assert versions.cuda_of_torch() == (torch.version.cuda or "")


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = None", ""),
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.8'", "12.8"),
        ("hip: Optional[str] = '6.4'", ""),
    ],
)
def test_the_cuda_of_torch_stands_in_a_file(tmp_path, monkeypatch, line, cuda):
    (tmp_path / "version.py").write_text(f"__version__ = '2.11.0'\n{line}\ngit_version = '0'\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(versions, "find_spec", lambda _: spec)
    assert versions.cuda_of_torch() == cuda


def test_what_is_missing_is_said_so(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "distribution", missing)
    monkeypatch.setattr(versions, "find_spec", lambda _: None)
    monkeypatch.setattr(versions.ctypes, "CDLL", lambda _: SimpleNamespace())
    said = versions.versions()
    assert (said["nixl"], said["torch"], said["ucx"]) == ("is not installed", "is not installed", "was not found")
    assert said["cuda"] == "is not in this build of torch"
