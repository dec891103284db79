"""Versions and settings, each provoked."""

import re
from pathlib import Path

import pytest

from kvxfer.copy import compiler
from kvxfer.tools.doctor import software

ROOT = Path(__file__).parents[2]


def statuses(findings):
    return {finding.name: finding.status.value for finding in findings}


@pytest.mark.parametrize(
    ("version", "system", "status"),
    [
        ((3, 11, 7), "linux", "ok"),
        ((3, 10, 1), "linux", "warn"),
        ((3, 14, 0), "linux", "warn"),
        ((3, 12), "darwin", "fail"),
    ],
)
def test_python(version, system, status):
    (found,) = software.check_python(version, system)
    assert found.status == status
    assert bool(found.remedy) is (status != "ok")


def test_what_is_supported_is_what_the_package_requires():
    text = (ROOT / "pyproject.toml").read_text()
    (least, beyond) = re.findall(r'^requires-python = ">=(\d+\.\d+),<(\d+\.\d+)"', text, re.MULTILINE)[0]
    assert tuple(tuple(map(int, one.split("."))) for one in (least, beyond)) == software.PYTHONS
    for name, wanted in software.LEAST.items():
        beyond = f",<{'.'.join(map(str, software.BEYOND[name]))}" if name in software.BEYOND else ""
        assert f'"{name}>={".".join(map(str, wanted))}{beyond}"' in text


@pytest.mark.parametrize(
    ("torch", "cuda", "gpu", "expected"),
    [
        ("", "", False, {"torch": "fail"}),
        ("2.7.1", "", False, {"torch": "fail", "cuda": "skipped"}),
        ("2.13.0+cpu", "", False, {"torch": "ok", "cuda": "skipped"}),
        ("2.13.0+cpu", "", True, {"torch": "ok", "cuda": "fail"}),
        ("2.13.0", "13.0", False, {"torch": "ok", "cuda": "warn"}),
        ("2.13.0", "13.0", True, {"torch": "ok", "cuda": "ok"}),
    ],
)
def test_torch_and_its_cuda(make_machine, torch, cuda, gpu, expected):
    machine = make_machine(packages={"torch": torch}, cuda=cuda, gpu=gpu)
    assert statuses(software.check_torch(machine)) == expected


@pytest.mark.parametrize(("nixl", "ucx", "expected"), [
    ("", "1.23.0", {"nixl": "fail"}), ("1.4.9", "1.23.0", {"nixl": "fail", "ucx": "ok"}),
    ("1.6.0rc1", "1.23.0", {"nixl": "fail", "ucx": "ok"}), ("1.10.0", "1.23.0", {"nixl": "fail", "ucx": "ok"}),
    ("1.5.9", "", {"nixl": "ok", "ucx": "warn"}), ("1.5.1", "1.23.0", {"nixl": "ok", "ucx": "ok"}),
])  # fmt: skip
def test_nixl_and_ucx(make_machine, nixl, ucx, expected):
    assert statuses(software.check_transport(make_machine(packages={"nixl": nixl}, ucx=ucx))) == expected


def test_a_gpu_needs_more(make_machine):
    (without,) = software.check_extras(make_machine())
    (missing,) = software.check_extras(make_machine(gpu=True, packages={"triton": "3.4"}))
    (there,) = software.check_extras(make_machine(gpu=True, packages={"triton": "3.4", "cuda-bindings": "13.0"}))
    assert [one.status for one in (without, missing, there)] == ["skipped", "fail", "ok"]
    assert missing.remedy == "pip install cuda-bindings"


@pytest.mark.parametrize(("there", "status"), [(False, "ok"), (True, "warn")])
def test_a_folder_for_compiled_code_that_cannot_be_made_is_named(monkeypatch, tmp_path, there, status):
    if there:
        (tmp_path / "kvxfer").write_text("no folder")
    monkeypatch.setattr(compiler._config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler.cache_folder.cache_clear()
    (found,) = software.check_compiled()
    compiler.cache_folder.cache_clear()
    assert found.status == status
    assert str(tmp_path / "kvxfer") in found.seen
    assert ("XDG_CACHE_HOME" in found.remedy) is there


def test_settings_that_contradict_each_other_are_named(make_machine, monkeypatch):
    monkeypatch.setenv("KVXFER_ROUTE", "direct")
    monkeypatch.setenv("KVXFER_TRUST", "none")
    (found,) = software.check_settings(make_machine())
    assert (found.status, found.name) == ("fail", "settings")
    assert "trust is 'none' and route is 'direct'" in found.seen


def test_settings_and_variables_are_shown_and_secrets_are_not(make_machine, monkeypatch):
    monkeypatch.setenv("KVXFER_SECRET", "correct-horse-battery")
    environment = {"UCX_TLS": "tcp", "KVXFER_SECRET": "correct-horse-battery", "HF_TOKEN": "hf"}
    settings, below = software.check_settings(make_machine(environment=environment))
    assert settings.seen == "secret=**********"
    assert below.seen == "UCX_TLS=tcp"
