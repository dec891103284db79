"""Installing kvxfer leaves the torch and triton that are there alone, and the wheel holds what it should."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvxfer

ROOT = Path(__file__).parents[2]
UNREACHABLE = re.compile(
    r"NewConnectionError|Connection(?:Error|Reset)|Max retries|Temporary failure in name|timed? ?out|ProxyError"
    r"|SSLError|No matching distribution found for hatchling",
    re.IGNORECASE,
)


def would_install(extras, folder):
    """What pip would install here for this tree, by name; builds its metadata but installs nothing."""
    log, report = folder / "pip.log", folder / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--retries", "0", "--timeout", "15"]
    command += ["--log", str(log), "--report", str(report), "--editable", f".{extras}"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    except subprocess.TimeoutExpired:
        check_untouched(log)
        pytest.skip("pip did not answer within 50 s; a package index cannot be reached from here, or only slowly")
    check_untouched(log)
    if "No module named pip" in done.stderr:
        pytest.skip("this environment has no pip")
    if done.returncode and (broken := UNREACHABLE.search(log.read_text())):
        pytest.skip(f"pip cannot reach a package index ({broken[0]})")
    assert done.returncode == 0, done.stderr
    return {item["metadata"]["name"].lower(): item["metadata"] for item in json.loads(report.read_text())["install"]}


def check_untouched(log):
    """Fail as soon as pip looks for another torch or triton: it may then load gigabytes and never come to a report."""
    looked_for = re.findall(r"Collecting (?:torch|triton)\b.*", log.read_text() if log.exists() else "")
    assert looked_for == []


def installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.mark.parametrize("extras", ["", "[gpu,uvloop]"])
def test_installing_leaves_torch_and_triton_alone(extras, tmp_path):
    if installed("torch") is None:
        pytest.skip("torch is not installed here, so pip would rightly install it")
    planned = would_install(extras, tmp_path)
    assert planned["kvxfer"]["version"] == kvxfer.__version__, "the report lists what would be installed"
    present = [name for name in ("torch", "triton", "numpy", "nixl") if installed(name)]
    assert [name for name in present if name in planned] == []


def test_requirements_put_no_upper_bound_on_torch_and_none_at_all_on_triton():
    requirements = importlib.metadata.requires("kvxfer") or []
    plain = [requirement for requirement in requirements if "extra ==" not in requirement]
    (torch,) = [requirement for requirement in plain if re.match(r"torch\b", requirement)]
    assert re.fullmatch(r"torch>=[\d.]+", torch)
    assert not [requirement for requirement in plain if requirement.startswith("triton")]
    for requirement in requirements:
        if requirement.startswith("triton"):
            assert re.match(r"triton *;.*extra == 'test'", requirement), "only the tests name it, without a bound"


def test_the_installed_version_is_that_of_the_tree():
    assert importlib.metadata.version("kvxfer") == kvxfer.__version__


def test_importing_kvxfer_takes_less_than_half_a_second():
    code = "import time\nbegan = time.process_time()\nimport kvxfer\nprint(time.process_time() - began)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5, "of the processor, which no other work on the machine makes longer"
